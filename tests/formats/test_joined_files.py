"""Several folders read as one: every file by its folder's location, the longest that fits."""

from pathlib import Path

import pytest

from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.execute.output.journal import file_stamps
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.storage.joined_files import JoinedFiles, by_folder, joined_name, place_of


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
