"""What others put where this tool keeps its own files: never followed, never truncated, never removed."""

import os
from pathlib import Path

import pytest

from ckpt_tools.errors import UsageError
from ckpt_tools.execute.output.folders import Folder, Foreign
from ckpt_tools.execute.output.local_output import LocalOutput
from ckpt_tools.execute.run import Output, write_checkpoint
from ckpt_tools.formats.locate.detect import TRACKER
from tests.execute.test_faults import finished_but_unpublished
from tests.execute.test_run import tree

PARTIAL = ".out.ckpt_tools-partial"
NAMES = ["lock", "journal", "checkpoint", "publishing", "replaced", "journal/plan.json"]


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A directory of somebody else, with names that this tool uses."""
    folder = tmp_path / "precious"
    for name in ("journal", "checkpoint", "data"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("precious")
    (folder / "file").write_text("precious")
    return folder


def everything(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


OPTIONS = pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}], ids=str)


@OPTIONS
def test_a_partial_directory_that_is_a_link_is_refused(case, tmp_path, precious, options):
    before = everything(precious)
    (tmp_path / PARTIAL).symlink_to(precious)
    with pytest.raises(UsageError, match="is not a directory"):
        write_checkpoint(case.plan(1), case.files, Output(tmp_path / "out", **options))
    assert everything(precious) == before
    assert (tmp_path / PARTIAL).is_symlink()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["file", "absent"])
@OPTIONS
@pytest.mark.parametrize("name", NAMES)
def test_links_in_the_partial_directory_are_not_followed(case, tmp_path, precious, name, options, target):
    """Whether it goes on from there or refuses: nothing that a link points to changes or appears."""
    before = everything(precious)
    (tmp_path / PARTIAL / name).parent.mkdir(parents=True)
    if name != "lock":
        (tmp_path / PARTIAL / "lock").write_bytes(b"process 1 on here")
    (tmp_path / PARTIAL / name).symlink_to(precious / target)
    try:
        write_checkpoint(case.plan(1), case.files, Output(tmp_path / "out", **options))
    except UsageError as error:
        assert PARTIAL in str(error)
        assert not (tmp_path / "out").exists()
    assert everything(precious) == before
    assert not (precious / "absent").exists()


def test_a_lock_with_another_name_elsewhere_is_not_written(case, tmp_path, precious):
    (tmp_path / PARTIAL).mkdir()
    (tmp_path / PARTIAL / "lock").hardlink_to(precious / "file")
    with pytest.raises(Foreign, match="hard link"):
        write_checkpoint(case.plan(1), case.files, Output(tmp_path / "out", overwrite=True))
    assert (precious / "file").read_text() == "precious"


@pytest.mark.parametrize("what", ["no lock", "another lock", "another name"])
def test_a_directory_that_only_has_the_name_is_left_alone(case, tmp_path, what):
    partial = tmp_path / PARTIAL
    (partial / "checkpoint").mkdir(parents=True)
    (partial / "checkpoint" / "thesis").write_text("precious")
    if what == "another lock":
        (partial / "lock").write_text("held by my own program")
    if what == "another name":
        (partial / "lock").write_text("process 1 on here")
        (partial / "notes").write_text("precious")
    before = everything(partial)
    with pytest.raises(UsageError, match="did not put there"):
        write_checkpoint(case.plan(1), case.files, Output(tmp_path / "out", overwrite=True))
    assert what == "another name" or everything(partial) == before
    assert (partial / "checkpoint" / "thesis").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("which", ["directory", "lock"])
def test_what_belongs_to_another_user_is_refused(case, tmp_path, which):
    partial = tmp_path / PARTIAL
    partial.mkdir()
    (partial / "lock").touch()
    os.chown(partial if which == "directory" else partial / "lock", 12345, -1)
    with pytest.raises(Foreign, match="belongs to user 12345"):
        write_checkpoint(case.plan(1), case.files, Output(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_links_among_the_files_of_stopped_work_are_not_written_through(case, tmp_path, precious, monkeypatch):
    plan, out = case.plan(2), tmp_path / "out"
    finished_but_unpublished(case, out, monkeypatch)
    data = tmp_path / PARTIAL / "checkpoint" / plan.items[0].file
    data.unlink()
    data.symlink_to(precious / "file")
    with pytest.raises(Foreign, match="not a plain file"):
        write_checkpoint(plan, case.files, Output(out, resume=True))
    assert (precious / "file").read_text() == "precious"
    write_checkpoint(plan, case.files, Output(out, overwrite=True))
    assert (precious / "file").read_text() == "precious"


def test_a_tracker_is_replaced_and_its_temporary_name_cannot_be_guessed(case, tmp_path, precious):
    (tmp_path / TRACKER).symlink_to(precious / "file")
    (tmp_path / f".{TRACKER}.ckpt_tools-tmp").symlink_to(precious / "file")
    write_checkpoint(case.plan(1), case.files, Output(tmp_path / "out", {TRACKER: b"7"}))
    assert (precious / "file").read_text() == "precious"
    assert not (tmp_path / TRACKER).is_symlink()
    assert (tmp_path / TRACKER).read_bytes() == b"7"


def test_replacing_a_directory_removes_links_and_not_what_they_point_to(case, tmp_path, precious):
    before = everything(precious)
    out = tmp_path / "out"
    write_checkpoint(case.plan(1), case.files, Output(out))
    (out / "link.distcp").symlink_to(precious / "file")
    write_checkpoint(case.plan(1), case.files, Output(out, overwrite=True))
    assert everything(precious) == before
    assert not (out / "link.distcp").is_symlink()
    assert not (tmp_path / PARTIAL).exists()


def test_a_partial_directory_that_is_exchanged_meanwhile_leads_nowhere(case, tmp_path, precious, monkeypatch):
    """Who may rename in the output's parent puts a link to another directory in its place."""
    before = everything(precious)
    create_files = LocalOutput.create_files

    def and_then_exchange(output: LocalOutput) -> None:
        create_files(output)
        (tmp_path / PARTIAL).rename(tmp_path / "away")
        (tmp_path / PARTIAL).symlink_to(precious)

    monkeypatch.setattr(LocalOutput, "create_files", and_then_exchange)
    write_checkpoint(case.plan(1), case.files, Output(tmp_path / "out"))
    assert everything(precious) == before
    monkeypatch.undo()
    write_checkpoint(case.plan(1), case.files, Output(tmp_path / "good"))
    assert tree(tmp_path / "out") == tree(tmp_path / "good")


@pytest.mark.parametrize("name", ["lock", "publishing", "journal/plan.json", "journal/0.jsonl"])
def test_a_fifo_keeps_nobody_waiting(case, tmp_path, monkeypatch, name):
    finished_but_unpublished(case, tmp_path / "out", monkeypatch)
    (tmp_path / PARTIAL / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / PARTIAL / name)
    with pytest.raises(Foreign, match="is not a plain file"):
        write_checkpoint(case.plan(2), case.files, Output(tmp_path / "out", resume=True))


def test_a_long_file_in_the_place_of_ours_fills_no_memory(tmp_path):
    with open(tmp_path / "long", "wb") as file:
        file.truncate(1 << 40)
    with Folder.named(tmp_path) as folder, pytest.raises(Exception, match="is longer than 100 bytes"):
        folder.read("long", 100)


def test_no_handle_stays_open(case, tmp_path, monkeypatch):
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    write_checkpoint(case.plan(1), case.files, Output(tmp_path / "first"))
    before = count()
    write_checkpoint(case.plan(2), case.files, Output(tmp_path / "second", {TRACKER: b"1"}))
    finished_but_unpublished(case, tmp_path / "out", monkeypatch)
    with pytest.raises(UsageError, match="another plan"):
        write_checkpoint(case.plan(3), case.files, Output(tmp_path / "out", resume=True))
    with pytest.raises(UsageError, match="--resume"):
        write_checkpoint(case.plan(3), case.files, Output(tmp_path / "out"))
    write_checkpoint(case.plan(2), case.files, Output(tmp_path / "out", resume=True))
    assert count() == before
