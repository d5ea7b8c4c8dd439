"""Failing disks, killed processes, second converters: never a wrong or half checkpoint, and always a way on."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.catalog.detect import TRACKER
from ckpt_tools.catalog.files import open_files
from ckpt_tools.errors import (
    CorruptCheckpointError,
    Interrupted,
    StorageError,
    Terminated,
    UsageError,
)
from ckpt_tools.execute import run
from ckpt_tools.execute.fileio import storage_errors
from ckpt_tools.execute.publish import Staging
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from tests.conftest import REPO
from tests.execute.conftest import Case, make_case
from tests.execute.test_run import tree

SMALL = WriteOptions(threads=2, memory_bytes=6 << 16)


def whole(out: Path) -> bool:
    """Whether a loader would take `out` for a checkpoint."""
    return (out / ".metadata").exists()


class Faults:
    """Wraps one of os' functions so that its n-th call goes wrong."""

    def __init__(
        self, real: Callable[..., Any], at: int, fault: Callable[[Callable[..., Any], Any], Any]
    ) -> None:
        self.real, self.at, self.fault = real, at, fault
        self.calls = itertools.count()

    def __call__(self, *args: Any) -> Any:
        if next(self.calls) == self.at:
            return self.fault(self.real, args)
        return self.real(*args)


def raising(code: int) -> Callable[[Callable[..., Any], Any], Any]:
    def fault(real: Callable[..., Any], args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fault


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "preadv", "posix_fallocate", "ftruncate", "copy_file_range"])
def test_an_error_of_any_call_leaves_nothing_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    case = make_case(tmp_path / "source", scale=24)
    plan = case.plan(2)
    write_checkpoint(plan, case.files, Output(tmp_path / "good"), SMALL)
    out = tmp_path / "out"
    tried = 0
    for at in [0, 1, 2, 5, 11]:
        faults = Faults(getattr(os, call), at, raising(code))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, faults)
            try:
                write_checkpoint(plan, case.files, Output(out, overwrite=True), SMALL)
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
    write_checkpoint(plan, case.files, Output(tmp_path / "out"), SMALL)
    assert next(shorts) > 10
    monkeypatch.undo()
    assert tree(tmp_path / "out") == tree(tmp_path / "good")


def test_where_the_kernel_cannot_copy_the_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(tmp_path / "source", scale=24)
    write_checkpoint(case.plan(1), case.files, Output(tmp_path / "good"))

    def refuse(*_args: Any) -> int:
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    report = write_checkpoint(case.plan(1), case.files, Output(tmp_path / "out"))
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
    monkeypatch.setattr("ckpt_tools.execute.work._WATCH_SECONDS", 0.0)
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


def finished_but_unpublished(case: Case, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All items written, then stopped just before publication."""

    def stop(*_args: object) -> None:
        raise Interrupted("here")

    with monkeypatch.context() as patch:
        patch.setattr(run, "check_unchanged", stop)
        with pytest.raises(Interrupted):
            write_checkpoint(case.plan(2), case.files, Output(out))


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


def test_resume_refuses_a_source_that_has_changed(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_but_unpublished(case, tmp_path / "out", monkeypatch)
    os.utime(tmp_path / "source" / "__1_0.distcp", ns=(1, 1))
    with pytest.raises(CorruptCheckpointError, match=r"__1_0\.distcp changed"):
        write_checkpoint(case.plan(2), case.files, Output(tmp_path / "out", resume=True))


def test_a_second_converter_stops_at_once(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused = []

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
        monkeypatch.setattr("ckpt_tools.execute.publish._exchange", lambda a, b: False)
    out = tmp_path / "out"
    write_checkpoint(case.plan(1), case.files, Output(out))
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "discard", lambda self: raising(errno.EIO)(None, None))
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


SERVER = """
import itertools, os, signal, sys
from pathlib import Path
from ckpt_tools.catalog.detect import TRACKER
from ckpt_tools.errors import CkptError
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from tests.execute.conftest import reopened_case
here = Path(sys.argv[1])
plan = reopened_case(here / "source").plan(2)
count = itertools.count()
CALLS = "open close mkdir rename replace unlink rmdir pwrite write pread preadv ftruncate"
CALLS += " copy_file_range posix_fallocate"

def deadly(call, at):
    def counted(*args, **named):
        if next(count) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **named)
    return counted

def convert(at):
    for name in CALLS.split():
        setattr(os, name, deadly(getattr(os, name), at))
    files = reopened_case(here / "source").files
    output = Output(here / "out", {TRACKER: b"7"}, overwrite=True, resume=True)
    try:
        write_checkpoint(plan, files, output, WriteOptions(2, 6 << 16))
    except CkptError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    (here / "calls").write_text(str(next(count)))
    return 0

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os._exit(convert(int(line)))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Converters:
    """Starts converters of one source, each a fresh fork of a process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder)],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Converters:
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.communicate(timeout=60)

    def start(self, killed_at: int = -1) -> int:
        """The process id of a new converter, which kills itself instead of its n-th call of the system."""
        assert self._server.stdin is not None
        self._server.stdin.write(f"{killed_at}\n")
        self._server.stdin.flush()
        return self._number()

    def wait(self) -> int:
        """The exit status of the converter started last."""
        return self._number()

    def _number(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def finish(self) -> None:
        """Run one to its end."""
        self.start()
        assert self.wait() == 0


def test_kill_9_anywhere_leaves_the_old_state_and_a_way_on(tmp_path: Path) -> None:
    kills = int(os.environ.get("CKPT_TOOLS_KILLS", "20"))
    make_case(tmp_path / "source", scale=24)
    out, partial = tmp_path / "out", tmp_path / ".out.ckpt_tools-partial"
    dice = random.Random(7)
    ends = Counter[str]()
    with Converters(tmp_path) as converters:
        converters.finish()
        good = tree(out)
        for _ in range(kills):
            shutil.rmtree(out)
            out.mkdir()
            (out / "old").write_text("old")
            calls = int((tmp_path / "calls").read_text())
            converters.start(
                killed_at=dice.choice([dice.randrange(calls), dice.randrange(calls - 40, calls)])
            )
            assert converters.wait() in {
                -signal.SIGKILL,
                0,
            }  # 0: going on took fewer calls than from the start
            names = {p.name for p in out.iterdir()}
            assert names == {"old"} or tree(out) == good
            ends["old" if names == {"old"} else "new"] += 1
            if dice.random() < 0.5:  # half of them go on; the next converter meets what the others left
                converters.finish()
                assert tree(out) == good
                assert not partial.exists()
        (tmp_path / TRACKER).unlink()
        converters.finish()
    assert tree(out) == good
    assert (tmp_path / TRACKER).read_text() == "7"
    assert not partial.exists()
    assert min(ends["old"], ends["new"]) > kills // 10


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
