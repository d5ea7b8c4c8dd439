"""A job's output in a directory of a mounted file system.

Rank 0 locks a hidden directory beside it (`Staging`), makes all files there in full length and writes what the plan
holds itself (blobs). Every rank writes its items, a run of neighbours, and notes each in its journal. Rank 0 renames
the directory into place.

An error leaves the hidden directory if somebody can go on from it (storage, signals, defects), and removes it if not
(damage, wrong masters).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from ckpt_tools.execute.move.source_reader import SourceReader
from ckpt_tools.execute.output.fileio import check_direct, storage_errors, write_all
from ckpt_tools.execute.output.finished import has_files, lengths
from ckpt_tools.execute.output.folders import opened
from ckpt_tools.execute.output.journal import Journal, fingerprint
from ckpt_tools.execute.output.opened_shards import prove_shards
from ckpt_tools.execute.output.staging import Staging, can_go_on
from ckpt_tools.execute.processes.threads import Work
from ckpt_tools.execute.write_job import METADATA, Done, Found, SourceState, WriteJob
from ckpt_tools.formats.storage.drivers import Part
from ckpt_tools.formats.storage.files import Files, LocalFiles
from ckpt_tools.formats.storage.joined_files import JoinedFiles
from ckpt_tools.model.transfers import OutputItem
from ckpt_tools.plan.build import holes, worker_share


class LocalOutput:
    """See `JobOutput`."""

    token = ""  # the lock says whose it is

    def __init__(self, job: WriteJob) -> None:
        self._job = job
        final = Path(job.output.directory)
        plan = job.plan
        self._staging = Staging(
            final, plan.digest, plan.file_bytes, _folders_of(job.files), holes(plan), job.output.extra_files
        )
        self._state: SourceState = []
        self.scratch: Path | None = self._staging.partial
        self.data: Path | None = self._staging.data

    @property
    def replaced(self) -> str | None:
        return self._staging.replaced

    def look(self) -> None:
        job, staging = self._job, self._staging
        if job.output.resume and has_files(job.plan.file_bytes, lengths(staging.final)):
            return  # perhaps all is done: that is for who writes to find out

        def check_journal(journal: Journal) -> None:
            journal.resume(job.plan, fingerprint(job.files, job.plan), job.files.location)

        staging.look(job.output.overwrite, job.output.resume, job.options.direct, check_journal)

    def take(self, state: SourceState) -> Found:
        self._state = state
        found = self._staging.acquire(self._job.output.overwrite, self._job.output.resume)
        if found in ("nothing", "unfinished"):
            self._make_files(found)
        return found

    def keep(self) -> None:
        """It is in place, and locked."""

    def begin(self) -> Found:
        found = self._staging.begin(self._job.output.overwrite, self._job.output.resume)
        self._make_files(found)
        return found

    def _make_files(self, found: Found) -> None:
        """All files in full length, with the blobs in them, and a journal."""
        plan, staging = self._job.plan, self._staging
        if self._job.options.direct:
            check_direct(staging.partial)
        if found == "unfinished":
            staging.journal.resume(plan, self._state, self._job.files.location)
        staging.create_files()
        if found == "nothing":
            staging.journal.begin(plan, self._state)
        self._write_blobs()

    def _write_blobs(self) -> None:
        blobs = self._job.plan.blobs
        with self._staging.open_data() as folder:
            for name in dict.fromkeys(blob.file for blob in blobs):
                with opened(folder, name, os.O_RDWR) as fd, storage_errors(folder.path / name):
                    shared = {blob.offset: blob.data for blob in blobs if blob.file == name}
                    for offset, data in shared.items():
                        write_all(fd, data, offset)
                    if self._job.options.fsync:
                        os.fsync(fd)

    def _numbers(self) -> range:
        ranks = self._job.ranks
        return worker_share(self._job.plan.items, ranks.rank, ranks.world)

    def share(self) -> Sequence[OutputItem]:
        numbers = self._numbers()
        return self._job.plan.items[numbers.start : numbers.stop]

    def open_files(self) -> Mapping[str, str | None]:
        return {}

    def work(self, source: SourceReader, opened: Mapping[str, str | None]) -> Done:
        job, journal = self._job, self._staging.journal
        finished = journal.finished()
        journal.open(job.ranks.rank)
        with closing(journal), self._staging.open_data() as folder:
            work = Work(job.plan, self._numbers(), source, folder, journal, job.options)
            counters = work.run(finished, job.ranks.check, job.progress)
        return Done(counters, work.resumed)

    def publish(
        self, metadata: bytes | None, versions: Mapping[str, str | None], parts: Mapping[str, Sequence[Part]]
    ) -> None:
        staging, sync = self._staging, self._job.options.fsync
        prove_shards(self._job.plan, staging.data)
        for name, content in self._job.output.extra_files.items():
            staging.write_file(name, content, sync)
        if metadata is not None:
            staging.write_file(METADATA, metadata, sync)
        staging.publish(sync, self._job.output.overwrite)

    def has_beside(self, name: str) -> bool:
        return self._staging.parent().exists(name)

    def write_beside(self, name: str, content: bytes) -> None:
        self._staging.write_beside(name, content)

    def finish(self) -> None:
        self._staging.discard()

    def leave(self, error: BaseException) -> None:
        if not self._staging.held:
            return
        if can_go_on(error) and self._staging.journal.exists():
            self._staging.release()
        else:
            self._staging.discard()

    def close(self) -> None:
        self._staging.release()


def _folders_of(files: Files) -> list[Path]:
    """The directories of a mounted file system that a source lies in."""
    parts = files.parts if isinstance(files, JoinedFiles) else (files,)
    return [Path(part.location) for part in parts if isinstance(part, LocalFiles)]
