"""`strip`: a copy of a checkpoint with the weights alone: without optimizer, scheduler and random number states.

The bytes of the weights, their chunks and their files stay; of a plain state dict, all that is the model's. An
`fsdp_dtensor` checkpoint stores fp32 masters in the place of weights, and only there another element type may be
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from ckpt_tools.commands.convert.relayout_plain import masters_beside_weights
from ckpt_tools.commands.convert.restart import begin_anew
from ckpt_tools.commands.convert.version_2 import is_version_2
from ckpt_tools.commands.job.conversion import prove_rounding
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.read_model import GO_ON_UNPROVEN, Wanted, master_targets, read_beside_masters
from ckpt_tools.commands.job.report import Masters, MastersUse
from ckpt_tools.commands.job.rewrite import Edited, EditOptions, rewrite, use_of_masters
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.proof.masters import MastersReport
from ckpt_tools.execute.run import WriteOptions
from ckpt_tools.formats.storage.files import AnyPath, path_text
from ckpt_tools.formats.torch_archive.item_reader import read_archive
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.megatron.dcp.state_dict import EXTRA_STATE, is_megatron, read_state_dict, root_of
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.keys import BUFFERS, COMMON_OBJECT, is_optimizer_key, is_run_state, parameter_of
from ckpt_tools.megatron.run_state.common_state import COMMON_FILE
from ckpt_tools.megatron.torch_dist.write import OPTIMIZER_METADATA
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.choices import CheckLevel
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.target import Target, TargetObject, TargetTensor
from ckpt_tools.model.views import Source

_OF_THE_OPTIMIZER = ("optimizer", "opt_param_scheduler", "lr_scheduler", "rerun_state_machine", "rng_state")
_LAYOUT = frozenset(OPTIMIZER_METADATA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripped(Edited):
    """What `strip` did; `removed` are keys, and entries of the common state."""

    dtype: str | None  # that was asked for
    cast: tuple[str, ...]  # keys with another element type than before
    notes: tuple[str, ...] = ()  # on a fresh optimizer, or masters that were not compared


def strip_checkpoint(
    source: AnyPath,
    output: AnyPath,
    dtype: str | None = None,
    options: EditOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
    fresh: TargetOptions | None = None,
    check_masters: CheckLevel = "sample",
) -> Stripped:
    """Write the weights of the checkpoint at `source` to `output`, in its format.

    `dtype` casts the weights of an `fsdp_dtensor` checkpoint, which are fp32 masters; buffers keep their type.
    `fresh` gives it an optimizer that has not begun, with these settings, or those that the source tells.
    `check_masters`: how much of the masters that are left out must be shown to round to the weights.

    Raises:
        UsageError: there is nothing but weights, or a type that weights are not cast to.
        UnsupportedCheckpointError: a Hugging Face model, or a plain state dict of a Megatron model.
        VerificationError: masters that do not round to the stored weights.
        Otherwise the errors of opening, planning and writing.
    """
    source, output = path_text(source), path_text(output)
    options = options or EditOptions()
    with open_checkpoint(source, options.iteration, options.trust_pickle, of_run=True) as opened:
        _check_request(opened, dtype, fresh)
        if fresh is not None:
            return _begun_anew(source, opened, output, fresh, options, progress)
        catalog = opened.catalog
        kept = _kept_keys(opened)
        removed = [key for key in (*catalog.tensors, *catalog.objects) if key not in kept]
        common = _stripped_common(opened.common.values)
        entries = [f"{opened.common.source}: {name}" for name in opened.common.values if name not in common]
        in_common = opened.common.source in ("common.pt", "common_state")
        if not removed and not (in_common and entries):
            raise UsageError(f"{opened.location.path} holds weights alone; there is nothing to leave out")
        masters, notes = _proven(opened, check_masters, options.write)
        if opened.location.kind == "dcp" and (more := read_state_dict(catalog).more):
            notes += (f"kept since they may be weights: {', '.join(more[:3])}{', ...' if more[3:] else ''}",)
        target = _target(opened, kept, dtype)
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
            masters=masters,
            written=report,
            left_out=opened.location.left_out,
            dtype=dtype,
            cast=tuple(t.key for t in target.tensors if t.dtype != types[t.key]),
            notes=notes,
        )


def _proven(opened: Opened, level: CheckLevel, write: WriteOptions) -> tuple[Masters, tuple[str, ...]]:
    """What the masters that are left out say of the weights; a note where they say nothing."""
    use = _use_of_masters(opened)
    if level == "none" or use != "left_out":
        return Masters(use), ()
    try:
        catalog, targets, recipe, unread = _masters_of(opened, write)
        found = prove_rounding(opened.files, catalog, targets, level, write, Ranks(), recipe, GO_ON_UNPROVEN)
    except (MappingError, UnsupportedCheckpointError) as error:
        found, unread = MastersReport(), str(error).splitlines()[0].rstrip(":")
    notes = (f"the weights were not compared with their masters: {unread}",) if unread else ()
    return Masters(use, level if found.tensors else "none", found), notes


def _masters_of(
    opened: Opened, write: WriteOptions
) -> tuple[Catalog, list[TargetTensor], str | None, str | None]:
    """The masters beside weights and the catalog that has them, by which recipe of FP8; why they cannot be read."""
    if opened.location.kind == "dcp":
        targets = masters_beside_weights(opened)
        lost = sum(len(one.masters) for one in read_state_dict(opened.catalog).optimizers) - len(targets)
        unread = f"nothing tells whose {lost} of them are" if lost else None
        return opened.catalog, targets, None, unread
    model = read_beside_masters(opened, Wanted(unknown_keys=True), write)
    return model.catalog, master_targets(model), model.settings.fp8_recipe, model.unread


def _begun_anew(
    source: str,
    opened: Opened,
    output: str,
    fresh: TargetOptions,
    options: EditOptions,
    progress: Callable[[int, int], None] | None,
) -> Stripped:
    target, report = begin_anew(source, opened, output, fresh, options, progress)
    stored = opened.catalog
    types = {key: entry.dtype for key, entry in stored.tensors.items()}
    written = {
        *(t.key for t in target.tensors),
        *(t.key for t in target.inline),
        *(t.key for t in target.objects),
    }
    return Stripped(
        source=source,
        output=output,
        source_format=opened.location.kind,
        tensors=len(target.tensors),
        objects=len(target.objects) + len(target.inline),
        removed=tuple(key for key in (*stored.tensors, *stored.objects) if key not in written),
        masters=Masters(use_of_masters(opened, "left_out")),
        written=report,
        left_out=opened.location.left_out,
        dtype=None,
        cast=tuple(t.key for t in target.tensors if t.key in types and t.dtype != types[t.key]),
        notes=target.notes,
    )


def _kept_keys(opened: Opened) -> frozenset[str]:
    """The keys of a weights-only checkpoint: of weights, and of what models keep beside these."""
    catalog = opened.catalog
    weights = frozenset(key for key, role in opened.roles().items() if role == WEIGHT)
    if opened.location.kind != "dcp":
        objects = (key for key in catalog.objects if not is_optimizer_key(key) and not is_run_state(key))
        return weights.union(objects)
    found = read_state_dict(catalog)
    roots = {root_of(catalog, key) for key in weights} - {""}
    return weights.union(
        key
        for key in found.others
        if (found.model and key.startswith(found.model))
        or root_of(catalog, key) in roots
        or key.endswith(EXTRA_STATE)
    )


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
    if dtype not in CASTABLE:
        raise UsageError(f"--dtype {dtype}: weights can be written as {', '.join(sorted(CASTABLE))}")
    if kind != "fsdp_dtensor":
        raise UsageError(
            f"--dtype {dtype}: {path} is {kind}, whose weights have the element type of the job already; "
            "`convert` and `export-hf` cast on the way to another format"
        )


def _check_fresh(opened: Opened, dtype: str | None) -> None:
    if opened.location.kind == "dcp":
        raise UsageError(
            f"--fresh-optimizer: {opened.location.path} is a plain state dict, whose program makes its own "
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


def _common_file(opened: Opened, common: Mapping[str, Any]) -> dict[str, bytes]:
    return {COMMON_FILE: dump_archive(dict(common))} if opened.common.source == "common.pt" else {}
