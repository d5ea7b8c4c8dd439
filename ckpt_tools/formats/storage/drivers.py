"""What a store is asked, one request at a time, and how a file system of fsspec answers it.

A path is one name and never a pattern: fsspec's `rm`, `cat`, `expand_path` and `glob` expand `*`, `?` and `[...]` in
what they are given, so that nothing here calls them.

`Multipart` is a file of an S3 store that is uploaded while it is written: several parts are on their way at once.
"""

from __future__ import annotations

import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from typing import Any, NamedTuple, Protocol

from ckpt_tools.errors import UsageError

IN_FLIGHT = 8  # unanswered parts of one file; each takes memory, as does the part that is being filled


class Part(NamedTuple):
    """A part of a file as the store calls it."""

    number: int
    tag: str


class PartUpload(NamedTuple):
    """An upload that several processes write: its id, and the number of this process's first part."""

    id: str
    first_part: int


def as_asked(parts: Iterable[Part]) -> dict[str, Any]:
    """Parts in the order of their numbers, as S3 takes them to complete a file."""
    return {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in sorted(parts)]}


class Multipart:
    """Takes bytes front to back. The file appears when it is closed; `discard` leaves nothing of it.

    `ask` sends a request about this file (method and its arguments) and returns the answer. Its threads start
    with the first part and end with the file.
    """

    def __init__(
        self,
        ask: Callable[..., Any],
        part_bytes: int,
        in_flight: int = IN_FLIGHT,
        upload: PartUpload | None = None,
    ) -> None:
        """`upload`: this file is a part range of that upload, which its starter completes or aborts."""
        self._ask, self._part_bytes, self._in_flight = ask, part_bytes, in_flight
        self._pool = ThreadPoolExecutor(in_flight, "ckpt-part")
        self._is_part_range = upload is not None
        self._upload: str | None = upload.id if upload else None
        self._first = upload.first_part if upload else 1
        self._buffer = BytesIO()
        self._asked: deque[Future[Any]] = deque()
        self._tags: list[str] = []

    def write(self, data: bytes | memoryview) -> None:
        """Send full parts. Raises the error of a part that was sent before."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self._buffer.write(rest[: self._part_bytes - self._buffer.tell()]) :]
            if self._buffer.tell() == self._part_bytes:
                self._send()

    def close(self) -> None:
        """Complete the file. Raises the error of any part."""
        if self._upload is None:  # not even one part
            self._ask("put_object", Body=self._buffer.getvalue())
            return
        self._ask("complete_multipart_upload", UploadId=self._upload, MultipartUpload=as_asked(self.parts()))
        self._upload = None

    def parts(self) -> list[Part]:
        """All parts, when the store has answered to the last. Raises the error of any."""
        if self._buffer.tell():
            self._send()
        while self._asked:
            self._answered()
        self._pool.shutdown()
        return [Part(number, tag) for number, tag in enumerate(self._tags, self._first)]

    def discard(self) -> None:
        """Stop all requests; the store forgets the parts that it has."""
        self._pool.shutdown(cancel_futures=True)
        self._asked.clear()
        self._buffer = BytesIO()
        if self._upload is not None and not self._is_part_range:
            self._ask("abort_multipart_upload", UploadId=self._upload)
            self._upload = None

    def _send(self) -> None:
        """Send the part that is full, when few enough are on their way."""
        if self._upload is None:
            self._upload = self._ask("create_multipart_upload")["UploadId"]
        while len(self._asked) >= self._in_flight:
            self._answered()
        number = self._first + len(self._tags) + len(self._asked)
        part = {"UploadId": self._upload, "PartNumber": number, "Body": self._buffer.getvalue()}
        # Bytes, not a file: a request that is repeated would send what is left of a file, which is nothing.
        self._asked.append(self._pool.submit(self._ask, "upload_part", **part))
        self._buffer = BytesIO()

    def _answered(self) -> None:
        """Wait for the part that was sent first."""
        self._tags.append(self._asked.popleft().result()["ETag"])


_COPIED_BYTES = 8 << 20  # at once

# `type` ("file", "directory"), `size` in bytes, and fields of the store that identify the content.
Entry = Mapping[str, Any]
# The answer to a request, which is repeated while it fails; and the bytes that it moves.
Call = Callable[[Callable[[float], Any], int], Any]


class Upload(NamedTuple):
    """A multipart upload that was started and never completed."""

    path: str
    id: str


class NoBucketError(FileNotFoundError):
    """The store has no bucket of the name that is asked for, so that no folder can be there."""


class Driver(Protocol):
    """Requests of one store. `seconds` is what each may take; a driver that cannot be interrupted takes longer.

    Raises (all methods):
        FileNotFoundError: the store says so; `NoBucketError` where even the bucket is absent.
        PermissionError: it will not do it, however often it is asked.
    """

    root: str  # the path of the location that the driver was made for

    @property
    def takes_stretches(self) -> bool:
        """Whether several processes may write parts of one file, of any lengths above the least."""

    def address(self) -> str:
        """URL that requests go to; empty if unknown."""

    def page(self, seconds: float, path: str, after: str | None) -> tuple[dict[str, Entry], str | None]:
        """Some of what lies directly inside a folder, by name, and what to go on `after`; None: that was all."""

    def get(self, seconds: float, path: str) -> bytes:
        """The content of a file."""

    def get_into(self, seconds: float, path: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` of a file. Raises OSError: other than that many bytes came."""

    def info(self, seconds: float, path: str) -> Entry:
        """The store's entry of one file, never from a cache."""

    def put(self, seconds: float, path: str, data: bytes) -> None:
        """Store a file as a whole."""

    def remove(self, seconds: float, path: str) -> None:
        """Delete the file of just this name."""

    def copy(self, seconds: float, path: str, target: str, nbytes: int) -> None:
        """Store a file of so many bytes under another name too, replacing what has it."""

    def open_for_writing(
        self, path: str, part_bytes: int, in_flight: int, call: Call, upload: PartUpload | None = None
    ) -> Any:
        """A file object that uploads what is written to it and appears when it is closed.

        `upload`: it is a part range of that upload (only where `takes_stretches`).
        """

    def begin(self, seconds: float, path: str) -> Upload:
        """Start an upload that several processes write."""

    def complete(self, seconds: float, upload: Upload, parts: Sequence[Part]) -> None:
        """Make a file of parts."""

    def uploads(self, seconds: float, path: str, after: str | None) -> tuple[list[Upload], str | None]:
        """As `page`, the uploads into a folder and those inside it; none if the driver cannot list them."""

    def abort(self, seconds: float, upload: Upload) -> None:
        """Make the store forget an upload and its parts."""


@contextmanager
def reading_configuration() -> Iterator[None]:
    """Around what makes fsspec read its configuration (its import does), which raises errors of any class."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise UsageError(
            f"fsspec cannot read its configuration (~/.config/fsspec or FSSPEC_CONFIG_DIR, FSSPEC_*): {error}. "
            "Correct it, or name an empty folder by FSSPEC_CONFIG_DIR."
        ) from error


class FsspecDriver:
    """As `Driver`, by the file system that fsspec has for the URL; `::` is a part of names, no chain of drivers."""

    takes_stretches = False

    def __init__(self, url: str) -> None:
        with reading_configuration():
            import fsspec

        self._scheme = url.partition("://")[0].lower()
        driver = fsspec.get_filesystem_class(self._scheme)
        self.fs = driver(**driver._get_kwargs_from_urls(url))
        self.root = driver._strip_protocol(url).rstrip("/")

    def ask(self, seconds: float, method: str, *args: Any, **options: Any) -> Any:
        """What the file system's `method` returns; one that can be interrupted is, after so many seconds."""
        if getattr(self.fs, "async_impl", False):
            from fsspec.asyn import sync

            return sync(self.fs.loop, getattr(self.fs, f"_{method}"), *args, timeout=seconds, **options)
        return getattr(self.fs, method)(*args, **options)

    def address(self) -> str:
        return ""

    def page(self, seconds: float, path: str, after: str | None) -> tuple[dict[str, Entry], str | None]:
        self.fs.invalidate_cache(path)
        inside = [(entry["name"].rstrip("/"), entry) for entry in self.ask(seconds, "ls", path, detail=True)]
        named = {full.rpartition("/")[2]: one for full, one in inside if full != path}  # a file lists itself
        return {name: entry for name, entry in named.items() if name}, None

    def get(self, seconds: float, path: str) -> bytes:
        found: bytes = self.ask(seconds, "cat_file", path, None, None)
        return found

    def get_into(self, seconds: float, path: str, start: int, buffer: memoryview) -> None:
        data = self.ask(seconds, "cat_file", path, start=start, end=start + len(buffer))
        if len(data) != len(buffer):
            raise OSError(f"{len(data)} bytes came instead of {len(buffer)}")
        buffer[:] = data

    def info(self, seconds: float, path: str) -> Entry:
        self.fs.invalidate_cache(path.rpartition("/")[0])
        found: Entry = self.ask(seconds, "info", path)
        return found

    def put(self, seconds: float, path: str, data: bytes) -> None:
        self.ask(seconds, "pipe_file", path, data)

    def remove(self, seconds: float, path: str) -> None:
        try:
            self.ask(seconds, "rm_file", path)
        except NotImplementedError:  # the driver has only `rm`, which takes patterns
            if re.search(r"[*?\[\]{}]", path):
                raise UsageError(
                    f"{path}: the driver of {self._scheme}:// deletes by pattern, and this name is one. Choose "
                    "another output."
                ) from None
            self.ask(seconds, "rm", path)

    def copy(self, seconds: float, path: str, target: str, nbytes: int) -> None:
        try:
            self.ask(seconds, "cp_file", path, target)
        except NotImplementedError:  # its bytes pass through this machine
            with self.fs.open(path, "rb") as source, self.fs.open(target, "wb") as file:
                shutil.copyfileobj(source, file, _COPIED_BYTES)

    def open_for_writing(
        self, path: str, part_bytes: int, in_flight: int, call: Call, upload: PartUpload | None = None
    ) -> Any:
        options = {} if self._scheme == "msc" else {"block_size": part_bytes}
        return self.fs.open(path, "wb", **options)

    def begin(self, seconds: float, path: str) -> Upload:
        raise NotImplementedError("files are written whole")

    def complete(self, seconds: float, upload: Upload, parts: Sequence[Part]) -> None:
        raise NotImplementedError("no upload was started")

    def uploads(self, seconds: float, path: str, after: str | None) -> tuple[list[Upload], str | None]:
        return [], None

    def abort(self, seconds: float, upload: Upload) -> None:
        raise NotImplementedError("no upload was listed")
