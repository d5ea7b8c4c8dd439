"""What has its keys already, re-sharded for another training job: `fsdp_dtensor`, a plain PyTorch state dict; and the
weights of a Hugging Face model as one.

torch's `fully_shard` cuts every parameter on its own along dimension 0, and its states with it. Megatron-FSDP cuts
flat buffers, of which every unit has its own: `--units` names those of a model that is not Megatron's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckpt_tools.commands.job.conversion import ConvertOptions, Prepared
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.outputs import read_bridge_files, trackers_of, with_record
from ckpt_tools.commands.job.placements import Layout, LiveModel, source_model
from ckpt_tools.commands.job.target_job import TargetJob, need_tp, said_tp, sized
from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import read_archive
from ckpt_tools.megatron.dcp.read import owners
from ckpt_tools.megatron.dcp.state_dict import StateDict, read_state_dict
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.fsdp_dtensor.parameters import packed_projections
from ckpt_tools.megatron.fsdp_dtensor.read import SmallValues, read_fsdp_source
from ckpt_tools.megatron.fsdp_dtensor.write import Relayout, build_relayout
from ckpt_tools.megatron.names import ModelStyle
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.record import TargetRecord, read_record
from ckpt_tools.megatron.run_state.settings import read_settings, refuse_tensor_parallel
from ckpt_tools.megatron.torch_dist.optimizers import refuse_missing_states
from ckpt_tools.megatron.vocab import vocabulary
from ckpt_tools.model.catalog import Catalog, Item, leave_out
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.target import Target, TargetObject, TargetTensor, target_of
from ckpt_tools.sharding.units import LiveTensor

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
    return Prepared(
        to="fsdp_dtensor",
        loader=old.target,
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
    _refuse_changes(location, options)
    if options.layout is None and options.target.tp is None:
        raise UsageError(
            f"nothing to convert: {location.path} is an fsdp_dtensor checkpoint already, and no other job is "
            "named. Give its size to lay the checkpoint out for it (--gpus or --dp-shard, --tp, --world-size), or "
            "another format with --to"
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


@dataclass(frozen=True, slots=True)
class _Plain:
    """The target tensors, and what the sharding room needs of them."""

    tensors: tuple[TargetTensor, ...]
    live: tuple[LiveTensor, ...]


def prepare_plain(opened: Opened, options: ConvertOptions, layout: Layout) -> Prepared:
    """The state dict for a job of `layout`: every key unchanged, for any model."""
    _refuse_plain_changes(opened.location, options, layout)
    catalog, left_out = leave_out(opened.catalog, options.ignore_keys)
    found = read_state_dict(catalog)
    states = _owners(catalog, found, layout, SmallValues(opened.files, opened.trust_pickle))
    plain = _as_stored(catalog, found, states)
    objects = tuple(
        TargetObject(key, None, tuple(catalog.planner_paths.get(key, ()))) for key in catalog.objects
    )
    must_round = [tensor for tensor in plain.tensors if tensor.must_round_to]
    record = replace(read_record(opened.files) or TargetRecord(), format="dcp")
    return Prepared(
        to="dcp",
        loader=None,
        catalog=catalog,
        target=Target(plain.tensors, objects=objects, dropped=left_out),
        extra_files=with_record({}, record),
        job=TargetJob(record),
        masters="written" if must_round else "none",
        must_round=must_round,
        optimizer_layout=None if found.layout == "none" else found.layout,
        keep_order=True,
        live_model=lambda: LiveModel(plain.live, local_spec=False),
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


def _as_stored(catalog: Catalog, found: StateDict, states: Mapping[str, str]) -> _Plain:
    """Weights and states share the place of their parameter; another tensor that ranks share has its own."""
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
    return _Plain(tuple(tensors), tuple(live.values()))


def masters_beside_weights(opened: Opened) -> list[TargetTensor]:
    """The masters of a state dict, with the weights that they must round to."""
    found, values = read_state_dict(opened.catalog), SmallValues(opened.files, opened.trust_pickle)
    states = _owners(opened.catalog, found, Layout(), values)
    return [tensor for tensor in _as_stored(opened.catalog, found, states).tensors if tensor.must_round_to]


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
