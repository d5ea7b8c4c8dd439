"""One rank's share of a plan's files, uploaded to a store: whole files, and stretches of long ones.

Where a store takes parts of one file from several processes, a long file is cut between entries, so that one file
keeps all threads of all ranks busy. Rank 0 begins its upload and completes it when all have ended.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ckpt_tools.execute.move.buffers import ThreadMemory
from ckpt_tools.execute.move.source_reader import SourceReader
from ckpt_tools.execute.move.stream import Counters, Pump
from ckpt_tools.execute.output.marker import Marker
from ckpt_tools.execute.processes.threads import Crew
from ckpt_tools.execute.write_job import Progress
from ckpt_tools.formats.storage.multipart import IN_FLIGHT, Begun, Part
from ckpt_tools.formats.storage.object_store import Store
from ckpt_tools.formats.storage.prefetch import reading_ahead
from ckpt_tools.model.transfers import OutputBlob, OutputItem, Plan

_PART_BYTES = 8 << 20  # of a multipart upload; every thread holds some (`ThreadMemory.parts`)
_MAX_PARTS = 9000  # S3 allows 10,000
_STRETCH_BYTES = 4 * _PART_BYTES  # a shorter stretch is not worth its own requests
_STRETCHES = 2  # for each thread: the last ones end at about the same time

Entries = Sequence[OutputItem | OutputBlob]


class Stretch(NamedTuple):
    """Bytes [start, stop) of a file, which one thread uploads front to back."""

    file: str
    start: int
    stop: int
    first_part: int = 0  # number of its first part in the file's upload; 0: it is all of the file
    parts: int = 0

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Uploads:
    """Writes stretches of a plan's files to the store, as long as the marker is this run's."""

    def __init__(self, plan: Plan, store: Store, marker: Marker) -> None:
        self._store, self._marker = store, marker
        self._entries = _entries_by_file(plan)
        self._lock = threading.Lock()
        self.versions: dict[str, str | None] = {}  # of whole files, as the store calls what it has
        self.parts: dict[str, list[Part]] = {}  # of others

    def note(self, name: str, source: SourceReader) -> None:
        """A file that an earlier process has uploaded and noted."""
        for entry in self._entries[name]:
            if isinstance(entry, OutputItem):
                source.note(entry.transfers)
        self.versions[name] = self._marker.noted(name)

    def run(
        self,
        stretches: Sequence[Stretch],
        begun: Mapping[str, str | None],
        source: SourceReader,
        threads: int,
        memory: ThreadMemory,
        watch: Callable[[], None],
        progress: Progress,
    ) -> list[Counters]:
        """Upload these stretches, those of files in `begun` as parts of its upload; see `Crew.run`."""
        crew = Crew(source, threads, memory, sum(stretch.nbytes for stretch in stretches))
        left = iter(stretches)

        def upload(pump: Pump) -> None:
            while (stretch := self._next(left)) is not None:
                crew.check()
                self._upload(pump, stretch, begun.get(stretch.file), memory)

        return crew.run(upload, watch, progress)

    def _next(self, stretches: Iterator[Stretch]) -> Stretch | None:
        with self._lock:
            return next(stretches, None)

    def _upload(self, pump: Pump, stretch: Stretch, begun: str | None, memory: ThreadMemory) -> None:
        """Upload one stretch; begun anew when the store fails in a way that its driver cannot mend."""
        name = stretch.file
        entries = _entries_in(self._entries[name], stretch)
        part_bytes = _part_bytes(stretch, memory)
        in_flight = max(1, min(IN_FLIGHT, memory.parts // part_bytes - 1))
        place = None if begun is None else Begun(begun, stretch.first_part)

        def upload(_timeout: float) -> list[Part]:
            self._marker.check()
            file = self._store.open_for_writing(name, part_bytes, in_flight, place)
            try:
                with reading_ahead(entries, pump.reads, memory.ahead) as ahead:
                    for data in _content(ahead, stretch, pump):
                        file.write(data)
                self._marker.check()
                if place is not None:
                    parts: list[Part] = file.parts()
                    return parts
                file.close()
            except BaseException:
                self._drop(file, name)
                raise
            return []

        parts = self._store.call(f"{self._store.where(name)}: writing", upload)
        version = self._marker.note(name) if begun is None else None
        with self._lock:
            if begun is None:
                self.versions[name] = version
            else:
                self.parts.setdefault(name, []).extend(parts)

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
    """The files a rank has, as a whole: the largest first, each to the rank with the fewest bytes so far."""
    whole = [Stretch(name, 0, size) for name, size in plan.file_bytes.items()]
    return [stretch.file for stretch in share_of(whole, rank, world)]


def share_of(stretches: Iterable[Stretch], rank: int, world: int) -> list[Stretch]:
    """The stretches a rank uploads: the largest first, each to the rank with the fewest bytes so far."""
    loads = [0] * world
    mine = []
    for stretch in sorted(stretches, key=lambda one: (-one.nbytes, one.file, one.start)):
        chosen = loads.index(min(loads))
        loads[chosen] += stretch.nbytes
        if chosen == rank:
            mine.append(stretch)
    return mine


def stretches(plan: Plan, threads: int) -> list[Stretch]:
    """All files of a plan, long ones cut so that so many threads, of all ranks, have about as much to upload."""
    entries = _entries_by_file(plan)
    wanted = max(plan.bytes_to_write // (_STRETCHES * threads), _STRETCH_BYTES)
    return [one for name, size in plan.file_bytes.items() for one in _cut(name, size, entries[name], wanted)]


def _cut(name: str, size: int, entries: Entries, wanted: int) -> list[Stretch]:
    """A file in stretches of about `wanted` bytes, each from one entry to another."""
    count, offsets = round(size / wanted), [entry.offset for entry in entries]
    least = max(_PART_BYTES, -(-size // _MAX_PARTS))
    bounds = [0]
    for number in range(1, count):
        at = bisect_left(offsets, size * number // count)
        if at < len(offsets) and offsets[at] - bounds[-1] >= least and size - offsets[at] >= least:
            bounds.append(offsets[at])
    if len(bounds) == 1:
        return [Stretch(name, 0, size)]
    found, first = [], 1
    for start, stop in zip(bounds, [*bounds[1:], size], strict=True):
        parts = (stop - start) // least
        found.append(Stretch(name, start, stop, first, parts))
        first += parts
    return found


def _part_bytes(stretch: Stretch, memory: ThreadMemory) -> int:
    """Bytes of a part: what memory allows, or what gives a stretch the number of parts that others count with."""
    if stretch.parts:
        return -(-stretch.nbytes // stretch.parts)
    return max(min(_PART_BYTES, memory.parts // 2), -(-stretch.nbytes // _MAX_PARTS))


def _entries_by_file(plan: Plan) -> dict[str, list[OutputItem | OutputBlob]]:
    """What stands in each file, in order."""
    found: dict[str, list[OutputItem | OutputBlob]] = {name: [] for name in plan.file_bytes}
    entries: list[OutputItem | OutputBlob] = [*plan.items, *plan.blobs]
    for entry in sorted(entries, key=lambda entry: entry.offset):
        found[entry.file].append(entry)
    return found


def _entries_in(entries: Entries, stretch: Stretch) -> Entries:
    """Those of a file's entries that begin in a stretch."""
    first, last = (bisect_left(entries, at, key=lambda one: one.offset) for at in stretch[1:3])
    return entries[first:last]


def _content(
    entries: Iterable[OutputItem | OutputBlob], stretch: Stretch, pump: Pump
) -> Iterator[bytes | memoryview]:
    """The bytes of a stretch in order, gaps as zeros; each part is valid until the next is asked for."""
    at = stretch.start
    for entry in entries:
        if entry.offset + entry.length <= at:  # equal blobs share their bytes
            continue
        yield bytes(entry.offset - at)
        if isinstance(entry, OutputBlob):
            yield entry.data
        else:
            yield from pump.item_content(entry)
        at = entry.offset + entry.length
    yield bytes(stretch.stop - at)
