"""A Hugging Face directory to write: weight files, and what stands beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpt_tools.commands.huggingface.hf_assets import Assets, read_assets
from ckpt_tools.commands.huggingface.hf_parts import CONFIG, as_json
from ckpt_tools.formats.safetensors import INDEX_FILE
from ckpt_tools.megatron.huggingface.mapping.shard_files import pack_shards, shard_index
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.target import InlineTensor, TargetTensor
from ckpt_tools.plan.build import WeightFile

_IS_TOKENIZER = re.compile(r"tokenizer|tekken|vocab|spiece|sentencepiece|.*\.(?:tiktoken|spm|model)$")


class HfDirectory(NamedTuple):
    """Weight files, and small files by name: tokenizer, config.json and, last, the index of several weight files."""

    files: list[WeightFile]
    extra_files: dict[str, bytes]
    notes: tuple[str, ...]


def hf_directory(
    tensors: Sequence[TargetTensor | InlineTensor],
    config: Mapping[str, Any],
    hf_config: str | None,
    max_shard_bytes: int,
) -> HfDirectory:
    """The directory of `tensors`, with what goes along from the original model in `hf_config`."""
    sizes = {t.key: prod(t.shape) * itemsize(t.dtype) for t in tensors}
    shards = pack_shards(sizes.items(), max_shard_bytes)
    by_key = {t.key: t for t in tensors}
    assets = Assets({}, ()) if hf_config is None else read_assets(hf_config, has_code="auto_map" in config)
    extra = {**assets.files, CONFIG: as_json(config)}
    if len(shards) > 1:
        extra[INDEX_FILE] = as_json(shard_index(shards, sizes))
    files = [WeightFile(shard.file, [by_key[key] for key in shard.keys]) for shard in shards]
    return HfDirectory(files, extra, tuple(_notes(hf_config, assets)))


def _notes(hf_config: str | None, assets: Assets) -> list[str]:
    notes = []
    if not any(_IS_TOKENIZER.match(name) for name in assets.files):
        where = "--hf-config has none" if hf_config else "pass --hf-config DIR to take one over"
        notes.append(f"no tokenizer was written; {where}")
    if assets.left:
        shown = ", ".join(assets.left[:8]) + (", ..." if len(assets.left) > 8 else "")
        notes.append(f"not taken over from --hf-config: {shown}")
    return notes
