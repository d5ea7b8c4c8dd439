"""`--iteration`: one number or all, as far as a command can, and what a report calls a release."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.cli.commands import MODULES
from tests.cli.options import OPTIONS
from tests.commands import oracle
from tests.conftest import DATA, fixture_dir

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
FSDP = "core019_llama_tp2_native_fsdp_dtensor"
FOLDER = "iter_0000002"
TRACKER = "latest_checkpointed_iteration.txt"

EDITS = {
    "strip": (),
    "slice": ("--layers", "0:1"),
    "modify-state-dict": ("--op", "remove ^rng"),
}
ALL = {
    "convert", "convert-torch-dist-to-fsdp-dtensor", "convert-fsdp-dtensor-to-torch-dist", "copy", "verify",
    "export-hf", *EDITS,
}  # fmt: skip
ONE = sorted(name for name in MODULES if "--iteration" in OPTIONS[name].split() and name not in ALL)


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A run with the iterations 2, 4 and 6, of which the tracker names 4, and a release."""
    root = tmp_path / "run"
    for name in ("iter_0000002", "iter_0000004", "iter_0000006"):
        shutil.copytree(fixture_dir(FSDP) / FOLDER, root / name)
    (root / TRACKER).write_text("4")
    return root


# Its publication ends between the rename and the tracker.
KILLED = """
import os, signal
from ckpt_tools.execute.output.local_output import LocalOutput
LocalOutput.write_beside = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
from ckpt_tools.__main__ import main
main()
"""


def test_an_iteration_that_was_not_published_to_the_end_is_not_passed_over(several, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["strip", str(several), str(out)]
    subprocess.run([sys.executable, "-c", KILLED, *words], capture_output=True, check=False)
    assert (out / "iter_0000004" / ".metadata").exists() and not (out / TRACKER).exists()
    assert run([*words, "--iteration", "all"]) == 2
    assert "Continue it with --resume" in capsys.readouterr().err
    assert run([*words, "--iteration", "all", "--resume"]) == 0
    assert (out / TRACKER).read_text() == "4"


@pytest.mark.filterwarnings("ignore:.*the folder says iteration")
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_all_iterations_is_that_of_each(name, several, tmp_path):
    words = [name, str(several), str(tmp_path / "all"), *EDITS[name]]
    assert run([*words, "--iteration", "all"]) == 0
    made = tmp_path / "all"
    assert sorted(os.listdir(made)) == ["iter_0000002", "iter_0000004", "iter_0000006", TRACKER]
    assert (made / TRACKER).read_text() == "4"
    assert run([name, str(several), str(tmp_path / "one"), *EDITS[name], "--iteration", "6"]) == 0
    both = [oracle.tensors(tmp_path / which / "iter_0000006") for which in ("one", "all")]
    assert both[0].keys() == both[1].keys()
    assert all(oracle.same_bytes(both[0][key], both[1][key]) for key in both[0])


@pytest.mark.filterwarnings("ignore:.*the folder says iteration")
def test_every_iteration_is_exported_once_into_a_folder_of_its_number(several, tmp_path, capsys):
    words = ["export-hf", str(several), str(tmp_path / "all"), "--iteration", "all"]
    assert run(words) == 0
    assert sorted(os.listdir(tmp_path / "all")) == ["iter_0000002", "iter_0000004", "iter_0000006"]
    assert run(["export-hf", str(several / "iter_0000006"), str(tmp_path / "one")]) == 0
    one = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert one == {path.name: path.read_bytes() for path in (tmp_path / "all" / "iter_0000006").iterdir()}
    capsys.readouterr()
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["already_there"] == [2, 6, 4]


@pytest.mark.filterwarnings("ignore:.*the folder says iteration")
def test_what_is_there_is_passed_over_and_what_is_broken_named(several, tmp_path, capsys):
    out = str(tmp_path / "out")
    os.truncate(several / "iter_0000002" / "__0_0.distcp", 1000)
    assert run(["strip", str(several), out, "--iteration", "6", "-q"]) == 0
    assert run(["strip", str(several), out, "--iteration", "all"]) == 4
    told, err = capsys.readouterr()
    assert "iteration 6: exists already" in told
    assert [line for line in err.splitlines() if line.startswith("error: iteration 2: ")]
    assert sorted(os.listdir(out)) == ["iter_0000004", "iter_0000006", TRACKER]
    assert (Path(out) / TRACKER).read_text() == "6"
    assert run(["strip", str(several), out, "--iteration", "all", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert (found["already_there"], found["not_finished"]) == ([6, 4], [])  # the latest comes last
    assert [(one["iteration"], one["exit_code"]) for one in found["failed"]] == [(2, 4)]
    assert run(["strip", str(several), out, "--iteration", "all", "--json", "--overwrite"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert [one["source_format"] for one in found["iterations"]] == ["fsdp_dtensor"] * 2


LINES = {
    "inspect": "RUN", "build-param-group-map": "RUN", "stats": "RUN", "plan": "RUN",
    "import-hf": "RUN OUT", "diff": "RUN RUN", "compare-two-checkpoint": "RUN RUN", "preflight": "RUN",
    "average": "RUN RUN OUT", "merge-adapter": "RUN RUN OUT", "repair": "RUN OUT", "print-tensor": "RUN args",
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_a_command_of_one_iteration_says_which_take_all(name, tmp_path, capsys):
    words = shlex.split(LINES[name].replace("RUN", str(LLAMA)).replace("OUT", str(tmp_path / "out")))
    assert run([name, *words, "--iteration", "all"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --iteration all: this command takes one iteration; give its number")
    assert set(re.findall(r"convert|copy|export-hf|modify-state-dict|slice|strip|verify", said)) <= ALL
    for wrong in ("two", "-1", "1.5", "", "9" * 19):
        assert run([name, *words, "--iteration", wrong]) == 2
        assert capsys.readouterr().err.startswith(
            f"error: --iteration {wrong}: give a number (`ls RUN` lists "
        )


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_command_of_all_iterations_says_so(name, capsys):
    words = [str(fixture_dir(FSDP) if "fsdp-dtensor-to" in name else LLAMA)]
    words += ["/tmp/never"] * (name != "verify")
    assert run([name, *words, *EDITS.get(name, ()), "--iteration", "two"]) == 2
    assert capsys.readouterr().err == "error: --iteration two: give a number, or all\n"


def test_a_release_is_called_one(tmp_path, capsys):
    """What is made of it with an optimizer begins at iteration 1, which is said of the output."""
    root = tmp_path / "run"
    shutil.copytree(LLAMA / FOLDER, root / "release")
    (root / TRACKER).write_text("release")
    for flags, number in (([], None), (["--weights-only", "--fresh-optimizer"], 1)):
        out = str(tmp_path / f"out{number}")
        assert run(["convert", str(root), out, *flags]) == 0
        source, _, target = capsys.readouterr().out.splitlines()[1].partition(" -> ")
        assert source.endswith(", release")
        assert ("iteration 1" in target) == (number == 1)
        assert os.listdir(out).count("release") == (number is None)
        assert run(["convert", str(root), out, *flags, "--overwrite", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["source_iteration"], report["iteration"]) == ("release", number)
    assert run(["plan", str(root), "--gpus", "2"]) == 0
    printed = capsys.readouterr().out
    assert ", release)" in printed
    assert "iteration" not in printed
    assert run(["inspect", str(root), "--html", "-"]) == 0
    assert re.search(r"<td[^>]*>iteration</td><td[^>]*>release</td>", capsys.readouterr().out)
    assert run(["convert", str(root), str(tmp_path / "all"), "--iteration", "all"]) == 0
    assert run(["convert", str(root), str(tmp_path / "all"), "--iteration", "all"]) == 2
    assert "error: release: " in capsys.readouterr().err


def test_an_iteration_is_told_of_the_source(tmp_path, capsys):
    assert run(["convert", str(LLAMA), str(tmp_path / "out")]) == 0
    source, _, target = capsys.readouterr().out.splitlines()[1].partition(" -> ")
    assert source.endswith(", iteration 2")
    assert "iteration" not in target
