"""Multipart uploads on a real server: in order, few at a time, and none is left of who stops or is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from ckpt_tools.errors import CorruptCheckpointError, Interrupted, StorageError, UsageError
from ckpt_tools.execute.output import remote_output
from ckpt_tools.execute.output.remote_output import MARKER, Stretch
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.execute.write_job import METADATA
from ckpt_tools.formats.storage import s3
from ckpt_tools.formats.storage.drivers import IN_FLIGHT, Multipart
from ckpt_tools.formats.storage.object_store import Store
from tests.conftest import REPO
from tests.execute.conftest import Case, make_case
from tests.ports import free_port
from tests.remote.s3 import FaultProxy, Objects, s3_environment, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    pytest.importorskip("botocore", reason="botocore is not installed")
    pytest.importorskip("moto.server", reason="moto's server is not installed")
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> FaultProxy:
    Objects(proxy.url).make("box")  # which may be there
    monkeypatch.setattr(remote_output, "_PART_BYTES", 5 << 20)
    return proxy


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(
        tmp_path_factory.mktemp("large") / "source", scale=64
    )  # files of 12 MiB: three parts each


def _uploads(proxy: FaultProxy) -> list[str]:
    return Objects(proxy.url).uploads("box")


def _parts(proxy: FaultProxy) -> int:
    return sum(method == "PUT" and "partNumber" in path for method, path, _ in proxy.requests)


def test_a_failing_source_leaves_no_upload(proxy, large, monkeypatch):
    original = remote_output._content

    def content(entries: Any, stretch: Stretch, pump: Any) -> Iterator[Any]:
        at = 0
        for data in original(entries, stretch, pump):
            if at > 6 << 20:
                raise CorruptCheckpointError("a flipped bit")
            at += len(data)
            yield data

    monkeypatch.setattr(remote_output, "_content", content)
    with pytest.raises(CorruptCheckpointError, match="a flipped bit"):
        write_checkpoint(large.plan(2), large.files, Output("s3://box/failing"))
    assert any(path.endswith("?uploads") for _, path, _ in proxy.requests), "uploads had begun"
    assert _uploads(proxy) == []
    import gc

    gc.collect()  # a forgotten file object must not complete itself
    assert sorted(Store("s3://box/failing").sizes()) == [MARKER]
    assert _uploads(proxy) == []


def test_a_run_that_loses_in_the_middle_of_a_file_does_not_complete_it(proxy, large, monkeypatch):
    original, store = remote_output._content, Store("s3://box/taken")

    def content(entries: Any, stretch: Stretch, pump: Any) -> Iterator[Any]:
        yield from original(entries, stretch, pump)
        store.put(MARKER, b'{"token": "other", "owner": "process 5 on there"}')

    monkeypatch.setattr(remote_output, "_content", content)
    with pytest.raises(UsageError, match=r"taken by another converter \(process 5 on there\)"):
        write_checkpoint(large.plan(2), large.files, Output("s3://box/taken"), WriteOptions(threads=1))
    assert _parts(proxy)
    assert sorted(store.sizes()) == [MARKER]


def test_ctrl_c_leaves_no_upload(proxy, large):
    def interrupt(done: int, _total: int) -> None:
        if _parts(proxy) and not sent:
            sent.append(done)
            os.kill(os.getpid(), signal.SIGINT)

    sent: list[int] = []

    def slow_parts(_number: int, _method: str, path: str) -> str:
        if "uploadId" in path:
            time.sleep(0.2)
        return "none"

    proxy.choose = slow_parts
    with pytest.raises(Interrupted):
        write_checkpoint(large.plan(1), large.files, Output("s3://box/ctrlc"), progress=interrupt)
    assert sent
    assert _uploads(proxy) == []
    left = Store("s3://box/ctrlc").sizes()  # files that were whole by then stay, for --resume
    assert MARKER in left and METADATA not in left


KILLED = """
import sys
from pathlib import Path
from ckpt_tools.execute.output import remote_output
from ckpt_tools.execute.run import Output, write_checkpoint
from tests.execute.conftest import reopened_case
remote_output._PART_BYTES = 5 << 20
case = reopened_case(Path(sys.argv[1]))
write_checkpoint(case.plan(2), case.files, Output(sys.argv[2]))
"""


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_uploads_of_a_killed_process_end_when_the_next_one_comes(proxy, large, how):
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
        env={**os.environ, **s3_environment(proxy.url)},
    )
    assert reached.wait(60)
    process.kill()
    process.wait()
    proxy.choose = lambda number, method, path: "none"
    time.sleep(1.2)  # what was under way arrives
    assert _uploads(proxy)
    others = Objects(proxy.url).client
    foreign = others.create_multipart_upload(Bucket="box", Key=f"killed-{how}2/x")
    write_checkpoint(
        large.plan(2), large.files, Output(url, overwrite=how == "overwrite", resume=how == "resume")
    )
    assert _uploads(proxy) == [f"killed-{how}2/x"], "and nobody else's"
    others.abort_multipart_upload(Bucket="box", Key=f"killed-{how}2/x", UploadId=foreign["UploadId"])
    assert sorted(Store(url).sizes()) == [METADATA, "__0_0.distcp", "__1_0.distcp"]


RANK = """
import os, signal, sys
from pathlib import Path
from ckpt_tools.errors import CkptError
from ckpt_tools.execute.processes import lines
from ckpt_tools.execute.output import remote_output
from ckpt_tools.execute.processes.meeting import connect
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.execute.write_job import METADATA
from tests.execute.conftest import reopened_case
lines.BEAT_SECONDS, lines.SILENT_SECONDS = 0.2, 4.0
remote_output._PART_BYTES = 5 << 20
ranks, case = connect(), reopened_case(Path(sys.argv[1]))
original = remote_output._content

def content(entries, stretch, pump):
    done = 0
    for data in original(entries, stretch, pump):
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


def test_uploads_of_a_killed_rank_end_with_the_run(proxy, large):
    url, port = "s3://box/ranks", str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, large.files.location, url],
            cwd=REPO,
            env={
                **os.environ,
                **s3_environment(proxy.url),
                **{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [7, -signal.SIGKILL]
    assert "rank 1: no sign of life" in said[0]
    assert any(path.endswith("?uploads") and "ranks/__1_0" in path for _, path, _ in proxy.requests), (
        "it had begun"
    )
    assert _uploads(proxy) == []
    assert METADATA not in Store(url).sizes()
    write_checkpoint(large.plan(2), large.files, Output(url, resume=True))
    assert sorted(Store(url).sizes()) == [METADATA, "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("most", [1 << 30, 5 << 20])
def test_the_store_copies_what_replaces_a_checkpoint(proxy, large, monkeypatch, most):
    """In one request a file, or in parts where it is too long for one."""
    monkeypatch.setattr(s3, "_COPY_BYTES", most)
    objects = Objects(proxy.url)
    write_checkpoint(large.plan(1), large.files, Output(f"s3://box/{most}/new"))
    write_checkpoint(large.plan(2), large.files, Output(f"s3://box/{most}/out"))
    done = write_checkpoint(large.plan(1), large.files, Output(f"s3://box/{most}/out", overwrite=True))
    assert str(done.replaced).startswith("a distributed checkpoint: 3 files, ")
    found = objects.below(f"box/{most}")
    assert {path.rpartition("/")[2]: data for path, data in found.items() if "/out/" in path} == {
        path.rpartition("/")[2]: data for path, data in found.items() if "/new/" in path
    }
    assert {path.split("/")[2] for path in found} == {"new", "out"}
    assert _uploads(proxy) == []


def test_a_bucket_is_never_replaced(proxy, large):
    Store("s3://box").put(".metadata", b"precious")
    before = Objects(proxy.url).below("box")
    with pytest.raises(UsageError, match="s3://box is not replaced: it is a whole bucket"):
        write_checkpoint(large.plan(1), large.files, Output("s3://box", overwrite=True))
    assert Objects(proxy.url).below("box") == before


@pytest.mark.parametrize("stop", [2, 4])
def test_equal_lengths_are_not_enough_to_go_on(proxy, large, monkeypatch, stop):
    """Files are uploaded in stretches; one that was replaced by another of its length is uploaded again."""
    out = Output(f"s3://box/length{stop}/out", {"tracker": b"7"}, {"extra": b"a"})
    writes = count()
    original = Store.put

    def put(self: Store, name: str, data: bytes) -> None:
        if next(writes) == stop + 1:
            raise StorageError("stopped")
        original(self, name, data)

    monkeypatch.setattr(Store, "put", put)
    with pytest.raises(StorageError, match="stopped"):
        write_checkpoint(large.plan(2), large.files, out)
    store = Store(str(out.directory))
    for name in store.sizes():
        if name in ("extra", ".metadata", *large.plan(2).file_bytes):
            store.put(name, bytes(store.sizes()[name] or 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_checkpoint(large.plan(2), large.files, replace(out, resume=True))
    write_checkpoint(large.plan(2), large.files, Output("s3://box/length/out", extra_files=out.extra_files))
    names = [*large.plan(2).file_bytes, "extra", ".metadata"]
    assert sorted(store.sizes()) == sorted(names)
    whole = Store("s3://box/length/out")
    assert all(store.get(name) == whole.get(name) for name in names)
    whole.clear(keep=())


class Answers:
    """A store that answers about parts when it is asked to, and what it was asked."""

    def __init__(self, *, at_once: bool = False, fails: int | None = None) -> None:
        self.at_once, self.fails = at_once, fails
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.parts: dict[int, bytes] = {}
        self.may_answer = threading.Semaphore(0)
        self.came = threading.Semaphore(0)

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        self.asked.append((method, given))
        if method != "upload_part":
            return {"UploadId": "u"}
        number, body = given["PartNumber"], given["Body"]
        assert type(body) is bytes  # which can be sent twice
        self.came.release()
        if not self.at_once:
            assert self.may_answer.acquire(timeout=60)
        if number == self.fails:
            raise OSError("the disk of the store is full")
        self.parts[number] = body
        return {"ETag": f"tag {number}"}

    def named(self, method: str) -> list[dict[str, Any]]:
        return [given for name, given in self.asked if name == method]


def test_parts_are_of_one_size_and_in_order():
    store, content = Answers(at_once=True), bytes(range(250))
    file = Multipart(store.ask, 16)
    for start, stop in ((0, 5), (5, 5), (5, 90), (90, 250)):
        file.write(memoryview(content)[start:stop])
    file.close()
    assert [len(store.parts[number]) for number in sorted(store.parts)] == [16] * 15 + [10]
    assert b"".join(store.parts[number] for number in sorted(store.parts)) == content
    (done,) = store.named("complete_multipart_upload")
    assert done["MultipartUpload"]["Parts"] == [
        {"PartNumber": number, "ETag": f"tag {number}"} for number in range(1, 17)
    ]


def test_several_parts_are_on_their_way_but_not_more():
    store = Answers()
    file = Multipart(store.ask, 4)
    file.write(bytes(4 * IN_FLIGHT))  # waits for nobody
    assert all(store.came.acquire(timeout=60) for _ in range(IN_FLIGHT))
    writer = threading.Thread(target=file.write, args=(bytes(4),))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    assert len(store.named("upload_part")) == IN_FLIGHT
    store.may_answer.release(IN_FLIGHT + 1)
    writer.join(60)
    file.close()
    assert len(store.parts) == IN_FLIGHT + 1


@pytest.mark.parametrize("length", [0, 3])
def test_a_small_file_is_one_request(length):
    store, before = Answers(), threading.active_count()
    file = Multipart(store.ask, 4)
    file.write(b"abc"[:length])
    file.close()
    ((method, given),) = store.asked
    assert (method, bytes(given["Body"])) == ("put_object", b"abc"[:length])
    assert threading.active_count() == before


def test_a_part_that_fails_is_told_and_nothing_is_completed():
    store = Answers(at_once=True, fails=2)
    file = Multipart(store.ask, 4)
    file.write(bytes(14))
    with pytest.raises(OSError, match="the disk of the store is full"):
        file.close()
    file.discard()
    assert store.named("abort_multipart_upload") == [{"UploadId": "u"}]
    assert not store.named("complete_multipart_upload")


@pytest.mark.parametrize("is_given_up", [False, True])
def test_no_thread_outlives_its_file(is_given_up):
    """A process can fork then, and what is given up is not on its way any more."""
    store, before = Answers(), threading.active_count()
    file = Multipart(store.ask, 4)
    file.write(bytes(12))
    assert threading.active_count() > before
    store.may_answer.release(3)
    file.discard() if is_given_up else file.close()
    assert threading.active_count() == before
    assert len(store.named("abort_multipart_upload")) == is_given_up
