"""Private stays private: permissions, group and setgid of outputs."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_tools.execute.output import access
from ckpt_tools.execute.run import Output, write_checkpoint
from ckpt_tools.formats.locate.detect import TRACKER
from ckpt_tools.formats.storage.open_files import open_files

GROUP = 54321
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give to any group")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(folder: Path) -> set[int]:
    return {mode(path) for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("source", "mask", "directory", "file"),
    [
        (0o755, 0o022, 0o755, 0o644),
        (0o700, 0o022, 0o700, 0o600),
        (0o750, 0o022, 0o750, 0o640),
        (0o770, 0o002, 0o770, 0o660),
        (0o777, 0o077, 0o700, 0o600),
        (0o555, 0o022, 0o755, 0o644),  # a read-only source: the owner can always use its output
    ],
    ids=oct,
)
def test_as_private_as_the_source(case, tmp_path, source, mask, directory, file):
    (tmp_path / "source").chmod(source)
    os.umask(mask)
    out = tmp_path / "run" / "iter"
    write_checkpoint(case.plan(2), case.files, Output(out, {TRACKER: b"1"}, {"extra": b"x"}))
    assert mode(out) == directory
    assert mode(out.parent) == directory
    assert modes(out) == {file}
    assert mode(out.parent / TRACKER) == file


def test_private_files_in_an_open_directory_stay_private(case, tmp_path):
    for path in (tmp_path / "source").iterdir():
        path.chmod(0o600)
    (tmp_path / "source").chmod(0o775)
    os.umask(0o002)
    files = open_files(case.files.location)  # as it is now
    write_checkpoint(case.plan(2), files, Output(tmp_path / "out"))
    assert mode(tmp_path / "out") == 0o775
    assert modes(tmp_path / "out") == {0o600}


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize(
    ("source", "old", "directory", "file"),
    [
        (0o755, 0o700, 0o700, 0o600),
        (0o700, 0o755, 0o700, 0o600),
        (0o700, 0o777, 0o700, 0o600),
        (0o750, 0o755, 0o750, 0o640),
        (0o755, 0o775, 0o775, 0o664),
        (0o705, 0o770, 0o700, 0o600),
    ],
    ids=oct,
)
def test_neither_what_is_replaced_nor_the_source_becomes_more_open(
    case, tmp_path, content, source, old, directory, file
):
    os.umask(0)
    out = tmp_path / "out"
    out.mkdir()
    if content:
        write_checkpoint(case.plan(1), case.files, Output(out))
        for path in out.iterdir():
            path.chmod(0o666)
    out.chmod(old)
    (tmp_path / "source").chmod(source)
    (tmp_path / TRACKER).write_text("1")
    (tmp_path / TRACKER).chmod(0o640)
    write_checkpoint(case.plan(2), case.files, Output(out, {TRACKER: b"2"}, overwrite=True))
    assert mode(out) == directory
    assert modes(out) == {file}
    assert mode(tmp_path / TRACKER) == 0o640


@root_only
def test_the_group_comes_along(case, tmp_path):
    os.chown(tmp_path / "source", -1, GROUP)
    (tmp_path / "source").chmod(0o2750)
    write_checkpoint(case.plan(2), case.files, Output(tmp_path / "run" / "out", {TRACKER: b"2"}))
    for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
        assert path.stat().st_gid == GROUP, path
    assert mode(tmp_path / "run" / "out") == 0o2750


@root_only
def test_a_parent_that_hands_down_its_group_is_honoured(case, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, -1, GROUP)
    shared.chmod(0o2775)
    (tmp_path / "source").chmod(0o750)
    write_checkpoint(case.plan(2), case.files, Output(shared / "out", {TRACKER: b"1"}))
    assert mode(shared / "out") == 0o2750
    assert {path.stat().st_gid for path in shared.rglob("*")} == {GROUP}


def test_a_group_that_may_not_be_given_gets_nothing(case, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refuse)
    real = access.access_of
    monkeypatch.setattr(
        "ckpt_tools.execute.output.local_output.access_of",
        lambda path: real(path)._replace(group=GROUP, setgid=True),
    )
    (tmp_path / "source").chmod(0o750)
    write_checkpoint(case.plan(2), case.files, Output(tmp_path / "out"))
    assert mode(tmp_path / "out") == 0o700


@pytest.mark.parametrize(
    ("old", "source", "found"),
    [
        (
            (0o750, 0o640, 7),
            (0o755, 0o644, 8),
            (0o750, 0o640, 7),
        ),  # group 7 is one of the others of the source
        ((0o755, 0o644, 7), (0o750, 0o640, 8), (0o700, 0o600, 7)),
        ((0o775, 0o664, 7), (0o770, 0o660, 7), (0o770, 0o660, 7)),
        ((0o755, 0o644, 7), (0o705, 0o604, None), (0o705, 0o604, 7)),
    ],
)
def test_a_group_that_the_source_does_not_have_is_one_of_its_others(old, source, found):
    assert access.Access(*old).within(access.Access(*source)) == access.Access(*found)


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ([], ()),
        ([(0o750, 0o640, 7, True)], (0o750, 0o640, 7, True)),
        ([(0o755, 0o644, 7), (0o770, 0o660, 7)], (0o750, 0o640, 7)),
        ([(0o755, 0o644, 7), (0o700, 0o600, 7)], (0o700, 0o600, 7)),
        ([(0o775, 0o664, 7), (0o775, 0o664, 8)], (0o705, 0o604)),  # nobody is known to be in both groups
        (
            [(0o770, 0o660, group) for group in (7, 8, 7)],
            (0o700, 0o600),
        ),  # one that comes back does not count
    ],
)
def test_several_sources_give_what_all_of_them_allow(places, found):
    assert access.common_access(access.Access(*place) for place in places) == access.Access(*found)
