"""`convert` of an `fsdp_dtensor` checkpoint: the same tensors and objects, laid out for another training job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_tools.commands.outputs import ConversionReport, choose_output, count_objects
from ckpt_tools.commands.placements import Layout, Model, lay_out, source_model
from ckpt_tools.commands.target_job import TargetJob, need_tp, said_tp
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.ranks import DistributedRanks, Ranks
from ckpt_tools.execute.rehearse import rehearse
from ckpt_tools.execute.run import Output, write_checkpoint
from ckpt_tools.formats.container import read_archive, read_small_file
from ckpt_tools.formats.dcp import read_catalog
from ckpt_tools.formats.detect import Location
from ckpt_tools.formats.files import Files, open_files
from ckpt_tools.megatron.bridge import BRIDGE_FILES, LATEST_TRAIN_STATE, TRAIN_STATE
from ckpt_tools.megatron.common_state import read_common_state
from ckpt_tools.megatron.fsdp_dtensor.entries import FsdpSource, read_fsdp_source
from ckpt_tools.megatron.fsdp_dtensor.regroup import Relayout, build_relayout
from ckpt_tools.megatron.fsdp_dtensor.stored import packed_projections
from ckpt_tools.megatron.fsdp_dtensor.write import TargetOptions
from ckpt_tools.megatron.names import ModelStyle
from ckpt_tools.megatron.record import (
    RECORD_FILE,
    TargetRecord,
    record_bytes,
)
from ckpt_tools.megatron.settings import read_settings
from ckpt_tools.megatron.torch_dist.optimizer_layouts.expected import expected_states, refuse_missing_states
from ckpt_tools.megatron.vocab import vocabulary
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.model.transfers import plan_summary

if TYPE_CHECKING:
    from ckpt_tools.commands.to_fsdp_dtensor import ConvertOptions


@dataclass(frozen=True, slots=True)
class OpenedFsdp:
    """An `fsdp_dtensor` checkpoint, and what laying it out for another job takes over from it."""

    files: Files
    source: FsdpSource
    style: ModelStyle
    built: Relayout
    job: TargetJob

    @property
    def catalog(self) -> Catalog:
        return self.source.catalog

    def model(self) -> Model:
        """The model as the sharding room asks for it."""
        return source_model(self.source, self.style)

    def archives(self) -> Iterator[tuple[str, bytes]]:
        """(key, bytes) of every object, as they are stored; what several keys share is read once."""
        read: dict[Item, bytes] = {}
        for key, item in self.built.archives:
            if item not in read:
                read[item] = read_archive(self.files, item)
            yield key, read[item]


def open_fsdp(location: Location, options: ConvertOptions, layout: Layout) -> OpenedFsdp:
    """The checkpoint at `location`, for a job of `layout`. Close its files when done.

    Raises:
        UsageError: an option that only a conversion from another format can meet, or `--tp` is needed.
    """
    refuse_changes(location, options)
    files = open_files(location.path)
    try:
        catalog = read_catalog(files, options.trust_pickle)
        common = read_common_state(files, catalog, options.trust_pickle)
        source = read_fsdp_source(files, catalog, common, options.ignore_keys, options.trust_pickle)
        if source.has_optimizer:
            held = {kind for tensor in source.tensors for kind in tensor.states}
            refuse_missing_states(held, expected_states(common, list(source.groups.values())))
        settings = read_settings(common)
        local = (
            settings.local_norms
            if options.target.layer_spec is None
            else options.target.layer_spec == "local"
        )
        style = ModelStyle(bool(local), bool(settings.grouped_experts), settings.fused_mla_down)
        old, stored = source.record or TargetRecord(), source.tp
        tp = said_tp(options.target.tp, layout) or stored
        names = [tensor.name for tensor in source.tensors]
        packed = packed_projections(names)
        if layout.topology is not None:
            need_tp(packed, options.target.tp, layout, stored)
        built = build_relayout(source, tp)
        args = common.args or common.model_config
        rows = vocabulary(((t.name, t.shape) for t in source.tensors), args, old.tokens)
        job = TargetJob(replace(old, tp=tp), packed, rows)
        return OpenedFsdp(files, source, style, built, job)
    except BaseException:
        files.close()
        raise


def refuse_changes(location: Location, options: ConvertOptions) -> None:
    """
    Raises:
        UsageError: an option that only a conversion from another format can meet.
    """
    kept = TargetOptions(tp=options.target.tp, layer_spec=options.target.layer_spec)
    if options.target != kept:
        raise UsageError(
            f"{location.path} is already an fsdp_dtensor checkpoint; it can be laid out for another topology, but "
            "its names, types, groups and vocabulary stay as they are: leave those options out"
        )


def relayout(
    source: str,
    output: str,
    location: Location,
    options: ConvertOptions,
    ranks: Ranks | DistributedRanks,
    progress: Callable[[int, int], None] | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Lay the checkpoint at `location` out anew and publish it at `output`; called on every rank.

    Raises:
        UsageError: an impossible layout, an option that does not apply, or an output that cannot be taken.
        MappingError, CorruptCheckpointError, StorageError: as reading, planning and writing say.
    """
    refuse_changes(location, options)
    if options.layout is None and options.target.tp is None:
        raise UsageError(
            f"nothing to convert: {location.path} is an fsdp_dtensor checkpoint already, and no other job is named. "
            "Give its size to lay the checkpoint out for it (--gpus or --dp-shard, --tp, --world-size), or another "
            "format with --to"
        )
    place = choose_output(source, location, output, options.overwrite, options.resume, options.tracker)
    layout = options.layout or Layout(world=ranks.world)
    opened = open_fsdp(location, options, layout)
    try:
        target = opened.built.target
        plan = lay_out(opened.catalog, target, opened.model, opened.archives(), layout)
        written = None
        rehearse(plan, opened.files, place, options.write, ranks)
        if not dry_run:
            place = _with_small_files(place, opened)
            written = write_checkpoint(
                plan, opened.files, place, options.write, ranks=ranks, progress=progress
            )
    finally:
        opened.files.close()
    return ConversionReport(
        source=source,
        output=output,
        iteration=location.iteration,
        source_layout="fsdp_dtensor",
        target="fsdp_dtensor",
        dialect="the same loader",
        tensors=len(target.tensors),
        objects=count_objects(target),
        groups={},
        masters_checked="carried over",
        dropped=target.dropped,
        renamed=target.renamed,
        backfilled=target.backfilled,
        notes=target.notes,
        job=opened.job.as_json(),
        written=written,
        plan=plan_summary(plan),
    )


def _with_small_files(place: Output, opened: OpenedFsdp) -> Output:
    """The output with its record, and with the files Bridge reads beside the tensors, as the source has them."""
    files = opened.files
    kept = {name: read_small_file(files, name) for name in BRIDGE_FILES if files.exists(name)}
    kept[RECORD_FILE] = record_bytes(opened.job.record)
    beside = dict(place.beside)
    if beside and TRAIN_STATE in kept:
        beside[LATEST_TRAIN_STATE] = kept[TRAIN_STATE]
    return replace(place, extra_files=kept, beside=beside)
