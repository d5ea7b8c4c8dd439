"""Checkpoints on a web server: with and without an index page, with a login, and where it cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.copy import copy_checkpoint
from ckpt_tools.errors import CorruptCheckpointError, StorageError, UnsupportedCheckpointError
from ckpt_tools.formats.dcp import read_catalog
from ckpt_tools.formats.files import LocalFiles, open_files
from ckpt_tools.formats.web import WebFiles
from tests.conftest import fixture_dir
from tests.remote.web import WebServer, web_server

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

RUN = fixture_dir("core019_llama_tp2_fully_reshardable")


@pytest.fixture
def server() -> Iterator[WebServer]:
    with web_server(RUN.parent) as found:
        yield found


def _url(server: WebServer, path: str = RUN.name, login: str = "", query: str = "") -> str:
    return f"http://{login}{server.host}/{path}{query}"


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("path", [RUN.name, f"{RUN.name}/iter_0000002"])
def test_a_checkpoint_converts_to_the_bytes_of_the_local_one(
    server: WebServer, tmp_path: Path, index: bool, path: str
) -> None:
    server.index = index
    assert run(["convert", _url(server, path), str(tmp_path / "far"), "--quiet"]) == 0
    assert run(["convert", str(RUN.parent / path), str(tmp_path / "near"), "--quiet"]) == 0
    far, near = (
        {str(p.relative_to(tmp_path / n)): p.read_bytes() for p in (tmp_path / n).rglob("*") if p.is_file()}
        for n in ("far", "near")
    )
    assert far == near
    assert len(far) > 1


def test_an_iteration_whose_run_cannot_be_listed(server: WebServer, tmp_path: Path) -> None:
    (tmp_path / "iter_0000002").symlink_to(RUN / "iter_0000002")  # no tracker beside it
    with web_server(tmp_path) as bare:
        bare.index = False
        assert run(["verify", _url(bare, "iter_0000002"), "--content"]) == 0
        far = read_catalog(open_files(_url(bare, "iter_0000002")))
    assert far.tensors == read_catalog(LocalFiles(str(RUN / "iter_0000002"))).tensors


def test_only_ranges_are_read(server: WebServer) -> None:
    files = open_files(_url(server, f"{RUN.name}/iter_0000002"))
    name = next(name for name in files.list() if name.endswith(".distcp"))
    local = (RUN / "iter_0000002" / name).read_bytes()
    assert files.size(name) == len(local)
    assert files.read(name, 100, 50) == local[100:150]
    assert all(asked for path, asked in server.requests if path.endswith((".distcp", ".metadata")))


@pytest.mark.parametrize("folder", ["", "/iter_0000002"])
def test_a_folder_holds_what_its_index_names_and_nothing_else(server: WebServer, folder: str) -> None:
    """Not the folder above it, nor what lies deeper, nor the page's own links to itself."""
    server.links = ["./", f"/{RUN.name}{folder}/", "deeper/file.bin", "%2e%2e", "a%2Fb"]
    found = open_files(_url(server, f"{RUN.name}{folder}")).list()
    assert found == sorted(p.name for p in (RUN.parent / f"{RUN.name}{folder}").iterdir())


def test_names_are_names(tmp_path: Path) -> None:
    folder = tmp_path / "run[1] #2 ä"
    folder.mkdir()
    (folder / "a?b%20c&d.bin").write_bytes(b"0123456789")
    (folder / "empty").write_bytes(b"")
    (tmp_path / "run1").mkdir()
    with web_server(tmp_path) as server:
        for spelled in ("run[1] #2 ä", "run%5B1%5D%20%232%20%C3%A4"):
            files = open_files(_url(server, spelled))
            assert isinstance(files, WebFiles)
            assert files.list() == ["a?b%20c&d.bin", "empty"]
            assert files.read("a?b%20c&d.bin", 2, 3) == b"234"
            assert files.size("empty") == 0
            assert not files.exists("absent")
            with pytest.raises(CorruptCheckpointError, match="absent does not exist"):
                files.size("absent")


def test_a_server_without_ranges_is_refused_by_name(
    server: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.ranges = False
    assert run(["inspect", _url(server)]) == 7
    assert "does not answer byte ranges (status 200 instead of 206)" in capsys.readouterr().err


@pytest.mark.parametrize("absent", [404, 403])
def test_nothing_there(server: WebServer, absent: int) -> None:
    server.absent, server.index = absent, False
    with pytest.raises(UnsupportedCheckpointError, match="does not exist, or its server neither lists it"):
        open_files(_url(server, "nowhere")).list()


def test_a_login_is_used_and_not_shown(server: WebServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.login = "me:hunter22"
    assert run(["inspect", _url(server, login="me:hunter22@"), "--json"]) == 0
    shown = capsys.readouterr()
    assert server.host in shown.out
    assert "hunter22" not in shown.out + shown.err
    with pytest.raises(StorageError, match=r"denies access \(401\)"):
        open_files(_url(server, f"{RUN.name}/iter_0000002").replace("127.0.0.1", "localhost")).size(
            ".metadata"
        )


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "URL", "HERE/out", "--json"],
        ["convert", "URL", "HERE/out"],
        ["plan", "URL", "--dp-shard", "2", "--html", "HERE/out.html", "--json"],
        ["verify", "URL", "--junit", "HERE/out.xml"],
        ["diff", "URL", "URL", "--json"],
        ["preflight", "URL"],
        ["build-param-group-map", "URL", "-o", "HERE/out.json"],
        ["print-tensor", "URL", "no such key"],
        ["convert", "URL", "HERE/out", "--no-such-option"],
        ["inspect", "URL/nowhere"],
    ],
)
def test_no_command_shows_a_login_or_writes_it_down(
    server: WebServer, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    server.login = "me:hunter22"
    url = _url(server, login="me:hunter22@")
    run([word.replace("URL", url).replace("HERE", str(tmp_path)) for word in words])
    shown = capfd.readouterr()
    assert shown.out or shown.err or list(tmp_path.iterdir())
    assert "hunter22" not in shown.out + shown.err
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and b"hunter22" in p.read_bytes()]


def test_a_token_is_given_to_every_file_and_not_shown(
    server: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.query, server.index = "sv=2&sig=Zm9v%2Fbar", False
    url = _url(server, f"{RUN.name}/iter_0000002", query="?sv=2&sig=Zm9v%2Fbar")
    assert run(["verify", url, "--content"]) == 0
    assert run(["inspect", url + "x"]) == 2  # another token for the same place
    shown = capsys.readouterr()
    assert "two different credentials" in shown.err
    assert "Zm9v" not in shown.out + shown.err


def test_nothing_is_written_to_a_web_server(server: WebServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(RUN), _url(server, "out")]) == 2
    assert "is read only" in capsys.readouterr().err


@pytest.mark.parametrize("index", [True, False])
def test_a_copy_from_the_web(index: bool, server: WebServer, tmp_path: Path) -> None:
    """Every file that the server lists; of one that lists nothing those that the metadata names."""
    server.index = index
    copy_checkpoint(_url(server), tmp_path / "out")
    stored = {path.name: path.read_bytes() for path in (RUN / "iter_0000002").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out" / "iter_0000002").iterdir()} == stored
