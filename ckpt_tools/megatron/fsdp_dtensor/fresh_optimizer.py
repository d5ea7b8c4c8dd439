"""A fresh optimizer for weights that start a job: zero moments, step 0, a schedule at its beginning.

Megatron-FSDP of core 0.18 and later cannot make its fp32 masters of loaded weights, so that nothing starts from
weights alone; what starts is a checkpoint with everything that a strict load asks for. Groups are those that Megatron
makes (optimizer/__init__.py `get_standard_config_overrides`), the schedule is that of optimizer_param_scheduler.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.formats.pickle.unpickle import StandIn
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.keys import BUFFERS
from ckpt_tools.megatron.param_groups import Group
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.catalog import Made, TensorEntry, Value, made_entry
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.kernels.kernel import Zeros
from ckpt_tools.model.model import Model, Parameter
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.views import Source

LAYOUT = "fresh"  # as a model's optimizer layout
MOMENTS = ("exp_avg", "exp_avg_sq")
# Where a setting is found that no option gives: in the args, else in the scheduler that the run stored.
_IN_SCHEDULER = {"lr": "max_lr", "min_lr": "min_lr", "weight_decay": "start_wd"}
_DEFAULTS = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8}  # Megatron's own
_SETTINGS = (*_IN_SCHEDULER, *_DEFAULTS)
SCHEDULE_SETTINGS = (
    "train_iters", "train_samples", "global_batch_size", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters",
    "lr_warmup_samples", "lr_warmup_fraction", "lr_decay_style", "weight_decay_incr_style", "start_weight_decay",
    "end_weight_decay",
)  # fmt: skip
_NOT_BEGUN = {"consumed_train_samples": 0, "skipped_train_samples": 0, "consumed_valid_samples": 0}


@dataclass(frozen=True, slots=True)
class Settings:
    lr: float
    min_lr: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    defaults: tuple[str, ...] = ()  # those with no source


def with_fresh_optimizer(model: Model, options: TargetOptions) -> tuple[Model, TargetOptions]:
    """The model with a fresh optimizer, and the options of a target that holds it.

    What a checkpoint of the run holds besides weights decides: fields of groups, schedule, rng states.
    """
    check_fresh(options)
    if model.common.args.get("use_mup"):
        raise MappingError(
            "--fresh-optimizer: the run used muP (args.use_mup), and its groups depend on settings outside the "
            "checkpoint. Convert with its own optimizer, or leave --fresh-optimizer out and start core-0.16 or "
            "core-0.17 from the weights (--finetune)"
        )
    settings = choose_settings(model, options)
    scheduler = scheduler_at_zero(model, settings, options)
    zeros: dict[str, TensorEntry] = {}
    parameters = tuple(_fresh(p, model, zeros) for p in model.parameters)
    has_one = model.optimizer_layout is not None or model.unread is not None or bool(model.groups)
    left_out = ("optimizer state of the source: --fresh-optimizer",) if has_one else ()
    fresh = replace(
        model,
        catalog=replace(model.catalog, tensors={**model.catalog.tensors, **zeros}),
        parameters=parameters,
        common=_not_begun(model.common, settings),
        optimizer_layout=LAYOUT,
        groups=fresh_groups(model, settings, scheduler),
        scheduler=scheduler,
        grad_scaler={},
        step=0,
        own_optimizer=None,
        extra_states={},
        dropped=(*model.dropped, *left_out),
        notes=(*model.notes, *_notes(model, parameters, settings, scheduler)),
    )
    return fresh, replace(options, weights_only=False, fresh_optimizer=False)


def given_settings(options: TargetOptions) -> list[str]:
    return [name for name in _SETTINGS if getattr(options, name) is not None]


def check_fresh(options: TargetOptions) -> None:
    """Raise UsageError for options that contradict a fresh optimizer, and for its settings without it."""
    given = given_settings(options)
    if not options.fresh_optimizer:
        if given:
            raise UsageError(f"{_flags(given)}: only valid with --fresh-optimizer")
        return
    if not options.weights_only:
        raise UsageError(
            "--fresh-optimizer goes with --weights-only: else the source's own optimizer is converted"
        )
    if options.dtype is not None:
        raise UsageError(
            f"--dtype {options.dtype}: with an optimizer, fp32 masters are stored in the place of weights"
        )
    if options.group_map is not None:
        raise UsageError(
            "--param-to-param-group-map-json: its numbers are those of the run's groups, and a fresh optimizer has "
            "its own"
        )


def choose_settings(model: Model, options: TargetOptions) -> Settings:
    """What was asked for, else what the run's args, schedule and groups say; for Adam, else Megatron's defaults."""
    asked = {name: getattr(options, name) for name in _SETTINGS}
    stored = {name: model.scheduler.get(key) for name, key in _IN_SCHEDULER.items()}
    sources = (asked, model.common.args, model.common.optimizer_config, stored, _of_groups(model.groups))
    chosen: dict[str, Any] = {
        name: next((source[name] for source in sources if source.get(name) is not None), None)
        for name in _SETTINGS
    }
    missing = [name for name in _IN_SCHEDULER if chosen[name] is None]
    if missing:
        raise UsageError(
            f"give {_flags(missing)} for the new optimizer: the source has none, and what is stored replaces "
            "the settings of the job that loads it. Or --no-fresh-optimizer "
            "for weights alone, from which core-0.16 and core-0.17 start (--finetune), and no later version"
        )
    defaults = tuple(name for name in _DEFAULTS if chosen[name] is None)
    settings = Settings(**chosen | {name: _DEFAULTS[name] for name in defaults}, defaults=defaults)
    _check_settings(settings)
    return settings


def _adam(groups: Sequence[Group]) -> Group | None:
    return next((group for group in groups if {"betas", "eps"} <= group.keys()), None)


def _of_groups(groups: Sequence[Group]) -> dict[str, Any]:
    """Adam's own settings as the run's groups have them."""
    own = _adam(groups)
    if own is None:
        return {}
    first, second = own["betas"]
    return {"adam_beta1": first, "adam_beta2": second, "adam_eps": own["eps"]}


def _check_settings(settings: Settings) -> None:
    numbers = {name: getattr(settings, name) for name in _SETTINGS}
    wrong = [
        f"{_flags([name])} {value!r} is not a number of at least 0"
        for name, value in numbers.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf
    ]
    if not wrong and settings.min_lr > settings.lr:
        wrong = [f"--min-lr {settings.min_lr} is above --lr {settings.lr}"]
    if not wrong:
        wrong = [
            f"{_flags([n])} {numbers[n]} is not below 1"
            for n in ("adam_beta1", "adam_beta2")
            if numbers[n] >= 1
        ]
    if not wrong and settings.adam_eps == 0:  # the first step of an element without a gradient is 0 / 0
        wrong = ["--adam-eps 0 makes a NaN of every element that has no gradient in the first step"]
    if wrong:
        raise UsageError("; ".join(wrong))


def _flags(names: list[str]) -> str:
    flags = ["--" + name.replace("_", "-") for name in names]
    return " and ".join(filter(None, [", ".join(flags[:-1]), flags[-1]]))


def scheduler_at_zero(model: Model, settings: Settings, options: TargetOptions) -> dict[str, Any]:
    """The state of a learning-rate schedule at step 0: the run's own, else one that keeps the rate.

    A job that does not take it from the checkpoint compares it with its own and stops where they differ.
    """
    decay = settings.weight_decay
    kept = model.scheduler if "lr_decay_steps" in model.scheduler else schedule_of(model.common.args) or {}
    state: dict[str, Any] = {
        "max_lr": settings.lr,
        "lr_warmup_steps": 0,
        "num_steps": 0,
        "lr_decay_style": "constant",
        "lr_decay_steps": 1,
        "min_lr": settings.min_lr,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": 1,
    }
    own = {"max_lr", "min_lr", "num_steps"}
    if options.weight_decay is not None:
        own |= {"start_wd", "end_wd", "wd_incr_style"}
    return state | {name: value for name, value in kept.items() if name not in own}


def schedule_of(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schedule that Megatron makes of its args (training.py `get_optimizer_param_scheduler`), None of too few."""
    batch, iterations, samples = (args.get(n) for n in ("global_batch_size", "train_iters", "train_samples"))
    if iterations and batch:
        steps, decay = iterations * batch, (args.get("lr_decay_iters") or iterations) * batch
        warmup = (args.get("lr_warmup_iters") or 0) * batch
    elif samples:
        steps, decay = samples, args.get("lr_decay_samples") or samples
        warmup = args.get("lr_warmup_samples") or 0
    else:
        return None
    if args.get("lr_warmup_fraction") is not None:
        warmup = args["lr_warmup_fraction"] * decay
    state = {
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": args.get("lr_decay_style"),
        "wd_incr_style": args.get("weight_decay_incr_style"),
        "wd_incr_steps": steps,
        "start_wd": args.get("start_weight_decay"),
        "end_wd": args.get("end_weight_decay"),
    }
    return {name: value for name, value in state.items() if value is not None}


def fresh_groups(
    model: Model, settings: Settings, scheduler: Mapping[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    """With and without weight decay; and again for embeddings and output layer where those have their own rate.

    Fields that this does not set are those of the run's own groups, or else of Transformer Engine's fused Adam.
    """
    args = model.common.args
    own = _adam(model.groups) or {"bias_correction": True}
    rates: list[dict[str, Any]] = [
        {"max_lr": settings.lr, "min_lr": settings.min_lr, "default_config": True},
    ]
    if (rate := args.get("decoupled_lr")) is not None:
        least = args.get("decoupled_min_lr")
        rates.append(
            {"max_lr": rate, "min_lr": settings.min_lr if least is None else least, "default_config": False}
        )
    warms_up = scheduler["lr_warmup_steps"] > 0
    return tuple(
        {
            **own,
            "betas": (settings.adam_beta1, settings.adam_beta2),
            "eps": settings.adam_eps,
            "step": 0,
            "wd_mult": multiple,
            "weight_decay": scheduler["start_wd"] * multiple,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            **at,
            "lr": (args.get("lr_warmup_init") or 0.0) if warms_up else at["max_lr"],
        }
        for at in rates
        for multiple in (1.0, 0.0)
    )


def _fresh(parameter: Parameter, model: Model, zeros: dict[str, TensorEntry]) -> Parameter:
    """The parameter with states if an optimizer works on it; `zeros` gets a tensor of every shape."""
    weight = parameter.weight
    is_buffer = parameter.name.endswith(BUFFERS) or weight.dtype not in CASTABLE
    if is_buffer or (model.roles and not parameter.states):  # what a run's own optimizer left alone stays so
        return replace(parameter, values={WEIGHT: weight})
    values = {role: parameter.values[role] for role in (WEIGHT, MASTER) if role in parameter.values}
    if MASTER not in values and (parameter.dtype or weight.dtype) != "float32":
        values = {MASTER: replace(weight, dtype="float32")}
    key = f"zeros of shape {parameter.shape}"
    if key not in zeros:
        zeros[key] = made_entry(key, Made(Zeros("float32", parameter.shape), ()))
    moment = Value("float32", parameter.shape, (Source(key),))
    return replace(parameter, values=values | dict.fromkeys(MOMENTS, moment))


def _not_begun(common: CommonState, settings: Settings) -> CommonState:
    """The common state with args of a job that has consumed nothing: a schedule that is overridden goes by that."""
    values = dict(common.values)
    values["iteration"] = max(1, common.iteration or 0)
    old = values.get("args")
    if isinstance(old, StandIn):
        decay = dict.fromkeys(("start_weight_decay", "end_weight_decay"), settings.weight_decay)
        kept = decay if settings.weight_decay != common.args.get("weight_decay") else {}
        args = StandIn.__new__(type(old), *old.args, **old.kwargs)
        args.called = old.called
        args.state = {
            **common.args,
            **_NOT_BEGUN,
            **{name: getattr(settings, name) for name in _SETTINGS},
            **kept,
            "optimizer": "adam",
            "iteration": values["iteration"],
        }
        values["args"] = args
    return replace(common, values=values)


def _notes(
    model: Model, parameters: tuple[Parameter, ...], settings: Settings, scheduler: Mapping[str, Any]
) -> list[str]:
    trained = sum("exp_avg" in p.values for p in parameters)
    widened = sum(MASTER in p.values and WEIGHT not in p.values for p in parameters)
    notes = [
        f"a fresh optimizer: zero moments and step 0 of {trained:,} parameters, lr {settings.lr} to "
        f"{settings.min_lr}, weight decay {settings.weight_decay}, {scheduler['lr_decay_style']} schedule at step 0"
    ]
    if widened:
        notes.append(f"fp32 masters of {widened:,} parameters are their weights")
    if settings.defaults:
        notes.append(
            f"{_flags(list(settings.defaults))}: not in the source, Megatron's defaults are written. What is loaded "
            "replaces the job's own: give them if it has others"
        )
    if not model.scheduler and not schedule_of(model.common.args):
        notes.append(
            "no learning-rate schedule found in the source: start the job with --override-opt_param-scheduler"
        )
    other = model.common.args.get("optimizer")
    if other not in (None, "adam"):
        notes.append(f"the run's optimizer was {other}; the fresh one is Adam")
    return notes
