"""Megatron's settings of rotary embeddings <-> `rope_scaling` of a transformers-4 config.json."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose, log
from typing import Any, TypeAlias

from ckpt_tools.errors import MappingError

RopeScaling: TypeAlias = Mapping[str, Any] | None
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
TRAINED_LLAMA3_FACTOR = 8.0  # what Megatron-LM trained with whatever --rope-scaling-factor said, until #6306
GPT_OSS_SCALING = {  # post_training/model_builder.py sets these, whatever the other arguments say
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 131072, "truncate": False,
}  # fmt: skip
RELEASED_GPT_OSS_SCALING = GPT_OSS_SCALING | {"original_max_position_embeddings": 4096}


def rope_scaling(args: Mapping[str, Any], kind: str, mla: bool) -> tuple[RopeScaling, ...]:
    """The scalings the model may have been trained with; `kind` is `position_embedding_type` as text."""
    if args.get("enable_gpt_oss"):
        return (GPT_OSS_SCALING,)
    if mla:
        factor: float = args.get("rotary_scaling_factor") or 1.0
        return (None if args.get("rope_type") == "rope" or factor == 1.0 else _mla_yarn(args, factor),)
    if kind == "yarn":
        factor = args.get("yarn_rotary_scaling_factor") or args.get("rotary_scaling_factor") or 1.0
        return (_yarn(args, float(factor)),)
    if rotary_bases(args)[1] is not None and args.get("rope_scaling_factor") not in (None, 1, 1.0):
        return ({"rope_type": "linear", "factor": float(args["rope_scaling_factor"])},)
    return _llama3_or_linear(args, bridge="share_embeddings_and_output_weights" in args)


def _llama3_or_linear(args: Mapping[str, Any], bridge: bool) -> tuple[RopeScaling, ...]:
    """Megatron-LM ignored both options in many versions, Bridge heeds them."""
    if args.get("use_rope_scaling") or args.get("rope_scaling") is True:
        factor = float(args.get("rope_scaling_factor") or TRAINED_LLAMA3_FACTOR)
        factors = (factor,) if bridge or factor == TRAINED_LLAMA3_FACTOR else (TRAINED_LLAMA3_FACTOR, factor)
        return tuple({"rope_type": "llama3", "factor": f, **LLAMA3_SCALING} for f in factors)
    length: float | None = args.get("rotary_seq_len_interpolation_factor") or args.get(
        "seq_len_interpolation_factor"
    )
    if length is None or length == 1:
        return (None,)
    linear = {"rope_type": "linear", "factor": float(length)}
    return (linear,) if bridge else (None, linear)


def rotary_bases(args: Mapping[str, Any]) -> tuple[float, float | None]:
    """The base of layers that see all keys, and that of layers with a window where it is another.

    Bridge's Gemma 3 stores both as (local, global), and only there divides all frequencies of the global layers
    by `rope_scaling_factor`.
    """
    match args.get("rotary_base", 10000):
        case [int() | float() as local, int() | float() as everywhere]:
            return everywhere, local
        case int() | float() as base:
            return base, None
        case other:
            raise MappingError(
                f"rotary_base {other!r} in the checkpoint's args is not a number or a pair of them"
            )


def rope_args(rope: Mapping[str, Any], mla: bool) -> dict[str, Any]:
    """Megatron-LM's arguments for a scaling."""
    match rope.get("rope_type"):
        case "llama3":
            return {"use_rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        case "linear":
            return {"rotary_seq_len_interpolation_factor": rope["factor"]}
        case "yarn" if mla:
            numbers = {name: value for name, value in rope.items() if name != "factor"}
            return {**numbers, "rotary_scaling_factor": rope["factor"]}
        case "yarn":
            if "attention_factor" in rope:
                raise MappingError(
                    f"rope_scaling: Megatron cannot set attention_factor {rope['attention_factor']}"
                )
            return {
                "position_embedding_type": "yarn",
                "use_rotary_position_embeddings": False,  # else Megatron makes "rope" of it
                "rotary_scaling_factor": rope["factor"],
                "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
                "yarn_beta_fast": rope["beta_fast"],
                "yarn_beta_slow": rope["beta_slow"],
                "yarn_correction_range_round_to_int": rope["truncate"],
            }
    return {"rope_type": "rope", "rotary_scaling_factor": 1.0} if mla else {"use_rope_scaling": False}


def read_rope(scaling: Mapping[str, Any] | None, config: Mapping[str, Any]) -> tuple[Any, ...]:
    """`rope_scaling` with every value spelled out that Megatron can set; others are refused."""
    if not scaling:
        return (None,)
    scaling = dict(scaling)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None)
    scaling.pop("type", None)
    for name in ("rope_theta", "partial_rotary_factor"):  # transformers 5 alone reads them here
        value = scaling.pop(name, None)
        if value not in (None, config.get(name)):
            raise MappingError(f"{name} is {value} in it, and {config.get(name)} next to it")
    if kind in (None, "default"):
        return (None,)
    if "kv_lora_rank" in config and kind != "yarn":
        raise MappingError(f"Megatron's latent attention has no {kind!r} scaling: it is YaRN's or none")
    settings = {key: value for key, value in scaling.items() if value is not None}
    is_told = "factor" in settings
    known: dict[str, Any] = {"rope_type": kind, "factor": float(settings.pop("factor", 1.0))}
    if kind == "llama3":
        known |= {key: settings.pop(key, None) for key in LLAMA3_SCALING}
        if known != known | LLAMA3_SCALING:
            raise MappingError(
                f"Megatron's llama3 scaling has {LLAMA3_SCALING} and no other values: {scaling}"
            )
    elif kind == "yarn":
        known |= {
            "beta_fast": float(settings.pop("beta_fast", 32)),
            "beta_slow": float(settings.pop("beta_slow", 1)),
            "original_max_position_embeddings": settings.pop(
                "original_max_position_embeddings", config.get("max_position_embeddings")
            ),
        }
        if "kv_lora_rank" in config:
            _refuse_two_readings(settings, known["factor"])
            known |= {
                "mscale": settings.pop("mscale", 1.0),
                "mscale_all_dim": settings.pop("mscale_all_dim", 0.0),
            }
        else:
            known["truncate"] = bool(settings.pop("truncate", True))
            own, usual = settings.pop("attention_factor", None), attention_factor(known["factor"])
            mscale, all_dim = settings.pop("mscale", None), settings.pop("mscale_all_dim", None)
            if own is None and mscale and all_dim:  # one of them alone is not looked at
                own = _quotient(mscale, all_dim, usual)
            if own is not None and not isclose(own, usual, rel_tol=1e-12):
                known["attention_factor"] = own
    elif kind != "linear":
        raise MappingError(f"Megatron has no {kind!r} scaling")
    name, inner = "original_max_position_embeddings", known.get("original_max_position_embeddings")
    if inner is not None and config.get(name) not in (None, inner):
        raise MappingError(
            f"{name} is {config[name]} besides: transformers 5 takes that one, transformers 4 {inner}"
        )
    if settings:
        raise MappingError(f"Megatron cannot set {settings} of {kind!r} scaling")
    if not is_told:
        raise MappingError(f"{kind!r} scaling without a factor, which transformers 4 cannot load")
    return (known,)


def _refuse_two_readings(settings: Mapping[str, Any], factor: float) -> None:
    """DeepSeek's own code and Megatron divide by the terms whatever they are, transformers only where
    both are given.
    """
    mscale, all_dim, usual = settings.get("mscale"), settings.get("mscale_all_dim"), attention_factor(factor)
    quotient = _quotient(1.0 if mscale is None else mscale, all_dim or 0.0, usual)
    if not (mscale and all_dim) and not isclose(quotient, usual, rel_tol=1e-12):
        raise MappingError(
            f"mscale {mscale} with mscale_all_dim {all_dim}: transformers multiplies what is rotated with "
            f"{usual:.6g}, Megatron and the code released with DeepSeek's models with {quotient:.6g}; give both"
        )


def attention_factor(factor: float) -> float:
    """What YaRN multiplies rotated queries and keys with by default."""
    return 0.1 * log(factor) + 1.0 if factor > 1 else 1.0


def _mla_yarn(args: Mapping[str, Any], factor: float) -> dict[str, Any]:
    _refuse_two_readings(args, factor)
    return _ramp(args, factor, "") | {
        "mscale": args.get("mscale", 1.0),
        "mscale_all_dim": args.get("mscale_all_dim", 0.0),
    }


def _yarn(args: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """YaRN of common attention; its `attention_factor` is written where it is not the usual one."""
    scaling = _ramp(args, factor, "yarn_")
    scaling["truncate"] = bool(args.get("yarn_correction_range_round_to_int", True))
    mscale, all_dim = (args.get("yarn_" + name, args.get(name)) for name in ("mscale", "mscale_all_dim"))
    if mscale is None or all_dim is None:
        return scaling
    usual = attention_factor(factor)
    own = _quotient(mscale, all_dim, usual)
    return scaling if isclose(own, usual, rel_tol=1e-12) else scaling | {"attention_factor": own}


def _quotient(mscale: float, all_dim: float, usual: float) -> float:
    """The factor of rotated queries and keys that both terms make of the usual one."""
    return (1 + mscale * (usual - 1)) / (1 + all_dim * (usual - 1))


def _ramp(args: Mapping[str, Any], factor: float, prefix: str) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": float(factor),
        "beta_fast": float(args.get(prefix + "beta_fast") or 32),
        "beta_slow": float(args.get(prefix + "beta_slow") or 1),
        "original_max_position_embeddings": args.get(prefix + "original_max_position_embeddings") or 4096,
    }
