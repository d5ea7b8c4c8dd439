"""Outputs for Megatron-FSDP v2: its names and boxes; the released v2 loads them; what v2 cannot hold is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.diff import diff_checkpoints
from ckpt_tools.commands.check.verify import VerifyOptions, verify_checkpoint
from ckpt_tools.commands.convert.version_2 import respelled
from ckpt_tools.commands.huggingface.import_hf import ImportOptions, completed
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.commands.job.placements import Layout
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.sharding.topology import Topology
from tests.commands import oracle
from tests.conftest import fixture_dir

GPT = "core019_gpt3_tp2_fully_reshardable"
LLAMA = "core019_llama_tp2_fully_reshardable"
PEER = Path(os.environ.get("CKPT_TOOLS_PEERS", ""), "megatron_fsdp-0.6.1")
WORKER = Path(__file__).with_name("version_2_worker.py")


def converted(name: str, output: Path, words: str = "--layout mfsdp-v2 --gpus 3 --weights-only") -> Path:
    source = next(fixture_dir(name).glob("iter_*"))
    assert run(["convert", str(source), str(output), *words.split()]) == 0
    return next(output.glob("iter_*"))


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
def test_one_wrapper_less(key: str, expected: str) -> None:
    assert respelled(key) == expected


def test_the_same_values_under_the_names_of_v2(tmp_path: Path) -> None:
    one, two = converted(GPT, tmp_path / "v1", "--gpus 3 --weights-only"), converted(GPT, tmp_path / "v2")
    was, now = oracle.tensors(one), oracle.tensors(two)
    assert {respelled(key) for key in was} == now.keys()
    assert all(oracle.same_bytes(now[respelled(key)], was[key]) for key in was)
    assert not any(".module.module.module" in key or "model.module" in key for key in now)
    paths = {key: path for key, path in oracle.metadata(two).planner_data.items() if ".decoder." in key}
    assert paths["model.decoder.final_layernorm.bias"] == ("model", "decoder.final_layernorm.bias")
    assert all(".".join(map(str, path)) == key for key, path in paths.items())
    objects = oracle.metadata(one).state_dict_metadata.keys() - was.keys()
    assert {respelled(key) for key in objects} == oracle.metadata(two).state_dict_metadata.keys() - now.keys()
    assert verify_checkpoint(str(two), None, VerifyOptions(content=True)).is_valid


def test_it_is_compared_with_what_it_was_made_from_and_goes_back(tmp_path: Path) -> None:
    source, two = next(fixture_dir(GPT).glob("iter_*")), converted(GPT, tmp_path / "v2")
    one = converted(GPT, tmp_path / "v1", "--gpus 2 --weights-only")
    for other in (source, one):
        report = diff_checkpoints(str(other), str(two))
        named = [found for found in report.tensors if found.name.startswith(("model", "optimizer"))]
        assert len(named) >= 28
        assert all(found.kind == "equal" for found in named)
        assert not [value for value in report.values if value.name.startswith("optimizer")]
    assert run(["convert", str(two), str(tmp_path / "a"), "-q", "--to", "torch_dist"]) == 0
    assert run(["convert", str(one), str(tmp_path / "b"), "-q", "--to", "torch_dist"]) == 0
    first, second = oracle.tensors(tmp_path / "a"), oracle.tensors(tmp_path / "b")
    assert first.keys() == second.keys()
    assert all(oracle.same_bytes(first[key], second[key]) for key in first)


def test_laid_out_anew_for_either_version(tmp_path: Path) -> None:
    """v2 to v2 keeps the names, and v2 to v1 and back gives the same bytes."""
    two = converted(GPT, tmp_path / "v2")

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


def test_weights_alone_are_known_again(tmp_path: Path) -> None:
    two = converted(GPT, tmp_path / "v2", "--layout mfsdp-v2 --gpus 3 --weights-only")
    with open_checkpoint(str(two)) as opened:
        assert opened.location.kind == "fsdp_dtensor"
        assert opened.common.args
        assert not any(key.startswith("optimizer") for key in opened.catalog.tensors)
    assert verify_checkpoint(str(two)).is_valid


def test_weights_of_v2_get_no_optimizer_by_strip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = converted(GPT, tmp_path / "v2", "--layout mfsdp-v2 --gpus 3 --weights-only")
    assert run(["strip", str(two), str(tmp_path / "out"), "-q", "--fresh-optimizer"]) == 2
    assert "is named for Megatron-FSDP v2, which loads no optimizer" in capsys.readouterr().err.replace(
        "\n", " "
    )
    assert not (tmp_path / "out").exists()


def test_an_import_for_v2_begins_with_weights_alone(tmp_path: Path) -> None:
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
def test_what_v2_cannot_hold_is_refused(
    name: str, words: str, code: int, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = fixture_dir(name)
    source = next(root.glob("iter_*"), root / "checkpoint")
    for command in (["convert", str(source), str(tmp_path / "out")], ["plan", str(source)]):
        assert run([*command, "--layout", "mfsdp-v2", "--gpus", "2", *words.split()]) == code
        assert why in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.peer
def test_the_released_v2_loads_it(tmp_path: Path) -> None:
    """Strictly, each of three ranks the rows that our placement gave its file."""
    if not (PEER / "megatron_fsdp").is_dir():
        pytest.skip("CKPT_TOOLS_PEERS has no megatron_fsdp-0.6.1")
    out = converted(GPT, tmp_path / "v2")
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
