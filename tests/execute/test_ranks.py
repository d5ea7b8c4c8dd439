"""Several processes: the same bytes, one verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tools.errors import UsageError
from ckpt_tools.execute.processes.ranks import Ranks, _first_host, connect
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from tests.conftest import REPO
from tests.execute.conftest import make_case
from tests.execute.test_run import tree
from tests.ports import free_port

SCRIPT = """
import json, os, sys
from pathlib import Path
from ckpt_tools.errors import CkptError, StorageError
from ckpt_tools.execute.move import stream
from ckpt_tools.execute.processes.ranks import connect
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from tests.execute.conftest import reopened_case

def fail(*args):
    raise StorageError("the disk of this rank is on fire")

here, out, fault = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
ranks = connect()
case = reopened_case(here / "source")
plan = case.plan(3 + (fault == "plan") * ranks.rank)
if fault == "work" and ranks.rank == 1:
    stream.Pump.write_item = fail
if fault == "die" and ranks.rank == 1:
    stream.Pump.write_item = lambda *args: os._exit(9)
try:
    if fault == "twice":
        write_checkpoint(plan, case.files, Output(out.with_name("first")), WriteOptions(2, 6 << 16), ranks=ranks)
        ranks, plan = connect(), case.plan(2)
    report = write_checkpoint(plan, case.files, Output(out), WriteOptions(2, 6 << 16), ranks=ranks)
    print(json.dumps(["report", report.bytes_read, report.ranks]))
except CkptError as error:
    print(json.dumps(["error", str(error)]))
    sys.exit(error.exit_code)
"""


def launch(folder: Path, out: Path, world: int, fault: str = "") -> list[tuple[int, list[str]]]:
    """(exit status, printed JSON) of every rank; torchrun's environment without torchrun, which takes seconds."""
    port = free_port()
    processes = []
    for rank in range(world):
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(folder), str(out), fault],
                cwd=REPO,
                env={**os.environ, **place},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    ends = []
    for process in processes:
        text, _ = process.communicate(timeout=120)
        ends.append((process.returncode, json.loads(text) if text else []))
    return ends


def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path) -> None:
    case = make_case(tmp_path / "source", scale=24)
    one = write_checkpoint(case.plan(3), case.files, Output(tmp_path / "1"), WriteOptions(2, 6 << 16))
    assert launch(tmp_path, tmp_path / "2", 2) == [(0, ["report", one.bytes_read, 2])] * 2
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    subprocess.run(
        [*torchrun, str(script), str(tmp_path), str(tmp_path / "4"), ""],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert tree(tmp_path / "1") == tree(tmp_path / "2") == tree(tmp_path / "4")


def test_one_job_converts_one_checkpoint_after_another(tmp_path: Path) -> None:
    """As `--iteration all` does: what was said of the first must not be taken for the second's."""
    case = make_case(tmp_path / "source", scale=24)
    ends = launch(tmp_path, tmp_path / "second", 2, "twice")
    for name, world in (("first", 3), ("second", 2)):
        place = Output(tmp_path / f"{name}1")
        one = write_checkpoint(case.plan(world), case.files, place, WriteOptions(2, 6 << 16))
        assert tree(tmp_path / name) == tree(tmp_path / f"{name}1")
    assert ends == [(0, ["report", one.bytes_read, 2])] * 2


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("work", 7, "rank 1: the disk of this rank is on fire"),
        ("plan", 2, "the ranks made different plans"),
    ],
)
def test_a_failing_rank_fails_all(tmp_path: Path, fault: str, code: int, says: str) -> None:
    make_case(tmp_path / "source")
    for status, printed in launch(tmp_path, tmp_path / "out", 2, fault):
        assert (status, printed[0]) == (code, "error")
        assert says in printed[1]
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("checkpoint/.metadata"))


def test_who_am_i() -> None:
    assert isinstance(connect({}), Ranks)
    assert isinstance(connect({"RANK": "0", "WORLD_SIZE": "1"}), Ranks)
    assert isinstance(connect({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}), Ranks)  # a batch script, no step
    with pytest.raises(UsageError, match="RANK=3 is not one of the ranks 0 to 1 of WORLD_SIZE=2"):
        connect({"RANK": "3", "WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="'x'"):
        connect({"RANK": "x"})
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        connect({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07-09,12],login1", "gpu07"), ("node1", "node1"), ("a-1,b-2", "a-1"), ("n[3,5-9]", "n3")],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert _first_host(nodes) == first
