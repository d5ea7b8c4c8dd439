"""One function over many jobs, by threads of as many processes as help: how everything that only reads is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from ckpt_tools.execute.ranks import Ranks
from ckpt_tools.execute.workers import shared_out
from ckpt_tools.execute.write_job import WriteOptions

Job = TypeVar("Job")
Result = TypeVar("Result")

Tick: TypeAlias = Callable[[int], None]
"""Told the bytes that were read since the last call; may raise to stop."""

_MOST_AHEAD = 256  # jobs handed to the threads of a process before their results are taken


def spread(
    work: Callable[[Job, Tick], Result],
    jobs: Sequence[Job],
    *,
    nbytes: int,
    threads: int,
    workers: int | None = None,
    tick: Tick,
) -> list[Result]:
    """`work` of every job, in the order of `jobs`.

    Args:
        work: given a job, and what to tell of the bytes it reads. It and what it returns are plain: a result may
            come from another process.
        nbytes: how much there is to read in all, which decides the number of processes.
        workers: how many processes instead.
        tick: told about how much has been read, by this process alone.

    Raises:
        What `work` raised first, in any process.
    """
    with shared_out(nbytes, WriteOptions(threads=threads, workers=workers), Ranks()) as (ranks, _):

        def told(count: int) -> None:
            ranks.check()
            if ranks.rank == 0:  # the others are about as far
                tick(count * ranks.world)

        mine = jobs[ranks.rank :: ranks.world]
        shares = ranks.together(lambda: list(_by_threads(lambda job: work(job, told), mine, threads)))
    return [shares[number % len(shares)][number // len(shares)] for number in range(len(jobs))]


def _by_threads(work: Callable[[Job], Result], jobs: Sequence[Job], threads: int) -> Iterator[Result]:
    with ThreadPoolExecutor(threads) as pool:
        try:
            for first in range(0, len(jobs), _MOST_AHEAD):
                yield from pool.map(work, jobs[first : first + _MOST_AHEAD])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
