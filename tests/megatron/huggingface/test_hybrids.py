"""Gated delta nets and Mamba: config.json as released, names and bits both ways, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.config.megatron_args import read_model_args
from ckpt_tools.megatron.huggingface.families.families import FAMILIES, Families, load_rule_file
from ckpt_tools.megatron.huggingface.families.identify import detect_family
from ckpt_tools.megatron.huggingface.mapping.targets import export_targets, import_targets
from tests.megatron.huggingface.by_rules import LLAMA, assert_same, directory, exported, imported, problems
from tests.megatron.huggingface.materialise import Arrays, specs

# The fields of released config.json files; sizes are shrunk.
SIZES = {
    "vocab_size": 11,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
NET = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
       "linear_value_head_dim": 5}  # fmt: skip
QWEN3_NEXT = {
    **SIZES, **NET, "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
    "hidden_act": "silu", "initializer_range": 0.02, "intermediate_size": 10, "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 6, "norm_topk_prob": True,
    "num_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 8, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 14, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": True, "use_sliding_window": False,
}  # fmt: skip
QWEN3_5 = {  # the text_config of a model with images
    **SIZES, **NET, "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
    "eos_token_id": 248044, "full_attention_interval": 4, "hidden_act": "silu", "initializer_range": 0.02,
    "intermediate_size": 10, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_hidden_layers": 4, "rms_norm_eps": 1e-06,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
    "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
QWEN3_5_MOE = {
    **{name: value for name, value in QWEN3_5.items() if name != "intermediate_size"},
    "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 6, "num_experts": 3, "num_experts_per_tok": 2,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 14,
}  # fmt: skip
MAMBA = {"conv_kernel": 4, "expand": 2, "mamba_head_dim": 3, "mamba_hidden_act": "silu", "mamba_num_heads": 4,
         "mamba_proj_bias": False, "n_groups": 2, "ssm_state_size": 5, "chunk_size": 128, "time_step_floor": 0.0001,
         "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001,
         "use_conv_bias": True, "use_mamba_kernels": True}  # fmt: skip
NEMOTRON_H = {
    **SIZES, **MAMBA, "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, "bos_token_id": 1, "eos_token_id": 12,
    "hidden_dropout": 0.0, "hybrid_override_pattern": "M-M*-M", "initializer_range": 0.02, "intermediate_size": 10,
    "layer_norm_epsilon": 1e-05, "max_position_embeddings": 8192, "mlp_bias": False, "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h", "num_hidden_layers": 6, "num_logits_to_keep": 1, "pad_token_id": 0,
    "rescale_prenorm_residual": True, "residual_in_fp32": False, "rms_norm_eps": 1e-05, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True,
}  # fmt: skip
NEMOTRON_3 = {
    **NEMOTRON_H, "hybrid_override_pattern": "MEM*EM", "moe_intermediate_size": 6, "n_routed_experts": 3,
    "moe_shared_expert_intermediate_size": 14, "n_group": 1, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "topk_group": 1,
}  # fmt: skip
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4,
    "eos_token_id": 0, "expand": 2, "head_dim": 3, "hidden_act": "silu", "hidden_size": 12,
    "initializer_range": 0.1, "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 4, "num_heads": 8,
    "num_hidden_layers": 2, "pad_token_id": 0, "rescale_prenorm_residual": False, "residual_in_fp32": True,
    "rms_norm": True, "state_size": 5, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
    "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 11,
}  # fmt: skip
MAMBA2_TIED = {**MAMBA2, "tie_word_embeddings": True}
RELEASED: dict[str, dict[str, Any]] = {
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "nemotron_h": NEMOTRON_H,
    "nemotron_3": NEMOTRON_3,
    "mamba2": MAMBA2,
    "mamba2_tied": MAMBA2_TIED,
}
HEAVY = "decoder.layers.0.self_attention.in_proj.weight."


def near_one(tensors: Arrays) -> Arrays:
    """The norm of a gated delta net where subtracting 1 loses nothing, as trained ones are."""
    return {
        name: np.clip(1 + array / 8, 0.5, 2) if name.endswith("linear_attn.norm.weight") else array
        for name, array in tensors.items()
    }


@pytest.mark.parametrize("name", RELEASED)
def test_released_configurations_go_both_ways(name: str) -> None:
    """Names and bits come back, and so does every field of the class; nothing is passed over as unknown."""
    config = json.loads(json.dumps(RELEASED[name]))
    family = FAMILIES[{"nemotron_3": "nemotron_h", "mamba2_tied": "mamba2"}.get(name, name)]
    layers: dict[str, Any] = (
        {"mtp_num_layers": 1} if any(rule.core.startswith("mtp") for rule in family.rules) else {}
    )
    tensors = near_one(directory(config, **layers))
    found, megatron = imported(config, tensors)
    assert found.family is family
    for reference in (config, None) if name != "qwen3_5_moe" else (config,):
        made, again = exported(megatron, found.args, reference)
        assert_same(again, tensors)
        assert read_config(family, made.config) == read_config(family, {**config, "torch_dtype": "float32"})
    assert not [note for note in found.notes if "not known" in note]


def test_where_the_parts_of_a_projection_lie() -> None:
    """By hand, as transformers splits them: a mistake of both directions would come back bit for bit."""
    tensors = directory(QWEN3_5)
    net, parts = "model.layers.0.linear_attn.", imported(QWEN3_5, tensors)[1]
    rows = {"query": slice(0, 6), "key": slice(6, 12), "value": slice(12, 32)}
    for part, where in rows.items():
        assert np.array_equal(parts[HEAVY + part], tensors[net + "in_proj_qkv.weight"][where])
        conv = parts[HEAVY.replace("in_proj", "conv1d") + part]
        assert np.array_equal(conv, tensors[net + "conv1d.weight"][where])
    for part, name in (("z", "in_proj_z"), ("beta", "in_proj_b"), ("alpha", "in_proj_a")):
        assert np.array_equal(parts[HEAVY + part], tensors[f"{net}{name}.weight"])
    tensors = directory(NEMOTRON_H)
    mixer, parts = "backbone.layers.0.mixer.", imported(NEMOTRON_H, tensors)[1]
    for part, start, stop in (("z", 0, 12), ("x", 12, 24), ("B", 24, 34), ("C", 34, 44), ("dt", 44, 48)):
        found = parts[f"decoder.layers.0.mixer.in_proj.weight.{part}"]
        assert np.array_equal(found, tensors[mixer + "in_proj.weight"][start:stop])
    for kind in ("weight", "bias"):
        for part, start, stop in (("x", 0, 12), ("B", 12, 22), ("C", 22, 32)):
            found = parts[f"decoder.layers.0.mixer.conv1d.{kind}.{part}"]
            assert np.array_equal(found, tensors[f"{mixer}conv1d.{kind}"][start:stop])


def test_args_name_the_layers() -> None:
    args = imported(QWEN3_NEXT, directory(QWEN3_NEXT))[0].args
    assert args["linear_attention_freq"] == [1, 1, 1, 0] * 2
    assert args["experimental_attention_variant"] == "gated_delta_net" and args["attention_output_gate"]
    assert args["rotary_percent"] == 0.25 and args["apply_layernorm_1p"]
    args = imported(NEMOTRON_3, directory(NEMOTRON_3))[0].args
    assert args["hybrid_override_pattern"] == "MEM*EM" and args["is_hybrid_model"] and args["squared_relu"]
    assert (args["mamba_num_heads"], args["mamba_state_dim"], args["mamba_num_groups"]) == (4, 5, 2)
    assert args["position_embedding_type"] == "none" and not args["use_rotary_position_embeddings"]
    plain = imported(LLAMA, directory(LLAMA))[0].args
    assert not [name for name in plain if name.startswith(("linear_", "mamba_", "hybrid_"))]


def as_bridge(args: dict[str, Any], function: str, **more: Any) -> dict[str, Any]:
    """The settings as the `model` section of Bridge's run_config.yaml has them."""
    renamed = {"num_experts": "num_moe_experts", "norm_epsilon": "layernorm_epsilon"}
    dropped = ("swiglu", "squared_relu", "quick_geglu", "untie_embeddings_and_output_weights", "apply_layernorm_1p",
               "use_rotary_position_embeddings", "group_query_attention", "bias_gelu_fusion")  # fmt: skip
    made = {renamed.get(name, name): value for name, value in args.items() if name not in dropped}
    return made | {
        "activation_func": {"_target_": function, "_call_": False},
        "gated_linear_unit": function.endswith("silu"),
        "share_embeddings_and_output_weights": False,
        **more,
    }


@pytest.mark.parametrize(
    ("config", "function", "more"),
    [
        (QWEN3_NEXT, "torch.nn.functional.silu", {"linear_attention_freq": 4}),
        (NEMOTRON_3, "megatron.core.activations.squared_relu", {"hybrid_attention_ratio": 0.0}),
        (NEMOTRON_H, "megatron.core.activations.squared_relu",
         {"hybrid_layer_pattern": "M-M|*-M", "hybrid_override_pattern": None}),
    ],
)  # fmt: skip
def test_bridges_settings_are_read(config: dict[str, Any], function: str, more: dict[str, Any]) -> None:
    found, megatron = imported(config, directory(config))
    exported = export_targets(specs(megatron), as_bridge(dict(found.args), function, **more))
    assert exported.config == export_targets(specs(megatron), found.args).config
    assert not [note for note in exported.notes if "not known" in note]


def test_prediction_layers_are_those_there_are() -> None:
    """config.json of Qwen3-Next does not say it; the layer has the names that NVIDIA's bridge gives it."""
    tensors = directory(QWEN3_NEXT, mtp_num_layers=1)
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.mlp.gate.weight",
            "mtp.layers.0.self_attn.q_proj.weight"} < tensors.keys()  # fmt: skip
    found, megatron = imported(QWEN3_NEXT, tensors)
    assert found.args["mtp_num_layers"] == 1
    assert "mtp.layers.0.transformer_layer.mlp.shared_experts.gate_weight" in megatron
    found, megatron = imported(QWEN3_5, directory({**QWEN3_5, "mtp_num_hidden_layers": 0}))
    assert found.args["mtp_num_layers"] is None and any("the files hold none" in note for note in found.notes)
    text = problems(lambda: export_targets(specs(megatron), {**found.args, "mtp_num_layers": 2}))
    assert "mtp_num_layers is 2; config.json of Qwen3_5ForCausalLM has names for one" in text


def test_prediction_layers_are_attention() -> None:
    config = {**QWEN3_NEXT, "layer_types": ["full_attention", "linear_attention"] * 4}
    tensors = {**directory(config)} | {name: array for name, array in directory(QWEN3_NEXT, mtp_num_layers=1).items()
                                   if name.startswith("mtp.")}  # fmt: skip
    text = problems(lambda: import_targets(specs(tensors), config))
    assert "the last layer is a gated delta net, which makes Megatron's prediction layer one" in text


def test_what_has_the_same_parameters_is_told_by_config_json() -> None:
    megatron = {name: imported(config, directory(config))[1] for name, config in RELEASED.items()}
    assert {name: detect_family(found).name for name, found in megatron.items()} == {
        "qwen3_next": "qwen3_next", "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_next", "nemotron_h": "nemotron_h",
        "nemotron_3": "nemotron_h", "mamba2": "mamba2", "mamba2_tied": "mamba2"}  # fmt: skip


def test_a_model_of_attention_alone_keeps_the_sizes_of_its_class() -> None:
    config = {**QWEN3_NEXT, "full_attention_interval": 1}
    found, megatron = imported(config, directory(config))
    assert "linear_attention_freq" not in found.args
    exported = export_targets(specs(megatron), found.args)
    assert exported.config["layer_types"] == ["full_attention"] * 8
    assert exported.config["linear_num_key_heads"] == 16


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (QWEN3_NEXT, {"layer_types": ["linear_attention"]}, "layer_types: expected linear_attention or full"),
        (QWEN3_NEXT, {"layer_types": [[]] * 8}, "layer_types: expected linear_attention or full"),
        (QWEN3_NEXT, {"full_attention_interval": 0.5}, "full_attention_interval is '0.5'"),
        (QWEN3_NEXT, {"linear_num_value_heads": 5}, "5 rows of a projection cannot be those of 2 key heads"),
        (QWEN3_NEXT, {"attention_bias": True}, "attention_bias is True"),
        (QWEN3_NEXT, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "YaRN together with rotary_percent"),
        (NEMOTRON_H, {"num_hidden_layers": 7}, "it names 6 layers, num_hidden_layers is 7"),
        (NEMOTRON_H, {"hybrid_override_pattern": "M-MX-M"}, "'X' is not one of M, *, -, E"),
        (NEMOTRON_H, {"conv_kernel": 3}, "conv_kernel is 3"),
        (NEMOTRON_H, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
        (NEMOTRON_H, {"time_step_limit": [0.001, 0.1]}, "time_step_limit is [0.001, 0.1]"),
        (NEMOTRON_3, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1: prediction layers of a Hybrid"),
        (NEMOTRON_3, {"norm_topk_prob": False}, "norm_topk_prob"),
        (MAMBA2, {"expand": 1}, "expand=4 and another field disagree: both are Megatron's mamba_num_heads"),
        (MAMBA2, {"use_bias": True}, "use_bias is True"),
    ],
)  # fmt: skip
def test_what_megatron_has_no_layer_for_is_refused(
    config: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    tensors = specs(directory(config))
    assert said in problems(lambda: import_targets(tensors, {**config, **changes}))


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (QWEN3_NEXT, {"experimental_attention_variant": "dsa"}, "layers with another kind of attention"),
        (QWEN3_NEXT, {"attention_output_gate": False}, "attention_output_gate is False"),
        (QWEN3_NEXT, {"linear_attention_freq": [1, 0]}, "linear_attention_freq"),
        (QWEN3_NEXT, {"linear_attention_freq": 3}, "is missing"),
        (QWEN3_NEXT, {"moe_router_score_function": "sigmoid"}, "moe_router_score_function is 'sigmoid'"),
        (NEMOTRON_3, {"hybrid_override_pattern": "MEM*E"}, "name 6 layers, their hybrid pattern 5"),
        (NEMOTRON_3, {"moe_router_score_function": "softmax"}, "moe_router_score_function is 'softmax'"),
        (NEMOTRON_3, {"squared_relu": False, "swiglu": True}, "activation is 'swiglu'"),
        (NEMOTRON_H, {"position_embedding_type": "rope"}, "position_embedding_type is 'rope'"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "MM", "num_hidden_layers": 2, "mamba_num_heads": 5}, {},
         "5 heads of 3 are not a multiple of hidden_size 12"),
    ],
)  # fmt: skip
def test_what_config_json_cannot_say_is_refused(
    config: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    found, megatron = imported(config, directory(config))
    assert said in problems(lambda: export_targets(specs(megatron), {**found.args, **changes}))


def test_a_rule_file_leaves_prediction_layers_out(tmp_path: Path) -> None:
    """Those of a HybridModel have no rules: whoever does without them says so."""
    path = tmp_path / "own.yaml"
    path.write_text(
        "family: own\nlike: nemotron_h\nmodel_type: nemotron_h\nfixed: {num_nextn_predict_layers: 1}\n"
        "ignored: ['mtp\\..*']\n"
    )
    config = {**NEMOTRON_3, "num_nextn_predict_layers": 1}
    tensors = {**directory(NEMOTRON_3), "mtp.layers.0.eh_proj.weight": np.zeros((12, 24), np.float32)}
    families = Families(load_rule_file(path))
    found = import_targets(specs(tensors), config, families=families)
    assert found.dropped == ("mtp.layers.0.eh_proj.weight",) and found.args["mtp_num_layers"] is None


def test_settings_of_experts_say_nothing_of_a_model_without_any() -> None:
    """Every Megatron job has them in its args."""
    found, megatron = imported(NEMOTRON_H, directory(NEMOTRON_H))
    args = {
        **found.args,
        "moe_router_topk": 6,
        "moe_router_score_function": "softmax",
        "moe_ffn_hidden_size": 9,
    }
    for reference in (None, NEMOTRON_H):
        exported = export_targets(specs(megatron), args, reference)
        assert exported.config["n_routed_experts"] == 8


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("jamba", "its layers are Mamba-1"),
        ("zamba2", "shared by many layers"),
        ("granitemoehybrid", "scales of their own"),
    ],
)
def test_hybrids_without_modules_are_refused_with_the_reason(kind: str, reason: str) -> None:
    text = problems(lambda: import_targets({}, {"model_type": kind}))
    assert "which Megatron core has no modules for" in text and reason in text


def test_parts_of_one_tensor_have_one_type() -> None:
    found, megatron = imported(QWEN3_NEXT, directory(QWEN3_NEXT))
    parameters = specs(megatron)
    parameters[HEAVY + "z"] = parameters[HEAVY + "z"]._replace(dtype="bfloat16")
    text = problems(lambda: export_targets(parameters, found.args))
    assert f"{HEAVY}query and what is one tensor with it are stored as bfloat16 and float32" in text


@pytest.mark.parametrize("name", ["qwen3_5_moe", "nemotron_3"])
def test_experts_of_one_tensor_are_read(name: str) -> None:
    """As transformers 5 holds them, and as Qwen3.5 is published; those of a prediction layer too."""
    config = RELEASED[name]
    tensors = directory(config)
    _, megatron = imported(config, tensors)
    fused: dict[str, Any] = {}
    for key, array in tensors.items():
        head, experts, tail = key.partition(".experts.")
        if experts:
            fused.setdefault(f"{head}.experts.{tail.split('.')[1]}", []).append(array)
    blocks = {key.rpartition(".")[0] for key in fused}
    for block in blocks if name == "qwen3_5_moe" else ():
        gate, up = fused.pop(f"{block}.gate_proj"), fused.pop(f"{block}.up_proj")
        fused[f"{block}.gate_up_proj"] = [np.concatenate(pair) for pair in zip(gate, up, strict=True)]
    rest = {key: array for key, array in tensors.items() if ".experts." not in key}
    _, again = imported(config, rest | {key: np.stack(arrays) for key, arrays in fused.items()})
    assert any("mtp" in block for block in blocks) == (name == "qwen3_5_moe")
    assert_same(again, megatron)


@pytest.mark.parametrize(
    ("config", "field"),
    [(QWEN3_NEXT, "linear_num_key_heads"), (NEMOTRON_H, "mamba_num_heads"), (NEMOTRON_H, "n_groups")],
)
def test_sizes_of_no_model_are_refused(config: dict[str, Any], field: str) -> None:
    for value in (0, 10**9, "8", 2.5):
        assert f"{field} is " in problems(lambda v=value: import_targets({}, {**config, field: v}))
    args = imported(QWEN3_NEXT, directory(QWEN3_NEXT))[0].args
    text = problems(lambda: read_model_args({**args, "num_layers": 9000, "linear_num_key_heads": 8000,
                                             "linear_attention_freq": 2}))  # fmt: skip
    assert "heads and query groups" in text


def test_groups_of_mamba_heads_are_another_norm_in_transformers_4() -> None:
    """And heads of attention, of which there is none, are as many as divide by a tensor-parallel size."""
    found, megatron = imported(MAMBA2, directory(MAMBA2))
    text = "transformers 4 normalizes all 4 groups of Mamba heads together"
    for notes in (found.notes, exported(megatron, found.args)[0].notes):
        assert any(text in note for note in notes)
    one = {**MAMBA2, "n_groups": 1}
    assert not any(text in note for note in imported(one, directory(one))[0].notes)
    assert found.args["num_attention_heads"] == MAMBA2["num_heads"] == 8
    made, _ = exported(megatron, {**found.args, "num_attention_heads": 1}, MAMBA2)  # as imports once had it
    assert made.config["num_attention_heads"] == 1


def test_steps_that_transformers_limits_are_told() -> None:
    notes = imported(NEMOTRON_H, directory(NEMOTRON_H))[0].notes
    assert any("above time_step_min" in note for note in notes)
    notes = imported(MAMBA2, directory(MAMBA2))[0].notes
    assert not any("time_step_min" in note for note in notes)
    other = {**MAMBA2, "layer_norm_epsilon": 1e-6}
    assert any("epsilon 1e-5" in note for note in imported(other, directory(other))[0].notes)
