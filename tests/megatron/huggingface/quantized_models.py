"""Tiny quantized models of random codes and scales, and what torch on whole tensors makes of them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.megatron.huggingface.by_rules import DEEPSEEK, LLAMA, directory
from tests.model.test_kernels import mxfp4, pack

Tensors = dict[str, torch.Tensor]
LINEAR = re.compile(r"_proj(?:_with_mqa)?\.weight$")


@dataclass
class Quantized:
    """A model's config.json, its stored tensors, and the plain ones that they stand for."""

    config: dict[str, Any]
    stored: Tensors
    plain: Tensors

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self.config["quantization_config"]
        return settings

    def save(self, folder: Path) -> Path:
        folder.mkdir()
        tensors = {key: value.contiguous() for key, value in self.stored.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


def _model(config: dict[str, Any], settings: dict[str, Any], dtype: torch.dtype) -> Quantized:
    plain = {
        key: torch.from_numpy(array).to(torch.float32 if key.endswith("correction_bias") else dtype)
        for key, array in directory(config).items()
    }
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch."), "quantization_config": settings}
    return Quantized(config, dict(plain), plain)


def _codes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """8-bit floats, among them no NaN, which no quantizer writes."""
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.where((codes & 0x7F) == 0x7F, codes - 1, codes).view(torch.float8_e4m3fn)


def spread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """The scale of every element."""
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def fp8_blocks(
    block: tuple[int, int] = (5, 4), dtype: torch.dtype = torch.float32, **sizes: int
) -> Quantized:
    """A DeepSeek-V3 whose last blocks are cut short in both directions."""
    config = {**DEEPSEEK, "num_nextn_predict_layers": 1, **sizes}
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": list(block)}  # fmt: skip
    model = _model(config, settings, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in model.plain if LINEAR.search(name)]:
        codes = _codes(model.plain[name].shape, generator)
        grid = [-(-n // b) for n, b in zip(codes.shape, block, strict=True)]
        scales = torch.rand(grid, generator=generator).to(dtype)
        model.stored |= {name: codes, f"{name}_scale_inv": scales}
        product = codes.float() * spread(scales.float(), block, codes.shape)
        model.plain[name] = product.to(torch.bfloat16)
    return model


def fp8_tensors() -> Quantized:
    """One scale for a tensor, and the scales of static activations, which Megatron does not have."""
    settings = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
                "modules_to_not_convert": ["lm_head", "model.layers.*.norm", "embed"]}  # fmt: skip
    model = _model(LLAMA, settings, torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in model.plain if LINEAR.search(name)]:
        codes, scale = _codes(model.plain[name].shape, generator), torch.rand((), generator=generator)
        model.stored |= {name: codes, f"{name}_scale_inv": scale}
        model.stored[name.replace("weight", "activation_scale")] = torch.ones(())
        model.plain[name] = (codes.float() * scale).to(torch.bfloat16)
    return model


def gpt_oss() -> Quantized:
    config = {**LLAMA, "model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2,
              "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
              "rope_scaling": {"rope_type": "default"}, "hidden_size": 64, "intermediate_size": 96}  # fmt: skip
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}  # fmt: skip
    model = _model(config, settings, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in model.plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, rows = model.stored.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, rows, inner // 32, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(110, 130, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        model.stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.plain[name] = mxfp4(blocks, scales)
    return model


def weights(**fields: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **fields}


def compressed(
    groups: list[dict[str, Any]], layout: str = "float-quantized", **fields: Any
) -> dict[str, Any]:
    """The settings of a compressed-tensors model."""
    named = {f"group_{n}": {"targets": ["Linear"], "weights": one} for n, one in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*mlp\\.gate$"], "config_groups": named, **fields}  # fmt: skip


def compressed_fp8(strategy: str, dtype: torch.dtype) -> Quantized:
    """FP8 with a scale for each tensor, each row or each block."""
    block = {"block_structure": [5, 4]} if strategy == "block" else {}
    model = _model(LLAMA, compressed([weights(strategy=strategy, **block)]), torch.bfloat16)
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in model.plain if LINEAR.search(name)]:
        codes = _codes(model.plain[name].shape, generator)
        rows, columns = codes.shape
        grid = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 5), -(-columns // 4))}[strategy]
        scales = torch.rand(grid, generator=generator).to(dtype)
        wide = spread(scales, (5, 4), codes.shape) if strategy == "block" else scales
        model.stored |= {name: codes, f"{name}_scale": scales}
        model.plain[name] = (codes.to(dtype) * wide).to(torch.bfloat16)
    return model


def compressed_int4(
    group: int | None = 4, zero_points: bool = False, dtype: torch.dtype = torch.bfloat16, **config: int
) -> Quantized:
    """Packed 4-bit integers; `group` None is a scale for each row. Rows and columns do not fill their words."""
    sizes = {"num_bits": 4, "type": "int", "symmetric": not zero_points, "strategy": "group" if group else "channel",
             "group_size": group}  # fmt: skip
    settings = compressed([weights(**sizes)], "pack-quantized")
    model = _model({**LLAMA, "intermediate_size": 20, **config}, settings, dtype)
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in model.plain if LINEAR.search(name)]:
        rows, columns = model.stored.pop(name).shape
        width = group or columns
        numbers = torch.randint(-8, 8, (rows, columns), generator=generator)
        zeros = torch.randint(-8, 8, (rows, columns // width), generator=generator) * zero_points
        scales = torch.rand(zeros.shape, generator=generator).to(dtype)
        model.stored |= {f"{name}_packed": pack(numbers), f"{name}_scale": scales,
                         f"{name}_shape": torch.tensor([rows, columns])}  # fmt: skip
        if zero_points:
            model.stored[f"{name}_zero_point"] = pack(zeros.T).T
        shifted = (numbers - zeros.repeat_interleave(width, 1)).to(dtype)
        model.plain[name] = shifted * scales.repeat_interleave(width, 1)
    return model


def mixed() -> Quantized:
    """Attention in FP8 by rows, the rest in packed integers, as Kimi K2 has it."""
    fp8, int4 = compressed_fp8("channel", torch.bfloat16), compressed_int4()
    stored = {k: v for k, v in int4.stored.items() if ".self_attn." not in k}
    stored |= {k: v for k, v in fp8.stored.items() if ".self_attn." in k}
    plain = {k: fp8.plain[k] if ".self_attn." in k else v for k, v in int4.plain.items()}
    groups = [{"format": form, **next(iter(one.settings["config_groups"].values()))}
              for form, one in (("float-quantized", fp8), ("pack-quantized", int4))]  # fmt: skip
    settings = {**int4.settings, "format": "mixed-precision",
                "config_groups": {f"group_{n}": one for n, one in enumerate(groups)}}  # fmt: skip
    return Quantized({**int4.config, "quantization_config": settings}, stored, plain)


MODELS: dict[str, Callable[[], Quantized]] = {
    "fp8_blocks": fp8_blocks,
    "fp8_blocks_with_bf16_scales": lambda: fp8_blocks(dtype=torch.bfloat16),
    "fp8_blocks_of_128": lambda: fp8_blocks((128, 128), hidden_size=160, moe_intermediate_size=136),
    "fp8_tensors": fp8_tensors,
    "mxfp4": gpt_oss,
    "compressed_fp8_tensor": lambda: compressed_fp8("tensor", torch.float32),
    "compressed_fp8_channel": lambda: compressed_fp8("channel", torch.bfloat16),
    "compressed_fp8_block": lambda: compressed_fp8("block", torch.bfloat16),
    "compressed_int4_group": compressed_int4,
    "compressed_int4_channel_fp16": lambda: compressed_int4(None, dtype=torch.float16),
    "compressed_int4_zero_points": lambda: compressed_int4(zero_points=True),
    "compressed_mixed": mixed,
}
