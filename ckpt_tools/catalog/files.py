"""Where bytes come from: the one seam between checkpoints and storage.

Everything that reads a checkpoint takes a `Files`: a flat folder of named files, read by exact byte ranges.
A location is a string, never a path object, so that a URL stays what the user typed.
"""

from __future__ import annotations

import difflib
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ckpt_tools.errors import CorruptCheckpointError, StorageError, UnsupportedCheckpointError

MAX_OPEN_FILES = 256  # the usual soft limit is 1024; further files are opened for each read


class Files(Protocol):
    """The files of one folder."""

    @property
    def location(self) -> str:
        """The folder as the user named it."""

    def exists(self, name: str) -> bool:
        """Whether `name` is a file (or folder) here."""

    def size(self, name: str) -> int:
        """Length of a file in bytes."""

    def list(self) -> list[str]:
        """Names of the files and folders directly inside, sorted.

        Raises:
            UnsupportedCheckpointError: there is no such folder.
        """

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill the whole of `buffer` from `offset`."""

    def close(self) -> None:
        """Release what was opened."""


class LocalFiles:
    """A folder of a mounted file system. Safe to share between threads.

    Raises (all methods):
        CorruptCheckpointError: a file is absent or ends before the range asked for.
        StorageError: the system refused (permission, I/O error).
    """

    def __init__(self, root: str) -> None:
        self.location = root
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    def exists(self, name: str) -> bool:
        try:
            return Path(self._path(name)).exists()
        except OSError as error:
            raise self._explain(name, error) from error

    def size(self, name: str) -> int:
        try:
            return os.stat(self._path(name)).st_size  # noqa: PTH116  in every read; a Path takes longer than the call
        except OSError as error:
            raise self._explain(name, error) from error

    def list(self) -> list[str]:
        try:
            return sorted(os.listdir(self.location))
        except FileNotFoundError:
            raise UnsupportedCheckpointError(absent_folder(Path(self.location))) from None
        except NotADirectoryError:
            raise UnsupportedCheckpointError(f"{self.location} is no folder.") from None
        except OSError as error:
            raise self._explain("", error) from error

    def read(self, name: str, offset: int, length: int) -> bytes:
        self._check_range(name, offset, length)  # before memory is set aside for it
        buffer = bytearray(length)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        fd, cached = self._open(name)
        done = 0
        try:
            while done < len(buffer):
                count = os.preadv(fd, [buffer[done:]], offset + done)
                if count == 0:
                    self._check_range(name, offset, len(buffer))
                    raise StorageError(f"{self._path(name)}: reading stopped at byte {offset + done}")
                done += count
        except OSError as error:
            raise self._explain(name, error) from error
        finally:
            if not cached:
                os.close(fd)

    def close(self) -> None:
        with self._lock:
            for fd in self._fds.values():
                with suppress(OSError):  # nothing was written
                    os.close(fd)
            self._fds.clear()

    def _path(self, name: str) -> str:
        return f"{self.location.rstrip('/')}/{name}" if name else self.location

    def _open(self, name: str) -> tuple[int, bool]:
        """A descriptor, and whether it stays open after this call."""
        with self._lock:
            fd = self._fds.get(name)
            if fd is not None:
                return fd, True
            try:
                fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise self._explain(name, error) from error
            if len(self._fds) >= MAX_OPEN_FILES:
                return fd, False
            self._fds[name] = fd
            return fd, True

    def _check_range(self, name: str, offset: int, length: int) -> None:
        size = self.size(name)
        if offset < 0 or length < 0 or offset + length > size:
            raise CorruptCheckpointError(
                f"{self._path(name)}: bytes {offset}..{offset + length} are needed, but the file "
                f"has {size} bytes. The file is truncated or its metadata is damaged; copy the checkpoint again."
            )

    def _explain(self, name: str, error: OSError) -> CorruptCheckpointError | StorageError:
        path = self._path(name)
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return CorruptCheckpointError(
                f"{path} does not exist, but the checkpoint needs it. Copy the checkpoint again."
            )
        return StorageError(f"{path}: {error.strerror or error}")


def open_files(location: str) -> Files:
    """The files at `location`: a folder of a mounted file system, or the URL of one in an object store.

    Raises:
        UsageError: the URL's scheme is unknown or its driver is not installed.
    """
    if location.startswith("file://"):
        location = location.removeprefix("file://")
    if "://" not in location:
        return LocalFiles(location)
    if location.lower().startswith(("http://", "https://")):
        from ckpt_tools.catalog.web import WebFiles

        return WebFiles(location)
    from ckpt_tools.catalog.remote import RemoteFiles  # fsspec is not needed for local paths

    return RemoteFiles(location)


def absent_folder(folder: Path) -> str:
    """What to say of a folder that does not exist: the one that was perhaps meant, or where the path ends."""
    parent = folder.parent
    if not parent.is_dir():
        return f"{folder} does not exist. Nor does {parent}."
    close = difflib.get_close_matches(folder.name, [entry.name for entry in parent.iterdir()], n=1)
    hint = f"Did you mean {parent / close[0]}?" if close else f"{parent} holds no folder of a similar name."
    return f"{folder} does not exist. {hint}"
