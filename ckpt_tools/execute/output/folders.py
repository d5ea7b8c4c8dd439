"""Directories held open, so that what is done in one stays in it.

A path is looked up again by every call, and who may write in one of its directories decides where it leads. A handle
is looked up once. Names below it are single names, links are never followed, and what is found there is only used
when it is a plain file or directory of ours.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.errors import StorageError, UsageError
from ckpt_tools.execute.output.fileio import storage_errors

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not keep us waiting for its other end
_EXCHANGE = 2  # RENAME_EXCHANGE, linux/fs.h


class Foreign(UsageError):  # noqa: N818  named for what was found
    """Something has the name of one of this tool's files, and is not one."""


class Place(NamedTuple):
    folder: Folder
    name: str

    @property
    def path(self) -> Path:
        return self.folder.path / self.name


class Folder:
    """An open directory; `path` is for messages.

    Raises (all methods):
        OSError: as the system says; FileNotFoundError where a name is absent.
        Foreign: a name is a link, a device or a file of somebody else.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd

    @classmethod
    def named(cls, path: Path) -> Folder:
        """The directory that a user named: links on the way to it are theirs."""
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            with suppress(OSError):
                os.close(fd)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.fd))

    def status(self, name: str) -> os.stat_result | None:
        """What `name` itself is, link or not; None when it is absent."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        return self.status(name) is not None

    def enter(self, name: str) -> Folder:
        """The directory `name`, which is ours."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError as error:
            status = self.status(name)
            if error.errno == errno.EACCES and status and status.st_uid != os.geteuid():
                raise self._foreign(name, f"it belongs to user {status.st_uid}") from None
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise self._foreign(name, "it is not a directory") from None
        try:
            self._check_owner(name, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return Folder(self.path / name, fd)

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """A descriptor of the plain file `name`, which is ours or is made now."""
        try:
            fd = os.open(name, flags & ~os.O_TRUNC | _OPEN, mode, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise
            raise self._foreign(name, "it is not a plain file") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise self._foreign(name, "it is not a plain file")
            if status.st_nlink > 1:
                raise self._foreign(name, "it has another name elsewhere (a hard link)")
            self._check_owner(name, status)
            if flags & os.O_TRUNC:  # only after the owner is checked
                os.ftruncate(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read(self, name: str, limit: int) -> bytes:
        fd = self.open(name, os.O_RDONLY)
        with os.fdopen(fd, "rb") as file:
            size = os.fstat(fd).st_size
            data = file.read() if size <= limit else b""
        if size > limit:
            raise StorageError(
                f"{self.path / name} is longer than {limit:,} bytes, which this tool never writes"
            )
        return data

    def write(self, name: str, data: bytes, sync: bool = False, mode: int = 0o666) -> None:
        """A new small file as `name`: a reader sees the old or the new content, never a part."""
        temporary = temporary_name()
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, mode, dir_fd=self.fd)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self.fd)
            raise

    def make(self, name: str, mode: int = 0o777) -> Folder:
        os.mkdir(name, mode, dir_fd=self.fd)
        return self.enter(name)

    def remove(self, name: str) -> None:
        """Remove a file or a directory with all that is in it, links as links; absent is well."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EPERM):
                raise
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
            with Folder(self.path / name, fd) as inside:
                for inner in inside.names():
                    inside.remove(inner)
            os.rmdir(name, dir_fd=self.fd)

    def sync(self) -> None:
        """Make the names inside durable."""
        os.fsync(self.fd)

    def _check_owner(self, name: str, status: os.stat_result) -> None:
        if status.st_uid != os.geteuid() and status.st_uid != self._own_uid():
            raise self._foreign(name, f"it belongs to user {status.st_uid}")

    def _own_uid(self) -> int:
        """Whom the file system here takes us for: on NFS not always the process's user."""
        name = temporary_name()
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self.fd)
        try:
            return os.fstat(fd).st_uid
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=self.fd)

    def _foreign(self, name: str, why: str) -> Foreign:
        return Foreign(
            f"{self.path / name} is in this tool's work directory, but {why}. Remove it, or choose "
            "another output."
        )


def temporary_name() -> str:
    """A name for a file that will get another; `secrets` would draw a similar one, and import hashlib for it."""
    return f".{os.urandom(8).hex()}.tmp"


def move(source: Place, target: Place) -> None:
    """Rename; an empty directory at the target gives way, anything else is an OSError for a directory."""
    os.rename(source.name, target.name, src_dir_fd=source.folder.fd, dst_dir_fd=target.folder.fd)


def exchange(a: Place, b: Place) -> bool:
    """Exchange two directories in one step, or say that this system cannot."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    return (
        call is not None
        and call(a.folder.fd, os.fsencode(a.name), b.folder.fd, os.fsencode(b.name), _EXCHANGE) == 0
    )


@contextmanager
def opened(folder: Folder, name: str, flags: int, mode: int = 0o666) -> Iterator[int]:
    with storage_errors(folder.path / name):
        fd = folder.open(name, flags, mode)
    try:
        yield fd
    finally:
        with storage_errors(folder.path / name):
            os.close(fd)
