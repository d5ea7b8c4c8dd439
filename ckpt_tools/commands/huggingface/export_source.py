"""What an export reads: every parameter of a checkpoint, and which of its values are taken.

A vision-language model is read for its language model alone, or whole; an import reads its language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from ckpt_tools.commands.huggingface.folder import DEFAULT_SHARD_SIZE, hf_directory, read_config
from ckpt_tools.commands.job.conversion import Conversion, SourceOptions
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.read_model import (
    Wanted,
    is_master,
    keeps_masters,
    master_targets,
    read_beside_masters,
    read_model,
)
from ckpt_tools.commands.job.report import MastersUse
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.write_job import WriteOptions
from ckpt_tools.formats.locate.run_layouts import snapshot_of
from ckpt_tools.formats.safetensors import read_safetensors_catalog
from ckpt_tools.formats.storage.joined_files import joined_entry
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.mapping.checks import HEAD, Spec, specs_of
from ckpt_tools.megatron.huggingface.mapping.targets import Exported
from ckpt_tools.megatron.huggingface.vision import towers
from ckpt_tools.megatron.huggingface.vision.vision_language import vision_language, vision_language_types
from ckpt_tools.megatron.hybrid import as_gpt, is_hybrid
from ckpt_tools.megatron.keys import is_optimizer_key, one_expert, strip_wrappers
from ckpt_tools.megatron.run_state.settings import contradicted_dtype, training_dtype
from ckpt_tools.model.catalog import Catalog, TensorEntry, Value, leave_out
from ckpt_tools.model.choices import CheckLevel, Quantization, TowerName
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.target import InlineTensor, Target, TargetTensor
from ckpt_tools.plan.build import build_safetensors_plan


@dataclass(frozen=True, slots=True)
class ExportOptions(SourceOptions):
    """What a user may decide about an export; the defaults let the checkpoint decide."""

    ignore_keys: tuple[str, ...] = ()
    hf_config: str | None = None  # directory of the original Hugging Face model
    rules: Path | None = None  # a rule file
    dtype: str | None = None
    vocab_size: int | None = None
    max_shard_bytes: int = DEFAULT_SHARD_SIZE
    mtp_copies: bool = False
    tp: int | None = None  # tensor-parallel size of the job that wrote an fsdp_dtensor checkpoint
    quantize: Quantization | None = None
    peft: bool = False  # the checkpoint's adapter (LoRA) as a PEFT directory
    tower: TowerName | None = None  # the part that it is of the model in `hf_config`
    check_masters: CheckLevel = "sample"  # of the stored weights' masters, whether they are exported or not
    alpha: float | None = None  # its scale times its rank, where nothing stored tells it


_WIDE = ("float32", "float64")  # what an fp32 master says more to than the weight


@dataclass(frozen=True, slots=True)
class ExportSource:
    """Parameters under their `torch_dist` names, layers and experts one by one, and the settings they go with.

    In a model of several parts these are the names of its language model as a separate model; `beside` are the
    parameters of the other parts, under their names (None: there are no other parts). `types` has the running
    model's type of each parameter with fp32 masters as values; others keep the stored type. `must_round` are the
    masters among the values, with the stored weights that they must round to.
    """

    catalog: Catalog
    bases: Mapping[str, Value]
    settings: Mapping[str, Any] | None
    types: Mapping[str, str]
    masters: MastersUse
    must_round: tuple[TargetTensor, ...] = ()
    fp8_recipe: str | None = None
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    beside: tuple[str, ...] | None = None


def read_export_source(
    opened: Opened,
    dtype: str | None,
    tp: int | None,
    ignored: tuple[str, ...],
    check: WriteOptions | None = None,
) -> ExportSource:
    """The parameters of the checkpoint, for an export as `dtype` (None: the model's own).

    Args:
        check: how to read the masters that the stored weights are to be compared with, also where those are not
            exported; None: they are not.
    """
    wide = dtype in _WIDE
    wanted = Wanted("masters" if wide else "none", ignored, unknown_keys=True, tp=tp)
    model = read_model(opened, wanted) if check is None else read_beside_masters(opened, wanted, check)
    source = _source(opened, model, dtype, wide)
    source = _parts_apart(replace(source, dropped=leave_out(opened.catalog, ignored)[1]))
    if not is_hybrid(source.bases):
        return source
    bases, settings, note = as_gpt(source.bases, source.settings or {})
    renamed = dict(zip(source.bases, bases, strict=True))
    types = {renamed[name]: dtype for name, dtype in source.types.items()}
    kept = settings if source.settings is not None else None
    return replace(source, bases=bases, types=types, settings=kept, notes=(*source.notes, note))


def imported_source(model: Model) -> ExportSource:
    """The parameters of a Hugging Face model that was read for an import."""
    bases = {one_expert(p.name, p.expert): p.weight for p in model.parameters}
    return _parts_apart(ExportSource(model.catalog, bases, model.common.args, {}, "none", notes=model.notes))


def _parts_apart(source: ExportSource) -> ExportSource:
    """The language model of a model of several parts under the names of a separate model."""
    prefix = towers.language_prefix(source.bases)
    if not prefix:
        return source
    return replace(
        source,
        bases={name.removeprefix(prefix): base for name, base in source.bases.items()},
        types={name.removeprefix(prefix): dtype for name, dtype in source.types.items()},
        beside=tuple(name for name in source.bases if not name.startswith(prefix)),
    )


def _source(opened: Opened, model: Model, dtype: str | None, wide: bool) -> ExportSource:
    """The stored weights; the masters instead where the export is wide enough to tell them apart."""
    own = training_dtype(opened.common)
    in_place = keeps_masters(model)
    unknown = contradicted_dtype(opened.common) or (None if own else "nothing names the model's type")
    if in_place and unknown and dtype is None:
        raise UsageError(f"the checkpoint holds fp32 masters, and {unknown}; pass --dtype")
    notes = model.notes
    if wide and not in_place and MASTER not in model.roles:
        reason = model.unread or "the checkpoint holds none"
        notes = (*notes, f"no fp32 masters are exported, only the stored weights: {reason}")
    if not wide and opened.location.kind == "torch_dist":  # its notes are on masters, which are not exported
        notes = (f"the weights were not compared with their masters: {model.unread}",) if model.unread else ()
    masters: MastersUse = "left_out" if any(map(is_optimizer_key, opened.catalog.tensors)) else "none"
    if wide and MASTER in model.roles:
        masters = "written"
    return ExportSource(
        model.catalog,
        {one_expert(p.name, p.expert): p.main if wide else p.weight for p in model.parameters},
        opened.common.args or opened.common.model_config or None,
        {one_expert(p.name, p.expert): own for p in model.parameters if own and is_master(p)},
        "as_stored" if in_place else masters,
        tuple(master_targets(model)),
        model.settings.fp8_recipe,
        notes=notes,
    )


# ---- a model of several parts


@dataclass(frozen=True, slots=True)
class WholeModel:
    """The vision-language model that a language model goes back into; `others` are named as among joined folders.

    There is no `folder` where the checkpoint itself records the `config`.
    """

    folder: str | None
    config: Mapping[str, Any]
    tower: towers.Tower
    others: Mapping[str, TensorEntry]


def check_tower(name: str | None) -> None:
    """Raises UsageError: no tower is called so."""
    if name is not None and name not in get_args(TowerName):
        raise UsageError(f"--tower {name}: {', '.join(get_args(TowerName))} is converted")


def tower_alone(
    catalog: Catalog, specs: Mapping[str, Spec], config: Mapping[str, Any]
) -> tuple[Catalog, dict[str, Spec], towers.Tower]:
    """The language model's tensors under the names of a separate model.

    The catalog keeps the others too: scales are read by the names they are stored under.
    """
    tower = towers.language_tower(config, specs)
    bare = {name: replace(catalog.tensors[own], key=name) for name, own in tower.names.items()}
    named = {name: specs[own] for name, own in tower.names.items()}
    return replace(catalog, tensors={**catalog.tensors, **bare}), named, tower


def whole_model(folder: str) -> WholeModel:
    """The vision-language model in a directory."""
    config = read_config(folder)
    if config.get(towers.QUANTIZED):
        raise UnsupportedCheckpointError(
            f"--tower language: the weights in {folder} are quantized, and those of the other towers are copied as "
            "stored; give the directory of the model that was quantized"
        )
    catalog = read_safetensors_catalog(snapshot_of(folder))
    tower = towers.language_tower(config, specs_of(catalog.tensors))
    absent = towers.absent_modules(config, tower)
    if absent:
        raise MappingError(
            f"--tower language: {folder} holds no tensors of {' and '.join(absent)}, from which the whole model "
            "would be made. Without --tower and --hf-config the language model is written as a separate model"
        )
    with closing(open_files(snapshot_of(folder))) as files:
        others = {
            key: joined_entry(files, catalog.tensors[key], f"{key} of {folder}") for key in tower.others
        }
    return WholeModel(folder, config, tower, others)


def whole_model_if_one(folder: str, config: Mapping[str, Any]) -> WholeModel | None:
    """The vision-language model in a directory, None for a directory with another model."""
    return whole_model(folder) if config.get(towers.TYPE) in vision_language_types() else None


def put_back(exported: Exported, whole: WholeModel) -> Exported:
    """The tensors of the language model under the whole model's names, and its config.json."""
    config = towers.whole_config(whole.config, whole.tower, exported.config)
    return replace(exported.renamed(whole.tower.name_of), config=config)


def holds_several(catalog: Catalog) -> bool:
    """Whether a checkpoint's keys are those of a model of several parts."""
    return bool(
        towers.language_prefix(strip_wrappers(key) for key in catalog.tensors if not is_optimizer_key(key))
    )


def reference_of(
    source: ExportSource, folder: str | None, alone: bool, whole: WholeModel | None
) -> tuple[Mapping[str, Any] | None, WholeModel | None]:
    """What a checkpoint of several parts is exported by: config.json of the language model, and the whole model that
    it is put back into.

    Args:
        folder: with the config.json that is known of it; None: the one that the checkpoint records, if it does.
        alone: the language model is written as a separate model.
        whole: the model that it is compared with, where it is.
    """
    if whole is not None:
        towers.known_to_bridge(whole.config)
        return whole.tower.config, whole
    config = towers.recorded_config(source.settings) if folder is None else read_config(folder)
    if alone:
        return None if config is None else _of_its_own(config, HEAD not in source.bases), None
    if config is None:
        raise MappingError(_what_it_is(source))
    if config.get(towers.TYPE) not in vision_language_types():
        raise MappingError(f"{_what_it_is(source)}; this one has model_type {config.get(towers.TYPE)!r}")
    towers.known_to_bridge(config)
    specs = {} if folder is None else _stored(folder)
    tower = towers.language_tower(config, specs, None if specs else HEAD not in source.bases)
    return tower.config, WholeModel(folder, config, tower, {})


def _what_it_is(source: ExportSource) -> str:
    others = source.beside or ()
    known = ", ".join(kind for kind in vision_language_types() if vision_language(kind).rules)
    own = "vision_projection" in {name.partition(".")[0] for name in others}
    why = (
        "It is Megatron-LM's own LLaVAModel; no class of transformers is known for its vision tower and projection"
        if own
        else f"Which model it is, its config.json tells (--hf-config DIR); known are {known}"
    )
    return (
        f"the checkpoint holds a language model ({len(source.bases) - len(others)} parameters) and other parts "
        f"({towers.counted(others)}). The language model alone is written by --tower language. {why}"
    )


def _of_its_own(config: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of the language model as a separate model; that of such a model unchanged."""
    if config.get(towers.TYPE) not in vision_language_types():
        return dict(config)
    family = FAMILIES[vision_language(str(config[towers.TYPE])).alone]
    text = towers.language_tower(config, {}, tied).config
    always = {
        name: value for name, value in family_of_config(text).fixed.items() if not isinstance(value, tuple)
    }
    return {**always, **text, towers.TYPE: family.model_type or family.name}


def _stored(folder: str) -> dict[str, Spec]:
    """The tensors of a directory, none where it has a config.json alone."""
    with closing(open_files(snapshot_of(folder))) as files:
        if not any(name.endswith(".safetensors") for name in files.list()):
            return {}
    return specs_of(read_safetensors_catalog(snapshot_of(folder)).tensors)


def without_others(source: ExportSource, language: Mapping[str, Value]) -> ExportSource:
    """The parameters of the language model alone, those of the other parts named as left out."""
    others = source.beside or ()
    left = f"{len(others)} parameters of other parts are left out ({towers.counted(others)})"
    return replace(
        source,
        bases=language,
        dropped=(*source.dropped, *(f"{name}: of another part than the language model" for name in others)),
        notes=(*source.notes, f"the language model alone: {left}"),
    )


def put_together(
    exported: Exported,
    whole: WholeModel,
    parameters: Mapping[str, Spec],
    dtype: str | None,
) -> Exported:
    """The whole model: the language model's tensors, and those of other parts by their rules, as `with_towers`."""
    made = towers.with_towers(put_back(exported, whole), whole.config, whole.tower, parameters, dtype)
    note = "config.json is made of the one that the checkpoint records"
    if whole.folder is not None:
        note = (
            "the settings of other parts than the language model are those of --hf-config; what the checkpoint "
            "records is not compared with them"
        )
    return replace(made, notes=(*made.notes, note))


def model_directory(
    opened: Opened,
    options: ExportOptions,
    catalog: Catalog,
    tensors: Sequence[TargetTensor | InlineTensor],
    config: Mapping[str, Any],
    target: Target,
    shapes: Mapping[str, tuple[int, ...]],
    **more: Any,
) -> Conversion:
    """The directory of `tensors`, whatever they are made of; `shapes` are those in which views see the sources.

    `target` says what of the checkpoint is written and dropped; `more` are fields of the conversion.
    """
    files, small, notes = hf_directory(tensors, config, options.hf_config, options.max_shard_bytes)
    return Conversion(
        to="hf",
        loader="transformers",
        iteration=opened.location.iteration,
        catalog=catalog,
        target=replace(target, notes=(*target.notes, *notes)),
        plan=build_safetensors_plan(catalog, files, shapes),
        extra_files=small,
        **more,
    )
