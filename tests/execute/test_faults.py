"""Failing disks, killed processes, second converters: never a wrong or half checkpoint, and always a way on."""

import errno
import itertools
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.errors import CorruptCheckpointError, Interrupted, StorageError, Terminated, UsageError
from ckpt_tools.execute import run
from ckpt_tools.execute.output import local_output
from ckpt_tools.execute.output.fileio import storage_errors, write_all
from ckpt_tools.execute.output.folders import Folder, exchange
from ckpt_tools.execute.output.journal import Journal
from ckpt_tools.execute.output.local_output import LocalOutput
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.formats.locate.detect import TRACKER
from ckpt_tools.formats.storage.open_files import open_files
from tests.execute.conftest import Case, make_case
from tests.execute.converter import Order, wait_until
from tests.execute.fault_matrix import every_call, flips, kill_anywhere, metadata_flips, raising
from tests.execute.test_run import tree

SMALL = WriteOptions(threads=2, memory_bytes=6 << 16)
UNPROVEN = replace(SMALL, check_source="none")  # the kernel copies only what need not be proven


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("pwrite", errno.ENOSPC),
        ("pwrite", errno.EIO),
        ("preadv", errno.EIO),
        ("posix_fallocate", errno.ENOSPC),
        ("ftruncate", errno.EIO),
        ("copy_file_range", errno.ENOSPC),
    ],
)
def test_an_error_of_any_call_leaves_the_old_output_and_a_way_on(tmp_path, call, code, resumed):
    ends = every_call(tmp_path, call, raising(code), resumed, [0, 1, 2, 5, 11])
    assert ends["error, old output"] == ends.total() > 0 or resumed


@pytest.mark.parametrize("call", ["pwrite", "preadv", "copy_file_range"])
def test_short_counts_are_continued(tmp_path, monkeypatch, call):
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


def test_a_write_without_progress_ends(tmp_path, monkeypatch):
    made = iter([3, 0])
    monkeypatch.setattr(os, "pwrite", lambda *_args: next(made))  # asked a third time, it would raise
    with open(tmp_path / "file", "wb") as file, pytest.raises(OSError, match="no progress") as caught:
        write_all(file.fileno(), b"content", 0)
    assert caught.value.errno == errno.EIO


def test_where_the_kernel_cannot_copy_the_process_does(tmp_path, monkeypatch):
    case = make_case(tmp_path / "source", scale=24)
    unproven = WriteOptions(check_source="none")
    write_checkpoint(case.plan(1), case.files, Output(tmp_path / "good"))

    def refuse(*_args: Any) -> int:
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    report = write_checkpoint(case.plan(1), case.files, Output(tmp_path / "out"), unproven)
    assert report.bytes_kernel_copied == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "good")


def test_a_truncated_source_is_named(case, tmp_path):
    plan = case.plan(1)
    name = tmp_path / "source" / "__0_0.distcp"
    os.truncate(name, name.stat().st_size // 2)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"):
        write_checkpoint(plan, open_files(str(tmp_path / "source")), Output(tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_interrupted_work_is_resumed_and_equal(case, tmp_path, monkeypatch):
    plan, out, sent = case.plan(2), tmp_path / "out", list[int]()

    def interrupt_once(done: int, _total: int) -> None:
        if done and not sent:  # a second Ctrl-C could arrive after the conversion has ended
            sent.append(done)
            os.kill(os.getpid(), signal.SIGINT)

    write_checkpoint(plan, case.files, Output(tmp_path / "good"))
    monkeypatch.setattr("ckpt_tools.execute.processes.threads._WATCH_SECONDS", 0.0)
    with pytest.raises(Interrupted, match="--resume"):
        write_checkpoint(plan, case.files, Output(out), SMALL, progress=interrupt_once)
    assert not out.exists()
    for refused, resume, says in ((plan, False, "--resume"), (case.plan(3), True, "another plan")):
        with pytest.raises(UsageError, match=says):
            write_checkpoint(refused, case.files, Output(out, resume=resume))
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


def test_finished_items_are_verified_before_they_are_skipped(case, tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (lambda _: None, "changed while"),
        (lambda _: {"source": []}, "no longer has the files"),
        (lambda _: {"source": [["__0_0.distcp"]]}, "no longer has the files"),
        (lambda rows: {"source": [[*row[:-1], 1] for row in rows]}, "changed while"),
        (lambda _: {"source": [[]]}, "is damaged"),
        (lambda _: {"source": [1]}, "is damaged"),
        (lambda _: {"source": {}}, "is damaged"),
        (lambda _: {"digest": 1}, "is damaged"),
        (lambda _: b"", "is damaged"),
        (lambda _: b"[" * 10_000, "is damaged"),
    ],
)
def test_work_on_another_source_is_not_resumed(case, tmp_path, monkeypatch, source, said):
    """Nor is work whose note of its source is damaged."""
    finished_but_unpublished(case, tmp_path / "out", monkeypatch)
    header = tmp_path / ".out.ckpt_tools-partial" / "journal" / "plan.json"
    before = json.loads(header.read_bytes())
    changed = source(before["source"])
    if changed is None:
        os.utime(tmp_path / "source" / "__1_0.distcp", ns=(1, 1))
    else:
        header.write_bytes(changed if isinstance(changed, bytes) else json.dumps(before | changed).encode())
    with pytest.raises(CorruptCheckpointError, match=said):
        write_checkpoint(case.plan(2), case.files, Output(tmp_path / "out", resume=True))
    assert not (tmp_path / "out").exists()


def test_a_second_converter_stops_at_once(case, tmp_path):
    out = tmp_path / "out"
    refused: list[bool] = []

    def second(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(UsageError, match=f"another converter .process {os.getpid()} on"):
                write_checkpoint(case.plan(1), case.files, Output(out, overwrite=True, resume=True))
            refused.append(True)

    write_checkpoint(case.plan(1), case.files, Output(out), progress=second)
    assert refused and (out / ".metadata").exists()


def test_a_process_killed_between_two_renames_gives_the_old_back(case, tmp_path):
    out, partial = tmp_path / "out", tmp_path / ".out.ckpt_tools-partial"
    write_checkpoint(case.plan(1), case.files, Output(out))
    before = tree(out)
    partial.mkdir()
    (partial / "lock").touch()
    out.rename(partial / "replaced")
    with pytest.raises(UsageError, match="not empty"):
        write_checkpoint(case.plan(1), case.files, Output(out))
    assert tree(out) == before


@pytest.mark.parametrize(("world", "kills"), [(1, 14), (2, 4)])
def test_kill_9_anywhere_leaves_the_old_state_and_a_way_on(tmp_path, converters, world, kills):
    kills = int(os.environ.get("CKPT_TOOLS_KILLS", kills))
    ends = kill_anywhere(converters, tmp_path, kills, world)
    assert ends["old"]
    assert ends["new"], "none was killed between publication and its end"
    assert ends["found published"], "none was killed with only the cleaning up left"
    assert ends["not reached"] <= kills // 2


def test_sigterm_ends_cleanly_and_resumable(tmp_path, converters):
    case, order = make_case(tmp_path / "source", scale=80), Order(str(tmp_path), resume=True)
    (pid,) = converters.start(order)
    wait_until((tmp_path / ".out.ckpt_tools-partial" / "journal" / "0.jsonl").exists)
    os.kill(pid, signal.SIGTERM)
    assert converters.wait()[0].status == Terminated.exit_code == 143
    assert not (tmp_path / "out").exists()
    assert converters.run(order)[0].status == 0
    write_checkpoint(case.plan(2), case.files, Output(tmp_path / "good"))
    assert tree(tmp_path / "out") == tree(tmp_path / "good")


def _killed_in_publication(at: int, convert: Callable[[], object]) -> bool:
    """Whether a process ended that is killed at the `at`-th moment of its publication: after so many calls."""
    pid = os.fork()
    if pid == 0:
        try:
            count, original = itertools.count(), LocalOutput.put_in_place

            def reached() -> None:
                if next(count) == at:
                    os.kill(os.getpid(), signal.SIGKILL)

            def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
                def called(*args: Any, **named: Any) -> Any:
                    result = real(*args, **named)
                    reached()
                    return result

                return called

            def counted(output: LocalOutput) -> None:
                for name in ("rename", "replace", "unlink", "rmdir", "open", "mkdir"):
                    setattr(os, name, deadly(getattr(os, name)))
                vars(local_output)["exchange"] = deadly(vars(local_output)["exchange"])
                reached()
                original(output)

            LocalOutput.put_in_place = counted  # type: ignore[method-assign,assignment]
            convert()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status == 0


@pytest.mark.parametrize(("exchanges", "has_old"), [(True, True), (False, True), (True, False)])
def test_every_stop_of_publication_can_be_gone_on_from(tmp_path, exchanges, has_old, monkeypatch):
    """Whoever killed it may have stopped it at any call: the old output, then the new one, then its tracker."""
    monkeypatch.setattr(local_output, "exchange", exchange if exchanges else lambda *_: False)
    case = make_case(tmp_path / "source", scale=4)
    out, tracker, kept = tmp_path / "out", tmp_path / TRACKER, tmp_path / "kept"
    mine = Output(out, {TRACKER: b"new"}, overwrite=True)
    write_checkpoint(case.plan(2), case.files, mine)
    new = tree(out)
    write_checkpoint(case.plan(3), case.files, Output(kept))
    old, seen = tree(kept), set[tuple[bool, str]]()
    for at in range(200):
        shutil.rmtree(out)
        if has_old:
            shutil.copytree(kept, out)
        tracker.write_text("old")
        has_ended = _killed_in_publication(at, lambda: write_checkpoint(case.plan(2), case.files, mine))
        is_new, tracked = out.exists() and tree(out) == new, tracker.read_text()
        assert is_new or not out.exists() or (has_old and tree(out) == old)
        assert is_new or tracked == "old", "the tracker came before the checkpoint"
        seen.add((is_new, tracked))
        if has_ended:
            break
        again = replace(mine, resume=True, overwrite=not is_new)
        report = write_checkpoint(case.plan(2), case.files, again)
        if is_new and tracked == "old":
            assert report.bytes_read == 0, "published, and written again"
        assert (tree(out), tracker.read_text()) == (new, "new")
        assert {p.name for p in tmp_path.iterdir()} == {"source", "kept", "out", TRACKER}
    assert has_ended
    assert seen >= {(False, "old"), (True, "old"), (True, "new")}


@pytest.mark.parametrize("change", ["shorter", "longer", "absent"])
def test_what_was_published_and_then_damaged_is_not_called_done(case, tmp_path, monkeypatch, change):
    """Inode numbers are used again: the marker alone does not vouch for what lies there."""
    out = Output(tmp_path / "out", {TRACKER: b"new"}, resume=True)
    write_checkpoint(case.plan(2), case.files, Output(tmp_path / "good"))
    with monkeypatch.context() as patch:
        patch.setattr(LocalOutput, "finish", lambda _: raising(errno.EIO)(print, None))
        with pytest.raises(OSError, match="Input/output error"):
            write_checkpoint(case.plan(2), case.files, replace(out, resume=False))
    file = tmp_path / "out" / "__1_0.distcp"
    if change == "absent":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size + (1 if change == "longer" else -1))
    with pytest.raises(UsageError, match="not empty"):
        write_checkpoint(case.plan(2), case.files, out)
    write_checkpoint(case.plan(2), case.files, replace(out, overwrite=True))
    assert tree(tmp_path / "out") == tree(tmp_path / "good")


def test_no_tracker_without_publication(case, tmp_path, monkeypatch):
    (tmp_path / TRACKER).write_text("old")

    def refuse(*_args: Any, **_named: Any) -> None:
        raise StorageError("the rename was refused")

    monkeypatch.setattr(LocalOutput, "put_in_place", refuse)
    with pytest.raises(StorageError, match="the rename was refused"):
        write_checkpoint(case.plan(2), case.files, Output(tmp_path / "out", {TRACKER: b"new"}))
    assert (tmp_path / TRACKER).read_text() == "old"
    assert not (tmp_path / "out").exists()


def test_a_journal_line_that_ran_into_another_counts_as_not_written(case, tmp_path):
    with Folder.named(tmp_path) as folder:
        journal = Journal(tmp_path / "journal", lambda: folder)
        journal.begin(case.plan(1), [])
        (tmp_path / "journal" / "0.jsonl").write_bytes(b"[0,7]\n[1,2[2,3]\n[3,4]\n\xff[4,5]\n[5,6]\n[6,7")
        assert journal.finished() == {0: 7, 3: 4, 5: 6}


@pytest.mark.parametrize("section", [flips, metadata_flips])
def test_no_flipped_bit_of_a_source_is_a_silent_wrong_result(tmp_path, section):
    """A sample of the fault matrix; all of it: `python -m tests.execute.fault_matrix`."""
    for what, ends in section(tmp_path, 6, random.Random(3)):
        assert sum(ends.values()) == 6, what
        assert not {"WRONG result", "error without a name"} & ends.keys(), what


@pytest.mark.parametrize(
    ("code", "says"), [(errno.ENOSPC, "The disk is full"), (errno.EACCES, "Check its permissions")]
)
def test_storage_errors_explain(code, says):
    with pytest.raises(StorageError, match=rf"/x: {os.strerror(code)}\. {says}"), storage_errors("/x"):
        raise OSError(code, os.strerror(code))
