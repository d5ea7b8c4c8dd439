"""How config.json says a value that `ModelArgs` says otherwise: sizes, numbers and names.

Here and in `layer_values`, `moe_values` and `hybrid_values`, `write_x` makes config.json's value of that of
`ModelArgs`, and `read_x` the other way; `forms` gives each pair a name for family files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.config.rope_args import read_rope

Config: TypeAlias = Mapping[str, Any]
# Megatron's fused GELU is the approximation by tanh.
GELU = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_erf"}


def plain_write(value: Any, model: ModelArgs) -> Any:
    return value


def plain_read(value: Any, config: Config) -> Any:
    return value


def write_nothing(value: Any, model: ModelArgs) -> None:
    """The class knows what stands here, and versions of it have other words for it."""
    return None


def as_float(value: Any, model: ModelArgs) -> float:
    """transformers 5 refuses an int where it expects a float; Megatron's rotary_base is an int."""
    return float(value)


def as_whole(value: float, model: ModelArgs) -> float:
    """transformers 5 refuses a float where it expects an int."""
    return int(value) if value == int(value) else value


def negated(value: Any, _: Any) -> bool:
    return not value


def one_for_none(value: Any, model: ModelArgs) -> Any:
    return 1 if value is None else value


def none_for_one(value: Any, config: Config) -> Any:
    return None if value in (None, 1, 1.0) else value


def dtype_name(value: Any, config: Config) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def heads(config: Config) -> int:
    """As many as there are heads."""
    return int(config["num_attention_heads"])


def square_heads(heads: int, model: ModelArgs) -> int:
    """The number of heads, where config.json has no field for their size."""
    if heads * model.kv_channels != model.hidden_size:
        raise MappingError(
            f"{heads} heads of {model.kv_channels} are not hidden_size {model.hidden_size}: the config.json of this "
            "architecture cannot say that"
        )
    return heads


def read_groups(groups: int | None, config: Config) -> int:
    return groups or heads(config)


def write_multi_query(groups: int, model: ModelArgs) -> bool:
    if groups not in (1, model.num_attention_heads):
        raise MappingError(f"num_query_groups is {groups}; this architecture has 1 or one for each head")
    return groups == 1


def read_multi_query(multi: Any, config: Config) -> int:
    return 1 if multi else int(config["n_head"])


def head_dim(config: Config) -> int:
    """An equal part of `hidden_size`."""
    return int(config["hidden_size"]) // heads(config)


def read_head_dim(size: int | None, config: Config) -> int:
    return size or head_dim(config)


def read_gpt2_ffn(size: int | None, config: Config) -> int:
    return size or 4 * int(config["n_embd"])


def read_window(keys: Any, config: Config) -> int:
    if not keys:
        raise MappingError("the class does not run without a window, or has other layers then")
    return int(keys)


def clamp(value: float | None, model: ModelArgs) -> float:
    if value is None:
        raise MappingError(
            "activation_func_clamp_value is not set, and the config.json of GPT-OSS must have swiglu_limit"
        )
    return value


def write_gelu(activation: str, model: ModelArgs) -> str:
    if activation not in GELU.values():
        raise MappingError(
            f"activation is {activation!r}; this architecture has {' or '.join(GELU.values())}"
        )
    return next(name for name, value in GELU.items() if value == activation)


def write_gelu_tanh(activation: str, model: ModelArgs) -> str:
    """The same for classes whose own word for the approximation is this one."""
    name = write_gelu(activation, model)
    return "gelu_pytorch_tanh" if name == "gelu_new" else name


def read_gelu(name: str, config: Config) -> str:
    if name not in GELU:
        raise MappingError(f"{name!r} is not one of {', '.join(GELU)}")
    return GELU[name]


def write_sequential(layers: int, model: ModelArgs) -> bool:
    return False


def read_sequential(parallel: Any, config: Config) -> int:
    """Of a class whose layers have attention and MLP beside each other unless told."""
    if parallel:
        raise MappingError("attention and MLP of a layer beside each other; Megatron has one after the other")
    return int(config["num_hidden_layers"])


def read_youtu_std(value: Any, config: Config) -> float:
    return float(value or youtu_std(config))


def youtu_std(config: Config) -> float:
    """What follows from `hidden_size` (Youtu)."""
    return float(2.0 / (5.0 * config["hidden_size"]) ** 0.5)


def write_rope(candidates: Sequence[Any], model: ModelArgs) -> Any:
    if len(candidates) != 1:
        raise MappingError(
            "rope_scaling: Megatron-LM ignored this option in many versions, so the args do not tell whether the "
            f"model was trained with {' or '.join(map(str, candidates))}; pass --hf-config with the right one"
        )
    return candidates[0]


def write_scaled(candidates: Sequence[Any], model: ModelArgs) -> Any:
    """For a class of transformers 5 that scales by itself where `rope_scaling` is null."""
    return write_rope(candidates, model) or {"rope_type": "default"}


def read_scaled(scaling: Any, config: Config) -> tuple[Any, ...]:
    if scaling is None:
        raise MappingError(
            "transformers 4 takes null for an embedding that is not scaled, transformers 5 for the scaling that the "
            'class has; {"rope_type": "default"} says the first, the scaling itself the second'
        )
    found: tuple[Any, ...] = read_rope(scaling, config)
    return found


def read_sarvam_rope(scaling: Any, config: Config) -> tuple[Any, ...]:
    """Sarvam's release has a name of its own for YaRN."""
    if isinstance(scaling, Mapping) and "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
        scaling = {key: value for key, value in scaling.items() if key != "type"} | {"rope_type": "yarn"}
    return read_rope(scaling, config)


def write_rotary_dim(part: float, model: ModelArgs) -> int:
    size = part * model.kv_channels
    if size != int(size):
        raise MappingError(f"rotary_percent {part} of {model.kv_channels} is not a whole number")
    return int(size)


def read_rotary_dim(size: int | None, config: Config) -> float:
    if size is not None:
        return float(size / (config.get("head_dim") or 128))
    part = config.get("partial_rotary_factor")
    return 1.0 if part is None else float(part)


def rotary_factor(config: Config) -> float:
    """The part of a head that `rotary_dim` is, or all of it."""
    return read_rotary_dim(config.get("rotary_dim"), config)


def write_nested_base(base: float, model: ModelArgs) -> dict[str, Any]:
    return {"rope_theta": float(base)}


def read_nested_base(rope: Config, config: Config) -> float:
    return float(_in_rope(rope, "rope_theta"))


def write_nested_scaling(candidates: Sequence[Any], model: ModelArgs) -> Any:
    return write_scaled(candidates, model)


def read_nested_scaling(rope: Config, config: Config) -> tuple[Any, ...]:
    scaling = {
        key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")
    }
    found: tuple[Any, ...] = read_rope(scaling, config)
    return found


def write_nested_part(part: float, model: ModelArgs) -> dict[str, Any]:
    return {"partial_rotary_factor": float(part)}


def read_nested_part(rope: Config, config: Config) -> float:
    return float(_in_rope(rope, "partial_rotary_factor"))


def _in_rope(rope: Config, name: str) -> Any:
    if not isinstance(rope, Mapping) or name not in rope:
        raise MappingError(f"{name} is missing in it")
    return rope[name]
