"""Outcomes to exit codes, stdout and stderr kept apart, and a start that loads nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer

from ckpt_tools import __version__, errors
from ckpt_tools.cli import app as module
from ckpt_tools.cli.app import REMOVED, run
from ckpt_tools.cli.commands import MODULES
from tests.conftest import REPO, fixture_dir

LLAMA = "core019_llama_tp2_fully_reshardable"


def python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


RAISED = [
    (errors.UsageError("u"), 2, "error: u\n"),
    (errors.UnsupportedCheckpointError("s"), 3, "error: s\n"),
    (errors.CorruptCheckpointError("c"), 4, "error: c\n"),
    (errors.MappingError("m"), 5, "error: m\n"),
    (errors.VerificationError("v"), 6, "error: v\n"),
    (errors.StorageError("d"), 7, "error: d\n"),
    (errors.Terminated("t"), 143, "error: t\n"),
    (KeyboardInterrupt(), 130, "error: interrupted; nothing was published.\n"),
    (typer.Abort(), 130, "error: interrupted; nothing was published.\n"),
    (OSError(28, "No space left on device", "x"), 7, "error: [Errno 28] No space left on device: 'x'\n"),
    (typer.BadParameter("bad"), 2, "error: Invalid value: bad\n"),
]


@pytest.mark.parametrize(("error", "code", "message"), RAISED, ids=lambda value: type(value).__name__)
def test_exit_codes(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(module, "app", fail)
    assert run([]) == code
    assert tuple(capsys.readouterr()) == ("", message)


def test_defects_show_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "app", lambda **_: 1 // 0)
    assert run([]) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_codes_of_commands_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "app", lambda **_: 1)
    assert run([]) == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"ckpt_tools {__version__}"
    assert {"python", "torch", "numpy", "typer", "isal"} <= {line.split()[0] for line in lines}


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "Missing command"),
        (["inspectt"], "'inspectt'"),
        (["inspect"], "checkpoint"),
        (["inspect", "x", "--nope"], "--nope"),
        (["stats", "x", "--threads", "two"], "--threads"),
    ],
)
def test_usage_errors(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The wording is typer's, and differs between its versions."""
    assert run(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert part.lower() in captured.err.lower()
    assert "--help" in captured.err


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["env"], ["inspect", str(fixture_dir(LLAMA))], ["inspect", "--help"]]
)
def test_start_is_light(argv: list[str]) -> None:
    """No torch and no numpy, neither for help nor to inspect."""
    program = (
        f"import sys; from ckpt_tools.cli.app import run; print(run({argv!r}), *sys.modules, file=sys.stderr)"
    )
    code, *modules = python("-c", program).stderr.split()
    assert code == "0"
    assert not {"torch", "numpy", "fsspec", "orjson"} & set(modules)


def test_a_command_is_imported_alone() -> None:
    program = (
        "import sys; from ckpt_tools.cli.app import run; run(['env']); print(*sys.modules, file=sys.stderr)"
    )
    loaded = {name for name in python("-c", program).stderr.split() if name.startswith("ckpt_tools.cli.")}
    assert "ckpt_tools.cli.environment" in loaded
    assert not loaded & {f"ckpt_tools.cli.{module}" for module in MODULES.values() if module != "environment"}


def test_numpy_starts_no_threads() -> None:
    program = (
        "import os, sys; sys.argv[1:] = {!r}; from ckpt_tools.cli.app import main\ntry: main()\n"
        "finally: print(len(os.listdir('/proc/self/task')), 'numpy' in sys.modules, file=sys.stderr)"
    ).format(["print-tensor", str(fixture_dir(LLAMA)), "decoder.final_layernorm.weight", "--stats"])
    assert python("-c", program).stderr.split() == ["1", "True"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_locale_cannot_spell_is_escaped(encoding: str) -> None:
    found = python("-m", "ckpt_tools", "inspect", str(fixture_dir(LLAMA)), PYTHONIOENCODING=encoding)
    assert (found.returncode, found.stderr) == (0, "")
    assert r"\u2500\u2500" in found.stdout


def test_module_and_broken_pipe() -> None:
    assert python("-m", "ckpt_tools", "--version").stdout.startswith(f"ckpt_tools {__version__}\n")
    command = f"{sys.executable} -m ckpt_tools inspect --json {fixture_dir(LLAMA)} | head -c 10"
    found = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=REPO, capture_output=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, b"")


def test_an_exit_that_no_closed_pipe_explains_is_not_success(monkeypatch):
    def leave(**_words):
        raise SystemExit(3)

    monkeypatch.setattr("ckpt_tools.cli.app.app", leave)
    with pytest.raises(SystemExit) as stop:
        run(["verify"])
    assert stop.value.code == 3


@pytest.mark.parametrize("option", REMOVED)
def test_an_option_that_went_says_why(option, capsys):
    assert run(["convert", "a", "b", option]) == 2
    assert f"error: {option} {REMOVED[option]}" in capsys.readouterr().err
