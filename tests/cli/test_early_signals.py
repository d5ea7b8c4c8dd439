"""Ctrl-C and SIGTERM while the program is still importing: the signal's exit code, one line, and nothing made."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DATA, REPO

RUN = DATA / "core019_llama_tp2_fully_reshardable"
# Looked for when a module is first imported; the signal comes just then.
PROGRAM = """
import os, runpy, signal, sys
module, number, heard = sys.argv[1], int(sys.argv[2]), sys.argv[3]
del sys.argv[1:4]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), number)
            assert heard == "ignored", "too late"

if heard == "ignored":
    signal.signal(number, signal.SIG_IGN)
sys.meta_path.insert(0, Finder())
runpy.run_module("ckpt_tools", run_name="__main__", alter_sys=True)
"""
MODULES = (
    "typer", "ckpt_tools.cli", "ckpt_tools.cli.app", "ckpt_tools.errors", "ckpt_tools.cli.commands",
    "ckpt_tools.cli.verbs.convert", "ckpt_tools.commands.convert.to_dtensors", "numpy",
    "ckpt_tools.execute.output.local_output",
)  # fmt: skip


def start(module: str, number: int, heard: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [module, str(int(number)), heard, "convert", str(RUN), str(folder / "out")]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("number", "code", "told"), [
    (signal.SIGINT, 130, "interrupted; nothing was published."), (signal.SIGTERM, 143, "terminated."),
])  # fmt: skip
def test_a_signal_while_modules_are_imported(
    module: str, number: int, code: int, told: str, tmp_path: Path
) -> None:
    done = start(module, number, "heard", tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (code, f"error: {told}\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_so(number: int, tmp_path: Path) -> None:
    """As in what a shell starts in the background, or `nohup`."""
    done = start("typer", number, "ignored", tmp_path)
    assert done.returncode == 0 and done.stderr == "" and (tmp_path / "out").is_dir()


def test_the_installed_program_begins_there() -> None:
    text = (REPO / "pyproject.toml").read_text()
    assert text.count('= "ckpt_tools.__main__:main"') == 2
