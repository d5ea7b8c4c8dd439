"""One function over many jobs, by threads of as many processes as help: how everything that only reads is shared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from heapq import heapify, heapreplace
from itertools import chain
from typing import TypeAlias, TypeVar

from ckpt_tools.execute.ranks import Ranks
from ckpt_tools.execute.workers import shared_out
from ckpt_tools.execute.write_job import WriteOptions
from ckpt_tools.formats.read_ahead import Range, reading_ahead

Job = TypeVar("Job")
Result = TypeVar("Result")

Reads: TypeAlias = Callable[[Job], Iterable[Range]]
"""The ranges of a store's files that a job reads, in order."""
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
    reads: Reads[Job] | None = None,
) -> list[Result]:
    """`work` of every job, in the order of `jobs`; the arguments and errors are those of `begun`."""
    with begun(work, jobs, sizes=sizes, threads=threads, workers=workers, tick=tick, reads=reads) as results:
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
    reads: Reads[Job] | None = None,
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
        reads: what a job reads of stores, in order; None where no store is read.

    Raises:
        What `work` raised for the first job that failed, in any process.
    """
    total = sum(sizes)
    with shared_out(total, WriteOptions(threads=threads, workers=workers), Ranks()) as (ranks, options):
        ahead = options.thread_memory(reads_store=True).ahead if reads is not None else 0
        shares = even_shares(sizes, ranks.world, min(behind, total // (2 * ranks.world)))
        mine = shares[ranks.rank]
        bytes_here = max(1, sum(sizes[number] for number in mine))

        def told(count: int) -> None:
            ranks.check()
            if ranks.rank == 0:  # the others are about as far
                tick(count * total // bytes_here)

        def share() -> list[Result]:
            own = [jobs[number] for number in mine]
            return by_threads(lambda job: work(job, told), own, threads, reads, ahead)

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


def by_threads(
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    threads: int,
    reads: Reads[Job] | None = None,
    ahead_bytes: int = 0,
) -> list[Result]:
    """`work` of every job, each taken by the next thread that is free: thousands of small ones cost little.

    What `reads` says that a job reads of stores is on its way before, of each thread at most `ahead_bytes`.
    """
    left = deque(range(len(jobs)))
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def taken() -> Iterator[int]:
        with suppress(IndexError):  # nothing is left
            while True:
                yield left.popleft()

    def take() -> None:
        told = reads or (lambda _: ())
        with reading_ahead(taken(), lambda number: told(jobs[number]), ahead_bytes) as mine:
            for number in mine:
                if errors:
                    return
                try:
                    results[number] = work(jobs[number])
                except BaseException as error:
                    errors[number] = error
                    left.clear()

    if not jobs:
        return []
    with ThreadPoolExecutor(threads) as pool:
        try:
            for done in [pool.submit(take) for _ in range(threads)]:
                done.result()
        finally:
            left.clear()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(jobs))]
