"""One function over many jobs, by threads of as many processes as help: how everything that only reads is shared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from heapq import heapify, heapreplace
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
    """`work` of every job, in the order of `jobs`; the arguments and errors are those of `begun`."""
    with begun(work, jobs, sizes=sizes, threads=threads, workers=workers, tick=tick) as results:
        return results()


@contextmanager
def begun(
    work: Callable[[Job, Tick], Result],
    jobs: Sequence[Job],
    *,
    sizes: Sequence[int],
    threads: int,
    workers: int | None = None,
    tick: Tick,
    behind: int = 0,
) -> Iterator[Callable[[], list[Result]]]:
    """Give the block a function that returns `work` of every job, in the order of `jobs`; call it once.

    The other processes have begun when the block does, so that it can do something else before.

    Args:
        work: given a job, and what to tell of the bytes it reads. It and what it returns are plain: a result may
            come from another process.
        sizes: the bytes that each job reads. Their sum decides the number of processes, and each process gets jobs
            of about as many bytes.
        workers: how many processes instead.
        tick: told about how much has been read, by this process alone.
        behind: bytes that another process reads before this one begins; its share is less by as many, or half.

    Raises:
        What `work` raised for the first job that failed, in any process.
    """
    total = sum(sizes)
    with shared_out(total, WriteOptions(threads=threads, workers=workers), Ranks()) as (ranks, _):
        shares = even_shares(sizes, ranks.world, min(behind, total // (2 * ranks.world)))
        mine = shares[ranks.rank]
        own = max(1, sum(sizes[number] for number in mine))

        def told(count: int) -> None:
            ranks.check()
            if ranks.rank == 0:  # the others are about as far
                tick(count * total // own)

        def share() -> list[Result]:
            return _by_threads(lambda number: work(jobs[number], told), mine, threads)

        def results() -> list[Result]:
            found = dict(zip(chain(*shares), chain(*ranks.gather(share)), strict=True))
            return [found[number] for number in range(len(jobs))]

        if ranks.rank:
            ranks.gather(share)  # and this process ends with `shared_out`
        else:
            yield results


def even_shares(sizes: Sequence[int], count: int, less: int = 0) -> list[list[int]]:
    """The numbers of jobs of these sizes in `count` shares, in order: about as large, the first smaller by `less`.

    The largest job not yet given goes to who has least: the largest share exceeds the best possible one by less than
    a third.
    """
    if count == 1:
        return [list(range(len(sizes)))]
    shares = [list[int]() for _ in range(count)]
    least = [(less if rank == 0 else 0, rank) for rank in range(count)]
    heapify(least)
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
