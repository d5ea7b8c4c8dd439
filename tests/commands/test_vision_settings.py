"""The config.json of a vision-language model: a run records it, and is exported by it."""

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.megatron.huggingface.vision.towers import RECORD
from ckpt_tools.megatron.run_state.record import read_record
from tests.commands.test_both_towers import FRESH, export, imported, model_and_run
from tests.commands.test_tower_source import config_of, refusal, tensors_of
from tests.megatron.huggingface.vision_language import KINDS, directory

VISION = "vision_config"


def reference(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def recorded(folder: Path) -> Any:
    """The config.json that a run records."""
    with open_checkpoint(str(folder)) as opened:
        return opened.common.args.get(RECORD)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_is_exported_by_what_it_records(name, tmp_path, capsys):
    """After every command that writes a run anew; the tokenizer is asked for."""
    source = directory(tmp_path / "vl", name)
    made = imported(source, tmp_path / "run", "--iteration", "2")
    capsys.readouterr()
    assert run(["export-hf", str(made), str(tmp_path / "out")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "config.json is made of the one that the checkpoint records" in told
    assert "no tokenizer was written; pass --hf-config DIR" in told
    assert tensors_of(tmp_path / "out") == tensors_of(source)
    assert config_of(tmp_path / "out") == config_of(source) == recorded(made)
    for number, words in enumerate((
        ["convert", made, "OUT", "--gpus", "2", "--weights-only", *FRESH, "-q"],
        ["convert", tmp_path / "0", "OUT", "--to", "torch_dist", "-q"],
        ["copy", made, "OUT"],
        ["strip", tmp_path / "1", "OUT"],
        ["average", made, tmp_path / "2", "OUT"],
    )):  # fmt: skip
        place = tmp_path / str(number)
        assert run([str(place if word == "OUT" else word) for word in words]) == 0, words
        assert recorded(place) == config_of(source), words


def test_a_slice_records_the_layers_that_are_left(tmp_path):
    """Of the language model, or of a tower; the numbers of the other are as they were."""
    source, made = model_and_run("gemma3")
    before = config_of(source)
    for block, part in (("language_model.decoder.layers", "text_config"),
                        ("vision_tower.vision_model.encoder.layers", VISION)):  # fmt: skip
        cut = tmp_path / part
        assert run(["slice", str(made), str(cut), "--layers", "0:1", "--block", block]) == 0
        changed = {
            "num_hidden_layers": 1,
            **({"layer_types": ["sliding_attention"]} if part != VISION else {}),
        }
        assert recorded(cut) == {**before, part: {**before[part], **changed}}
        assert config_of(export(cut, tmp_path / f"out_{part}"))[part]["num_hidden_layers"] == 1


def test_quantized_weights_are_the_reference_s_alone(tmp_path):
    """An export of bfloat16 or float32 weights does not say that they are codes and scales."""
    source, made = model_and_run("qwen3_vl")
    coded = {**config_of(source), "quantization_config": {"quant_method": "fp8"}}
    out = export(made, tmp_path / "out", "--hf-config", reference(tmp_path / "coded", coded))
    assert config_of(out) == config_of(source)


def program_of(folder: Path) -> str | None:
    with open_checkpoint(str(folder)) as opened:
        record = read_record(opened.files)
    return None if record is None else record.target


def test_the_program_follows_from_the_model(tmp_path, capsys):
    """Megatron-Bridge alone trains it with its towers: others are refused by name, and checks agree."""
    source = directory(tmp_path / "vl", "qwen3_vl")
    assert run(["import-hf", str(source), str(tmp_path / "run")]) == 0
    assert "for Megatron-Bridge, which alone trains a qwen3_vl" in " ".join(capsys.readouterr().out.split())
    assert program_of(tmp_path / "run") == "bridge"
    for to in ("torch_dist", "fsdp_dtensor"):
        words: list[Any] = ["import-hf", source, tmp_path / to, "--to", to]
        for target in ("main", "core-0.19"):
            text = refusal([*words, "--target", target], 2, capsys)
            assert f"--target {target}: Megatron-Bridge alone trains a qwen3_vl" in text
        assert run([str(word) for word in [*words, "--target", "bridge", "-q"]]) == 0
        assert program_of(tmp_path / to) == "bridge"
    assert run(["preflight", str(tmp_path / "fsdp_dtensor")]) == 0
    assert "run_recipe.py" in capsys.readouterr().out
    for more in (["--gpus", "2"], ["--to", "torch_dist", "--dtype", "bfloat16"]):
        given = [tmp_path / "run", tmp_path / "new", "--weights-only", "--target", "main", *more]
        assert "--target main: the model has vision_model, a module of transformers" in refusal(
            ["convert", *given], 2, capsys
        )
    text_alone = ["import-hf", str(source), str(tmp_path / "text"), "--tower", "language", "-q"]
    assert run([*text_alone, "--target", "core-0.19"]) == 0
    assert program_of(tmp_path / "text") == "core-0.19"
