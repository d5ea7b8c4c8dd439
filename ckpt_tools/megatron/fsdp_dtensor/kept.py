"""What Megatron-FSDP has no place for, kept beside what it asks for: under `kept.`, which no loader knows.

A loader asks for its own keys and passes over all others (`DefaultLoadPlanner`), so these change no load. The way
back to `torch_dist` finds them and puts them where they were::

    kept.optimizer.state.module.module.module.<name>.<kind>   states of another optimizer than Adam (`--keep-states`)
    kept.optimizer                                            its entry in the common state: groups and steps
    kept.<module>._extra_state/shard_<place>_<grid>           Transformer Engine's scales and amax histories

A job that goes on from the checkpoint does not save them again: what is there is of the iteration that was converted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.megatron.fsdp_dtensor.live import LiveParameter
from ckpt_tools.megatron.fsdp_dtensor.tensors import Prefixes, roles_of, state_tensors
from ckpt_tools.megatron.keys import KEPT, KEPT_OPTIMIZER
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.target import TargetObject, TargetTensor

NOT_LOADED = "Megatron-FSDP resumes from Adam's exp_avg and exp_avg_sq only"


@dataclass(frozen=True, slots=True)
class Kept:
    """Items beside those that a loader asks for, and a line for each kind of what is kept or left out."""

    tensors: tuple[TargetTensor, ...] = ()
    objects: tuple[TargetObject, ...] = ()
    archives: Mapping[str, Item] = field(default_factory=dict)  # by key, of objects carried byte for byte
    kept: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def other_states(model: Model, trainable: Sequence[LiveParameter], prefixes: Prefixes, keep: bool) -> Kept:
    """The states of an optimizer that Megatron-FSDP does not have: kept beside, or left out, by name."""
    kinds = told_kinds(trainable)
    notes = (
        f"no optimizer is written: {NOT_LOADED}, and the source's is {optimizer_name(model)}. The weights are "
        f"{'its masters' if MASTER in model.roles else 'as stored'}; the job starts its optimizer anew",
    )
    if not keep:
        why = f"{NOT_LOADED}; --keep-states keeps them beside, for the way back to torch_dist"
        return Kept(dropped=(f"optimizer states {kinds}: {why}",) if kinds else (), notes=notes)
    tensors = (
        replace(tensor, key=KEPT + tensor.key, path=())
        for parameter in trainable
        for tensor in state_tensors(parameter, prefixes)
    )
    states = (f"optimizer states {kinds}: as {KEPT}{prefixes.state}.*; {NOT_LOADED}",) if kinds else ()
    return Kept(
        tuple(tensors),
        (TargetObject(KEPT_OPTIMIZER, model.own_optimizer),),
        kept=(*states, f"the optimizer's groups and steps: as {KEPT_OPTIMIZER}"),
        notes=notes,
    )


def optimizer_name(model: Model) -> str:
    """What the args call the optimizer, else the states that it keeps."""
    kinds = [role for role in model.roles if role != MASTER]
    named = model.common.arg("optimizer")
    return named if isinstance(named, str) else f"one with {', '.join(kinds) or 'no states'}"


def told_kinds(trainable: Iterable[LiveParameter]) -> str:
    """Every kind of state but the master, of how many parameters it is, and of how many elements."""
    held: dict[str, list[LiveParameter]] = {}
    for parameter in trainable:
        for kind in roles_of(parameter):
            if kind != MASTER:
                held.setdefault(kind, []).append(parameter)
    return ", ".join(
        f"{kind} ({len(found):,} parameters, {sum(math.prod(p.shape) for p in found):,} elements)"
        for kind, found in held.items()
    )


def extra_states(model: Model, keep: bool) -> Kept:
    """Transformer Engine's states that hold something, as the source stores them; and what else reading left out."""
    archives = {KEPT + key: item for key, item in model.extra_states.items()} if keep else {}
    dropped = (line for line in model.dropped if KEPT + line.partition(": ")[0] not in archives)
    kept = (
        f"{len(archives)} Transformer Engine extra states (FP8 scales and amax histories): as "
        f"{KEPT}*._extra_state/*, byte for byte; Megatron-FSDP starts its own"
    )
    return Kept(
        objects=tuple(TargetObject(key, None) for key in archives),
        archives=archives,
        kept=(kept,) if archives else (),
        dropped=tuple(dropped),
    )
