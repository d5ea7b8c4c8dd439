"""From a `Model` to the `Target` of its `torch_dist` checkpoint: all decisions, no bytes.

The result has the `fully_reshardable` optimizer layout, which core 0.15 and later load at any topology::

    <weight key>                                   in the training dtype, stacked over layers and experts
    optimizer.state.{param,exp_avg,exp_avg_sq}.<weight key>         fp32, of the same shape
    <module>._extra_state/shard_<index>_<shape>, rng_state/shard_<pp>.<tp>_<PP>.<TP>, common_state/shard_0_1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ckpt_tools.errors import MappingError, UsageError, raise_if
from ckpt_tools.megatron.keys import (
    BUFFERS,
    COMMON_ITEMS,
    COMMON_OBJECT,
    object_shard,
    shard_key,
    stacked_layers,
    state_role,
)
from ckpt_tools.megatron.names import BRIDGE, Dialect, dialect_for
from ckpt_tools.megatron.param_groups import refuse_lost_memberships, rules_of
from ckpt_tools.megatron.run_state.record import Size, TargetRecord
from ckpt_tools.megatron.run_state.settings import contradicted_dtype
from ckpt_tools.megatron.torch_dist.grids import (
    RngGrid,
    extra_state_keys,
    refuse_incomplete,
    refuse_sizes,
    rng_grid,
    rng_objects,
)
from ckpt_tools.megatron.torch_dist.optimizers import (
    is_distributed,
    refuse_lost_states,
    spelled_master,
)
from ckpt_tools.megatron.torch_dist.stacking import (
    Stack,
    contradicted_layers,
    joined_halves,
    stack_parameters,
)
from ckpt_tools.megatron.vocab import Vocabulary, vocabulary
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.choices import DialectName, LayerSpec
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.model import Model, unread_note
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.target import Target, TargetObject, TargetTensor

CONTENT_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
OPTIMIZER_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}
EXTRA_STATE, RERUN = "*._extra_state/shard_*", "rerun_state_machine_state/*"
# args of a job that holds such
FP8_WEIGHTS = ("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param")

# Of a source's common state: what is made here, and what only a job that resumes asks for.
_OWN = {"optimizer", "opt_param_scheduler", "content_metadata"}
_RESUMED = {"rerun_state_machine"}
# What loaders tell groups apart by (optimizer.py `param_group_identifier_keys`); the expert flag is set here.
_IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr")
Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TorchDistOptions:
    """What a user may decide about the target; None leaves the decision to the checkpoint."""

    layer_spec: LayerSpec | None = None
    stacked: bool | None = None  # layers of a block in one tensor
    dtype: str | None = None  # of the weights
    tp: int | None = None  # the tensor-parallel size that the source's packed projections are for
    ep: int | None = None  # sizes of the job that will load the result: of expert parallelism,
    etp: int | None = None  # of tensor parallelism inside experts
    gpus: int | None = None  # of that job
    dialect: DialectName | None = None  # of the program that will load the result
    weights_only: bool = False

    extra_state: bool = True
    extra_state_template: tuple[str, ...] = ()  # keys of a checkpoint of the same model; () to derive them


@dataclass(frozen=True, slots=True)
class TorchDistTarget:
    """A target, and the common state that also goes into `common.pt`."""

    target: Target
    common: Mapping[str, Any]
    groups: tuple[int, ...] = ()  # parameters per optimizer group, in id order
    record: TargetRecord = field(default_factory=TargetRecord)
    vocabulary: Vocabulary | None = None


def build_torch_dist_target(model: Model, options: TorchDistOptions) -> TorchDistTarget:
    local = model.settings.local_norms if options.layer_spec is None else options.layer_spec == "local"
    dialect = choose_dialect(model, options.dialect)
    _check_counts(model)
    rounded = any(p.dtype not in (None, p.weight.dtype) for p in model.parameters)
    if rounded and options.dtype is None and (problem := contradicted_dtype(model.common)):
        raise MappingError(f"{problem}: to which type the masters are to be rounded is unknown; pass --dtype")
    stacks, notes = stack_parameters(joined_halves(model.parameters), model.common, options.stacked)
    common, counts = _common_state(model, options)
    grid = None
    if model.rng and not options.weights_only:
        grid = rng_grid(model.rng, model.common, dialect, options.ep, options.gpus)
    has_experts = any(p.expert is not None for p in model.parameters)
    refuse_sizes({"gpus": options.gpus, "ep": options.ep, "etp": options.etp}, has_experts, grid)
    rng, rng_notes = ([], []) if options.weights_only else rng_objects(model.rng, grid)
    extra = [TargetObject(key, [None]) for key in _extra_keys(stacks, local, model, options)]
    rerun = [] if options.weights_only else [TargetObject(key, [None]) for key in _stored(model, RERUN)]
    objects = (*rng, *extra, *rerun, TargetObject(COMMON_OBJECT, [common]))
    names = {shard.name for o in objects if (shard := object_shard(o.key))}
    refuse_incomplete(
        (name, problem)
        for name, problem in model.incomplete
        if name in names or (extra and name.endswith("._extra_state"))  # stacked otherwise
    )
    kept = carried_objects(model, objects)
    is_empty = extra and not any(o.key in kept for o in extra)
    scaling = "FP8 scaling starts again: Transformer Engine's extra states are written empty"
    asked = {_of_layer(o.key) for o in extra}
    unplaced = [
        f"{key}: its FP8 scales are not part of the target, which has no such key"
        for key in model.extra_states
        if _of_layer(key) not in asked
    ]
    target = Target(
        tensors=(
            *_weights(stacks, model, options),
            *(_states(stacks, model) if "optimizer" in common else ()),
        ),
        objects=objects,
        dropped=(*_dropped(model, {*kept, *model.extra_states}), *unplaced),
        renamed=_renamed(stacks, model),
        notes=(
            *unread_note(model),
            *model.notes,
            *([scaling] if is_empty and model.common.arg("fp8") else []),
            *notes,
            *(rng_notes if any(o.key not in kept for o in rng) or not rng else ()),
            *_losses(model, options, kept),
        ),
    )
    record = _record(model, options, dialect, grid)
    args = model.common.settings
    rows = vocabulary(((p.name, p.shape) for p in model.parameters), args, record.tokens)
    return TorchDistTarget(target, common, counts, record, rows)


def choose_dialect(model: Model, asked: str | None) -> Dialect:
    """The program asked for, else the one that the source was made for. Raises as `dialect_for`."""
    known = None if model.record is None else model.record.target
    otherwise = known or (BRIDGE if model.settings.bridge else "main")
    return dialect_for(asked, otherwise, (p.name for p in model.parameters))


def _record(model: Model, options: TorchDistOptions, dialect: Dialect, grid: RngGrid | None) -> TargetRecord:
    """The sizes that something written depends on: rng states on TP and DP, the groups of experts on EP and ETP."""
    arg = model.common.arg
    has_experts = any(p.expert is not None for p in model.parameters)

    def size(asked: int | None, option: str, name: str) -> Size | None:
        ranks = asked or arg(name)
        return Size(ranks, option if asked else "args") if ranks and has_experts else None

    told_tp = "args" if arg("tensor_model_parallel_size") else "rng states"
    return TargetRecord(
        dialect.name,
        tp=None if grid is None else Size(grid.tp, told_tp),
        ep=size(options.ep, "--ep", "expert_model_parallel_size"),
        etp=size(options.etp, "--etp", "expert_tensor_parallel_size"),
        dp=None if grid is None else grid.dp,
        tokens=None if model.record is None else model.record.tokens,
    )


def _common_state(model: Model, options: TorchDistOptions) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The common state, and the number of tensors of the running model in each optimizer group."""
    values = model.common.values
    common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0}
    left = _OWN | (_RESUMED if options.weights_only else set())
    names = set(values) - left if model.common.of_torch_dist else {*COMMON_ITEMS}
    common |= {name: value for name, value in values.items() if name in names}
    common["content_metadata"] = dict(CONTENT_METADATA)
    if options.weights_only:
        return common, ()
    if model.scheduler:
        common["opt_param_scheduler"] = dict(model.scheduler)
    if model.optimizer_layout is None:
        return common, ()
    refuse_lost_states(model)
    if model.own_optimizer is not None:
        common["optimizer"] = model.own_optimizer
        if is_distributed(model.own_optimizer):
            common["content_metadata"] |= OPTIMIZER_METADATA
        return common, ()
    common["optimizer"], counts = _rebuild_optimizer(model, _experts_apart(model, options))
    common["content_metadata"] |= OPTIMIZER_METADATA
    return common, counts


def _check_counts(model: Model) -> None:
    common = model.common
    problems = contradicted_layers((p.name for p in model.parameters), common.arg("num_layers"))
    wanted = common.arg("num_experts") or common.arg("num_moe_experts")
    experts = Counter(p.name for p in model.parameters if p.expert is not None)
    if wanted is not None:
        problems += [
            f"{k}: the args say {wanted} experts, there are {n}" for k, n in experts.items() if n != wanted
        ]
    raise_if(problems, MappingError, "the weights contradict the args")


def _experts_apart(model: Model, options: TorchDistOptions) -> bool:
    """Whether the loading job has a separate optimizer for routed experts (optimizer/__init__.py)."""
    common = model.common
    tp = common.arg("tensor_model_parallel_size") or 1
    ep = options.ep or common.arg("expert_model_parallel_size") or 1
    etp = options.etp or common.arg("expert_tensor_parallel_size") or tp
    return any(p.expert is not None for p in model.parameters) and (ep > 1 or etp != tp)


def _weights(stacks: Sequence[Stack], model: Model, options: TorchDistOptions) -> Iterable[TargetTensor]:
    """The stored weights and buffers; for another type, and where masters are in their place, the masters rounded."""
    for stack in stacks:
        value = stack.weight
        dtype = _weight_dtype(stack, value.dtype, model, options)
        if options.dtype and dtype != value.dtype and all(MASTER in p.values for p in stack.parameters):
            value = stack.state(MASTER)
        yield TargetTensor(
            stack.key,
            dtype,
            value.shape,
            value.sources,
            zero_filled=value.zero_filled,
            role="weight",
        )


def _states(stacks: Sequence[Stack], model: Model) -> Iterable[TargetTensor]:
    for stack in stacks:
        roles = {p.states for p in stack.parameters}
        if len(roles) > 1:
            raise MappingError(
                f"{stack.key}: its layers or experts have different optimizer states {sorted(roles)}"
            )
        held = next(iter(roles))
        own = model.own_optimizer
        master = "param" if own is None else spelled_master(own, held, model.roles)
        for role in held:
            if role == MASTER and master == "fp32_param" and stack.parameters[0].dtype == "float32":
                continue  # an optimizer that is not distributed keeps none of fp32 weights
            value = stack.state(role)
            spelled, dtype = (master, "float32") if role == MASTER else (role, value.dtype)
            yield TargetTensor(
                f"optimizer.state.{spelled}.{stack.key}",
                dtype,
                value.shape,
                value.sources,
                zero_filled=value.zero_filled,
                role=state_role(role),
            )


def _weight_dtype(stack: Stack, stored: str, model: Model, options: TorchDistOptions) -> str:
    """Element type of a stored weight: that of the running model for masters; buffers and other weights keep theirs.

    Buffers and frozen weights are known by having no optimizer state, so a checkpoint without any tells them by
    name only.
    """
    first = stack.parameters[0]
    is_frozen = model.optimizer_layout is not None and not first.states
    if stored not in CASTABLE or is_frozen or stack.key.endswith(BUFFERS):
        return stored
    known = options.dtype or first.dtype
    if known is None and stored == "float32":
        raise UsageError(
            f"{stack.key} is stored as an fp32 master, and neither args nor run_config.yaml name the type the model "
            "is trained in; pass --dtype"
        )
    return known or stored


def _extra_keys(
    stacks: Sequence[Stack], local: bool | None, model: Model, options: TorchDistOptions
) -> Sequence[str]:
    """Keys of extra states: a template's, the source's where the weights keep their keys, or derived ones.

    Another program may ask for some that the source's does not have.
    """
    if not options.extra_state:
        return ()
    if options.extra_state_template:
        return options.extra_state_template
    stored = _stored(model, EXTRA_STATE) if all(s.key in model.catalog.tensors for s in stacks) else []
    if stored and options.dialect is None:
        return stored
    return tuple(dict.fromkeys((*stored, *extra_state_keys(stacks, transformer_engine=not local))))


def _stored(model: Model, glob: str) -> list[str]:
    return [key for key in model.catalog.objects if model.common.of_torch_dist and fnmatchcase(key, glob)]


def carried_objects(model: Model, objects: Iterable[TargetObject]) -> dict[str, Item]:
    """What a `torch_dist` source has of the objects, by their keys: it is copied byte for byte."""
    stored = model.catalog.objects if model.common.of_torch_dist else {}
    scales = {_of_layer(key): item for key, item in model.extra_states.items()}
    found = {o.key: stored[o.key].item for o in objects if o.key in stored and o.key != COMMON_OBJECT}
    return found | {o.key: scales[place] for o in objects if (place := _of_layer(o.key)) in scales}


def _of_layer(key: str) -> str:
    """The key that a shard of a module has where layers are not stacked."""
    shard = object_shard(key)
    stacked = stacked_layers(shard.name) if shard else []
    if shard is None or not stacked:
        return key
    name = f"{shard.name[: stacked[0]]}{shard.place[0]}.{shard.name[stacked[0] :]}"
    return shard_key(name, shard.place[1:] or (0,), shard.grid[1:] or (1,))


def _dropped(model: Model, kept: Container[str]) -> tuple[str, ...]:
    """What reading left out, as `fsdp_dtensor` does, without what is kept here."""
    if not model.common.of_torch_dist:
        return model.dropped
    lines = (line.partition(": ") for line in model.dropped)
    return tuple(
        f"{key}: the target does not ask for it" if "fsdp_dtensor" in why else f"{key}: {why}"
        for key, _, why in lines
        if key not in kept
    )


def _renamed(stacks: Sequence[Stack], model: Model) -> tuple[str, ...]:
    """One line per name that changed by more than a layer or expert axis."""
    if model.common.of_torch_dist:
        pairs = dict.fromkeys((p.origin, stack.key) for stack in stacks for p in stack.parameters)
        return tuple(f"{old} -> {new}" for old, new in pairs if old != new)
    return tuple(
        f"{p.origin} -> {p.name}"
        for p in model.parameters
        if p.origin not in (p.name, "") and p.expert is None
    )


def _losses(model: Model, options: TorchDistOptions, kept: Collection[str]) -> list[str]:
    """What the source, or this checkpoint, does not hold and a training job's own would have."""
    notes = []
    if "iteration" not in model.common.values:
        notes.append("iteration: the source does not tell it; written as 0")
    if not model.common.of_torch_dist:
        notes.append("rerun state machine: the source has none, the loading job starts a new one")
        if any(map(model.common.arg, FP8_WEIGHTS)) and any(MASTER in p.values for p in model.parameters):
            notes.append(
                "weights are the masters rounded to the training type: a job that holds them in FP8 quantizes them "
                "again"
            )
    if not options.extra_state:
        notes.append("no Transformer Engine extra states: load with --dist-ckpt-strictness log_all")
    elif not model.common.arg("fp8") and not any(fnmatchcase(key, EXTRA_STATE) for key in kept):
        notes.append("Transformer Engine extra states are written empty")
    if model.optimizer_layout is None or options.weights_only:
        return notes
    if model.own_optimizer is not None:
        notes.append(
            "its optimizer is not Adam: states and groups are as they were, for a job with the same optimizer and "
            "expert-parallel size"
        )
    if model.common.arg("use_precision_aware_optimizer") and not model.common.arg("optimizer_cpu_offload"):
        notes.append(
            "masters are written as plain fp32 numbers: load without --use-precision-aware-optimizer, or with "
            "store_param_remainders off; a job that keeps remainders does not load them"
        )
        if any(WEIGHT not in p.values for p in model.parameters):
            notes.append(
                "weights are their masters, halfway values rounded to the even number; the optimizer of the source's "
                "job rounds these away from zero, so that a few of its weights differ by one ulp (no master does)"
            )
    for p in {p.origin: p for p in model.parameters}.values():
        if not p.states:
            notes.append(f"{p.origin}: no optimizer state in the source (buffer or frozen weight)")
        elif MASTER in p.values and p.main.dtype != "float32":
            notes.append(f"{p.origin}: its master is {p.main.dtype}, not fp32; widened")
    return notes


def _rebuild_optimizer(model: Model, experts_apart: bool) -> tuple[dict[Any, Any], tuple[int, ...]]:
    """The `optimizer` entry of the common state, and the number of tensors of the running model in each group.

    A `torch_dist` source does not say which parameter is in which group, and need not: its groups are taken as they
    are. Megatron-FSDP does not know expert groups, so whether routed experts have an optimizer of their own follows
    the topology that will load the result. Groups are ordered as core 0.16 and later order them: by what a group
    overrides, the default group first (optimizer/__init__.py `_get_param_groups`); loaders match groups by their
    attributes.
    """
    if all(p.group is None for p in model.parameters):
        return _stored_optimizer(model, experts_apart), ()
    refuse_lost_memberships(model.parameters, model.groups, rules_of(model.common, model.groups))
    members = _members(model, experts_apart)
    order = sorted(members, key=lambda item: _rank(item[0], model.scheduler))
    _refuse_lookalikes([group for group, _ in order])
    if not experts_apart:
        return _optimizer([group for group, _ in order], model), tuple(count for _, count in order)
    parts = [[item for item in order if item[0]["is_expert_parallel"] is expert] for expert in (False, True)]
    optimizer = {i: _optimizer([group for group, _ in part], model) for i, part in enumerate(parts)}
    return optimizer, tuple(count for part in parts for _, count in part)


def _stored_optimizer(model: Model, experts_apart: bool) -> dict[Any, Any]:
    """The source's groups in their order; those of routed experts follow where the loading job has them."""
    step = {} if model.step is None else {"step": model.step}
    groups = [step | dict(group) for group in model.groups]
    experts = [g for g in groups if g.get("is_expert_parallel")]
    others = [g for g in groups if not g.get("is_expert_parallel")]
    if experts_apart:
        experts = experts or [g | {"is_expert_parallel": True} for g in others]
        return {i: _optimizer(part, model) for i, part in enumerate((others, experts))}
    known = {_identity(group) for group in others}
    joined = [g | {"is_expert_parallel": False} for g in experts]
    return _optimizer([*others, *(g for g in joined if _identity(g) not in known)], model)


def _optimizer(groups: list[Group], model: Model) -> dict[str, Any]:
    scaler = {"grad_scaler": dict(model.grad_scaler)} if model.grad_scaler else {}
    return {"optimizer": {"param_groups": groups}, **scaler, "param_state_sharding_type": "fully_reshardable"}


def _members(model: Model, experts_apart: bool) -> list[tuple[Group, int]]:
    """Distinct groups, those of routed experts apart where they have their own, each with its number of tensors."""
    tensors: dict[tuple[int, bool], set[str]] = {}
    for p in model.parameters:
        if p.group is not None:
            tensors.setdefault((p.group, experts_apart and p.expert is not None), set()).add(p.origin)
    return [
        (dict(model.groups[group]) | {"is_expert_parallel": expert}, len(names))
        for (group, expert), names in tensors.items()
    ]


def _rank(group: Group, scheduler: Mapping[str, Any]) -> tuple[Any, ...]:
    """Sort key: groups without overrides first, then by the overrides' names and values."""
    defaults: dict[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}
    defaults |= {name: scheduler[name] for name in ("max_lr", "min_lr") if name in scheduler}
    overrides = [(k, float(group[k])) for k in sorted(defaults) if group.get(k) not in (None, defaults[k])]
    return bool(overrides), overrides, group["is_expert_parallel"]


def _identity(group: Group) -> tuple[object, ...]:
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTIFIERS)


def _refuse_lookalikes(groups: Iterable[Group]) -> None:
    seen: dict[tuple[object, ...], Group] = {}
    problems = []
    for group in groups:
        identity = _identity(group)
        other = seen.setdefault(identity, group)
        if other is not group:
            differing = [k for k in {*group, *other} if group.get(k) != other.get(k)]
            values = ", ".join(f"{k}: {other.get(k)!r} and {group.get(k)!r}" for k in sorted(differing))
            problems.append(f"{dict(zip(_IDENTIFIERS, identity, strict=True))}: {values}")
    raise_if(
        problems,
        MappingError,
        "parameters in groups that loaders cannot tell apart have different settings or steps",
    )
