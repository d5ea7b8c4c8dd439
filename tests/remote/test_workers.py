"""Several processes that read from a real S3 server and write to it: the same bytes, one verdict, nothing left."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_tools.errors import UsageError
from ckpt_tools.execute.output import remote_output
from ckpt_tools.execute.output.remote_output import MARKER, Stretch, share_of, stretches
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.processes.team import with_workers
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.execute.write_job import METADATA
from tests.conftest import REPO
from tests.execute.conftest import Case, make_case
from tests.execute.test_run import tree
from tests.remote.s3 import BUSY, DENIED, NONE, FaultProxy, Objects, s3_server

SCRIPT = """
import os, sys
from pathlib import Path
from ckpt_tools.errors import CkptError
from ckpt_tools.execute.move import stream
from ckpt_tools.execute.output import remote_output
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.execute.processes.team import with_workers
from tests.execute.conftest import reopened_case

source, out, workers, fault, how, files = sys.argv[1:]
remote_output._PART_BYTES = remote_output._STRETCH_BYTES = 5 << 20
case = reopened_case(source)
plan = case.plan(int(files))
options = WriteOptions(workers=int(workers), threads=1)
place = Output(out if "://" in out else Path(out), resume=how == "resume", overwrite=how == "overwrite")
original = remote_output._content

def content(entries, stretch, pump):
    done = 0
    for data in original(entries, stretch, pump):
        yield data
        done += len(data)
        if done > 6 << 20:
            os.kill(os.getpid(), 9)

try:
    with with_workers(plan.bytes_to_write, options, Ranks(), place.directory) as (ranks, write):
        if fault == "refused" and ranks.rank == 1:
            os.environ["AWS_ACCESS_KEY_ID"] = "refused"
            case = reopened_case(source)
        if fault == "killed" and ranks.rank == 1:
            remote_output._content = content
        report = write_checkpoint(plan, case.files, place, write, ranks=ranks)
        assert report.ranks == int(workers)
except CkptError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    pytest.importorskip("botocore", reason="botocore is not installed")
    pytest.importorskip("moto.server", reason="moto's server is not installed")
    with s3_server() as address:
        Objects("http://{}:{}".format(*address)).client.create_bucket(Bucket="box")
        yield address


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A file of 24 MiB is made of it."""
    return make_case(tmp_path_factory.mktemp("large") / "source", scale=64)


@pytest.fixture(scope="module")
def expected(large: Case, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("expected") / "out"
    write_checkpoint(large.plan(1), large.files, Output(out))
    return tree(out)


def run(
    source: str, out: str, workers: int, fault: str = "", how: str = "", files: int = 1
) -> tuple[int, str]:
    """Exit status and what was said by a process of its own: one with threads, as pytest's may be, is not forked."""
    process = subprocess.run(  # noqa: PLW1510  its status is looked at
        [sys.executable, "-c", SCRIPT, source, out, str(workers), fault, how, str(files)],
        cwd=REPO,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return process.returncode, process.stdout + process.stderr


def put(proxy: FaultProxy, folder: Path, name: str) -> str:
    store = Objects(proxy.url)
    for path in folder.iterdir():
        store.client.put_object(Bucket="box", Key=f"{name}/{path.name}", Body=path.read_bytes())
    return f"s3://box/{name}"


def fetched(proxy: FaultProxy, name: str, folder: Path) -> dict[str, str]:
    """The files of a folder in the store as `tree` tells of a local one."""
    store, out = Objects(proxy.url), folder / "fetched"
    out.mkdir()
    for one in store.client.list_objects_v2(Bucket="box", Prefix=f"{name}/")["Contents"]:
        body = store.client.get_object(Bucket="box", Key=one["Key"])["Body"].read()
        (out / one["Key"].rpartition("/")[2]).write_bytes(body)
    return tree(out)


def begun(proxy: FaultProxy) -> list[str]:
    found = Objects(proxy.url).client.list_multipart_uploads(Bucket="box").get("Uploads") or []
    return [one["Key"] for one in found]


def test_three_workers_write_the_same(proxy, large, expected, tmp_path):
    """Out of the store and into it, with every ninth request refused: one file by several processes."""
    source = put(proxy, Path(large.files.location), "source")
    proxy.choose = lambda number, method, path: BUSY if number % 9 == 5 else NONE
    assert run(source, "s3://box/out", 3) == (0, "")
    proxy.choose = lambda number, method, path: NONE
    assert fetched(proxy, "out", tmp_path) == expected
    assert begun(proxy) == []
    parts = {path for method, path, _ in proxy.requests if method == "PUT" and "partNumber" in path}
    assert len(parts) == 4  # one process would write five, the file front to back
    assert run(source, str(tmp_path / "local"), 3) == (0, "")
    assert tree(tmp_path / "local") == expected


@pytest.mark.parametrize("files", [1, 3])
def test_a_worker_killed_in_an_upload_is_named_and_resume_goes_on(proxy, large, tmp_path, files):
    """One file that all write in stretches; and three, of which those that are whole are not written again."""
    write_checkpoint(large.plan(files), large.files, Output(tmp_path / "expected"))
    name = f"killed{files}"
    code, said = run(large.files.location, f"s3://box/{name}", 3, "killed", files=files)
    assert code == 7 and "worker 1 (process " in said and "--resume" in said
    there = fetched(proxy, name, tmp_path).keys()
    assert METADATA not in there
    assert begun(proxy) == []
    proxy.requests.clear()
    code, said = run(large.files.location, f"s3://box/{name}", 2, how="resume", files=files)
    assert (code, said) == (0, "")
    (tmp_path / "again").mkdir()
    assert fetched(proxy, name, tmp_path / "again") == tree(tmp_path / "expected")
    written = {path.partition("?")[0] for method, path, _ in proxy.requests if method in ("PUT", "POST")}
    assert not {path for path in written if path.endswith(tuple(there - {MARKER}))}


def test_a_store_that_refuses_one_worker_ends_all(proxy, large, tmp_path):
    """Its credentials have ended, for one: the error is that of the command, and nothing is published."""
    mine = "Credential=refused/"

    def choose(number: int, _method: str, _path: str) -> str:
        return DENIED if mine in proxy.headers[number - 1].get("authorization", "") else NONE

    proxy.choose = choose
    begin = time.monotonic()
    code, said = run(large.files.location, "s3://box/refused", 3, "refused")
    assert code == 7 and "s3://box/refused" in said and "Check the address, the credentials" in said
    assert time.monotonic() - begin < 60
    assert METADATA not in fetched(proxy, "refused", tmp_path)
    assert begun(proxy) == []


def test_drivers_that_work_in_one_process_say_so():
    for place, message in (("memory://x/y", "driver of memory:// works in one process"),):
        with (
            pytest.raises(UsageError, match=message),
            with_workers(1, WriteOptions(workers=2), Ranks(), place),
        ):
            pass
    with with_workers(1 << 40, WriteOptions(), Ranks(), "memory://x/y") as (ranks, options):
        assert (ranks.world, options.workers) == (1, 1)


@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize("files", [1, 2, 9])
def test_stretches_hold_every_byte_once(large, monkeypatch, files, world):
    monkeypatch.setattr(remote_output, "_PART_BYTES", 1 << 20)
    monkeypatch.setattr(remote_output, "_STRETCH_BYTES", 1 << 20)
    plan = large.plan(files)
    everything = stretches(plan, world)
    begins = {(item.file, item.offset) for item in plan.items}
    begins |= {(blob.file, blob.offset) for blob in plan.blobs}
    for name, size in plan.file_bytes.items():
        mine = sorted(one for one in everything if one.file == name)
        assert [one.start for one in mine] == [0, *(one.stop for one in mine[:-1])]
        assert mine[-1].stop == size
        assert all((name, one.start) in begins for one in mine[1:])
        if len(mine) == 1:
            assert mine == [Stretch(name, 0, size)]
        else:
            assert [one.first_part for one in mine] == [
                1 + sum(o.parts for o in mine[:i]) for i in range(len(mine))
            ]
            assert all(one.nbytes >= one.parts << 20 > 0 for one in mine)
    shares = [share_of(everything, rank, world) for rank in range(world)]
    assert sorted(one for share in shares for one in share) == sorted(everything)
    if files == 1 and world > 1:
        assert len(everything) > 3
