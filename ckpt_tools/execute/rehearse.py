"""Refuse at once what writing would refuse before its first byte, and make nothing: all that a dry run does here."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

from ckpt_tools.errors import CorruptCheckpointError, StorageError, UsageError
from ckpt_tools.execute.move.source_reader import has_stores
from ckpt_tools.execute.output.fileio import storage_errors
from ckpt_tools.execute.output.finished import has_files, lengths
from ckpt_tools.execute.output.folders import Folder
from ckpt_tools.execute.output.journal import Journal, fingerprint
from ckpt_tools.execute.output.local_output import folders_of
from ckpt_tools.execute.output.staging import (
    DATA,
    JOURNAL,
    LOCK,
    REPLACED,
    allocated,
    cannot_be_made,
    check_final,
    check_own,
    check_space,
    lock_output,
    partial_of,
    stopped,
)
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.write_job import Output, WriteOptions
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.model.transfers import Plan, stored_parts
from ckpt_tools.plan.build import hole_bytes, holes


def rehearse(
    plan: Plan,
    files: Files,
    output: Output,
    options: WriteOptions | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Return if `write_checkpoint` would begin; called on every rank.

    Raises the errors that it would: an output that cannot be taken, too little disk or memory, source files that are
    absent or too short.
    """
    options, ranks = options or WriteOptions(), ranks or Ranks()

    def look() -> str:
        options.thread_memory(has_stores(files), isinstance(output.directory, str))
        if ranks.rank == 0:
            if isinstance(output.directory, str):
                _look_remotely(plan, output, options)
            else:
                _look(plan, files, output, options)
            check_extents(plan, files)
        return plan.digest

    if len(set(ranks.together(look))) > 1:
        raise UsageError("the ranks made different plans: do they all see the same source and options?")


def check_extents(plan: Plan, files: Files) -> None:
    """Every source file is there and reaches to the end of what is read of it."""
    ends: dict[str, tuple[int, str]] = {}
    for item in plan.items:
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


def _look(plan: Plan, files: Files, output: Output, options: WriteOptions) -> None:
    final = Path(output.directory)
    if output.resume and has_files(plan.file_bytes, lengths(final)):
        return  # an earlier process may have got as far as this: that is for who goes on to look at
    above, present = _nearest(final.parent), 0
    with ExitStack() as opened, storage_errors(above):
        parent = opened.enter_context(Folder.named(above))
        if above == final.parent:
            present = _check_place(plan, files, output, parent)
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13))
        _check_names(above, final)
        check_space(parent, final, plan.bytes_to_write - hole_bytes(holes(plan)) - present)
    if options.direct:
        _check_direct(above)


def _check_place(plan: Plan, files: Files, output: Output, parent: Folder) -> int:
    """Bytes that are set aside already in the output's parent, if nothing there stands in the way."""
    final, stands, present = Path(output.directory), None, 0
    with ExitStack() as opened:
        if parent.exists(partial_of(final).name):
            partial = opened.enter_context(parent.enter(partial_of(final).name))
            _check_lock(final, partial)
            if partial.exists(REPLACED) and not parent.exists(final.name):
                stands = partial.path / REPLACED
            present = _present(plan, files, output, partial)
        written = {*plan.file_bytes, *output.extra_files}
        check_final(parent, final, output.overwrite, written, folders_of(files), stands)
    return present


def _present(plan: Plan, files: Files, output: Output, partial: Folder) -> int:
    """Bytes that a stopped conversion has set aside already, if it is gone on from."""
    journal = Journal(partial.path / JOURNAL, lambda: partial)
    if not journal.exists():
        return 0
    if not (output.resume or output.overwrite):
        raise stopped(partial.path)
    if not output.resume:
        return 0
    journal.resume(plan, fingerprint(files, plan), files.location)
    if not partial.exists(DATA):
        return 0
    with partial.enter(DATA) as data:
        return allocated(data)


def _nearest(folder: Path) -> Path:
    """`folder`, or the one that stands where it would be made."""
    found = next(above for above in (folder, *folder.parents) if above.exists())
    if not found.is_dir():
        raise cannot_be_made(folder)
    return found


def _check_names(above: Path, final: Path) -> None:
    """Raise OSError if the file system does not take a name that is to be made."""
    limit = os.pathconf(above, "PC_NAME_MAX")
    made = final.parent.relative_to(above).parts
    if any(len(os.fsencode(name)) > limit for name in (*made, partial_of(final).name)):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))


def _check_lock(final: Path, partial: Folder) -> None:
    """
    Raises:
        UsageError: another converter works there, or somebody has put there what is not this tool's.
    """
    check_own(partial)
    if partial.exists(LOCK):
        with os.fdopen(partial.open(LOCK, os.O_RDONLY), "rb") as lock:
            lock_output(lock.fileno(), final, fcntl.LOCK_SH)


def _check_direct(folder: Path) -> None:
    """Whether files here can be written past the page cache, tried on one without a name."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT))
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written with --direct: {error.strerror}. Convert without it."
        ) from error


def _look_remotely(plan: Plan, output: Output, options: WriteOptions) -> None:
    from ckpt_tools.execute.output.remote_output import MARKER, look_at_old, open_store, refuse_present
    from ckpt_tools.formats.storage.object_store import no_bucket

    store = open_store(output, options)
    present = store.sizes()
    if store.without_bucket:
        raise no_bucket(store.location, store.without_bucket)
    goes_on = output.resume and (MARKER in present or has_files(plan.file_bytes, present))
    if present and not output.overwrite and not goes_on:
        raise refuse_present(store, present)
    if output.overwrite:
        look_at_old(store, present, plan, output)
