"""Quantized models as the real transformers dequantizes them, against an import that is exported again.

Runs under whatever transformers is installed; `test_transformers.py` runs it under a release.
"""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the optional peer transformers is not installed")
from safetensors.torch import load_file  # noqa: E402  # after the skip

from ckpt_tools.commands.huggingface.export_hf import export_hf  # noqa: E402
from ckpt_tools.commands.huggingface.export_source import ExportOptions  # noqa: E402
from ckpt_tools.commands.huggingface.import_hf import import_hf  # noqa: E402
from tests.megatron.huggingface.quantized_models import (  # noqa: E402
    Quantized,
    compressed_fp8,
    compressed_int4,
    fp8_blocks,
    gpt_oss,
)

transformers.utils.logging.set_verbosity(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore:You passed .quantization_config")
# transformers takes the size of a block from the grid, so its blocks are whole ones; and it knows no MTP layers.
WHOLE_BLOCKS = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "moe_intermediate_size": 8,
                "intermediate_size": 16, "num_nextn_predict_layers": 0}  # fmt: skip


def fp8() -> Quantized:
    return fp8_blocks((4, 4), **WHOLE_BLOCKS)


MODELS: dict[str, tuple[Callable[[], Quantized], str, dict[str, Any]]] = {
    "fp8_blocks": (fp8, "FineGrainedFP8Config", {"dequantize": True, "weight_block_size": (4, 4)}),
    "mxfp4": (gpt_oss, "Mxfp4Config", {"dequantize": True}),
    **{
        name: (make, "CompressedTensorsConfig", {"run_compressed": False})
        for name, make in {
            "fp8_tensor": lambda: compressed_fp8("tensor", torch.float32),
            "fp8_channel": lambda: compressed_fp8("channel", torch.bfloat16),
            "fp8_block": lambda: compressed_fp8("block", torch.bfloat16),
            "int4_group": compressed_int4,
            "int4_channel_fp16": lambda: compressed_int4(None, dtype=torch.float16),
            "int4_zero_points": lambda: compressed_int4(zero_points=True, head_dim=8),
        }.items()
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_dequantizes_to_the_same_bits(name, tmp_path):
    make, config, options = MODELS[name]
    package = "compressed_tensors" if config == "CompressedTensorsConfig" else "accelerate"
    pytest.importorskip(package, reason=f"the optional peer {package} is not installed")
    quantized = make()
    source = quantized.save(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        quantization_config=getattr(transformers, config)(**options),
        dtype=getattr(torch, quantized.config["torch_dtype"]),
    )
    model.save_pretrained(tmp_path / "theirs")
    import_hf(str(source), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "ours"))
    theirs, ours = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        kept_wide = key.endswith("mlp.gate.weight")  # of DeepSeek, whatever it was stored as
        wanted = tensor.to(ours[key].dtype) if kept_wide else tensor
        assert (ours[key].dtype, ours[key].shape) == (wanted.dtype, wanted.shape), key
        assert torch.equal(ours[key].view(torch.uint8), wanted.view(torch.uint8)), key


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_transformers_quantizes_to_the_same_numbers(scale_fmt, tmp_path):
    """Its own `Fp8Quantize` on the plain export, tensor by tensor.

    It rounds 448 / magnitude, its inverse and the product, DeepSeek's kernel magnitude / 448 and the quotient: three
    roundings of float32 apart, scales differ by three steps at most, and codes only where a value lies halfway
    between two but for that. Powers of two are the same.
    """
    operation = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Quantize
    config = transformers.FineGrainedFP8Config(weight_block_size=(4, 4), scale_fmt=scale_fmt)
    quantizer = type("Quantizer", (), {"quantization_config": config})()
    source, reference = fp8(), tmp_path / "reference"
    reference.mkdir()
    source.settings["scale_fmt"] = scale_fmt
    (reference / "config.json").write_text(json.dumps(source.config))
    del source.config["quantization_config"]
    random = torch.Generator().manual_seed(6)
    source.stored = {
        key: torch.randn(tensor.shape, generator=random).to(tensor.dtype)
        for key, tensor in source.plain.items()
    }
    import_hf(str(source.save(tmp_path / "hf")), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "plain"))
    options = ExportOptions(quantize="fp8-block", hf_config=str(reference))
    export_hf(str(tmp_path / "run"), str(tmp_path / "ours"), options)
    plain, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "ours"))
    codes = [key for key in plain if f"{key}_scale_inv" in ours]
    assert len(codes) > 20
    differ = 0
    for key in codes:
        theirs = operation(quantizer).convert({key: plain[key]})
        scales, expected = ours[f"{key}_scale_inv"], theirs[f"{key}_scale_inv"].float()
        if scale_fmt == "ue8m0":
            assert torch.equal(scales, expected), key
        assert ((scales.view(torch.int32) - expected.view(torch.int32)).abs() <= 3).all(), key
        found, wanted = (one.view(torch.uint8).int() for one in (ours[key], theirs[key]))
        assert ((found - wanted).abs() <= 1).all(), key
        differ += int((found != wanted).sum())
    assert differ == 0 if scale_fmt == "ue8m0" else differ <= 4


def test_transformers_loads_a_quantized_export(tmp_path):
    """Dequantized by transformers it is what our import reads."""
    import_hf(str(fp8().save(tmp_path / "hf")), str(tmp_path / "run"))
    options = ExportOptions(quantize="fp8-block", hf_config=str(tmp_path / "hf"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "ours"), options)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours",
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(4, 4)),
    )
    loaded.save_pretrained(tmp_path / "theirs")
    import_hf(str(tmp_path / "ours"), str(tmp_path / "again"))
    export_hf(str(tmp_path / "again"), str(tmp_path / "plain"))
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "plain"))
    assert theirs.keys() == ours.keys()
    for key, tensor in ours.items():
        assert torch.equal(theirs[key].to(tensor.dtype), tensor), key
