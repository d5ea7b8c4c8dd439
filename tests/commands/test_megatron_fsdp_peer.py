"""A conversion for three ranks, loaded into uneven DTensors that the released megatron-fsdp describes to DCP."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_tools.commands.convert.to_dtensors import convert_to_dcp, convert_to_fsdp_dtensor
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.commands.job.placements import Layout
from ckpt_tools.sharding.topology import Topology
from tests.commands import oracle
from tests.conftest import DATA

PEER = Path(os.environ.get("CKPT_TOOLS_PEERS", ""), "megatron_fsdp-0.6.1")
WORKER = Path(__file__).with_name("megatron_fsdp_worker.py")


@pytest.mark.peer
def test_megatron_fsdps_own_dtensors_get_their_rows(tmp_path):
    source = str(DATA / "core019_llama_tp2_fully_reshardable" / "iter_0000002")
    layout = Layout("mfsdp-v1", Topology(dp_shard=3))
    convert_to_fsdp_dtensor(source, str(tmp_path / "out"), ConvertOptions(layout=layout))
    assert load_rows(tmp_path, 3) == 51


@pytest.mark.peer
def test_so_do_those_of_a_model_that_is_not_megatrons(sharded, tmp_path):
    """Megatron-FSDP on its own: a state dict laid out for its units."""
    layout = Layout("mfsdp-v1", Topology(dp_shard=2), units=("layers.*",))
    convert_to_dcp(str(sharded / "numbered"), str(tmp_path / "out"), ConvertOptions(layout=layout))
    assert load_rows(tmp_path, 2) == 18 + 2 * 17


def load_rows(tmp_path: Path, ranks: int) -> int:
    """The number of tensors of `out` of which every rank of a job got its own rows, all of them together."""
    if not (PEER / "megatron_fsdp").is_dir():
        pytest.skip("CKPT_TOOLS_PEERS has no megatron_fsdp-0.6.1")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, str(WORKER), str(oracle.files_of(tmp_path / "out")), str(tmp_path / "got")],
        env={**os.environ, "PYTHONPATH": str(PEER), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = oracle.tensors(tmp_path / "out")
    seen = dict.fromkeys(whole, 0)
    for rank in range(ranks):
        rows = json.loads((tmp_path / f"got.{rank}.json").read_text())
        for key, local in torch.load(tmp_path / f"got.{rank}.pt", weights_only=True).items():
            start, count = rows[key]
            assert oracle.same_bytes(local, whole[key][start : start + count]), (rank, key)
            seen[key] += count
    cut = {key for key, t in whole.items() if t.dim() and not key.startswith("rng_state")}
    assert {key: seen[key] for key in cut} == {key: whole[key].shape[0] for key in cut}
    return len(cut)
