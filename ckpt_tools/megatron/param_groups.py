"""Optimizer parameter groups: the ones a checkpoint has, and which parameter belongs to which.

A group's id is its index in the concatenation of the groups of optimizer 0, optimizer 1, ...: the order in which
Megatron's own `--dump-param-to-param-group-map` counts. A parameter's group is found by attributes, not by
position: weight decay by shape and name, learning-rate overrides by name, expert parallelism by the args
(Megatron-LM optimizer/__init__.py `_get_param_groups`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ckpt_tools.errors import MappingError, raise_if
from ckpt_tools.megatron.fsdp_dtensor.parameters import LiveParameter
from ckpt_tools.megatron.keys import split_half, strip_wrappers
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.model import Parameter

Group = Mapping[str, Any]
DECOUPLED_LR_NAMES = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, slots=True)
class GroupRules:
    """The training settings that decide a parameter's group."""

    experts_apart: bool = False  # routed experts have an optimizer of their own
    decoupled_lr: bool = False
    decay_qk_layernorm: bool = False
    use_mup: bool = False


@dataclass(frozen=True, slots=True)
class Membership:
    """The group of one parameter and the rule that put it there."""

    group: int
    rule: str


def rules_of(common: CommonState, groups: Sequence[Group]) -> GroupRules:
    """Group rules of the run that wrote the checkpoint; settings that are absent have Megatron's defaults."""
    args = common.args or common.optimizer_config
    return GroupRules(
        experts_apart=any(group.get("is_expert_parallel") for group in groups),
        decoupled_lr=args.get("decoupled_lr") is not None,
        decay_qk_layernorm=bool(args.get("apply_wd_to_qk_layernorm")),
        use_mup=bool(args.get("use_mup")),
    )


def derive_memberships(
    parameters: Iterable[LiveParameter], groups: Sequence[Group], rules: GroupRules
) -> dict[str, Membership]:
    """Group of every parameter, by its group name: the stored one, where the source says which that is."""
    parameters = list(parameters)
    known = {p.group_name: {stored.group for stored in p.stored} for p in parameters}
    if known and all(len(held) == 1 and None not in held for held in known.values()):
        return {name: Membership(group, "as stored") for name, (group,) in known.items() if group is not None}
    if not groups:
        raise MappingError(
            "the checkpoint stores no optimizer parameter groups, so which parameter is in which is unknown; "
            "give a map with --param-to-param-group-map-json, or convert with --weights-only"
        )
    if rules.use_mup:
        raise MappingError(
            "the run used muP (args.use_mup), and its groups depend on settings outside the checkpoint; dump the "
            "map from the training job and give it with --param-to-param-group-map-json"
        )
    memberships: dict[str, Membership] = {}
    problems = []
    fit: dict[tuple[tuple[str, object], ...], list[int]] = {}  # of the few attributes that are wanted
    member = cache(Membership)  # equal for tens of thousands
    for parameter in parameters:
        expert = any(p.expert is not None for p in parameter.stored)
        wanted, rule = _wanted(parameter.group_name, parameter.shape, expert, rules)
        asked = tuple(wanted.items())
        fitting = fit.get(asked)
        if fitting is None:
            fitting = fit[asked] = [i for i, group in enumerate(groups) if _fits(group, wanted)]
        if not fitting or any(dict(groups[i]) != dict(groups[fitting[0]]) for i in fitting):
            fits = "no group" if not fitting else f"groups {fitting}"
            problems.append(f"{parameter.group_name} (wants {wanted}; {rule}) fits {fits}")
        else:
            memberships[parameter.group_name] = member(fitting[0], rule)
    raise_if(
        problems,
        MappingError,
        "the parameter groups cannot be derived from the checkpoint; dump the map from the training job and "
        "give it with --param-to-param-group-map-json",
    )
    return memberships


def refuse_lost_memberships(
    parameters: Iterable[Parameter], groups: Sequence[Group], rules: GroupRules
) -> None:
    """Raise MappingError if stored groups have other attributes than a job's own derivation gives their parameters.

    For a target that does not say which parameter is in which group; loaders give routed experts their own anyway.
    """
    problems = []
    for parameter in parameters:
        if parameter.group is not None and not rules.use_mup:
            group = groups[parameter.group]
            wanted, rule = _wanted(
                parameter.origin, parameter.shape, False, replace(rules, experts_apart=False)
            )
            problems += [
                f"{parameter.origin}: {key} is {_attribute(group, key)}, a job makes it {value} ({rule})"
                for key, value in wanted.items()
                if _attribute(group, key) != value
            ]
    raise_if(
        dict.fromkeys(problems),
        MappingError,
        "torch_dist does not say which parameter is in which group, and a job would put these into others",
        "A job whose args have what the groups rest on (apply_wd_to_qk_layernorm, decoupled_lr) writes those too; "
        "`--to dcp` keeps the groups, --weights-only leaves the optimizer out",
    )


def _wanted(
    name: str, shape: tuple[int, ...], expert: bool, rules: GroupRules
) -> tuple[dict[str, object], str]:
    """Attributes the parameter's group must have, and why."""
    wanted: dict[str, object] = {}
    if rules.decay_qk_layernorm and (".q_layernorm." in name or ".k_layernorm." in name):
        wanted["wd_mult"], rule = 1.0, "q/k layer norm, apply_wd_to_qk_layernorm"
    elif len(shape) == 1:
        wanted["wd_mult"], rule = 0.0, "one dimension: no weight decay"
    elif name.endswith(".bias"):
        wanted["wd_mult"], rule = 0.0, "bias: no weight decay"
    else:
        wanted["wd_mult"], rule = 1.0, f"{len(shape)} dimensions: weight decay"
    if rules.experts_apart:
        wanted["is_expert_parallel"] = expert
        rule += ", routed expert" if expert else ", not a routed expert"
    if rules.decoupled_lr:
        wanted["decoupled"] = name.endswith(DECOUPLED_LR_NAMES)
        rule += ", own learning rate" if wanted["decoupled"] else ""
    return wanted, rule


def _fits(group: Group, wanted: Mapping[str, object]) -> bool:
    return all(_attribute(group, key) == value for key, value in wanted.items())


def _attribute(group: Group, key: str) -> object:
    if key == "wd_mult":  # NeMo writes pre_wd_mult
        return group.get("wd_mult", group.get("pre_wd_mult", 1.0))
    if key == "decoupled":  # since core 0.16 the flag stays False and only default_config tells
        return bool(group.get("is_decoupled_lr")) or group.get("default_config") is False
    return bool(group.get(key))


def merge_map(
    derived: Mapping[str, Membership] | None,
    given: Mapping[str, int],
    names: Sequence[str],
    groups: Sequence[Group],
    strict: bool,
) -> tuple[dict[str, Membership], list[str]]:
    """Memberships with the entries of a user's map put over the derived ones, and notes for the report.

    Names of a map may carry any number of leading `module.` or `model.` segments. Names absent from the map keep
    their derived group, or are an error when `strict`.
    """
    # NVIDIA's converter asks for the `_w` and `_v` of a parameter too
    pairs = [(split_half(strip_wrappers(name))[0], group) for name, group in given.items()]
    wanted, known = dict(pairs), set(names)
    problems = [f"{name}: no such parameter" for name in wanted if name not in known]
    problems += [
        f"{name}: group {group!r}, but the checkpoint has groups 0 to {len(groups) - 1}"
        for name, group in pairs
        if not isinstance(group, int) or isinstance(group, bool) or not 0 <= group < len(groups)
    ]
    absent = [name for name in names if name not in wanted]
    if strict:
        problems += [f"{name}: not in the map (--strict-map)" for name in absent]
    elif derived is None:
        problems += [f"{name}: not in the map, and its group cannot be derived" for name in absent]
    raise_if(problems, MappingError, "the parameter group map does not fit the checkpoint")
    # groups with the same fields are one group, whichever of them a map names
    contradictions = [
        f"{name}: group {group} in the map, but group {derived[name].group} by the checkpoint ({derived[name].rule})"
        for name, group in wanted.items()
        if derived and name in derived and dict(groups[group]) != dict(groups[derived[name].group])
    ]
    raise_if(
        contradictions,
        MappingError,
        "the parameter group map contradicts the groups' own attributes: it is of another run, or its ids are "
        "mixed up. Leave it out, or dump it again from the job that wrote the checkpoint",
    )
    merged = {name: Membership(group, "the given map") for name, group in wanted.items()}
    merged |= {name: derived[name] for name in absent if derived is not None}
    notes = [f"{name}: not in the given map, group {merged[name].group} derived" for name in absent]
    return {name: merged[name] for name in names}, notes
