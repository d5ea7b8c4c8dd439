"""One function over many jobs, by threads of as many processes as help: how everything that only reads is shared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from heapq import heapreplace
from itertools import chain
from typing import TypeAlias, TypeVar

from ckpt_tools.execute.ranks import Ranks
from ckpt_tools.execute.workers import shared_out
from ckpt_tools.execute.write_job import WriteOptions

Job = TypeVar("Job")
Result = TypeVar("Result")

Tick: TypeAlias = Callable[[int], None]
"""Told the bytes that were read since the last call; may raise to stop."""


def spread(
    work: Callable[[Job, Tick], Result],
    jobs: Sequence[Job],
    *,
    sizes: Sequence[int],
    threads: int,
    workers: int | None = None,
    tick: Tick,
) -> list[Result]:
    """`work` of every job, in the order of `jobs`.

    Args:
        work: given a job, and what to tell of the bytes it reads. It and what it returns are plain: a result may
            come from another process.
        sizes: the bytes that each job reads. Their sum decides the number of processes, and each process gets jobs
            of about as many bytes.
        workers: how many processes instead.
        tick: told about how much has been read, by this process alone.

    Raises:
        What `work` raised for the first job that failed, in any process.
    """
    with shared_out(sum(sizes), WriteOptions(threads=threads, workers=workers), Ranks()) as (ranks, _):

        def told(count: int) -> None:
            ranks.check()
            if ranks.rank == 0:  # the others are about as far
                tick(count * ranks.world)

        shares = even_shares(sizes, ranks.world)
        mine = [jobs[number] for number in shares[ranks.rank]]
        found = ranks.gather(lambda: _by_threads(lambda job: work(job, told), mine, threads))
    results = dict(zip(chain(*shares), chain(*found), strict=True))
    return [results[number] for number in range(len(jobs))]


def even_shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The numbers of jobs of these sizes in `count` shares about as large, each in order.

    The largest job not yet given goes to who has least: the largest share exceeds the best possible one by less than
    a third.
    """
    if count == 1:
        return [list(range(len(sizes)))]
    shares = [list[int]() for _ in range(count)]
    least = [(0, rank) for rank in range(count)]
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        size, rank = least[0]
        shares[rank].append(number)
        heapreplace(least, (size + sizes[number], rank))
    return [sorted(share) for share in shares]


def _by_threads(work: Callable[[Job], Result], jobs: Sequence[Job], threads: int) -> list[Result]:
    """`work` of every job, each taken by the next thread that is free: thousands of small ones cost little."""
    left = deque(range(len(jobs)))
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def take() -> None:
        with suppress(IndexError):  # nothing is left
            while True:
                number = left.popleft()
                try:
                    results[number] = work(jobs[number])
                except BaseException as error:
                    errors[number] = error
                    left.clear()

    with ThreadPoolExecutor(threads) as pool:
        try:
            for done in [pool.submit(take) for _ in range(threads)]:
                done.result()
        finally:
            left.clear()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(jobs))]
