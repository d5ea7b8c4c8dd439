"""Jobs shared out over threads and processes: each done once, shares about even, the first failure told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.execute.processes.team import Tick, _batches, even_shares, spread
from tests.conftest import REPO


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 20))
def test_shares_are_even_and_hold_every_job_once(sizes: list[int], count: int) -> None:
    shares = even_shares(sizes, count)
    assert len(shares) == count
    assert sorted(number for share in shares for number in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(sizes[number] for number in share) for share in shares]
    for share, load in zip(
        shares, loads, strict=True
    ):  # without its smallest job it is no longer than any other
        assert load - min((sizes[number] for number in share), default=0) <= min(loads)


def test_results_are_in_the_order_of_jobs() -> None:
    jobs = list(range(1000))
    read: list[int] = []

    def work(job: int, tick: Tick) -> str:
        tick(job)
        return str(job)

    found = spread(work, jobs, sizes=jobs, threads=3, workers=1, tick=read.append)
    assert found == list(map(str, jobs))
    assert sum(read) == sum(jobs)
    assert spread(work, [], sizes=[], threads=3, workers=1, tick=read.append) == []


def test_the_first_job_that_fails_is_told_and_the_rest_left() -> None:
    done: list[int] = []

    def work(job: int, _: Tick) -> None:
        done.append(job)
        if job >= 40:
            raise ValueError(job)

    with pytest.raises(ValueError, match=r"^40$"):
        spread(work, range(10_000), sizes=[1] * 10_000, threads=4, workers=1, tick=lambda _: None)
    assert set(range(41)) <= set(done) and len(done) < 100


def test_workers_give_what_one_process_gives() -> None:
    """In another process, because one with threads, as pytest's may be, is not forked."""
    script = """
import os, time
from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.execute.processes.team import spread

def work(job, tick):
    tick(job)
    time.sleep(0.005)  # the others need as long to begin
    if job in bad:
        raise CorruptCheckpointError(f"job {job} is bad")
    return job * job, os.getpid()

bad, jobs = (), list(range(200))
found = spread(work, jobs, sizes=jobs, threads=2, workers=3, tick=lambda _: None)
assert [square for square, _ in found] == [job * job for job in jobs]
assert len({process for _, process in found}) == 3
bad = range(60, 200)  # which the processes meet at one time
for _ in range(5):
    try:
        spread(work, jobs, sizes=jobs, threads=2, workers=3, tick=lambda _: None)
    except CorruptCheckpointError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("job 60 is bad\n" * 5, "")


@given(st.lists(st.integers(0, 1 << 40), max_size=3000))
def test_batches_hold_every_job_once_and_fit_a_page(sizes: list[int]) -> None:
    batches = _batches(sizes)
    assert [number for batch in batches for number in batch] == list(range(len(sizes)))
    assert len(batches) * 4 <= 4096
    alone = _batches([1 << 40] * 3000)
    assert len(alone) == 1000, "three each"


def test_other_processes_have_begun_when_the_block_does(tmp_path: Path) -> None:
    """And end with it, whatever ends it; what all have read is told. Who begins late finds little left."""
    script = """
import os, sys, time
from pathlib import Path
from ckpt_tools.execute.processes.team import start_jobs
here, place = os.getpid(), Path(sys.argv[1])

def work(job, tick):
    if os.getpid() != here:
        (place / f"{job}").touch()
    tick(10)
    return job

told = []
with start_jobs(work, range(100), sizes=[10] * 100, threads=1, workers=2, tick=told.append) as results:
    while len(list(place.iterdir())) < 100:
        time.sleep(0.01)
    assert results() == list(range(100))
assert sum(told) == 1000, sum(told)
try:
    with start_jobs(work, range(100), sizes=[10] * 100, threads=1, workers=2, tick=told.append):
        raise KeyError("the block")
except KeyError:
    print("left")
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("alone")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\nalone\n", "")
