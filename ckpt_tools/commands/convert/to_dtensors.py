"""WRITE what jobs load as DTensors: `fsdp_dtensor` for Megatron-FSDP, a plain state dict (`dcp`) for any program.

What has its keys already (`fsdp_dtensor`, a plain state dict, the weights of a Hugging Face model) is re-sharded for
another training job. torch's `fully_shard` cuts every parameter on its own along dimension 0, and its states with it.
Megatron-FSDP cuts flat buffers, of which every unit has its own: `--units` names those of a model that is not
Megatron's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from ckpt_tools.commands.convert.fresh_optimizer import started_at, weights_for_masters, with_run_state
from ckpt_tools.commands.convert.version_2 import VERSION_1, VERSION_2, for_version_1, for_version_2, renamed
from ckpt_tools.commands.job.conversion import (
    Conversion,
    ConvertOptions,
    CutRows,
    MegatronOptions,
    Prepared,
    Progress,
    Writer,
    convert,
    like_to_like,
    open_source,
)
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.outputs import (
    is_root,
    object_archives,
    read_bridge_files,
    trackers_of,
    with_record,
)
from ckpt_tools.commands.job.placements import (
    Layout,
    LiveModel,
    TargetJob,
    need_tp,
    said_tp,
    sized,
    source_model,
    target_model,
)
from ckpt_tools.commands.job.read_model import READ, Wanted, read_model
from ckpt_tools.commands.job.report import ConversionReport
from ckpt_tools.commands.look.dcp_json import read_group_map
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.run import Output
from ckpt_tools.formats.locate.detect import Location, locate
from ckpt_tools.formats.storage.files import AnyPath, Files, path_text
from ckpt_tools.formats.torch_archive.item_reader import read_archive
from ckpt_tools.formats.untrusted_documents import read_named_file
from ckpt_tools.megatron.dcp.read import owners
from ckpt_tools.megatron.dcp.state_dict import StateDict, is_megatron, read_state_dict
from ckpt_tools.megatron.dcp.write import build_dcp_target
from ckpt_tools.megatron.fsdp_dtensor.fresh_optimizer import check_fresh, with_fresh_optimizer
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.fsdp_dtensor.parameters import packed_projections
from ckpt_tools.megatron.fsdp_dtensor.read import SmallValues, read_fsdp_source
from ckpt_tools.megatron.fsdp_dtensor.write import (
    FsdpTarget,
    Relayout,
    build_fsdp_target,
    build_relayout,
    writer_tp,
)
from ckpt_tools.megatron.keys import GROUP_META
from ckpt_tools.megatron.names import (
    BRIDGE,
    MLA_FUSED_DOWN,
    ModelStyle,
    dialect_named,
    is_hybrid_mtp,
    respelled,
)
from ckpt_tools.megatron.run_state.common_state import (
    RUN_CONFIG,
    TRAIN_STATE,
    CommonState,
    fsdp_run_config,
    train_state_file,
)
from ckpt_tools.megatron.run_state.record import TargetRecord, read_record
from ckpt_tools.megatron.run_state.settings import read_settings, refuse_tensor_parallel
from ckpt_tools.megatron.torch_dist.optimizers import refuse_missing_states
from ckpt_tools.megatron.torch_dist.read import Extent
from ckpt_tools.megatron.vocab import VocabChange, vocabulary
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Catalog, Item, leave_out
from ckpt_tools.model.model import Model, without_optimizer
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.target import Target, TargetObject, TargetTensor, target_of
from ckpt_tools.sharding.units import LiveTensor

_BUILD: Final = {"fsdp_dtensor": build_fsdp_target, "dcp": build_dcp_target}


def convert_to_fsdp_dtensor(
    source: AnyPath,
    output: AnyPath,
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Convert the `torch_dist` checkpoint at `source` and publish it at `output`; called on every rank.

    A source that is `fsdp_dtensor` already is re-sharded.

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
    is_plain = options.keep_plain and opened.location.kind == "dcp"
    return is_plain and not is_megatron(read_state_dict(opened.catalog))


def prepare_output(opened: Opened, options: ConvertOptions, layout: Layout) -> Prepared:
    """As `prepare`, with the names of the Megatron-FSDP version that `layout` is for."""
    prepared = prepare(opened, options, layout)
    if prepared.to == "dcp":
        return prepared
    if layout.name == VERSION_1 and opened.location.kind == "fsdp_dtensor":
        return for_version_1(prepared)
    return for_version_2(prepared, opened.common, layout) if layout.name == VERSION_2 else prepared


def prepare(opened: Opened, options: ConvertOptions, layout: Layout) -> Prepared:
    """The checkpoint as the `fsdp_dtensor` checkpoint that a job of `layout` loads."""
    if opened.location.kind == "fsdp_dtensor":
        return prepare_relayout(opened, options, layout)
    if stays_plain(opened, options):
        return prepare_plain(opened, options, layout)
    if opened.location.kind not in READ:
        raise UnsupportedCheckpointError(
            f"{opened.location.path} is {opened.format.described}, not a torch_dist checkpoint"
        )
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
    named = {f"model.module.{name}": member for name, member in built.memberships.items()}
    groups = {name: member.group for name, member in named.items()}
    return GroupMap(groups, {name: member.rule for name, member in named.items()}, "derived")


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


def convert_to_dcp(
    source: AnyPath,
    output: AnyPath,
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Convert the checkpoint at `source` to a plain PyTorch state dict at `output`; called on every rank.

    Megatron checkpoints get the keys of `megatron.dcp.write`, Hugging Face models ``model.<their name>``. A source
    that is a plain state dict already keeps its keys and is re-sharded.

    Raises the errors of `convert_to_fsdp_dtensor`.
    """
    return convert(source, output, TO_DCP, options or ConvertOptions(), progress, dry_run)


def plan_dcp(opened: Opened, options: ConvertOptions, world: int) -> Conversion:
    """Everything up to the first byte; `world` processes convert."""
    if opened.location.kind == "dcp":
        need_job(opened.location, options)
    layout = plain_layout(options.layout or Layout(world=world, of_job=False))
    prepared = prepare_dcp(opened, options, layout)
    made = prepared.planned(layout, opened.location.iteration, options.check_masters)
    if opened.location.kind != "safetensors":
        return made
    # Most conversions start without the rules of families.
    from ckpt_tools.commands.huggingface.folder import CONFIG, architecture_of, read_config

    if not opened.files.exists(CONFIG):
        return made
    return replace(made, architecture=architecture_of(read_config(opened.location.path)))


def prepare_dcp(opened: Opened, options: ConvertOptions, layout: Layout) -> Prepared:
    """The checkpoint as the plain state dict that a job of `layout` loads."""
    if opened.location.kind == "dcp":
        return prepare_plain(opened, options, layout)
    if opened.location.kind == "safetensors":
        return prepare_hf(opened, options, layout)
    _refuse_halves(options.target)
    optimizer: Extent = "masters" if options.target.weights_only else "whole"
    model = read_model(opened, Wanted(optimizer, options.ignore_keys, workers=options.write.workers))
    return prepare_model(model, opened.files, options.target, layout, "dcp")


def _refuse_halves(target: TargetOptions) -> None:
    """Raise UsageError if options about keys that a plain state dict does not have."""
    plain = TargetOptions()
    asked = {
        "swiglu": target.swiglu is not None or target.swiglu_modules != (),
        "rename_mtp": target.rename_mtp,
        "prefixes": (target.model_prefix, target.state_prefix) != (plain.model_prefix, plain.state_prefix),
    }
    useless = [name for name, is_asked in asked.items() if is_asked]
    if useless:
        raise UsageError(
            f"{', '.join(useless)}: no meaning for a plain state dict: its names are the running model's"
        )


def _place_plain(source: str, location: Location, output: str, options: MegatronOptions) -> Output:
    """A directory of an iteration: who loads it looks for no tracker."""
    plain = location if is_root(source, location) else replace(location, kind="dcp")
    return like_to_like(source, plain, output, options)


TO_DCP = Writer(open=open_source, place=_place_plain, plan=plan_dcp)


HF_PREFIX = "model"
LOADER = "torch.distributed.checkpoint"


def prepare_relayout(opened: Opened, options: ConvertOptions, layout: Layout) -> Prepared:
    """The `fsdp_dtensor` checkpoint for a job of `layout`: keys that nobody knows go along, byte for byte."""
    _refuse_changes(opened.location, options)
    common = opened.common
    source = read_fsdp_source(opened.files, opened.catalog, common, options.ignore_keys, opened.trust_pickle)
    if source.has_optimizer:
        held = {kind for tensor in source.tensors for kind in tensor.states}
        refuse_missing_states(held, common, list(source.groups.values()))
    old, stored, dialect = source.record or TargetRecord(), source.tp, options.target.dialect
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
    record = replace(record, target=dialect or old.target)
    prepared = Prepared(
        to="fsdp_dtensor",
        loader=record.target,
        catalog=source.catalog,
        target=built.target,
        extra_files=with_record(small, record),
        beside=trackers_of(small),
        job=TargetJob(record, packed, rows),
        masters="as_stored" if source.has_optimizer else "none",
        optimizer_layout="fsdp_dtensor" if source.has_optimizer else None,
        live_model=lambda: source_model(source, _style(common, options)),
        archives=lambda: stored_archives(opened.files, built),
    )
    if dialect is None:
        return prepared
    names = [*(tensor.name for tensor in source.tensors), *source.groups]
    why = ""
    if (dialect == BRIDGE) != (bool(small) or old.target == BRIDGE):
        why = "Megatron-Bridge keeps other files than Megatron-LM"
    elif read_settings(common).fused_mla_down or any(MLA_FUSED_DOWN in name for name in names):
        why = "programs store the fused down-projections of MLA in different ways"
    if why:
        raise UsageError(
            f"--target {dialect}: {why}, so more than names would change. Go through torch_dist: convert with --to "
            f"torch_dist, and that with --target {dialect}"
        )
    program, hybrid = dialect_named(dialect), is_hybrid_mtp(names)
    return renamed(prepared, lambda key: respelled(key, program, key.startswith(GROUP_META), hybrid))


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


def _refuse_changes(location: Location, options: ConvertOptions) -> None:
    """Raise UsageError if an option that only a conversion from another format can meet."""
    if options.target.fresh_optimizer:
        raise UsageError(
            f"{location.path} is already an fsdp_dtensor checkpoint: `strip --fresh-optimizer` gives it a fresh "
            "optimizer"
        )
    asked = options.target
    kept = TargetOptions(tp=asked.tp, layer_spec=asked.layer_spec, dialect=asked.dialect)
    if options.target.weights_only:
        raise UsageError(
            f"{location.path} is already an fsdp_dtensor checkpoint: `strip {location.path} OUT` leaves its "
            "optimizer out"
        )
    if options.target != kept:
        raise UsageError(
            f"{location.path} is already an fsdp_dtensor checkpoint; it can be re-sharded for another topology, and "
            "renamed for another --target, but types, groups and vocabulary stay as they are: leave those options out"
        )


def need_other_job(opened: Opened, options: ConvertOptions) -> None:
    """Raise UsageError if no other job is named, so that nothing would change."""
    location, record = opened.location, read_record(opened.files) or TargetRecord()
    _refuse_changes(location, options)
    asked = options.target
    if options.layout is None and asked.tp is None and asked.dialect in (None, record.target):
        raise UsageError(
            f"nothing to convert: {location.path} is an fsdp_dtensor checkpoint already, and no other job is "
            "named. Give its size to lay the checkpoint out for it (--gpus or --dp-shard, --tp, --world-size), its "
            "program with --target, or another format with --to"
        )


def plain_layout(layout: Layout) -> Layout:
    """The layout, which is FSDP2's where nobody named one."""
    return layout if layout.name_given or layout.name == "even" else replace(layout, name="fsdp2")


def need_job(location: Location, options: ConvertOptions) -> None:
    """Raise UsageError if no job is named, so that nothing would change."""
    if options.layout is None:
        raise UsageError(
            f"nothing to convert: {location.path} is a PyTorch state dict already, and no other job is named. Give "
            "its size (--gpus or --dp-shard, or --world-size)"
        )


def prepare_plain(opened: Opened, options: ConvertOptions, layout: Layout) -> Prepared:
    """The state dict for a job of `layout`: every key unchanged, for any model."""
    _refuse_plain_changes(opened.location, options, layout)
    catalog, left_out = leave_out(opened.catalog, options.ignore_keys)
    found = read_state_dict(catalog)
    states = _owners(catalog, found, layout, SmallValues(opened.files, opened.trust_pickle))
    tensors, live = _as_stored(catalog, found, states)
    objects = tuple(
        TargetObject(key, None, tuple(catalog.planner_paths.get(key, ()))) for key in catalog.objects
    )
    must_round = [tensor for tensor in tensors if tensor.must_round_to]
    record = replace(read_record(opened.files) or TargetRecord(), format="dcp")
    return Prepared(
        to="dcp",
        loader=None,
        catalog=catalog,
        target=Target(tensors, objects=objects, dropped=left_out),
        extra_files=with_record({}, record),
        job=TargetJob(record),
        masters="written" if must_round else "none",
        must_round=must_round,
        optimizer_layout=None if found.layout == "none" else found.layout,
        keep_order=True,
        live_model=lambda: LiveModel(live, local_spec=False),
        archives=lambda: ((key, read_archive(opened.files, o.item)) for key, o in catalog.objects.items()),
    )


def prepare_hf(opened: Opened, options: ConvertOptions, layout: Layout) -> Prepared:
    """The weights of a Hugging Face model under its own names, as ``{"model": model.state_dict()}`` has them."""
    _refuse_plain_changes(opened.location, options, layout)
    catalog, left_out = leave_out(opened.catalog, options.ignore_keys)
    tensors, live = [], []
    for key, entry in catalog.tensors.items():
        made = target_of(f"{HF_PREFIX}.{key}", entry.value, (HF_PREFIX, key))
        tensors.append(replace(made, parameter=key))
        live.append(LiveTensor(key, entry.shape, entry.dtype, buffer=not entry.shape or not entry.numel))
    note = "weights under the names of their safetensors; config.json and tokenizer stay where they are"
    record = TargetRecord(format="dcp")
    return Prepared(
        to="dcp",
        loader=LOADER,
        catalog=catalog,
        target=Target(tuple(tensors), dropped=left_out, notes=(note,)),
        extra_files=with_record({}, record),
        job=TargetJob(record),
        live_model=lambda: LiveModel(tuple(live), local_spec=False),
        archives=lambda: (),
    )


def _as_stored(
    catalog: Catalog, found: StateDict, states: Mapping[str, str]
) -> tuple[tuple[TargetTensor, ...], tuple[LiveTensor, ...]]:
    """The target tensors, and what the sharding room needs of them.

    Weights and states share the place of their parameter; another tensor that ranks share has its own.
    """
    owned = dict(states)
    roles = found.roles()
    live: dict[str, LiveTensor] = {}
    is_cut = any(len(catalog.tensors[key].chunks) > 1 for key in found.weights.values())
    trained = set(owned.values())
    for name, key in (*found.weights.items(), *((key, key) for key in found.more)):
        entry = catalog.tensors[key]
        whole = is_cut and len(entry.chunks) == 1 and name not in trained
        live[name] = LiveTensor(
            name,
            entry.shape,
            entry.dtype,
            buffer=whole or not entry.numel or not entry.shape,
            trainable=not trained or name in trained,
        )
        owned[key] = name
    tensors = []
    for key, entry in catalog.tensors.items():
        owner = owned.get(key, "")
        if owner and live.get(owner) is not None and entry.shape != live[owner].shape:
            owner = ""  # a state of another form than its parameter's
        if not owner and len(entry.chunks) > 1 and 0 not in entry.shape:
            owner = key
            live[key] = LiveTensor(key, entry.shape, entry.dtype, buffer=not entry.shape)
        path = tuple(catalog.planner_paths.get(key, ()))
        made = replace(target_of(key, entry.value, path, roles.get(key, "other")), parameter=owner)
        if made.role == MASTER and owner in found.weights:
            weight = catalog.tensors[found.weights[owner]]
            made = replace(made, must_round_to=weight.value.sources, must_round_dtype=weight.dtype)
        tensors.append(made)
    return tuple(tensors), tuple(live.values())


def masters_beside_weights(opened: Opened) -> list[TargetTensor]:
    """The masters of a state dict, with the weights that they must round to."""
    found, values = read_state_dict(opened.catalog), SmallValues(opened.files, opened.trust_pickle)
    states = _owners(opened.catalog, found, Layout(), values)
    return [tensor for tensor in _as_stored(opened.catalog, found, states)[0] if tensor.must_round_to]


def _owners(catalog: Catalog, found: StateDict, layout: Layout, values: SmallValues) -> dict[str, str]:
    """The parameter of every state that has its shape, by the state's key."""
    of_keys: dict[str, str] = {}
    for optimizer in found.optimizers:
        try:
            of_keys |= owners(optimizer, found, catalog, values)
        except MappingError as error:
            if layout.name.startswith("mfsdp"):
                raise UsageError(f"--layout {layout.name}: {error}") from None
    return {key: name for key, name in of_keys.items() if name in found.weights and key in catalog.tensors}


def _refuse_plain_changes(location: Location, options: ConvertOptions, layout: Layout) -> None:
    """Raise UsageError if options that only a Megatron model can meet."""
    if replace(options.target, tp=None) != TargetOptions():
        raise UsageError(
            f"{location.path} is only re-sharded: names, types, groups and vocabulary stay; leave those options out"
        )
    job = layout.topology
    asked = (
        {"tp": options.target.tp, "ep": 1, "etp": 1}
        if job is None
        else {"tp": job.tp, "ep": job.ep, "etp": job.etp}
    )
    cut = [f"--{axis} {size}" for axis, size in asked.items() if size not in (None, 1)]
    if cut:
        raise UsageError(
            f"{', '.join(cut)}: which dimension of a weight these ranks cut is known of Megatron's models only. "
            "Leave it out: DCP loads any layout into any job"
        )
