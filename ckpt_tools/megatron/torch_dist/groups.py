"""The optimizer part of a `torch_dist` common state: the model's groups, as the job that loads counts them.

A `torch_dist` source does not say which parameter is in which group, and need not: its groups are taken as they are.

Megatron-FSDP does not know expert groups, so whether routed experts have an optimizer of their own follows the
topology that will load the result. Groups are ordered as core 0.16 and later order them: by what a group overrides,
the default group first (optimizer/__init__.py `_get_param_groups`); loaders match groups by their attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.model.model import Model

# What loaders tell groups apart by (optimizer.py `param_group_identifier_keys`); the expert flag is set here.
IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr")
Group = dict[str, Any]


def rebuild_optimizer(model: Model, experts_apart: bool) -> tuple[dict[Any, Any], tuple[int, ...]]:
    """The `optimizer` entry of the common state, and the number of tensors of the running model in each group."""
    if all(p.group is None for p in model.parameters):
        return _stored_optimizer(model, experts_apart), ()
    found = _members(model, experts_apart)
    order = sorted(found, key=lambda item: _rank(item[0], model.scheduler))
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
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in IDENTIFIERS)


def _refuse_lookalikes(groups: Iterable[Group]) -> None:
    seen: dict[tuple[object, ...], Group] = {}
    problems = []
    for group in groups:
        identity = _identity(group)
        other = seen.setdefault(identity, group)
        if other is not group:
            differing = [k for k in {*group, *other} if group.get(k) != other.get(k)]
            values = ", ".join(f"{k}: {other.get(k)!r} and {group.get(k)!r}" for k in sorted(differing))
            problems.append(f"{dict(zip(IDENTIFIERS, identity, strict=True))}: {values}")
    if problems:
        raise MappingError(
            "parameters whose groups loaders cannot tell apart have different settings or steps:\n"
            + list_problems(problems),
            problems,
        )
