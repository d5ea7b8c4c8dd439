"""The optimizer part of the common state, rebuilt from the group fields that every parameter has of its own.

Parameters with equal fields make a group. Megatron-FSDP does not know expert groups, so whether routed experts
have an optimizer of their own follows the topology that will load the result. Groups are ordered as
core 0.16 and later order them: by what a group overrides, the default group first (optimizer/__init__.py
`_get_param_groups`); loaders match groups by their attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.fsdp_dtensor import TORCH_ADAM_FIELDS
from ckpt_tools.megatron.fsdp_source import FsdpSource, FsdpTensor
from ckpt_tools.megatron.names import MLA_DOWN, MLA_FUSED_DOWN, PART, split_expert, stored_name
from ckpt_tools.megatron.stored import StoredParameter

# What loaders tell groups apart by (optimizer.py `param_group_identifier_keys`); the expert flag is set here.
IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr")
Group = dict[str, Any]


def rebuild_optimizer(
    source: FsdpSource, parameters: Sequence[StoredParameter], experts_apart: bool
) -> tuple[dict[Any, Any], tuple[int, ...]]:
    """The `optimizer` entry of the common state, and the number of live tensors in each group.

    Raises:
        MappingError: a trained parameter without group fields or step, fields without a parameter, or groups
            that loaders could not tell apart.
    """
    found = _members(source, parameters, experts_apart)
    order = sorted(found, key=lambda item: _rank(item[0], source.scheduler))
    _refuse_lookalikes([group for group, _ in order])
    if not experts_apart:
        return _optimizer([group for group, _ in order], source), tuple(count for _, count in order)
    parts = [[item for item in order if item[0]["is_expert_parallel"] is expert] for expert in (False, True)]
    optimizer = {i: _optimizer([group for group, _ in part], source) for i, part in enumerate(parts)}
    return optimizer, tuple(count for part in parts for _, count in part)


def _optimizer(groups: list[Group], source: FsdpSource) -> dict[str, Any]:
    scaler = {"grad_scaler": dict(source.grad_scaler)} if source.grad_scaler else {}
    return {"optimizer": {"param_groups": groups}, **scaler, "param_state_sharding_type": "fully_reshardable"}


def _members(
    source: FsdpSource, parameters: Sequence[StoredParameter], experts_apart: bool
) -> list[tuple[Group, int]]:
    """Distinct groups with the number of live tensors in each."""
    fields = {_spelling(name): dict(group) for name, group in source.groups.items()}
    unused = set(fields)
    found: dict[str, tuple[Group, int]] = {}
    problems = []
    for tensor, expert in {p.tensor.name: (p.tensor, p.expert) for p in parameters}.values():
        name = next((name for name in _group_names(tensor.name) if name in fields), None)
        if name is not None:
            unused.discard(name)
        if not tensor.states and name is None:
            continue  # a buffer or a frozen weight
        group = (
            None
            if name is None
            else fields[name] | {"is_expert_parallel": experts_apart and expert is not None}
        )
        problem = _problem(tensor, group)
        if problem or group is None:
            problems.append(f"{tensor.name}: {problem}")
            continue
        if not TORCH_ADAM_FIELDS.isdisjoint(group):
            group["step"] = tensor.step
        same = repr(sorted(group.items()))
        found[same] = (group, found.get(same, (group, 0))[1] + 1)
    problems += [f"param_to_group_meta of {name}: there is no such parameter" for name in sorted(unused)]
    if problems:
        raise MappingError("optimizer groups and parameters do not fit together:\n" + list_problems(problems))
    return list(found.values())


def _problem(tensor: FsdpTensor, group: Group | None) -> str | None:
    """Why a trained tensor cannot be put into a group, None when it can."""
    if group is None:
        return "has optimizer states but no param_to_group_meta"
    if not tensor.states:
        return "has param_to_group_meta but no optimizer states"
    if TORCH_ADAM_FIELDS.isdisjoint(group):
        return None if group.get("step") is not None else "its group has no step"
    return None if tensor.step is not None else "there is no step beside its states"


def _spelling(name: str) -> str:
    """One spelling for a parameter's names in `model.*` and in `param_to_group_meta.*` of every dialect."""
    stored, expert = split_expert(stored_name(name))
    return stored if expert is None else f"{stored}{expert}"


def _group_names(name: str) -> Iterator[str]:
    """Names under which the group of a tensor may stand: its own, or that of the projection it is a part of."""
    spelled = _spelling(name)
    yield spelled
    if match := PART.match(spelled):
        yield match["base"]
    for part in MLA_DOWN:
        if part in spelled:
            yield spelled.replace(part, MLA_FUSED_DOWN)


def _rank(group: Group, scheduler: Mapping[str, Any]) -> tuple[Any, ...]:
    """Sort key: groups without overrides first, then by the overrides' names and values."""
    defaults: dict[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}
    defaults |= {name: scheduler[name] for name in ("max_lr", "min_lr") if name in scheduler}
    overrides = [(k, float(group[k])) for k in sorted(defaults) if group.get(k) not in (None, defaults[k])]
    return bool(overrides), overrides, group["is_expert_parallel"]


def _refuse_lookalikes(groups: Iterable[Group]) -> None:
    seen: dict[tuple[object, ...], Group] = {}
    problems = []
    for group in groups:
        identity = tuple(group.get(key, group.get(f"pre_{key}")) for key in IDENTIFIERS)
        other = seen.setdefault(identity, group)
        if other is not group:
            differing = [k for k in {*group, *other} if group.get(k) != other.get(k)]
            values = ", ".join(f"{k}: {other.get(k)!r} and {group.get(k)!r}" for k in sorted(differing))
            problems.append(f"{dict(zip(IDENTIFIERS, identity, strict=True))}: {values}")
    if problems:
        raise MappingError(
            "parameters whose groups loaders cannot tell apart have different settings or steps:\n"
            + list_problems(problems)
        )
