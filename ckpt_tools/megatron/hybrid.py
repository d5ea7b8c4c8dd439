"""HybridModel (and MambaModel): attention, MLP and Mamba are layers of their own, in the order of a pattern.

Its layers come from `hybrid_stack_spec` and `mamba_stack_spec`, which use Transformer Engine's modules whatever
`--transformer-impl` says (megatron/core/models/{hybrid,mamba}): norms are fused into the projections after them. Its
last norm is `final_norm`, where a GPT model has `final_layernorm`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.keys import DECODER_LAYERS, decoder_layer

T = TypeVar("T")

_FINAL_NORM = re.compile(r"^(?:.*\.)?decoder\.final_norm\.(?:weight|bias)$")
_EXPERTS = ("mlp.router.", "mlp.experts.")
_KINDS = {"self_attention": "*", "mlp": "-", "mixer": "M", "mamba_mixer": "P"}
_NAMED_BY = ("is_hybrid_model", "hybrid_layer_pattern", "hybrid_override_pattern", "hybrid_attention_ratio",
             "hybrid_mlp_ratio")  # fmt: skip


def says_hybrid(settings: Mapping[str, Any]) -> bool:
    spec = str(settings.get("spec") or "")
    return any(map(settings.get, _NAMED_BY)) or "hybrid" in spec or "mamba" in spec


def is_hybrid(names: Iterable[str]) -> bool:
    return any(map(_FINAL_NORM.match, names))


def as_gpt(
    parameters: Mapping[str, T], settings: Mapping[str, Any]
) -> tuple[dict[str, T], dict[str, Any], str]:
    """A HybridModel of attention and MLP in turn as the GPT model it computes the same as, and a note on it.

    A layer of attention without MLP and one of MLP without attention, one after the other, are a transformer layer.
    A model of other layers stays unchanged, and its settings name the layers that its weights have.
    """
    pattern = _pattern(parameters)
    declared = settings.get("hybrid_layer_pattern") or settings.get("hybrid_override_pattern")
    if declared and re.sub(r"[|\s]", "", str(declared)).partition("/")[0] != pattern:
        raise MappingError(f"the args say hybrid pattern {declared!r}, the weights have layers {pattern!r}")
    layers = len(pattern) // 2
    unset = dict.fromkeys(_NAMED_BY)
    if pattern.replace("E", "-") != "*-" * layers:
        own_settings = {**settings, **unset, "hybrid_override_pattern": pattern, "num_layers": len(pattern)}
        return dict(parameters), own_settings, f"the checkpoint is a HybridModel of layers {pattern!r}"
    renamed = {gpt_name(name): value for name, value in parameters.items()}
    note = f"a HybridModel of {len(pattern)} layers {pattern!r} is exported as {layers} transformer layers"
    return renamed, {**settings, **unset, "spec": None, "num_layers": layers}, note


def _pattern(names: Iterable[str]) -> str:
    kinds: dict[int, set[str]] = {}
    for name in names:
        if layer := decoder_layer(name):
            number, leaf = layer
            module = leaf.partition(".")[0]
            kinds.setdefault(number, set()).update(
                "E" if leaf.startswith(_EXPERTS) else _KINDS.get(module, "")
            )
    # the rest of a layer of experts looks like an MLP, and a Falcon-H1's layer has attention and an MLP next to Mamba
    whole = {"P": set("*-"), "E": set("-")}
    of_layer = {
        number: kind - next((rest for one, rest in whole.items() if one in kind), set())
        for number, kind in kinds.items()
    }
    mixed = [number for number, kind in of_layer.items() if len(kind) != 1]
    if mixed:
        raise MappingError(
            f"decoder.layers.{mixed[0]}: a layer of a HybridModel is attention, an MLP, experts or Mamba, this one "
            f"holds {sorted(of_layer[mixed[0]])}"
        )
    return "".join(next(iter(of_layer[number])) for number in sorted(of_layer))


def gpt_name(name: str) -> str:
    """The name that a parameter of a HybridModel of attention and MLP in turn has in the GPT model."""
    if layer := decoder_layer(name):
        number, leaf = layer
        return f"{DECODER_LAYERS}{number // 2}.{leaf}"
    return name.replace("decoder.final_norm.", "decoder.final_layernorm.")
