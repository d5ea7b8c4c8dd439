"""Names and numbers that mean nothing: a variable that is not set, a store without a folder, less than one."""

from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from tests.cli.test_convert import LLAMA, NATIVE

RUN, FSDP = str(LLAMA), str(NATIVE)
READERS = {
    "inspect": ["inspect", ""],
    "verify": ["verify", ""],
    "plan": ["plan", ""],
    "preflight": ["preflight", ""],
    "print-torch-dcp-in-json": ["print-torch-dcp-in-json", ""],
    "print-tensor": ["print-tensor", "", "key"],
    "build-param-group-map": ["build-param-group-map", "", "-o", "map.json"],
    "diff": ["diff", RUN, ""],
    "convert": ["convert", "", "out"],
    "export-hf": ["export-hf", "", "out"],
    "import-hf": ["import-hf", "", "out"],
    "slice": ["slice", "", "out", "--layers", "0:1"],
    "modify-state-dict": ["modify-state-dict", "", "out", "--op", "remove rng.*"],
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory. Nothing may be made there, nor in the root of the file system."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", READERS)
def test_a_source_without_a_name_is_refused(command, made, capsys):
    assert run(READERS[command]) == 2
    assert "the name of a checkpoint is empty" in capsys.readouterr().err
    assert not list(made.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["convert", RUN, ""],
        ["average", FSDP, FSDP, ""],
        ["merge-adapter", RUN, RUN, ""],
        *(
            [*words, "--iteration", "all"]
            for words in (
                ["convert", RUN, ""],
                ["convert", RUN, "file://"],
                ["export-hf", RUN, ""],
                ["copy", RUN, ""],
                ["strip", RUN, ""],
                ["slice", RUN, "", "--layers", "0:1"],
                ["modify-state-dict", RUN, "", "--op", "remove rng.*"],
            )
        ),
    ],
)
def test_an_output_without_a_name_is_refused(words, made, capsys):
    """Before anything is looked for in it: its iterations would be those of `/`."""
    assert run([*words, "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("error: the output's name is empty")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["export-hf", RUN, "out", "--vocab-size", "-1"], "--vocab-size -1"),
        (["export-hf", RUN, "out", "--vocab-size", "0"], "--vocab-size 0"),
        (["export-hf", RUN, "out", "--tp", "0"], "--tp 0"),
        (["export-hf", FSDP, "out", "--tp", "-1"], "--tp -1"),
        (["convert", RUN, "out", "--vocab-size-padded", "0"], "--vocab-size-padded 0"),
        (["convert", RUN, "out", "--vocab-size-padded", "224", "--vocab-size", "0"], "--vocab-size 0"),
        (["convert", RUN, "out", "--vocab-size-padded", "224", "--vocab-size", "-1"], "--vocab-size -1"),
        (["convert", RUN, "out", "--to", "hf", "--vocab-size", "0"], "--vocab-size 0"),
        (["import-hf", "hf", "out", "--iteration", "-1"], "--iteration -1"),
        (["import-hf", "hf", "out", "--iteration", "1" + "0" * 18], "--iteration 1000"),
        (["import-hf", "hf", "out", "--vocab-size-padded", "0"], "--vocab-size-padded 0"),
        (["inspect", RUN, "--iteration", "-1"], "--iteration -1"),
        (["diff", RUN, RUN, "--iteration", "-1"], "--iteration -1"),
        (["convert", RUN, "out", "--iteration", "-1"], "--iteration -1"),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_named_with_its_option(words, named, made, capsys):
    if words[0] == "import-hf":
        assert run(["export-hf", RUN, "hf", "-q"]) == 0
    assert run(words) == 2
    assert named in capsys.readouterr().err
    assert not (made / "out").exists()
