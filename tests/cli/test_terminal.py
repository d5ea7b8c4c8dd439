"""No command sends to a terminal what a checkpoint's names would like it to do, errors included."""

from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.errors import CorruptCheckpointError
from tests.damage import ITERATION, copy_of, drop_key, infos_of, keys_with, metadata_of

LLAMA = "core019_llama_tp2_fully_reshardable"
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
