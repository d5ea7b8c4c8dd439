"""Block FP8 as DeepSeek-V3 is published: which tensors of a model become codes and scales, and what config.json says.

Codes are the linears of attention and of dense and expert MLPs in the layers, under their own names; NAME_scale_inv
has a float32 scale for every block. Embedding, head, norms, routers and what joins a prediction layer stay as they
are (DeepSeek-V3 README_WEIGHTS.md, and the index of the release).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.huggingface.mapping.rules import Family
from ckpt_tools.megatron.huggingface.quantization.quantized import SETTINGS
from ckpt_tools.model.catalog import Catalog, Made, TensorEntry, Value, made_entry
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.kernels.kernel import Kernel
from ckpt_tools.model.kernels.quantize import BlockScales, QuantizeBlocks
from ckpt_tools.model.target import InlineTensor, TargetTensor
from ckpt_tools.model.views import Source

BLOCK = (128, 128)
UE8M0 = "ue8m0"
LINEAR = re.compile(
    r"(?:^|\.)layers\.\d+\.(?:self_attn|mlp|block_sparse_moe)\.(?:\w+\.)*"
    r"(?:(?!weights_proj)\w+_proj|\w+_proj_with_mqa|w[123]|c_fc|(?<=indexer\.)(?:wq_b|wk))\.weight"
)  # of an indexer, the linear that weighs its heads is never quantized
_IN_A_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.\d+\.")
_NEVER = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|wpe|shared_head\.head)\.weight$"
)  # known not to be quantized


@dataclass(frozen=True, slots=True)
class BlockFp8:
    block: tuple[int, int] = BLOCK
    powers: bool = False  # scales are powers of two (`scale_fmt` ue8m0)


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """Tensors to write, the catalog of what they are made of, and what config.json says of the `count` linears."""

    tensors: tuple[TargetTensor | InlineTensor, ...]
    catalog: Catalog
    settings: Mapping[str, Any]
    count: int

    @property
    def note(self) -> str:
        rows, columns = self.settings["weight_block_size"]
        powers = " that are powers of two (ue8m0)" if "scale_fmt" in self.settings else ""
        return (
            f"{self.count:,} linears were quantized to E4M3 in blocks of {rows} x {columns}, scales{powers} in "
            "float32 (largest magnitude / 448, as DeepSeek-V3's kernel does it); other tensors keep their type"
        )


def block_fp8_of(reference: Mapping[str, Any] | None) -> BlockFp8:
    """How the model of a config.json is quantized, which the output follows; the published form without one."""
    settings = (reference or {}).get(SETTINGS)
    if not isinstance(settings, Mapping) or settings.get("quant_method") != "fp8":
        return BlockFp8()
    block = settings.get("weight_block_size", list(BLOCK))
    pair = isinstance(block, list | tuple) and [type(n) for n in block] == [int, int] and min(block) > 0
    scales, fmt = settings.get("scale_fmt"), settings.get("fmt", "e4m3")
    if not pair or scales not in (None, "float", UE8M0) or fmt != "e4m3":
        raise MappingError(
            f"--quantize fp8-block: the {SETTINGS} of --hf-config has weight_block_size {block!r}, fmt {fmt!r} and "
            f"scale_fmt {scales!r}; blocks of two lengths, e4m3 and {UE8M0} are written"
        )
    return BlockFp8(tuple(block), scales == UE8M0)


def quantized_tensors(
    tensors: Iterable[TargetTensor | InlineTensor], catalog: Catalog, family: Family, how: BlockFp8
) -> QuantizedTensors:
    """The tensors of an export with their linears as codes and scales."""
    tensors = list(tensors)
    odd = [
        t.key
        for t in tensors
        if len(t.shape) > 2 and _IN_A_LAYER.search(t.key) and t.key.endswith(("proj", "weight"))
    ]
    chosen = {
        t.key for t in tensors if isinstance(t, TargetTensor) and LINEAR.search(t.key) and len(t.shape) == 2
    }
    wrong = [f"{t.key} is {t.dtype}" for t in tensors if t.key in chosen and t.dtype not in CASTABLE]
    if odd or not chosen or wrong:
        problems = odd or wrong or ["none is named as one"]
        raise MappingError(
            f"--quantize fp8-block: no {family.architecture} is published so; weights of its layers are not "
            "linears of their own:\n" + list_problems(problems),
            problems,
        )
    made: dict[str, TensorEntry] = {}
    ready: list[TargetTensor | InlineTensor] = []
    for tensor in tensors:
        ready += _codes_and_scales(tensor, how, made) if tensor.key in chosen else [tensor]  # type: ignore[arg-type]
    full = replace(catalog, tensors={**catalog.tensors, **made})
    return QuantizedTensors(tuple(ready), full, _settings(tensors, chosen, family, how), len(chosen))


def _codes_and_scales(
    tensor: TargetTensor, how: BlockFp8, made: dict[str, TensorEntry]
) -> list[TargetTensor]:
    """A linear as its codes and its scales, which are made of what would have been written."""
    value = Value(tensor.dtype, tensor.shape, tensor.sources, tensor.zero_filled)
    kernels: dict[str, Kernel] = {
        tensor.key: QuantizeBlocks(tensor.dtype, how.block, how.powers),
        f"{tensor.key}_scale_inv": BlockScales(tensor.dtype, how.block, how.powers),
    }
    found = []
    for key, kernel in kernels.items():
        name = f"block FP8 of {key}"
        entry = made[name] = made_entry(name, Made(kernel, (value,)))
        found.append(TargetTensor(key, entry.dtype, entry.shape, (Source(name),)))
    return found


def _settings(
    tensors: Iterable[TargetTensor | InlineTensor], chosen: set[str], family: Family, how: BlockFp8
) -> dict[str, Any]:
    """config.json's `quantization_config`.

    DeepSeek's does not list what is left alone, since its modules are not linears there; those of others are.
    """
    settings: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(how.block),
    }
    if how.powers:
        settings["scale_fmt"] = UE8M0
    if not family.name.startswith("deepseek"):
        settings["modules_to_not_convert"] = [
            t.key.removesuffix(".weight")
            for t in tensors
            if len(t.shape) == 2
            and t.key.endswith(".weight")
            and t.key not in chosen
            and not _NEVER.search(t.key)
        ]
    return settings
