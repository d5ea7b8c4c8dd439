"""Exact byte ranges, errors that name file, range and size; several folders read as one."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.execute.output.journal import file_stamps
from ckpt_tools.formats.storage import files as module
from ckpt_tools.formats.storage.files import LocalFiles, _places_of, follow_links, read_whole
from ckpt_tools.formats.storage.joined_files import JoinedFiles, by_folder, joined_name, place_of
from ckpt_tools.formats.storage.open_files import open_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    (tmp_path / "b").write_bytes(b"")
    return tmp_path


def test_reads_are_exact(folder):
    files = open_files(str(folder))
    assert isinstance(files, LocalFiles)
    assert files.list() == ["a", "b"]
    assert (files.exists("a"), files.exists("c")) == (True, False)
    assert files.size("a") == 100
    assert files.read("a", 10, 5) == bytes(range(10, 15))
    assert files.read("a", 100, 0) == b""
    buffer = bytearray(100)
    files.read_into("a", 0, memoryview(buffer))
    assert buffer == bytes(range(100))
    files.close()


@pytest.mark.parametrize(("offset", "length"), [(0, 101), (100, 1), (1 << 60, 1), (-1, 1), (0, 1 << 60)])
def test_ranges_past_the_end_are_named(folder, offset, length):
    files = LocalFiles(str(folder))
    with pytest.raises(CorruptCheckpointError) as found:
        files.read("a", offset, length)
    assert f"{folder}/a: bytes {offset}..{offset + length} are needed, but the file has 100 bytes" in str(
        found.value
    )
    files.close()


def test_a_file_that_shrinks_is_reported(folder):
    files = LocalFiles(str(folder))
    files.read("a", 0, 1)
    (folder / "a").write_bytes(b"x" * 50)
    with pytest.raises(CorruptCheckpointError, match="the file has 50 bytes"):
        files.read_into("a", 0, memoryview(bytearray(60)))
    files.close()


def test_missing_and_unreadable_files(folder):
    files = LocalFiles(str(folder))
    with pytest.raises(CorruptCheckpointError, match="does not exist, but the checkpoint needs it"):
        files.read("c", 0, 1)
    (folder / "d").mkdir()
    with pytest.raises(CorruptCheckpointError, match="/d is a folder, where a file is expected"):
        files.read_into("d", 0, memoryview(bytearray(1)))
    files.close()


def test_short_reads_are_completed(folder, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:7]], at))
    files = LocalFiles(str(folder))
    assert files.read("a", 3, 50) == bytes(range(3, 53))
    files.close()


def test_descriptors_are_bounded_and_returned(folder, monkeypatch):
    monkeypatch.setattr(module, "MAX_OPEN_FILES", 3)
    names = [f"f{i}" for i in range(10)]
    for name in names:
        (folder / name).write_bytes(name.encode())
    before = len(os.listdir("/proc/self/fd"))
    files = LocalFiles(str(folder))
    for _ in range(2):
        assert [files.read(name, 0, 2) for name in names] == [name.encode() for name in names]
    assert len(os.listdir("/proc/self/fd")) == before + 3
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def following() -> Iterator[None]:
    follow_links(True)
    yield
    follow_links(False)


def test_links_inside_the_folder_are_read(folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "c").write_bytes(b"deep")
    (folder / "one").symlink_to("a")
    (folder / "two").symlink_to("deep/c")
    (folder / "three").symlink_to(folder / "two")
    files = LocalFiles(str(folder))
    assert files.read("one", 1, 2) == b"\1\2"
    assert [files.read(name, 0, 4) for name in ("two", "three", "deep/c")] == [b"deep"] * 3
    files.close()


def test_the_user_s_own_path_may_be_a_link(folder, tmp_path):
    link = tmp_path / "here"
    link.symlink_to(folder)
    (folder / "one").symlink_to("a")
    files = LocalFiles(str(link))
    assert files.read("one", 0, 2) == files.read("a", 0, 2) == b"\0\1"
    files.close()


def elsewhere(folder: Path) -> None:
    outside = folder.parent / f"{folder.name}-outside"  # a name that begins like the folder's
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (folder / "direct").symlink_to(outside / "secret")
    (folder / "relative").symlink_to(f"../{outside.name}/secret")
    (folder / "twice").symlink_to("direct")
    (folder / "door").symlink_to(outside)


@pytest.mark.parametrize("name", ["direct", "relative", "twice", "door/secret"])
def test_links_to_elsewhere_are_refused(folder, name):
    elsewhere(folder)
    files = LocalFiles(str(folder))
    with pytest.raises(
        CorruptCheckpointError, match=r"a link to .*-outside/secret, outside .*--follow-links"
    ):
        files.read(name, 0, 6)
    files.close()


@pytest.mark.parametrize("name", ["direct", "relative", "twice", "door/secret"])
@pytest.mark.usefixtures("following")
def test_links_to_elsewhere_are_read_when_asked_for(folder, name):
    elsewhere(folder)
    files = LocalFiles(str(folder))
    assert files.read(name, 0, 6) == b"secret"
    files.close()


def test_a_snapshot_of_a_hugging_face_cache_is_read(tmp_path):
    model, other = tmp_path / "hub" / "models--a--b", tmp_path / "hub" / "models--c--d"
    for one in (model, other):
        (one / "blobs").mkdir(parents=True)
        (one / "blobs" / "0123").write_bytes(b"blob")
    snapshot = model / "snapshots" / "abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    (snapshot / "foreign").symlink_to("../../../models--c--d/blobs/0123")
    files = LocalFiles(str(snapshot))
    assert files.read("config.json", 0, 4) == b"blob"
    with pytest.raises(CorruptCheckpointError, match="follow-links"):
        files.read("foreign", 0, 4)
    files.close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "link to a fifo"])
def test_what_is_no_file_is_refused_at_once(folder, kind, monkeypatch):
    monkeypatch.chdir(folder)  # the path of a socket has at most 107 bytes
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind("x")
    elif kind == "device":
        (folder / "x").symlink_to("/dev/zero")
    else:
        os.mkfifo(folder / ("y" if kind.startswith("link") else "x"))
        if kind.startswith("link"):
            (folder / "x").symlink_to("y")
    files = LocalFiles(str(folder))
    for read in (
        lambda: files.read("x", 0, 1),
        lambda: files.size("x"),
        lambda: files.read_into("x", 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(CorruptCheckpointError, match=r"is a (FIFO|socket|device), not a file"):
            read()
    files.close()


def test_a_file_that_should_be_small_fills_no_memory(folder):
    with open(folder / "long", "wb") as file:
        file.truncate(1 << 40)
    files = LocalFiles(str(folder))
    with pytest.raises(CorruptCheckpointError, match="has 1,099,511,627,776 bytes"):
        read_whole(files, "long")
    assert read_whole(files, "a") == bytes(range(100))
    files.close()


@pytest.mark.parametrize("name", ["\0", "a\0b", "\ud800"])
def test_what_is_not_a_file_name_is_refused(folder, name):
    files = LocalFiles(str(folder))
    with pytest.raises(CorruptCheckpointError, match="is not a file name"):
        files.size(name)
    with pytest.raises(CorruptCheckpointError, match="is not a file name"):
        files.read_into(name, 0, memoryview(bytearray(1)))


@pytest.mark.parametrize(
    ("root", "places"),
    [
        ("/cache/models--a/snapshots/1f", ("/cache/models--a/snapshots/1f", "/cache/models--a/blobs")),
        ("/cache/models--a/others/1f", ("/cache/models--a/others/1f",)),
        ("/snapshots/1f", ("/snapshots/1f",)),  # no cache: `/blobs` is anybody's
        ("/run", ("/run",)),
    ],
)
def test_files_of_a_snapshot_may_lie_in_its_caches_blobs_only(root, places):
    assert _places_of(root) == places


@pytest.fixture
def folders(tmp_path: Path) -> list[LocalFiles]:
    found = []
    for name in ("a", "ab", "a/b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "f").write_bytes(f"in {name}".encode())
        found.append(LocalFiles(f"{folder}/" if name == "ab" else str(folder)))
    return found


def test_a_file_is_read_where_it_lies(folders):
    files = JoinedFiles(folders)
    for folder, content in zip(folders, (b"in a", b"in ab", b"in a/b"), strict=True):
        name = joined_name(folder, "f")
        assert "//" not in name
        assert place_of(files, name) == (folder, "f")
        assert files.exists(name)
        assert not files.exists(joined_name(folder, "g"))
        assert files.size(name) == len(content)
        assert files.read(name, 0, len(content)) == content
        buffer = bytearray(2)
        files.read_into(name, 1, memoryview(buffer))
        assert buffer == content[1:3]
        assert name in files.list()


def test_a_file_of_no_folder_is_refused(folders, tmp_path):
    with pytest.raises(CorruptCheckpointError, match="is not in"):
        JoinedFiles(folders).size(f"{tmp_path}/abc/f")


def test_a_folder_that_is_joined_twice_is_one(folders):
    files = JoinedFiles([folders[0], LocalFiles(folders[0].location)])
    assert len(files.parts) == 1


def test_fingerprints_are_those_of_the_folders(folders):
    files = JoinedFiles(folders)
    names = sorted(joined_name(folder, "f") for folder in folders)
    rows = file_stamps(files, names)
    assert sorted(str(row[0]) for row in rows) == names
    stamps = {joined_name(folder, "f"): file_stamps(folder, ["f"])[0][1:] for folder in folders}
    assert {str(name): stamp for name, *stamp in rows} == stamps
    Path(folders[1].location, "f").write_bytes(b"another")
    assert file_stamps(files, names) != rows


def test_one_folder_is_not_renamed(folders):
    assert place_of(folders[0], "f") == (folders[0], "f")
    assert list(by_folder(folders[0], ["f", "g"])) == [(folders[0], ["f", "g"])]
