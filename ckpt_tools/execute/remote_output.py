"""Carries out a plan into an object store, where nothing can be renamed and files are written front to back.

Objects appear whole or not at all (multipart uploads), so each is uploaded to its final name, in the order::

    .ckpt_tools-partial   the marker: what is being written, from what and by whom (a run's token). `--resume` skips
                          objects that are there in full length
    __<r>_<n>.distcp ...  data; a worker has whole files, each thread streams one at a time
    .metadata             last: without it no loader takes the folder for a checkpoint
    trackers              beside the folder; then the partial marker is deleted

Replacing a checkpoint deletes its `.metadata` first: at no time can a mix of old and new be loaded.

A store has no locks. Of two runs with one output the last to write the marker has it; the other finds a foreign token
when it looks, before and after each file and before `.metadata`, and stops without touching anything. What it may
have replaced until then is found by the versions of the objects.
"""

from __future__ import annotations

import json
import os
import resource
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckpt_tools.credentials import hidden
from ckpt_tools.errors import CkptError, CorruptCheckpointError, UsageError
from ckpt_tools.execute.finished import METADATA, has_files, is_written
from ckpt_tools.execute.journal import check_as_opened, check_unchanged, fingerprint, is_fingerprint
from ckpt_tools.execute.opened_shards import prove_uploaded
from ckpt_tools.execute.proof import SourceProof
from ckpt_tools.execute.prove import ProofReport
from ckpt_tools.execute.publish import Found
from ckpt_tools.execute.ranks import DistributedRanks, Ranks
from ckpt_tools.execute.run import prove_source
from ckpt_tools.execute.source_reader import SourceReader
from ckpt_tools.execute.stream import Pump
from ckpt_tools.execute.work import Progress, tile_bytes
from ckpt_tools.formats.dcp_metadata import metadata_bytes
from ckpt_tools.formats.files import Files, open_files
from ckpt_tools.formats.store import CONNECTIONS, WEB, Retry, Store
from ckpt_tools.model.transfers import OutputBlob, OutputItem, Plan

if TYPE_CHECKING:
    from ckpt_tools.execute.run import Output, WriteOptions

MARKER = ".ckpt_tools-partial"
_PART_BYTES = 16 << 20  # of a multipart upload; held in memory by every thread
_MARKER_BYTES = 256 << 20  # it tells of every file of the source
_MAX_PARTS = 9000  # S3 allows 10,000
_WATCH_SECONDS = 0.1
_LEAVING = Retry(attempts=1, patience=5.0)  # a run that failed tidies up, but waits for nobody


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
        """Raises: UsageError: the output cannot be opened or written at all; `--direct`."""
        self._plan, self._files, self._output, self._options = plan, files, output, options
        self._ranks, self._progress = ranks, progress
        self._leads = ranks.rank == 0
        self._store = open_store(output, options)
        self._token = ""  # of the run that has the output; all ranks learn it
        self._entries = _entries_by_file(plan)
        self._source_state: list[list[object]] = []
        self._proof = SourceProof() if options.check_source != "none" else None
        self._versions: dict[str, str | None] = {}  # of the files this rank has in the store
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._done = 0

    def run(self) -> tuple[list[dict[str, Any]], ProofReport]:
        """The counters of every thread of every rank, and what was proven of the source."""
        try:
            found, self._token = self._ranks.together(self._prepare)[0]
            if found == Found.FINISHED.name:
                found = self._take_finished()
            counts: list[list[dict[str, Any]]] = []
            proven = ProofReport()
            if found not in (Found.PUBLISHED.name, Found.FINISHED.name):
                counts = self._ranks.together(self._work)
            if found != Found.PUBLISHED.name:
                proven = prove_source(self._proof, self._plan, self._files, self._options, self._ranks)
            versions = {
                name: version for share in counts for name, version in share[0].pop("versions").items()
            }
            self._ranks.together(lambda: self._publish(found, versions))
        except BaseException:
            self._leave()
            raise
        return [count for share in counts for count in share], proven

    def _take_finished(self) -> str:
        """Compare a finished output with what would be written; what was found, after that."""
        same = all(self._ranks.together(self._compare))
        found, self._token = self._ranks.together(lambda: self._accept(same))[0]
        if not same and self._proof is not None:
            self._proof = SourceProof()
        return found

    def _prepare(self) -> tuple[str, str]:
        """Rank 0 takes the output; what an earlier process has left there, and this run's token."""
        tile_bytes(self._options.memory_bytes, self._options.threads)
        if not self._leads:
            return "", ""
        plan, store, location = self._plan, self._store, self._files.location
        self._source_state = fingerprint(self._files, plan)
        present = store.sizes()
        goes_on = self._output.resume and MARKER in present
        if goes_on and (present[MARKER] or 0) > _MARKER_BYTES:
            raise self._not_a_marker()
        header = self._marker() if goes_on else None
        if header and header.get("digest") is None and self._output.overwrite:
            header = None  # stopped while the old files were being deleted: no work to go on from
        if header is not None:
            if header.get("digest") != plan.digest:
                raise UsageError(
                    f"{store.location} was begun with another plan (other options, source or version). Repeat "
                    "the command with the same options, or start anew with --overwrite."
                )
            check_unchanged(header["source"], self._source_state, location)
            self._take(withdraw=False, clear=False)
            return (Found.PUBLISHED if METADATA in present else Found.UNFINISHED).name, self._token
        if self._output.resume and self._may_be_finished(present):
            return Found.FINISHED.name, self._token
        return self._begin(present), self._token

    def _may_be_finished(self, present: Mapping[str, int | None]) -> bool:
        """Whether all files are there in full length, and nothing that `--overwrite` is to remove."""
        output, plan = self._output, self._plan
        strange = present.keys() - {METADATA, *plan.file_bytes, *output.extra_files}
        is_marked = METADATA in present or not output.is_dcp
        return is_marked and has_files(plan.file_bytes, present) and not (output.overwrite and strange)

    def _compare(self) -> bool:
        """Whether this rank's share is there already as it would be written."""
        mine = set(share_of_files(self._plan, self._ranks.rank, self._ranks.world))
        items = [item for item in self._plan.items if item.file in mine]
        with closing(SourceReader(self._files, proof=self._proof)) as source:
            return is_written(
                self._plan,
                self._output,
                items,
                source,
                self._options,
                small_parts=self._leads,
                tick=self._ranks.check,
            )

    def _accept(self, same: bool) -> tuple[str, str]:
        """Rank 0 takes a finished output for its own, or treats it as any other that is in the way."""
        if not self._leads:
            return "", ""
        if not same:
            return self._begin(self._store.sizes()), self._token
        self._take(withdraw=False, clear=False)
        return Found.FINISHED.name, self._token

    def _begin(self, present: Mapping[str, int | None]) -> str:
        """Rank 0 makes room where `present` lies.

        Raises:
            UsageError: it is not to be replaced.
        """
        store = self._store
        if present and not self._output.overwrite:
            raise refuse_present(store, present)
        self._take(withdraw=METADATA in present, clear=bool(present))
        return Found.NOTHING.name

    def _take(self, withdraw: bool, clear: bool) -> None:
        """Make the output this run's: what was written there until now cannot be completed any more."""
        self._token = uuid.uuid4().hex
        if withdraw:  # before all else: from here on no loader takes the folder for a checkpoint
            self._store.remove(METADATA)
        # With nothing to compare: nothing that lies here now can be gone on from.
        self._put_marker(None if clear else self._plan.digest)
        if clear:
            self._store.clear(keep=MARKER)
        self._store.abort_uploads()
        if clear:
            self._check_marker()
            self._put_marker(self._plan.digest)
        self._check_marker()

    def _put_marker(self, digest: str | None) -> None:
        owner = f"process {os.getpid()} on {os.uname().nodename}"
        header = {"digest": digest, "source": self._source_state, "token": self._token, "owner": owner}
        self._store.put(MARKER, json.dumps(header).encode())

    def _marker(self) -> dict[str, Any]:
        """What the marker says; nothing when there is none.

        Raises:
            UsageError: no marker of this tool.
        """
        try:
            found = json.loads(self._store.get(MARKER))
        except FileNotFoundError:
            return {}
        except ValueError:
            found = None
        if not isinstance(found, dict) or not is_fingerprint(found.setdefault("source", [])):
            raise self._not_a_marker()
        return found

    def _not_a_marker(self) -> UsageError:
        return UsageError(
            f"{self._store.where(MARKER)} was not written by this version. Start anew with --overwrite."
        )

    def _check_marker(self) -> None:
        """Go on as long as the output is this run's.

        Raises:
            UsageError: another run has taken it.
        """
        found = self._marker()
        if found.get("token") != self._token:
            raise UsageError(
                f"{self._store.location} was taken by another converter ({found.get('owner', 'it has ended')}) while "
                "this one wrote there. This one stops and leaves everything as it is; choose another output, or wait "
                "for the other one."
            )

    def _leave(self) -> None:
        """End the uploads of ranks that could not end them on their own; what is whole stays, for `--resume`."""
        if not self._leads or not self._token:
            return
        self._store.retry = _LEAVING
        with suppress(Exception):
            self._check_marker()
            self._store.abort_uploads()

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
        self._versions.update({name: self._store.version(name) for name in sorted(skipped)})
        resumed = sum(item.file in skipped for item in self._plan.items)
        resumed += sum(blob.file in skipped for blob in self._plan.blobs)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        counts[0] |= {"resumed": resumed, "peak_rss": peak, "versions": self._versions}
        return counts

    def _publish(self, found: str, versions: Mapping[str, str | None]) -> None:
        self._ranks.check()
        if not self._leads:
            return
        store, output = self._store, self._output
        if found not in (Found.PUBLISHED.name, Found.FINISHED.name):
            after = fingerprint(self._files, self._plan)
            check_unchanged(self._source_state, after, self._files.location)
            check_as_opened(self._files)
            metadata = metadata_bytes(self._plan) if output.is_dcp else b""
            self._check_marker()
            with closing(open_files(str(output.directory))) as there:
                prove_uploaded(self._plan, there)
            for name, data in output.extra_files.items():
                store.put(name, data)
            self._check_marker()  # a run that lost says so, not which of its files are gone
            self._check_objects(versions)
            self._check_marker()
            if output.is_dcp:
                store.put(METADATA, metadata)
        parent = Store(store.parent) if output.beside else store
        for name, data in output.beside.items():
            if found == Found.FINISHED.name and name in parent.sizes():
                continue  # it was written then, and may have been changed since
            parent.put(name, data)
        self._check_marker()
        store.remove(MARKER)

    def _check_objects(self, versions: Mapping[str, str | None]) -> None:
        """Prove that every file is the one that was uploaded.

        Raises:
            CorruptCheckpointError: some are not; nothing is published.
        """
        present = self._store.sizes()
        names = [name for name, size in self._plan.file_bytes.items() if present.get(name) == size]
        with ThreadPoolExecutor(CONNECTIONS, "ckpt-check") as pool:
            now = dict(zip(names, pool.map(self._store.version, names), strict=True))
        changed = [name for name in self._plan.file_bytes if name not in now or now[name] != versions[name]]
        if changed:
            raise CorruptCheckpointError(
                f"{self._store.location}: {', '.join(changed[:5])} changed after this run had uploaded it; another "
                "converter writes there too. Nothing was published. Convert again with --overwrite when it has ended."
            )

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
            self._check_marker()
            file = self._store.open_for_writing(name, part_bytes)
            try:
                for data in _content(self._entries[name], size, pump):
                    file.write(data)
                self._check_marker()
                file.close()
            except BaseException:
                self._drop(file, name)
                raise

        self._store.call(f"{self._store.where(name)}: writing", upload)
        version = self._store.version(name)
        with self._lock:
            self._versions[name] = version

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

    def _tick(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
        if self._stop.is_set():
            raise _StoppedError("another thread has failed")


def open_store(output: Output, options: WriteOptions) -> Store:
    """The store of an output.

    Raises:
        UsageError: it cannot be opened or written at all; `--direct`.
    """
    if options.direct:
        raise UsageError(f"--direct is for files; {output.directory} is in an object store. Leave it out.")
    location = hidden(str(output.directory))
    if location.partition("://")[0].lower() in WEB:  # whether or not its driver is installed
        raise UsageError(f"{location} is read only; choose another output.")
    store = Store(str(output.directory))
    if not store.root.strip("/"):
        raise UsageError(f"{location} does not name a folder; choose another output.")
    return store


def refuse_present(store: Store, present: Iterable[str]) -> UsageError:
    """What to say of an output with files in it that no option gives up."""
    what = "is not empty; choose another output or replace it with --overwrite"
    if MARKER in present:
        what = (
            "holds a conversion that was stopped, or is being written. Go on from it with --resume, or start anew "
            "with --overwrite"
        )
    return UsageError(f"{store.location} {what}.")


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
