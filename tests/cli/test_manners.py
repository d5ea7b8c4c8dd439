"""Manners: verbs people try, usage, progress to the end, narrow terminals, silence, closed streams."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tools.cli import progress
from ckpt_tools.cli.app import run
from ckpt_tools.cli.commands import MEANT, MODULES, REMOVED
from ckpt_tools.cli.findings import grouped
from ckpt_tools.cli.options import model_folder
from ckpt_tools.cli.reports import _by_reason
from ckpt_tools.cli.verbs.check import two_values
from ckpt_tools.errors import list_problems
from ckpt_tools.human import human_bytes
from ckpt_tools.verify.report import Finding
from tests.cli.terminal import on_a_terminal
from tests.conftest import DATA, REPO, fixture_dir

RUN = DATA / "core019_llama_tp2_fully_reshardable"
MOE = fixture_dir("core019_moe_ep2_fully_reshardable")
FSDP = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")


@pytest.mark.parametrize("verb", MEANT)
def test_verbs_that_people_try(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, str(RUN)]) == 2
    err = capsys.readouterr().err
    assert f"error: No such command '{verb}'. Try " in err
    assert MEANT[verb].partition(" ")[0] in {*MODULES, "--version", "--help"}
    assert f" {MEANT[verb]}'" in err


def test_what_was_removed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED, "ls --gone", "Use --new.")
    monkeypatch.setitem(REMOVED, "gone", "Use new.")
    for words, sentence in REMOVED.items():
        command, _, option = words.partition(" ")
        assert run([command, str(RUN), *([option, "x"] if option else [])]) == 2
        assert capsys.readouterr().err.splitlines()[0].endswith(f" {sentence}"), words
    assert run(["stats", str(RUN), "--gone"]) == 2
    assert "Use " not in capsys.readouterr().err


@pytest.mark.parametrize("name", MODULES)
def test_a_command_without_arguments_prints_its_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(rf"Usage: .* {name} \[OPTIONS\] \S", " ".join(err.split()))
    assert f"{name} --help'" in err


def test_the_program_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "Usage: " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["ls", str(RUN)], ["verify", str(RUN)]], ids=lambda w: w[0])
def test_a_closed_stdout_takes_nothing(words: list[str], tmp_path: Path) -> None:
    """No file that is opened gets the number of stdout: a checkpoint is only read."""
    before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m ckpt_tools {' '.join(words)} >&-"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()} == before


def test_quiet_does_not_hide_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = shutil.copytree(RUN, tmp_path / "run")
    os.truncate(root / "iter_0000002" / "__0_0.distcp", 1000)
    for command in ("convert", "copy"):
        assert run([command, str(root), str(tmp_path / "out"), "--iteration", "all", "-q"]) == 4
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: iteration 2")


def test_a_bar_ends_at_one_hundred_percent_and_is_named() -> None:
    text = on_a_terminal(["stats", str(RUN)])
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    last = [line for line in re.split(r"[\r\n]", plain) if "stats" in line and "%" in line][-1]
    assert "100 %" in last
    assert re.search(r"KiB of [\d.]+ KiB", last)
    assert "kB" not in plain


def test_lines_of_progress_end_at_one_hundred_percent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    progress.name_work("copy")
    with progress.progress_bar(False) as update:
        update(3 << 20, 6 << 30)
        update(5 << 30, 6 << 30)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("copy: 3.0 MiB of 6.0 GiB (0 %), ")
    assert lines[-1].startswith("copy: 6.0 GiB of 6.0 GiB (100 %), done in ")
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 10.0)
    with progress.progress_bar(False) as update:  # work that was soon done says nothing
        update(6 << 30, 6 << 30)
    assert capsys.readouterr().err == ""


def test_progress_of_work_that_failed_does_not_claim_to_be_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with pytest.raises(OSError, match="full"), progress.progress_bar(False) as update:
        update(1, 2)
        raise OSError("full")
    assert "done in" not in capsys.readouterr().err


def test_several_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "junit.xml"
    assert run(["verify", str(RUN), str(MOE), str(FSDP), "--junit", str(report)]) == 0
    assert capsys.readouterr().out.count(" is valid") == 3
    assert report.read_text().count("<testsuite ") == 3
    assert run(["verify", str(RUN), str(tmp_path / "absent")]) == 1
    out = capsys.readouterr().out
    assert "does not exist" in out
    assert f"{RUN}/iter_0000002 (torch_dist) is valid" in out
    assert run(["verify", str(RUN), str(MOE), "--write-manifest", str(tmp_path / "m.json")]) == 2
    assert not (tmp_path / "m.json").exists()


def test_problems_that_differ_in_numbers_are_grouped() -> None:
    lines = [f"layers.{i}.{kind}: absent" for i in range(30) for kind in ("a", "b")]
    text = list_problems(lines)
    assert text.splitlines() == [
        "  - layers.0.a: absent", "  - layers.1.a: absent", "  - layers.2.a: absent", "  ... and 27 more like these",
        "  - layers.0.b: absent", "  - layers.1.b: absent", "  - layers.2.b: absent", "  ... and 27 more like these",
    ]  # fmt: skip
    assert list_problems(lines[:20]).count("\n") == 19  # few are listed as they are
    words = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(40)]
    assert list_problems(words).splitlines()[-1] == "  ... and 20 more"
    findings = [Finding("tiling", "error", f"layers.{i}", "hole") for i in range(6)]
    assert list(grouped(findings))[3:] == ["... and 3 more like these (--json lists all)"]
    assert len(list(grouped(findings[:4]))) == 4


def test_a_missing_file_is_told_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what is the same of many keys is grouped; with the way out that a run with another iteration has."""
    root = shutil.copytree(RUN, tmp_path / "run")
    shutil.copytree(root / "iter_0000002", root / "iter_0000004")
    (root / "latest_checkpointed_iteration.txt").write_text("4")
    (root / "iter_0000004" / "__1_0.distcp").unlink()
    assert run(["verify", str(root)]) == 1
    out = capsys.readouterr().out
    told = [line for line in out.splitlines() if "__1_0.distcp does not exist" in line]
    assert len(told) == 1
    assert told[0].endswith(". Fix: another copy of the file, or an earlier iteration (--iteration 2)")
    assert ".." not in told[0]
    assert run(["verify", str(root), "--content"]) == 1
    out = capsys.readouterr().out
    assert sum("error: checksums: " in line for line in out.splitlines()) == 3
    assert "... and 47 more like these (--json lists all)" in out
    (root / "iter_0000002" / "__1_0.distcp").unlink()
    assert run(["verify", str(root), "--iteration", "2"]) == 1
    assert "earlier iteration" not in capsys.readouterr().out, "there is none"


def test_a_hostile_common_state_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = shutil.copytree(RUN, tmp_path / "run")
    shutil.copy(DATA / "hostile" / "global_system.pt", root / "iter_0000002" / "common.pt")
    assert run(["verify", str(root)]) == 4
    out = capsys.readouterr().out
    assert "error: common state: " in out
    assert "neither common.pt nor common_state" not in out
    assert run(["ls", str(root)]) == 0
    assert " damaged " in capsys.readouterr().out


def test_a_resumed_conversion_that_is_finished_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("convert", "strip"):
        words = [verb, str(RUN), str(tmp_path / verb)]
        assert run(words) == 0
        assert "compared" not in capsys.readouterr().out.replace("compared with", "")
        assert run([*words, "--resume"]) == 0
        assert "compared" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["inspect nope", "convert nope x", "verify ./nope"])
def test_what_is_not_there(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words.split()) == 3
    assert "nope does not exist. No file next to it has a similar name." in capsys.readouterr().err


def test_one_iteration_is_not_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(RUN), f"{RUN}/", "--iteration", "2"]) == 2
    assert "`diff RUN/iter_0000002 RUN/iter_0000004`" in capsys.readouterr().err
    assert run(["diff", str(RUN), str(RUN), "-q"]) == 0, "whoever writes it so knows it"


def test_the_config_of_a_model_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(tmp_path / "config.json") == model_folder(tmp_path) == str(tmp_path)
    assert model_folder(tmp_path / "no" / "config.json") == str(tmp_path / "no" / "config.json")
    assert model_folder(None) is None


def test_what_was_dropped_is_named() -> None:
    dropped = [f"k{i}: of a run" for i in range(5)]
    assert _by_reason((*dropped, "x: alone", "y: two", "z: two")) == [
        "k0, k1, k2 and 2 more: of a run",
        "x: alone",
        "y, z: two",
    ]


def test_two_values_are_shown_so_that_they_differ() -> None:
    assert two_values(1.0, 1.5) == ("1", "1.5")
    assert two_values(0.1, 0.1 + 1e-8) == ("0.1", "0.10000001")
    a, b = two_values(1.0, 1.0 + 2**-52)
    assert a != b
    assert two_values(1, 2) == ("1", "2")


def test_one_unit_everywhere() -> None:
    """Sizes are binary wherever something prints them: no other function makes text of bytes."""
    assert human_bytes(5 << 30) == "5.0 GiB"
    for file in (REPO / "ckpt_tools" / "cli").glob("*.py"):
        assert "DownloadColumn" not in file.read_text()
        assert "TransferSpeedColumn" not in file.read_text()
