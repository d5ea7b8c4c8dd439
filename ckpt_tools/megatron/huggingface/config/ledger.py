"""The ledgers: every setting of a checkpoint's args or a config.json is accounted for.

`arguments.yaml` and `config_json.yaml` give every name a class; what changes the forward pass and cannot be said on
the other side is refused, what they do not know is named. They are read when a model is exported or imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.huggingface.config.config import NESTED, V4_ROPE
from ckpt_tools.megatron.huggingface.config.layer_patterns import windows_said_again
from ckpt_tools.megatron.huggingface.config.megatron_args import as_text, flat_args
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.mapping.rules import Family, allows, first_of

MAX_VALUE_CHARS = 60
MEGATRON_NAMES = {"activation_clamp": "activation_func_clamp_value", "rotary_base_local": "the local rotary_base",
                  "sliding_window": "window_size", "sliding_pattern": "interleaved_attn_pattern",
                  "no_rope_layers": "no_rope_freq", "linear_layers": "linear_attention_freq",
                  "query_pre_attn_scalar": "softmax_scale, as 1 / its square,"}  # fmt: skip


class Change(NamedTuple):
    """A setting that changes the forward pass.

    `neutral` values do not, nor does the value of `same_as`, nor any without one of `only_with`.
    """

    neutral: tuple[Any, ...]
    why: str
    only_with: tuple[str, ...] = ()
    same_as: str | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """The class of every name; of `shape`, `only_with` and `irrelevant` the reason, of `carried` where it goes."""

    carried: Mapping[str, str]
    changes: Mapping[str, Change]
    shape: Mapping[str, str]
    only_with: Mapping[str, str]
    irrelevant: Mapping[str, str]

    def __contains__(self, name: object) -> bool:
        return any(name in part for part in self.parts.values())

    @property
    def parts(self) -> dict[str, Mapping[str, Any]]:
        return {name: getattr(self, name) for name in Ledger.__dataclass_fields__}


class Account(NamedTuple):
    """What is wrong, and what is said; `refused` are the settings that a rule file could allow."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    refused: Mapping[str, Any] = {}


def account_for_settings(
    family: Family, model: ModelArgs | None, args: Mapping[str, Any] | None, config: Mapping[str, Any] | None
) -> tuple[str, ...]:
    """What is to be said about a checkpoint's args and a config.json (in its transformers-4 form).

    `model` is what the source's own settings describe.
    """
    nothing = Account((), ())
    ours = nothing if args is None else account_for_args(family, args)
    theirs = nothing if config is None else account_for_config(family, config)
    accounts = (ours, theirs)
    problems = [problem for account in accounts for problem in account.problems]
    problems += [] if model is None else uncarried(family, model)
    if problems:
        raise MappingError(
            f"the model is not a {family.architecture} as its settings have it:\n{list_problems(problems)}\n"
            "Where a setting is wrong, correct it at its source. Where the architecture does compute this, a rule "
            f"file (--rules) says so: `needs: {_flow(ours.refused)}` for a Megatron setting, "
            f"`fixed: {_flow(theirs.refused)}` for a field of config.json",
            problems,
        )
    return tuple(note for account in accounts for note in account.notes)


def account_for_args(family: Family, args: Mapping[str, Any]) -> Account:
    """Settings of the checkpoint that `family` does not compute, and those nothing is known about."""
    ledger, args = arguments(), flat_args(args)
    problems = [
        f"{name} is {args.get(name)!r}; {family.name} demands {needed!r}"
        for name, needed in family.needs.items()
        if name in ledger.changes and not allows(needed, args.get(name), equal)
    ]
    carried = {
        *(MEGATRON_NAMES.get(one.arg) for one in family.fields),
        *family.settings,
        *windows_said_again(args),
    }
    refused = {}
    for name, change in ledger.changes.items():
        if name not in carried and name not in family.needs and not is_neutral(args.get(name), change, args):
            refused[name] = args[name]
            problems.append(
                f"{name} is {short(args[name])}: {change.why}; {family.architecture} does not compute that"
            )
    unknown = _unknown((k, v) for k, v in args.items() if k not in ledger and k not in carried)
    return Account(tuple(problems), unknown, refused)


def demanded_args(family: Family) -> dict[str, Any]:
    """Arguments that a rule file demands beyond what `ModelArgs` holds: an imported model has them."""
    fields = ModelArgs.__dataclass_fields__
    return {name: first_of(needed) for name, needed in family.needs.items() if name not in fields}


def account_for_config(family: Family, config: Mapping[str, Any]) -> Account:
    """Fields of a config.json (in its transformers-4 form) that Megatron does not compute, and unknown ones."""
    ledger = config_fields_of(family.like or family.name)
    said = {name for one in family.fields for name in (one.hf, one.also) if name} | set(family.fixed)
    if NESTED in said:
        turned = any(one.arg == "rotary_percent" for one in family.fields)
        said |= {name for name in V4_ROPE if turned or name != "partial_rotary_factor"}
    problems, refused = [], {}
    for name, change in ledger.changes.items():
        # A null that is there is false: classes ask `if config.NAME:`
        is_off = config.get(name, True) is None and any(one is True for one in change.neutral)
        if name not in said and (is_off or not is_neutral(config.get(name), change, config)):
            refused[name] = config[name]
            problems.append(
                f"{name} is {short(config[name])}: {change.why}; Megatron's {family.name} has no setting for that"
            )
    kinds = config.get("layer_types")
    if kinds and not _has_layer_types(family, config, kinds):
        problems.append(f"layer_types is {short(kinds)}, which Megatron's {family.name} does not have")
    unknown = ((k, v) for k, v in config.items() if k not in ledger and k not in said)
    return Account(tuple(problems), _unknown(unknown), refused)


def _flow(settings: Mapping[str, Any]) -> str:
    """Settings as a rule file has them in one line; words to fill in where there are none."""
    plain = {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)}
    said = ", ".join(f"{name}: {json.dumps(value)}" for name, value in plain.items())
    return f"{{{said or 'NAME: VALUE'}}}"


def uncarried(family: Family, model: ModelArgs) -> list[str]:
    """Settings of the model that neither config.json of this family nor its class can hold."""
    said = {one.arg for one in family.fields} | set(family.needs)
    if model.hybrid_pattern and "*" not in model.hybrid_pattern:
        said |= {"num_query_groups", "query_pre_attn_scalar"}  # of attention, which no layer has
    rope = model.position_embedding_type == "rope"
    neutral: dict[str, tuple[Any, ...]] = {
        "num_query_groups": (model.num_attention_heads,),
        "activation_clamp": (None,),
        "glu_linear_offset": (0,),
        "add_qkv_bias": (False,),
        "rotary_base_local": (None,),
        "rope_scaling": ((None,),) if rope else (model.rope_scaling,),
        "rotary_percent": (1,) if rope else (model.rotary_percent,),
        "sliding_window": (None,),
        "sliding_pattern": (None,),
        "query_pre_attn_scalar": (
            None,
            model.query_pre_attn_scalar if model.multi_latent_attention else model.kv_channels,
        ),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "attention_output_gate": (False,),
        "linear_layers": ((),),
        "moe_latent_size": (None,),
    }
    return [
        f"{MEGATRON_NAMES.get(name, name)} is {short(getattr(model, name))}; {family.architecture} has {values[0]!r} "
        f"and no setting for it (`{name}` in a rule file)"
        for name, values in neutral.items()
        if name not in said and not any(equal(getattr(model, name), one) for one in values)
    ]


def is_neutral(value: Any, change: Change, settings: Mapping[str, Any]) -> bool:
    """Whether the value does not change the forward pass, given the other settings."""
    if value in (None, [], ()) or (
        change.only_with and not any(settings.get(name) for name in change.only_with)
    ):
        return True
    neutral = change.neutral if change.same_as is None else (*change.neutral, settings.get(change.same_as))
    return _neutral(value, neutral)


def _neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    if any(equal(value, one) for one in neutral):
        return True
    if isinstance(value, list | tuple):
        flat = bool(value) and not any(isinstance(one, list | tuple) for one in value)
        dotted = ".".join(value) if all(isinstance(one, str) for one in value) else ""
        return flat and (all(_neutral(one, neutral) for one in value) or _neutral(dotted, neutral))
    return isinstance(value, str | Mapping) and any(
        fnmatchcase(as_text(value), one) for one in neutral if isinstance(one, str)
    )


def equal(value: Any, other: Any) -> bool:
    """Equality that takes lists for tuples, and a truth value for 0 or 1 only."""
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(equal(a, b) for a, b in zip(value, other, strict=True))
    if isinstance(value, bool) or isinstance(other, bool):
        return value in (0, 1) and other in (0, 1) and bool(value) == bool(other)
    return value is other or (isinstance(value, int | float | str | Mapping) and bool(value == other))


def _has_layer_types(family: Family, config: Mapping[str, Any], kinds: Any) -> bool:
    """Whether the layers are of the kinds that this family's class has; carried where it has a field for them."""
    carried = {one.hf for one in family.fields}
    turn: Any = family.window_turn
    if "layer_types" in carried or ("sliding_window" in carried and not turn):
        return True
    if "sliding_window_pattern" in carried:
        turn = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or turn
    if (
        not isinstance(kinds, list)
        or not isinstance(turn, int)
        or len(kinds) != config.get("num_hidden_layers")
    ):
        return False
    return kinds == [
        "sliding_attention" if turn and (layer + 1) % turn else "full_attention"
        for layer in range(len(kinds))
    ]


def _unknown(found: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    texts = sorted(
        f"{name if isinstance(name, str) and name.isidentifier() else short(name)}={short(value)}"
        for name, value in found
        if not (value is None or (isinstance(value, str | list | tuple | dict) and not value))
    )
    if not texts:
        return ()
    shown = ", ".join(texts[:20]) + (f" and {len(texts) - 20} more" if len(texts) > 20 else "")
    return (f"not known to this version, and taken for irrelevant: {shown}",)


def short(value: Any) -> str:
    """A value as text of one short line."""
    text = repr(as_text(value) if isinstance(value, Mapping) and "_target_" in value else value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."


@cache
def arguments() -> Ledger:
    return _ledger(_load("arguments.yaml"))


@cache
def config_fields_of(family: str) -> Ledger:
    data = _load("config_json.yaml")
    own = data["families"].get(family, {})
    return _ledger({
        "changes": data["changes"] | own.get("changes", {}),
        "shape": data["shape"] | own.get("shape", {}),
        "irrelevant": data["irrelevant"] | own.get("irrelevant", {}),
    })  # fmt: skip


def _load(file: str) -> dict[str, Any]:
    import yaml

    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return data


def _ledger(data: Mapping[str, Any]) -> Ledger:
    changes = {
        name: Change(tuple(one["neutral"]), one["why"], tuple(one.get("only_with", ())), one.get("same_as"))
        for name, one in data["changes"].items()
    }
    shape, only_with, irrelevant = (
        {name: reason for reason, names in data.get(part, {}).items() for name in names.split()}
        for part in ("shape", "only_with", "irrelevant")
    )
    return Ledger(data.get("carried", {}), changes, shape, only_with, irrelevant)
