"""Forked workers: the same bytes as one process, one verdict, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt_tools.cli.app import _explain
from ckpt_tools.cores import usable_cores
from ckpt_tools.errors import Interrupted, MappingError, UsageError
from ckpt_tools.execute.processes.ranks import Ranks, _joined, all_problems, serialize_error
from ckpt_tools.execute.processes.team import _error_of, default_workers, with_workers
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from tests.conftest import REPO
from tests.execute.conftest import make_case
from tests.execute.test_run import tree

SCRIPT = """
import os, sys, time
from pathlib import Path
from ckpt_tools.errors import CkptError, CorruptCheckpointError
from ckpt_tools.execute.move import stream
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.execute.processes import team as workers_module
from ckpt_tools.execute.processes.team import with_workers
from tests.execute.conftest import reopened_case

here, out, workers, fault = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
case = reopened_case(here / "source")
plan = case.plan(3)
options = WriteOptions(workers=workers, threads=1, memory_bytes=12 << 20)
real = stream.Pump.write_item

def slowly(pump, item, file):
    (here / "busy").touch()
    for _ in range(600):
        pump._tick(0)
        time.sleep(0.05)

faults = {"defect": lambda *args: 1 / 0, "killed": lambda *args: os.kill(os.getpid(), 9), "slow": slowly}

def refused(*args):
    raise CorruptCheckpointError("as found by worker 1", ["in one place", "in another"])

faults["damage"] = refused
faults["stopped"] = lambda *args: os.kill(os.getpid(), 19)
workers_module._STOPPED_LOOKS = 5
forks = os.fork
if fault.startswith("limit"):
    left = [1]

    def fork():
        if not left:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        left.pop()
        return forks()

    os.fork = fork
    if fault == "limit by default":
        workers_module.default_workers = lambda *words: workers
        options = WriteOptions(threads=1, memory_bytes=12 << 20)
try:
    with with_workers(plan.bytes_to_write, options, Ranks()) as (ranks, write):
        if fault in faults and (ranks.rank == 1 or fault == "slow"):
            stream.Pump.write_item = stream.Pump.write_batch = faults[fault]
        place = Output(out, resume=fault == "resume")
        report = write_checkpoint(plan, case.files, place, write, ranks=ranks)
        assert report.ranks == (2 if fault == "limit by default" else workers)
        if ranks.rank == 0:
            print(report.items_resumed)
except CkptError as error:
    print(error, *error.told_problems, sep=" | ")
    sys.exit(error.exit_code)
print("left by", ranks.rank)
"""


def start(folder: Path, out: Path, workers: int, fault: str = "") -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SCRIPT, str(folder), str(out), str(workers), fault]
    return subprocess.Popen(
        words,
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; no process of its session is left."""
    out, err = process.communicate(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return process.returncode, out, err


def partial(out: Path) -> Path:
    return out.parent / f".{out.name}.ckpt_tools-partial"


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, str]:
    case = make_case(tmp_path / "source")
    write_checkpoint(case.plan(3), case.files, Output(tmp_path / "one"))
    return tree(tmp_path / "one")


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers_writes_the_same(
    tmp_path: Path, expected: dict[str, str], workers: int
) -> None:
    code, out, err = ended(start(tmp_path, tmp_path / "out", workers))
    assert (code, out, err) == (0, "0\nleft by 0\n", "")
    assert tree(tmp_path / "out") == expected


def test_the_error_of_a_worker_is_that_of_the_command(tmp_path: Path) -> None:
    make_case(tmp_path / "source")
    code, out, err = ended(start(tmp_path, tmp_path / "out", 3, "damage"))
    assert (code, out, err) == (4, "as found by worker 1 | in one place | in another\n", "")
    assert not (tmp_path / "out").exists() and not partial(tmp_path / "out").exists()


def test_a_defect_in_a_worker_shows_where_it_is(tmp_path: Path) -> None:
    make_case(tmp_path / "source")
    code, _, err = ended(start(tmp_path, tmp_path / "out", 3, "defect"))
    assert code == 1 and "in a worker" in err and "ZeroDivisionError" in err
    assert not (tmp_path / "out").exists()


def test_a_killed_worker_is_named_and_another_number_goes_on(
    tmp_path: Path, expected: dict[str, str]
) -> None:
    code, out, _ = ended(start(tmp_path, tmp_path / "out", 3, "killed"))
    assert code == 7 and "worker 1 (process " in out and "--resume" in out
    assert not (tmp_path / "out").exists() and partial(tmp_path / "out").exists()
    code, out, _ = ended(start(tmp_path, tmp_path / "out", 2, "resume"))
    assert code == 0 and tree(tmp_path / "out") == expected


def test_a_stopped_worker_is_named_and_ended(tmp_path: Path, expected: dict[str, str]) -> None:
    code, out, _ = ended(start(tmp_path, tmp_path / "out", 3, "stopped"))
    assert code == 7 and "worker 1 (process " in out and "it was stopped (SIGSTOP)" in out
    code, out, _ = ended(start(tmp_path, tmp_path / "out", 2, "resume"))
    assert code == 0 and tree(tmp_path / "out") == expected


def test_where_processes_are_limited_fewer_write_the_same(tmp_path: Path, expected: dict[str, str]) -> None:
    code, out, err = ended(start(tmp_path, tmp_path / "out", 4, "limit by default"))
    assert (code, out, err) == (0, "0\nleft by 0\n", "")
    assert tree(tmp_path / "out") == expected
    code, out, err = ended(start(tmp_path, tmp_path / "other", 4, "limit"))
    assert code == 7, err
    assert "--workers 4: the system starts no more than 2 processes (Resource temporarily unavailable)" in out
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("where", ["", "in a worker:\n"])
def test_threads_that_cannot_be_started_are_not_a_defect(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _explain(RuntimeError(f"{where}can't start new thread")) == 7
    assert "the system starts no more threads" in capsys.readouterr().err


def test_problems_of_several_are_listed_once() -> None:
    told = [
        serialize_error(MappingError("a", ["x", "y"])),
        serialize_error(MappingError("b", ["y"])),
        serialize_error(MappingError("c")),
    ]
    assert all_problems(told) == ("x", "y", "c")
    assert all_problems(told[2:]) == ()
    assert _joined(dict(enumerate(told))).problems == ("x", "y", "c")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_signal_to_the_first_process_ends_all(tmp_path: Path, number: signal.Signals, code: int) -> None:
    make_case(tmp_path / "source")
    process = start(tmp_path, tmp_path / "out", 3, "slow")
    while not (tmp_path / "busy").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    process.wait(30)
    process.communicate(timeout=30)  # ends when the last one that holds stdout does
    assert process.returncode == code
    assert not (tmp_path / "out").exists() and partial(tmp_path / "out").exists()


def test_workers_are_refused_beside_a_launcher_and_beside_threads() -> None:
    class Two(Ranks):
        world = 2

    with (
        pytest.raises(UsageError, match="launcher has started 2"),
        with_workers(1, WriteOptions(workers=2), Two()),
    ):
        pass


@pytest.mark.parametrize(
    ("gib", "threads", "memory_mib", "cores", "workers"),
    [
        (8, 2, 96, 32, 16),
        (8, 2, 96, 16, 8),
        (8, 1, 96, 16, 16),
        (1, 2, 96, 32, 4),  # by bytes
        (8, 2, 24, 32, 4),  # by memory
        (8, 2, 1, 32, 1),
        (8, 2, 96, 2, 1),
        (8, 2, 96, 1, 1),
        (0, 2, 96, 32, 1),
        (8, 64, 96, 32, 1),
    ],
)
def test_workers_by_default(gib: int, threads: int, memory_mib: int, cores: int, workers: int) -> None:
    options = WriteOptions(threads=threads, memory_bytes=memory_mib << 20)
    assert default_workers(gib << 30, options, cores) == workers


@pytest.mark.parametrize(
    ("text", "least"),
    [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("", None), ("x y z", None)],
)
def test_a_control_groups_quota_counts(tmp_path: Path, text: str, least: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    everything = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path / "cpu.max") == (everything if least is None else least)
    assert usable_cores(tmp_path / "absent") == everything


def test_an_interrupted_worker_is_told_of_in_words() -> None:
    found = _error_of([serialize_error(KeyboardInterrupt()), serialize_error(KeyboardInterrupt())])
    assert type(found) is Interrupted
    assert str(found) == "interrupted."
