"""The keys of a `torch_dist` checkpoint, taken apart into parameters and the rest.

A stored weight may be stacked: along a leading layer axis (homogeneous blocks write no layer number) and along an
expert axis. Every (layer, expert) slice of a stored weight is one parameter here, under the name it would have if
layers were written one by one. Names at this point are still those of the disk; `names.py` makes them live ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.model.catalog import Catalog, TensorEntry

CHAINED = re.compile(r"^chained_(\d+)\.")
STACKED_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d+\.)")
LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
EXPERTS = ".experts.experts."
# Keys of `singleton_local_shards` (moe/experts.py) have a number here instead of an axis.
EXPERT_NUMBER = re.compile(r"(?<=\.experts\.experts\.)(\d+)\.")


@dataclass(frozen=True, slots=True)
class Slice:
    """One slice of a stored weight: a parameter or persistent buffer of one layer and one expert.

    `lead` indexes the leading (layer, expert) axes of the stored tensor `key`; `shape` is what is left of its
    shape, in elements. `name` has the layer number but keeps the disk's spelling and no expert number.
    """

    name: str
    key: str
    lead: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """All keys of a `torch_dist` catalog by what they are. Extra states, rng and the like are in `objects`."""

    parameters: tuple[Slice, ...]
    optimizer: tuple[str, ...]
    objects: tuple[str, ...]


def sort_keys(catalog: Catalog) -> SortedKeys:
    """Every key of the catalog, as parameters, optimizer keys and objects.

    Raises:
        MappingError: keys that cannot be weights of a Megatron model, or blocks with missing layers.
    """
    optimizer = [key for key in catalog.tensors if is_optimizer_key(key)]
    weights = [entry for key, entry in catalog.tensors.items() if not is_optimizer_key(key)]
    parameters = without_wrapper([parameter for entry in weights for parameter in slices_of(entry)])
    problems = [f"{e.key}: adapter weights (LoRA) are not part of a pre-training checkpoint; merge them first"
                for e in weights if ".adapter." in e.key or ".lora_" in e.key]  # fmt: skip
    problems += missing_layers(p.name for p in parameters)
    if problems:
        raise MappingError("the weights do not make a whole Megatron model:\n" + list_problems(problems))
    return SortedKeys(tuple(parameters), tuple(optimizer), tuple(catalog.objects))


def without_wrapper(parameters: list[Slice]) -> list[Slice]:
    """The parameters without the `module.` that NeMo 2 puts in front of every name."""
    if not all(p.name.startswith("module.") for p in parameters):
        return parameters
    return [replace(p, name=p.name.removeprefix("module.")) for p in parameters]


def is_optimizer_key(key: str) -> bool:
    """Whether the key belongs to the optimizer, with or without the `chained_<i>.` prefix."""
    return CHAINED.sub("", key).startswith("optimizer.")


def slices_of(entry: TensorEntry) -> list[Slice]:
    """The parameters stacked in one stored weight, in index order; a single one when nothing is stacked."""
    key, layers = entry.key, STACKED_LAYERS.findall(entry.key)
    if len(layers) > 1:
        raise MappingError(f"{key}: more than one stacked `layers` segment; no known model writes that")
    axes = stacked_axes(key)
    if len(entry.shape) < axes:
        raise MappingError(f"{key}: shape {entry.shape} is too short for its stacked layer and expert axes")
    lead_shape, shape = entry.shape[:axes], entry.shape[axes:]
    layer_range: Iterable[int | None] = range(lead_shape[0]) if layers else (None,)
    number = EXPERT_NUMBER.search(key)
    name = EXPERT_NUMBER.sub("", key)
    expert_range: Iterable[int | None] = range(lead_shape[-1]) if has_expert_axis(key) else (None,)
    experts = tuple(expert_range)
    stacked = STACKED_LAYERS.search(name)
    at = stacked.end() if stacked else 0
    return [
        Slice(
            name=name if layer is None else f"{name[:at]}{layer}.{name[at:]}",
            key=key,
            lead=tuple([i for i in (layer, expert) if i is not None]),
            shape=shape,
            dtype=entry.dtype,
            expert=int(number[1]) if number else expert,
        )
        for layer in layer_range
        for expert in experts
    ]


def stacked_axes(key: str) -> int:
    """Number of leading (layer, expert) axes of the tensor with this key."""
    return len(STACKED_LAYERS.findall(key)) + has_expert_axis(key)


def has_expert_axis(key: str) -> bool:
    """Whether the tensor with this key holds all experts of its layer."""
    return EXPERTS in key and not EXPERT_NUMBER.search(key)


def missing_layers(names: Iterable[str]) -> list[str]:
    """One line per block whose layer numbers do not run from 0 without a gap."""
    blocks: dict[str, set[int]] = {}
    for name in names:
        match = LAYER_NUMBER.search(name)
        if match:
            blocks.setdefault(name[: match.start(1)], set()).add(int(match[1]))
    problems = []
    for block, found in sorted(blocks.items()):
        absent = sorted(set(range(max(found) + 1)) - found)
        if absent:
            problems.append(f"{block}*: layers {absent} are missing below layer {max(found)}")
    return problems


def layer_counts(names: Iterable[str]) -> Mapping[str, int]:
    """Number of layers of every block, by the name before the layer number (`decoder.layers.`)."""
    counts: dict[str, int] = {}
    for name in names:
        match = LAYER_NUMBER.search(name)
        if match:
            block = name[: match.start(1)]
            counts[block] = max(counts.get(block, 0), int(match[1]) + 1)
    return counts
