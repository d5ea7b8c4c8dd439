"""S3 by botocore's client, which threads share: one request each, bodies read straight into the buffer they are for.

Credentials, profiles, regions and endpoints are botocore's own business: environment, `~/.aws/config`, roles, SSO.
Nothing of a client passes a fork: a process that was forked makes its own, from the session that has read the models.
"""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from collections.abc import Sequence
from math import ceil, log2
from typing import Any
from urllib.parse import urlsplit

from ckpt_tools.errors import UsageError
from ckpt_tools.formats.storage.drivers import (
    Call,
    Entry,
    Multipart,
    NoBucketError,
    Part,
    PartUpload,
    Upload,
    as_asked,
)

_USUAL_SECONDS = 20.0  # that `Retry` gives a request: the client of the address serves most of them too
_CONNECTIONS = 256  # kept at most; more at once are closed after each request, with a warning
# An access point takes a bucket's place: its name has slashes or colons.
_BUCKET = re.compile(
    r"(?s)(arn:[^:/]+:s3[^:/]*:[^:/]*:[^:/]*:(?:outpost[:/][^:/]+[:/])?(?:bucket|accesspoint)[:/][^:/]+|[^/]*)/?(.*)"
)
_EQUAL_PARTS = ".r2.cloudflarestorage.com"  # wants parts of equal length, except the last of a file
_COPY_BYTES = 4 << 30  # that one request copies; S3 allows 5 GiB
_ABSENT = {"NoSuchKey", "NoSuchUpload"}
_REFUSED = {401, 403, 405, 501}  # of HTTP: asking again is of no use, also where a request is not implemented
_EXPIRED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
_ELSEWHERE = {
    "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301",
}  # fmt: skip
# What the store's words mean for who asked; 403 without a word is the answer to a question about one file.
_MEANT = {
    "NoSuchBucket": "there is no such bucket",
    "InvalidAccessKeyId": "the store does not know this access key",
    "SignatureDoesNotMatch": "the secret key is not that of the access key",
    "AccessDenied": "the credentials do not allow it",
    "403": "the credentials are not good, or do not allow it",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    **dict.fromkeys(_EXPIRED, "the credentials have expired"),
    **dict.fromkeys(_ELSEWHERE, "the bucket lies in another region: set AWS_DEFAULT_REGION to its own"),
}

# What a process and its children share: sessions by what they read; what it has alone: clients by time-out.
_Made = tuple[tuple[str, str], ...]
_sessions: dict[_Made, Any] = {}
_clients: dict[tuple[_Made, int, float], Any] = {}
_making = threading.Lock()


class S3Driver:
    """As `Driver`."""

    def __init__(self, url: str) -> None:
        import botocore.session  # noqa: F401

        self.root = url.partition("://")[2].strip("/")
        self._made = tuple(
            sorted(one for one in os.environ.items() if one[0].startswith(("AWS_", "FSSPEC_S3_")))
        )
        self._session = _session(self._made)

    def address(self) -> str:
        return str(self._client(_USUAL_SECONDS).meta.endpoint_url)

    def page(self, seconds: float, path: str, after: str | None) -> tuple[dict[str, Entry], str | None]:
        bucket, prefix = _folder(path)
        more = {"ContinuationToken": after} if after else {}
        answer = self._ask(seconds, "list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", **more)
        found: dict[str, Entry] = {}
        for one in answer.get("Contents", ()):
            found[one["Key"].removeprefix(prefix)] = {"type": "file", "size": one["Size"], **one}
        for one in answer.get("CommonPrefixes", ()):
            found[one["Prefix"].removeprefix(prefix)[:-1]] = {"type": "directory", "size": 0}
        found.pop("", None)  # the folder itself, as some tools store it
        return found, answer.get("NextContinuationToken")

    def get(self, seconds: float, path: str) -> bytes:
        stop = time.monotonic() + seconds
        answer = self._ask(seconds, "get_object", **_object(path))
        if answer.get("ContentLength") is None:  # it comes in chunks
            return bytes(answer["Body"].read())
        data = bytearray(answer["ContentLength"])
        _fill(memoryview(data), answer, stop)
        return bytes(data)

    def get_into(self, seconds: float, path: str, start: int, buffer: memoryview) -> None:
        stop = time.monotonic() + seconds
        span = f"bytes={start}-{start + len(buffer) - 1}"
        _fill(buffer, self._ask(seconds, "get_object", **_object(path), Range=span), stop)

    def info(self, seconds: float, path: str) -> Entry:
        answer = self._ask(seconds, "head_object", **_object(path))
        return {"type": "file", "size": answer["ContentLength"], **answer}

    def put(self, seconds: float, path: str, data: bytes) -> None:
        self._ask(seconds, "put_object", **_object(path), Body=data)

    def remove(self, seconds: float, path: str) -> None:
        self._ask(seconds, "delete_object", **_object(path))

    def copy(self, seconds: float, path: str, target: str, nbytes: int) -> None:
        asked = {**_object(target), "CopySource": _object(path)}
        if nbytes <= _COPY_BYTES:
            self._ask(seconds, "copy_object", **asked)
            return
        upload, parts = self.begin(seconds, target), list[Part]()
        for number, start in enumerate(range(0, nbytes, _COPY_BYTES), 1):
            span = f"bytes={start}-{min(start + _COPY_BYTES, nbytes) - 1}"
            which = {"UploadId": upload.id, "PartNumber": number, "CopySourceRange": span}
            answer = self._ask(seconds, "upload_part_copy", **asked, **which)
            parts.append(Part(number, answer["CopyPartResult"]["ETag"]))
        self.complete(seconds, upload, parts)

    @property
    def takes_stretches(self) -> bool:
        return not str(urlsplit(self.address()).hostname).endswith(_EQUAL_PARTS)

    def begin(self, seconds: float, path: str) -> Upload:
        return Upload(path, self._ask(seconds, "create_multipart_upload", **_object(path))["UploadId"])

    def complete(self, seconds: float, upload: Upload, parts: Sequence[Part]) -> None:
        asked = {"UploadId": upload.id, "MultipartUpload": as_asked(parts)}
        self._ask(seconds, "complete_multipart_upload", **_object(upload.path), **asked)

    def open_for_writing(
        self, path: str, part_bytes: int, in_flight: int, call: Call, upload: PartUpload | None = None
    ) -> Multipart:
        def ask(method: str, **asked: Any) -> Any:
            try:
                return call(
                    lambda seconds: self._ask(seconds, method, **_object(path), **asked),
                    len(asked.get("Body", b"")),
                )
            except FileNotFoundError as error:
                # Ended by another, or completed though the answer was lost: its starter may start it again.
                raise OSError(f"the upload is not there any more: {error}") from error

        return Multipart(ask, part_bytes, in_flight, upload)

    def uploads(self, seconds: float, path: str, after: str | None) -> tuple[list[Upload], str | None]:
        bucket, prefix = _folder(path)
        key, _, number = (after or "").rpartition("\n")
        more = {"KeyMarker": key, "UploadIdMarker": number} if after else {}
        answer = self._ask(seconds, "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
        found = [
            Upload(f"{bucket}/{one['Key']}", one["UploadId"])
            for one in answer.get("Uploads", ())
            if one["Key"].startswith(prefix)
        ]
        last = f"{answer.get('NextKeyMarker', '')}\n{answer.get('NextUploadIdMarker', '')}"
        return found, last if answer.get("IsTruncated") else None

    def abort(self, seconds: float, upload: Upload) -> None:
        self._ask(seconds, "abort_multipart_upload", **_object(upload.path), UploadId=upload.id)

    def _ask(self, seconds: float, method: str, **asked: Any) -> Any:
        """The answer to one request. Raises as `Driver` says, and what botocore raises."""
        from botocore.exceptions import ClientError, ParamValidationError

        client = self._client(seconds)
        try:
            return getattr(client, method)(**asked)
        except ClientError as error:
            raise _told(error) from error
        except ParamValidationError as error:
            if "bucket name" not in str(error):
                raise
            raise UsageError(f"{asked['Bucket']!r} is not a name that a bucket can have.") from error

    def _client(self, seconds: float) -> Any:
        """A client of this process with this socket timeout, rounded up to a power of two: a few serve all."""
        from botocore import UNSIGNED
        from botocore.config import Config

        wait = 2.0 ** ceil(log2(seconds))
        key = self._made, os.getpid(), wait
        with _making:
            if key not in _clients:
                unsigned = os.environ.get("FSSPEC_S3_ANON", "").lower() in ("1", "true", "yes", "on")
                config = Config(
                    connect_timeout=wait,  # also what a part may take to send on its connection
                    read_timeout=wait,
                    max_pool_connections=_CONNECTIONS,
                    # `Store.call` repeats, with its own pauses: both would multiply.
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    signature_version=UNSIGNED if unsigned else None,
                )
                _clients[key] = self._session.create_client("s3", config=config)
            return _clients[key]


def _session(made: _Made) -> Any:
    """The session of an environment."""
    from botocore.session import Session

    with _making:
        if made not in _sessions:
            others = [name for name, _ in made if name.startswith("FSSPEC_") and name != "FSSPEC_S3_ANON"]
            if others:
                warnings.warn(
                    f"{', '.join(others)}: not read for s3://; set AWS_*, or a profile.", stacklevel=2
                )
            _sessions[made] = Session()
        return _sessions[made]


def _object(path: str) -> dict[str, str]:
    """Bucket and key of a path, as requests name them."""
    bucket, key = _BUCKET.fullmatch(path).groups()  # type: ignore[union-attr]  # whatever it is
    return {"Bucket": bucket, "Key": key}


def _folder(path: str) -> tuple[str, str]:
    """Bucket and prefix of what lies inside a folder."""
    at = _object(path)
    return at["Bucket"], f"{at['Key']}/" if at["Key"] else ""


def _told(error: Any) -> OSError:
    """The store's error as one of Python's."""
    said, status = error.response.get("Error", {}), error.response["ResponseMetadata"].get("HTTPStatusCode")
    code, kind = str(said.get("Code", status)), OSError
    if code == "NoSuchBucket":
        kind = NoBucketError
    elif code in _ABSENT or status == 404:
        kind = FileNotFoundError
    elif code in _EXPIRED | _ELSEWHERE or status in _REFUSED:
        kind = PermissionError
    words = f"{code}: {said.get('Message', '')}".rstrip(".: ")
    return kind(f"{_MEANT[code]} ({words})" if code in _MEANT else words)


def _fill(buffer: memoryview, answer: Any, stop: float) -> None:
    """Read an answer's body, as long as `buffer`, into it; `stop` is in seconds of `time.monotonic`."""
    from botocore.response import StreamingBody

    body, length = answer["Body"], answer.get("ContentLength")
    raw: Any = getattr(body, "_raw_stream", None)
    file = getattr(
        getattr(raw, "_fp", None), "fp", None
    )  # private to botocore and urllib3: it may be gone one day
    if (
        type(body) is not StreamingBody or length is None or file is None
    ):  # it proves a checksum, or is in chunks
        data = body.read()
        if len(data) != len(buffer):
            raise OSError(f"{len(data)} bytes came instead of {len(buffer)}")
        buffer[:] = data
        return
    # Where botocore sets a socket's time-out: its own `readinto` copies, and waits without end for a slow peer.
    try:
        if length != len(buffer):
            raise OSError(f"{length} bytes came instead of {len(buffer)}")
        left = buffer
        while left:
            if time.monotonic() > stop:
                raise TimeoutError(f"{len(buffer) - len(left)} of {len(buffer)} bytes came in time")
            count = file.readinto1(left)
            if not count:
                raise OSError(f"{len(buffer) - len(left)} bytes came instead of {len(buffer)}")
            left = left[count:]
        raw._fp.close()  # the body has been read: the connection serves the next request
        raw.release_conn()
    finally:
        raw.close()  # and so ends with its connection if it has not
