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
from typing import Any, NamedTuple

from ckpt_tools.errors import CorruptCheckpointError, MappingError, UnsupportedCheckpointError, raise_if
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor, load_object
from ckpt_tools.megatron.fsdp_dtensor.parameters import FsdpTensor, StoredParameter, stored_parameters
from ckpt_tools.megatron.fsdp_dtensor.tensors import TORCH_ADAM_FIELDS, Path, unflatten
from ckpt_tools.megatron.keys import (
    BUFFERS,
    COMMON_ITEMS,
    HALVES,
    NESTED_STATES,
    STEP,
    canonical_kind,
    decoder_layer,
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
    """A checkpoint with the running model's names, taken apart; tensors are still only described."""

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
        """For how many tensor-parallel ranks its packed projections are, None if unknown."""
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
    weights, states, groups, dropped = _sort_keys(catalog, values, weights_only)
    training = read_training_state(catalog, values)
    numbers = local_numbers(weights, (*states, *groups), common, len({pp for pp, _ in training.rng}))
    if numbers is not None:
        raise MappingError(f"{numbers}.\n{numbers.way_out[:1].upper()}{numbers.way_out[1:]}")
    notes: tuple[str, ...] = ()
    try:
        tensors = _join(weights, states, values)
    except (MappingError, UnsupportedCheckpointError) as error:
        if not weights_only:
            raise
        tensors, groups, notes = _join(weights, {}, values), {}, (unread_optimizer(error),)
    return FsdpSource(
        catalog=catalog,
        common=common,
        tensors=tensors,
        groups=groups,
        **training._asdict(),
        dropped=(*left_out, *dropped),
        ignored=left_out,
        notes=notes,
        record=read_record(files),
    )


def unread_optimizer(error: Exception) -> str:
    """The note on an optimizer that is left out anyway and has damage."""
    return f"the optimizer, which is left out, could not be read: {str(error).splitlines()[0]}"


class TrainingState(NamedTuple):
    """What a job saves of itself next to its model."""

    scheduler: Mapping[str, Any]
    rng: Mapping[tuple[int, int], object]
    grad_scaler: Mapping[str, Any]


def read_training_state(catalog: Catalog, values: SmallValues) -> TrainingState:
    """The leaves under `NESTED_STATES`, nested again as the job had them in memory."""
    leaves = {_path(catalog, k): values.at(catalog, k) for k in (*catalog.tensors, *catalog.objects)
              if k.startswith(NESTED_STATES)}  # fmt: skip
    tree = unflatten(leaves) if leaves else {}
    rng = tree.get("rng_state", {})
    # `torch_dcp` keeps the states of the only model-parallel rank without saying so
    named = rng.items() if isinstance(rng, Mapping) else [("(0, 0)", rng)]
    return TrainingState(
        fields_at(tree.get("opt_param_scheduler", {}), "opt_param_scheduler"),
        {rank: rng_at(states, f"rng_state.{name}") for name, states in named if (rank := rank_of(str(name)))},
        fields_at(tree.get("optimizer", {}).get("grad_scaler", {}), "optimizer.grad_scaler"),
    )


def _path(catalog: Catalog, key: str) -> Path:
    """Where the leaf `key` was in the nested state: by planner data, else by the dots of the key."""
    known = catalog.planner_paths.get(key)
    path = known if known is not None and len(known) > 1 else key.split(".")
    return tuple(int(part) if isinstance(part, str) and part.isdigit() else part for part in path)


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

    def at(self, catalog: Catalog, key: str) -> Any:
        """An object, or a small tensor."""
        if key in catalog.objects:
            return self.load(catalog.objects[key].item)
        return self.tensor(catalog.tensors[key])

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
) -> tuple[dict[str, TensorEntry], _States, _Groups, tuple[str, ...]]:
    """Weights by name, states by name and kind, group fields by name, and what is dropped."""
    weights: dict[str, TensorEntry] = {}
    states: _States = {}
    groups: _Groups = {}
    rest: list[str] = []
    for key, entry in catalog.tensors.items():
        if name := model_name(key):
            weights[name] = entry
        elif state := fsdp_state(key):
            states.setdefault(state.name, {})[state.kind] = entry
        elif not key.startswith(NESTED_STATES):
            rest.append(key)
    for key, stored in catalog.objects.items():
        if of_group := group_key(key):
            value = checked_field(of_group.field, values.load(stored.item), key)
            groups.setdefault(of_group.name, {})[of_group.field] = value
        elif key not in COMMON_ITEMS and not key.startswith(NESTED_STATES):
            rest.append(key)
    rules = (*_DROPPED, *([("optimizer.*", "--weights-only")] if weights_only else []))
    return weights, states, groups, tuple(left_out_by(rules, rest))


def _join(weights: Mapping[str, TensorEntry], states: _States, values: SmallValues) -> tuple[FsdpTensor, ...]:
    """Live tensors in stored order, halves joined in the place of the first."""
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
        "fp32 masters are among the optimizer states, where Megatron-FSDP neither writes nor reads them (the "
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
    entries = [{WEIGHT: weights[part]} | states.get(part, {}) for part in parts]
    steps = {step_number(values.tensor(kinds.pop(STEP))) for kinds in entries if STEP in kinds}
    if len(steps) > 1:
        raise MappingError(f"{whole}: its halves have different steps {sorted(steps)}")
    joined = {kind: concat(whole, [kinds[kind].value for kinds in entries]) for kind in entries[0]}
    return FsdpTensor(whole, joined[WEIGHT].shape, joined, steps.pop() if steps else None)


def step_number(tensor: StoredTensor) -> float:
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
    """What is stored for a trained weight is its fp32 master, unless that is stored as a state."""
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
    """Distinct sets of group fields, and for each trained tensor the number of its set.

    Every parameter has the fields of its group; those with equal fields make a group.
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
        if (step := group.get("step")) is None:
            return "its group has no step"
        if tensor.step not in (None, step):
            return f"its own step is {tensor.step:g}, its group's {step}: loaders cannot tell which is right"
        return None
    return None if tensor.step is not None else "it has states but no step"


def _spelling(name: str) -> str:
    """One spelling for a parameter's names in `model.*` and in `param_to_group_meta.*` of every dialect."""
    stored, expert = split_expert(stored_name(name))
    return stored if expert is None else f"{stored}{expert}"


def _group_names(name: str) -> Iterator[str]:
    """Names under which the group of a tensor may be stored: its own, or that of the projection it is a part of."""
    spelled = _spelling(name)
    yield spelled
    if part_of := split_projection(spelled):
        yield part_of[0]
    for part in MLA_DOWN:
        if part in spelled:
            yield spelled.replace(part, MLA_FUSED_DOWN)


# ---- layers of pipeline stages that were saved under the numbers they have inside of their stage

ISSUE = "MLM#7452"


@dataclass(frozen=True, slots=True)
class LocalNumbers:
    """What tells that weights have the layer numbers of a pipeline stage.

    Megatron-FSDP names weights by `named_parameters()`, which counts the layers of each stage from 0, and the states
    of its optimizer by the layer's number in the model (fsdp_dtensor_checkpoint.py `get_global_unique_param_name`).
    Stages that save into one checkpoint overwrite each other's weights: DCP keeps one of the writers of a key. Only
    where no two stages meet under a name do the states tell where the weights belong.
    """

    weights: tuple[int, ...]  # numbers of the decoder's layers, in order
    states: tuple[int, ...]  # the same of optimizer states and groups, which have the model's numbers
    layers: int | None  # of the whole model, as the args say
    stages: int

    @property
    def offset(self) -> int | None:
        """What is to be added to the weights' numbers; None where several stages had one number."""
        if not self.states or len(self.states) != len(self.weights):
            return None
        shift = self.states[0] - self.weights[0]
        return shift if [n + shift for n in self.weights] == list(self.states) else None

    def __str__(self) -> str:
        held = f", the optimizer's states layers {ranges(self.states)}" if self.states else ""
        of_args = "" if self.layers is None else f", the args say {self.layers} layers"
        met = "" if self.offset is not None else ", one over the other: those of other stages are lost"
        met = met if self.states else ", and no optimizer states tell of which stage they are"
        return (
            f"{ISSUE}: the weights are of layers {ranges(self.weights)}{held}{of_args} and {self.stages} pipeline "
            f"stages: the weights were saved under the numbers that layers have inside of their stage{met}"
        )

    @property
    def way_out(self) -> str:
        """What to do about it."""
        if self.offset is not None:
            return "`repair` gives the layers of this stage their numbers in the model"
        again = "save the run again as torch_dist, or from a job without pipeline parallelism"
        if not self.states:
            return again
        return f"{again}, or take a checkpoint from before; of this one only the optimizer's states are whole"


def local_numbers(
    weights: Iterable[str], states: Iterable[str], common: CommonState, stages: int = 1
) -> LocalNumbers | None:
    """What is wrong with the layer numbers of an `fsdp_dtensor` checkpoint; None for a sound or another damaged one.

    Args:
        weights: names of the parameters under `model.*`.
        states: those of optimizer states and group fields.
        stages: pipeline stages with stored rng states.
    """
    held, named = _layers(weights), _layers(states)
    count = common.arg("num_layers")
    layers = count if isinstance(count, int) else None
    size = common.arg("pipeline_model_parallel_size")
    stages = max(stages, size if isinstance(size, int) else 1)
    if not held or stages < 2 or held != tuple(range(len(held))):
        return None
    is_short = bool(set(named) - set(held)) if named else layers is not None and len(held) < layers
    return LocalNumbers(held, named, layers, stages) if is_short else None


def _layers(names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({layer[0] for layer in map(decoder_layer, names) if layer}))


def ranges(numbers: Iterable[int]) -> str:
    """`0, 1, 2, 5` as `0-2, 5`."""
    out: list[list[int]] = []
    for n in sorted(numbers):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in out)
