"""A job's output in a folder of an object store, where nothing can be renamed and files are written front to back.

Objects appear whole or not at all (multipart uploads), so each is uploaded to its final name, in the order::

    .ckpt_tools-partial   the marker: what is being written, from what and by whom (a run's token). `--resume` skips
                          objects that are the ones that were uploaded
    __<r>_<n>.distcp ...  data; a rank has whole files, each thread streams one at a time. The version of each is
                          noted in .ckpt_tools-partial.<file>, for `--resume`
    .metadata             last: without it no loader takes the folder for a checkpoint
    trackers              next to the folder; then the marker is deleted

A checkpoint that is replaced stays until the new one is whole, which is made in a folder next to it
(`.<name>.ckpt_tools-partial/`). Then the store itself copies that: the old `.metadata` is deleted first and the new
one copied last, so that at no time a mix of old and new can be loaded. A process that is stopped meanwhile leaves the
marker in the old place and all of the new one next to it: `--resume` continues.

A store has no locks. Of two runs with one output the last to write the marker has it; the other finds a foreign token
when it looks, before and after each file and before `.metadata`, and stops without touching anything. What it may
have replaced until then is found by the versions of the objects.

Where a store takes parts of one file from several processes, a long file is cut between entries, so that one file
keeps all threads of all ranks busy. Rank 0 begins its upload and completes it when all have ended.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_tools.credentials import hidden
from ckpt_tools.errors import CorruptCheckpointError, StorageError, UsageError
from ckpt_tools.execute.move.source_reader import SourceReader
from ckpt_tools.execute.move.stream import Counters, Pump
from ckpt_tools.execute.output.checks import (
    can_go_on,
    has_files,
    prove_uploaded,
    replaced,
    same_small_parts,
)
from ckpt_tools.execute.output.journal import check_unchanged, is_fingerprint
from ckpt_tools.execute.processes.team import even_shares
from ckpt_tools.execute.processes.threads import WorkerThreads
from ckpt_tools.execute.write_job import (
    METADATA,
    Done,
    Found,
    SourceState,
    ThreadMemory,
    WriteJob,
)
from ckpt_tools.formats.locate.detect import PARTIAL_SUFFIX
from ckpt_tools.formats.storage.drivers import IN_FLIGHT, Part, PartUpload
from ckpt_tools.formats.storage.io_pool import pool
from ckpt_tools.formats.storage.object_store import Retry, Store, no_bucket
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.storage.prefetch import reading_ahead
from ckpt_tools.model.transfers import OutputBlob, OutputItem, Plan

MARKER = PARTIAL_SUFFIX
_MOST_BYTES = 256 << 20  # it tells of every file of the source


def note_of(name: str) -> str:
    """The file that says which version of the file `name` was uploaded."""
    return f"{MARKER}.{name}"


def is_note(name: str) -> bool:
    return name.startswith(note_of(""))


class Marker:
    """A run's claim on a folder: of two, the last to write the marker has it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.token = ""  # of the run that has the folder

    def draw(self) -> None:
        """Be a run that nobody else is."""
        self.token = uuid.uuid4().hex

    def put(self, digest: str | None, state: SourceState) -> None:
        """Claim the folder for a plan and a source; without a digest what lies there is not to be gone on from."""
        owner = f"process {os.getpid()} on {os.uname().nodename}"
        header = {"digest": digest, "source": state, "token": self.token, "owner": owner}
        self._store.put(MARKER, json.dumps(header).encode())

    def read(self, present: Mapping[str, int | None] | None = None) -> dict[str, Any]:
        """What the marker says; empty if there is no marker. `present` may have its length."""
        if ((present or {}).get(MARKER) or 0) > _MOST_BYTES:
            raise self._not_ours()
        try:
            found = json.loads(self._store.get(MARKER))
        except FileNotFoundError:
            return {}
        except ValueError:
            found = None
        if not isinstance(found, dict) or not is_fingerprint(found.setdefault("source", [])):
            raise self._not_ours()
        return found

    def check(self) -> None:
        """Go on as long as the folder is this run's."""
        found = self.read()
        if found.get("token") != self.token:
            raise UsageError(
                f"{self._store.location} was taken by another converter ({found.get('owner', 'it has ended')}) while "
                "this one wrote there. This run stopped without changing anything. Choose another output, "
                "or retry later."
            )

    def note(self, name: str) -> str | None:
        """Note which version of a file was uploaded, and return it. Raises as `check`."""
        self.check()  # a note of a run that lost would vouch for a file that it has written
        version = self._store.version(name)
        if version is not None:
            self._store.put(note_of(name), version.encode())
        return version

    def noted(self, name: str) -> str:
        return self._store.get(note_of(name)).decode(errors="replace")

    def is_noted(self, name: str) -> bool:
        """Whether a file is the one that was uploaded. Another one may have its length."""
        try:
            return self.noted(name) == self._store.version(name)
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Give the folder up: all is done."""
        list(pool().map(self._store.remove, filter(is_note, self._store.sizes())))
        self._store.remove(MARKER)

    def _not_ours(self) -> UsageError:
        return UsageError(
            f"{self._store.where(MARKER)} was not written by this version. Start again with --overwrite."
        )


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

    def __init__(self, job: WriteJob, store: Store, marker: Marker) -> None:
        self._job, self._store, self._marker = job, store, marker
        self._entries = _entries_by_file(job.plan)
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
        self, stretches: Sequence[Stretch], started: Mapping[str, str | None], source: SourceReader
    ) -> list[Counters]:
        """Upload these stretches, those of files in `started` as parts of its upload; see `WorkerThreads.run`."""
        job, memory = self._job, self._job.thread_memory
        crew = WorkerThreads(source, job.options.threads, memory, sum(one.nbytes for one in stretches))
        left = iter(stretches)

        def upload(pump: Pump) -> None:
            while True:
                with self._lock:
                    stretch = next(left, None)
                if stretch is None:
                    return
                crew.check()
                self._upload(pump, stretch, started.get(stretch.file), memory)

        return crew.run(upload, job.ranks.check, job.progress)

    def _upload(self, pump: Pump, stretch: Stretch, upload_id: str | None, memory: ThreadMemory) -> None:
        """Upload one stretch; started again when the store fails in a way that its driver cannot mend."""
        name = stretch.file
        first, last = (
            bisect_left(self._entries[name], at, key=lambda one: one.offset) for at in stretch[1:3]
        )
        entries = self._entries[name][first:last]  # those that begin in it
        part_bytes = _part_bytes(stretch, memory)
        in_flight = max(1, min(IN_FLIGHT, memory.parts // part_bytes - 1))
        place = None if upload_id is None else PartUpload(upload_id, stretch.first_part)

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
        version = self._marker.note(name) if upload_id is None else None
        with self._lock:
            if upload_id is None:
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
    ordered = sorted(stretches, key=lambda one: (-one.nbytes, one.file, one.start))
    return [ordered[number] for number in even_shares([one.nbytes for one in ordered], world)[rank]]


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
    cut, first = [], 1
    for start, stop in zip(bounds, [*bounds[1:], size], strict=True):
        parts = (stop - start) // least
        cut.append(Stretch(name, start, stop, first, parts))
        first += parts
    return cut


def _part_bytes(stretch: Stretch, memory: ThreadMemory) -> int:
    """Bytes of a part: what memory allows, or what gives a stretch the number of parts that others count with."""
    if stretch.parts:
        return -(-stretch.nbytes // stretch.parts)
    return max(min(_PART_BYTES, memory.parts // 2), -(-stretch.nbytes // _MAX_PARTS))


def _entries_by_file(plan: Plan) -> dict[str, list[OutputItem | OutputBlob]]:
    by_file: dict[str, list[OutputItem | OutputBlob]] = {name: [] for name in plan.file_bytes}
    entries: list[OutputItem | OutputBlob] = [*plan.items, *plan.blobs]
    for entry in sorted(entries, key=lambda entry: entry.offset):
        by_file[entry.file].append(entry)
    return by_file


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


_ASIDE = "aside:"  # before the token of a run that writes next to what it replaces
_LEAVING = Retry(attempts=1, patience=5.0)  # a run that failed tidies up, but waits for nobody


class RemoteOutput:
    scratch: Path | None = None
    data: Path | None = None

    def __init__(self, job: WriteJob) -> None:
        """Raises: UsageError: the output cannot be opened or written at all; `--direct`."""
        self._job = job
        location = hidden(str(job.output.directory))
        if job.options.direct:
            raise UsageError(f"--direct is for files; {location} is in an object store. Leave it out.")
        self._final = self._store = Store(str(job.output.directory))
        if not self._store.root.strip("/"):
            raise UsageError(f"{location} does not name a folder; choose another output.")
        self._marker = Marker(self._store)
        self.replaced: str | None = None
        self._state: SourceState = []
        self._begun: dict[str, str] = {}  # uploads of files that several ranks write

    @property
    def token(self) -> str:
        return ("" if self._store is self._final else _ASIDE) + self._marker.token

    @token.setter
    def token(self, token: str) -> None:
        if token.startswith(_ASIDE):
            self._use(self._aside)
        self._marker.token = token.removeprefix(_ASIDE)

    def draw_token(self) -> None:
        """The marker has it already."""

    def check_token(self) -> None:
        """The marker is asked for each file."""

    def _use(self, store: Store) -> None:
        self._store, self._marker = store, Marker(store)

    @cached_property
    def _aside(self) -> Store:
        """The folder for an output that replaces another, which stays until all is done."""
        name = self._final.location.rstrip("/").rpartition("/")[2]
        return Store(f"{self._final.parent}/.{name}{MARKER}")

    @cached_property
    def _parent(self) -> Store:
        return Store(self._final.parent)

    def look(self) -> bool:
        store, output, plan = self._store, self._job.output, self._job.plan
        present = store.sizes()
        if store.without_bucket:
            raise no_bucket(store.location, store.without_bucket)
        goes_on = output.resume and (MARKER in present or has_files(plan.file_bytes, present))
        if output.overwrite or not goes_on:
            self.replaced = self._old(store, present)
        return goes_on and MARKER not in present

    def _old(self, store: Store, present: Mapping[str, int | None], may_be_there: bool = False) -> str | None:
        """What `present` is, which the output replaces; raise UsageError if it may not."""
        plan, output = self._job.plan, self._job.output
        if present and not (output.overwrite or may_be_there):
            what = "is not empty; choose another output or replace it with --overwrite"
            if MARKER in present:
                what = (
                    "holds a conversion that was stopped, or is being written. Continue it with --resume, or start "
                    "again with --overwrite"
                )
            raise UsageError(f"{store.location} {what}.")
        sizes = {name: size for name, size in present.items() if name != MARKER and not is_note(name)}
        if not sizes:
            return None
        if store.is_bucket:
            raise UsageError(
                f"{store.location} is not replaced: it is a whole bucket. Name a folder inside as the output."
            )
        return replaced(
            store.location,
            lambda folder: store.sizes(folder) if folder else sizes,
            {*plan.file_bytes, *output.extra_files},
            is_unfinished=MARKER in present,
        )

    def take(self, state: SourceState) -> Found:
        self._state = state
        present, output = self._store.sizes(), self._job.output
        resume = output.resume
        if resume and not self._final.is_bucket and MARKER in (aside := self._aside.sizes()):
            self.replaced = self._old(self._final, present, may_be_there=MARKER in present)
            self._use(self._aside)
            present = aside
        header = self._marker.read(present) if resume and MARKER in present else {}
        if self._goes_on(header):
            is_published = self._store is self._final and self._is_published(present)
            self._claim(withdraw=METADATA in present and not is_published, clear=False)
            return "published" if is_published else "unfinished"
        if resume and self._store is self._final and self._may_be_finished(present):
            return "finished"
        return self.begin()

    def _goes_on(self, header: Mapping[str, Any]) -> bool:
        """Whether the marker is of work that can be gone on from."""
        if not header:
            return False
        if header.get("digest") is None and self._job.output.overwrite:
            return False  # stopped while the old files were being deleted
        if header.get("digest") != self._job.plan.digest:
            raise UsageError(
                f"{self._store.location} was started with another plan (other options, source or version). Repeat "
                "the command with the same options, or start again with --overwrite."
            )
        check_unchanged(header["source"], self._state, self._job.files.location)
        return True

    def _is_published(self, present: Mapping[str, int | None]) -> bool:
        """Whether nothing is left but the cleaning up: all files are what this tool has put there."""
        plan = self._job.plan
        if METADATA not in present or not all(pool().map(self._marker.is_noted, plan.file_bytes)):
            return False
        with closing(open_files(self._final.location)) as there:
            return same_small_parts(plan, self._job.output, there)

    def _may_be_finished(self, present: Mapping[str, int | None]) -> bool:
        """Whether all files are there in full length, and nothing that `--overwrite` is to remove."""
        output, plan = self._job.output, self._job.plan
        strange = present.keys() - {METADATA, *plan.file_bytes, *output.extra_files}
        is_marked = METADATA in present or not output.is_dcp
        return is_marked and has_files(plan.file_bytes, present) and not (output.overwrite and strange)

    def keep(self) -> None:
        self._claim(withdraw=False, clear=False)

    def begin(self) -> Found:
        present = self._final.sizes()
        self._use(self._final)
        self.replaced = self._old(self._final, present)
        is_old = bool(present) and (METADATA in present or MARKER not in present)
        can_keep_old = self._job.output.overwrite and not self._final.is_bucket
        if can_keep_old and (is_old or self._aside.sizes()):
            self._use(self._aside)
            present = self._store.sizes()
            self._old(self._store, present)
        self._claim(withdraw=METADATA in present, clear=bool(present))
        return "nothing"

    def _claim(self, withdraw: bool, clear: bool) -> None:
        """Make the output this run's: what was written there until now cannot be completed any more."""
        marker, digest = self._marker, self._job.plan.digest
        marker.draw()
        if withdraw:  # before all else: from here on no loader takes the folder for a checkpoint
            self._store.remove(METADATA)
        # With nothing to compare: what lies here now is not work to go on from.
        marker.put(None if clear else digest, self._state)
        if clear:
            self._store.clear(keep=(MARKER,))
        self._store.abort_uploads()
        if clear:
            marker.check()
            marker.put(digest, self._state)
        marker.check()

    def _names(self) -> list[str]:
        return share_of_files(self._job.plan, self._job.ranks.rank, self._job.ranks.world)

    def share(self) -> Sequence[OutputItem]:
        names = set(self._names())
        return [item for item in self._job.plan.items if item.file in names]

    def _stretches(self) -> list[Stretch]:
        plan, ranks = self._job.plan, self._job.ranks
        if not self._store.driver.takes_stretches:
            return [Stretch(name, 0, size) for name, size in plan.file_bytes.items()]
        return stretches(plan, ranks.world * self._job.options.threads)

    def open_files(self) -> Mapping[str, str | None]:
        present, sizes = self._store.sizes(), self._job.plan.file_bytes
        whole = [
            name for name, size in sizes.items() if present.get(name) == size and note_of(name) in present
        ]
        same = dict(zip(whole, pool().map(self._marker.is_noted, whole), strict=True))
        for name in (name for name in whole if not same[name]):
            warnings.warn(
                f"{self._store.where(name)} is not what was uploaded; it is written again", stacklevel=2
            )
        there = {name for name in whole if same[name]}
        cut = {stretch.file for stretch in self._stretches() if stretch.parts}
        self._begun = {name: self._store.begin_upload(name) for name in sorted(cut - there)}
        return {**dict.fromkeys(there), **self._begun}

    def work(self, source: SourceReader, opened: Mapping[str, str | None]) -> Done:
        job, ranks = self._job, self._job.ranks
        uploads = Uploads(job, self._store, self._marker)
        there = {name for name in self._names() if opened.get(name, "") is None}
        for name in sorted(there):
            uploads.note(name, source)
        mine = share_of(self._stretches(), ranks.rank, ranks.world)
        todo = [stretch for stretch in mine if opened.get(stretch.file, "") is not None]
        counters = uploads.run(todo, opened, source)
        resumed = sum(item.file in there for item in job.plan.items)
        resumed += sum(blob.file in there for blob in job.plan.blobs)
        return Done(counters, resumed, uploads.versions, uploads.parts)

    def publish(
        self, metadata: bytes | None, versions: Mapping[str, str | None], parts: Mapping[str, Sequence[Part]]
    ) -> None:
        store, marker = self._store, self._marker
        marker.check()
        for name, upload in self._begun.items():
            store.complete_upload(name, upload, parts[name])
        versions = {**versions, **{name: marker.note(name) for name in self._begun}}
        with closing(open_files(store.location)) as there:
            prove_uploaded(self._job.plan, there)
        for name, content in self._job.output.extra_files.items():
            store.put(name, content)
        marker.check()  # a run that lost says so, not which of its files are gone
        self._check_objects(versions)
        marker.check()
        if metadata is not None:
            store.put(METADATA, metadata)
        if store is not self._final:
            self._replace()

    def _replace(self) -> None:
        """Put what was made aside into the place of the old checkpoint."""
        job, final, aside = self._job, self._final, self._store
        old = final.sizes()
        self._old(final, old, may_be_there=True)
        self._marker.check()
        marker = Marker(final)
        marker.token = self._marker.token
        marker.put(job.plan.digest, self._state)
        final.abort_uploads()
        final.remove(METADATA)
        final.clear(keep=(MARKER, *job.plan.file_bytes))  # what describes the old data goes before the data
        data, size = job.plan.file_bytes, aside.sizes().get(METADATA)
        small = {name: len(content) for name, content in job.output.extra_files.items() if name != METADATA}
        for sizes in (data, small, {} if size is None else {METADATA: size}):
            marker.check()
            copied = [(name, nbytes, final) for name, nbytes in sizes.items()]
            list(pool().map(lambda one: aside.copy(*one), copied))
        marker.check()
        if data and not has_files(data, final.sizes()):
            raise StorageError(
                f"{final.location}: files that the store copied have another length. Continue with --resume."
            )
        marker.remove()

    def _check_objects(self, versions: Mapping[str, str | None]) -> None:
        """Prove that every file is the one that was uploaded."""
        present, sizes = self._store.sizes(), self._job.plan.file_bytes
        names = [name for name, size in sizes.items() if present.get(name) == size]
        now = dict(zip(names, pool().map(self._store.version, names), strict=True))
        changed = [name for name in sizes if name not in now or now[name] != versions[name]]
        if changed:
            raise CorruptCheckpointError(
                f"{self._store.location}: {', '.join(changed[:5])} changed after this run had uploaded it; another "
                "converter writes there too. Nothing was published. Convert again with --overwrite when it has ended."
            )

    def trackers_locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def has_beside(self, name: str) -> bool:
        return name in self._parent.sizes()

    def write_beside(self, name: str, content: bytes) -> None:
        self._parent.put(name, content)

    def finish(self) -> None:
        self._marker.check()
        self._discard()

    def _discard(self) -> None:
        if self._store is not self._final:
            self._store.clear(keep=(MARKER,))
        self._marker.remove()

    def leave(self, error: BaseException) -> None:
        """End the uploads of ranks that could not end them on their own; what is whole stays, for `--resume`."""
        if not self.token:
            return
        self._store.retry = _LEAVING
        with suppress(Exception):
            self._marker.check()
            self._store.abort_uploads()
            if self._store is not self._final and not can_go_on(error):
                self._discard()

    def close(self) -> None:
        """A store holds nothing open."""
