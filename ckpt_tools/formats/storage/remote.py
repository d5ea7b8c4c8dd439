"""Object stores: `s3://`, and `gs://`, `memory://`, `msc://` and every other scheme that fsspec has a driver for.

A request to a store costs 20-50 ms whatever its size, and one connection carries 50-100 MB/s. What is known to be
read comes from `read_ahead`. Of other reads long ones are split into parallel ranges, and short ones fetch their
surroundings, up to 8 MiB when they follow one another.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError
from ckpt_tools.formats.storage.io_pool import CONNECTIONS, pool
from ckpt_tools.formats.storage.object_store import Retry, Store, version_of
from ckpt_tools.formats.storage.prefetch import REQUEST_BYTES, read_ahead

MIN_RANGE_BYTES = 2 << 20  # a read is not split into smaller requests
_BLOCK = 64 << 10  # a short read fetches whole blocks; a gap of one block still counts as following
_WINDOWS = 4  # kept by each thread: 32 MiB


class _Window(NamedTuple):
    name: str
    start: int
    data: bytes

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


class RemoteFiles:
    """A folder of an object store. Safe to share between threads.

    The folder is listed once: files that appear later are not seen.

    Raises (all methods):
        CorruptCheckpointError: a file is absent or ends before the range asked for.
        StorageError: the store refused, or kept failing.
    """

    def __init__(self, location: str, retry: Retry | None = None) -> None:
        self._store = Store(location, retry)
        self.location = self._store.location
        self._sizes: dict[str, dict[str, int | None]] = {}  # of each folder; None: a folder
        self._near = threading.local()

    def exists(self, name: str) -> bool:
        folder, _, last = name.rpartition("/")
        return last in self._folder(folder)

    def size(self, name: str) -> int:
        folder, _, last = name.rpartition("/")
        size = self._folder(folder).get(last)
        if size is None:
            raise CorruptCheckpointError(
                f"{self._store.where(name)} does not exist, but the checkpoint needs it. "
                "Copy the checkpoint again."
            )
        return size

    def list(self) -> list[str]:
        """As `Files.list`."""
        names = sorted(self._folder(""))
        if self._store.without_bucket:
            raise UnsupportedCheckpointError(f"{self.location}: {self._store.without_bucket}.")
        if not names:
            raise UnsupportedCheckpointError(f"{self.location} does not exist or is empty.")
        return names

    def read(self, name: str, offset: int, length: int) -> bytes:
        self._check_range(name, offset, length)  # before memory is set aside for it
        buffer = bytearray(length)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._check_range(name, offset, len(buffer))
        done = read_ahead(self, name, offset, buffer)
        offset, buffer = offset + done, buffer[done:]
        if len(buffer) >= REQUEST_BYTES:
            self._fetch_long(name, offset, buffer)
        elif buffer:
            window = self._window(name, offset, len(buffer))
            buffer[:] = memoryview(window.data)[offset - window.start :][: len(buffer)]

    def stamps(self, names: Sequence[str]) -> dict[str, tuple[int | None, str | None]]:
        """Length and version of each file, uncached: equal as long as nothing changed; Nones when it is gone."""
        places = {name: name.rpartition("/") for name in names}
        folders = {folder: self._store.entries(folder) for folder, _, _ in places.values()}
        entries = {name: folders[folder].get(last, {}) for name, (folder, _, last) in places.items()}
        return {name: (entry.get("size"), version_of(entry)) for name, entry in entries.items()}

    def fetch_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` of a file, which has as many, by one request."""
        try:
            self._store.get_into(name, start, buffer)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f"{self._store.where(name)}: reading bytes {start}..{start + len(buffer)}: the file has vanished "
                "since the folder was listed."
            ) from error

    def close(self) -> None:
        """A store holds nothing open; the threads of requests are the process's."""

    def _window(self, name: str, offset: int, length: int) -> _Window:
        """Cached bytes around a range; each thread reads on its own."""
        windows: list[_Window] = self._near.__dict__.setdefault("windows", [])
        stop = offset + length
        near = None
        for window in windows:
            if window.name == name and window.start - _BLOCK <= offset <= window.stop + _BLOCK:
                near = window
                if window.start <= offset and stop <= window.stop:
                    return window
        wanted = max(length, min(2 * len(near.data), REQUEST_BYTES) if near else _BLOCK)
        start = offset // _BLOCK * _BLOCK
        stop = min(-(-max(stop, start + wanted) // _BLOCK) * _BLOCK, self.size(name))
        data = bytearray(stop - start)
        self._fetch_long(name, start, memoryview(data))
        found = _Window(name, start, bytes(data))
        if near:
            windows.remove(near)
        del windows[: len(windows) - _WINDOWS + 1]
        windows.append(found)
        return found

    def _fetch_long(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` by parallel requests; every one is waited for before the first failure is raised."""
        count = min(CONNECTIONS, -(-len(buffer) // MIN_RANGE_BYTES))
        step = min(-(-len(buffer) // max(count, 1)), REQUEST_BYTES)
        parts = [(at, buffer[at : at + step]) for at in range(0, len(buffer), max(step, 1))]
        if len(parts) == 1:
            self.fetch_into(name, offset, buffer)
            return
        futures = [pool().submit(self.fetch_into, name, offset + at, part) for at, part in parts]
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            raise errors[0]

    def _folder(self, name: str) -> dict[str, int | None]:
        """`Store.sizes`, asked once."""
        found = self._sizes.get(name)
        if found is None:
            self._sizes[name] = found = self._store.sizes(name)
        return found

    def _check_range(self, name: str, offset: int, length: int) -> None:
        size = self.size(name)
        if offset < 0 or length < 0 or offset + length > size:
            raise CorruptCheckpointError(
                f"{self._store.where(name)}: bytes {offset}..{offset + length} are needed, but the file has {size} "
                "bytes. The file is truncated or its metadata is damaged; copy the checkpoint again."
            )
