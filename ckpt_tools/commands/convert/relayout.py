"""`fsdp_dtensor` from `fsdp_dtensor`: the same tensors and objects, laid out for another training job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_tools.commands.job.conversion import Conversion
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.outputs import read_bridge_files, trackers_of, with_record
from ckpt_tools.commands.job.placements import Layout, source_model
from ckpt_tools.commands.job.target_job import TargetJob, need_tp, said_tp, sized
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import read_archive
from ckpt_tools.megatron.fsdp_dtensor.entries import read_fsdp_source
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.fsdp_dtensor.regroup import Relayout, build_relayout
from ckpt_tools.megatron.fsdp_dtensor.stored import packed_projections
from ckpt_tools.megatron.names import ModelStyle
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.parallel_sizes import refuse_tensor_parallel
from ckpt_tools.megatron.run_state.record import TargetRecord
from ckpt_tools.megatron.run_state.settings import read_settings
from ckpt_tools.megatron.torch_dist.optimizer_layouts.expected import expected_states, refuse_missing_states
from ckpt_tools.megatron.vocab import vocabulary
from ckpt_tools.model.catalog import Item

if TYPE_CHECKING:
    from ckpt_tools.commands.convert.options import ConvertOptions


def prepare_relayout(opened: Opened, options: ConvertOptions, layout: Layout) -> Conversion:
    """The `fsdp_dtensor` checkpoint for a job of `layout`: keys that nobody knows go along, byte for byte."""
    refuse_changes(opened.location, options)
    common = opened.common
    source = read_fsdp_source(opened.files, opened.catalog, common, options.ignore_keys, opened.trust_pickle)
    if source.has_optimizer:
        held = {kind for tensor in source.tensors for kind in tensor.states}
        refuse_missing_states(held, expected_states(common, list(source.groups.values())))
    old, stored = source.record or TargetRecord(), source.tp
    asked_tp = said_tp(options.target.tp, layout)
    if asked_tp is not None:
        refuse_tensor_parallel(asked_tp.ranks, common.arg, (tensor.name for tensor in source.tensors))
    tp = asked_tp or stored
    packed = packed_projections([tensor.name for tensor in source.tensors])
    if layout.topology is not None:
        need_tp(packed, options.target.tp, layout, stored)
    built = build_relayout(source, tp)
    args = common.args or common.model_config
    rows = vocabulary(((t.name, t.shape) for t in source.tensors), args, old.tokens)
    has_experts = any(".experts." in tensor.name for tensor in source.tensors)
    record, small = sized(old, tp, layout, has_experts), read_bridge_files(opened.files)
    return Conversion(
        to="fsdp_dtensor",
        loader=old.target,
        iteration=None,
        catalog=source.catalog,
        target=built.target,
        extra_files=with_record(small, record),
        beside=trackers_of(small),
        job=TargetJob(record, packed, rows),
        masters="as_stored" if source.has_optimizer else "none",
        optimizer_layout="fsdp_dtensor" if source.has_optimizer else None,
        model=lambda: source_model(source, _style(common, options)),
        archives=lambda: stored_archives(opened.files, built),
    )


def _style(common: CommonState, options: ConvertOptions) -> ModelStyle:
    settings, spec = read_settings(common), options.target.layer_spec
    local = settings.local_norms if spec is None else spec == "local"
    return ModelStyle(bool(local), bool(settings.grouped_experts), settings.fused_mla_down)


def stored_archives(files: Files, built: Relayout) -> Iterator[tuple[str, bytes]]:
    """(key, bytes) of every object, as they are stored; what several keys share is read once."""
    read: dict[Item, bytes] = {}
    for key, item in built.archives:
        if item not in read:
            read[item] = read_archive(files, item)
        yield key, read[item]


def refuse_changes(location: Location, options: ConvertOptions) -> None:
    """Raise UsageError if an option that only a conversion from another format can meet."""
    if options.target.fresh_optimizer:
        raise UsageError(
            f"{location.path} is already an fsdp_dtensor checkpoint: `strip --fresh-optimizer` gives it a fresh "
            "optimizer"
        )
    kept = TargetOptions(tp=options.target.tp, layer_spec=options.target.layer_spec)
    if options.target.weights_only:
        raise UsageError(
            f"{location.path} is already an fsdp_dtensor checkpoint: `strip {location.path} OUT` leaves its "
            "optimizer out"
        )
    if options.target != kept:
        raise UsageError(
            f"{location.path} is already an fsdp_dtensor checkpoint; it can be re-sharded for another topology, but "
            "its names, types, groups and vocabulary stay as they are: leave those options out"
        )


def need_other_job(location: Location, options: ConvertOptions) -> None:
    """Raise UsageError if no job is named, so that nothing would change."""
    refuse_changes(location, options)
    if options.layout is None and options.target.tp is None:
        raise UsageError(
            f"nothing to convert: {location.path} is an fsdp_dtensor checkpoint already, and no other job is "
            "named. Give its size to lay the checkpoint out for it (--gpus or --dp-shard, --tp, --world-size), or "
            "another format with --to"
        )
