"""Reading through fsspec: the same bytes as from a disk, few requests, failures repeated and then explained."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import CorruptCheckpointError, StorageError, UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage import object_store as store_module
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.storage.object_store import Retry
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.storage.prefetch import REQUEST_BYTES
from ckpt_tools.formats.storage.remote import RemoteFiles
from tests.conftest import fixture_dir
from tests.execute.conftest import make_case
from tests.execute.test_run import tree

QUICK = Retry(attempts=4, pause=0.001)
MIB = 1 << 20
DATA = random.Random(8).randbytes(20 * MIB + 123)

Fault = Callable[[int, int, int], bytes | None]


class Store:
    """`memory://ckpt` with one file `data`; requests are recorded and `fault` may raise or answer in their place."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []
        self.fault: Fault = lambda number, start, end: None
        self._lock = threading.Lock()

    def answer(self, start: int, end: int) -> bytes | None:
        with self._lock:
            self.requests.append((start, end))
            number = len(self.requests)
        return self.fault(number, start, end)


@contextmanager
def memory_store() -> Iterator[Store]:
    found = Store()
    original = MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, start: int, end: int) -> bytes:
        answer = found.answer(start, end)
        return original(self, path, start, end) if answer is None else answer

    MemoryFileSystem().pipe({"/ckpt/data": DATA, "/ckpt/folder/inner": b"abc", "/ckpt/empty": b""})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", cat_file)
        yield found
    MemoryFileSystem.store.clear()


@pytest.fixture
def store() -> Iterator[Store]:
    with memory_store() as found:
        yield found


def test_a_folder_reads_like_a_local_one(store):
    files = open_files("memory://ckpt/")
    assert isinstance(files, RemoteFiles)
    assert files.location == "memory://ckpt/"
    assert files.list() == ["data", "empty", "folder"]
    assert [files.exists(name) for name in ("data", "folder", "folder/inner", "dat")] == [
        True,
        True,
        True,
        False,
    ]
    assert files.size("data") == len(DATA)
    assert files.read("folder/inner", 1, 2) == b"bc"
    assert files.read("empty", 0, 0) == b""
    files.close()


def test_a_long_read_is_split_into_parallel_ranges(store):
    files = RemoteFiles("memory://ckpt")
    meeting = threading.Barrier(8, timeout=20)  # all eight requests are under way at once, or this breaks

    def meet(number: int, start: int, end: int) -> bytes | None:
        meeting.wait()
        return None

    store.fault = meet
    assert files.read("data", 1, 16 * MIB) == DATA[1 : 1 + 16 * MIB]
    assert sorted(store.requests) == [(1 + i * 2 * MIB, 1 + (i + 1) * 2 * MIB) for i in range(8)]


def test_short_reads_that_follow_one_another_become_few_requests(store):
    files = RemoteFiles("memory://ckpt")
    for offset in range(0, len(DATA), 4096):  # 5,121 reads
        length = min(4096, len(DATA) - offset)
        assert files.read("data", offset, length) == DATA[offset : offset + length]
    spans = sorted(store.requests)
    assert len(spans) <= 16
    assert sum(stop - start for start, stop in spans) < 1.1 * len(DATA)
    assert max(stop - start for start, stop in spans) <= REQUEST_BYTES


def test_scattered_short_reads_fetch_little(store):
    files = RemoteFiles("memory://ckpt")
    for offset in (19 * MIB, 5 * MIB, 12 * MIB, MIB, 8 * MIB):
        assert files.read("data", offset + 5, 30) == DATA[offset + 5 : offset + 35]
    assert sum(stop - start for start, stop in store.requests) == 5 * (64 << 10)


def _blip(number: int, start: int, end: int) -> bytes | None:
    if number % 3 == 0:
        raise ConnectionResetError("reset by peer")
    return DATA[start : end - 1] if number % 3 == 1 else None


@given(st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, 9 * MIB)), min_size=1, max_size=5))
def test_any_reads_give_the_bytes_of_the_file_though_two_of_three_requests_fail(reads):
    with memory_store() as store:
        store.fault = _blip
        files = RemoteFiles("memory://ckpt", Retry(attempts=100, pause=0))
        for offset, wanted in reads:
            length = min(wanted, len(DATA) - offset)
            assert files.read("data", offset, length) == DATA[offset : offset + length]
        files.close()


def test_threads_share_one_folder(store):
    files = RemoteFiles("memory://ckpt", Retry(attempts=100, pause=0))
    store.fault = _blip

    def scan(seed: int) -> bool:
        draw = random.Random(seed)
        places = [(draw.randrange(len(DATA) - 9 * MIB), draw.randrange(9 * MIB)) for _ in range(10)]
        return all(files.read("data", at, n) == DATA[at : at + n] for at, n in places)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(scan, range(16)))


def test_pauses_double_and_are_bounded(store, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(random, "uniform", lambda low, high: 1.0)

    def reset(number: int, start: int, end: int) -> bytes | None:
        raise ConnectionResetError("reset by peer")

    store.fault = reset
    with pytest.raises(StorageError) as caught:
        RemoteFiles("memory://ckpt", Retry(attempts=7, pause=1, max_pause=9)).read("data", 100, 10)
    assert pauses == [1, 2, 4, 8, 9, 9]
    assert str(caught.value).startswith(
        "memory://ckpt/data: reading bytes 0..65536: still failing after 7 attempts in 0 s: "
        "ConnectionResetError: reset by peer. Check the address"
    )


@pytest.mark.parametrize(
    ("give_up", "taken", "requests"),  # pauses are 1, 2, 4, 8, 8 ... seconds
    [(0, 0, 2), (0, 5, 1), (14.9, 0, 5), (15, 0, 6), (15.1, 0, 6), (30, 20, 2), (50, 20, 3), (1e9, 0, 50)],
)
def test_a_request_is_repeated_until_give_up(give_up, taken, requests, store, monkeypatch):
    clock = [1000.0]

    def pass_time(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=pass_time))
    monkeypatch.setattr(random, "uniform", lambda low, high: 1.0)

    def busy(number: int, start: int, end: int) -> bytes | None:
        pass_time(taken)
        raise ConnectionResetError("reset by peer")

    store.fault = busy
    retry = Retry(attempts=50, pause=1, max_pause=8, give_up=give_up)
    with pytest.raises(StorageError, match=f"still failing after {requests} attempts in"):
        RemoteFiles("memory://ckpt", retry).read("data", 100, 10)
    assert len(store.requests) == requests


@pytest.mark.parametrize("much", [len(DATA), (64 << 10) + 1, (64 << 10) - 1, 1, 0])
def test_an_answer_of_another_length_is_not_taken(much, store):
    """Such as all of an object from a server that knows no ranges."""
    for start in (0, 8 << 20):
        store.requests.clear()
        store.fault = lambda number, start, end: DATA[:much] if number == 1 else None
        assert RemoteFiles("memory://ckpt", QUICK).read("data", start, 10) == DATA[start : start + 10]
        assert len(store.requests) == 2
    store.fault = lambda number, start, end: DATA[:much]
    with pytest.raises(StorageError, match=f"{much} bytes came instead of 65536"):
        RemoteFiles("memory://ckpt", QUICK).read("data", 100, 10)


def test_what_cannot_succeed_is_not_repeated(store):
    def forbidden(number: int, start: int, end: int) -> bytes | None:
        raise PermissionError("Access Denied")

    store.fault = forbidden
    with pytest.raises(StorageError, match=r": Access Denied\. Check the address, the cred"):
        RemoteFiles("memory://ckpt", QUICK).read("data", 0, 10)
    assert len(store.requests) == 1


def test_all_parts_end_before_a_failure_is_raised(store):
    def half_broken(number: int, start: int, end: int) -> bytes | None:
        if start >= 8 * MIB:
            raise PermissionError("Access Denied")
        return None

    store.fault = half_broken
    buffer = bytearray(16 * MIB)
    with pytest.raises(StorageError, match=r"bytes 8388608\.\."):
        RemoteFiles("memory://ckpt", QUICK).read_into("data", 0, memoryview(buffer))
    assert buffer[: 8 * MIB] == DATA[: 8 * MIB]


def test_ranges_outside_of_the_file_are_refused_without_a_request(store):
    files = RemoteFiles("memory://ckpt", QUICK)
    with pytest.raises(CorruptCheckpointError, match=f"the file has {len(DATA)} bytes"):
        files.read("data", len(DATA) - 5, 6)
    with pytest.raises(CorruptCheckpointError, match="the file has"):
        files.read("data", 0, 1 << 62)
    with pytest.raises(CorruptCheckpointError, match=r"memory://ckpt/absent does not exist"):
        files.read("absent", 0, 1)
    with pytest.raises(CorruptCheckpointError, match=r"memory://ckpt/folder does not exist"):
        files.size("folder")
    assert store.requests == []


def test_a_file_that_vanishes_is_named(store):
    files = RemoteFiles("memory://ckpt", QUICK)
    files.list()
    del MemoryFileSystem.store["/ckpt/data"]
    with pytest.raises(CorruptCheckpointError, match=r"memory://ckpt/data: .* vanished"):
        files.read("data", 0, 1)


@pytest.mark.parametrize("location", ["memory://nowhere", "memory://ckpt/nowhere/deeper"])
def test_a_missing_folder_is_no_checkpoint(store, location):
    files = open_files(location)
    assert not files.exists(".metadata")
    with pytest.raises(UnsupportedCheckpointError, match=f"{location} does not exist"):
        read_catalog(files)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("nope://x", "Protocol not known: nope"),
        ("gs://bucket/x", "gcsfs for gs://"),
    ],
)
def test_urls_without_a_driver_say_what_to_install(location, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as if it were not installed
    with pytest.raises(UsageError, match=message):
        open_files(location)


def test_a_checkpoint_in_a_store_has_the_catalog_of_the_local_one():
    folder = fixture_dir("core019_llama_tp2_fully_reshardable") / "iter_0000002"
    fs = MemoryFileSystem()
    fs.put(str(folder), "/run/iter_0000002", recursive=True)
    try:
        local = read_catalog(LocalFiles(str(folder)))
        far = read_catalog(open_files("memory://run/iter_0000002"))
    finally:
        fs.store.clear()
    assert far.root == "memory://run/iter_0000002"
    assert (far.tensors, far.objects) == (local.tensors, local.objects)


def test_file_urls_are_local_files():
    files = open_files("file:///tmp")
    assert isinstance(files, LocalFiles)
    assert files.location == "/tmp"


def test_local_paths_do_not_import_fsspec():
    code = "import sys, ckpt_tools.formats.storage.open_files as f; f.open_files('/'); print('fsspec' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_msc_urls_read_through_multi_storage_client(tmp_path, monkeypatch):
    pytest.importorskip("multistorageclient", reason="multi-storage-client is not installed")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "data").write_bytes(DATA)
    provider = {"type": "file", "options": {"base_path": str(tmp_path)}}
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {"shop": {"storage_provider": provider}}}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    monkeypatch.setattr(store_module, "_ASKED_FOR", set())  # an earlier test may have asked
    with pytest.raises(UsageError, match="add --enable-msc"):
        open_files("msc://shop/run")
    store_module.allow_msc()
    files = open_files("msc://shop/run")
    assert files.list() == ["data"]
    assert files.read("data", 5, 9 * MIB) == DATA[5 : 5 + 9 * MIB]


def test_a_conversion_fetches_what_it_needs_in_few_requests(tmp_path, monkeypatch):
    case = make_case(tmp_path / "source", scale=64)
    fs = MemoryFileSystem()
    fs.put(str(tmp_path / "source"), "/counted", recursive=True)
    fetched: list[int] = []
    fetch_into = RemoteFiles.fetch_into

    def counted(files: RemoteFiles, name: str, start: int, buffer: memoryview) -> None:
        fetched.append(len(buffer))
        fetch_into(files, name, start, buffer)

    monkeypatch.setattr(RemoteFiles, "fetch_into", counted)
    try:
        files = open_files("memory://counted")
        report = write_checkpoint(case.plan(1), files, Output(tmp_path / "out"), WriteOptions(threads=1))
    finally:
        fs.store.clear()
    write_checkpoint(case.plan(1), case.files, Output(tmp_path / "local"))
    assert tree(tmp_path / "out") == tree(tmp_path / "local")
    assert sum(fetched) < 1.02 * (report.bytes_read + report.bytes_read_to_prove)
    assert len(fetched) < 20
