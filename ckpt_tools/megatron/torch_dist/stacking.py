"""Stored tensors as parameters of one layer and one expert (`slices_of`), and parameters as stored tensors (`Stack`).

A stored weight may be stacked: along a leading layer axis (homogeneous blocks write no layer number) and along an
expert axis. Every (layer, expert) slice of it is one parameter, under the name it would have if layers were written
one by one. Names at this point are those of the disk; `names.py` makes them live ones.

Back again, Megatron stacks a block's layers unless its configuration says that layers may differ
(transformer_block.py `sharded_state_dict`); experts of a layer always share a tensor. The target model asks for
exactly its own form, so the choice follows the args, and a block with differing layers cannot be stacked at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypeAlias

from ckpt_tools.errors import MappingError, raise_if
from ckpt_tools.megatron.adapters import not_merged
from ckpt_tools.megatron.keys import (
    DECODER_LAYERS,
    HALVES,
    Layer,
    expert_of,
    has_expert_axis,
    is_of_transformers,
    is_optimizer_key,
    layer_of,
    split_half,
    stacked_axes,
    stacked_layers,
)
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.catalog import Catalog, TensorEntry, Value, concat, stack
from ckpt_tools.model.model import Parameter

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
    optimizer = [key for key in catalog.tensors if is_optimizer_key(key)]
    weights = [entry for key, entry in catalog.tensors.items() if not is_optimizer_key(key)]
    parameters = [parameter for entry in weights for parameter in slices_of(entry)]
    if all(p.name.startswith("module.") for p in parameters):  # NeMo 2 puts it in front of every name
        parameters = [p._replace(name=p.name.removeprefix("module.")) for p in parameters]
    problems = [
        f"{e.key}: adapter weights (LoRA) are not part of a whole model; {other or 'merge-adapter merges them'}"
        for e in weights
        if (other := not_merged(e.key)) or ".adapter." in e.key
    ]
    problems += missing_layers(p.name for p in parameters)
    raise_if(problems, MappingError, "the weights do not make a whole Megatron model")
    return SortedKeys(tuple(parameters), tuple(optimizer), tuple(catalog.objects))


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
    """One line per block with layer numbers that do not run from 0 without a gap."""
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


def contradicted_layers(names: Iterable[str], num_layers: object) -> list[str]:
    """What is wrong if the args count other layers than the weights have."""
    count = layer_counts(names).get(DECODER_LAYERS)
    if count is None or num_layers in (None, count):
        return []
    return [f"the args say num_layers = {num_layers}, the weights have {count} layers"]


# Settings under which a transformer block names its layers one by one.
_FREQUENCIES = ("moe_layer_freq", "linear_attention_freq")
_FLAGS = (
    "hetereogenous_dist_checkpoint",  # Megatron's spelling
    "heterogeneous_block_specs",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "is_hybrid_model",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
)


@dataclass(frozen=True, slots=True)
class Stack:
    """One tensor of the target: parameters by their index on its leading (layer, expert) axes.

    `lead` are the lengths of those axes, () for a single parameter.
    """

    key: str
    lead: tuple[int, ...]
    members: Mapping[tuple[int, ...], Parameter]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(self.members.values())

    @property
    def weight(self) -> Value:
        return stack(self.key, {index: p.weight for index, p in self.members.items()}, self.lead)

    def state(self, role: str) -> Value:
        """One optimizer state, which all its parameters have, as one tensor."""
        return stack(self.key, {index: p.values[role] for index, p in self.members.items()}, self.lead)


_Content: TypeAlias = tuple[str, int | None, tuple[int, ...]]
"""What tells a parameter of one layer from another: rest of its name, expert, shape."""


def stack_parameters(
    parameters: Sequence[Parameter], common: CommonState, stacked: bool | None
) -> tuple[list[Stack], list[str]]:
    """The target's tensors in order of first appearance, and notes on how blocks were laid out.

    `stacked` overrides what the args say, but not what is impossible.
    """
    problems = missing_layers(p.name for p in parameters)
    raise_if(problems, MappingError, "the model is not whole")
    layers = [None if is_of_transformers(p.name) else layer_of(p.name) for p in parameters]
    as_stack, notes = _choose(parameters, layers, common, stacked)
    members: dict[str, dict[tuple[int, ...], Parameter]] = {}
    for parameter, layer in zip(parameters, layers, strict=True):
        in_stack = layer if layer is not None and as_stack[layer.block] else None
        key = parameter.name if in_stack is None else f"{in_stack.block}{in_stack.leaf}"
        index = (None if in_stack is None else in_stack.number, parameter.expert)
        members.setdefault(key, {})[tuple(i for i in index if i is not None)] = parameter
    stacks = [_stack(key, found, problems) for key, found in members.items()]
    raise_if(problems, MappingError, "layers or experts do not make whole tensors")
    return stacks, notes


def joined_halves(parameters: Sequence[Parameter]) -> list[Parameter]:
    """The parameters with the gate and up halves of an fc1 in one, which `singleton_local_shards` keeps apart."""
    twins: dict[tuple[str, int | None], dict[str, Parameter]] = {}
    for p in parameters:
        name, half = split_half(p.name)
        if half:
            twins.setdefault((name, p.expert), {})[half] = p
    joined = []
    for p in parameters:
        name, half = split_half(p.name)
        if not half:
            joined.append(p)
        elif half == HALVES[0] or len(twins[name, p.expert]) == 1:
            joined.append(_joined_half(name, twins[name, p.expert]))
    return joined


def _joined_half(name: str, twins: Mapping[str, Parameter]) -> Parameter:
    parts = [twins[part] for part in HALVES if part in twins]
    if len({(p.shape, p.dtype, p.states) for p in parts}) != 1 or len(parts) != len(HALVES):
        raise MappingError(f"{name}: its halves {', '.join(p.name for p in parts)} do not make one tensor")
    first = parts[0]
    values = {role: concat(name, [p.values[role] for p in parts]) for role in first.values}
    shape = (first.shape[0] * len(parts), *first.shape[1:])
    return replace(first, name=name, shape=shape, values=values, origin=first.origin.removesuffix(HALVES[0]))


def _choose(
    parameters: Sequence[Parameter],
    places: Sequence[Layer | None],
    common: CommonState,
    stacked: bool | None,
) -> tuple[dict[str, bool], list[str]]:
    """Whether each block is stacked, and notes."""
    layers: dict[str, dict[int, set[_Content]]] = {}
    stored: dict[str, bool] = {}
    for p, place in zip(parameters, places, strict=True):
        if place is not None:
            stored[place.block] = bool(stacked_layers(p.origin))
            of_block = layers.setdefault(place.block, {})
            of_block.setdefault(place.number, set()).add((place.leaf, p.expert, p.shape))
    reason = _reason_apart(common)
    if stacked is not False and (reason is None or reason.startswith(_FREQUENCIES)):
        _refuse_partial_layers(layers)
    choice, notes = {}, []
    for block, found in layers.items():
        are_equal = len({frozenset(content) for content in found.values()}) == 1
        never = f".{block}".startswith(".mtp.") or ".mtp." in block or _is_hybrid(found)
        if stacked and not never and not are_equal:
            raise MappingError(f"{block}*: its layers hold different parameters and cannot be stacked")
        if stacked is not None:
            wanted, why = stacked, "as asked for"
        elif common.of_torch_dist and block in stored:
            wanted, why = stored[block], "as in the source"
        else:
            wanted, why = reason is None or "vision_model." in block, reason or ""
        choice[block] = wanted and are_equal and not never
        if not never:
            why = why if are_equal or stacked is not None else "its layers differ"
            form = "one tensor for all layers" if choice[block] else "a tensor for each layer"
            notes.append(f"{block}*: {form}" + (f" ({why})" if why else ""))
    return choice, notes


def _refuse_partial_layers(layers: Mapping[str, Mapping[int, set[_Content]]]) -> None:
    """Layers of different kinds each have something of their own; one that only lacks something is damaged."""
    problems = []
    for block, found in layers.items():
        kinds = {frozenset(content): layer for layer, content in sorted(found.items(), reverse=True)}
        for part, layer in kinds.items():
            whole = next((other for other in kinds if part < other), None)
            if whole is not None:
                name, expert, _ = min(whole - part)
                which = "" if expert is None else f" (expert {expert})"
                problems.append(f"{block}{layer}.{name}{which} is missing, layer {kinds[whole]} has it")
    raise_if(
        problems,
        MappingError,
        "layers are not whole; if the model is meant to be so, ask for a tensor for each layer",
    )


def _is_hybrid(layers: Mapping[int, Iterable[_Content]]) -> bool:
    """Whether a block is a hybrid or Mamba stack: its layers are never stacked (ssm/mamba_block.py)."""
    return any(
        rest.startswith(("mixer.", "mamba_mixer.")) for contents in layers.values() for rest, _, _ in contents
    )


def _reason_apart(common: CommonState) -> str | None:
    """The setting that makes transformer blocks write their layers one by one, None when none does."""
    for name in _FREQUENCIES:
        value = common.arg(name)
        if isinstance(value, list) or (isinstance(value, int) and value > 1):
            return f"{name} = {value}"
    return next((name for name in _FLAGS if common.arg(name)), None)


def _stack(key: str, members: dict[tuple[int, ...], Parameter], problems: list[str]) -> Stack:
    lead = tuple(max(axis) + 1 for axis in zip(*members, strict=True))
    shapes = {p.shape for p in members.values()}
    if len(shapes) > 1:
        problems.append(f"{key}: its layers or experts have different shapes {sorted(shapes)}")
    expected = prod(lead)
    if len(members) != expected:
        problems.append(f"{key}: {len(members)} of {expected} (layer, expert) slices are there")
    return Stack(key, lead, dict(sorted(members.items())))
