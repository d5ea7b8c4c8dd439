"""READ `fsdp_dtensor`: its keys taken apart (`read_fsdp_source`), and what they hold as a `Model` (`fsdp_model`).

All that is read before planning is small. The keys are those of `tensors.py`. Wrapper segments (`module.`) are
dropped from names, the gate and up halves `_w` and `_v` joined again, and everything that is not a parameter or its
state brought back into the nested form that the training job had in memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckpt_tools.errors import CorruptCheckpointError, MappingError, UnsupportedCheckpointError, raise_if
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor, load_object
from ckpt_tools.megatron.fsdp_dtensor.flatten import Path, unflatten
from ckpt_tools.megatron.fsdp_dtensor.parameters import FsdpTensor, StoredParameter, stored_parameters
from ckpt_tools.megatron.fsdp_dtensor.stages import local_numbers
from ckpt_tools.megatron.fsdp_dtensor.tensors import TORCH_ADAM_FIELDS
from ckpt_tools.megatron.keys import (
    BUFFERS,
    COMMON_ITEMS,
    HALVES,
    NESTED_STATES,
    STEP,
    canonical_kind,
    fsdp_state,
    group_key,
    left_out_by,
    model_name,
    rank_of,
    split_expert,
    split_half,
    split_projection,
)
from ckpt_tools.megatron.names import MLA_DOWN, MLA_FUSED_DOWN, stored_name
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.record import Size, TargetRecord, read_record, stored_tp
from ckpt_tools.megatron.run_state.settings import read_settings, training_dtype
from ckpt_tools.megatron.run_state.stored_values import checked_field, fields_at, rng_at
from ckpt_tools.megatron.torch_dist.optimizers import refuse_missing_states
from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Catalog, Item, TensorEntry, concat, leave_out
from ckpt_tools.model.choices import LayerSpec
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.model import Model, Parameter
from ckpt_tools.model.roles import MASTER, WEIGHT

# What native checkpoints do not hold and no loader asks for.
_DROPPED = (
    ("*._extra_state", "Transformer Engine extra state: not part of fsdp_dtensor"),
    ("optimizer.param_groups.*", "not the place where Megatron-FSDP keeps groups"),
    ("content_metadata.*", "describes the torch_dist checkpoint this one was made from"),
    ("rerun_state_machine.*", "rerun state: not part of fsdp_dtensor"),
)


@dataclass(frozen=True)
class FsdpSource:
    """An `fsdp_dtensor` checkpoint taken apart; tensors are still only described."""

    catalog: Catalog
    common: CommonState
    tensors: tuple[FsdpTensor, ...]
    groups: Mapping[str, Mapping[str, Any]]  # live (group) name of a parameter -> fields of its group
    scheduler: Mapping[str, Any]
    rng: Mapping[tuple[int, int], object]  # (pp, tp) -> list of rng states
    grad_scaler: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # as `dropped`, by the user's wish
    notes: tuple[str, ...] = ()
    record: TargetRecord | None = None  # of the job that it was converted for

    @property
    def tp(self) -> Size | None:
        """For how many tensor-parallel ranks its packed projections are, None when nothing tells."""
        return stored_tp(self.record, self.rng, self.common.args)

    def known_tp(self, asked: int | None) -> int | None:
        """The same, said by `asked` where the checkpoint does not tell."""
        known = self.tp
        if known is None:
            return asked
        if asked not in (None, known.ranks):
            raise MappingError(
                f"--tp {asked}: the checkpoint is for {known.ranks} tensor-parallel ranks, by {known.source}"
            )
        return known.ranks

    @cached_property
    def has_optimizer(self) -> bool:
        return bool(self.groups) or self._has_states

    @cached_property
    def _has_states(self) -> bool:
        return any(tensor.states for tensor in self.tensors)

    @cached_property
    def _all_fp32(self) -> bool:
        return all(t.values[WEIGHT].dtype == "float32" for t in self.tensors if not t.name.endswith(BUFFERS))

    def is_master(self, tensor: FsdpTensor) -> bool:
        """Whether a tensor's value is the fp32 master of a parameter, which the model holds in its own type.

        Without states the values are masters when all are fp32; a model of several types keeps them.
        """
        if MASTER in tensor.values:
            return False
        if self._has_states or self.groups:
            return bool(tensor.states)
        return self._all_fp32 and not tensor.name.endswith(BUFFERS)


def read_fsdp_source(
    files: Files,
    catalog: Catalog,
    common: CommonState,
    ignored: tuple[str, ...] = (),
    trust_pickle: bool = False,
    weights_only: bool = False,
) -> FsdpSource:
    """The checkpoint's tensors, groups and scalars.

    `ignored` are globs of keys that are left out. With `weights_only` an optimizer that cannot be read is too.
    """
    values = SmallValues(files, trust_pickle)
    catalog, left_out = leave_out(catalog, ignored)
    weights, states, groups, nested, dropped = _sort_keys(catalog, values, weights_only)
    tree = unflatten(nested) if nested else {}
    ranks = rng_ranks_in(tree)
    found = local_numbers(weights, (*states, *groups), common, len({pp for pp, _ in ranks}))
    if found is not None:
        raise MappingError(f"{found}.\n{found.way_out[:1].upper()}{found.way_out[1:]}")
    notes: tuple[str, ...] = ()
    try:
        tensors = _join(weights, states, values)
    except (MappingError, UnsupportedCheckpointError) as error:
        if not weights_only:
            raise
        tensors, groups = _join(weights, {}, values), {}
        notes = (f"the optimizer, which is left out, could not be read: {str(error).splitlines()[0]}",)
    return FsdpSource(
        catalog=catalog,
        common=common,
        tensors=tensors,
        groups=groups,
        scheduler=fields_at(tree.get("opt_param_scheduler", {}), "opt_param_scheduler"),
        rng=ranks,
        grad_scaler=fields_at(tree.get("optimizer", {}).get("grad_scaler", {}), "optimizer.grad_scaler"),
        dropped=(*left_out, *dropped),
        ignored=left_out,
        notes=notes,
        record=read_record(files),
    )


def rng_ranks_in(tree: Mapping[str, Any]) -> dict[tuple[int, int], object]:
    """Rng states by (pp, tp): `torch_dcp` keeps those of the only model-parallel rank without saying so."""
    stored = tree.get("rng_state", {})
    named = stored.items() if isinstance(stored, Mapping) else [("(0, 0)", stored)]
    return {
        rank: rng_at(states, f"rng_state.{name}") for name, states in named if (rank := rank_of(str(name)))
    }


class SmallValues:
    """Loads objects, equal archives only once: group fields repeat for every parameter."""

    def __init__(self, files: Files, trust_pickle: bool) -> None:
        self._files, self._trust = files, trust_pickle
        self._seen: dict[bytes, Any] = {}

    def load(self, item: Item) -> Any:
        archive = self._files.read(item.file, item.offset, item.length)
        if archive not in self._seen:
            self._seen[archive] = load_object(self._files, item, self._trust)
        return self._seen[archive]

    def tensor(self, entry: TensorEntry) -> StoredTensor:
        """A small tensor that is stored in one piece."""
        if len(entry.chunks) == 1 and entry.chunks[0].box == full_box(entry.shape):
            try:
                value = self.load(entry.chunks[0].item)
            except CorruptCheckpointError as error:
                raise CorruptCheckpointError(f"{entry.key}: {error}") from error
            if isinstance(value, StoredTensor):
                return value
        raise MappingError(f"{entry.key}: expected one whole tensor, found {len(entry.chunks)} pieces")


_States = dict[str, dict[str, TensorEntry]]
_Groups = dict[str, dict[str, Any]]


def _sort_keys(
    catalog: Catalog, values: SmallValues, weights_only: bool
) -> tuple[dict[str, TensorEntry], _States, _Groups, dict[Path, object], tuple[str, ...]]:
    """Weights by name, states by name and kind, group fields by name, nested leaves by path, and what is dropped."""
    weights: dict[str, TensorEntry] = {}
    states: _States = {}
    groups: _Groups = {}
    nested: dict[Path, object] = {}
    rest: list[str] = []
    for key, entry in catalog.tensors.items():
        if name := model_name(key):
            weights[name] = entry
        elif state := fsdp_state(key):
            states.setdefault(state.name, {})[state.kind] = entry
        elif key.startswith(NESTED_STATES):
            nested[nested_path(catalog, key)] = values.tensor(entry)
        else:
            rest.append(key)
    for key, stored in catalog.objects.items():
        if of_group := group_key(key):
            value = checked_field(of_group.field, values.load(stored.item), key)
            groups.setdefault(of_group.name, {})[of_group.field] = value
        elif key.startswith(NESTED_STATES):
            nested[nested_path(catalog, key)] = values.load(stored.item)
        elif key not in COMMON_ITEMS:
            rest.append(key)
    rules = (*_DROPPED, *([("optimizer.*", "--weights-only")] if weights_only else []))
    return weights, states, groups, nested, tuple(left_out_by(rules, rest))


def nested_path(catalog: Catalog, key: str) -> Path:
    """Where the leaf `key` stood in the nested state; planner data tell, else the dots of the key."""
    known = catalog.planner_paths.get(key)
    path = known if known is not None and len(known) > 1 else key.split(".")
    return tuple(int(part) if isinstance(part, str) and part.isdigit() else part for part in path)


def _join(weights: Mapping[str, TensorEntry], states: _States, values: SmallValues) -> tuple[FsdpTensor, ...]:
    """Live tensors in stored order, halves joined where the first of them stood."""
    _refuse_masters(states)
    problems = [
        f"optimizer state of {name}: there is no such weight" for name in states if name not in weights
    ]
    halves: dict[str, dict[str, str]] = {}
    for name in weights:
        whole, half = split_half(name)
        halves.setdefault(whole, {})[half] = name
    tensors = []
    for whole, names in halves.items():
        parts = [names[half] for half in ("", *HALVES) if half in names]
        if len(parts) != (1 if "" in names else 2):
            problems.append(f"{whole}: stored as {parts}, expected it whole or as _w and _v")
            continue
        wrong = list(_mismatches(whole, parts, weights, states))
        problems += wrong
        if not wrong:
            tensors.append(_tensor(whole, parts, weights, states, values))
    raise_if(problems, MappingError, "weights and optimizer states do not fit together")
    return tuple(tensors)


def _refuse_masters(states: _States) -> None:
    masters = [
        f"{name}.{kind}" for name, kinds in states.items() for kind in kinds if canonical_kind(kind) == MASTER
    ]
    raise_if(
        masters,
        UnsupportedCheckpointError,
        "fp32 masters stand among the optimizer states, where Megatron-FSDP neither writes nor reads them (the "
        "converter of Megatron-LM does); `repair` puts those that round to the weights in their place, and "
        "--weights-only converts the model's values alone",
    )


def _mismatches(
    whole: str, parts: list[str], weights: Mapping[str, TensorEntry], states: _States
) -> Iterable[str]:
    first = weights[parts[0]]
    kinds = states.get(parts[0], {}).keys()
    for part in parts:
        entry = weights[part]
        if (entry.shape, entry.dtype) != (first.shape, first.dtype):
            yield f"{whole}: halves are {first.dtype} {first.shape} and {entry.dtype} {entry.shape}"
        if states.get(part, {}).keys() != kinds:
            yield f"{whole}: halves have states {sorted(kinds)} and {sorted(states.get(part, {}))}"
        for kind, state in states.get(part, {}).items():
            if state.shape != (() if kind == STEP else entry.shape):
                yield f"{state.key}: shape {state.shape} does not fit the weight's {entry.shape}"


def _tensor(
    whole: str, parts: list[str], weights: Mapping[str, TensorEntry], states: _States, values: SmallValues
) -> FsdpTensor:
    found = [{WEIGHT: weights[part]} | states.get(part, {}) for part in parts]
    steps = {step_number(values.tensor(kinds.pop(STEP))) for kinds in found if STEP in kinds}
    if len(steps) > 1:
        raise MappingError(f"{whole}: its halves have different steps {sorted(steps)}")
    joined = {kind: concat(whole, [kinds[kind].value for kinds in found]) for kind in found[0]}
    return FsdpTensor(whole, joined[WEIGHT].shape, joined, steps.pop() if steps else None)


def step_number(tensor: StoredTensor) -> float:
    """The 0-d fp32 step as a number."""
    if tensor.dtype != "float32" or tensor.shape:
        raise MappingError(f"a step is a 0-d float32 tensor, found {tensor.dtype} {tensor.shape}")
    return float(struct.unpack("<f", tensor.data)[0])


Group = dict[str, Any]


def fsdp_model(
    source: FsdpSource,
    *,
    tp: int | None = None,
    layer_spec: LayerSpec | None = None,
    weights_only: bool = False,
) -> Model:
    """The model that an `fsdp_dtensor` checkpoint holds.

    Args:
        tp: tensor-parallel size of the job that it is for, where the checkpoint does not tell.
        layer_spec: `te` or `local`, None to let the settings decide.
        weights_only: leave the optimizer alone: what it holds is neither read nor checked.
    """
    settings = read_settings(source.common)
    local = settings.local_norms if layer_spec is None else layer_spec == "local"
    stored = stored_parameters(source.tensors, source.known_tp(tp), local)
    with_optimizer = source.has_optimizer and not weights_only
    groups: list[Group] = []
    group_of: dict[str, int] = {}
    if with_optimizer:
        held = {kind for tensor in source.tensors for kind in tensor.states}
        refuse_missing_states(held, source.common, list(source.groups.values()))
        groups, group_of = _groups(source)
    return Model(
        catalog=source.catalog,
        parameters=tuple(_parameter(p, source, group_of, with_optimizer) for p in stored),
        common=source.common,
        settings=settings,
        optimizer_layout="fsdp_dtensor" if with_optimizer else None,
        groups=tuple(groups),
        scheduler={} if weights_only else source.scheduler,
        rng={} if weights_only else source.rng,
        grad_scaler={} if weights_only else source.grad_scaler,
        dropped=source.dropped,
        notes=source.notes,
        record=source.record,
    )


def _parameter(
    stored: StoredParameter, source: FsdpSource, group_of: Mapping[str, int], with_optimizer: bool
) -> Parameter:
    """What is stored in the place of a trained weight is its fp32 master, unless that stands beside it."""
    tensor = stored.tensor
    kept = tensor.values[WEIGHT].dtype
    values = {}
    for kind in tensor.values if with_optimizer else (k for k in (WEIGHT, MASTER) if k in tensor.values):
        role = kind
        if kind == WEIGHT:
            role = MASTER if with_optimizer and source.is_master(tensor) else WEIGHT
        values[role] = stored.value(kind)
    dtype: str | None = kept
    if source.is_master(tensor) and kept in CASTABLE and not stored.name.endswith(BUFFERS):
        dtype = training_dtype(source.common) or (None if kept == "float32" else kept)
    return Parameter(
        stored.name, stored.shape, dtype, values, stored.expert, group_of.get(tensor.name), tensor.name
    )


def _groups(source: FsdpSource) -> tuple[list[Group], dict[str, int]]:
    """Distinct sets of group fields, and for each trained tensor the number of its own.

    Every parameter has the fields of its group beside it; those with equal fields make a group.
    """
    fields = {_spelling(name): dict(group) for name, group in source.groups.items()}
    unused = set(fields)
    numbers: dict[str, int] = {}
    groups: list[Group] = []
    members: dict[str, int] = {}
    problems = []
    for tensor in source.tensors:
        name = next((name for name in _group_names(tensor.name) if name in fields), None)
        if name is None and not tensor.states:
            continue  # a buffer or a frozen weight
        group = None if name is None else dict(fields[name])
        unused.discard(name or "")
        problem = _problem(tensor, group)
        if problem or group is None:
            problems.append(f"{tensor.name}: {problem}")
            continue
        if not TORCH_ADAM_FIELDS.isdisjoint(group):
            group["step"] = tensor.step
        same = repr(sorted(group.items()))
        if same not in numbers:
            numbers[same] = len(groups)
            groups.append(group)
        members[tensor.name] = numbers[same]
    problems += [f"param_to_group_meta of {name}: there is no such parameter" for name in sorted(unused)]
    raise_if(problems, MappingError, "optimizer groups and parameters do not fit together")
    return groups, members


def _problem(tensor: FsdpTensor, group: Group | None) -> str | None:
    """Why a trained tensor cannot be put into a group, None when it can."""
    if group is None:
        return "has optimizer states but no param_to_group_meta"
    if not tensor.states:
        return "has param_to_group_meta but no optimizer states"
    if TORCH_ADAM_FIELDS.isdisjoint(group):
        return None if group.get("step") is not None else "its group has no step"
    return None if tensor.step is not None else "it has states but no step"


def _spelling(name: str) -> str:
    """One spelling for a parameter's names in `model.*` and in `param_to_group_meta.*` of every dialect."""
    stored, expert = split_expert(stored_name(name))
    return stored if expert is None else f"{stored}{expert}"


def _group_names(name: str) -> Iterator[str]:
    """Names under which the group of a tensor may stand: its own, or that of the projection it is a part of."""
    spelled = _spelling(name)
    yield spelled
    if part_of := split_projection(spelled):
        yield part_of[0]
    for part in MLA_DOWN:
        if part in spelled:
            yield spelled.replace(part, MLA_FUSED_DOWN)
