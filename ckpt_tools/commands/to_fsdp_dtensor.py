"""`convert-torch-dist-to-fsdp-dtensor`: plan the whole conversion, prove what can be proven, then move the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import astuple, dataclass, field, replace

from ckpt_tools.commands.outputs import (
    ConversionReport,
    choose_output,
    count_objects,
    object_archives,
)
from ckpt_tools.commands.placements import Layout, lay_out, target_model
from ckpt_tools.commands.relayout import relayout
from ckpt_tools.commands.target_job import TargetJob, need_tp, said_tp
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, VerificationError
from ckpt_tools.execute.prove import prove_payloads
from ckpt_tools.execute.ranks import DistributedRanks, Ranks, connect
from ckpt_tools.execute.rehearse import rehearse
from ckpt_tools.execute.run import CheckLevel, Output, WriteOptions, WriteReport, write_checkpoint
from ckpt_tools.formats.container import read_small_file
from ckpt_tools.formats.dcp import read_catalog
from ckpt_tools.formats.detect import Location, locate
from ckpt_tools.formats.files import Files, open_files
from ckpt_tools.megatron.bridge import (
    BRIDGE_FILES,
    LATEST_TRAIN_STATE,
    RUN_CONFIG,
    TRAIN_STATE,
    fsdp_run_config,
    train_state_file,
)
from ckpt_tools.megatron.fsdp_dtensor.write import FsdpTarget, TargetOptions, build_fsdp_target, writer_tp
from ckpt_tools.megatron.record import RECORD_FILE, TargetRecord, record_bytes
from ckpt_tools.megatron.torch_dist.read import read_torch_dist
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.model import Model, without_optimizer
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.transfers import Plan, plan_summary
from ckpt_tools.model.without_gc import without_gc

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) as a conversion goes on."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What a user may decide about a conversion; the defaults let the checkpoint decide."""

    target: TargetOptions = field(default_factory=TargetOptions)
    layout: Layout | None = None  # None: rows over the ranks that convert
    iteration: int | None = None
    check_masters: CheckLevel = "sample"
    ignore_keys: tuple[str, ...] = ()
    trust_pickle: bool = False
    overwrite: bool = False
    resume: bool = False
    tracker: bool = True  # the output's root is to name this iteration as its latest
    write: WriteOptions = field(default_factory=WriteOptions)


@dataclass(frozen=True, slots=True)
class Planned:
    """A conversion that is ready to run."""

    location: Location
    files: Files
    model: Model
    built: FsdpTarget
    job: TargetJob
    plan: Plan


def convert_to_fsdp_dtensor(
    source: str,
    output: str,
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Convert the `torch_dist` checkpoint at `source` and publish it at `output`; called on every rank.

    A source that is `fsdp_dtensor` already is laid out anew (see `relayout`).

    Raises:
        UsageError: options that contradict each other, or an output that cannot be taken.
        UnsupportedCheckpointError: the source is of a kind that is not read.
        MappingError: options that contradict the checkpoint, or facts that cannot be proven from it.
        VerificationError: masters that do not round to the stored weights.
        CorruptCheckpointError, StorageError: damaged files, full disks.
    """
    options = options or ConvertOptions()
    ranks = connect()
    location = locate(source, options.iteration)
    if location.kind == "fsdp_dtensor":
        return relayout(source, output, location, options, ranks, progress, dry_run)
    place = choose_output(source, location, output, options.overwrite, options.resume, options.tracker)
    planned = plan_conversion(location, options, ranks)
    written = None
    try:
        prove_padding(planned)
        rehearse(planned.plan, planned.files, place, options.write, ranks)
        planned, checked = with_proven_masters(planned, options, ranks)
        if not dry_run:
            place = with_small_files(place, planned)
            written = write_checkpoint(
                planned.plan, planned.files, place, options.write, ranks=ranks, progress=progress
            )
    finally:
        planned.files.close()
    return _report(source, output, planned, checked, written)


@without_gc()
def plan_conversion(location: Location, options: ConvertOptions, ranks: Ranks | DistributedRanks) -> Planned:
    """Everything up to the first byte."""
    try:
        files, model = open_source(
            location, options.ignore_keys, options.trust_pickle, options.target.weights_only
        )
    except VerificationError:
        if options.write.check_source != "none":
            _look_for_damage(location, options, ranks)
        raise
    return _planned(location, files, model, options, ranks)


def _planned(
    location: Location,
    files: Files,
    model: Model,
    options: ConvertOptions,
    ranks: Ranks | DistributedRanks,
) -> Planned:
    layout = options.layout or Layout(world=ranks.world)
    built, job = build_target(model, layout, options.target)
    return Planned(location, files, model, built, job, make_plan(model.catalog, built, layout))


def build_target(model: Model, layout: Layout, options: TargetOptions) -> tuple[FsdpTarget, TargetJob]:
    """The target of a conversion for a job of `layout`, and that job.

    Raises:
        UsageError: `--tp` is needed and was left out, or contradicts the layout.
        Otherwise the errors of `build_fsdp_target`.
    """
    stored = writer_tp(model)
    tp = said_tp(options.tp, layout) or stored
    built = build_fsdp_target(model, replace(options, tp=tp.ranks))
    need_tp(built.packed, options.tp, layout, stored)
    record = TargetRecord(built.dialect.name, tp, tokens=built.tokens)
    return built, TargetJob(record, built.packed, built.vocabulary)


def _look_for_damage(location: Location, options: ConvertOptions, ranks: Ranks | DistributedRanks) -> None:
    """Every rank has failed to prove by content what a bucket holds; see whether its share of the source is sound.

    Raises:
        CorruptCheckpointError: some rank's is not.
    """
    with closing(open_files(location.path)) as files:
        catalog = read_catalog(files, options.trust_pickle)
        share = [*catalog.tensors, *catalog.objects][ranks.rank :: ranks.world]
        ranks.together(lambda: prove_payloads(files, catalog, share, options.write.threads))


def with_proven_masters(
    planned: Planned, options: ConvertOptions, ranks: Ranks | DistributedRanks
) -> tuple[Planned, str]:
    """The plan, and what its masters were shown to be; a conversion of weights does without those that are not.

    Raises:
        VerificationError, UnsupportedCheckpointError: masters that do not belong to the stored weights.
    """
    try:
        return planned, prove_masters(planned, options, ranks)
    except (VerificationError, UnsupportedCheckpointError) as error:
        if not options.target.weights_only:
            raise
        first, second, *_ = [*str(error).splitlines(), ""]
    reason = f"{first} {second.strip(' -')}" if first.endswith(":") else first
    note = f"the stored weights are written, not the masters: {reason}"
    model = without_optimizer(planned.model, note)
    return _planned(planned.location, planned.files, model, options, ranks), "left out with the optimizer"


def open_source(
    location: Location,
    ignore_keys: tuple[str, ...] = (),
    trust_pickle: bool = False,
    weights_only: bool = False,
) -> tuple[Files, Model]:
    """The model in the `torch_dist` checkpoint at `location` (see `read_torch_dist`), and its open files."""
    if location.kind != "torch_dist":
        raise UnsupportedCheckpointError(
            f"{location.path} is {A_KIND.get(location.kind, location.kind)}, not a torch_dist checkpoint"
        )
    files = open_files(location.path)
    catalog = read_catalog(files, trust_pickle)
    source = read_torch_dist(
        files, catalog, ignore_keys, trust_pickle, optimizer="masters" if weights_only else "whole"
    )
    return files, source.model


A_KIND = {
    "torch_dist": "already a torch_dist checkpoint",
    "fsdp_dtensor": "already an fsdp_dtensor checkpoint",
    "safetensors": "a Hugging Face model (use import-hf)",
}
"""What a source is that its converter refuses, by kind."""


def make_plan(catalog: Catalog, built: FsdpTarget, layout: Layout) -> Plan:
    """The plan of a target laid out for the ranks of `layout`."""
    archives = object_archives(built.target.objects)
    return lay_out(catalog, built.target, lambda: target_model(built), archives, layout)


def with_small_files(place: Output, planned: Planned) -> Output:
    """The output with its record, and for Bridge with the files that it reads beside the tensors.

    A Bridge source's own are taken over; progress is made up from the args of a Megatron-LM source.
    """
    inside = {RECORD_FILE: record_bytes(planned.job.record)}
    inside = {RECORD_FILE: record_bytes(planned.job.record)}
    if planned.built.dialect.name != "bridge":
        return replace(place, extra_files=inside)
    files, common = planned.files, planned.model.common
    kept = {name: read_small_file(files, name) for name in BRIDGE_FILES if files.exists(name)}
    state = kept.get(TRAIN_STATE) or train_state_file(common.values, common.args)
    inside[TRAIN_STATE] = state
    if RUN_CONFIG in kept:
        inside[RUN_CONFIG] = fsdp_run_config(kept[RUN_CONFIG])
    beside = {**place.beside, LATEST_TRAIN_STATE: state} if place.beside else {}
    return replace(place, extra_files=inside, beside=beside)


def prove_padding(planned: Planned) -> None:
    """Rows that a smaller vocabulary leaves out must be zeros where nothing tells how many tokens are real.

    Raises:
        MappingError: some are not.
    """
    from ckpt_tools.execute.read_box import read_box
    from ckpt_tools.megatron.fsdp_dtensor.live import Rows
    from ckpt_tools.megatron.fsdp_dtensor.tensors import live_value

    vocab = planned.built.vocab
    for parameter in vocab.parameters:
        if parameter.name not in vocab.cut:
            continue
        stored = parameter.stored[0]
        whole = replace(parameter, shape=stored.shape, rows=(Rows(stored, 0, stored.shape[0], 0),))
        value = live_value(whole, WEIGHT)
        tensor = TargetTensor(parameter.name, value.dtype, value.shape, value.sources)
        dropped = Box(
            (vocab.kept, *(0,) * (len(stored.shape) - 1)), (stored.shape[0] - vocab.kept, *stored.shape[1:])
        )
        if read_box(planned.files, planned.model.catalog, tensor, dropped).any():
            prove_payloads(planned.files, planned.model.catalog, sorted({s.key for s in value.sources}), 1)
            raise MappingError(
                f"{parameter.name}: rows {vocab.kept} to {stored.shape[0] - 1} would be cut off and are not zeros; "
                "give the number of real tokens with --vocab-size if they are padding"
            )


def prove_masters(planned: Planned, options: ConvertOptions, ranks: Ranks | DistributedRanks) -> str:
    """Every master rounds to its stored weight: said how many elements were compared.

    Raises:
        CorruptCheckpointError: some do not, as payloads are damaged.
        VerificationError: some do not, and their payloads are what was stored.
    """
    from ckpt_tools.execute.check_masters import MastersReport, check_masters, describe_masters

    mode, threads = options.check_masters, options.write.threads
    if mode == "none":
        return "not checked (--check-masters none)"
    mine = [t for t in planned.built.target.tensors if t.must_round_to][ranks.rank :: ranks.world]
    recipe = planned.model.settings.fp8_recipe

    def check() -> tuple[int, ...]:
        catalog = planned.model.catalog
        try:
            return astuple(check_masters(planned.files, catalog, mine, mode, ranks.check, threads, recipe))
        except VerificationError:
            if options.write.check_source != "none":
                keys = {s.key for t in mine for s in (*t.sources, *t.must_round_to)}
                prove_payloads(planned.files, catalog, sorted(keys), threads)
            raise

    if not any(t.must_round_to for t in planned.built.target.tensors):
        has_some = MASTER in planned.model.roles
        return "left out with the optimizer" if has_some or planned.model.unread else "the source has none"
    return describe_masters(MastersReport(*map(sum, zip(*ranks.together(check), strict=True))), mode)


def _report(
    source: str, output: str, planned: Planned, checked: str, written: WriteReport | None
) -> ConversionReport:
    target = planned.built.target
    return ConversionReport(
        source=source,
        output=output,
        iteration=planned.location.iteration,
        source_layout=planned.model.optimizer_layout or "weights only",
        target="fsdp_dtensor",
        dialect=planned.built.dialect.name,
        tensors=len(target.tensors),
        objects=count_objects(target),
        groups=dict(sorted(Counter(m.group for m in planned.built.memberships.values()).items())),
        masters_checked=checked,
        dropped=target.dropped,
        renamed=target.renamed,
        backfilled=target.backfilled,
        notes=target.notes,
        job=planned.job.as_json(),
        written=written,
        plan=plan_summary(planned.plan),
    )


def membership_map(built: FsdpTarget) -> Mapping[str, int]:
    """The content of a `param_to_param_group_map.json`: every trainable parameter's live name and group id."""
    return {f"model.module.{name}": m.group for name, m in built.memberships.items()}
