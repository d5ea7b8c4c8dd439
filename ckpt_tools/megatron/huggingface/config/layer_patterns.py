"""Which layers have a window, or experts: the short forms that Megatron and Bridge have for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt_tools.errors import MappingError, list_problems

# Settings where a number n means a list: which layers, counted from 0, have a 1 in it.
TURNS: Mapping[str, Callable[[int, int], bool]] = {
    "moe_layer_freq": lambda layer, n: layer % n == 0,
    "linear_attention_freq": lambda layer, n: (layer + 1) % n != 0,
    "window_attn_skip_freq": lambda layer, n: (layer + 1) % n != 0,
    "no_rope_freq": lambda layer, n: (layer + 1) % n == 0,
}

KINDS = "M*-EP"  # Mamba, attention, MLP, experts: layers of their own in a HybridModel; or (Falcon-H1) three in one


def in_turns(name: str, n: int, layers: int) -> tuple[int, ...]:
    """What a number means, as the list that Megatron takes in its place."""
    return tuple(int(TURNS[name](layer, n)) for layer in range(layers))


def has_some(name: str, value: Any, layers: int) -> bool:
    """Whether any of the layers has a 1, by a number or a list; where neither is set nothing says that none has."""
    if isinstance(value, list | tuple):
        return any(value)
    return not isinstance(value, int) or value < 1 or any(in_turns(name, value, layers))


def window_of(window: object) -> int | None:
    """Keys a query sees, from Megatron's (left, right) or Bridge's scalar window; None for all."""
    if window is None:
        return None
    if isinstance(window, int):
        return window
    match window:
        case [int(left), 0]:
            return None if left < 0 else left + 1
    raise MappingError(f"window_size {window}: only a window to the left has a Hugging Face form")


def sliding_layers(skip: object, layers: int) -> tuple[int, ...]:
    """1 for every layer with a sliding window (Megatron transformer_config.py `window_attn_skip_freq`)."""
    if skip is None:
        return (1,) * layers
    if isinstance(skip, int):
        return in_turns("window_attn_skip_freq", skip, layers)
    return _pattern(skip, layers, "window_attn_skip_freq")


def windows_said_again(args: Mapping[str, Any]) -> set[str]:
    """Settings of Megatron-Bridge's K-EXAONE that repeat the window of each layer."""
    layers, window = args.get("num_layers"), window_of(args.get("window_size"))
    if not isinstance(layers, int) or not window:
        return set()
    having = sliding_layers(args.get("window_attn_skip_freq"), layers)
    modules = args.get("mtp_num_layers")
    inner = having[-1:] * (modules if isinstance(modules, int) and modules <= layers else 0)  # as the last is
    again: dict[str, list[Any]] = {}
    for prefix, those in (("", having), ("mtp_", inner)):
        again[f"{prefix}layer_types"] = ["sliding_attention" if one else "full_attention" for one in those]
        again[f"{prefix}sliding_windows"] = [window if one else 0 for one in those]
    return {name for name, same in again.items() if args.get(name) in (same, tuple(same))}


def sliding_turn(pattern: object) -> int | None:
    """Bridge's (local, global) layers in turns, as the number of layers of one turn."""
    match pattern:
        case None:
            return None
        case [int(local), 1]:
            return local + 1
    raise MappingError(f"interleaved_attn_pattern {pattern}: config.json has one global layer in each turn")


def no_rope_layers(freq: object, layers: int, *, even: bool = True) -> tuple[int, ...]:
    """1 for every layer without rotary embedding (Megatron transformer_config.py `no_rope_freq`); () for none.

    `even` demands, as Megatron does, that a number divides the layers.
    """
    match freq:
        case None | 0:
            return ()
        case int(turn) if turn > 0 and not (even and layers % turn):
            pattern = in_turns("no_rope_freq", turn, layers)
        case [*values] if len(values) == layers and all(value in (0, 1) for value in values):
            pattern = tuple(int(value == 1) for value in values)
        case _:
            raise MappingError(
                f"no_rope_freq is {repr(freq)[:60]}, expected 0 or 1 for each of {layers} layers, or a number that "
                "divides them"
            )
    return pattern if any(pattern) else ()


def moe_layers(freq: object, layers: int) -> tuple[int, ...]:
    """1 for every MoE layer (Megatron gpt_layer_specs.py `moe_layer_freq`)."""
    if isinstance(freq, int):
        return in_turns("moe_layer_freq", freq, layers)
    return _pattern(freq, layers, "moe_layer_freq")


def delta_net_layers(freq: object, layers: int) -> tuple[int, ...]:
    """1 for every layer that is a gated delta net (Megatron transformer_config.py `linear_attention_freq`)."""
    if freq is None:
        return ()
    if isinstance(freq, int) and freq > 0:
        return in_turns("linear_attention_freq", freq, layers)
    return _pattern(freq, layers, "linear_attention_freq")


def _pattern(values: object, layers: int, name: str) -> tuple[int, ...]:
    pattern = tuple(values) if isinstance(values, list | tuple) else ()
    problems = [f"{value!r} is not 0 or 1" for value in pattern if value not in (0, 1)]
    if len(pattern) != layers:
        problems.append(f"{values!r} does not name {layers} layers")
    if problems:
        raise MappingError(f"{name} in the checkpoint's args:\n" + list_problems(problems), problems)
    return tuple(int(value) for value in pattern)


def hybrid_pattern(said: object) -> str:
    """The kind of each layer of the decoder, from Megatron's pattern.

    Bars cut it for pipelines. What follows a slash is the pattern of a prediction layer.
    """
    pattern = "".join(str(said).partition("/")[0].replace("|", "").split())
    strange = sorted(set(pattern) - set(KINDS))
    if strange:
        raise MappingError(
            f"hybrid pattern {str(said)[:60]!r}: {', '.join(map(repr, strange))} is not one of {', '.join(KINDS)}"
        )
    return pattern


def indexer_layers(layers: int, freq: int, offset: int) -> tuple[int, ...]:
    """1 for every layer with an indexer, 0 for one that reuses the choice before it; () where all have one.

    Megatron's dsa.py `is_dsa_skip_topk_layer`, and transformers' `GlmMoeDsaConfig`, which counts layers from 0.
    """
    first = max(offset, 1)
    pattern = tuple(int(max(number - first, 0) % max(freq, 1) == 0) for number in range(1, layers + 1))
    return () if all(pattern) else pattern


def sharing(pattern: Sequence[int]) -> tuple[int, int]:
    """`dsa_indexer_topk_freq` and `dsa_indexer_skip_topk_offset` of a pattern."""
    if all(pattern):
        return 1, 0
    offset = list(pattern).index(0)
    behind = [layer for layer in range(offset, len(pattern)) if pattern[layer]]
    freq = (behind[0] if behind else len(pattern)) - offset + 1
    if not offset or indexer_layers(len(pattern), freq, offset) != tuple(pattern):
        raise MappingError(
            f"layers with an indexer are {list(pattern)}; in Megatron the first ones have one, and every n-th layer "
            "after them"
        )
    return freq, offset
