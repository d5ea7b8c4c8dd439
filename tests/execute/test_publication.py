"""In which order a finished checkpoint becomes visible, seen from outside: by processes that stop at every step."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.errors import StorageError, UsageError
from ckpt_tools.execute.output import staging
from ckpt_tools.execute.output.folders import exchange
from ckpt_tools.execute.output.staging import Staging
from ckpt_tools.execute.run import Output, write_checkpoint
from ckpt_tools.formats.locate.detect import TRACKER
from tests.execute.conftest import Case, make_case
from tests.execute.test_run import tree


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(tmp_path / "source", scale=4)


def _killed_in_publication(at: int, convert: Callable[[], object]) -> bool:
    """Whether a process ended that is killed at the `at`-th moment of its publication: before or after a call."""
    pid = os.fork()
    if pid == 0:
        try:
            count, original = itertools.count(), Staging.publish

            def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
                def called(*args: Any, **named: Any) -> Any:
                    for moment in ("before", "after"):
                        if moment == "after":
                            found = real(*args, **named)
                        if next(count) == at:
                            os.kill(os.getpid(), signal.SIGKILL)
                    return found

                return called

            def counted(self: Staging, *args: Any, **named: Any) -> None:
                for name in ("rename", "replace", "unlink", "rmdir", "open", "mkdir"):
                    setattr(os, name, deadly(getattr(os, name)))
                setattr(staging, "exchange", deadly(exchange))  # noqa: B010  not a name that the module exports
                original(self, *args, **named)

            Staging.publish = counted  # type: ignore[method-assign]
            convert()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status == 0


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("has_old", [True, False])
def test_every_stop_of_publication_can_be_gone_on_from(
    case: Case, tmp_path: Path, exchange: bool, has_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(staging, "exchange", lambda *_names: False)
    out, tracker = tmp_path / "out", tmp_path / TRACKER
    mine, before = (
        Output(out, {TRACKER: b"new"}, overwrite=True),
        Output(out, {TRACKER: b"old"}, overwrite=True),
    )
    write_checkpoint(case.plan(2), case.files, mine)
    new = tree(out)
    seen = set()
    for at in range(200):
        write_checkpoint(case.plan(3), case.files, before)
        old = tree(out)
        if not has_old:
            shutil.rmtree(out)
        has_ended = _killed_in_publication(at, lambda: write_checkpoint(case.plan(2), case.files, mine))
        is_new = out.exists() and tree(out) == new
        assert is_new or not out.exists() or (has_old and tree(out) == old)
        assert is_new or tracker.read_text() == "old", "the tracker came before the checkpoint"
        seen.add((is_new, tracker.read_text()))
        if has_ended:
            break
        was_tracked = tracker.read_text() == "new"
        report = write_checkpoint(case.plan(2), case.files, replace(mine, resume=True))
        if is_new and not was_tracked:
            assert report.bytes_read == 0, "published, and written again"
        assert (tree(out), tracker.read_text()) == (new, "new")
    assert has_ended
    assert seen >= {(False, "old"), (True, "old"), (True, "new")}


def _published_but_not_tidied(case: Case, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_self: Staging) -> None:
        raise StorageError("here")

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "discard", stop)
        with pytest.raises(StorageError, match="here"):
            write_checkpoint(case.plan(2), case.files, Output(out, {TRACKER: b"new"}))
    assert (out / ".metadata").exists()


@pytest.mark.parametrize("change", ["shorter", "longer", "absent"])
def test_what_was_published_and_then_damaged_is_not_called_done(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Inode numbers are used again: the marker alone does not vouch for what lies there."""
    out = tmp_path / "out"
    write_checkpoint(case.plan(2), case.files, Output(tmp_path / "good"))
    _published_but_not_tidied(case, out, monkeypatch)
    file = out / "__1_0.distcp"
    if change == "absent":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size + (1 if change == "longer" else -1))
    with pytest.raises(UsageError, match="not empty"):
        write_checkpoint(case.plan(2), case.files, Output(out, {TRACKER: b"new"}, resume=True))
    write_checkpoint(case.plan(2), case.files, Output(out, {TRACKER: b"new"}, resume=True, overwrite=True))
    assert tree(out) == tree(tmp_path / "good")


def test_a_published_output_is_only_tidied(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _published_but_not_tidied(case, out, monkeypatch)
    (tmp_path / TRACKER).write_text("old")
    report = write_checkpoint(case.plan(2), case.files, Output(out, {TRACKER: b"new"}, resume=True))
    assert report.bytes_read == 0
    assert (tmp_path / TRACKER).read_text() == "new"
    assert {p.name for p in tmp_path.iterdir()} == {"source", "out", TRACKER}


def test_no_tracker_without_publication(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / TRACKER).write_text("old")

    def refuse(*_args: Any, **_named: Any) -> None:
        raise StorageError("the rename was refused")

    monkeypatch.setattr(Staging, "publish", refuse)
    with pytest.raises(StorageError, match="the rename was refused"):
        write_checkpoint(case.plan(2), case.files, Output(tmp_path / "out", {TRACKER: b"new"}))
    assert (tmp_path / TRACKER).read_text() == "old"
    assert not (tmp_path / "out").exists()
