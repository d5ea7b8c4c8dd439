"""A real S3 server on loopback (moto's) and a proxy before it that loses, refuses, or trickles as a test says."""

import http.client
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.ports import free_port

# Answers that are lost, cut, changed on their way, or come byte by byte.
NONE, RESET, CUT, FLIPPED, SLOW = "none", "reset", "cut", "flipped", "slow"
# All of the object, whatever range was asked for, with the checksum that the server stored or without.
WHOLE, UNPROVEN = "200 with all", "200 with all and no checksum"
# Requests that never reach the server, by what they are answered.
BUSY, DENIED, FAILED_INSIDE, MOVED = "503", "403", "200 with an error in it", "301"


def error_of(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()


_REFUSALS = {
    BUSY: (503, error_of("SlowDown"), {}),
    DENIED: (403, error_of("AccessDenied"), {}),
    FAILED_INSIDE: (200, error_of("InternalError"), {}),
    MOVED: (301, error_of("PermanentRedirect"), {"x-amz-bucket-region": "eu-west-1"}),
}


class FaultProxy(ThreadingHTTPServer):
    """Forwards to an S3 server. `choose(number, method, path)` names each request's fault; `done` counts them."""

    daemon_threads = True

    def __init__(self, upstream: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.choose: Callable[[int, str, str], str] = lambda number, method, path: NONE
        self.done: Counter[str] = Counter()
        self.requests: list[tuple[str, str, str]] = []  # method, path, range
        self.headers: list[dict[str, str]] = []  # of each request, by name in small letters
        self.connections = 0
        self.refusals: dict[str, tuple[int, bytes, dict[str, str]]] = {}  # a test's own
        self.slow_seconds = 60.0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up on a slow answer are part of the test."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections += 1

    def _serve(self) -> None:
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with proxy.lock:
            proxy.requests.append((self.command, self.path, self.headers.get("Range") or ""))
            proxy.headers.append({name.lower(): value for name, value in self.headers.items()})
            fault = proxy.choose(len(proxy.requests), self.command, self.path)
            proxy.done[fault] += 1
        refusal = _REFUSALS.get(fault) or proxy.refusals.get(fault)
        if refusal is not None:
            status, data, more = refusal
            self._answer(status, [("Content-Type", "application/xml"), *more.items()], data)
            return
        connection = http.client.HTTPConnection(*proxy.upstream, timeout=60)
        headers = {
            n: value for n, value in self.headers.items() if fault not in (WHOLE, UNPROVEN) or n != "Range"
        }
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        told = [
            (n, value) for n, value in answer.getheaders() if fault != UNPROVEN or "checksum" not in n.lower()
        ]
        self._answer(answer.status, told, data, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, fault: str = NONE) -> None:
        self.send_response_only(status)
        is_head = self.command == "HEAD"
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding") or (
                is_head and name.lower() == "content-length"
            ):
                self.send_header(name, value)
        if not is_head:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if fault in (RESET, CUT):
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            if fault == CUT:
                return
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()  # lingering for 0 seconds sends RST, not FIN
            return
        if fault == FLIPPED:
            data = bytes([data[0] ^ 1]) + data[1:]
        if fault == SLOW:
            self._trickle(data)
        if not is_head:
            self.wfile.write(data)

    def _trickle(self, data: bytes) -> None:
        """Bytes one by one, too few for any deadline yet too steady for a socket timeout."""
        stop = time.monotonic() + self.server.slow_seconds
        for value in data:
            if time.monotonic() > stop:
                break
            self.wfile.write(bytes([value]))
            time.sleep(0.1)
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        """Quiet."""


@contextmanager
def fault_proxy(upstream: tuple[str, int]) -> Iterator[FaultProxy]:
    proxy = FaultProxy(upstream)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield proxy
    proxy.shutdown()
    proxy.server_close()
    thread.join()


@contextmanager
def s3_server(page: int = 1000) -> Iterator[tuple[str, int]]:
    """Host and port of a server with no buckets that lists `page` names at once; a process of its own."""
    port = free_port()
    command = [
        sys.executable,
        "-c",
        "from moto.server import main; main()",
        "-H",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    environment = os.environ | {"MOTO_S3_DEFAULT_MAX_KEYS": str(page)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        _wait_for(port, process)
        yield "127.0.0.1", port
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    stop = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > stop:
                raise RuntimeError("moto's server did not start") from None
            time.sleep(0.1)


class Objects:
    """What a server at `url` has, as boto3 sees it; a path is BUCKET/KEY."""

    def __init__(self, url: str) -> None:
        import boto3  # moto brings it

        self.client: Any = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id="k",
            aws_secret_access_key="s",
            region_name="us-east-1",
        )

    def make(self, bucket: str) -> None:
        self.client.create_bucket(Bucket=bucket)

    def put(self, path: str, data: bytes) -> None:
        self.client.put_object(**_object(path), Body=data)

    def put_folder(self, folder: Path, path: str) -> None:
        for file in folder.rglob("*"):
            if file.is_file():
                self.put(f"{path}/{file.relative_to(folder)}", file.read_bytes())

    def get(self, path: str) -> bytes:
        return bytes(self.client.get_object(**_object(path))["Body"].read())

    def below(self, path: str) -> dict[str, bytes]:
        """Every object of a folder, by its path."""
        bucket, prefix = _object(f"{path}/").values()
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        names = [f"{bucket}/{one['Key']}" for page in pages for one in page.get("Contents", ())]
        return {name: self.get(name) for name in names}

    def uploads(self, bucket: str) -> list[str]:
        """Keys of the multipart uploads that nobody has completed."""
        found = self.client.list_multipart_uploads(Bucket=bucket)
        return [one["Key"] for one in found.get("Uploads") or []]


def _object(path: str) -> dict[str, str]:
    bucket, _, key = path.partition("/")
    return {"Bucket": bucket, "Key": key}


def s3_environment(url: str) -> dict[str, str]:
    """What a user's environment says of a server at `url`."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
