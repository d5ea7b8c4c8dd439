"""`convert --to torch_dist`: the way back from `fsdp_dtensor`, or from any optimizer layout to `fully_reshardable`.

Planned as a whole before the first byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import astuple, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TypeVar

from ckpt_tools.commands.opened import Opened, open_checkpoint
from ckpt_tools.commands.outputs import ConversionReport, choose_output, count_objects, object_archives
from ckpt_tools.commands.target_job import TargetJob
from ckpt_tools.commands.to_fsdp_dtensor import A_KIND, Progress, look_for_damage
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError, VerificationError
from ckpt_tools.execute.ranks import DistributedRanks, Ranks, connect
from ckpt_tools.execute.rehearse import rehearse
from ckpt_tools.execute.run import WriteOptions, WriteReport, write_checkpoint
from ckpt_tools.formats.container import read_archive, read_small_file
from ckpt_tools.formats.detect import METADATA_JSON, Location
from ckpt_tools.formats.files import Files
from ckpt_tools.formats.pickling import dump_archive
from ckpt_tools.megatron.bridge import BRIDGE_FILES
from ckpt_tools.megatron.common_state import COMMON_FILE
from ckpt_tools.megatron.fsdp_dtensor.entries import read_fsdp_source
from ckpt_tools.megatron.fsdp_dtensor.read import fsdp_model
from ckpt_tools.megatron.keys import stacked_axes
from ckpt_tools.megatron.record import RECORD_FILE, read_record, record_bytes
from ckpt_tools.megatron.torch_dist.read import Extent, read_torch_dist
from ckpt_tools.megatron.torch_dist.write import (
    TorchDistOptions,
    TorchDistTarget,
    build_torch_dist_target,
    carried_objects,
)
from ckpt_tools.model.box import Box
from ckpt_tools.model.model import Model
from ckpt_tools.model.target import TargetObject, TargetTensor
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
    model: Model
    built: TorchDistTarget
    plan: Plan


def convert_to_torch_dist(
    source: str,
    output: str,
    options: ToTorchDistOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Convert the checkpoint at `source` and publish it at `output`; called on every rank.

    It is `fsdp_dtensor`, or `torch_dist` of another optimizer layout or for another program.

    Raises:
        UsageError: a fact only the user can give is missing, nothing to convert, or an output that cannot be taken.
        UnsupportedCheckpointError: the source is of a kind, or has an optimizer layout, that is not read.
        MappingError: options that contradict the checkpoint, or facts that cannot be proven from it.
        VerificationError: masters that do not round to the stored weights.
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
        checked = _proven(planned.location, options, ranks, lambda: prove_masters(planned, ranks))
        if not dry_run:
            place = replace(place, extra_files=extra_files(planned))
            written = write_checkpoint(
                planned.plan, planned.files, place, options.write, ranks=ranks, progress=progress
            )
    finally:
        planned.files.close()
    return _report(source, output, planned, checked, written)


@without_gc()
def plan_torch_dist(
    source: str, options: ToTorchDistOptions, ranks: Ranks | DistributedRanks
) -> PlannedTorchDist:
    """Everything up to the first byte."""
    opened = open_checkpoint(source, options.iteration, options.trust_pickle)
    try:
        target_options = options.target
        if options.extra_state_template is not None:
            keys = template_keys(options.extra_state_template, options.trust_pickle)
            target_options = replace(target_options, extra_state_template=keys)
        model = _proven(opened.location, options, ranks, lambda: _read_model(opened, options))
        built = build_torch_dist_target(model, target_options)
        carried = carried_objects(model, built.target.objects)
        archives = _archives(opened, built.target.objects, carried)
        plan = build_plan(model.catalog, built.target, slice_placement(ranks.world), ranks.world, archives)
    except BaseException:
        opened.files.close()
        raise
    return PlannedTorchDist(opened.location, opened.files, model, built, plan)


_T = TypeVar("_T")


def _proven(
    location: Location, options: ToTorchDistOptions, ranks: Ranks | DistributedRanks, prove: Callable[[], _T]
) -> _T:
    """What `prove` gives; where it fails, damaged payloads are the better answer."""
    try:
        return prove()
    except VerificationError:
        if options.write.check_source != "none":
            look_for_damage(location, options.trust_pickle, options.write.threads, ranks)
        raise


def _read_model(opened: Opened, options: ToTorchDistOptions) -> Model:
    """The model in a checkpoint of either kind.

    Raises:
        UnsupportedCheckpointError: it is of another kind.
        UsageError: it is what it would become.
    """
    files, wanted = opened.files, options.target
    if opened.location.kind == "torch_dist":
        if wanted.tp is not None:
            raise UsageError(
                f"--tp {wanted.tp}: no meaning for a torch_dist source, which loads at any tensor-parallel size; "
                "leave it out"
            )
        extent: Extent = "none" if wanted.weights_only else "whole"
        source = read_torch_dist(
            files, opened.catalog, options.ignore_keys, options.trust_pickle, optimizer=extent
        )
        model = replace(source.model, record=read_record(files))
        _refuse_same(opened.location, model, options)
        return model
    if opened.location.kind != "fsdp_dtensor":
        raise UnsupportedCheckpointError(
            f"{opened.location.path} is {A_KIND.get(opened.location.kind, opened.location.kind)}, "
            "not an fsdp_dtensor or torch_dist checkpoint"
        )
    read = read_fsdp_source(
        files,
        opened.catalog,
        opened.common,
        options.ignore_keys,
        options.trust_pickle,
        weights_only=wanted.weights_only,
    )
    return fsdp_model(read, tp=wanted.tp, layer_spec=wanted.layer_spec, weights_only=wanted.weights_only)


def _refuse_same(location: Location, model: Model, options: ToTorchDistOptions) -> None:
    """
    Raises:
        UsageError: a `torch_dist` checkpoint would be written as it is.
    """
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


def _archives(
    opened: Opened, objects: Sequence[TargetObject], carried: Container[str]
) -> list[tuple[str, bytes]]:
    """(key, archive) of every object, those of the source as they are stored."""
    made = dict(object_archives(o for o in objects if o.key not in carried))
    stored = opened.catalog.objects
    return [(o.key, made.get(o.key) or read_archive(opened.files, stored[o.key].item)) for o in objects]


def prove_masters(planned: PlannedTorchDist, ranks: Ranks | DistributedRanks) -> str:
    """A sample of every master of a `torch_dist` source rounds to its stored weight: said how many were compared.

    Raises:
        VerificationError: some do not.
    """
    from ckpt_tools.commands.export_source import master_targets
    from ckpt_tools.execute.check_masters import MastersReport, check_masters, describe_masters

    model = planned.model
    if planned.location.kind != "torch_dist":
        return "the masters are the source"
    if model.optimizer_layout is None:
        return "left out with the optimizer"
    mine, recipe = master_targets(model)[ranks.rank :: ranks.world], model.settings.fp8_recipe

    def check() -> tuple[int, ...]:
        return astuple(
            check_masters(planned.files, model.catalog, mine, "sample", ranks.check, fp8_recipe=recipe)
        )

    return describe_masters(MastersReport(*map(sum, zip(*ranks.together(check), strict=True))), "sample")


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
    source: str, output: str, planned: PlannedTorchDist, checked: str, written: WriteReport | None
) -> ConversionReport:
    built, target = planned.built, planned.built.target
    return ConversionReport(
        source=source,
        output=output,
        iteration=planned.location.iteration,
        source_layout="fsdp_dtensor"
        if planned.location.kind == "fsdp_dtensor"
        else planned.model.optimizer_layout or "weights only",
        target="torch_dist",
        dialect="fully_reshardable" if "optimizer" in built.common else "weights only",
        tensors=len(target.tensors),
        objects=count_objects(target),
        groups=dict(enumerate(built.groups)),
        masters_checked=checked,
        dropped=target.dropped,
        renamed=target.renamed,
        backfilled=target.backfilled,
        notes=target.notes,
        job=TargetJob(built.record, (), built.vocabulary).as_json(),
        written=written,
        plan=plan_summary(planned.plan),
    )
