"""What an `fsdp_dtensor` checkpoint must contain, built from a `torch_dist` one.

Keys and values follow what native Megatron-FSDP checkpoints hold (Megatron-LM checkpointing.py
`generate_state_dict` and `preprocess_fsdp_dtensor_state_dict`, distrib_optimizer.py
`sharded_param_state_fsdp_dtensor`)::

    model.module.<name>                                         the fp32 master, or the weight where none is stored
    optimizer.state.module.module.module.<name>.<state>         exp_avg, exp_avg_sq, and `step` for torch's Adam
    optimizer.param_to_group_meta.module.module.module.<unsplit name>.<field>
    opt_param_scheduler.<field>, rng_state.(pp, tp).<i>.<name>, args, iteration, checkpoint_version, ...

The gate and up halves of a SwiGLU fc1 are written apart as `<name>_w` and `<name>_v`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckpt_tools.errors import MappingError
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor
from ckpt_tools.megatron.fsdp_dtensor.parameters import LiveParameter
from ckpt_tools.megatron.keys import (
    BUFFERS,
    HALVES,
    MODEL_PREFIX,
    STATE_PREFIX,
    STATE_PREFIX_FP32,
    state_role,
)
from ckpt_tools.megatron.param_groups import Group, Membership
from ckpt_tools.model.catalog import Value, concat
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.many import many
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.target import InlineTensor, TargetObject, TargetTensor

TORCH_ADAM_FIELDS = frozenset({"amsgrad", "foreach", "maximize", "capturable"})


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Dotted prefixes of weights and of optimizer states in the output's keys."""

    model: str = MODEL_PREFIX
    state: str = STATE_PREFIX

    @property
    def wrappers(self) -> str:
        """The wrapper segments in front of a parameter's name in optimizer keys."""
        return self.state.removeprefix("optimizer.state.")


def state_prefix(model: Model) -> str:
    """Optimizer names have one `module.` less when the model was trained in fp32 (no Float16Module)."""
    half = model.settings.half_precision
    if half is None:
        half = any(p.dtype != "float32" for p in model.parameters)
    return STATE_PREFIX if half else STATE_PREFIX_FP32


@many(frozen=True, slots=True)
class Half:
    """One target tensor of a live parameter: all of it, or the gate or up half of its rows."""

    suffix: str
    start: int
    count: int


def halves(parameter: LiveParameter) -> tuple[Half, ...]:
    """The target tensors of a live parameter, as row ranges of its unsplit shape."""
    if not parameter.gated:
        return (Half("", 0, parameter.shape[0] if parameter.shape else 1),)
    count = parameter.shape[0] // 2
    gate, up = HALVES
    return Half(gate, 0, count), Half(up, count, count)


def live_value(parameter: LiveParameter, role: str) -> Value:
    """The unsplit parameter as one value: its stored parts in order, and zeros where it has more rows than they."""
    if not parameter.shape:
        return parameter.rows[0].parameter.values[role]
    parts = [rows.parameter.values[role].rows(rows.start, rows.count) for rows in parameter.rows]
    return concat(parameter.name, parts, parameter.shape[0])


def _cut(value: Value, half: Half) -> Value:
    return value.rows(half.start, half.count) if half.suffix else value


def running_dtype(parameter: LiveParameter) -> str | None:
    """Element type of the parameter in the running model, None if unknown."""
    dtypes = {p.dtype for p in parameter.stored}
    if len(dtypes) > 1:
        raise MappingError(
            f"{parameter.name}: its stored parts have different types {sorted(map(str, dtypes))}"
        )
    return dtypes.pop()


def has_role(parameter: LiveParameter, role: str) -> bool:
    """Whether every stored part of the parameter has this value."""
    stored = parameter.stored
    lacking = [p.name for p in stored if role not in p.values]
    if 0 < len(lacking) < len(stored):
        raise MappingError(f"{parameter.name}: optimizer state {role!r} is missing for {lacking}")
    return not lacking


def roles_of(parameter: LiveParameter) -> tuple[str, ...]:
    """What the optimizer holds for the parameter; nothing for buffers and frozen weights."""
    stored = parameter.stored
    if len(stored) == 1:  # nearly all of the hundred thousands of a large model
        return stored[0].states
    known = dict.fromkeys(role for p in stored for role in p.states)
    return tuple(role for role in known if has_role(parameter, role))


def model_tensors(parameter: LiveParameter, prefix: str, dtype: str | None) -> Iterator[TargetTensor]:
    """The `model.*` tensors of one parameter: masters when stored, else the weights.

    `dtype` asks for another element type; stored weights that already have it are taken as they are, and so are
    buffers and what is not a floating-point number.
    """
    running = running_dtype(parameter)
    if running not in CASTABLE or parameter.name.endswith(BUFFERS):
        dtype = None
    weights = live_value(parameter, WEIGHT) if has_role(parameter, WEIGHT) else None
    use_master = has_role(parameter, MASTER) and (weights is None or dtype != running)
    values = live_value(parameter, MASTER) if use_master or weights is None else weights
    proof = weights if use_master else None
    head, _, tail = prefix.partition(".")
    for half in halves(parameter):
        name = f"{parameter.name}{half.suffix}"
        part = _cut(values, half)
        yield TargetTensor(
            key=f"{prefix}.{name}",
            dtype=dtype or values.dtype,
            shape=part.shape,
            sources=part.sources,
            path=(head, f"{tail}.{name}" if tail else name),
            must_round_to=_cut(proof, half).sources if proof else (),
            must_round_dtype=proof.dtype if proof else None,
            zero_filled=values.zero_filled,
            parameter=name,
            role="master" if use_master else "weight",
        )


def state_tensors(parameter: LiveParameter, prefixes: Prefixes) -> Iterator[TargetTensor]:
    """The `optimizer.state.*` tensors of one parameter, masters excepted: those are the model's values."""
    named = [(half, f"{parameter.name}{half.suffix}") for half in halves(parameter)]
    wrapped = [f"{prefixes.wrappers}.{name}" for _, name in named]
    for kind in roles_of(parameter):
        if kind == MASTER:
            continue
        values = live_value(parameter, kind)
        for (half, name), path in zip(named, wrapped, strict=True):
            part = _cut(values, half)
            yield TargetTensor(
                key=f"{prefixes.state}.{name}.{kind}",
                dtype=values.dtype,
                shape=part.shape,
                sources=part.sources,
                path=("optimizer", "state", path, kind),
                zero_filled=values.zero_filled,
                parameter=name,
                role=state_role(kind),
            )


def step_tensors(
    parameters: Iterable[LiveParameter],
    memberships: Mapping[str, Membership],
    groups: Sequence[Group],
    prefixes: Prefixes,
) -> Iterator[InlineTensor]:
    """A 0-d fp32 `step` per parameter in a group of torch's Adam; a fused Adam keeps it in the group."""
    for parameter in parameters:
        group = groups[memberships[parameter.group_name].group]
        if TORCH_ADAM_FIELDS.isdisjoint(group):
            continue
        for half in halves(parameter):
            path: Path = ("optimizer", "state", f"{prefixes.wrappers}.{parameter.name}{half.suffix}", "step")
            yield InlineTensor(dotted(path), "float32", (), struct.pack("<f", float(group["step"])), path)


def group_objects(
    parameters: Iterable[LiveParameter],
    memberships: Mapping[str, Membership],
    groups: Sequence[Group],
    prefixes: Prefixes,
) -> Iterator[TargetObject]:
    """Every field of every trainable parameter's group, under the parameter's unsplit live name.

    `is_expert_parallel` is False for all: Megatron-FSDP does not know expert groups
    (param_and_grad_buffer.py drops the attribute).
    """
    fields = [dict(group) | {"is_expert_parallel": False} for group in groups]
    for group in fields:
        if not TORCH_ADAM_FIELDS.isdisjoint(group):
            group.pop("step", None)
    # the parts of a projection that the target keeps apart share one live name
    for name in dict.fromkeys(p.group_name for p in parameters):
        wrapped = f"{prefixes.wrappers}.{name}"
        head = f"optimizer.param_to_group_meta.{wrapped}"
        for field, value in fields[memberships[name].group].items():
            yield TargetObject(f"{head}.{field}", value, ("optimizer", "param_to_group_meta", wrapped, field))


def backfill_groups(
    groups: Sequence[Group], scheduler: Mapping[str, Any], step: object
) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups with every field a current run asks for, and a note per field that had to be filled in.

    The loader asks for exactly the fields its own groups have, so a field the writer did not know yet would fail
    a strict load.
    """
    filled: list[dict[str, Any]] = []
    notes: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        whole = dict(group)
        for alias, name in (("pre_wd_mult", "wd_mult"), ("pre_lr_mult", "lr_mult")):
            if alias in whole:
                whole.setdefault(name, whole[alias])
        defaults: dict[str, Any] = {
            "wd_mult": 1.0,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "max_lr": scheduler.get("max_lr"),
            "min_lr": scheduler.get("min_lr"),
            "step": step,
        }
        if TORCH_ADAM_FIELDS.isdisjoint(whole):
            defaults["bias_correction"] = True
        for field, value in defaults.items():
            if field not in whole and value is not None:
                whole[field] = value
                notes.setdefault(f"{field} = {value!r}", []).append(index)
        if "default_config" not in whole:
            whole["default_config"] = not whole.get("is_decoupled_lr") and all(
                whole.get(rate) == scheduler.get(rate, whole.get(rate)) for rate in ("max_lr", "min_lr")
            )
            notes.setdefault(f"default_config = {whole['default_config']}", []).append(index)
        if whole.get("step") is None:
            raise MappingError(f"optimizer group {index} has no step and the common state has none either")
        filled.append(whole)
    return filled, [f"group field {field} (groups {', '.join(map(str, at))})" for field, at in notes.items()]


def rng_items(
    rng: Mapping[tuple[int, int], object], tp: int
) -> tuple[list[InlineTensor], list[TargetObject], list[str]]:
    """`rng_state.(0, t).*` for the target's `tp` ranks, and notes.

    `rng` maps the writer's (pp, tp) to its list of states. The target has one pipeline stage: stage 0 is
    carried over, and its last rank repeated where the target has more tensor-parallel ranks.
    """
    tensors, objects, notes = [], [], []
    stage = {t: states for (p, t), states in sorted(rng.items()) if p == 0}
    if not stage:
        return [], [], ["the source has no rng states: resume with --no-load-rng"]
    for rank in range(tp):
        source = min(rank, max(stage))
        if source != rank:
            notes.append(f"rng of tensor-parallel rank {rank}: copied from rank {source}")
        more_tensors, more_objects = leaves(stage[source], ("rng_state", f"(0, {rank})"))
        tensors += more_tensors
        objects += more_objects
    other = sorted(key for key in rng if key[0] != 0 or key[1] >= tp)
    if other:
        notes.append(f"rng of (pp, tp) ranks {other}: dropped, the target has no such ranks")
    return tensors, objects, notes


Path: TypeAlias = tuple[str | int, ...]


# ---- nested Python values as leaves under dotted keys


def flatten(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    """(path, leaf) of everything below `value`, which is at `path`, as DCP stores it.

    The rule of `torch.distributed.checkpoint._traverse`: mappings are always descended; lists only when they hold,
    at any depth, a tensor or a mapping; everything else, tuples included, is a leaf. Empty mappings vanish. A list
    index is an integer in the path and its decimal text in the key.
    """
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from flatten(child, (*path, key if isinstance(key, int) else str(key)))
    elif isinstance(value, list) and any(_has_tensor_or_mapping(child) for child in value):
        for index, child in enumerate(value):
            yield from flatten(child, (*path, index))
    else:
        yield path, value


def _has_tensor_or_mapping(value: object) -> bool:
    if isinstance(value, list):
        return any(_has_tensor_or_mapping(child) for child in value)
    return isinstance(value, Mapping | StoredTensor)


def unflatten(found: Mapping[Path, object]) -> Any:
    """The value with these leaves: the inverse of `flatten`, without the empty mappings that vanish there.

    A node with the integers from 0 on as keys is a list.
    """
    if set(found) == {()}:
        return found[()]
    children: dict[str | int, dict[Path, object]] = {}
    for path, leaf in found.items():
        children.setdefault(path[0], {})[path[1:]] = leaf
    nested = {key: unflatten(below) for key, below in children.items()}
    if nested and set(nested) == set(range(len(nested))):
        return [nested[index] for index in range(len(nested))]
    return nested


def dotted(path: Path) -> str:
    """The key DCP gives a path."""
    return ".".join(map(str, path))


def leaves(value: object, path: Path) -> tuple[list[InlineTensor], list[TargetObject]]:
    """The leaves of `value` as items to write: tensors inline, everything else as objects."""
    tensors, objects = [], []
    for leaf_path, leaf in flatten(value, path):
        key = dotted(leaf_path)
        if isinstance(leaf, StoredTensor):
            tensors.append(InlineTensor(key, leaf.dtype, leaf.shape, leaf.data, leaf_path))
        else:
            objects.append(TargetObject(key, leaf, leaf_path))
    return tensors, objects
