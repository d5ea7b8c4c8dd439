"""One rank's files of a plan, each uploaded to a store front to back by one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from ckpt_tools.execute.buffers import ThreadMemory
from ckpt_tools.execute.marker import Marker
from ckpt_tools.execute.source_reader import SourceReader
from ckpt_tools.execute.stream import Counters, Pump
from ckpt_tools.execute.work import Crew
from ckpt_tools.execute.write_job import Progress
from ckpt_tools.formats.read_ahead import reading_ahead
from ckpt_tools.formats.store import Store
from ckpt_tools.model.transfers import OutputBlob, OutputItem, Plan

_PART_BYTES = 8 << 20  # of a multipart upload; every thread holds some (`IN_FLIGHT`)
_MAX_PARTS = 9000  # S3 allows 10,000


class Uploads:
    """Writes files of a plan to the store, as long as the marker is this run's."""

    def __init__(self, plan: Plan, store: Store, marker: Marker) -> None:
        self._sizes, self._store, self._marker = plan.file_bytes, store, marker
        self._entries = _entries_by_file(plan)
        self._lock = threading.Lock()
        self.versions: dict[str, str | None] = {}  # of the files, as the store calls what it has

    def note(self, name: str, source: SourceReader) -> None:
        """A file that an earlier process has uploaded."""
        for entry in self._entries[name]:
            if isinstance(entry, OutputItem):
                source.note(entry.transfers)
        self.versions[name] = self._store.version(name)

    def run(
        self,
        names: Sequence[str],
        source: SourceReader,
        threads: int,
        memory: ThreadMemory,
        watch: Callable[[], None],
        progress: Progress,
    ) -> list[Counters]:
        """Upload the files `names`; see `Crew.run`."""
        crew = Crew(source, threads, memory, sum(self._sizes[name] for name in names))
        left = iter(names)

        def upload(pump: Pump) -> None:
            while (name := self._next(left)) is not None:
                crew.check()
                self._upload(pump, name, memory)

        return crew.run(upload, watch, progress)

    def _next(self, names: Iterator[str]) -> str | None:
        with self._lock:
            return next(names, None)

    def _upload(self, pump: Pump, name: str, memory: ThreadMemory) -> None:
        """Upload one file; begun anew when the store fails in a way that its driver cannot mend."""
        size = self._sizes[name]
        part_bytes = max(min(_PART_BYTES, memory.parts // 2), -(-size // _MAX_PARTS))

        def upload(_timeout: float) -> None:
            self._marker.check()
            file = self._store.open_for_writing(name, part_bytes)
            try:
                with reading_ahead(self._entries[name], pump.reads, memory.ahead) as entries:
                    for data in _content(entries, size, pump):
                        file.write(data)
                self._marker.check()
                file.close()
            except BaseException:
                self._drop(file, name)
                raise

        self._store.call(f"{self._store.where(name)}: writing", upload)
        version = self._store.version(name)
        with self._lock:
            self.versions[name] = version

    def _drop(self, file: Any, name: str) -> None:
        """End an upload so that neither parts nor half a file are left, nor come when Python forgets `file`."""
        with suppress(Exception):  # what it was doing failed; this only tidies up
            if hasattr(file, "discard"):
                file.discard()
            else:  # a driver that can only complete it
                file.close()
                self._store.remove(name)
        with suppress(AttributeError):
            file.closed = True  # or fsspec would complete it


def share_of_files(plan: Plan, rank: int, world: int) -> list[str]:
    """The files a rank writes: the largest first, each to the rank with the fewest bytes so far."""
    loads = [0] * world
    mine = []
    for name, size in sorted(plan.file_bytes.items(), key=lambda entry: (-entry[1], entry[0])):
        chosen = loads.index(min(loads))
        loads[chosen] += size
        if chosen == rank:
            mine.append(name)
    return mine


def _entries_by_file(plan: Plan) -> dict[str, list[OutputItem | OutputBlob]]:
    """What stands in each file, in order."""
    found: dict[str, list[OutputItem | OutputBlob]] = {name: [] for name in plan.file_bytes}
    entries: list[OutputItem | OutputBlob] = [*plan.items, *plan.blobs]
    for entry in sorted(entries, key=lambda entry: entry.offset):
        found[entry.file].append(entry)
    return found


def _content(
    entries: Iterable[OutputItem | OutputBlob], size: int, pump: Pump
) -> Iterator[bytes | memoryview]:
    """The bytes of a file in order, gaps as zeros; each part is valid until the next is asked for."""
    at = 0
    for entry in entries:
        if entry.offset + entry.length <= at:  # equal blobs share their bytes
            continue
        yield bytes(entry.offset - at)
        if isinstance(entry, OutputBlob):
            yield entry.data
        else:
            yield from pump.item_content(entry)
        at = entry.offset + entry.length
    yield bytes(size - at)
