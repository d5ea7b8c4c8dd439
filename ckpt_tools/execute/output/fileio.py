"""Exact reads and writes of byte ranges of local files: every short count is continued, every error explained."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.errors import StorageError
from ckpt_tools.formats.torch_archive.tensor_template import EXTENT_BYTES

_FICLONERANGE = 0x4020940D  # linux/fs.h
_COPY_UNSUPPORTED = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY}
_NEVER_SHARED = {errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS}
_BOUNCE_BYTES = 1 << 20
BLOCK_BYTES = max(4096, mmap.PAGESIZE)  # what passes by the page cache begins and ends at multiples of it


@dataclass(slots=True)
class CopyCount:
    """Bytes that went each way."""

    cloned: int = 0  # shared with the source by the file system
    kernel: int = 0  # copied inside the kernel
    touched: int = 0  # passed through this process


class At(NamedTuple):
    """A place in an open file; `offset` in bytes."""

    fd: int
    offset: int

    def skip(self, nbytes: int) -> At:
        return At(self.fd, self.offset + nbytes)


@contextmanager
def storage_errors(path: object) -> Iterator[None]:
    """Turn OSErrors inside into StorageErrors that name `path`."""
    try:
        yield
    except OSError as error:
        hint = {
            errno.ENOSPC: " The disk is full; free some space.",
            errno.EDQUOT: " The quota is used up; free some space.",
            errno.EACCES: " Check its permissions.",
        }.get(error.errno or 0, "")
        raise StorageError(f"{path}: {error.strerror or error}.{hint}") from error


class OutputFile(NamedTuple):
    """A file that is written; `path` is for messages."""

    path: Path
    fd: int
    direct: int | None = None  # opened O_DIRECT, if whole blocks shall pass by the page cache

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at byte `offset`; both begin at the same place of a block."""
        with storage_errors(self.path):
            write_all(self.fd, data, offset, self.direct)


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int, direct: int | None = None) -> None:
    """Write all of `data` at byte `offset`, whole blocks of the file through `direct` if that is given.

    No page is then written both ways, so that the cache cannot hold an old one.
    """
    view = memoryview(data)
    while view:
        whole = len(view) // BLOCK_BYTES * BLOCK_BYTES
        if direct is None:
            count = os.pwrite(fd, view, offset)
        elif whole and offset % BLOCK_BYTES == 0:
            count = os.pwrite(direct, view[:whole], offset)
        else:  # what is left of a block, also after a short count
            count = os.pwrite(fd, view[: BLOCK_BYTES - offset % BLOCK_BYTES], offset)
        if count == 0:
            raise OSError(errno.EIO, "write made no progress")
        view = view[count:]
        offset += count


def share(source: At, target: At, length: int, count: CopyCount, refused: set[tuple[int, int]]) -> bool:
    """Copy `length` bytes by sharing whole blocks of theirs, or say that it cannot be done; adds to `count`.

    `refused` are the pairs of file systems (device numbers) that are known not to share, and gets further ones.
    """
    lead = -source.offset % EXTENT_BYTES
    blocks = (length - lead) // EXTENT_BYTES * EXTENT_BYTES
    pair = (os.fstat(source.fd).st_dev, os.fstat(target.fd).st_dev)
    if (source.offset - target.offset) % EXTENT_BYTES or blocks <= 0 or pair in refused:
        return False
    request = struct.pack("qQQQ", source.fd, source.offset + lead, blocks, target.offset + lead)
    try:
        fcntl.ioctl(target.fd, _FICLONERANGE, request)
    except OSError as error:  # copied instead; if a disk is full, that says so
        if error.errno in _NEVER_SHARED:
            refused.add(pair)
        return False
    count.cloned += blocks
    copy_range(source, target, lead, count)
    copy_range(source.skip(lead + blocks), target.skip(lead + blocks), length - lead - blocks, count)
    return True


def can_share(source: int, folder: Path) -> bool:
    """Whether files in `folder` can share blocks with an open file: tried with its first, on one without a name."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _FICLONERANGE, struct.pack("qQQQ", source, 0, EXTENT_BYTES, 0))
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def copy_range(source: At, target: At, length: int, count: CopyCount) -> None:
    """Copy `length` bytes between two files inside the kernel where that can, adding to `count`."""
    while length:
        try:
            done = os.copy_file_range(source.fd, target.fd, length, source.offset, target.offset)
            count.kernel += done
        except OSError as error:
            if error.errno not in _COPY_UNSUPPORTED:
                raise
            done = 0
        if done == 0:  # not between these two file systems, or the source ends: through this process
            data = os.pread(source.fd, min(_BOUNCE_BYTES, length), source.offset)
            if not data:
                raise OSError(errno.EIO, f"the source file ends at byte {source.offset}")
            write_all(target.fd, data, target.offset)
            done = len(data)
            count.touched += done
        source, target, length = source.skip(done), target.skip(done), length - done


def stored_ranges(fd: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of bytes `start` to `stop` of a file that are stored; all where holes cannot be asked for."""
    while start < stop:
        try:
            first = os.lseek(fd, start, os.SEEK_DATA)
            end = os.lseek(fd, first, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # a hole up to the end of the file
            first, end = start, stop
        if first >= stop:
            return
        yield first, min(end, stop)
        start = end


def preallocate(fd: int, length: int, holes: Iterable[tuple[int, int]] = ()) -> None:
    """Reserve `length` bytes and make the file that long, so that a full disk shows before the first byte.

    Nothing is reserved for the byte ranges `holes`, in order, which will hold zeros. A file system in memory would
    fill every reserved page with zeros, a second writing of all; there the free space, which the caller looks at, has
    to do.
    """
    os.ftruncate(fd, length)
    if not length or _in_memory(fd):
        return
    start = 0
    for first, stop in (*holes, (length, length)):
        if first > start:
            try:
                os.posix_fallocate(fd, start, first - start)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
        start = stop


def check_direct(folder: Path) -> None:
    """Try whether files in `folder` can be written past the page cache, on one without a name."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            os.pwrite(fd, mmap.mmap(-1, BLOCK_BYTES), 0)
        finally:
            os.close(fd)
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(
            f"{folder} cannot be written with --direct: {reason}. Convert without it."
        ) from error


def _in_memory(fd: int) -> bool:
    """Whether a file lies in a tmpfs; False where the mounts cannot be read."""
    device = os.fstat(fd).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo") as mounts:  # proc_pid_mountinfo(5)
        for mount in mounts:
            if mount.split(maxsplit=3)[2] == name:
                return mount.partition(" - ")[2].startswith("tmpfs ")
    return False


def drop_cache(fd: int) -> None:
    """Drop the pages of a file that are written out from the page cache; best effort."""
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
