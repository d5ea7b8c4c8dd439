"""Do the settings of two checkpoints with the same tensors describe the same model?

Settings are compared where both checkpoints have them: versions of Megatron and transformers have other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckpt_tools.megatron.huggingface.config.config import in_v4_form
from ckpt_tools.megatron.huggingface.config.layer_patterns import TURNS, in_turns
from ckpt_tools.megatron.huggingface.config.ledger import (
    Change,
    arguments,
    config_fields_of,
    equal,
    is_neutral,
    short,
)
from ckpt_tools.megatron.huggingface.config.megatron_args import as_text, flat_args
from ckpt_tools.megatron.huggingface.families.families import FAMILIES, known_fields

# Settings that an export takes from the args, and without a part in the forward pass of the same tensors.
_NOT_COMPUTED = frozenset({
    "attention_dropout", "bf16", "expert_tensor_parallel_size", "fp16", "heterogeneous_layers_config_path",
    "hidden_dropout", "init_method_std", "max_position_embeddings", "moe_grouped_gemm", "padded_vocab_size",
    "params_dtype", "seq_length", "tokenizer_type", "vocab_size", "yaml_cfg",
})  # fmt: skip
_OF_GELU = frozenset({"bias_gelu_fusion", "bias_activation_fusion", "use_te_activation_func"})
_NO_SCALING = {"rope_type": "default"}
_OTHER_ACTIVATIONS = ("swiglu", "quick_geglu", "squared_relu")


class Difference(NamedTuple):
    """A setting with its two values; `is_model`: it changes the forward pass."""

    name: str
    values: tuple[Any, Any]
    is_model: bool

    def text(self, here: str, there: str) -> str:
        return f"{self.name} is {short(self.values[0])} in {here}, {short(self.values[1])} in {there}"


def args_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """Differences between Megatron's args, or the `model` sections of Megatron-Bridge."""
    ledger, sides = arguments(), (flat_args(one), flat_args(other))
    for name in sorted(sides[0].keys() & sides[1].keys() & {*ledger.carried, *ledger.changes}):
        values = sides[0][name], sides[1][name]
        if equal(*(_plain(name, side) for side in sides)):
            continue
        change = ledger.changes.get(name)
        if change and all(is_neutral(side[name], change, side) for side in sides):
            continue
        if name in _OF_GELU and not any(map(_has_gelu, sides)):
            continue
        rows = name == "expert_tensor_parallel_size" and any(
            s.get("moe_mlp_glu_interleave_size") for s in sides
        )
        yield Difference(name, values, rows or name not in _NOT_COMPUTED)


def _plain(name: str, settings: Mapping[str, Any]) -> Any:
    value, layers = settings[name], settings.get("num_layers")
    if name in TURNS and type(value) is int and value > 0 and isinstance(layers, int):
        return in_turns(name, value, layers)
    return value if isinstance(value, int | float | list | tuple | None) else as_text(value)


def _has_gelu(settings: Mapping[str, Any]) -> bool:
    if any(settings.get(name) for name in _OTHER_ACTIVATIONS):
        return False
    return "gelu" in as_text(settings.get("activation_func") or "gelu")


def config_differences(
    one: Mapping[str, Any], other: Mapping[str, Any], where: str = ""
) -> Iterator[Difference]:
    """Differences between two config.json."""
    kinds = one.get("model_type"), other.get("model_type")
    if kinds[0] != kinds[1]:
        yield Difference(f"{where}model_type", kinds, is_model=True)
        return
    sides = tuple(in_v4_form(side) for side in (one, other))
    names = FAMILIES.that_may_be(str(kinds[0]))
    fields = [f for name in names for f in FAMILIES[name].fields] or list(known_fields())
    changes: dict[str, Change] = dict(config_fields_of(names[0] if names else "").changes)
    of_model = {name for f in fields if f.arg not in _NOT_COMPUTED for name in (f.hf, f.also) if name}
    of_model |= {name for family in names for name in FAMILIES[family].fixed} | changes.keys()
    noted = {name for f in fields for name in (f.hf, f.also) if name} | {"architectures"}
    usual = {f.hf: f.default for f in fields if names and isinstance(f.default, bool | int | float | str)}
    sides = tuple(usual | side for side in sides)
    for name in sorted(sides[0].keys() & sides[1].keys()):
        values = sides[0][name], sides[1][name]
        if all(isinstance(value, Mapping) for value in values) and name.endswith("_config"):
            yield from config_differences(*values, f"{where}{name}.")
        elif name in of_model | noted and not equal(*(None if v == _NO_SCALING else v for v in values)):
            change = changes.get(name)
            if not (change and all(is_neutral(side[name], change, side) for side in sides)):
                yield Difference(f"{where}{name}", values, name in of_model)
