"""WRITE `torch_dist`: the way back from `fsdp_dtensor`, or from any optimizer layout to `fully_reshardable`.

Planned as a whole before the first byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ckpt_tools.commands.job.conversion import (
    Conversion,
    MegatronOptions,
    Progress,
    Writer,
    convert,
    like_to_like,
    open_source,
)
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.outputs import object_archives, read_bridge_files
from ckpt_tools.commands.job.placements import TargetJob
from ckpt_tools.commands.job.read_model import Wanted, keeps_masters, master_targets, read_model
from ckpt_tools.commands.job.report import ConversionReport, MastersUse
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError, raise_if
from ckpt_tools.formats.locate.detect import METADATA_JSON, METADATA_JSON_TEXT, RECORD_FILE, Location
from ckpt_tools.formats.storage.files import AnyPath
from ckpt_tools.formats.torch_archive.item_reader import read_archive
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.megatron.fsdp_dtensor.parameters import packed_projections
from ckpt_tools.megatron.keys import stacked_axes
from ckpt_tools.megatron.run_state.common_state import COMMON_FILE
from ckpt_tools.megatron.run_state.record import read_record, record_bytes
from ckpt_tools.megatron.run_state.settings import training_dtype
from ckpt_tools.megatron.torch_dist.grids import NO_SIZE, incomplete_objects
from ckpt_tools.megatron.torch_dist.read import Extent
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions, build_torch_dist_target, carried_objects
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.model import Model, without_optimizer
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.target import TargetObject, TargetTensor
from ckpt_tools.plan.build import Placement, build_plan
from ckpt_tools.sharding.placement import chunk_rows

EXTRA_STATE = "*._extra_state/shard_*"


@dataclass(frozen=True, slots=True)
class ToTorchDistOptions(MegatronOptions):
    """What a user may decide about a conversion; the defaults let the checkpoint decide."""

    target: TorchDistOptions = field(default_factory=TorchDistOptions)
    extra_state_template: str | None = None  # a torch_dist checkpoint of the same model


def convert_to_torch_dist(
    source: AnyPath,
    output: AnyPath,
    options: ToTorchDistOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Convert the checkpoint at `source` and publish it at `output`; called on every rank.

    It is `fsdp_dtensor`, or `torch_dist` of another optimizer layout or for another program.

    Raises:
        UsageError: a fact only the user can give is missing, nothing to convert, or an output that cannot be taken.
        UnsupportedCheckpointError: the source's kind or optimizer layout is unsupported.
        MappingError: options that contradict the checkpoint, or facts that cannot be proven from it.
        VerificationError: masters that do not round to the stored weights.
        CorruptCheckpointError, StorageError: damaged files, full disks.
    """
    return convert(source, output, TO_TORCH_DIST, options or ToTorchDistOptions(), progress, dry_run)


def plan_torch_dist(opened: Opened, options: ToTorchDistOptions, world: int) -> Conversion:
    """Everything up to the first byte; `world` processes convert."""
    target = options.target
    if options.extra_state_template is not None:
        with open_checkpoint(options.extra_state_template, trust_pickle=options.trust_pickle) as template:
            keys = tuple(key for key in template.catalog.objects if fnmatchcase(key, EXTRA_STATE))
        if not keys:
            raise MappingError(
                f"{options.extra_state_template} holds no _extra_state objects, so it cannot serve as --extra-state "
                "template"
            )
        raise_if(
            (f"{name}: {problem}" for name, problem in incomplete_objects(keys, template.common)),
            MappingError,
            f"{options.extra_state_template} cannot serve as --extra-state template, its objects lack a part",
            "Take another checkpoint, or --extra-state derive",
        )
        target = replace(target, extra_state_template=keys)
    return write_torch_dist(_read_source(opened, options), opened, target, world)


def _read_source(opened: Opened, options: ToTorchDistOptions) -> Model:
    """The model in a checkpoint of either kind."""
    kind, target = opened.location.kind, options.target
    if target.tp is not None and (
        kind == "torch_dist" or not packed_projections(opened.catalog.tensors)
    ):  # nothing in the source is arranged for one tensor-parallel size
        raise UsageError(f"--tp {target.tp}: {NO_SIZE}")
    optimizer: Extent = "none" if target.weights_only else "whole"
    if target.weights_only and target.dtype not in (None, training_dtype(opened.common)):
        optimizer = "masters"
    workers = options.write.workers
    wanted = Wanted(optimizer, options.ignore_keys, False, target.tp, target.layer_spec, workers)
    if kind in ("fsdp_dtensor", "dcp"):
        return read_model(opened, wanted)
    if kind != "torch_dist":
        raise UnsupportedCheckpointError(
            f"{opened.location.path} is {opened.format.described}, not an fsdp_dtensor or torch_dist checkpoint"
        )
    model = replace(read_model(opened, wanted), record=read_record(opened.files))
    _refuse_same(opened.location, model, options)
    return model


def _refuse_same(location: Location, model: Model, options: ToTorchDistOptions) -> None:
    """Raise UsageError if a `torch_dist` checkpoint would be written unchanged."""
    known = None if model.record is None else model.record.target
    wanted = replace(options.target, dialect=None) if options.target.dialect == known else options.target
    is_plain = model.optimizer_layout in (None, "fully_reshardable") and not any(
        entry.made for entry in model.catalog.tensors.values()
    )
    asked = wanted != TorchDistOptions() or options.extra_state_template or options.ignore_keys
    if is_plain and not asked:
        layout = model.optimizer_layout or "without an optimizer"
        raise UsageError(
            f"nothing to convert: {location.path} is a torch_dist checkpoint ({layout}) already, which loads at any "
            "topology. Name another program with --target, another form with --stacked, --dtype or "
            "--weights-only, or another format with --to"
        )


def write_torch_dist(model: Model, opened: Opened, options: TorchDistOptions, world: int) -> Conversion:
    """The model as `torch_dist`: a chunk for every layer and expert, written by `world` processes."""
    built = build_torch_dist_target(model, options)
    archives = _archives(opened, built.target.objects, carried_objects(model, built.target.objects))
    # Masters, and the weights that these must round to.
    beside_weights = not opened.format.masters_in_place and any(
        MASTER in p.values and WEIGHT in p.values for p in model.parameters
    )
    otherwise: MastersUse = "as_stored" if keeps_masters(model) else "left_out" if model.unread else "none"

    def without_masters(note: str) -> Conversion:
        return write_torch_dist(without_optimizer(model, note), opened, options, world)

    return Conversion(
        to="torch_dist",
        loader=built.record.target or "main",
        iteration=opened.location.iteration,
        catalog=model.catalog,
        target=built.target,
        plan=build_plan(model.catalog, built.target, slice_placement(world), world, archives),
        extra_files=read_bridge_files(opened.files)
        | {
            METADATA_JSON: METADATA_JSON_TEXT.encode(),
            COMMON_FILE: dump_archive(built.common),
            RECORD_FILE: record_bytes(built.record),
        },
        job=TargetJob(built.record, (), built.vocabulary),
        optimizer_layout=model.optimizer_layout,
        weights_only=options.weights_only,
        groups=dict(enumerate(built.groups)),
        masters="written" if beside_weights else otherwise,
        must_round=master_targets(model) if beside_weights else (),  # else the masters are the weights
        without_masters=without_masters if options.weights_only else None,
        fp8_recipe=model.settings.fp8_recipe,
    )


def _archives(
    opened: Opened, objects: Sequence[TargetObject], as_stored: Mapping[str, Item]
) -> list[tuple[str, bytes]]:
    """(key, archive) of every object, those of the source as they are stored."""
    made = dict(object_archives(o for o in objects if o.key not in as_stored))
    return [(o.key, made.get(o.key) or read_archive(opened.files, as_stored[o.key])) for o in objects]


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


TO_TORCH_DIST = Writer(open=open_source, place=like_to_like, plan=plan_torch_dist, imported_as="torch_dist")
