"""Whether a local output can be taken: asked by who writes there, and by a dry run, which makes nothing."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from pathlib import Path

from ckpt_tools.errors import StorageError, UsageError
from ckpt_tools.execute.fileio import storage_errors
from ckpt_tools.execute.folders import Folder, Foreign

SPARE_BYTES = 16 << 20  # for `.metadata`, the journal and directories
LOCK, MARKER, DATA, REPLACED, JOURNAL = "lock", "publishing", "checkpoint", "replaced", "journal"
_OWN = re.compile(rf"{LOCK}|{MARKER}|{DATA}|{REPLACED}|{JOURNAL}|(spool|direct)-\w+|\.[0-9a-f]{{16}}\.tmp")


def partial_of(final: Path) -> Path:
    """The directory in which the output `final` is made."""
    return final.parent / f".{final.name}.ckpt_tools-partial"


def check_final(parent: Folder, final: Path, overwrite: bool, stands: Path | None = None) -> None:
    """Nothing, for an output that is absent, empty or to be replaced.

    Args:
        stands: the directory that a process killed while replacing it has moved out of the place of `final`.

    Raises:
        UsageError: it is not to be replaced, or cannot be.
    """
    status = parent.status(final.name) if stands is None else os.lstat(stands)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{final} exists and is not a directory; choose another output")
    if final.is_mount():
        raise UsageError(f"{final} is a mount point, which cannot be replaced; choose a directory inside it")
    if any((stands or final).iterdir()) and not overwrite:
        raise UsageError(f"{final} is not empty; choose another output or replace it with --overwrite")


def cannot_be_made(folder: Path) -> UsageError:
    """What to say of a folder on whose way something else stands."""
    return UsageError(f"{folder} cannot be made: a file stands in its way; choose another output")


def stopped(partial: Path) -> UsageError:
    """What to say of work that was stopped, and that no option says what to do with."""
    return UsageError(
        f"{partial} holds a conversion that was stopped. Go on from it with --resume, or start anew with --overwrite."
    )


def check_own(folder: Folder) -> None:
    """Nothing, for a partial directory in which only this tool has put something.

    Raises:
        Foreign: somebody else has.
    """
    names = folder.names()
    if names and LOCK not in names:
        raise not_own(folder, names[0])
    for name in names:
        if not _OWN.fullmatch(name):
            raise not_own(folder, name)


def not_own(folder: Folder, name: str) -> Foreign:
    """What to say of a name in the partial directory that is not this tool's."""
    return Foreign(
        f"{folder.path} is where the output would be made, but it holds {name}, which this tool did not put there. "
        "Move it away, or choose another output."
    )


def lock_output(lock: int, final: Path, kind: int = fcntl.LOCK_EX) -> None:
    """Lock the open file `lock` of the output `final`.

    Raises:
        UsageError: another converter has it.
    """
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 100, 0).decode(errors="replace")
        raise UsageError(f"{final} is being written by another converter ({owner})") from None


def check_space(at: Folder, final: Path, nbytes: int) -> None:
    """
    Raises:
        StorageError: the file system of `at` has less than `nbytes` free, and some to spare.
    """
    with storage_errors(at.path):
        status = os.statvfs(at.fd)
    free = status.f_bavail * status.f_frsize
    if free < nbytes + SPARE_BYTES:
        raise StorageError(
            f"{final.parent} has {free} bytes free, but {nbytes + SPARE_BYTES} are needed. Free some space or choose "
            "another output."
        )


def allocated(data: Folder) -> int:
    """Bytes that the file system has set aside for the files of a directory."""
    found = [data.status(name) for name in data.names()]
    return sum(status.st_blocks * 512 for status in found if status)
