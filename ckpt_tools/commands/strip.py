"""`strip`: a copy of a checkpoint with the weights alone: without optimizer, scheduler and random number states.

The bytes of the weights, their chunks and their files stay. An `fsdp_dtensor` checkpoint stores fp32 masters in the
place of weights, and only there another element type may be asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.commands.conversion_report import Masters
from ckpt_tools.commands.opened import Opened, open_checkpoint
from ckpt_tools.commands.rewrite import Edited, EditOptions, rewrite, use_of_masters
from ckpt_tools.errors import UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.container import read_archive
from ckpt_tools.formats.files import AnyPath, path_text
from ckpt_tools.formats.pickling import dump_archive
from ckpt_tools.megatron.common_state import COMMON_FILE
from ckpt_tools.megatron.keys import BUFFERS, COMMON_OBJECT, KEPT, is_optimizer_key, parameter_of
from ckpt_tools.megatron.torch_dist.write import OPTIMIZER_METADATA
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.target import Source, Target, TargetObject, TargetTensor

# What a job that saves with --no-save-optim and --no-save-rng does not write, beside the keys of its optimizer.
_OF_A_RUN = re.compile(
    r"^(?:rng_state|rerun_state_machine(?:_state)?|opt_param_scheduler|lr_scheduler)(?:[./]|$)"
    rf"|^{re.escape(KEPT)}"
)
_OF_THE_OPTIMIZER = ("optimizer", "opt_param_scheduler", "lr_scheduler", "rerun_state_machine", "rng_state")
_LAYOUT = frozenset(OPTIMIZER_METADATA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripped(Edited):
    """What `strip` did; `removed` are keys, and entries of the common state."""

    dtype: str | None  # that was asked for
    cast: tuple[str, ...]  # keys with another element type than before


def strip_checkpoint(
    source: AnyPath,
    output: AnyPath,
    dtype: str | None = None,
    options: EditOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Stripped:
    """Write the weights of the checkpoint at `source` to `output`, in its format.

    `dtype` casts the weights of an `fsdp_dtensor` checkpoint, which are fp32 masters; buffers keep their type.

    Raises:
        UsageError: there is nothing but weights, or a type that weights are not cast to.
        UnsupportedCheckpointError: neither `torch_dist` nor `fsdp_dtensor`.
        Otherwise the errors of opening, planning and writing.
    """
    source, output = path_text(source), path_text(output)
    options = options or EditOptions()
    with open_checkpoint(source, options.iteration, options.trust_pickle) as opened:
        _check_request(opened, dtype)
        catalog = opened.catalog
        removed = [key for key in (*catalog.tensors, *catalog.objects) if not is_kept(key)]
        common = _stripped_common(opened.common.values)
        entries = [f"{opened.common.source}: {name}" for name in opened.common.values if name not in common]
        in_common = opened.common.source in ("common.pt", "common_state")
        if not removed and not (in_common and entries):
            raise UsageError(f"{opened.location.path} holds weights alone; there is nothing to leave out")
        target = _target(opened, dtype)
        report = rewrite(
            source,
            opened,
            output,
            target,
            ((o.key, _archive(opened, o.key, common)) for o in target.objects),
            options,
            companions=_common_file(opened, common),
            progress=progress,
        )
        types = {key: entry.dtype for key, entry in catalog.tensors.items()}
        return Stripped(
            source=source,
            output=output,
            source_format=opened.location.kind,
            tensors=len(target.tensors),
            objects=len(target.objects),
            removed=(*removed, *(entries if in_common else ())),
            masters=Masters(use_of_masters(opened, "left_out")),
            written=report,
            dtype=dtype,
            cast=tuple(t.key for t in target.tensors if t.dtype != types[t.key]),
        )


def is_kept(key: str) -> bool:
    """Whether a stored key is part of a weights-only checkpoint."""
    return not is_optimizer_key(key) and not _OF_A_RUN.match(key)


def _check_request(opened: Opened, dtype: str | None) -> None:
    kind, path = opened.location.kind, opened.location.path
    if kind not in ("torch_dist", "fsdp_dtensor"):
        raise UnsupportedCheckpointError(
            f"{path} is {kind}; strip works on torch_dist and fsdp_dtensor checkpoints. `modify-state-dict --op "
            "'remove REGEX'` leaves keys out of any torch distributed checkpoint"
        )
    if dtype is None:
        return
    if dtype not in CASTABLE:
        raise UsageError(f"--dtype {dtype}: weights can be written as {', '.join(sorted(CASTABLE))}")
    if kind == "torch_dist":
        raise UsageError(
            f"--dtype {dtype}: {path} is torch_dist, whose weights have the element type of the job already; "
            "`convert` and `export-hf` cast on the way to another format"
        )


def _target(opened: Opened, dtype: str | None) -> Target:
    catalog, paths = opened.catalog, opened.catalog.planner_paths
    return Target(
        tensors=tuple(
            TargetTensor(key, _dtype_of(key, e.dtype, dtype), e.shape, (Source(key),), paths.get(key, ()))
            for key, e in catalog.tensors.items()
            if is_kept(key)
        ),
        objects=tuple(TargetObject(key, None, paths.get(key, ())) for key in catalog.objects if is_kept(key)),
    )


def _dtype_of(key: str, stored: str, wanted: str | None) -> str:
    """The element type of a kept tensor: `wanted` for the floating-point parameters of a model, not its buffers."""
    parameter = parameter_of(key)
    is_weight = parameter is not None and parameter[1] == WEIGHT and not key.endswith(BUFFERS)
    return wanted if wanted is not None and is_weight and stored in CASTABLE else stored


def _stripped_common(values: Mapping[str, Any]) -> dict[str, Any]:
    """The common state of a job that saves neither optimizer nor random number states."""
    kept = {name: value for name, value in values.items() if name not in _OF_THE_OPTIMIZER}
    content = kept.get("content_metadata")
    if isinstance(content, dict):
        kept["content_metadata"] = {name: value for name, value in content.items() if name not in _LAYOUT}
    return kept


def _archive(opened: Opened, key: str, common: Mapping[str, Any]) -> bytes:
    if key == COMMON_OBJECT and opened.common.source == "common_state":
        return dump_archive([dict(common)])
    return read_archive(opened.files, opened.catalog.objects[key].item)


def _common_file(opened: Opened, common: Mapping[str, Any]) -> dict[str, bytes]:
    return {COMMON_FILE: dump_archive(dict(common))} if opened.common.source == "common.pt" else {}
