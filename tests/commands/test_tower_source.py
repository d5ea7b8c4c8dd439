"""Vision-language models, one tower or all: import, export, comparison, conversion, settings, and what is refused."""

import json
import shutil
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file as save_torch

from ckpt_tools.cli.app import run
from ckpt_tools.commands.huggingface.export_source import ExportSource, reference_of
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.errors import MappingError
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.huggingface.vision import towers
from ckpt_tools.megatron.huggingface.vision.towers import RECORD
from ckpt_tools.megatron.huggingface.vision.vision_language import vision_language, vision_language_types
from ckpt_tools.megatron.run_state.record import read_record
from ckpt_tools.model.catalog import Catalog, Value
from tests.commands.made import place
from tests.megatron.huggingface.vision_language import (
    AS_FILES,
    AS_MODULES,
    INSIDE,
    KINDS,
    MOE_TEXT,
    MROPE,
    QWEN2_5,
    QWEN3_MOE,
    TEXT,
    directory,
    language_tensors,
    qwen2_5_vl,
    save,
    whole,
)

TOWER = ["--tower", "language", "-q"]


def imported(source: Path, folder: Path) -> Path:
    assert run(["import-hf", str(source), str(folder), *TOWER]) == 0
    return folder


def exported(source: Path, hf: Path, folder: Path, *words: str) -> Path:
    assert run(["export-hf", str(source), str(folder), "--hf-config", str(hf), *TOWER, *words]) == 0
    return folder


def tensors_of(folder: Path) -> dict[str, Any]:
    found = load_file(folder / "model.safetensors")
    return {key: (str(array.dtype), array.shape, array.tobytes()) for key, array in found.items()}


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def refusal(argv: list[Any], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run([str(word) for word in argv]) == code
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("names", [AS_FILES, AS_MODULES, INSIDE])
def test_every_spelling_goes_there_and_back(names, tmp_path):
    source = qwen2_5_vl(tmp_path / "vl", names)
    out = exported(imported(source, tmp_path / "run"), source, tmp_path / "out")
    assert tensors_of(out) == tensors_of(source) and config_of(out) == config_of(source) == QWEN2_5


def test_the_language_model_is_the_checkpoint_s_and_the_rest_the_directory_s(tmp_path):
    """Told apart by two models of different values; --dtype is for the language model; assets are carried."""
    one, other = qwen2_5_vl(tmp_path / "one"), qwen2_5_vl(tmp_path / "other", seed=1)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
                 "chat_template.jinja", "tokenizer.json"):  # fmt: skip
        (other / name).write_text(f'{{"of": "{name}"}}')
    source = imported(one, tmp_path / "run")
    found = tensors_of(exported(source, other, tmp_path / "out"))
    before, beside = tensors_of(one), tensors_of(other)
    assert found == {key: (beside if key.startswith("visual.") else before)[key] for key in before}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
                 "chat_template.jinja", "tokenizer.json"):  # fmt: skip
        assert (tmp_path / "out" / name).read_bytes() == (other / name).read_bytes()
    half = exported(source, other, tmp_path / "half", "--dtype", "float16", "--max-shard-size", "20KB")
    files = sorted(half.glob("model-*.safetensors"))
    assert len(files) > 1 and config_of(half)["torch_dtype"] == "float16"
    written = {key: array for file in files for key, array in load_file(file).items()}
    language = load_file(one / "model.safetensors")
    for key, array in written.items():
        assert array.tobytes() == (load_file(other / "model.safetensors")[key].tobytes() if key.startswith("visual.")
                                   else language[key].astype(np.float16).tobytes()), key  # fmt: skip


def test_a_checkpoint_for_megatron_fsdp_goes_back_too(tmp_path):
    source, made = qwen2_5_vl(tmp_path / "vl"), tmp_path / "run"
    rates = ["--lr", "1e-5", "--min-lr", "1e-6", "--weight-decay", "0.1"]
    assert run(["import-hf", str(source), str(made), *TOWER, "--to", "fsdp_dtensor", *rates]) == 0
    assert tensors_of(exported(made, source, tmp_path / "out")) == tensors_of(source)


def test_diff_compares_the_language_model(tmp_path, capsys):
    """Whether the import was faithful; one value that differs is found under the directory's name."""
    source = qwen2_5_vl(tmp_path / "vl")
    made = imported(source, tmp_path / "run")
    capsys.readouterr()
    assert run(["diff", str(source), str(made), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert any("2 tensors of the model's other towers are not compared" in note for note in report["notes"])
    assert run(["diff", str(source), str(made), "--headers"]) == 0
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] += 1
    other = save(tmp_path / "other", QWEN2_5, tensors)
    assert run(["diff", str(other), str(made)]) == 1
    assert "model.layers.1.mlp.up_proj.weight" in capsys.readouterr().out


def test_a_quantized_model_is_dequantized(tmp_path):
    """Block FP8 of the language model beside a tower that is as it was."""
    source = qwen2_5_vl(tmp_path / "vl")
    tensors = {key: torch.from_numpy(array) for key, array in load_file(source / "model.safetensors").items()}
    plain, random = dict(tensors), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes = torch.randint(0, 0x7F, tensors[name].shape, generator=random, dtype=torch.uint8)
        codes = codes.view(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{name}_scale_inv": torch.full((1, 1), 0.5)}
        plain[name] = codes.float() * 0.5
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
                "modules_to_not_convert": ["visual", "lm_head"]}  # fmt: skip
    (source / "config.json").write_text(json.dumps({**QWEN2_5, "quantization_config": settings}))
    save_torch(tensors, source / "model.safetensors")
    base = qwen2_5_vl(tmp_path / "base")
    out = exported(imported(source, tmp_path / "run"), base, tmp_path / "out")
    found = load_file(out / "model.safetensors")
    assert found.keys() == plain.keys()
    assert all(found[key].tobytes() == plain[key].numpy().tobytes() for key in plain)


def test_the_report_counts_and_names_what_is_left_out(tmp_path, capsys):
    source = qwen2_5_vl(tmp_path / "vl")
    assert run(["import-hf", str(source), str(tmp_path / "run"), "--tower", "language", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    left_out = [line for line in report["dropped"] if "of another tower" in line]
    assert [line.split(":")[0] for line in left_out] == [
        "visual.merger.ln_q.weight",
        "visual.patch_embed.proj.weight",
    ]
    assert "the language model alone: 2 tensors of other towers are left out (2 of visual)" in report["notes"]
    assert any("M-RoPE (sections [1, 1, 1])" in note for note in report["notes"])
    words = ["--hf-config", str(source), "--tower", "language", "--json"]
    assert run(["export-hf", str(tmp_path / "run"), str(tmp_path / "out"), *words]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert f"2 tensors of the other towers are taken from {source} as they are stored" in notes


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("ffn", [18, 12, 24])
def test_experts_lie_as_the_directory_has_them(ffn, by_rows, tmp_path):
    """Columns first as released, rows first as transformers 5 saves; with 12 and 24 one of the two is square."""
    text = {**MOE_TEXT, "moe_intermediate_size": ffn}
    released = language_tensors("qwen3_vl_moe_text", text)
    experts = {key for key in released if ".experts." in key}
    turned = {
        key: np.ascontiguousarray(array.transpose(0, 2, 1)) if key in experts else array
        for key, array in released.items()
    }
    config = {**QWEN3_MOE, "text_config": text}
    source = save(tmp_path / "vl", config, whole(turned if by_rows else released, AS_MODULES))
    out = exported(imported(source, tmp_path / "run"), source, tmp_path / "out")
    assert tensors_of(out) == tensors_of(source) and config_of(out) == config
    assert run(["export-hf", str(tmp_path / "run"), str(tmp_path / "plain"), "-q"]) == 0
    plain = load_file(tmp_path / "plain" / "model.safetensors")  # as Qwen3-MoE: a tensor for each expert
    for expert in range(5):
        one = f"model.layers.1.mlp.experts.{expert}."
        fused = released["model.layers.1.mlp.experts.gate_up_proj"][expert].T
        assert np.concatenate([plain[f"{one}gate_proj.weight"], plain[f"{one}up_proj.weight"]]).tobytes() == (
            np.ascontiguousarray(fused).tobytes()
        )
    assert config_of(tmp_path / "plain")["model_type"] == "qwen3_moe"


@pytest.mark.parametrize(
    ("outer", "inner", "has_head", "tied"),
    [(None, None, True, False), (False, True, True, False), (True, True, False, True), (True, False, False, True),
     (None, True, False, True)],
)  # fmt: skip
def test_whether_the_head_is_the_embedding(outer, inner, has_head, tied, tmp_path):
    """Versions of transformers write it outside of text_config, inside, or nowhere."""
    text = {key: value for key, value in MOE_TEXT.items() if key != "tie_word_embeddings"}
    config: dict[str, Any] = {
        **QWEN3_MOE,
        "tie_word_embeddings": outer,
        "text_config": {**text, "tie_word_embeddings": inner},
    }
    for part in (config, config["text_config"]):
        if part["tie_word_embeddings"] is None:
            del part["tie_word_embeddings"]
    tensors = language_tensors("qwen3_vl_moe_text", {**text, "tie_word_embeddings": not has_head})
    source = save(tmp_path / "vl", config, whole(tensors, AS_MODULES))
    out = exported(imported(source, tmp_path / "run"), source, tmp_path / "out")
    assert tensors_of(out) == tensors_of(source) and config_of(out) == config
    assert run(["export-hf", str(tmp_path / "run"), str(tmp_path / "plain"), "-q"]) == 0
    assert config_of(tmp_path / "plain")["tie_word_embeddings"] is tied


@pytest.mark.parametrize(("outer", "inner"), [(None, None), (None, False), (False, None), (False, False)])
def test_a_head_that_no_place_says_is_shared_is_missing(outer, inner, tmp_path, capsys):
    """Both releases of transformers make a new one for it."""
    text, config = (
        {key: value for key, value in one.items() if key != "tie_word_embeddings"}
        for one in (MOE_TEXT, QWEN3_MOE)
    )
    for part, said in ((config, outer), (text, inner)):
        part.update({} if said is None else {"tie_word_embeddings": said})
    config["text_config"] = text
    tensors = language_tensors("qwen3_vl_moe_text", {**text, "tie_word_embeddings": True})
    source = save(tmp_path / "vl", config, whole(tensors, AS_MODULES))
    for words in ([], TOWER):
        assert "lm_head.weight [97, 24] is missing" in refusal(
            ["import-hf", source, tmp_path / "run", *words], 5, capsys
        )


def test_a_larger_vocabulary_is_written_where_config_json_says_it(tmp_path):
    """A checkpoint with more tokens than the directory: text_config and what repeats it outside follow."""
    text = {**MOE_TEXT, "vocab_size": 101}
    more = {**QWEN3_MOE, "vocab_size": 101, "text_config": text}
    source = save(tmp_path / "more", more, whole(language_tensors("qwen3_vl_moe_text", text), AS_MODULES))
    few = save(
        tmp_path / "few",
        {**QWEN3_MOE, "vocab_size": 97},
        whole(language_tensors("qwen3_vl_moe_text", MOE_TEXT), AS_MODULES),
    )
    out = exported(imported(source, tmp_path / "run"), few, tmp_path / "out")
    assert tensors_of(out) == tensors_of(source)
    assert config_of(out) == more


def test_what_is_refused_on_import(tmp_path, capsys):
    source = qwen2_5_vl(tmp_path / "vl")
    out = tmp_path / "out"
    text = refusal(["import-hf", source, out, *TOWER, "--adapter", tmp_path / "peft"], 2, capsys)
    assert "--adapter together with --tower" in text
    tensors = load_file(source / "model.safetensors")

    def changed(config: dict[str, Any], arrays: dict[str, Any]) -> str:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        return refusal(["import-hf", save(folder, config, arrays), out, *TOWER], 5, capsys)

    text = changed({**QWEN2_5, "model_type": "llava"}, tensors)
    assert (
        "model_type 'llava'" in text
        and "gemma3, mistral3, qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe" in text
    )
    text = changed(QWEN2_5, {**tensors, "audio.proj.weight": tensors["lm_head.weight"]})
    assert "1 tensors belong neither to the language model (model.) nor to the other modules" in text
    assert "audio.proj.weight" in text
    text = changed({**QWEN2_5, "text_config": {**TEXT, "model_type": "llama"}}, tensors)
    assert "is qwen2_5_vl_text, text_config has model_type 'llama'" in text
    text = changed({**QWEN3_MOE, "text_config": None}, tensors)
    assert "has no text_config" in text
    text = changed(QWEN2_5, {key: tensors[key] for key in tensors if "embed_tokens" not in key})
    assert "no tensor is the embedding of a language model" in text
    experts = whole(language_tensors("qwen3_vl_moe_text", MOE_TEXT), AS_MODULES)
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    turned = {**experts, name: np.ascontiguousarray(experts[name].transpose(0, 2, 1))}
    assert "1.mlp.experts.down_proj has shape [5, 24, 18], config.json asks for [5, 18, 24]" in changed(
        QWEN3_MOE, turned
    )
    assert not out.exists()


def test_what_is_refused_on_export(tmp_path, capsys):
    source, out = qwen2_5_vl(tmp_path / "vl"), tmp_path / "out"
    made = imported(source, tmp_path / "run")
    back = ["export-hf", made, out, *TOWER]
    assert "--hf-config names the directory of the whole model" in refusal(back, 2, capsys)
    text = refusal(["export-hf", made, out, "--hf-config", source, "-q"], 5, capsys)
    assert "--tower language" in text
    for words in (["--quantize", "fp8-block"], ["--peft"]):
        text = refusal([*back, "--hf-config", source, *words], 2, capsys)
        assert f"together with {words[0]} is not written" in text
    tensors = load_file(source / "model.safetensors")
    alone = save(tmp_path / "alone", QWEN2_5, {k: tensors[k] for k in tensors if not k.startswith("visual.")})
    text = refusal([*back, "--hf-config", alone], 5, capsys)
    assert "holds no tensors of visual" in text and "Without --tower and --hf-config" in text
    quantized = save(tmp_path / "fp8", {**QWEN2_5, "quantization_config": {"quant_method": "fp8"}}, tensors)
    assert "are quantized" in refusal([*back, "--hf-config", quantized], 3, capsys)
    other = save(tmp_path / "base", {**QWEN2_5, "rope_theta": 5e5}, tensors)
    text = refusal([*back, "--hf-config", other], 5, capsys)
    assert "rope_theta: the checkpoint has 1000000.0, the reference config 500000.0" in text
    text = refusal(["export-hf", made, source, *TOWER, "--hf-config", source, "--overwrite"], 2, capsys)
    assert str(source) in text and load_file(source / "model.safetensors").keys() == tensors.keys()
    assert not out.exists()


def test_damage_in_another_tower_is_found_before_anything_is_written(tmp_path, capsys):
    source = qwen2_5_vl(tmp_path / "vl")
    made = imported(source, tmp_path / "run")
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    words = ["export-hf", made, tmp_path / "out", *TOWER, "--hf-config", source]
    assert "truncated" in refusal(words, 4, capsys)
    assert not (tmp_path / "out").exists()


FRESH = ["--fresh-optimizer", "--lr", "1e-5", "--min-lr", "1e-6", "--weight-decay", "0.1"]


def catalog_of(folder: Path) -> Catalog:
    with closing(open_files(str(folder))) as files:
        return read_catalog(files)


def imported_as(source: Path, folder: Path, *words: str) -> Path:
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
    return source, imported_as(source, place())


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
        imported_as(tmp_path / "both", tmp_path / "run"), tmp_path / "out", "--hf-config", tmp_path / "both"
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
    made = imported_as(source, tmp_path / "run")
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
    assert imported_as(tmp_path / "out", tmp_path / "plain")  # a whole model of its family
    if name == "qwen3_vl":  # by its arguments too
        export(made, tmp_path / "alone", "--tower", "language")
        assert tensors_of(tmp_path / "alone") == tensors_of(tmp_path / "out")


@pytest.mark.usefixtures("nothing_recorded")
def test_what_is_refused(tmp_path, capsys):
    source, out = directory(tmp_path / "vl", "qwen3_vl"), tmp_path / "out"
    made = imported_as(source, tmp_path / "run")
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
    text = refusal(["export-hf", imported_as(qwen2_5_vl(tmp_path / "few"), tmp_path / "text", "--tower", "language"),
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
    made = imported_as(source, tmp_path / "run", "--iteration", "2")
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
