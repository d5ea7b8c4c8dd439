"""Work shared by threads and forked processes of one machine, without a launcher or in each rank of one.

Threads of one Python process hold each other up long before a machine's memory does, so a large conversion is shared
by processes. They are forked from the one that has made the plan, before it starts a thread: a worker costs some
milliseconds, and the plan is not made again. Where the system starts fewer processes than would help, those that
there are do the work, unless a number was asked for. How they agree is in `ranks`.

`start_jobs` runs one function over many jobs, by threads of as many processes as help: all that only reads uses it.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from heapq import heapreplace
from mmap import mmap
from pathlib import Path
from typing import TypeAlias, TypeVar

from ckpt_tools.cores import usable_cores
from ckpt_tools.errors import CkptError, StorageError, UsageError
from ckpt_tools.execute.processes.lines import Line
from ckpt_tools.execute.processes.meeting import shares_its_node
from ckpt_tools.execute.processes.ranks import Ranks, SerializedError, error_called, serialize_error
from ckpt_tools.execute.write_job import WriteOptions
from ckpt_tools.formats.storage.io_pool import BYSTANDERS, connections_of, rest
from ckpt_tools.formats.storage.object_store import S3
from ckpt_tools.formats.storage.prefetch import Range, reading_ahead

_WORTH_BYTES = 256 << 20  # a worker's least share: moving less takes no longer than forking and agreeing
MOST_BY_DEFAULT = 16  # beyond, one machine's memory is busy (measured on 16 and 32 cores)


def default_workers(nbytes: int, options: WriteOptions, cores: int) -> int:
    """How many processes move `nbytes` fastest on so many cores, with room for buffers of a MiB in each thread."""
    most = min(cores // options.threads, MOST_BY_DEFAULT, nbytes // _WORTH_BYTES)
    if options.memory_bytes is not None:
        most = min(most, options.memory_bytes // (3 * options.threads << 20))
    return max(1, most)


@contextmanager
def with_workers(
    nbytes: int, options: WriteOptions, ranks: Ranks, output: Path | str | None = None
) -> Iterator[tuple[Ranks, WriteOptions]]:
    """The ranks that move `nbytes`, and the options of each: those given, with workers that each of them forks."""
    workers = options.workers
    scheme = output.partition("://")[0].lower() if isinstance(output, str) else ""
    in_one = scheme not in ("", *S3)
    if workers is None:
        may_fork = not in_one and not shares_its_node() and is_alone()
        workers = default_workers(nbytes // ranks.world, options, usable_cores()) if may_fork else 1
    elif workers > 1 and in_one:
        raise UsageError(
            f"--workers {workers}: the driver of {scheme}:// works in one process. Leave --workers out, or start "
            "several processes with a launcher"
        )
    elif workers > 1 and not can_fork():
        raise UsageError(
            f"--workers {workers}: other threads run in this process, which cannot be forked then (drivers of stores "
            "other than s3:// keep some). Leave --workers out"
        )
    if workers == ranks.world == 1:
        yield ranks, replace(options, workers=1)
        return
    with (
        forked(workers, ranks, allow_fewer=options.workers is None) as (all_ranks, here),
        connections_of(here),
    ):
        yield all_ranks, replace(options, workers=here)


def can_fork() -> bool:
    """Whether no other Python thread runs: a fork copies none of them, but the locks they hold.

    Those that wait for stores are ended for it.
    """
    rest()
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and threading.active_count() == 1 + len(BYSTANDERS)


def is_alone() -> bool:
    """Whether no thread of a C library runs either: who asks for workers may know that it outlives a fork."""
    return can_fork() and len(os.listdir("/proc/self/task")) == 1 + len(BYSTANDERS)


@contextmanager
def forked(workers: int, ranks: Ranks, allow_fewer: bool = False) -> Iterator[tuple[Ranks, int]]:
    """Run the block in this process and in `workers` - 1 copies of it; only this one leaves it.

    The other `ranks` do the same, each with its own number. The block gets all of them, and how many run here.
    Whatever ends the block here ends it in the copies: they meet a closed line.
    """
    lines: list[Line] = []
    problem: StorageError | None = None
    up = None
    try:
        try:
            up = _fork(workers, lines, allow_fewer)
        except StorageError as error:
            problem = error

        def number() -> int:
            if problem is not None:
                raise problem
            return 1 + len(lines)

        if up is not None:
            with suppress(BaseException):  # `together` reports it, or who has forked it finds a closed line
                yield Ranks.of_worker(up)
            os._exit(0)
        yield ranks.with_workers(ranks.together(number), lines), 1 + len(lines)
    finally:
        for line in lines:
            line.close()
        for line in lines:
            with suppress(ChildProcessError):  # reaped by somebody's SIGCHLD handler
                os.waitpid(line.pid or 0, 0)


def _fork(workers: int, lines: list[Line], allow_fewer: bool) -> Line | None:
    """In each copy its line to this process, which adds its own to `lines`."""
    gc.freeze()  # what is there stays shared: a collection, in a copy for all its life, would touch every page
    for started in range(1, workers):
        ours, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: `can_fork` has looked
            try:
                pid = os.fork()
            except OSError as error:  # of processes or of memory there are no more
                gc.unfreeze()
                theirs.close()
                ours.close()
                if allow_fewer:
                    return None
                raise StorageError(
                    f"--workers {workers}: the system starts no more than {started} processes ({error.strerror}). "
                    "Ask for fewer, or see `ulimit -u` and the control group's pids.max"
                ) from error
        if pid == 0:
            ours.close()
            for line in lines:  # or nobody would notice that this process's parent has closed them
                line.close()
            lines.clear()
            return Line(theirs, is_local=True)
        theirs.close()
        lines.append(Line(ours, is_local=True, pid=pid))
    gc.unfreeze()
    return None


Job = TypeVar("Job")
Result = TypeVar("Result")

Reads: TypeAlias = Callable[[Job], Iterable[Range]]
"""The ranges of a store's files that a job reads, in order."""
Tick: TypeAlias = Callable[[int], None]
"""Told the bytes that were read since the last call; may raise to stop."""
_Failed: TypeAlias = tuple[int, SerializedError]  # the number of a job, and what it has raised
_BATCH_BYTES = 8 << 20  # taken at a time, at least: some milliseconds of reading
_JOB_BYTES = 256 << 10  # as much as these takes what a job needs besides its bytes
_MOST_BATCHES = 1000  # their numbers fit one page, which is all that a pipe may have


def results_of(started: AbstractContextManager[Callable[[], list[Result]]]) -> list[Result]:
    """The results of `start_jobs`, where there is nothing else to do meanwhile."""
    with started as results:
        return results()


@contextmanager
def start_jobs(
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

    The other processes have started when the block does, so that it can do something else before. All take jobs from
    one queue: who begins late, or is slow, takes fewer.

    Args:
        work: given a job, and what to tell of the bytes it reads. It and what it returns are plain: a result may
            come from another process.
        sizes: the bytes that each job reads. Their sum decides the number of processes.
        workers: how many processes instead.
        tick: called with what all processes have read, by this one, as long as it takes jobs itself and at the end.
        reads: what a job reads of stores, in order; None where no store is read.
    """
    with (
        closing(_Queue(sizes, workers)) as queue,
        with_workers(sum(sizes), WriteOptions(threads=threads, workers=workers), Ranks()) as (ranks, options),
    ):
        ahead = options.thread_memory(reads_store=True).ahead if reads is not None else 0

        def count_read(count: int) -> None:
            ranks.check()
            queue.add_read(ranks.rank, count)
            if ranks.rank == 0:
                tick(queue.newly_read())

        def share() -> tuple[dict[int, Result], _Failed | None]:
            found, errors = _by_threads(
                lambda job: work(job, count_read), jobs, queue.take, queue.empty, threads, reads, ahead
            )
            if not errors:
                return found, None
            first = min(errors)
            if ranks.world == 1 or not isinstance(errors[first], CkptError):
                raise errors[first]
            return {}, (first, serialize_error(errors[first]))

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
            ranks.gather(share)  # and this process ends with `with_workers`
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
        """Let nobody take any more; a thread that has taken an earlier job still does it."""
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
    """`work` of the jobs that threads take from `taken`, by number; and the errors that jobs have raised.

    `empty` is called when one has. Jobs are taken in order, so that all before the first that fails are
    done.
    """
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def take() -> None:
        ranges = reads or (lambda _: ())
        with reading_ahead(taken(), lambda number: ranges(jobs[number]), ahead_bytes) as mine:
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
