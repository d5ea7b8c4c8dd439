"""The export of a checkpoint that holds a vision-language model: whole, or its language model alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt_tools.commands.huggingface.export_source import ExportSource
from ckpt_tools.commands.huggingface.hf_parts import read_config
from ckpt_tools.commands.huggingface.tower_source import WholeModel, put_back, tower_files, tower_tensors
from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.mapping.checks import HEAD, Spec, specs_of
from ckpt_tools.megatron.huggingface.mapping.targets import Exported
from ckpt_tools.megatron.huggingface.vision.tower_settings import recorded_config
from ckpt_tools.megatron.huggingface.vision.tower_targets import (
    counted,
    known_to_bridge,
    language_prefix,
    language_settings,
    with_towers,
)
from ckpt_tools.megatron.huggingface.vision.towers import TYPE, language_tower
from ckpt_tools.megatron.huggingface.vision.vision_language import vision_language, vision_language_types
from ckpt_tools.megatron.keys import is_optimizer_key, strip_wrappers
from ckpt_tools.model.catalog import Catalog


class Reference(NamedTuple):
    """What an export goes by: config.json of the language model, and the whole model that it is put back into."""

    config: Mapping[str, Any] | None
    whole: WholeModel | None


def holds_several(catalog: Catalog) -> bool:
    """Whether a checkpoint's keys are those of a model of several parts."""
    return bool(language_prefix(strip_wrappers(key) for key in catalog.tensors if not is_optimizer_key(key)))


def reference_of(
    source: ExportSource, folder: str | None, alone: bool, whole: WholeModel | None
) -> Reference:
    """What a checkpoint of several parts is exported by.

    Args:
        folder: with the config.json that is known of it; None: the one that the checkpoint records, if it does.
        alone: the language model is to be one of its own.
        whole: the model that it is compared with, where it is.
    """
    if whole is not None:
        known_to_bridge(whole.config)
        return Reference(whole.tower.config, whole)
    config = recorded_config(source.settings) if folder is None else read_config(folder)
    if alone:
        return Reference(None if config is None else _of_its_own(config, HEAD not in source.bases), None)
    if config is None:
        raise MappingError(_what_it_is(source))
    if config.get(TYPE) not in vision_language_types():
        raise MappingError(f"{_what_it_is(source)}; this one has model_type {config.get(TYPE)!r}")
    known_to_bridge(config)
    specs = {} if folder is None else _stored(folder)
    tower = language_tower(config, specs, None if specs else HEAD not in source.bases)
    return Reference(tower.config, WholeModel(folder, config, tower, {}))


def _what_it_is(source: ExportSource) -> str:
    beside = source.beside or ()
    own = "vision_projection" in {name.partition(".")[0] for name in beside}
    why = (
        "It is Megatron-LM's own LLaVAModel, for whose vision tower and projection no class of transformers is known"
        if own
        else f"Which model it is, its config.json tells (--hf-config DIR); known are {_known()}"
    )
    return (
        f"the checkpoint holds a language model ({len(source.bases) - len(beside)} parameters) and other parts "
        f"({counted(beside)}). The language model alone is written by --tower language. {why}"
    )


def _known() -> str:
    return ", ".join(kind for kind in vision_language_types() if vision_language(kind).rules)


def _of_its_own(config: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of the language model as a model of its own; one of such a model as it is."""
    if config.get(TYPE) not in vision_language_types():
        return dict(config)
    family = FAMILIES[vision_language(str(config[TYPE])).alone]
    text = language_tower(config, {}, tied).config
    always = {
        name: value for name, value in family_of_config(text).fixed.items() if not isinstance(value, tuple)
    }
    return {**always, **text, TYPE: family.model_type or family.name}


def _stored(folder: str) -> dict[str, Spec]:
    """The tensors of a directory, none where it has a config.json alone."""
    with closing(tower_files(folder)) as files:
        if not any(name.endswith(".safetensors") for name in files.list()):
            return {}
    return specs_of(tower_tensors(folder).tensors)


def with_language_settings(source: ExportSource, whole: WholeModel | None) -> ExportSource:
    """The source with the settings of its language model for text. Raises as `language_settings`."""
    if source.settings is None:
        return source
    config = None if whole is None else whole.config
    return replace(source, settings=language_settings(source.settings, config))


def without_others(source: ExportSource) -> ExportSource:
    """The language model of a source, the parameters of the other parts named as left out."""
    beside = source.beside or ()
    note = (
        f"the language model alone: {len(beside)} parameters of other parts are left out ({counted(beside)})"
    )
    return replace(
        source,
        bases={name: base for name, base in source.bases.items() if name not in set(beside)},
        dropped=(*source.dropped, *(f"{name}: of another part than the language model" for name in beside)),
        notes=(*source.notes, note),
    )


def put_together(
    exported: Exported,
    whole: WholeModel,
    parameters: Mapping[str, Spec],
    dtype: str | None,
) -> Exported:
    """The whole model: the language model's tensors, and those of other parts by their rules, as `with_towers`."""
    made = with_towers(put_back(exported, whole), whole.config, whole.tower, parameters, dtype)
    note = "config.json is made of the one that the checkpoint records"
    if whole.folder is not None:
        note = (
            "the settings of other parts than the language model are those of --hf-config; what the checkpoint "
            "records is not compared with them"
        )
    return replace(made, notes=(*made.notes, note))
