"""`config.json` <-> `ModelArgs`, and what a reference config may add to a checkpoint.

What is written is the transformers-4 form (`rope_theta`, `rope_scaling`, `torch_dtype`), which transformers 4 and
5 both load; a config written by 5 makes 4 use wrong values without a word. Both forms are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isclose
from typing import Any

from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, list_problems
from ckpt_tools.megatron.huggingface.config.codecs import REQUIRED, ROPE_NUMBERS, Config
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs, bounded, frozen
from ckpt_tools.megatron.huggingface.config.rope_args import GPT_OSS_SCALING, RELEASED_GPT_OSS_SCALING
from ckpt_tools.megatron.huggingface.mapping.rules import Family, first_of

_MISSING = object()
LOCAL_BASE = "rope_local_base_freq"
NESTED, V4_ROPE = "rope_parameters", ("rope_theta", "rope_scaling", "partial_rotary_factor")


def write_config(family: Family, model: ModelArgs) -> dict[str, Any]:
    """config.json of the model, from its architecture alone; its class's own values for what it has not."""
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type or family.name,
    }
    config |= {key: value[0] if isinstance(value, tuple) else value for key, value in family.fixed.items()}
    problems = []
    for one in family.fields:
        own = model.has(one.arg) or one.default is REQUIRED or callable(one.default)
        try:
            value = one.write(model.setting(one.arg), model) if own else one.default
        except MappingError as error:
            problems.append(f"{one.hf}, for {one.arg} {model.setting(one.arg)}: {error}")
            continue
        config[one.hf] = (
            {**config.get(NESTED, {}), **value} if one.hf == NESTED else value
        )  # of several settings
    if problems:
        raise MappingError(
            f"config.json of a {family.architecture} cannot say it:\n{list_problems(problems)}", problems
        )
    return {**config, **family.written}


@bounded("config.json")
def read_config(family: Family, config: Config) -> ModelArgs:
    config = in_v4_form(config)
    if NESTED in family.config_fields:
        config |= _nested(config)
    values: dict[str, Any] = {}
    needed = (one for one in family.fields if one.default is REQUIRED)
    missing = dict.fromkeys(one.hf for one in needed if not {one.hf, one.also} & config.keys())
    if missing:
        hint = f"; its fields are those of {family.like}, and `fields` in the rule file changes them"
        raise MappingError(
            f"config.json of a {family.name} model: {', '.join(missing)} is missing{hint if family.like else ''}"
        )
    problems = []
    for key, value in family.fixed.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if config.get(key) is not None and config[key] not in allowed:
            problems.append(f"{key} is {config[key]!r}; Megatron's {family.name} is {allowed[0]!r} only")
    problems += [
        f"{one.hf} is {config[one.hf]} and {one.also} {config[one.also]}: two names of one setting"
        for one in family.fields
        if one.also
        and None not in (config.get(one.hf), config.get(one.also))
        and not equal_values(config[one.hf], config[one.also])
    ]
    problems += _two_bases(family, config)
    constant = [one for one in family.fields if one.default is not REQUIRED and not callable(one.default)]
    given = {one.hf: one.default for one in constant if one.also not in config} | config
    for one in family.fields:
        no_experts = one.arg.startswith("moe_") and values.get("num_experts", 1) is None
        if no_experts or (one.arg.startswith("linear_") and values.get("linear_layers") == ()):
            continue  # config.json has what its class takes for it all the same
        value = config.get(one.hf, config.get(one.also, _MISSING) if one.also else _MISSING)
        try:
            if value is _MISSING:
                value = one.default(given) if callable(one.default) else one.default
            value = one.read(value, given)
        except MappingError as error:
            problems.append(f"{one.hf}: {error}")
            continue
        except KeyError as absent:
            problems.append(f"{one.hf} is read together with {absent.args[0]}, which is missing")
            continue
        except (TypeError, ValueError, ArithmeticError, AttributeError):
            problems.append(
                f"{one.hf} is {config.get(one.hf)!r:.80}, not a value that it has in any {family.name}"
            )
            continue
        if one.arg in ("hidden_size", "num_attention_heads") and type(value) is not int:
            problems.append(f"{one.hf} is {value!r:.80}, not a whole number")
        if one.arg == "sliding_window" and value is not None and not (type(value) is int and value > 0):
            problems.append(f"{one.hf} is {value!r:.80}, not a number of keys; null stands for none")
        if values.setdefault(one.arg, value) != value:
            problems.append(f"{one.hf}={value} and another field disagree: both are Megatron's {one.arg}")
    if problems:
        raise MappingError(f"config.json does not fit {family.name}:\n" + list_problems(problems), problems)
    return ModelArgs(**_implied(family, values))


def reconcile(family: Family, model: ModelArgs, reference: Config) -> ModelArgs:
    """The checkpoint's architecture with what only the reference config tells."""
    theirs = read_config(family, reference)
    model = replace(model, rope_scaling=(_settle_rope(model, theirs),))
    problems, taken = [], {}
    for one in family.fields:
        if not model.has(one.arg) and not theirs.has(one.arg):
            continue  # what no side has tells no model apart
        ours, other = model.setting(one.arg), theirs.setting(one.arg)
        if one.wins == "reference" or (one.wins == "checkpoint" and ours is None):
            taken[one.arg] = other
        elif one.wins == "either" and None in (ours, other):
            taken[one.arg] = other if ours is None else ours
        elif one.wins in ("", "either") and not equal_values(ours, other):
            problems.append(f"{one.hf}: the checkpoint has {ours}, the reference config {other} ({one.arg})")
    if problems:
        raise MappingError(
            "the reference config contradicts the checkpoint:\n" + list_problems(problems), problems
        )
    own = {name: taken.pop(name, value) for name, value in model.own.items()}
    return replace(model, **taken, own=own)


def keep_reference(family: Family, reference: Config) -> dict[str, Any]:
    """What an exported config.json copies from the reference.

    That is all but the quantization of its weights, and other spellings of what is written anyway.
    """
    dropped = {"quantization_config", "transformers_version", "dtype", *(one.also for one in family.fields)}
    dropped |= set(V4_ROPE) if NESTED in family.config_fields else set()
    return {key: value for key, value in in_v4_form(reference).items() if key not in dropped}


def _two_bases(family: Family, config: Config) -> list[str]:
    """A base of rotation for layers with a window, in a family that has no setting for one."""
    base, local = config.get("rope_theta"), config.get(LOCAL_BASE)
    if any(LOCAL_BASE in (one.hf, one.also) for one in family.fields) or LOCAL_BASE in family.fixed:
        return []
    if local is None or equal_values(local, base):
        return []
    return [
        f"layers with a window rotate by {local} and the others by {base}; {family.name} has one rope_theta"
    ]


def in_v4_form(config: Config) -> dict[str, Any]:
    """The config with the names of transformers 4 for what transformers 5 spells in another way."""
    found = dict(config)
    if found.get(NESTED) is not None:
        said = _rope_fields(_mapping(found["rope_parameters"], "rope_parameters"))
        # transformers 5 goes by the whole of a `rope_scaling` that is set, and completes it from fields next to it
        scaling = found.get("rope_scaling") or {}
        theirs = found | {k: v for k, v in _mapping(scaling, "rope_scaling").items() if k in ROPE_NUMBERS}
        problems = [
            f"{name} is {theirs.get(name, 'not set')}, but rope_parameters has {value}"
            for name, value in said.items()
            if (scaling or name in found) and not equal_values(_plain(theirs.get(name)), _plain(value))
        ]
        if problems:
            raise MappingError(
                "config.json says two things; transformers 5 goes by rope_parameters unless rope_scaling is set, "
                "transformers 4 by the other. Remove the one that is stale:\n" + list_problems(problems),
                problems,
            )
        found = said | found
    found.pop("rope_parameters", None)
    if "dtype" in found:
        found.setdefault("torch_dtype", found["dtype"])
    return found


def _nested(config: Config) -> dict[str, Any]:
    """`rope_parameters` made from a config.json in transformers 4's form, for a family that has that field."""
    found = {name: config[name] for name in V4_ROPE if config.get(name) is not None}
    scaling = dict(_mapping(found.pop("rope_scaling", {}), "rope_scaling"))
    older = scaling.pop("type", "default")
    return {NESTED: {"rope_type": older, **scaling, **found}} if found or scaling else {}


def _mapping(value: object, name: str) -> Config:
    if not isinstance(value, Mapping):
        raise MappingError(f"config.json: {name} is {value!r}, expected a set of fields")
    return value


def _rope_fields(rope: Config) -> dict[str, Any]:
    """What `rope_parameters` says, in the fields of transformers 4."""
    said: dict[str, Any] = {}
    if "full_attention" in rope or "sliding_attention" in rope:  # Gemma 3: one set for each kind of layer
        local, rope = (
            _mapping(rope.get(kind, {}), f"rope_parameters.{kind}")
            for kind in ("sliding_attention", "full_attention")
        )
        if "rope_theta" in local:
            said[LOCAL_BASE] = local["rope_theta"]
        if local.get("rope_type", "default") != "default":
            raise MappingError(f"Megatron has no scaling for layers with a window: {dict(local)}")
    if "rope_theta" in rope:
        said["rope_theta"] = rope["rope_theta"]
    if rope.get("partial_rotary_factor") is not None:  # 1 too: some classes rotate a part by default
        said["partial_rotary_factor"] = rope["partial_rotary_factor"]
    scaling = {k: v for k, v in rope.items() if k not in ROPE_NUMBERS}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    said["rope_scaling"] = {"rope_type": "default"} if kind == "default" else scaling
    return said


def _plain(value: Any) -> Any:
    """A `rope_scaling` without what says nothing: other names of its type, empty values, a base."""
    if not isinstance(value, Mapping):
        return value
    kind = value.get("rope_type", value.get("type", "default"))
    rest = {k: v for k, v in value.items() if v is not None and k not in ("type", "rope_type", "rope_theta")}
    return None if kind == "default" else {"rope_type": kind, **rest}


def refuse_quantized(config: Config) -> None:
    """Raise UnsupportedCheckpointError if the weights are stored as codes and scales."""
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise UnsupportedCheckpointError(
            f"config.json says the weights are quantized ({method}); turn them into bfloat16 first "
            "(transformers: from_pretrained with dequantize, then save_pretrained)"
        )


def _implied(family: Family, values: dict[str, Any]) -> dict[str, Any]:
    """`ModelArgs` fields that follow from the family or from other fields."""
    heads = values["num_attention_heads"]
    implied: dict[str, Any] = {
        "num_query_groups": heads,
        "kv_channels": values["hidden_size"] // heads,
        "ffn_hidden_size": values.get("moe_ffn_hidden_size") or 4 * values["hidden_size"],
        "zero_centered_gamma": family.plus_one,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if values.get("num_experts"):
        implied["moe_layers"] = (1,) * values["num_layers"]
        implied["moe_router_pre_softmax"] = False
    if values.get("sliding_window"):
        implied["sliding_layers"] = (1,) * values["num_layers"]
    needed = {k: first_of(v) for k, v in family.needs.items() if k in ModelArgs.__dataclass_fields__}
    own = {name: frozen(values.get(name)) for name in family.settings}
    return {**implied, **needed, **{k: v for k, v in values.items() if k not in own}, "own": own}


def _settle_rope(model: ModelArgs, theirs: ModelArgs) -> Any:
    """The one scaling the model was trained with, where the args leave several open."""
    wanted = theirs.rope_scaling[0]
    if model.rope_scaling == (GPT_OSS_SCALING,) and equal_values(RELEASED_GPT_OSS_SCALING, wanted):
        return wanted
    ours = model.rope_scaling[0]
    if not model.yarn_told and ours and wanted and ours["rope_type"] == wanted["rope_type"] == "yarn":
        return wanted  # plain rotation in the args is what Megatron computed, whatever a reference says
    fitting = [one for one in model.rope_scaling if equal_values(one, wanted)]
    if fitting:
        return fitting[0]
    if len(model.rope_scaling) == 1:
        return model.rope_scaling[0]
    raise MappingError(
        f"rope_scaling: the checkpoint was trained with one of {list(model.rope_scaling)}, the reference config "
        f"says {wanted}"
    )


def equal_values(ours: Any, theirs: Any) -> bool:
    """Equality of config values; floats as far as their decimal texts can carry them."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and all(equal_values(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, tuple | list) and isinstance(theirs, tuple | list):
        return len(ours) == len(theirs) and all(equal_values(a, b) for a, b in zip(ours, theirs, strict=True))
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return isclose(ours, theirs, rel_tol=1e-12)
    return bool(ours == theirs)
