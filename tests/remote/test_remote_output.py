"""Writing into an object store: the bytes of a local conversion, whole objects only, `.metadata` last."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_tools.commands.job.outputs import place_parts
from ckpt_tools.errors import CorruptCheckpointError, StorageError, UsageError
from ckpt_tools.execute.output import remote_output
from ckpt_tools.execute.output.remote_output import MARKER, share_of_files
from ckpt_tools.execute.run import Output, WriteReport, write_checkpoint
from ckpt_tools.execute.write_job import METADATA
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from tests.execute.conftest import Case, make_case

WORLD = 3
OUT = Output(
    "memory://out/iter_0000007", beside={"tracker.txt": b"7"}, extra_files={"run_config.yaml": b"a: 1"}
)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("source") / "ckpt")


@pytest.fixture(scope="module")
def local(case: Case, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a local conversion."""
    root = tmp_path_factory.mktemp("local")
    write_checkpoint(case.plan(WORLD), case.files, replace(OUT, directory=root / "iter_0000007"))
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def store() -> Iterator[MemoryFileSystem]:
    fs = MemoryFileSystem()
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Exception], None]]:
    """Makes the n-th object that is opened for writing fail with an error, in the middle of its content."""
    original = MemoryFileSystem._open
    fail: dict[int, Exception] = {}
    lock = threading.Lock()
    count = 0

    def opened(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        nonlocal count
        error = None
        if mode == "wb":
            with lock:
                count += 1
                error = fail.get(count)
        if error is not None and "data" in options:  # all at once
            raise error
        file = original(self, path, mode, **options)
        if error is not None:

            def write(data: bytes) -> None:
                raise error

            file.write = write
        return file

    monkeypatch.setattr(MemoryFileSystem, "_open", opened)
    monkeypatch.setattr(remote_output, "Store", _quick_store)
    yield fail.__setitem__


def _quick_store(location: str) -> Any:
    from ckpt_tools.formats.storage.object_store import Retry, Store

    return Store(location, Retry(attempts=3, pause=0.001))


def _write(case: Case, **changes: Any) -> WriteReport:
    return write_checkpoint(case.plan(WORLD), case.files, replace(OUT, **changes))


def _content(fs: MemoryFileSystem) -> dict[str, bytes]:
    return {path.removeprefix("/out/"): fs.cat_file(path, None, None) for path in fs.find("/out")}


def test_a_store_gets_the_bytes_of_a_local_conversion(case, local, store):
    report = _write(case)
    assert _content(store) == local
    assert report.items_resumed == 0
    far = read_catalog(open_files("memory://out/iter_0000007"))
    assert set(far.tensors) == {t.key for t in case.target.tensors} | {t.key for t in case.target.inline}


def test_metadata_is_written_after_all_data_and_the_tracker_after_it(case, store, monkeypatch):
    order: list[str] = []
    original = MemoryFileSystem._open

    def opened(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb":
            order.append(path.removeprefix("/out/").removeprefix("iter_0000007/"))
        return original(self, path, mode, **options)

    monkeypatch.setattr(MemoryFileSystem, "_open", opened)
    _write(case)
    assert order[0] == MARKER
    data = {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp"}
    assert {*order[1:7]} == data | {f"{MARKER}.{name}" for name in data}
    assert order[7:] == ["run_config.yaml", METADATA, "tracker.txt"]


def test_a_failing_upload_is_begun_anew(case, local, store, breaking):
    breaking(2, ConnectionResetError("reset by peer"))
    breaking(3, TimeoutError("slow"))
    _write(case)
    assert _content(store) == local


def test_a_stopped_conversion_is_no_checkpoint_and_resumes(case, local, store, breaking):
    breaking(6, PermissionError("Access Denied"))  # marker, two files and their notes, then this
    with pytest.raises(
        StorageError, match=r"memory://out/iter_0000007/\S*__\d_0.distcp: writing: Access Denied"
    ):
        _write(case)
    left = {name.rpartition("/")[2] for name in _content(store)}
    assert METADATA not in left
    assert MARKER in left
    with pytest.raises(UsageError, match=r"holds a conversion that was stopped.*--resume"):
        _write(case)
    report = _write(case, resume=True)
    assert _content(store) == local
    assert 0 < report.items_resumed < report.items


def test_a_conversion_stopped_after_metadata_only_cleans_up(case, local, store, breaking):
    breaking(10, PermissionError("Access Denied"))  # the tracker, which comes after .metadata
    with pytest.raises(StorageError, match=r"memory://out/tracker.txt: writing"):
        _write(case)
    assert _write(case, resume=True).bytes_read == 0
    assert _content(store) == local


def test_resume_refuses_another_plan_and_a_changed_source(case, store, breaking, tmp_path):
    breaking(4, PermissionError("Access Denied"))
    with pytest.raises(StorageError):
        _write(case)
    with pytest.raises(UsageError, match="started with another plan"):
        write_checkpoint(case.plan(2), case.files, replace(OUT, resume=True))
    copy = make_case(tmp_path / "copy")
    with pytest.raises(CorruptCheckpointError, match="changed while the conversion ran"):
        write_checkpoint(copy.plan(WORLD), copy.files, replace(OUT, resume=True))


def test_the_old_checkpoint_stays_until_the_new_one_is_whole(case, local, store, breaking):
    store.pipe({"/out/iter_0000007/.metadata": b"old", "/out/iter_0000007/__9_0.distcp": b"old"})
    with pytest.raises(UsageError, match="is not empty"):
        _write(case)
    old = _content(store)
    breaking(5, PermissionError("Access Denied"))  # the two of this test, the marker, a file, then this
    with pytest.raises(StorageError):
        _write(case, overwrite=True)
    assert old.items() < _content(store).items()
    with pytest.raises(UsageError, match="is not empty"):
        _write(case, resume=True)
    assert _write(case, overwrite=True).replaced == "a distributed checkpoint: 2 files, 6 B"
    assert _content(store) == local


@pytest.mark.parametrize("replaces", [False, True])
def test_a_damaged_source_is_reported_once_and_not_retried(case, store, tmp_path, replaces):
    if replaces:
        _write(case)
    old = _content(store)
    damaged = make_case(tmp_path / "damaged")
    plan = damaged.plan(WORLD)
    file = tmp_path / "damaged" / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CorruptCheckpointError, match="does not end like"):
        write_checkpoint(plan, damaged.files, replace(OUT, overwrite=replaces))
    assert "iter_0000007/.metadata" not in _content(store) or replaces
    assert _content(store) == old or not replaces


@pytest.mark.parametrize("stop", [8, 10], ids=["before .metadata", "before the tracker"])
@pytest.mark.parametrize("replaces", [False, True])
def test_resume_publishes_nothing_but_what_it_has_uploaded(case, local, store, breaking, stop, replaces):
    """An object that was replaced by another of its length meanwhile is written again."""
    if replaces:
        store.pipe({"/out/iter_0000007/.metadata": b"old", "/out/iter_0000007/__9_0.distcp": b"old"})
    breaking(stop + 2 * replaces, PermissionError("Access Denied"))
    with pytest.raises(StorageError):
        _write(case, overwrite=replaces)
    stopped, data = dict(store.store), case.plan(WORLD).file_bytes
    mine = [path for path in stopped if path.rpartition("/")[2] in (METADATA, "run_config.yaml", *data)]
    assert len(mine) >= 3
    for path in mine:
        store.store.clear()
        store.store.update(stopped)
        store.pipe_file(path, bytes(stopped[path].size))
        is_data = path.rpartition("/")[2] in data and (not replaces or "ckpt_tools" in path)
        with pytest.warns(UserWarning, match="is written again") if is_data else nullcontext():
            done = _write(case, overwrite=replaces, resume=True)
        assert _content(store) == local, path
        assert done.items_resumed > 0


def test_a_source_in_a_store_that_changes_meanwhile_is_noticed(case, store):
    store.put(case.files.location, "/source", recursive=True)
    files = open_files("memory://source")

    def touch(done: int, total: int) -> None:
        store.pipe_file("/source/__0_0.distcp", store.cat_file("/source/__0_0.distcp", None, None))

    with pytest.raises(CorruptCheckpointError, match=r"memory://source: __0_0\.distcp changed while"):
        write_checkpoint(case.plan(WORLD), files, OUT, progress=touch)
    assert "iter_0000007/.metadata" not in _content(store)


def test_files_are_shared_out_once_and_evenly(case):
    plan = case.plan(WORLD)
    for world in (1, 2, 3, 5):
        shares = [share_of_files(plan, rank, world) for rank in range(world)]
        assert sorted(name for share in shares for name in share) == sorted(plan.file_bytes)
        loads = [sum(plan.file_bytes[name] for name in share) for share in shares]
        assert max(loads) - min(loads) <= max(plan.file_bytes.values())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("s3://bucket/run/", "s3://bucket//run"),
        ("file:///tmp/x", "/tmp/y/../x"),
        ("local:///tmp/x", "/tmp/x"),
        ("s3://bucket/run", "S3A://bucket/run"),
        ("gs://bucket/run", "gcs://bucket/run"),
    ],
)
def test_spellings_of_one_place(a, b):
    assert place_parts(a) == place_parts(b)
    assert place_parts("s3://bucket/run") != place_parts("gs://bucket/run")


@pytest.mark.parametrize("rows", [[], [["__0_0.distcp"]], [["a", 1]] * 9, [[]], [1], {}, None, "absent"])
def test_a_marker_that_does_not_tell_the_source_vouches_for_nothing(case, store, rows):
    header = {"digest": case.plan(WORLD).digest, "token": "t"} | (
        {} if rows == "absent" else {"source": rows}
    )
    store.pipe_file(f"/out/iter_0000007/{MARKER}", json.dumps(header).encode())
    with pytest.raises(
        (CorruptCheckpointError, UsageError), match=r"changed while|not written by this version"
    ):
        write_checkpoint(case.plan(WORLD), case.files, replace(OUT, resume=True))
    assert not store.exists(f"/out/iter_0000007/{METADATA}")
