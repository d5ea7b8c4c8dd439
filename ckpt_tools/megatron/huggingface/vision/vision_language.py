"""Vision-language models as data: the language model inside, and rules for the modules next to it.

A file of `model_files` for each, by its model_type::

    family: mymodel_vl            # its model_type
    architecture: MyForConditionalGeneration
    language: mymodel_vl_text     # model_type of text_config, by which the family of the language model is known
    alone: mymodel                # the family that the language model is as a separate model
    modules: [visual]             # those next to the language model, as config.json's class has them
    spelling: model.language_model.   # before `layers.` in the released files
    flat: true                    # config.json may have no text_config, its fields next to those of the towers
    defaults: {hidden_size: 64}   # what the class of text_config takes for fields that the released files leave out
    vision: {depth: 2}            # the same of vision_config, `whole` of config.json itself: the fields named below
    names: {visual: [visual., model.visual.]}  # what `<visual>` in `hf` means: the released files' first
    core_names: {tower: [tower.model., tower.]}  # the same in `core`: Megatron-Bridge's first
    sizes: {ffn: intermediate_size, qkv: [3, hidden_size]}  # of vision_config, or `language.` or `whole.` of the
                                  # others: a field, a number, `A // B`, or the product of several
    layers: {l: depth}            # how often rules with {l} are repeated: a field that is a number or a list
    conditions: {head: vision_use_head}  # words for `when`: fields that are true
    rules:                        # those of a rule file (families.py), and whole modules of the same tensors
      - module: {core: visual., hf: <visual>}
        tensors: {'blocks.{l}.norm.weight': [ffn], 'blocks.{l}.proj': {weight: [ffn, ffn], bias: [ffn]}}
    like: mymodel2_vl             # copies what is not given here

Without rules no program is known that trains all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from ckpt_tools.errors import CkptError, MappingError, list_problems
from ckpt_tools.megatron.huggingface.config.model_args import MAX_LAYERS, MAX_SIZE
from ckpt_tools.megatron.huggingface.families.file_places import RuleSource, parse_rule_source
from ckpt_tools.megatron.huggingface.families.rule_items import Names, Words, read_rules
from ckpt_tools.megatron.huggingface.mapping.rules import SMALLEST, Pair, Rule, pairs_of

FOLDER = Path(__file__).parent / "model_files"
VISION = "vision_config"
Spellings: TypeAlias = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class VisionLanguage:
    """A vision-language model by its model_type; the fields are the words of its file."""

    name: str
    architecture: str
    language: str
    alone: str
    modules: tuple[str, ...]
    spelling: str
    flat: bool
    defaults: Mapping[str, Any]
    given: Mapping[str, Mapping[str, Any]]  # what classes take, of the parts `vision` and `whole`
    spelled: Spellings
    sizes: Mapping[str, Any]
    layers: Mapping[str, str]
    conditions: Mapping[str, str]
    rules: tuple[Rule, ...] = field(default=())


@cache
def vision_language_types() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@cache
def vision_language(model_type: str) -> VisionLanguage:
    source = _source(model_type)
    data = _whole(source)
    core, names = ({k: tuple(v) for k, v in data.get(key, {}).items()} for key in ("core_names", "names"))
    top = source.top
    words = Words(
        Names({name: spelled[0] for name, spelled in (core | names).items()}),
        tuple(data.get("sizes", {})),
        tuple(data.get("conditions", {})),
        frozenset(data.get("layers", {})),
    )
    rules = read_rules(data.get("rules", []), words, top / "rules")
    if top.problems:
        raise CkptError(f"{FOLDER / model_type}.yaml:\n{list_problems(top.problems)}", top.problems)
    return VisionLanguage(
        model_type,
        data["architecture"],
        data["language"],
        data["alone"],
        tuple(data["modules"]),
        data.get("spelling", "model."),
        data.get("flat", False),
        data.get("defaults", {}),
        {part: data.get(part, {}) for part in ("vision", "whole")},
        tuple(names.values()),
        data.get("sizes", {}),
        data.get("layers", {}),
        data.get("conditions", {}),
        tuple(
            replace(
                rule,
                also=tuple(
                    other + rule.core.removeprefix(first)
                    for first, *others in core.values()
                    if rule.core.startswith(first)
                    for other in others
                ),
            )
            for rule in rules
        ),
    )


def _source(model_type: str) -> RuleSource:
    path = FOLDER / f"{model_type}.yaml"
    return parse_rule_source(path.read_bytes(), path.name, ours=True)


def _whole(source: RuleSource) -> dict[str, Any]:
    """What a file says, with what it copies from `like`."""
    data: dict[str, Any] = source.data
    return data if "like" not in data else _whole(_source(data["like"])) | data


def tower_pairs(
    kind: VisionLanguage, config: Mapping[str, Any], language: Mapping[str, Any], present: Iterable[str]
) -> list[Pair]:
    """All pairs of the modules next to the language model.

    Args:
        config: config.json of the whole model.
        language: that of the language model inside.
        present: the tensors of a directory, which tell how it spells them.
    """
    parts = {"vision": config.get(VISION), "whole": config, "language": language}
    if not isinstance(parts["vision"], Mapping):
        raise MappingError(f"config.json of a {kind.name} has no {VISION}")
    fields = Fields(
        {part: {**kind.given.get(part, {}), **said} for part, said in parts.items() if said is not None}
    )
    sizes = {name: fields.size(said) for name, said in kind.sizes.items()}
    counts = {letter: fields.count(said) for letter, said in kind.layers.items()}
    keys = tuple(present)
    spelled = {  # how the directory spells each name, by the released spelling
        group[0]: next((one for one in group if any(key.startswith(one) for key in keys)), group[0])
        for group in kind.spelled
    }

    def respelled(name: str) -> str:
        first = next((one for one in spelled if name.startswith(one)), "")
        return spelled.get(first, "") + name.removeprefix(first)

    found: list[Pair] = []
    for rule in kind.rules:
        if all(fields.value(kind.conditions[word]) for word in rule.when):
            own = replace(rule, hf=tuple(map(respelled, rule.hf)))
            letters = [letter for letter in counts if f"{{{letter}}}" in rule.core]
            numbers = [{letter: n} for letter in letters for n in range(counts[letter])] if letters else [{}]
            found += [pair for one in numbers for pair in pairs_of(own, one, SMALLEST, sizes, frozenset())]
    return found


class Fields:
    """The fields of config.json that sizes are made of: `hidden_size` of vision_config, `language.hidden_size`."""

    def __init__(self, parts: Mapping[str, Mapping[str, Any]]) -> None:
        self.parts = parts

    def value(self, name: str) -> Any:
        part, dot, own = name.rpartition(".")
        return self.parts[part if dot else "vision"].get(own)

    def size(self, said: Any) -> int:
        """A size in elements: of a field, a number, or the product of several."""
        return prod(self._factor(one) for one in (said if isinstance(said, list) else [said]))

    def count(self, name: str) -> int:
        """How many: the number that a field is, or the length of a list."""
        value = self.value(name)
        return _checked(name, len(value) if isinstance(value, list) else value, 0, MAX_LAYERS)

    def _factor(self, said: Any) -> int:
        if isinstance(said, int):
            return said
        first, _, divisor = said.partition(" // ")
        value = _checked(first, self.value(first), 1, MAX_SIZE)
        return value // _checked(divisor, self.value(divisor), 1, MAX_SIZE) if divisor else value


def _checked(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise MappingError(
            f"{VISION}: {name} is {str(value)[:60]!r}, expected a number from {least} to {most}"
        )
    return value
