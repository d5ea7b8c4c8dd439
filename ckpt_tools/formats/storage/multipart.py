"""A file of an S3 store, uploaded while it is written: several parts are on their way at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from typing import Any, NamedTuple

IN_FLIGHT = (
    8  # parts of one file that nobody has answered yet: memory is theirs and that of the part being filled
)


class Part(NamedTuple):
    """A part of a file as the store calls it."""

    number: int
    tag: str


class Begun(NamedTuple):
    """An upload that several write: its id, and the number of the first part that this one does."""

    upload: str
    first_part: int


def as_asked(parts: Iterable[Part]) -> dict[str, Any]:
    """Parts in the order of their numbers, as S3 takes them to complete a file."""
    return {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in sorted(parts)]}


class Multipart:
    """Takes bytes front to back. The file appears when it is closed; `discard` leaves nothing of it.

    `ask` sends a request about this file (method and its arguments) and returns the answer. Threads of its own begin
    with the first part and end with the file.
    """

    def __init__(
        self,
        ask: Callable[..., Any],
        part_bytes: int,
        in_flight: int = IN_FLIGHT,
        begun: Begun | None = None,
    ) -> None:
        """`begun`: an upload of which this is a stretch; who has begun it completes or aborts it."""
        self._ask, self._part_bytes, self._in_flight = ask, part_bytes, in_flight
        self._pool = ThreadPoolExecutor(in_flight, "ckpt-part")
        self._is_stretch = begun is not None
        self._upload: str | None = begun.upload if begun else None
        self._first = begun.first_part if begun else 1
        self._buffer = BytesIO()
        self._asked: deque[Future[Any]] = deque()
        self._tags: list[str] = []

    def write(self, data: bytes | memoryview) -> None:
        """Raises: what the store said of a part that was sent before."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self._buffer.write(rest[: self._part_bytes - self._buffer.tell()]) :]
            if self._buffer.tell() == self._part_bytes:
                self._send()

    def close(self) -> None:
        """Complete the file. Raises: what the store said of any part of it."""
        if self._upload is None:  # not even one part
            self._ask("put_object", Body=self._buffer.getvalue())
            return
        self._ask("complete_multipart_upload", UploadId=self._upload, MultipartUpload=as_asked(self.parts()))
        self._upload = None

    def parts(self) -> list[Part]:
        """All parts, when the store has answered to the last. Raises: what it said of any of them."""
        if self._buffer.tell():
            self._send()
        while self._asked:
            self._answered()
        self._pool.shutdown()
        return [Part(number, tag) for number, tag in enumerate(self._tags, self._first)]

    def discard(self) -> None:
        """Nothing is on its way any more, and the store forgets the parts that it has."""
        self._pool.shutdown(cancel_futures=True)
        self._asked.clear()
        self._buffer = BytesIO()
        if self._upload is not None and not self._is_stretch:
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
