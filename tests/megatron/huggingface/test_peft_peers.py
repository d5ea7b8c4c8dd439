"""Adapters as the real peft saves, loads and merges them, against `import-hf --adapter` and `export-hf --peft`.

Runs under whatever peft and transformers are installed; `test_transformers.py` runs it under a release.

Numbers are small integers times powers of two, so that no order of summation rounds: merged weights are equal bit for
bit. Random ones differ by peft's own roundings, at most one step of the weight's type.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the optional peer transformers is not installed")
peft = pytest.importorskip("peft", reason="the optional peer peft is not installed")
from safetensors.torch import load_file  # noqa: E402  # after the skip

from ckpt_tools.commands.edit.merge_adapter import merge_adapter  # noqa: E402
from ckpt_tools.commands.edit.strip import strip_checkpoint  # noqa: E402
from ckpt_tools.commands.huggingface.export_hf import export_hf  # noqa: E402
from ckpt_tools.commands.huggingface.export_source import ExportOptions  # noqa: E402
from ckpt_tools.commands.huggingface.import_hf import ImportOptions, import_hf  # noqa: E402
from tests.conftest import DATA  # noqa: E402
from tests.megatron.adapter_checkpoints import AdapterFolder, canonical, lora  # noqa: E402
from tests.megatron.huggingface.models import make_model  # noqa: E402

transformers.utils.logging.set_verbosity(logging.ERROR)
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers about peft
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]
RUN = DATA / "core019_llama_tp2_fully_reshardable"
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama3", {"target_modules": LLAMA}),
    "rslora": ("llama3", {"target_modules": LLAMA, "use_rslora": True, "r": 4}),
    "patterns": (
        "llama3",
        {
            "target_modules": LLAMA,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8},
            "alpha_pattern": {"k_proj": 16, "^model.layers.0.mlp.down_proj": 2},
        },
    ),
    "some_layers": ("llama3", {"target_modules": LLAMA, "layers_to_transform": [1]}),
    "whole_modules": (
        "llama3",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "head_and_embedding": ("llama3", {"target_modules": ["lm_head", "embed_tokens", "v_proj"]}),
    "tied": (
        "gemma",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "trained_biases": ("llama_bias", {"target_modules": ["q_proj", "down_proj"], "bias": "all"}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2_square_only": ("gpt2", {"target_modules": ["attn.c_proj"], "fan_in_fan_out": True}),
}


def trained(model: Any, settings: dict[str, Any], exact: bool) -> Any:
    """The model in peft with an adapter that does something: every trained number is drawn anew."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **settings})
    adapted = peft.get_peft_model(model, config)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                numbers = torch.randint(-3, 4, parameter.shape, generator=random) / 4
                parameter.copy_(numbers if exact else torch.randn(parameter.shape, generator=random) / 3)
    return adapted


def base(name: str, dtype: torch.dtype, folder: Path, exact: bool) -> Any:
    model = make_model(name)
    if exact:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter * 16).round() / 16)
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


def merged(adapted: Any, folder: Path) -> dict[str, torch.Tensor]:
    adapted.merge_and_unload().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].shape == tensor.shape, key
        assert found[key].dtype == dtype, key
        assert torch.equal(found[key], tensor.to(dtype)), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_peft_merges_to_the_same_bits(variant, dtype, tmp_path):
    name, settings = VARIANTS[variant]
    if not settings.keys() <= peft.LoraConfig.__dataclass_fields__.keys():
        pytest.skip("this release of peft has no ensure_weight_tying")
    model = base(name, dtype, tmp_path / "hf", exact=True)
    before = load_file(tmp_path / "hf" / "model.safetensors")
    adapted = trained(model, settings, exact=True)
    adapted.save_pretrained(tmp_path / "peft")
    expected = merged(adapted, tmp_path / "merged")
    assert any(not torch.equal(before[key], expected[key].to(dtype)) for key in before)
    import_hf(str(tmp_path / "hf"), str(tmp_path / "run"), ImportOptions(adapter=str(tmp_path / "peft")))
    export_hf(str(tmp_path / "run"), str(tmp_path / "again"))
    assert_equal(load_file(tmp_path / "again" / "model.safetensors"), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_numbers_differ_by_peft_s_roundings_only(dtype, tmp_path):
    model = base("llama3", dtype, tmp_path / "hf", exact=False)
    adapted = trained(model, {"target_modules": LLAMA}, exact=False)
    adapted.save_pretrained(tmp_path / "peft")
    expected = merged(adapted, tmp_path / "merged")
    import_hf(str(tmp_path / "hf"), str(tmp_path / "run"), ImportOptions(adapter=str(tmp_path / "peft")))
    export_hf(str(tmp_path / "run"), str(tmp_path / "ours"))
    found = load_file(tmp_path / "ours" / "model.safetensors")
    step = torch.finfo(dtype).eps
    before = load_file(tmp_path / "hf" / "model.safetensors")
    for key, tensor in expected.items():
        ours, theirs = found[key].double(), tensor.double()
        largest = torch.maximum(theirs.abs(), before[key].double().abs()).clamp(min=1)
        assert ((ours - theirs).abs() <= 4 * step * largest).all(), key


@pytest.mark.parametrize("make", [lora, canonical])
def test_a_megatron_adapter_is_merged_by_peft_as_by_us(make, tmp_path):
    """Out as a PEFT directory, loaded onto the exported base and merged by peft; or merged first and exported."""
    made: AdapterFolder = make(rank=4, alpha=8, dtype=torch.bfloat16, tp=2)
    for module, (a, b) in made.matrices.items():
        made.matrices[module] = (a * 2).round() / 2, (b * 2).round() / 2
    adapter = made.save(tmp_path / "adapter")
    export_hf(str(RUN), str(tmp_path / "hf"))
    options = ExportOptions(peft=True, hf_config=str(tmp_path / "hf"))
    export_hf(str(adapter), str(tmp_path / "peft"), options)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, sorted(LLAMA))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "peft")
    expected = merged(loaded, tmp_path / "merged")
    weights = tmp_path / "weights"
    strip_checkpoint(str(RUN), str(weights))
    merge_adapter(str(weights), str(adapter), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "again"))
    assert_equal(load_file(tmp_path / "again" / "model.safetensors"), expected, torch.bfloat16)
