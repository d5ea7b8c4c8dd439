"""Carries out a plan into an object store, where nothing can be renamed and files are written front to back.

Objects appear whole or not at all (multipart uploads), so each is uploaded to its final name, in the order::

    .ckpt_tools-partial   what is being written, from what: `--resume` skips objects that are there in full length
    __<r>_<n>.distcp ...  data; a worker has whole files, each thread streams one at a time
    .metadata             last: without it no loader takes the folder for a checkpoint
    trackers              beside the folder; then the partial marker is deleted

Replacing a checkpoint deletes its `.metadata` first: at no time can a mix of old and new be loaded.
"""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckpt_tools.catalog.files import Files
from ckpt_tools.catalog.remote import Store
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.execute.dcp_metadata import metadata_bytes
from ckpt_tools.execute.finished import METADATA, has_files, is_written
from ckpt_tools.execute.journal import check_unchanged, fingerprint
from ckpt_tools.execute.proof import SourceProof
from ckpt_tools.execute.prove import ProofReport
from ckpt_tools.execute.publish import Found
from ckpt_tools.execute.ranks import DistributedRanks, Ranks
from ckpt_tools.execute.run import prove_source
from ckpt_tools.execute.source import SourceReader
from ckpt_tools.execute.stream import Pump
from ckpt_tools.execute.work import Progress, tile_bytes
from ckpt_tools.plan.model import OutputBlob, OutputItem, Plan

if TYPE_CHECKING:
    from ckpt_tools.execute.run import Output, WriteOptions

MARKER = ".ckpt_tools-partial"
_PART_BYTES = 16 << 20  # of a multipart upload; held in memory by every thread
_MAX_PARTS = 9000  # S3 allows 10,000
_WATCH_SECONDS = 0.1


class _StoppedError(CkptError):
    """Ends a thread whose work is no longer wanted."""


class RemoteJob:
    """The steps of one conversion into a store, in order: prepare, work, publish."""

    def __init__(
        self,
        plan: Plan,
        files: Files,
        output: Output,
        options: WriteOptions,
        *,
        ranks: Ranks | DistributedRanks,
        progress: Progress,
    ) -> None:
        """Raises: UsageError: the output's scheme is unknown or its driver is not installed; `--direct`."""
        if options.direct:
            raise UsageError(
                f"--direct is for files; {output.directory} is in an object store. Leave it out."
            )
        self._plan, self._files, self._output, self._options = plan, files, output, options
        self._ranks, self._progress = ranks, progress
        self._leads = ranks.rank == 0
        self._store = Store(str(output.directory))
        self._entries = _entries_by_file(plan)
        self._source_state: list[list[object]] = []
        self._proof = SourceProof() if options.check_source != "none" else None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._done = 0

    def run(self) -> tuple[list[dict[str, Any]], ProofReport]:
        """The counters of every thread of every rank, and what was proven of the source."""
        found = self._ranks.together(self._prepare)[0]
        if found == Found.FINISHED.name:
            same = all(self._ranks.together(self._compare))
            found = self._ranks.together(lambda: self._accept(same))[0]
            if not same and self._proof is not None:
                self._proof = SourceProof()
        counts: list[list[dict[str, Any]]] = []
        proven = ProofReport()
        if found not in (Found.PUBLISHED.name, Found.FINISHED.name):
            counts = self._ranks.together(self._work)
        if found != Found.PUBLISHED.name:
            proven = prove_source(self._proof, self._plan, self._files, self._options, self._ranks)
        self._ranks.together(lambda: self._publish(found))
        return [count for share in counts for count in share], proven

    def _prepare(self) -> str:
        """Rank 0 takes the output; what an earlier process has left there."""
        tile_bytes(self._options.memory_bytes, self._options.threads)
        if not self._leads:
            return ""
        plan, store, location = self._plan, self._store, self._files.location
        self._source_state = fingerprint(self._files, plan.source_files)
        present = store.sizes()
        if self._output.resume and MARKER in present:
            header = json.loads(store.get(MARKER))
            if header["digest"] != plan.digest:
                raise UsageError(
                    f"{store.location} was begun with another plan (other options, source or version). Repeat "
                    "the command with the same options, or start anew with --overwrite."
                )
            check_unchanged(header["source"], self._source_state, location)
            return (Found.PUBLISHED if METADATA in present else Found.UNFINISHED).name
        is_marked = METADATA in present or not self._output.is_dcp
        if self._output.resume and is_marked and has_files(plan.file_bytes, present):
            return Found.FINISHED.name
        return self._begin(present)

    def _compare(self) -> bool:
        """Whether this rank's share is there already as it would be written."""
        mine = set(share_of_files(self._plan, self._ranks.rank, self._ranks.world))
        items = [item for item in self._plan.items if item.file in mine]
        source = SourceReader(self._files, proof=self._proof)
        try:
            return is_written(
                self._plan,
                self._output,
                items,
                source,
                self._options,
                small_parts=self._leads,
                tick=self._ranks.check,
            )
        finally:
            source.close()

    def _accept(self, same: bool) -> str:
        """Rank 0 takes a finished output for its own, or treats it as any other that is in the way."""
        if not self._leads:
            return ""
        return Found.FINISHED.name if same else self._begin(self._store.sizes())

    def _begin(self, present: Mapping[str, int | None]) -> str:
        """Rank 0 makes room where `present` lies.

        Raises:
            UsageError: it is not to be replaced.
        """
        store, plan = self._store, self._plan
        if present and not self._output.overwrite:
            what = (
                "holds a conversion that was stopped, or is being written. Go on from it with --resume, or start "
                "anew with --overwrite"
                if MARKER in present
                else "is not empty; choose another output or replace it with --overwrite"
            )
            raise UsageError(f"{store.location} {what}.")
        if METADATA in present:
            store.remove(METADATA)
        if present:
            store.remove("")
        store.put(MARKER, json.dumps({"digest": plan.digest, "source": self._source_state}).encode())
        return Found.NOTHING.name

    def _work(self) -> list[dict[str, Any]]:
        """This rank's share of the files."""
        options, present = self._options, self._store.sizes()
        mine = share_of_files(self._plan, self._ranks.rank, self._ranks.world)
        todo = [name for name in mine if present.get(name) != self._plan.file_bytes[name]]
        source = SourceReader(self._files, proof=self._proof)
        for name in set(mine) - set(todo):
            for entry in self._entries[name]:
                if isinstance(entry, OutputItem):
                    source.note(entry.transfers)
        tile = tile_bytes(options.memory_bytes, options.threads)
        pumps = [Pump(source, tile, self._tick) for _ in range(options.threads)]
        total = sum(self._plan.file_bytes[name] for name in todo)
        queue = iter(todo)
        try:
            with ThreadPoolExecutor(options.threads) as pool:
                threads = [pool.submit(self._write_files, pump, queue) for pump in pumps]
                try:
                    while wait(threads, _WATCH_SECONDS).not_done and not self._stop.is_set():
                        self._ranks.check()
                        self._progress(self._done, total)
                finally:
                    self._stop.set()
            self._progress(self._done, total)
            errors = [e for e in (thread.exception() for thread in threads) if e]
            if errors:
                raise next((e for e in errors if not isinstance(e, _StoppedError)), errors[0])
        finally:
            source.close()
        counts: list[dict[str, Any]] = [asdict(pump.counters) for pump in pumps]
        skipped = set(mine) - set(todo)
        resumed = sum(item.file in skipped for item in self._plan.items)
        resumed += sum(blob.file in skipped for blob in self._plan.blobs)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        counts[0] |= {"resumed": resumed, "peak_rss": peak}
        return counts

    def _publish(self, found: str) -> None:
        self._ranks.check()
        if not self._leads:
            return
        store, output = self._store, self._output
        if found not in (Found.PUBLISHED.name, Found.FINISHED.name):
            after = fingerprint(self._files, self._plan.source_files)
            check_unchanged(self._source_state, after, self._files.location)
            for name, data in output.extra_files.items():
                store.put(name, data)
            if output.is_dcp:
                store.put(METADATA, metadata_bytes(self._plan))
        parent = Store(store.location.rstrip("/").rpartition("/")[0]) if output.beside else store
        for name, data in output.beside.items():
            if found == Found.FINISHED.name and name in parent.sizes():
                continue  # it was written then, and may have been changed since
            parent.put(name, data)
        store.remove(MARKER)

    def _write_files(self, pump: Pump, names: Iterator[str]) -> None:
        try:
            while not self._stop.is_set():
                with self._lock:
                    name = next(names, None)
                if name is None:
                    return
                self._write_file(pump, name)
        except BaseException:
            self._stop.set()
            raise

    def _write_file(self, pump: Pump, name: str) -> None:
        """Upload one file; begun anew when the store fails in a way that its driver cannot mend."""
        size = self._plan.file_bytes[name]
        part_bytes = max(_PART_BYTES, -(-size // _MAX_PARTS))

        def upload(_timeout: float) -> None:
            file = self._store.open_for_writing(name, part_bytes)
            try:
                for data in _content(self._entries[name], size, pump):
                    file.write(data)
                file.close()
            except BaseException:
                with suppress(Exception):  # what it was doing failed; this only frees the parts in the store
                    getattr(file, "discard", file.close)()
                raise

        self._store.call(f"{self._store.where(name)}: writing", upload)

    def _tick(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
        if self._stop.is_set():
            raise _StoppedError("another thread has failed")


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
    entries: Sequence[OutputItem | OutputBlob], size: int, pump: Pump
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
