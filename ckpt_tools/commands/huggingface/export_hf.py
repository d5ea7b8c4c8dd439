"""WRITE a Hugging Face model directory from a Megatron checkpoint of either format, without a model in memory.

Of a plain PyTorch state dict with Hugging Face names, as a job saves that trains a model of transformers (FSDP2,
accelerate, slime), nothing is translated: there is no model in the middle, and its names and shapes are equal to
those of the model that config.json describes, or refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from ckpt_tools.commands.edit.merge_adapter import read_adapter_source
from ckpt_tools.commands.huggingface.export_source import (
    ExportOptions,
    ExportSource,
    WholeModel,
    check_tower,
    holds_several,
    model_directory,
    put_back,
    put_together,
    read_export_source,
    reference_of,
    whole_model,
    without_others,
)
from ckpt_tools.commands.huggingface.folder import (
    architecture_of,
    as_json,
    families_with,
    prove_equal,
    read_config,
    shifted_norms,
    without_frequencies,
)
from ckpt_tools.commands.job.conversion import Conversion, Progress, Writer, convert, open_source
from ckpt_tools.commands.job.opened import Opened, closed_on_error
from ckpt_tools.commands.job.outputs import output_directory, place_parts, refuse_overlap
from ckpt_tools.commands.job.read_model import GO_ON_UNPROVEN
from ckpt_tools.commands.job.report import ConversionReport
from ckpt_tools.errors import (
    MappingError,
    UsageError,
    list_problems,
)
from ckpt_tools.execute.run import Output
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.locate.run_layouts import snapshot_of
from ckpt_tools.formats.safetensors import (
    INDEX_FILE,
    SINGLE_FILE,
    read_safetensors_catalog,
)
from ckpt_tools.formats.storage.files import AnyPath
from ckpt_tools.formats.storage.joined_files import FilesBeside
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.dcp.read import refuse_group_map
from ckpt_tools.megatron.dcp.state_dict import (
    NamedModel,
    is_megatron,
    named_model,
    possible_names,
    read_state_dict,
)
from ckpt_tools.megatron.huggingface.config.config import read_config as model_of_config
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.lora.peft import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
)
from ckpt_tools.megatron.huggingface.lora.peft_targets import peft_target, with_vocabulary
from ckpt_tools.megatron.huggingface.mapping.checks import Spec, specs_of
from ckpt_tools.megatron.huggingface.mapping.rules import expand
from ckpt_tools.megatron.huggingface.mapping.targets import (
    Expected,
    Exported,
    bulk_dtype,
    expected_by_rules,
    expected_by_weights,
    export_targets,
)
from ckpt_tools.megatron.huggingface.quantization.block_fp8 import block_fp8_of, quantized_tensors
from ckpt_tools.megatron.huggingface.quantization.quantized import SETTINGS
from ckpt_tools.megatron.huggingface.vision.towers import language_settings
from ckpt_tools.model.catalog import Catalog, TensorEntry, leave_out
from ckpt_tools.model.choices import Quantization
from ckpt_tools.model.dtypes import CASTABLE, check_dtype
from ckpt_tools.model.target import InlineTensor, Target, TargetTensor, rebase, target_of
from ckpt_tools.model.views import Source
from ckpt_tools.plan.build import WeightFile, build_safetensors_plan


def export_hf(
    source: AnyPath,
    output: AnyPath,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Export the checkpoint at `source` as the Hugging Face directory `output`; called on every rank.

    Raises:
        UsageError: a fact only the user can give is missing, or an output that cannot be taken.
        UnsupportedCheckpointError: the source is not a Megatron checkpoint.
        MappingError: an architecture without rules, or a model that is not whole or contradicts its settings.
        VerificationError: masters that do not round to their weights, or a cast that makes infinities.
        CorruptCheckpointError, StorageError: damaged files, full disks.
    """
    return convert(source, output, TO_HF, options or ExportOptions(), progress, dry_run)


@dataclass(frozen=True, slots=True)
class ExportTensors:
    """A checkpoint as the tensors of a Hugging Face model: what each is made of."""

    source: ExportSource
    exported: Exported
    ready: tuple[TargetTensor | InlineTensor, ...]
    notes: tuple[str, ...]


def export_tensors(
    opened: Opened,
    options: ExportOptions,
    whole: WholeModel | None,
    present: Iterable[str] = (),
    source: ExportSource | None = None,
    headers: bool = False,
) -> ExportTensors:
    """The Hugging Face tensors of a checkpoint of either format.

    `present` are the tensors of a model to compare with: the export takes their names. With `whole`, a
    vision-language model, they are those of its language model. `source` is what is exported, if it was read already.
    With `headers` no payload is read, and values that are shared or computed are not looked at.
    """
    for option, number in (("--vocab-size", options.vocab_size), ("--tp", options.tp)):
        if number is not None and number < 1:
            raise UsageError(f"{option} {number}: a number from 1 is expected")
    if source is None:
        check = None if options.check_masters == "none" else options.write
        source = read_export_source(opened, options.dtype, options.tp, options.ignore_keys, check)
    if source.beside is not None:
        source, exported = _export_several(source, options, whole, present)
    elif whole is not None:
        exported = put_back(_export(source, options, whole.tower.config, whole), whole)
    else:
        config = read_config(options.hf_config) if options.hf_config else None
        exported = _export(source, options, config, None, present)
    if headers:
        return ExportTensors(source, exported, exported.tensors, (*source.notes, *exported.notes))
    prove_equal(opened.files, source.catalog, exported.equal, source.bases)
    shapes = {key: entry.shape for key, entry in source.catalog.tensors.items()}
    tensors = rebase(exported.tensors, source.bases, shapes)
    shifted, notes = shifted_norms(opened.files, source.catalog, tensors, exported.offsets)
    ready = [
        InlineTensor(t.key, t.dtype, t.shape, shifted[t.key]) if t.key in shifted else t for t in tensors
    ]
    return ExportTensors(source, exported, tuple(ready), (*source.notes, *exported.notes, *notes))


def _export_several(
    source: ExportSource, options: ExportOptions, whole: WholeModel | None, present: Iterable[str]
) -> tuple[ExportSource, Exported]:
    """A vision-language model: all of it, or with --tower its language model."""
    reference, whole = reference_of(source, options.hf_config, options.tower is not None, whole)
    if source.settings is not None:
        config = None if whole is None else whole.config
        source = replace(source, settings=language_settings(source.settings, config))
    others = set(source.beside or ())
    language = {name: base for name, base in source.bases.items() if name not in others}
    if whole is None:
        source = without_others(source, language)
        return source, _export(source, options, reference, None, present)
    exported = _export(replace(source, bases=language), options, reference, whole)
    specs = _specs(source)
    other_parts = {name: specs[name] for name in source.beside or ()}
    return source, put_together(exported, whole, other_parts, options.dtype)


def _specs(source: ExportSource) -> dict[str, Spec]:
    return {name: Spec(source.types.get(name, base.dtype), base.shape) for name, base in source.bases.items()}


def _export(
    source: ExportSource,
    options: ExportOptions,
    reference: Mapping[str, Any] | None,
    whole: WholeModel | None,
    present: Iterable[str] = (),
) -> Exported:
    """The tensors of a language model, as a separate model."""
    families = families_with(options.rules, reference)
    if whole is not None:
        families, present = whole.tower.families(families), whole.tower.names
    return export_targets(
        _specs(source),
        source.settings,
        reference,
        dtype=options.dtype,
        vocab_size=options.vocab_size,
        mtp_copies=options.mtp_copies,
        families=families,
        present=present,
    )


def plan_export(opened: Opened, options: ExportOptions, world: int = 1) -> Conversion:
    """Everything up to the first byte; the files do not depend on how many processes write them."""
    del world
    check_dtype(options.dtype)
    if options.peft:
        return plan_peft(opened, options)
    if options.alpha is not None:
        raise UsageError("--alpha: it is that of an adapter, which --peft writes")
    if options.hf_config is not None and is_plain(opened):
        return plan_plain(opened, options, options.hf_config)
    is_part = options.tower is not None and not holds_several(opened.catalog)
    whole = whole_model(options.hf_config) if is_part and options.hf_config else None
    made = _as_asked(export_tensors(opened, options, whole), options)
    if whole is not None:
        made = _with_other_towers(made, whole)
    source, exported = made.source, made.exported
    return model_directory(
        opened,
        options,
        source.catalog,
        made.ready,
        exported.config,
        Target(tuple(exported.tensors), dropped=source.dropped, notes=made.notes),
        exported.shapes,
        architecture=exported.family.architecture,
        masters=source.masters,
        must_round=source.must_round,
        check_masters=options.check_masters,
        fp8_recipe=source.fp8_recipe,
        advice=GO_ON_UNPROVEN,
    )


def plan_peft(opened: Opened, options: ExportOptions) -> Conversion:
    """Everything up to the first byte."""
    if options.hf_config is None:
        raise UsageError("--peft: the names are those of the base model; pass its directory with --hf-config")
    config = read_config(options.hf_config)
    family = family_of_config(config, families_with(options.rules, config))
    model = with_vocabulary(model_of_config(family, config))
    source = read_adapter_source(
        opened, options.alpha, opened, "; without --peft the model itself is exported"
    )
    made = peft_target(
        opened.catalog,
        source.adapters,
        expand(family, model),
        model,
        source.alpha,
        options.hf_config,
        options.dtype,
    )
    return Conversion(
        to="hf",
        loader="peft",
        iteration=opened.location.iteration,
        catalog=opened.catalog,
        target=Target(made.tensors, notes=(source.summary, *made.notes)),
        plan=build_safetensors_plan(opened.catalog, [WeightFile(ADAPTER_WEIGHTS, made.tensors)], {}),
        extra_files={ADAPTER_CONFIG: as_json(dict(made.config))},
        architecture=family.architecture,
    )


def _with_other_towers(made: ExportTensors, whole: WholeModel) -> ExportTensors:
    """The whole model: its language model, and the other towers as its directory has them."""
    others = tuple(target_of(key, entry.value) for key, entry in whole.others.items())
    source = made.source.catalog
    catalog = replace(
        source, tensors={**source.tensors, **{entry.key: entry for entry in whole.others.values()}}
    )
    note = f"{len(others)} tensors of the other towers are taken from {whole.folder} as they are stored"
    return replace(
        made,
        source=replace(made.source, catalog=catalog),
        exported=replace(made.exported, tensors=(*made.exported.tensors, *others)),
        ready=(*made.ready, *others),
        notes=(*made.notes, note),
    )


def _as_asked(made: ExportTensors, options: ExportOptions) -> ExportTensors:
    """The tensors, quantized where that is asked for, and the config.json that says so."""
    if options.quantize is None:
        return made
    if made.source.beside is not None:
        raise UsageError("--quantize: a vision-language model is written unquantized only")
    known = get_args(Quantization)
    if options.quantize not in known:
        raise UsageError(f"--quantize {options.quantize}: {', '.join(known)} is written")
    how = block_fp8_of(read_config(options.hf_config) if options.hf_config else None)
    found = quantized_tensors(made.ready, made.source.catalog, made.exported.family, how)
    tensors = tuple(t for t in found.tensors if isinstance(t, TargetTensor))
    config = {**made.exported.config, SETTINGS: found.settings}
    return replace(
        made,
        source=replace(made.source, catalog=found.catalog),
        exported=replace(made.exported, tensors=tensors, config=config),
        ready=found.tensors,
        notes=(*made.notes, found.note),
    )


def _open(source: str, options: ExportOptions) -> Opened:
    """The checkpoint; its files include those of the whole model that it becomes a part of."""
    if options.tower is None:
        return open_source(source, options)
    check_tower(options.tower)
    if options.peft or options.quantize:
        raise UsageError(
            f"--tower {options.tower} together with --{'peft' if options.peft else 'quantize'} is not written"
        )
    opened = open_source(source, options)
    if holds_several(opened.catalog):
        return opened
    with closed_on_error(opened.files):
        if options.hf_config is None:
            raise UsageError(
                f"--tower {options.tower}: --hf-config names the directory of the whole model, from where the other "
                "parts are taken; the checkpoint is a language model alone"
            )
        return replace(opened, files=FilesBeside(opened.files, [open_files(snapshot_of(options.hf_config))]))


def _place(source: str, location: Location, output: str, options: ExportOptions) -> Output:
    refuse_overlap(source, location, output)
    model = options.hf_config
    if model is not None and (options.tower is not None or place_parts(output) == place_parts(model)):
        refuse_overlap(model, location, output)
    return Output(output_directory(output), overwrite=options.overwrite, resume=options.resume)


TO_HF = Writer(open=_open, place=_place, plan=plan_export)


_TYPES = ("dtype", "torch_dtype")  # what transformers 5 and 4 call the weights' type


def is_plain(opened: Opened) -> bool:
    """Whether it is a state dict without Megatron's names."""
    kinds = (
        "dcp",
        "fsdp_dtensor",
    )  # a program that saves a wrapped module may have keys like Megatron-FSDP's
    return opened.location.kind in kinds and not is_megatron(read_state_dict(opened.catalog))


def plan_plain(opened: Opened, options: ExportOptions, hf_config: str) -> Conversion:
    """Everything up to the first byte."""
    _refuse_meaningless(options)
    refuse_group_map(opened.files.location, opened.catalog)
    catalog, ignored = leave_out(opened.catalog, options.ignore_keys)
    catalog, frequencies = without_frequencies(catalog)
    config = read_config(hf_config)
    expected = expected_model(catalog, config, options.rules, hf_config)
    model = named_model(catalog, expected.shapes)
    entries = {name: catalog.tensors[key] for name, key in model.keys.items()}
    equal, extra = expected.superfluous(sorted(entries.keys() - expected.shapes.keys()))
    problems = [*expected.problems, *_misfits(entries, expected, set(extra))]
    problems += [f"{key}: {expected.told_by} knows of no such tensor" for key in model.stray]
    if problems:
        raise _not_that_model(opened, hf_config, expected, model, problems)
    bases = {name: one.value for name, one in entries.items()}
    prove_equal(opened.files, catalog, equal, bases)
    tensors = [_target(name, entries[name], expected, options.dtype) for name in expected.shapes]
    written, changed = _config(config, bulk_dtype(tensors))
    tied = {other: one for one, other in equal}
    dropped = (
        *ignored,
        *frequencies,
        *(f"{model.keys[n]}: {superfluous(n, tied)}" for n in extra),
        *_left_out(catalog, model),
    )
    notes = (*_type_notes(entries, tensors, options.dtype), *changed)
    if model.prefix:
        notes = (f"the names are those behind {model.prefix!r} in the checkpoint", *notes)
    target = Target(tuple(tensors), dropped=dropped, notes=notes)
    return model_directory(
        opened, options, catalog, tensors, written, target, {}, architecture=architecture_of(config)
    )


def _refuse_meaningless(options: ExportOptions) -> None:
    given = {
        "--tower": options.tower,
        "--quantize": options.quantize,
        "--vocab-size": options.vocab_size,
        "--tp": options.tp,
        "--mtp-copies": options.mtp_copies or None,
    }
    if useless := [option for option, value in given.items() if value is not None]:
        raise UsageError(
            f"{', '.join(useless)}: no meaning for a checkpoint with Hugging Face names: its tensors are written "
            "unchanged"
        )


def expected_model(
    catalog: Catalog, config: Mapping[str, Any], rules: Path | None, hf_config: str
) -> Expected:
    """What the model has: by the rules of its architecture; without such, by the weights next to the config.json."""
    families = families_with(rules, config)
    plain = {name: value for name, value in config.items() if name != SETTINGS}
    try:
        return expected_by_rules(plain, possible_names(catalog), families)
    except MappingError as error:
        place = snapshot_of(hf_config)
        with closing(open_files(place)) as files:
            has_weights = any(files.exists(name) for name in (INDEX_FILE, SINGLE_FILE))
        if not has_weights or rules is not None:
            raise MappingError(
                f"names and shapes of the model are not known: {error} If --hf-config names a folder with weights of "
                "this architecture next to its config.json, those tell (only their headers are read)",
                error.problems,
            ) from error
        stored = without_frequencies(read_safetensors_catalog(place))[0].tensors
        return expected_by_weights(specs_of(stored), config)


def _misfits(entries: Mapping[str, TensorEntry], expected: Expected, superfluous: set[str]) -> Iterator[str]:
    for name, shape in expected.shapes.items():
        if name not in entries:
            yield f"{name} {list(shape)} is missing"
        elif entries[name].shape != shape:
            yield f"{name} is {list(entries[name].shape)}; {expected.told_by} asks for {list(shape)}"
    for name, entry in entries.items():
        if name not in expected.shapes and name not in superfluous:
            yield f"{entry.key}: {expected.told_by} knows of no {name}"


def _not_that_model(
    opened: Opened, hf_config: str, expected: Expected, model: NamedModel, problems: list[str]
) -> MappingError:
    found = len(model.keys.keys() & expected.shapes.keys())
    advice = "--ignore-keys GLOB leaves out what is not the model's."
    if not found:
        advice = (
            "A program with other names translates them itself (torchtitan: "
            "scripts/checkpoint_conversion/convert_to_hf.py)."
        )
    return MappingError(
        f"{opened.location.path} is not the model of {hf_config}: of {len(expected.shapes)} tensors that "
        f"{expected.told_by} asks for it has {found} by name. {advice}\n" + list_problems(problems),
        problems,
    )


def _target(name: str, entry: TensorEntry, expected: Expected, dtype: str | None) -> TargetTensor:
    """The stored tensor, or its cast; what is not floating point (or FP8) keeps its type."""
    written = entry.dtype
    if dtype is not None and entry.dtype in CASTABLE:
        written = expected.types.get(name, dtype)
    return TargetTensor(name, written, entry.shape, (Source(entry.key),))


def _config(config: Mapping[str, Any], dtype: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """config.json with the type of what is written, and without the quantization of what is not."""
    written, notes = {key: value for key, value in config.items() if key != SETTINGS}, list[str]()
    if written != config:
        notes.append(f"{SETTINGS} of --hf-config is left out: the weights are not codes")
    names = [name for name in _TYPES if name in config] or ["torch_dtype"]
    said = [str(config[name]) for name in names if name in config and config[name] != dtype]
    if said:
        notes.append(f"config.json says {dtype}, as the weights are; --hf-config said {said[0]}")
    return written | dict.fromkeys(names, dtype), tuple(notes)


def _type_notes(
    entries: Mapping[str, TensorEntry], tensors: Iterable[TargetTensor], dtype: str | None
) -> Iterator[str]:
    """Which types are written: those that are stored unless --dtype says otherwise."""
    counts = Counter((entries[one.key].dtype, one.dtype) for one in tensors)
    for (stored, written), count in sorted(counts.items()):
        if stored != written:
            yield f"{count} tensors are cast from {stored} to {written}"
        elif dtype is not None and written != dtype:
            yield f"{count} tensors stay {written}"
        elif dtype is None and written in ("float32", "float64"):
            yield f"{count} tensors are {written}, as they are stored; --dtype bfloat16 casts them"


def superfluous(name: str, tied: Mapping[str, str]) -> str:
    """Why a tensor of a state dict is left out; `tied` has the one that it must equal."""
    return f"tied to {tied[name]}, which has the same bytes" if name in tied else "its class does not load it"


def _left_out(catalog: Catalog, model: NamedModel) -> Iterator[str]:
    """A line for each dict of optimizers, and of what else is not the model's."""
    for keys, why in ((model.optimizer, "optimizer states"), (model.beside, "not of the model")):
        groups: dict[str, list[str]] = {}
        for key in keys:
            path = catalog.planner_paths.get(key) or (key,)
            outer = "".join(f"{step}." for step in path[:-1][:2])
            groups.setdefault(f"{outer}*" if outer else key, []).append(key)
        for glob, inside in groups.items():
            nbytes = sum(catalog.tensors[key].nbytes for key in inside if key in catalog.tensors)
            yield f"{glob}: {why} ({len(inside)} keys, {nbytes:,} bytes in tensors)"
