"""Further dense families: LayerNorm with a bias, MLPs without a gate, fused projections, rotary pairs, windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.config.megatron_args import read_model_args
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.identify import detect_family, family_of_config, without_modules
from ckpt_tools.megatron.huggingface.mapping.targets import export_targets
from ckpt_tools.megatron.huggingface.quantization.block_fp8 import BlockFp8, quantized_tensors
from ckpt_tools.model.catalog import Catalog
from tests.megatron.huggingface.by_rules import (
    BASE,
    DEEPSEEK,
    LLAMA,
    assert_same,
    directory,
    exported,
    imported,
    problems,
)
from tests.megatron.huggingface.materialise import materialise, specs
from tests.megatron.huggingface.test_config import MLM

SMOLLM3 = {**BASE, "model_type": "smollm3", "no_rope_layers": [1, 0], "tie_word_embeddings": False}
SEED_OSS = {**BASE, "model_type": "seed_oss"}
ERNIE = {**BASE, "model_type": "ernie4_5", "tie_word_embeddings": False}
PHI3 = {**BASE, "model_type": "phi3", "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("config", "said"),
    [(SMOLLM3, {"no_rope_freq": [0, 1]}), (SEED_OSS, {"add_qkv_bias": True}), (PHI3, {"rotary_percent": 0.5}),
     ({**PHI3, "sliding_window": 8}, {"window_size": (7, 0)}),
     (ERNIE, {"rotary_interleaved": False}), ({**ERNIE, "use_bias": True}, {"add_bias_linear": True}),
     ({**SMOLLM3, "attention_bias": True, "mlp_bias": True}, {"add_bias_linear": True})],
)  # fmt: skip
def test_both_ways_of_what_is_like_a_llama(config: dict[str, Any], said: dict[str, Any]) -> None:
    tensors = directory(config)
    found, megatron = imported(config, tensors)
    assert {name: found.args[name] for name in said} == said
    told = detect_family(megatron, read_model_args(found.args)).name == config["model_type"]
    assert told == (config["model_type"] == "seed_oss")  # the others have the parameters of a Llama
    made, again = exported(megatron, found.args, None if told else config)
    assert_same(again, tensors)
    assert {key: made.config[key] for key in config} == config
    assert made.config.get("pad_token_id") is None  # the class's own is beyond this vocabulary
    assert (
        export_targets(specs(megatron), found.args, {**config, "pad_token_id": 3}).config["pad_token_id"] == 3
    )


def test_rows_of_fused_projections() -> None:
    """Queries of all groups, then keys, then values; gate and up as Megatron has them."""
    config = {**PHI3, "partial_rotary_factor": 1.0}
    tensors = directory(config)
    _, megatron = imported(config, tensors)
    fused, ours = (
        tensors["model.layers.1.self_attn.qkv_proj.weight"],
        megatron["decoder.layers.1.self_attention.linear_qkv.weight"],
    )
    for ours_at, theirs_at, rows in (
        (0, 0, 8),
        (8, 16, 4),
        (12, 24, 4),
        (16, 8, 8),
        (24, 20, 4),
        (28, 28, 4),
    ):
        assert ours[ours_at : ours_at + rows].tobytes() == fused[theirs_at : theirs_at + rows].tobytes()
    gate_up = tensors["model.layers.1.mlp.gate_up_proj.weight"]
    assert megatron["decoder.layers.1.mlp.linear_fc1.weight"].tobytes() == gate_up.tobytes()


def test_rotary_pairs_that_are_neighbours() -> None:
    """ERNIE stores what Megatron has with rotary_interleaved; without it, a pair is half a head apart."""
    tensors = directory(ERNIE)
    found, megatron = imported(ERNIE, tensors)
    name, (q, k, v) = (
        "decoder.layers.1.self_attention.linear_qkv.weight",
        (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"),
    )
    ours = megatron[name]
    assert ours[:4].tobytes() == q[[0, 2, 1, 3]].tobytes()  # pairs (0, 1) and (2, 3) of the first query
    assert ours[24:28].tobytes() == k[[4, 6, 5, 7]].tobytes()
    assert ours[28:].tobytes() == v[4:].tobytes()
    args = {**found.args, "rotary_interleaved": True}
    _, again = exported(megatron, args, ERNIE)
    assert again["model.layers.1.self_attn.q_proj.weight"][:4].tobytes() == ours[:4].tobytes()  # as they lie


def test_kimi_is_deepseek_under_a_name_of_its_own() -> None:
    kimi = {
        **DEEPSEEK,
        "model_type": "kimi_k2",
        "num_nextn_predict_layers": 0,
        "auto_map": {"AutoModel": "x.Y"},
    }
    tensors = directory(kimi)
    found, megatron = imported(kimi, tensors)
    assert found.family.name == "deepseek_v3"
    exported = export_targets(specs(megatron), found.args, kimi)
    assert exported.config["model_type"] == "kimi_k2" and exported.config["auto_map"] == kimi["auto_map"]
    assert exported.config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert export_targets(specs(megatron), found.args).config["model_type"] == "deepseek_v3"
    again = materialise(exported.tensors, megatron)
    assert again.keys() == tensors.keys()


@pytest.mark.parametrize("kind", without_modules())
def test_what_megatron_core_has_no_modules_for(kind: str) -> None:
    text = problems(lambda: family_of_config({"model_type": kind}))
    assert f"{kind!r}, which Megatron core has no modules for: {without_modules()[kind]}" in text
    own = replace(FAMILIES["llama"], name=kind)  # a rule file's
    assert family_of_config({"model_type": kind}, {**FAMILIES, kind: own}) is own


def test_layers_without_rotary_embedding() -> None:
    """config.json names the layers that rotate, Megatron those that do not; both have a short form."""
    told = {key: value for key, value in SMOLLM3.items() if key != "no_rope_layers"}
    eight = {**told, "num_hidden_layers": 8}
    assert imported(eight, directory(eight))[0].args["no_rope_freq"] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert (
        "no_rope_freq" not in imported(told, directory(told))[0].args
    )  # the fourth layer would be the first
    third = {**eight, "no_rope_layer_interval": 3}
    assert imported(third, directory(eight))[0].args["no_rope_freq"] == [0, 0, 1, 0, 0, 1, 0, 0]
    assert read_model_args({**MLM, "no_rope_freq": 2}).no_rope_layers == (0, 1)
    for wrong in ([1], [1, 2], 3):
        assert "no_rope_layers: expected 0 or 1" in problems(
            lambda w=wrong: imported({**SMOLLM3, "no_rope_layers": w}, directory(SMOLLM3))
        )
        assert "no_rope_freq is" in problems(lambda w=wrong: read_model_args({**MLM, "no_rope_freq": w}))


@pytest.mark.parametrize(
    ("scaling", "text"),
    [({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "has no 'longrope' scaling"),
     ({"type": "su", "short_factor": [1.0], "long_factor": [2.0]}, "has no 'su' scaling"),
     ({"type": "yarn", "short_factor": [1.0], "long_factor": [2.0]}, "cannot set"),
     ({"type": "linear", "factor": 2.0}, "Phi3ForCausalLM is (None,)")],
)  # fmt: skip
def test_every_scaling_of_phi_is_refused(scaling: dict[str, Any], text: str) -> None:
    """Its class computes LongRoPE under every name, which Megatron does not have."""
    assert text in problems(lambda: imported({**PHI3, "rope_scaling": scaling}, directory(PHI3)))


def test_a_scaled_model_is_not_exported_as_phi() -> None:
    config = {**PHI3, "partial_rotary_factor": 1.0}
    found, megatron = imported(config, directory(config))
    args = {**found.args, "use_rope_scaling": True, "rope_scaling_factor": 8.0}
    assert "rope_scaling: the checkpoint has" in problems(
        lambda: export_targets(specs(megatron), args, config)
    )


@pytest.mark.parametrize(
    ("config", "changes", "text"),
    [(SEED_OSS, {"attention_out_bias": True}, "attention_out_bias is True"),
     (SEED_OSS, {"mlp_bias": True}, "mlp_bias is True"),
     (SMOLLM3, {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True"),
     (SMOLLM3, {"mlp_bias": True}, "another field disagree"),
     (SMOLLM3, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types is")],
)  # fmt: skip
def test_what_no_llama_computes(config: dict[str, Any], changes: dict[str, Any], text: str) -> None:
    assert text in problems(lambda: imported({**config, **changes}, directory(config)))


SQUARE = {
    **{key: value for key, value in BASE.items() if key not in ("head_dim", "rms_norm_eps")},
    "hidden_size": 16,
}
HEADS = {key: value for key, value in SQUARE.items() if key != "num_key_value_heads"}
RELU2 = {"hidden_act": "relu2"}
GPT = {"vocab_size": 11, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 9}
LATENT = {key: value for key, value in DEEPSEEK.items() if "expert" not in key and "moe" not in key
          and key not in ("first_k_dense_replace", "num_nextn_predict_layers")}  # fmt: skip
NEMOTRON = {**SQUARE, "model_type": "nemotron", "head_dim": 6, "partial_rotary_factor": 0.5, **RELU2}
NEOX = {**HEADS, "model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 0.5}
PERSIMMON = {**HEADS, "model_type": "persimmon", "rope_theta": 25000.0, **RELU2}
STABLELM = {**SQUARE, "model_type": "stablelm", "use_qkv_bias": True}
STARCODER2 = {**SQUARE, "model_type": "starcoder2", "sliding_window": 8}
BIGCODE = {**GPT, "model_type": "gpt_bigcode"}
GLM = {**BASE, "model_type": "glm", "partial_rotary_factor": 0.5}
MINISTRAL = {**BASE, "model_type": "ministral", "sliding_window": 8,
             "layer_types": ["full_attention", "sliding_attention"]}  # fmt: skip
SCALED = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
CWM = {**MINISTRAL, "model_type": "cwm", "rope_scaling": SCALED}
OWN = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon"}
EXAONE = {OWN.get(key, key): value for key, value in BASE.items()} | {"model_type": "exaone",
                                                                      "activation_function": "silu"}  # fmt: skip
TOLD = "a config.json alone"
CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (NEMOTRON, {"squared_relu": True, "layernorm_zero_centered_gamma": True, "rotary_percent": 0.5}, "nemotron"),
    ({**NEMOTRON, "attention_bias": True, "mlp_bias": True}, {"add_bias_linear": True}, "nemotron"),
    ({**SQUARE, "model_type": "jais2", "head_dim": 6}, {"add_bias_linear": True, "rotary_percent": 1.0}, "jais2"),
    (PERSIMMON, {"qk_layernorm": True, "add_bias_linear": True, "rotary_base": 25000.0}, "persimmon"),
    ({**BASE, "model_type": "arcee", **RELU2}, {"normalization": "RMSNorm", "squared_relu": True}, "arcee"),
    (STARCODER2, {"window_size": (7, 0), "bias_gelu_fusion": True, "add_bias_linear": True}, "starcoder2"),
    ({**STARCODER2, "use_bias": False, "hidden_act": "gelu"}, {"bias_gelu_fusion": False}, "starcoder2"),
    (NEOX, {"group_query_attention": False, "rotary_percent": 0.5, "bias_gelu_fusion": False}, "gpt_neox"),
    (BIGCODE, {"num_query_groups": 1, "group_query_attention": True}, "gpt_bigcode"),
    ({**BIGCODE, "multi_query": False, "n_inner": 20}, {"group_query_attention": False}, TOLD),
    (STABLELM, {"swiglu": True, "add_qkv_bias": True, "rotary_percent": 0.25}, "stablelm"),
    (GLM, {"add_qkv_bias": True, "rotary_percent": 0.5, "rotary_interleaved": False}, "glm"),
    ({**SQUARE, "model_type": "helium", "head_dim": 4, "rms_norm_eps": 1e-8}, {"add_bias_linear": False}, TOLD),
    (MINISTRAL, {"window_size": (7, 0), "window_attn_skip_freq": [0, 1]}, "ministral"),
    (CWM, {"window_attn_skip_freq": [0, 1], "rope_scaling_factor": 16.0}, TOLD),
    ({**LATENT, "model_type": "youtu"}, {"multi_latent_attention": True, "num_experts": None}, "youtu"),
    ({**BASE, "model_type": "internlm3", "qkv_bias": True, "bias": True}, {"add_bias_linear": True}, TOLD),
    ({**BASE, "model_type": "iquestcoder"}, {"add_bias_linear": False}, TOLD),
    (EXAONE, {"layernorm_epsilon": 1e-6, "num_layers": 2}, TOLD),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "said", "told"), CASES, ids=lambda one: None if isinstance(one, str) else ""
)
def test_both_ways(config: dict[str, Any], said: dict[str, Any], told: str) -> None:
    """Names and bits come back, without a config.json where the parameters and args tell the family."""
    tensors = directory(config)
    found, megatron = imported(config, tensors)
    assert {name: found.args[name] for name in said} == said
    model = read_model_args(found.args)
    assert (detect_family(megatron, model).name == config["model_type"]) == (told != TOLD)
    made, again = exported(megatron, found.args, config if told == TOLD else None)
    assert_same(again, tensors)
    assert not made.offsets
    assert {key: made.config[key] for key in config} == config


def test_rotary_pairs_of_a_part_of_each_head() -> None:
    """GLM-4 rotates neighbours; Megatron has them half of the rotated rows apart, and the rest of the head alike."""
    config = {**GLM, "head_dim": 8}
    tensors = directory(config)
    found, megatron = imported(config, tensors)
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    name, turned = "decoder.layers.1.self_attention.linear_qkv.weight", [0, 2, 1, 3, 4, 5, 6, 7]
    ours = megatron[name]
    assert ours[:8].tobytes() == q[turned].tobytes() and ours[16:24].tobytes() == k[turned].tobytes()
    assert ours[24:32].tobytes() == v[:8].tobytes()
    bias = tensors["model.layers.1.self_attn.q_proj.bias"]
    assert megatron[name.replace("weight", "bias")][:8].tobytes() == bias[turned].tobytes()
    _, again = exported(megatron, {**found.args, "rotary_interleaved": True})
    assert again["model.layers.1.self_attn.q_proj.weight"][:8].tobytes() == ours[:8].tobytes()  # as they lie


def test_rows_that_are_grouped_on_both_sides() -> None:
    """A fused projection is Megatron's own, unless that has rotary pairs in neighbouring rows."""
    tensors = directory(NEOX)
    found, megatron = imported(NEOX, tensors)
    theirs = "gpt_neox.layers.1.attention.query_key_value.weight"
    ours = megatron["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert ours.tobytes() == tensors[theirs].tobytes()
    args = {**found.args, "rotary_interleaved": True, "rotary_percent": 1.0}
    exported = export_targets(specs(megatron), args, {**NEOX, "rotary_pct": 1.0})
    turned = materialise(exported.tensors, megatron)[theirs]
    assert (
        turned[:12].tobytes() == ours[[0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11]].tobytes()
    )  # q, k, v of a head
    assert turned[40:48].tobytes() == ours[[40, 42, 41, 43, *range(44, 48)]].tobytes()  # k, v of the last


def test_norms_of_nemotron_are_centred_at_zero() -> None:
    """Weights are stored as weight - 1, and so Megatron stores them; biases are not."""
    found, megatron = imported(NEMOTRON, directory(NEMOTRON))
    args = {**found.args, "layernorm_zero_centered_gamma": False, "apply_layernorm_1p": False}
    exported = export_targets(specs(megatron), args)
    assert exported.offsets == {t.key: -1.0 for t in exported.tensors if "norm.weight" in t.key}
    whole = {**found.args, "layernorm_zero_centered_gamma": True, "rotary_percent": 1.0}
    assert export_targets(specs(megatron), whole).family.name == "nemotron"
    plain = export_targets(specs(megatron), {**args, "rotary_percent": 1.0})
    assert plain.family.name == "jais2" and not plain.offsets


def test_nemotron_of_bridge() -> None:
    """Its settings are told in Bridge's words, with a squared ReLU of Bridge's own."""
    _, megatron = imported(NEMOTRON, directory(NEMOTRON))
    bridge = {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6,
        "ffn_hidden_size": 10, "seq_length": 32, "vocab_size": 11, "share_embeddings_and_output_weights": False,
        "normalization": "LayerNorm", "layernorm_zero_centered_gamma": True, "gated_linear_unit": False,
        "activation_func": {"_call_": False,
                            "_target_": "megatron.bridge.models.nemotron.nemotron_bridge.squared_relu"},
        "add_bias_linear": False, "position_embedding_type": "rope", "rotary_percent": 0.5, "bf16": True,
    }  # fmt: skip
    exported = export_targets(specs(megatron), bridge)
    assert exported.family.name == "nemotron" and not exported.offsets
    assert {key: exported.config[key] for key in NEMOTRON} == NEMOTRON


@pytest.mark.parametrize(
    "config", [STARCODER2, NEMOTRON, GLM, STABLELM, PERSIMMON], ids=lambda one: one["model_type"]
)
def test_all_linears_of_a_layer_are_quantized_or_none(config: dict[str, Any]) -> None:
    tensors, family = directory(config), FAMILIES[config["model_type"]]
    found, megatron = imported(config, tensors)
    targets, nothing = export_targets(specs(megatron), found.args).tensors, Catalog("", {}, {})
    if config is PERSIMMON:  # under names that no quantized model has
        text = problems(lambda: quantized_tensors(targets, nothing, family, BlockFp8()))
        assert "no PersimmonForCausalLM is published so" in text
        return
    quantized = quantized_tensors(targets, nothing, family, BlockFp8())
    assert quantized.count == sum(".layers." in name and array.ndim == 2 for name, array in tensors.items())
    assert quantized.settings["modules_to_not_convert"] == (
        ["lm_head"] if "lm_head.weight" in tensors else []
    )


def test_heads_and_first_segments_of_other_names() -> None:
    """A tied head that is stored nevertheless, and names of a model without its head."""
    tied = {**NEOX, "tie_word_embeddings": True}
    tensors = directory(tied)
    assert "embed_out.weight" in directory(NEOX) and "embed_out.weight" not in tensors
    stored = {**tensors, "embed_out.weight": tensors["gpt_neox.embed_in.weight"]}
    found, _ = imported(tied, stored)
    assert found.equal == (("gpt_neox.embed_in.weight", "embed_out.weight"),)
    bare = {name.removeprefix("gpt_neox."): array for name, array in tensors.items()}
    _, megatron = imported(tied, bare)
    assert all(
        megatron[key].tobytes() == array.tobytes() for key, array in imported(tied, tensors)[1].items()
    )
    buffers = {**tensors, "gpt_neox.layers.0.attention.masked_bias": np.float32(0)[None]}
    assert imported(tied, buffers)[0].dropped == ("gpt_neox.layers.0.attention.masked_bias",)


def test_a_window_on_some_layers_of_a_llama_is_a_ministral() -> None:
    found, megatron = imported(LLAMA, directory(LLAMA))
    args = {**found.args, "window_size": (7, 0), "window_attn_skip_freq": 2}
    exported = export_targets(specs(megatron), args)
    assert (
        exported.config["architectures"] == ["MinistralForCausalLM"]
        and exported.config["sliding_window"] == 8
    )
    assert exported.config["layer_types"] == ["sliding_attention", "full_attention"]
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": 8}
    assert "sliding windows on some layers only" in problems(
        lambda: export_targets(specs(megatron), args, mistral)
    )
    biased = {**LLAMA, "model_type": "qwen2", "head_dim": 3}
    found, megatron = imported(biased, directory(biased))
    args = {**found.args, "window_size": (7, 0), "window_attn_skip_freq": [1, 0]}
    assert "Qwen2ForCausalLM has them on all or none" in problems(
        lambda: export_targets(specs(megatron), args)
    )


@pytest.mark.parametrize(
    ("window", "kinds", "name"),
    [(8, None, "mistral"), (8, ["sliding_attention"] * 2, "mistral"), (None, ["full_attention"] * 2, "mistral"),
     (8, ["full_attention"] * 2, "ministral"), (8, ["full_attention", "sliding_attention"], "ministral"),
     (8, 5, "ministral")],
)  # fmt: skip
def test_a_mistral_whose_layers_differ_is_a_ministral(window: Any, kinds: Any, name: str) -> None:
    """As the AutoConfig of transformers 5 has it."""
    config = {**BASE, "model_type": "mistral", "sliding_window": window, "layer_types": kinds}
    assert family_of_config(config).name == name


GPT_OSS = {
    **BASE,
    "model_type": "gpt_oss",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 8,
}


@pytest.mark.parametrize("config", [CWM, GPT_OSS], ids=lambda config: config["model_type"])
def test_no_scaling_is_said_where_null_is_one(config: dict[str, Any]) -> None:
    """transformers 5 scales by the class's own default where `rope_scaling` is null."""
    unscaled = {**config, "rope_scaling": {"rope_type": "default"}}
    found, megatron = imported(unscaled, directory(unscaled))
    assert found.args["use_rope_scaling"] is False and found.args["position_embedding_type"] == "rope"
    assert export_targets(specs(megatron), found.args, unscaled).config["rope_scaling"] == {
        "rope_type": "default"
    }
    of_v5 = {key: value for key, value in unscaled.items() if key != "rope_scaling"}
    of_v5["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert imported(of_v5, directory(unscaled))[0].args["use_rope_scaling"] is False
    del of_v5["rope_parameters"]
    (scaling,) = read_config(FAMILIES[config["model_type"]], of_v5).rope_scaling
    assert scaling is not None
    assert scaling["factor"] in (16.0, 32.0)


@pytest.mark.parametrize("config", [MINISTRAL, CWM, GPT_OSS], ids=lambda config: config["model_type"])
@pytest.mark.parametrize(
    "kinds",
    ["full_attention", 5, ["full_attention"], ["linear_attention", "full_attention"], [1, 0], [[], []]],
)
def test_kinds_of_layers_are_a_list_of_known_ones(config: dict[str, Any], kinds: Any) -> None:
    text = problems(lambda: read_config(FAMILIES[config["model_type"]], {**config, "layer_types": kinds}))
    assert "layer_types: expected full_attention or sliding_attention for each of 2 layers" in text


PARALLEL = {key: value for key, value in NEOX.items() if key != "use_parallel_residual"}
BESIDE = "use_parallel_residual: attention and MLP of a layer beside each other"
INTERNLM3 = {**BASE, "model_type": "internlm3"}
DYNAMIC = {"rope_type": "dynamic", "factor": 6.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("config", "changes", "text"),
    [(PARALLEL, {}, BESIDE), (NEOX, {"use_parallel_residual": True}, BESIDE),
     (NEOX, {"attention_bias": False}, "attention_bias is False"),
     (NEOX, {"hidden_act": "relu"}, "'relu' is not one of"),
     (NEOX, {"rotary_emb_base": 500, "rope_theta": 1e4}, "two names of one setting"),
     (STABLELM, {"use_parallel_residual": True, "qk_layernorm": True}, "use_parallel_residual is True"),
     (STABLELM, {"use_parallel_residual": True, "qk_layernorm": True}, "qk_layernorm is True"),
     (STABLELM, {"rope_scaling": YARN}, "YaRN together with rotary_percent"),
     (NEMOTRON, {"mlp_bias": True}, "another field disagree"),
     (NEMOTRON, {"hidden_act": "silu"}, "hidden_act is 'silu'"),
     (NEMOTRON, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "NemotronForCausalLM is (None,)"),
     (INTERNLM3, {"qkv_bias": True}, "another field disagree"),
     (INTERNLM3, {"qkv_bias": True, "attention_bias": False}, "two names of one setting"),
     (INTERNLM3, {"rope_scaling": DYNAMIC}, "Megatron has no 'dynamic' scaling"),
     ({**SQUARE, "model_type": "helium", "head_dim": 4}, {"mlp_bias": True}, "mlp_bias is True"),
     (MINISTRAL, {"sliding_window": None}, "does not run without a window"),
     (CWM, {"rope_scaling": None}, "transformers 4 takes null for an embedding that is not scaled"),
     (GPT_OSS, {"rope_scaling": None}, "transformers 4 takes null for an embedding that is not scaled"),
     (BIGCODE, {"scale_attn_weights": False}, "scale_attn_weights is False"),
     (EXAONE, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
     (PERSIMMON, {"rope_theta": None}, "rope_theta is missing"),
     ({**LATENT, "model_type": "youtu"}, {"rope_interleave": False}, "rope_interleave is False")],
)  # fmt: skip
def test_what_megatron_does_not_compute(config: dict[str, Any], changes: dict[str, Any], text: str) -> None:
    changed = {
        key: value for key, value in {**config, **changes}.items() if (key, value) != ("rope_theta", None)
    }
    tensors = directory(config) if config is not PARALLEL else directory(NEOX)
    assert text in problems(lambda: imported(changed, tensors))


@pytest.mark.parametrize(
    ("config", "args", "text"),
    [(BIGCODE, {"num_query_groups": 2}, "num_query_groups"),
     (NEOX, {"add_bias_linear": False, "add_qkv_bias": False}, "add_bias_linear is False"),
     (NEOX, {"normalization": "RMSNorm"}, "normalization is 'RMSNorm'"),
     (STARCODER2, {"qk_layernorm": True}, "qk_layernorm is True"),
     (NEMOTRON, {"squared_relu": False}, "activation is 'gelu_erf'"),
     (GLM, {"no_rope_freq": [0, 1]}, "no_rope_freq is [0, 1]"),
     (PERSIMMON, {"rotary_interleaved": True}, "rotary_interleaved together with q/k norms"),
     (MINISTRAL, {"window_size": None}, "sliding"), (STABLELM, {"num_query_groups": 4}, "num_key_value_heads")],
)  # fmt: skip
def test_what_a_config_of_the_family_cannot_say(
    config: dict[str, Any], args: dict[str, Any], text: str
) -> None:
    found, megatron = imported(config, directory(config))
    assert text in problems(lambda: export_targets(specs(megatron), {**found.args, **args}, config))


def test_what_no_default_hides() -> None:
    """Settings whose absence means something else than what they are here are written."""
    for config, name, value in ((NEOX, "use_parallel_residual", False), (BIGCODE, "multi_query", True),
                                (STARCODER2, "use_bias", True), (GLM, "attention_bias", True)):  # fmt: skip
        found, megatron = imported(config, directory(config))
        assert export_targets(specs(megatron), found.args).config[name] is value
    found, megatron = imported(GLM, directory(GLM))
    assert (
        export_targets(specs(megatron), found.args).config["pad_token_id"] is None
    )  # its own is beyond 11 tokens


@pytest.mark.parametrize(
    ("more", "factor"),
    [({"mscale": 1.0}, None), ({"mscale_all_dim": 1.0}, None), ({"mscale": 0.0, "mscale_all_dim": 1.0}, None),
     ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0), ({"mscale": 2.0, "mscale_all_dim": 0.5}, 1.194465)],
)  # fmt: skip
def test_terms_of_yarn_beside_each_other(more: dict[str, float], factor: float | None) -> None:
    """transformers makes a factor of both; one alone says nothing. Megatron-LM has no argument for another factor."""
    arcee = {**BASE, "model_type": "arcee", **RELU2, "rope_scaling": {**YARN, **more}}
    (scaling,) = read_config(FAMILIES["arcee"], arcee).rope_scaling
    assert scaling is not None
    assert scaling.get("attention_factor") == (None if factor is None else pytest.approx(factor, rel=1e-6))
    if factor is not None:
        assert "Megatron cannot set attention_factor" in problems(lambda: imported(arcee, directory(arcee)))
