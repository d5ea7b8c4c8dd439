"""WRITE a Hugging Face model directory from a Megatron checkpoint of either format, without a model in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from ckpt_tools.commands.adapters.peft import plan_peft
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
    tower_files,
    whole_model,
    without_others,
)
from ckpt_tools.commands.huggingface.folder import families_with, read_config
from ckpt_tools.commands.huggingface.plain_to_hf import is_plain, plan_plain
from ckpt_tools.commands.huggingface.tensors import prove_equal, shifted_norms
from ckpt_tools.commands.job.conversion import Conversion, Progress, Writer, convert, open_source
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.outputs import output_directory, place_parts, refuse_overlap
from ckpt_tools.commands.job.read_model import GO_ON_UNPROVEN
from ckpt_tools.commands.job.report import ConversionReport
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.run import Output
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.storage.files import AnyPath
from ckpt_tools.formats.storage.joined_files import FilesBeside
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.mapping.targets import Exported, export_targets
from ckpt_tools.megatron.huggingface.quantization.block_fp8 import block_fp8_of, quantized_tensors
from ckpt_tools.megatron.huggingface.quantization.quantized import SETTINGS
from ckpt_tools.megatron.huggingface.vision.towers import language_settings
from ckpt_tools.model.choices import Quantization
from ckpt_tools.model.dtypes import check_dtype
from ckpt_tools.model.target import InlineTensor, Target, TargetTensor, rebase, target_of


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
class ExportRequest:
    """What is to be exported.

    `present`: the tensors of a model to compare with; the export takes their names. With `whole`, a vision-language
    model, they are those of its language model. `source`: what is exported, if it was read already.
    """

    options: ExportOptions
    present: Iterable[str] = ()
    whole: WholeModel | None = None
    source: ExportSource | None = None


@dataclass(frozen=True, slots=True)
class ExportTensors:
    """A checkpoint as the tensors of a Hugging Face model: what each is made of."""

    source: ExportSource
    exported: Exported
    ready: tuple[TargetTensor | InlineTensor, ...]
    notes: tuple[str, ...]


def export_tensors(opened: Opened, request: ExportRequest, headers: bool = False) -> ExportTensors:
    """The Hugging Face tensors of a checkpoint of either format. Raises as `export_hf`, short of writing.

    With `headers` no payload is read, and values that are shared or computed are not looked at.
    """
    options, whole, source = request.options, request.whole, request.source
    for option, number in (("--vocab-size", options.vocab_size), ("--tp", options.tp)):
        if number is not None and number < 1:
            raise UsageError(f"{option} {number}: a number from 1 is expected")
    if source is None:
        check = None if options.check_masters == "none" else options.write
        source = read_export_source(opened, options.dtype, options.tp, options.ignore_keys, check)
    if source.beside is not None:
        source, exported = _export_several(source, request)
    elif whole is not None:
        exported = put_back(_export(source, request, whole.tower.config), whole)
    else:
        exported = _export(source, request, read_config(options.hf_config) if options.hf_config else None)
    if headers:
        return ExportTensors(source, exported, exported.tensors, (*source.notes, *exported.notes))
    prove_equal(opened.files, source.catalog, source.bases, exported.equal)
    shapes = {key: entry.shape for key, entry in source.catalog.tensors.items()}
    tensors = rebase(exported.tensors, source.bases, shapes)
    shifted, notes = shifted_norms(opened.files, source.catalog, tensors, exported.offsets)
    ready = [
        InlineTensor(t.key, t.dtype, t.shape, shifted[t.key]) if t.key in shifted else t for t in tensors
    ]
    return ExportTensors(source, exported, tuple(ready), (*source.notes, *exported.notes, *notes))


def _export_several(source: ExportSource, request: ExportRequest) -> tuple[ExportSource, Exported]:
    """A vision-language model: all of it, or with --tower its language model."""
    options = request.options
    reference, whole = reference_of(source, options.hf_config, options.tower is not None, request.whole)
    if source.settings is not None:
        config = None if whole is None else whole.config
        source = replace(source, settings=language_settings(source.settings, config))
    others = set(source.beside or ())
    language = {name: base for name, base in source.bases.items() if name not in others}
    if whole is None:
        source = without_others(source, language)
        return source, _export(source, request, reference)
    exported = _export(replace(source, bases=language), replace(request, whole=whole), reference)
    specs = _specs(source)
    other_parts = {name: specs[name] for name in source.beside or ()}
    return source, put_together(exported, whole, other_parts, options.dtype)


def _specs(source: ExportSource) -> dict[str, Spec]:
    return {name: Spec(source.types.get(name, base.dtype), base.shape) for name, base in source.bases.items()}


def _export(source: ExportSource, request: ExportRequest, reference: Mapping[str, Any] | None) -> Exported:
    """The tensors of a language model, as a separate model. Raises as `export_targets`."""
    options, whole, present = request.options, request.whole, request.present
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
    made = _as_asked(export_tensors(opened, ExportRequest(options, whole=whole)), options)
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
