"""For Megatron-FSDP v2 (`--megatron-fsdp-version 2` of Megatron-LM main): one wrapper less in every name.

What v2 of main (d98e8a64) asks for is in mcore_fsdp_adapter.py (`FullyShardedDataParallelV2`) and checkpointing.py:
`model.<name>`, the fp32 main weights. Of the optimizer it can neither save nor load anything yet; the open change
NVIDIA/Megatron-LM#6215 (9b9343dc) gives it the layout of v1, `optimizer.state.module.module.<name>.exp_avg` and
`optimizer.param_to_group_meta.module.module.<name>.<field>`, and refuses expert parallelism. How v2 will store fused
tensors nobody has said: the code that takes them apart for v1 asks for attributes that v2's parameters do not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckpt_tools.commands.placements import Layout
from ckpt_tools.commands.prepared import Prepared
from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.megatron.common_state import CommonState
from ckpt_tools.megatron.keys import GROUP_META, MODEL_PREFIX, STEP, fsdp_state, split_half
from ckpt_tools.model.target import Target

VERSION_2 = "mfsdp-v2"
_WRAPPER = "module."
_PREFIXES = ("model.", "optimizer.state.", GROUP_META)  # of the three kinds of names, before their wrappers
_NOTE = "named for Megatron-FSDP v2 (--megatron-fsdp-version 2 of Megatron-LM main)"
_OPTIMIZER = (
    "optimizer: in the layout of NVIDIA/Megatron-LM#6215, an open change; v2 of main loads no optimizer yet: start "
    "with --no-load-optim there"
)


def for_version_2(prepared: Prepared, common: CommonState, layout: Layout) -> Prepared:
    """What v2 asks for, of what v1 does.

    Raises:
        MappingError: the model has tensors for which v2's form is not known.
        UsageError: another program than main is to load it, or experts with their optimizer.
    """
    _refuse(prepared, common, layout)
    archives = prepared.archives
    notes = [_NOTE, *([_OPTIMIZER] if _has_optimizer(prepared.target) else [])]
    target = _respelled(prepared.target)
    return replace(
        prepared,
        target=replace(target, notes=(*target.notes, *notes)),
        archives=lambda: ((respelled(key), data) for key, data in archives()),
        without_masters=None
        if prepared.without_masters is None
        else lambda note: _again(prepared, note, common, layout),
    )


def respelled(key: str) -> str:
    """The key under which v2 asks for what v1 has under `key`."""
    for prefix in _PREFIXES:
        if key.startswith(prefix + _WRAPPER):
            return prefix + key[len(prefix + _WRAPPER) :]
    return key


def is_version_2(keys: Iterable[str]) -> bool:
    """Whether weights have the names that v2 asks for."""
    weights = [key for key in keys if key.startswith("model.")]
    return bool(weights) and not any(key.startswith(f"{MODEL_PREFIX}.") for key in weights)


def _again(prepared: Prepared, note: str, common: CommonState, layout: Layout) -> Prepared:
    assert prepared.without_masters is not None
    return for_version_2(prepared.without_masters(note), common, layout)


def _respelled(target: Target) -> Target:
    return replace(
        target,
        tensors=tuple(replace(t, key=respelled(t.key), path=_path(t.path)) for t in target.tensors),
        inline=tuple(replace(t, key=respelled(t.key), path=_path(t.path)) for t in target.inline),
        objects=tuple(replace(o, key=respelled(o.key), path=_path(o.path)) for o in target.objects),
        aliases={
            respelled(alias): (respelled(key), _path(path)) for alias, (key, path) in target.aliases.items()
        },
    )


def _path(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """A planner path with one wrapper less in the name, which is one of its steps."""
    if len(path) == 1:
        return tuple(respelled(step) if isinstance(step, str) else step for step in path)
    at = 1 if path[0] == "model" else 2 if path[:1] == ("optimizer",) else len(path)
    return tuple(
        step.removeprefix(_WRAPPER) if i == at and isinstance(step, str) else step
        for i, step in enumerate(path)
    )


def _refuse(prepared: Prepared, common: CommonState, layout: Layout) -> None:
    if prepared.loader not in (None, "main"):
        raise UsageError(
            f"--layout {VERSION_2}: Megatron-FSDP v2 is a part of Megatron-LM main, not of {prepared.loader}; "
            "use --target main"
        )
    topology = layout.topology
    if topology is not None:
        topology.check_layout(VERSION_2)
    if topology is not None and topology.ep > 1 and _has_optimizer(prepared.target):
        raise UsageError(
            f"--layout {VERSION_2} --ep {topology.ep}: the only known layout of v2's optimizer (the open change "
            "NVIDIA/Megatron-LM#6215) refuses expert parallelism; pass --weights-only"
        )
    fused = next(_fused(prepared.target, common), None)
    if fused is not None:
        raise MappingError(
            f"--layout {VERSION_2}: {fused}. Megatron-FSDP v2 of Megatron-LM main (d98e8a64) ends with an error when "
            "it saves or loads such a tensor: the code of its checkpoints takes it apart by attributes that only v1 "
            "sets, and no released or proposed code shows what v2 will store. Use --layout mfsdp-v1"
        )


def _fused(target: Target, common: CommonState) -> Iterator[str]:
    """Tensors that are one in the running model and several in a checkpoint of v1."""
    for tensor in target.tensors:
        whole, half = split_half(tensor.parameter)
        if half:
            yield f"{whole} is a gated MLP's, gate and up in one"
    if common.arg("mla_down_proj_fusion"):
        yield "the down-projections of multi-latent attention are fused (--mla-down-proj-fusion)"


def _has_optimizer(target: Target) -> bool:
    states = (fsdp_state(tensor.key) for tensor in target.tensors)
    return any(state is not None and state.kind != STEP for state in states)
