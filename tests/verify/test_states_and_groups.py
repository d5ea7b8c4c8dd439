"""What an optimizer must hold is told by the optimizer; a group map is held against the groups themselves."""

import json
import shutil

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.formats.pickle.unpickle import stand_in
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.torch_dist.optimizers import expected_states
from ckpt_tools.verify.checkpoint.meaning import has_step
from tests.conftest import fixture_dir
from tests.damage import copy_of, drop_key, errors_of, keys_with, metadata_of

LLAMA = "core019_llama_tp2_fully_reshardable"
NATIVE = "core019_llama_tp2_native_fsdp_dtensor"
BUCKETS = "core019_llama_tp2_dp_reshardable"
MOE = "core019_moe_ep2_fully_reshardable"


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
