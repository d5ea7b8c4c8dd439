"""A vision-language model of Megatron-Bridge, which holds its towers side by side, and its Hugging Face tensors.

Parameters of the language model have `language_model.` before the names of a model of its own; those of the other
modules stand beside it, under names that the model's file has (vision_language.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.huggingface.config.megatron_args import as_text, flat_args
from ckpt_tools.megatron.huggingface.mapping.checks import EMBEDDING, Spec, Wanted, misfits, spellings
from ckpt_tools.megatron.huggingface.mapping.model_tensors import Prefix
from ckpt_tools.megatron.huggingface.mapping.rules import SMALLEST
from ckpt_tools.megatron.huggingface.mapping.targets import (
    Exported,
    Imported,
    export_pair,
    import_pair,
)
from ckpt_tools.megatron.huggingface.vision.towers import QUANTIZED, Tower, mrope_section, vision_language_of
from ckpt_tools.megatron.huggingface.vision.vision_language import VisionLanguage, tower_pairs

RECORD = "hf_config"


def record_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The argument that records a config.json; without how its weights were quantized, which the run's are not."""
    return {RECORD: {name: value for name, value in config.items() if name != QUANTIZED}}


def recorded_config(settings: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The whole config.json that a run records, if it does."""
    return _configuration(flat_args(settings or {}).get(RECORD))


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


def _configuration(value: Any) -> Mapping[str, Any] | None:
    """A configuration, plain or as Bridge writes one of transformers."""
    if not isinstance(value, Mapping):
        return None
    inside = value.get("config_dict")
    if isinstance(inside, Mapping):
        return inside
    return {name: one for name, one in value.items() if name not in ("_target_", "_call_", "_partial_")}


LANGUAGE = "language_model."
POSITIONS, SECTION = "position_embedding_type", "mrope_section"


def language_prefix(names: Iterable[str]) -> str:
    """What stands before the language model's parameters in a model of several parts; "" in one of its own."""
    end = f"{LANGUAGE}{EMBEDDING}"
    return next((name.removesuffix(EMBEDDING) for name in names if f".{name}".endswith(f".{end}")), "")


def counted(names: Iterable[str]) -> str:
    """How many parameters there are of each module: `19 of vision_model, 2 of vision_projection`."""
    counts = Counter(name.partition(".")[0] for name in names)
    return ", ".join(f"{count} of {module}" for module, count in sorted(counts.items()))


def language_settings(args: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of the language model alone, for text.

    Positions of text are the same in every section of M-RoPE, and no image is there to be seen without a mask.
    """
    found = {**args, "is_vision_language": False}
    if as_text(args.get(POSITIONS)) != "mrope":
        return found
    wanted, said = None if config is None else mrope_section(config), args.get(SECTION)
    if wanted and said and list(wanted) != list(said):
        raise MappingError(f"{SECTION}: the checkpoint has {list(said)}, config.json {list(wanted)}")
    return found | {POSITIONS: "rope"}


def with_towers(
    exported: Exported,
    config: Mapping[str, Any],
    tower: Tower,
    parameters: Mapping[str, Spec],
    dtype: str | None,
) -> Exported:
    """The export of a language model with the tensors of the other modules, whose parameters are `parameters`."""
    kind = known_to_bridge(config)
    pairs = tower_pairs(kind, config, tower.config, tower.others)
    problems: list[str] = []
    spelled, unused = spellings(pairs, parameters, problems)
    problems += [f"{name}: no rule of {kind.name} has this parameter" for name in unused]
    _refuse(problems, f"the checkpoint is not a whole {kind.name} model (told by config.json)")
    made = [target for pair in pairs for target in export_pair(pair, spelled, parameters, dtype)]
    return replace(
        exported,
        family=replace(exported.family, architecture=kind.architecture),
        tensors=(*exported.tensors, *made),
    )


def imported_whole(
    imported: Imported,
    config: Mapping[str, Any],
    tower: Tower,
    tensors: Mapping[str, Spec],
    dtype: str | None,
) -> Imported:
    """The import of a language model among the parameters of the other modules, made of `tensors`.

    Its arguments record `config`, which tells what the tensors do not.
    """
    kind = known_to_bridge(config)
    pairs = tower_pairs(kind, config, tower.config, tower.others)
    wanted = {
        name: Wanted(shape.shape, pair.rule.whose)
        for pair in pairs
        for name, shape in zip(pair.hf, pair.tensors, strict=True)
    }
    there = {name: tensors[name] for name in tower.others}
    problems = [*misfits(there, wanted)]
    problems += [f"{name}: no rule of {kind.name} has this tensor" for name in there if name not in wanted]
    _refuse(problems, f"the directory is not a whole {kind.name} model")
    positions, notes = _positions(config, imported.args)
    made = [target for pair in pairs for target in import_pair(SMALLEST, pair, Prefix(""), there, dtype)]
    language = [replace(target, key=LANGUAGE + target.key) for target in imported.tensors]
    return replace(
        imported,
        family=replace(imported.family, architecture=kind.architecture),
        tensors=(*language, *made),
        offsets={LANGUAGE + key: offset for key, offset in imported.offsets.items()},
        args={**imported.args, **positions, **record_of(config)},
        notes=(*imported.notes, *notes),
    )


def known_to_bridge(config: Mapping[str, Any]) -> VisionLanguage:
    """The kind of model that config.json describes."""
    kind = vision_language_of(config)
    if not kind.rules:
        raise MappingError(
            f"config.json has model_type {kind.name!r}, a vision-language model that Megatron-Bridge has no model "
            "for: nothing names its vision tower. The language model alone is converted, by --tower language"
        )
    return kind


def _positions(config: Mapping[str, Any], args: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments of multimodal positions, where config.json has them, and a note where they cannot be said."""
    section = mrope_section(config)
    if not section:
        return {}, ()
    if args[POSITIONS] != "rope":
        return {}, (
            f"Megatron's arguments have no {args[POSITIONS]} of M-RoPE (sections {list(section)}): they say that of "
            "text. Megatron-Bridge's Qwen3-VL takes its rotary embedding from config.json",
        )
    return {POSITIONS: "mrope", SECTION: list(section), "use_rotary_position_embeddings": False}, ()


def _refuse(problems: list[str], what: str) -> None:
    if problems:
        raise MappingError(f"{what}:\n{list_problems(problems)}", problems)
