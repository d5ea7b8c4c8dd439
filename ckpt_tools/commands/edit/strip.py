"""`strip`: a copy of a checkpoint with the weights alone: without optimizer, scheduler and random number states.

The bytes of the weights, their chunks and their files stay; of a plain state dict, all that is the model's. An
`fsdp_dtensor` checkpoint stores fp32 masters in the place of weights, and only there another element type may be
asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from ckpt_tools.commands.convert.fresh_optimizer import plan_fresh, started_at
from ckpt_tools.commands.convert.to_dtensors import masters_beside_weights
from ckpt_tools.commands.job.conversion import (
    Conversion,
    EditOptions,
    Progress,
    like_to_like,
    not_compared,
    with_note,
)
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.read_model import GO_ON_UNPROVEN, Wanted, master_targets, read_beside_masters
from ckpt_tools.commands.job.report import ConversionReport, Edits, MastersUse
from ckpt_tools.commands.job.rewrite import edit, rewrite, use_of_masters
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.run import Output, WriteOptions
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.storage.files import AnyPath
from ckpt_tools.formats.torch_archive.item_reader import read_archive
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.megatron.dcp.state_dict import is_megatron, read_state_dict
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.keys import BUFFERS, COMMON_OBJECT, is_version_2, parameter_of
from ckpt_tools.megatron.run_state.common_state import COMMON_FILE
from ckpt_tools.megatron.torch_dist.read import refuse_lost_weights
from ckpt_tools.megatron.torch_dist.write import OPTIMIZER_METADATA
from ckpt_tools.model.choices import CheckLevel
from ckpt_tools.model.dtypes import CASTABLE, check_dtype
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.target import Target, TargetObject, TargetTensor
from ckpt_tools.model.views import Source

_OF_THE_OPTIMIZER = ("optimizer", "opt_param_scheduler", "lr_scheduler", "rerun_state_machine", "rng_state")
_LAYOUT = frozenset(OPTIMIZER_METADATA)


def strip_checkpoint(
    source: AnyPath,
    output: AnyPath,
    dtype: str | None = None,
    options: EditOptions | None = None,
    progress: Progress | None = None,
    fresh: TargetOptions | None = None,
    check_masters: CheckLevel = "sample",
) -> ConversionReport:
    """Write the weights of the checkpoint at `source` to `output`, in its format.

    `dtype` casts the weights of an `fsdp_dtensor` checkpoint, which are fp32 masters; buffers keep their type.
    `fresh` gives it a fresh optimizer with these settings, else with the source's.
    `check_masters`: how much of the masters that are left out must be shown to round to the weights.

    Raises:
        UsageError: there is nothing but weights, or a type that weights are not cast to.
        UnsupportedCheckpointError: a Hugging Face model, or a plain state dict of a Megatron model.
        VerificationError: masters that do not round to the stored weights.
        Otherwise the errors of opening, planning and writing.
    """
    options = options or EditOptions()
    if fresh is None:
        return edit(
            source,
            output,
            lambda opened: _plan(opened, dtype, check_masters, options.write),
            options,
            progress,
        )
    settings = replace(fresh, fresh_optimizer=True, weights_only=True)

    def place(source: str, location: Location, output: str, options: EditOptions) -> Output:
        return like_to_like(source, started_at(location, settings), output, options)

    def plan(opened: Opened) -> Conversion:
        _check_request(opened, dtype, settings)
        return plan_fresh(opened, settings)

    return edit(source, output, plan, options, progress, place=place)


def _plan(opened: Opened, dtype: str | None, check_masters: CheckLevel, write: WriteOptions) -> Conversion:
    _check_request(opened, dtype, None)
    catalog = opened.catalog
    if opened.location.kind == "torch_dist":
        refuse_lost_weights(catalog, catalog.tensors.keys())
    kept = opened.format.without_optimizer(catalog)
    removed = [key for key in (*catalog.tensors, *catalog.objects) if key not in kept]
    common = _stripped_common(opened.common.values)
    if opened.common.source in ("common.pt", "common_state"):
        left_out = (name for name in opened.common.values if name not in common)
        removed += [f"{opened.common.source}: {name}" for name in left_out]
    if not removed:
        raise UsageError(f"{opened.location.path} holds weights alone; there is nothing to leave out")
    target = _target(opened, kept, dtype)
    types = {key: entry.dtype for key, entry in catalog.tensors.items()}
    made = rewrite(
        opened,
        target,
        ((o.key, _archive(opened, o.key, common)) for o in target.objects),
        Edits(removed=tuple(removed), cast=tuple(t.key for t in target.tensors if t.dtype != types[t.key])),
        companions={COMMON_FILE: dump_archive(dict(common))} if opened.common.source == "common.pt" else {},
        masters=_use_of_masters(opened),
    )
    if made.masters == "left_out" and check_masters != "none":
        made = replace(_with_proof(made, opened, write), check_masters=check_masters)
    if opened.location.kind == "dcp" and (more := read_state_dict(catalog).more):
        kept_too = f"{', '.join(more[:3])}{', ...' if more[3:] else ''}"
        made = with_note(made, f"kept since they may be weights: {kept_too}")
    return made


def _with_proof(made: Conversion, opened: Opened, write: WriteOptions) -> Conversion:
    """The conversion with the masters that it leaves out, which the weights must be the rounding of; or a note."""
    made = replace(made, advice=GO_ON_UNPROVEN)
    try:
        if opened.location.kind == "dcp":
            targets = masters_beside_weights(opened)
            lost = sum(len(one.masters) for one in read_state_dict(opened.catalog).optimizers) - len(targets)
            made = replace(made, must_round=targets)
            return with_note(made, not_compared(f"{lost} of them match no known weight")) if lost else made
        model = read_beside_masters(opened, Wanted(unknown_keys=True), write)
    except (MappingError, UnsupportedCheckpointError) as error:
        return with_note(made, not_compared(str(error)))
    made = replace(
        made,
        catalog=model.catalog,
        must_round=master_targets(model),
        fp8_recipe=model.settings.fp8_recipe,
    )
    return made if model.unread is None else with_note(made, not_compared(model.unread))


def _use_of_masters(opened: Opened) -> MastersUse:
    if opened.location.kind != "dcp":
        return use_of_masters(opened, "left_out")
    return "left_out" if any(one.masters for one in read_state_dict(opened.catalog).optimizers) else "none"


def _check_request(opened: Opened, dtype: str | None, fresh: TargetOptions | None) -> None:
    kind, path = opened.location.kind, opened.location.path
    if kind == "safetensors":
        raise UnsupportedCheckpointError(
            f"{path} is a Hugging Face model, which holds weights alone; there is nothing to leave out"
        )
    if kind == "dcp" and is_megatron(read_state_dict(opened.catalog)):
        raise UnsupportedCheckpointError(
            f"{path} is a plain state dict of a Megatron model, and what it is, its optimizer tells. `convert --to "
            "torch_dist --weights-only` (or fsdp_dtensor) writes its weights alone"
        )
    if fresh is not None:
        _check_fresh(opened, dtype)
    if dtype is None:
        return
    check_dtype(dtype)
    if not opened.format.masters_in_place:
        raise UsageError(
            f"--dtype {dtype}: {path} is {kind}; its weights already have the job's element type. "
            "`convert` and `export-hf` cast on the way to another format"
        )


def _check_fresh(opened: Opened, dtype: str | None) -> None:
    if opened.location.kind == "dcp":
        raise UsageError(
            f"--fresh-optimizer: {opened.location.path} is a plain state dict, and its program makes its own "
            "optimizer; load its weights alone"
        )
    if opened.location.kind == "torch_dist":
        raise UsageError(
            f"--fresh-optimizer: {opened.location.path} is torch_dist, and a 3D-parallel job starts from weights "
            "alone (--finetune). For Megatron-FSDP: `convert --weights-only --fresh-optimizer`"
        )
    if is_version_2(opened.catalog.tensors):
        raise UsageError(
            f"--fresh-optimizer: {opened.location.path} is named for Megatron-FSDP v2, which loads no optimizer and "
            "starts from weights alone (--no-load-optim). For v1: `convert --layout mfsdp-v1` first"
        )
    if dtype is not None:
        raise UsageError(
            f"--dtype {dtype}: fp32 masters stand in the place of weights where there is an optimizer "
            "(--fresh-optimizer)"
        )


def _target(opened: Opened, kept: Set[str], dtype: str | None) -> Target:
    catalog, paths = opened.catalog, opened.catalog.planner_paths
    return Target(
        tensors=tuple(
            TargetTensor(key, _dtype_of(key, e.dtype, dtype), e.shape, (Source(key),), paths.get(key, ()))
            for key, e in catalog.tensors.items()
            if key in kept
        ),
        objects=tuple(TargetObject(key, None, paths.get(key, ())) for key in catalog.objects if key in kept),
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
