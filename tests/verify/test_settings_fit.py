"""What stands beside the tensors: settings, counters, states and groups that contradict each other are found.

So are damaged shards of objects, `metadata.json` and `integrity.json`; those of sound checkpoints are not.
"""

import argparse
import hashlib
import json
import re
import shutil
import struct
from copy import copy
from dataclasses import replace
from functools import cache

import pytest
import torch

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.commands.look.ls import list_run
from ckpt_tools.formats.pickle.unpickle import stand_in
from ckpt_tools.megatron.format import FORMATS
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.torch_dist.grids import object_grids
from ckpt_tools.megatron.torch_dist.optimizers import expected_states
from ckpt_tools.verify.checkpoint.counters import _contradictions, _is_count, _of_optimizer
from ckpt_tools.verify.checkpoint.meaning import has_step
from ckpt_tools.verify.readiness.model_rules import check_settings
from tests.commands import oracle
from tests.conftest import LLAMA, NATIVE, fixture_dir
from tests.damage import (
    ITERATION,
    copy_of,
    drop_key,
    errors_of,
    findings_of,
    flip_bit,
    infos_of,
    keys_with,
    metadata_of,
    replace_chunk,
)

MOE, NATIVE_MOE = "core019_moe_ep2_fully_reshardable", "core019_moe_dp1_native_fsdp_dtensor"
MLA, GPT, BRIDGE = "main_mla_mtp_moe_fr_tp2", "core019_gpt3_tp2_fully_reshardable", "bridge_dense_fr_tp2_dp2"


def folder(name: str):
    root = fixture_dir(name)
    return root / "checkpoint" if (root / "checkpoint").is_dir() else root


@cache
def settings_of(name: str):
    """The kind, the weights and the common state of a real checkpoint."""
    with open_checkpoint(str(folder(name))) as opened:
        kind = opened.location.kind
        return kind, FORMATS[kind].weights(opened.catalog).found, opened.common


def findings(name: str, settings: dict[str, object]):
    """What the settings check says of a real checkpoint whose settings have other values."""
    kind, weights, common = settings_of(name)
    if common.args:
        namespace = copy(common.values["args"])
        namespace.state = {**common.args, **settings}
        common = replace(common, values={**common.values, "args": namespace})
    else:
        common = replace(common, model_config={**common.model_config, **settings})
    return check_settings(kind, weights, common).findings


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
    ("name", "settings", "told"),
    [
        (LLAMA, {"bf16": False}, "params_dtype is bfloat16, bf16 False"),
        (NATIVE, {"params_dtype": "torch.float16"}, "params_dtype is float16, bf16 True"),
    ],
)
def test_settings_that_a_job_does_not_need_warn(name, settings, told):
    (found,) = findings(name, settings)
    assert found.severity == "warning"
    assert told in found.message


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
    root = str(with_common(tmp_path, **change))
    for words in ([], ["--content"]):
        assert run(["verify", root, *words]) in (0, 1)
        assert capsys.readouterr().out.count(told) == 1


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


BUCKETS = "core019_llama_tp2_dp_reshardable"


def without_states(name, tmp_path, kinds):
    """A copy of a checkpoint that has no state of these kinds."""
    root = copy_of(name, tmp_path)
    with metadata_of(root) as metadata:
        for kind in kinds:
            ours = [
                key
                for key in keys_with(metadata, kind)
                if "optimizer." in key and (key.endswith(f".{kind}") or f".state.{kind}." in key)
            ]
            assert ours
            for key in ours:
                drop_key(metadata, key)
    return root


def missing(kind):
    return "states", "optimizer", f"no parameter has the state {kind}, but args.optimizer is 'adam'"


@pytest.mark.parametrize(
    ("name", "kind"), [(LLAMA, "exp_avg"), (MOE, "exp_avg_sq"), (BUCKETS, "exp_avg_sq"), (NATIVE, "exp_avg")]
)
def test_a_kind_of_state_that_nothing_has(name, kind, tmp_path, capsys):
    root = without_states(name, tmp_path, [kind])
    found = errors_of(root)
    assert missing(kind) in found
    assert {check for check, _, _ in found} <= {"states"}
    command = ["convert", str(root), str(tmp_path / "out"), "-q"]
    command += ["--to", "torch_dist"] if name == NATIVE else []
    assert run(command) == 5
    said = capsys.readouterr().err
    assert f"no parameter has the optimizer state {kind}, but args.optimizer is 'adam'" in said
    assert not (tmp_path / "out").exists()
    assert run([*command, "--weights-only"]) == 0


@pytest.mark.parametrize("name", [LLAMA, NATIVE])
def test_groups_without_any_state(name, tmp_path, capsys):
    kinds = ["exp_avg", "exp_avg_sq", *(["param"] if name == LLAMA else ["step"])]
    root = without_states(name, tmp_path, kinds)
    found = errors_of(root)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert missing(kind) in found
    command = ["convert", str(root), str(tmp_path / "out"), "-q"]
    assert run(command + (["--to", "torch_dist"] if name == NATIVE else [])) == 5
    assert "exp_avg or exp_avg_sq" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["preflight", "IN"], 1, "no parameter has the state exp_avg_sq"),
        (["convert", "IN", "OUT", "--world-size", "3"], 5, "no parameter has the optimizer state exp_avg_sq"),
    ],
)
def test_a_job_and_a_relayout_refuse_lost_states_too(words, code, said, tmp_path, capsys):
    places = {"IN": str(without_states(NATIVE, tmp_path, ["exp_avg_sq"])), "OUT": str(tmp_path / "out")}
    assert run([places.get(word, word) for word in words]) == code
    assert said in "".join(capsys.readouterr())


def test_masters_that_nothing_has_are_said(tmp_path, capsys):
    root = without_states(LLAMA, tmp_path, ["param"])
    report = verify_checkpoint(str(root))
    assert report.is_valid
    assert [(f.where, f.message.partition(":")[0]) for f in report.findings] == [
        ("optimizer", "it holds no fp32 masters of the weights")
    ]
    assert run(["convert", str(root), str(tmp_path / "out")]) == 0
    assert "holds no fp32 masters" in capsys.readouterr().out


def common_with(**args):
    namespace = stand_in("argparse", "Namespace")()
    namespace.state = args
    return CommonState({"args": namespace}, "common.pt")


ADAM = {"lr": 1.0, "betas": (0.9, 0.95), "eps": 1e-8}


@pytest.mark.parametrize(
    ("args", "groups", "kinds", "why"),
    [
        ({"optimizer": "adam"}, [], ("exp_avg", "exp_avg_sq"), "args.optimizer is 'adam'"),
        ({"optimizer": "lion"}, [], ("exp_avg",), "args.optimizer is 'lion'"),
        ({"optimizer": "sgd", "sgd_momentum": 0.9}, [], ("momentum_buffer",), "args.optimizer is 'sgd'"),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, [{"momentum": 0.0}], (), "args.optimizer is 'sgd'"),
        ({}, [ADAM], ("exp_avg", "exp_avg_sq"), "betas and eps"),
        ({}, [{"betas": (0.9, 0.99)}], ("exp_avg",), "no eps"),
        ({}, [{"momentum": 0.9}], ("momentum_buffer",), "a momentum"),
        ({}, [{"lr": 1.0}], None, "neither the args nor the fields"),
        ({"optimizer": "dist_muon"}, [ADAM], None, "'dist_muon', and which states it keeps"),
    ],
)
def test_what_is_expected(args, groups, kinds, why):
    expected = expected_states(common_with(**args), groups)
    assert expected.kinds == kinds
    assert why in expected.why
    assert expected.missing(()) == list(kinds or ())
    assert expected.missing(kinds or ()) == []


@pytest.mark.parametrize("flags", [[], ["--strict-map"]])
def test_a_map_with_swapped_ids(flags, tmp_path, capsys):
    """It fits by its names and numbers; its groups have other attributes than the parameters."""
    right, wrong = tmp_path / "right.json", tmp_path / "wrong.json"
    assert run(["build-param-group-map", str(fixture_dir(LLAMA)), "-o", str(right)]) == 0
    groups = json.loads(right.read_text())
    assert set(groups.values()) == {0, 1}
    wrong.write_text(json.dumps({name: 1 - group for name, group in groups.items()}))
    out = tmp_path / "out"
    command = ["convert", str(fixture_dir(LLAMA)), str(out), "-q", *flags, "--param-to-param-group-map-json"]
    capsys.readouterr()
    for mixed in (wrong, tmp_path / "one.json"):
        if mixed != wrong:  # one parameter alone
            mixed.write_text(json.dumps(groups | {"module.module.decoder.final_layernorm.weight": 0}))
        assert run([*command, str(mixed)]) == 5
        said = capsys.readouterr().err
        assert "decoder.final_layernorm.weight: group 0 in the map, but group 1 by the checkpoint" in said
        assert said.count(" in the map, but group ") == (len(groups) if mixed == wrong else 1)
        assert not out.exists()
    assert run([*command, str(right)]) == 0
    shutil.rmtree(out)


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        ({"state": {"common_step": 3}, "param_groups": []}, True),
        ({"param_groups": [], "step": 3}, True),
        ({"0": {"optimizer": {"state": {"common_step": 3}}}, "1": {"optimizer": {}}}, True),
        ({"step": {}, "state": {"common_step": {"step": {}}}}, False),  # mappings of that name hold no number
        ({"param_groups": [{"step": 3}]}, False),  # in a group, which is looked at on its own
        ({}, False),
        (None, False),
    ],
)
def test_a_step_outside_the_groups_is_found_at_any_depth(optimizer, found):
    assert has_step(optimizer) is found


EXTRA = "decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state"


@pytest.mark.parametrize(
    ("case", "where", "missing"),
    [
        ("rng_tp1_missing", "rng_state", "rng_state/shard_0.1_1.2"),
        ("expert_extra_state_missing", EXTRA, f"{EXTRA}/shard_2_4"),
    ],
)
def test_a_missing_shard_of_an_object(case, where, missing, cases, capsys):
    assert run(["verify", str(cases / "incomplete_objects" / case)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    (line,) = lines
    assert line.startswith(f"error: shards: {where}: ")
    assert line.endswith(f"shards are missing: {missing}")


FC2, RNG, RERUN = (
    "decoder.layers.mlp.linear_fc2._extra_state/shard_1_2",
    "rng_state/shard_0.1_1.2",
    "rerun_state_machine_state/shard_1_2",
)


@pytest.fixture(scope="module")
def lacking(tmp_path_factory):
    """Checkpoints that lack one shard, by its key."""
    roots = {}
    for name, key in (("fc2", FC2), ("rng", RNG), ("rerun", RERUN)):
        roots[key] = copy_of(LLAMA, tmp_path_factory.mktemp(name))
        with metadata_of(roots[key]) as metadata:
            drop_key(metadata, key)
    return roots


@pytest.mark.parametrize(
    ("verb", "options", "refused"),
    [
        ("convert", ["--to", "torch_dist", "--target", "core-0.18"], {FC2, RNG, RERUN}),
        ("convert", ["--to", "torch_dist", "--per-layer"], {FC2, RNG, RERUN}),
        ("convert", ["--to", "torch_dist", "--weights-only"], {FC2}),
        ("convert", ["--gpus", "1"], {RNG}),  # fsdp_dtensor has no others
        ("convert", ["--gpus", "1", "--weights-only"], set()),
        ("convert", ["--gpus", "1", "--weights-only", "--fresh-optimizer"], set()),  # which says it
        ("export-hf", [], set()),
        ("slice", ["--layers", "1:2"], {FC2, RNG, RERUN}),  # nothing of FC2 would be in it
        ("strip", [], {FC2}),
        ("average", [], {FC2, RNG, RERUN}),
        ("modify-state-dict", ["--op", "remove linear_proj._extra_state"], {FC2, RNG, RERUN}),
    ],
)
def test_what_lacks_a_shard_is_not_written_unless_it_is_left_out(
    verb, options, refused, lacking, tmp_path, capsys
):
    """The message names the shard and a way out, which works."""
    for n, (key, root) in enumerate(lacking.items()):
        sources = [str(root)] * (2 if verb == "average" else 1)
        output = tmp_path / str(n)
        code = run([verb, *sources, str(output), *options])
        said = capsys.readouterr().err
        assert code == (5 if key in refused else 0), said
        if key not in refused:
            continue
        assert f"1 of 2 shards are missing: {key}\n" in said
        assert ("--no-load-rng" if key == RNG else "--dist-ckpt-strictness log_all") in said
        assert not output.exists()
        if "--ignore-keys" in said:
            left_out = re.search("--ignore-keys '(.*)'", said)
            assert (
                left_out and run([verb, *sources, str(output), *options, "--ignore-keys", left_out[1]]) == 0
            )
        else:
            left_out, whole = re.search("--op '(.*)'", said), str(tmp_path / f"whole{n}")
            assert left_out and run(["modify-state-dict", str(root), whole, "--op", left_out[1]]) == 0
            assert run([verb, *[whole] * len(sources), str(output), *options]) == 0
        assert run(["verify", str(output)]) == 0


def test_a_template_that_lacks_a_shard(lacking, tmp_path, capsys):
    command = ["convert", str(folder(NATIVE)), str(tmp_path), "--to", "torch_dist"]
    assert run([*command, "--extra-state", str(lacking[FC2])]) == 5
    assert f"1 of 2 shards are missing: {FC2}\n" in capsys.readouterr().err


def test_a_copy_lacks_the_shards_that_its_source_lacks(lacking, tmp_path, capsys):
    assert run(["copy", str(lacking[RERUN]), str(tmp_path / "copy")]) == 0
    assert f"1 of 2 shards are missing: {RERUN}; it is copied unchanged" in capsys.readouterr().err


def test_every_shard_that_is_missing_is_an_error(tmp_path):
    """Whatever object it is of, and in however many axes its grid is."""
    root = copy_of(MOE, tmp_path)
    path = root / ITERATION / ".metadata"
    data = path.read_bytes()
    with metadata_of(root) as metadata:
        keys = [k for k in metadata.state_dict_metadata if "/shard_" in k and not k.endswith(("_1", "_1.1"))]
    assert len(keys) > 5
    for key in keys:
        path.write_bytes(data)
        with metadata_of(root) as metadata:
            drop_key(metadata, key)
        found = [f for f in findings_of(root) if f[1] == "shards"]
        assert [(f[0], f[2]) for f in found] == [("error", key.partition("/shard_")[0])]
        assert key in found[0][3]


def test_grids_of_hostile_keys_cost_nothing():
    (grid,) = object_grids(["a/shard_0_999999999999999999"])
    assert "999999999999999998 of 999999999999999999 shards are missing: a/shard_1_" in (grid.problem or "")
    assert "and 999999999999999995 more" in (grid.problem or "")
    (grid,) = object_grids(["a/shard_0.0.0_2.1.2", "a/shard_1.0.1_2.1.2", "a/shard_0.0.1_2.1.2"])
    assert (grid.problem or "").endswith("1 of 4 shards are missing: a/shard_1.0.0_2.1.2")
    for key in ("a/shard_4_4", "a/shard_0.0_4", "a/shard_0_0"):
        (grid,) = object_grids([key])
        assert f"{key} is outside its grid" in (grid.problem or "")
    assert object_grids(["a/shard_x_4", "a/shard_0", "plain", "shard_0_4"]) == []


def test_shards_of_two_grids(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        key = next(k for k in metadata.state_dict_metadata if k.startswith("rng_state/shard_"))
        ((index, info),) = infos_of(metadata, key).values()
        other = "rng_state/shard_0.0.0_1.1.1"
        metadata.state_dict_metadata[other] = metadata.state_dict_metadata[key]
        metadata.storage_data[type(index)(other)] = info
    found = findings_of(root)
    assert ("shards", "rng_state") in [f[1:3] for f in found]
    assert any("of 2 grids" in f[3] for f in found)


def test_values_that_were_not_read_are_said(capsys):
    root = str(fixture_dir(LLAMA))
    said = "is valid; the values were not read (--content reads them)"
    for form in ("text", "github", "markdown"):
        assert run(["verify", root, "--format", form]) == 0
        assert said in capsys.readouterr().out, form
        assert run(["verify", root, "--content", "--format", form]) == 0
        assert "not read" not in capsys.readouterr().out, form
    for flags, read in (([], False), (["--content"], True)):
        assert run(["verify", root, "-q", "--json", *flags]) == 0
        assert json.loads(capsys.readouterr().out)["content_read"] is read


def test_a_newer_iteration_that_is_half_written_is_named(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    (root / "iter_0000003").mkdir()
    shutil.copy(root / ITERATION / "__0_0.distcp", root / "iter_0000003")
    (root / "iter_0000001").mkdir()  # older: no business of a loader

    def said():
        ((severity, _, where, message),) = (f for f in findings_of(root) if f[1] == "place")
        assert (severity, where) == ("warning", "iter_0000003")
        return message

    assert "half-written" in said()
    shutil.copy(root / ITERATION / ".metadata", root / "iter_0000003")
    assert "which was verified, and damaged: " in said()
    assert list_run(root).iterations[-1].why in said()  # as ls says
    shutil.copytree(root / ITERATION, root / "iter_0000003", dirs_exist_ok=True)
    assert said().endswith("which was verified; see --iteration 3")


def test_files_of_one_node(cases, capsys):
    assert run(["inspect", str(cases / "node_local")]) == 3
    said = capsys.readouterr().err
    assert "here are only the files of rank 1; those of rank 0 and .metadata" in said
    assert "interrupted" not in said
    assert run(["verify", str(cases / "node_local")]) == 1
    assert "files of rank 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"sharded_backend_version": 3}, "sharded_backend_version is 3"),
        ({"common_backend": "torcj"}, "common_backend is 'torcj'"),
        (
            {"common_backend": None, "common_bbckend": "torch"},
            "common_backend_version is there, but not common_backend",
        ),
    ],
)
def test_a_metadata_json_that_no_loader_takes(fields, part, tmp_path):
    root = copy_of(LLAMA, tmp_path)
    sound = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend_version": 1}
    text = {
        name: value
        for name, value in {**sound, "common_backend": "torch", **fields}.items()
        if value is not None
    }
    (root / ITERATION / "metadata.json").write_text(json.dumps(text))
    errors = [f for f in findings_of(root) if f[0] == "error"]
    assert [f[1:3] for f in errors] == [("metadata.json", "metadata.json")]
    assert part in errors[0][3]


@pytest.mark.parametrize("fields", [{}, {"sharded_backend_version": 1}, {"common_backend": "torch"}])
def test_versions_of_metadata_json_are_1_where_it_has_none(fields, tmp_path):
    """As in Megatron's `CheckpointingConfig`."""
    root = copy_of(LLAMA, tmp_path)
    (root / ITERATION / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", **fields}))
    assert not findings_of(root)
    open_checkpoint(str(root)).files.close()


def test_a_field_of_metadata_json_that_is_not_known(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    path = root / ITERATION / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"new": 1}))
    assert [f[:3] for f in findings_of(root)] == [("warning", "metadata.json", "metadata.json")]


def with_integrity(tmp_path):
    """A copy with the file that Megatron writes (dist_checkpointing/integrity.py)."""
    root = copy_of(LLAMA, tmp_path)
    folder = root / ITERATION
    sums = {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir()) if p.is_file()
    }
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": sums}, indent=2))
    return root, sums


def test_megatrons_own_sums_are_checked(tmp_path):
    root, _ = with_integrity(tmp_path)
    assert findings_of(root) == findings_of(root, content=True) == []
    path = root / ITERATION / "__0_0.distcp"
    flip_bit(path, 52)  # padding of an archive, which no checksum of its own covers
    assert findings_of(root) == []
    ((severity, check, where, message),) = findings_of(root, content=True)
    assert (severity, check, where) == ("error", "integrity", path.name)
    assert hashlib.sha256(path.read_bytes()).hexdigest() in message


def test_a_file_that_the_sums_do_not_fit(tmp_path):
    root, sums = with_integrity(tmp_path)
    folder = root / ITERATION
    (folder / "integrity.json").write_text(json.dumps({"files": {**sums, "__7_0.distcp": "0" * 64}}))
    assert [f[:3] for f in findings_of(root)] == [("error", "integrity", "__7_0.distcp")]
    (folder / "__8_0.distcp").write_bytes(b"new")
    assert ("error", "integrity", "__8_0.distcp") in [f[:3] for f in findings_of(root)]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"algorithm": "md5", "files": {}}', '{"algorithm": "sha256"}', '{"files": {"a": 1}}',
     '{"files": {"a": "XY"}}', "[" * 100_000],
)  # fmt: skip
def test_sums_that_are_not_sums(text, tmp_path):
    root, _ = with_integrity(tmp_path)
    (root / ITERATION / "integrity.json").write_text(text)
    assert [f[:3] for f in findings_of(root)] == [("error", "integrity", "integrity.json")]


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", ".."])
def test_sums_of_files_elsewhere_are_not_made(name, tmp_path):
    root, sums = with_integrity(tmp_path)
    (root / "secret").write_text("secret")
    text = json.dumps({"files": {**sums, name: "0" * 64}})
    (root / ITERATION / "integrity.json").write_text(text)
    ((severity, check, where, message),) = findings_of(root, content=True)
    assert (severity, check, where) == ("error", "integrity", "integrity.json")
    assert "not the name of a file of this folder" in message


def test_what_is_new_since_a_manifest_is_named(tmp_path, capsys):
    root, manifest = copy_of(LLAMA, tmp_path), tmp_path / "m.json"
    assert run(["verify", str(root), "--write-manifest", str(manifest)]) == 0
    (root / ITERATION / "__9_0.distcp").write_bytes(b"new")
    with metadata_of(root) as metadata:
        key = "decoder.final_layernorm.weight"
        ((index, info),) = infos_of(metadata, key).values()
        metadata.state_dict_metadata["new.weight"] = metadata.state_dict_metadata[key]
        metadata.storage_data[type(index)("new.weight", index.offset)] = info
    capsys.readouterr()
    assert run(["verify", str(root), "--manifest", str(manifest)]) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error: manifest")]
    assert [line.split(": ")[2] for line in found] == [".metadata", "__9_0.distcp", "new.weight"]
    assert all("it is new" in line for line in found[1:])
    drop = root / ITERATION / "__1_0.distcp"
    drop.unlink()
    assert run(["verify", str(root), "--manifest", str(manifest)]) == 1
    assert f"error: manifest: {drop.name}: " in capsys.readouterr().out
