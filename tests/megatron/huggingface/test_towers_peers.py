"""Vision-language models, whole and their language models alone, against the classes of transformers 4 and 5.

`test_transformers.py` runs this file under either.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.megatron.huggingface.vision.vision_language import vision_language, vision_language_types
from tests.megatron.huggingface.models import BASE, HEAD, MOE, eager, logits
from tests.verify.test_hf_folder import check_names, names

transformers = pytest.importorskip("transformers", reason="the optional peer transformers is not installed")
import torch  # noqa: E402  # after the skip
from safetensors.numpy import load_file  # noqa: E402

transformers.utils.logging.set_verbosity(logging.ERROR)

QWEN2_5 = {**BASE, "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}
QWEN3: dict[str, Any] = {**BASE, **HEAD, "rope_theta": 5e5,
         "rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 1], "mrope_interleaved": True}}  # fmt: skip
YARN = {**QWEN3["rope_scaling"], "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VISUAL = {"depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4,
          "out_hidden_size": 24}  # fmt: skip
VISUAL2 = {**VISUAL, "window_size": 16, "fullatt_block_indexes": [1]}
VISUAL3 = {**VISUAL, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
SMALL = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
         "image_size": 16, "patch_size": 4}  # fmt: skip
GEMMA = {**BASE, **HEAD, "query_pre_attn_scalar": 10, "sliding_window": 8, "sliding_window_pattern": 2,
         "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True}  # fmt: skip
TIED = {"tie_word_embeddings": True}
TOKENS = {"image_token_id": 95, "video_token_id": 94, "vision_start_token_id": 93}
INDEX = {"image_token_index": 95}
PATCHES = {
    "pixel_values": (16, 96),
    "image_grid_thw": [[1, 4, 4]],
}  # 4 x 4 patches, two frames of 3 x 4 x 4 values
PIXELS = {"pixel_values": (1, 3, 16, 16)}

# By name: prefix of the classes, text_config, vision_config, further fields
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", QWEN2_5, {"depth": 1, "embed_dim": 16, "hidden_size": 24, "num_heads": 2,
                                      "patch_size": 4, "mlp_ratio": 2}, TOKENS),
    "qwen2_5_vl": ("Qwen2_5_VL", QWEN2_5, VISUAL2, TOKENS),
    "qwen2_5_vl_flat": ("Qwen2_5_VL", QWEN2_5, VISUAL2, TOKENS),
    "qwen3_vl": ("Qwen3VL", QWEN3, VISUAL3, TOKENS),
    "qwen3_vl_yarn": ("Qwen3VL", {**QWEN3, "rope_scaling": YARN}, VISUAL3, TOKENS),
    "qwen3_vl_tied": ("Qwen3VL", {**QWEN3, **TIED}, VISUAL3, {**TIED, **TOKENS}),
    "qwen3_vl_moe": ("Qwen3VLMoe", {**QWEN3, **MOE}, VISUAL3, TOKENS),
    "gemma3": ("Gemma3", GEMMA, {**SMALL, "model_type": "siglip_vision_model"},
               {"mm_tokens_per_image": 4, **TIED, **INDEX}),
    "gemma3_no_head": ("Gemma3", GEMMA, {**SMALL, "model_type": "siglip_vision_model", "vision_use_head": False},
                       {"mm_tokens_per_image": 4, **TIED, **INDEX}),
    "mistral3": ("Mistral3", {**BASE, **HEAD, "model_type": "mistral"},
                 {**SMALL, "head_dim": 8, "model_type": "pixtral"}, {"tie_word_embeddings": False, **INDEX}),
    "mistral3_bias": ("Mistral3", {**BASE, **HEAD, "model_type": "mistral"},
                      {**SMALL, "head_dim": 8, "model_type": "pixtral"},
                      {"tie_word_embeddings": False, "multimodal_projector_bias": True, **INDEX}),
}  # fmt: skip


@dataclass
class Case:
    """A model saved by its class, and the run that its language model became."""

    directory: Path
    run: Path
    want: Any  # logits of text
    loader: Any


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    prefix, text, vision, fields = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=vision, **fields)
    loader = getattr(transformers, f"{prefix}ForConditionalGeneration")
    torch.manual_seed(0)
    model = loader._from_config(config, **eager()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + 0.1)
    model.save_pretrained(folder / "vl")
    if request.param.endswith("_flat"):  # as the released models have it
        path = folder / "vl" / "config.json"
        said = json.loads(path.read_text())
        said.pop("text_config")
        path.write_text(json.dumps({**said, **QWEN2_5, "hidden_act": "silu", "rms_norm_eps": 1e-5}))
    assert run(["import-hf", str(folder / "vl"), str(folder / "run"), "--tower", "language", "-q"]) == 0
    return Case(folder / "vl", folder / "run", logits(loaded(loader, folder / "vl")), loader)


def seen(model: Any, seed: int = 1) -> Any:
    """Logits for tokens with an image of random values among them."""
    torch.manual_seed(seed)
    is_qwen = type(model).__name__.startswith("Qwen")
    image: dict[str, Any] = {
        name: torch.tensor(value) if isinstance(value, list) else torch.randn(value)
        for name, value in (PATCHES if is_qwen else PIXELS).items()
    }
    if type(model).__name__.startswith("Mistral"):
        image["image_sizes"] = torch.tensor([[16, 16]])
    tokens = torch.tensor([[1, 2, 93, 95, 95, 95, 95, 3, 4]])
    if type(model).__name__.startswith("Gemma"):
        image["token_type_ids"] = (tokens == 95).long()
    if transformers.__version__ >= "5" and is_qwen:
        image["mm_token_type_ids"] = (tokens == 95).long()
    with torch.no_grad():
        return model(input_ids=tokens, **image).logits


def loaded(loader: Any, folder: Path) -> Any:
    """The model of a directory; every tensor found, none left over."""
    model, info = loader.from_pretrained(folder, output_loading_info=True, **eager())
    assert not any(info.values()), info
    for parameter in model.parameters():  # where a file's bytes begin decides how a CPU adds them up
        parameter.data = parameter.data.clone()
    return model.eval()


def test_verify_knows_what_the_class_has(case):
    if case.loader.__name__.startswith("Qwen2VL"):  # whose vision tower has no rules
        (warned,) = names(case.directory)
        assert "19 tensors of other towers than the language model" in warned.message
    else:
        check_names(case.directory, ["lm_head.weight"])


def test_back_in_the_whole_model(case, tmp_path):
    """Every tensor of every tower under its name, bit for bit; config.json as it was; the class computes the same."""
    words = ["--hf-config", str(case.directory), "--tower", "language", "-q"]
    assert run(["export-hf", str(case.run), str(tmp_path / "out"), *words]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (case.directory, tmp_path / "out"))
    assert after.keys() == before.keys()
    for key, array in before.items():
        assert (array.dtype, array.shape, array.tobytes()) == (after[key].dtype, after[key].shape,
                                                               after[key].tobytes()), key  # fmt: skip
    said = [json.loads((folder / "config.json").read_text()) for folder in (case.directory, tmp_path / "out")]
    assert said[0] == said[1]
    assert torch.equal(logits(loaded(case.loader, tmp_path / "out")), case.want)


def test_as_a_language_model_of_its_own(case, tmp_path):
    """The plain class of the family computes for text what the whole model does."""
    words = []
    text = json.loads((case.directory / "config.json").read_text()).get("text_config", {})
    if text.get("model_type") == "gemma3_text":  # only a config.json tells its windows
        (tmp_path / "text").mkdir()
        (tmp_path / "text" / "config.json").write_text(json.dumps(text))
        words = ["--hf-config", str(tmp_path / "text")]
    assert run(["export-hf", str(case.run), str(tmp_path / "out"), *words, "-q"]) == 0
    model = loaded(transformers.AutoModelForCausalLM, tmp_path / "out")
    plain = {"Qwen2VL": "Qwen2", "Qwen2_5_VL": "Qwen2", "Qwen3VL": "Qwen3", "Qwen3VLMoe": "Qwen3Moe"}
    prefix = case.loader.__name__.removesuffix("ForConditionalGeneration")
    assert type(model).__name__ == f"{plain.get(prefix, prefix.replace('Mistral3', 'Mistral'))}ForCausalLM"
    assert torch.allclose(logits(model), case.want, rtol=0, atol=1e-5)


def test_what_the_released_gemma_leaves_out_is_what_the_class_takes():
    whole, defaults = transformers.Gemma3TextConfig().to_dict(), vision_language("gemma3").defaults
    assert {key: whole[key] for key in defaults} == defaults


@pytest.mark.parametrize("name", [name for name in vision_language_types() if vision_language(name).rules])
def test_what_config_json_leaves_out_is_what_the_class_takes(name):
    """`vision` and `whole` of a model's file."""
    kind = vision_language(name)
    config = getattr(transformers, kind.architecture.replace("ForConditionalGeneration", "Config"))()
    vision = type(
        config.vision_config
    )()  # Mistral 3 gives its tower other values where nothing is said of it at all
    for part, fields in (("vision", vision.to_dict()), ("whole", config.to_dict())):
        said, given = json.loads(json.dumps(fields)), kind.given[part]
        assert {field: said[field] for field in given if field in said} == {
            field: value for field, value in given.items() if field in said
        }


def test_the_whole_model_there_and_back(case, tmp_path):
    """All towers as Bridge has them: every tensor bit for bit, and what the class computes of an image."""
    if not vision_language(json.loads((case.directory / "config.json").read_text())["model_type"]).rules:
        return  # Megatron-Bridge has no model of it
    source, want = tmp_path / "run", seen(loaded(case.loader, case.directory))
    assert not torch.equal(want, seen(loaded(case.loader, case.directory), seed=2))  # the image is looked at
    assert run(["import-hf", str(case.directory), str(source), "-q"]) == 0
    bare = tmp_path / "bare"  # where nothing but config.json tells the names: those of the released files
    bare.mkdir()
    (bare / "config.json").write_bytes((case.directory / "config.json").read_bytes())
    for name, folder in (("out", case.directory), ("released", bare)):
        assert run(["export-hf", str(source), str(tmp_path / name), "--hf-config", str(folder), "-q"]) == 0
    found = loaded(case.loader, tmp_path / "out")
    assert torch.equal(seen(found), want) and torch.equal(logits(found), case.want)
    held, own = (model.state_dict() for model in (loaded(case.loader, tmp_path / "released"), found))
    assert held.keys() == own.keys() and all(torch.equal(held[key], own[key]) for key in own)
    before, after = (load_file(folder / "model.safetensors") for folder in (case.directory, tmp_path / "out"))
    assert after.keys() == before.keys()
    assert {key: (array.shape, array.tobytes()) for key, array in before.items()} == {
        key: (array.shape, array.tobytes()) for key, array in after.items()
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (case.directory / "config.json").read_text()
    )


def test_the_language_model_of_a_whole_run_alone(case, tmp_path):
    """What `--tower language` writes of it, the plain class of the family loads, and computes the same of text."""
    if not vision_language(json.loads((case.directory / "config.json").read_text())["model_type"]).rules:
        return  # Megatron-Bridge has no model of it
    assert run(["import-hf", str(case.directory), str(tmp_path / "run"), "-q"]) == 0
    words = ["--hf-config", str(case.directory), "--tower", "language", "-q"]
    assert run(["export-hf", str(tmp_path / "run"), str(tmp_path / "out"), *words]) == 0
    model = loaded(transformers.AutoModelForCausalLM, tmp_path / "out")
    assert torch.allclose(logits(model), case.want, rtol=0, atol=1e-5)
