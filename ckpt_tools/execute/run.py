"""Carries out a plan: the public door of this room."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tools.catalog.files import Files
from ckpt_tools.errors import CkptError, Interrupted, StorageError, Terminated, UsageError
from ckpt_tools.execute.dcp_metadata import metadata_bytes
from ckpt_tools.execute.fileio import check_direct, replace_file, storage_errors, write_all
from ckpt_tools.execute.journal import check_unchanged, fingerprint
from ckpt_tools.execute.publish import Found, Staging
from ckpt_tools.execute.ranks import DistributedRanks, Ranks
from ckpt_tools.execute.signals import StopSignals
from ckpt_tools.execute.source import SourceReader, forget
from ckpt_tools.execute.work import Progress, Work, tile_bytes
from ckpt_tools.plan.assign import worker_share
from ckpt_tools.plan.model import Plan, stored_parts

if TYPE_CHECKING:
    from ckpt_tools.execute.remote_output import RemoteJob


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
        CorruptCheckpointError: a source item is damaged, or the source changed meanwhile.
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
        counts = job.run()
    return WriteReport(
        bytes_written=plan.bytes_to_write,
        bytes_read=sum(c["read"] for c in counts),
        bytes_cloned=sum(c["copies"]["cloned"] for c in counts),
        bytes_kernel_copied=sum(c["copies"]["kernel"] for c in counts),
        bytes_touched=sum(c["copies"]["touched"] for c in counts),
        items=len(plan.items) + len(plan.blobs),
        items_resumed=sum(c.get("resumed", 0) for c in counts),
        seconds=time.monotonic() - started,
        peak_rss_bytes=max((c.get("peak_rss", 0) for c in counts), default=0),
        ranks=ranks.world,
    )


def _remote_job() -> type[RemoteJob]:
    from ckpt_tools.execute.remote_output import RemoteJob  # fsspec is not needed for local outputs

    return RemoteJob


class _Job:
    """The steps of one conversion, in order: prepare, work, publish."""

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
        self._staging = Staging(Path(output.directory), plan.digest, plan.file_bytes)
        self._source_state: list[list[object]] = []

    def run(self) -> list[dict[str, Any]]:
        """The counters of every thread of every rank."""
        try:
            found = self._ranks.together(self._prepare)[0]
            if found == Found.PUBLISHED.name:
                counts: list[list[dict[str, Any]]] = []
            else:
                counts = self._ranks.together(self._work)
            self._ranks.together(lambda: self._publish(found))
        except BaseException as error:
            self._leave(error)
            raise
        return [count for share in counts for count in share]

    def _prepare(self) -> str:
        """Rank 0 takes the output and makes its files in full length."""
        tile_bytes(self._options.memory_bytes, self._options.threads)
        if not self._leads:
            return ""
        found = self._staging.acquire(self._output.overwrite, self._output.resume)
        self._source_state = fingerprint(self._files, self._plan.source_files)
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
        for name in dict.fromkeys(blob.file for blob in self._plan.blobs):
            path = self._staging.data / name
            with storage_errors(path), open(path, "r+b", buffering=0) as file:
                shared = {blob.offset: blob.data for blob in self._plan.blobs if blob.file == name}
                for offset, data in shared.items():
                    write_all(file.fileno(), data, offset)
                if sync:
                    os.fsync(file.fileno())

    def _work(self) -> list[dict[str, Any]]:
        """This rank's share of the items."""
        plan, staging, options = self._plan, self._staging, self._options
        share = worker_share(plan.items, self._ranks.rank, self._ranks.world)
        finished = staging.journal.finished()
        staging.journal.open(self._ranks.rank)
        source = SourceReader(self._files, staging.partial)
        work = Work(
            plan,
            share,
            source,
            staging.data,
            journal=staging.journal,
            sync=options.fsync,
            direct=options.direct,
        )
        try:
            tile = tile_bytes(options.memory_bytes, options.threads)
            counters = work.run(finished, options.threads, tile, self._ranks.check, self._progress)
        finally:
            source.close()
            staging.journal.close()
        if options.fsync or options.direct:
            forget(self._files, {t.item.file for i in share for t in stored_parts(plan.items[i].transfers)})
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        counts = [asdict(c) for c in counters]
        counts[0] |= {"resumed": work.resumed, "peak_rss": peak}
        return counts

    def _publish(self, found: str) -> None:
        self._ranks.check()
        if not self._leads:
            return
        staging, output, sync = self._staging, self._output, self._options.fsync
        if found != Found.PUBLISHED.name:
            after = fingerprint(self._files, self._plan.source_files)
            check_unchanged(self._source_state, after, self._files.location)
            for name, data in output.extra_files.items():
                staging.write_file(name, data, sync)
            if output.is_dcp:
                staging.write_file(".metadata", metadata_bytes(self._plan), sync)
            staging.publish(sync, output.overwrite)
        for name, data in output.beside.items():
            path = Path(output.directory).parent / name
            with storage_errors(path):
                replace_file(path, data)
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
