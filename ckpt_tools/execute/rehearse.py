"""Refuse at once what writing would refuse before its first byte, and make nothing: all that a dry run does here."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from ckpt_tools.errors import CorruptCheckpointError, StorageError, UsageError
from ckpt_tools.execute.fileio import storage_errors
from ckpt_tools.execute.folders import Folder
from ckpt_tools.execute.journal import Journal, fingerprint
from ckpt_tools.execute.publish import SPARE_BYTES
from ckpt_tools.execute.ranks import DistributedRanks, Ranks
from ckpt_tools.execute.run import Output, WriteOptions
from ckpt_tools.execute.work import tile_bytes
from ckpt_tools.formats.files import Files
from ckpt_tools.model.transfers import Plan, stored_parts


def rehearse(
    plan: Plan,
    files: Files,
    output: Output,
    options: WriteOptions | None = None,
    ranks: Ranks | DistributedRanks | None = None,
) -> None:
    """Return if `write_checkpoint` would begin; called on every rank.

    Raises the errors that it would: an output that cannot be taken, too little disk or memory, source files that are
    absent or too short.
    """
    options, ranks = options or WriteOptions(), ranks or Ranks()

    def look() -> str:
        tile_bytes(options.memory_bytes, options.threads)
        if ranks.rank == 0:
            if isinstance(output.directory, str):
                _look_remotely(plan, output, options, str(output.directory))
            else:
                _look(plan, files, output, options)
            check_extents(plan, files)
        return plan.digest

    if len(set(ranks.together(look))) > 1:
        raise UsageError("the ranks made different plans: do they all see the same source and options?")


def check_extents(plan: Plan, files: Files) -> None:
    """Every source file is there and reaches to the end of what is read of it.

    Raises:
        CorruptCheckpointError: one does not.
    """
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
    partial = final.parent / f".{final.name}.ckpt_tools-partial"
    folder = _nearest(final.parent)
    if output.resume and _is_finished(plan, _sizes(final)):
        return
    _check_final(final, output.overwrite)
    present = 0
    if partial.is_dir():
        _check_lock(final, partial)
        journal = Journal(partial / "journal")
        if journal.exists() and output.resume:
            journal.resume(plan, fingerprint(files, plan.source_files), files.location)
            present = _allocated(partial / "checkpoint")
        elif journal.exists() and not output.overwrite:
            raise UsageError(
                f"{partial} holds a conversion that was stopped. Go on from it with --resume, or start anew with "
                "--overwrite."
            )
    with storage_errors(folder):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13))
        status = os.statvfs(folder)
    free, needed = status.f_bavail * status.f_frsize, plan.bytes_to_write - present + SPARE_BYTES
    if free < needed:
        raise StorageError(
            f"{final.parent} has {free} bytes free, but {needed} are needed. Free some space or choose another "
            "output."
        )
    if options.direct:
        _check_direct(folder)


def _is_finished(plan: Plan, present: Mapping[str, int | None]) -> bool:
    """Whether an earlier process may have got as far as this: that is for who goes on to look at."""
    return all(present.get(name) == size for name, size in plan.file_bytes.items())


def _sizes(folder: Path) -> dict[str, int | None]:
    """Lengths of the files in a folder, if it is one."""
    if folder.is_symlink() or not folder.is_dir():
        return {}
    with storage_errors(folder):
        return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def _nearest(folder: Path) -> Path:
    """`folder`, or the one that stands where it would be made.

    Raises:
        UsageError: it cannot be made.
    """
    found = next(above for above in (folder, *folder.parents) if above.exists())
    if not found.is_dir():
        raise UsageError(f"{folder} cannot be made: a file stands in its way; choose another output")
    return found


def _check_final(final: Path, overwrite: bool) -> None:
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise UsageError(f"{final} exists and is not a directory; choose another output")
    if final.is_mount():
        raise UsageError(f"{final} is a mount point, which cannot be replaced; choose a directory inside it")
    with storage_errors(final):
        is_taken = final.exists() and any(final.iterdir())
    if is_taken and not overwrite:
        raise UsageError(f"{final} is not empty; choose another output or replace it with --overwrite")


def _check_lock(final: Path, partial: Path) -> None:
    """Whether another converter works there."""
    with ExitStack() as opened, suppress(FileNotFoundError), storage_errors(partial):
        above = opened.enter_context(Folder.named(final.parent))
        folder = opened.enter_context(above.enter(partial.name))
        lock = opened.enter_context(os.fdopen(folder.open("lock", os.O_RDONLY), "rb"))
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = lock.read(100).decode(errors="replace")
            raise UsageError(f"{final} is being written by another converter ({owner})") from None


def _allocated(folder: Path) -> int:
    """Bytes that the files of a stopped conversion have already."""
    with storage_errors(folder):
        return sum(path.stat().st_blocks * 512 for path in folder.iterdir()) if folder.is_dir() else 0


def _check_direct(folder: Path) -> None:
    """Whether files here can be written past the page cache, tried on one without a name."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT))
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written with --direct: {error.strerror}. Convert without it."
        ) from error


def _look_remotely(plan: Plan, output: Output, options: WriteOptions, url: str) -> None:
    from ckpt_tools.execute.remote_output import MARKER
    from ckpt_tools.formats.store import Store

    if options.direct:
        raise UsageError(f"--direct is for files; {url} is in an object store. Leave it out.")
    store = Store(url)
    present = store.sizes()
    goes_on = output.resume and (MARKER in present or _is_finished(plan, present))
    if not present or output.overwrite or goes_on:
        return
    what = "is not empty; choose another output or replace it with --overwrite"
    if MARKER in present:
        what = (
            "holds a conversion that was stopped, or is being written. Go on from it with --resume, or start anew "
            "with --overwrite"
        )
    raise UsageError(f"{store.location} {what}.")
