"""Two nodes without a scheduler: one torchrun each, meeting on loopback by c10d rendezvous."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPO, fixture_dir
from tests.folders import content
from tests.ports import free_port

SOURCE = "core019_llama_tp2_fully_reshardable"


def test_two_nodes_write_what_one_process_writes(tmp_path: Path) -> None:
    words = ["-m", "ckpt_tools", "convert", str(fixture_dir(SOURCE))]
    options = ["--world-size", "2", "--quiet"]
    subprocess.run([sys.executable, *words, str(tmp_path / "one"), *options], check=True, capture_output=True)
    meeting = f"127.0.0.1:{free_port()}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "convert"]
    nodes = [
        subprocess.Popen(
            [*launcher, *words, str(tmp_path / "two"), *options, "--json"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ends = [node.communicate(timeout=200) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ends
    assert json.loads("".join(stdout for stdout, _ in ends))["written"]["ranks"] == 2, (
        "one report, of all ranks"
    )
    assert content(tmp_path / "two") == content(tmp_path / "one")
