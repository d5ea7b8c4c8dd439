"""`watch`: a job writes iterations, slowly; each is done once, and what is killed, damaged or held is told."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.cli import app
from ckpt_tools.cli.commands import Commands
from ckpt_tools.cli.watch import _ITS_OWN, _VERBS
from ckpt_tools.commands import watch, watch_run
from ckpt_tools.commands.watch import Watcher
from ckpt_tools.commands.watch_child import Ended, Hand
from ckpt_tools.commands.watch_events import Action, Told, WatchOptions
from ckpt_tools.commands.watch_state import FOLDER, STATE, WatchFolder
from ckpt_tools.errors import Interrupted, Terminated, UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.detect import BRIDGE_TRACKER, TRACKER
from tests.conftest import DATA, REPO
from tests.formats.test_run_layouts import first_layout

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
FIRST = LLAMA / "iter_0000002"
CONVERT = Action("convert", ("--gpus", "2"), "root", ("fsdp_dtensor",), False)
WORDS = ["--then", "convert --gpus 2"]


def write(root: Path, number: int, tracker: bool = True) -> Path:
    """An iteration, as a job leaves it."""
    folder = shutil.copytree(FIRST, root / f"iter_{number:07d}")
    if tracker:
        (root / TRACKER).write_text(str(number))
    return folder


def writing(root: Path, number: int) -> Iterator[str]:
    """An iteration as Megatron writes it, stopped at every step: files in halves, `.metadata`, the tracker last."""
    folder = root / f"iter_{number:07d}"
    folder.mkdir(parents=True)
    yield "an empty folder"
    files = sorted(FIRST.iterdir(), key=lambda f: (f.name == "metadata.json", f.name == ".metadata", f.name))
    for file in files:
        data = file.read_bytes()
        (folder / file.name).write_bytes(data[: len(data) // 2])
        yield f"half of {file.name}"
        (folder / file.name).write_bytes(data)
        yield file.name
    for text in ("", str(number)[:-1]):
        (root / TRACKER).write_text(text)
        yield f"a tracker that reads {text!r}"


def tree(root: Path) -> dict[str, bytes]:
    """Content of all files but those that a watcher keeps."""
    found = (p for p in sorted(root.rglob("*")) if p.is_file())
    return {str(p.relative_to(root)): p.read_bytes() for p in found if FOLDER not in p.parts}


class Here(Hand):
    """Commands run in this process. `fails` are the ends of those that do not."""

    def __init__(self, *fails: Ended) -> None:
        super().__init__(lambda line: None)
        self.ran: list[list[str]] = []
        self.fails = list(fails)

    def check(self) -> None: ...

    def run(self, words: Sequence[str]) -> Ended:
        self.ran.append(list(words))
        if self.fails:
            return self.fails.pop(0)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = app.run(list(words))
        report = json.loads(out.getvalue()) if out.getvalue() else None
        return Ended(code, report, err.getvalue().removeprefix("error: "), 0.0)


class Watched:
    """A run and a watcher of it that looks when it is told to."""

    def __init__(self, tmp_path: Path, action: Action = CONVERT, **options: float) -> None:
        self.run, self.out = tmp_path / "run", tmp_path / "out"
        self.run.mkdir(exist_ok=True)
        self.action, self.options = action, WatchOptions(**options)  # type: ignore[arg-type]
        self.told: list[Told] = []
        self.begin()

    def begin(self) -> None:
        """As another process would."""
        folder = WatchFolder(self.out, str(self.run))
        self.watcher = Watcher(
            str(self.run), str(self.out), self.action, self.options, folder, self.told.append
        )

    def look(self, *fails: Ended) -> tuple[int, list[str]]:
        """One pass: its exit code, and what became of which iterations."""
        self.hand = Here(*fails)
        self.told.clear()
        code = self.watcher.one_pass(self.hand)
        return code, [f"{told.event} {told.iteration}" for told in self.told]

    def made(self) -> list[str]:
        return sorted(path.name for path in self.out.iterdir() if path.name not in (FOLDER, TRACKER))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass."""
    past = [0.0]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + past[0])

    def wait(seconds: float) -> None:
        past[0] += seconds

    return wait


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one command makes of a run with three iterations."""
    folder = tmp_path_factory.mktemp("plain")
    for number in (2, 10, 100):
        write(folder / "run", number)
    words = ["convert", str(folder / "run"), str(folder / "out"), "--gpus", "2", "--iteration", "all", "-q"]
    assert app.run(words) == 0
    return tree(folder / "out")


def test_nothing_half_written_is_touched(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    write(watched.run, 2)
    assert watched.look() == (0, ["done 2"])
    for step in writing(watched.run, 10):
        code, told = watched.look()
        assert (code, watched.hand.ran) == (0, []), step
        assert told in ([], ["waiting 10"]), step
    (watched.run / TRACKER).write_text("10")
    assert watched.look() == (0, ["done 10"])
    assert watched.look() == (0, [])
    assert watched.made() == ["iter_0000002", "iter_0000010"]
    assert (watched.out / TRACKER).read_text() == "10"


def test_without_a_tracker_files_must_rest(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """A save that its job is still at looks whole when `.metadata` is there and `metadata.json` is not yet."""
    watched = Watched(tmp_path, settle=100)
    for step in writing(watched.run, 10):
        if step.startswith("a tracker"):
            break
        clock(60)
        assert watched.look()[0] == 0
        assert watched.hand.ran == [], step
    (watched.run / TRACKER).unlink()
    clock(60)
    assert watched.look()[0] == 0
    assert watched.hand.ran == []
    clock(60)
    watched.begin()  # what was seen is remembered by a pass that another process makes
    assert watched.look() == (0, ["done 10"])


@pytest.mark.parametrize("tracker", [TRACKER, BRIDGE_TRACKER])
def test_a_tracker_that_cannot_be_read_is_waited_for(tracker: str, tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    write(watched.run, 2, tracker=False)
    (watched.run / tracker).write_bytes(b"\0")
    assert watched.look() == (0, ["waiting 2"])
    assert watched.look() == (0, [])


@pytest.mark.parametrize("tracker", [TRACKER, BRIDGE_TRACKER])
def test_a_damaged_tracker_is_an_error_by_name(
    tracker: str, tmp_path: Path, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """When nobody is writing it any more; with --once in the exit code, without it again and again."""
    watched = Watched(tmp_path)
    write(watched.run, 2, tracker=False)
    (watched.run / tracker).write_bytes(b"\0")
    words = ["watch", str(watched.run), str(watched.out), "--then", "copy", "--once"]
    assert app.run(words) == 0
    assert "is not finished" in capsys.readouterr().err
    clock(121)
    assert app.run(words) == 4
    said = capsys.readouterr().err
    assert tracker in said
    assert "Nothing tells what is finished" in said
    assert not list(watched.out.glob("iter_*"))
    (watched.run / tracker).unlink()
    (watched.run / TRACKER).write_text("2")
    assert app.run(words) == 0
    assert (watched.out / "iter_0000002").is_dir()


def test_a_tracker_that_names_no_folder_ends_a_pass(
    tmp_path: Path, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be waited for for ever; what is older than what it names is done before."""
    watched = Watched(tmp_path)
    for number in (2, 100):
        write(watched.run, number)
    (watched.run / TRACKER).write_text("7")
    words = ["watch", str(watched.run), str(watched.out), "--then", "copy", "--once"]
    assert app.run(words) == 0
    assert "iter_0000100" in capsys.readouterr().err
    clock(121)
    assert app.run(words) == 3
    assert "iteration iter_0000007 is meant, but there is no such folder" in capsys.readouterr().err
    assert watched.made() == ["iter_0000002"]
    (watched.run / TRACKER).write_text("100")
    assert app.run(words) == 0
    assert watched.made() == ["iter_0000002", "iter_0000100"]


def test_a_damaged_tracker_does_not_end_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, settle=0)
    write(watched.run, 2, tracker=False)
    (watched.run / TRACKER).write_text("two")
    notes: list[str] = []

    def mend(_self: Hand, _seconds: float) -> None:
        if (watched.run / TRACKER).read_text() == "2":
            raise Interrupted("enough")
        (watched.run / TRACKER).write_text("2")

    monkeypatch.setattr(Hand, "sleep", mend)
    with pytest.raises(Interrupted):
        watch.watch(
            str(watched.run), str(watched.out), CONVERT, watched.options, watched.told.append, notes.append
        )
    assert [told.event for told in watched.told] == ["done"]
    assert "holds 'two', not an iteration" in notes[0]
    assert "The next try is in" in notes[0]


def test_a_pass_with_nothing_new_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = Watched(tmp_path)
    words = ["watch", str(watched.run), str(watched.out), "--then", "copy", "--once"]
    for _ in range(2):  # nothing at all, then nothing new
        assert app.run(words) == 0
        assert capsys.readouterr().err == f"note: nothing new in {watched.run}\n"
        if not list(watched.run.iterdir()):
            write(watched.run, 2)
            assert app.run(words) == 0
            shown = capsys.readouterr()
            assert "done in" in shown.out
            assert "nothing new" not in shown.err
    assert app.run([*words, "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_bytes_are_those_of_one_command(tmp_path: Path, plain: dict[str, bytes]) -> None:
    watched = Watched(tmp_path)
    for number in (2, 10, 100):
        write(watched.run, number)
    assert watched.look() == (0, ["done 2", "done 10", "done 100"])
    assert tree(watched.out) == plain


def test_an_older_iteration_leaves_the_tracker_alone(
    tmp_path: Path, plain: dict[str, bytes], clock: Callable[[float], None]
) -> None:
    watched = Watched(tmp_path)
    for number in (2, 10, 100):
        write(watched.run, number)
    assert watched.look(Ended(7, None, "no disk", 0.1)) == (7, ["failed 2", "done 10", "done 100"])
    assert watched.look() == (7, []), "not before a pause"
    clock(60)
    assert watched.look() == (0, ["done 2"])
    assert tree(watched.out) == plain


def test_tries_are_counted_and_end(tmp_path: Path, clock: Callable[[float], None]) -> None:
    watched = Watched(tmp_path, retries=2, every=10)
    folder = write(watched.run, 2)
    broken = Ended(7, None, "no disk", 0.1)
    waited = []
    for event in ("failed 2", "failed 2", "given_up 2"):
        seconds = 0
        while (found := watched.look(broken)) == (7, []):
            clock(5)
            seconds += 5
            watched.begin()  # a pass of cron's
        assert found == (7, [event])
        waited.append(seconds)
    assert waited[1] <= 10 < waited[2] <= 20
    clock(1e6)
    assert watched.look() == (7, [])
    os.utime(folder / ".metadata")  # it was written again
    assert watched.look() == (0, ["done 2"])


@pytest.mark.parametrize("tries", [0, 9])
def test_what_would_fail_again_is_given_up_at_once(
    tries: int, tmp_path: Path, clock: Callable[[float], None]
) -> None:
    watched = Watched(tmp_path, retries=tries)
    for number in (2, 10, 100):
        folder = write(watched.run, number)
        if number == 10:
            os.truncate(folder / "__0_0.distcp", 1000)
    (watched.run / "iter_0000002" / ".metadata").unlink()
    assert watched.look() == (4, ["given_up 2", "given_up 10", "done 100"])
    assert [told.exit_code for told in watched.told] == [3, 4, 0]
    assert "interrupted" in watched.told[0].why
    assert "__0_0.distcp" in watched.told[1].why
    clock(1e6)
    assert watched.look() == (4, []), "told once, and not forgotten"
    shutil.copytree(FIRST, folder.with_name("iter_0000010"), dirs_exist_ok=True)
    shutil.rmtree(watched.run / "iter_0000002")
    assert watched.look() == (0, ["done 10"])
    assert (watched.out / TRACKER).read_text() == "100"


def test_single_passes_say_why_they_end_as_they_do(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """What an earlier pass has given up, waits to try again or has found not to be valid: in a line, each time."""
    watched = Watched(tmp_path, once=True, every=10)
    folder = write(watched.run, 2)
    assert watched.look(Ended(6, None, "not proven:\n  - a", 0.1)) == (6, ["given_up 2"])
    for _ in range(2):
        watched.begin()
        assert watched.look() == (6, ["given_up 2"])
        assert (watched.told[0].exit_code, watched.told[0].why) == (6, "not proven:")
        assert watched.hand.ran == []
    os.utime(folder / ".metadata")  # it was written again
    assert watched.look(Ended(7, None, "no disk", 0.1)) == (7, ["failed 2"])
    watched.begin()
    assert watched.look() == (7, ["failed 2"])
    assert (watched.told[0].tries, watched.hand.ran) == (1, [])
    clock(10)
    assert watched.look() == (0, ["done 2"])
    assert watched.look() == (0, [])


def test_a_single_pass_names_what_is_not_valid(tmp_path: Path) -> None:
    watched = Watched(tmp_path, Action("verify", ("--content",), "reports", (), False), once=True)
    with open(write(watched.run, 2) / "__0_0.distcp", "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 64)
    for ran in (1, 0):
        assert watched.look() == (1, ["done 2"])
        assert (watched.told[0].exit_code, len(watched.hand.ran)) == (1, ran)
        watched.begin()


def test_what_is_done_stays_done(tmp_path: Path) -> None:
    """Whoever keeps the newest outputs only does not get the others again."""
    watched = Watched(tmp_path)
    for number in (2, 10):
        write(watched.run, number)
    assert watched.look() == (0, ["done 2", "done 10"])
    shutil.rmtree(watched.out / "iter_0000002")
    watched.begin()
    assert watched.look() == (0, [])
    shutil.rmtree(watched.out)  # and with it what it remembers
    watched.begin()
    assert watched.look() == (0, ["done 2", "done 10"])


def test_what_was_written_again_is_told_of_and_done_again_if_its_output_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that was set back writes iterations that were converted already, with other values."""
    watched = Watched(tmp_path)
    for number in (2, 10):
        folder = write(watched.run, number)
    assert watched.look() == (0, ["done 2", "done 10"])
    os.utime(folder / ".metadata")
    before = tree(watched.out)
    assert watched.look() == (0, ["stale 10"])
    watched.begin()
    assert watched.look() == (0, []), "told once"
    assert tree(watched.out) == before, "nothing is replaced unasked"
    shutil.rmtree(watched.out / "iter_0000010")
    assert watched.look() == (0, ["done 10"])
    assert tree(watched.out) == before
    os.utime(folder / ".metadata")
    assert app.run(["watch", str(watched.run), str(watched.out), *WORDS, "--once", "-q"]) == 0
    assert "iter_0000010: it was written again since; remove" in capsys.readouterr().err


def test_what_another_command_has_made_counts(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    write(watched.run, 2)
    assert app.run(["convert", str(watched.run), str(watched.out), "-q"]) == 0
    before = tree(watched.out)
    assert watched.look() == (0, [])
    assert tree(watched.out) == before
    shutil.rmtree(watched.out / "iter_0000002")
    watched.begin()
    assert watched.look() == (0, []), "it was seen to be done"


def test_another_run_for_the_same_output_is_refused(tmp_path: Path) -> None:
    """Its iterations have the numbers of those that are done."""
    watched, other = Watched(tmp_path), tmp_path / "other"
    write(watched.run, 2)
    watched.look()
    write(other, 2)
    folder = WatchFolder(watched.out, str(other))
    with pytest.raises(UsageError, match=r"was made of .*run; now it is .*other. Give another output"):
        folder.read(CONVERT.words)
    folder.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["done"]["2"].update(exit_code="x"),
        lambda state: state["done"]["2"].pop("mark"),
        lambda state: state.update(run=None),
        lambda state: state.update(command="convert"),
        lambda state: state["failed"].update(
            {"3": dict.fromkeys(("looks", "tries", "exit_code", "error", "next_try"), "x")}
        ),
    ],
)
def test_a_memory_of_wrong_types_is_refused(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    write(watched.run, 2)
    watched.look()
    file = watched.out / FOLDER / STATE
    state = json.loads(file.read_text())
    change(state)
    file.write_text(json.dumps(state))
    with pytest.raises(UsageError, match=r"is not what watch keeps there|was made "):
        watched.begin()


def test_another_command_for_the_same_output_is_refused(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    write(watched.run, 2)
    watched.look()
    watched.action = Action("convert", ("--gpus", "4"), "root", ("fsdp_dtensor",), False)
    with pytest.raises(UsageError, match=r"made by --then 'convert --gpus 2'; now it is 'convert --gpus 4'"):
        watched.begin()
    (watched.out / FOLDER / STATE).write_text('{"schema_version": 1}')
    with pytest.raises(UsageError, match=r"is not what watch keeps"):
        watched.begin()


def test_reports_of_every_iteration(tmp_path: Path) -> None:
    action = Action("verify", ("--content",), "reports", (), False)
    watched = Watched(tmp_path, action)
    for number in (2, 10):
        folder = write(watched.run, number)
    with open(folder / "__0_0.distcp", "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 64)
    code, told = watched.look()
    assert (code, told) == (1, ["done 2", "done 10"]), "a verdict is what was asked for"
    reports = {name: json.loads((watched.out / name).read_text()) for name in watched.made()}
    assert {name: report["valid"] for name, report in reports.items()} == {
        "iter_0000002.json": True, "iter_0000010.json": False,
    }  # fmt: skip
    assert watched.look() == (1, [])


def test_models_of_every_iteration(tmp_path: Path) -> None:
    watched = Watched(tmp_path, Action("export-hf", (), "folders", ("safetensors",), False))
    for number in (2, 10):
        write(watched.run, number)
    assert watched.look() == (0, ["done 2", "done 10"])
    assert watched.made() == ["iter_0000002", "iter_0000010"]
    assert not (watched.out / TRACKER).exists()
    assert (watched.out / "iter_0000010" / "config.json").exists()


def test_a_run_of_verl(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """Its steps lie in folders of other names, with the checkpoint further inside; outputs are Megatron's."""
    watched = Watched(tmp_path)
    first_layout(watched.run, 2, 10)
    assert watched.look(Ended(7, None, "no disk", 0.1)) == (7, ["failed 2", "done 10"])
    clock(60)
    assert watched.look() == (0, ["done 2"])
    assert watched.made() == ["iter_0000002", "iter_0000010"]
    assert (watched.out / TRACKER).read_text() == "10"


def test_what_cannot_be_watched(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    watch_run.check_run(str(tmp_path / "empty"), str(tmp_path / "out"))  # its job has just begun
    watch_run.check_run(str(LLAMA), str(tmp_path / "out"))
    with pytest.raises(UsageError, match="is one checkpoint, not a run's root"):
        watch_run.check_run(str(FIRST), str(tmp_path / "out"))
    with pytest.raises(UsageError, match="overlap"):
        watch_run.check_run(str(LLAMA), str(LLAMA / "out"))
    with pytest.raises(UnsupportedCheckpointError, match="does not exist"):
        watch_run.check_run(str(tmp_path / "none"), str(tmp_path / "out"))
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "iter_0000010_0_local.pt").touch()
    with pytest.raises(UnsupportedCheckpointError, match="local checkpoint of NVIDIA Resiliency"):
        watch_run.check_run(str(tmp_path / "local"), str(tmp_path / "out"))


WRONG = {
    "": "say what is to be done",
    "convert '": "No closing quotation",
    "average --ema 0.9": "can be convert, export-hf, copy, verify",
    "convert --gpu": "No such option",
    "convert --gpus x": "not a valid int",
    "--every nan": "not a number of seconds",
    "--every inf": "not in the range",
    "convert --to torch_dist --dp-shard 4": "no meaning for a conversion to torch_dist",
    "convert --max-memory lots": "is not a size",
    "convert --gpus 3 --tp 2": "tp",
    "convert --resume": "watch sets --resume itself",
    "copy --iteration 3": "watch sets --iteration itself",
    "verify --write-manifest X": "watch sets --write-manifest itself",
    "export-hf X": "unexpected extra argument",
}


@pytest.mark.parametrize("then", WRONG)
def test_a_wrong_command_is_told_before_anything_is_waited_for(
    then: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    words = [*then.split(), "--then", "convert"] if then.startswith("-") else ["--then", then]
    assert app.run(["watch", str(tmp_path / "run"), str(tmp_path / "out"), *words]) == 2
    assert WRONG[then] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_options_that_watch_sets_exist() -> None:
    assert {p.name for verb in _VERBS for p in Commands()[verb].params} >= _ITS_OWN


def test_outputs_in_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["watch", str(LLAMA), "memory://a/b", *WORDS]) == 2
    assert "give --state" in capsys.readouterr().err
    assert app.run(["watch", str(LLAMA), "memory://a/b", "--then", "verify", "--state", str(tmp_path)]) == 2
    assert "written to a folder" in capsys.readouterr().err


def start(*words: object, **environ: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [environ.pop("FIRST_PATH", ""), str(REPO)]))
    return subprocess.Popen(
        [sys.executable, "-m", "ckpt_tools", "watch", *map(str, words), *WORDS],
        env={**os.environ, "PYTHONPATH": path, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out, err


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_beside_a_job_until_it_is_terminated(tmp_path: Path, plain: dict[str, bytes]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    watcher = start(run, out, "--every", "0.1", "--json")

    def job() -> None:
        for iteration in (2, 10, 100):
            for _ in writing(run, iteration):
                time.sleep(0.02)
            (run / TRACKER).write_text(str(iteration))

    thread = threading.Thread(target=job)
    thread.start()
    until(lambda: (out / "iter_0000100").exists() and (out / TRACKER).read_text() == "100")
    thread.join()
    until(lambda: '"100": {' in (out / FOLDER / STATE).read_text())
    watcher.terminate()
    stdout, stderr = end(watcher, 143)
    assert "note: terminated; started again, it goes on from here" in stderr
    assert "error" not in stderr, "it was ended on purpose"
    told = [json.loads(line) for line in stdout.splitlines()]
    assert [t["iteration"] for t in told if t["event"] == "done"] == [2, 10, 100]
    assert {t["event"] for t in told} <= {"done", "waiting"}
    assert tree(out) == plain


HOLD = """
import os, time
_real = os.rename
def rename(*words, **named):
    if os.environ["HOLD"] == "after":
        _real(*words, **named)
    with open(os.environ["HELD"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
if "HOLD" in os.environ:
    os.rename = rename
"""


@pytest.fixture
def held(tmp_path: Path) -> Callable[[Path, Path, str], tuple[subprocess.Popen[str], int]]:
    """A watcher whose command stands still, before its output has its name or after; and the command's process."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HOLD)

    def begin(run: Path, out: Path, where: str) -> tuple[subprocess.Popen[str], int]:
        mark = tmp_path / "held"
        watcher = start(run, out, FIRST_PATH=str(tmp_path / "site"), HOLD=where, HELD=str(mark))
        until(lambda: mark.exists() and mark.read_text() != "")
        return watcher, int(mark.read_text())

    return begin


@pytest.mark.parametrize("where", ["before", "after"])
def test_killed_in_the_middle_it_gets_there(
    where: str,
    held: Callable[..., tuple[subprocess.Popen[str], int]],
    tmp_path: Path,
    plain: dict[str, bytes],
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, 2)
    watcher, command = held(run, out, where)
    watcher.kill()
    end(watcher, -9)
    _, err = end(start(run, out, "--once"), 2)  # its command still has the output
    assert f"is watched by another process (process {watcher.pid} on " in err
    os.kill(command, signal.SIGKILL)
    assert (out / "iter_0000002").exists() == (where == "after")
    assert not (out / TRACKER).exists()
    end(start(run, out, "--once"), 0)
    assert (out / TRACKER).read_text() == "2"
    assert tree(out / "iter_0000002") == {
        name.partition("/")[2]: data for name, data in plain.items() if name.startswith("iter_0000002/")
    }
    assert sorted(p.name for p in out.iterdir()) == [FOLDER, "iter_0000002", TRACKER]


def test_a_run_that_is_away_is_waited_for(tmp_path: Path) -> None:
    """As a file system that is mounted again; the watcher was started by `srun` with other tasks."""
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, 2)
    watcher = start(run, out, "--every", "0.1", RANK="1", WORLD_SIZE="4")
    until((out / TRACKER).exists)
    run.rename(tmp_path / "away")
    assert watcher.stderr is not None
    assert "does not exist" in watcher.stderr.readline()
    write(tmp_path / "away", 10)
    (tmp_path / "away").rename(run)
    until((out / "iter_0000010").exists)
    watcher.terminate()
    end(watcher, 143)


def test_a_second_watcher_waits_and_takes_over(
    held: Callable[..., tuple[subprocess.Popen[str], int]], tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, 2)
    first, command = held(run, out, "before")
    second = start(run, out, "--every", "0.1")
    assert second.stderr is not None
    assert "waiting for its end" in second.stderr.readline()
    assert not (out / "iter_0000002").exists()
    first.kill()
    os.kill(command, signal.SIGKILL)
    end(first, -9)
    until((out / TRACKER).exists)
    second.send_signal(signal.SIGINT)
    end(second, 130)


def test_a_command_that_is_killed_is_told_of_and_one_that_runs_ends_with_its_watcher(
    held: Callable[..., tuple[subprocess.Popen[str], int]], tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, 2)
    watcher, command = held(run, out, "before")
    os.kill(command, signal.SIGKILL)
    assert watcher.stderr is not None
    assert "was ended by SIGKILL, perhaps as memory ran out" in watcher.stderr.readline()
    watcher.terminate()
    end(watcher, 143)
    hand = Hand(lambda line: None)
    with hand, pytest.raises(Terminated):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        hand.run(["watch", str(tmp_path / "run"), str(tmp_path / "other"), *WORDS, "--retries", "0"])
