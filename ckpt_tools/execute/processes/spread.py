"""One function over many jobs, by threads of as many processes as help: how everything that only reads is shared."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from heapq import heapreplace
from mmap import mmap
from typing import TypeAlias, TypeVar

from ckpt_tools.errors import CkptError
from ckpt_tools.execute.processes.ranks import Ranks, ToldError, error_called, told_error
from ckpt_tools.execute.processes.workers import MOST_BY_DEFAULT, shared_out
from ckpt_tools.execute.write_job import WriteOptions
from ckpt_tools.formats.storage.prefetch import Range, reading_ahead

Job = TypeVar("Job")
Result = TypeVar("Result")

Reads: TypeAlias = Callable[[Job], Iterable[Range]]
"""The ranges of a store's files that a job reads, in order."""
Tick: TypeAlias = Callable[[int], None]
"""Told the bytes that were read since the last call; may raise to stop."""
_Failed: TypeAlias = tuple[int, ToldError]  # the number of a job, and what it has raised
_BATCH_BYTES = 8 << 20  # taken at a time, at least: some milliseconds of reading
_JOB_BYTES = 256 << 10  # as much as these takes what a job needs beside its bytes
_MOST_BATCHES = 1000  # their numbers fit one page, which is all that a pipe may have


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
    reads: Reads[Job] | None = None,
) -> Iterator[Callable[[], list[Result]]]:
    """Give the block a function that returns `work` of every job, in the order of `jobs`; call it once.

    The other processes have begun when the block does, so that it can do something else before. All take jobs from
    one queue: who begins late, or is slow, takes fewer.

    Args:
        work: given a job, and what to tell of the bytes it reads. It and what it returns are plain: a result may
            come from another process.
        sizes: the bytes that each job reads. Their sum decides the number of processes.
        workers: how many processes instead.
        tick: told what all processes have read, by this one, as long as it takes jobs itself and at the end.
        reads: what a job reads of stores, in order; None where no store is read.
    """
    with (
        closing(_Queue(sizes, workers)) as queue,
        shared_out(sum(sizes), WriteOptions(threads=threads, workers=workers), Ranks()) as (ranks, options),
    ):
        ahead = options.thread_memory(reads_store=True).ahead if reads is not None else 0

        def told(count: int) -> None:
            ranks.check()
            queue.add_read(ranks.rank, count)
            if ranks.rank == 0:
                tick(queue.newly_read())

        def share() -> tuple[dict[int, Result], _Failed | None]:
            found, errors = _by_threads(
                lambda job: work(job, told), jobs, queue.take, queue.empty, threads, reads, ahead
            )
            if not errors:
                return found, None
            first = min(errors)
            if ranks.world == 1 or not isinstance(errors[first], CkptError):
                raise errors[first]
            return {}, (first, told_error(errors[first]))

        def results() -> list[Result]:
            shares = ranks.gather(share)
            failed = [failure for _, failure in shares if failure is not None]
            if failed:
                _, (kind, text, problems) = min(failed)
                raise error_called(kind, text, problems)
            tick(queue.newly_read())
            found = {number: result for some, _ in shares for number, result in some.items()}
            return [found[number] for number in range(len(jobs))]

        if ranks.rank:
            ranks.gather(share)  # and this process ends with `shared_out`
        else:
            yield results


class _Queue:
    """The numbers of jobs, in order, as forked processes take them; and how many bytes those have read.

    A pipe that all inherit holds a number for each batch of jobs. Four bytes are read from it together or not at all,
    and its end is the end of the work.
    """

    def __init__(self, sizes: Sequence[int], workers: int | None) -> None:
        self._batches = _batches(sizes)
        self._pipe, filled = os.pipe()
        os.write(filled, b"".join(number.to_bytes(4, "little") for number in range(len(self._batches))))
        os.close(filled)
        self._shared = mmap(-1, 8 * max(MOST_BY_DEFAULT, workers or 0))
        self._read = memoryview(self._shared).cast("q")  # bytes, by rank
        self._told = 0
        self._lock = threading.Lock()

    def take(self) -> Iterator[int]:
        """Numbers of jobs that nobody else takes, until all are taken."""
        while number := os.read(self._pipe, 4):
            yield from self._batches[int.from_bytes(number, "little")]

    def empty(self) -> None:
        """Let nobody take any more; whoever has taken a job that stands before does it."""
        while os.read(self._pipe, 4096):
            pass

    def add_read(self, rank: int, count: int) -> None:
        with self._lock:
            self._read[rank] += count

    def newly_read(self) -> int:
        """Bytes read by all since the last call."""
        with self._lock:
            new = sum(self._read) - self._told
            self._told += new
        return new

    def close(self) -> None:
        os.close(self._pipe)
        self._read.release()
        self._shared.close()


def _batches(sizes: Sequence[int]) -> list[range]:
    """Jobs of these sizes in batches, in order, of about as much work; few enough for the smallest pipe."""
    least = max(_BATCH_BYTES, (sum(sizes) + len(sizes) * _JOB_BYTES) // _MOST_BATCHES)
    batches, first, nbytes = list[range](), 0, 0
    for number, size in enumerate(sizes):
        nbytes += size + _JOB_BYTES
        if nbytes >= least or number == len(sizes) - 1:
            batches.append(range(first, number + 1))
            first, nbytes = number + 1, 0
    return batches


def even_shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The numbers of jobs of these sizes in `count` shares, in order, that are about as large.

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

    def taken() -> Iterator[int]:
        with suppress(IndexError):  # nothing is left
            while True:
                yield left.popleft()

    found, errors = _by_threads(work, jobs, taken, left.clear, threads, reads, ahead_bytes)
    if errors:
        raise errors[min(errors)]
    return [found[number] for number in range(len(jobs))]


def _by_threads(
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    taken: Callable[[], Iterator[int]],
    empty: Callable[[], None],
    threads: int,
    reads: Reads[Job] | None,
    ahead_bytes: int,
) -> tuple[dict[int, Result], dict[int, BaseException]]:
    """`work` of the jobs whose numbers threads take from `taken`, by number; and what some have raised.

    `empty` is called when one has. Jobs are taken in order, so that all that stand before the first that fails are
    done.
    """
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def take() -> None:
        told = reads or (lambda _: ())
        with reading_ahead(taken(), lambda number: told(jobs[number]), ahead_bytes) as mine:
            for number in mine:
                if errors and number > min(errors):
                    return
                try:
                    results[number] = work(jobs[number])
                except BaseException as error:
                    errors[number] = error
                    empty()

    if jobs:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(take) for _ in range(threads)]:
                done.result()
    return results, errors
