"""A vision-language model with all its towers: import, export, comparison, conversion, and what is refused."""

import json
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckpt_tools.cli.app import run
from ckpt_tools.commands.huggingface.export_source import ExportSource, reference_of
from ckpt_tools.errors import MappingError
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.huggingface.vision import towers
from ckpt_tools.megatron.huggingface.vision.vision_language import vision_language, vision_language_types
from ckpt_tools.model.catalog import Catalog, Value
from tests.commands.made import place
from tests.commands.test_tower_source import config_of, refusal, tensors_of
from tests.megatron.huggingface.vision_language import KINDS, MROPE, directory, qwen2_5_vl, save

FRESH = ["--fresh-optimizer", "--lr", "1e-5", "--min-lr", "1e-6", "--weight-decay", "0.1"]


def catalog_of(folder: Path) -> Catalog:
    with closing(open_files(str(folder))) as files:
        return read_catalog(files)


def imported(source: Path, folder: Path, *words: str) -> Path:
    assert run(["import-hf", str(source), str(folder), "-q", *words]) == 0
    return folder


def export(source: Path, out: Path, *words: Any) -> Path:
    assert run(["export-hf", str(source), str(out), "-q", *(str(word) for word in words)]) == 0
    return out


def changed(source: Path, folder: Path, **arrays: Any) -> Path:
    """The directory with other tensors; None for none."""
    tensors = {**load_file(source / "model.safetensors"), **arrays}
    return save(
        folder, config_of(source), {key: array for key, array in tensors.items() if array is not None}
    )


@cache
def model_and_run(name: str) -> tuple[Path, Path]:
    """A model of a kind, and what an import makes of it."""
    source = directory(place(), name)
    return source, imported(source, place())


@cache
def fsdp_of(name: str) -> Path:
    """And a job of Megatron-FSDP that starts from it."""
    run_of, out = model_and_run(name)[1], place()
    assert run(["convert", str(run_of), str(out), "--gpus", "2", "--weights-only", *FRESH, "-q"]) == 0
    return out


@pytest.fixture
def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports write what they wrote before they recorded config.json."""
    monkeypatch.setattr(towers, "record_of", lambda _: {})


@pytest.mark.parametrize("name", KINDS)
def test_all_towers_go_there_and_back_in_either_format(name, tmp_path):
    """Import, export, and the other format between; a directory of config.json alone gives the released names."""
    source, made = model_and_run(name)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((source / "config.json").read_bytes())
    out = export(made, tmp_path / "out", "--hf-config", bare)
    assert tensors_of(out) == tensors_of(source) and config_of(out) == config_of(source)
    fsdp = fsdp_of(name)
    assert tensors_of(export(fsdp, tmp_path / "again", "--hf-config", source)) == tensors_of(source)
    back = tmp_path / "back"
    assert run(["convert", str(fsdp), str(back), "--to", "torch_dist", "--weights-only", "-q"]) == 0
    for one, other in ((source, made), (source, fsdp)):
        assert run(["diff", str(one), str(other)]) == 0
        assert run(["verify", str(other)]) == 0
        assert run(["diff", str(one), str(other), "--headers"]) == 0
    keys = [set(catalog_of(folder).tensors) for folder in (made / "release", back / "iter_0000001")]
    assert keys[0] == keys[1]


def test_layers_of_transformers_modules_are_stored_one_by_one(tmp_path):
    """As Bridge's runs have them, and without extra states; those of Megatron's own are stacked."""
    source, made = model_and_run("gemma3")
    catalog = catalog_of(made / "release")
    assert "vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight" in catalog.tensors
    assert "language_model.decoder.layers.mlp.linear_fc1.weight" in catalog.tensors
    assert not [key for key in catalog.objects if key.startswith("vision_tower.")]
    assert catalog.tensors["multi_modal_projector.proj.weight"].shape == (24, 16)
    assert tensors_of(source)["multi_modal_projector.mm_input_projection_weight"][1] == (16, 24)


def with_tied(source: Path, folder: Path, outer: bool | None, inner: bool | None) -> Path:
    """The config.json of a model alone, with what is said of its head outside of text_config and inside."""
    config = config_of(source)
    for part, value in ((config, outer), (config.get("text_config"), inner)):
        if part is not None:
            part.pop("tie_word_embeddings", None)
            part.update({} if value is None else {"tie_word_embeddings": value})
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("alone", [(), ("--tower", "language")])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "qwen2_5_vl"])
def test_the_checkpoint_says_whether_the_head_is_the_embedding(name, alone, tmp_path, capsys):
    """A config.json that says otherwise is refused; one that is silent, or unsure, gets the answer in both places."""
    source, run_of = model_and_run(name)
    tied = not any(name.endswith("lm_head.weight") for name in tensors_of(source))

    other: tuple[tuple[bool | None, bool | None], ...] = (
        (not tied, not tied),
        (None, not tied),
        (not tied, tied),
    )
    for outer, inner in other:
        asked = with_tied(source, tmp_path / "reference", outer, inner)
        words = ["export-hf", str(run_of), str(tmp_path / "out"), "--hf-config", str(asked), *alone]
        assert run(words) == 5
        assert f"tie_word_embeddings {str(not tied).lower()}, and the checkpoint" in capsys.readouterr().err
    unsure: tuple[tuple[bool | None, bool | None], ...] = ((None, None), (tied, None), (tied, not tied))
    for outer, inner in unsure:
        asked = with_tied(source, tmp_path / "reference", outer, inner)
        out = export(run_of, tmp_path / f"out_{outer}_{inner}", "--hf-config", asked, *alone)
        made = config_of(out)
        assert made["tie_word_embeddings"] is tied
        assert alone or made["text_config"]["tie_word_embeddings"] is tied


def test_a_stored_head_is_kept_where_one_place_says_that_it_is_shared(tmp_path):
    source, _ = model_and_run("qwen3_vl")
    tensors = dict(load_file(source / "model.safetensors"))
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].copy()
    config = {**config_of(source), "tie_word_embeddings": True}
    config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    save(tmp_path / "both", config, tensors)
    made = export(
        imported(tmp_path / "both", tmp_path / "run"), tmp_path / "out", "--hf-config", tmp_path / "both"
    )
    assert tensors_of(made) == tensors_of(tmp_path / "both") and config_of(made) == config


def test_no_head_and_two_answers(tmp_path, capsys):
    source, _ = model_and_run("qwen3_vl")
    tensors = {
        name: array
        for name, array in load_file(source / "model.safetensors").items()
        if "lm_head" not in name
    }
    config = {**config_of(source), "tie_word_embeddings": False}
    config["text_config"] = {**config["text_config"], "tie_word_embeddings": True}
    save(tmp_path / "two", config, tensors)
    assert run(["import-hf", str(tmp_path / "two"), str(tmp_path / "run")]) == 5
    assert "false, and true in text_config, and there is no lm_head.weight" in capsys.readouterr().err


def test_a_job_of_megatron_lm_is_not_ready_for_it(tmp_path, capsys):
    made = model_and_run("qwen3_vl")[1]
    assert run(["convert", str(made), str(tmp_path / "fsdp"), "--gpus", "2", "--weights-only", *FRESH]) == 0
    assert "no fp32 masters in the source" in capsys.readouterr().out  # weights are no masters
    for target in ("core-0.16", "main"):
        assert run(["preflight", str(tmp_path / "fsdp"), "--target", target]) == 1
        assert "vision_model next to its language model" in capsys.readouterr().out
    assert run(["preflight", str(tmp_path / "fsdp"), "--target", "bridge"]) == 0


def test_megatron_fsdp_asks_for_every_fc1_of_a_swiglu_model_in_halves():
    """By its name, where no transformer layer tells otherwise: that of a tower too, whatever it computes."""
    keys = catalog_of(fsdp_of("qwen3_vl") / "iter_0000001").tensors
    found = {
        key: keys[key].shape for key in keys if key.startswith("model.module.vision_model") and "fc1.w" in key
    }
    assert found == {
        **{f"model.module.vision_model.blocks.{layer}.mlp.linear_fc1.weight_{half}": (10, 16)
           for layer in (0, 1) for half in "wv"},
        "model.module.vision_model.merger.linear_fc1.weight": (64, 64),
        "model.module.vision_model.deepstack_merger_list.0.linear_fc1.weight": (64, 64),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
@pytest.mark.usefixtures("nothing_recorded")
def test_a_tower_that_is_not_whole_is_refused_by_name(name, tmp_path, capsys):
    source, out = directory(tmp_path / "vl", name), tmp_path / "out"
    key = {"qwen2_5_vl": "visual.blocks.1.attn.qkv.bias",
           "gemma3": "vision_tower.vision_model.encoder.layers.1.layer_norm2.bias"}[name]  # fmt: skip
    stray = key.replace(".1.", ".2.")
    text = refusal(["import-hf", changed(source, tmp_path / "few", **{key: None}), out], 5, capsys)
    assert f"not a whole {name} model" in text and f"{key} [" in text and "is missing" in text
    wrong = {key: np.zeros(5, np.float32), stray: np.zeros(5, np.float32)}
    text = refusal(["import-hf", changed(source, tmp_path / "odd", **wrong), out], 5, capsys)
    assert f"{key} has shape [5], config.json asks for" in text
    assert f"{stray}: no rule of {name} has this tensor" in text
    made = imported(source, tmp_path / "run")
    config = config_of(source)
    layers = "depth" if name == "qwen2_5_vl" else "num_hidden_layers"
    config["vision_config"] = {**config["vision_config"], layers: 1}
    (tmp_path / "less").mkdir()
    (tmp_path / "less" / "config.json").write_text(json.dumps(config))
    text = refusal(["export-hf", made, out, "--hf-config", tmp_path / "less"], 5, capsys)
    assert f"no rule of {name} has this parameter" in text and key.rpartition(".1.")[2] in text
    for value in (0.5, -1, 1 << 60, "2"):
        config["vision_config"][layers] = value
        (tmp_path / "less" / "config.json").write_text(json.dumps(config))
        text = refusal(["export-hf", made, out, "--hf-config", tmp_path / "less"], 5, capsys)
        assert f"vision_config: {layers} is '{value}', expected a number" in text
    assert not out.exists()


def test_one_other_value_of_a_vision_tower_is_found(tmp_path, capsys):
    source, made = model_and_run("qwen3_vl")
    key = "model.visual.deepstack_merger_list.0.linear_fc2.weight"
    array = load_file(source / "model.safetensors")[key]
    array[3, 5] += 1
    capsys.readouterr()
    assert run(["diff", str(changed(source, tmp_path / "other", **{key: array})), str(made)]) == 1
    assert key in capsys.readouterr().out
    few, stray = changed(source, tmp_path / "few", **{key: None}), "model.visual.blocks.2.norm1.bias"
    assert run(["diff", str(few), str(made), "--headers"]) == 1
    assert f"{key}: only in B (float32 [24, 64])" in " ".join(capsys.readouterr().out.split())
    more = changed(source, tmp_path / "more", **{stray: array})
    assert run(["diff", str(more), str(made), "--headers"]) == 1
    assert stray in capsys.readouterr().out


@pytest.mark.parametrize(("name", "architecture"), [("qwen3_vl", "Qwen3ForCausalLM"), ("gemma3", "Gemma3ForCausalLM"),
                                                    ("qwen3_vl_moe", "Qwen3MoeForCausalLM")])  # fmt: skip
def test_the_language_model_alone(name, architecture, tmp_path, capsys):
    """As a model of its own, by the whole model's config.json or that of the text; what is left out is named."""
    source, made = model_and_run(name)
    words = ["--tower", "language", "--hf-config", str(source)]
    assert run(["export-hf", str(made), str(tmp_path / "out"), *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "parameters of other parts are left out" in text and "of another part than the language model" in text
    )
    config = config_of(tmp_path / "out")
    assert config["architectures"] == [architecture] and "vision_config" not in config
    assert "mrope_section" not in json.dumps(config)
    assert imported(tmp_path / "out", tmp_path / "plain")  # a whole model of its family
    if name == "qwen3_vl":  # by its arguments too
        export(made, tmp_path / "alone", "--tower", "language")
        assert tensors_of(tmp_path / "alone") == tensors_of(tmp_path / "out")


@pytest.mark.usefixtures("nothing_recorded")
def test_what_is_refused(tmp_path, capsys):
    source, out = directory(tmp_path / "vl", "qwen3_vl"), tmp_path / "out"
    made = imported(source, tmp_path / "run")
    text = refusal(["export-hf", made, out], 5, capsys)
    assert "a language model (19 parameters) and other parts (39 of vision_model)" in text
    assert "--hf-config DIR" in text and "known are gemma3, mistral3, qwen2_5_vl, qwen3_vl" in text
    assert "--tower language" in text
    other = save(tmp_path / "llava", {**config_of(source), "model_type": "llava"}, {})
    text = refusal(["export-hf", made, out, "--hf-config", other], 5, capsys)
    assert "this one has model_type 'llava'" in text
    text = refusal(["export-hf", made, out, "--hf-config", source, "--quantize", "fp8-block"], 2, capsys)
    assert "a vision-language model is written unquantized only" in text
    config = config_of(source)
    config["text_config"]["rope_scaling"] = {**MROPE, "mrope_section": [3, 1, 1]}
    turned = save(tmp_path / "turned", config, {})
    text = refusal(["export-hf", made, out, "--hf-config", turned], 5, capsys)
    assert "mrope_section: the checkpoint has [2, 2, 1], config.json [3, 1, 1]" in text
    old = save(tmp_path / "old", {**config_of(source), "model_type": "qwen2_vl"}, {})
    for words in (["import-hf", old, out], ["export-hf", made, out, "--hf-config", old]):
        assert "Megatron-Bridge has no model for" in refusal(words, 5, capsys)
    text = refusal(["export-hf", imported(qwen2_5_vl(tmp_path / "few"), tmp_path / "text", "--tower", "language"),
                    out, "--hf-config", source], 5, capsys)  # fmt: skip
    assert "--tower language" in text
    assert not out.exists()


@pytest.mark.parametrize("tower", ["siglip", [1], None])
def test_a_tower_that_is_not_described(tower, tmp_path, capsys):
    """A config.json that says nothing of the vision tower is none of the model, for who reads or compares it."""
    (source, made), out = model_and_run("qwen3_vl"), tmp_path / "out"
    bare = save(
        tmp_path / "bare",
        {**config_of(source), "vision_config": tower},
        load_file(source / "model.safetensors"),
    )
    for words in (["import-hf", bare, out], ["export-hf", made, out, "--hf-config", bare]):
        assert "has no vision_config" in refusal(words, 5, capsys)
    assert not out.exists()


def test_megatron_s_own_llava_is_called_so():
    names = ("vision_model.class_token", "vision_projection.encoder.linear_fc1.weight")
    bases = dict.fromkeys(("embedding.word_embeddings.weight", *names), Value("float32", (1,), ()))
    source = ExportSource(Catalog("", {}, {}), bases, None, {}, "none", beside=names)
    with pytest.raises(MappingError, match=r"Megatron-LM's own LLaVAModel.* no class of transformers"):
        reference_of(source, None, False, None)


def test_the_files_of_vision_language_models_say_what_they_must():
    """Each can be read; parts that a class has no tensor for are nowhere named."""
    for name in vision_language_types():
        kind = vision_language(name)
        assert kind.modules and kind.architecture.endswith("ForConditionalGeneration")
        assert not kind.rules or {
            rule.hf[0].removeprefix("model.").partition(".")[0] for rule in kind.rules
        } == set(kind.modules)
