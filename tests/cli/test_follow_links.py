"""What leads out of a checkpoint, and names that a stranger gave: refused, or followed and shown without harm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from tests.cli.options import OPTIONS
from tests.cli.test_sinks import assert_harmless
from tests.conftest import DATA, REPO, fixture_dir

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


HOSTILE = sorted(path.name for path in (DATA / "hostile").glob("*.metadata"))
RUN_CONFIGS = {
    "aliases": b"model: &a [1]\n" + b"".join(b"k%d: &b%d [*a, *a]\n" % (i, i) for i in range(3)) + b"x: [*a",
    "bomb": b"a0: &a0 [1]\n"
    + b"".join(b"a%d: &a%d [%b]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 20)),
    "cycle": b"model: &a {b: *a}\n",
    "deep": b"[" * 400,
    "long": b"a: 1\n" * 300_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_metadata(name, tmp_path, capsys):
    shutil.copy(DATA / "hostile" / name, tmp_path / ".metadata")
    assert run(["inspect", str(tmp_path)]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "--unknown-classes" not in err, "no placeholder can stand in metadata"
    assert_harmless(err)


@pytest.mark.parametrize("what", RUN_CONFIGS)
def test_run_config(what, tmp_path, capsys):
    run_folder = tmp_path / "run"
    shutil.copytree(fixture_dir("core019_llama_tp2_native_fsdp_dtensor"), run_folder)
    (run_folder / "iter_0000002" / "run_config.yaml").write_bytes(RUN_CONFIGS[what])
    assert run(["inspect", str(run_folder)]) == 4
    assert "run_config.yaml: not readable YAML" in capsys.readouterr().err


def test_a_metadata_file_of_a_terabyte(tmp_path, capsys):
    with open(tmp_path / ".metadata", "wb") as file:
        file.truncate(1 << 40)
    assert run(["inspect", str(tmp_path)]) == 4
    assert "more is not read into memory" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["latest_checkpointed_iteration.txt", "iter_0000002/metadata.json"])
def test_small_files_of_a_terabyte(name, tmp_path, capsys):
    shutil.copytree(DATA / "core019_llama_tp2_fully_reshardable", tmp_path / "run")
    with open(tmp_path / "run" / name, "wb") as file:
        file.truncate(1 << 40)
    assert run(["inspect", str(tmp_path / "run")]) == 4
    assert "more is not read into memory" in capsys.readouterr().err
