"""Who may read and write an output: as much as what it replaces or was made from, and the umask, allow.

* A directory gets the permissions of the source's directory; of those the ones that a directory had that stood in its
  place, with the group of that one. Its owner can always use it. Directories that are made on the way to it get the
  same.
* An iteration is no more open than its run's directory.
* It gets the group and the setgid bit of that directory too, unless the directory it is made in hands down its own
  (setgid). Where the group may not be given, nobody's group gets anything.
* A file gets of its directory's permissions what a file has. Group and others get nothing if a file in that
  directory is not readable for them: private files in an open directory stay private.
* The umask is always taken off. ACLs are the file system's: a default ACL is inherited as ever.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.execute.output.fileio import storage_errors
from ckpt_tools.execute.output.folders import Folder, temporary_name

_ITERATION = re.compile(r"iter_\d+|release")
_LOOKED_AT = 10_000  # files of a model directory; a checkpoint's have the same modes


class Access(NamedTuple):
    """Permissions that an output copies from its source. `group` None: whatever the system gives."""

    directory: int = 0o777
    file: int = 0o666
    group: int | None = None
    setgid: bool = False

    def within(self, most: Access) -> Access:
        """This access, but those who may not read by `most` get nothing more; another group is one of its others."""
        modes = (most.directory, most.file)
        if most.group not in (None, self.group):
            modes = (modes[0] & ~0o070 | (modes[0] & 0o007) << 3, modes[1] & ~0o070 | (modes[1] & 0o007) << 3)
        # Who reads may write too, where the old output lets them.
        directory, file = (mode | (mode & 0o044) >> 1 for mode in modes)
        return self._replace(directory=self.directory & directory, file=self.file & file)


def access_of(folder: Path) -> Access:
    """The permissions of a directory and of the files in it; the umask's if it does not exist."""
    try:
        status = folder.stat()
        files = _common_bits(folder)
        root = folder.absolute().parent.stat().st_mode if _ITERATION.fullmatch(folder.name) else 0o777
    except OSError:
        return Access()
    mode = status.st_mode & root & 0o777 | 0o700
    return Access(mode, mode & files & 0o666, status.st_gid, bool(status.st_mode & stat.S_ISGID))


def common_access(places: Iterable[Access]) -> Access:
    """What all of these allow, so that nobody reads in the mean of several sources what they may not read."""
    common: Access | None = None
    for access in places:
        if common is None:
            common = access
            continue
        directory, file = common.directory & access.directory, common.file & access.file
        if access.group == common.group:
            common = Access(directory, file, common.group, common.setgid and access.setgid)
        else:
            common = Access(directory & ~0o070, file & ~0o070)
    return common or Access()


def _common_bits(folder: Path) -> int:
    """0o777 less those, group or others, who cannot read every plain file in `folder`."""
    readable = 0o777
    with os.scandir(folder) as entries:
        for entry, _ in zip(entries, range(_LOOKED_AT), strict=False):
            if entry.is_file(follow_symlinks=False):
                readable &= entry.stat(follow_symlinks=False).st_mode
    return 0o700 | sum(7 << shift for shift in (3, 0) if readable & 4 << shift)


def make_folder(parent: Folder, name: str, access: Access) -> Folder:
    folder = parent.make(name, access.directory)
    status = os.fstat(folder.fd)
    mode, inherits = stat.S_IMODE(status.st_mode), bool(status.st_mode & stat.S_ISGID)
    if access.group is None or inherits:
        return folder
    if give_group(folder.fd, access.group):
        with suppress(OSError):  # some file systems keep no permissions
            os.fchmod(folder.fd, mode | stat.S_ISGID if access.setgid else mode)
    return folder


def give_group(fd: int, group: int) -> bool:
    """Give an open file or directory to a group; if that is not allowed, take the group's permissions away."""
    status = os.fstat(fd)
    if status.st_gid == group:
        return True
    try:
        os.fchown(fd, -1, group)
    except OSError:  # not a member of the group, or a file system without groups
        with suppress(OSError):
            os.fchmod(fd, stat.S_IMODE(status.st_mode) & ~0o070)
        return False
    return True


def write_report(file: Path, data: bytes, source: Path | None) -> None:
    """Write a file that a user named, whole or not at all, unless it is a device or a pipe.

    One that is there keeps its permissions, a new one gets those of `source`.
    """
    access = access_of(source) if source else Access()
    target = Path(os.path.realpath(file))
    with storage_errors(file):
        old = file.stat() if file.exists() else None
        if old is not None:
            is_file = stat.S_ISREG(old.st_mode) and not str(file).startswith(("/dev/", "/proc/"))
            is_file = is_file and os.access(target.parent, os.W_OK)
            fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC | (0 if is_file else os.O_TRUNC))
            with os.fdopen(fd, "wb") as opened:  # a file too: who may not write it must not replace it
                opened.write(b"" if is_file else data)
            if not is_file:
                return
        temporary = target.with_name(temporary_name())
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, access.file)
        try:
            with os.fdopen(fd, "wb") as opened:
                if old is not None:
                    os.fchmod(fd, stat.S_IMODE(old.st_mode))
                    give_group(fd, old.st_gid)
                elif access.group is not None and not target.parent.stat().st_mode & stat.S_ISGID:
                    give_group(fd, access.group)
                opened.write(data)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
