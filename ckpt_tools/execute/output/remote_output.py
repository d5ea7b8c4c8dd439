"""A job's output in a folder of an object store, where nothing can be renamed and files are written front to back.

Objects appear whole or not at all (multipart uploads), so each is uploaded to its final name, in the order::

    .ckpt_tools-partial   the marker: what is being written, from what and by whom (a run's token). `--resume` skips
                          objects that are the ones that were uploaded
    __<r>_<n>.distcp ...  data; a rank has whole files, each thread streams one at a time. The version of each is
                          noted in .ckpt_tools-partial.<file>, for `--resume`
    .metadata             last: without it no loader takes the folder for a checkpoint
    trackers              beside the folder; then the marker is deleted

A checkpoint that is replaced stays until the new one is whole, which is made in a folder beside it
(`.<name>.ckpt_tools-partial/`). Then the store itself copies that: the old `.metadata` is deleted first and the new
one copied last, so that at no time a mix of old and new can be loaded. A process that is stopped meanwhile leaves the
marker in the old place and all of the new one beside it: `--resume` goes on.

A store has no locks. Of two runs with one output the last to write the marker has it; the other finds a foreign token
when it looks, before and after each file and before `.metadata`, and stops without touching anything. What it may
have replaced until then is found by the versions of the objects.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from ckpt_tools.credentials import hidden
from ckpt_tools.errors import CorruptCheckpointError, StorageError, UsageError
from ckpt_tools.execute.move.source_reader import SourceReader
from ckpt_tools.execute.output.finished import has_files, same_small_parts
from ckpt_tools.execute.output.journal import check_unchanged
from ckpt_tools.execute.output.marker import MARKER, Marker, is_note, note_of
from ckpt_tools.execute.output.opened_shards import prove_uploaded
from ckpt_tools.execute.output.uploads import Stretch, Uploads, share_of, share_of_files, stretches
from ckpt_tools.execute.output.vacant import can_go_on, replaced
from ckpt_tools.execute.write_job import (
    METADATA,
    Done,
    Found,
    Output,
    SourceState,
    WriteJob,
    WriteOptions,
)
from ckpt_tools.formats.storage.io_pool import pool
from ckpt_tools.formats.storage.multipart import Part
from ckpt_tools.formats.storage.object_store import Retry, Store
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.model.transfers import OutputItem, Plan

_ASIDE = "aside:"  # before the token of a run that writes beside what it replaces
_LEAVING = Retry(attempts=1, patience=5.0)  # a run that failed tidies up, but waits for nobody


class RemoteOutput:
    """See `JobOutput`."""

    scratch: Path | None = None

    def __init__(self, job: WriteJob) -> None:
        """Raises: UsageError: the output cannot be opened or written at all; `--direct`."""
        self._job = job
        self._final = self._store = open_store(job.output, job.options)
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

    def _use(self, store: Store) -> None:
        """Write into this folder."""
        self._store, self._marker = store, Marker(store)

    @cached_property
    def _aside(self) -> Store:
        """The folder for an output that replaces another, which stays until all is done."""
        name = self._final.location.rstrip("/").rpartition("/")[2]
        return Store(f"{self._final.parent}/.{name}{MARKER}")

    @cached_property
    def _parent(self) -> Store:
        return Store(self._final.parent)

    def take(self, state: SourceState) -> Found:
        self._state = state
        present, output = self._store.sizes(), self._job.output
        resume = output.resume
        if resume and not self._final.is_bucket and MARKER in (aside := self._aside.sizes()):
            if present and MARKER not in present and not output.overwrite:
                raise refuse_present(self._final, present)
            self.replaced = look_at_old(self._final, present, self._job.plan, output)
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
                f"{self._store.location} was begun with another plan (other options, source or version). Repeat "
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
        output, plan, present = self._job.output, self._job.plan, self._final.sizes()
        self._use(self._final)
        if present and not output.overwrite:
            raise refuse_present(self._final, present)
        self.replaced = look_at_old(self._final, present, plan, output)
        is_old = bool(present) and (METADATA in present or MARKER not in present)
        if output.overwrite and not self._final.is_bucket and (is_old or self._aside.sizes()):
            self._use(self._aside)
            present = self._store.sizes()
            look_at_old(self._store, present, plan, output)
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
        """Those of all ranks."""
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
        uploads = Uploads(job.plan, self._store, self._marker)
        there = {name for name in self._names() if opened.get(name, "") is None}
        for name in sorted(there):
            uploads.note(name, source)
        mine = share_of(self._stretches(), ranks.rank, ranks.world)
        todo = [stretch for stretch in mine if opened.get(stretch.file, "") is not None]
        counters = uploads.run(
            todo, opened, source, job.options.threads, job.thread_memory, job.ranks.check, job.progress
        )
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
        look_at_old(final, old, job.plan, job.output)
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


def open_store(output: Output, options: WriteOptions) -> Store:
    """The store of an output."""
    if options.direct:
        raise UsageError(f"--direct is for files; {output.directory} is in an object store. Leave it out.")
    location = hidden(str(output.directory))
    store = Store(str(output.directory))
    if not store.root.strip("/"):
        raise UsageError(f"{location} does not name a folder; choose another output.")
    return store


def look_at_old(store: Store, present: Mapping[str, int | None], plan: Plan, output: Output) -> str | None:
    """What `present` is, which may be replaced."""
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


def refuse_present(store: Store, present: Iterable[str]) -> UsageError:
    """What to say of an output with files in it that no option gives up."""
    what = "is not empty; choose another output or replace it with --overwrite"
    if MARKER in present:
        what = (
            "holds a conversion that was stopped, or is being written. Continue it with --resume, or start again "
            "with --overwrite"
        )
    return UsageError(f"{store.location} {what}.")
