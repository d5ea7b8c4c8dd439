"""Values that config.json and `ModelArgs` say differently: codecs, which family files name (`form`).

`write_x` makes config.json's value of that of `ModelArgs`, `read_x` the other way; `FORMS` pairs them. `DEFAULTS` are
what a class takes where config.json has no such field (`default_by`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.layer_patterns import (
    hybrid_pattern,
    indexer_layers,
    no_rope_layers,
    sharing,
)
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.config.rope_args import read_rope

Config: TypeAlias = Mapping[str, Any]
# Megatron's fused GELU is the approximation by tanh.
GELU = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_erf"}


def plain_write(value: Any, model: ModelArgs) -> Any:
    return value


def plain_read(value: Any, config: Config) -> Any:
    return value


def as_float(value: Any, model: ModelArgs) -> float:
    """transformers 5 refuses an int where it expects a float; Megatron's rotary_base is an int."""
    return float(value)


def one_for_none(value: Any, model: ModelArgs) -> Any:
    return 1 if value is None else value


def read_shared(count: int | None, config: Config) -> int | None:
    return count * int(config["moe_intermediate_size"]) if count else None


def write_layer_types(sliding: Sequence[int], model: ModelArgs) -> list[str]:
    return in_words(sliding or (0,) * model.num_layers, WINDOWS)


def none_for_one(value: Any, config: Config) -> Any:
    return None if value in (None, 1, 1.0) else value


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


def write_multi_query(groups: int, model: ModelArgs) -> bool:
    if groups not in (1, model.num_attention_heads):
        raise MappingError(f"num_query_groups is {groups}; this architecture has 1 or one for each head")
    return groups == 1


def head_dim(config: Config) -> int:
    """An equal part of `hidden_size`."""
    return int(config["hidden_size"]) // heads(config)


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


def read_gelu(name: str, config: Config) -> str:
    if name not in GELU:
        raise MappingError(f"{name!r} is not one of {', '.join(GELU)}")
    return GELU[name]


def read_sequential(parallel: Any, config: Config) -> int:
    """For a class that runs attention and MLP of a layer in parallel by default."""
    if parallel:
        raise MappingError("attention and MLP of a layer run in parallel; Megatron runs one after the other")
    return int(config["num_hidden_layers"])


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
    """Sarvam's release has another name for YaRN."""
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


ROPE_NUMBERS = ("rope_theta", "partial_rotary_factor")  # besides a scaling, in `rope_parameters`


def _in_rope(rope: Config, name: str) -> Any:
    if not isinstance(rope, Mapping) or name not in rope:
        raise MappingError(f"{name} is missing in it")
    return rope[name]


WINDOWS = {"full_attention": 0, "sliding_attention": 1}
MLPS = {"dense": 0, "sparse": 1}


def of_words(words: object, meaning: Mapping[str, int], config: Config) -> tuple[int, ...]:
    """A word for each layer, as numbers."""
    layers = int(config["num_hidden_layers"])
    known = isinstance(words, list | tuple) and all(isinstance(one, str) and one in meaning for one in words)
    if not isinstance(words, list | tuple) or not known or len(words) != layers:
        raise MappingError(
            f"expected {' or '.join(meaning)} for each of {layers} layers, found {str(words)[:60]}"
        )
    return tuple(meaning[one] for one in words)


def in_words(numbers: Sequence[int], meaning: Mapping[str, int]) -> list[str]:
    """Numbers of layers as the words that mean them."""
    words = {number: word for word, number in meaning.items()}
    return [words[int(bool(one))] for one in numbers]


def layers_of(config: Config, holds: Callable[[int], bool]) -> tuple[int, ...]:
    """1 for every layer, counted from 0, of which something holds."""
    return tuple(int(holds(layer)) for layer in range(int(config["num_hidden_layers"])))


def read_layer_types(types: Any, config: Config) -> tuple[int, ...]:
    """1 for every layer with a window; () for a model that has no window."""
    sliding = of_words(types, WINDOWS, config)
    if config.get("sliding_window", True):
        return sliding
    if any(sliding):
        raise MappingError("layers have a window, and sliding_window is not set")
    return ()


def every_second(config: Config) -> list[str]:
    """Layers with a window and without one in turns, one with a window first (GPT-OSS)."""
    return in_words(layers_of(config, lambda layer: layer % 2 == 0), WINDOWS)


def every_fourth_full(config: Config) -> list[str]:
    """The first layer sees all keys, and so does every fourth from there on (CWM)."""
    return in_words(layers_of(config, lambda layer: layer % 4 != 0), WINDOWS)


def all_sliding(config: Config) -> list[str]:
    """All layers have a window (Ministral)."""
    return in_words(layers_of(config, lambda _: True), WINDOWS)


def read_exaone_types(types: Any, config: Config) -> tuple[int, ...]:
    """1 for layers with a window, of `layer_types` or of the pattern that the class makes them of; () for none."""
    if types is not None or not config.get("sliding_window", True):
        return () if types is None else read_layer_types(types, config)
    turn = config.get("sliding_window_pattern", 4)
    if not isinstance(turn, int) or turn < 1:
        raise MappingError(f"sliding_window_pattern {turn!r} without layer_types")
    return layers_of(config, lambda layer: (layer + 1) % turn != 0)


def read_exaone_rope(types: Any, config: Config) -> tuple[int, ...]:
    """Layers without a window do not rotate, unless no layer has one."""
    sliding = read_exaone_types(types, config)
    return no_rope_layers([1 - one for one in sliding], len(sliding))


def read_no_window(window: int | None, config: Config) -> None:
    """The class has a window from layer `max_window_layers` on, unless `layer_types` says which have one."""
    layers, kinds = int(config["num_hidden_layers"]), config.get("layer_types")
    windows = "sliding_attention" in kinds if kinds else int(config.get("max_window_layers", 62)) < layers
    if window is not None and windows:
        raise MappingError(f"{window} on some layers, which Megatron's model of this class does not have")


def write_types_that_rotate(without: Sequence[int], model: ModelArgs) -> list[str]:
    """Of a class that rotates the layers with a window and no others, or all where none has one."""
    sliding = model.sliding_layers
    if tuple(without or (0,) * len(sliding)) != tuple(1 - one for one in sliding):
        raise MappingError(
            f"no_rope_freq is {list(without)}, and layers with a window are {list(sliding)}: this architecture "
            "rotates those with a window and no others, or all where none has one"
        )
    return write_layer_types(sliding, model)


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


def read_dense(dense: Sequence[int], config: Config) -> tuple[int, ...]:
    step = config.get("decoder_sparse_step", 1)
    return layers_of(config, lambda layer: layer not in (dense or ()) and (layer + 1) % step == 0)


def write_leading_dense(moe: Sequence[int], model: ModelArgs) -> int:
    dense = model.num_layers - sum(moe)
    if any(moe[:dense]):
        raise MappingError(
            f"moe_layer_freq {list(moe)}: DeepSeek has dense layers first and MoE layers after them"
        )
    return dense


def read_leading_dense(dense: int, config: Config) -> tuple[int, ...]:
    if config.get("moe_layer_freq", 1) != 1:
        raise MappingError(f"moe_layer_freq {config['moe_layer_freq']} is not supported")
    return dense_first(dense, config)


def dense_first(dense: int, config: Config) -> tuple[int, ...]:
    layers = int(config["num_hidden_layers"])
    return (0,) * min(dense, layers) + (1,) * (layers - dense)


def usual_dense(config: Config) -> int:
    return 3 if config.get("model_type") in ("deepseek_v32", "glm_moe_dsa") else 1


def dense_by_types(config: Config) -> int:
    """As many leading layers without experts as `mlp_layer_types` has."""
    types = config.get("mlp_layer_types")
    if types is None:
        return usual_dense(config)
    found = of_words(types, MLPS, config)
    return found.index(1) if 1 in found else len(found)


def leading_dense(config: Config) -> list[str]:
    """Dense layers first, as many as `first_k_dense_replace` says; the class has the rest sparse."""
    dense = config.get("first_k_dense_replace")
    return in_words(dense_first(usual_dense(config) if dense is None else dense, config), MLPS)


def read_mlp_types(types: Any, config: Config) -> tuple[int, ...]:
    found = of_words(leading_dense(config) if types is None else types, MLPS, config)
    released = config.get("is_moe_layer")  # of K-EXAONE's release; no class reads it
    if released is not None and [int(one) for one in released] != list(found):
        raise MappingError(f"is_moe_layer says {str(released)[:60]}")
    return found


EIGHT_GROUPS = (
    "deepseek_v3",
    "kimi_k2",
    "deepseek_v32",
    "bailing_moe_v2",
    "bailing_moe",
)  # groups of experts where config.json has no n_group
INDEXERS = {"shared": 0, "full": 1}
LETTERS = {"S": "shared", "F": "full"}
# Each layer's word in transformers 5.24, and in configs from before it.
SPARSE_LAYERS = {"indexed_attention": 1, "deepseek_sparse_attention": 1}


def expert_size(config: Config) -> int:
    """As large as an expert."""
    return int(config["moe_intermediate_size"])


def write_shared(size: int | None, model: ModelArgs, least: int = 0) -> int:
    count, rest = divmod(size or 0, model.moe_ffn_hidden_size)
    if rest:
        raise MappingError(
            f"a shared expert of {size} is not a multiple of the experts' {model.moe_ffn_hidden_size}, and this "
            "class counts shared experts of that size. Classes with a field for it (Qwen2-MoE, Qwen3-Next) have a "
            f"gate before the shared expert (moe_shared_expert_gate is {model.moe_shared_expert_gate} here). Where "
            "your class has such a field and no gate, a rule file (--rules) says so under `fields`: this field "
            "`null`, and `shared_expert_intermediate_size: moe_shared_expert_intermediate_size`"
        )
    if count < least:
        raise MappingError(
            "moe_shared_expert_intermediate_size is not set; every MoE layer of this class has a shared expert"
        )
    return count  # 0 for none: the classes of DeepSeek multiply by it, and fail with null


def read_greedy(method: str, config: Config) -> int | None:
    if method == "greedy":
        return None
    if method != "group_limited_greedy":
        raise MappingError(f"{method!r} is not a way of routing that Megatron knows")
    groups: int | None = none_for_one(config.get("n_group"), config)
    return groups


def read_group_topk(value: int | None, config: Config) -> int | None:
    """One group of several is a choice; one of one leaves nothing to choose."""
    has_groups = "n_group" in config or config.get("model_type") in EIGHT_GROUPS
    only = config.get("n_group", 8) in (None, 1) if has_groups else value == 1
    if value == 0:
        raise MappingError("of 0 groups no expert can be chosen")
    return None if only else value


def read_sum_to_one(value: bool, config: Config) -> int:
    """Megatron makes the weights of several experts sum to one, and keeps the sigmoid of a single one."""
    topk = int(config["num_experts_per_tok"])
    if bool(value) != (topk > 1):
        raise MappingError(f"Megatron computes as with {topk > 1} where num_experts_per_tok is {topk}")
    return topk


def read_several(topk: int, _: object) -> int:
    if topk < 2:
        raise MappingError("this class gives a single expert the weight 1, Megatron that of its sigmoid")
    return topk


def read_sparse_layers(kinds: Any, config: Config) -> int:
    if kinds is not None:
        of_words(kinds, SPARSE_LAYERS, config)
    return int(config.get("index_n_heads") or (32 if config.get("model_type") == "glm_moe_dsa" else 64))


def read_indexers(_: Any, config: Config) -> tuple[int, ...]:
    """The layers with an indexer: the class goes by the list first, then by a pattern, then by the two numbers."""
    kinds, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        kinds = [LETTERS.get(one, one) for one in pattern]
    if kinds is None:
        freq, offset = config.get("index_topk_freq"), config.get("index_skip_topk_offset")
        freq, offset = int(freq or 1), 2 if offset is None else int(offset)
        if freq > 1 > offset:
            raise MappingError(
                "the first layer has no earlier layer whose choice it can reuse (index_skip_topk_offset)"
            )
        return indexer_layers(int(config["num_hidden_layers"]), freq, offset)
    found = of_words(kinds, INDEXERS, config)
    if not found[0]:
        raise MappingError("the first layer has no earlier layer whose choice it can reuse")
    return () if all(found) else found


NETS = {"linear_attention": 1, "full_attention": 0}
TURN = 4  # layers of which the last one is attention, where config.json does not say it


def layers_in_turns(config: Config) -> list[str]:
    """`layer_types` of a config.json that has none: every n-th layer is attention (`full_attention_interval`)."""
    turn = config.get("full_attention_interval") or TURN
    if not isinstance(turn, int) or turn < 1:
        raise MappingError(f"full_attention_interval is {str(turn)[:60]!r}, expected a number of layers")
    return in_words(layers_of(config, lambda layer: (layer + 1) % turn != 0), NETS)


def read_linear(types: Any, config: Config) -> tuple[int, ...]:
    found = of_words(layers_in_turns(config) if types is None else types, NETS, config)
    return found if any(found) else ()


def write_interval(linear: Sequence[int], model: ModelArgs) -> int | None:
    """The length of a turn, if the layers are in turns."""
    first = next((layer for layer, one in enumerate(linear) if not one), len(linear))
    turns = tuple(int((layer + 1) % (first + 1) != 0) for layer in range(len(linear)))
    return first + 1 if turns == tuple(linear) and linear else None


# One layer of a Nemotron-H; the last two are what transformers before 5.24 wrote for the first two.
BLOCKS = {
    "linear_attention": "M",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
    "mamba": "M",
    "attention": "*",
}


def pattern_of(config: Config) -> str:
    """The pattern of a Nemotron-H: a text of the released models, a list of kinds of transformers 5."""
    pattern = config.get("hybrid_override_pattern")
    if pattern is None:
        pattern = config.get("layers_block_type")
    if isinstance(pattern, list | tuple):
        strange = [kind for kind in pattern if not isinstance(kind, str) or kind not in BLOCKS]
        if strange:
            raise MappingError(f"{str(strange[0])[:60]!r} is not one of {', '.join(BLOCKS)}")
        return "".join(BLOCKS[kind] for kind in pattern)
    if not isinstance(pattern, str):
        raise MappingError(f"expected a letter for each layer, found {str(pattern)[:60]!r}")
    return hybrid_pattern(pattern)


def read_pattern(said: Any, config: Config) -> str:
    pattern, layers = pattern_of(config), config.get("num_hidden_layers")
    if layers is not None and layers != len(pattern):
        raise MappingError(f"it names {len(pattern)} layers, num_hidden_layers is {layers}")
    return pattern


def mamba_heads(config: Config) -> int:
    """As many as there are Mamba heads: no layer attends, but Megatron divides them by the tensor-parallel size."""
    return int(config.get("num_heads", 128))


def count_layers(config: Config) -> int:
    """As many as the pattern of layers has letters."""
    return len(pattern_of(config))


def write_expand(heads: int, model: ModelArgs) -> int:
    """`expand` of a Mamba-2, which its class compares with the size and number of its heads."""
    inner = heads * model.mamba_head_dim
    if inner % model.hidden_size:
        raise MappingError(
            f"{heads} heads of {model.mamba_head_dim} are not a multiple of hidden_size {model.hidden_size}, and the "
            "config.json of this architecture says them as one"
        )
    return inner // model.hidden_size


def read_mamba_head(size: Any, config: Config) -> int:
    """The size of a head of a Falcon-H1: `auto` for an equal part of the inner size."""
    return inner_size(config) // int(config["mamba_n_heads"]) if size == "auto" else int(size)


def read_inner(size: Any, config: Config) -> int:
    """The heads of the inner size of a Falcon-H1, by the size of one."""
    inner, head = inner_size(config), read_mamba_head(config["mamba_d_head"], config)
    if not head or inner % head:
        raise MappingError(f"heads of {head} do not make {inner}")
    return inner // head


def inner_size(config: Config) -> int:
    """`mamba_d_ssm`, or where that is null `mamba_expand` times the hidden size."""
    size = config["mamba_d_ssm"]
    return int(config.get("mamba_expand", 2) * config["hidden_size"]) if size is None else int(size)


REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class Field:
    """config.json's `hf` is `ModelArgs.arg`; `write` and `read` translate the value.

    `default` is what the transformers class takes when the key is absent: a value, or a function of the config.
    `wins` says which value is taken where checkpoint and reference config differ; "" refuses, and so does "either"
    unless one of them does not know (None). `also` is another spelling of `hf` that readers accept.
    """

    hf: str
    arg: str
    default: Any = REQUIRED
    write: Callable[[Any, ModelArgs], Any] = plain_write
    read: Callable[[Any, Config], Any] = plain_read
    wins: Literal["", "either", "reference", "checkpoint"] = ""
    also: str | None = None


class Form(NamedTuple):
    """A value as config.json has it, made of that of `ModelArgs` (`write`), and the other way (`read`).

    `says` is a line for authors of rule files, of what config.json has.
    """

    says: str
    write: Callable[[Any, ModelArgs], Any] = plain_write
    read: Callable[[Any, Config], Any] = plain_read


FORMS: dict[str, Form] = {
    "plain": Form("the same value on both sides"),
    # transformers 5 refuses an int where it expects a float, and a float where it expects an int
    "float": Form("the same number, written as a float", as_float),
    "whole": Form(
        "the same number, written as an int where it is one",
        lambda value, model: int(value) if value == int(value) else value,
    ),
    "dtype": Form(
        "a type by its name, with or without `torch.` before it",
        read=lambda value, config: None if value is None else str(value).removeprefix("torch."),
    ),
    "negated": Form(
        "true for false, and false for true",
        lambda value, model: not value,
        lambda value, config: not value,
    ),
    "rope": Form(
        "`rope_scaling`: llama3, linear or yarn with all their numbers; null for none", write_rope, read_rope
    ),
    "groups": Form(
        "the number of key heads; null for as many as there are heads",
        read=lambda groups, config: groups or heads(config),
    ),
    "head_dim": Form(
        "the size of a head; null for an equal part of `hidden_size`",
        read=lambda size, config: size or head_dim(config),
    ),
    "square_heads": Form(
        "the number of heads of a class without `head_dim`: they make `hidden_size` together", square_heads
    ),
    "dense_layers": Form(
        "a list of the layers without experts",
        lambda moe, model: [layer for layer, one in enumerate(moe) if not one],
        read_dense,
    ),
    "sparse_step": Form(
        "every n-th layer has experts; read with `mlp_only_layers`, written as 1",
        lambda moe, model: 1,
        lambda step, config: read_dense(config.get("mlp_only_layers", ()), config),
    ),
    "leading_dense": Form(
        "the number of layers without experts, which come first", write_leading_dense, read_leading_dense
    ),
    "shared_experts": Form(
        "a number of shared experts, each of `moe_intermediate_size`; 0 for none",
        write_shared,
        read_shared,
    ),
    "some_shared_experts": Form(
        "the same, of a class that always has one", partial(write_shared, least=1), read_shared
    ),
    "one_for_none": Form("1 for null", one_for_none, none_for_one),
    "group_topk": Form(
        "groups that a token may choose from; null where `n_group` is 1", one_for_none, read_group_topk
    ),
    "routing_scale": Form(
        "a factor; 1.0 for null", lambda value, model: 1.0 if value is None else float(value), none_for_one
    ),
    "sum_to_one": Form(
        "whether the weights of the chosen experts sum to one: Megatron's do if there are several",
        lambda topk, model: topk > 1,
        read_sum_to_one,
    ),
    "greedy": Form(
        "`topk_method`: greedy, or group_limited_greedy with `n_group`",
        lambda groups, model: "group_limited_greedy" if groups else "greedy",
        read_greedy,
    ),
    "rotated_layers": Form(
        "`no_rope_layers`: 1 for each layer that does rotate",
        lambda without, model: [1 - one for one in without or (0,) * model.num_layers],
        read_rotated,
    ),
    "rotated_interval": Form(
        "every n-th layer does not rotate; read where `no_rope_layers` is absent, written as 4",
        lambda without, model: 4,
        lambda interval, config: read_rotated(config.get("no_rope_layers"), config),
    ),
    "layer_types": Form(
        "full_attention or sliding_attention for each layer", write_layer_types, read_layer_types
    ),
    "clamp": Form("a limit that must be there", clamp),
    "gelu": Form("the name of a GELU: gelu_new (by tanh) or gelu", write_gelu, read_gelu),
    "gelu_tanh": Form(
        "the same of a class that says gelu_pytorch_tanh",
        lambda activation, model: write_gelu(activation, model).replace("gelu_new", "gelu_pytorch_tanh"),
        read_gelu,
    ),
    "gpt2_ffn": Form(
        "the size of the MLP; null for four times `n_embd`",
        read=lambda size, config: size or 4 * int(config["n_embd"]),
    ),
    "sequential": Form(
        "false, of a class that runs attention and MLP in parallel by default",
        lambda layers, model: False,
        read_sequential,
    ),
    "multi_query": Form(
        "true for one key head, false for as many as there are heads",
        write_multi_query,
        lambda multi, config: 1 if multi else int(config["n_head"]),
    ),
    "window": Form("the keys that a query sees, of a class that always has a window", read=read_window),
    "scaled_rope": Form(
        "`rope_scaling` of a class that scales by itself where it is null", write_scaled, read_scaled
    ),
    "youtu_std": Form(
        "the spread of initial weights; null for what follows from `hidden_size`",
        as_float,
        lambda value, config: float(value or youtu_std(config)),
    ),
    "mlp_types": Form(
        "dense or sparse for each layer", lambda moe, model: in_words(moe, MLPS), read_mlp_types
    ),
    "sparse_layers": Form(
        "`layer_types` of sparse attention, which say nothing more; not written",
        lambda heads, model: None,  # the class knows them, and its versions have other words for them
        read_sparse_layers,
    ),
    "indexer_types": Form(
        "full or shared for each layer: whether it has an indexer",
        lambda pattern, model: in_words(pattern or (1,) * model.num_layers, INDEXERS),
        read_indexers,
    ),
    "index_freq": Form(
        "every n-th layer has an indexer", lambda pattern, model: sharing(pattern)[0], read_indexers
    ),
    "index_offset": Form(
        "how many layers at first have an indexer each",
        lambda pattern, model: sharing(pattern)[1],
        read_indexers,
    ),
    "no_window": Form("a window that no layer has", lambda window, model: None, read_no_window),
    "exaone_windows": Form(
        "full_attention or sliding_attention for each layer, or made of `sliding_window_pattern`",
        write_layer_types,
        read_exaone_types,
    ),
    "exaone_rope": Form(
        "the same list, of a class that rotates the layers with a window alone",
        write_types_that_rotate,
        read_exaone_rope,
    ),
    "rotary_dim": Form("how many rows of a head are rotated", write_rotary_dim, read_rotary_dim),
    "several_experts": Form(
        "the number of experts of a token, of a class that has at least two", read_several, read_several
    ),
    "sarvam_rope": Form(
        "`rope_scaling` where YaRN may be called deepseek_yarn", write_rope, read_sarvam_rope
    ),
    "linear_layers": Form(
        "full_attention or linear_attention (a gated delta net) for each layer",
        lambda linear, model: in_words(linear or (0,) * model.num_layers, NETS),
        read_linear,
    ),
    "linear_interval": Form(
        "every n-th layer is attention; `layer_types` has the last word",
        write_interval,
        lambda turn, config: read_linear(config.get("layer_types"), config),
    ),
    "hybrid_pattern": Form(
        "a letter of each layer of a HybridModel (M Mamba, * attention, - MLP, E experts), or a list of words",
        read=read_pattern,
    ),
    "experts_of_pattern": Form(
        "the number of experts, where the pattern has an E",  # a Nemotron-H has a number without any E too
        read=lambda count, config: count if "E" in pattern_of(config) else None,
    ),
    "mamba_layers": Form(
        "the number of layers, which are all Mamba",
        lambda pattern, model: len(pattern),
        lambda layers, config: "M" * layers,
    ),
    "parallel_layers": Form(
        "the number of layers, which all have Mamba and attention",
        lambda pattern, model: len(pattern),
        lambda layers, config: "P" * layers,  # Falcon-H1; an MLP is behind both
    ),
    "mamba_head": Form(
        "the size of a Mamba head; auto for an equal part of the inner size", read=read_mamba_head
    ),
    "mamba_inner": Form(
        "the size of all Mamba heads together",
        lambda heads, model: heads * model.mamba_head_dim,
        read_inner,
    ),
    "mamba_expand": Form(
        "how many times `hidden_size` all Mamba heads are",
        write_expand,
        lambda expand, config: expand * int(config["hidden_size"]) // int(config.get("head_dim", 64)),
    ),
    "nested_base": Form(
        "`rope_theta` in `rope_parameters`",
        lambda base, model: {"rope_theta": float(base)},
        lambda rope, config: float(_in_rope(rope, "rope_theta")),
    ),
    "nested_scaling": Form(
        "`rope_type` and the numbers of a scaling in `rope_parameters`",
        write_scaled,
        lambda rope, config: read_rope({k: v for k, v in rope.items() if k not in ROPE_NUMBERS}, config),
    ),
    "nested_part": Form(
        "`partial_rotary_factor` in `rope_parameters`",
        lambda part, model: {"partial_rotary_factor": float(part)},
        lambda rope, config: float(_in_rope(rope, "partial_rotary_factor")),
    ),
}
# By what a class takes where config.json has no such field; the first line of each docstring is for authors.
DEFAULTS: dict[str, Callable[[Config], Any]] = {
    "heads": heads,
    "head_dim": head_dim,
    "every_second": every_second,
    "every_fourth_full": every_fourth_full,
    "all_sliding": all_sliding,
    "youtu_std": youtu_std,
    "leading_dense": leading_dense,
    "dense_by_types": dense_by_types,
    "rotary_factor": rotary_factor,
    "expert_size": expert_size,
    "pattern_length": count_layers,
    "mamba_heads": mamba_heads,
}
