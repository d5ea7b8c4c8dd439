"""How config.json says which layers are attention, gated delta nets or Mamba, and which `ModelArgs` that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.field_values import Config
from ckpt_tools.megatron.huggingface.config.layer_values import in_words, layers_of, of_words
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.config.recurrent_args import hybrid_pattern

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


def write_linear(linear: Sequence[int], model: ModelArgs) -> list[str]:
    return in_words(linear or (0,) * model.num_layers, NETS)


def read_interval(turn: Any, config: Config) -> tuple[int, ...]:
    """The turn, where it counts: `layer_types` has the last word."""
    return read_linear(config.get("layer_types"), config)


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
    told = config.get("hybrid_override_pattern")
    if told is None:
        told = config.get("layers_block_type")
    if isinstance(told, list | tuple):
        strange = [kind for kind in told if not isinstance(kind, str) or kind not in BLOCKS]
        if strange:
            raise MappingError(f"{str(strange[0])[:60]!r} is not one of {', '.join(BLOCKS)}")
        return "".join(BLOCKS[kind] for kind in told)
    if not isinstance(told, str):
        raise MappingError(f"expected a letter for each layer, found {str(told)[:60]!r}")
    return hybrid_pattern(told)


def read_pattern(told: Any, config: Config) -> str:
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


def read_experts(count: int, config: Config) -> int | None:
    """The experts of a Nemotron-H, whose class has a number of them without any layer of experts too."""
    return count if "E" in pattern_of(config) else None


def write_pattern_length(pattern: str, model: ModelArgs) -> int:
    return len(pattern)


def read_mamba_layers(layers: int, config: Config) -> str:
    """The pattern of a model whose layers are all Mamba."""
    return "M" * layers


def write_expand(heads: int, model: ModelArgs) -> int:
    """`expand` of a Mamba-2, which its class compares with the size and number of its heads."""
    inner = heads * model.mamba_head_dim
    if inner % model.hidden_size:
        raise MappingError(
            f"{heads} heads of {model.mamba_head_dim} are not a multiple of hidden_size {model.hidden_size}, and the "
            "config.json of this architecture says them as one"
        )
    return inner // model.hidden_size


def read_expand(expand: int, config: Config) -> int:
    return expand * int(config["hidden_size"]) // int(config.get("head_dim", 64))


def read_parallel_layers(layers: int, config: Config) -> str:
    """The pattern of a Falcon-H1, whose layers have Mamba beside attention, and an MLP behind both."""
    return "P" * layers


def read_mamba_head(size: Any, config: Config) -> int:
    """The size of a head of a Falcon-H1: `auto` for an equal part of the inner size."""
    return inner_size(config) // int(config["mamba_n_heads"]) if size == "auto" else int(size)


def read_inner(size: Any, config: Config) -> int:
    """The heads of the inner size of a Falcon-H1, by the size of one."""
    inner, head = inner_size(config), read_mamba_head(config["mamba_d_head"], config)
    if not head or inner % head:
        raise MappingError(f"heads of {head} do not make {inner}")
    return inner // head


def write_inner(heads: int, model: ModelArgs) -> int:
    return heads * model.mamba_head_dim


def inner_size(config: Config) -> int:
    """`mamba_d_ssm`, or where that is null `mamba_expand` times the hidden size."""
    told = config["mamba_d_ssm"]
    return int(config.get("mamba_expand", 2) * config["hidden_size"]) if told is None else int(told)
