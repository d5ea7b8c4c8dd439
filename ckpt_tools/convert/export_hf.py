"""`export-hf`: a Megatron checkpoint of either format as a Hugging Face model directory, without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ckpt_tools.catalog.model import Catalog
from ckpt_tools.catalog.safetensors import INDEX_FILE
from ckpt_tools.convert.hf_parts import (
    CONFIG,
    families_with,
    offset_values,
    prove_equal,
    read_assets,
    read_config,
)
from ckpt_tools.convert.opened import Opened, open_checkpoint
from ckpt_tools.convert.outputs import ConversionReport, output_directory, refuse_overlap
from ckpt_tools.convert.to_fsdp_dtensor import Progress
from ckpt_tools.dtypes import CASTABLE, itemsize
from ckpt_tools.errors import UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.ranks import connect
from ckpt_tools.execute.run import Output, WriteOptions, WriteReport, write_checkpoint
from ckpt_tools.megatron.fsdp_model import fsdp_model
from ckpt_tools.megatron.fsdp_source import read_fsdp_source
from ckpt_tools.megatron.huggingface.checks import Spec
from ckpt_tools.megatron.huggingface.shards import DEFAULT_SHARD_SIZE, Shard, pack_shards, shard_index
from ckpt_tools.megatron.huggingface.targets import Exported, export_targets
from ckpt_tools.megatron.rebase import Base, rebase
from ckpt_tools.megatron.settings import training_dtype
from ckpt_tools.megatron.target import InlineTensor, Source, TargetTensor
from ckpt_tools.megatron.torch_dist import EXPERTS, sort_keys
from ckpt_tools.megatron.views import Select
from ckpt_tools.plan.model import Plan, plan_summary
from ckpt_tools.plan.safetensors import WeightFile, build_safetensors_plan


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What a user may decide about an export; the defaults let the checkpoint decide."""

    hf_config: str | None = None  # directory of the original Hugging Face model
    rules: Path | None = None  # a rule file
    dtype: str | None = None
    vocab_size: int | None = None
    max_shard_bytes: int = DEFAULT_SHARD_SIZE
    mtp_copies: bool = False
    tp: int | None = None  # tensor-parallel size of the job that wrote an fsdp_dtensor checkpoint
    iteration: int | None = None
    ignore_keys: tuple[str, ...] = ()
    trust_pickle: bool = False
    overwrite: bool = False
    resume: bool = False
    write: WriteOptions = field(default_factory=WriteOptions)


@dataclass(frozen=True, slots=True)
class PlannedExport:
    """An export that is ready to run."""

    opened: Opened
    exported: Exported
    plan: Plan
    extra_files: Mapping[str, bytes]
    notes: tuple[str, ...]


def export_hf(
    source: str,
    output: str,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Export the checkpoint at `source` as the Hugging Face directory `output`; called on every rank.

    Raises:
        UsageError: a fact only the user can give is missing, or an output that cannot be taken.
        UnsupportedCheckpointError: the source is no Megatron checkpoint.
        MappingError: an architecture without rules, or a model that is not whole or contradicts its settings.
        CorruptCheckpointError, StorageError: damaged files, full disks.
    """
    options = options or ExportOptions()
    ranks = connect()
    written = None
    with open_checkpoint(source, options.iteration, options.trust_pickle) as opened:
        refuse_overlap(source, opened.location, output)
        planned = plan_export(opened, options)
        if not dry_run:
            place = Output(
                output_directory(output),
                extra_files=planned.extra_files,
                is_dcp=False,
                overwrite=options.overwrite,
                resume=options.resume,
            )
            written = write_checkpoint(
                planned.plan, opened.files, place, options.write, ranks=ranks, progress=progress
            )
    return _report(source, output, planned, written)


def plan_export(opened: Opened, options: ExportOptions) -> PlannedExport:
    """Everything up to the first byte."""
    if options.dtype is not None and options.dtype not in CASTABLE:
        raise UsageError(f"--dtype {options.dtype}: weights can be written as {', '.join(sorted(CASTABLE))}")
    bases = parameters_of(opened, options)
    reference = read_config(options.hf_config) if options.hf_config else None
    args = opened.common.args or opened.common.model_config or None
    exported = export_targets(
        {name: Spec(base.dtype, base.shape) for name, base in bases.items()},
        args,
        reference,
        dtype=options.dtype or _dtype_of_masters(opened, bases),
        vocab_size=options.vocab_size,
        mtp_copies=options.mtp_copies,
        families=families_with(options.rules),
    )
    prove_equal(opened.files, opened.catalog, bases, exported.equal)
    tensors = rebase(exported.tensors, bases, _shapes(opened.catalog))
    ready, notes = _with_offsets(opened, tensors, exported.offsets)
    sizes = {t.key: prod(t.shape) * itemsize(t.dtype) for t in ready}
    shards = pack_shards(sizes.items(), options.max_shard_bytes)
    by_key = {t.key: t for t in ready}
    files = [WeightFile(shard.file, [by_key[key] for key in shard.keys]) for shard in shards]
    plan = build_safetensors_plan(opened.catalog, files, exported.shapes)
    return PlannedExport(
        opened,
        exported,
        plan,
        _extra_files(options, exported, shards, sizes),
        (*exported.notes, *notes),
    )


def parameters_of(opened: Opened, options: ExportOptions) -> dict[str, Base]:
    """Every parameter of the model under its `torch_dist` name, layers and experts one by one.

    Raises:
        UnsupportedCheckpointError: neither `torch_dist` nor `fsdp_dtensor`.
    """
    match opened.location.kind:
        case "torch_dist":
            return {
                one_name(p.name, p.expert): Base(
                    p.dtype, p.shape, (Source(p.key, tuple(Select(0, i) for i in p.lead)),)
                )
                for p in sort_keys(opened.catalog).parameters
            }
        case "fsdp_dtensor":
            source = read_fsdp_source(
                opened.files, opened.catalog, opened.common, options.ignore_keys, options.trust_pickle
            )
            model = fsdp_model(source, tp=options.tp, weights_only=True)
            return {
                one_name(p.name, p.expert): Base(p.main.dtype, p.shape, p.main.sources)
                for p in model.parameters
            }
    raise UnsupportedCheckpointError(
        f"{opened.location.path} is of kind {opened.location.kind}; torch_dist and fsdp_dtensor can be exported"
    )


def one_name(name: str, expert: int | None) -> str:
    """The name of one expert's parameter: ``...experts.experts.7.linear_fc1.weight``."""
    return name if expert is None else name.replace(EXPERTS, f"{EXPERTS}{expert}.")


def _dtype_of_masters(opened: Opened, bases: Mapping[str, Base]) -> str | None:
    """The type of the running model where the checkpoint holds fp32 masters; None to keep what is stored.

    Raises:
        UsageError: nothing names that type.
    """
    masters = opened.location.kind == "fsdp_dtensor" and any(b.dtype == "float32" for b in bases.values())
    if not masters:
        return None
    dtype = training_dtype(opened.common)
    if dtype is None:
        raise UsageError(
            "the checkpoint holds fp32 masters, and nothing names the model's type; pass --dtype"
        )
    return dtype


def _with_offsets(
    opened: Opened, tensors: Sequence[TargetTensor], offsets: Mapping[str, float]
) -> tuple[list[TargetTensor | InlineTensor], list[str]]:
    """Tensors with an offset as their bytes, which are few; and what rounding did to them."""
    ready: list[TargetTensor | InlineTensor] = []
    changed, elements = {}, 0
    for tensor in tensors:
        if tensor.key not in offsets:
            ready.append(tensor)
            continue
        data, lost = offset_values(opened.files, opened.catalog, tensor, offsets[tensor.key])
        ready.append(InlineTensor(tensor.key, tensor.dtype, tensor.shape, data))
        elements += prod(tensor.shape)
        if lost:
            changed[tensor.key] = lost
    if not offsets:
        return ready, []
    step = next(iter(offsets.values()))
    note = f"{step:+g} was added to {len(offsets)} norms in float32 and rounded once: "
    if not changed:
        return ready, [note + "every element can be told from the result"]
    worst = max(changed, key=lambda key: changed[key])
    return ready, [
        f"{note}{sum(changed.values()):,} of {elements:,} elements lost bits, most of them ({changed[worst]:,}) in "
        f"{worst}"
    ]


def _extra_files(
    options: ExportOptions, exported: Exported, shards: Sequence[Shard], sizes: Mapping[str, int]
) -> dict[str, bytes]:
    """Tokenizer, config and, last, the index of several shards."""
    found: dict[str, bytes] = {}
    if options.hf_config:
        found |= read_assets(options.hf_config, with_code="auto_map" in exported.config)
    found[CONFIG] = _json(exported.config)
    if len(shards) > 1:
        found[INDEX_FILE] = _json(shard_index(shards, sizes))
    return found


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _shapes(catalog: Catalog) -> dict[str, tuple[int, ...]]:
    return {key: entry.shape for key, entry in catalog.tensors.items()}


def _report(
    source: str, output: str, planned: PlannedExport, written: WriteReport | None
) -> ConversionReport:
    location, exported = planned.opened.location, planned.exported
    notes = list(planned.notes)
    if not any(name.startswith("tokenizer") for name in planned.extra_files):
        notes.append("no tokenizer was written; pass --hf-config DIR to take one over")
    return ConversionReport(
        source=source,
        output=output,
        iteration=location.iteration,
        source_layout=location.kind,
        target="hf",
        dialect=exported.family.architecture,
        tensors=len(exported.tensors),
        objects=len(planned.extra_files),
        groups={},
        masters_checked="not checked",
        dropped=(),
        renamed=(),
        backfilled=(),
        notes=tuple(notes),
        written=written,
        plan=plan_summary(planned.plan),
    )
