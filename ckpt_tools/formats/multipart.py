"""A file of an S3 store, uploaded while it is written: several parts are on their way at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from typing import Any

IN_FLIGHT = (
    8  # parts of one file that nobody has answered yet: memory is theirs and that of the part being filled
)


class Multipart:
    """Takes bytes front to back. The file appears when it is closed; `discard` leaves nothing of it.

    `ask` sends a request about this file (method and its arguments) and returns the answer. Threads of its own begin
    with the first part and end with the file.
    """

    def __init__(self, ask: Callable[..., Any], part_bytes: int) -> None:
        self._ask, self._part_bytes = ask, part_bytes
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "ckpt-part")
        self._upload: str | None = None
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
        if self._buffer.tell():
            self._send()
        while self._asked:
            self._answered()
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(self._tags, 1)]
        self._ask("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        self._upload = None
        self._pool.shutdown()

    def discard(self) -> None:
        """Nothing is on its way any more, and the store forgets the parts that it has."""
        self._pool.shutdown(cancel_futures=True)
        self._asked.clear()
        self._buffer = BytesIO()
        if self._upload is not None:
            self._ask("abort_multipart_upload", UploadId=self._upload)
            self._upload = None

    def _send(self) -> None:
        """Send the part that is full, when few enough are on their way."""
        if self._upload is None:
            self._upload = self._ask("create_multipart_upload")["UploadId"]
        while len(self._asked) >= IN_FLIGHT:
            self._answered()
        number = len(self._tags) + len(self._asked) + 1
        part = {"UploadId": self._upload, "PartNumber": number, "Body": self._buffer.getvalue()}
        # Bytes, not a file: a request that is repeated would send what is left of a file, which is nothing.
        self._asked.append(self._pool.submit(self._ask, "upload_part", **part))
        self._buffer = BytesIO()

    def _answered(self) -> None:
        """Wait for the part that was sent first."""
        self._tags.append(self._asked.popleft().result()["ETag"])
