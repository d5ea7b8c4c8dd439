"""WRITE `fsdp_dtensor`: a model for a job of Megatron-FSDP, and a checkpoint of the format itself re-sharded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ckpt_tools.commands.convert.fresh_optimizer import started_at, weights_for_masters, with_run_state
from ckpt_tools.commands.convert.relayout import (
    need_job,
    need_other_job,
    plain_layout,
    prepare_plain,
    prepare_relayout,
)
from ckpt_tools.commands.convert.version_2 import VERSION_1, VERSION_2, for_version_1, for_version_2
from ckpt_tools.commands.job.conversion import (
    Conversion,
    ConvertOptions,
    CutRows,
    Prepared,
    Progress,
    Writer,
    convert,
    like_to_like,
    open_source,
)
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.outputs import object_archives, read_bridge_files, trackers_of, with_record
from ckpt_tools.commands.job.placements import Layout, target_model
from ckpt_tools.commands.job.read_model import Wanted, need_torch_dist, read_model
from ckpt_tools.commands.job.report import ConversionReport
from ckpt_tools.commands.job.target_job import TargetJob, need_tp, said_tp, sized
from ckpt_tools.commands.look.dcp_json import read_group_map
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError
from ckpt_tools.execute.run import Output
from ckpt_tools.formats.locate.detect import Location, locate
from ckpt_tools.formats.storage.files import AnyPath, Files, path_text
from ckpt_tools.formats.untrusted_documents import read_named_file
from ckpt_tools.megatron.dcp.write import build_dcp_target
from ckpt_tools.megatron.fsdp_dtensor.fresh_optimizer import check_fresh, with_fresh_optimizer
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.fsdp_dtensor.write import FsdpTarget, build_fsdp_target, writer_tp
from ckpt_tools.megatron.run_state.common_state import (
    RUN_CONFIG,
    TRAIN_STATE,
    fsdp_run_config,
    train_state_file,
)
from ckpt_tools.megatron.run_state.record import TargetRecord
from ckpt_tools.megatron.run_state.settings import refuse_tensor_parallel
from ckpt_tools.megatron.vocab import VocabChange
from ckpt_tools.model.box import Box
from ckpt_tools.model.model import Model, without_optimizer
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.target import TargetTensor

if TYPE_CHECKING:
    from ckpt_tools.megatron.torch_dist.read import Extent

_BUILD: Final = {"fsdp_dtensor": build_fsdp_target, "dcp": build_dcp_target}


def convert_to_fsdp_dtensor(
    source: AnyPath,
    output: AnyPath,
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Convert the `torch_dist` checkpoint at `source` and publish it at `output`; called on every rank.

    A source that is `fsdp_dtensor` already is re-sharded (see `relayout.py`).

    Raises:
        UsageError: options that contradict each other, or an output that cannot be taken.
        UnsupportedCheckpointError: the source is of an unsupported kind.
        MappingError: options that contradict the checkpoint, or facts that cannot be proven from it.
        VerificationError: masters that do not round to the stored weights.
        CorruptCheckpointError, StorageError: damaged files, full disks.
    """
    return convert(source, output, TO_FSDP_DTENSOR, options or ConvertOptions(), progress, dry_run)


def plan_fsdp_dtensor(opened: Opened, options: ConvertOptions, world: int) -> Conversion:
    """Everything up to the first byte; `world` processes convert."""
    if opened.location.kind == "fsdp_dtensor":
        need_other_job(opened, options)
    layout = options.layout or Layout(world=world, of_job=False)
    if stays_plain(opened, options):
        need_job(opened.location, options)
        layout = plain_layout(layout)
    prepared = prepare_output(opened, options, layout)
    return prepared.planned(
        layout, started_at(opened.location, options.target).iteration, options.check_masters
    )


def stays_plain(opened: Opened, options: ConvertOptions) -> bool:
    """Whether the source is a state dict of a model that no format of Megatron can hold, and need not become one."""
    if not options.keep_plain or opened.location.kind != "dcp":
        return False
    from ckpt_tools.megatron.dcp.state_dict import is_megatron, read_state_dict

    return not is_megatron(read_state_dict(opened.catalog))


def prepare_output(opened: Opened, options: ConvertOptions, layout: Layout) -> Prepared:
    """As `prepare`, with the names of the Megatron-FSDP version that `layout` is for."""
    prepared = prepare(opened, options, layout)
    if prepared.to == "dcp":
        return prepared
    if layout.name == VERSION_1 and opened.location.kind == "fsdp_dtensor":
        return for_version_1(prepared)
    return for_version_2(prepared, opened.common, layout) if layout.name == VERSION_2 else prepared


def prepare(opened: Opened, options: ConvertOptions, layout: Layout) -> Prepared:
    """The checkpoint as the `fsdp_dtensor` checkpoint that a job of `layout` loads.

    Raises the errors of `convert_to_fsdp_dtensor` up to its plan.
    """
    if opened.location.kind == "fsdp_dtensor":
        return prepare_relayout(opened, options, layout)
    if stays_plain(opened, options):
        return prepare_plain(opened, options, layout)
    if opened.location.kind != "dcp":
        need_torch_dist(opened)
    optimizer: Extent = "masters" if options.target.weights_only else "whole"
    model = read_model(opened, Wanted(optimizer, options.ignore_keys, workers=options.write.workers))
    if options.target.fresh_optimizer:
        model = with_run_state(model, opened)
    return prepare_model(model, opened.files, options.target, layout)


def prepare_model(
    model: Model,
    files: Files,
    options: TargetOptions,
    layout: Layout,
    to: Literal["fsdp_dtensor", "dcp"] = "fsdp_dtensor",
) -> Prepared:
    """The model as a job of `layout` loads it; `files` are those of its source."""
    as_read, asked = model, options
    check_fresh(options)
    if options.fresh_optimizer:
        model, options = with_fresh_optimizer(model, options)
    stored = writer_tp(model)
    asked_tp = said_tp(options.tp, layout)
    if asked_tp is not None:
        refuse_tensor_parallel(asked_tp.ranks, model.common.arg, (p.name for p in model.parameters))
    tp = asked_tp or stored
    built = _BUILD[to](model, replace(options, tp=tp.ranks))
    need_tp(built.packed, options.tp, layout, stored)
    plain: Literal["dcp"] | None = "dcp" if to == "dcp" else None
    has_experts = any(p.expert is not None for p in model.parameters)
    record = TargetRecord(built.dialect.name, tokens=built.tokens, format=plain)
    record = sized(record, tp, layout, has_experts)
    job = TargetJob(record, built.packed, built.vocabulary)
    must_round = tuple(tensor for tensor in built.target.tensors if tensor.must_round_to)
    small = _bridge_files(built, model, files, begins=bool(asked.fresh_optimizer))
    in_place = any(MASTER in p.values and WEIGHT not in p.values for p in as_read.parameters)
    left_out = MASTER in as_read.roles or as_read.unread  # a fresh optimizer's are not the source's

    def without_masters(note: str) -> Prepared:
        without = weights_for_masters if asked.fresh_optimizer else without_optimizer
        return prepare_model(without(as_read, note), files, asked, layout, to)

    return Prepared(
        to=to,
        loader=built.dialect.name,
        catalog=model.catalog,
        target=built.target,
        extra_files=with_record(small, job.record),
        beside=trackers_of(small),
        job=job,
        masters="written" if must_round else "as_stored" if in_place else "left_out" if left_out else "none",
        must_round=must_round,
        optimizer_layout=as_read.optimizer_layout,
        weights_only=asked.weights_only,
        groups=dict(sorted(Counter(m.group for m in built.memberships.values()).items())),
        fp8_recipe=model.settings.fp8_recipe,
        must_be_zero=tuple(_cut_rows(built.vocab)),
        without_masters=without_masters if asked.weights_only else None,
        live_model=lambda: target_model(built, model.common),
        archives=partial(object_archives, built.target.objects),
    )


def _bridge_files(built: FsdpTarget, model: Model, files: Files, begins: bool) -> dict[str, bytes]:
    """For Bridge the files that it reads next to the tensors.

    A Bridge source's own are copied; progress is made from the args of a Megatron-LM source, and of a job that
    `begins`.
    """
    if built.dialect.name != "bridge":
        return {}
    kept = read_bridge_files(files)
    if begins:
        kept.pop(TRAIN_STATE, None)
    if RUN_CONFIG in kept:
        kept[RUN_CONFIG] = fsdp_run_config(kept[RUN_CONFIG])
    return {TRAIN_STATE: train_state_file(model.common.values, model.common.args)} | kept


def _cut_rows(vocab: VocabChange) -> Iterator[CutRows]:
    """What is cut off of the vocabulary, whatever it is."""
    for parameter in vocab.parameters:
        if parameter.name in vocab.cut:
            stored = parameter.stored[0]
            value, (rows, *rest) = stored.weight, stored.shape
            tensor = TargetTensor(parameter.name, value.dtype, value.shape, value.sources)
            box = Box((vocab.kept, *(0,) * len(rest)), (rows - vocab.kept, *rest))
            yield CutRows(tensor, box)


def membership_map(built: FsdpTarget) -> Mapping[str, int]:
    """The content of a `param_to_param_group_map.json`: every trainable parameter's live name and group id."""
    return {f"model.module.{name}": m.group for name, m in built.memberships.items()}


def _place(source: str, location: Location, output: str, options: ConvertOptions) -> Output:
    return like_to_like(source, started_at(location, options.target), output, options)


TO_FSDP_DTENSOR = Writer(open=open_source, place=_place, plan=plan_fsdp_dtensor, imported_as="fsdp_dtensor")


MAX_MAP_BYTES = 128 << 20  # a million parameters


@dataclass(frozen=True, slots=True)
class GroupMap:
    """Parameter name -> group id, and the rule that placed each; `source` is `dump` or `derived`."""

    groups: Mapping[str, int]
    rules: Mapping[str, str]
    source: str


def build_group_map(
    source: AnyPath, options: TargetOptions | None = None, iteration: int | None = None
) -> GroupMap:
    """The map of a `--dump-param-to-param-group-map` folder, or derived from a `torch_dist` checkpoint.

    Raises:
        UnsupportedCheckpointError: `source` is neither.
        MappingError: the groups cannot be derived, with the reason.
    """
    source = path_text(source)
    location = locate(source, iteration, of_run=True)
    dumped = read_group_map(location.path) if location.kind == "dcp" else None
    if dumped is not None:
        return GroupMap(dumped, dict.fromkeys(dumped, "dumped by the training job"), "dump")
    if location.kind != "torch_dist":
        raise UnsupportedCheckpointError(
            f"{source} is neither a dump of --dump-param-to-param-group-map nor a torch_dist checkpoint"
        )
    with open_checkpoint(source, iteration, of_run=True) as opened:
        model = read_model(opened)
        if model.optimizer_layout is None:
            raise MappingError(f"{source} has no optimizer state, so its parameters have no groups")
        built = build_fsdp_target(model, options or TargetOptions())
    rules = {f"model.module.{name}": m.rule for name, m in built.memberships.items()}
    return GroupMap(membership_map(built), rules, "derived")


def load_group_map(path: Path) -> dict[str, int]:
    """A map file: parameter names to group ids, checked only for its form."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        if twice:
            raise MappingError(f"{path}: names given more than once: {', '.join(twice[:5])}")
        return dict(pairs)

    try:
        found = json.loads(read_named_file(path, MAX_MAP_BYTES), object_pairs_hook=unique)
    except MappingError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise MappingError(f"{path}: not a readable parameter group map ({error})") from error
    if not isinstance(found, dict):
        raise MappingError(
            f"{path}: holds a {type(found).__name__}; expected one object of names and group ids"
        )
    return found
