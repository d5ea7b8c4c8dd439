"""How a Hugging Face model directory is cut into files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_SHARD_SIZE = 5 * 10**9


@dataclass(frozen=True, slots=True)
class Shard:
    """One file and the tensors it holds, in order."""

    file: str
    keys: tuple[str, ...]


def pack_shards(sizes: Iterable[tuple[str, int]], max_bytes: int = DEFAULT_SHARD_SIZE) -> list[Shard]:
    """Tensors (name, bytes) in order, in files of at most `max_bytes` of data; a larger tensor stands alone.

    The rule is huggingface_hub's `split_state_dict_into_shards_factory`; so are the file names.
    """
    groups: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for key, nbytes in sizes:
        if nbytes > max_bytes:
            groups.append([key])
            continue
        if filled + nbytes > max_bytes:
            groups.append(current)
            current, filled = [], 0
        current.append(key)
        filled += nbytes
    if current:
        groups.append(current)
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0]))]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(keys))
        for number, keys in enumerate(groups, 1)
    ]


def shard_index(shards: Iterable[Shard], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Content of `model.safetensors.index.json` for shards that were written."""
    weight_map = {key: shard.file for shard in shards for key in shard.keys}
    total = sum(sizes[key] for key in weight_map)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
