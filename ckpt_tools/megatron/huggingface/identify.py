"""Which family a model belongs to, from a reference config or from the names of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.huggingface.families import FAMILIES, Families
from ckpt_tools.megatron.huggingface.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.rules import Family
from ckpt_tools.megatron.huggingface.towers import WRAPPERS

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
ARCHITECTURES_WITHOUT_RULES = {
    "vision_model.": "a vision tower",
}
DENSE = ".mlp.linear_fc1.weight"
NORM_OVER_HEADS = "queries and keys are normalized over all heads at once"
NORM_AFTER_ROTATION = "queries and keys are normalized after they are rotated, not before"
NORMS_WITHOUT_WEIGHT = "norms have no weights"
NORMS_AROUND = "a layer has norms behind its attention and its MLP too"
BESIDE = "attention and MLP of a layer stand beside each other, not one after the other"
ALIBI = "positions are told by slopes added to attention (ALiBi)"
FROM_TWO = "positions are counted from 2 on"
BY_POSITION = "queries are scaled by their position"
CHUNKS = "attention sees chunks of tokens"
CAPPED = "attention logits are capped; Bridge has such layers for Gemma 2 only"
PER_LAYER = "layers have embeddings of their own"
VALUE_NORM = "values are normalized, and layers with a window have heads of another size than the others"
NORMS_BEHIND = f"{NORM_OVER_HEADS}, and a layer has norms only behind its attention and its MLP"
HEADS_GATED = "heads are gated"
SCALED = "embeddings, residuals, attention and logits have scales of their own"
MAMBA_1 = "its layers are Mamba-1, Megatron's are Mamba-2"
WITHOUT_MODULES = {  # of megatron-core 0.16.1, by model_type
    "olmo2": NORMS_BEHIND,
    "olmo3": NORMS_BEHIND,
    "flex_olmo": NORMS_BEHIND,
    "granite": SCALED,
    "granite_swa": SCALED,
    "granitemoe": SCALED,
    "hyperclovax": SCALED,
    "minicpm": SCALED,
    "minicpm3": SCALED,
    "olmo": NORMS_WITHOUT_WEIGHT,
    "nanochat": NORMS_WITHOUT_WEIGHT,
    "exaone4": "a layer has norms only behind its attention and its MLP",
    "openai-gpt": "a layer has norms only behind its attention and its MLP",
    "glm4": NORMS_AROUND,
    "hunyuan_v1_dense": NORM_AFTER_ROTATION,
    "hunyuan_v1_moe": NORM_AFTER_ROTATION,
    "phi": BESIDE,
    "gptj": BESIDE,
    "codegen": BESIDE,
    "cohere": BESIDE,
    "cohere2": BESIDE,
    "falcon": f"{BESIDE}, or {ALIBI}",
    "bloom": ALIBI,
    "mpt": ALIBI,
    "opt": FROM_TWO,
    "biogpt": FROM_TWO,
    "gpt_neo": "attention is not scaled, and only one of its linears has a bias",
    "apertus": "the activation is xIELU, with parameters of its own",
    "bitnet": "attention and MLP have a norm inside",
    "diffllama": "attention is the difference of two",
    "doge": "attention has a mask that is computed from values",
    "llama4": CHUNKS,
    "llama4_text": CHUNKS,
    "ministral3": BY_POSITION,
    "nemotron-nas": "layers have shapes of their own",
    "vaultgemma": CAPPED,
    "gemma3n": PER_LAYER,
    "gemma3n_text": PER_LAYER,
    "gemma4": VALUE_NORM,
    "gemma4_text": VALUE_NORM,
    "granitemoeshared": SCALED,
    "granitemoehybrid": SCALED,
    "granitemoe_swa": SCALED,
    "afmoe": f"{HEADS_GATED}, and a layer has norms behind its attention and its MLP",
    "bailing_hybrid": "layers have linear attention of another kind",
    "deepseek_v4": "keys are compressed before queries see them",
    "glm5_next": "layers have linear attention of another kind",
    "kimi_linear": "layers have Kimi delta attention",
    "jetmoe": "queries have experts of their own",
    "laguna": HEADS_GATED,
    "lfm2_moe": "layers are short convolutions",
    "longcat_flash": "a layer has two attentions, and some experts are no more than their input",
    "mimo_v2_flash": "values have heads of another size than keys, and are scaled",
    "minimax": "layers have lightning attention",
    "phimoe": "experts are chosen and weighed by sparse mixing",
    "step3p5": HEADS_GATED,
    "step3p7": HEADS_GATED,
    "mamba": MAMBA_1,
    "falcon_mamba": MAMBA_1,
    "jamba": MAMBA_1,
    "zamba2": "one block of attention is shared by many layers",
    "lfm2": "layers are short convolutions with gates",
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
    have the same parameters. Where only one of the `families` is possible, it is that.

    Raises:
        MappingError: no family has such parameters, or config.json names one without rules.
    """
    if config is not None:
        return family_of_config(config, families)
    if len(families) == 1:
        return next(iter(families.values()))
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
            if family.name == "mistral" and family is FAMILIES["mistral"] and _has_kinds_of_layers(config):
                return FAMILIES[
                    "ministral"
                ]  # as transformers 5 has it: Mistral's own class does not look at them
            return family
    if isinstance(kind, str) and kind in WITHOUT_MODULES:
        raise MappingError(
            f"config.json has model_type {kind!r}, which Megatron core has no modules for: {WITHOUT_MODULES[kind]}. "
            "Where a Megatron of your own has them, a rule file can say so (--rules)"
        )
    if kind in WRAPPERS:
        raise MappingError(
            f"config.json has model_type {kind!r}, a vision-language model; its language model alone is converted, "
            "by import-hf and export-hf with --tower language"
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


def _has_kinds_of_layers(config: Mapping[str, Any]) -> bool:
    """Whether a Mistral says anything of its layers but that all have its window, or that none has one."""
    kinds = config.get("layer_types")
    usual = "sliding_attention" if config.get("sliding_window", True) else "full_attention"
    return bool(kinds) and (not isinstance(kinds, list) or any(kind != usual for kind in kinds))


def _by_kinds(kinds: set[str], model: ModelArgs | None) -> str:
    """A family's name by what only its models have (order matters: the most telling parameters first)."""

    def has(part: str) -> bool:
        return any(part in kind for kind in kinds)

    qk_norm = has(".q_layernorm.")
    gemma = model is not None and model.activation == "geglu"
    wide = model is not None and model.num_attention_heads * model.kv_channels != model.hidden_size
    mistral = model is not None and model.sliding_window is not None
    hybrid = model is not None and 0 in model.sliding_layers
    relu2 = model is not None and model.activation == "squared_relu"
    partial = model is not None and model.rotary_percent < 1
    shared_keys = model is not None and model.num_query_groups == 1 < model.num_attention_heads
    interleaved = model is not None and bool(model.dsa_indexer_rope_interleaved)
    gated = has(".self_attention.in_proj.") or (model is not None and model.attention_output_gate)
    known = (
        (has("decoder.final_norm."), "nemotron_h" if has(".self_attention.") or has(".mlp.") else "mamba2"),
        (gated, "qwen3_next" if has(".experts.experts.") else "qwen3_5"),
        (has(".core_attention.indexer."), "glm_moe_dsa" if interleaved else "deepseek_v32"),
        (has(".linear_kv_down_proj.") and not has(".experts.experts."), "youtu"),
        (has(".linear_kv_down_proj."), "deepseek_v3" if has(".router.expert_bias") else "deepseek_v2"),
        (
            has(".router.expert_bias") and qk_norm and not has(".shared_experts.") and not has(DENSE),
            "minimax_m2",
        ),
        (has(".router.expert_bias"), "glm4_moe"),
        (has(".softmax_offset"), "gpt_oss"),
        (has(".linear_proj.post_layernorm."), "gemma3" if qk_norm else "gemma2"),
        (has("embedding.position_embeddings."), "gpt_bigcode" if shared_keys else "gpt2"),
        (has(".shared_experts.gate_weight"), "qwen2_moe"),
        (has(".experts.experts."), "qwen3_moe" if qk_norm else "mixtral"),
        (has("decoder.final_layernorm.bias"), _with_layer_norm(model)),
        (relu2, "arcee"),
        (qk_norm, "qwen3"),
        (
            has(".linear_qkv.bias") and not has(".linear_proj.bias"),
            "glm" if partial else "seed_oss" if wide else "qwen2",
        ),
        (gemma, "gemma"),
        (mistral, "ministral" if hybrid else "mistral"),
    )
    return next((name for holds, name in known if holds), "llama")


def _with_layer_norm(model: ModelArgs | None) -> str:
    """The family of a dense model with LayerNorm and rotary embedding, by what it computes."""
    if model is None or (not model.gated and model.activation != "squared_relu"):
        return "starcoder2" if model is not None and model.rotary_percent == 1 else "gpt_neox"
    if model.gated:
        return "stablelm"
    if model.qk_layernorm:
        return "persimmon"
    return "nemotron" if model.zero_centered_gamma or model.rotary_percent < 1 else "jais2"
