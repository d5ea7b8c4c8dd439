"""A store on loopback that is as fast as the machine: as much of S3 as botocore asks of it, over a folder.

    python -m tests.benchmarks.store_server FOLDER --port 9100 [--processes 4] [--seconds 600] [--rate BYTES]

moto's server is one Python thread and the bottleneck of whatever is measured against it. Here several processes
accept on one socket, objects are files, and what is read leaves by `sendfile`. With `--rate` all of them together
move so many bytes a second at each port, as a network or a node's disk would; all ports have the same objects.
`GET /-/counts` tells the requests and the bytes of bodies since it was asked last. Nothing is authenticated: it is
for benchmarks, ends after `--seconds`, and with its parent.
"""

import argparse
import ctypes
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_BLOCK = 1 << 20
_PARTS = ".uploads"
COUNTS = "/-/counts"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def store_environment(port: int) -> dict[str, str]:
    """What points a client at the store."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }


class Throttle:
    """So many bytes a second, for all processes that were forked with it."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free = rate, multiprocessing.Value("d", 0.0)

    def __call__(self, nbytes: int) -> None:
        with self._free.get_lock():
            begin = max(time.monotonic(), self._free.value)
            self._free.value = begin + nbytes / self._rate
        time.sleep(max(0.0, begin + nbytes / self._rate - time.monotonic()))


class Counts:
    """Requests by kind, and the bytes of their bodies, of all processes that were forked with it."""

    KINDS = ("GET", "PUT", "POST", "HEAD", "DELETE", "bytes out", "bytes in")

    def __init__(self) -> None:
        self._counts = multiprocessing.Array("q", len(self.KINDS))

    def add(self, kind: str, count: int = 1) -> None:
        with self._counts.get_lock():
            self._counts[self.KINDS.index(kind)] += count

    def taken(self) -> dict[str, int]:
        """What was counted since this was asked last."""
        with self._counts.get_lock():
            found = dict(zip(self.KINDS, self._counts[:], strict=True))
            self._counts[:] = [0] * len(self.KINDS)
        return found


class Handler(BaseHTTPRequestHandler):
    """One connection; `folder`, `throttle` and `counts` are set for the process."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and small bodies leave in one packet
    folder: Path
    throttle: Throttle | None = None
    counts: Counts

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def handle_expect_100(self) -> bool:
        found = super().handle_expect_100()
        self.wfile.flush()
        return found

    def _asked(self) -> tuple[Path, dict[str, list[str]]]:
        url = urlsplit(self.path)
        self.counts.add(self.command)
        return self.folder / unquote(url.path).strip("/"), parse_qs(url.query, keep_blank_values=True)

    def do_GET(self) -> None:
        if self.path == COUNTS:
            self._answer(200, json.dumps(self.counts.taken()).encode())
            return
        path, query = self._asked()
        if "uploads" in query:
            self._xml("<ListMultipartUploadsResult/>")
        elif "list-type" in query:
            self._list(path, query)
        elif not path.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._send(path)

    def do_HEAD(self) -> None:
        path, _ = self._asked()
        if path.is_file():
            self._head(200, path, path.stat().st_size)
        else:
            self._answer(404 if path != self.folder else 200)

    def do_PUT(self) -> None:
        path, query = self._asked()
        if "uploadId" in query:
            path = self._upload(query) / query["partNumber"][0].zfill(6)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.folder / f"{os.getpid()}.{id(self)}"  # beside the buckets: nobody lists it
        with beside.open("wb") as file:
            self._take(file)
        beside.replace(path)
        self._answer(200, headers={"ETag": _etag(path)})

    def do_POST(self) -> None:
        path, query = self._asked()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "delete" in query:
            self._delete_all(path, body)
        elif "uploads" in query:
            name = os.urandom(8).hex()
            (self.folder / _PARTS / name).mkdir(parents=True)
            self._xml(
                f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            )
        else:
            upload = self._upload(query)
            path.parent.mkdir(parents=True, exist_ok=True)
            first, *rest = sorted(upload.iterdir())
            with first.open("r+b") as whole:
                whole.seek(0, os.SEEK_END)
                for part in rest:
                    with part.open("rb") as file:
                        while os.copy_file_range(file.fileno(), whole.fileno(), 1 << 30):
                            pass
            first.replace(path)
            shutil.rmtree(upload)
            self._xml(
                f"<CompleteMultipartUploadResult><ETag>{_etag(path)}</ETag></CompleteMultipartUploadResult>"
            )

    def do_DELETE(self) -> None:
        path, query = self._asked()
        if "uploadId" in query:
            shutil.rmtree(self._upload(query), ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        self._answer(204)

    def _upload(self, query: dict[str, list[str]]) -> Path:
        return self.folder / _PARTS / Path(query["uploadId"][0]).name

    def _delete_all(self, bucket: Path, body: bytes) -> None:
        for key in body.decode().split("<Key>")[1:]:
            (bucket / key.partition("</Key>")[0]).unlink(missing_ok=True)
        self._xml("<DeleteResult/>")

    def _take(self, file: Any) -> None:
        left = int(self.headers["Content-Length"])
        self.counts.add("bytes in", left)
        while left:
            data = self.rfile.read1(min(left, _BLOCK))
            if not data:
                raise ConnectionError("the client hung up")
            file.write(data)
            left -= len(data)
            if self.throttle:
                self.throttle(len(data))

    def _send(self, path: Path) -> None:
        size, start, stop = path.stat().st_size, 0, path.stat().st_size
        asked = self.headers.get("Range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, size) if last else size
        more = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if asked else {}
        self.counts.add("bytes out", stop - start)
        self._head(206 if asked else 200, path, stop - start, more)
        self.wfile.flush()
        with path.open("rb") as file:
            while start < stop:
                count = min(stop - start, _BLOCK if self.throttle else 1 << 30)
                if self.throttle:
                    self.throttle(count)
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, count)

    def _list(self, bucket: Path, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        folder = bucket / prefix.rpartition("/")[0]
        rows = []
        for one in sorted(folder.iterdir()) if folder.is_dir() else ():
            key = str(one.relative_to(bucket))
            if not key.startswith(prefix):
                continue
            if one.is_dir():
                rows.append(f"<CommonPrefixes><Prefix>{escape(key)}/</Prefix></CommonPrefixes>")
            else:
                rows.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{one.stat().st_size}</Size><ETag>{_etag(one)}</ETag>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
        self._xml(f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>")

    def _xml(self, text: str) -> None:
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _head(self, status: int, path: Path, length: int, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("ETag", _etag(path))
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.send_header("Content-Length", str(length))
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


def _etag(path: Path) -> str:
    """What changes when a file is written anew."""
    found = path.stat()
    return f'"{hashlib.md5(f"{found.st_mtime_ns} {found.st_size} {found.st_ino}".encode()).hexdigest()}"'


def serve(folder: Path, port: int, processes: int, seconds: int, throttle: Throttle | None) -> list[int]:
    """Processes that serve `folder` at a port of loopback, for so many seconds or until their parent ends."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler, bind_and_activate=False)
    server.daemon_threads = True
    server.request_queue_size = 256
    server.server_bind()
    server.server_activate()
    made, counts = [], Counts()
    for _ in range(processes):
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
            signal.alarm(seconds)
            Handler.folder, Handler.throttle, Handler.counts = folder, throttle, counts
            server.serve_forever()
        made.append(pid)
    server.socket.close()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, nargs="+", default=[9100])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--rate", type=float, help="bytes a second of each port")
    given = parser.parse_args()
    for port in given.port:
        serve(
            given.folder, port, given.processes, given.seconds, Throttle(given.rate) if given.rate else None
        )
    time.sleep(given.seconds)


if __name__ == "__main__":
    main()
