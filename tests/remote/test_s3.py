"""Reading from a real S3 server through a proxy that injects faults; stores that are not there."""

import random
import socket
import time
from collections.abc import Iterator

import pytest

from ckpt_tools import CopyOptions, copy_checkpoint
from ckpt_tools.cli.app import run
from ckpt_tools.errors import StorageError, UnsupportedCheckpointError
from ckpt_tools.execute.output import remote_output
from ckpt_tools.execute.run import Output, write_checkpoint
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage import object_store as store_module
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.storage.object_store import Retry, Store
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.storage.remote import RemoteFiles
from tests.conftest import fixture_dir
from tests.execute.conftest import make_case
from tests.ports import free_port
from tests.remote.s3 import (
    BUSY,
    NONE,
    RESET,
    SLOW,
    Objects,
    s3_environment,
    s3_server,
)

pytest.importorskip("botocore", reason="botocore is not installed")
pytest.importorskip("moto.server", reason="moto's server is not installed")

MIB = 1 << 20
DATA = random.Random(3).randbytes(9 * MIB + 77)
NAME = "core019_llama_tp2_fully_reshardable"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """A server whose bucket `runs` holds a checkpoint and a large file."""
    with s3_server() as address:
        objects = Objects("http://{}:{}".format(*address))
        objects.make("runs")
        objects.put_folder(fixture_dir(NAME), "runs/llama")
        objects.put("runs/large/data", DATA)
        yield address


def test_a_checkpoint_in_s3_has_the_catalog_of_the_local_one(proxy):
    local = read_catalog(LocalFiles(str(fixture_dir(NAME) / "iter_0000002")))
    far = read_catalog(open_files("s3://runs/llama/iter_0000002"))
    assert (far.tensors, far.objects) == (local.tensors, local.objects)
    assert len(proxy.requests) == 2, "one listing, one range"


def test_folders_and_sizes(proxy):
    files = open_files("s3://runs/llama/")
    assert files.list() == sorted(entry.name for entry in fixture_dir(NAME).iterdir())
    assert files.exists("iter_0000002/.metadata")
    assert files.size("losses.txt") == (fixture_dir(NAME) / "losses.txt").stat().st_size
    assert not open_files("s3://runs/nothing").exists(".metadata")
    with pytest.raises(UnsupportedCheckpointError, match="s3://runs/nothing does not exist"):
        open_files("s3://runs/nothing").list()
    with pytest.raises(UnsupportedCheckpointError, match="s3://no-bucket/x: there is no such bucket"):
        open_files("s3://no-bucket/x").list()


def test_faults_do_not_change_a_byte(proxy):
    draw = random.Random(1)
    proxy.choose = lambda number, method, path: draw.choice([NONE, NONE, NONE, RESET, BUSY])
    files = RemoteFiles("s3://runs/large", Retry(attempts=20, pause=0.01))
    assert files.read("data", 0, len(DATA)) == DATA
    for offset in range(0, 9 * MIB, 3 * MIB):
        assert files.read("data", offset, 1000) == DATA[offset : offset + 1000]
    assert proxy.done[RESET] > 0
    assert proxy.done[BUSY] > 0


def test_a_trickling_answer_is_abandoned_and_asked_again(proxy):
    proxy.choose = lambda number, method, path: SLOW if number == 2 else NONE
    files = RemoteFiles("s3://runs/large", Retry(patience=1, min_rate=4 * MIB, pause=0.01))
    files.list()
    begin = time.monotonic()
    assert files.read("data", 0, 1000) == DATA[:1000]
    assert time.monotonic() - begin < 10
    assert proxy.done[SLOW] == 1


def test_a_store_that_stays_down_is_reported(proxy):
    files = RemoteFiles("s3://runs/large", Retry(attempts=2, pause=0.01, patience=1))
    files.list()
    proxy.choose = lambda number, method, path: BUSY
    with pytest.raises(
        StorageError, match=r"s3://runs/large/data: reading bytes 0\.\.65536: still failing after 2 att"
    ):
        files.read("data", 0, 10)


def test_a_conversion_from_s3_to_s3_survives_faults_bit_for_bit(proxy, tmp_path, monkeypatch):
    """Reads, multipart uploads and their completion, each answer lost, refused or cut at random."""
    case = make_case(tmp_path / "source", scale=64)  # files of 12 MiB: three parts each
    objects = Objects(proxy.url)
    objects.put_folder(tmp_path / "source", "runs/source")
    write_checkpoint(case.plan(2), case.files, Output(tmp_path / "local"))
    monkeypatch.setattr(remote_output, "_PART_BYTES", 5 << 20)
    draw = random.Random(5)
    proxy.requests.clear()
    proxy.done.clear()
    proxy.choose = lambda number, method, path: draw.choice([NONE, NONE, NONE, NONE, NONE, NONE, RESET, BUSY])
    report = write_checkpoint(case.plan(2), open_files("s3://runs/source"), Output("s3://runs/target"))
    faults = dict(proxy.done)
    proxy.choose = lambda number, method, path: NONE
    assert faults[RESET] > 0
    assert faults[BUSY] > 0
    parts = {path for method, path, _ in proxy.requests if method == "PUT" and "partNumber" in path}
    assert len(parts) >= 4, "multipart uploads"
    assert report.bytes_read > 10 * MIB
    far = {path.rpartition("/")[2]: data for path, data in objects.below("runs/target").items()}
    assert far == {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}


def test_a_copy_to_s3_and_back_survives_faults_bit_for_bit(proxy, tmp_path):
    proxy.choose = lambda number, method, path: BUSY if number % 9 == 5 else NONE
    copy_checkpoint(fixture_dir(NAME), "s3://runs/copied")
    assert proxy.done[BUSY] > 0
    copy_checkpoint("s3://runs/copied", tmp_path / "back", CopyOptions(read_back=True))
    for path in (fixture_dir(NAME) / "iter_0000002").iterdir():
        assert (tmp_path / "back" / "iter_0000002" / path.name).read_bytes() == path.read_bytes()


def test_a_bucket_that_is_not_there_is_named(proxy):
    with pytest.raises(StorageError, match=r"s3://no-bucket/x/\S+: .*bucket.* Make the bucket first"):
        copy_checkpoint(fixture_dir(NAME), "s3://no-bucket/x")


pytest.importorskip("botocore", reason="botocore is not installed")


def test_a_store_that_refuses_connections_is_told_of_at_once(monkeypatch, capsys, tmp_path):
    port = free_port()
    for name, value in s3_environment(f"http://127.0.0.1:{port}").items():
        monkeypatch.setenv(name, value)
    begin = time.monotonic()
    assert run(["inspect", "s3://bucket/run"]) == 7
    assert time.monotonic() - begin < 10
    shown = capsys.readouterr().err
    assert f"nothing answers at 127.0.0.1 port {port}" in shown
    assert "Connection refused" in shown


def test_a_store_that_swallows_connections_is_told_of_in_seconds(monkeypatch, capsys):
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
        for name, value in s3_environment(f"http://127.0.0.1:{port}").items():
            monkeypatch.setenv(name, value)
        begin = time.monotonic()
        assert run(["inspect", "s3://bucket/run"]) == 7
        assert time.monotonic() - begin < 10
        for filler in fillers:
            filler.close()
    assert f"nothing answers at 127.0.0.1 port {port} (timed out)" in capsys.readouterr().err


def test_a_store_that_accepts_and_never_answers(monkeypatch):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(16)
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        for name, value in s3_environment(url).items():
            monkeypatch.setenv(name, value)
        quick = store_module.Retry(attempts=6, pause=0.01, patience=0.5)
        store = Store("s3://box/run", quick)
        begin = time.monotonic()
        with pytest.raises(StorageError, match="still failing after 2 attempts"):
            store.get("x")
        assert time.monotonic() - begin < 5


def test_a_name_that_is_not_known(monkeypatch, capsys):
    for name, value in s3_environment("http://nowhere.invalid").items():
        monkeypatch.setenv(name, value)
    assert run(["inspect", "s3://bucket/run"]) == 7
    assert "nothing answers at nowhere.invalid port 80" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:99999", "http://127.0.0.1:port", "http://[::1", "http://[bad]"]
)
def test_an_address_that_none_can_be(address, monkeypatch, capsys):
    for name, value in s3_environment(address).items():
        monkeypatch.setenv(name, value)
    assert run(["inspect", "s3://bucket/run"]) == 7
    assert capsys.readouterr().err.count("\n") == 1
