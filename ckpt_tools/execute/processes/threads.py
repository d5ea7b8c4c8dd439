"""One rank's share of a plan: a few threads, each with a pump, and a main thread that watches over them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, groupby

from ckpt_tools.errors import CkptError
from ckpt_tools.execute.move.source_reader import SourceReader
from ckpt_tools.execute.move.stream import Counters, Pump
from ckpt_tools.execute.output.fileio import OutputFile, drop_cache, storage_errors
from ckpt_tools.execute.output.folders import Folder, opened
from ckpt_tools.execute.output.journal import Journal
from ckpt_tools.execute.write_job import Progress, ThreadMemory, WriteJob
from ckpt_tools.formats.storage.prefetch import Range, reading_ahead
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.transfers import OutputItem, stored_parts
from ckpt_tools.plan.byte_runs import batches

_WATCH_SECONDS = 0.1


class _StoppedError(CkptError):
    """Ends a thread when its work is no longer wanted; requests to a store are not retried after it."""


class WorkerThreads:
    """Threads that do one task, each with a pump, while the thread that called watches over them."""

    def __init__(self, source: SourceReader, threads: int, memory: ThreadMemory, total: int) -> None:
        self._source, self._count, self._memory = source, threads, memory
        self._total, self._done = total, 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._errors: list[BaseException] = []

    def run(
        self, task: Callable[[Pump], None], watch: Callable[[], None], progress: Progress
    ) -> list[Counters]:
        """Do it; the counters of every thread. `watch` may raise to stop the work."""
        # Not kept by the crew, which they keep by its `_tick`: their buffers would outlive the work.
        pumps = [Pump(self._source, self._memory.tile, self._tick) for _ in range(self._count)]
        threads = [threading.Thread(target=self._guarded, args=(task, pump)) for pump in pumps]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_WATCH_SECONDS)
                    watch()
                    progress(self._done, self._total)
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]
        progress(self._done, self._total)
        return [pump.counters for pump in pumps]

    def check(self) -> None:
        if self._stop.is_set():
            raise _StoppedError("another thread has failed")

    def _guarded(self, task: Callable[[Pump], None], pump: Pump) -> None:
        try:
            task(pump)
        except _StoppedError:
            pass
        except BaseException as error:
            self._errors.append(error)
            self._stop.set()

    def _tick(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
        self.check()


class _FileQueue:
    """What is left to write, file by file: most file systems let one thread at a time write into a file."""

    def __init__(
        self, items: Sequence[OutputItem], share: range, max_bytes: int, by_source: bool = False
    ) -> None:
        """With `by_source` in the order of what is read: of a store's files, what follows comes with one request."""
        self._left: dict[str, Iterator[range]] = {}
        for file, run in groupby(share, key=lambda number: items[number].file):
            first, *rest = run
            part: Iterable[range] = batches(items, range(first, first + 1 + len(rest)), max_bytes)
            if by_source:
                part = sorted(part, key=lambda batch: _first_read(items[batch.start]))
            self._left[file] = chain(self._left.get(file, ()), part)
        self._writers: Counter[str] = Counter()
        self._lock = threading.Lock()

    def file(self) -> str | None:
        """The unfinished file that the fewest threads have chosen, chosen once more."""
        with self._lock:
            name = min(self._left, key=self._writers.__getitem__, default=None)
            if name is not None:
                self._writers[name] += 1
            return name

    def batches(self, file: str) -> Iterator[range]:
        """Runs of item numbers of a file that no thread has taken yet, each taken when asked for."""
        while True:
            with self._lock:
                batch = next(self._left.get(file, iter(())), None)
                if batch is None:
                    self._left.pop(file, None)
                    return
            yield batch


def _first_read(item: OutputItem) -> tuple[str, int]:
    """The file and the byte of it, or thereabouts, that an item's content begins with."""
    first = next(stored_parts(item.transfers), None)
    if first is None:
        return "", 0
    return first.item.file, first.item.offset + first.piece.offset * itemsize(first.dtype)


class Work:
    """Writes the items numbered `share` into the files of `folder`, which exist in full length.

    Items in `finished` (number -> payload CRC-32) are verified and skipped; damaged ones are written again.
    """

    def __init__(
        self, job: WriteJob, share: range, source: SourceReader, folder: Folder, journal: Journal
    ) -> None:
        self._job, self._items, self._share = job, job.plan.items, share
        self._source, self._folder, self._journal = source, folder, journal
        self._memory = job.thread_memory
        self._lock = threading.Lock()
        self.resumed = 0  # items that an earlier process had finished

    def run(self, finished: Mapping[int, int]) -> list[Counters]:
        total = sum(self._items[number].length for number in self._share)
        crew = WorkerThreads(self._source, self._job.options.threads, self._memory, total)
        todo = _FileQueue(self._items, self._share, self._memory.tile, by_source=self._source.is_remote)
        task = partial(self._write_items, todo, finished)
        return crew.run(task, self._job.ranks.check, self._job.progress)

    def _write_items(self, todo: _FileQueue, finished: Mapping[int, int], pump: Pump) -> None:
        def reads(batch: range) -> Iterator[Range]:
            missing = [n for n in batch if n not in finished]
            if len(missing) == len(batch) > 1:
                return pump.batch_reads(self._items[batch.start : batch.stop])
            return chain.from_iterable(pump.reads(self._items[n]) for n in missing)

        while (name := todo.file()) is not None:
            with (
                self._open(name) as file,
                reading_ahead(todo.batches(name), reads, self._memory.ahead) as mine,
            ):
                for batch in mine:
                    self._write_batch(batch, pump, file, finished)

    def _write_batch(self, batch: range, pump: Pump, file: OutputFile, finished: Mapping[int, int]) -> None:
        missing = [n for n in batch if not self._is_done(n, pump, file, finished)]
        if len(missing) == len(batch) > 1:
            checksums = pump.write_batch(self._items[batch.start : batch.stop], file)
        else:
            checksums = [pump.write_item(self._items[n], file) for n in missing]
        self._journal.append(zip(missing, checksums, strict=True))

    def _is_done(self, number: int, pump: Pump, file: OutputFile, finished: Mapping[int, int]) -> bool:
        if number not in finished:
            return False
        done = pump.is_intact(self._items[number], file, finished[number])
        if done:
            self._source.note(self._items[number].transfers)
        with self._lock:
            self.resumed += done
        return done

    @contextmanager
    def _open(self, name: str) -> Iterator[OutputFile]:
        """An output file; what was written through it is made durable, if that is asked for."""
        path = self._folder.path / name
        with ExitStack() as held:
            fd = held.enter_context(opened(self._folder, name, os.O_RDWR))
            direct = None
            if self._job.options.direct:
                direct = held.enter_context(opened(self._folder, name, os.O_WRONLY | os.O_DIRECT))
            yield OutputFile(path, fd, direct)
            if self._job.options.fsync:
                with storage_errors(path):
                    os.fsync(fd)
            if self._job.options.fsync or self._job.options.direct:
                drop_cache(fd)
