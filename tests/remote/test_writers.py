"""Two runs with one output in a store, uploads that nobody completes, and stores that are not there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_tools.catalog import store as store_module
from ckpt_tools.catalog.store import Store
from ckpt_tools.cli.app import run
from ckpt_tools.errors import CorruptCheckpointError, Interrupted, StorageError, UsageError
from ckpt_tools.execute import remote_output
from ckpt_tools.execute.remote_output import MARKER, METADATA, RemoteJob
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from tests.conftest import REPO
from tests.execute.conftest import Case, make_case
from tests.remote.s3 import FaultProxy, fault_proxy, s3_server

OUT = Output("memory://out/run", beside={"tracker": b"7"}, extra_files={"extra": b"a"})
FOLDER = "/out/run"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("source") / "ckpt")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    fs = MemoryFileSystem()
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], None]]:
    """What to do just before a step: `put NAME`, `write NAME`, `remove NAME`. Each is done once."""
    chosen: dict[str, Callable[[], None]] = {}

    def before(kind: str, owner: type, method: str) -> None:
        original = getattr(owner, method)

        def called(self: Any, *args: Any) -> Any:
            name = next(one for one in args if isinstance(one, str))
            chosen.pop(f"{kind} {name}", lambda: None)()
            return original(self, *args)

        monkeypatch.setattr(owner, method, called)

    before("put", Store, "put")
    before("write", RemoteJob, "_write_file")
    before("remove", Store, "remove")
    return chosen


def _content(fs: MemoryFileSystem) -> dict[str, bytes]:
    return {path: fs.cat_file(path, None, None) for path in fs.find("/out")}


def _convert(case: Case, world: int = 3, **changes: Any) -> None:
    write_checkpoint(case.plan(world), case.files, replace(OUT, **changes))


@pytest.fixture(scope="module")
def whole(case: Case) -> dict[str, bytes]:
    """What a run of two ranks leaves that nobody disturbs."""
    _convert(case, 2)
    found = _content(MemoryFileSystem())
    MemoryFileSystem.store.clear()
    return found


@pytest.mark.parametrize(
    "moment",
    [
        f"put {MARKER}",
        "write __0_0.distcp",
        "write __2_0.distcp",
        "put extra",
        f"put {METADATA}",
        f"remove {MARKER}",
    ],
)
@pytest.mark.parametrize("how", [{"overwrite": True}, {"overwrite": True, "resume": True}])
def test_the_later_run_has_the_output_whenever_it_comes(
    moment: str,
    how: dict[str, bool],
    case: Case,
    whole: dict[str, bytes],
    memory: MemoryFileSystem,
    steps: dict[str, Callable[[], None]],
) -> None:
    """The later one comes at each step of the first, and runs to its end before the first one goes on."""
    if how.get("resume") and moment != f"put {MARKER}":
        pytest.skip("another plan is not gone on with")
    steps[moment] = lambda: _convert(case, 2, **how)
    if moment == f"put {MARKER}":  # the first comes last after all, and has looked before
        _convert(case, 3)
        assert f"{FOLDER}/{MARKER}" not in _content(memory)
        return
    if moment == f"remove {MARKER}":
        _convert(case, 3)  # it had published; then it was replaced as any checkpoint may be
    else:
        with pytest.raises(UsageError, match=r"memory://out/run was taken by another converter|it has ended"):
            _convert(case, 3)
    found = _content(memory)
    if moment == f"put {METADATA}":
        assert found[f"{FOLDER}/{METADATA}"] != whole[f"{FOLDER}/{METADATA}"]  # what no check can close
        return
    assert found == whole


def test_the_loser_exits_with_2_and_leaves_the_winner_alone(
    case: Case, memory: MemoryFileSystem, steps: dict[str, Callable[[], None]]
) -> None:
    """The winner has only begun: its marker and first file are there when the loser notices."""

    def take() -> None:
        header = json.dumps(
            {"digest": "x", "source": [], "token": "other", "owner": "process 5 on there"}
        ).encode()
        memory.pipe_file(f"{FOLDER}/{MARKER}", header)
        memory.pipe_file(f"{FOLDER}/__7_0.distcp", b"the winner's")

    steps["write __1_0.distcp"] = take
    with pytest.raises(UsageError, match=r"was taken by another converter \(process 5 on there\)") as caught:
        _convert(case)
    assert caught.value.exit_code == 2
    found = _content(memory)
    assert json.loads(found[f"{FOLDER}/{MARKER}"])["token"] == "other"
    assert found[f"{FOLDER}/__7_0.distcp"] == b"the winner's"
    assert f"{FOLDER}/{METADATA}" not in found
    assert "/out/tracker" not in found


def test_a_file_that_another_run_replaced_is_not_published(
    case: Case, memory: MemoryFileSystem, steps: dict[str, Callable[[], None]]
) -> None:
    """An upload of the loser that ends late, in a winner's folder, with as many bytes."""
    name = f"{FOLDER}/__0_0.distcp"
    steps["put extra"] = lambda: memory.pipe_file(name, bytes(memory.size(name)))
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp changed after this run had uploaded it"):
        _convert(case)
    assert f"{FOLDER}/{METADATA}" not in _content(memory)


def test_a_marker_that_is_none_is_named(case: Case, memory: MemoryFileSystem) -> None:
    memory.pipe_file(f"{FOLDER}/{MARKER}", b"\xff{")
    with pytest.raises(UsageError, match="was not written by this version"):
        _convert(case, resume=True)
    memory.pipe_file(f"{FOLDER}/{MARKER}", b'{"other": 1}')
    with pytest.raises(UsageError, match="begun with another plan"):
        _convert(case, resume=True)


def test_metadata_goes_first_and_every_stop_on_the_way_leaves_no_checkpoint(
    case: Case, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing is stopped before its n-th change of the store, for every n; a loader never finds a mix."""
    _convert(case, 3)
    old = _content(memory)
    changes: list[tuple[str, str]] = []
    stop_at = -1

    class StoppedError(Exception):
        pass

    def watch(method: str) -> None:
        original = getattr(MemoryFileSystem, method)

        def called(self: Any, path: str, mode: str = "wb", *args: Any, **named: Any) -> Any:
            if method == "rm_file" or mode == "wb":
                changes.append((method, path.rpartition("/")[2]))
                if len(changes) > stop_at >= 0:
                    raise StoppedError
            return original(self, path, *([mode] if method == "_open" else []), *args, **named)

        monkeypatch.setattr(MemoryFileSystem, method, called)

    watch("rm_file")
    watch("_open")
    quick = store_module.Retry(attempts=1, patience=1)
    monkeypatch.setattr(remote_output, "Store", lambda location: Store(location, quick))
    _convert(case, 2, overwrite=True)
    new, total = _content(memory), len(changes)
    assert changes[0] == ("rm_file", METADATA)
    assert [name for method, name in changes if method == "_open"][-2:] == [METADATA, "tracker"]
    for n in range(total):
        memory.store.clear()
        memory.pipe(old)
        changes.clear()
        stop_at = n
        with pytest.raises((StorageError, StoppedError)):
            _convert(case, 2, overwrite=True)
        stop_at = -1
        found = _content(memory)
        if f"{FOLDER}/{METADATA}" in found:
            mine = {path: data for path, data in found.items() if not path.endswith((MARKER, "tracker"))}
            assert mine in ({p: d for p, d in one.items() if not p.endswith("tracker")} for one in (old, new))
        _convert(case, 2, overwrite=True, resume=True)
        assert _content(memory) == new, n


# ---- a real server ----


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    pytest.importorskip("moto.server", reason="moto's server is not installed")
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    import s3fs

    with fault_proxy(server) as found:
        for name, value in _environment(found.url).items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().makedirs("box", exist_ok=True)
        monkeypatch.setattr(remote_output, "_PART_BYTES", 5 << 20)
        yield found


def _environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(
        tmp_path_factory.mktemp("large") / "source", scale=64
    )  # files of 12 MiB: three parts each


def _uploads() -> list[str]:
    import s3fs

    found = s3fs.S3FileSystem().call_s3("list_multipart_uploads", Bucket="box")
    return [one["Key"] for one in found.get("Uploads") or []]


def _parts(proxy: FaultProxy) -> int:
    return sum(method == "PUT" and "partNumber" in path for method, path, _ in proxy.requests)


def test_a_failing_source_leaves_no_upload(
    proxy: FaultProxy, large: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = remote_output._content

    def content(entries: Any, size: int, pump: Any) -> Iterator[Any]:
        at = 0
        for data in original(entries, size, pump):
            if at > 6 << 20:
                raise CorruptCheckpointError("a flipped bit")
            at += len(data)
            yield data

    monkeypatch.setattr(remote_output, "_content", content)
    with pytest.raises(CorruptCheckpointError, match="a flipped bit"):
        write_checkpoint(large.plan(2), large.files, Output("s3://box/failing"))
    assert _parts(proxy), "uploads had begun"
    assert _uploads() == []
    import gc

    gc.collect()  # a forgotten file object must not complete itself
    assert sorted(Store("s3://box/failing").sizes()) == [MARKER]
    assert _uploads() == []


def test_a_run_that_loses_in_the_middle_of_a_file_does_not_complete_it(
    proxy: FaultProxy, large: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, store = remote_output._content, Store("s3://box/taken")

    def content(entries: Any, size: int, pump: Any) -> Iterator[Any]:
        yield from original(entries, size, pump)
        store.put(MARKER, b'{"token": "other", "owner": "process 5 on there"}')

    monkeypatch.setattr(remote_output, "_content", content)
    with pytest.raises(UsageError, match=r"taken by another converter \(process 5 on there\)"):
        write_checkpoint(large.plan(2), large.files, Output("s3://box/taken"), WriteOptions(threads=1))
    assert _parts(proxy)
    assert sorted(store.sizes()) == [MARKER]


def test_ctrl_c_leaves_no_upload(proxy: FaultProxy, large: Case) -> None:
    def interrupt(done: int, _total: int) -> None:
        if _parts(proxy) and not sent:
            sent.append(done)
            os.kill(os.getpid(), signal.SIGINT)

    sent: list[int] = []
    proxy.choose = lambda number, method, path: (
        "none" if "uploadId" not in path else time.sleep(0.2) or "none"
    )
    with pytest.raises(Interrupted):
        write_checkpoint(large.plan(1), large.files, Output("s3://box/ctrlc"), progress=interrupt)
    assert sent
    assert _uploads() == []
    assert sorted(Store("s3://box/ctrlc").sizes()) == [MARKER]


KILLED = """
import sys
from pathlib import Path
from ckpt_tools.execute import remote_output
from ckpt_tools.execute.run import Output, write_checkpoint
from tests.execute.conftest import reopened_case
remote_output._PART_BYTES = 5 << 20
case = reopened_case(Path(sys.argv[1]))
write_checkpoint(case.plan(2), case.files, Output(sys.argv[2]))
"""


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_uploads_of_a_killed_process_end_when_the_next_one_comes(
    proxy: FaultProxy, large: Case, how: str
) -> None:
    url = f"s3://box/killed-{how}"
    reached = threading.Event()

    def choose(_number: int, method: str, path: str) -> str:
        if method == "PUT" and "partNumber=2" in path:
            reached.set()
            time.sleep(1)
        return "none"

    proxy.choose = choose
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, large.files.location, url],
        cwd=REPO,
        env={**os.environ, **_environment(proxy.url)},
    )
    assert reached.wait(60)
    process.kill()
    process.wait()
    proxy.choose = lambda number, method, path: "none"
    time.sleep(1.2)  # what was under way arrives
    assert _uploads()
    others = Store("s3://box")
    foreign = others.fs.call_s3("create_multipart_upload", Bucket="box", Key=f"killed-{how}2/x")
    write_checkpoint(large.plan(2), large.files, Output(url, **{how: True}))
    assert _uploads() == [f"killed-{how}2/x"], "and nobody else's"
    others.fs.call_s3(
        "abort_multipart_upload", Bucket="box", Key=f"killed-{how}2/x", UploadId=foreign["UploadId"]
    )
    assert sorted(Store(url).sizes()) == [METADATA, "__0_0.distcp", "__1_0.distcp"]


RANK = """
import os, signal, sys
from pathlib import Path
from ckpt_tools.errors import CkptError
from ckpt_tools.execute import heartbeat, ranks as waiting, remote_output
from ckpt_tools.execute.ranks import connect
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from tests.execute.conftest import reopened_case
heartbeat.BEAT_SECONDS, heartbeat.SILENT_SECONDS, waiting._LAST_WORDS_SECONDS = 0.2, 4.0, 1.0
remote_output._PART_BYTES = 5 << 20
ranks, case = connect(), reopened_case(Path(sys.argv[1]))
original = remote_output._content

def content(entries, size, pump):
    done = 0
    for data in original(entries, size, pump):
        if ranks.rank == 1 and done > 6 << 20:
            os.kill(os.getpid(), signal.SIGKILL)
        done += len(data)
        yield data

remote_output._content = content
try:
    write_checkpoint(case.plan(2), case.files, Output(sys.argv[2]), WriteOptions(threads=1), ranks=ranks)
except CkptError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_uploads_of_a_killed_rank_end_with_the_run(proxy: FaultProxy, large: Case) -> None:
    url, port = "s3://box/ranks", str(_closed_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, large.files.location, url],
            cwd=REPO,
            env={
                **os.environ,
                **_environment(proxy.url),
                **{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [7, -signal.SIGKILL]
    assert "no sign of life from rank 1" in said[0]
    assert sum("partNumber" in path and "ranks/__1_0" in path for _, path, _ in proxy.requests), (
        "it had begun"
    )
    assert _uploads() == []
    assert METADATA not in Store(url).sizes()
    write_checkpoint(large.plan(2), large.files, Output(url, resume=True))
    assert sorted(Store(url).sizes()) == [METADATA, "__0_0.distcp", "__1_0.distcp"]


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_store_that_refuses_connections_is_told_of_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import s3fs

    port = _closed_port()
    for name, value in _environment(f"http://127.0.0.1:{port}").items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    begin = time.monotonic()
    assert run(["inspect", "s3://bucket/run"]) == 7
    assert run(["inspect", f"http://127.0.0.1:{port}/run"]) == 7
    assert time.monotonic() - begin < 10
    shown = capsys.readouterr().err
    assert shown.count(f"nothing answers at 127.0.0.1 port {port}") == 2
    assert "Connection refused" in shown


def test_a_store_that_swallows_connections_is_told_of_in_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full backlog: the kernel answers no further SYN, as where a firewall drops them."""
    monkeypatch.setattr(store_module, "CONNECT_SECONDS", 0.5)
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        port = hole.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        begin = time.monotonic()
        assert run(["inspect", f"http://127.0.0.1:{port}/run"]) == 7
        assert time.monotonic() - begin < 10
        for filler in fillers:
            filler.close()
    assert f"nothing answers at 127.0.0.1 port {port} (timed out)" in capsys.readouterr().err


def test_a_store_that_accepts_and_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(16)
        quick = store_module.Retry(attempts=6, pause=0.01, patience=0.5)
        store = Store(f"http://127.0.0.1:{mute.getsockname()[1]}/run", quick)
        begin = time.monotonic()
        with pytest.raises(StorageError, match="still failing after 2 attempts"):
            store.get("x")
        assert time.monotonic() - begin < 5


def test_a_name_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "http://nowhere.invalid/run"]) == 7
    assert "nothing answers at nowhere.invalid port 80" in capsys.readouterr().err


def test_options_of_threads_change_nothing(
    case: Case, memory: MemoryFileSystem, whole: dict[str, bytes]
) -> None:
    write_checkpoint(case.plan(2), case.files, OUT, WriteOptions(threads=1))
    assert _content(memory) == whole
