"""Jobs: the launch of a preflight that is ready, and torchrun's ranks with what each reports."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckpt_tools.commands.check.launch import Launch
from ckpt_tools.commands.check.preflight import Preflight
from tests.conftest import REPO


def launch_of(found: Preflight) -> Launch:
    """The command that starts the job, which must be there."""
    assert found.launch is not None
    return found.launch


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """A job of this process alone, and its mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    finally:
        dist.destroy_process_group()


def torchrun(worker: str, cases: list[dict[str, Any]], ranks: int, scratch: Path) -> list[dict[str, Any]]:
    """What every rank of a job reports of each case, by name; a module of tests.commands is the program."""
    scratch.mkdir(exist_ok=True)
    task = scratch / "task.json"
    task.write_text(json.dumps({"cases": cases, "scratch": str(scratch)}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, "-m", f"tests.commands.{worker}", str(task)],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((scratch / f"result_{rank}.json").read_text()) for rank in range(ranks)]
