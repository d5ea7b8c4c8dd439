"""Megatron's and Bridge's settings as config.json, references, and which family a model is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config import codecs as values
from ckpt_tools.megatron.huggingface.config.codecs import REQUIRED
from ckpt_tools.megatron.huggingface.config.config import (
    in_v4_form,
    keep_reference,
    read_config,
    reconcile,
    write_config,
)
from ckpt_tools.megatron.huggingface.config.ledger import arguments
from ckpt_tools.megatron.huggingface.config.megatron_args import read_model_args
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.identify import detect_family
from ckpt_tools.megatron.huggingface.mapping.layouts import JOINED, LAYOUTS
from ckpt_tools.megatron.huggingface.mapping.rules import CONDITIONS, DIMENSIONS
from ckpt_tools.megatron.huggingface.mapping.targets import export_targets
from tests.megatron.huggingface.by_rules import DEEPSEEK, LLAMA, QWEN3_MOE, directory, exported, imported
from tests.megatron.huggingface.materialise import specs

MLM = {
    "num_layers": 2, "hidden_size": 12, "num_attention_heads": 4, "group_query_attention": True,
    "num_query_groups": 2, "kv_channels": 4, "ffn_hidden_size": 10, "max_position_embeddings": 32, "vocab_size": 11,
    "padded_vocab_size": 11, "untie_embeddings_and_output_weights": True, "normalization": "RMSNorm",
    "norm_epsilon": 1e-6, "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope",
    "rotary_base": 10000, "params_dtype": "torch.bfloat16", "bf16": True,
}  # fmt: skip


def llama_config(**changes: Any) -> dict[str, Any]:
    return write_config(FAMILIES["llama"], read_model_args({**MLM, **changes}))


def test_names_of_all_versions_are_read() -> None:
    model = read_model_args(MLM)
    later = {**MLM, "layernorm_epsilon": 1e-6}
    del later["norm_epsilon"]
    assert read_model_args(later) == model
    ungrouped = read_model_args({**MLM, "group_query_attention": False, "num_query_groups": 1})
    assert ungrouped.num_query_groups == 4  # the stored 1 means nothing without the flag


@pytest.mark.parametrize(("tokenizer", "size"), [("NullTokenizer", 12), ("GPT2BPETokenizer", 11), (None, 11)])
def test_null_tokenizer_has_a_token_more(tokenizer: str | None, size: int) -> None:
    assert read_model_args({**MLM, "tokenizer_type": tokenizer}).vocab_size == size


def test_bridge_provider_is_read() -> None:
    provider = {
        "num_layers": 2, "hidden_size": 12, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 4,
        "ffn_hidden_size": 10, "seq_length": 32, "vocab_size": 11, "padded_vocab_size": 11,
        "share_embeddings_and_output_weights": False, "normalization": "RMSNorm", "layernorm_epsilon": 1e-6,
        "gated_linear_unit": True, "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "add_bias_linear": False, "position_embedding_type": "rope", "rotary_base": 10000,
        "params_dtype": {"_target_": "torch.bfloat16", "_call_": False},
    }  # fmt: skip
    ours, theirs = read_model_args(provider), read_model_args(MLM)
    assert write_config(FAMILIES["llama"], ours) == write_config(FAMILIES["llama"], theirs)
    nested = {
        "_builder_": "x",
        "transformer": {k: v for k, v in provider.items() if k != "vocab_size"},
        "vocab_size": 11,
    }
    assert read_model_args(nested) == ours
    factor32 = read_model_args({**provider, "rope_scaling": True, "rope_scaling_factor": 32.0})
    assert [scaling and scaling["factor"] for scaling in factor32.rope_scaling] == [32.0]


def test_rope_scaling_is_what_was_trained() -> None:
    """Megatron-LM trained with factor 8 whatever its args said: then the args alone do not tell."""
    assert llama_config(use_rope_scaling=True, rope_scaling_factor=8.0)["rope_scaling"]["factor"] == 8.0
    open_args = {**MLM, "use_rope_scaling": True, "rope_scaling_factor": 32.0}
    with pytest.raises(MappingError, match="do not tell whether"):
        llama_config(**open_args)
    for factor in (8.0, 32.0):
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}  # fmt: skip
        model = reconcile(FAMILIES["llama"], read_model_args(open_args), {**LLAMA, "rope_scaling": scaling})
        assert model.rope_scaling == (scaling,)
    with pytest.raises(MappingError, match="was trained with one of"):
        reconcile(FAMILIES["llama"], read_model_args(open_args), LLAMA)
    with pytest.raises(MappingError, match="do not tell whether"):
        llama_config(rotary_seq_len_interpolation_factor=4)


def test_reference_fills_in_and_must_not_contradict() -> None:
    found, megatron = imported(LLAMA, directory(LLAMA))
    reference = {**LLAMA, "max_position_embeddings": 4096, "bos_token_id": 3, "quantization_config": None}
    config = export_targets(specs(megatron), found.args, reference).config
    assert config["max_position_embeddings"] == 4096 and config["bos_token_id"] == 3
    assert "quantization_config" not in config
    with pytest.raises(MappingError) as caught:
        export_targets(specs(megatron), found.args, {**LLAMA, "rope_theta": 5e5, "intermediate_size": 11})
    assert "rope_theta: the checkpoint has 10000" in str(caught.value)
    assert "intermediate_size: the checkpoint has 10, the reference config 11" in str(caught.value)


def test_reference_alone_describes_a_checkpoint_without_args() -> None:
    _, megatron = imported(LLAMA, directory(LLAMA))
    exported = export_targets(specs(megatron), None, LLAMA)
    assert exported.family.name == "llama"
    with pytest.raises(MappingError, match="--hf-config"):
        export_targets(specs(megatron), None)


def test_transformers_5_spellings_are_read() -> None:
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}, "dtype": "bfloat16"}
    old = in_v4_form(new)
    assert old["rope_theta"] == 5e5 and old["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert old["torch_dtype"] == "bfloat16"
    experts = {
        "num_local_experts" if key == "num_experts" else key: value for key, value in QWEN3_MOE.items()
    }
    family = FAMILIES["qwen3_moe"]
    assert read_config(family, experts) == read_config(family, QWEN3_MOE)
    assert "num_local_experts" not in keep_reference(family, experts)
    plain = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    assert in_v4_form(plain)["rope_scaling"] == {"rope_type": "default"}  # null is a scaling for some classes


def test_floats_are_floats() -> None:
    """transformers 5 refuses an int where it expects a float; Megatron's rotary_base is an int."""
    config = llama_config(norm_epsilon=1, init_method_std=1)
    assert {type(config[k]) for k in ("rope_theta", "rms_norm_eps", "initializer_range")} == {float}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'; LlamaForCausalLM is 'RMSNorm'"),
        ({"swiglu": False}, "activation is 'gelu_erf'"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        ({"window_size": [7, 0], "softmax_type": "off-by-one"}, "softmax_type"),
    ],
)
def test_settings_without_a_hugging_face_form_are_refused(changes: dict[str, Any], text: str) -> None:
    found, megatron = imported(LLAMA, directory(LLAMA))
    with pytest.raises(MappingError, match=re.escape(text)):
        export_targets(specs(megatron), {**found.args, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"moe_layer_freq": [1, 0]}, "DeepSeek has dense layers first"),
     ({"moe_layer_freq": [1]}, "does not name 2 layers"), ({"moe_layer_freq": [1, 2]}, "2 is not 0 or 1")],
)  # fmt: skip
def test_patterns_are_checked(changes: dict[str, Any], text: str) -> None:
    found, _ = imported(DEEPSEEK, directory(DEEPSEEK))
    with pytest.raises(MappingError, match=text):
        write_config(FAMILIES["deepseek_v3"], read_model_args({**found.args, "num_experts": 3, **changes}))


@pytest.mark.parametrize(
    ("config", "name"), [(LLAMA, "llama"), (QWEN3_MOE, "qwen3_moe"), (DEEPSEEK, "deepseek_v3")]
)
def test_family_is_told_by_its_parameters(config: dict[str, Any], name: str) -> None:
    _, megatron = imported(config, directory(config))
    assert detect_family(megatron).name == name


def test_families_without_rules_are_refused() -> None:
    with pytest.raises(MappingError, match=r"a vision tower: vision_model\.decoder\.layers\.N\.mlp"):
        detect_family(["vision_model.decoder.layers.3.mlp.linear_fc1.weight"])
    with pytest.raises(MappingError, match="'bert'"):
        detect_family([], config={"model_type": "bert"})


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_tables_use_known_words(family: Any) -> None:
    """Dimensions, conditions, settings and fields of a family exist, and no parameter has two rules at once."""
    for rule in family.rules:
        assert {*rule.shape, *(rows for _, rows in rule.parts)} <= set(DIMENSIONS)
        assert set(rule.when) <= {*CONDITIONS, *family.conditions} and bool(rule.parts) == (
            "{p}" in rule.core
        )
        assert rule.layout in (JOINED if rule.parts else LAYOUTS)
    known = ModelArgs.__dataclass_fields__
    assert set(family.needs) <= {*known, *arguments().changes} and {field.arg for field in family.fields} <= {
        *known,
        *family.settings,
    }
    assert all(field.default is not REQUIRED for field in family.fields if field.hf.startswith("tie"))
    keys = [(rule.core.replace("{p}", part), rule.when)
            for rule in family.rules for part, _ in (rule.parts or [("", "")])]  # fmt: skip
    assert len(set(keys)) == len(keys)


def test_a_second_base_of_rotation_is_no_matter_of_course() -> None:
    """Layers with a window that rotate by another base are another model in a family that has one base."""
    config = {**LLAMA, "rope_theta": 5e5, "rope_local_base_freq": 5e5}
    assert read_config(FAMILIES["llama"], config) == read_config(
        FAMILIES["llama"], {**LLAMA, "rope_theta": 5e5}
    )
    both = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    nested = {**{k: v for k, v in LLAMA.items() if k != "rope_theta"}, "rope_parameters": both}
    for other in (config | {"rope_local_base_freq": 1e4}, nested):
        with pytest.raises(MappingError, match=r"rotate by 10000\.0 and the others by 500000\.0"):
            read_config(FAMILIES["llama"], other)


def test_yarn_of_a_reference_is_no_matter_of_course() -> None:
    """Megatron computed what the args say; a reference has the numbers of YaRN where they have only its name."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    found, megatron = imported(LLAMA, directory(LLAMA))
    plain = {key: value for key, value in found.args.items() if "yarn" not in key}
    reference = {**LLAMA, "rope_scaling": yarn}
    with pytest.raises(
        MappingError, match=r"rope_scaling: the checkpoint has \(None,\), the reference config"
    ):
        exported(megatron, plain, reference)
    named = {**plain, "position_embedding_type": "yarn"}
    assert exported(megatron, named, reference)[0].config["rope_scaling"]["factor"] == 4.0
    linear = {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    with pytest.raises(MappingError, match="rope_scaling: the checkpoint has"):
        exported(megatron, named, linear)
    told = {**named, "yarn_original_max_position_embeddings": 4096}
    with pytest.raises(MappingError, match="rope_scaling: the checkpoint has"):
        exported(megatron, told, reference)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda c: values.FORMS["sparse_step"].read(2, {**c, "decoder_sparse_step": 2}), (0, 1, 0, 1, 0)),
        (lambda c: values.FORMS["sparse_step"].read(3, {**c, "decoder_sparse_step": 3}), (0, 0, 1, 0, 0)),
        (lambda c: values.read_dense([3], {**c, "decoder_sparse_step": 2}), (0, 1, 0, 0, 0)),
        (lambda c: values.read_dense([0, 2], c), (0, 1, 0, 1, 1)),
        (lambda c: values.read_dense(None, c), (1, 1, 1, 1, 1)),  # type: ignore[arg-type]
        (values.every_second, ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]),
        (values.every_fourth_full, ["full_attention", *["sliding_attention"] * 3, "full_attention"]),
        (values.all_sliding, ["sliding_attention"] * 5),
        (lambda c: values.read_exaone_types(None, {**c, "sliding_window": 8}), (1, 1, 1, 0, 1)),
        (lambda c: values.read_exaone_types(None, {**c, "sliding_window_pattern": 2}), (1, 0, 1, 0, 1)),
        (lambda c: values.read_exaone_types(None, {**c, "sliding_window": None}), ()),
        (lambda c: values.read_exaone_rope(None, {**c, "sliding_window": 8}), (0, 0, 0, 1, 0)),
        (lambda c: values.read_exaone_rope(["full_attention"] * 5, {**c, "sliding_window": None}), ()),
        (lambda c: values.read_leading_dense(2, c), (0, 0, 1, 1, 1)),
        (lambda c: values.read_leading_dense(7, c), (0,) * 5),
        (lambda c: values.read_mlp_types(None, {**c, "first_k_dense_replace": 0}), (1,) * 5),
        (lambda c: values.read_mlp_types(None, c), (0, 1, 1, 1, 1)),
        (lambda c: values.read_mlp_types(None, {**c, "model_type": "glm_moe_dsa"}), (0, 0, 0, 1, 1)),
        (lambda c: values.dense_by_types({**c, "mlp_layer_types": ["dense"] * 5}), 5),
        (lambda c: values.dense_by_types({**c, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3}), 2),
        (lambda c: values.read_rotated([1, 0, 1, 1, 0], c), (0, 1, 0, 0, 1)),
        (lambda c: values.read_rotated(None, c), (0, 0, 0, 1, 0)),
        (lambda c: values.read_rotated(None, {**c, "no_rope_layer_interval": 2}), (0, 1, 0, 1, 0)),
    ],
)
def test_every_layer_has_its_own(found: Any, expected: object) -> None:
    assert found({"num_hidden_layers": 5}) == expected


@pytest.mark.parametrize(
    ("args", "dtype"),
    [
        ({"bf16": True}, "bfloat16"),
        ({"fp16": True, "params_dtype": "torch.float32"}, "float16"),
        ({"params_dtype": "torch.float32"}, "float32"),
        ({}, None),
    ],
)
def test_the_type_of_the_weights_is_read_from_the_arguments(args: dict[str, Any], dtype: str | None) -> None:
    sizes = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 2}
    assert read_model_args({**sizes, **args}).params_dtype == dtype
