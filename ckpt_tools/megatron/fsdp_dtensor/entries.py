"""Everything a conversion reads of an `fsdp_dtensor` checkpoint before it plans: all of it small.

The keys are those of `tensors.py`. Wrapper segments (`module.`) are dropped from names, the gate and up halves
`_w` and `_v` joined again, and everything that is not a parameter or its state brought back into the nested form
that the training job had in memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from ckpt_tools.errors import CorruptCheckpointError, MappingError, UnsupportedCheckpointError, list_problems
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor, load_object
from ckpt_tools.megatron.fsdp_dtensor.flatten import Path, unflatten
from ckpt_tools.megatron.fsdp_dtensor.stages import local_numbers
from ckpt_tools.megatron.keys import (
    BUFFERS,
    COMMON_ITEMS,
    HALVES,
    KEPT,
    KEPT_OPTIMIZER,
    NESTED_STATES,
    STEP,
    canonical_kind,
    fsdp_state,
    group_key,
    model_name,
    rank_of,
    rng_key,
    split_half,
)
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.record import Size, TargetRecord, read_record, stored_tp
from ckpt_tools.megatron.run_state.stored_values import checked_field, fields_at, rng_at
from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Catalog, Item, TensorEntry, leave_out
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.views import Place, Source

# What native checkpoints do not hold and no loader asks for.
_DROPPED = (
    ("*._extra_state", "Transformer Engine extra state: not part of fsdp_dtensor"),
    ("optimizer.param_groups.*", "not the place where Megatron-FSDP keeps groups"),
    ("content_metadata.*", "describes the torch_dist checkpoint this one was made from"),
    ("rerun_state_machine.*", "rerun state: not part of fsdp_dtensor"),
)


@dataclass(frozen=True, slots=True)
class FsdpTensor:
    """One parameter or buffer of the running model; `shape` is global and unsplit, in elements.

    `sources[kind]` tile that shape with the kind's stored tensors; kinds are `WEIGHT` and the optimizer's own
    (exp_avg, ...). `step` is torch Adam's, which stands beside the states; a fused Adam keeps it in the group.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: Mapping[str, str]
    sources: Mapping[str, tuple[Source, ...]]
    step: float | None = None

    @property
    def states(self) -> tuple[str, ...]:
        """Kinds of optimizer state that are stored."""
        return tuple(kind for kind in self.sources if kind != WEIGHT)


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
    own_optimizer: Any = None  # of another optimizer than Adam, kept beside: see `kept`
    extra_states: Mapping[str, Item] = field(default_factory=dict)  # kept beside, by their keys in torch_dist

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
        return bool(self.groups) or self.own_optimizer is not None or self._has_states

    @cached_property
    def _has_states(self) -> bool:
        return any(tensor.states for tensor in self.tensors)

    @cached_property
    def _all_fp32(self) -> bool:
        return all(t.dtypes[WEIGHT] == "float32" for t in self.tensors if not t.name.endswith(BUFFERS))

    def is_master(self, tensor: FsdpTensor) -> bool:
        """Whether a tensor's value is the fp32 master of a parameter, which the model holds in its own type.

        Without states the values are masters when all are fp32; a model of several types keeps them.
        """
        if MASTER in tensor.sources:
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
    _refuse_local_numbers(weights, (*states, *groups), common, len({pp for pp, _ in ranks}))
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
        own_optimizer=_own_optimizer(catalog, values, weights_only),
        extra_states={} if weights_only else _extra_states(catalog),
    )


def _own_optimizer(catalog: Catalog, values: SmallValues, weights_only: bool) -> Any:
    entry = None if weights_only else catalog.objects.get(KEPT_OPTIMIZER)
    return None if entry is None else values.load(entry.item)


def _extra_states(catalog: Catalog) -> dict[str, Item]:
    """The extra states of the `torch_dist` source that are kept, by their keys there."""
    return {
        key.removeprefix(KEPT): entry.item
        for key, entry in catalog.objects.items()
        if key.startswith(KEPT) and "._extra_state/" in key
    }


def rng_ranks_in(tree: Mapping[str, Any]) -> dict[tuple[int, int], object]:
    """Rng states by (pp, tp): `torch_dcp` keeps those of the only model-parallel rank without saying so."""
    stored = tree.get("rng_state", {})
    named = stored.items() if isinstance(stored, Mapping) else [("(0, 0)", stored)]
    return {
        rank: rng_at(states, f"rng_state.{name}") for name, states in named if (rank := rank_of(str(name)))
    }


def rng_ranks(catalog: Catalog) -> set[tuple[int, int]]:
    """The (pp, tp) ranks whose rng states are stored."""
    keys = (*catalog.tensors, *catalog.objects)
    return {(found.pp, found.tp) for found in map(rng_key, keys) if found}


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
        elif state := fsdp_state(key.removeprefix(KEPT)):
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
        elif key not in COMMON_ITEMS and not key.startswith(KEPT):
            rest.append(key)
    return weights, states, groups, nested, tuple(_dropped(rest, weights_only))


def nested_path(catalog: Catalog, key: str) -> Path:
    """Where the leaf `key` stood in the nested state; planner data tell, else the dots of the key."""
    known = catalog.planner_paths.get(key)
    path = known if known is not None and len(known) > 1 else key.split(".")
    return tuple(int(part) if isinstance(part, str) and part.isdigit() else part for part in path)


def _dropped(keys: Iterable[str], weights_only: bool) -> Iterable[str]:
    unknown = []
    rules = (*_DROPPED, *([("optimizer.*", "--weights-only")] if weights_only else []))
    for key in keys:
        reason = next((why for glob, why in rules if fnmatchcase(key, glob)), None)
        if reason is None:
            unknown.append(key)
        else:
            yield f"{key}: {reason}"
    if unknown:
        raise MappingError(
            "the checkpoint holds keys that no rule accounts for; leave them out with --ignore-keys GLOB if the "
            "target can do without them:\n" + list_problems(unknown),
            unknown,
        )


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
    if problems:
        raise MappingError(
            "weights and optimizer states do not fit together:\n" + list_problems(problems), problems
        )
    return tuple(tensors)


def _refuse_local_numbers(
    weights: Iterable[str], states: Iterable[str], common: CommonState, stages: int
) -> None:
    found = local_numbers(weights, states, common, stages)
    if found is not None:
        raise MappingError(f"{found}.\n{found.way_out[:1].upper()}{found.way_out[1:]}")


def _refuse_masters(states: _States) -> None:
    masters = [
        f"{name}.{kind}" for name, kinds in states.items() for kind in kinds if canonical_kind(kind) == MASTER
    ]
    if masters:
        raise UnsupportedCheckpointError(
            "fp32 masters stand among the optimizer states, where Megatron-FSDP neither writes nor reads them (the "
            "converter of Megatron-LM does); `repair` puts those that round to the weights in their place, and "
            "--weights-only converts the model's values alone:\n" + list_problems(masters),
            masters,
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
    shape = weights[parts[0]].shape
    if len(parts) == 2:
        shape = (2 * shape[0], *shape[1:])
    found = [{WEIGHT: weights[part]} | states.get(part, {}) for part in parts]
    steps = {step_number(values.tensor(kinds.pop(STEP))) for kinds in found if STEP in kinds}
    if len(steps) > 1:
        raise MappingError(f"{whole}: its halves have different steps {sorted(steps)}")
    return FsdpTensor(
        name=whole,
        shape=shape,
        dtypes={kind: entry.dtype for kind, entry in found[0].items()},
        sources={kind: _sources([kinds[kind] for kinds in found], shape) for kind in found[0]},
        step=steps.pop() if steps else None,
    )


def _sources(entries: list[TensorEntry], shape: tuple[int, ...]) -> tuple[Source, ...]:
    if len(entries) == 1:
        return (Source(entries[0].key),)
    rest = (0,) * (len(shape) - 1)
    count = shape[0] // 2
    return tuple(Source(e.key, (Place((i * count, *rest), shape),)) for i, e in enumerate(entries))


def step_number(tensor: StoredTensor) -> float:
    """The 0-d fp32 step as a number."""
    if tensor.dtype != "float32" or tensor.shape:
        raise MappingError(f"a step is a 0-d float32 tensor, found {tensor.dtype} {tensor.shape}")
    return float(struct.unpack("<f", tensor.data)[0])
