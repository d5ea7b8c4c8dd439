"""What export and import account for: names, shapes, vocabularies, norms, heads, prediction layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckpt_tools.errors import CkptError, UnsupportedCheckpointError
from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.mapping.rules import expand
from ckpt_tools.megatron.huggingface.mapping.targets import export_targets, import_targets
from tests.megatron.huggingface.by_rules import (
    DEEPSEEK,
    LLAMA,
    QWEN3_MOE,
    assert_same,
    directory,
    imported,
    problems,
)
from tests.megatron.huggingface.materialise import materialise, specs


def test_every_problem_of_an_export_is_named() -> None:
    found, megatron = imported(QWEN3_MOE, directory(QWEN3_MOE))
    parameters = specs(megatron)
    del parameters["decoder.layers.1.mlp.experts.experts.2.linear_fc2.weight"]
    del parameters["decoder.layers.0.self_attention.linear_proj.weight"]
    parameters["decoder.layers.0.mlp.router.weight"] = Spec("float32", (4, 12))
    parameters["decoder.layers.0.surprise.weight"] = Spec("float32", (1,))
    parameters["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"] = Spec("float32", (12,))
    text = problems(lambda: export_targets(parameters, found.args))
    assert "decoder.layers.1.mlp.experts.experts.2.linear_fc2.weight [12, 6] is missing" in text
    assert "decoder.layers.0.self_attention.linear_proj.weight [12, 16] is missing" in text
    assert "decoder.layers.0.mlp.router.weight has shape [4, 12], its settings ask for [3, 12]" in text
    assert "decoder.layers.0.surprise.weight: no rule of qwen3_moe has this parameter" in text
    assert "are two names of one parameter" in text
    assert text.count("\n  - ") == 5


def test_every_problem_of_an_import_is_named() -> None:
    tensors = specs(directory(QWEN3_MOE))
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    tensors["model.norm.weight"] = Spec("float32", (13,))
    tensors["model.layers.0.extra"] = Spec("float32", (1,))
    text = problems(lambda: import_targets(tensors, QWEN3_MOE))
    assert "model.layers.1.mlp.experts.2.up_proj.weight [6, 12] is missing" in text
    assert "model.norm.weight has shape [13], config.json asks for [12]" in text
    assert "model.layers.0.extra: no rule of qwen3_moe has this tensor" in text
    assert text.count("\n  - ") == 3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("heads", "is_head"),
    [({"score.weight": (1, 12)}, True), ({"classifier.weight": (5, 12), "classifier.bias": (5,)}, True),
     ({"qa_outputs.weight": (2, 12), "qa_outputs.bias": (2,)}, True),
     ({"v_head.summary.weight": (1, 12), "v_head.summary.bias": (1,)}, True),
     ({"reward_head.0.weight": (30, 12), "reward_head.2.weight": (1, 30)}, True),
     ({"model.layers.0.score.weight": (1, 12)}, False), ({"projector.weight": (12, 5)}, False)],
)  # fmt: skip
def test_the_head_of_another_model_is_named(heads: dict[str, Any], is_head: bool, tied: bool) -> None:
    """Beside the head of a language model (TRL), or in its place."""
    config = {**LLAMA, "tie_word_embeddings": tied, "architectures": ["RewardModel"]}
    tensors = {**specs(directory(config)), **{name: Spec("float32", shape) for name, shape in heads.items()}}
    for _ in range(2):
        text = problems(lambda: import_targets(tensors, config))
        assert all(name in text for name in heads)
        assert (
            "head of a reward, value or classification model (architectures: ['RewardModel'])" in text
        ) is is_head
        assert ("lm_head.weight [11, 12] is missing" in text) is not (
            is_head or tied or "lm_head.weight" in tensors
        )
        tensors.pop("lm_head.weight", None)


def test_vocabulary_is_padded_with_zeros_and_cut_again() -> None:
    tensors = directory(LLAMA)
    found, megatron = imported(LLAMA, tensors, multiple=8)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert megatron[name].shape == (16, 12)
        assert not megatron[name][11:].any() and megatron[name][:11].any()
    assert found.args["padded_vocab_size"] == 16 and found.args["vocab_size"] == 11
    exported = export_targets(specs(megatron), found.args)
    assert exported.config["vocab_size"] == 11
    assert "cut from 16 to 11" in exported.notes[0]
    args = {**found.args, "vocab_size": None}
    whole = export_targets(specs(megatron), args)
    assert whole.config["vocab_size"] == 16 and "not known" in whole.notes[0]
    assert export_targets(specs(megatron), args, LLAMA).config["vocab_size"] == 11
    assert export_targets(specs(megatron), args, vocab_size=12).config["vocab_size"] == 12
    assert export_targets(specs(megatron), args, {**LLAMA, "vocab_size": 20}).config["vocab_size"] == 16
    assert "fewer than" in problems(lambda: export_targets(specs(megatron), args, vocab_size=17))


@pytest.mark.parametrize(("centred", "offset"), [(False, -1.0), (True, 0.0)])
def test_gemma_norms_are_offset_by_the_convention(centred: bool, offset: float) -> None:
    """Gemma computes 1 + w. Megatron stores w with zero-centred gamma, 1 + w without."""
    config = {**LLAMA, "model_type": "gemma", "tie_word_embeddings": True}
    tensors = directory(config)
    found, megatron = imported(config, tensors)
    args = {**found.args, "layernorm_zero_centered_gamma": centred, "apply_layernorm_1p": centred}
    stored = {key: array - np.float32(offset) if "norm" in key else array for key, array in megatron.items()}
    exported = export_targets(specs(stored), args)
    norms = {t.key for t in exported.tensors if "norm" in t.key} if offset else set()
    assert exported.offsets == dict.fromkeys(norms, offset)
    again = materialise(exported.tensors, stored, offsets=exported.offsets)
    for key, array in tensors.items():
        np.testing.assert_allclose(again[key], array, atol=2e-7)  # x + 1 - 1 is not the identity in float32


def test_zero_centred_llama_norms_get_one_added() -> None:
    found, megatron = imported(LLAMA, directory(LLAMA))
    exported = export_targets(specs(megatron), {**found.args, "layernorm_zero_centered_gamma": True})
    assert set(exported.offsets.values()) == {1.0}
    assert exported.offsets.keys() == {t.key for t in exported.tensors if "norm" in t.key}


def test_local_layer_spec_names_are_accepted() -> None:
    found, megatron = imported(QWEN3_MOE, directory(QWEN3_MOE))
    renamed = {
        key.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight").replace(
            "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
        ): array
        for key, array in megatron.items()
    }
    assert renamed.keys() != megatron.keys()
    exported = export_targets(specs(renamed), found.args)
    for key, array in materialise(exported.tensors, renamed).items():
        assert array.tobytes() == directory(QWEN3_MOE)[key].tobytes()


def test_tied_head_is_not_written_and_a_stored_one_is_to_be_proven_equal() -> None:
    config = {**LLAMA, "tie_word_embeddings": True}
    tensors = dict(directory(config))
    assert "lm_head.weight" not in tensors
    found, megatron = imported(config, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert found.equal == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert "output_layer.weight" not in megatron
    stored = {**megatron, "output_layer.weight": megatron["embedding.word_embeddings.weight"]}
    exported = export_targets(specs(stored), found.args)
    assert exported.equal == (("embedding.word_embeddings.weight", "output_layer.weight"),)
    assert "lm_head.weight" not in {target.key for target in exported.tensors}
    assert exported.config["tie_word_embeddings"] is True


def test_prediction_layers_of_deepseek() -> None:
    """MTP layer i is layer L + i; the release repeats embedding and head there, Megatron does not store them."""
    tensors = dict(directory(DEEPSEEK))
    assert {"model.layers.2.eh_proj.weight", "model.layers.3.shared_head.norm.weight",
            "model.layers.3.mlp.experts.2.gate_proj.weight"} < tensors.keys()  # fmt: skip
    copies = {}
    for layer in (2, 3):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        copies[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"]
    found, megatron = imported(DEEPSEEK, {**tensors, **copies})
    assert {name for _, name in found.equal} == copies.keys() == set(found.dropped)
    assert "mtp.layers.1.transformer_layer.mlp.experts.experts.2.linear_fc1.weight" in megatron
    assert found.args["mtp_num_layers"] == 2
    plain = export_targets(specs(megatron), found.args)
    again = materialise(plain.tensors, megatron)
    assert_same(again, tensors)
    assert plain.config["num_nextn_predict_layers"] == 2
    whole = export_targets(specs(megatron), found.args, mtp_copies=True)
    again = materialise(whole.tensors, megatron)
    assert again.keys() == {**tensors, **copies}.keys()
    assert all(again[key].tobytes() == copies[key].tobytes() for key in copies)


def test_config_with_prediction_layers_that_no_file_holds() -> None:
    tensors = {
        k: v for k, v in directory(DEEPSEEK).items() if ".layers.2." not in k and ".layers.3." not in k
    }
    found, _ = imported(DEEPSEEK, tensors)
    assert found.args["mtp_num_layers"] is None
    assert any("prediction layers" in note for note in found.notes)


def test_score_bias_stays_float32() -> None:
    tensors = directory(DEEPSEEK)
    found = import_targets(specs(tensors), DEEPSEEK, dtype="bfloat16")
    types = {target.key: target.dtype for target in found.tensors}
    assert types.pop("decoder.layers.1.mlp.router.expert_bias") == "float32"
    assert types.pop("mtp.layers.0.transformer_layer.mlp.router.expert_bias") == "float32"
    assert types.pop("mtp.layers.1.transformer_layer.mlp.router.expert_bias") == "float32"
    assert set(types.values()) == {"bfloat16"}
    parameters = {t.key: Spec(t.dtype, t.shape) for t in found.tensors}
    exported = export_targets(parameters, found.args, dtype="float16")
    kept = {t.key for t in exported.tensors if t.dtype == "float32"}
    assert kept == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3)}
    assert exported.config["torch_dtype"] == "float16"


def test_directories_saved_from_a_bare_model_and_masks_are_read() -> None:
    """The released `gpt2` spells its names without `transformer.` and stores its causal masks."""
    config = {"model_type": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 9, "vocab_size": 11,
              "layer_norm_epsilon": 1e-5}  # fmt: skip
    tensors = directory(config)
    bare = {key.removeprefix("transformer."): array for key, array in tensors.items()}
    masks = {f"h.{i}.attn.bias": np.zeros((1, 1, 9, 9), np.float32) for i in range(2)}
    found, megatron = imported(config, {**bare, **masks})
    assert set(found.dropped) == masks.keys()
    assert all(
        megatron[key].tobytes() == array.tobytes() for key, array in imported(config, tensors)[1].items()
    )


def test_experts_of_different_types_are_refused() -> None:
    tensors = specs(directory(QWEN3_MOE))
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"] = Spec("bfloat16", (6, 12))
    assert "become one parameter" in problems(lambda: import_targets(tensors, QWEN3_MOE))


def test_quantized_weights_are_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match=r"quantized \(fp8\)"):
        import_targets({}, {**LLAMA, "quantization_config": {"quant_method": "fp8"}})


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("attention_bias", True, "mlp_bias=False and another field disagree"),
        ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}, "no 'longrope' scaling"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 4096}, "llama3 scaling has"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 8.0, "attention_factor": 2.0}, "cannot set"),
        ("hidden_size", None, "hidden_size is missing"),
    ],
)  # fmt: skip
def test_configs_megatron_cannot_express_are_refused(key: str, value: Any, text: str) -> None:
    config = {**LLAMA, key: value}
    if value is None:
        del config[key]
    with pytest.raises(CkptError, match=text):
        import_targets(specs(directory(LLAMA)), config)


def test_deepseek_v3_has_the_tensors_of_its_release() -> None:
    """Megatron-Bridge #5790 counted the released model: 46,183 tensors, 684,489,845,504 values, copies included."""
    config = {
        **DEEPSEEK, "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8,
        "topk_group": 4, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    family = family_of_config(config)
    model = replace(read_config(family, config), padded_vocab_size=129280)
    shapes = {
        key: Spec("bfloat16", shape.shape)
        for pair in expand(family, model)
        for key, shape in zip(pair.hf, pair.tensors, strict=True)
    }
    found = import_targets(shapes, config)
    parameters = {target.key: Spec(target.dtype, target.shape) for target in found.tensors}
    exported = export_targets(parameters, found.args, mtp_copies=True)
    assert len(exported.tensors) == 46_183
    assert sum(math.prod(target.shape) for target in exported.tensors) == 684_489_845_504


@pytest.mark.parametrize(
    ("prefix", "drop", "why"),
    [("base_model.model.", "", "peft's: merge its adapters"), ("module.", "", "a parallel wrapper's"),
     ("_orig_mod.", "", "torch.compile's"), ("language_model.", "", "the language model in a model of several parts"),
     ("model.language_model.", "model.", "the language model in a model of several parts"),
     ("student.", "", "that of a model which has this one inside")],
)  # fmt: skip
def test_a_prefix_before_all_names_is_named(prefix: str, drop: str, why: str) -> None:
    """In place of a list in which everything is missing; a tensor that is missing indeed is listed as ever."""
    plain = directory(LLAMA)
    wrapped = {prefix + name.removeprefix(drop): array for name, array in plain.items()}
    text = problems(lambda: imported(LLAMA, wrapped))
    assert f"have the prefix {prefix!r}" in text and why in text and "missing" not in text
    beside = {name: array for name, array in wrapped.items() if not name.endswith("lm_head.weight")}
    assert f"{prefix!r}" in problems(
        lambda: imported(LLAMA, {**beside, "lm_head.weight": plain["lm_head.weight"]})
    )
    assert "lm_head.weight [11, 12] is missing" in problems(lambda: imported(LLAMA, beside))


def test_models_of_several_parts_are_named() -> None:
    config = {"model_type": "llava", "text_config": LLAMA, "vision_config": {}}
    text = problems(lambda: family_of_config(config))
    assert (
        "'llava', a model of several parts" in text and "its language model is a llama (text_config)" in text
    )


def test_expert_biases_become_float32_and_it_is_said() -> None:
    """Megatron keeps them so, and so does the class; releases such as Moonlight's have them in bfloat16."""
    tensors = specs(directory(DEEPSEEK))
    bias = next(key for key in tensors if key.endswith("e_score_correction_bias"))
    halves = {key: spec._replace(dtype="bfloat16") for key, spec in tensors.items()}
    text = "are bfloat16 in the source and written as float32, the type that both programs hold them in"
    found = import_targets(halves, DEEPSEEK)
    layers = sum(key.endswith("e_score_correction_bias") for key in tensors)
    assert f"{layers} tensors, {bias} the first, {text}" in found.notes
    assert not any("written as" in note for note in import_targets(tensors, DEEPSEEK).notes)
    parameters = {one.key: Spec(one.dtype, one.shape) for one in found.tensors}
    assert not any("written as" in note for note in export_targets(parameters, found.args).notes)
    core = next(key for key in parameters if key.endswith("router.expert_bias"))
    parameters = {key: spec._replace(dtype="bfloat16") for key, spec in parameters.items()}
    assert f"{layers} tensors, {core} the first, {text}" in export_targets(parameters, found.args).notes


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2"])
def test_no_shared_expert_is_zero_of_them(kind: str) -> None:
    """transformers multiplies by it: null fails in both majors, 0 computes the same (test_families)."""
    config = {key: value for key, value in DEEPSEEK.items() if key != "num_nextn_predict_layers"}
    config |= {"model_type": kind, "n_shared_experts": 0}
    tensors = specs(directory(config))
    assert not any("shared_experts" in key for key in tensors)
    empty = {"model.layers.1.mlp.shared_experts.gate_proj.weight": Spec("float32", (0, 12))}
    for said, more in ((0, {}), (None, {}), (0, empty)):
        found = import_targets(tensors | more, {**config, "n_shared_experts": said})
        assert found.dropped == tuple(more)
        parameters = {one.key: Spec(one.dtype, one.shape) for one in found.tensors}
        made = export_targets(parameters, found.args)
        assert made.config["n_shared_experts"] == 0 and {one.key for one in made.tensors} == tensors.keys()
        assert any("the model has no shared expert: config.json says 0" in note for note in made.notes)
    found = import_targets(
        specs(directory(config | {"n_shared_experts": 1})), config | {"n_shared_experts": 1}
    )
    parameters = {one.key: Spec(one.dtype, one.shape) for one in found.tensors}
    assert not any("no shared expert" in note for note in export_targets(parameters, found.args).notes)
