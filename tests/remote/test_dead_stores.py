"""Stores that are not there: told of in seconds, with exit code 7."""

import socket
import time

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.errors import StorageError
from ckpt_tools.formats.storage import object_store as store_module
from ckpt_tools.formats.storage.object_store import Store
from tests.ports import free_port
from tests.remote.s3 import s3_environment

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
