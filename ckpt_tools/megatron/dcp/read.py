"""READ: the plain state dict of a Megatron model, as Megatron's `torch_dcp` or our own `--to dcp` writes it.

Weights have the names of the running model, and masters are next to them (`torch_dcp`) or in their place. What is
not a parameter or its state is nested as the training job had it. From there on it is read as `fsdp_dtensor` is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, list_problems, raise_if
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.megatron.dcp.state_dict import (
    OptimizerKeys,
    StateDict,
    is_group_map,
    is_megatron,
    read_state_dict,
    shape_of_states,
    without_segments,
)
from ckpt_tools.megatron.dcp.write import ADAM_FIELDS, INITIAL_LR
from ckpt_tools.megatron.fsdp_dtensor.parameters import FsdpTensor
from ckpt_tools.megatron.fsdp_dtensor.read import (
    FsdpSource,
    SmallValues,
    fsdp_model,
    read_training_state,
    step_number,
    unread_optimizer,
)
from ckpt_tools.megatron.fsdp_dtensor.write import NOT_LOADED
from ckpt_tools.megatron.keys import BUFFERS, COMMON_ITEMS, NESTED_STATES, STEP, left_out_by
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.record import read_record
from ckpt_tools.megatron.run_state.stored_values import checked_field
from ckpt_tools.megatron.torch_dist.optimizers import is_adams
from ckpt_tools.model.catalog import Catalog, TensorEntry, leave_out
from ckpt_tools.model.choices import LayerSpec
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER, WEIGHT

Rounds: TypeAlias = Callable[[Catalog, str, str], bool]
"""Whether all of the master with the second key rounds to the weight with the first."""
_DROPPED = (
    ("*_extra_state", "Transformer Engine extra state: read from torch_dist only"),
    ("*.param_groups.*", "the group of no parameter"),
    ("rerun_state_machine.*", "rerun state: not part of fsdp_dtensor"),
    ("content_metadata.*", "describes the torch_dist checkpoint this one was made from"),
)  # fmt: skip
_EMPTY: Mapping[str, Any] = {}
_NOT_ADAM = f"the optimizer is not Adam: {NOT_LOADED}; load the result with --no-load-optim there"


def dcp_model(
    files: Files,
    catalog: Catalog,
    common: CommonState,
    rounds: Rounds,
    *,
    ignored: tuple[str, ...] = (),
    trust_pickle: bool = False,
    tp: int | None = None,
    layer_spec: LayerSpec | None = None,
    weights_only: bool = False,
) -> Model:
    refuse_group_map(files.location, catalog)
    catalog, left_out = leave_out(catalog, ignored)
    found = read_state_dict(catalog)
    if not is_megatron(found):
        some = ", ".join(list(found.weights)[:3])
        raise UnsupportedCheckpointError(
            f"{files.location} is a PyTorch state dict, and its weights ({some}, ...) do not have the names of a "
            "Megatron model. It can be re-sharded (convert --to dcp --dp-shard N). If the names are "
            "Hugging Face's, export-hf SRC HF --hf-config MODEL makes the folder, where MODEL has the config.json; "
            "other names are translated by the program that trained it (torchtitan: "
            "scripts/checkpoint_conversion/convert_to_hf.py). import-hf makes a Megatron checkpoint of such a folder"
        )
    _refuse_parts(files.location, common)
    names = Counter(map(_unwrapped, found.weights))
    twice = [name for name, count in names.items() if count > 1]
    raise_if(twice, MappingError, "weights that are one without their wrappers")
    values = SmallValues(files, trust_pickle)
    kinds, groups, notes = _optimizers(found, catalog, values, rounds, weights_only)
    others = (k for k in found.others if k not in COMMON_ITEMS and not k.startswith(NESTED_STATES))
    source = FsdpSource(
        catalog=catalog,
        common=common,
        tensors=tuple(_tensor(name, key, kinds.get(name, {}), catalog, values)
                      for name, key in found.weights.items()),
        groups={_unwrapped(name): fields for name, fields in groups.items()},
        **read_training_state(catalog, values)._asdict(),
        dropped=(*left_out, *left_out_by(_DROPPED, others)),
        notes=notes,
        record=read_record(files),
    )  # fmt: skip
    model = fsdp_model(source, tp=tp, layer_spec=layer_spec, weights_only=weights_only)
    if not is_adams(model.parameters):
        model = replace(model, notes=(*model.notes, _NOT_ADAM))
    return replace(model, optimizer_layout=None if model.optimizer_layout is None else found.layout)


def refuse_group_map(location: str, catalog: Catalog) -> None:
    """Raise UnsupportedCheckpointError if it is what `--dump-param-to-param-group-map` writes."""
    if is_group_map(catalog):
        raise UnsupportedCheckpointError(
            f"{location} is not a model but the map of one: the parameter group of each of {len(catalog.objects)} "
            "parameters. build-param-group-map MAP -o FILE makes the JSON file of it that convert takes as "
            "--param-to-param-group-map-json"
        )


def _refuse_parts(location: str, common: CommonState) -> None:
    """Every rank of a model-parallel job saves under the same keys, so that one rank's part is all there is."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    split = [f"{name} {size}" for name in sizes if isinstance(size := common.arg(name), int) and size > 1]
    if split and common.arg("ckpt_format") == "torch_dcp":
        raise UnsupportedCheckpointError(
            f"{location}: torch_dcp of a job with {', '.join(split)} holds the weights of one model-parallel rank "
            "under names that all ranks use. Save the job with --ckpt-format torch_dist"
        )


def _optimizers(
    found: StateDict, catalog: Catalog, values: SmallValues, rounds: Rounds, weights_only: bool
) -> tuple[dict[str, dict[str, str]], dict[str, Mapping[str, Any]], tuple[str, ...]]:
    """State keys by parameter and kind, group fields by parameter, and notes; of weights alone masters only."""
    kinds: dict[str, dict[str, str]] = {}
    groups: dict[str, Mapping[str, Any]] = {}
    try:
        for optimizer in found.optimizers:
            if weights_only and not optimizer.masters:
                continue
            for name, states, fields in _parameters(optimizer, found, catalog, values, rounds):
                kinds[name] = {MASTER: states[MASTER]} if weights_only and MASTER in states else dict(states)
                step = _value(states[STEP], catalog, values) if STEP in states and not weights_only else None
                groups[name] = megatron_fields(fields, step)
    except MappingError as error:
        if not weights_only:
            raise
        return {}, {}, (unread_optimizer(error),)
    stray = [name for name in kinds if name not in found.weights]
    raise_if(stray, MappingError, "optimizer states of parameters that the model does not have")
    return kinds, {} if weights_only else groups, ()


def _parameters(
    optimizer: OptimizerKeys, found: StateDict, catalog: Catalog, values: SmallValues, rounds: Rounds
) -> Iterator[tuple[str, Mapping[str, str], Mapping[str, Any]]]:
    """(name, state keys by kind, fields of its group) of every parameter of an optimizer."""
    fields = {
        owner: {field: checked_field(field, _value(key, catalog, values), key) for field, key in keys.items()}
        for owner, keys in optimizer.groups.items()
    }
    if optimizer.form == "flattened":
        for name, states in optimizer.states.items():
            yield name, states, fields.get(name, _EMPTY)
        return
    ordered = [fields[owner] for owner in sorted(fields, key=int)]
    members = group_members(optimizer, catalog, values)
    plain = [{field: value for field, value in group.items() if field != "params"} for group in ordered]
    if optimizer.form == "by_name":
        for group, names in zip(plain, members, strict=True):
            yield from ((name, optimizer.states[name], group) for name in names if name in optimizer.states)
        return
    named, masters = numbered(optimizer, members, found, catalog, rounds)
    for group, numbers in zip(plain, members, strict=True):
        for number in numbers:
            master = {MASTER: masters[number]} if number in masters else {}
            states = master | dict(optimizer.states.get(str(number), {}))
            if states:
                yield named[number], states, group


def numbered(
    optimizer: OptimizerKeys,
    members: list[list[int]],
    found: StateDict,
    catalog: Catalog,
    rounds: Rounds | None,
) -> tuple[dict[int, str], dict[int, str]]:
    """The name and the master's key of every number; masters are of the 16-bit parameters of a group in order."""
    parameters = {
        name: catalog.tensors[key].shape
        for name, key in found.weights.items()
        if name.startswith(optimizer.prefix) and not name.endswith(BUFFERS)
    }
    shapes = {
        int(number): shape
        for number, keys in optimizer.states.items()
        if (shape := shape_of_states(keys.values(), catalog))
    }
    masters = _numbered_masters(optimizer, members)
    shapes |= {number: catalog.tensors[key].shape for number, key in masters.items()}

    def proves(name: str, number: int) -> bool:
        return (
            number not in masters or rounds is None or rounds(catalog, found.weights[name], masters[number])
        )

    return name_numbers(members, parameters, shapes, proves if masters and rounds else None), masters


def owners(
    optimizer: OptimizerKeys, found: StateDict, catalog: Catalog, values: SmallValues
) -> dict[str, str]:
    """The parameter of every state's and every master's key; of numbers as far as order and shapes tell."""
    names: Mapping[str, str] = {name: name for name in optimizer.states}
    masters: dict[str, str] = {}
    if optimizer.form == "by_number":
        members = group_members(optimizer, catalog, values)
        of_number, kept = numbered(optimizer, members, found, catalog, None)
        names = {str(number): name for number, name in of_number.items()}
        masters = {key: of_number[number] for number, key in kept.items()}
    return masters | {
        key: names[owner]
        for owner, keys in optimizer.states.items()
        for kind, key in keys.items()
        if kind != STEP and owner in names
    }


def group_members(optimizer: OptimizerKeys, catalog: Catalog, values: SmallValues) -> list[list[Any]]:
    """The names or numbers of the parameters of each group, where groups list them."""
    wanted = int if optimizer.form == "by_number" else str
    found: list[list[Any]] = []
    for owner in sorted(optimizer.groups, key=int):
        key = optimizer.groups[owner].get("params")
        listed = [] if key is None else _value(key, catalog, values)
        if not isinstance(listed, list | tuple) or any(type(name) is not wanted for name in listed):
            raise MappingError(f"{key}: expected the {'numbers' if wanted is int else 'names'} of parameters")
        found.append([f"{optimizer.prefix}{name}" for name in listed] if wanted is str else list(listed))
    return found


def _numbered_masters(optimizer: OptimizerKeys, members: list[list[int]]) -> dict[int, str]:
    if not optimizer.masters:
        return {}
    held = Counter(group for group, _ in optimizer.masters)
    counts = [held[group] for group in range(len(members))]
    wrong = [g for g, (have, group) in enumerate(zip(counts, members, strict=True)) if have != len(group)]
    if wrong or sum(counts) != len(optimizer.masters):
        raise MappingError(
            f"the optimizer's groups have {list(map(len, members))} parameters and {counts} fp32 masters: which of "
            "them have one is not known. Take the weights alone with --weights-only"
        )
    return {members[g][place]: key for (g, place), key in optimizer.masters.items()}


def megatron_fields(fields: Mapping[str, Any], step: float | None) -> Mapping[str, Any]:
    """A group's fields without those that `write` filled in for torch's Adam, of which Megatron has no knowledge.

    Its fused Adam is the one that corrects biases on demand; that keeps its step, a whole number, in the group.
    """
    kept = {name: value for name, value in fields.items() if name != INITIAL_LR or "max_lr" not in fields}
    if "bias_correction" not in fields:
        return kept
    own = {name: value for name, value in kept.items() if name not in ADAM_FIELDS}
    return own if step is None or "step" in own else own | {"step": int(step) if step.is_integer() else step}


def _value(key: str, catalog: Catalog, values: SmallValues) -> Any:
    value = values.at(catalog, key)
    return step_number(value) if key in catalog.tensors else value


def _tensor(
    name: str, key: str, states: Mapping[str, str], catalog: Catalog, values: SmallValues
) -> FsdpTensor:
    weight = catalog.tensors[key]
    kept: dict[str, TensorEntry] = {WEIGHT: weight}
    step = None
    for kind, of in states.items():
        if kind == STEP:
            step = float(_value(of, catalog, values))
        elif of in catalog.tensors:
            kept[kind] = catalog.tensors[of]
        else:
            raise MappingError(f"{of}: expected a tensor, found an object")
    wrong = [entry.key for entry in kept.values() if entry.shape != weight.shape]
    if wrong:
        raise MappingError(
            f"{key} is {weight.shape}, its states have other shapes:\n{list_problems(wrong)}", wrong
        )
    return FsdpTensor(
        _unwrapped(name),
        weight.shape,
        {kind: entry.value for kind, entry in kept.items()},
        step,
    )


def _unwrapped(name: str) -> str:
    """Without the segments that wrappers (DDP, FSDP, Megatron-FSDP, torch.compile) put in front or inside."""
    name = without_segments(name)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


# ---- names of numbered parameters

Shape: TypeAlias = tuple[int, ...]
Fits: TypeAlias = Callable[[str, int], bool]
"""Whether a parameter may be the one with a number."""
_Way: TypeAlias = "tuple[_Way, int, str] | None"
_MAX_OPEN = 1 << 14  # beginnings that are looked at side by side
_WAY_OUT = (
    "Save its states by name (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict), or leave them out "
    "with --weights-only"
)


class OpenChoiceError(MappingError):
    """Several orders fit, and nothing stored tells which is right: the checkpoint may be sound all the same."""


def name_numbers(
    groups: Sequence[Sequence[int]],
    parameters: Mapping[str, Shape],
    shapes: Mapping[int, Shape],
    proves: Fits | None = None,
) -> dict[int, str]:
    """The name of every parameter that `optimizer.state_dict()` numbers, counting through its groups.

    Inside of a group the parameters keep the order of the model's. Shapes say where the groups interleave; where they
    leave a choice, masters that round to their weights decide. What is still open then is not guessed.

    Args:
        groups: numbers of each group's parameters, in its order.
        parameters: names and shapes in the model's order, those that are not trained among them.
        shapes: of the states of a number; a number without states fits any shape.
        proves: a dearer test by content, asked only where shapes leave a choice.
    """
    has_shape: Fits = lambda name, number: shapes.get(number, parameters[name]) == parameters[name]  # noqa: E731
    found = _interleavings(groups, list(parameters), has_shape)
    if len(found) > 1 and proves is not None:
        seen: dict[tuple[str, int], bool] = {}

        def fits(name: str, number: int) -> bool:
            at = name, number
            if at not in seen:
                seen[at] = has_shape(name, number) and (number not in shapes or proves(name, number))
            return seen[at]

        found = _interleavings(groups, list(parameters), fits)
    total = sum(map(len, groups))
    if not found:
        raise MappingError(
            f"the optimizer numbers {total} parameters in {len(groups)} groups, and in no order of the groups have "
            f"its states the shapes of the model's {len(parameters)} weights: they belong to another model"
        )
    first, *others = found
    if others:
        number = next(n for n in first if first[n] != others[0].get(n))
        raise OpenChoiceError(
            f"the optimizer numbers its parameters, and its parameter {number} may be {first[number]} or "
            f"{others[0].get(number)}: nothing stored tells. {_WAY_OUT}"
        )
    return first


def _interleavings(groups: Sequence[Sequence[int]], names: Sequence[str], fits: Fits) -> list[dict[int, str]]:
    """Up to two ways to give the numbers to names, both in order; names may be left over.

    A way is a chain of (the way before, number, name). Distinct paths to one state are distinct assignments.
    """
    open_ways: dict[tuple[int, ...], list[_Way]] = {(0,) * len(groups): [None]}
    spare = len(names) - sum(map(len, groups))
    for at, name in enumerate(names):
        following: dict[tuple[int, ...], list[_Way]] = {}
        for taken, ways in open_ways.items():
            if at - sum(taken) < spare:  # it may be frozen, or a buffer
                _add(following, taken, ways)
            for g, group in enumerate(groups):
                if taken[g] < len(group) and fits(name, number := group[taken[g]]):
                    step = (*taken[:g], taken[g] + 1, *taken[g + 1 :])
                    _add(following, step, [(way, number, name) for way in ways])
        if len(following) > _MAX_OPEN:
            raise OpenChoiceError(
                f"the optimizer numbers its parameters, and too many orders of its {len(groups)} groups fit the "
                f"model's shapes. {_WAY_OUT}"
            )
        open_ways = following
    return [_names(way) for way in open_ways.get(tuple(map(len, groups)), [])]


def _add(ways: dict[tuple[int, ...], list[_Way]], taken: tuple[int, ...], more: Sequence[_Way]) -> None:
    """Keep two ways to a position at most: a third tells nothing new."""
    kept = ways.setdefault(taken, [])
    kept += more[: 2 - len(kept)]


def _names(way: _Way) -> dict[int, str]:
    found: dict[int, str] = {}
    while way is not None:
        way, number, name = way
        found[number] = name
    return found
