"""What is written loads with stock torch in fresh processes, one and two ranks, as tensors and as DTensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_tools.commands.convert.to_dtensors import convert_to_fsdp_dtensor
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.commands.job.placements import Layout
from tests.commands import oracle
from tests.conftest import DATA

WORKER = Path(__file__).with_name("stock_worker.py")


@pytest.mark.parametrize("ranks", [1, 2])
def test_fresh_processes_load_every_tensor(ranks, tmp_path):
    source = DATA / "core019_llama_tp2_fully_reshardable" / "iter_0000002"
    convert_to_fsdp_dtensor(
        str(source), str(tmp_path / "iter_0000002"), ConvertOptions(layout=Layout(world=3))
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, str(WORKER), str(tmp_path / "iter_0000002"), str(tmp_path / "loaded.pt")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = oracle.tensors(tmp_path / "iter_0000002")
    plain, sharded, different = json.loads((tmp_path / "loaded.pt.json").read_text())
    assert (plain, different) == (len(expected), [])
    assert sharded == sum(1 for t in expected.values() if t.dim())
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    assert all(oracle.same_bytes(loaded[key], tensor) for key, tensor in expected.items())
