"""How config.json says experts and how they are chosen, and the indexer of sparse attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.field_values import Config, none_for_one
from ckpt_tools.megatron.huggingface.config.layer_values import in_words, of_words
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.config.sparse_attention import indexer_layers, sharing

EIGHT_GROUPS = (
    "deepseek_v3",
    "kimi_k2",
    "deepseek_v32",
    "bailing_moe_v2",
    "bailing_moe",
)  # where none are told
INDEXERS = {"shared": 0, "full": 1}
LETTERS = {"S": "shared", "F": "full"}
# Each layer's word in transformers 5.24, and in configs from before it.
SPARSE_LAYERS = {"indexed_attention": 1, "deepseek_sparse_attention": 1}


def expert_size(config: Config) -> int:
    """As large as an expert."""
    return int(config["moe_intermediate_size"])


def write_shared(size: int | None, model: ModelArgs) -> int:
    count, rest = divmod(size or 0, model.moe_ffn_hidden_size)
    if rest:
        raise MappingError(
            f"a shared expert of {size} is not a multiple of the experts' {model.moe_ffn_hidden_size}, and this "
            "class counts shared experts of that size. Classes with a field for it (Qwen2-MoE, Qwen3-Next) have a "
            f"gate before the shared expert (moe_shared_expert_gate is {model.moe_shared_expert_gate} here). Where "
            "your class has such a field and no gate, a rule file (--rules) says so under `fields`: this field "
            "`null`, and `shared_expert_intermediate_size: moe_shared_expert_intermediate_size`"
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


def write_scale(value: float | None, model: ModelArgs) -> float:
    return 1.0 if value is None else float(value)


def write_sum_to_one(topk: int, model: ModelArgs) -> bool:
    return topk > 1


def read_sum_to_one(value: bool, config: Config) -> int:
    """Megatron makes the weights of several experts sum to one, and keeps the sigmoid of a single one."""
    topk = int(config["num_experts_per_tok"])
    if bool(value) != (topk > 1):
        raise MappingError(f"Megatron computes as with {topk > 1} where num_experts_per_tok is {topk}")
    return topk


def read_several(topk: int, config: Config) -> int:
    if topk < 2:
        raise MappingError("this class gives a single expert the weight 1, Megatron that of its sigmoid")
    return topk


def write_several(topk: int, model: ModelArgs) -> int:
    return read_several(topk, {})


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
                "the first layer has no choice before it to take over (index_skip_topk_offset)"
            )
        return indexer_layers(int(config["num_hidden_layers"]), freq, offset)
    found = of_words(kinds, INDEXERS, config)
    if not found[0]:
        raise MappingError("the first layer has no choice before it to take over")
    return () if all(found) else found


def write_indexers(pattern: Sequence[int], model: ModelArgs) -> list[str]:
    return in_words(pattern or (1,) * model.num_layers, INDEXERS)


def write_index_freq(pattern: Sequence[int], model: ModelArgs) -> int:
    return sharing(pattern)[0]


def write_index_offset(pattern: Sequence[int], model: ModelArgs) -> int:
    return sharing(pattern)[1]
