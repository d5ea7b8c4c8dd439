"""Stored settings and counters that contradict what stands beside them are found; those of sound checkpoints not."""

import argparse
import json
import struct
from copy import copy
from dataclasses import replace

import pytest
import torch

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.megatron.format import FORMATS
from ckpt_tools.verify.checkpoint.counters import _contradictions, _is_count, _of_optimizer
from ckpt_tools.verify.readiness.model_rules import check_settings
from tests.commands import oracle
from tests.conftest import all_checkpoints, fixture_dir
from tests.damage import copy_of, keys_with, metadata_of, replace_chunk

LLAMA, NATIVE = "core019_llama_tp2_fully_reshardable", "core019_llama_tp2_native_fsdp_dtensor"
MOE, NATIVE_MOE = "core019_moe_ep2_fully_reshardable", "core019_moe_dp1_native_fsdp_dtensor"
MLA, GPT, BRIDGE = "main_mla_mtp_moe_fr_tp2", "core019_gpt3_tp2_fully_reshardable", "bridge_dense_fr_tp2_dp2"
UNKNOWN = {"main_llava_fr_tp2"}  # two towers: the settings describe neither
PLAIN = {"tf2_dcp"}  # of PyTorch's own DCP: it stores no settings of Megatron


def folder(name: str):
    root = fixture_dir(name)
    return root / "checkpoint" if (root / "checkpoint").is_dir() else root


def findings(name: str, settings: dict[str, object]):
    """What the settings check says of a real checkpoint whose settings have other values."""
    with open_checkpoint(str(folder(name))) as opened:
        common, kind = opened.common, opened.location.kind
        if common.args:
            namespace = copy(common.values["args"])
            namespace.state = {**common.args, **settings}
            common = replace(common, values={**common.values, "args": namespace})
        else:
            common = replace(common, model_config={**common.model_config, **settings})
        weights = FORMATS[kind].weights(opened.catalog).found
        return check_settings(kind, weights, common).findings


@pytest.mark.parametrize("name", all_checkpoints())
def test_a_sound_checkpoint_has_no_finding(name):
    checks = {check.name: check for check in verify_checkpoint(str(folder(name))).checks}
    if name in PLAIN:
        assert "settings" not in checks
        return
    assert not checks["settings"].findings + checks["counters"].findings
    assert (checks["settings"].looked_at > 3) == (name not in UNKNOWN)


DENSE = [
    ("num_attention_heads", 64, "rows of linear_qkv would be"),
    ("num_query_groups", 1, "rows of linear_qkv would be"),
    ("kv_channels", 64, "columns of linear_proj would be 256, the checkpoint has 32"),
    ("hidden_size", 48, "hidden size would be 48, the checkpoint has 32"),
    ("ffn_hidden_size", 72, "ffn_hidden_size would be 72, the checkpoint has 64"),
    ("untie_embeddings_and_output_weights", False, "output_layer.weight is stored"),
    ("add_bias_linear", True, "linear_fc2.bias is not stored"),
    ("add_qkv_bias", True, "linear_qkv.bias is not stored"),
    ("qk_layernorm", True, "q_layernorm is not stored"),
    ("normalization", "LayerNorm", "decoder.final_layernorm.bias is not stored"),
    ("position_embedding_type", "learned_absolute", "position_embeddings.weight is not stored"),
    ("num_experts", 8, "a router is not stored"),
    ("multi_latent_attention", True, "linear_kv_down_proj is not stored"),
    ("mtp_num_layers", 1, "0 such layers are stored"),
]
EXPERTS = [
    ("num_experts", 8, "num_experts would be 8, the checkpoint has 4"),
    ("moe_ffn_hidden_size", 40, "moe_ffn_hidden_size would be 40, the checkpoint has 48"),
    ("moe_shared_expert_intermediate_size", 16, "would be 16, the checkpoint has 24"),
    ("moe_router_enable_expert_bias", False, "expert_bias is stored"),
    ("moe_layer_freq", 1, "makes experts in layers [0, 1"),
]
OTHERS = [
    (LLAMA, "swiglu", False, "rows of linear_fc1 would be 64, the checkpoint has 128"),
    (NATIVE, "swiglu", False, "linear_fc1.weight_w is stored"),
    (MLA, "kv_lora_rank", 16, "rows of linear_kv_down_proj would be 20, the checkpoint has 12"),
    (MLA, "q_lora_rank", 16, "rows of linear_q_down_proj would be 16, the checkpoint has 12"),
    (MLA, "qk_head_dim", 16, "rows of linear_kv_up_proj would be 96, the checkpoint has 64"),
    (MLA, "qk_pos_emb_head_dim", 8, "rows of linear_q_up_proj would be 64, the checkpoint has 48"),
    (MLA, "v_head_dim", 16, "columns of linear_proj would be 64, the checkpoint has 32"),
    (MLA, "mtp_num_layers", 2, "1 such layers are stored"),
    (GPT, "max_position_embeddings", 4096, "would be 4096"),
    (BRIDGE, "num_attention_heads", 16, "rows of linear_qkv would be"),
    (BRIDGE, "gated_linear_unit", False, "rows of linear_fc1 would be"),
]


@pytest.mark.parametrize(
    ("name", "setting", "value", "told"),
    [
        *((name, *row) for name in (LLAMA, NATIVE) for row in DENSE),
        *((name, *row) for name in (MOE, NATIVE_MOE) for row in EXPERTS),
        *OTHERS,
    ],
)
def test_settings_that_contradict_the_weights(name, setting, value, told):
    found = findings(name, {setting: value})
    named = [f for f in found if setting in f.where or setting == "gated_linear_unit"]
    assert any(f.severity == "error" and told in f.message for f in named), found


@pytest.mark.parametrize(
    "settings",
    [
        {"spec": ["their", "layers"], "kv_channels": 64},
        {"hybrid_layer_pattern": "*-*-", "kv_channels": 64},
        {"heterogeneous_layers_config_path": "layers.json", "kv_channels": 64},
        {"kv_channels": 64, "hidden_size": None},
    ],
)
def test_what_the_settings_do_not_describe_is_passed_over(settings):
    assert not findings(LLAMA, settings)


@pytest.mark.parametrize(
    ("gate", "halves"), [("torch.nn.functional.silu", True), ("torch.nn.functional.gelu", False)]
)
def test_a_gate_of_bridge_is_looked_for_as_convert_writes_it(gate, halves, tmp_path):
    """Bridge takes fc1 apart for SwiGLU alone: with another activation (Gemma's) it stays whole."""
    root = copy_of(BRIDGE, tmp_path / "run") / "checkpoint"
    settings = root / "run_config.yaml"
    settings.write_text(settings.read_text().replace("torch.nn.functional.silu", gate))
    assert run(["convert", str(root), str(tmp_path / "out"), "-q"]) == 0
    report = verify_checkpoint(str(tmp_path / "out"))
    assert not {check.name: check for check in report.checks}["settings"].findings
    stored = oracle.metadata(tmp_path / "out").state_dict_metadata
    assert any(key.endswith("linear_fc1.weight_w") for key in stored) == halves


def test_a_prediction_layer_that_is_used_again_is_stored_once():
    assert not findings(MLA, {"mtp_num_layers": 3, "mtp_use_repeated_layer": True})


def with_common(place, **changes):
    """A copy of a run whose common state has other values under these dotted names."""
    root = copy_of("v016_dense_fr_tp2_dp2_te", place) / "checkpoint"
    common = torch.load(root / "common.pt", weights_only=False, pickle_module=oracle.PickleModule)
    plain = {k: v for k, v in vars(common["args"]).items() if isinstance(v, bool | int | float | str | None)}
    common["args"] = argparse.Namespace(**plain)
    for name, value in changes.items():
        *path, last = name.split(".")
        holder = common
        for part in path:
            holder = vars(holder[part]) if part == "args" else holder[int(part) if part.isdecimal() else part]
        holder[last] = value
    torch.save(common, root / "common.pt")
    return root


STEP, SAMPLES = "optimizer.optimizer.param_groups.0.step", "opt_param_scheduler.num_steps"
CHANGES = [
    ({"args.num_attention_heads": 8}, 1, "num_attention_heads 8, num_query_groups 2, kv_channels 8: rows of"),
    ({"iteration": 99}, 0, "it is 99, but 16 samples (args.consumed_train_samples) in batches of 8 are 2 iterations"),
    ({STEP: 7}, 0, "different numbers of steps: 7 (optimizer.param_groups.0), 2 (optim"),
    ({STEP: 7}, 0, "it is 2, but the optimizer has made 7 steps"),
    ({"args.iteration": 3}, 0, "it is 2, but the run went on from 3 (args.iteration)"),
    ({SAMPLES: 8}, 0, "the learning rate is that of 8 samples, args.consumed_train_samples is 16"),
    ({SAMPLES: 999}, 0, "the learning rate is that of 999 samples, args.consumed_train_samples is 16"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code", "told"), CHANGES)
def test_verify_and_convert_tell_of_a_contradiction(tmp_path, capsys, change, code, told):
    root = with_common(tmp_path, **change)
    assert run(["verify", str(root)]) == code
    assert told in capsys.readouterr().out
    assert run(["convert", str(root), str(tmp_path / "out"), "--json"]) == 0
    printed = capsys.readouterr()
    assert told in printed.err and "it is copied unchanged" in printed.err
    assert any(told in line for line in json.loads(printed.out)["warnings"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({STEP: "two"}, f"{STEP} is 'two', and a 64-bit number belongs there"),
        ({STEP: float("nan")}, "optimizer.param_groups.0: its step is nan, no number of steps"),
        ({STEP: 10**400}, f"{STEP} is an integer of 1329 bits"),
        ({SAMPLES: "many"}, f"{SAMPLES} is 'many'"),
    ],
)
def test_a_counter_that_is_no_number_is_told(tmp_path, capsys, change, told):
    assert run(["verify", str(with_common(tmp_path, **change))]) in (0, 1)
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("change", [{STEP: 7}, {SAMPLES: 8}])
@pytest.mark.parametrize("to", ["fsdp_dtensor", "torch_dist", "dcp"])
def test_a_counter_that_is_not_written_is_not_warned_of(tmp_path, capsys, change, to):
    root = with_common(tmp_path, **change)
    words = ["convert", str(root), str(tmp_path / "out"), "--to", to, "--weights-only", "--json"]
    assert run(words) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["warnings"] == [] and "copied unchanged" not in printed.err


def test_one_that_is_written_with_weights_alone_is(tmp_path, capsys):
    root = with_common(tmp_path, **{"args.iteration": 3})
    assert run(["convert", str(root), str(tmp_path / "out"), "--weights-only", "--json"]) == 0
    assert "the run went on from 3" in capsys.readouterr().err


def counters_of(place):
    checks = {check.name: check for check in verify_checkpoint(str(place)).checks}
    return checks["counters"], [f"{one.where}: {one.message}" for one in checks["counters"].findings]


STEPS = [
    (7.0, "different numbers of steps: 2 (optim"),
    (7.0, "it is 2, but the optimizer has made 7 steps"),
    (float("nan"), "its step is nan, no number of steps"),
]


@pytest.mark.parametrize(("step", "told"), STEPS)
@pytest.mark.parametrize("name", [NATIVE, NATIVE_MOE])
def test_a_step_beside_the_states_is_a_counter(tmp_path, name, step, told):
    """Where torch's Adam keeps one for every parameter."""
    root = copy_of(name, tmp_path)
    with metadata_of(root) as metadata:
        keys = [key for key in keys_with(metadata, "optimizer.state.") if key.endswith(".step")]
    check, lines = counters_of(root)
    assert check.looked_at == len(keys) + 2 and not lines  # with the iteration and the samples
    replace_chunk(root, keys[3], (), "float32", struct.pack("<f", step))
    _, lines = counters_of(root)
    assert any(told in line for line in lines), lines
    assert any(keys[3] in line for line in lines)


def test_a_step_of_another_type_is_an_error_as_for_a_conversion(tmp_path, capsys):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        key = next(key for key in keys_with(metadata, "optimizer.state.") if key.endswith(".step"))
        metadata.state_dict_metadata[key].properties.dtype = torch.int32
    replace_chunk(root, key, (), "int32", struct.pack("<i", 2))
    check, lines = counters_of(root)
    assert check.errors == 1 and lines == [f"{key}: a step is a 0-d float32 tensor, found int32 ()"]
    assert run(["convert", str(root), str(tmp_path / "out"), "--to", "torch_dist"]) == 5
    assert lines[0].partition(": ")[2] in capsys.readouterr().err


def test_the_counters_of_a_plain_state_dict_are_looked_at(tmp_path):
    assert run(["convert", str(folder(NATIVE)), str(tmp_path / "out"), "--to", "dcp", "-q"]) == 0
    check, lines = counters_of(tmp_path / "out")
    assert check.looked_at > 10 and not lines


@pytest.mark.parametrize(
    "change",
    [
        {SAMPLES: 8, **{STEP.replace("0", str(group)): 1 for group in (0, 1)}},  # steps that were skipped
        {"args.global_batch_size": 4},
    ],
)
def test_what_is_no_contradiction(tmp_path, change):
    checks = {check.name: check for check in verify_checkpoint(with_common(tmp_path, **change)).checks}
    assert not checks["counters"].findings


@pytest.mark.parametrize("value", [10**400, -(10**400), 1 << 63, float("inf"), float("nan"), "2", None])
def test_no_count(value):
    assert not _is_count(value)


def test_samples_that_no_float_holds():
    args = {"consumed_train_samples": 10**400, "global_batch_size": 1}
    assert list(_contradictions(5, None, _of_optimizer({"step": 4}, has_groups=True), args)) == []
