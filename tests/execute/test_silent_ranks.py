"""Ranks that are killed or stopped in the middle of their work, with nobody to tell: the others end and name them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.errors import StorageError
from ckpt_tools.execute.processes import ranks as waiting
from ckpt_tools.execute.processes.ranks import Line
from tests.conftest import REPO
from tests.execute.conftest import make_case
from tests.ports import free_port

SETTINGS = """
from ckpt_tools.execute.processes import ranks as waiting
waiting.BEAT_SECONDS, waiting.SILENT_SECONDS, waiting._LAST_WORDS_SECONDS = 0.2, 3.0, 1.0
"""
WORK = """
import json, os, signal, sys, threading, time
from pathlib import Path
from ckpt_tools.errors import CkptError
from ckpt_tools.execute.move import stream
from ckpt_tools.execute.processes.ranks import connect
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from tests.execute.conftest import reopened_case

def convert(here, environ, victim, number, busy):
    ranks = connect(environ)
    case = reopened_case(here / "source")
    real = {name: getattr(stream.Pump, name) for name in ("write_item", "write_batch")}
    def hooked(name):
        def write(*args):
            if ranks.rank == victim:
                own = here / f"gone-{threading.get_ident()}"  # a thread may be stopped between opening and writing
                own.write_text(str(os.getpid()))
                own.replace(here / "gone")
                os.kill(os.getpid(), number)
            time.sleep(busy)
            return real[name](*args)
        return write
    for name in real:
        setattr(stream.Pump, name, hooked(name))
    end = here / f"end{ranks.rank}"
    try:
        write_checkpoint(case.plan(4), case.files, Output(here / "out"), WriteOptions(2, 6 << 16), ranks=ranks)
        end.write_text(json.dumps([0, ""]))
        return 0
    except CkptError as error:
        end.write_text(json.dumps([error.exit_code, str(error)]))
        return error.exit_code
"""
SERVER = (
    """
import torch.distributed
"""
    + SETTINGS
    + WORK
    + """
def start(order, rank):
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            environ = {name: value.replace("RANK_HERE", str(rank)) for name, value in order["environ"].items()}
            code = convert(Path(order["here"]), environ, order["victim"], order["signal"], order["busy"])
        finally:
            os._exit(code)
    return pid

for line in sys.stdin:
    order = json.loads(line)
    pids = {start(order, rank): rank for rank in range(order["world"])}
    victim = next(pid for pid, rank in pids.items() if rank == order["victim"])
    gone = Path(order["here"]) / "gone"
    while not gone.exists():
        time.sleep(0.01)
    begin = time.monotonic()
    for pid in pids:
        if pid != victim:
            os.waitpid(pid, 0)
    seconds = time.monotonic() - begin
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    print(seconds, flush=True)
"""
)


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported everything and forks the ranks of a job."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    yield process
    process.communicate(timeout=60)


def _environ(kind: str, world: int) -> dict[str, str]:
    if kind == "srun":
        return {
            "SLURM_PROCID": "RANK_HERE",
            "SLURM_NTASKS": str(world),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2",
            "MASTER_PORT": str(free_port()),
        }
    return {
        "RANK": "RANK_HERE",
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


@pytest.mark.parametrize(
    ("kind", "world", "victim", "number", "busy"),
    [
        ("bare", 2, 1, signal.SIGKILL, 0.0),
        ("bare", 2, 1, signal.SIGSTOP, 0.5),
        ("bare", 2, 0, signal.SIGKILL, 0.5),
        ("bare", 4, 0, signal.SIGSTOP, 0.0),
        ("bare", 4, 2, signal.SIGSTOP, 0.0),
        ("srun", 4, 3, signal.SIGKILL, 0.5),
        ("srun", 2, 0, signal.SIGKILL, 0.0),
    ],
)
def test_the_others_end_and_name_it(
    server: subprocess.Popen[str],
    tmp_path: Path,
    kind: str,
    world: int,
    victim: int,
    number: int,
    busy: float,
) -> None:
    make_case(tmp_path / "source", scale=24)
    order = {"here": str(tmp_path), "world": world, "victim": victim, "signal": number, "busy": busy}
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(order | {"environ": _environ(kind, world)}) + "\n")
    server.stdin.flush()
    assert float(server.stdout.readline()) < 20
    for rank in set(range(world)) - {victim}:
        code, message = json.loads((tmp_path / f"end{rank}").read_text())
        assert code == StorageError.exit_code
        assert f"rank {victim}" in message, message
        assert "killed or stopped, or its node is gone" in message
        others = set(range(world)) - {victim, rank}
        assert not any(f"from rank {other}" in message or f"{other}, which" in message for other in others), (
            message
        )
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("checkpoint/.metadata"))


def test_torchrun_ends_a_job_whose_rank_is_stopped(tmp_path: Path) -> None:
    """Its agent sees processes that end, and this one does not."""
    make_case(tmp_path / "source", scale=24)
    call = "sys.exit(convert(Path(sys.argv[1]), os.environ, 1, signal.SIGSTOP, 0.0))"
    script = tmp_path / "script.py"
    script.write_text(SETTINGS + WORK + call)
    job = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(script),
            tmp_path,
        ],
        env={**os.environ, "PYTHONPATH": str(REPO), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(tmp_path / "end0", 60)
        os.kill(int((tmp_path / "gone").read_text()), signal.SIGKILL)  # torchrun waits 30 s until it does so
        assert job.wait(60) == 1
    finally:
        job.kill()
    code, message = json.loads((tmp_path / "end0").read_text())
    assert code == StorageError.exit_code
    assert "no sign of life from rank 1: it was killed or stopped" in message


def _wait_for(path: Path, seconds: float) -> None:
    stop = time.monotonic() + seconds
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < stop, f"no {path}"
        time.sleep(0.05)


class _Store:
    """A store in this process."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, key: str, by: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + by
        return self.counts[key]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(waiting, "JOIN_SECONDS", 1.0)


def _until(condition: Any) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 10
        time.sleep(0.005)
    return time.monotonic() - begin


def test_a_rank_may_come_late_but_not_fall_silent(quick: None) -> None:
    store = _Store()
    line = Line(0, 3, store, "rank 0")
    store.add("beat/1", 1)
    assert _until(lambda: line.silent() == [1]) >= 0.15
    assert _until(lambda: line.silent() == [1, 2]) >= 0.4  # never came: waited for longer
    store.add("beat/1", 1)
    _until(lambda: line.silent() == [2])


def test_ranks_watch_rank_0_alone(quick: None) -> None:
    store = _Store()
    store.add("beat/0", 1)
    line = Line(2, 3, store, "rank 0")
    _until(lambda: line.silent() == [0])
    assert "beat/1" not in store.counts
    assert store.counts["beat/2"] > 5


def test_a_request_that_blocks_is_given_up_once(quick: None) -> None:
    line = Line(1, 2, _Store(), "rank 0, which keeps the store at h:1,")
    for longest in (5.0, 0.1):  # the second does not wait again
        begin = time.monotonic()
        with pytest.raises(
            StorageError, match=r"rank 0, which keeps the store at h:1, was killed or stopped"
        ):
            line.ask(lambda: time.sleep(1))
        assert time.monotonic() - begin < longest
