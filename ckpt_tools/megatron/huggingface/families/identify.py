"""Which family a model belongs to, from a reference config or from the names of its parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.huggingface.config.ledger import account_for_args, uncarried
from ckpt_tools.megatron.huggingface.config.megatron_args import with_own_settings
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.families.families import FAMILIES, Families
from ckpt_tools.megatron.huggingface.families.file_places import parse_rule_source, perhaps
from ckpt_tools.megatron.huggingface.mapping.checks import Spec, not_of_family, spellings, with_vocabulary
from ckpt_tools.megatron.huggingface.mapping.rules import Family, expand
from ckpt_tools.megatron.huggingface.vision.vision_language import vision_language_types

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
REFUSED = Path(__file__).with_name("refused.yaml")
ARCHITECTURES_WITHOUT_RULES = {
    "vision_model.": "a vision tower",
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
    return families[told_by(kinds, model)]


def family_of_config(config: Mapping[str, Any], families: Mapping[str, Family] = FAMILIES) -> Family:
    kind = config.get("model_type")
    near = families.that_may_be(str(kind)) if isinstance(families, Families) else families
    for family in map(families.__getitem__, near):
        if kind == (family.model_type or family.name) or kind in family.also_types:
            if family.name == "mistral" and family is FAMILIES["mistral"] and _has_kinds_of_layers(config):
                return FAMILIES[
                    "ministral"
                ]  # as transformers 5 has it: Mistral's own class does not look at them
            return family
    if reason := without_modules().get(str(kind)):
        raise MappingError(
            f"config.json has model_type {kind!r}, which Megatron core has no modules for: {reason}. "
            "Where a Megatron of your own has them, a rule file can say so (--rules)"
        )
    if kind in vision_language_types():
        raise MappingError(
            f"config.json has model_type {kind!r}, a vision-language model, which is more than what is stored: "
            "--tower language of export-hf puts a language model back into it"
        )
    text = config.get("text_config")
    inside = text.get("model_type") if isinstance(text, Mapping) else None
    if inside:
        raise MappingError(
            f"config.json has model_type {kind!r}, a model of several parts, which have no rules; its language model "
            f"is a {inside} (text_config): save that one as a separate model"
        )
    known = {kind for one in families.values() for kind in (one.model_type or one.name, *one.also_types)}
    raise MappingError(
        f"config.json has model_type {kind!r}, for which there are no rules{perhaps(kind, sorted(known), 5) or '.'} "
        f"The {len(known)} types that have some are on the page of families (formats/families.md); a rule file can "
        "add one (--rules)"
    )


@cache
def without_modules() -> dict[str, str]:
    """What Megatron core lacks, by model_type (refused.yaml)."""
    said = parse_rule_source(REFUSED.read_bytes(), REFUSED.name, ours=True).data
    return {kind: reason for reason, kinds in said.items() for kind in kinds}


def _has_kinds_of_layers(config: Mapping[str, Any]) -> bool:
    """Whether a Mistral says anything of its layers but that all have its window, or that none has one."""
    kinds = config.get("layer_types")
    usual = "sliding_attention" if config.get("sliding_window", True) else "full_attention"
    return bool(kinds) and (not isinstance(kinds, list) or any(kind != usual for kind in kinds))


PARTS = {  # of a parameter's name
    "hybrid": "decoder.final_norm.",
    "three in one": ".mamba_mixer.",
    "attention": ".self_attention.",
    "mlp": ".mlp.",
    "delta net": ".self_attention.in_proj.",
    "indexer": ".core_attention.indexer.",
    "latent attention": ".linear_kv_down_proj.",
    "experts": ".experts.experts.",
    "expert bias": ".router.expert_bias",
    "shared expert": ".shared_experts.",
    "shared gate": ".shared_experts.gate_weight",
    "dense layer": ".mlp.linear_fc1.weight",
    "qk norm": ".q_layernorm.",
    "sink": ".softmax_offset",
    "norm behind": ".linear_proj.post_layernorm.",
    "fused norm before": ".mlp.linear_fc1.layer_norm_weight",
    "norm before": ".pre_mlp_layernorm.",
    "norm bias": "decoder.final_layernorm.bias",
    "learned positions": "embedding.position_embeddings.",
    "qkv bias": ".linear_qkv.bias",
    "output bias": ".linear_proj.bias",
}
SETTINGS: dict[str, Callable[[ModelArgs], bool]] = {
    "gated attention": lambda model: model.attention_output_gate,
    "rotates neighbours": lambda model: bool(model.dsa_indexer_rope_interleaved),
    "one key head": lambda model: model.num_query_groups == 1 < model.num_attention_heads,
    "gated": lambda model: model.gated,
    "geglu": lambda model: model.activation == "geglu",
    "squared relu": lambda model: model.activation == "squared_relu",
    "normalizes q and k": lambda model: model.qk_layernorm,
    "norms around zero": lambda model: model.zero_centered_gamma,
    "rotates a part": lambda model: model.rotary_percent < 1,
    "rotates all": lambda model: model.rotary_percent == 1,
    "wide": lambda model: model.num_attention_heads * model.kv_channels != model.hidden_size,
    "window": lambda model: model.sliding_window is not None,
    "some see all": lambda model: 0 in model.sliding_layers,
}
# The first family with words that all hold is taken. The most specific come first; the last has no words.
FAMILIES_TOLD: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("falcon_h1", ("three in one",)),
    ("nemotron_h", ("hybrid", "attention")),
    ("nemotron_h", ("hybrid", "mlp")),
    ("mamba2", ("hybrid",)),
    ("qwen3_next", ("delta net", "experts")),
    ("qwen3_next", ("gated attention", "experts")),
    ("qwen3_5", ("delta net",)),
    ("qwen3_5", ("gated attention",)),
    ("glm_moe_dsa", ("indexer", "rotates neighbours")),
    ("deepseek_v32", ("indexer",)),
    ("youtu", ("latent attention", "no experts")),
    ("deepseek_v3", ("latent attention", "expert bias")),
    ("deepseek_v2", ("latent attention",)),
    ("minimax_m2", ("expert bias", "qk norm", "no shared expert", "no dense layer")),
    ("glm4_moe", ("expert bias",)),
    ("gpt_oss", ("sink",)),
    ("exaone4", ("norm behind", "no norm before", "no fused norm before")),
    ("gemma3", ("norm behind", "qk norm")),
    ("gemma2", ("norm behind",)),
    ("gpt_bigcode", ("learned positions", "one key head")),
    ("gpt2", ("learned positions",)),
    ("qwen2_moe", ("shared gate",)),
    ("qwen3_moe", ("experts", "qk norm")),
    ("mixtral", ("experts",)),
    ("stablelm", ("norm bias", "gated")),
    ("persimmon", ("norm bias", "squared relu", "normalizes q and k")),
    ("nemotron", ("norm bias", "squared relu", "norms around zero")),
    ("nemotron", ("norm bias", "squared relu", "rotates a part")),
    ("jais2", ("norm bias", "squared relu")),
    ("starcoder2", ("norm bias", "rotates all")),
    ("gpt_neox", ("norm bias",)),
    ("arcee", ("squared relu",)),
    ("qwen3", ("qk norm",)),
    ("glm", ("qkv bias", "no output bias", "rotates a part")),
    ("seed_oss", ("qkv bias", "no output bias", "wide")),
    ("qwen2", ("qkv bias", "no output bias")),
    ("gemma", ("geglu",)),
    ("ministral", ("window", "some see all")),
    ("mistral", ("window",)),
    ("llama", ()),
)


def told_by(names: set[str], model: ModelArgs | None) -> str:
    """The family's name. Without args, its parameters alone decide."""
    held = words_of(names, model)
    return next(family for family, words in FAMILIES_TOLD if all(holds(word, held) for word in words))


def words_of(names: set[str], model: ModelArgs | None) -> set[str]:
    parts = {word for word, part in PARTS.items() if any(part in name for name in names)}
    return parts | {word for word, said in SETTINGS.items() if model is not None and said(model)}


def holds(word: str, held: Set[str]) -> bool:
    """Whether a word is among those that hold, or is not where it begins with no."""
    plain = word.removeprefix("no ")
    return (plain in held) == (plain == word)


@contextmanager
def naming_look_alikes(
    asked: bool, parameters: Mapping[str, Spec], args: Mapping[str, Any] | None, model: ModelArgs | None
) -> Iterator[None]:
    """
    Raises:
        MappingError: that of the block; if `asked`, with the families that the model may be of instead.
    """
    try:
        yield
    except MappingError as error:
        if not asked or args is None or model is None:
            raise
        names = [
            family.model_type or family.name
            for family in FAMILIES.values()
            if _fits(family, parameters, args, with_own_settings(model, family.settings, args))
        ]
        if not names:
            raise
        raise MappingError(
            f"{error}\nIts parameters and settings are those of {' or '.join(names)}: --hf-config with the model's "
            "config.json says which it is",
            error.problems,
        ) from error


def _fits(family: Family, parameters: Mapping[str, Spec], args: Mapping[str, Any], model: ModelArgs) -> bool:
    """Whether a family has all parameters and settings, but for what only a reference tells."""
    try:
        model, _ = with_vocabulary(model, parameters, model.vocab_size)
        reference = {one.hf: None for one in family.fields if one.wins == "either"}
        problems = [*account_for_args(family, args).problems, *uncarried(family, model)]
        problems += not_of_family(family, model, reference)
        _, unused = spellings(expand(family, model), parameters, problems)
    except MappingError:
        return False
    return not problems and not unused
