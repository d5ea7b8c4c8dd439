"""Where bytes come from: the one seam between checkpoints and storage.

Everything that reads a checkpoint takes a `Files`: a flat folder of named files, read by exact byte ranges.
A location is a string, never a path object, so that a URL stays what the user typed.

A checkpoint is untrusted, and so are the links, FIFOs and devices in its folder. Only plain files are opened.
A link may lead to another place of the folder, or from a snapshot of a Hugging Face cache to that model's blobs;
where else it leads is only followed after `follow_links(True)`, the command line's `--follow-links`. How the user's
own path leads to the folder is the user's affair.
"""

from __future__ import annotations

import difflib
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from ckpt_tools.errors import (
    CkptError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedCheckpointError,
    UsageError,
)

MAX_OPEN_FILES = 256  # the usual soft limit is 1024; further files are opened for each read
_SMALL_READ = 1 << 20  # is just tried; asking for a file's length takes as long as reading a page of it
SMALL_FILE_BYTES = 16 << 20  # for settings: real ones are a thousandth of it
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}
_follows_links = False
AnyPath: TypeAlias = str | os.PathLike[str]
"""A location as callers of the library may give it: a path object, or a string, which may be a URL."""


def follow_links(wanted: bool) -> None:
    """Whether this process reads files of checkpoints through links that lead out of their folders."""
    global _follows_links  # noqa: PLW0603  a decision about the whole process, made once by who starts it
    _follows_links = wanted


def path_text(path: AnyPath) -> str:
    """A location as the string that everything behind the library's functions takes."""
    return os.fspath(path)


def path_in(folder: str, name: str) -> str:
    """The path or the URL of what is called `name` in a folder."""
    return f"{folder.rstrip('/')}/{name}"


def read_whole(files: Files, name: str, limit: int = SMALL_FILE_BYTES) -> bytes:
    """All of a file that should be small."""
    size = files.size(name)
    if size > limit:
        raise CorruptCheckpointError(
            f"{path_in(files.location, name)} has {size:,} bytes; such a file has at most {limit:,}, and more "
            "is not read into memory"
        )
    return files.read(name, 0, size)


def readable_size(files: Files, name: str) -> int:
    """Bytes of a file; 0 if it cannot be read, which the reader reports."""
    try:
        return files.size(name)
    except CkptError:
        return 0


class Stamp(NamedTuple):
    """Distinguishes a file from an earlier one of its name, which may have had the same length and time."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def stamp_of(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


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
        """Names of the files and folders directly inside, sorted."""

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
        self._allowed: tuple[str, ...] | None = None
        self._fds: dict[str, int] = {}
        self.opened: dict[str, Stamp] = {}  # what every file was when it was opened first
        self._lock = threading.Lock()

    def exists(self, name: str) -> bool:
        try:
            return Path(self._path(name)).exists()
        except (OSError, ValueError) as error:
            raise self._explain(name, error) from error

    def size(self, name: str) -> int:
        try:
            status = os.stat(self._path(name))  # noqa: PTH116  in every read; a Path takes longer than the call
        except (OSError, ValueError) as error:
            raise self._explain(name, error) from error
        self._check_kind(name, status.st_mode)
        return status.st_size

    def list(self) -> list[str]:
        try:
            return sorted(os.listdir(self.location))
        except FileNotFoundError:
            raise UnsupportedCheckpointError(absent_folder(Path(self.location))) from None
        except NotADirectoryError:
            raise UnsupportedCheckpointError(f"{self.location} is not a folder.") from None
        except OSError as error:
            raise self._explain("", error) from error

    def read(self, name: str, offset: int, length: int) -> bytes:
        if not 0 <= length <= _SMALL_READ or offset < 0:
            self._check_range(name, offset, length)  # before memory is set aside for it
        buffer = bytearray(length)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        done = 0
        fd, cached = self._open(name)  # not by `descriptor`: entering that costs as much as a read of 8 KiB
        try:
            while done < len(buffer):
                try:
                    count = os.preadv(fd, [buffer[done:]], offset + done)
                except OSError as error:
                    raise self._explain(name, error) from error
                if count == 0:
                    self._check_range(name, offset, len(buffer))
                    raise StorageError(f"{self._path(name)}: reading stopped at byte {offset + done}")
                done += count
        finally:
            if not cached:
                os.close(fd)

    @contextmanager
    def descriptor(self, name: str) -> Iterator[int]:
        """The open file, for who can do more with it than read."""
        fd, cached = self._open(name)
        try:
            yield fd
        finally:
            if not cached:
                os.close(fd)

    def opened_now(self, names: Iterable[str]) -> Mapping[str, os.stat_result]:
        """What is there by now under the names of opened files; without those that are gone."""
        found: dict[str, os.stat_result] = {}
        for name in names:
            try:
                found[name] = Path(self._path(name)).stat()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._explain(name, error) from error
        return found

    @contextmanager
    def links_change(self, names: Iterable[str]) -> Iterator[None]:
        """Links of opened files are made or removed here: their ctime changes, which counts as no change of them."""
        before = self.opened_now(names)
        yield
        for name, status in self.opened_now(before).items():
            was, now = stamp_of(before[name]), stamp_of(status)
            is_relinked = status.st_nlink != before[name].st_nlink
            if is_relinked and self.opened[name] == was == now._replace(ctime_ns=was.ctime_ns):
                self.opened[name] = now

    def check_folder(self, name: str) -> None:
        """Raise CorruptCheckpointError if a folder in here is a link that leads elsewhere."""
        self._check_place(name, os.path.realpath(self._path(name)))

    def close(self) -> None:
        with self._lock:
            for fd in self._fds.values():
                with suppress(OSError):  # nothing was written
                    os.close(fd)
            self._fds.clear()

    def _path(self, name: str) -> str:
        return path_in(self.location, name) if name else self.location

    def _open(self, name: str) -> tuple[int, bool]:
        """A descriptor, and whether it stays open after this call."""
        with self._lock:
            fd = self._fds.get(name)
            if fd is not None:
                return fd, True
            fd = self._open_plain(name)
            if len(self._fds) >= MAX_OPEN_FILES:
                return fd, False
            self._fds[name] = fd
            return fd, True

    def _open_plain(self, name: str) -> int:
        """A new descriptor of a plain file in here, opened without waiting for anybody."""
        path, flags = self._path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        self.size(name)  # looked at before it is opened: opening a device may do something
        fd = -1
        try:
            if "/" not in name:
                with suppress(OSError):  # a link is, with this flag
                    fd = os.open(path, flags | os.O_NOFOLLOW)
            is_here = fd >= 0
            fd = fd if is_here else os.open(path, flags)
            status = os.fstat(fd)
            self._check_kind(name, status.st_mode)
            self.opened.setdefault(name, stamp_of(status))
            if not is_here:
                self._check_place(name, _path_of(fd) or os.path.realpath(path))
        except OSError as error:
            raise self._explain(name, error) from error
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_kind(self, name: str, mode: int) -> None:
        if stat.S_ISREG(mode):
            return
        if stat.S_ISDIR(mode):
            raise CorruptCheckpointError(
                f"{self._path(name)} is a folder, where a file is expected. Move it away, or copy that file again."
            )
        raise CorruptCheckpointError(
            f"{self._path(name)} is {_KINDS.get(stat.S_IFMT(mode), 'a special file')}, not a file; nothing like that "
            "belongs into a checkpoint"
        )

    def _check_place(self, name: str, real: str) -> None:
        if _follows_links:
            return
        if self._allowed is None:
            self._allowed = _places_of(os.path.realpath(self.location))
        if not any(os.path.commonpath((real, place)) == place for place in self._allowed):
            raise CorruptCheckpointError(
                f"{self._path(name)} is a link to {real}, outside the checkpoint's folder. If you trust who made it, "
                "repeat the command with --follow-links."
            )

    def _check_range(self, name: str, offset: int, length: int) -> None:
        size = self.size(name)
        if offset < 0 or length < 0 or offset + length > size:
            raise CorruptCheckpointError(
                f"{self._path(name)}: bytes {offset}..{offset + length} are needed, but the file "
                f"has {size} bytes. The file is truncated or its metadata is damaged; copy the checkpoint again."
            )

    def _explain(self, name: str, error: OSError | ValueError) -> CorruptCheckpointError | StorageError:
        path = self._path(name)
        if not isinstance(error, OSError):  # half a surrogate pair or a NUL
            return CorruptCheckpointError(f"{self.location}: {name!r} is not a file name")
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return CorruptCheckpointError(
                f"{path} does not exist, but the checkpoint needs it. Copy the checkpoint again."
            )
        return StorageError(f"{path}: {error.strerror or error}")


def _path_of(fd: int) -> str | None:
    """The path of what was really opened; None if the system does not say."""
    with suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115  as text
        if path.startswith("/") and not path.endswith(" (deleted)"):
            return path
    return None


def _places_of(root: str) -> tuple[str, ...]:
    """Where the files of the folder `root`, a real path, may lie: in it, or in the cache that it is a snapshot of."""
    above, _, _ = root.rpartition("/")
    cache, _, kind = above.rpartition("/")
    return (root, f"{cache}/blobs") if kind == "snapshots" and cache else (root,)


def refuse_location(location: str) -> None:
    """Check that `location` can name a folder."""
    if not location:
        raise UsageError("the name of a checkpoint is empty; is a variable not set?")
    if location.endswith("://"):
        raise UsageError(f"{location} names no place; is a variable not set?")
    if location.lower().startswith(("http://", "https://")):
        raise UsageError(f"{location}: checkpoints on web servers are not read. Download the folder first.")


def absent_folder(folder: Path) -> str:
    """What to say of a folder that does not exist: the one that was perhaps meant, or where the path ends.

    Of a link that leads nowhere, on the way to it too: that it does.
    """
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            return (
                f"{place} is a link to {place.readlink()}, where nothing is. Mend it, or give another folder."
            )
    parent = folder.parent
    if not parent.is_dir():
        return f"{folder} does not exist. Nor does {parent}."
    close = difflib.get_close_matches(folder.name, [entry.name for entry in parent.iterdir()], n=1)
    hint = f"Did you mean {parent / close[0]}?" if close else "No file next to it has a similar name."
    return f"{folder} does not exist. {hint}"
