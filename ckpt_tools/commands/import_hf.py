"""`import-hf`: a Hugging Face model directory as a Megatron checkpoint of either format, weights only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpt_tools.commands.hf_parts import (
    families_with,
    prove_equal,
    read_config,
    refuse_adapters,
    seen_as,
    unread_notes,
    without_frequencies,
)
from ckpt_tools.commands.outputs import ConversionReport, object_archives, output_directory, refuse_overlap
from ckpt_tools.commands.placements import Layout
from ckpt_tools.commands.target_job import TargetJob
from ckpt_tools.commands.to_fsdp_dtensor import Progress, build_target, make_plan
from ckpt_tools.commands.to_torch_dist import METADATA_JSON_BYTES, slice_placement
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.ranks import connect
from ckpt_tools.execute.rehearse import rehearse
from ckpt_tools.execute.run import Output, WriteOptions, WriteReport, write_checkpoint
from ckpt_tools.formats.detect import METADATA_JSON, TRACKER, Location
from ckpt_tools.formats.files import Files, open_files
from ckpt_tools.formats.hub_cache import snapshot_of
from ckpt_tools.formats.pickling import dump_archive
from ckpt_tools.formats.safetensors import read_safetensors_catalog
from ckpt_tools.formats.unpickle import StandIn, TorchDtype, stand_in
from ckpt_tools.megatron.common_state import COMMON_FILE, CommonState
from ckpt_tools.megatron.fsdp_dtensor.write import TargetOptions
from ckpt_tools.megatron.huggingface.checks import Spec
from ckpt_tools.megatron.huggingface.targets import Imported, import_targets
from ckpt_tools.megatron.keys import EXPERTS
from ckpt_tools.megatron.names import LayerSpec
from ckpt_tools.megatron.record import RECORD_FILE, record_bytes
from ckpt_tools.megatron.settings import read_settings
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions, build_torch_dist_target
from ckpt_tools.megatron.vocab import vocabulary
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.expressions import Value
from ckpt_tools.model.model import Model, Parameter
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.target import Source, Target
from ckpt_tools.model.transfers import Plan, plan_summary
from ckpt_tools.plan.build import build_plan

MLA_NORM = re.compile(r"\.linear_(q|kv)_up_proj\.layer_norm_weight$")
FORMATS = ("torch_dist", "fsdp_dtensor")


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What a user may decide about an import; the defaults let the model decide."""

    to: str = "torch_dist"
    rules: Path | None = None  # a rule file
    dtype: str | None = None
    vocab_multiple: int = 128  # --make-vocab-size-divisible-by times the tensor-parallel size
    layer_spec: LayerSpec | None = None  # te by default
    fsdp: TargetOptions = field(default_factory=TargetOptions)
    torch_dist: TorchDistOptions = field(default_factory=TorchDistOptions)
    layout: Layout | None = None
    iteration: int | None = None  # None: a release
    overwrite: bool = False
    resume: bool = False
    write: WriteOptions = field(default_factory=WriteOptions)


@dataclass(frozen=True, slots=True)
class PlannedImport:
    """An import that is ready to run."""

    imported: Imported
    target: Target
    plan: Plan
    extra_files: Mapping[str, bytes]
    job: TargetJob


def import_hf(
    source: str,
    output: str,
    options: ImportOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Import the Hugging Face directory `source` into the run's root `output`; called on every rank.

    Raises:
        UsageError: options that contradict each other, or an output that cannot be taken.
        UnsupportedCheckpointError: no safetensors weights there, or quantized ones.
        MappingError: an architecture without rules, an adapter, or a model that is not whole or contradicts its
            config.json.
        VerificationError: a cast that makes infinities.
        CorruptCheckpointError, StorageError: damaged files, full disks.
    """
    options = options or ImportOptions()
    ranks = connect()
    folder = snapshot_of(source)
    refuse_overlap(source, Location("safetensors", folder), output)
    files = open_files(folder)
    written = None
    try:
        planned = plan_import(folder, files, options, ranks.world)
        tracker = "release" if options.iteration is None else str(options.iteration)
        name = "release" if options.iteration is None else f"iter_{options.iteration:07d}"
        place = Output(
            output_directory(f"{output.rstrip('/')}/{name}"),
            beside={TRACKER: tracker.encode()},
            extra_files=planned.extra_files,
            overwrite=options.overwrite,
            resume=options.resume,
        )
        rehearse(planned.plan, files, place, options.write, ranks)
        if not dry_run:
            written = write_checkpoint(
                planned.plan, files, place, options.write, ranks=ranks, progress=progress
            )
    finally:
        files.close()
    return _report(source, output, options, planned, written)


def plan_import(source: str, files: Files, options: ImportOptions, world: int) -> PlannedImport:
    """Everything up to the first byte."""
    _check_options(options)
    catalog = read_safetensors_catalog(source)
    refuse_adapters(catalog.tensors)
    catalog, frequencies = without_frequencies(catalog)
    specs = {key: Spec(entry.dtype, entry.shape) for key, entry in catalog.tensors.items()}
    imported = import_targets(
        specs,
        read_config(source),
        dtype=options.dtype,
        vocab_multiple=options.vocab_multiple,
        families=families_with(options.rules),
    )
    own = {key: Value(spec.dtype, spec.shape, (Source(key),)) for key, spec in specs.items()}
    prove_equal(files, catalog, own, imported.equal)
    dropped = (*(f"{key}: no content of its own" for key in imported.dropped), *frequencies)
    imported = replace(imported, dropped=dropped, notes=(*imported.notes, *unread_notes(files)))
    shapes = imported.shapes
    tensors = {key: seen_as(entry, shapes.get(key, entry.shape)) for key, entry in catalog.tensors.items()}
    seen = replace(catalog, tensors=tensors)
    common = common_state(imported, options, source)
    make = _plan_torch_dist if options.to == "torch_dist" else _plan_fsdp_dtensor
    return make(_model(seen, imported, common, options), imported, options, world)


def common_state(imported: Imported, options: ImportOptions, source: str) -> CommonState:
    """The common state of a run that has not begun: its arguments, as Megatron-LM pickles them."""
    args = dict(imported.args)
    args |= {
        "params_dtype": TorchDtype(args["params_dtype"]),
        "transformer_impl": "local" if options.layer_spec == "local" else "transformer_engine",
        "make_vocab_size_divisible_by": options.vocab_multiple,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": source,
        "ckpt_format": options.to,
    }
    namespace = StandIn.__new__(stand_in("argparse", "Namespace"))
    namespace.state = args
    return CommonState(
        {"args": namespace, "checkpoint_version": 3.0, "iteration": options.iteration or 0}, None
    )


def _check_options(options: ImportOptions) -> None:
    if options.to not in FORMATS:
        raise UsageError(f"--to {options.to}: Hugging Face models become {' or '.join(FORMATS)}")
    if options.dtype is not None and options.dtype not in CASTABLE:
        raise UsageError(f"--dtype {options.dtype}: weights can be written as {', '.join(sorted(CASTABLE))}")
    if options.vocab_multiple < 1:
        raise UsageError(f"--vocab-multiple {options.vocab_multiple}: at least one row")


def _plan_torch_dist(model: Model, imported: Imported, options: ImportOptions, world: int) -> PlannedImport:
    wanted = replace(
        options.torch_dist, weights_only=True, layer_spec=options.layer_spec, dtype=options.dtype
    )
    built = build_torch_dist_target(model, wanted)
    archives = object_archives(built.target.objects)
    plan = build_plan(model.catalog, built.target, slice_placement(world), world, archives)
    extra = {METADATA_JSON: METADATA_JSON_BYTES, COMMON_FILE: dump_archive(built.common)}
    job = _with_tokens(TargetJob(built.record), imported, model.common)
    return PlannedImport(imported, built.target, plan, extra | {RECORD_FILE: record_bytes(job.record)}, job)


def _with_tokens(job: TargetJob, imported: Imported, common: CommonState) -> TargetJob:
    """The job with the vocabulary's real size, which config.json tells."""
    tokens = imported.args["vocab_size"]
    rows = vocabulary(((t.key, t.shape) for t in imported.tensors), common.args, tokens)
    return replace(job, record=replace(job.record, tokens=tokens), vocabulary=rows)


def _plan_fsdp_dtensor(model: Model, imported: Imported, options: ImportOptions, world: int) -> PlannedImport:
    wanted = replace(options.fsdp, weights_only=True, layer_spec=options.layer_spec)
    layout = options.layout or Layout(world=world)
    built, job = build_target(model, layout, wanted)
    plan = make_plan(model.catalog, built, layout)
    job = _with_tokens(job, imported, model.common)
    return PlannedImport(imported, built.target, plan, {RECORD_FILE: record_bytes(job.record)}, job)


def _model(catalog: Catalog, imported: Imported, common: CommonState, options: ImportOptions) -> Model:
    """The imported weights as a model.

    MLA's norms are the only ones whose stored names depend on the layer spec (gpt_layer_specs.py).
    """
    found = []
    for tensor in imported.tensors:
        head, experts, tail = tensor.key.partition(EXPERTS)
        expert, _, leaf = tail.partition(".")
        name = f"{head}{EXPERTS}{leaf}" if experts else tensor.key
        if options.layer_spec == "local":
            name = MLA_NORM.sub(r".\1_layernorm.weight", name)
        value = Value(tensor.dtype, tensor.shape, tensor.sources, tensor.zero_filled)
        number = int(expert) if experts else None
        found.append(Parameter(name, tensor.shape, tensor.dtype, {WEIGHT: value}, number, origin=name))
    return Model(catalog, tuple(found), common, read_settings(common))


def _report(
    source: str, output: str, options: ImportOptions, planned: PlannedImport, written: WriteReport | None
) -> ConversionReport:
    target, imported = planned.target, planned.imported
    return ConversionReport(
        source=source,
        output=output,
        iteration=options.iteration,
        source_layout=f"Hugging Face {imported.family.architecture}",
        target=options.to,
        dialect=imported.family.name,
        tensors=len(target.tensors),
        objects=len(target.objects) + len(target.inline),
        groups={},
        masters_checked="none: weights only",
        dropped=(*imported.dropped, *target.dropped),
        renamed=(),
        backfilled=target.backfilled,
        notes=(*imported.notes, *target.notes),
        job=planned.job.as_json(),
        written=written,
        plan=plan_summary(planned.plan),
    )
