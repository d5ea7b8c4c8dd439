"""`--tower language`: a vision-language model's language model alone, and back among the other towers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file as save_torch

from ckpt_tools.cli.app import run
from tests.megatron.huggingface.vision_language import (
    AS_FILES,
    AS_MODULES,
    INSIDE,
    MOE_TEXT,
    QWEN2_5,
    QWEN3_MOE,
    TEXT,
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
    for place in (config, config["text_config"]):
        if place["tie_word_embeddings"] is None:
            del place["tie_word_embeddings"]
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
    for place, said in ((config, outer), (text, inner)):
        place.update({} if said is None else {"tie_word_embeddings": said})
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
