"""Exact byte ranges, and errors that name file, range and size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_tools.catalog import files as module
from ckpt_tools.catalog.files import LocalFiles, open_files
from ckpt_tools.errors import CorruptCheckpointError, StorageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    (tmp_path / "b").write_bytes(b"")
    return tmp_path


def test_reads_are_exact(folder: Path) -> None:
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
def test_ranges_past_the_end_are_named(folder: Path, offset: int, length: int) -> None:
    files = LocalFiles(str(folder))
    with pytest.raises(CorruptCheckpointError) as found:
        files.read("a", offset, length)
    assert f"{folder}/a: bytes {offset}..{offset + length} are needed, but the file has 100 bytes" in str(
        found.value
    )
    files.close()


def test_a_file_that_shrinks_is_reported(folder: Path) -> None:
    files = LocalFiles(str(folder))
    files.read("a", 0, 1)
    (folder / "a").write_bytes(b"x" * 50)
    with pytest.raises(CorruptCheckpointError, match="the file has 50 bytes"):
        files.read_into("a", 0, memoryview(bytearray(60)))
    files.close()


def test_missing_and_unreadable_files(folder: Path) -> None:
    files = LocalFiles(str(folder))
    with pytest.raises(CorruptCheckpointError, match="does not exist, but the checkpoint needs it"):
        files.read("c", 0, 1)
    (folder / "d").mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        files.read_into("d", 0, memoryview(bytearray(1)))
    files.close()


def test_short_reads_are_completed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(module.os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:7]], at))
    files = LocalFiles(str(folder))
    assert files.read("a", 3, 50) == bytes(range(3, 53))
    files.close()


def test_descriptors_are_bounded_and_returned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
