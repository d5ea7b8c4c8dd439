"""Outputs for Megatron-FSDP v2: its names and boxes; the released v2 loads them; what v2 cannot hold is refused."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from ckpt_tools import (
    ImportOptions,
    Layout,
    TargetOptions,
    Topology,
    diff_checkpoints,
)
from ckpt_tools.cli.app import run
from ckpt_tools.commands.convert.version_2 import respelled
from ckpt_tools.commands.huggingface.import_hf import completed
from tests.commands import oracle
from tests.commands.made import iteration_of, place, torch_dist
from tests.conftest import LLAMA, fixture_dir
from tests.folders import is_sound

GPT = "core019_gpt3_tp2_fully_reshardable"
PEER = Path(os.environ.get("CKPT_TOOLS_PEERS", ""), "megatron_fsdp-0.6.1")
WORKER = Path(__file__).with_name("version_2_worker.py")


@cache
def converted(words: str = "--layout mfsdp-v2 --gpus 3 --weights-only") -> Path:
    output = place()
    assert run(["convert", str(iteration_of(GPT)), str(output), *words.split()]) == 0
    return oracle.files_of(output)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("model.module.decoder.final_layernorm.bias", "model.decoder.final_layernorm.bias"),
        ("optimizer.state.module.module.module.a.b.exp_avg", "optimizer.state.module.module.a.b.exp_avg"),
        (
            "optimizer.state.module.module.a.b.exp_avg",
            "optimizer.state.module.a.b.exp_avg",
        ),  # trained in fp32
        (
            "optimizer.param_to_group_meta.module.module.module.a.b.lr",
            "optimizer.param_to_group_meta.module.module.a.b.lr",
        ),
        ("rng_state.(0, 0).0.np_rng_state", "rng_state.(0, 0).0.np_rng_state"),
        ("args", "args"),
    ],
)
def test_one_wrapper_less(key, expected):
    assert respelled(key) == expected


def test_the_same_values_under_the_names_of_v2():
    one, two = converted("--gpus 3 --weights-only"), converted()
    was, now = oracle.tensors(one), oracle.tensors(two)
    assert {respelled(key) for key in was} == now.keys()
    assert all(oracle.same_bytes(now[respelled(key)], was[key]) for key in was)
    assert not any(".module.module.module" in key or "model.module" in key for key in now)
    paths = {key: path for key, path in oracle.metadata(two).planner_data.items() if ".decoder." in key}
    assert paths["model.decoder.final_layernorm.bias"] == ("model", "decoder.final_layernorm.bias")
    assert all(".".join(map(str, path)) == key for key, path in paths.items())
    objects = oracle.metadata(one).state_dict_metadata.keys() - was.keys()
    assert {respelled(key) for key in objects} == oracle.metadata(two).state_dict_metadata.keys() - now.keys()
    assert is_sound(two)


def test_it_is_compared_with_what_it_was_made_from_and_goes_back():
    source, two = iteration_of(GPT), converted()
    one = converted("--gpus 2 --weights-only")
    for other in (source, one):
        report = diff_checkpoints(other, two)
        named = [found for found in report.tensors if found.name.startswith(("model", "optimizer"))]
        assert len(named) >= 28
        assert all(found.kind == "equal" for found in named)
        assert not [value for value in report.values if value.name.startswith("optimizer")]
    oracle.assert_same(torch_dist(one), torch_dist(two))


def test_laid_out_anew_for_either_version(tmp_path):
    """v2 to v2 keeps the names, and v2 to v1 and back gives the same bytes."""
    two = converted()

    def again(source: Path, output: Path, layout: str) -> Path:
        words = ["--layout", layout, "--gpus", "2"]
        assert run(["convert", str(source), str(output), "-q", *words]) == 0
        return output

    other = again(two, tmp_path / "a", "mfsdp-v2")
    one = again(two, tmp_path / "b", "mfsdp-v1")
    back = again(one, tmp_path / "c", "mfsdp-v2")
    was, kept, wrapped, last = map(oracle.tensors, (two, other, one, back))
    assert was.keys() == kept.keys() == last.keys() == {respelled(key) for key in wrapped}
    assert all(key.startswith("model.module.") for key in wrapped if key.startswith("model."))
    for key, value in was.items():
        assert oracle.same_bytes(kept[key], value)
        assert oracle.same_bytes(last[key], value)
    assert (
        oracle.metadata(other).state_dict_metadata.keys() == oracle.metadata(back).state_dict_metadata.keys()
    )
    assert oracle.metadata(other).planner_data == oracle.metadata(back).planner_data


def test_weights_of_v2_get_no_optimizer_by_strip(tmp_path, capsys):
    two = converted()
    assert run(["strip", str(two), str(tmp_path / "out"), "-q", "--fresh-optimizer"]) == 2
    assert "is named for Megatron-FSDP v2, which loads no optimizer" in capsys.readouterr().err.replace(
        "\n", " "
    )
    assert not (tmp_path / "out").exists()


def test_an_import_for_v2_begins_with_weights_alone():
    at = Layout("mfsdp-v2", Topology(dp_shard=2))
    assert completed(ImportOptions(to="fsdp_dtensor", layout=at), {}).fsdp.fresh_optimizer is False
    asked = ImportOptions(to="fsdp_dtensor", layout=at, fsdp=TargetOptions(fresh_optimizer=True))
    assert completed(asked, {}).fsdp.fresh_optimizer is True
    assert completed(ImportOptions(to="fsdp_dtensor"), {}).fsdp.fresh_optimizer is True


@pytest.mark.parametrize(
    ("name", "words", "code", "why"),
    [
        (LLAMA, "", 5, "is a gated MLP's, gate and up in one"),
        (LLAMA, "--weights-only", 5, "is a gated MLP's, gate and up in one"),
        (GPT, "--target core-0.19", 2, "a part of Megatron-LM main, not of core-0.19"),
        (GPT, "", 2, "v2 of Megatron-LM main loads no optimizer"),
        (GPT, "--weights-only --fresh-optimizer", 2, "pass --weights-only without --fresh-optimizer"),
    ],
)
def test_what_v2_cannot_hold_is_refused(name, words, code, why, tmp_path, capsys):
    root = fixture_dir(name)
    source = next(root.glob("iter_*"), root / "checkpoint")
    for command in (["convert", str(source), str(tmp_path / "out")], ["plan", str(source)]):
        assert run([*command, "--layout", "mfsdp-v2", "--gpus", "2", *words.split()]) == code
        assert why in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.peer
def test_the_released_v2_loads_it(tmp_path):
    """Strictly, each of three ranks the rows that our placement gave its file."""
    if not (PEER / "megatron_fsdp").is_dir():
        pytest.skip("CKPT_TOOLS_PEERS has no megatron_fsdp-0.6.1")
    out = converted()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    path = os.pathsep.join(map(str, [PEER, Path(__file__).parents[2]]))
    done = subprocess.run(
        [*launcher, str(WORKER), str(out), str(tmp_path / "got")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole, known = oracle.tensors(out), oracle.metadata(out)
    files = {(i.fqn, tuple(i.offset)): s.relative_path for i, s in known.storage_data.items() if i.offset}
    seen = 0
    for rank in range(3):
        boxes = json.loads((tmp_path / f"got.{rank}.json").read_text())
        for name, local in torch.load(tmp_path / f"got.{rank}.pt", weights_only=True).items():
            if not local.numel():
                continue
            (offset,) = boxes[name]
            rows = whole[f"model.{name}"][offset[0] : offset[0] + local.shape[0]]
            assert oracle.same_bytes(local, rows), (rank, name)
            assert files[f"model.{name}", tuple(offset)] == f"__{rank}_0.distcp"
            seen += local.numel()
    assert seen == sum(value.numel() for key, value in whole.items() if key.startswith("model."))
