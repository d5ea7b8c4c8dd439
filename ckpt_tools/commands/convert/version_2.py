"""For Megatron-FSDP v2 (`--megatron-fsdp-version 2` of Megatron-LM main): one wrapper less in every name.

What v2 of main (d98e8a64) asks for is in mcore_fsdp_adapter.py (`FullyShardedDataParallelV2`) and checkpointing.py:
`model.<name>`, the fp32 main weights. Of the optimizer it can neither save nor load anything (NotImplementedError).
v2's layout of fused tensors is undefined upstream: the code that takes them apart for v1 needs attributes that
v2's parameters do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.megatron.keys import FSDP_PREFIXES, STEP, fsdp_state, is_version_2, split_half
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.target import InlineTensor, Target, TargetObject, TargetTensor

if TYPE_CHECKING:  # `diff` asks for names alone, and is not to wait for all that writes
    from ckpt_tools.commands.job.conversion import Prepared
    from ckpt_tools.commands.job.placements import Layout

VERSION_1, VERSION_2 = "mfsdp-v1", "mfsdp-v2"
Rename: TypeAlias = Callable[[str], str]
Path: TypeAlias = tuple[str | int, ...]
Item = TypeVar("Item", TargetTensor, InlineTensor, TargetObject)
_WRAPPER = "module."
_NOTE = "named for Megatron-FSDP v2 (--megatron-fsdp-version 2 of Megatron-LM main)"


def for_version_2(prepared: Prepared, common: CommonState, layout: Layout) -> Prepared:
    """What v2 asks for, of what v1 does; what has the names of v2 keeps them."""
    _refuse(prepared, common, layout)
    again = prepared.without_masters
    made = prepared if is_version_2(t.key for t in prepared.target.tensors) else renamed(prepared, respelled)
    return replace(
        made,
        target=replace(made.target, notes=(*made.target.notes, _NOTE)),
        without_masters=None if again is None else lambda note: for_version_2(again(note), common, layout),
    )


def for_version_1(prepared: Prepared) -> Prepared:
    """What v1 asks for, of a checkpoint that may have the names of v2."""
    if not is_version_2(t.key for t in prepared.target.tensors):
        return prepared
    return renamed(prepared, wrapped)


def respelled(key: str) -> str:
    """The key under which v2 asks for what v1 has under `key`."""
    for prefix in FSDP_PREFIXES:
        if key.startswith(prefix + _WRAPPER):
            return prefix + key[len(prefix + _WRAPPER) :]
    return key


def wrapped(key: str) -> str:
    """The key under which v1 asks for what v2 has under `key`."""
    for prefix in FSDP_PREFIXES:
        if key.startswith(prefix):
            return prefix + _WRAPPER + key[len(prefix) :]
    return key


def renamed(prepared: Prepared, rename: Rename) -> Prepared:
    """The same with other keys for everything."""
    archives, target = prepared.archives, prepared.target

    def named(items: Iterable[Item]) -> tuple[Item, ...]:
        return tuple(replace(i, key=rename(i.key), path=_path(i.path, rename(i.key))) for i in items)

    made = replace(
        target, tensors=named(target.tensors), inline=named(target.inline), objects=named(target.objects)
    )
    return replace(prepared, target=made, archives=lambda: ((rename(key), data) for key, data in archives()))


def _path(path: Path, key: str) -> Path:
    """The planner path of what gets the name `key`: only the step that is a parameter's name becomes another."""
    if len(path) < 2:
        return (key,) if path else ()
    at = {"model": 1, "optimizer": 2}.get(str(path[0]), len(path))
    if at >= len(path):
        return path
    before, after = ".".join(map(str, path[:at])) + ".", "".join(f".{step}" for step in path[at + 1 :])
    return (*path[:at], key[len(before) : len(key) - len(after)], *path[at + 1 :])


def _refuse(prepared: Prepared, common: CommonState, layout: Layout) -> None:
    if prepared.loader not in (None, "main"):
        raise UsageError(
            f"--layout {VERSION_2}: Megatron-FSDP v2 is a part of Megatron-LM main, not of {prepared.loader}; "
            "use --target main"
        )
    if layout.topology is not None:
        layout.topology.check_layout(VERSION_2)
    fused = next(_fused(prepared.target, common), None)
    if fused is not None:
        raise MappingError(
            f"--layout {VERSION_2}: {fused}. Megatron-FSDP v2 of Megatron-LM main (d98e8a64) ends with an error when "
            "it saves or loads such a tensor: the code of its checkpoints takes it apart by attributes that only v1 "
            "sets, and no released or proposed code shows what v2 will store. Use --layout mfsdp-v1"
        )
    states = (fsdp_state(tensor.key) for tensor in prepared.target.tensors)
    if any(state is not None and state.kind != STEP for state in states):
        raise UsageError(
            f"--layout {VERSION_2}: Megatron-FSDP v2 of Megatron-LM main loads no optimizer (it ends with "
            "NotImplementedError); pass --weights-only without --fresh-optimizer, or run `strip` first"
        )


def _fused(target: Target, common: CommonState) -> Iterator[str]:
    """Tensors that are one in the running model and several in a checkpoint of v1."""
    for tensor in target.tensors:
        whole, half = split_half(tensor.parameter)
        if half:
            yield f"{whole} is a gated MLP's, gate and up in one"
    if common.arg("mla_down_proj_fusion"):
        yield "the down-projections of multi-latent attention are fused (--mla-down-proj-fusion)"
