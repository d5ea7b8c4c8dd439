"""What tells a family without a config.json: every line and every word of the table; and what is refused by name."""

from collections.abc import Sequence
from functools import cache

import pytest

from ckpt_tools.megatron.huggingface.config.megatron_args import read_model_args
from ckpt_tools.megatron.huggingface.families import identify as table
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.file_places import parse_rule_source, twice
from ckpt_tools.megatron.huggingface.families.identify import REFUSED, without_modules
from tests.megatron.huggingface.by_rules import BASE, directory, exported, imported, problems
from tests.megatron.huggingface.models import CONFIGS, LIKE, config_of, family_of

Line = tuple[str, tuple[str, ...]]


@cache
def words(variant: str) -> frozenset[str]:
    """Those that hold for a tiny model."""
    config = config_of(variant)
    found, megatron = imported(config, directory(config))
    return frozenset(table.words_of(set(megatron), read_model_args(found.args)))


# Models that none of the tiny ones is.
MADE: dict[frozenset[str], str] = {
    frozenset({"hybrid", "attention"}): "nemotron_h",
    frozenset({"hybrid", "mlp"}): "nemotron_h",
    frozenset({"delta net", "experts"}): "qwen3_next",
    frozenset({"gated attention", "experts"}): "qwen3_next",
    frozenset({"delta net", "dense layer"}): "qwen3_5",
    frozenset({"gated attention", "dense layer"}): "qwen3_5",
    frozenset({"rotates neighbours", "latent attention", "experts", "expert bias"}): "deepseek_v3",
    frozenset({"experts", "expert bias"}): "glm4_moe",
    frozenset({"experts", "expert bias", "qk norm", "shared expert"}): "glm4_moe",
    frozenset({"experts", "expert bias", "qk norm", "dense layer"}): "glm4_moe",
    frozenset({"norm behind", "norm before"}): "gemma2",
    frozenset({"one key head"}): "llama",
    frozenset({"squared relu", "normalizes q and k", "qk norm"}): "arcee",
    frozenset({"squared relu", "norms around zero", "rotates a part"}): "arcee",
    frozenset({"squared relu", "rotates a part"}): "arcee",
    frozenset({"norm bias", "normalizes q and k", "rotates a part"}): "gpt_neox",
    frozenset({"norm bias", "norms around zero", "rotates a part"}): "gpt_neox",
    frozenset({"norm bias", "squared relu", "norms around zero", "rotates all"}): "nemotron",
    frozenset({"qkv bias", "output bias", "rotates a part"}): "llama",
    frozenset({"some see all"}): "llama",
    frozenset(): "llama",
}


def told(lines: Sequence[Line]) -> list[str]:
    """The family of every model by these lines."""
    return [
        next((name for name, line in lines if all(table.holds(word, held) for word in line)), "")
        for held in (*map(words, CONFIGS), *MADE)
    ]


def without(lines: Sequence[Line], number: int, word: str | None) -> list[Line]:
    """The table without a line, or without a word of it."""
    name, line = lines[number]
    less = [] if word is None else [(name, tuple(one for one in line if one != word))]
    return [*lines[:number], *less, *lines[number + 1 :]]


def test_words_are_known():
    known = table.PARTS.keys() | table.SETTINGS.keys()
    said = {word.removeprefix("no ") for _, line in table.FAMILIES_TOLD for word in line}
    assert said == known and not table.PARTS.keys() & table.SETTINGS.keys()
    assert {name for name, _ in table.FAMILIES_TOLD} <= FAMILIES.keys()
    assert table.FAMILIES_TOLD[-1] == ("llama", ())


CHANGES = [(number, word) for number, (_, line) in enumerate(table.FAMILIES_TOLD) for word in (None, *line)]


def test_every_line_and_every_word_of_the_table_counts():
    right = told(table.FAMILIES_TOLD)
    assert right == [*(LIKE.get(variant, family_of(variant)) for variant in CONFIGS), *MADE.values()]
    idle = [
        (table.FAMILIES_TOLD[number], word)
        for number, word in CHANGES
        if told(without(table.FAMILIES_TOLD, number, word)) == right
    ]
    assert idle == []


@pytest.mark.parametrize(
    ("variant", "names"),
    [("smollm3", "smollm3"), ("exaone_moe", "exaone_moe"), ("phi3_partial", "phi3"), ("olmoe", "olmoe"),
     ("persimmon_plain", "gpt_neox or persimmon")],
)  # fmt: skip
def test_a_family_that_does_not_fit_names_those_that_do(variant, names):
    """Without config.json, one of several families with the same parameters is told; settings may say it is not."""
    config = config_of(variant)
    found, megatron = imported(config, directory(config))
    text = problems(lambda: exported(megatron, found.args))
    assert f"parameters and settings are those of {names}: --hf-config with the model's config.json" in text
    assert "--hf-config with" not in problems(lambda: exported(megatron, {**found.args, "use_mup": True}))
    assert "are those of" not in problems(
        lambda: exported(megatron, found.args, {**BASE, "model_type": "llama"})
    )


def test_what_is_refused_is_not_known():
    source = parse_rule_source(REFUSED.read_bytes(), REFUSED.name, ours=True)
    kinds = [kind for kinds in source.data.values() for kind in kinds]
    known = {
        kind for name, family in FAMILIES.items() for kind in (family.model_type or name, *family.also_types)
    }
    assert list(twice(source)) == [] and len(kinds) == len(set(kinds)) and not set(kinds) & known
    assert without_modules().keys() == set(kinds) and all(isinstance(kind, str) for kind in kinds)
