"""What every editing command has of the one job that writes: a dry run, the report in a file, several ranks."""

import json
from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from tests.conftest import RUN
from tests.folders import is_sound

EDITS = (
    "modify-state-dict RUN OUT --op remove^rng",
    "slice RUN OUT --layers 0:1",
    "strip RUN OUT",
    "average RUN RUN OUT",
)


def words_of(edit: str, out: Path) -> list[str]:
    places = {"RUN": str(RUN), "OUT": str(out), "remove^rng": "remove ^rng"}
    return [places.get(word, word) for word in edit.split()]


@pytest.mark.parametrize("edit", EDITS)
def test_a_dry_run_says_what_would_be_written(edit, tmp_path, capsys):
    words = words_of(edit, tmp_path / "out")
    assert run([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert run([*words, "--report", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert f"{report['tensor_count']} tensors, {report['object_count']} objects" in said
    assert is_sound(tmp_path / "out")
    assert run([*words, "--dry-run"]) == 2  # the output is taken
    assert "--overwrite" in capsys.readouterr().err


def test_what_an_edit_removes_is_listed_for_who_asks(tmp_path, capsys):
    assert run([*words_of(EDITS[0], tmp_path / "out"), "-v"]) == 0
    assert "removed rng_state/shard_0.0_1.2" in capsys.readouterr().out
