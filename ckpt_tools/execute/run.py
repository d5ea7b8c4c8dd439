"""Carries out a plan: the public door of this room.

Every rank calls `write_checkpoint` with the same plan, and all go through the same steps (`_Job.run`). A step is run
by `Ranks.together`: all ranks call it, and none goes on before all have ended it; if one fails, all raise its error.

    step       rank 0                                                     other ranks
    digest     the plans are compared                                     the same
    prepare    takes the output (`Staging.acquire`: lock, what lies       nothing
               there); notes the state of the source; makes the files
               in full length; begins or goes on with the journal;
               writes what the plan holds itself (blobs)
    compare    only for an output that seems finished, with `resume`:     the same
               its share as it is against what would be written
    accept     takes it for its own, or prepares as for any other         nothing
    work       its share of the items (`worker_share`), by threads        the same
               (`Work`), each with a pump (`Pump`); every item that
               is done goes into the rank's journal
    prove      sums of the source that several ranks hold parts of are    the same
               joined, what nobody read is read (`prove_rest`)
    publish    source unchanged?; shards open?; small files; `.metadata`  nothing
               last; the rename; trackers; the partial folder goes

An output that a process had put in place before it was killed goes from `prepare` to the end of `publish`. An error
leaves the partial folder if somebody can go on from it (storage, signals, defects), and removes it if not (damage,
wrong masters). Into a store the order is the same, with a marker for the rename (`RemoteJob`).
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ckpt_tools.errors import CkptError, Interrupted, StorageError, Terminated, UsageError
from ckpt_tools.execute.fileio import check_direct, storage_errors, write_all
from ckpt_tools.execute.finished import is_written
from ckpt_tools.execute.folders import opened
from ckpt_tools.execute.journal import check_as_opened, check_unchanged, fingerprint
from ckpt_tools.execute.opened_shards import prove_shards
from ckpt_tools.execute.proof import SourceProof
from ckpt_tools.execute.prove import ProofReport, prove_rest
from ckpt_tools.execute.publish import Found, Staging
from ckpt_tools.execute.ranks import DistributedRanks, Ranks
from ckpt_tools.execute.signals import StopSignals
from ckpt_tools.execute.source_reader import SourceReader, forget
from ckpt_tools.execute.work import Progress, Work, tile_bytes
from ckpt_tools.formats.dcp_metadata import metadata_bytes
from ckpt_tools.formats.files import Files, LocalFiles
from ckpt_tools.formats.joined_files import JoinedFiles
from ckpt_tools.model.transfers import Plan
from ckpt_tools.plan.assign import worker_share
from ckpt_tools.plan.holes import holes

if TYPE_CHECKING:
    from ckpt_tools.execute.remote_output import RemoteJob

SourceCheck: TypeAlias = Literal["all", "none"]
"""Whether every payload that is read from must have the checksum its writer stored."""
CheckLevel: TypeAlias = Literal["sample", "all", "none"]
"""How much of fp32 masters is compared with weights: a few rows of every tensor, everything, or nothing."""


@dataclass(frozen=True, slots=True)
class Output:
    """Where the checkpoint goes, and what may already be there."""

    directory: Path | str  # str: a URL
    beside: Mapping[str, bytes] = field(
        default_factory=dict
    )  # files to replace in its parent afterwards: trackers
    extra_files: Mapping[str, bytes] = field(default_factory=dict)  # small files to put into the directory
    is_dcp: bool = True  # describe the tensors in `.metadata`, which is written last
    overwrite: bool = False
    resume: bool = False


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to work. None of it changes a byte of the result."""

    threads: int = 2
    memory_bytes: int = 96 << 20  # for buffers, in every process
    fsync: bool = False  # make everything durable before it is published, and give its page cache back
    direct: bool = False  # write past the page cache
    check_source: SourceCheck = "all"


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What was done, over all ranks; bytes are payload bytes unless said otherwise."""

    bytes_written: int  # length of all files
    bytes_read: int
    bytes_cloned: int
    bytes_kernel_copied: int
    bytes_touched: int
    items: int
    items_resumed: int
    seconds: float
    peak_rss_bytes: int  # of the largest rank
    ranks: int
    check_source: SourceCheck  # as asked for
    payloads_proven: int  # of the source
    payloads_without_checksum: int  # of the source, read from
    bytes_proven: int
    bytes_read_to_prove: int  # beside `bytes_read`: what nothing else needed
    rounded_tensors: int = 0  # with elements that a cast changed, among the items that were not resumed
    rounded_elements: int = 0
    rounded_most: str | None = None  # the key with the most of them


def write_checkpoint(
    plan: Plan,
    files: Files,
    output: Output,
    options: WriteOptions | None = None,
    *,
    ranks: Ranks | DistributedRanks | None = None,
    progress: Progress | None = None,
) -> WriteReport:
    """Write the checkpoint of `plan` from the source `files` and publish it; called on every rank.

    Raises:
        UsageError: the output is in use, not empty, or another conversion's; too little memory.
        StorageError: too little disk, or the file system refused.
        CorruptCheckpointError: a source item is damaged, or the source changed meanwhile; nothing is published.
        Interrupted, Terminated: stopped from outside; `Output.resume` goes on from there.
    """
    started = time.monotonic()
    options = options or WriteOptions()
    ranks = ranks or Ranks()
    with StopSignals() as signals:
        ranks.watch = signals.check
        job_of = _remote_job() if isinstance(output.directory, str) else _Job
        job = job_of(
            plan, files, output, options, ranks=ranks, progress=progress or (lambda done, total: None)
        )
        if len(set(ranks.together(lambda: plan.digest))) > 1:
            raise UsageError("the ranks made different plans: do they all see the same source and options?")
        counts, proven = job.run()
    resumed = sum(c.get("resumed", 0) for c in counts)
    rounded: Counter[str] = Counter()
    for count in counts:
        rounded.update(count["rounded"])
    return WriteReport(
        bytes_written=plan.bytes_to_write,
        bytes_read=sum(c["read"] for c in counts),
        bytes_cloned=sum(c["copies"]["cloned"] for c in counts),
        bytes_kernel_copied=sum(c["copies"]["kernel"] for c in counts),
        bytes_touched=sum(c["copies"]["touched"] for c in counts),
        items=len(plan.items) + len(plan.blobs),
        items_resumed=resumed if counts else len(plan.items) + len(plan.blobs),  # none: all was there
        seconds=time.monotonic() - started,
        peak_rss_bytes=max((c.get("peak_rss", 0) for c in counts), default=0),
        ranks=ranks.world,
        check_source=options.check_source,
        payloads_proven=proven.payloads,
        payloads_without_checksum=proven.without,
        bytes_proven=proven.nbytes,
        bytes_read_to_prove=proven.read_for_it,
        rounded_tensors=len(rounded),
        rounded_elements=rounded.total(),
        rounded_most=max(rounded, key=lambda key: (rounded[key], key)) if rounded else None,
    )


def _remote_job() -> type[RemoteJob]:
    from ckpt_tools.execute.remote_output import RemoteJob  # fsspec is not needed for local outputs

    return RemoteJob


def prove_source(
    proof: SourceProof | None,
    plan: Plan,
    files: Files,
    options: WriteOptions,
    ranks: Ranks | DistributedRanks,
) -> ProofReport:
    """Complete the proof of what all ranks have read for a plan; called on every rank.

    Raises:
        CorruptCheckpointError: a payload has another checksum than its archive says.
    """
    if proof is None:
        return ProofReport()
    tile = tile_bytes(options.memory_bytes, options.threads)
    return prove_rest(proof, files, plan.source_key, ranks, options.threads, tile)


def _folders(files: Files) -> list[Path]:
    """The directories of a mounted file system that a source lies in."""
    parts = files.parts if isinstance(files, JoinedFiles) else (files,)
    return [Path(part.location) for part in parts if isinstance(part, LocalFiles)]


class _Job:
    """The steps of one conversion, in order: prepare, work, prove the source, publish."""

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
        self._plan, self._files, self._output, self._options = plan, files, output, options
        self._ranks, self._progress = ranks, progress
        self._leads = ranks.rank == 0
        self._staging = Staging(
            Path(output.directory), plan.digest, plan.file_bytes, _folders(files), holes(plan)
        )
        self._source_state: list[list[object]] = []
        self._proof = SourceProof() if options.check_source != "none" else None

    def run(self) -> tuple[list[dict[str, Any]], ProofReport]:
        """The counters of every thread of every rank, and what was proven of the source."""
        counts: list[list[dict[str, Any]]] = []
        proven = ProofReport()
        try:
            found = self._ranks.together(self._prepare)[0]
            if found == Found.FINISHED.name:
                same = all(self._ranks.together(self._compare))
                found = self._ranks.together(lambda: self._accept(same))[0]
                if not same and self._proof is not None:
                    self._proof = SourceProof()
            if found not in (Found.PUBLISHED.name, Found.FINISHED.name):
                counts = self._ranks.together(self._work)
            if found != Found.PUBLISHED.name:
                proven = prove_source(self._proof, self._plan, self._files, self._options, self._ranks)
                self._forget_source()
            self._ranks.together(lambda: self._publish(found))
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            if not self._leads:
                self._staging.release()  # the handles; the lock is the leading rank's
        return [count for share in counts for count in share], proven

    def _prepare(self) -> str:
        """Rank 0 takes the output."""
        tile_bytes(self._options.memory_bytes, self._options.threads)
        if not self._leads:
            return ""
        found = self._staging.acquire(self._output.overwrite, self._output.resume)
        return found.name if found is Found.FINISHED else self._begin(found)

    def _compare(self) -> bool:
        """Whether this rank's share is there already as it would be written."""
        share = worker_share(self._plan.items, self._ranks.rank, self._ranks.world)
        items = self._plan.items[share.start : share.stop]
        with closing(SourceReader(self._files, self._staging.partial, self._proof)) as source:
            return is_written(
                self._plan,
                self._output,
                items,
                source,
                self._options,
                small_parts=self._leads,
                tick=self._ranks.check,
            )

    def _accept(self, same: bool) -> str:
        """Rank 0 takes a finished output for its own, or treats it as any other that is in the way."""
        if not self._leads:
            return ""
        if same:
            return Found.FINISHED.name
        return self._begin(self._staging.begin(self._output.overwrite, self._output.resume))

    def _begin(self, found: Found) -> str:
        """Rank 0 makes the files in full length."""
        self._source_state = fingerprint(self._files, self._plan)
        if found is Found.PUBLISHED:
            return found.name
        if self._options.direct:
            check_direct(self._staging.partial)
        if found is Found.UNFINISHED:
            self._staging.journal.resume(self._plan, self._source_state, self._files.location)
        self._staging.create_files()
        if found is Found.NOTHING:
            self._staging.journal.begin(self._plan, self._source_state)
        self._write_blobs(self._options.fsync)
        return found.name

    def _write_blobs(self, sync: bool) -> None:
        with self._staging.open_data() as folder:
            for name in dict.fromkeys(blob.file for blob in self._plan.blobs):
                with opened(folder, name, os.O_RDWR) as fd, storage_errors(folder.path / name):
                    shared = {blob.offset: blob.data for blob in self._plan.blobs if blob.file == name}
                    for offset, data in shared.items():
                        write_all(fd, data, offset)
                    if sync:
                        os.fsync(fd)

    def _work(self) -> list[dict[str, Any]]:
        """This rank's share of the items."""
        plan, staging, options = self._plan, self._staging, self._options
        share = worker_share(plan.items, self._ranks.rank, self._ranks.world)
        finished = staging.journal.finished()
        staging.journal.open(self._ranks.rank)
        source, data = SourceReader(self._files, staging.partial, self._proof), staging.open_data()
        work = Work(
            plan,
            share,
            source,
            data,
            journal=staging.journal,
            sync=options.fsync,
            direct=options.direct,
        )
        try:
            tile = tile_bytes(options.memory_bytes, options.threads)
            counters = work.run(finished, options.threads, tile, self._ranks.check, self._progress)
        finally:
            source.close()
            data.close()
            staging.journal.close()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        counts = [asdict(c) for c in counters]
        counts[0] |= {"resumed": work.resumed, "peak_rss": peak}
        return counts

    def _forget_source(self) -> None:
        """Give the page cache of what this rank has read back, as that of what it wrote."""
        if self._options.fsync or self._options.direct:
            forget(self._files, self._plan.source_files)

    def _publish(self, found: str) -> None:
        self._ranks.check()
        if not self._leads:
            return
        staging, output, sync = self._staging, self._output, self._options.fsync
        if found not in (Found.PUBLISHED.name, Found.FINISHED.name):
            after = fingerprint(self._files, self._plan)
            check_unchanged(self._source_state, after, self._files.location)
            check_as_opened(self._files)
            prove_shards(self._plan, staging.data)
            for name, data in output.extra_files.items():
                staging.write_file(name, data, sync)
            if output.is_dcp:
                staging.write_file(".metadata", metadata_bytes(self._plan), sync)
            staging.publish(sync, output.overwrite)
        for name, data in output.beside.items():
            if found == Found.FINISHED.name and staging.parent().exists(name):
                continue  # it was written then, and may have been changed since
            staging.write_beside(name, data)
        staging.discard()

    def _leave(self, error: BaseException) -> None:
        """Keep what another process can go on from; remove work that no one can use."""
        if not self._leads or not self._staging.held:
            return
        usable = isinstance(error, StorageError | UsageError | Interrupted | Terminated) or not isinstance(
            error, CkptError
        )
        if usable and self._staging.journal.exists():
            self._staging.release()
        else:
            self._staging.discard()
