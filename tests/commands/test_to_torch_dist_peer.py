"""The real megatron-core 0.16.1 loads what we write: `dist_checkpointing.load` into a GPTModel, on CPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools import (
    ConvertOptions,
    TargetOptions,
    ToTorchDistOptions,
    convert_to_fsdp_dtensor,
    convert_to_torch_dist,
)
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from tests.commands import oracle
from tests.commands.made import fsdp, torch_dist
from tests.commands.test_to_fsdp_dtensor import source_of
from tests.conftest import REPO, fixture_dir

MCORE = Path(os.environ.get("CKPT_TOOLS_PEERS", "absent")) / "megatron_core-0.16.1"

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(
        not MCORE.is_dir(),
        reason="megatron-core 0.16.1 is not in CKPT_TOOLS_PEERS (tests/peers/run installs it)",
    ),
]


@pytest.mark.parametrize(
    ("name", "world", "tp", "ep", "tensors", "groups"),
    [
        ("core019_llama_tp2_fully_reshardable", 1, 1, 1, 60, 2),
        ("core019_llama_tp2_fully_reshardable", 2, 1, 1, 60, 2),
        ("core019_llama_tp2_fully_reshardable", 2, 2, 1, 60, 2),
        ("core019_moe_ep2_fully_reshardable", 2, 1, 2, 81, 3),
        ("core019_moe_ep2_fully_reshardable", 2, 2, 1, 97, 2),
    ],
)
def test_megatron_loads_a_round_trip_as_it_loads_the_original(name, world, tp, ep, tensors, groups, tmp_path):
    ours = torch_dist(fsdp(source_of(fixture_dir(name))))
    original = shutil.copytree(source_of(fixture_dir(name)), tmp_path / "original")
    shutil.copy(ours / "common.pt", original)  # 0.16.1 asks for it, and this writer is newer
    reports = run_ranks(world, tp, ep, tmp_path / "store", ours, original)
    for report in reports:
        assert report.pop("elements") > 0
        assert report == {
            "tensors": tensors,
            "different": [],
            "groups": groups,
            "not asked for": ["common_state", "rng_state"],
            "not there": [],
        }


def run_ranks(
    world: int, tp: int, ep: int, store: Path, *folders: Path, axes: int = 0
) -> list[dict[str, Any]]:
    """The JSON line of every rank of one job."""
    environment = {**os.environ, "PYTHONPATH": f"{MCORE}:{REPO}", "OMP_NUM_THREADS": "1"}
    words = [str(w) for w in (world, tp, ep, store, *folders, *([axes] if axes else []))]
    worker = [sys.executable, str(REPO / "tests" / "commands" / "megatron_worker.py")]
    ranks = [
        subprocess.Popen(
            [*worker, str(rank), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    results = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, results[0][1][-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in results]


@pytest.mark.parametrize(
    ("name", "target", "axes"),
    [("v16_moe_ep2_fr", "core-0.16", 3), ("v16n_moe_ep2", "core-0.16", 3), ("v16n_moe_ep2", None, 2)],
)
def test_the_release_loads_both_ways_of_its_own_checkpoints(name, target, axes, tmp_path):
    """The way back names rng states as the program that loads asks for them: core 0.16 with data-parallel ranks."""
    source, ours = source_of(fixture_dir(name)), tmp_path / "back"
    if (source / "common.pt").exists():
        options = ConvertOptions(target=TargetOptions(dialect=target))
        convert_to_fsdp_dtensor(source, tmp_path / "there", options)
        original = source
        convert_to_torch_dist(tmp_path / "there", ours)  # its record names the program
    else:
        back = ToTorchDistOptions(target=TorchDistOptions(dialect=target))
        convert_to_torch_dist(source, ours, back)
        original = oracle.files_of(ours)
    ours = oracle.files_of(ours)
    for report in run_ranks(2, 1, 2, tmp_path / "store", ours, original, axes=axes):
        assert report["elements"] > 0
        assert report["different"] == report["not there"] == []
        assert report["groups"] == 3
        rest = [key for key in report["not asked for"] if not key.endswith("._extra_state")]
        assert rest == ["common_state"]  # the rng states are asked for, and there
