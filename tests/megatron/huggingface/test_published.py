"""Families whose layers are modules of Megatron-Bridge: what its published mapping says, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from tests.megatron.huggingface.by_rules import assert_same, directory, exported, imported, problems
from tests.megatron.huggingface.test_released_configs import RELEASED

FALCON, EXAONE = RELEASED["Falcon-H1-1.5B-Base"], RELEASED["EXAONE-4.0-32B"]


def test_mimo_joins_the_inputs_of_a_prediction_layer_the_other_way_round() -> None:
    """Bridge exchanges the halves of `input_proj` (mimo_bridge.py); its layers lie beside the model's."""
    config = RELEASED["MiMo-7B-Base"]
    tensors = directory(config)
    _, megatron = imported(config, tensors)
    theirs, ours = tensors["model.mtp_layers.0.input_proj.weight"], megatron["mtp.layers.0.eh_proj.weight"]
    assert np.array_equal(ours, np.concatenate([theirs[:, 16:], theirs[:, :16]], axis=1))
    inner = megatron["mtp.layers.0.transformer_layer.mlp.linear_fc1.weight"]
    assert np.array_equal(inner[20:], tensors["model.mtp_layers.0.mlp.up_proj.weight"])


def test_settings_of_falcon_h1_as_bridge_has_them() -> None:
    """`falconh1_ratio` 1 without a pattern: every layer has Mamba and attention side by side, and an MLP."""
    tensors = directory(FALCON)
    found, megatron = imported(FALCON, tensors)
    assert (
        found.args["hybrid_override_pattern"] == "PP"
        and found.args["key_multiplier"] == FALCON["key_multiplier"]
    )
    mixer = tensors["model.layers.1.mamba.in_proj.weight"]  # z, x, B, C and dt
    assert np.array_equal(megatron["decoder.layers.1.mamba_mixer.in_proj.weight.x"], mixer[24:48])
    assert np.array_equal(megatron["decoder.layers.1.mamba_mixer.in_proj.weight.dt"], mixer[58:])
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "seq_length",
             "ffn_hidden_size", "vocab_size", "normalization", "layernorm_epsilon", "rotary_base", "rmsnorm",
             "norm_before_gate", "position_embedding_type")  # fmt: skip
    bridge = {name: found.args[name] for name in names}
    bridge |= {
        name: value for name, value in found.args.items() if name.startswith("mamba_") or "multipl" in name
    }
    bridge |= {"share_embeddings_and_output_weights": False, "gated_linear_unit": True, "bf16": True,
               "activation_func": "torch.nn.functional.silu", "add_bias_linear": False, "falconh1_ratio": 1.0,
               "hybrid_override_pattern": None, "hybrid_attention_ratio": 0.0, "use_mamba": True, "d_conv": 4,
               "chunk_size": 128, "A_init_range": [1, 16], "dt_min": 0.001}  # fmt: skip
    made, again = exported(megatron, bridge)
    assert_same(again, tensors)
    assert made.notes == () and made.config["model_type"] == "falcon_h1"
    assert {key: made.config[key] for key in FALCON if "multipl" in key or key.startswith("mamba_n")} == {
        key: value for key, value in FALCON.items() if "multipl" in key or key.startswith("mamba_n")
    }
    less = {name: value for name, value in bridge.items() if name != "ssm_multipliers"}
    text = problems(lambda: exported(megatron, less, FALCON))
    assert "ssm_multipliers: the checkpoint has None" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"mamba_d_ssm": 25}, "heads of 4 do not make 25"), ({"mamba_d_ssm": 28}, "another field disagree"),
     ({"mamba_d_conv": 3}, "mamba_d_conv is 3"), ({"mamba_use_mlp": False}, "layers have no MLP"),
     ({"time_step_limit": [0.0, 1.0]}, "time steps have limits"), ({"projectors_bias": True}, "projectors_bias is")],
)  # fmt: skip
def test_a_falcon_h1_that_bridge_does_not_compute(changes: dict[str, object], text: str) -> None:
    assert text in problems(lambda: imported({**FALCON, **changes}, directory(FALCON)))


def test_sizes_of_falcon_h1_that_follow_from_others() -> None:
    config = {**FALCON, "mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_n_heads": 8}  # 2 x 16 of 8 heads
    found, _ = imported(config, directory(config))
    assert (found.args["mamba_num_heads"], found.args["mamba_head_dim"]) == (8, 4)


@pytest.mark.parametrize(
    ("args", "text"),
    [({"no_rope_freq": None}, "layer_types: the checkpoint has ()"),  # a class that rotates what has a window
     ({"window_size": None, "window_attn_skip_freq": None}, "sliding_window: the checkpoint has None")],
)  # fmt: skip
def test_an_exaone_4_that_its_class_does_not_compute(args: dict[str, object], text: str) -> None:
    config = {**EXAONE, "rope_scaling": None}
    found, megatron = imported(config, directory(config))
    assert text in problems(lambda: exported(megatron, {**found.args, **args}, config))
    if "no_rope_freq" in args:
        assert "rotat" in problems(lambda: exported(megatron, {**found.args, **args}))


def test_import_says_whose_layers_they_are() -> None:
    for config in (FALCON, EXAONE):
        assert any(
            "its layers come from Megatron-Bridge" in note
            for note in imported(config, directory(config))[0].notes
        )
        assert family_of_config(config).published == "Megatron-Bridge"
