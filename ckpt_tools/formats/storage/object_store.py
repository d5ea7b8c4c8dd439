"""One folder of an object store: where it is, how requests are repeated, and what is asked of it.

A URL is one name and never a pattern, and folders are walked by listing them. S3 has its own driver, all others
are fsspec's.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ckpt_tools.credentials import hidden, revealed
from ckpt_tools.errors import CkptError, StorageError, UsageError
from ckpt_tools.formats.storage.drivers import (
    IN_FLIGHT,
    Driver,
    Entry,
    FsspecDriver,
    NoBucketError,
    Part,
    PartUpload,
    Upload,
)
from ckpt_tools.formats.storage.files import path_in, refuse_location
from ckpt_tools.formats.storage.io_pool import pool

CONNECT_SECONDS = 5.0
S3 = ("s3", "s3a")

_INSTALL = "pip install botocore for s3://, gcsfs for gs://, multi-storage-client for msc://"
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile; FSSPEC_S3_ANON=true for public buckets"
)
_HINT = "Check the address, the credentials and the network."
_ASKED_FOR: set[str] = set()  # schemes that must be
# Drivers wrap what happened in classes of their own, which are not imported only to be caught.
_FINAL = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ParamValidationError",
    "ProfileNotFound",
    "ConfigParseError",
    "NoRegionError",
    "InvalidRegionError",
    "EndpointResolutionError",
    "InvalidS3AddressingStyleError",
    "UnknownSignatureVersionError",
    "UnauthorizedSSOTokenError",
    "SSOTokenLoadError",
    "TokenRetrievalError",
    "InvalidURL",
}
_UNREACHABLE = {
    "EndpointConnectionError", "ConnectTimeoutError", "ConnectionTimeoutError", "ServerTimeoutError",
    "ClientConnectorError", "ClientConnectorDNSError", "ClientConnectorCertificateError", "SSLError",
    "FSTimeoutError", "TimeoutError", "ConnectionRefusedError", "gaierror", "ReadTimeoutError",
    "ProxyConnectionError",
}  # fmt: skip
_UNREACHABLE_ATTEMPTS = 2
_REACHED: set[tuple[str, int]] = set()  # hosts and ports that have answered

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
    seconds after a request began it is not repeated (drivers repeat on their own as well).
    """

    attempts: int = 6
    pause: float = 0.2
    max_pause: float = 10.0
    patience: float = 20.0
    min_rate: float = 256 << 10
    give_up: float = 120.0


class Store:
    """A folder of an object store: its driver, a path there, and how failures are repeated."""

    def __init__(self, location: str, retry: Retry | None = None) -> None:
        """Raises: UsageError: the scheme is unknown, its driver is not installed, or the URL is not one name."""
        self.location = hidden(location)  # as messages and reports name it
        refuse_location(self.location)
        self.scheme = self.location.partition("://")[0].lower()
        self.retry = retry or Retry()
        _check_names(self.location, self.scheme)
        real = revealed(self.location)
        self.driver = _driver(real, self.location)
        self.root = self.driver.root
        self._answered = False
        self.without_bucket = ""  # why not even a folder can be there, once it was asked for

    @property
    def parent(self) -> str:
        """The folder around this one."""
        return self.location.rstrip("/").rpartition("/")[0]

    def path(self, name: str) -> str:
        """The store's own path of a file of this folder."""
        return f"{self.root}/{name}" if name else self.root

    def where(self, name: str) -> str:
        """A file of this folder as a message names it."""
        return path_in(self.location, name) if name else self.location

    def call(self, what: str, request: Callable[[float], T], nbytes: int = 0) -> T:
        """The result of `request(seconds it may take)`, repeated while the store fails; `nbytes` is what it moves."""
        retry, begin = self.retry, time.monotonic()
        self._reach(what)
        for attempt in range(1, retry.attempts + 1):
            try:
                found = request(retry.patience + nbytes / retry.min_rate)
            except (CkptError, FileNotFoundError, AttributeError, TypeError):
                raise
            except Exception as error:
                if _is_final(error):
                    raise StorageError(f"{what}: {_text(error)}. {_HINT}") from error
                waited = time.monotonic() - begin
                if attempt >= self._attempts(error) or waited > retry.give_up:
                    raise StorageError(
                        f"{what}: still failing after {attempt} attempts in {waited:.0f} s: {_text(error)}. "
                        f"{_HINT} Then run the command again."
                    ) from error
                time.sleep(min(retry.pause * 2 ** (attempt - 1), retry.max_pause) * random.uniform(0.5, 1.5))
            else:
                self._answered = True
                return found
        raise AssertionError("the last attempt returns or raises")

    def _attempts(self, error: BaseException) -> int:
        """How often to ask in all; fail within seconds if the store never answered and cannot be reached."""
        if self._answered or not _UNREACHABLE & {type(one).__name__ for one in _causes(error)}:
            return self.retry.attempts
        return min(self.retry.attempts, _UNREACHABLE_ATTEMPTS)

    def _reach(self, what: str) -> None:
        """Check once that the store's address accepts connections; drivers take minutes to say no."""
        place = None if self._answered else self._host()
        if place is None or place in _REACHED:
            return
        for attempt in range(1, _UNREACHABLE_ATTEMPTS + 1):
            try:
                socket.create_connection(place, CONNECT_SECONDS).close()
            except OSError as error:
                if attempt == _UNREACHABLE_ATTEMPTS or isinstance(error, socket.gaierror):
                    raise StorageError(
                        f"{what}: nothing answers at {place[0]} port {place[1]} ({error}). Check the address "
                        "(AWS_ENDPOINT_URL for s3://), the network and its proxies."
                    ) from error
            else:
                _REACHED.add(place)
                return

    def _host(self) -> tuple[str, int] | None:
        """Host and port that requests go to; None if unknown or behind a proxy."""
        url, port = urlsplit(""), None
        with suppress(
            Exception
        ):  # no such profile, no region, no such port: the request itself says it better
            found = urlsplit(self.driver.address())
            url, port = found, found.port
        from urllib.request import (  # http and ssl: only stores need them
            getproxies,
            proxy_bypass,
        )

        if not url.hostname or (getproxies().get(url.scheme) and not proxy_bypass(url.hostname)):
            return None
        return url.hostname, port or (443 if url.scheme == "https" else 80)

    def entries(self, name: str = "") -> dict[str, Entry]:
        """The driver's entry of each file and folder directly inside; empty when there is no such folder."""
        path, what = self.path(name), f"{self.where(name)}: listing"
        found: dict[str, Entry] = {}
        after: str | None = None
        while True:
            try:
                page, after = self.call(what, partial(self.driver.page, path=path, after=after))
            except NoBucketError as error:
                self.without_bucket = str(error)
                return {}
            except FileNotFoundError:
                return {}
            found |= page
            if after is None:
                return found

    def sizes(self, name: str = "") -> dict[str, int | None]:
        """Sizes of the files and None for the folders directly inside; empty when there is no such folder."""
        found = self.entries(name)
        return {last: entry["size"] if entry["type"] == "file" else None for last, entry in found.items()}

    def get(self, name: str) -> bytes:
        """The content of a small file."""
        return self.call(f"{self.where(name)}: reading", lambda t: self.driver.get(t, self.path(name)))

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` of a file, in one request."""
        path, what = self.path(name), f"{self.where(name)}: reading bytes {start}..{start + len(buffer)}"
        self.call(what, lambda t: self.driver.get_into(t, path, start, buffer), len(buffer))

    def version(self, name: str) -> str | None:
        """Identifies a file's content (an ETag, say), never from a cache; None if the driver has nothing."""
        what = f"{self.where(name)}: asking"
        return version_of(self.call(what, lambda t: self.driver.info(t, self.path(name))))

    def put(self, name: str, data: bytes) -> None:
        """Store a file; readers see the old or the new one, never a part."""
        path, what = self.path(name), f"{self.where(name)}: writing"
        try:
            self.call(what, lambda t: self.driver.put(t, path, data), len(data))
        except FileNotFoundError as error:  # a file needs no folder, but it needs a bucket
            raise no_bucket(what, str(error)) from error

    def remove(self, name: str) -> None:
        """Delete the file of just this name; nothing happens if it is not there."""
        with suppress(FileNotFoundError):
            self.call(f"{self.where(name)}: deleting", lambda t: self.driver.remove(t, self.path(name)))

    def copy(self, name: str, nbytes: int, target: Store) -> None:
        """Store a file of so many bytes in another folder of this store too, under its name."""
        paths = self.path(name), target.path(name)
        self.call(f"{target.where(name)}: copying", lambda t: self.driver.copy(t, *paths, nbytes), nbytes)

    @property
    def is_bucket(self) -> bool:
        """Whether it is all of a bucket, and no folder in one; `memory://` has none."""
        return self.scheme != "memory" and "/" not in self.root.strip("/")

    def clear(self, keep: Collection[str]) -> None:
        """Delete every file of this folder, at any depth, but those called `keep`."""
        list(pool().map(self.remove, [name for name in self._files_below() if name not in keep]))

    def _files_below(self, name: str = "") -> Iterator[str]:
        for last, size in self.sizes(name).items():
            inner = f"{name}/{last}" if name else last
            if size is None:
                yield from self._files_below(inner)
            else:
                yield inner

    def open_for_writing(
        self, name: str, part_bytes: int, in_flight: int = IN_FLIGHT, upload: PartUpload | None = None
    ) -> Any:
        """A file object that uploads what is written to it in parts and appears when it is closed.

        On S3 several parts are on their way at once, and it may upload a part range of a file (`Multipart`).
        """
        what = f"{self.where(name)}: writing"
        call = partial(self.call, what)
        return self.driver.open_for_writing(self.path(name), part_bytes, in_flight, call, upload)

    def begin_upload(self, name: str) -> str:
        """Start an upload that several processes write part ranges of; its id."""
        what = f"{self.where(name)}: writing"
        return self.call(what, lambda t: self.driver.begin(t, self.path(name))).id

    def complete_upload(self, name: str, upload: str, parts: Sequence[Part]) -> None:
        """Make a file of the parts that it was uploaded in.

        An upload that is not there may have been completed, and the answer lost: what is there must be looked at.
        """
        asked = partial(self.driver.complete, upload=Upload(self.path(name), upload), parts=parts)
        with suppress(FileNotFoundError):
            self.call(f"{self.where(name)}: completing", asked)

    def abort_uploads(self) -> None:
        """Abort the multipart uploads into this folder that were never completed.

        Their parts are invisible but billed. Where the store does not list them, they stay: its own
        rules may end them.
        """
        for one in self._uploads():
            where = self.where(one.path.removeprefix(f"{self.root}/"))
            with suppress(FileNotFoundError):  # it has ended meanwhile
                self.call(f"{where}: aborting an upload", partial(self.driver.abort, upload=one))

    def _uploads(self) -> Iterator[Upload]:
        after: str | None = None
        while True:
            try:
                ask = partial(self.driver.uploads, path=self.root, after=after)
                found, after = self.call(f"{self.location}: listing uploads", ask)
            except (FileNotFoundError, StorageError):
                return
            yield from found
            if after is None:
                return


def no_bucket(what: str, why: str) -> StorageError:
    """What to say of an output in a bucket that is not there."""
    return StorageError(f"{what}: {why.rstrip('.')}. Make the bucket first, or correct its name.")


def version_of(entry: Mapping[str, Any]) -> str | None:
    """Identifies a file's content or its last change: the first of the fields that drivers use for it."""
    kinds = ("ETag", "etag", "generation", "md5Hash", "LastModified", "mtime", "created")
    return next((str(entry[kind]) for kind in kinds if entry.get(kind)), None)


def _check_names(location: str, scheme: str) -> None:
    """Refuse what a driver would not take for the name it is."""
    path = location.partition("://")[2]
    if scheme in (*S3, "gs", "gcs") and not path.partition("/")[0]:
        raise UsageError(f"{location} names no bucket: write {scheme}://NAME/FOLDER.")
    if {".", ".."} & set(path.split("/")):
        raise UsageError(f"{location}: . and .. are not resolved in a store. Write the address without them.")
    if scheme in S3 and "?versionId=" in path:
        raise UsageError(f"{location}: a ?versionId is not read; objects are taken as they are now.")


def _driver(real: str, shown: str) -> Driver:
    """The driver for the URL `real`, which is named as `shown`."""
    scheme = shown.partition("://")[0].lower()
    if scheme == "msc" and "msc" not in _ASKED_FOR:
        raise UsageError(
            f"{shown}: multi-storage-client has to be asked for: add --enable-msc, or call allow_msc() first."
        )
    try:
        if scheme in S3:
            from ckpt_tools.formats.storage.s3 import S3Driver

            return S3Driver(real)
        return FsspecDriver(real)
    except ImportError as error:
        raise UsageError(f"{shown}: {error} ({_INSTALL}).") from error
    except ValueError as error:
        raise UsageError(f"{shown}: {error}. Schemes such as s3://, gs:// and file:// are known.") from error


def _is_final(error: BaseException) -> bool:
    """Whether the same request would fail again."""
    if isinstance(error, PermissionError | ImportError | ValueError) or getattr(error, "status", 0) in (
        401,
        403,
    ):
        return True
    return bool(_FINAL & {type(one).__name__ for one in _causes(error)})


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _text(error: BaseException) -> str:
    """What happened; drivers' own classes say more than their words, Python's less."""
    if type(error).__name__ == "NoCredentialsError":
        return f"no credentials are found ({_CREDENTIALS})"
    if type(error) in (OSError, PermissionError) and str(error):
        return str(error).rstrip(".: ")
    return f"{type(error).__name__}: {error}".rstrip(".: ")
