"""`convert-fsdp-dtensor-to-torch-dist`: the way back, planned as a whole before the first byte."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ckpt_tools.commands.opened import open_checkpoint
from ckpt_tools.commands.outputs import ConversionReport, choose_output, count_objects, object_archives
from ckpt_tools.commands.target_job import TargetJob
from ckpt_tools.commands.to_fsdp_dtensor import A_KIND, Progress
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError
from ckpt_tools.execute.ranks import DistributedRanks, Ranks, connect
from ckpt_tools.execute.rehearse import rehearse
from ckpt_tools.execute.run import WriteOptions, WriteReport, write_checkpoint
from ckpt_tools.formats.container import read_small_file
from ckpt_tools.formats.detect import METADATA_JSON, Location
from ckpt_tools.formats.files import Files
from ckpt_tools.formats.pickling import dump_archive
from ckpt_tools.megatron.bridge import BRIDGE_FILES
from ckpt_tools.megatron.common_state import COMMON_FILE
from ckpt_tools.megatron.fsdp_dtensor.entries import read_fsdp_source
from ckpt_tools.megatron.fsdp_dtensor.read import fsdp_model
from ckpt_tools.megatron.keys import stacked_axes
from ckpt_tools.megatron.record import RECORD_FILE, record_bytes
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions, TorchDistTarget, build_torch_dist_target
from ckpt_tools.model.box import Box
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.transfers import Plan, plan_summary
from ckpt_tools.model.without_gc import without_gc
from ckpt_tools.plan.build import Placement, build_plan
from ckpt_tools.sharding.fsdp2 import chunk_rows

# Readers of core 0.18 and older look at all four fields, later ones ignore the last two.
METADATA_JSON_BYTES = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    b'"common_backend": "torch", "common_backend_version": 1}'
)
EXTRA_STATE = "*._extra_state/shard_*"


@dataclass(frozen=True, slots=True)
class ToTorchDistOptions:
    """What a user may decide about a conversion; the defaults let the checkpoint decide."""

    target: TorchDistOptions = field(default_factory=TorchDistOptions)
    extra_state_template: str | None = None  # a torch_dist checkpoint of the same model
    iteration: int | None = None
    ignore_keys: tuple[str, ...] = ()
    trust_pickle: bool = False
    overwrite: bool = False
    resume: bool = False
    tracker: bool = True  # the output's root is to name this iteration as its latest
    write: WriteOptions = field(default_factory=WriteOptions)


@dataclass(frozen=True, slots=True)
class PlannedTorchDist:
    """A conversion that is ready to run."""

    location: Location
    files: Files
    built: TorchDistTarget
    plan: Plan


def convert_to_torch_dist(
    source: str,
    output: str,
    options: ToTorchDistOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Convert the `fsdp_dtensor` checkpoint at `source` and publish it at `output`; called on every rank.

    Raises:
        UsageError: a fact only the user can give is missing, or an output that cannot be taken.
        UnsupportedCheckpointError: the source is no `fsdp_dtensor` checkpoint, or of a kind that is not read.
        MappingError: options that contradict the checkpoint, or facts that cannot be proven from it.
        CorruptCheckpointError, StorageError: damaged files, full disks.
    """
    options = options or ToTorchDistOptions()
    ranks = connect()
    planned = plan_torch_dist(source, options, ranks)
    written = None
    try:
        place = choose_output(
            source, planned.location, output, options.overwrite, options.resume, options.tracker
        )
        rehearse(planned.plan, planned.files, place, options.write, ranks)
        if not dry_run:
            place = replace(place, extra_files=extra_files(planned))
            written = write_checkpoint(
                planned.plan, planned.files, place, options.write, ranks=ranks, progress=progress
            )
    finally:
        planned.files.close()
    return _report(source, output, planned, written)


@without_gc()
def plan_torch_dist(
    source: str, options: ToTorchDistOptions, ranks: Ranks | DistributedRanks
) -> PlannedTorchDist:
    """Everything up to the first byte."""
    opened = open_checkpoint(source, options.iteration, options.trust_pickle)
    try:
        if opened.location.kind != "fsdp_dtensor":
            raise UnsupportedCheckpointError(
                f"{opened.location.path} is {A_KIND.get(opened.location.kind, opened.location.kind)}, "
                "not an fsdp_dtensor checkpoint"
            )
        target_options = options.target
        if options.extra_state_template is not None:
            keys = template_keys(options.extra_state_template, options.trust_pickle)
            target_options = replace(target_options, extra_state_template=keys)
        read = read_fsdp_source(
            opened.files,
            opened.catalog,
            opened.common,
            options.ignore_keys,
            options.trust_pickle,
            weights_only=target_options.weights_only,
        )
        model = fsdp_model(
            read,
            tp=target_options.tp,
            layer_spec=target_options.layer_spec,
            weights_only=target_options.weights_only,
        )
        built = build_torch_dist_target(model, target_options)
        archives = object_archives(built.target.objects)
        plan = build_plan(read.catalog, built.target, slice_placement(ranks.world), ranks.world, archives)
    except BaseException:
        opened.files.close()
        raise
    return PlannedTorchDist(opened.location, opened.files, built, plan)


def template_keys(template: str, trust_pickle: bool = False) -> tuple[str, ...]:
    """Keys of all extra-state objects of a `torch_dist` checkpoint.

    Raises:
        MappingError: it has none.
    """
    with open_checkpoint(template, trust_pickle=trust_pickle) as opened:
        keys = tuple(key for key in opened.catalog.objects if fnmatchcase(key, EXTRA_STATE))
    if not keys:
        raise MappingError(
            f"{template} holds no _extra_state objects, so it cannot serve as --extra-state template"
        )
    return keys


def slice_placement(world: int) -> Placement:
    """A chunk for every layer and expert, its rows shared out over `world` files."""

    def place(tensor: TargetTensor) -> Sequence[tuple[int, Box]]:
        axes = stacked_axes(tensor.key)
        lead, shape = tensor.shape[:axes], tensor.shape[axes:]
        cuts = [chunk_rows(shape[0], world, rank) for rank in range(world)] if shape else [(0, 1)]
        rest = (0,) * (len(shape) - 1)
        return [
            (
                rank,
                Box((*index, start, *rest), (*(1,) * axes, stop - start, *shape[1:]))
                if shape
                else Box(index, (1,) * axes),
            )
            for index in itertools.product(*map(range, lead))
            for rank, (start, stop) in enumerate(cuts)
            if stop > start
        ]

    return place


def extra_files(planned: PlannedTorchDist) -> dict[str, bytes]:
    """The files beside the tensors: `metadata.json`, `common.pt`, the record, and Bridge's own as they are."""
    files = planned.files
    kept = {name: read_small_file(files, name) for name in BRIDGE_FILES if files.exists(name)}
    return kept | {
        METADATA_JSON: METADATA_JSON_BYTES,
        COMMON_FILE: dump_archive(planned.built.common),
        RECORD_FILE: record_bytes(planned.built.record),
    }


def _report(
    source: str, output: str, planned: PlannedTorchDist, written: WriteReport | None
) -> ConversionReport:
    built, target = planned.built, planned.built.target
    return ConversionReport(
        source=source,
        output=output,
        iteration=planned.location.iteration,
        source_layout="fsdp_dtensor",
        target="torch_dist",
        dialect="fully_reshardable" if built.groups else "weights only",
        tensors=len(target.tensors),
        objects=count_objects(target),
        groups=dict(enumerate(built.groups)),
        masters_checked="the masters are the source",
        dropped=target.dropped,
        renamed=target.renamed,
        backfilled=target.backfilled,
        notes=target.notes,
        job=TargetJob(built.record, (), built.vocabulary).as_json(),
        written=written,
        plan=plan_summary(planned.plan),
    )
