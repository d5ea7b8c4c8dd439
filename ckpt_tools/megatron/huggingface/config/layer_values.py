"""What config.json says of each layer, in words or numbers: windows, rotation, and which layers have experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.field_values import Config
from ckpt_tools.megatron.huggingface.config.layer_patterns import no_rope_layers
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs

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


def write_layer_types(sliding: Sequence[int], model: ModelArgs) -> list[str]:
    return in_words(sliding or (0,) * model.num_layers, WINDOWS)


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


def write_rope_interval(without: Sequence[int], model: ModelArgs) -> int:
    """`no_rope_layers` says it all; this is the class's own."""
    return 4


def read_rope_interval(interval: int, config: Config) -> tuple[int, ...]:
    return read_rotated(config.get("no_rope_layers"), config)


def write_dense(moe: Sequence[int], model: ModelArgs) -> list[int]:
    return [layer for layer, one in enumerate(moe) if not one]


def read_dense(dense: Sequence[int], config: Config) -> tuple[int, ...]:
    step = config.get("decoder_sparse_step", 1)
    return layers_of(config, lambda layer: layer not in (dense or ()) and (layer + 1) % step == 0)


def write_step(moe: Sequence[int], model: ModelArgs) -> int:
    """`mlp_only_layers` says it all."""
    return 1


def read_step(step: int, config: Config) -> tuple[int, ...]:
    return read_dense(config.get("mlp_only_layers", ()), config)


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


def write_mlp_types(moe: Sequence[int], model: ModelArgs) -> list[str]:
    return in_words(moe, MLPS)


def read_mlp_types(types: Any, config: Config) -> tuple[int, ...]:
    found = of_words(leading_dense(config) if types is None else types, MLPS, config)
    told = config.get("is_moe_layer")  # of K-EXAONE's release; no class reads it
    if told is not None and [int(one) for one in told] != list(found):
        raise MappingError(f"is_moe_layer says {str(told)[:60]}")
    return found
