"""Which tensors the model of a config.json has: names and shapes, and what may lie beside them.

The family's rules tell them, of every architecture that has some; else the weights that lie beside the config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.mapping.checks import EMBEDDING, HEAD, Spec
from ckpt_tools.megatron.huggingface.mapping.rules import Family, expand
from ckpt_tools.model.views import Shape

Superfluous: TypeAlias = tuple[tuple[tuple[str, str], ...], list[str]]
"""Pairs of tensors to prove equal, and all tensors that carry nothing of their own."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a whole model has; shapes in elements.

    `types` are of tensors that have one type whatever the others have. `superfluous` tells of names that are not
    among `shapes` which may be there all the same. `head` is the one that a class of another task does not have.
    """

    shapes: Mapping[str, Shape]
    told_by: str
    superfluous: Callable[[Iterable[str]], Superfluous]
    types: Mapping[str, str] = field(default_factory=dict)
    head: str = ""


def expected_by_rules(
    config: Mapping[str, Any],
    present: Collection[str],
    families: Mapping[str, Family] = FAMILIES,
    may_be_bare: bool = False,
) -> Expected:
    """The tensors by the rules of the family; of spellings that a class has saved, the one that is `present`.

    With `may_be_bare` these are of the model inside of a class with a head, if its names are present.
    """
    family = family_of_config(config, families)
    model = read_config(family, config)
    model = replace(model, padded_vocab_size=model.true_vocab_size)
    prefix = bare_prefix(family, present) if may_be_bare else Prefix("")
    model = replace(model, mtp_num_layers=prediction_layers(family, model, present, prefix))
    shapes: dict[str, Shape] = {}
    types: dict[str, str] = {}
    for pair in expand(family, model, present):
        names = [prefix(name) for name in pair.hf]
        shapes |= {name: one.shape for name, one in zip(names, pair.tensors, strict=True)}
        types |= dict.fromkeys(names, pair.rule.dtype) if pair.rule.dtype else {}
    return Expected(
        shapes,
        "config.json",
        lambda extra: without_content(family, model, extra, prefix),
        types,
        tensor_of(family, HEAD),
    )


def expected_by_weights(tensors: Mapping[str, Spec], config: Mapping[str, Any]) -> Expected:
    """The tensors of a directory with weights of the same architecture."""
    shapes = {name: one.shape for name, one in tensors.items()}
    embeddings = [name for name in shapes if name.endswith("embed_tokens.weight")]
    tied = config.get("tie_word_embeddings") is True and len(embeddings) == 1

    def superfluous(extra: Iterable[str]) -> Superfluous:
        heads = [name for name in extra if tied and name == "lm_head.weight"]
        return tuple((embeddings[0], head) for head in heads), heads

    return Expected(shapes, "the weights beside config.json", superfluous)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Translates rule names for a directory saved from a bare model, whose names lack the first segment."""

    dropped: str

    def __call__(self, name: str) -> str:
        return name.removeprefix(self.dropped) if self.dropped else name


def bare_prefix(family: Family, tensors: Iterable[str]) -> Prefix:
    """What the names of a directory lack that was saved from the model inside of a class with a head."""
    rules = [rule for rule in family.rules if not rule.core.startswith("mtp.")]  # may stand beside the model
    names = {name for rule in rules for name in rule.hf} - {tensor_of(family, HEAD)}
    first = {name.split(".")[0] + "." for name in names}
    there = {name.split(".")[0] + "." for name in tensors}
    return Prefix("".join(first) if len(first) == 1 and not first & there else "")


def tensor_of(family: Family, core: str) -> str:
    """The tensor that is a parameter; a class without a head of its own may have stored one."""
    return next((rule.hf[0] for rule in family.rules if rule.core == core), "lm_head.weight")


def shared_head(
    config: Mapping[str, Any], tensors: Iterable[str], families: Mapping[str, Family] = FAMILIES
) -> tuple[str, str] | None:
    """The names of the embedding and of the head that is the same weight; None: the head is one of its own."""
    family = family_of_config(config, families)
    if not read_config(family, config).tied:
        return None
    return bare_prefix(family, tensors)(tensor_of(family, EMBEDDING)), tensor_of(family, HEAD)


def without_content(
    family: Family, model: ModelArgs, extra: Iterable[str], prefix: Prefix
) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Pairs to prove equal, and all extra tensors that carry nothing of their own."""
    embedding, head = prefix(tensor_of(family, EMBEDDING)), tensor_of(family, HEAD)
    same = {head: embedding} if model.tied else {}
    for m in range(model.mtp_num_layers):
        for core, name in family.copies:
            original = embedding if core == EMBEDDING or model.tied else head
            same[prefix(name.replace("{n}", str(model.num_layers + m)))] = original
    extra = sorted(extra)
    equal = tuple((same[name], name) for name in extra if name in same)
    ignored = re.compile("|".join(family.ignored) or "(?!)")
    return equal, [name for name in extra if name in same or ignored.fullmatch(prefix.dropped + name)]


def prediction_layers(family: Family, model: ModelArgs, tensors: Collection[str], prefix: Prefix) -> int:
    """How many prediction layers (MTP) there are: as many as config.json says, or one where it says nothing.

    None, if the directory has no tensor of them.
    """
    said = any(one.arg == "mtp_num_layers" for one in family.fields)
    asked = replace(model, mtp_num_layers=model.mtp_num_layers if said else 1)
    rules = tuple(rule for rule in family.rules if "{m}" in rule.core)
    names = (
        prefix(name) for pair in expand(replace(family, rules=rules), asked, tensors) for name in pair.hf
    )
    return asked.mtp_num_layers if any(name in tensors for name in names) else 0
