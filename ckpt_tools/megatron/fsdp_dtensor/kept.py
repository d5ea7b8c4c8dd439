"""States of another optimizer than Adam, which Megatron-FSDP does not have: left out, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ckpt_tools.megatron.fsdp_dtensor.live import LiveParameter
from ckpt_tools.megatron.fsdp_dtensor.tensors import roles_of
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER

NOT_LOADED = "Megatron-FSDP resumes from Adam's exp_avg and exp_avg_sq only"


def other_states(model: Model, trainable: Sequence[LiveParameter]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a report says of them: left out, and notes."""
    kinds = told_kinds(trainable)
    notes = (
        f"no optimizer is written: {NOT_LOADED}, and the source's is {optimizer_name(model)}. The weights are "
        f"{'its masters' if MASTER in model.roles else 'as stored'}; the job starts a new optimizer",
    )
    return (f"optimizer states {kinds}: {NOT_LOADED}",) if kinds else (), notes


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
