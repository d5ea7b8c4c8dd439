"""A conversion for three ranks, loaded into uneven DTensors that the released megatron-fsdp describes to DCP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_tools.commands.placements import Layout
from ckpt_tools.commands.to_fsdp_dtensor import ConvertOptions, convert_to_fsdp_dtensor
from ckpt_tools.sharding.topology import Topology
from tests.commands import oracle
from tests.conftest import DATA

PEER = Path(os.environ.get("CKPT_TOOLS_PEERS", ""), "megatron_fsdp-0.6.1")
WORKER = Path(__file__).with_name("megatron_fsdp_worker.py")
RANKS = 3


@pytest.mark.peer
def test_megatron_fsdps_own_dtensors_get_their_rows(tmp_path):
    if not (PEER / "megatron_fsdp").is_dir():
        pytest.skip("CKPT_TOOLS_PEERS has no megatron_fsdp-0.6.1")
    source = str(DATA / "core019_llama_tp2_fully_reshardable" / "iter_0000002")
    layout = Layout("mfsdp-v1", Topology(dp_shard=RANKS))
    convert_to_fsdp_dtensor(source, str(tmp_path / "out"), ConvertOptions(layout=layout))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*launcher, str(WORKER), str(tmp_path / "out"), str(tmp_path / "got")],
        env={**os.environ, "PYTHONPATH": str(PEER), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = oracle.tensors(tmp_path / "out")
    seen = dict.fromkeys(whole, 0)
    for rank in range(RANKS):
        rows = json.loads((tmp_path / f"got.{rank}.json").read_text())
        for key, local in torch.load(tmp_path / f"got.{rank}.pt", weights_only=True).items():
            start, count = rows[key]
            assert oracle.same_bytes(local, whole[key][start : start + count]), (rank, key)
            seen[key] += count
    cut = {key for key, t in whole.items() if t.dim() and not key.startswith("rng_state")}
    assert {key: seen[key] for key in cut} == {key: whole[key].shape[0] for key in cut}
    assert len(cut) == 51
