"""Settings of Megatron, Bridge and config.json: what is read, what a reference adds; none is passed over."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config import codecs as values
from ckpt_tools.megatron.huggingface.config import ledger as module
from ckpt_tools.megatron.huggingface.config.config import (
    in_v4_form,
    keep_reference,
    read_config,
    reconcile,
    write_config,
)
from ckpt_tools.megatron.huggingface.config.ledger import arguments, config_fields_of
from ckpt_tools.megatron.huggingface.config.megatron_args import flat_args, read_model_args
from ckpt_tools.megatron.huggingface.config.same_model import args_differences, config_differences
from ckpt_tools.megatron.huggingface.families.families import FAMILIES, load_rule_file
from ckpt_tools.megatron.huggingface.families.identify import detect_family
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.mapping.targets import Exported, export_targets, import_targets
from tests.conftest import DATA, all_checkpoints
from tests.megatron.huggingface.by_rules import (
    DEEPSEEK,
    LLAMA,
    QWEN3_MOE,
    directory,
    exported,
    imported,
    problems,
    specs,
)
from tests.megatron.huggingface.models import LLAMA3_ROPE, YARN, config_of
from tests.megatron.huggingface.released import NEMOTRON_H, QWEN3_NEXT

MLM = {
    "num_layers": 2, "hidden_size": 12, "num_attention_heads": 4, "group_query_attention": True,
    "num_query_groups": 2, "kv_channels": 4, "ffn_hidden_size": 10, "max_position_embeddings": 32, "vocab_size": 11,
    "padded_vocab_size": 11, "untie_embeddings_and_output_weights": True, "normalization": "RMSNorm",
    "norm_epsilon": 1e-6, "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope",
    "rotary_base": 10000, "params_dtype": "torch.bfloat16", "bf16": True,
}  # fmt: skip


def llama_config(**changes: Any) -> dict[str, Any]:
    return write_config(FAMILIES["llama"], read_model_args({**MLM, **changes}))


def test_names_of_all_versions_are_read():
    model = read_model_args(MLM)
    later = {**MLM, "layernorm_epsilon": 1e-6}
    del later["norm_epsilon"]
    assert read_model_args(later) == model
    with pytest.raises(MappingError, match="do not say num_query_groups"):
        read_model_args({name: value for name, value in MLM.items() if name != "num_query_groups"})


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [({"group_query_attention": False, "num_query_groups": 1}, "num_query_groups", 4),  # the 1 means nothing then
     ({"tokenizer_type": "NullTokenizer"}, "vocab_size", 12), ({"tokenizer_type": "GPT2BPE"}, "vocab_size", 11),
     ({}, "params_dtype", "bfloat16"), ({"bf16": False}, "params_dtype", "bfloat16"),
     ({"bf16": False, "params_dtype": "torch.float32"}, "params_dtype", "float32"),
     ({"bf16": False, "fp16": True, "params_dtype": "torch.float32"}, "params_dtype", "float16"),
     ({"bf16": False, "params_dtype": None}, "params_dtype", None)],
)  # fmt: skip
def test_what_arguments_mean(args, field, value):
    assert getattr(read_model_args({**MLM, **args}), field) == value


def test_rope_scaling_is_what_was_trained():
    """Megatron-LM trained with factor 8 whatever its args said: then the args alone do not tell."""
    assert llama_config(use_rope_scaling=True, rope_scaling_factor=8.0)["rope_scaling"]["factor"] == 8.0
    open_args = {**MLM, "use_rope_scaling": True, "rope_scaling_factor": 32.0}
    for factor in (8.0, 32.0):
        scaling = {**LLAMA3_ROPE, "factor": factor}
        model = reconcile(FAMILIES["llama"], read_model_args(open_args), {**LLAMA, "rope_scaling": scaling})
        assert model.rope_scaling == (scaling,)
    with pytest.raises(MappingError, match="was trained with one of"):
        reconcile(FAMILIES["llama"], read_model_args(open_args), LLAMA)
    for args in (open_args, {"rotary_seq_len_interpolation_factor": 4}):
        with pytest.raises(MappingError, match="do not tell whether"):
            llama_config(**args)


def test_yarn_of_a_reference_is_no_matter_of_course():
    """Megatron computed what the args say; a reference has the numbers of YaRN where they have only its name."""
    found, megatron = imported(LLAMA, directory(LLAMA))
    plain = {key: value for key, value in found.args.items() if "yarn" not in key}
    named = {**plain, "position_embedding_type": "yarn"}
    yarn, linear = ({**LLAMA, "rope_scaling": one} for one in (YARN, {"rope_type": "linear", "factor": 4.0}))
    assert exported(megatron, named, yarn)[0].config["rope_scaling"]["factor"] == 4.0
    told = {**named, "yarn_original_max_position_embeddings": 4096}
    for args, reference in ((plain, yarn), (named, linear), (told, yarn)):
        with pytest.raises(MappingError, match="rope_scaling: the checkpoint has"):
            exported(megatron, args, reference)


def test_reference_fills_in_and_must_not_contradict():
    _, megatron = imported(LLAMA, directory(LLAMA))
    args = source(json.dumps(LLAMA))[1]
    reference = {**LLAMA, "max_position_embeddings": 4096, "bos_token_id": 3, "quantization_config": None}
    config = export_targets(specs(megatron), args, reference).config
    assert config["max_position_embeddings"] == 4096 and config["bos_token_id"] == 3
    assert "quantization_config" not in config
    other = {**LLAMA, "rope_theta": 5e5, "head_dim": 8}
    text = problems(lambda: export_targets(specs(megatron), args, other))
    assert "rope_theta: the checkpoint has 10000" in text
    assert "head_dim: the checkpoint has 4, the reference config 8" in text


def test_a_reference_alone_describes_a_checkpoint_without_args():
    parameters, _ = source(json.dumps(LLAMA))
    made = export_targets(parameters, None, LLAMA)
    assert made.family.name == "llama" and any("holds no args" in note for note in made.notes)
    assert "--hf-config" in problems(lambda: export_targets(parameters, None))
    text = problems(lambda: export_targets(parameters, None, {**LLAMA, "embedding_multiplier": 12}))
    assert "embedding_multiplier is 12" in text


def test_what_one_field_says_in_two_ways():
    """transformers 5 refuses an int where it expects a float; layers are dense first; one base is one for all."""
    config = llama_config(norm_epsilon=1, init_method_std=1)
    assert {type(config[k]) for k in ("rope_theta", "rms_norm_eps", "initializer_range")} == {float}
    args = {**source(json.dumps(DEEPSEEK))[1], "moe_layer_freq": [1, 0]}
    with pytest.raises(MappingError, match="DeepSeek has dense layers first"):
        write_config(FAMILIES["deepseek_v3"], read_model_args(args))
    plain = {**LLAMA, "rope_theta": 5e5}
    both = plain | {"rope_local_base_freq": 5e5}
    assert read_config(FAMILIES["llama"], both) == read_config(FAMILIES["llama"], plain)
    tensors = specs(directory(QWEN3_MOE))
    assert import_targets(tensors, {**QWEN3_MOE, "num_local_experts": 3}).notes == ()
    text = problems(lambda: import_targets(tensors, {**QWEN3_MOE, "num_local_experts": 4}))
    assert "num_experts is 3 and num_local_experts 4: two names of one setting" in text


def test_bridge_provider_is_read():
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


def test_transformers_5_spellings_are_read():
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


def test_families_without_rules_are_refused():
    with pytest.raises(MappingError, match=r"a vision tower: vision_model\.decoder\.layers\.N\.mlp"):
        detect_family(["vision_model.decoder.layers.3.mlp.linear_fc1.weight"])
    with pytest.raises(MappingError, match="'bert'"):
        detect_family([], config={"model_type": "bert"})


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
def test_every_layer_has_its_own(found, expected):
    assert found({"num_hidden_layers": 5}) == expected


# That nothing is passed over.

PACKAGE = Path(module.__file__).parent
CHECKPOINTS = sorted(path.parent for run in all_checkpoints().values() for path in run.rglob(".metadata"))
# A value for each setting that changes the forward pass, where `True` is not one.
OTHERS = {"no_rope_freq": [0, 1], "experimental_attention_variant": "dsa",
          "moe_router_load_balancing_type": "sinkhorn", "spec": ["my.specs", "layer"],
          "transformer_layer_spec": {"_target_": "my.spec", "_call_": False},
          "heterogeneous_layers_config_path": "layers.json", "embedding_multiplier": 12.0,
          "heterogeneous_layers_config_encoded_json": "{}"}  # fmt: skip
SWITCHED_ON = {"num_experts": 3, "mtp_num_layers": 0, "use_grouped_gemm_for_shared_expert": True,
               "experimental_attention_variant": "dsa"}  # fmt: skip


def recorded(file: str) -> dict[str, list[str]]:
    """Names by their heading, of a file in tests/data."""
    found: dict[str, list[str]] = {}
    for line in (DATA / file).read_text().splitlines():
        if line.startswith("  "):
            found[next(reversed(found))] += line.split()
        elif line.endswith(":"):
            found[line[:-1]] = []
    return found


@cache
def source(config: str) -> tuple[dict[str, Spec], Mapping[str, Any]]:
    """Parameters and args of a model by its config.json."""
    found, megatron = imported(json.loads(config), directory(json.loads(config)))
    return specs(megatron), found.args


def export(config: dict[str, Any], **args: Any) -> Exported:
    parameters, found = source(json.dumps(config))
    return export_targets(parameters, {**found, **args})


def test_every_argument_of_every_release_has_a_class():
    known = arguments()
    releases = recorded("megatron_arguments.txt")
    assert len(releases) == 14 and sum(map(len, releases.values())) > 1100
    assert [name for found in releases.values() for name in found if name not in known] == []


def test_a_name_has_one_class():
    data = yaml.safe_load((PACKAGE / "arguments.yaml").read_text())
    assert data.keys() == {"carried", "changes", "shape", "only_with", "irrelevant"}
    count = Counter([*data["carried"], *data["changes"]])
    for part in ("shape", "only_with", "irrelevant"):
        count.update(name for text in data[part].values() for name in text.split())
    assert [name for name, times in count.items() if times > 1] == []
    fields = yaml.safe_load((PACKAGE / "config_json.yaml").read_text())
    assert fields["families"].keys() <= FAMILIES.keys()
    for own in [{}, *fields["families"].values()]:
        count = Counter([*fields["changes"], *own.get("changes", {})])
        for part in (fields["shape"], fields["irrelevant"], own.get("irrelevant", {})):
            count.update(name for text in part.values() for name in text.split())
        assert [name for name, times in count.items() if times > 1] == []


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_real_checkpoint_brings_no_argument_without_a_class(path):
    with open_checkpoint(str(path)) as opened:
        args = flat_args(opened.common.args or opened.common.model_config or {})
    assert [name for name in args if name not in arguments()] == []


@pytest.mark.parametrize("name", arguments().changes)
def test_what_changes_the_forward_pass_is_refused_by_name(name):
    change = arguments().changes[name]
    other = OTHERS.get(name, 12.0 if 1 in change.neutral or not change.neutral else True)
    switched = {one: SWITCHED_ON[one] for one in change.only_with if one in SWITCHED_ON}
    if name.startswith("mtp_"):
        switched["mtp_num_layers"] = 1
    text = problems(lambda: export(QWEN3_MOE, **switched, **{name: other}))
    assert f"- {name} is " in text and change.why in text and "--rules" in text


@pytest.mark.parametrize("name", arguments().changes)
def test_neutral_values_pass_without_a_word(name):
    plain = export(QWEN3_MOE)
    spelled = {"megatron.*": {"_target_": "megatron.bridge.models.spec"},
               "megatron.core.models.*": ["megatron.core.models.hybrid.specs", "stack"]}  # fmt: skip
    for neutral in (*arguments().changes[name].neutral, None):
        value = spelled.get(str(neutral), neutral)
        assert export(QWEN3_MOE, **{name: value}) == plain, value


@pytest.mark.parametrize(
    "args",
    [
        {"moe_apply_probs_on_input": True},  # no experts
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"mtp_use_repeated_layer": True},
        {"mup_embedding_mult": 4.0, "mup_output_mult": 0.25},  # without use_mup
        {"moe_shared_expert_glu_interleave_size": 32},
        {"no_rope_freq": [0, 0]},
        {"no_rope_freq": (0, 0)},
        {"transformer_layer_spec": {"_target_": "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
                                    "_partial_": True, "_args_": [True]}},
        {"rope_scaling_factor": 32.0},  # without use_rope_scaling
        {"window_attn_skip_freq": 2},  # without a window
        {"softmax_scale": 0.5},  # 1 / sqrt(4), the size of a head
        {"moe_router_num_groups": 1, "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 1.0},
        {"add_qkv_bias": False, "activation_func_clamp_value": None, "glu_linear_offset": 0.0},
        {"tensor_model_parallel_size": 8, "lr": 3e-4, "fp8": "hybrid", "apply_query_key_layer_scaling": True},
    ],
)  # fmt: skip
def test_what_has_no_effect_passes(args):
    assert export(LLAMA, **args) == export(LLAMA)


@pytest.mark.parametrize(
    "args",
    [{"softmax_scale": "x"}, {"softmax_scale": 0}, {"moe_mlp_glu_interleave_size": "x"}, {"rotary_base": "x"},
     {"rotary_base": [1, 2, 3]}, {"query_pre_attn_scalar": -1}, {"interleaved_attn_pattern": [5, 2]},
     {"activation_func": {"_args_": 5}, "gated_linear_unit": True}, {"no_rope_freq": np.arange(2)},
     {"spec": object()}],
)  # fmt: skip
def test_values_that_are_not_what_they_must_be(args):
    assert next(iter(args)).split("_")[0] in problems(lambda: export(QWEN3_MOE, **args))


def test_unknown_arguments_are_named_when_they_are_set():
    unset = dict.fromkeys("abcde") | {"g": "", "h": [], "i": {}}
    assert export(LLAMA, **unset) == export(LLAMA)
    notes = export(LLAMA, my_scale=2.5, my_path="x" * 100, off=False).notes
    (note,) = set(notes) - set(export(LLAMA).notes)
    assert note.startswith("not known to this version") and "my_scale=2.5, off=False" in note
    assert len(note) < 200
    hostile = export(LLAMA, **{"::error::x\n": 1}).notes  # a name cannot begin a line of its own
    assert all("\n" not in note for note in hostile) and any("'::error::x\\n'=1" in note for note in hostile)
    many = export(LLAMA, **{f"mine_{i:02}": i for i in range(1, 31)}).notes
    assert any("mine_20=20 and 10 more" in one for one in many)


def test_norms_that_are_stored_against_the_arguments_are_named():
    config = config_of("qwen3")
    (note,) = set(export(config, qk_layernorm=False).notes) - set(export(config).notes)
    assert "qk_layernorm is False in the args" in note


def test_unknown_config_fields_are_named_when_they_are_set():
    tensors = specs(directory(LLAMA))
    assert import_targets(tensors, {**LLAMA, "one": None, "two": []}).notes == ()
    (note,) = import_targets(tensors, {**LLAMA, "my_scale": 2.5, "off": False, "zero": 0}).notes
    assert "not known to this version" in note and "my_scale=2.5, off=False, zero=0" in note


def test_a_rule_file_does_not_bypass_the_ledger(tmp_path):
    """Unless it says that its architecture computes the value; then no other one is taken."""
    config = {**LLAMA, "model_type": "mine"}

    def family(more: str) -> Any:
        (tmp_path / "mine.yaml").write_text("family: mine\nlike: llama\n" + more)
        return {**FAMILIES, "mine": load_rule_file(tmp_path / "mine.yaml")}

    parameters, args = source(json.dumps(LLAMA))
    tensors, plain = specs(directory(LLAMA)), family("")

    def export_as(families: Any, freq: Any) -> Exported:
        return export_targets(parameters, {**args, "no_rope_freq": freq}, config, families=families)

    assert "no_rope_freq is [0, 1]" in problems(lambda: export_as(plain, [0, 1]))
    demanding = family("needs: {no_rope_freq: [0, 1]}\nfixed: {no_rope_layers: [1, 0]}")
    assert import_targets(tensors, config, families=demanding).args["no_rope_freq"] == [0, 1]
    assert export_as(demanding, [0, 1]).config["no_rope_layers"] == [1, 0]
    for other in (None, [1, 0]):
        text = problems(lambda v=other: export_as(demanding, v))
        assert f"no_rope_freq is {other}; mine demands [0, 1]" in text
    text = problems(lambda: import_targets(tensors, {**config, "embedding_multiplier": 12}, families=plain))
    assert "embedding_multiplier is 12" in text


def test_every_field_of_every_configuration_class_has_a_class():
    fields = recorded("config_json_fields.txt")
    assert fields.keys() == {"any", *FAMILIES}
    for name, family in FAMILIES.items():
        carried = {hf for one in family.fields for hf in (one.hf, one.also)} | set(family.fixed)
        ledger = config_fields_of(name)
        assert [
            one for one in fields["any"] + fields[name] if one not in ledger and one not in carried
        ] == [], name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("name", config_fields_of("llama").changes)
def test_config_fields_that_change_the_forward_pass_are_refused(family, name):
    """On import, and as a reference of an export; neutral values are not."""
    config = {"llama": LLAMA, "qwen3_moe": QWEN3_MOE}[family]
    parameters, args = source(json.dumps(config))
    tensors = specs(directory(config))
    change = config_fields_of(family).changes[name]
    unset = () if name == "is_causal" else (None,)  # a null is false where true is neutral
    for value in (*change.neutral, *unset):
        assert import_targets(tensors, {**config, name: value}).notes == import_targets(tensors, config).notes
    wrong = {**config, name: 0 if 1 in change.neutral or not change.neutral else {"0": [1]}}
    for call in (
        lambda: import_targets(tensors, wrong),
        lambda: export_targets(parameters, args, wrong),
    ):
        text = problems(call)
        assert f"- {name} is " in text and change.why in text


@pytest.mark.parametrize(
    ("name", "fused", "written"),
    [("gelu_new", True, "gelu_new"), ("gelu_pytorch_tanh", True, "gelu_new"), ("gelu", False, "gelu")],
)
def test_the_gelu_that_is_computed(name, fused, written):
    """Megatron's fused GELU is the approximation by tanh, its plain one is not."""
    config = {**config_of("gpt2"), "activation_function": name}
    assert source(json.dumps(config))[1]["bias_gelu_fusion"] is fused
    assert export(config).config["activation_function"] == written
    assert export(config, bias_gelu_fusion=not fused).config["activation_function"] != written
    assert export(config, use_te_activation_func=True).config["activation_function"] == "gelu_new"


@pytest.mark.parametrize(
    ("mscale", "all_dim", "factor"), [(1.0, 0.0, None), (None, None, None), (1.0, 1.0, 1.0), (0.0, 0.0, 1.0)]
)
def test_the_attention_factor_of_yarn(mscale, all_dim, factor):
    """transformers takes 0.1 ln(factor) + 1 unless told; Megatron a quotient of two such terms."""
    yarn = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": mscale}
    scaling = export(LLAMA, **yarn, mscale_all_dim=all_dim, use_rotary_position_embeddings=False).config[
        "rope_scaling"
    ]
    assert scaling["rope_type"] == "yarn" and scaling.get("attention_factor") == factor


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("args", "said"),
    [({"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "type is ['aux_loss', 'sinkhorn']"),
     ({"no_rope_freq": LOOP}, "no_rope_freq is [[...]]")],
)  # fmt: skip
def test_lists_are_looked_into(args, said):
    assert export(QWEN3_MOE, moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"]) == export(QWEN3_MOE)
    assert said in problems(lambda: export(QWEN3_MOE, **args))


@pytest.mark.parametrize(
    ("config", "fields"),
    [({**LLAMA, "attention_bias": True, "mlp_bias": True}, ["attention_bias"]),  # Megatron-LM sets add_qkv_bias then
     # What Megatron-LM has no names for is kept under Bridge's.
     ({**LLAMA, "model_type": "gemma3_text", "tie_word_embeddings": True, "rope_local_base_freq": 10000.0,
       "rope_theta": 1e6, "sliding_window": 8, "query_pre_attn_scalar": 6, "sliding_window_pattern": 6,
       "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
      ["rope_local_base_freq", "rope_theta", "sliding_window", "query_pre_attn_scalar", "sliding_window_pattern",
       "rope_scaling"])],
    ids=["biases", "gemma3"],
)  # fmt: skip
def test_fields_come_back_without_a_reference(config, fields):
    made = export(config).config
    assert {name: made[name] for name in fields} == {name: config[name] for name in fields}


# Sizes that no model has.

QWEN = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
        "num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
        "decoder_sparse_step": 1, "head_dim": 4, "hidden_act": "silu", "rope_theta": 10000.0}  # fmt: skip
ARGS = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_experts": 4}


STRANGE: tuple[Any, ...] = (
    0, -1, 7, 1.5, "x", "", [], [1], ["x"], {}, {"a": 1}, {"rope_type": "yarn"}, True, None, float("nan"),
    float("inf"), [[1]], 10**400, 10**5000, (1,), b"x", object(),
)  # fmt: skip
COUNTS: tuple[Any, ...] = (2.5, "2", True, -1, {})
KINDS: tuple[dict[str, Any], ...] = (
    {}, {"multi_latent_attention": True}, {"gated_linear_unit": True}, {"position_embedding_type": "yarn"},
    {"use_rope_scaling": True}, {"window_size": (1, 0)}, {"moe_mlp_glu_interleave_size": 2},
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": 10**10}, {"num_hidden_layers": 1e10}, {"num_hidden_layers": -1},
     {"num_hidden_layers": True}, {"num_experts": 10**10}, {"num_hidden_layers": 9_000, "num_experts": 9_000},
     {"num_attention_heads": 0}, {"num_attention_heads": "2"}, {"hidden_size": [8]}, {"hidden_size": 1 << 62},
     {"decoder_sparse_step": 0}, {"decoder_sparse_step": "x"}, {"mlp_only_layers": 3}, {"rope_scaling": "linear"},
     {"rope_scaling": {"rope_type": "linear", "factor": "x"}}, {"rope_parameters": {"full_attention": 1}},
     {"vocab_size": 1.5},
     *({name: value} for name in ("num_experts_per_tok", "moe_intermediate_size") for value in COUNTS)],
    ids=str,
)  # fmt: skip
def test_what_no_config_says(change):
    """Counts are never rounded, and nothing is built of sizes that no model has."""
    began = time.process_time()
    with pytest.raises(MappingError, match=f"{next(iter(change))} is |config"):
        read_config(FAMILIES["qwen3_moe"], QWEN | change)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 10**10}, {"num_layers": 10**10, "moe_layer_freq": 2}, {"num_experts": 10**10},
     {"num_layers": 9_000, "num_experts": 9_000}, {"num_attention_heads": "x"}, {"hidden_size": -8},
     {"moe_layer_freq": 0}, {"padded_vocab_size": "x"}, {"ffn_hidden_size": 2.5}, {"moe_router_topk": 2.5},
     {"moe_ffn_hidden_size": 2.5}, {"rotary_scaling_factor": "x", "multi_latent_attention": True},
     {"experimental_attention_variant": "gated_delta_net", "num_layers": 9000, "linear_num_key_heads": 8000,
      "linear_attention_freq": 2}],
    ids=str,
)  # fmt: skip
def test_what_no_arguments_say(change):
    began = time.process_time()
    with pytest.raises(MappingError):
        read_model_args(ARGS | change)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("config", "field"),
    [(QWEN3_NEXT, "linear_num_key_heads"), (NEMOTRON_H, "mamba_num_heads"), (NEMOTRON_H, "n_groups")],
)
def test_sizes_of_no_hybrid(config, field):
    for value in (0, 10**9, "8", 2.5):
        assert f"{field} is " in problems(lambda v=value: import_targets({}, {**config, field: v}))


class Asked(dict[str, Any]):
    """Settings that note which of them are looked at."""

    def __init__(self, values: Mapping[str, Any], names: set[str]) -> None:
        super().__init__(values)
        self.names = names

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


def test_what_is_carried_is_read():
    llama, moe, mla = (source(json.dumps(config))[1] for config in (LLAMA, QWEN3_MOE, DEEPSEEK))
    bare = {"num_layers": 2, "hidden_size": 12, "num_attention_heads": 4}
    variants: list[Mapping[str, Any]] = [
        bare, {**bare, "num_experts": 2, "moe_router_num_groups": 2}, llama,
        {**moe, "moe_mlp_glu_interleave_size": 2}, {**mla, "rotary_scaling_factor": 2.0, "rope_type": "yarn"},
        {**mla, "experimental_attention_variant": "dsa"}, {**llama, "position_embedding_type": "yarn"},
        {**llama, "gated_linear_unit": True, "share_embeddings_and_output_weights": True},
        {**llama, "use_rope_scaling": True, "bf16": False, "params_dtype": "torch.float16"},
        {**llama, "rotary_base": [1, 2], "rope_scaling_factor": 2, "window_size": (3, 0), "num_query_groups": 2},
        {**bare, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2},
        {**bare, "hybrid_override_pattern": "M-"},
    ]  # fmt: skip
    seen: set[str] = set()
    for variant in variants:
        read_model_args(Asked(variant, seen))
    assert arguments().carried.keys() - seen == set()


def is_refused(read: Any, *args: Any) -> bool:
    """No other error: `bounded` explains wrong values, and would hide a mistake of ours if it caught all."""
    try:
        read(*args)
    except MappingError:
        return True
    return False


def test_any_value_of_any_argument_is_read_or_refused():
    names: set[str] = set()
    for kind in KINDS:
        read_model_args(Asked(ARGS | kind, names))
    assert len(names) > 70
    tried = (ARGS | kind | {name: value} for kind in KINDS for name in sorted(names) for value in STRANGE)
    assert sum(is_refused(read_model_args, args) for args in tried) > 1000


def test_any_value_in_a_config_is_read_or_refused():
    names = (*QWEN, "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "num_local_experts")
    tried = [QWEN | {name: value} for name in names for value in STRANGE]
    assert (
        sum(is_refused(read_config, family, config) for family in FAMILIES.values() for config in tried)
        > 1000
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("rope_scaling", [1]), ("rope_scaling", 5), ("hidden_size", None), ("num_attention_heads", None)],
)
def test_a_field_of_another_kind_is_named_in_words(name, value):
    with pytest.raises(MappingError, match=name) as caught:
        read_config(FAMILIES["llama"], {**LLAMA, name: value})
    assert "Error" not in str(caught.value)


GELU = {"bias_gelu_fusion": True}
LLAMA_CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("one", "other", "of_model", "noted"),
    [
        ({"rotary_base": 10000}, {"rotary_base": 5.0}, ["rotary_base"], []),
        ({"rotary_base": 10000}, {"rotary_base": 10000.0}, [], []),
        ({"normalization": "RMSNorm"}, {"normalization": "LayerNorm"}, ["normalization"], []),
        ({"layernorm_epsilon": 1e-5}, {"layernorm_epsilon": 1e-6}, ["layernorm_epsilon"], []),
        ({"swiglu": True}, {"swiglu": False}, ["swiglu"], []),
        ({"num_attention_heads": 4}, {"num_attention_heads": 2}, ["num_attention_heads"], []),
        ({"position_embedding_type": "rope"}, {"position_embedding_type": "none"}, ["position_embedding_type"], []),
        ({"untie_embeddings_and_output_weights": True}, {"untie_embeddings_and_output_weights": False},
         ["untie_embeddings_and_output_weights"], []),
        ({"window_size": None}, {"window_size": (7, 0)}, ["window_size"], []),
        ({"window_size": [7, 0]}, {"window_size": (7, 0)}, [], []),
        ({"qk_l2_norm": None}, {"qk_l2_norm": False}, [], []),
        ({"qk_l2_norm": True}, {"qk_l2_norm": False}, ["qk_l2_norm"], []),
        ({"num_layers": 2, "moe_layer_freq": 1}, {"num_layers": 2, "moe_layer_freq": [1, 1]}, [], []),
        ({**GELU, "swiglu": True}, {"bias_gelu_fusion": False, "swiglu": True}, [], []),
        (GELU, {"bias_gelu_fusion": False}, ["bias_gelu_fusion"], []),
        ({"attention_dropout": 0.1, "seq_length": 8}, {"attention_dropout": 0.0, "seq_length": 16}, [],
         ["attention_dropout", "seq_length"]),
        ({"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 2}, [], ["expert_tensor_parallel_size"]),
        ({"lr": 1, "save": "a", "rotary_base": 1}, {"lr": 2, "save": "b"}, [], []),
        ({"transformer": {"rotary_base": 1}}, {"transformer": {"rotary_base": 2}}, ["rotary_base"], []),
    ],
)  # fmt: skip
def test_args(one, other, of_model, noted):
    found = list(args_differences(one, other))
    assert [d.name for d in found if d.is_model] == of_model
    assert [d.name for d in found if not d.is_model] == noted


@pytest.mark.parametrize(
    ("one", "other", "of_model", "noted"),
    [
        ({}, {"model_type": "mistral"}, ["model_type"], []),
        ({}, {"rope_theta": 5}, ["rope_theta"], []),
        ({}, {"rope_theta": 10000, "transformers_version": "5", "eos_token_id": 3}, [], []),
        ({}, {"rope_theta": 10000, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}, [], []),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, ["tie_word_embeddings"], []),
        ({"tie_word_embeddings": True}, {}, ["tie_word_embeddings"], []),
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-6}, ["rms_norm_eps"], []),
        ({"initializer_range": 1, "max_position_embeddings": 8},
         {"initializer_range": 2, "max_position_embeddings": 9}, [],
         ["initializer_range", "max_position_embeddings"]),
        ({"text_config": {"model_type": "llama", "rope_theta": 1}}, {"text_config": {"model_type": "llama",
          "rope_theta": 2}}, ["text_config.rope_theta"], []),
    ],
)  # fmt: skip
def test_configs(one, other, of_model, noted):
    found = list(config_differences({**LLAMA_CONFIG, **one}, {**LLAMA_CONFIG, **other}))
    assert [d.name for d in found if d.is_model] == of_model
    assert [d.name for d in found if not d.is_model] == noted
