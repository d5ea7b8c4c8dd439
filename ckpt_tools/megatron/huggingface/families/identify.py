"""Which family a model belongs to, from a reference config or from the names of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.families.families import FAMILIES, Families
from ckpt_tools.megatron.huggingface.families.file_places import parse_rule_source, perhaps
from ckpt_tools.megatron.huggingface.families.told_by import told_by
from ckpt_tools.megatron.huggingface.mapping.rules import Family
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
    """The family of a config.json."""
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
