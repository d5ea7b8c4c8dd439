"""How values of config.json are said in `ModelArgs` and back, where the two sides say them differently.

A family file names a form (`FORMS`, both directions in one) and what a class takes without a field (`DEFAULTS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface import hybrid_values as hybrid
from ckpt_tools.megatron.huggingface import moe_values as moe
from ckpt_tools.megatron.huggingface.layer_patterns import no_rope_layers
from ckpt_tools.megatron.huggingface.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.rope_args import read_rope

Config: TypeAlias = Mapping[str, Any]
EIGHT_GROUPS = (
    "deepseek_v3",
    "kimi_k2",
    "deepseek_v32",
    "bailing_moe_v2",
    "bailing_moe",
)  # where none are told
# Megatron's fused GELU is the approximation by tanh.
GELU = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_erf"}


def plain_write(value: Any, model: ModelArgs) -> Any:
    return value


def plain_read(value: Any, config: Config) -> Any:
    return value


def write_rope(candidates: Sequence[Any], model: ModelArgs) -> Any:
    if len(candidates) != 1:
        raise MappingError(
            "rope_scaling: Megatron-LM ignored this option in many versions, so the args do not tell whether the "
            f"model was trained with {' or '.join(map(str, candidates))}; pass --hf-config with the right one"
        )
    return candidates[0]


def read_dense(dense: Sequence[int], config: Config) -> tuple[int, ...]:
    step = config.get("decoder_sparse_step", 1)
    layers = range(config["num_hidden_layers"])
    return tuple(int(layer not in (dense or ()) and (layer + 1) % step == 0) for layer in layers)


def read_step(step: int, config: Config) -> tuple[int, ...]:
    return read_dense(config.get("mlp_only_layers", ()), config)


def write_step(moe: Sequence[int], model: ModelArgs) -> int:
    """`mlp_only_layers` says it all."""
    return 1


def write_dense(moe: Sequence[int], model: ModelArgs) -> list[int]:
    return [layer for layer, one in enumerate(moe) if not one]


def write_leading_dense(moe: Sequence[int], model: ModelArgs) -> int:
    dense = model.num_layers - sum(moe)
    if any(moe[:dense]):
        raise MappingError(
            f"moe_layer_freq {list(moe)}: DeepSeek has dense layers first and MoE layers after them"
        )
    return dense


def read_leading_dense(dense: int, config: Config) -> tuple[int, ...]:
    layers = int(config["num_hidden_layers"])
    if config.get("moe_layer_freq", 1) != 1:
        raise MappingError(f"moe_layer_freq {config['moe_layer_freq']} is not supported")
    return (0,) * min(dense, layers) + (1,) * (layers - dense)


def write_layer_types(sliding: Sequence[int], model: ModelArgs) -> list[str]:
    return ["sliding_attention" if one else "full_attention" for one in sliding or (0,) * model.num_layers]


def read_layer_types(types: Sequence[str], config: Config) -> tuple[int, ...]:
    """1 for every layer with a window; () for a model that has no window."""
    layers, kinds = int(config["num_hidden_layers"]), ("full_attention", "sliding_attention")
    if not isinstance(types, list | tuple) or len(types) != layers or any(one not in kinds for one in types):
        raise MappingError(
            f"expected {' or '.join(kinds)} for each of {layers} layers, found {str(types)[:60]}"
        )
    sliding = tuple(int(one == "sliding_attention") for one in types)
    if config.get("sliding_window", True):
        return sliding
    if any(sliding):
        raise MappingError("layers have a window, and sliding_window is not set")
    return ()


def write_types_that_rotate(without: Sequence[int], model: ModelArgs) -> list[str]:
    """Of a class that rotates the layers with a window and no others: `layer_types` says both."""
    return write_layer_types(model.sliding_layers, model)


def write_rotated(without: Sequence[int], model: ModelArgs) -> list[int]:
    """`no_rope_layers` of a config.json has 1 for the layers that do rotate."""
    return [1 - one for one in without or (0,) * model.num_layers]


def read_rotated(rotated: Sequence[int] | None, config: Config) -> tuple[int, ...]:
    layers = int(config["num_hidden_layers"])
    if rotated is None:
        return no_rope_layers(config.get("no_rope_layer_interval", 4), layers, even=False)
    if (
        not isinstance(rotated, list | tuple)
        or len(rotated) != layers
        or any(one not in (0, 1) for one in rotated)
    ):
        raise MappingError(f"expected 0 or 1 for each of {layers} layers, found {str(rotated)[:60]}")
    return no_rope_layers([1 - one for one in rotated], layers)


def read_rope_interval(interval: int, config: Config) -> tuple[int, ...]:
    return read_rotated(config.get("no_rope_layers"), config)


def write_rope_interval(without: Sequence[int], model: ModelArgs) -> int:
    """`no_rope_layers` says it all; this is the class's own."""
    return 4


def every_second(config: Config) -> list[str]:
    """GPT-OSS without `layer_types` begins with a sliding layer and alternates."""
    return [("full_attention" if i % 2 else "sliding_attention") for i in range(config["num_hidden_layers"])]


def one_for_none(value: Any, model: ModelArgs) -> Any:
    return 1 if value is None else value


def write_greedy(groups: int | None, model: ModelArgs) -> str:
    return "group_limited_greedy" if groups else "greedy"


def read_greedy(method: str, config: Config) -> int | None:
    if method == "greedy":
        return None
    if method != "group_limited_greedy":
        raise MappingError(f"{method!r} is not a way of routing that Megatron knows")
    groups: int | None = none_for_one(config.get("n_group"), config)
    return groups


def read_group_topk(value: int | None, config: Config) -> int | None:
    """One group of several is a choice; one of one leaves nothing to choose."""
    told = "n_group" in config or config.get("model_type") in EIGHT_GROUPS
    only = config.get("n_group", 8) in (None, 1) if told else value == 1
    if value == 0:
        raise MappingError("of 0 groups no expert can be chosen")
    return None if only else value


def read_sum_to_one(value: bool, config: Config) -> int:
    """Megatron makes the weights of several experts sum to one, and keeps the sigmoid of a single one."""
    topk = int(config["num_experts_per_tok"])
    if bool(value) != (topk > 1):
        raise MappingError(f"Megatron computes as with {topk > 1} where num_experts_per_tok is {topk}")
    return topk


def write_sum_to_one(topk: int, model: ModelArgs) -> bool:
    return topk > 1


def write_scale(value: float | None, model: ModelArgs) -> float:
    return 1.0 if value is None else float(value)


def as_float(value: Any, model: ModelArgs) -> float:
    """transformers 5 refuses an int where it expects a float; Megatron's rotary_base is an int."""
    return float(value)


def as_whole(value: float, model: ModelArgs) -> float:
    """transformers 5 refuses a float where it expects an int."""
    return int(value) if value == int(value) else value


def none_for_one(value: Any, config: Config) -> Any:
    return None if value in (None, 1, 1.0) else value


def write_shared(size: int | None, model: ModelArgs) -> int:
    count, rest = divmod(size or 0, model.moe_ffn_hidden_size)
    if rest:
        raise MappingError(
            f"a shared expert of {size} is not a multiple of the experts' {model.moe_ffn_hidden_size}, and "
            "config.json counts shared experts of that size (n_shared_experts)"
        )
    return count  # 0 for none: the classes of DeepSeek multiply by it, and fail with null


def write_some_shared(size: int | None, model: ModelArgs) -> int:
    count = write_shared(size, model)
    if not count:
        raise MappingError(
            "moe_shared_expert_intermediate_size is not set; every MoE layer of this class has a shared expert"
        )
    return count


def read_shared(count: int | None, config: Config) -> int | None:
    return count * int(config["moe_intermediate_size"]) if count else None


def heads(config: Config) -> int:
    return int(config["num_attention_heads"])


def head_dim(config: Config) -> int:
    return int(config["hidden_size"]) // heads(config)


def read_groups(groups: int | None, config: Config) -> int:
    return groups or heads(config)


def read_head_dim(size: int | None, config: Config) -> int:
    return size or head_dim(config)


def read_gpt2_ffn(size: int | None, config: Config) -> int:
    return size or 4 * int(config["n_embd"])


def dtype_name(value: Any, config: Config) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


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


def square_heads(heads: int, model: ModelArgs) -> int:
    """The number of heads, where config.json has no field for their size."""
    if heads * model.kv_channels != model.hidden_size:
        raise MappingError(
            f"{heads} heads of {model.kv_channels} are not hidden_size {model.hidden_size}: the config.json of this "
            "architecture cannot say that"
        )
    return heads


def negated(value: Any, _: Any) -> bool:
    return not value


class Form(NamedTuple):
    """A value as config.json has it, made of that of `ModelArgs` (`write`), and the other way (`read`)."""

    write: Callable[[Any, ModelArgs], Any] = plain_write
    read: Callable[[Any, Config], Any] = plain_read


def write_sequential(layers: int, model: ModelArgs) -> bool:
    return False


def read_sequential(parallel: Any, config: Config) -> int:
    """Of a class whose layers have attention and MLP beside each other unless told."""
    if parallel:
        raise MappingError("attention and MLP of a layer beside each other; Megatron has one after the other")
    return int(config["num_hidden_layers"])


def write_multi_query(groups: int, model: ModelArgs) -> bool:
    if groups not in (1, model.num_attention_heads):
        raise MappingError(f"num_query_groups is {groups}; this architecture has 1 or one for each head")
    return groups == 1


def read_multi_query(multi: Any, config: Config) -> int:
    return 1 if multi else int(config["n_head"])


def read_window(keys: Any, config: Config) -> int:
    if not keys:
        raise MappingError("the class does not run without a window")
    return int(keys)


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


def read_youtu_std(value: Any, config: Config) -> float:
    return float(value or youtu_std(config))


def youtu_std(config: Config) -> float:
    return float(2.0 / (5.0 * config["hidden_size"]) ** 0.5)


def every_fourth_full(config: Config) -> list[str]:
    """CWM without `layer_types`: the first layer sees all keys, and so does every fourth from there on."""
    return [("sliding_attention" if i % 4 else "full_attention") for i in range(config["num_hidden_layers"])]


def all_sliding(config: Config) -> list[str]:
    """Ministral without `layer_types`."""
    return ["sliding_attention"] * int(config["num_hidden_layers"])


FORMS: dict[str, Form] = {
    "plain": Form(),
    "float": Form(as_float),
    "whole": Form(as_whole),
    "dtype": Form(read=dtype_name),
    "negated": Form(negated, negated),
    "rope": Form(write_rope, read_rope),
    "groups": Form(read=read_groups),
    "head_dim": Form(read=read_head_dim),
    "square_heads": Form(square_heads),
    "dense_layers": Form(write_dense, read_dense),
    "sparse_step": Form(write_step, read_step),
    "leading_dense": Form(write_leading_dense, read_leading_dense),
    "shared_experts": Form(write_shared, read_shared),
    "some_shared_experts": Form(write_some_shared, read_shared),
    "one_for_none": Form(one_for_none, none_for_one),
    "group_topk": Form(one_for_none, read_group_topk),
    "routing_scale": Form(write_scale, none_for_one),
    "sum_to_one": Form(write_sum_to_one, read_sum_to_one),
    "greedy": Form(write_greedy, read_greedy),
    "rotated_layers": Form(write_rotated, read_rotated),
    "rotated_interval": Form(write_rope_interval, read_rope_interval),
    "layer_types": Form(write_layer_types, read_layer_types),
    "clamp": Form(clamp),
    "gelu": Form(write_gelu, read_gelu),
    "gelu_tanh": Form(write_gelu_tanh, read_gelu),
    "gpt2_ffn": Form(read=read_gpt2_ffn),
    "sequential": Form(write_sequential, read_sequential),
    "multi_query": Form(write_multi_query, read_multi_query),
    "window": Form(read=read_window),
    "scaled_rope": Form(write_scaled, read_scaled),
    "youtu_std": Form(as_float, read_youtu_std),
    "mlp_types": Form(moe.write_mlp_types, moe.read_mlp_types),
    "sparse_layers": Form(moe.write_nothing, moe.read_sparse_layers),
    "indexer_types": Form(moe.write_indexers, moe.read_indexers),
    "index_freq": Form(moe.write_index_freq, moe.read_indexers),
    "index_offset": Form(moe.write_index_offset, moe.read_indexers),
    "no_window": Form(moe.write_nothing, moe.read_no_window),
    "a_window": Form(read=moe.read_window),
    "exaone_windows": Form(write_layer_types, moe.read_exaone_types),
    "exaone_rope": Form(write_types_that_rotate, moe.read_exaone_rope),
    "rotary_dim": Form(moe.write_rotary_dim, moe.read_rotary_dim),
    "several_experts": Form(moe.write_several, moe.read_several),
    "sarvam_rope": Form(write_rope, moe.read_sarvam_rope),
    "linear_layers": Form(hybrid.write_linear, hybrid.read_linear),
    "linear_interval": Form(hybrid.write_interval, hybrid.read_interval),
    "hybrid_pattern": Form(read=hybrid.read_pattern),
    "experts_of_pattern": Form(read=hybrid.read_experts),
    "mamba_layers": Form(hybrid.write_pattern_length, hybrid.read_mamba_layers),
    "mamba_expand": Form(hybrid.write_expand, hybrid.read_expand),
}
DEFAULTS: dict[str, Callable[[Config], Any]] = {
    "heads": heads,
    "head_dim": head_dim,
    "every_second": every_second,
    "every_fourth_full": every_fourth_full,
    "all_sliding": all_sliding,
    "youtu_std": youtu_std,
    "leading_dense": moe.leading_dense,
    "dense_by_types": moe.dense_by_types,
    "rotary_factor": moe.rotary_factor,
    "expert_size": moe.expert_size,
    "pattern_length": hybrid.count_layers,
}
