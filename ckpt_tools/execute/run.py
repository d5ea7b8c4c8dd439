"""Carries out a plan: the public door of this room.

Every rank calls `write_checkpoint` with the same plan, and all go through the same steps (`_Run`). A step is run by
`Ranks.together`: all ranks call it, and none continues before all have ended it; if one fails, all raise its error.

    step     rank 0                                                       other ranks
    agree    the plans are compared                                       the same
    take     notes the state of the source; takes the output, sees what   nothing
             lies there, makes it ready to be written into
    see      whether all see the output that was taken                    the same
    compare  only for an output that seems finished, with `resume`: its   the same
             share of the output against what would be written
    accept   keeps it as its own, or begins as for any other              nothing
    open     of a store: sees what is there, begins files that several ranks      nothing
             write
    work     its share, by threads (`WorkerThreads`), each with a pump (`Pump`)    the same
    verify   only with `verify_output`: reads its share back and compares it       the same
    prove    sums of the source that several ranks hold parts of are      the same
             joined, what nobody read is read (`prove_rest`)
    publish  source unchanged?; shards open?; small files; `.metadata`    nothing
             last; published; trackers; what only the work needed goes

What a step does to an output is asked of `JobOutput`: `LocalOutput` (a lock, files made in full length, a journal of
items, a rename) or `RemoteOutput` (a marker, whole files uploaded front to back). An output that a process had put in
place before it was killed goes from `take` to the end of `publish`.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, Final, TypedDict

from ckpt_tools.errors import CorruptCheckpointError, UsageError, VerificationError
from ckpt_tools.execute.move.source_reader import SourceReader, forget
from ckpt_tools.execute.output.checks import has_blobs, is_written
from ckpt_tools.execute.output.journal import check_unchanged, check_unchanged_since_open, fingerprint
from ckpt_tools.execute.output.local_output import LocalOutput
from ckpt_tools.execute.output.trackers import is_tracked, tracker_change
from ckpt_tools.execute.processes.ranks import Ranks, StopSignals
from ckpt_tools.execute.proof.payload_sums import SourceProof
from ckpt_tools.execute.proof.prove_source import ProofReport, prove_rest
from ckpt_tools.execute.write_job import (
    Found,
    JobOutput,
    Output,
    Preview,
    Progress,
    SourceState,
    WriteJob,
    WriteOptions,
    WriteReport,
)
from ckpt_tools.formats.dcp.metadata_write import metadata_bytes
from ckpt_tools.formats.locate.detect import TRACKER
from ckpt_tools.formats.storage.drivers import Part
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.model.transfers import Plan, stored_parts

__all__ = ["Output", "WriteOptions", "WriteReport", "write_checkpoint"]

_IN_PLACE: Final = ("published", "finished")


def write_checkpoint(
    plan: Plan,
    files: Files,
    output: Output,
    options: WriteOptions | None = None,
    *,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
    kept: Container[tuple[str, str]] = (),
) -> WriteReport:
    """Write the checkpoint of `plan` from the source `files` and publish it; called on every rank.

    `kept` are casts that lose nothing, see `target.kept_exactly`: the report counts what they round apart.
    """
    started = time.monotonic()
    ranks = ranks or Ranks()
    job = WriteJob(
        plan, files, output, options or WriteOptions(), ranks, progress or (lambda done, total: None)
    )
    with StopSignals() as signals:
        ranks.watch = signals.check
        run = _Run(job, _output_of(job))
        ranks.agree({"plan": plan.digest})
        shares, proven = run.steps()
    ranks.watch = lambda: None
    done = _report(job, shares, proven, kept, time.monotonic() - started)
    return replace(done, replaced=run.output.replaced, tracker=run.tracker, is_tracked=run.is_tracked)


def rehearse(
    plan: Plan,
    files: Files,
    output: Output,
    options: WriteOptions | None = None,
    ranks: Ranks | None = None,
) -> Preview:
    """What `write_checkpoint` will find, if it would begin; called on every rank.

    Raises the errors that it would: an output that cannot be taken, too little disk or memory, source files that are
    absent or too short.
    """
    ranks = ranks or Ranks()
    job = WriteJob(plan, files, output, options or WriteOptions(), ranks, lambda done, total: None)

    def look() -> Preview:
        assert job.thread_memory.tile  # or nobody begins
        if ranks.rank:
            return Preview()
        there = _output_of(job)
        is_done = there.look()
        _check_extents(plan, files)
        latest = None if is_done else output.beside.get(TRACKER)
        return Preview(
            there.replaced, None if latest is None else tracker_change(output.directory, latest.decode())[1]
        )

    ranks.agree({"plan": plan.digest})
    return Preview(*ranks.together(look)[0])


def _check_extents(plan: Plan, files: Files) -> None:
    """Every source file is there and reaches to the end of what is read of it."""
    ends: dict[str, tuple[int, str]] = {}
    for item in (*plan.linked, *plan.items):
        for transfer in stored_parts(item.transfers):
            stored = transfer.item
            end = stored.offset + stored.length
            if end > ends.get(stored.file, (0, ""))[0]:
                ends[stored.file] = end, transfer.key
    for name, (end, key) in ends.items():
        size = files.size(name)
        if size < end:
            raise CorruptCheckpointError(
                f"{files.location}/{name}: has {size} bytes, but {key} lies at bytes up to {end}. The file was cut "
                "short; copy it again, or use another iteration."
            )


def _output_of(job: WriteJob) -> JobOutput:
    if not isinstance(job.output.directory, str):
        return LocalOutput(job)
    if job.plan.links:
        raise UsageError(
            f"--hard-link: {job.output.directory} is in an object store, which has no links. Leave it out"
        )
    if job.options.verify_output:
        raise UsageError(
            "--verify: an object store shows no output before it is published. Leave it out, and run "
            f"`verify {job.output.directory} --content` afterwards"
        )
    from ckpt_tools.execute.output.remote_output import RemoteOutput  # fsspec is not needed for local outputs

    return RemoteOutput(job)


class _Share(TypedDict):
    """What a rank tells the others of its work, as JSON."""

    counters: list[dict[str, Any]]  # of every thread
    resumed: int
    versions: Mapping[str, str | None]
    parts: Mapping[str, Sequence[tuple[int, str]]]
    peak_rss: int


class _Run:
    """The steps of one job on this rank, in order."""

    def __init__(self, job: WriteJob, output: JobOutput) -> None:
        self._job, self.output = job, output
        self._leads = job.ranks.rank == 0
        self.tracker: str | None = None  # rank 0: what became of it
        self.is_tracked = False
        self._source_state: SourceState = []
        self._proof = self._new_proof()

    def _new_proof(self) -> SourceProof | None:
        return SourceProof() if self._job.options.check_source == "all" else None

    def steps(self) -> tuple[list[_Share], ProofReport]:
        """What every rank has done, and what was proven of the source."""
        together = self._job.ranks.together
        shares: list[_Share] = []
        proven = ProofReport()
        try:
            found, self.output.token = together(self._take)[0]
            together(self.output.check_token)
            if found == "finished":
                same = all(together(self._compare))
                found, self.output.token = together(lambda: self._accept(same))[0]
                self._proof = self._proof if same else self._new_proof()
            if found not in _IN_PLACE:
                files = together(lambda: self.output.open_files() if self._leads else {})[0]
                shares = together(lambda: self._work(files))
                if self._job.options.verify_output and not all(together(self._read_back)):
                    raise VerificationError(
                        f"{self._job.output.directory}: what was read back is not what was written. Nothing was "
                        "published. Check the disk and its file system, and convert again."
                    )
            if found != "published":
                proven = self._prove()
            together(lambda: self._publish(found, shares))
        except BaseException as error:
            if self._leads:
                self.output.leave(error)
            raise
        finally:
            self.output.close()
        return shares, proven

    def _take(self) -> tuple[Found, str]:
        """Rank 0 takes the output: what an earlier process has left there, and the output's token."""
        job = self._job
        assert job.thread_memory.tile  # or nobody begins
        if not self._leads:
            return "nothing", ""
        self._source_state = fingerprint(job.files, job.plan)
        found = self.output.take(self._source_state)
        self.output.draw_token()
        return found, self.output.token

    def _compare(self) -> bool:
        """Whether this rank's share is there already as it would be written."""
        job = self._job
        with closing(self._source()) as source:
            return is_written(
                job.plan,
                job.output,
                self.output.share(),
                source,
                job.options,
                small_parts=self._leads,
                tick=job.ranks.check,
            )

    def _read_back(self) -> bool:
        """Whether this rank's share is in the unpublished output as it should be."""
        job, data = self._job, self.output.data
        assert data is not None  # of a store nothing is read back
        with (
            closing(self._source(proven=False)) as source,
            closing(open_files(str(data))) as there,
        ):
            return has_blobs(job.plan, there) and is_written(
                job.plan,
                replace(job.output, directory=data),
                self.output.share(),
                source,
                job.options,
                small_parts=False,
                tick=job.ranks.check,
            )

    def _accept(self, same: bool) -> tuple[Found, str]:
        """Rank 0 takes a finished output for its own, or treats it as any other that is in the way."""
        found: Found = "finished"
        if self._leads and same:
            self.output.keep()
        elif self._leads:
            found = self.output.begin()
        return found, self.output.token

    def _work(self, opened: Mapping[str, str | None]) -> _Share:
        with closing(self._source()) as source:
            done = self.output.work(source, opened)
        return {
            "counters": [asdict(counters) for counters in done.counters],
            "resumed": done.resumed,
            "versions": done.versions,
            "parts": {
                name: [(part.number, part.tag) for part in parts] for name, parts in done.parts.items()
            },
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def _source(self, proven: bool = True) -> SourceReader:
        sums = self._job.options.check_source != "unread"
        return SourceReader(self._job.files, self.output.scratch, self._proof if proven else None, sums)

    def _prove(self) -> ProofReport:
        """Complete the proof of what all ranks have read; then the source is not needed any more."""
        files, plan, options, ranks = self._job.files, self._job.plan, self._job.options, self._job.ranks
        proven = ProofReport()
        if self._proof is not None:
            memory = self._job.thread_memory
            proven = prove_rest(
                self._proof, files, plan.source_key, ranks, options.threads, memory.tile, memory.ahead
            )
        if options.fsync or options.direct:  # its page cache goes back, as that of what was written
            forget(files, plan.source_files)
        return proven

    def _publish(self, found: Found, shares: Sequence[_Share]) -> None:
        self._job.ranks.check()
        if not self._leads:
            return
        job, output = self._job, self.output
        if found not in _IN_PLACE:
            check_unchanged(self._source_state, fingerprint(job.files, job.plan), job.files.location)
            check_unchanged_since_open(job.files)
            versions = {name: version for share in shares for name, version in share["versions"].items()}
            parts: dict[str, list[Part]] = {}
            for share in shares:
                for name, rows in share["parts"].items():
                    parts.setdefault(name, []).extend(Part(*row) for row in rows)
            output.publish(metadata_bytes(job.plan) if job.output.is_dcp else None, versions, parts)
        trackers = dict(job.output.beside)
        if found == "finished":  # they were written then, and may have been changed since
            trackers = {name: content for name, content in trackers.items() if not output.has_beside(name)}
        with output.trackers_locked() if trackers else nullcontext():
            if TRACKER in trackers:
                stays, self.tracker = tracker_change(job.output.directory, trackers[TRACKER].decode())
                trackers = {} if stays else trackers
            for name, content in trackers.items():
                output.write_beside(name, content)
        self.is_tracked = is_tracked(job.output.directory)
        output.finish()


def _report(
    job: WriteJob,
    shares: Sequence[_Share],
    proven: ProofReport,
    kept: Container[tuple[str, str]],
    seconds: float,
) -> WriteReport:
    counts = [count for share in shares for count in share["counters"]]
    rounded: Counter[str] = Counter()
    rounded_and_kept = 0
    for key, sources in chain.from_iterable(count["rounded"].items() for count in counts):
        for source, changed in sources.items():
            if (key, source) in kept:
                rounded_and_kept += changed
            else:
                rounded[key] += changed
    items = len(job.plan.linked) + len(job.plan.items) + len(job.plan.blobs)
    return WriteReport(
        bytes_written=job.plan.bytes_to_write,
        bytes_read=sum(count["read"] for count in counts),
        bytes_cloned=sum(count["copies"]["cloned"] for count in counts),
        bytes_kernel_copied=sum(count["copies"]["kernel"] for count in counts),
        bytes_touched=sum(count["copies"]["touched"] for count in counts),
        items=items,
        items_resumed=sum(share["resumed"] for share in shares) if shares else items,  # none: all was there
        seconds=seconds,
        peak_rss_bytes=max((share["peak_rss"] for share in shares), default=0),
        ranks=job.ranks.world,
        check_source=job.options.check_source,
        payloads_proven=proven.payloads,
        payloads_without_checksum=proven.without,
        bytes_proven=proven.nbytes,
        bytes_read_to_prove=proven.read_for_it,
        rounded_tensors=len(rounded),
        rounded_elements=rounded.total(),
        rounded_most=max(rounded, key=lambda key: (rounded[key], key)) if rounded else None,
        rounded_and_kept=rounded_and_kept,
        output_verified=job.options.verify_output and bool(shares),
        directory=str(job.output.directory),
    )
