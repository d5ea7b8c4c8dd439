"""WRITE plain DCP: a Megatron model as the state dict of the running module, for whatever PyTorch program loads it::

    model.<name>                               the fp32 master, or the weight where none is stored
    optimizer.state.<name>.<state>             exp_avg, exp_avg_sq, and `step` as a number of no dimensions
    optimizer.param_groups.<name>.<field>      every field of the parameter's group
    opt_param_scheduler.<field>, rng_state.(pp, tp).<i>.<name>, args, iteration, ...

That is ``{"model": model.state_dict(), "optimizer": get_optimizer_state_dict(...)}``, the latter flattened.
Names are those of the running module: gate and up of an fc1 are one tensor, fused projections are fused. Fields of
torch's Adam that the groups lack get its defaults, since it asks for every field it has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.fsdp_dtensor.parameters import LiveParameter
from ckpt_tools.megatron.fsdp_dtensor.tensors import (
    Prefixes,
    backfill_groups,
    roles_of,
    state_tensors,
)
from ckpt_tools.megatron.fsdp_dtensor.write import (
    FsdpTarget,
    Part,
    build_live_target,
    check_options,
    choose_dialect,
    choose_memberships,
    optimizer_name,
    told_kinds,
    trained_parameters,
)
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.target import InlineTensor, TargetObject

INITIAL_LR = "initial_lr"  # what torch's schedulers multiply
DECOUPLED = "decoupled_weight_decay"
# Fields of torch.optim.Adam and AdamW besides lr, betas, eps and weight_decay, with their defaults.
ADAM_FIELDS: Mapping[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    DECOUPLED: True,
}


MODEL, OPTIMIZER = "model", "optimizer"
_PREFIXES = Prefixes(MODEL, f"{OPTIMIZER}.state")
_NOT_NAMED = "only Adam's states and groups have names that torch's optimizers ask for here"
_ADAM = frozenset({"exp_avg", "exp_avg_sq"})
_APART = frozenset({"params", "step"})  # parameters have the fields, and steps are among the states


def build_dcp_target(model: Model, options: TargetOptions) -> FsdpTarget:
    """Everything the plain state dict of `model` must contain; gated projections stay whole."""
    check_options(options)
    dialect = choose_dialect(model, options)
    running = replace(
        dialect, mtp_in_state=dialect.mtp_in_groups, mla_fused_in_state=True, gdn_fused_in_state=True
    )
    built = build_live_target(
        model, options, running, MODEL, partial(_optimizer, model, options), halves=False
    )
    dropped = tuple(line.replace("fsdp_dtensor", "a plain state dict") for line in built.target.dropped)
    return replace(built, target=replace(built.target, dropped=dropped))


def _optimizer(model: Model, options: TargetOptions, parameters: Sequence[LiveParameter]) -> Part:
    """States, steps and group fields of every trained parameter; nothing for a conversion of weights."""
    trained = trained_parameters(model, options, parameters)
    if trained is None:
        return Part()
    if model.own_optimizer is not None:
        return Part(
            dropped=(f"optimizer states {told_kinds(trained)}: {_NOT_NAMED}",),
            notes=(f"no optimizer is written: {_NOT_NAMED}, and the source's is {optimizer_name(model)}",),
        )
    groups, filled = backfill_groups(model.groups, model.scheduler, model.step)
    more = _adam_fields(model, trained)
    memberships, map_notes = choose_memberships(model, options, trained)
    lacking = [name for name in more if any(name not in group for group in groups)]
    groups = [_with_initial_lr(dict(more) | group) for group in groups]
    group_of = {p.name: groups[memberships[p.group_name].group] for p in trained}
    states = (tensor for p in trained for tensor in state_tensors(p, _PREFIXES))
    return Part(
        # every state and field has one dotted name in the optimizer's dict
        tensors=tuple(replace(t, path=(OPTIMIZER, t.key.removeprefix(f"{OPTIMIZER}."))) for t in states),
        inline=tuple(_step(p.name, group_of[p.name]["step"]) for p in trained),
        objects=tuple(field for p in trained for field in _fields(p.group_name, group_of[p.name])),
        backfilled=(
            *filled,
            *(f"group field {name} = {more[name]!r}: torch's default" for name in lacking),
            f"group field {INITIAL_LR}: the highest rate, which torch's schedulers multiply",
        ),
        notes=tuple(map_notes),
        memberships=memberships,
    )


def _adam_fields(model: Model, trained: Sequence[LiveParameter]) -> Mapping[str, Any]:
    """What torch's Adam asks of every group; nothing of another optimizer."""
    if any(set(roles_of(p)) - {MASTER} != _ADAM for p in trained):
        return {}
    return {**ADAM_FIELDS, DECOUPLED: bool(model.common.arg(DECOUPLED, ADAM_FIELDS[DECOUPLED]))}


def _with_initial_lr(group: Mapping[str, Any]) -> dict[str, Any]:
    first = group.get("max_lr")
    return {INITIAL_LR: group.get("lr") if first is None else first, **group}


def _step(parameter: str, step: Any) -> InlineTensor:
    inner = f"state.{parameter}.step"
    return InlineTensor(
        f"{OPTIMIZER}.{inner}", "float32", (), struct.pack("<f", float(step)), (OPTIMIZER, inner)
    )


def _fields(parameter: str, group: Mapping[str, Any]) -> Iterator[TargetObject]:
    for name, value in group.items():
        if name not in _APART:
            inner = f"param_groups.{parameter}.{name}"
            yield TargetObject(f"{OPTIMIZER}.{inner}", value, (OPTIMIZER, inner))
