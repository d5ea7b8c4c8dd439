"""A web server on loopback that serves a folder as a test says: with byte ranges, an index page, a login or not."""

from __future__ import annotations

import base64
import html
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit


class WebServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.ranges = True
        self.index = True
        self.links: list[str] = []  # more of them on every index page
        self.login = ""  # user:password that every request must bring
        self.query = ""  # that every request for a file must end with
        self.absent = 404
        self.requests: list[tuple[str, str]] = []  # path, range

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the test."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebServer

    def do_GET(self) -> None:
        server, url = self.server, urlsplit(self.path)
        asked = self.headers.get("Range") or ""
        server.requests.append((self.path, asked))
        path = server.root / unquote(url.path).lstrip("/")
        login = "Basic " + base64.b64encode(server.login.encode()).decode()
        if server.login and self.headers.get("Authorization") != login:
            self._answer(401, b"who are you?")
        elif path.is_dir() and not url.path.endswith("/"):
            self._answer(301, b"", {"Location": f"{url.path}/"})
        elif path.is_dir():
            names = [n.name + "/" * n.is_dir() for n in sorted(path.iterdir()) if not n.name.startswith(".")]
            links = "".join(
                f'<a href="{link}">{html.escape(link)}</a>\n'
                for link in ["../", *server.links, *map(quote, names)]
            )
            page = f"<html>{links}<a href='?C=M;O=A'>sort</a></html>".encode()
            self._answer(200 if server.index else 403, page, {"Content-Type": "text/html; charset=utf-8"})
        elif not path.is_file() or (server.query and url.query != server.query):
            self._answer(server.absent, b"nothing here")
        else:
            self._file(path.read_bytes(), asked)

    def _file(self, data: bytes, asked: str) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
        headers = {"ETag": f'"{hash(data):x}"', "Content-Type": "application/octet-stream"}
        if not self.server.ranges or found is None:
            self._answer(200, data, headers)
            return
        start, stop = int(found[1]), min(int(found[2]) + 1, len(data))
        if start >= len(data):
            self._answer(416, b"", headers | {"Content-Range": f"bytes */{len(data)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self._answer(206, data[start:stop], headers)

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def web_server(root: Path) -> Iterator[WebServer]:
    server = WebServer(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
