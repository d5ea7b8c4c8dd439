"""Failing disks, killed processes, second converters: never a wrong or half checkpoint, and always a way on."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.errors import (
    CorruptCheckpointError,
    Interrupted,
    StorageError,
    Terminated,
    UsageError,
)
from ckpt_tools.execute import run
from ckpt_tools.execute.output.fileio import storage_errors, write_all
from ckpt_tools.execute.output.journal import Journal
from ckpt_tools.execute.output.staging import Staging
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.formats.locate.detect import TRACKER
from ckpt_tools.formats.storage.open_files import open_files
from tests.execute.conftest import Case, make_case
from tests.execute.fault_matrix import flips, metadata_flips
from tests.execute.faults import Converters, Faults, kill_anywhere, raising
from tests.execute.test_run import tree

SMALL = WriteOptions(threads=2, memory_bytes=6 << 16)
UNPROVEN = replace(SMALL, check_source="none")  # the kernel copies only what need not be proven


def whole(out: Path) -> bool:
    """Whether a loader would take `out` for a checkpoint."""
    return (out / ".metadata").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "preadv", "posix_fallocate", "ftruncate", "copy_file_range"])
def test_an_error_of_any_call_leaves_nothing_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    case = make_case(tmp_path / "source", scale=24)
    plan = case.plan(2)
    options = UNPROVEN if call == "copy_file_range" else SMALL
    write_checkpoint(plan, case.files, Output(tmp_path / "good"), SMALL)
    out = tmp_path / "out"
    tried = 0
    for at in [0, 1, 2, 5, 11]:
        faults = Faults(getattr(os, call), at, raising(code))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, faults)
            try:
                write_checkpoint(plan, case.files, Output(out, overwrite=True), options)
            except StorageError as error:
                assert os.strerror(code) in str(error)
                assert "distcp" in str(error) or "ckpt_tools-partial" in str(error)
                tried += 1
            else:
                assert next(faults.calls) <= at  # not called so often
                break
        assert not out.exists()
    assert tried
    resume = (tmp_path / ".out.ckpt_tools-partial").exists()
    write_checkpoint(plan, case.files, Output(out, resume=resume, overwrite=not resume), SMALL)
    assert tree(out) == tree(tmp_path / "good")


@pytest.mark.parametrize("call", ["pwrite", "preadv", "copy_file_range"])
def test_short_counts_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    case = make_case(tmp_path / "source", scale=24)
    plan = case.plan(2)
    write_checkpoint(plan, case.files, Output(tmp_path / "good"), SMALL)
    real: Any = getattr(os, call)
    shorts = itertools.count()

    def short(fd: int, data: Any, *rest: Any) -> int:
        next(shorts)
        if call == "pwrite":
            return real(fd, memoryview(data)[: len(data) // 3 + 1], *rest)
        if call == "preadv":
            return real(fd, [data[0][: len(data[0]) // 3 + 1]], *rest)
        return real(fd, data, rest[0] // 3 + 1, *rest[1:])

    monkeypatch.setattr(os, call, short)
    options = UNPROVEN if call == "copy_file_range" else SMALL
    write_checkpoint(plan, case.files, Output(tmp_path / "out"), options)
    assert next(shorts) > 10
    monkeypatch.undo()
    assert tree(tmp_path / "out") == tree(tmp_path / "good")


def test_a_write_without_progress_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([3, 0])
    monkeypatch.setattr(os, "pwrite", lambda *_args: next(made))  # asked a third time, it would raise
    with open(tmp_path / "file", "wb") as file, pytest.raises(OSError, match="no progress") as caught:
        write_all(file.fileno(), b"content", 0)
    assert caught.value.errno == errno.EIO


def test_where_the_kernel_cannot_copy_the_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(tmp_path / "source", scale=24)
    unproven = WriteOptions(check_source="none")
    write_checkpoint(case.plan(1), case.files, Output(tmp_path / "good"))

    def refuse(*_args: Any) -> int:
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    report = write_checkpoint(case.plan(1), case.files, Output(tmp_path / "out"), unproven)
    assert report.bytes_kernel_copied == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "good")


def test_a_truncated_source_is_named(case: Case, tmp_path: Path) -> None:
    plan = case.plan(1)
    name = tmp_path / "source" / "__0_0.distcp"
    os.truncate(name, name.stat().st_size // 2)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"):
        write_checkpoint(plan, open_files(str(tmp_path / "source")), Output(tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def interrupt_once() -> Callable[[int, int], None]:
    """Ctrl-C when something is written; a second one could arrive after the conversion has ended."""
    sent: list[int] = []

    def progress(done: int, _total: int) -> None:
        if done and not sent:
            sent.append(done)
            os.kill(os.getpid(), signal.SIGINT)

    return progress


def test_interrupted_work_is_resumed_and_equal(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = case.plan(2)
    write_checkpoint(plan, case.files, Output(tmp_path / "good"))
    monkeypatch.setattr("ckpt_tools.execute.processes.threads._WATCH_SECONDS", 0.0)
    out = tmp_path / "out"
    with pytest.raises(Interrupted, match="--resume"):
        write_checkpoint(plan, case.files, Output(out), SMALL, progress=interrupt_once())
    assert not out.exists()
    with pytest.raises(UsageError, match="--resume"):
        write_checkpoint(plan, case.files, Output(out))
    with pytest.raises(UsageError, match="another plan"):
        write_checkpoint(case.plan(3), case.files, Output(out, resume=True))
    write_checkpoint(plan, case.files, Output(out, resume=True))
    assert tree(out) == tree(tmp_path / "good")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "out", "source"]


def finished_but_unpublished(
    case: Case, out: Path, monkeypatch: pytest.MonkeyPatch, options: WriteOptions | None = None
) -> None:
    """All items written, then stopped just before publication."""

    def stop(*_args: object) -> None:
        raise Interrupted("here")

    with monkeypatch.context() as patch:
        patch.setattr(run, "check_unchanged", stop)
        with pytest.raises(Interrupted):
            write_checkpoint(case.plan(2), case.files, Output(out), options)


def test_finished_items_are_verified_before_they_are_skipped(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = case.plan(2)
    write_checkpoint(plan, case.files, Output(tmp_path / "good"))
    out = tmp_path / "out"
    finished_but_unpublished(case, out, monkeypatch)
    item = plan.items[0]
    data = tmp_path / ".out.ckpt_tools-partial" / "checkpoint" / item.file
    with open(data, "r+b") as file:  # one payload bit, and the frame of another item
        file.seek(item.offset + item.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
        file.seek(plan.items[1].offset + 30)
        file.write(b"damage")
    report = write_checkpoint(plan, case.files, Output(out, resume=True))
    assert report.items_resumed == len(plan.items) - 2
    assert tree(out) == tree(tmp_path / "good")


def test_a_plan_that_is_refused_costs_nothing(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plan = tmp_path / "out", case.plan(2)
    finished_but_unpublished(case, out, monkeypatch)
    with pytest.raises(UsageError, match="another plan"):
        write_checkpoint(case.plan(3), case.files, Output(out, resume=True))
    report = write_checkpoint(plan, case.files, Output(out, resume=True))
    assert report.items_resumed == len(plan.items)


def test_resume_refuses_a_source_that_has_changed(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_but_unpublished(case, tmp_path / "out", monkeypatch)
    os.utime(tmp_path / "source" / "__1_0.distcp", ns=(1, 1))
    with pytest.raises(CorruptCheckpointError, match=r"__1_0\.distcp changed"):
        write_checkpoint(case.plan(2), case.files, Output(tmp_path / "out", resume=True))


@pytest.mark.parametrize("rows", [[], [["__0_0.distcp"]], [["a", 1]] * 9, [[]], [1], {}, None])
def test_a_damaged_note_of_the_source_vouches_for_nothing(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: object
) -> None:
    finished_but_unpublished(case, tmp_path / "out", monkeypatch)
    header = tmp_path / ".out.ckpt_tools-partial" / "journal" / "plan.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), "source": rows}))
    with pytest.raises(
        CorruptCheckpointError, match=r"changed while|no longer has the files|plan\.json is damaged"
    ):
        write_checkpoint(case.plan(2), case.files, Output(tmp_path / "out", resume=True))
    assert not (tmp_path / "out").exists()


def test_a_second_converter_stops_at_once(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused: list[bool] = []

    def second(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(UsageError, match=f"another converter .process {os.getpid()} on"):
                write_checkpoint(case.plan(1), case.files, Output(out, overwrite=True, resume=True))
            refused.append(True)

    write_checkpoint(case.plan(1), case.files, Output(out), progress=second)
    assert refused
    assert whole(out)


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_keeps_the_old_until_the_new_is_in_place(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr("ckpt_tools.execute.output.staging.exchange", lambda a, b: False)
    out = tmp_path / "out"
    write_checkpoint(case.plan(1), case.files, Output(out))
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "discard", lambda self: raising(errno.EIO)(print, None))
        with pytest.raises(OSError, match="Input/output error"):
            write_checkpoint(case.plan(2), case.files, Output(out, overwrite=True))
    names = sorted(case.plan(2).file_bytes)
    assert sorted(p.name for p in out.iterdir()) == [".metadata", *names]
    report = write_checkpoint(case.plan(2), case.files, Output(out, {TRACKER: b"2"}, resume=True))
    assert report.bytes_read == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest_checkpointed_iteration.txt",
        "out",
        "source",
    ]


def test_a_process_killed_between_two_renames_gives_the_old_back(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_checkpoint(case.plan(1), case.files, Output(out))
    before = tree(out)
    finished = Staging(out, "", {})
    finished.acquire(overwrite=True, resume=False)
    out.rename(finished.partial / "replaced")
    finished.release()
    with pytest.raises(UsageError, match="not empty"):
        write_checkpoint(case.plan(1), case.files, Output(out))
    assert tree(out) == before


@pytest.mark.parametrize(("world", "kills"), [(1, 20), (2, 4)])
def test_kill_9_anywhere_leaves_the_old_state_and_a_way_on(tmp_path: Path, world: int, kills: int) -> None:
    kills = int(os.environ.get("CKPT_TOOLS_KILLS", kills))
    ends = kill_anywhere(tmp_path, kills, world)
    assert ends["old"]
    assert ends["new"], "none was killed between publication and its end"
    assert ends["found published"], "none was killed with only the cleaning up left"
    assert ends["not reached"] <= kills // 2


def test_sigterm_ends_cleanly_and_resumable(tmp_path: Path) -> None:
    case = make_case(tmp_path / "source", scale=80)
    with Converters(tmp_path) as converters:
        pid = converters.start()
        while not (tmp_path / ".out.ckpt_tools-partial" / "journal" / "0.jsonl").exists():
            time.sleep(0.001)
        os.kill(pid, signal.SIGTERM)
        assert converters.wait() == Terminated.exit_code == 143
        assert not (tmp_path / "out").exists()
        converters.finish()
    write_checkpoint(case.plan(2), case.files, Output(tmp_path / "good"))
    assert tree(tmp_path / "out") == tree(tmp_path / "good")


def test_a_journal_line_that_ran_into_another_counts_as_not_written(case: Case, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.begin(case.plan(1), [])
    (tmp_path / "journal" / "0.jsonl").write_bytes(b"[0,7]\n[1,2[2,3]\n[3,4]\n\xff[4,5]\n[5,6]\n[6,7")
    assert journal.finished() == {0: 7, 3: 4, 5: 6}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ([["a", 1, 2], ["b", 3, 4]], None),
        ([["a", 1, 2], ["b", 3, 5]], "b changed while"),
        ([["a", 2, 2], ["b", 3, 4]], "a changed while"),
        ([["a", 1, 2]], "no longer has the files"),
        ([["a", 1, 2], ["b", 3, 4], ["c", 1, 1]], "no longer has the files"),
    ],
)
def test_a_journal_goes_on_from_the_same_source_alone(
    now: list[list[object]], said: str | None, case: Case, tmp_path: Path
) -> None:
    journal, plan = Journal(tmp_path / "journal"), case.plan(1)
    journal.begin(plan, [["a", 1, 2], ["b", 3, 4]])
    if said is None:
        journal.resume(plan, now, "here")
        with pytest.raises(UsageError, match="another plan"):
            journal.resume(replace(plan, digest="other"), now, "here")
        return
    with pytest.raises(CorruptCheckpointError, match=said):
        journal.resume(plan, now, "here")


@pytest.mark.parametrize("section", [flips, metadata_flips])
def test_no_flipped_bit_of_a_source_is_a_silent_wrong_result(
    tmp_path: Path, section: Callable[..., Iterator[tuple[str, Counter[str]]]]
) -> None:
    """A sample of the fault matrix; all of it: `python -m tests.execute.fault_matrix`."""
    for what, ends in section(tmp_path, 6, random.Random(3)):
        assert sum(ends.values()) == 6, what
        assert not {"WRONG result", "error without a name"} & ends.keys(), what


def test_storage_errors_explain() -> None:
    with (
        pytest.raises(StorageError, match=r"/x: No space left on device\. The disk is full"),
        storage_errors("/x"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        pytest.raises(StorageError, match=r"/x: Permission denied\. Check its permissions"),
        storage_errors("/x"),
    ):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
