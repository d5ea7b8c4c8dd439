"""The manual: every example runs, help fits a terminal, options are frozen, the exit codes are the ones it lists."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ckpt_tools import errors
from ckpt_tools.cli import manual
from ckpt_tools.cli.app import app, run
from tests.altered import without_numbers
from tests.cli.options import OPTIONS
from tests.conftest import FSDP, RUN
from tests.megatron.adapter_checkpoints import lora
from tests.megatron.huggingface.vision_language import directory

GROUP: Any = typer.main.get_command(app)  # a group of one of Typer's two copies of click
COMMANDS = {name: GROUP.get_command(None, name) for name in GROUP.list_commands(None)}
EXAMPLES = [(name, words) for name, page in manual.PAGES.items() for _, words in page.examples]
DIFFERENT = {
    "diff RUN FSDP",
    "compare-two-checkpoint RUN FSDP --by parameters",  # one run is no conversion of the other
    "repair FSDP OUT",  # it is sound
    "repair FSDP OUT --dry-run",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face model: the checkpoint RUN, exported; beside it its adapter, and a model of several towers."""
    folder = tmp_path_factory.mktemp("models") / "hf"
    assert run(["export-hf", str(RUN), str(folder), "-q"]) == 0
    lora().save(folder.parent / "lora")
    lora_folder, peft_folder = str(folder.parent / "lora"), str(folder.parent / "peft")
    assert run(["export-hf", lora_folder, peft_folder, "--peft", "--hf-config", str(folder), "-q"]) == 0
    whole = str(directory(folder.parent / "vl", "qwen2_5_vl"))
    assert run(["import-hf", whole, str(folder.parent / "text"), "--tower", "language", "-q"]) == 0
    for number in (2, 4):
        shutil.copytree(RUN / "iter_0000002", folder.parent / f"long/iter_{number:07d}")
    (folder.parent / "long" / "latest_checkpointed_iteration.txt").write_text("4")
    return folder


@pytest.mark.parametrize(("name", "words"), EXAMPLES, ids=[words for _, words in EXAMPLES])
def test_every_example_runs(name, words, models, tmp_path, capsys):
    dump = shutil.copytree(RUN / "param_to_param_group_map", tmp_path / "dump")
    places = {"RUN": RUN, "FSDP": FSDP, "HF": models, "LORA": models.parent / "lora",
              "VL": models.parent / "vl", "TEXT": models.parent / "text",
              "PEFT": models.parent / "peft", "DUMP": dump, "OUT": tmp_path / "out",
              "LONG": models.parent / "long"}  # fmt: skip
    places["BAD"] = without_numbers(RUN, tmp_path / "bad", "output_layer.weight") if "BAD" in words else RUN
    assert places.keys() == manual.PLACEHOLDERS.keys()
    words = words.removeprefix(
        "torchrun --nproc-per-node 4 -m ckpt_tools "
    )  # in one process, tested elsewhere
    argv = shlex.split(
        re.sub("|".join(rf"\b{name}\b" for name in places), lambda m: str(places[m[0]]), words)
    )
    assert argv[0] == name
    assert run(argv) == (1 if words in DIFFERENT else 0)
    out, err = capsys.readouterr()
    assert "error" not in err
    assert out or "OUT" in words or "DUMP" in words


def test_every_command_has_a_page_that_fits():
    assert manual.PAGES.keys() == COMMANDS.keys()
    for name, page in manual.PAGES.items():
        assert 0 < len(page.summary) <= 42
        assert len(page.examples) >= 2 or name == "compare-two-checkpoint"


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_fits_80_columns(argv, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(argv) == 0
    out = capsys.readouterr().out
    assert not [line for line in out.splitlines() if len(line) > 80]
    assert "...\n" not in out.partition("Options:")[2]  # no summary is cut
    assert not re.search(r"\[env var|\bNone\b", out)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_few_options_and_help_all_every_one(name, capsys):
    def shown(word: str) -> set[str]:
        assert run([name, word]) == 0
        listed = capsys.readouterr().out.partition("Examples:\n")[0]
        return set(re.findall(r"^  (?:-\w, )*(--[a-z0-9-]+)", listed, re.MULTILINE)) - {"--help"}

    few, every = shown("--help"), shown("--help-all")
    assert len(few) <= 15 and few <= every
    first = {p.opts[0] for p in COMMANDS[name].params if p.param_type_name == "option" and not p.hidden}
    assert every >= {word for word in first if word.startswith("--")}


def test_help_of_a_verb(capsys):
    pages = []
    for words in (["help", "ls"], ["ls", "--help"], ["help"], ["--help"]):
        assert run(words) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] != pages[2] == pages[3]
    assert run(["help", "nothing"]) == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_shown_as_they_are_typed(name, capsys):
    for word, most in (("--help", 2), ("--help-all", 99)):
        assert run([name, word]) == 0
        shown = capsys.readouterr().out.partition("Examples:\n")[2].replace(" \\\n        ", " ")
        lines = [words if words.startswith("torchrun") else f"checkpoint-inspector {words}"
                 for _, words in manual.PAGES[name].examples]  # fmt: skip
        assert [line for line in lines if f"    {line}\n" in shown] == lines[:most]


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_frozen(name):
    """A new option, or one less, is a decision: write it into tests/cli/options.py as well."""
    found = {
        opt
        for p in COMMANDS[name].params
        for opt in (*p.opts, *p.secondary_opts)
        if p.param_type_name == "option"
    }
    assert found == set(OPTIONS[name].split())


def test_every_error_class_has_its_line_in_the_manual():
    codes = {
        c.exit_code for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.CkptError)
    }
    assert codes - {errors.CkptError.exit_code} == set(manual.EXIT_CODES) - {0, 1}


def _damaged(tmp_path: Path, file: str, data: bytes) -> str:
    root = shutil.copytree(RUN, tmp_path / "damaged")
    (root / "iter_0000002" / file).write_bytes(data)
    return str(root)


# What has to happen for every code that one process can leave with on its own; interruption, termination and a failed
# proof of an output have tests of their own (tests/execute, tests/clusters, tests/commands).
OUTCOMES = {
    0: lambda tmp: ["verify", str(RUN)],
    1: lambda tmp: ["diff", str(RUN), str(FSDP)],
    2: lambda tmp: ["convert", str(RUN), str(RUN / "inside")],
    3: lambda tmp: ["inspect", str(tmp)],
    4: lambda tmp: ["inspect", _damaged(tmp, ".metadata", b"\x80\x04no pickle")],
    5: lambda tmp: ["print-tensor", str(RUN), "no.such.key"],
    7: lambda tmp: ["verify", str(RUN), "--junit", "/dev/full"],
}


@pytest.mark.parametrize("code", manual.EXIT_CODES)
def test_exit_codes_of_real_commands(code, tmp_path, capsys):
    if code not in OUTCOMES:
        assert code in {6, 130, 143}
        return
    assert run(OUTCOMES[code](tmp_path)) == code
    assert ("error: " in capsys.readouterr().err) == (code > 1)


def test_the_help_ends_with_the_exit_codes(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {code:<5}" in out for code in manual.EXIT_CODES)
    assert not [
        name
        for name, page in manual.PAGES.items()
        if f"  {name} " not in out and page.section != "Other names"
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell):
    """The shell's function asks the program, and gets commands and options."""
    named = "import sys; sys.argv[0] = 'checkpoint-inspector'; from ckpt_tools.cli.app import main; main()"
    program = [sys.executable, "-c", named]
    told = {
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"
    }  # the shell by name, not by the parent process
    show = [*program, "--show-completion", shell]
    script = subprocess.run(show, env=told, capture_output=True, text=True, check=True).stdout
    assert f"_CHECKPOINT_INSPECTOR_COMPLETE=complete_{shell}" in script
    for typed, expected in (("ver", "verify"), ("diff --rt", "--rtol"), ("convert --to to", "torch_dist")):
        asked = {
            "_CHECKPOINT_INSPECTOR_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": f"checkpoint-inspector {typed}",
            "COMP_CWORD": str(typed.count(" ") + 1),
            "_TYPER_COMPLETE_ARGS": f"checkpoint-inspector {typed}",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        found = subprocess.run(program, env=asked, capture_output=True, text=True, check=False).stdout
        assert expected in found
