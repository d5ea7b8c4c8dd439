"""From an `fsdp_dtensor` checkpoint to the `Target` of its `torch_dist` conversion: all decisions, no bytes.

The result has the `fully_reshardable` optimizer layout, which core 0.15 and later load at any topology::

    <weight key>                                   in the training dtype, stacked over layers and experts
    optimizer.state.{param,exp_avg,exp_avg_sq}.<weight key>         fp32, of the same shape
    <module>._extra_state/shard_<index>_<shape>, rng_state/shard_<pp>.<tp>_<PP>.<TP>, common_state/shard_0_1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.catalog.unpickle import TorchDtype
from ckpt_tools.dtypes import CASTABLE
from ckpt_tools.errors import MappingError, UsageError, list_problems
from ckpt_tools.megatron.common_state import COMMON_OBJECT, CommonState
from ckpt_tools.megatron.extra_state import extra_state_keys
from ckpt_tools.megatron.fsdp_source import WEIGHT, FsdpSource
from ckpt_tools.megatron.group_rebuild import rebuild_optimizer
from ckpt_tools.megatron.names import BUFFERS, DIALECTS, Dialect
from ckpt_tools.megatron.optimizer_layouts.expected import expected_states, refuse_missing_states
from ckpt_tools.megatron.record import Size, TargetRecord
from ckpt_tools.megatron.rng_grid import Grid, rng_grid, rng_objects
from ckpt_tools.megatron.settings import read_settings
from ckpt_tools.megatron.stacking import Stack, stack_parameters
from ckpt_tools.megatron.stored import StoredParameter, stored_parameters
from ckpt_tools.megatron.target import Target, TargetObject, TargetTensor
from ckpt_tools.megatron.torch_dist import layer_counts
from ckpt_tools.megatron.vocab import Vocabulary, vocabulary

CONTENT_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
OPTIMIZER_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}
_CARRIED = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")


@dataclass(frozen=True, slots=True)
class TorchDistOptions:
    """What a user may decide about the target; None leaves the decision to the checkpoint."""

    layer_spec: str | None = None  # "te" or "local"
    stacked: bool | None = None  # layers of a block in one tensor
    dtype: str | None = None  # of the weights
    tp: int | None = None  # the tensor-parallel size that the source's packed projections are for
    ep: int | None = (
        None  # sizes of the job that will load the result: expert-parallel, expert tensor-parallel
    )
    etp: int | None = None
    gpus: int | None = None  # of that job
    dialect: str | None = None  # a key of names.DIALECTS: the program that will load the result
    weights_only: bool = False
    extra_state: bool = True
    extra_state_template: tuple[str, ...] = ()  # keys of a checkpoint of the same model; () to derive them


@dataclass(frozen=True, slots=True)
class TorchDistTarget:
    """A target, and the common state that also goes into `common.pt`."""

    target: Target
    common: Mapping[str, Any]
    parameters: tuple[StoredParameter, ...]
    groups: tuple[int, ...] = ()  # parameters per optimizer group, in id order
    record: TargetRecord = field(default_factory=TargetRecord)
    vocabulary: Vocabulary | None = None


def build_torch_dist_target(source: FsdpSource, options: TorchDistOptions) -> TorchDistTarget:
    """Everything the `torch_dist` conversion of `source` must contain.

    Raises:
        UsageError: something that has to come from the user is missing.
        MappingError: options or names that contradict the checkpoint, or facts that cannot be proven from it.
    """
    local = (
        read_settings(source.common).local_norms
        if options.layer_spec is None
        else options.layer_spec == "local"
    )
    dialect = choose_dialect(source, options.dialect)
    parameters = stored_parameters(source.tensors, source.known_tp(options.tp), local)
    _check_counts(parameters, source.common)
    stacks, notes = stack_parameters(parameters, source.common, options.stacked)
    common, counts = _common_state(source, parameters, options)
    grid = None
    if source.rng and not options.weights_only:
        grid = rng_grid(source.rng, source.common, dialect, options.ep, options.gpus)
    rng, rng_notes = ([], []) if options.weights_only else rng_objects(source.rng, grid)
    extra = [TargetObject(key, [None]) for key in _extra_keys(stacks, local, options)]
    target = Target(
        tensors=(*_weights(stacks, source, options), *(_states(stacks) if "optimizer" in common else ())),
        objects=(*rng, *extra, TargetObject(COMMON_OBJECT, [common])),
        dropped=source.dropped,
        renamed=_renamed(parameters),
        notes=(*source.notes, *notes, *rng_notes, *_losses(source, options)),
    )
    record = _record(source, parameters, options, dialect, grid)
    args = source.common.args or source.common.model_config
    rows = vocabulary(((p.name, p.shape) for p in parameters), args, record.tokens)
    return TorchDistTarget(target, common, tuple(parameters), counts, record, rows)


def choose_dialect(source: FsdpSource, asked: str | None) -> Dialect:
    """The program asked for, else the one that the source was made for.

    Raises:
        UsageError: nobody knows that program.
    """
    known = None if source.record is None else source.record.target
    name = asked or known or ("bridge" if read_settings(source.common).bridge else "main")
    if name not in DIALECTS:
        raise UsageError(f"unknown target {name!r}; known targets are {', '.join(DIALECTS)}")
    return DIALECTS[name]


def _record(
    source: FsdpSource,
    parameters: Sequence[StoredParameter],
    options: TorchDistOptions,
    dialect: Dialect,
    grid: Grid | None,
) -> TargetRecord:
    """The sizes that something written depends on: rng states on TP and DP, the groups of experts on EP and ETP."""
    arg = source.common.arg
    has_experts = any(p.expert is not None for p in parameters)

    def size(asked: int | None, option: str, name: str) -> Size | None:
        told = asked or arg(name)
        return Size(told, option if asked else "args") if told and has_experts else None

    return TargetRecord(
        dialect.name,
        tp=None
        if grid is None
        else Size(grid.tp, "args" if arg("tensor_model_parallel_size") else "rng states"),
        ep=size(options.ep, "--ep", "expert_model_parallel_size"),
        etp=size(options.etp, "--etp", "expert_tensor_parallel_size"),
        dp=None if grid is None else grid.dp,
        tokens=None if source.record is None else source.record.tokens,
    )


def _common_state(
    source: FsdpSource, parameters: Sequence[StoredParameter], options: TorchDistOptions
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The common state, and the number of live tensors in each optimizer group."""
    values = source.common.values
    common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0}
    common |= {name: values[name] for name in _CARRIED if name in values}
    common["content_metadata"] = dict(CONTENT_METADATA)
    if options.weights_only:
        return common, ()
    if source.scheduler:
        common["opt_param_scheduler"] = dict(source.scheduler)
    if not source.has_optimizer:
        return common, ()
    held = {kind for tensor in source.tensors for kind in tensor.states}
    refuse_missing_states(held, expected_states(source.common, list(source.groups.values())))
    apart = _experts_apart(parameters, source.common, options)
    common["optimizer"], counts = rebuild_optimizer(source, parameters, apart)
    common["content_metadata"] |= OPTIMIZER_METADATA
    return common, counts


def _check_counts(parameters: Sequence[StoredParameter], common: CommonState) -> None:
    """Layers and experts against the args.

    Raises:
        MappingError: the weights have other numbers.
    """
    problems = []
    layers, wanted = layer_counts(p.name for p in parameters).get("decoder.layers."), common.arg("num_layers")
    if None not in (layers, wanted) and layers != wanted:
        problems.append(f"the args say num_layers = {wanted}, the weights have {layers} layers")
    wanted = common.arg("num_experts") or common.arg("num_moe_experts")
    experts = Counter(p.name for p in parameters if p.expert is not None)
    if wanted is not None:
        problems += [
            f"{k}: the args say {wanted} experts, there are {n}" for k, n in experts.items() if n != wanted
        ]
    if problems:
        raise MappingError("the weights contradict the args:\n" + list_problems(problems))


def _experts_apart(
    parameters: Sequence[StoredParameter], common: CommonState, options: TorchDistOptions
) -> bool:
    """Whether the loading job has an optimizer of its own for routed experts (optimizer/__init__.py)."""
    tp = common.arg("tensor_model_parallel_size") or 1
    ep = options.ep or common.arg("expert_model_parallel_size") or 1
    etp = options.etp or common.arg("expert_tensor_parallel_size") or tp
    return any(p.expert is not None for p in parameters) and (ep > 1 or etp != tp)


def _weights(
    stacks: Sequence[Stack], source: FsdpSource, options: TorchDistOptions
) -> Iterable[TargetTensor]:
    """The stored weights and buffers."""
    for stack in stacks:
        yield TargetTensor(
            stack.key,
            _weight_dtype(stack, source, options),
            stack.shape,
            stack.sources(WEIGHT),
            role="weight",
        )


def _states(stacks: Sequence[Stack]) -> Iterable[TargetTensor]:
    """Masters and moments of everything that is trained."""
    for stack in stacks:
        kinds = {p.tensor.states for p in stack.parameters}
        if len(kinds) > 1:
            raise MappingError(
                f"{stack.key}: its layers or experts have different optimizer states {sorted(kinds)}"
            )
        if not any(kinds):
            continue
        yield TargetTensor(
            f"optimizer.state.param.{stack.key}", "float32", stack.shape, stack.sources(WEIGHT), role="master"
        )
        for kind in stack.parameters[0].tensor.states:
            dtype = stack.parameters[0].tensor.dtypes[kind]
            yield TargetTensor(
                f"optimizer.state.{kind}.{stack.key}", dtype, stack.shape, stack.sources(kind), role=kind
            )


def _weight_dtype(stack: Stack, source: FsdpSource, options: TorchDistOptions) -> str:
    """Element type of a stored weight: the training type for masters; buffers and other weights keep theirs.

    Buffers and frozen weights are known by having no optimizer state, so a checkpoint without any tells them by
    name only.
    """
    (stored, *others) = {p.tensor.dtypes[WEIGHT] for p in stack.parameters}
    if others:
        raise MappingError(
            f"{stack.key}: its layers or experts have different types {sorted([stored, *others])}"
        )
    tensor = stack.parameters[0].tensor
    is_frozen = source.has_optimizer and not tensor.states
    if stored not in CASTABLE or is_frozen or stack.key.endswith(BUFFERS):
        return stored
    if options.dtype is not None or not source.is_master(tensor):
        return options.dtype or stored
    return training_dtype(source.common) or _need_dtype(stack.key, stored)


def _need_dtype(key: str, stored: str) -> str:
    if stored == "float32":
        raise UsageError(
            f"{key} is stored as an fp32 master, and neither args nor run_config.yaml name the type the model is "
            "trained in; pass --dtype"
        )
    return stored


def training_dtype(common: CommonState) -> str | None:
    """Element type of the running model's parameters, None when nothing names it."""
    value = common.arg("params_dtype")
    if isinstance(value, TorchDtype):
        return value.name
    if isinstance(value, Mapping):
        value = value.get("_target_")
    if isinstance(value, str):
        return value.removeprefix("torch.")
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if common.arg(flag):
            return dtype
    return "float32" if common.arg("bf16") is False else None


def _extra_keys(stacks: Sequence[Stack], local: bool | None, options: TorchDistOptions) -> Sequence[str]:
    if not options.extra_state:
        return ()
    return options.extra_state_template or extra_state_keys(stacks, transformer_engine=not local)


def _renamed(parameters: Iterable[StoredParameter]) -> tuple[str, ...]:
    """One line per live name that changed by more than a layer or expert axis."""
    return tuple(
        f"{p.tensor.name} -> {p.name}" for p in parameters if p.name != p.tensor.name and p.expert is None
    )


def _losses(source: FsdpSource, options: TorchDistOptions) -> list[str]:
    """What an `fsdp_dtensor` checkpoint, or this one, does not hold and the target would have."""
    notes = ["rerun state machine: not part of fsdp_dtensor, the loading job starts a new one"]
    if options.extra_state:
        notes.append("Transformer Engine extra states are written empty: FP8 scaling starts anew")
    else:
        notes.append("no Transformer Engine extra states: load with --dist-ckpt-strictness log_all")
    if source.has_optimizer and not options.weights_only:
        for tensor in source.tensors:
            if not tensor.states:
                notes.append(f"{tensor.name}: no optimizer state in the source (buffer or frozen weight)")
            elif tensor.dtypes[WEIGHT] != "float32":
                notes.append(f"{tensor.name}: its master is {tensor.dtypes[WEIGHT]}, not fp32; widened")
    return notes
