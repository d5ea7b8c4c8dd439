"""Terminals: every page of help, table and line is folded where a reader would fold it, however narrow.

No command prints what a terminal acts on.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckpt_tools.cli.app import app, run
from ckpt_tools.cli.commands import MODULES
from ckpt_tools.cli.manual import PAGES
from ckpt_tools.cli.render import column_widths, fold_cell, fold_command, fold_line
from ckpt_tools.errors import CorruptCheckpointError
from tests.cli.terminal import on_a_terminal
from tests.conftest import DATA, FSDP, LLAMA, RUN, fixture_dir
from tests.damage import ITERATION, copy_of, drop_key, infos_of, keys_with, metadata_of

MOE = fixture_dir("core019_moe_ep2_fully_reshardable")
TABLES = [
    f"ls {RUN}",
    f"ls {DATA}",
    f"inspect {RUN} --by layer",
    f"stats {RUN}",
    f"stats {RUN} --layer 0 --role weight",
    f"stats {RUN} {FSDP}",
    f"diff {RUN} {MOE}",
    f"diff {RUN} {FSDP}",
    f"plan {MOE} --gpus 4",
    f"plan {MOE} --tensor *qkv* --dp-shard 2",
    f"verify {RUN} -v",
    f"inspect {MOE}",
    f"preflight {FSDP}",
    f"preflight {RUN}",
    f"convert {RUN} {{out}}",
    f"inspect {RUN}/nowhere",
]


def shown(text: str) -> list[str]:
    """The lines that stay on the screen, without colours and what a bar of progress overwrote."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line.rpartition("\r")[2].rstrip() for line in plain.split("\n")]


@pytest.mark.parametrize("words", TABLES)
def test_no_line_of_a_report_is_wider_than_the_terminal(words, tmp_path):
    argv = words.format(out=tmp_path / "out").split()
    text = on_a_terminal(argv, tmp_path, 40, codes=(0, 1, 3), LC_ALL="C.UTF-8")
    lines = shown(text)
    assert any(lines)
    for line in lines:
        is_alone = len(line.removesuffix("\\").split()) == 1  # a path, or an option of a command to be copied
        assert len(line) <= 40 or is_alone, line
    assert not [line for line in lines if re.fullmatch(r"\W*\w(\s+\w){3,}\W*", line)]  # columns of a letter


@pytest.mark.parametrize("name", [None, *MODULES])
def test_help_fits(name):  # 80 columns: test_manual
    found = CliRunner().invoke(app, [*([name] if name else []), "--help"], env={"COLUMNS": "40"})
    assert found.exit_code == 0
    for line in found.output.splitlines():
        assert len(line) <= 40 or len(re.findall(r"'[^']*'|[^\s\\]+", line)) == 1, line
    if name:  # no option is lost, nor torn apart
        for option in re.findall(r"--[a-z][a-z-]+", " ".join(shlex.split(PAGES[name].examples[0][1]))):
            assert option in found.output


def test_a_report_says_the_same_whatever_the_width(tmp_path):
    def letters(columns: int) -> str:
        return re.sub(r"\s", "", "".join(shown(on_a_terminal(["ls", str(RUN)], tmp_path, columns)))).replace(
            "─", ""
        )

    wide = letters(200)
    assert "iter_0000002*" in letters(40) and sorted(letters(80)) == sorted(wide)


@pytest.mark.parametrize("columns", ["1", "0", "-5", "x", "99999"])
def test_odd_widths_end(columns, tmp_path):
    for words in (f"inspect {MOE}", f"diff {RUN} {MOE}", "stats --help", f"inspect {RUN}/nowhere"):
        assert on_a_terminal(words.split(), tmp_path, codes=(0, 1, 3), COLUMNS=columns)


def test_a_pipe_gets_no_line_folded(tmp_path, capsys):
    from ckpt_tools.cli import render

    assert not sys.stdout.isatty()
    render.tell("word " * 100)
    render.print_table(("key", "bytes"), [("a." * 200, 1)])
    assert [len(line) for line in capsys.readouterr().out.splitlines()] == [500, 0, 407, 407, 407]


@pytest.mark.parametrize("width", [12, 20, 38, 80])
@pytest.mark.parametrize(
    "line",
    [
        "error: /a/path/with/some/names/in/it is not empty; try `diff A B` instead",
        "  masters    32,928 elements of 17 masters round to the stored weights (all)",
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight: bfloat16 [2, 32]",
        "",
        "short",
    ],
)
def test_a_folded_line_keeps_its_words(line, width):
    lines = fold_line(line, width)
    assert "".join("".join(lines).split()) == "".join(line.split())
    assert all(lines) or not line
    for part in lines:
        assert len(part) <= width or len(part.split()) == 1 or "`" in part
    if len(line) > width:
        assert len(lines) > 1


def test_paths_and_commands_are_left_whole():
    lines = fold_line("see /an/iteration/of/a.run/iter_0000001 and `diff RUN/1 RUN/2 --json` for more", 30)
    assert "  /an/iteration/of/a.run/iter_0000001" in lines and "  `diff RUN/1 RUN/2 --json`" in lines


def as_typed(lines: list[str]) -> list[str]:
    """The words that a shell makes of lines, for which a backslash at an end joins two."""
    return shlex.split("\n".join(lines).replace("\\\n", ""))


@pytest.mark.parametrize("width", [20, 40, 70])
def test_a_folded_command_is_the_same_command(width):
    line = "  checkpoint-inspector slice RUN OUT --layers '0: 1' --workers 2 --block \"a b\""
    folded = fold_command(line, width)
    assert as_typed(folded) == shlex.split(line)
    again = fold_command(f"{line} \\", width)
    assert as_typed([*again, "--json"]) == [*shlex.split(line), "--json"]
    comment = "  # " + "what a comment says " * 9
    parts = fold_command(comment, width)
    assert all(part.startswith("  # ") and len(part.rstrip()) <= max(width, 12) for part in parts)
    assert "".join(part.removeprefix("  # ").rstrip() + " " for part in parts).split() == comment.split()[1:]


def test_names_are_folded_after_their_dots():
    assert fold_cell("decoder.layers.self_attention.linear_qkv.weight", 24) == [
        "decoder.layers.self_", "attention.linear_qkv.", "weight",
    ]  # fmt: skip
    assert fold_cell("x" * 50, 24) == ["x" * 24, "x" * 24, "xx"]
    assert fold_cell("one two-three four", 9) == ["one", "two-three", "four"]


def test_numbers_are_never_torn():
    cells = [["decoder.layers.0.weight", "1.25e-07", "12,345", "1.5 GiB"], ["b", "-3", "7", "12 B"]]
    columns = ("tensor", "norm", "elements", "size of it")
    assert column_widths(columns, cells, 100) == [23, 8, 8, 10]
    assert column_widths(columns, cells, 35) == [12, 8, 8, 7]
    assert column_widths(columns, cells, 34) is None


EVIL = "decoder.evil\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\x00.weight"
COMMANDS = [
    "inspect {root}",
    "inspect {root} --tree",
    "inspect {root} --json",
    "print-torch-dcp-in-json {root}/" + ITERATION,
    "print-tensor {root} {key}",
    "print-tensor {root} {key}x",
    "verify {root}",
    "verify {root} --content",
    "verify {root} --format github",
    "verify {root} --format markdown",
    "diff {root} {plain}",
    "diff {plain} {root}",
    "plan {root} --swiglu",
    "convert {root} {out} --swiglu",
    "modify-state-dict {root} {out} --op remove:evil -v",
]


@pytest.fixture
def words(tmp_path: Path) -> dict[str, str]:
    """Two checkpoints and an output; in `root` a parameter has control characters in its name, and no weight."""
    root = copy_of(LLAMA, tmp_path / "renamed")
    with metadata_of(root) as metadata:
        drop_key(metadata, "decoder.final_layernorm.weight")
        for key in keys_with(metadata, "decoder.final_layernorm.weight"):
            evil = key.replace("decoder.final_layernorm.weight", EVIL)
            metadata.state_dict_metadata[evil] = metadata.state_dict_metadata[key]
            for index, info in infos_of(metadata, key).values():
                metadata.storage_data[type(index)(evil, index.offset, index.index)] = info
            drop_key(metadata, key)
    plain = copy_of(LLAMA, tmp_path / "plain")
    return {
        "root": str(root),
        "plain": str(plain),
        "out": str(tmp_path / "out"),
        "key": f"optimizer.state.exp_avg.{EVIL}",
    }


def assert_harmless(text: str) -> None:
    assert not {c for c in text if not c.isprintable()} - {"\n"}
    assert any(
        f"evil\\{code}]0;owned" in text for code in ("x1b", "u001b")
    )  # the name is shown, the second in JSON


def test_no_command_prints_a_control_character(words, capsys):
    for command in COMMANDS:
        run([word.format(**words).replace("remove:", "remove ") for word in command.split()])
        assert_harmless("".join(capsys.readouterr()))


@pytest.mark.parametrize(
    ("error", "code"),
    [(CorruptCheckpointError(EVIL), 4), (OSError(EVIL), 7), (ValueError(f"a\n{EVIL}"), 70)],
)
def test_errors_of_every_kind_are_escaped(monkeypatch, capsys, error, code):
    def fail(*_args: object) -> None:
        raise error

    monkeypatch.setattr("ckpt_tools.commands.look.inspect.inspect_checkpoint", fail)
    assert run(["inspect", "somewhere"]) == code
    assert_harmless(capsys.readouterr().err)
