"""What Tab offers: stored keys and iterations, in any order of words, and nothing where something is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer.main

from ckpt_tools.cli import completion
from ckpt_tools.cli.app import app, run
from ckpt_tools.formats.dcp import read_catalog
from ckpt_tools.formats.files import LocalFiles
from tests.conftest import DATA, fixture_dir

RUN = DATA / "core019_llama_tp2_fully_reshardable"
FSDP = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")
ITERATION = "iter_0000002"


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A root with the iterations 2, 10 and 100, and one that is half written."""
    root = shutil.copytree(RUN, tmp_path / "a run")
    for number in (10, 100):
        shutil.copytree(root / ITERATION, root / f"iter_{number:07d}")
    (root / "iter_0000200").mkdir()
    return root


def offered(
    line: Sequence[object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """What bash would get for the last word of `line`."""
    words = ["checkpoint-inspector", *map(str, line)]
    quoted = [word.replace(" ", "\\ ") for word in words]
    monkeypatch.setenv("_CHECKPOINT_INSPECTOR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(quoted))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit):
        typer.main.get_command(app).main([], prog_name=words[0], standalone_mode=False)
    out, err = capsys.readouterr()
    assert err == ""
    return out.split()


def keys(root: Path) -> set[str]:
    files = LocalFiles(str(root / ITERATION))
    catalog = read_catalog(files)
    files.close()
    return {*catalog.tensors, *catalog.objects}


@pytest.mark.parametrize(
    "line",
    [
        ["print-tensor", RUN, "decoder."],
        ["print-tensor", RUN, "--stats", "decoder."],
        ["inspect", RUN, "--keys", "decoder."],
        ["inspect", RUN / ITERATION, "--iteration", "2", "--keys", "decoder."],
        ["inspect", "--keys", "x", RUN, "--keys", "decoder."],
        ["convert", RUN, FSDP, "--ignore-keys", "decoder."],  # the output may be there
        ["diff", RUN, RUN, "--keys", "decoder."],
    ],
    ids=lambda line: " ".join(str(word).rpartition("/")[2] for word in line),
)
def test_stored_keys(
    line: Sequence[object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sorted(key for key in keys(RUN) if key.startswith("decoder."))
    assert len(expected) > 5
    assert offered(line, capsys, monkeypatch) == expected


def test_compared_are_the_keys_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "weights"
    assert run(["strip", str(RUN), str(weights), "--quiet", "--json"]) == 0
    capsys.readouterr()
    both = keys(RUN) & keys(weights)
    assert both and both != keys(RUN)
    assert offered(["diff", RUN, weights, "--keys", ""], capsys, monkeypatch) == sorted(both)
    assert offered(["diff", RUN, FSDP, "--keys", "decoder."], capsys, monkeypatch) == []


@pytest.mark.parametrize(
    "line",
    [
        ["inspect", "ROOT", "--iteration", ""],
        ["verify", "--content", "ROOT", "--iteration", ""],
        ["convert", "ROOT", "OUT", "--to", "torch_dist", "--iteration", ""],
    ],
    ids=lambda line: line[0],
)
def test_iterations(
    line: Sequence[object],
    several: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp_dtensor").mkdir()  # called like the value of an option
    words = [str(several) if word == "ROOT" else word for word in line]
    assert offered(words, capsys, monkeypatch) == ["2", "10", "100", "200"]
    assert offered([*words[:-1], "1"], capsys, monkeypatch) == ["10", "100"]


def test_what_cannot_be_read_offers_nothing(
    several: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert offered(["inspect", several, "--iteration", "200", "--keys", ""], capsys, monkeypatch) == []
    (several / ITERATION / ".metadata").write_bytes(b"\x80\x04no pickle")
    damaged: list[list[object]] = [
        ["inspect", several / ITERATION, "--keys", ""],
        ["inspect", "s3://bucket/run", "--keys", ""],
        ["inspect", "/no/such/folder", "--iteration", ""],
        ["inspect", "--keys", ""],
    ]
    for line in damaged:
        assert offered(line, capsys, monkeypatch) == [], line


def test_large_metadata_is_not_read(
    several: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line: list[object] = ["inspect", several, "--keys", "decoder."]
    size = (several / ITERATION / ".metadata").stat().st_size
    monkeypatch.setattr(completion, "MAX_METADATA_BYTES", size - 1)
    assert offered(line, capsys, monkeypatch) == []
    monkeypatch.setattr(completion, "MAX_METADATA_BYTES", size)
    assert offered(line, capsys, monkeypatch) != []
