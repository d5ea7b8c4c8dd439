"""A file of an S3 store, uploaded while it is written: several parts are on their way at once.

What s3fs opens for writing waits for every part before it takes more, so that a file costs the sum of its requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from io import BytesIO
from typing import Any

IN_FLIGHT = (
    8  # parts of one file that nobody has answered yet: memory is theirs and that of the part being filled
)


class Multipart:
    """Takes bytes front to back. The file appears when it is closed; `discard` leaves nothing of it.

    `begin` starts a request of the store (method and its arguments) and gives its answer later.
    """

    def __init__(self, begin: Callable[..., Future[Any]], bucket: str, key: str, part_bytes: int) -> None:
        self._begin, self._part_bytes = begin, part_bytes
        self._place = {"Bucket": bucket, "Key": key}
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
            self._begin("put_object", **self._place, Body=self._buffer.getvalue()).result()
            return
        if self._buffer.tell():
            self._send()
        while self._asked:
            self._answered()
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(self._tags, 1)]
        done = self._begin(
            "complete_multipart_upload",
            **self._place,
            UploadId=self._upload,
            MultipartUpload={"Parts": parts},
        )
        done.result()
        self._upload = None

    def discard(self) -> None:
        """Nothing is on its way any more, and the store forgets the parts that it has."""
        for one in self._asked:
            one.cancel()
        for one in self._asked:
            with suppress(BaseException):  # called off, or failed as others did
                one.result()
        self._asked.clear()
        self._buffer = BytesIO()
        if self._upload is not None:
            self._begin("abort_multipart_upload", **self._place, UploadId=self._upload).result()
            self._upload = None

    def _send(self) -> None:
        """Send the part that is full, when few enough are on their way."""
        if self._upload is None:
            self._upload = self._begin("create_multipart_upload", **self._place).result()["UploadId"]
        while len(self._asked) >= IN_FLIGHT:
            self._answered()
        number = len(self._tags) + len(self._asked) + 1
        part = {"UploadId": self._upload, "PartNumber": number, "Body": self._buffer.getvalue()}
        # Bytes, not a file: a driver that repeats a request would send what is left of a file, which is nothing.
        self._asked.append(self._begin("upload_part", **self._place, **part))
        self._buffer = BytesIO()

    def _answered(self) -> None:
        """Wait for the part that was sent first."""
        self._tags.append(self._asked.popleft().result()["ETag"])
