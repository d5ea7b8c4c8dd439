"""What a target has beside weights and optimizer states: entries of the common state, rng, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.fsdp_dtensor.flatten import leaves
from ckpt_tools.megatron.fsdp_dtensor.live import LiveParameter
from ckpt_tools.megatron.fsdp_dtensor.tensors import rng_items
from ckpt_tools.megatron.names import DIALECTS, MTP_DISK, MTP_LIVE, Dialect
from ckpt_tools.megatron.param_groups import Membership
from ckpt_tools.megatron.run_state.bridge import ARGS_FROM_MODEL_CONFIG, args_from_model_config
from ckpt_tools.model.model import Model
from ckpt_tools.model.target import InlineTensor, TargetObject, TargetTensor

if TYPE_CHECKING:
    from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions


@dataclass(frozen=True, slots=True)
class Part:
    """Some items of a target, and what their making left out or filled in."""

    tensors: Sequence[TargetTensor] = ()
    inline: tuple[InlineTensor, ...] = ()
    objects: Sequence[TargetObject] = ()
    dropped: tuple[str, ...] = ()
    backfilled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    memberships: Mapping[str, Membership] = field(default_factory=dict)


def common_part(model: Model, options: TargetOptions, dialect: Dialect, tp: int) -> Part:
    """Arguments, progress, scheduler and rng."""
    notes: list[str] = []
    values: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0}
    stored = model.common.values
    values |= {k: stored[k] for k in CARRIED_SCALARS if k in stored}
    if "iteration" not in stored:
        notes.append("iteration: the source does not tell it; written as 0")
    if model.args_object is not None:
        values["args"] = model.args_object
    elif dialect.name != "bridge":  # Megatron-LM refuses a checkpoint without args, Bridge asks for none
        config = model.common.model_config
        values["args"] = args_from_model_config(config, values["iteration"], model.settings.swiglu)
        held = values["args"].attributes
        asked = [name for name in (*ARGS_FROM_MODEL_CONFIG, "iteration") if name in held]
        others = f" and {len(held) - len(asked)} more settings of its run_config.yaml" if config else ""
        notes.append(
            f"args: the source has none; made up with {', '.join(asked)}{others}. Load with --finetune if a check "
            "asks for more"
        )
    dropped = [
        f"common state {name}: not part of fsdp_dtensor"
        for name in stored
        if name not in {*CARRIED_SCALARS, "args", "optimizer", "opt_param_scheduler", "lr_scheduler"}
    ]
    tensors: list[InlineTensor] = []
    objects: list[TargetObject] = []
    if options.weights_only:
        dropped.append("optimizer state, parameter groups, scheduler and rng: --weights-only")
    else:
        values["opt_param_scheduler"] = model.scheduler
        if model.optimizer_layout is not None and not model.scheduler:
            notes.append("opt_param_scheduler: the source has none, and a strict load asks for it")
        if model.grad_scaler:
            values["optimizer"] = {"grad_scaler": model.grad_scaler}
            notes.append(
                "the loss scaler is kept as optimizer.grad_scaler.*; Megatron-FSDP does not ask for it"
            )
        if model.rng_missing:
            raise MappingError(
                "rng states of some ranks are missing, so training would not go on where it stopped. Leave all out "
                "with --ignore-keys 'rng_state/*' and start the job with --no-load-rng:\n"
                + list_problems(model.rng_missing),
                model.rng_missing,
            )
        tensors, objects, rng_notes = rng_items(model.rng, tp)
        notes += rng_notes
    for name, value in values.items():
        more_tensors, more_objects = leaves(value, (name,))
        tensors += more_tensors
        objects += more_objects
    return Part(inline=tuple(tensors), objects=tuple(objects), dropped=tuple(dropped), notes=tuple(notes))


CARRIED_SCALARS = ("checkpoint_version", "iteration", "num_floating_point_operations_so_far")


def dialect_notes(
    parameters: Sequence[LiveParameter], model: Model, dialect: Dialect, options: TargetOptions
) -> list[str]:
    """A note when the model has parts that other targets would name differently."""
    kinds = {
        "MTP": any(
            ".mtp." in f".{p.name}" and (MTP_DISK in p.name or MTP_LIVE in p.name) for p in parameters
        ),
        "fused MLA": model.settings.fused_mla_down,
        "GDN": any(".in_proj." in p.name and p.name.endswith(".query") for p in model.parameters),
        "Mamba": any("mixer.conv1d." in p.name for p in model.parameters),
    }
    parts = [kind for kind, present in kinds.items() if present]
    if not parts:
        return []
    others = ", ".join(name for name in DIALECTS if name != dialect.name)
    chosen = "chosen" if options.dialect else "the default"
    return [f"{' and '.join(parts)} names follow --target {dialect.name} ({chosen}); others: {others}"]


def renamed(parameters: Sequence[LiveParameter]) -> tuple[str, ...]:
    """One line per stored name that changed by more than a layer number."""
    return tuple(
        f"{stored.name} -> {p.name}{' (_w, _v)' if p.gated else ''}"
        for p in parameters
        for stored in p.stored
        if stored.name != p.name or p.gated
    )
