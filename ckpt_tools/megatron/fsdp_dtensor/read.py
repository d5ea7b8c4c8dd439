"""The second half of reading `fsdp_dtensor`: live tensors, groups by name and scalars, as a `Model`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.fsdp_dtensor.entries import FsdpSource, FsdpTensor
from ckpt_tools.megatron.fsdp_dtensor.stored import StoredParameter, stored_parameters
from ckpt_tools.megatron.fsdp_dtensor.tensors import TORCH_ADAM_FIELDS
from ckpt_tools.megatron.keys import BUFFERS, split_expert, split_projection
from ckpt_tools.megatron.names import MLA_DOWN, MLA_FUSED_DOWN, stored_name
from ckpt_tools.megatron.run_state.settings import read_settings, training_dtype
from ckpt_tools.megatron.run_state.stored_values import optimizer_groups
from ckpt_tools.megatron.torch_dist.optimizer_layouts.expected import expected_states, refuse_missing_states
from ckpt_tools.model.catalog import Value
from ckpt_tools.model.choices import LayerSpec
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.model import Model, Parameter
from ckpt_tools.model.roles import MASTER, WEIGHT

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
        refuse_missing_states(held, expected_states(source.common, list(source.groups.values())))
        own = source.own_optimizer
        groups, group_of = _groups(source) if own is None else (optimizer_groups(own), {})
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
        own_optimizer=source.own_optimizer if with_optimizer else None,
        extra_states={} if weights_only else source.extra_states,
    )


def _parameter(
    stored: StoredParameter, source: FsdpSource, group_of: Mapping[str, int], with_optimizer: bool
) -> Parameter:
    """What is stored in the place of a trained weight is its fp32 master, unless that stands beside it."""
    tensor = stored.tensor
    kept = tensor.dtypes[WEIGHT]
    values = {}
    for kind in tensor.sources if with_optimizer else (k for k in (WEIGHT, MASTER) if k in tensor.sources):
        role = kind
        if kind == WEIGHT:
            role = MASTER if with_optimizer and source.is_master(tensor) else WEIGHT
        values[role] = Value(tensor.dtypes[kind], stored.shape, stored.sources(kind))
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
    if problems:
        raise MappingError(
            "optimizer groups and parameters do not fit together:\n" + list_problems(problems), problems
        )
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
