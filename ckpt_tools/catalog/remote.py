"""Object stores through fsspec: `s3://`, `gs://`, `memory://`, `msc://` and every other scheme it has a driver for.

A request to a store costs 20-50 ms whatever its size, and one connection carries 50-100 MB/s. So long reads are
split into parallel ranges, and short ones fetch their surroundings, up to 8 MiB when they follow one another.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ckpt_tools.errors import (
    CkptError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedCheckpointError,
    UsageError,
)

MAX_RANGE_BYTES = 8 << 20  # of one request; more does not make a connection faster
MIN_RANGE_BYTES = 2 << 20  # a read is not split into smaller requests
CONNECTIONS = 16
_BLOCK = 64 << 10  # a short read fetches whole blocks; a gap of one block still counts as following
_WINDOWS = 4  # kept by each thread: 32 MiB

_INSTALL = "pip install s3fs for s3://, gcsfs for gs://, multi-storage-client for msc://"
_HINT = "Check the address, the credentials and the network."

_ASKED_FOR: set[str] = set()  # schemes that must be

T = TypeVar("T")


def allow_msc() -> None:
    """Let this process open `msc://` locations.

    multi-storage-client loads the Python code that its configuration files name, so a URL alone does not start it.
    """
    _ASKED_FOR.add("msc")


@dataclass(frozen=True, slots=True)
class Retry:
    """When to ask again: `attempts` in all, pauses doubling from `pause` to `max_pause` seconds, jittered.

    A request that moves less than `min_rate` bytes a second after `patience` seconds counts as failed. `give_up`
    seconds after its first failure a request is not repeated (drivers repeat on their own as well).
    """

    attempts: int = 6
    pause: float = 0.2
    max_pause: float = 10.0
    patience: float = 20.0
    min_rate: float = 256 << 10
    give_up: float = 120.0


class _Window(NamedTuple):
    name: str
    start: int
    data: bytes

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


class Store:
    """A folder of an object store: a file system of fsspec, a path in it, and how failures are repeated."""

    def __init__(self, location: str, retry: Retry | None = None) -> None:
        """Raises: UsageError: the scheme is unknown or its driver is not installed."""
        self.location = location
        self.retry = retry or Retry()
        self.fs, path = _file_system(location)
        self.root = path.rstrip("/")

    def path(self, name: str) -> str:
        """The store's own path of a file of this folder."""
        return f"{self.root}/{name}" if name else self.root

    def where(self, name: str) -> str:
        """A file of this folder as a message names it."""
        return f"{self.location.rstrip('/')}/{name}" if name else self.location

    def call(self, what: str, request: Callable[[float], T], nbytes: int = 0) -> T:
        """The result of `request(seconds it may take)`, repeated while the store fails; `nbytes` is what it moves.

        Raises:
            FileNotFoundError: the store says so.
            StorageError: refused, or still failing after the last attempt; begins with `what`.
        """
        retry, begin = self.retry, time.monotonic()
        for attempt in range(1, retry.attempts + 1):
            try:
                return request(retry.patience + nbytes / retry.min_rate)
            except (CkptError, FileNotFoundError, AttributeError, TypeError):
                raise
            except (PermissionError, ImportError, ValueError) as error:  # asking again cannot help
                raise StorageError(f"{what}: {_text(error)}. {_HINT}") from error
            except Exception as error:
                waited = time.monotonic() - begin
                if attempt == retry.attempts or waited > retry.give_up:
                    raise StorageError(
                        f"{what}: still failing after {attempt} attempts in {waited:.0f} s: {_text(error)}. "
                        f"{_HINT} Then run the command again."
                    ) from error
                time.sleep(min(retry.pause * 2 ** (attempt - 1), retry.max_pause) * random.uniform(0.5, 1.5))
        raise AssertionError("the last attempt returns or raises")

    def entries(self, name: str = "") -> dict[str, dict[str, Any]]:
        """What the driver tells of each file and folder directly inside; empty when there is no such folder."""
        path = self.path(name)
        self.fs.invalidate_cache(path)
        try:
            found = self.call(f"{self.where(name)}: listing", lambda t: self.ask(t, "ls", path, detail=True))
        except FileNotFoundError:
            return {}
        named = [(entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in found]
        return {last: entry for last, entry in named if last}

    def sizes(self, name: str = "") -> dict[str, int | None]:
        """Sizes of the files and None for the folders directly inside; empty when there is no such folder."""
        found = self.entries(name)
        return {last: entry["size"] if entry["type"] == "file" else None for last, entry in found.items()}

    def get(self, name: str) -> bytes:
        """The content of a small file."""
        path = self.path(name)
        found: bytes = self.call(f"{self.where(name)}: reading", lambda t: self.ask(t, "cat_file", path))
        return found

    def put(self, name: str, data: bytes) -> None:
        """Store a file; readers see the old or the new one, never a part."""
        path = self.path(name)
        self.call(f"{self.where(name)}: writing", lambda t: self.ask(t, "pipe_file", path, data), len(data))

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing happens if it is not there."""
        path = self.path(name)
        with suppress(FileNotFoundError):
            self.call(f"{self.where(name)}: deleting", lambda t: self.ask(t, "rm", path, recursive=True))

    def open_for_writing(self, name: str, part_bytes: int) -> Any:
        """A file object that uploads what is written to it in parts and appears when it is closed."""
        options = {} if self.location.startswith("msc://") else {"block_size": part_bytes}
        return self.fs.open(self.path(name), "wb", **options)

    def ask(self, timeout: float, method: str, *args: Any, **options: Any) -> Any:
        """What the file system's `method` returns; a driver that can be interrupted is, after `timeout` seconds."""
        if getattr(self.fs, "async_impl", False):
            from fsspec.asyn import sync

            return sync(self.fs.loop, getattr(self.fs, f"_{method}"), *args, timeout=timeout, **options)
        return getattr(self.fs, method)(*args, **options)


class RemoteFiles:
    """A folder of an object store. Safe to share between threads.

    The folder is listed once: files that appear later are not seen.

    Raises (all methods):
        CorruptCheckpointError: a file is absent or ends before the range asked for.
        StorageError: the store refused, or kept failing.
    """

    def __init__(self, location: str, retry: Retry | None = None) -> None:
        self.location = location
        self._store = Store(location, retry)
        self._sizes: dict[str, dict[str, int | None]] = {}  # of each folder; None: a folder
        self._near = threading.local()
        self._pool = ThreadPoolExecutor(CONNECTIONS, "ckpt-remote")

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
        """As `Files.list`.

        Raises:
            UnsupportedCheckpointError: there is no such folder.
        """
        names = sorted(self._folder(""))
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
        if len(buffer) >= MAX_RANGE_BYTES:
            self._fetch_into(name, offset, buffer)
        elif buffer:
            window = self._window(name, offset, len(buffer))
            buffer[:] = memoryview(window.data)[offset - window.start :][: len(buffer)]

    def stamps(self, names: Sequence[str]) -> dict[str, tuple[int | None, str | None]]:
        """Length and version of each file, asked anew: equal as long as nothing changed; Nones when it is gone."""
        places = {name: name.rpartition("/") for name in names}
        folders = {folder: self._store.entries(folder) for folder, _, _ in places.values()}
        entries = {name: folders[folder].get(last, {}) for name, (folder, _, last) in places.items()}
        return {name: (entry.get("size"), _version(entry)) for name, entry in entries.items()}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

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
        wanted = max(length, min(2 * len(near.data), MAX_RANGE_BYTES) if near else _BLOCK)
        start = offset // _BLOCK * _BLOCK
        stop = min(-(-max(stop, start + wanted) // _BLOCK) * _BLOCK, self.size(name))
        data = bytearray(stop - start)
        self._fetch_into(name, start, memoryview(data))
        found = _Window(name, start, bytes(data))
        if near:
            windows.remove(near)
        del windows[: len(windows) - _WINDOWS + 1]
        windows.append(found)
        return found

    def _fetch_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` by parallel requests; every one is waited for before the first failure is raised."""
        count = min(CONNECTIONS, -(-len(buffer) // MIN_RANGE_BYTES))
        step = min(-(-len(buffer) // max(count, 1)), MAX_RANGE_BYTES)
        parts = [(at, buffer[at : at + step]) for at in range(0, len(buffer), max(step, 1))]
        if len(parts) == 1:
            self._fetch_part(name, offset, buffer)
            return
        futures = [self._pool.submit(self._fetch_part, name, offset + at, part) for at, part in parts]
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            raise errors[0]

    def _fetch_part(self, name: str, offset: int, part: memoryview) -> None:
        path, stop = self._store.path(name), offset + len(part)

        def request(timeout: float) -> bytes:
            data: bytes = self._store.ask(timeout, "cat_file", path, start=offset, end=stop)
            if len(data) != len(part):
                raise OSError(f"{len(data)} bytes came instead of {len(part)}")
            return data

        what = f"{self._store.where(name)}: reading bytes {offset}..{stop}"
        try:
            part[:] = self._store.call(what, request, len(part))
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f"{what}: the file has vanished since the folder was listed."
            ) from error

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


def _file_system(location: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it."""
    import fsspec

    if location.startswith("msc://") and "msc" not in _ASKED_FOR:
        raise UsageError(
            f"{location}: multi-storage-client has to be asked for: add --enable-msc, or call allow_msc() first."
        )
    try:
        fs, path = fsspec.core.url_to_fs(location)
    except ImportError as error:
        raise UsageError(f"{location}: {error} ({_INSTALL}).") from error
    except ValueError as error:
        raise UsageError(
            f"{location}: {error}. Schemes such as s3://, gs:// and file:// are known."
        ) from error
    return fs, path


def _version(entry: Mapping[str, Any]) -> str | None:
    """What a driver tells of a file's content or its last change, under the names that drivers use."""
    kinds = ("ETag", "etag", "generation", "md5Hash", "LastModified", "mtime", "created")
    return next((str(entry[kind]) for kind in kinds if entry.get(kind)), None)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")
