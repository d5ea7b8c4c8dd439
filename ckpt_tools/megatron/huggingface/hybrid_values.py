"""How config.json says which layers are attention, gated delta nets or Mamba, and which `ModelArgs` that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.model_args import ModelArgs

Config: TypeAlias = Mapping[str, Any]
KINDS = {"linear_attention": 1, "full_attention": 0}
TURN = 4  # layers of which the last one is attention, where config.json does not say it


def layers_in_turns(config: Config) -> list[str]:
    """`layer_types` of a config.json that has none: every n-th layer is attention (`full_attention_interval`)."""
    turn = config.get("full_attention_interval") or TURN
    if not isinstance(turn, int) or turn < 1:
        raise MappingError(f"full_attention_interval is {str(turn)[:60]!r}, expected a number of layers")
    return [
        "linear_attention" if (layer + 1) % turn else "full_attention"
        for layer in range(int(config["num_hidden_layers"]))
    ]


def read_linear(types: Sequence[str] | None, config: Config) -> tuple[int, ...]:
    kinds = layers_in_turns(config) if types is None else types
    layers = int(config["num_hidden_layers"])
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or any(one not in KINDS for one in kinds):
        raise MappingError(
            f"expected {' or '.join(KINDS)} for each of {layers} layers, found {str(kinds)[:60]}"
        )
    found = tuple(KINDS[one] for one in kinds)
    return found if any(found) else ()


def write_linear(linear: Sequence[int], model: ModelArgs) -> list[str]:
    return [
        "linear_attention" if one else "full_attention" for one in linear or (0,) * model.num_layers
    ]


def read_interval(turn: Any, config: Config) -> tuple[int, ...]:
    """The turn, where it counts: `layer_types` has the last word."""
    return read_linear(config.get("layer_types"), config)


def write_interval(linear: Sequence[int], model: ModelArgs) -> int | None:
    """The length of a turn, if the layers are in turns."""
    first = next((layer for layer, one in enumerate(linear) if not one), len(linear))
    turns = tuple(int((layer + 1) % (first + 1) != 0) for layer in range(len(linear)))
    return first + 1 if turns == tuple(linear) and linear else None


def read_net_size(size: int, config: Config) -> int:
    """A size of gated delta nets; Megatron has none where no layer is one."""
    return size if read_interval(None, config) else 0
