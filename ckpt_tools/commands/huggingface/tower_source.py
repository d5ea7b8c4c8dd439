"""A vision-language model's directory: its language model for an import, and the towers beside it for an export."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, get_args

from ckpt_tools.commands.huggingface.hf_parts import read_config
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.locate.run_layouts import snapshot_of
from ckpt_tools.formats.safetensors import read_safetensors_catalog
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.joined_files import joined_entry
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.huggingface.mapping.checks import Spec, specs_of
from ckpt_tools.megatron.huggingface.mapping.targets import Exported
from ckpt_tools.megatron.huggingface.vision.towers import (
    QUANTIZED,
    TYPE,
    Tower,
    absent_modules,
    language_tower,
    whole_config,
)
from ckpt_tools.megatron.huggingface.vision.vision_language import vision_language_types
from ckpt_tools.model.catalog import Catalog, TensorEntry
from ckpt_tools.model.choices import TowerName
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Source


@dataclass(frozen=True, slots=True)
class WholeModel:
    """The vision-language model that a language model goes back into; `others` are named as among joined folders.

    There is no `folder` where the checkpoint itself records the `config`.
    """

    folder: str | None
    config: Mapping[str, Any]
    tower: Tower
    others: Mapping[str, TensorEntry]


def check_tower(name: str | None) -> None:
    """Raises UsageError: no tower is called so."""
    if name is not None and name not in get_args(TowerName):
        raise UsageError(f"--tower {name}: {', '.join(get_args(TowerName))} is converted")


def tower_alone(
    catalog: Catalog, specs: Mapping[str, Spec], config: Mapping[str, Any]
) -> tuple[Catalog, dict[str, Spec], Tower]:
    """The language model's tensors under the names of a model of its own.

    The catalog keeps the others too: scales are read by the names they are stored under.
    """
    tower = language_tower(config, specs)
    bare = {name: replace(catalog.tensors[own], key=name) for name, own in tower.names.items()}
    named = {name: specs[own] for name, own in tower.names.items()}
    return replace(catalog, tensors={**catalog.tensors, **bare}), named, tower


def tower_files(folder: str) -> Files:
    """The files of the whole model."""
    return open_files(snapshot_of(folder))


def tower_tensors(folder: str) -> Catalog:
    """The stored tensors of the whole model. Raises as `read_safetensors_catalog`."""
    return read_safetensors_catalog(snapshot_of(folder))


def whole_model(folder: str) -> WholeModel:
    """The vision-language model in a directory."""
    config = read_config(folder)
    if config.get(QUANTIZED):
        raise UnsupportedCheckpointError(
            f"--tower language: the weights in {folder} are quantized, and those of the other towers are taken over "
            "as they are stored; give the directory of the model that was quantized"
        )
    catalog = tower_tensors(folder)
    tower = language_tower(config, specs_of(catalog.tensors))
    absent = absent_modules(config, tower)
    if absent:
        raise MappingError(
            f"--tower language: {folder} holds no tensors of {' and '.join(absent)}, from which the whole model "
            "would be made. Without --tower and --hf-config the language model is written as a model of its own"
        )
    with closing(tower_files(folder)) as files:
        others = {
            key: joined_entry(files, catalog.tensors[key], f"{key} of {folder}") for key in tower.others
        }
    return WholeModel(folder, config, tower, others)


def whole_model_if_one(folder: str, config: Mapping[str, Any]) -> WholeModel | None:
    """The vision-language model in a directory, None for a directory with another model."""
    return whole_model(folder) if config.get(TYPE) in vision_language_types() else None


def put_back(exported: Exported, whole: WholeModel) -> Exported:
    """The tensors of the language model under the whole model's names, and its config.json."""
    tower = whole.tower
    return replace(
        exported,
        tensors=tuple(replace(tensor, key=tower.name_of(tensor.key)) for tensor in exported.tensors),
        config=whole_config(whole.config, tower, exported.config),
        shapes={tower.name_of(key): shape for key, shape in exported.shapes.items()},
        offsets={tower.name_of(key): offset for key, offset in exported.offsets.items()},
    )


def other_towers(whole: WholeModel) -> tuple[TargetTensor, ...]:
    """The tensors of the other towers, as they are stored."""
    return tuple(
        TargetTensor(key, entry.dtype, entry.shape, (Source(entry.key),))
        for key, entry in whole.others.items()
    )
