"""The settings of a vision-language model that no tensor's shape tells: what a run records of them, and config.json.

An import records the whole config.json as the argument `hf_config`, which Megatron-Bridge's provider of Mistral 3 has
too. Its other providers have `vision_config`, and the ids of tokens beside it. In a run_config.yaml these are what a
configuration of transformers is made of again: `{_target_: <class>.from_dict, config_dict: {...}}`.

Compared are the fields that the class has a value for, as the model's file names them (`vision`, `whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.huggingface.config import equal_values
from ckpt_tools.megatron.huggingface.ledger import config_fields_of, is_unset, short
from ckpt_tools.megatron.huggingface.read_args import flat_args
from ckpt_tools.megatron.huggingface.towers import QUANTIZED, TEXT, mrope_section
from ckpt_tools.megatron.huggingface.vision_language import VISION, VisionLanguage

RECORD = "hf_config"
_PLAIN_ROPES = ("default", "axial")  # two words of transformers for the one rotation of patches
# Of vision_config, beside what is irrelevant everywhere: older spellings, and what follows from other fields.
_UNREAD = frozenset(("in_chans", "spatial_patch_size", "head_dim", "rope_parameters", "tie_word_embeddings"))


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run records: fields of `vision_config`, and of config.json itself; None where it has nothing of them.

    `is_whole`: of config.json there is nothing else.
    """

    vision: Mapping[str, Any] | None
    whole: Mapping[str, Any] | None
    is_whole: bool = False


class Difference(NamedTuple):
    """A field that a run and config.json have differently; None is what one of them does not say.

    `is_known`: the class has a value for it, so it changes what the model computes.
    """

    name: str
    ours: Any
    theirs: Any
    is_known: bool


def record_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The argument that records a config.json; without how its weights were quantized, which the run's are not."""
    return {RECORD: {name: value for name, value in config.items() if name != QUANTIZED}}


def recorded_config(settings: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The whole config.json that a run records, if it does."""
    return _configuration(flat_args(settings or {}).get(RECORD))


def recorded_settings(kind: VisionLanguage, settings: Mapping[str, Any] | None) -> Recorded:
    """What a run's settings record of the modules beside the language model."""
    config = recorded_config(settings)
    if config is not None:
        return Recorded(_configuration(config.get(VISION)), config, is_whole=True)
    args = flat_args(settings or {})
    names = {name: kind.also.get(name, name) for name in kind.given["whole"]}
    whole = {name: args[own] for name, own in names.items() if args.get(own) is not None}
    return Recorded(_configuration(args.get(VISION)), whole or None)


def changed_record(
    settings: Mapping[str, Any], part: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """The settings that record a config.json, with changes to the fields of `text_config` or `vision_config`."""
    changed = {}
    for name in (RECORD, part):
        fields = _configuration(settings.get(name))
        if fields is None:
            continue
        inside = fields.get(part) if name == RECORD else None
        new = {part: {**inside, **change(inside)}} if isinstance(inside, Mapping) else change(fields)
        own = settings[name]
        changed[name] = own | ({"config_dict": {**fields, **new}} if "config_dict" in own else new)
    return changed


def compare_towers(
    kind: VisionLanguage, settings: Mapping[str, Any] | None, config: Mapping[str, Any]
) -> tuple[str, ...]:
    """What is to be said of settings that a run does not record, or that nothing is known about.

    Args:
        settings: the run's arguments, or the `model` section of its run_config.yaml.
        config: config.json of the whole model.

    Raises:
        MappingError: a field that changes what the model computes is another one in the run; all are named. Or
            config.json says nothing of the tower.
    """
    if not isinstance(config.get(VISION), Mapping):
        raise MappingError(
            f"the reference config has no {VISION}, which is {short(config.get(VISION))} there"
        )
    ours, theirs = recorded_settings(kind, settings), Recorded(config.get(VISION), config, is_whole=True)
    if ours.vision is None and ours.whole is None:
        return (
            "the settings of other parts than the language model are those of config.json: the checkpoint has none",
        )
    problems, unknown, missing = [], [], []
    for name, a, b, is_known in _differences(kind, ours, theirs):
        both = f"the checkpoint has {short(a)}, the reference config {short(b)}"
        if is_known and a is None:
            missing.append(name)
        elif is_known:
            problems.append(f"{name}: {both}")
        elif not (is_unset(a) and is_unset(b)):
            unknown.append(f"{name} ({both})")
    if problems:
        raise MappingError(
            "the reference config contradicts the checkpoint:\n" + list_problems(problems), problems
        )
    notes = (
        (missing, "not recorded in the checkpoint, and as config.json has them"),
        (unknown, "not known to this version, and taken for irrelevant"),
    )
    return tuple(f"{why}: {', '.join(names)}" for names, why in notes if names)


def unknown_fields(kind: VisionLanguage, config: Mapping[str, Any]) -> tuple[str, ...]:
    """A note on fields of vision_config that nothing is known about, as an import says of the language model's."""
    vision = _in_one_form(config[VISION], {})
    names = sorted(name for name in vision if name not in kind.given["vision"] and not is_irrelevant(name))
    said = [f"{VISION}.{name}={short(vision[name])}" for name in names if not is_unset(vision[name])]
    return (f"not known to this version, and taken for irrelevant: {', '.join(said)}",) if said else ()


def _differences(kind: VisionLanguage, ours: Recorded, theirs: Recorded) -> Iterator[Difference]:
    """Every field that differs."""
    given = kind.given["vision"]
    if ours.vision is None:
        yield Difference(VISION, None, theirs.vision, True)
    else:
        a, b = (_in_one_form(side.vision or {}, given) for side in (ours, theirs))
        yield from (
            Difference(f"{VISION}.{name}", one, other, name in given) for name, one, other in _unequal(a, b)
        )
    given, inside = kind.given["whole"], _of_language(kind, ours, theirs)
    a = _respelled(kind, ours.whole or {}, given if ours.is_whole else {})
    b = _respelled(kind, theirs.whole or {}, given)
    for name, one, other in _unequal(a, b):
        if name in given or (ours.is_whole and name not in inside):
            yield Difference(name, one, other, name in given)
    section, wanted = (mrope_section(side.whole or {}) if ours.is_whole else None for side in (ours, theirs))
    if section and wanted and not equal_values(section, wanted):
        yield Difference("mrope_section", section, wanted, True)


def _unequal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(name), theirs.get(name)
        if not is_irrelevant(name) and not equal_values(a, b):
            yield name, a, b


def _of_language(kind: VisionLanguage, *sides: Recorded) -> set[str]:
    """Names in config.json that say nothing of other modules: its parts, and the language model's fields."""
    found = {TEXT, VISION}
    for whole in (side.whole or {} for side in sides):
        text = whole.get(TEXT)
        if isinstance(text, Mapping):
            found |= text.keys()
        elif kind.flat:
            found |= whole.keys()
    return found


def is_irrelevant(name: str) -> bool:
    """Whether a field of vision_config, or of config.json itself, has no part in what the model computes."""
    return name in _UNREAD or name in config_fields_of("").irrelevant


def _in_one_form(vision: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A vision_config with the values of its class, and its rotary base where transformers 4 has it."""
    found = {**given, **vision}
    rope = vision.get("rope_parameters")
    if isinstance(rope, Mapping):
        found |= {"rope_theta": rope["rope_theta"]} if rope.get("rope_theta") is not None else {}
        if rope.get("rope_type", "default") not in _PLAIN_ROPES:
            found["rope_type"] = rope["rope_type"]
    return found


def _respelled(kind: VisionLanguage, whole: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of config.json under the names of its class, with the class's values for those that are not there."""
    names = {also: name for name, also in kind.also.items()}
    return {**given, **{names.get(name, name): value for name, value in whole.items()}}


def _configuration(value: Any) -> Mapping[str, Any] | None:
    """A configuration, plain or as Bridge writes one of transformers."""
    if not isinstance(value, Mapping):
        return None
    inside = value.get("config_dict")
    if isinstance(inside, Mapping):
        return inside
    return {name: one for name, one in value.items() if name not in ("_target_", "_call_", "_partial_")}
