"""Which family a model belongs to, from a reference config or from the names of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.huggingface.families import FAMILIES, Families
from ckpt_tools.megatron.huggingface.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.rules import Family

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
ARCHITECTURES_WITHOUT_RULES = {
    "vision_model.": "a vision tower",
}
NORM_OVER_HEADS = "queries and keys are normalized over all heads at once"
NORMS_BEHIND = f"{NORM_OVER_HEADS}, and a layer has norms only behind its attention and its MLP"
SCALED = "embeddings, residuals, attention and logits have scales of their own"
MAMBA_1 = "its layers are Mamba-1, Megatron's are Mamba-2"
WITHOUT_MODULES = {  # of megatron-core 0.16.1, by model_type
    "olmo2": NORMS_BEHIND,
    "olmo3": NORMS_BEHIND,
    "flex_olmo": NORMS_BEHIND,
    "olmoe": NORM_OVER_HEADS,
    "minimax_m2": NORM_OVER_HEADS,
    "granite": SCALED,
    "granitemoe": SCALED,
    "mamba": MAMBA_1,
    "falcon_mamba": MAMBA_1,
    "jamba": MAMBA_1,
    "zamba2": "one block of attention is shared by many layers",
    "lfm2": "layers are short convolutions with gates",
    "granitemoehybrid": SCALED,
    "falcon_h1": "attention and Mamba stand side by side in one layer, and their parts have scales of their own",
    "ernie4_5_moe": "experts are chosen by a softmax with a bias, and Megatron has a bias with sigmoid only",
}


def detect_family(
    names: Iterable[str],
    model: ModelArgs | None = None,
    config: Mapping[str, Any] | None = None,
    families: Mapping[str, Family] = FAMILIES,
) -> Family:
    """The family; a config.json decides where there is one, otherwise the parameters do.

    `names` are Megatron parameters with any layer numbers. `model` tells Llama, Mistral and Gemma apart, which
    have the same parameters.

    Raises:
        MappingError: no family has such parameters, or config.json names one without rules.
    """
    if config is not None:
        return family_of_config(config, families)
    kinds = {NUMBER.sub("N", name) for name in names}
    unknown = [
        f"{what}: {name}"
        for part, what in ARCHITECTURES_WITHOUT_RULES.items()
        for name in sorted(kinds)
        if f".{part}" in f".{name}"
    ]
    if unknown:
        raise MappingError(
            "this architecture has no Hugging Face rules; a rule file can add them (--rules):\n"
            + list_problems(unknown),
            unknown,
        )
    return families[_by_kinds(kinds, model)]


def family_of_config(config: Mapping[str, Any], families: Mapping[str, Family] = FAMILIES) -> Family:
    """The family of a config.json.

    Raises:
        MappingError: its model_type has no rules.
    """
    kind = config.get("model_type")
    near = families.that_may_be(str(kind)) if isinstance(families, Families) else families
    for family in map(families.__getitem__, near):
        if kind == (family.model_type or family.name) or kind in family.also_types:
            return family
    if isinstance(kind, str) and kind in WITHOUT_MODULES:
        raise MappingError(
            f"config.json has model_type {kind!r}, which Megatron core has no modules for: {WITHOUT_MODULES[kind]}. "
            "Where a Megatron of your own has them, a rule file can say so (--rules)"
        )
    text = config.get("text_config")
    inside = text.get("model_type") if isinstance(text, Mapping) else None
    if inside:
        raise MappingError(
            f"config.json has model_type {kind!r}, a model of several parts, which have no rules; its language model "
            f"is a {inside} (text_config): save that one as a model of its own"
        )
    known = ", ".join(sorted(family.model_type or family.name for family in families.values()))
    raise MappingError(
        f"config.json has model_type {kind!r}, for which there are no rules; known are {known}. "
        "A rule file can add one (--rules)"
    )


def _by_kinds(kinds: set[str], model: ModelArgs | None) -> str:
    """A family's name by what only its models have (order matters: the most telling parameters first)."""

    def has(part: str) -> bool:
        return any(part in kind for kind in kinds)

    qk_norm = has(".q_layernorm.")
    gemma = model is not None and model.activation == "geglu"
    wide = model is not None and model.num_attention_heads * model.kv_channels != model.hidden_size
    mistral = model is not None and model.sliding_window is not None
    gated = has(".self_attention.in_proj.") or (model is not None and model.attention_output_gate)
    known = (
        (has("decoder.final_norm."), "nemotron_h" if has(".self_attention.") or has(".mlp.") else "mamba2"),
        (gated, "qwen3_next" if has(".experts.experts.") else "qwen3_5"),
        (has(".linear_kv_down_proj."), "deepseek_v3" if has(".router.expert_bias") else "deepseek_v2"),
        (has(".router.expert_bias"), "glm4_moe"),
        (has(".softmax_offset"), "gpt_oss"),
        (has(".linear_proj.post_layernorm."), "gemma3" if qk_norm else "gemma2"),
        (has("embedding.position_embeddings."), "gpt2"),
        (has(".shared_experts.gate_weight"), "qwen2_moe"),
        (has(".experts.experts."), "qwen3_moe" if qk_norm else "mixtral"),
        (qk_norm, "qwen3"),
        (has(".linear_qkv.bias") and not has(".linear_proj.bias"), "seed_oss" if wide else "qwen2"),
        (gemma, "gemma"),
        (mistral, "mistral"),
    )
    return next((name for holds, name in known if holds), "llama")
