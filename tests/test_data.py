"""`tests/data` holds what `tests/data/pack.py` says, and no more than a submission may."""

from tests.conftest import DATA
from tests.data.pack import GROUPS, PACKED, packed, unpacked

LIMIT = 30_000_000


def test_the_folder_is_small():
    files = [path for path in DATA.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < LIMIT


def test_every_archive_holds_its_group():
    assert {path.name for path in PACKED.iterdir()} == {f"{group}.tar.xz" for group in GROUPS}
    for names in GROUPS.values():
        assert {path.name for path in unpacked(names[0]).parent.iterdir()} == set(names)


def test_the_same_contents_give_the_same_archive(tmp_path):
    """Whatever the order in which files were written, their times and their permissions."""
    made = []
    for name, order, mode in (("a", 1, 0o600), ("b", -1, 0o755)):
        folder = tmp_path / name / "run"
        folder.mkdir(parents=True)
        for file in ["x", "y", "z"][::order]:
            (folder / file).write_text(file * 1000)
            (folder / file).chmod(mode)
        made.append(packed([folder]))
    assert made[0] == made[1]
    (tmp_path / "b" / "run" / "x").write_text("other")
    assert packed([tmp_path / "b" / "run"]) != made[0]
