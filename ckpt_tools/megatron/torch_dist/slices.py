"""The keys of a `torch_dist` checkpoint, taken apart into parameters and the rest.

A stored weight may be stacked: along a leading layer axis (homogeneous blocks write no layer number) and along an
expert axis. Every (layer, expert) slice of a stored weight is one parameter here, under the name it would have if
layers were written one by one. Names at this point are still those of the disk; `names.py` makes them live ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.adapters import not_merged
from ckpt_tools.megatron.keys import (
    expert_of,
    has_expert_axis,
    is_optimizer_key,
    layer_of,
    stacked_axes,
    stacked_layers,
)
from ckpt_tools.model.catalog import Catalog, TensorEntry

_SHOWN = 16  # missing layers that a message names; a key may claim to be of any layer


class Slice(NamedTuple):
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
    """Every key of the catalog, as parameters, optimizer keys and objects."""
    optimizer = [key for key in catalog.tensors if is_optimizer_key(key)]
    weights = [entry for key, entry in catalog.tensors.items() if not is_optimizer_key(key)]
    parameters = without_wrapper([parameter for entry in weights for parameter in slices_of(entry)])
    problems = [
        f"{e.key}: adapter weights (LoRA) are not part of a whole model; {other or 'merge-adapter merges them'}"
        for e in weights
        if (other := not_merged(e.key)) or ".adapter." in e.key
    ]
    problems += missing_layers(p.name for p in parameters)
    if problems:
        raise MappingError(
            "the weights do not make a whole Megatron model:\n" + list_problems(problems), problems
        )
    return SortedKeys(tuple(parameters), tuple(optimizer), tuple(catalog.objects))


def without_wrapper(parameters: list[Slice]) -> list[Slice]:
    """The parameters without the `module.` that NeMo 2 puts in front of every name."""
    if not all(p.name.startswith("module.") for p in parameters):
        return parameters
    return [p._replace(name=p.name.removeprefix("module.")) for p in parameters]


def slices_of(entry: TensorEntry) -> list[Slice]:
    """The parameters stacked in one stored weight, in index order; a single one when nothing is stacked."""
    key = entry.key
    name, number = expert_of(key)
    stacked = stacked_layers(name)
    if len(stacked) > 1:
        raise MappingError(f"{key}: more than one stacked `layers` segment; no known model writes that")
    axes = stacked_axes(key)
    if len(entry.shape) < axes:
        raise MappingError(f"{key}: shape {entry.shape} is too short for its stacked layer and expert axes")
    lead_shape, shape = entry.shape[:axes], entry.shape[axes:]
    layer_range: Iterable[int | None] = range(lead_shape[0]) if stacked else (None,)
    expert_range: Iterable[int | None] = range(lead_shape[-1]) if has_expert_axis(key) else (None,)
    experts = tuple(expert_range)
    at = stacked[0] if stacked else 0
    return [
        Slice(
            name=name if layer is None else f"{name[:at]}{layer}.{name[at:]}",
            key=key,
            lead=tuple([i for i in (layer, expert) if i is not None]),
            shape=shape,
            dtype=entry.dtype,
            expert=expert if number is None else number,
        )
        for layer in layer_range
        for expert in experts
    ]


def missing_layers(names: Iterable[str]) -> list[str]:
    """One line per block whose layer numbers do not run from 0 without a gap."""
    blocks: dict[str, set[int]] = {}
    for name in names:
        layer = layer_of(name)
        if layer:
            blocks.setdefault(layer.block, set()).add(layer.number)
    problems = []
    for block, found in sorted(blocks.items()):
        count = max(found) + 1 - len(found)
        if count:
            first = [n for n in range(len(found) + _SHOWN) if n not in found][:_SHOWN]
            named = f"layers {first[:count]}" if count <= _SHOWN else f"{count} layers, the first {first},"
            problems.append(f"{block}*: {named} are missing below layer {max(found)}")
    return problems


def layer_counts(names: Iterable[str]) -> Mapping[str, int]:
    """Number of layers of every block, by the name before the layer number (`decoder.layers.`)."""
    counts: dict[str, int] = {}
    for name in names:
        layer = layer_of(name)
        if layer:
            counts[layer.block] = max(counts.get(layer.block, 0), layer.number + 1)
    return counts
