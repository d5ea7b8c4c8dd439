"""Values of config.json that only some families with experts have, or say in ways of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.layer_patterns import no_rope_layers
from ckpt_tools.megatron.huggingface.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.rope_args import read_rope
from ckpt_tools.megatron.huggingface.sparse_attention import indexer_layers, sharing

Config: TypeAlias = Mapping[str, Any]
KINDS = {"dense": 0, "sparse": 1}
WINDOWS = {"full_attention": 0, "sliding_attention": 1}
INDEXERS = {"shared": 0, "full": 1}
LETTERS = {"S": "shared", "F": "full"}
SPARSE_LAYERS = (
    "indexed_attention",
    "deepseek_sparse_attention",
)  # transformers 5.24, and configs from before it


def of_layers(words: object, meaning: dict[str, int], config: Config) -> tuple[int, ...]:
    """A word for each layer, as numbers."""
    layers = int(config["num_hidden_layers"])
    if not isinstance(words, list | tuple) or len(words) != layers or not set(words) <= meaning.keys():
        raise MappingError(
            f"expected {' or '.join(meaning)} for each of {layers} layers, found {str(words)[:60]}"
        )
    return tuple(meaning[word] for word in words)


def leading_dense(config: Config) -> list[str]:
    """The kinds of layers where only the number of dense ones is told: the class has the rest sparse."""
    layers, dense = int(config["num_hidden_layers"]), config.get("first_k_dense_replace")
    dense = usual_dense(config) if dense is None else dense
    return ["dense" if layer < dense else "sparse" for layer in range(layers)]


def usual_dense(config: Config) -> int:
    return 3 if config.get("model_type") in ("deepseek_v32", "glm_moe_dsa") else 1


def dense_by_types(config: Config) -> int:
    """The number of leading dense layers where only the kinds are told."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return usual_dense(config)
    found = of_layers(kinds, KINDS, config)
    return found.index(1) if 1 in found else len(found)


def write_mlp_types(moe: Sequence[int], model: ModelArgs) -> list[str]:
    return ["sparse" if one else "dense" for one in moe]


def read_mlp_types(kinds: Any, config: Config) -> tuple[int, ...]:
    found = of_layers(leading_dense(config) if kinds is None else kinds, KINDS, config)
    told = config.get("is_moe_layer")  # of K-EXAONE's release; no class reads it
    if told is not None and [int(one) for one in told] != list(found):
        raise MappingError(f"is_moe_layer says {str(told)[:60]}")
    return found


def write_nothing(value: Any, model: ModelArgs) -> None:
    """The class knows what stands here, and versions of it have other words for it."""
    return None


def read_sparse_layers(kinds: Any, config: Config) -> int:
    if kinds is not None:
        of_layers(kinds, dict.fromkeys(SPARSE_LAYERS, 1), config)
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
    found = of_layers(kinds, INDEXERS, config)
    if not found[0]:
        raise MappingError("the first layer has no choice before it to take over")
    return () if all(found) else found


def write_indexers(pattern: Sequence[int], model: ModelArgs) -> list[str]:
    return ["full" if one else "shared" for one in pattern or (1,) * model.num_layers]


def write_index_freq(pattern: Sequence[int], model: ModelArgs) -> int:
    return sharing(pattern)[0]


def write_index_offset(pattern: Sequence[int], model: ModelArgs) -> int:
    return sharing(pattern)[1]


def read_no_window(window: int | None, config: Config) -> None:
    """The class has a window from layer `max_window_layers` on, unless `layer_types` says which have one."""
    layers, kinds = int(config["num_hidden_layers"]), config.get("layer_types")
    windows = "sliding_attention" in kinds if kinds else int(config.get("max_window_layers", 62)) < layers
    if window is not None and windows:
        raise MappingError(f"{window} on some layers, which Megatron's model of this class does not have")


def read_sarvam_rope(scaling: Any, config: Config) -> tuple[Any, ...]:
    """Sarvam's release has a name of its own for YaRN."""
    if isinstance(scaling, Mapping) and "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
        scaling = {key: value for key, value in scaling.items() if key != "type"} | {"rope_type": "yarn"}
    return read_rope(scaling, config)


def read_several(topk: int, config: Config) -> int:
    if topk < 2:
        raise MappingError("this class gives a single expert the weight 1, Megatron that of its sigmoid")
    return topk


def write_several(topk: int, model: ModelArgs) -> int:
    return read_several(topk, {})


def expert_size(config: Config) -> int:
    return int(config["moe_intermediate_size"])


def exaone_types(kinds: Any, config: Config) -> tuple[int, ...]:
    """1 for layers with a window, of `layer_types` or of the pattern that the class makes them of."""
    if kinds is not None:
        return of_layers(kinds, WINDOWS, config)
    turn, layers = config.get("sliding_window_pattern", 4), int(config["num_hidden_layers"])
    if not isinstance(turn, int) or turn < 1:
        raise MappingError(f"sliding_window_pattern {turn!r} without layer_types")
    return tuple(int((layer + 1) % turn != 0) for layer in range(layers))


def read_exaone_types(kinds: Any, config: Config) -> tuple[int, ...]:
    return exaone_types(kinds, config)


def read_exaone_rope(kinds: Any, config: Config) -> tuple[int, ...]:
    """Layers without a window do not rotate."""
    return no_rope_layers([1 - one for one in exaone_types(kinds, config)], int(config["num_hidden_layers"]))


def read_window(window: int | None, config: Config) -> int:
    if window is None:
        raise MappingError("without a window this class rotates every layer")
    return window


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
    return read_rotary_dim(config.get("rotary_dim"), config)
