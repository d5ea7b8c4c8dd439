"""One conversion, whatever it makes: planned as data, rehearsed, proven, carried out and reported.

`convert` is `WRITE(READ(opened, options), options)`: READ is in `read_model`, one entry a format that is read; a
`Writer` makes a `Conversion` of what was read, one a format that is written. `plan` and `load_dtensors` take the same
`Conversion` before anybody has said who holds which pieces, and ask the sharding room for themselves.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Generic, NamedTuple, TypeVar

from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.outputs import choose_output, output_directory
from ckpt_tools.commands.job.placements import Layout, LiveModel, TargetJob, lay_out, place_model
from ckpt_tools.commands.job.report import ConversionReport, Edits, Masters, MastersUse
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError, VerificationError
from ckpt_tools.execute.move.read_box import read_box
from ckpt_tools.execute.processes.meeting import connect
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.processes.team import with_workers
from ckpt_tools.execute.proof.masters import compare_shared, refuse_masters
from ckpt_tools.execute.proof.prove_source import prove_payloads
from ckpt_tools.execute.run import Output, WriteOptions, WriteReport, rehearse, write_checkpoint
from ckpt_tools.execute.write_job import Preview
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.storage.files import AnyPath, Files, LocalFiles, path_text
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.keys import is_optimizer_key, is_version_2
from ckpt_tools.megatron.run_state.common_state import RUN_CONFIG, TRAIN_STATE
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.choices import CheckLevel, Format, MegatronFormat
from ckpt_tools.model.target import Target, TargetTensor, kept_exactly
from ckpt_tools.model.transfers import Plan, links_summary, plan_summary
from ckpt_tools.model.without_gc import without_gc
from ckpt_tools.plan.links import link_tensors
from ckpt_tools.sharding.topology import Topology

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) during a conversion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How any conversion is carried out."""

    overwrite: bool = False
    resume: bool = False
    hard_link: bool = False  # data files are not copied but get one more name
    write: WriteOptions = field(default_factory=WriteOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(RunOptions):
    """And which Megatron checkpoint is read, and how."""

    iteration: int | None = None
    trust_pickle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOptions(SourceOptions):
    """And how an edited copy is published."""

    tracker: bool = True  # as of `MegatronOptions`
    dry_run: bool = False  # find and prove everything, write nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOptions(SourceOptions):
    """And what of a Megatron checkpoint is converted, and how the output is published."""

    ignore_keys: tuple[str, ...] = ()
    tracker: bool = True  # the output's root is to name this iteration as its latest


@dataclass(frozen=True, slots=True)
class ConvertOptions(MegatronOptions):
    """What a user may decide about a conversion to Megatron-FSDP or DCP; the defaults let the checkpoint decide."""

    target: TargetOptions = field(default_factory=TargetOptions)
    layout: Layout | None = None  # None: rows over the ranks that convert
    check_masters: CheckLevel = "sample"
    keep_plain: bool = False  # the state dict of a model that is not Megatron's is laid out as what it is


class CutRows(NamedTuple):
    """Rows of a tensor that the output leaves out, and that must be zeros."""

    tensor: TargetTensor
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What is written and what of, what must be proven first, and what is said of it."""

    to: Format
    loader: str | None  # None: the program that loads the source
    catalog: Catalog  # the source's, with tensors added that stand inside its objects
    target: Target
    extra_files: Mapping[str, bytes] = field(default_factory=dict)  # next to the tensors
    beside: Mapping[str, bytes] = field(default_factory=dict)  # in the run's root, where the output has one
    job: TargetJob | None = None
    optimizer_layout: str | None = None  # of the source
    weights_only: bool = False  # what the source says of its optimizer and schedule is not carried
    groups: Mapping[int, int] = field(default_factory=dict)
    masters: MastersUse = "none"
    must_round: Sequence[TargetTensor] = ()  # masters, with the stored weights that they must round to
    fp8_recipe: str | None = None  # of a source with weights held in FP8 (`ModelSettings.fp8_recipe`)
    must_be_zero: Sequence[CutRows] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Contents):
    """A conversion of which it is not said yet who holds which pieces."""

    job: TargetJob
    live_model: Callable[[], LiveModel]  # as the job that loads it has it; a job's placement is asked of it
    archives: Callable[[], Iterable[tuple[str, bytes]]]  # of the target's objects
    keep_order: bool = False  # the target's, in the metadata: an optimizer may number parameters by it
    without_masters: Callable[[str], Prepared] | None = None  # as of `Conversion`

    def planned(
        self, layout: Layout, iteration: int | None, check_masters: CheckLevel = "sample"
    ) -> Conversion:
        """The conversion for the ranks of `layout`."""
        again = self.without_masters
        tp = self.job.record.tp if layout.topology is None else None
        if self.to == "fsdp_dtensor" and tp is not None and tp.source == "--tp" and tp.ranks > 1:
            # With --tp alone, check that at least one job of that TP size can exist.
            place_model(self.live_model(), Layout("mfsdp-v1", Topology(tp=tp.ranks, etp=1)))
        core = None if layout.name == "even" else place_model(self.live_model(), layout)
        plan = lay_out(self.catalog, self.target, core, self.archives(), layout, keep_order=self.keep_order)
        return Conversion(
            **{one.name: getattr(self, one.name) for one in fields(Contents)},
            plan=plan,
            iteration=iteration,
            check_masters=check_masters,
            without_masters=None
            if again is None
            else lambda note: again(note).planned(layout, iteration, check_masters),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion(Contents):
    """What every command that writes starts from."""

    plan: Plan
    iteration: int | None
    architecture: str | None = None
    check_masters: CheckLevel = "sample"
    advice: str | None = None  # what else can be done when masters do not round
    without_masters: Callable[[str], Conversion] | None = None  # for masters that do not; takes a note why
    edits: Edits | None = None  # of a command that writes what it reads, but for these
    copies_files: bool = False  # `.metadata` is one of the `extra_files`, none is made of the target


AnyOptions = TypeVar("AnyOptions", bound=RunOptions)


@dataclass(frozen=True, slots=True)
class Writer(Generic[AnyOptions]):
    """How checkpoints of one format are made: what is opened for them, where they go, and what is written."""

    open: Callable[[str, AnyOptions], AbstractContextManager[Opened]]
    place: Callable[[str, Location, str, AnyOptions], Output]
    plan: Callable[[Opened, AnyOptions, int], Conversion]  # the last: number of converting ranks
    imported_as: MegatronFormat | None = None  # what `import-hf` makes of a model that this does not take


def open_source(source: str, options: SourceOptions) -> Opened:
    """The Megatron checkpoint that is meant."""
    return open_checkpoint(source, options.iteration, options.trust_pickle, of_run=True)


def like_to_like(
    source: str, location: Location, output: str, options: MegatronOptions | EditOptions
) -> Output:
    """See `choose_output`."""
    return choose_output(source, location, output, options.overwrite, options.resume, options.tracker)


def convert(
    source: AnyPath,
    output: AnyPath,
    writer: Writer[AnyOptions],
    options: AnyOptions,
    progress: Progress | None = None,
    dry_run: bool = False,
    ranks: Ranks | None = None,
) -> ConversionReport:
    """Make what `writer` makes of the checkpoint at `source`, and publish it at `output`; called on every rank."""
    source, output = path_text(source), path_text(output)
    with ExitStack() as stack:
        ranks = stack.enter_context((ranks or connect()).ending_together())
        ranks.agree(_asked(output, options, dry_run))
        opened = ranks.everywhere(lambda: stack.enter_context(writer.open(source, options)))
        if opened.location.kind == "safetensors" and writer.imported_as is not None:
            words = shlex.join(["import-hf", source, output, "--to", writer.imported_as])
            raise UnsupportedCheckpointError(
                f"{opened.location.path} is a Hugging Face model. `{words}` makes a Megatron checkpoint of it"
            )
        place = writer.place(source, opened.location, output, options)
        conversion = _linked(_plan(writer, opened, options, ranks), opened, options)
        contradictions = _contradictions(opened, conversion)
        prove_zeros(opened, conversion)
        nbytes = conversion.plan.bytes_to_write
        if options.write.check_source == "all":
            nbytes += sum(conversion.plan.links.values())  # which are read
        with (
            with_workers(nbytes, options.write, ranks, place.directory) as (all_ranks, write),
            all_ranks.ending_together() as ranks,
        ):
            preview = rehearse(conversion.plan, opened.files, _complete(place, conversion), write, ranks)
            conversion, masters = with_proven_masters(opened, conversion, write, ranks)
            conversion = _linked(conversion, opened, options)  # it may be another now
            written = None
            if not dry_run:
                # A Hugging Face model keeps no masters.
                written_too = conversion.target.tensors if conversion.to != "hf" else ()
                written = write_checkpoint(
                    conversion.plan,
                    opened.files,
                    _complete(place, conversion),
                    write,
                    ranks=ranks,
                    progress=progress,
                    kept=kept_exactly(written_too, conversion.catalog),
                )
    return _report(source, output, opened.location, conversion, masters, written or preview, contradictions)


def _asked(output: str, options: RunOptions, dry_run: bool) -> dict[str, str]:
    """What all ranks must have been asked for: everything but how fast each works."""
    place = output_directory(output)
    write = {one.name: getattr(options.write, one.name) for one in fields(options.write)}
    given = {one.name: getattr(options, one.name) for one in fields(options)} | write
    for name in ("write", "threads", "memory_bytes", "workers", "tiles"):
        del given[name]
    where = place if isinstance(place, str) else str(place.absolute())
    asked = {"options": type(options).__name__, "output": where, "dry_run": repr(dry_run)}
    return asked | {name: repr(value) for name, value in given.items()}


def _contradictions(opened: Opened, conversion: Conversion) -> tuple[str, ...]:
    """Settings and counters of a Megatron source that cannot be true, each warned of: no byte's way rests on them.

    What does rest on a setting was refused by who decided. An export asks them all for itself.
    """
    if not opened.format.is_run or conversion.to == "hf" or conversion.edits is not None:
        return ()
    from ckpt_tools.verify.checkpoint.counters import check_counters
    from ckpt_tools.verify.readiness.model_rules import check_settings

    files, catalog, common = opened.files, opened.catalog, opened.common
    checks = (
        check_settings(opened.location.kind, opened.format.weights(catalog).found, common),
        check_counters(files, catalog, common, opened.trust_pickle, conversion.weights_only),
    )
    lines = tuple(f"{one.where}: {one.message}" for check in checks for one in check.findings)
    for line in lines:
        warnings.warn(f"{opened.location.path}: {line}; it is copied unchanged", stacklevel=3)
    return lines


def _plan(writer: Writer[AnyOptions], opened: Opened, options: AnyOptions, ranks: Ranks) -> Conversion:
    """Everything up to the first byte. A proof by content that fails may be a matter of damaged payloads."""
    try:
        with without_gc():
            return ranks.everywhere(lambda: writer.plan(opened, options, ranks.world))
    except VerificationError:
        if options.write.check_source == "all":
            keys = [*opened.catalog.tensors, *opened.catalog.objects]
            _prove_shared(opened.files, opened.catalog, keys, ranks, options.write.threads)
        raise


def _linked(conversion: Conversion, opened: Opened, options: RunOptions) -> Conversion:
    """The conversion with links in the place of data files, if these are asked for."""
    if options.hard_link and not isinstance(opened.files, LocalFiles):
        raise UsageError(f"--hard-link: {opened.location.path} is not a folder on a disk. Leave it out")
    if not options.hard_link or conversion.plan.links or conversion.copies_files:
        return conversion
    plan = link_tensors(
        conversion.plan, conversion.target, conversion.catalog, opened.catalog, opened.files.size
    )
    return replace(conversion, plan=plan)


def _complete(place: Output, conversion: Conversion) -> Output:
    """The output with its small files."""
    trackers = {**place.beside, **conversion.beside} if place.beside else {}
    is_dcp = conversion.to != "hf" and not conversion.copies_files
    return replace(place, extra_files=conversion.extra_files, beside=trackers, is_dcp=is_dcp)


def prove_zeros(opened: Opened, conversion: Conversion) -> None:
    """Raise MappingError if rows that are left out hold values; for an unknown number of real tokens."""
    for tensor, box in conversion.must_be_zero:
        if read_box(opened.files, conversion.catalog, tensor, box).any():
            prove_payloads(opened.files, conversion.catalog, sorted({s.key for s in tensor.sources}), 1)
            raise MappingError(
                f"{tensor.key}: rows {box.start[0]} to {tensor.shape[0] - 1} would be cut off and are not zeros; "
                "give the number of real tokens with --vocab-size if they are padding"
            )


def with_proven_masters(
    opened: Opened, conversion: Conversion, options: WriteOptions, ranks: Ranks
) -> tuple[Conversion, Masters]:
    """The conversion, and what its masters were shown to be; one of weights does without those that are not."""
    try:
        return conversion, _prove_masters(opened, conversion, options, ranks)
    except (VerificationError, UnsupportedCheckpointError) as error:
        if isinstance(error, UnsupportedCheckpointError) and conversion.masters == "left_out":
            # Lower halves of masters, which say nothing of the weights.
            return with_note(conversion, not_compared(str(error))), Masters("left_out")
        if conversion.without_masters is None:
            raise
        first, second, *_ = [*str(error).splitlines(), ""]
    reason = f"{first} {second.strip(' -')}" if first.endswith(":") else first
    with without_gc():
        return conversion.without_masters(
            f"the stored weights are written, not the masters: {reason}"
        ), Masters("left_out")


def not_compared(why: str) -> str:
    """The note that stored weights were not compared with their masters, which are left out."""
    return f"the weights were not compared with their masters: {why.splitlines()[0].rstrip(':')}"


def with_note(conversion: Conversion, note: str) -> Conversion:
    """The conversion with one more note in its report."""
    target = conversion.target
    return replace(conversion, target=replace(target, notes=(*target.notes, note)))


def _prove_masters(opened: Opened, conversion: Conversion, options: WriteOptions, ranks: Ranks) -> Masters:
    """Every master rounds to its stored weight; the ranks share them out."""
    mode, must_round = conversion.check_masters, conversion.must_round
    if mode == "none" or not must_round:
        return Masters(conversion.masters)
    files, catalog, threads = opened.files, conversion.catalog, options.threads
    report, problems = compare_shared(files, catalog, must_round, mode, ranks, threads, conversion.fp8_recipe)
    if problems and options.check_source == "all":
        keys = sorted({s.key for t in must_round for s in (*t.sources, *t.must_round_to)})
        _prove_shared(files, catalog, keys, ranks, threads)
    refuse_masters(problems, conversion.advice)
    return Masters(conversion.masters, mode, report)


def _prove_shared(files: Files, catalog: Catalog, keys: Sequence[str], ranks: Ranks, threads: int) -> None:
    share = keys[ranks.rank :: ranks.world]
    ranks.together(lambda: prove_payloads(files, catalog, share, threads))


def _report(
    source: str,
    output: str,
    location: Location,
    conversion: Conversion,
    masters: Masters,
    written: WriteReport | Preview,
    contradictions: tuple[str, ...],
) -> ConversionReport:
    target = conversion.target
    return ConversionReport(
        source=source,
        output=output,
        iteration=conversion.iteration,
        source_iteration=location.label,
        source_format=location.kind,
        optimizer_layout=conversion.optimizer_layout,
        output_format=conversion.to,
        loader=conversion.loader,
        architecture=conversion.architecture,
        tensors=len(target.tensors),
        objects=len(target.objects) + len(target.inline),
        groups=dict(conversion.groups),
        masters=masters,
        dropped=(
            *_lost_weights(conversion, masters),
            *target.dropped,
            *location.left_out,
            *_not_carried(location, conversion),
        ),
        kept=target.kept,
        renamed=target.renamed,
        backfilled=target.backfilled,
        notes=(*target.notes, *_without_optimizer(conversion)),
        warnings=contradictions,
        job=None if conversion.job is None else conversion.job.as_json(),
        written=None if isinstance(written, Preview) else written,
        replaced=written.replaced,
        tracker=written.tracker,
        plan=plan_summary(conversion.plan) | links_summary(conversion.plan),
        edits=conversion.edits or Edits(),
    )


def _lost_weights(conversion: Conversion, masters: Masters) -> Iterator[str]:
    """A line on stored weights that the masters, which are written in their place, do not give back."""
    found = masters.found
    if masters.use != "written" or not found.accepted:
        return
    weights = {source.key for tensor in conversion.must_round for source in tensor.must_round_to}
    if weights - {source.key for tensor in conversion.target.tensors for source in tensor.sources}:
        yield (
            f"stored weights: {found.accepted:,} of {found.elements:,} compared elements are not their masters "
            f"rounded to even; {conversion.to} holds the masters alone"
        )


def _without_optimizer(conversion: Conversion) -> Iterator[str]:
    """How Megatron-LM starts from weights alone: what `preflight` says by its rules and its launch command."""
    target = conversion.target
    keys = [one.key for items in (target.tensors, target.inline, target.objects) for one in items]
    if conversion.loader == "bridge" or not keys or any(map(is_optimizer_key, keys)):
        return
    if conversion.to == "torch_dist":
        yield "no optimizer is in it: jobs start from it with --finetune"
    elif conversion.to == "fsdp_dtensor" and is_version_2(keys):
        yield "no optimizer is in it: jobs of Megatron-FSDP v2 start from it with --no-load-optim"
    elif conversion.to == "fsdp_dtensor":
        yield (
            "no optimizer is in it: core-0.18 and later need a fresh one (--fresh-optimizer), core-0.16 and "
            "core-0.17 start from it with --finetune"
        )


def _not_carried(location: Location, conversion: Conversion) -> Iterator[str]:
    """Megatron-Bridge's own files, where the program that loads the output reads none."""
    loader = conversion.loader or conversion.to
    for name, is_there in ((RUN_CONFIG, location.has_run_config), (TRAIN_STATE, location.has_train_state)):
        if is_there and name not in conversion.extra_files:
            yield f"{name}: Megatron-Bridge's, which {loader} does not read"
