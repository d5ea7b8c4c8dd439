"""`--quiet` is one thing in every command: errors on stderr, what programs are to read on stdout, nothing else."""

import json
import shlex
from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.cli.commands import MODULES
from tests.cli.options import OPTIONS
from tests.typed import PLACES, places

# A line of every command, and its exit code.
LINES = {
    "inspect": ("inspect RUN --keys nothing --keys 'decoder*'", 0),
    "convert": ("convert RUN OUT", 0),
    "convert-torch-dist-to-fsdp-dtensor": ("convert-torch-dist-to-fsdp-dtensor RUN OUT --dry-run", 0),
    "convert-fsdp-dtensor-to-torch-dist": ("convert-fsdp-dtensor-to-torch-dist FSDP OUT --iteration all", 0),
    "ls": ("ls RUN", 0),
    "stats": ("stats RUN", 0),
    "plan": ("plan RUN --gpus 4", 0),
    "export-hf": ("export-hf RUN OUT", 0),
    "import-hf": ("import-hf HF OUT", 0),
    "verify": ("verify RUN FSDP", 0),
    "diff": ("diff RUN LATER", 1),
    "compare-two-checkpoint": ("compare-two-checkpoint RUN FSDP", 0),
    "preflight": ("preflight FSDP", 0),
    "modify-state-dict": ("modify-state-dict RUN OUT --op 'remove rng.*'", 0),
    "slice": ("slice RUN OUT --layers 0:1", 0),
    "copy": ("copy RUN OUT --iteration all", 0),
    "average": ("average RUN LATER OUT", 0),
    "merge-adapter": ("merge-adapter RUN LORA OUT", 0),
    "strip": ("strip FSDP OUT", 0),
    "repair": ("repair FSDP OUT", 1),
    "print-tensor": ("print-tensor RUN decoder.final_layernorm.weight", 0),
}
# Whose output is a document for programs, asked for or not.
DOCUMENTS = ("print-torch-dcp-in-json RUN/iter_0000002 --no-write", "build-param-group-map RUN --explain")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return places(tmp_path_factory.mktemp("quiet") / "places")


@pytest.fixture
def typing(ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLACES:
        (tmp_path / name).symlink_to(ready / name)
    monkeypatch.chdir(tmp_path)


def test_every_command_that_has_it_is_in_the_lists():
    listed = {*LINES, *(line.partition(" ")[0] for line in DOCUMENTS)}
    assert listed == {name for name in MODULES if "-q" in OPTIONS[name].split()}


@pytest.mark.usefixtures("typing")
@pytest.mark.parametrize("name", LINES)
def test_nothing_is_printed_but_json(name, capsys):
    line, code = LINES[name]
    words = [word.replace("OUT", "loud") for word in shlex.split(line)]
    assert run(words) == code
    assert "".join(capsys.readouterr()), "there is nothing to keep back"
    assert run([word.replace("OUT", "out") for word in [*shlex.split(line), "-q"]]) == code
    assert capsys.readouterr() == ("", "")
    assert run([word.replace("OUT", "json") for word in [*shlex.split(line), "--json", "-q"]]) == code
    out, err = capsys.readouterr()
    assert (isinstance(json.loads(out), dict), err) == (True, "")


@pytest.mark.usefixtures("typing")
@pytest.mark.parametrize("line", DOCUMENTS)
def test_a_document_is_printed_whole(line, capsys):
    assert run(shlex.split(line)) == 0
    loud = capsys.readouterr().out
    assert run([*shlex.split(line), "-q"]) == 0
    assert capsys.readouterr() == (loud, "")
    json.loads(loud)


@pytest.mark.usefixtures("typing")
def test_what_verify_and_preflight_find_wrong_is_an_error(capsys):
    assert run(["verify", "BAD", "RUN", "--content", "-q"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    verdict, *found = err.splitlines()
    assert verdict == "BAD/iter_0000002 (torch_dist) is not valid: 2 errors"
    assert all(line.startswith("error: ") for line in found)
    assert run(["preflight", "RUN", "-q"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[1].startswith("error: checkpoint-format")) == ("", True)


@pytest.mark.usefixtures("typing")
def test_another_format_is_for_programs_too(capsys):
    assert run(["verify", "RUN", "-q", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("`RUN/iter_0000002` (torch_dist) is valid")
