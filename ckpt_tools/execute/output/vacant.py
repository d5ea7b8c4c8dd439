"""Whether a local output can be taken: asked by who writes there, and by a dry run, which makes nothing."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from ckpt_tools.errors import CkptError, Interrupted, StorageError, Terminated, UsageError
from ckpt_tools.execute.output.fileio import storage_errors
from ckpt_tools.execute.output.folders import Folder, Foreign
from ckpt_tools.formats.locate.owned_files import TEMPLATES, refuse_foreign
from ckpt_tools.human import counted, human_bytes

LOCK, MARKER, DATA, REPLACED, JOURNAL = "lock", "publishing", "checkpoint", "replaced", "journal"
_OWN = re.compile(rf"{LOCK}|{MARKER}|{DATA}|{REPLACED}|{JOURNAL}|(spool|direct)-\w+|\.[0-9a-f]{{16}}\.tmp")


def partial_of(final: Path) -> Path:
    """The directory in which the output `final` is made."""
    return final.parent / f".{final.name}.ckpt_tools-partial"


def check_final(
    parent: Folder,
    final: Path,
    overwrite: bool,
    written: Collection[str],
    sources: Iterable[Path],
    stands: Path | None = None,
) -> str | None:
    """What is replaced, for an output that is absent, empty (None) or to be replaced.

    Args:
        written: the names of the new output's files.
        sources: the directories that it is made of.
        stands: the directory that a process killed while replacing it has moved out of the place of `final`.
    """
    status = parent.status(final.name) if stands is None else os.lstat(stands)
    if status is None:
        return None
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{final} exists and is not a directory; choose another output")
    if final.is_mount():
        raise UsageError(f"{final} is a mount point, which cannot be replaced; choose a directory inside it")
    old = stands or final
    if not any(old.iterdir()):
        return None
    if not overwrite:
        raise UsageError(f"{final} is not empty; choose another output or replace it with --overwrite")
    _refuse_sources(final, sources)
    return replaced(str(final), lambda name: _entries(old / name), written)


def replaced(
    where: str,
    sizes: Callable[[str], Mapping[str, int | None]],
    written: Collection[str],
    *,
    is_unfinished: bool = False,
) -> str:
    """What the one checkpoint at `where` is, which may be replaced. `sizes` are those in a folder, as
    `Store.sizes`.
    """
    found = dict(sizes(""))
    for folder in {TEMPLATES, *(name.rpartition("/")[0] for name in written)} & found.keys():
        if found[folder] is None:
            del found[folder]
            found |= {f"{folder}/{name}": size for name, size in sizes(folder).items()}
    names = [name if size is not None else f"{name}/" for name, size in found.items()]
    kind = refuse_foreign(where, names, written, is_unfinished=is_unfinished)
    return f"{kind}: {counted(len(found), 'file')}, {human_bytes(sum(size or 0 for size in found.values()))}"


def _entries(folder: Path) -> dict[str, int | None]:
    """As `Store.sizes`; what is neither a file nor a link to one counts as a folder."""
    with storage_errors(folder):
        if folder.is_symlink():
            return {"": None}
        return {one.name: one.stat().st_size if one.is_file() else None for one in folder.iterdir()}


def _refuse_sources(final: Path, sources: Iterable[Path]) -> None:
    """
    Raises:
        UsageError: a file of the sources lies in the output, perhaps by links, or the output in one of them.
    """
    target = Path(os.path.realpath(final))
    for source in sources:
        with storage_errors(source):
            linked = [path for path in source.iterdir() if path.is_symlink()]
        files = [Path(os.path.realpath(path)) for path in (source, *linked)]
        if target.is_relative_to(files[0]) or any(file.is_relative_to(target) for file in files):
            raise UsageError(
                f"{final} is not replaced: files of the source {source} are in it, or it is in the source. Choose "
                "another output."
            )


def cannot_be_made(folder: Path) -> UsageError:
    """What to say of a folder on whose way something else stands."""
    return UsageError(f"{folder} cannot be made: a file stands in its way; choose another output")


def stopped(partial: Path) -> UsageError:
    """What to say of work that was stopped, and that no option says what to do with."""
    return UsageError(
        f"{partial} holds a conversion that was stopped. Continue it with --resume, or start again with --overwrite."
    )


def can_go_on(error: BaseException) -> bool:
    """Whether `--resume` may go on from work that ended so: after damage, or masters that do not round, it cannot."""
    to_go_on = (StorageError, UsageError, Interrupted, Terminated)
    return isinstance(error, to_go_on) or not isinstance(error, CkptError)


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
    """Lock the open file `lock` of the output `final`."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 100, 0).decode(errors="replace")
        raise UsageError(f"{final} is being written by another converter ({owner})") from None


def check_space(at: Folder, final: Path, nbytes: int) -> None:
    """Raise StorageError if the file system of `at` has less than `nbytes` free."""
    with storage_errors(at.path):
        status = os.statvfs(at.fd)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise StorageError(
            f"{final.parent} has {human_bytes(free)} free, but {final.name} needs {human_bytes(nbytes)}. Free some "
            "space, or choose another output."
        )


def allocated(data: Folder) -> int:
    """Bytes that the file system has set aside for the files of a directory."""
    found = [data.status(name) for name in data.names()]
    return sum(status.st_blocks * 512 for status in found if status)
