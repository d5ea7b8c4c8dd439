"""`slice` of a plain PyTorch state dict: keys by their owners' names, and numbered states numbered anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tools.commands.edit.modify import new_path
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.megatron.dcp.read import group_members, numbered
from ckpt_tools.megatron.dcp.state_dict import OptimizerKeys, StateDict, read_state_dict
from ckpt_tools.megatron.fsdp_dtensor.read import SmallValues
from ckpt_tools.megatron.keys import layer_of

Rename = Callable[[str], "str | None"]
"""A parameter's name with its layer renumbered, None for a layer that is left out."""


@dataclass(frozen=True, slots=True)
class PlainCut:
    """What every key is called in the slice (None: left out), and the objects that say something else there."""

    names: Mapping[str, str | None]
    values: Mapping[str, Any]

    def path(self, key: str, path: Sequence[str | int]) -> tuple[str | int, ...]:
        """The planner path of a key that stays; a number stays a number."""
        name = self.names[key]
        if name is None or name == key:
            return tuple(path)
        old = tuple(path)
        made = new_path(old, name)
        if len(made) != len(old):
            return made
        return tuple(
            int(new) if isinstance(was, int) and str(new).isdecimal() else new
            for was, new in zip(old, made, strict=True)
        )


def renamer(block: str, start: int, stop: int) -> Rename:
    """For the layers `[start, stop)` of the block `layers.` or `decoder.layers.`."""

    def rename(name: str) -> str | None:
        layer = layer_of(name)
        if layer is None or layer.block != block:
            return name
        kept = start <= layer.number < stop
        return f"{block}{layer.number - start}.{layer.leaf}" if kept else None

    return rename


def plain_cut(opened: Opened, rename: Rename) -> PlainCut:
    """The keys of a slice of the checkpoint."""
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
    return PlainCut(names, values)


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
    anew: dict[int, int] = {}
    for group, (owner, numbers) in enumerate(zip(sorted(optimizer.groups, key=int), members, strict=True)):
        kept = [number for number in numbers if rename(of_number[number]) is not None]
        anew |= {number: len(anew) + at for at, number in enumerate(kept)}
        if "params" in optimizer.groups[owner]:
            values[optimizer.groups[owner]["params"]] = [anew[number] for number in kept]
        for number in numbers:
            if number in masters:
                head = masters[number].rpartition(".")[0].rpartition(".")[0]
                names[masters[number]] = f"{head}.{group}.{kept.index(number)}" if number in kept else None
    head = f"{optimizer.root}state."
    for owner, keys in optimizer.states.items():
        for key in keys.values():
            tail = key[len(head) + len(owner) :]
            names[key] = f"{head}{anew[int(owner)]}{tail}" if int(owner) in anew else None
