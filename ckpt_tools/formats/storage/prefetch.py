"""Prefetching: ranges of a store's files that a thread will read are requested before it reads them.

A request takes 20-50 ms whatever its size, and up to a millisecond of this machine's work. So neighbouring ranges of
what is to be read become one request of up to 8 MiB, and some are under way while the thread works on earlier ones.
Prefetching is only a hint: a range that was not announced is read when it is needed, and one that is announced but
never read is dropped with its job.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Generic, NamedTuple, Protocol, TypeVar

from ckpt_tools.errors import CkptError
from ckpt_tools.formats.storage.io_pool import pool

REQUEST_BYTES = 8 << 20  # more does not make a connection faster
_ROUNDS = 3  # that the memory is for: one is read while two are on their way
_GAP_BYTES = 64 << 10  # fetched in vain rather than asked for one more time
_JOB_BYTES = 64 << 10  # a job counts for at least so many: those ahead are not for other threads any more

Job = TypeVar("Job")
_of_thread = threading.local()


class Fetching(Protocol):
    """A folder with files that are fetched by requests."""

    def size(self, name: str) -> int:
        """Bytes of a file."""

    def fetch_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` of a file by one request, in any thread."""


class Range(NamedTuple):
    """Bytes [start, stop) of a file, to be read once."""

    files: Fetching
    name: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class _Request:
    """A range on its way; `left` bytes of it are still to be read, the last of them by job number `job`."""

    def __init__(self, first: Range, job: int) -> None:
        self.range, self.left, self.job = first, first.nbytes, job
        self.data = memoryview(b"")
        self.answer: Future[None]

    def send(self) -> None:
        import numpy as np  # memory that is not filled with zeros first

        files, name, start, _ = self.range
        self.data = np.empty(self.range.nbytes, np.uint8).data
        self.answer = pool().submit(files.fetch_into, name, start, self.data)

    def joins(self, more: Range) -> bool:
        """Whether a range that begins no earlier than this one becomes a part of it."""
        files, name, start, stop = self.range
        near = files is more.files and name == more.name and more.start - stop <= _GAP_BYTES
        return near and max(stop, more.stop) - start <= REQUEST_BYTES

    def add(self, more: Range, job: int) -> None:
        self.range = self.range._replace(stop=max(self.range.stop, more.stop))
        self.left += more.nbytes
        self.job = max(self.job, job)

    def holds(self, files: Fetching, name: str, at: int) -> bool:
        mine, own, start, stop = self.range
        return start <= at < stop and mine is files and own == name


class ReadAhead(Generic[Job]):
    """One thread's jobs in order, what they read on its way before; see `reading_ahead`."""

    def __init__(
        self, jobs: Iterable[Job], reads: Callable[[Job], Iterable[Range]], memory_bytes: int
    ) -> None:
        self._jobs, self._reads = jobs, reads
        share = max(1, memory_bytes // _ROUNDS)
        self._memory, self._round = (
            memory_bytes,
            max(share - share % REQUEST_BYTES, min(share, REQUEST_BYTES)),
        )
        self._taken: deque[Job] = deque()  # announced, not started
        self._started = self._announced = 0  # how many jobs
        self._ranges = self._announced_ranges()
        self._rest: Range | None = None  # of one that was too long for its round
        self._requests: list[_Request] = []
        self._held = 0  # bytes on their way or here

    def __iter__(self) -> Iterator[Job]:
        while True:
            self._drop(lambda request: request.job <= self._started)
            if not self._taken:  # the last job has ended: what it did not read needs no request
                self._rest = None
                while not self._taken and next(self._ranges, self) is not self:
                    pass
            self._ask()
            if not self._taken:
                return
            self._started += 1
            yield self._taken.popleft()

    def fill(self, files: Fetching, name: str, offset: int, buffer: memoryview) -> int:
        """Fill the beginning of `buffer` with what was prefetched; returns its bytes, raises the request's error."""
        done = 0
        while done < len(buffer):
            at = offset + done
            request = next((one for one in self._requests if one.holds(files, name, at)), None)
            if request is None:
                break
            request.answer.result()
            data = request.data[at - request.range.start :][: len(buffer) - done]
            buffer[done : done + len(data)] = data
            done += len(data)
            request.left -= len(data)
            if request.left <= 0:
                self._drop(lambda one: one.left <= 0)
                self._ask()
        return done

    def close(self) -> None:
        """Call off what has not been sent."""
        self._drop(lambda _: True)

    def _drop(self, is_done: Callable[[_Request], bool]) -> None:
        kept = []
        for request in self._requests:
            if is_done(request):
                request.answer.cancel()
                self._held -= request.range.nbytes
            else:
                kept.append(request)
        self._requests = kept

    def _ask(self) -> None:
        """Ask for as much as there is memory for, a round at a time: neighbours within a round are joined."""
        while self._held + self._round <= self._memory and self._ask_for(self._round):
            pass

    def _ask_for(self, nbytes: int) -> bool:
        """Ask for about so many bytes of what comes next; False when nothing does."""
        announced, found = self._announced, list[tuple[Range, int]]()
        paid = 0  # bytes of the job's ranges that its minimum (_JOB_BYTES) has already been charged for
        while nbytes > 0:
            try:
                one = self._rest or next(self._ranges)
            except StopIteration:
                break
            self._rest = None
            if one is None:
                nbytes, paid = nbytes - _JOB_BYTES, _JOB_BYTES
                continue
            if one.nbytes > nbytes + paid:
                cut = one.start + nbytes + paid
                one, self._rest = one._replace(stop=cut), one._replace(start=cut)
            nbytes -= max(0, one.nbytes - paid)
            paid = max(0, paid - one.nbytes)
            found.append((one, self._announced))
        requests: list[_Request] = []
        for one, job in sorted(found, key=lambda entry: (id(entry[0].files), *entry[0][1:])):
            if requests and requests[-1].joins(one):
                requests[-1].add(one, job)
            else:
                requests.append(_Request(one, job))
        for request in requests:
            request.send()
            self._held += request.range.nbytes
        self._requests += requests
        return bool(found) or self._announced > announced

    def _announced_ranges(self) -> Iterator[Range | None]:
        """For every job None and then its ranges; a wrong range is left to the reader, which reports it."""
        for job in self._jobs:
            self._taken.append(job)
            self._announced += 1
            yield None
            with suppress(CkptError):
                for one in self._reads(job):
                    if 0 <= one.start < one.stop <= one.files.size(one.name):
                        yield one


def read_ahead(files: Fetching, name: str, offset: int, buffer: memoryview) -> int:
    """Fill the beginning of `buffer` with what this thread has had fetched ahead; how many bytes that is."""
    ahead: ReadAhead[object] | None = getattr(_of_thread, "ahead", None)
    return ahead.fill(files, name, offset, buffer) if ahead is not None else 0


@contextmanager
def reading_ahead(
    jobs: Iterable[Job], reads: Callable[[Job], Iterable[Range]], memory_bytes: int
) -> Iterator[Iterator[Job]]:
    """Give the block the `jobs` one after the other; what this thread reads for them was asked for before.

    Args:
        jobs: may be shared by threads; some are taken before the current one has ended.
        reads: the ranges that a job reads, each once and in order.
        memory_bytes: that requests under way and bytes not yet read may take; 0: nothing is read ahead.
    """
    if not memory_bytes:
        yield iter(jobs)
        return
    ahead = ReadAhead(jobs, reads, memory_bytes)
    _of_thread.ahead = ahead
    try:
        yield iter(ahead)
    finally:
        _of_thread.ahead = None
        ahead.close()
