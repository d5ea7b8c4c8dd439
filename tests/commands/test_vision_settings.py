"""The settings of a vision-language model that no tensor tells: a run records them, and they are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.opened import open_checkpoint
from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface import tower_targets
from ckpt_tools.megatron.huggingface.tower_settings import RECORD, compare_towers
from ckpt_tools.megatron.huggingface.vision_language import vision_language
from ckpt_tools.megatron.record import read_record
from tests.commands.test_both_towers import FRESH, export, imported
from tests.commands.test_tower_source import config_of, refusal, tensors_of
from tests.megatron.huggingface.vision_language import KINDS, directory

VISION = "vision_config"
QWEN = {"vision_config.num_heads": (16, 8), "vision_config.patch_size": (4, 8),
        "vision_config.spatial_merge_size": (2, 4), "image_token_id": (151655, 7),
        "video_token_id": (151656, 7), "vision_start_token_id": (151652, 7)}  # fmt: skip
QWEN3 = {**QWEN, "vision_config.hidden_act": ("gelu_pytorch_tanh", "silu"),
         "vision_config.deepstack_visual_indexes": ([0], [1])}  # fmt: skip
SIGLIP = {"vision_config.num_attention_heads": (12, 4), "vision_config.hidden_act": ("gelu_pytorch_tanh", "gelu"),
          "vision_config.patch_size": (4, 8), "vision_config.layer_norm_eps": (1e-6, 1e-5),
          "mm_tokens_per_image": (256, 4), "image_token_index": (262144, 7)}  # fmt: skip
PIXTRAL = {"vision_config.num_attention_heads": (16, 4), "vision_config.hidden_act": ("gelu", "silu"),
           "vision_config.patch_size": (4, 8), "vision_config.rope_theta": (10000.0, 500.0),
           "vision_config.image_size": (16, 32), "spatial_merge_size": (2, 4), "image_token_index": (10, 7),
           "vision_feature_layer": (-1, -2), "projector_hidden_act": ("gelu", "silu")}  # fmt: skip
# By model_type: what it records, and another value.
CHANGED: dict[str, dict[str, tuple[Any, Any]]] = {
    "qwen2_5_vl": {**QWEN, "vision_config.hidden_act": ("silu", "gelu"), "vision_config.window_size": (112, 56),
                   "vision_config.fullatt_block_indexes": ([7, 15, 23, 31], [1]),
                   "vision_config.tokens_per_second": (4, 2)},
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "gemma3": SIGLIP,
    "mistral3": PIXTRAL,
}  # fmt: skip


def with_fields(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The config.json with other values; `vision_config.` is before those of that part."""
    inside = {name.removeprefix(f"{VISION}."): v for name, v in fields.items() if name.startswith(VISION)}
    outside = {name: value for name, value in fields.items() if not name.startswith(VISION)}
    return {**config, **outside, VISION: {**config[VISION], **inside}}


def reference(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def recorded(folder: Path) -> Any:
    """The config.json that a run records."""
    with open_checkpoint(str(folder)) as opened:
        return opened.common.args.get(RECORD)


@pytest.mark.parametrize("name", KINDS)
def test_a_reference_with_another_setting_is_refused_with_both_values(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Field by field, whether it is said or what the class takes; the other way round too, and by every command."""
    source = directory(tmp_path / "vl", name)
    made, config = imported(source, tmp_path / "run"), config_of(source)
    for field, (ours, other) in CHANGED[name].items():
        asked = reference(tmp_path / "other", with_fields(config, **{field: other}))
        text = refusal(["export-hf", made, tmp_path / "out", "--hf-config", asked], 5, capsys)
        assert f"- {field}: the checkpoint has {ours!r}, the reference config {other!r}" in text
        if field in (
            f"{VISION}.hidden_act",
            "image_token_id",
            "image_token_index",
        ):  # nothing told by a shape
            text = refusal(
                ["export-hf", made, tmp_path / "out", "--hf-config", reference(asked, config), "--dry-run"],
                0,
                capsys,
            )
            assert "the checkpoint has" not in text
            (source / "config.json").write_text(json.dumps(with_fields(config, **{field: other})))
            back = imported(source, tmp_path / f"back_{field}")
            (source / "config.json").write_text(json.dumps(config))
            text = refusal(["export-hf", back, tmp_path / "out", "--hf-config", source], 5, capsys)
            assert f"- {field}: the checkpoint has {other!r}, the reference config {ours!r}" in text
            assert field in refusal(["diff", source, back], 5, capsys)
            assert run(["verify", str(source), "--against", str(back)]) == 1
            assert f"{field}: the checkpoint has" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", KINDS)
def test_what_the_class_takes_may_be_said(name: str, tmp_path: Path) -> None:
    """And a rotary base in the form of transformers 5, ids of tokens under both of their names."""
    source = directory(tmp_path / "vl", name)
    made = imported(source, tmp_path / "run")
    config = with_fields(
        config_of(source),
        **{field: ours for field, (ours, _) in CHANGED[name].items()},
        transformers_version="5.0",
    )
    if "image_token_index" in config:
        config["image_token_id"] = config.pop("image_token_index")
    config[VISION].pop("rope_theta", None)
    config[VISION] |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"}, "dtype": "float32"}
    out = export(made, tmp_path / "out", "--hf-config", reference(tmp_path / "said", config))
    assert config_of(out) == config and tensors_of(out) == tensors_of(source)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_is_exported_by_what_it_records(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After every command that writes a run anew; the tokenizer is asked for."""
    source = directory(tmp_path / "vl", name)
    made = imported(source, tmp_path / "run", "--iteration", "2")
    capsys.readouterr()
    assert run(["export-hf", str(made), str(tmp_path / "out")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "config.json is made of the one that the checkpoint records" in told
    assert "no tokenizer was written; pass --hf-config DIR" in told
    assert "not known" not in told and "has none" not in told.partition("note")[2]
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


def test_a_slice_records_the_layers_that_are_left(tmp_path: Path) -> None:
    """Of the language model, or of a tower; the numbers of the other are as they were."""
    source = directory(tmp_path / "vl", "gemma3")
    made, before = imported(source, tmp_path / "run"), config_of(source)
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


def test_an_older_run_says_that_nothing_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = directory(tmp_path / "vl", "qwen3_vl")
    monkeypatch.setattr(tower_targets, "record_of", lambda _: {})
    made = imported(source, tmp_path / "run")
    other = reference(tmp_path / "other", with_fields(config_of(source), **{f"{VISION}.num_heads": 8}))
    capsys.readouterr()
    assert run(["export-hf", str(made), str(tmp_path / "out"), "--hf-config", str(other)]) == 0
    assert "those of config.json: the checkpoint has none" in " ".join(capsys.readouterr().out.split())
    assert "--hf-config DIR" in refusal(["export-hf", made, tmp_path / "none"], 5, capsys)


def test_a_field_that_nothing_is_known_about_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = directory(tmp_path / "vl", "gemma3")
    config = with_fields(config_of(source), **{f"{VISION}.novel": 3, "surprise": [1]})
    reference(source, config)
    assert run(["import-hf", str(source), str(tmp_path / "run")]) == 0
    assert "taken for irrelevant: vision_config.novel=3" in " ".join(capsys.readouterr().out.split())
    other = reference(tmp_path / "other", with_fields(config, **{f"{VISION}.novel": 4, "surprise": None}))
    assert run(["export-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--hf-config", str(other)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "surprise (the checkpoint has [1], the reference config None)" in text
    assert "vision_config.novel (the checkpoint has 3, the reference config 4)" in text


def test_quantized_weights_are_the_reference_s_alone(tmp_path: Path) -> None:
    """An export of bfloat16 or float32 weights does not say that they are codes and scales."""
    source = directory(tmp_path / "vl", "qwen3_vl")
    made = imported(source, tmp_path / "run")
    coded = {**config_of(source), "quantization_config": {"quant_method": "fp8"}}
    out = export(made, tmp_path / "out", "--hf-config", reference(tmp_path / "coded", coded))
    assert config_of(out) == config_of(source)


def of_bridge(config: dict[str, Any], how: str) -> dict[str, Any]:
    """A configuration as Bridge writes one of transformers into a run_config.yaml."""
    target = {"_target_": "transformers.models.x.configuration_x.XConfig", "_call_": True}
    return {**target, "config_dict": config} if how == "from_dict" else {**target, **config}


@pytest.mark.parametrize("how", ["from_dict", "fields"])
def test_a_run_of_bridge_is_compared_by_its_provider(how: str) -> None:
    """Of Mistral 3 by its whole config.json, of others by vision_config and the ids of tokens."""
    vision = {"num_heads": 4, "depth": 2}
    config = {"model_type": "qwen3_vl", VISION: vision, "image_token_id": 95, "text_config": {}}
    kind, names = vision_language("qwen3_vl"), ("image_token_id", "video_token_id", "vision_start_token_id")
    settings = {VISION: of_bridge(vision, how), **dict(zip(names, (95, 151656, 151652), strict=True))}
    settings |= {"spatial_merge_size": 3, "patch_size": 14}  # the provider's own, which no config.json gives
    notes = compare_towers(kind, {"transformer": settings}, config)
    assert notes == ("not recorded in the checkpoint, and as config.json has them: vision_end_token_id",)
    for field, value in ((f"{VISION}.num_heads", 8), ("image_token_id", 96)):
        with pytest.raises(MappingError, match=f"{field}: the checkpoint has"):
            compare_towers(kind, settings, with_fields(config, **{field: value}))
    mistral = {"model_type": "mistral3", VISION: {"num_attention_heads": 4}, "spatial_merge_size": 2}
    record = {RECORD: of_bridge(mistral, how), "image_token_id": 7}
    assert compare_towers(vision_language("mistral3"), record, mistral) == ()
    with pytest.raises(
        MappingError, match="spatial_merge_size: the checkpoint has 2, the reference config 4"
    ):
        compare_towers(vision_language("mistral3"), record, {**mistral, "spatial_merge_size": 4})


def program_of(folder: Path) -> str | None:
    with open_checkpoint(str(folder)) as opened:
        record = read_record(opened.files)
    return None if record is None else record.target


def test_the_program_follows_from_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
