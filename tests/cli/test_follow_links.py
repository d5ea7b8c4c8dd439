"""`--follow-links`: every command that reads a checkpoint has it, and refuses without it what leads out."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from tests.cli.options import OPTIONS
from tests.conftest import DATA, REPO

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
ITERATION = "iter_0000002"
COMMANDS = [
    "inspect IN",
    "verify IN --content -q",
    "convert IN OUT -q",
    "convert-torch-dist-to-fsdp-dtensor IN OUT -q",
    "export-hf IN OUT -q",
    "diff IN IN -q",
    "plan IN",
    "preflight IN",
    "slice IN OUT --layers 0:1 -q",
    "print-tensor IN decoder.final_layernorm.weight",
    "build-param-group-map IN",
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint whose files all are links to another folder."""
    shutil.copytree(LLAMA, tmp_path / "real")
    folder = tmp_path / "run" / ITERATION
    folder.mkdir(parents=True)
    for path in (tmp_path / "real" / ITERATION).iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("words", COMMANDS)
def test_only_with_the_option(words, source, capsys):
    argv = [{"IN": str(source), "OUT": str(source.parent / "out")}.get(word, word) for word in words.split()]
    code = run(argv)
    out, err = capsys.readouterr()
    assert (code, "--follow-links" in err + out) == (4, True) or (words.startswith("verify") and code == 1)
    assert run([*argv, "--follow-links"]) in (0, 1)  # 1: not ready, not valid
    assert "--follow-links" not in "".join(capsys.readouterr())
    assert run(argv) == code  # what one command was allowed, the next is not


def test_every_command_that_reads_has_it():
    assert not {name for name, options in OPTIONS.items() if "--follow-links" not in options}


def test_an_iteration_that_is_a_link_to_elsewhere(tmp_path, capsys):
    shutil.copytree(LLAMA, tmp_path / "real")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ITERATION).symlink_to(tmp_path / "real" / ITERATION)
    assert run(["inspect", str(tmp_path / "run")]) == 4
    assert "--follow-links" in capsys.readouterr().err
    assert run(["inspect", str(tmp_path / "run"), "--follow-links"]) == 0
    assert run(["inspect", str(tmp_path / "run" / ITERATION)]) == 0  # the user named it


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "latest_checkpointed_iteration.txt"])
def test_a_fifo_in_a_checkpoint_keeps_nobody_waiting(tmp_path, name):
    shutil.copytree(LLAMA, tmp_path / "run")
    path = tmp_path / "run" / name if name.startswith("latest") else tmp_path / "run" / ITERATION / name
    path.unlink()
    os.mkfifo(path)
    found = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "inspect", str(tmp_path / "run")],
        cwd=REPO, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.returncode == 4
    assert "is a FIFO, not a file" in found.stderr
