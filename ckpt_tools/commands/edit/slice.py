"""`slice`: a few layers of a checkpoint as a small, whole checkpoint, for tests and CI.

Layers are renumbered from 0 and the stored arguments say so. Optimizer states that are flattened or in buckets come
out as `fully_reshardable`: a part of a bucket is not a bucket.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tools.commands.edit.modify import new_path
from ckpt_tools.commands.job.conversion import Conversion, EditOptions, Progress
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.read_model import shared_by
from ckpt_tools.commands.job.report import ConversionReport, Edits
from ckpt_tools.commands.job.rewrite import edit, refuse_missing_shards, rewrite
from ckpt_tools.errors import UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.pickle.unpickle import StandIn
from ckpt_tools.formats.storage.files import AnyPath, read_whole
from ckpt_tools.formats.torch_archive.item_reader import read_archive
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.formats.untrusted_documents import parse_yaml
from ckpt_tools.megatron.dcp.read import group_members, numbered
from ckpt_tools.megatron.dcp.state_dict import OptimizerKeys, StateDict, read_state_dict
from ckpt_tools.megatron.fsdp_dtensor.read import SmallValues
from ckpt_tools.megatron.huggingface.vision.towers import TEXT, changed_record
from ckpt_tools.megatron.huggingface.vision.vision_language import VISION
from ckpt_tools.megatron.keys import (
    COMMON_OBJECT,
    is_of_transformers,
    is_optimizer_key,
    layer_of,
    name_start,
    object_shard,
    shard_key,
    stacked_axes,
)
from ckpt_tools.megatron.run_state.common_state import COMMON_FILE, RUN_CONFIG
from ckpt_tools.megatron.run_state.layer_settings import Layers, cut_settings
from ckpt_tools.megatron.torch_dist.optimizers import refuse_lost_states, spelled_master
from ckpt_tools.megatron.torch_dist.read import TorchDistSource, read_torch_dist
from ckpt_tools.megatron.torch_dist.stacking import layer_counts
from ckpt_tools.megatron.torch_dist.write import CONTENT_METADATA, OPTIMIZER_METADATA
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.target import Target, TargetObject, TargetTensor
from ckpt_tools.model.views import Narrow, Source, Step

_NUMBER = re.compile(r"(\d+)(?=\.)")
_NATURAL = ("none", "fully_reshardable", "non_distributed")


Rename = Callable[[str], "str | None"]
"""A parameter's name with its layer renumbered, None for a layer that is left out."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Layers `[start, stop)` of the `count` layers of a block (`decoder.layers.`), and what becomes of every key."""

    block: str
    start: int
    stop: int
    count: int
    names: Mapping[str, str | None]  # in the slice; None: left out
    stacked: frozenset[str] = frozenset()  # have the block's layers along their first axis
    values: Mapping[str, Any] | None = (
        None  # of a plain state dict: objects that say something else in the slice
    )

    def path(self, key: str, path: Sequence[str | int]) -> tuple[str | int, ...]:
        """The planner path of a key that stays, () for that of its name; a number stays a number."""
        name, old = self.names[key], tuple(path)
        if name is None or name == key:
            return old
        made = () if self.values is None else new_path(old, name)
        if len(made) != len(old):
            return made
        return tuple(
            int(new) if isinstance(was, int) and str(new).isdecimal() else new
            for was, new in zip(old, made, strict=True)
        )


def _numbered(key: str, block: str, kept: range, fsdp: bool) -> tuple[str | None, bool]:
    """The key with its layer renumbered, None for a layer that is left out; and whether it has layers on an axis."""
    at = name_start(key, fsdp)
    head, name = key[:at], key[at:]
    if not name.startswith(block):
        return key, False
    number, shard = _NUMBER.match(name, len(block)), object_shard(key)
    if number is not None:
        layer = int(number[1])
        return f"{head}{block}{layer - kept.start}{name[number.end() :]}" if layer in kept else None, False
    if not shard:
        return key, True
    layer, *rest = shard.place
    grid = (len(kept), *shard.grid[1:])
    return shard_key(shard.name, (layer - kept.start, *rest), grid) if layer in kept else None, True


def slice_layers(
    source: AnyPath,
    output: AnyPath,
    layers: str,
    block: str | None = None,
    options: EditOptions | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Write layers `start:stop` of the checkpoint at `source` to `output`.

    `block` is the module that holds the layers; None for `decoder.layers.`, or the only one there is.

    Raises:
        UsageError: not a range of layers, or several blocks to choose from.
        UnsupportedCheckpointError: a Hugging Face model.
        MappingError: states are numbered, and their parameters are unknown.
        Otherwise the errors of opening, planning and writing.
    """
    chosen = options or EditOptions()
    return edit(
        source,
        output,
        lambda opened: _plan(opened, layers, block, chosen.write.workers),
        chosen,
        progress,
    )


def _plan(opened: Opened, layers: str, block: str | None, workers: int | None) -> Conversion:
    if opened.location.kind == "safetensors":
        raise UnsupportedCheckpointError(
            f"{opened.location.path} is a Hugging Face model; only torch distributed checkpoints are sliced"
        )
    cut = choose_cut(opened, layers, block)
    tensors, changed, catalog = _parts(opened, cut, workers)
    objects, archives = _objects(opened, cut, changed)
    edits = Edits(
        removed=tuple(key for key, name in cut.names.items() if name is None),
        renamed={key: name for key, name in cut.names.items() if name not in (None, key)},
    )
    return rewrite(
        opened,
        Target(tuple(tensors), objects=tuple(objects)),
        archives,
        edits,
        catalog=catalog,
        companions=_companions(opened, cut, changed),
    )


def _parts(
    opened: Opened, cut: Cut, workers: int | None
) -> tuple[list[TargetTensor], dict[str, Any], Catalog]:
    """The tensors that stay, the changed common state (or `args` alone), and the catalog that holds the sources."""
    if opened.location.kind == "torch_dist":
        source = read_torch_dist(
            opened.files,
            opened.catalog,
            trust_pickle=opened.trust_pickle,
            unknown_keys=True,
            share=shared_by(workers),
        )
        if source.states is not None:
            refuse_lost_states(source.model)
        return *_torch_dist_parts(opened, source, cut), source.model.catalog
    args = {name: opened.common.values[name] for name in ("args",) if name in opened.common.values}
    tensors = _kept_tensors(opened, cut, list(opened.catalog.tensors))
    return tensors, _with_layers(args, cut), opened.catalog


def choose_cut(opened: Opened, layers: str, block: str | None) -> Cut:
    """The layers to keep, from `start:stop` as Python counts."""
    kind = opened.location.kind
    counts = layer_counts(opened.format.weights(opened.catalog).shapes)
    blocks = {name: n for name, n in counts.items() if ".mtp." not in f".{name}"}
    if block is None:
        block = "decoder.layers." if "decoder.layers." in blocks else next(iter(blocks), "")
        if block != "decoder.layers." and len(blocks) != 1:
            raise UsageError(f"choose the layers' module with --block; there are {sorted(blocks) or 'none'}")
    block = f"{block.rstrip('.')}."
    if block not in counts:
        raise UsageError(f"--block {block}: there are no such layers; there are {sorted(counts)}")
    match = re.fullmatch(r"(\d*):(\d*)", layers)
    if match is None:
        raise UsageError(f"--layers {layers!r}: expected a range like 0:2")
    count = counts[block]
    start, stop = int(match[1] or 0), int(match[2] or count)
    if not 0 <= start < stop <= count:
        raise UsageError(
            f"--layers {layers!r}: {block.rstrip('.')} has layers 0:{count}, and at least one must be left"
        )
    if kind == "dcp":
        plain_names, values = _plain_cut(opened, _renamer(block, start, stop))
        return Cut(block, start, stop, count, plain_names, values=values)
    keys = (*opened.catalog.tensors, *opened.catalog.objects)
    found = {key: _numbered(key, block, range(start, stop), kind == "fsdp_dtensor") for key in keys}
    names = {key: name for key, (name, _) in found.items()}
    return Cut(block, start, stop, count, names, frozenset(key for key in keys if found[key][1]))


def _renamer(block: str, start: int, stop: int) -> Rename:
    """For the layers `[start, stop)` of the block `layers.` or `decoder.layers.`."""

    def rename(name: str) -> str | None:
        layer = layer_of(name)
        if layer is None or layer.block != block:
            return name
        kept = start <= layer.number < stop
        return f"{block}{layer.number - start}.{layer.leaf}" if kept else None

    return rename


def _plain_cut(opened: Opened, rename: Rename) -> tuple[dict[str, str | None], dict[str, Any]]:
    """`names` and `values` of the cut of a plain state dict."""
    catalog = opened.catalog
    found = read_state_dict(catalog)
    names: dict[str, str | None] = {key: key for key in (*catalog.tensors, *catalog.objects)}
    values: dict[str, Any] = {}
    for key in found.others:  # extra states and buffers that no optimizer knows
        if key.startswith(found.model) and layer_of(key.removeprefix(found.model)):
            names[key] = _joined(found.model, rename(key.removeprefix(found.model)))
    for name, key in found.weights.items():
        names[key] = _joined(found.model, rename(name))
    reader = SmallValues(opened.files, opened.trust_pickle)
    for optimizer in found.optimizers:
        if optimizer.form == "by_number":
            _by_number(optimizer, found, opened, rename, names, values, reader)
        else:
            names |= dict(_by_name(optimizer, rename))
        if optimizer.form == "by_name":
            members = group_members(optimizer, catalog, reader)
            for owner, kept in zip(sorted(optimizer.groups, key=int), members, strict=True):
                if "params" in optimizer.groups[owner]:
                    values[optimizer.groups[owner]["params"]] = [
                        n.removeprefix(optimizer.prefix) for old in kept if (n := rename(old)) is not None
                    ]
    return names, values


def _joined(head: str, name: str | None) -> str | None:
    return None if name is None else f"{head}{name}"


def _by_name(optimizer: OptimizerKeys, rename: Rename) -> Iterator[tuple[str, str | None]]:
    parts = [("state", optimizer.states)]
    if optimizer.form == "flattened":
        parts.append(("param_groups", optimizer.groups))
    for part, owned in parts:
        head = f"{optimizer.root}{part}."
        for owner, keys in owned.items():
            name, old = rename(owner), owner.removeprefix(optimizer.prefix)
            for key in keys.values():
                tail = key[len(head) + len(old) :]
                yield key, None if name is None else f"{head}{name.removeprefix(optimizer.prefix)}{tail}"


def _by_number(
    optimizer: OptimizerKeys,
    found: StateDict,
    opened: Opened,
    rename: Rename,
    names: dict[str, str | None],
    values: dict[str, Any],
    reader: SmallValues,
) -> None:
    """Numbers count through what stays; masters, named by their place in a group, do so inside of it."""
    members = group_members(optimizer, opened.catalog, reader)
    of_number, masters = numbered(optimizer, members, found, opened.catalog, None)
    new_numbers: dict[int, int] = {}
    for group, (owner, numbers) in enumerate(zip(sorted(optimizer.groups, key=int), members, strict=True)):
        kept = [number for number in numbers if rename(of_number[number]) is not None]
        new_numbers |= {number: len(new_numbers) + at for at, number in enumerate(kept)}
        if "params" in optimizer.groups[owner]:
            values[optimizer.groups[owner]["params"]] = [new_numbers[number] for number in kept]
        for number in numbers:
            if number in masters:
                head = masters[number].rpartition(".")[0].rpartition(".")[0]
                names[masters[number]] = f"{head}.{group}.{kept.index(number)}" if number in kept else None
    head = f"{optimizer.root}state."
    for owner, keys in optimizer.states.items():
        for key in keys.values():
            tail = key[len(head) + len(owner) :]
            names[key] = f"{head}{new_numbers[int(owner)]}{tail}" if int(owner) in new_numbers else None


def _kept_tensors(opened: Opened, cut: Cut, keys: Sequence[str]) -> list[TargetTensor]:
    """The tensors of these keys that stay, cut along the layer axis where they have one."""
    tensors = []
    for key in keys:
        entry, name = opened.catalog.tensors[key], cut.names[key]
        if name is None:
            continue
        shape, view = entry.shape, tuple[Step, ...]()
        if key in cut.stacked:
            view = (Narrow(0, cut.start, cut.stop - cut.start),)
            shape = (cut.stop - cut.start, *shape[1:])
        path = cut.path(key, opened.catalog.planner_paths.get(key, ()))
        tensors.append(TargetTensor(name, entry.dtype, shape, (Source(key, view),), path))
    return tensors


def _torch_dist_parts(
    opened: Opened, source: TorchDistSource, cut: Cut
) -> tuple[list[TargetTensor], dict[str, Any]]:
    """The tensors of a sliced `torch_dist` checkpoint, and its common state."""
    keys = list(opened.catalog.tensors)
    common = _with_layers(opened.common.values, cut)
    if source.states is None or source.states.layout in _NATURAL:
        return _kept_tensors(opened, cut, keys), common
    tensors = _kept_tensors(opened, cut, [key for key in keys if not is_optimizer_key(key)])
    tensors += _states(source, opened, cut)
    common["content_metadata"] = CONTENT_METADATA | OPTIMIZER_METADATA
    own = source.model.own_optimizer
    common["optimizer"] = _optimizer(source.model) if own is None else own
    return tensors, common


def _states(source: TorchDistSource, opened: Opened, cut: Cut) -> list[TargetTensor]:
    """Optimizer states of any layout under the keys and in the shapes of their weights."""
    assert source.states is not None
    states, own = source.states.states, source.model.own_optimizer
    held: dict[str, list[str]] = {}
    for kind, key in states:
        held.setdefault(key, []).append(kind)
    tensors = []
    for (kind, key), state in states.items():
        name = cut.names[key]
        if name is None:
            continue
        value = state.value(key, opened.catalog.tensors[key].shape, stacked_axes(key))
        if key in cut.stacked:
            value = value.rows(cut.start, cut.stop - cut.start)
        spelled = kind
        if kind == MASTER:
            spelled = "param" if own is None else spelled_master(own, held[key], source.model.roles)
        tensors.append(
            TargetTensor(f"optimizer.state.{spelled}.{name}", value.dtype, value.shape, value.sources)
        )
    return tensors


def _optimizer(model: Model) -> dict[Any, Any]:
    """The optimizer entry of the common state as `fully_reshardable` has it."""
    step = {} if model.step is None else {"step": model.step}
    groups = [step | dict(group) for group in model.groups]
    parts = [[g for g in groups if bool(g.get("is_expert_parallel")) is expert] for expert in (False, True)]
    optimizers = [
        {"optimizer": {"param_groups": part}, "param_state_sharding_type": "fully_reshardable"}
        for part in parts
    ]
    return dict(enumerate(optimizers)) if parts[1] else optimizers[0]


def _with_layers(values: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """The common state with the new number of layers in its arguments."""
    args = values.get("args")
    if not isinstance(args, StandIn) or not isinstance(args.state, dict):
        return dict(values)
    changed = type(args).__new__(type(args), *args.args, **args.kwargs)
    changed.called, changed.items, changed.pairs = args.called, args.items, args.pairs
    changed.state = args.state | sliced_settings(args.state, cut)
    return {**values, "args": changed}


def sliced_settings(settings: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """The settings that say how many layers there are, or something of each, for the layers kept.

    In a vision-language model they are the language model's; the run may also record a config.json.
    """
    layers = Layers(cut.start, cut.stop, cut.count)
    if ".mtp." in f".{cut.block}":
        return {"mtp_num_layers": layers.kept} if settings.get("mtp_num_layers") == cut.count else {}
    of_tower = is_of_transformers(cut.block)
    part = VISION if of_tower else TEXT
    changed = changed_record(settings, part, lambda fields: cut_settings(fields, layers))
    if of_tower or ".vision_model." in f".{cut.block}":
        return changed
    if isinstance(inside := settings.get("transformer"), Mapping):  # newer Bridge
        changed["transformer"] = {**inside, **cut_settings(inside, layers)}
    return cut_settings(settings, layers) | changed


def _objects(
    opened: Opened, cut: Cut, changed: Mapping[str, Any]
) -> tuple[list[TargetObject], list[tuple[str, bytes]]]:
    """The objects that stay, with their archives: `args` or the common state changed, others as stored."""
    catalog, files = opened.catalog, opened.files
    natural = cut.values is not None or not any(
        is_optimizer_key(k) and "/shard_" in k for k in catalog.objects
    )
    taken = [key for key in catalog.objects if natural or not is_optimizer_key(key)]
    refuse_missing_shards(opened, taken)  # in the slice, nothing need be left of an object that lacks shards
    objects, blobs = [], []
    for key in taken:
        name = cut.names[key]
        if name is None:
            continue
        if key == COMMON_OBJECT:
            archive = dump_archive([changed])
        elif cut.values and key in cut.values:
            archive = dump_archive(cut.values[key])
        elif key == "args" and "args" in changed:
            archive = dump_archive(changed["args"])
        else:
            archive = read_archive(files, catalog.objects[key].item)
        objects.append(TargetObject(name, None, cut.path(key, catalog.planner_paths.get(key, ()))))
        blobs.append((name, archive))
    return objects, blobs


def _companions(opened: Opened, cut: Cut, changed: Mapping[str, Any]) -> dict[str, bytes]:
    """The small files that say the number of layers."""
    companions = {}
    if opened.location.has_common_pt:
        companions[COMMON_FILE] = dump_archive(dict(changed))
    if opened.common.model_config:  # else it says nothing of the model, and is copied unchanged
        import yaml

        config = parse_yaml(read_whole(opened.files, RUN_CONFIG))
        config["model"] |= sliced_settings(config["model"], cut)
        companions[RUN_CONFIG] = yaml.safe_dump(config, sort_keys=False).encode()
    return companions
