"""An output directory that appears whole or not at all.

Everything is written under `<parent>/.<name>.ckpt_tools-partial/`::

    lock         held while a converter works here
    journal/     what is finished
    checkpoint/  the future directory; its `.metadata` comes last
    publishing   the inode number of `checkpoint/` and its plan, once it is complete
    replaced/    the old directory, where the file system cannot exchange two names at once

`checkpoint/` is renamed to `<parent>/<name>` when it is complete. A process killed before that leaves the old state
and a hidden partial directory; the next one cleans up or goes on from it.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ckpt_tools.errors import StorageError, UsageError
from ckpt_tools.execute.fileio import preallocate, storage_errors, sync_directory
from ckpt_tools.execute.finished import has_files
from ckpt_tools.execute.journal import Journal

SPARE_BYTES = 16 << 20  # for `.metadata`, the journal and directories


class Found(enum.Enum):
    """What an earlier process left in the partial directory."""

    NOTHING = enum.auto()
    UNFINISHED = enum.auto()  # the journal says how far it came
    PUBLISHED = enum.auto()  # the output is in place; only the cleaning up is left
    FINISHED = enum.auto()  # nothing, but the output has the plan's files: perhaps all is done


class Staging:
    """The partial directory of one output, for the plan with this digest and these files (name -> bytes)."""

    def __init__(self, final: Path, digest: str, sizes: Mapping[str, int]) -> None:
        self.final = final
        self._digest, self._sizes = digest, sizes
        self.partial = final.parent / f".{final.name}.ckpt_tools-partial"
        self.data = self.partial / "checkpoint"
        self.journal = Journal(self.partial / "journal")
        self._marker = self.partial / "publishing"
        self._replaced = self.partial / "replaced"
        self._lock: int | None = None

    @property
    def held(self) -> bool:
        """Whether this process has the output."""
        return self._lock is not None

    def acquire(self, overwrite: bool, resume: bool) -> Found:
        """Take the output for this process, and say what lies there already.

        Raises:
            UsageError: the output is in use or not empty, or a stopped conversion lies here and neither `resume`
                nor `overwrite` says what to do with it.
        """
        try:
            with storage_errors(self.partial):
                self._make_parent()
                self._take_lock()
                return self._examine(overwrite, resume)
        except BaseException:
            if self.held and [path.name for path in self.partial.iterdir()] == ["lock"]:
                self.discard()  # nothing but what this process put there
            self.release()
            raise

    def _make_parent(self) -> None:
        try:
            self.final.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(
                f"{self.final.parent} cannot be made: a file stands in its way; choose another output"
            ) from None

    def _examine(self, overwrite: bool, resume: bool) -> Found:
        self._undo_half_replacement()
        if resume and self._is_published():
            return Found.PUBLISHED
        if resume and not self.journal.exists() and has_files(self._sizes, self._present()):
            return Found.FINISHED
        return self.begin(overwrite, resume)

    def begin(self, overwrite: bool, resume: bool) -> Found:
        """Make room for a new beginning, or find what can be gone on from.

        Raises:
            UsageError: the output is not empty, or a stopped conversion lies here; see `acquire`.
        """
        self._check_final(overwrite)
        if resume and self.journal.exists() and self._has_own_data():
            return Found.UNFINISHED
        if self.journal.exists() and not (overwrite or resume):
            raise UsageError(
                f"{self.partial} holds a conversion that was stopped. Go on from it with --resume, or start anew "
                "with --overwrite."
            )
        self._marker.unlink(missing_ok=True)  # before the rest: it must not vouch for what is written next
        self._clear()
        self.data.mkdir()
        return Found.NOTHING

    def _present(self) -> dict[str, int | None]:
        """Lengths of what lies in the output."""
        if self.final.is_symlink() or not self.final.is_dir():
            return {}
        return {path.name: path.stat().st_size for path in self.final.iterdir() if path.is_file()}

    def _has_own_data(self) -> bool:
        """Whether `checkpoint/` is there and is not what an exchange left in its place."""
        if not self.data.exists():
            return False
        return not self._marker.exists() or self._marker.read_text() == self._mark(self.data)

    def _mark(self, folder: Path) -> str:
        return f"{folder.stat().st_ino} {self._digest}"

    def _is_published(self) -> bool:
        """Whether an earlier process was stopped after it had put the output in place."""
        if not (self._marker.exists() and self.final.exists()):
            return False
        if self._marker.read_text() != self._mark(self.final):
            return False
        paths = {
            self.final / name: size for name, size in self._sizes.items()
        }  # inode numbers are used again
        return all(path.exists() and path.stat().st_size == size for path, size in paths.items())

    def _take_lock(self) -> None:
        """Lock the partial directory, which a finishing converter may be removing right now."""
        path = self.partial / "lock"
        while self._lock is None:
            self.partial.mkdir(exist_ok=True)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:
                continue
            try:
                self._lock_file(fd)
                if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
                    self._lock = fd
            finally:
                if self._lock is None:
                    os.close(fd)

    def _lock_file(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(fd, 100).decode(errors="replace")
            raise UsageError(f"{self.final} is being written by another converter ({owner})") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise  # these three: a file system without locks, where only the name guards the output

    def _check_final(self, overwrite: bool) -> None:
        if self.final.is_symlink() or (self.final.exists() and not self.final.is_dir()):
            raise UsageError(f"{self.final} exists and is not a directory; choose another output")
        if self.final.is_mount():
            raise UsageError(
                f"{self.final} is a mount point, which cannot be replaced; choose a directory inside it"
            )
        if self.final.exists() and any(self.final.iterdir()) and not overwrite:
            raise UsageError(
                f"{self.final} is not empty; choose another output or replace it with --overwrite"
            )

    def _undo_half_replacement(self) -> None:
        """Put the old directory back if a process was killed between the two renames of `publish`."""
        if self._replaced.exists() and not self.final.exists():
            self._replaced.rename(self.final)

    def _clear(self) -> None:
        for path in self.partial.iterdir():
            if path.is_dir():
                shutil.rmtree(path)

    def _check_space(self, nbytes: int) -> None:
        with storage_errors(self.partial):
            status = os.statvfs(self.partial)
        free = status.f_bavail * status.f_frsize
        if free < nbytes + SPARE_BYTES:
            raise StorageError(
                f"{self.final.parent} has {free} bytes free, but {nbytes + SPARE_BYTES} are needed. Free some "
                "space or choose another output."
            )

    def create_files(self) -> None:
        """Make the data files in their full length; those that exist keep their content.

        Raises:
            StorageError: the disk has not enough space.
        """
        with storage_errors(self.data):
            present = [path.stat().st_blocks * 512 for path in self.data.iterdir()]
        self._check_space(sum(self._sizes.values()) - sum(present))
        for name, size in self._sizes.items():
            with storage_errors(self.data / name):
                fd = os.open(self.data / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    preallocate(fd, size)
                finally:
                    os.close(fd)

    def write_file(self, name: str, data: bytes, sync: bool) -> None:
        """A small file of the future directory."""
        path = self.data / name
        with storage_errors(path), open(path, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def publish(self, sync: bool, overwrite: bool) -> None:
        """Rename the finished directory into place. `discard` then removes what it replaced.

        Raises:
            StorageError: among others, when files have appeared in the output that `overwrite` does not give up.
        """
        with storage_errors(self.final):
            if sync:
                sync_directory(self.data)
            self._marker.write_text(self._mark(self.data))
            if not (overwrite and self.final.exists()):
                self.data.rename(self.final)  # refused unless it is absent or empty
            elif not _exchange(self.data, self.final):
                self.final.rename(self._replaced)
                self.data.rename(self.final)
            if sync:
                sync_directory(self.final.parent)

    def discard(self) -> None:
        """Remove the partial directory and everything in it; the marker last, as it says that all is well."""
        with storage_errors(self.partial):
            self._clear()
            self._marker.unlink(missing_ok=True)
            (self.partial / "lock").unlink()
        self.release()
        with suppress(OSError):  # another converter may have begun here already
            self.partial.rmdir()

    def release(self) -> None:
        """Let others take the output; what is in the partial directory stays."""
        if self._lock is not None:
            with suppress(OSError):
                os.close(self._lock)
            self._lock = None


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories in one step, or say that this system cannot."""
    at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    return call is not None and call(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0
