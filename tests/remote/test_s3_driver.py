"""What the driver of S3 makes of a server's answers: right, wrong, late, cut, in pages, and after a fork."""

import io
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.errors import StorageError, UsageError
from ckpt_tools.formats.storage.object_store import Retry, Store
from ckpt_tools.formats.storage.s3 import _fill
from tests.conftest import REPO
from tests.remote.s3 import (
    BUSY,
    CUT,
    DENIED,
    FAILED_INSIDE,
    FLIPPED,
    MOVED,
    NONE,
    RESET,
    UNPROVEN,
    WHOLE,
    Objects,
    s3_server,
)

pytest.importorskip("botocore", reason="botocore is not installed")
pytest.importorskip("moto.server", reason="moto's server is not installed")

PAGE = 3
DATA = random.Random(7).randbytes(300_000)
ODD = [
    "a#b?c",
    "50%25 + e",
    "'äé\"",
    "日本",
    " ",
    "x&y=z;",
    "back\\slash",
    "<&>",
    "~!*()",
    "a",
    "+",
]
QUICK = Retry(attempts=3, pause=0.001, patience=2)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    with s3_server(PAGE) as address:
        Objects("http://{}:{}".format(*address)).make("box")
        yield address


def _first(fault: str, method: str = "GET") -> Any:
    """The first request of a method meets the fault, and nothing else does."""
    left = [fault]
    return lambda number, asked, path: left.pop() if asked == method and left else NONE


def _multipart(store: Store, name: str, data: bytes) -> None:
    file = store.open_for_writing(name, 5 << 20)
    file.write(data)
    file.close()


def test_a_folder_of_many_pages_is_listed_whole(proxy):
    store, objects = Store("s3://box/pages", QUICK), Objects(proxy.url)
    for number in range(2 * PAGE + 1):
        objects.put(f"box/pages/file{number}", bytes(number))
        objects.put(f"box/pages/folder{number}/x", b"")
    objects.put("box/pages/", b"")  # the folder itself, as consoles make it
    objects.put("box/pages2/x", b"")
    proxy.requests.clear()
    proxy.choose = lambda number, method, path: BUSY if number == 2 else NONE
    sizes = store.sizes()
    assert sizes == {
        **{f"file{number}": number for number in range(2 * PAGE + 1)},
        **{f"folder{number}": None for number in range(2 * PAGE + 1)},
    }
    assert len(proxy.requests) == len(sizes) // PAGE + 2, "one page is asked for again, not all"
    store.clear(keep="file0")
    assert sorted(objects.below("box/pages")) == ["box/pages/", "box/pages/file0"]
    assert objects.get("box/pages2/x") == b""


@pytest.mark.parametrize("name", ODD)
def test_odd_names_are_what_they_are(name, proxy):
    store, objects = Store(f"s3://box/odd/{name}", QUICK), Objects(proxy.url)
    store.put(name, DATA)
    assert objects.below("box/odd") == {f"box/odd/{name}/{name}": DATA}
    assert store.sizes() == {name: len(DATA)}
    assert Store("s3://box/odd").sizes() == {name: None}
    buffer = bytearray(1000)
    store.get_into(name, 5, memoryview(buffer))
    assert buffer == DATA[5:1005]
    assert store.get(name) == DATA
    assert store.version(name) == store.entries()[name]["ETag"]
    store.open_for_writing("begun", 4).write(b"12345")
    assert len(objects.uploads("box")) == 1
    store.abort_uploads()
    assert objects.uploads("box") == []
    store.remove(name)
    assert objects.below("box/odd") == {}


def test_empty_files(proxy):
    store = Store("s3://box/empty", QUICK)
    store.put("a", b"")
    _multipart(store, "b", b"")
    assert [store.get("a"), store.get("b"), store.sizes()] == [b"", b"", {"a": 0, "b": 0}]
    store.clear(keep="")


@pytest.mark.parametrize("fault", [RESET, CUT, BUSY, WHOLE, UNPROVEN])
@pytest.mark.parametrize("how", ["whole", "range", "listing"])
def test_what_is_lost_is_asked_for_again(fault, how, proxy):
    store = Store("s3://box/lost", QUICK)
    store.put("x", DATA)
    proxy.choose = _first(fault)
    if how == "range":
        buffer = bytearray(200_000)
        store.get_into("x", 7, memoryview(buffer))
        assert buffer == DATA[7:200_007]
    elif how == "whole":
        assert store.get("x") == DATA
    else:
        assert store.sizes() == {"x": len(DATA)}
    assert proxy.done[fault] == 1
    proxy.choose = _first(NONE)
    store.clear(keep="")


def test_a_connection_serves_many_requests(proxy, monkeypatch):
    store = Store("s3://box/kept", QUICK)
    store.put("x", DATA)
    before = proxy.connections
    for start in range(20):
        buffer = bytearray(100_000)
        store.get_into("x", start, memoryview(buffer))
        assert buffer == DATA[start : start + 100_000]
    assert store.get("x") == DATA
    assert proxy.connections - before <= 1  # ranges may be waited for as long as the upload, or longer
    store.clear(keep="")


def test_what_came_changed_does_not_pass_for_the_file(proxy):
    """botocore proves the checksum that the server stored with the object."""
    store = Store("s3://box/flipped", QUICK)
    store.put("x", DATA)
    proxy.choose = _first(FLIPPED)
    assert store.get("x") == DATA
    assert proxy.done[FLIPPED] == 1
    proxy.choose = lambda number, method, path: FLIPPED
    with pytest.raises(StorageError, match="FlexibleChecksumError"):
        store.get("x")


def test_what_is_denied_is_asked_once(proxy):
    proxy.choose = lambda number, method, path: DENIED
    with pytest.raises(
        StorageError, match=r"y: reading: the credentials do not allow it \(AccessDenied: no\)\. Ch"
    ):
        Store("s3://box/x", QUICK).get("y")
    assert len(proxy.requests) == 1


@pytest.mark.parametrize("at", ["uploads", "partNumber=2", "uploadId"])
@pytest.mark.parametrize("fault", [RESET, BUSY, FAILED_INSIDE])
def test_an_upload_survives(fault, at, proxy):
    """Each of its requests may fail or its answer be lost; where only its end was lost, it is done anew."""
    store, content = Store(f"s3://box/{fault} {at}", QUICK), DATA * 40  # of three parts
    left = [fault]
    proxy.choose = lambda number, method, path: (
        left.pop() if left and at in path and (at != "uploadId" or method == "POST") else NONE
    )
    store.call("writing", lambda seconds: _multipart(store, "x", content))
    assert proxy.done[fault] == 1
    proxy.choose = _first(NONE)
    assert store.get("x") == content
    store.abort_uploads()  # of which nobody knows, as the answer was lost
    assert Objects(proxy.url).uploads("box") == []
    store.clear(keep="")


def test_all_pages_of_uploads_are_aborted(proxy, monkeypatch):
    """moto lists all uploads at once: what it lists is cut here as S3 does."""
    from ckpt_tools.formats.storage.s3 import S3Driver

    original, pages = S3Driver._ask, []

    def ask(self: S3Driver, seconds: float, method: str, **asked: Any) -> Any:
        marker = (asked.pop("KeyMarker", ""), asked.pop("UploadIdMarker", ""))
        answer = original(self, seconds, method, **asked)
        if method == "list_multipart_uploads":
            pages.append(marker)
            found = sorted((one["Key"], one["UploadId"]) for one in answer.get("Uploads", ()))
            rest = [one for one in found if one > marker]
            answer["Uploads"] = [{"Key": key, "UploadId": number} for key, number in rest[:2]]
            if len(rest) > 2:
                more = {"NextKeyMarker": rest[1][0], "NextUploadIdMarker": rest[1][1]}
                answer |= {"IsTruncated": True, **more}
        return answer

    objects = Objects(proxy.url)
    for name in ("a", "b", "b", "c", "d"):
        objects.client.create_multipart_upload(Bucket="box", Key=f"run/{name}")
    objects.client.create_multipart_upload(Bucket="box", Key="run2/x")
    monkeypatch.setattr(S3Driver, "_ask", ask)
    Store("s3://box/run", QUICK).abort_uploads()
    assert len(pages) == 3
    assert objects.uploads("box") == ["run2/x"]
    Store("s3://box/run2", QUICK).abort_uploads()


def test_a_bucket_of_another_region_is_followed(proxy):
    store = Store("s3://box/moved", QUICK)
    store.put("x", DATA)
    proxy.choose = _first(MOVED)
    assert store.get("x") == DATA
    assert "/eu-west-1/" in proxy.headers[-1]["authorization"]
    proxy.choose = _first(NONE)
    store.clear(keep="")


def test_no_credentials(proxy, monkeypatch, capsys):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    assert run(["inspect", "s3://box/run"]) == 7
    assert "listing: no credentials are found (AWS_ACCESS_KEY_ID and" in capsys.readouterr().err
    assert proxy.requests == []
    monkeypatch.setenv("FSSPEC_S3_ANON", "true")
    assert Store("s3://box/nothing").sizes() == {}
    assert "authorization" not in proxy.headers[0]
    monkeypatch.setenv("AWS_PROFILE", "not there")
    with pytest.raises(StorageError, match=r"ProfileNotFound: .*not there"):
        Store("s3://box/nothing").sizes()


FORKED = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from ckpt_tools.formats.storage.object_store import Store
store, whole = Store("s3://box/fork"), sys.stdin.buffer.read()

def read(start):
    buffer = bytearray(1000)
    store.get_into("x", start, memoryview(buffer))
    assert buffer == whole[start : start + 1000], start

with ThreadPoolExecutor(8) as pool:
    list(pool.map(read, range(0, 100_000, 1000)))
file = store.open_for_writing("y", 5 << 20)
file.write(whole * 40)
file.close()
assert threading.active_count() == 1
children = []
for _ in range(2):
    children.append(os.fork())
    if not children[-1]:
        break
with ThreadPoolExecutor(8) as pool:
    list(pool.map(read, range(100_000, 299_000, 1000)))
if not children[-1]:
    os._exit(0)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
assert store.get("y") == whole * 40
"""


def test_processes_that_were_forked_share_no_connection(proxy):
    store = Store("s3://box/fork", QUICK)
    store.put("x", DATA)
    subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKED], input=DATA, cwd=REPO, check=True, timeout=120
    )
    store.clear(keep="")


def test_what_is_imported():
    """Neither fsspec for s3://, nor botocore for anything else."""
    code = (
        "import sys; from ckpt_tools.formats.storage.object_store import Store; Store(sys.argv[1]); "
        "print(*sorted({'fsspec', 'botocore', 'boto3'} & set(sys.modules)))"
    )
    environment = {**os.environ, "FSSPEC_CONFIG_DIR": "/nowhere"}

    def modules(url: str) -> str:
        command = [sys.executable, "-c", code, url]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert modules("s3://box/x") == "botocore"
    assert modules("memory://x") == "fsspec"


def test_without_botocore_it_is_said_what_to_install(monkeypatch):
    for name in ("botocore", "botocore.session"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"s3://box/x: .*botocore.* \(pip install botocore for s3://"):
        Store("s3://box/x")


def test_threads_make_one_client(proxy, monkeypatch):
    from botocore.session import Session

    made, original = [], Session.create_client

    def client(self: Session, *given: Any, **options: Any) -> Any:
        made.append(given)
        return original(self, *given, **options)

    monkeypatch.setattr(Session, "create_client", client)
    store = Store("s3://box/one")
    threads = [threading.Thread(target=store.sizes) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_body_of_an_unknown_form_is_read_all_the_same():
    """Its socket is private to botocore and urllib3: a release without it costs a copy, and nothing else."""
    from botocore.response import StreamingBody

    body = StreamingBody(io.BytesIO(b"12345"), 5)
    buffer = bytearray(5)
    _fill(memoryview(buffer), {"Body": body, "ContentLength": 5}, time.monotonic() + 5)
    assert buffer == b"12345"
    with pytest.raises(OSError, match="4 bytes came instead of 5"):
        _fill(memoryview(buffer), {"Body": StreamingBody(io.BytesIO(b"1234"), 4), "ContentLength": 5}, 0.0)
