"""A run's tracker goes forward only: an iteration that is added does not send a job back to an older one."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_tools.execute import run
from ckpt_tools.execute.output import local_output
from ckpt_tools.execute.run import Output, rehearse, write_checkpoint
from ckpt_tools.formats.locate.detect import BRIDGE_TRACKER, TRACKER
from tests.execute.conftest import Case, make_case

STAYS = "for a job to load"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("source") / "ckpt")


@pytest.fixture(params=["folder", "store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "root") if request.param == "folder" else "memory://root"
    if request.param == "store":
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    ("old", "there", "new", "left", "says"),
    [
        (None, (), "2", "2", None),
        (None, ("iter_0000009",), "2", "2", None),
        ("9", ("iter_0000009",), "2", "9", f"stays at 9; {STAYS} 2, give it --ckpt-step 2, or write 2 into"),
        ("9\n", ("iter_0000009",), "release", "9\n", f"stays at 9; {STAYS} release, write release into"),
        ("9", ("iter_0000009",), "0", "9", f"stays at 9; {STAYS} 0, write 0 into"),
        ("1", ("iter_0000001",), "release", "1", "stays at 1"),
        ("9", (), "2", "2", "moves from 9 to 2"),
        ("1", ("iter_0000001",), "2", "2", "moves from 1 to 2"),
        ("release", ("release",), "2", "2", "moves from release to 2"),
        ("2", ("iter_0000009",), "2", "2", None),
        ("release", (), "release", "release", None),
        ("", ("iter_0000009",), "2", "2", None),
        ("nine", ("iter_0000009",), "2", "2", None),
    ],
)
def test_a_tracker_goes_forward_only(old, there, new, left, says, root, case):
    fs, _ = fsspec.core.url_to_fs(root)
    for name in there:
        fs.makedirs(f"{root}/{name}", exist_ok=True)
        fs.pipe(f"{root}/{name}/.metadata", b"x")
    if old is not None:
        fs.makedirs(root, exist_ok=True)
        fs.pipe(f"{root}/{TRACKER}", old.encode())
    folder = "release" if new == "release" else f"iter_{int(new):07d}"
    place = f"{root}/{folder}" if "://" in root else Path(root, folder)
    beside = {TRACKER: new.encode(), BRIDGE_TRACKER: b"new"}
    foretold = rehearse(case.plan(1), case.files, Output(place, beside))
    done = write_checkpoint(case.plan(1), case.files, Output(place, beside))
    assert fs.cat(f"{root}/{TRACKER}").decode() == left
    assert fs.exists(f"{root}/{BRIDGE_TRACKER}") == (left == new)
    assert (done.tracker or "").startswith(f"{TRACKER} {says}" if says else "")
    assert (done.tracker is None) == (says is None)
    assert foretold.tracker == done.tracker
    assert done.is_tracked == (left == new)


def test_of_two_that_publish_at_once_the_second_sees_the_tracker_of_the_first(case, tmp_path, monkeypatch):
    """What is read is still true when the new tracker is written."""
    asked, fd = [], os.open(tmp_path, os.O_RDONLY)

    def decide(output: Path, latest: str) -> tuple[bool, str | None]:
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        asked.append(latest)
        return False, None

    monkeypatch.setattr(run, "tracker_change", decide)
    write_checkpoint(case.plan(1), case.files, Output(tmp_path / "iter_0000002", {TRACKER: b"2"}))
    assert asked == ["2"] and (tmp_path / TRACKER).read_text() == "2"
    monkeypatch.undo()
    monkeypatch.setattr(local_output, "_LOCK_TRIES", 1)
    fcntl.flock(
        fd, fcntl.LOCK_EX | fcntl.LOCK_NB
    )  # as `flock ROOT checkpoint-inspector ...` does: nobody waits
    write_checkpoint(case.plan(1), case.files, Output(tmp_path / "iter_0000004", {TRACKER: b"4"}))
    assert (tmp_path / TRACKER).read_text() == "4"
    os.close(fd)
