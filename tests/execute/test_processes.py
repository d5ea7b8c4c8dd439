"""Forked workers and the ranks of a launcher: the same bytes as one process, one verdict, nobody left behind."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.cli.app import _explain
from ckpt_tools.cores import usable_cores
from ckpt_tools.errors import Interrupted, MappingError, StorageError
from ckpt_tools.execute.processes.ranks import joined_error, serialize_error
from ckpt_tools.execute.processes.team import (
    Tick,
    _batches,
    default_workers,
    even_shares,
    results_of,
    start_jobs,
)
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from tests.conftest import REPO
from tests.execute.conftest import make_case
from tests.execute.converter import Order, wait_until
from tests.execute.test_run import tree


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, str]:
    """The output of one process, with three target ranks."""
    case = make_case(tmp_path / "source", scale=24)
    write_checkpoint(case.plan(3), case.files, Output(tmp_path / "one"))
    return tree(tmp_path / "one")


def partial(folder: Path) -> Path:
    return folder / ".out.ckpt_tools-partial"


@pytest.mark.parametrize(("world", "workers"), [(2, 1), (4, 1), (1, 2), (1, 5), (2, 2), (2, 3)])
def test_any_number_of_processes_writes_the_same(converters, tmp_path, expected, world, workers):
    ends = converters.run(Order(str(tmp_path), parts=3, world=world, workers=workers))
    assert len(ends) == world and {end.ranks for end in ends} == {world * workers}, ends
    assert tree(tmp_path / "out") == expected
    assert sorted((tmp_path / "left").read_text().split()) == [
        str(rank) for rank in range(0, world * workers, workers)
    ], "workers end inside"


def test_one_job_converts_one_checkpoint_after_another(converters, tmp_path, expected):
    """As `--iteration all` does: what was said of the first must not be taken for the second's."""
    ends = converters.run(Order(str(tmp_path), world=2, fault="twice"))
    assert [end.status for end in ends] == [0, 0]
    assert tree(tmp_path / "first") == expected
    assert len(tree(tmp_path / "out")) == len(expected) - 1


@pytest.mark.parametrize(
    ("fault", "processes", "code", "says"),
    [
        ("fail", {"world": 2}, 7, "rank 1: the disk of this rank is on fire"),
        ("fail", {"world": 2, "workers": 2, "victim": 3}, 7, "rank 1: the disk of this rank is on fire"),
        ("kill", {"world": 2, "workers": 2, "victim": 3}, 7, "rank 1: worker 1 (process "),
        ("plan", {"world": 2}, 2, "the ranks were asked for different things: plan is "),
        ("elsewhere", {"world": 2}, 2, "rank 1: the ranks do not see one output folder"),
        ("defect", {"workers": 3}, 70, "in a worker:\nTraceback"),
        ("damage", {"workers": 3}, 4, "as seen by worker 1 | in one place | in another"),
        ("kill", {"workers": 3}, 7, "worker 1 (process "),
        ("stop", {"workers": 3}, 7, "it was stopped (SIGSTOP)"),
        ("limit", {"workers": 4}, 7, "starts no more than 2 processes (Resource temporarily unavailable)"),
    ],
)  # fmt: skip
def test_a_failure_of_one_is_that_of_all(converters, tmp_path, expected, fault, processes, code, says):
    ends = converters.run(Order(str(tmp_path), parts=3, fault=fault, **{"victim": 1} | processes))
    assert all(end.status == code and says in end.message for end in ends), ends
    assert not (tmp_path / "out").exists() and not list(tmp_path.rglob("checkpoint/.metadata"))
    assert partial(tmp_path).exists() == (fault not in ("damage", "plan", "limit"))
    if fault in ("kill", "stop"):
        assert "--resume" in ends[0].message
        (end,) = converters.run(
            Order(str(tmp_path), parts=3, workers=2, resume=True)
        )  # another number goes on
        assert end.status == 0 and tree(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("environ", "processes"),
    [({}, [2]), ({"LOCAL_WORLD_SIZE": "1"}, [6, 6]), ({"LOCAL_WORLD_SIZE": "2"}, [2, 2])],
)
def test_one_process_a_node_forks_as_many_as_its_node_starts(
    converters, tmp_path, expected, environ, processes
):
    """Fewer than would help, two on the first node and four on the second."""
    order = Order(str(tmp_path), parts=3, world=len(processes), workers=None, fault="limit")
    if environ:
        order = replace(order, environ=environ | TORCHRUN)
    assert [end.ranks for end in converters.run(order)] == processes
    assert tree(tmp_path / "out") == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_to_the_first_process_ends_all(converters, tmp_path, number, code):
    make_case(tmp_path / "source")
    (pid,) = converters.start(Order(str(tmp_path), workers=3, fault="slow"))
    wait_until((tmp_path / "busy").exists)
    os.kill(pid, number)
    assert converters.wait()[0].status == code
    assert not (tmp_path / "out").exists() and partial(tmp_path).exists()


TORCHRUN = {"RANK": "RANK", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
SRUN = {
    "SLURM_PROCID": "RANK", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "workers", "victim", "fault", "environ"),
    [(2, 1, 1, "stop", None), (2, 2, 1, "stop", None), (2, 1, 0, "kill", None), (4, 1, 3, "kill", SRUN)],
)
def test_ranks_that_fall_silent_are_named(converters, tmp_path, world, workers, victim, fault, environ):
    """With nobody to tell that they were killed or stopped."""
    make_case(tmp_path / "source", scale=24)
    order = Order(
        str(tmp_path),
        world=world,
        workers=workers,
        victim=victim * workers,
        fault=fault,
        environ=environ,
        parts=4,
    )
    for rank, end in enumerate(converters.run(order)):
        if rank != victim:
            assert end.status == StorageError.exit_code
            assert f"rank {victim}" in end.message and "killed or stopped, or its node is gone" in end.message
            others = set(range(world)) - {victim, rank}
            assert not any(f"rank {other}," in end.message for other in others), end
    assert not (tmp_path / "out").exists() and not list(tmp_path.rglob("checkpoint/.metadata"))


def test_torchrun_ends_a_job_whose_rank_is_stopped(tmp_path):
    """Its agent sees processes that end, and this one does not."""
    make_case(tmp_path / "source", scale=24)
    order = json.dumps(asdict(Order(str(tmp_path), victim=1, fault="stop")))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = subprocess.Popen(
        [*launcher, "-m", "tests.execute.converter", order],
        env={**os.environ, "PYTHONPATH": str(REPO), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until((tmp_path / "end0").exists, 60)
        os.kill(int((tmp_path / "gone").read_text()), signal.SIGKILL)  # torchrun waits 30 s until it does so
        assert job.wait(60) == 1
    finally:
        job.kill()
    code, message, *_ = json.loads((tmp_path / "end0").read_text())
    assert code == StorageError.exit_code
    assert "rank 1: no sign of life: it was killed or stopped" in message


def test_errors_of_several_are_joined():
    errors = [MappingError("a", ["x", "y"]), MappingError("b", ["y"]), MappingError("c")]
    joined = joined_error(dict(enumerate(map(serialize_error, errors))), [0, 1, 2])
    assert isinstance(joined, MappingError)
    assert (str(joined), joined.told_problems) == ("rank 0: a\nrank 1: b\nrank 2: c", ("x", "y", "c"))
    alone = joined_error({2: serialize_error(errors[2])}, ())
    assert isinstance(alone, MappingError)
    assert (str(alone), alone.told_problems) == ("c", ())
    stopped = joined_error(dict.fromkeys((0, 1), serialize_error(KeyboardInterrupt())), ())
    assert (type(stopped), str(stopped)) == (Interrupted, "interrupted.")


@pytest.mark.parametrize("where", ["", "in a worker:\n"])
def test_threads_that_cannot_be_started_are_not_a_defect(where, capsys):
    assert _explain(RuntimeError(f"{where}can't start new thread")) == 7
    assert "the system starts no more threads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gib", "threads", "memory_mib", "cores", "workers"),
    [
        (8, 2, 96, 32, 16),
        (8, 2, 96, 16, 8),
        (1, 2, 96, 32, 4),  # by bytes
        (8, 2, 24, 32, 4),  # by memory
        (8, 2, 1, 32, 1),
        (8, 2, 96, 1, 1),
        (0, 2, 96, 32, 1),
        (8, 64, 96, 32, 1),
    ],
)
def test_workers_by_default(gib, threads, memory_mib, cores, workers):
    options = WriteOptions(threads=threads, memory_bytes=memory_mib << 20)
    assert default_workers(gib << 30, options, cores) == workers


@pytest.mark.parametrize(
    ("text", "least"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("x y z", None)]
)
def test_a_control_groups_quota_counts(tmp_path, text, least):
    (tmp_path / "cpu.max").write_text(text)
    everything = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path / "cpu.max") == (everything if least is None else least)
    assert usable_cores(tmp_path / "absent") == everything


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 20))
def test_shares_are_even_and_hold_every_job_once(sizes, count):
    shares = even_shares(sizes, count)
    assert len(shares) == count
    assert sorted(number for share in shares for number in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(sizes[number] for number in share) for share in shares]
    for share, load in zip(shares, loads, strict=True):  # without its smallest job no longer than any other
        assert load - min((sizes[number] for number in share), default=0) <= min(loads)


@given(st.lists(st.integers(0, 1 << 40), max_size=3000))
def test_batches_hold_every_job_once_and_fit_a_page(sizes):
    batches = _batches(sizes)
    assert [number for batch in batches for number in batch] == list(range(len(sizes)))
    assert len(batches) * 4 <= 4096
    assert len(_batches([1 << 40] * 3000)) == 1000, "three each"


def test_results_are_in_the_order_of_jobs_and_the_first_failure_is_raised():
    jobs = list(range(1000))
    read: list[int] = []
    done: list[int] = []

    def work(job: int, tick: Tick) -> str:
        tick(job)
        return str(job)

    def failing(job: int, _: Tick) -> None:
        done.append(job)
        if job >= 40:
            raise ValueError(job)

    assert results_of(start_jobs(work, jobs, sizes=jobs, threads=3, workers=1, tick=read.append)) == [
        *map(str, jobs)
    ]
    assert sum(read) == sum(jobs)
    assert results_of(start_jobs(work, [], sizes=[], threads=3, workers=1, tick=read.append)) == []
    with pytest.raises(ValueError, match=r"^40$"):
        results_of(start_jobs(failing, jobs, sizes=[1 << 20] * 1000, threads=4, workers=1, tick=read.append))
    assert set(range(41)) <= set(done) and len(done) < 100


# In another process, because one with threads, as pytest's may be, is not forked.
JOBS = """
import os, sys, time
from pathlib import Path
from typing import Any
from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.execute.processes.team import results_of, start_jobs
here, place, bad, told = os.getpid(), Path(sys.argv[1]), (), []

def work(job, tick):
    if os.getpid() != here:
        (place / f"{job}").touch()
    tick(10)
    time.sleep(0.002)  # the others need as long to begin
    if job in bad:
        raise CorruptCheckpointError(f"job {job} is bad")
    return job * job, os.getpid()

def started(workers):
    return start_jobs(work, range(200), sizes=[10] * 200, threads=2, workers=workers, tick=told.append)

results = results_of(started(3))
assert [square for square, _ in results] == [job * job for job in range(200)]
assert len({process for _, process in results}) == 3 and sum(told) == 2000
bad = range(60, 200)  # which the processes meet at one time
for _ in range(3):
    try:
        results_of(started(3))
    except CorruptCheckpointError as error:
        print(error)
bad = ()
for path in place.iterdir():
    path.unlink()
with started(2) as results:  # the other process has begun, who begins late finds little left
    while len(list(place.iterdir())) < 200:
        time.sleep(0.01)
    assert [square for square, _ in results()] == [job * job for job in range(200)]
try:
    with started(2):
        raise KeyError("the block")
except KeyError:
    print("left")
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("alone")
"""


def test_workers_give_what_one_process_gives_and_end_with_the_block(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", JOBS, str(tmp_path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("job 60 is bad\n" * 3 + "left\nalone\n", "")
