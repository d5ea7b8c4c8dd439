"""WRITE a Hugging Face model directory from a Megatron checkpoint of either format, without a model in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, get_args

from ckpt_tools.commands.adapters.export_peft import plan_peft
from ckpt_tools.commands.huggingface.export_options import ExportOptions
from ckpt_tools.commands.huggingface.export_source import ExportSource, read_export_source
from ckpt_tools.commands.huggingface.hf_directory import hf_directory
from ckpt_tools.commands.huggingface.hf_parts import (
    families_with,
    offset_notes,
    offset_values,
    prove_equal,
    read_config,
)
from ckpt_tools.commands.huggingface.plain_to_hf import is_plain, plan_plain
from ckpt_tools.commands.huggingface.several_parts import (
    holds_several,
    put_together,
    reference_of,
    with_language_settings,
    without_others,
)
from ckpt_tools.commands.huggingface.tower_source import (
    WholeModel,
    check_tower,
    other_towers,
    put_back,
    tower_files,
    whole_model,
)
from ckpt_tools.commands.job.conversion import (
    Conversion,
    Progress,
    Writer,
    convert,
    open_source,
)
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.outputs import output_directory, place_parts, refuse_overlap
from ckpt_tools.commands.job.read_model import GO_ON_UNPROVEN
from ckpt_tools.commands.job.report import ConversionReport
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.run import Output
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.storage.files import AnyPath, Files, path_text
from ckpt_tools.formats.storage.joined_files import FilesBeside
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.mapping.targets import Exported, export_targets
from ckpt_tools.megatron.huggingface.quantization.block_fp8 import block_fp8_of, quantized_tensors
from ckpt_tools.megatron.huggingface.quantization.quantized import SETTINGS
from ckpt_tools.megatron.rebase import rebase
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.choices import Quantization
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.target import InlineTensor, Target, TargetTensor
from ckpt_tools.plan.build import build_safetensors_plan


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
    source, output = path_text(source), path_text(output)
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
    present: Iterable[str] = (),
    whole: WholeModel | None = None,
    source: ExportSource | None = None,
    headers: bool = False,
) -> ExportTensors:
    """The Hugging Face tensors of a checkpoint of either format. Raises as `export_hf`, short of writing.

    `present` are the tensors of a model that it is compared with, whose names it gets; of a `whole` model it is the
    language model. `source` is what is exported where that was read already. With `headers` no payload is read, and
    values that are shared or computed are not looked at.
    """
    source, exported = describe_export(opened, options, present, whole, source)
    if headers:
        return ExportTensors(source, exported, exported.tensors, (*source.notes, *exported.notes))
    prove_equal(opened.files, source.catalog, source.bases, exported.equal)
    tensors = rebase(exported.tensors, source.bases, _shapes(source.catalog))
    ready, notes = _with_offsets(opened.files, source.catalog, tensors, exported.offsets)
    return ExportTensors(source, exported, tuple(ready), (*source.notes, *exported.notes, *notes))


def describe_export(
    opened: Opened,
    options: ExportOptions,
    present: Iterable[str] = (),
    whole: WholeModel | None = None,
    source: ExportSource | None = None,
) -> tuple[ExportSource, Exported]:
    """What is exported of a checkpoint and as which tensors, from its metadata. Raises as `export_tensors`."""
    if options.dtype is not None and options.dtype not in CASTABLE:
        raise UsageError(f"--dtype {options.dtype}: weights can be written as {', '.join(sorted(CASTABLE))}")
    for option, number in (("--vocab-size", options.vocab_size), ("--tp", options.tp)):
        if number is not None and number < 1:
            raise UsageError(f"{option} {number}: a number from 1 is expected")
    check = None if options.check_masters == "none" else options.write
    if source is None:
        source = read_export_source(opened, options.dtype, options.tp, options.ignore_keys, check)
    if source.beside is not None:
        return _describe_several(source, options, whole)
    if whole is None:
        reference = read_config(options.hf_config) if options.hf_config else None
        return source, _export(source, options, reference, present)
    exported = _export(source, options, dict(whole.tower.config), whole=whole)
    return source, put_back(exported, whole)


def _describe_several(
    source: ExportSource, options: ExportOptions, compared: WholeModel | None
) -> tuple[ExportSource, Exported]:
    """What is exported of a vision-language model: all of it, or with --tower its language model."""
    alone = options.tower is not None
    reference, whole = reference_of(source, options.hf_config, alone, compared)
    source = with_language_settings(source, whole)
    if whole is None:
        source = without_others(source)
        return source, _export(source, options, reference)
    specs = _specs(source)
    beside = {name: specs[name] for name in source.beside or ()}
    language = replace(
        source, bases={name: base for name, base in source.bases.items() if name not in beside}
    )
    exported = _export(language, options, reference, whole=whole)
    return source, put_together(exported, whole, beside, options.dtype)


def _specs(source: ExportSource) -> dict[str, Spec]:
    return {name: Spec(source.types.get(name, base.dtype), base.shape) for name, base in source.bases.items()}


def _export(
    source: ExportSource,
    options: ExportOptions,
    reference: Mapping[str, Any] | None,
    present: Iterable[str] = (),
    whole: WholeModel | None = None,
) -> Exported:
    """The tensors of a language model, as one of its own. Raises as `export_targets`."""
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
    if options.peft:
        return plan_peft(opened, options)
    if options.alpha is not None:
        raise UsageError("--alpha: it is that of an adapter, which --peft writes")
    if options.hf_config is not None and is_plain(opened):
        return plan_plain(opened, options, options.hf_config)
    is_part = options.tower is not None and not holds_several(opened.catalog)
    whole = whole_model(options.hf_config) if is_part and options.hf_config else None
    made = _as_asked(export_tensors(opened, options, whole=whole), options)
    if whole is not None:
        made = _with_other_towers(made, whole)
    source, exported = made.source, made.exported
    made_of = hf_directory(made.ready, exported.config, options.hf_config, options.max_shard_bytes)
    return Conversion(
        "hf",
        "transformers",
        opened.location.iteration,
        source.catalog,
        Target(tuple(exported.tensors), dropped=source.dropped, notes=(*made.notes, *made_of.notes)),
        build_safetensors_plan(source.catalog, made_of.files, exported.shapes),
        extra_files=made_of.extra_files,
        architecture=exported.family.architecture,
        masters=source.masters,
        must_round=source.must_round,
        check_masters=options.check_masters,
        fp8_recipe=source.fp8_recipe,
        advice=GO_ON_UNPROVEN,
    )


def _with_other_towers(made: ExportTensors, whole: WholeModel) -> ExportTensors:
    """The whole model: its language model, and the other towers as its directory has them."""
    others = other_towers(whole)
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
        raise UsageError("--quantize: a vision-language model is written as it is stored only")
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


def _with_offsets(
    stored: Files, catalog: Catalog, tensors: Sequence[TargetTensor], offsets: Mapping[str, float]
) -> tuple[list[TargetTensor | InlineTensor], list[str]]:
    """Tensors with an offset as their bytes, which are few; and what rounding did to them."""
    ready: list[TargetTensor | InlineTensor] = []
    changed, elements = {}, 0
    for tensor in tensors:
        if tensor.key not in offsets:
            ready.append(tensor)
            continue
        data, lost = offset_values(stored, catalog, tensor, offsets[tensor.key])
        ready.append(InlineTensor(tensor.key, tensor.dtype, tensor.shape, data))
        elements += prod(tensor.shape)
        if lost:
            changed[tensor.key] = lost
    return ready, offset_notes(offsets, changed, elements)


def _shapes(catalog: Catalog) -> dict[str, tuple[int, ...]]:
    return {key: entry.shape for key, entry in catalog.tensors.items()}


def _open(source: str, options: ExportOptions) -> Opened:
    """The checkpoint, and beside its files those of the whole model that it becomes a part of."""
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
    try:
        if options.hf_config is None:
            raise UsageError(
                f"--tower {options.tower}: --hf-config names the directory of the whole model, from where the other "
                "parts are taken; the checkpoint is a language model alone"
            )
        return replace(opened, files=FilesBeside(opened.files, [tower_files(options.hf_config)]))
    except BaseException:
        opened.files.close()
        raise


def _place(source: str, location: Location, output: str, options: ExportOptions) -> Output:
    refuse_overlap(source, location, output)
    model = options.hf_config
    if model is not None and (options.tower is not None or place_parts(output) == place_parts(model)):
        refuse_overlap(model, location, output)
    return Output(output_directory(output), overwrite=options.overwrite, resume=options.resume)


TO_HF = Writer(open=_open, place=_place, plan=plan_export)
