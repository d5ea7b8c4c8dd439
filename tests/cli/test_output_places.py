"""Outputs that cannot be taken, and odd spellings of those that can: refused before the work, nothing left behind."""

import os
from pathlib import Path
from shutil import copytree

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.execute.output.local_output import LocalOutput
from tests.conftest import DATA

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
ITERATION = "iter_0000002"


def convert(*words: object) -> int:
    return run(["convert", *map(str, words), "--quiet"])


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("source", [LLAMA, LLAMA / ITERATION], ids=["root", "iteration"])
@pytest.mark.parametrize("output", ["file", "file/below", "file/further/below", "dangling", "full"])
def test_what_stands_in_the_way_is_refused_and_left_alone(tmp_path, capsys, source, output):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "dangling").symlink_to("nowhere")
    for folder in ("full", f"full/{ITERATION}"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "precious").write_text("precious")
    before = tree(tmp_path)
    assert convert(source, tmp_path / output) == 2
    assert "choose another output" in capsys.readouterr().err
    assert tree(tmp_path) == before


@pytest.mark.parametrize("output", ["bare", ITERATION, "root"])
def test_a_folder_that_no_job_finds_is_said_to_be_one(tmp_path, capsys, output):
    copytree(LLAMA / ITERATION, tmp_path / "source")
    source = tmp_path / "source" if output == "bare" else LLAMA if output == "root" else LLAMA / ITERATION
    assert run(["convert", str(source), str(tmp_path / output)]) == 0
    assert ("no job finds this folder" in capsys.readouterr().out) == (output == "bare")


def test_a_mount_point_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "is_mount", lambda path: path.parent == tmp_path)
    (tmp_path / ITERATION).mkdir()
    assert convert(LLAMA / ITERATION, tmp_path / ITERATION) == 2
    assert "mount point" in capsys.readouterr().err
    assert tree(tmp_path) == [ITERATION]
    (tmp_path / "run").mkdir()
    assert convert(LLAMA, tmp_path / "run") == 0  # the iteration lies inside it


@pytest.mark.parametrize("output", [".", "../here", "../here/", "../here/.", "deeper/.."])
def test_spellings_of_the_current_directory(tmp_path, monkeypatch, output):
    here = tmp_path / "here"
    (here / "deeper").mkdir(parents=True)
    monkeypatch.chdir(here)
    assert convert(LLAMA, output) == 0
    assert sorted(os.listdir(here)) == ["deeper", ITERATION, "latest_checkpointed_iteration.txt"]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert convert(LLAMA / ITERATION, ".") == 0
    assert sorted(os.listdir(tmp_path / "empty")) == [ITERATION, "latest_checkpointed_iteration.txt"]
    assert sorted(os.listdir(tmp_path)) == ["empty", "here"]


def test_files_that_appear_in_the_output_meanwhile_are_kept(tmp_path, monkeypatch, capsys):
    create_files = LocalOutput.create_files

    def and_then_another_program(output: LocalOutput) -> None:
        create_files(output)
        output.final.mkdir()
        (output.final / "precious").write_text("precious")

    monkeypatch.setattr(LocalOutput, "create_files", and_then_another_program)
    assert convert(LLAMA / ITERATION, tmp_path / ITERATION) == 7
    assert f"{tmp_path}/{ITERATION}" in capsys.readouterr().err
    assert os.listdir(tmp_path / ITERATION) == ["precious"]
    (tmp_path / ITERATION / "precious").unlink()
    monkeypatch.undo()
    assert convert(LLAMA / ITERATION, tmp_path / ITERATION, "--resume") == 0
    assert sorted(os.listdir(tmp_path)) == [ITERATION]


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "CKPT", "OUT", "--quiet", "--report"],
        ["stats", "CKPT", "--html"],
        ["stats", "CKPT", "--svg"],
        ["inspect", "CKPT", "--html"],
        ["plan", "CKPT", "--html"],
        ["verify", "CKPT", "--junit"],
        ["print-torch-dcp-in-json", f"CKPT/{ITERATION}", "--no-write", "-o"],
        ["build-param-group-map", "CKPT", "-o"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_report_never_replaces_a_file_of_a_checkpoint_or_any_other(tmp_path, words, capsys):
    root = copytree(LLAMA, tmp_path / "run")
    (tmp_path / "script.sh").write_text("#!/bin/sh")
    (tmp_path / "old.json").write_text("{}")
    files = [
        root / ITERATION / ".metadata",
        root / ITERATION / "metadata.json",
        root / ITERATION / "new.json",
    ]
    files += [root / "latest_checkpointed_iteration.txt", tmp_path / "script.sh"]
    given = [word.replace("CKPT", str(root)).replace("OUT", str(tmp_path / "out")) for word in words]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for file in files:
        assert run([*given, str(file)]) == 2
        assert f"{file} cannot be written" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert run([*given, str(tmp_path / "old.json")]) == 0


@pytest.mark.parametrize("words", [("convert",), ("copy",)])
def test_links_that_lead_in_a_circle(tmp_path, capsys, words):
    (tmp_path / "circle").symlink_to("circle")
    assert run([words[0], str(LLAMA), str(tmp_path / "circle"), *words[1:]]) in (2, 7)
    assert run([words[0], str(tmp_path / "circle"), str(tmp_path / "out"), *words[1:]]) in (3, 7)
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert shown.count("circle") >= 2
    assert tree(tmp_path) == ["circle"]
