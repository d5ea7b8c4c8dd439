"""SmolLM3, Seed-OSS, Phi-3/4, ERNIE 4.5 and Kimi K2: what they have beyond their like, and what has no form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_tools.megatron.huggingface.config.megatron_args import read_model_args
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.identify import detect_family, family_of_config, without_modules
from ckpt_tools.megatron.huggingface.mapping.targets import export_targets
from tests.megatron.huggingface.by_rules import (
    BASE,
    DEEPSEEK,
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
def test_both_ways(config: dict[str, Any], said: dict[str, Any]) -> None:
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
def test_what_megatron_does_not_compute(config: dict[str, Any], changes: dict[str, Any], text: str) -> None:
    assert text in problems(lambda: imported({**config, **changes}, directory(config)))
