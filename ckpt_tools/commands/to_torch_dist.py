"""WRITE `torch_dist`: the way back from `fsdp_dtensor`, planned as a whole before the first byte."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ckpt_tools.commands.conversion import (
    Conversion,
    MegatronOptions,
    Progress,
    Writer,
    convert,
    like_to_like,
    open_source,
)
from ckpt_tools.commands.conversion_report import ConversionReport
from ckpt_tools.commands.opened import Opened, open_checkpoint
from ckpt_tools.commands.outputs import object_archives, read_bridge_files
from ckpt_tools.commands.read_model import Wanted, keeps_masters, need_kind, read_model
from ckpt_tools.commands.target_job import TargetJob
from ckpt_tools.errors import MappingError
from ckpt_tools.formats.detect import METADATA_JSON
from ckpt_tools.formats.pickling import dump_archive
from ckpt_tools.megatron.common_state import COMMON_FILE
from ckpt_tools.megatron.record import RECORD_FILE, record_bytes
from ckpt_tools.megatron.torch_dist.read import Extent
from ckpt_tools.megatron.torch_dist.slices import stacked_axes
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions, build_torch_dist_target
from ckpt_tools.model.box import Box
from ckpt_tools.model.model import Model
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.plan.build import Placement, build_plan
from ckpt_tools.sharding.fsdp2 import chunk_rows

# Readers of core 0.18 and older look at all four fields, later ones ignore the last two.
METADATA_JSON_BYTES = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    b'"common_backend": "torch", "common_backend_version": 1}'
)
EXTRA_STATE = "*._extra_state/shard_*"


@dataclass(frozen=True, slots=True)
class ToTorchDistOptions(MegatronOptions):
    """What a user may decide about a conversion; the defaults let the checkpoint decide."""

    target: TorchDistOptions = field(default_factory=TorchDistOptions)
    extra_state_template: str | None = None  # a torch_dist checkpoint of the same model


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
    return convert(source, output, TO_TORCH_DIST, options or ToTorchDistOptions(), progress, dry_run)


def plan_torch_dist(opened: Opened, options: ToTorchDistOptions, world: int) -> Conversion:
    """Everything up to the first byte; `world` processes convert."""
    need_kind(opened, "fsdp_dtensor")
    target = options.target
    if options.extra_state_template is not None:
        keys = template_keys(options.extra_state_template, options.trust_pickle)
        target = replace(target, extra_state_template=keys)
    optimizer: Extent = "none" if target.weights_only else "whole"
    wanted = Wanted(optimizer, options.ignore_keys, tp=target.tp, layer_spec=target.layer_spec)
    return write_torch_dist(read_model(opened, wanted), opened, target, world)


def write_torch_dist(model: Model, opened: Opened, options: TorchDistOptions, world: int) -> Conversion:
    """The model as `torch_dist`: a chunk for every layer and expert, written by `world` processes."""
    built = build_torch_dist_target(model, options)
    archives = object_archives(built.target.objects)
    return Conversion(
        "torch_dist",
        built.record.target or "main",
        opened.location.iteration,
        model.catalog,
        built.target,
        build_plan(model.catalog, built.target, slice_placement(world), world, archives),
        extra_files=read_bridge_files(opened.files)
        | {
            METADATA_JSON: METADATA_JSON_BYTES,
            COMMON_FILE: dump_archive(built.common),
            RECORD_FILE: record_bytes(built.record),
        },
        job=TargetJob(built.record, (), built.vocabulary),
        optimizer_layout=model.optimizer_layout,
        groups=dict(enumerate(built.groups)),
        masters="as_stored" if keeps_masters(model) else "none",
    )


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


TO_TORCH_DIST = Writer(open=open_source, place=like_to_like, plan=plan_torch_dist)
