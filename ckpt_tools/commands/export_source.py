"""What an export reads: every parameter of a checkpoint of either format, and which of its values are taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.commands.opened import Opened
from ckpt_tools.errors import UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.check_masters import check_masters, describe_masters
from ckpt_tools.formats.left_out import leave_out
from ckpt_tools.megatron.fsdp_dtensor.entries import read_fsdp_source
from ckpt_tools.megatron.fsdp_dtensor.read import fsdp_model
from ckpt_tools.megatron.hybrid import as_gpt, gpt_name, is_hybrid
from ckpt_tools.megatron.keys import EXPERTS
from ckpt_tools.megatron.settings import training_dtype
from ckpt_tools.megatron.torch_dist.read import read_torch_dist
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.expressions import Value
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.target import TargetTensor

_WIDE = ("float32", "float64")  # what an fp32 master says more to than the weight


@dataclass(frozen=True, slots=True)
class ExportSource:
    """Parameters under their `torch_dist` names, layers and experts one by one, and the settings they go with.

    `types` has the running model's type of parameters whose values are fp32 masters; others keep what is stored.
    `values` says in words which values are taken.
    """

    catalog: Catalog
    bases: Mapping[str, Value]
    settings: Mapping[str, Any] | None
    types: Mapping[str, str]
    values: str
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_export_source(
    opened: Opened, dtype: str | None, tp: int | None, ignored: tuple[str, ...], trust_pickle: bool
) -> ExportSource:
    """The parameters of the checkpoint, for an export as `dtype` (None: the model's own).

    Raises:
        UsageError: nothing names the type of the running model.
        UnsupportedCheckpointError: neither `torch_dist` nor `fsdp_dtensor`.
        VerificationError: masters that are to be exported do not round to the stored weights.
        MappingError: the parameters do not make a whole model.
    """
    match opened.location.kind:
        case "torch_dist":
            source = _torch_dist(opened, dtype, ignored)
        case "fsdp_dtensor":
            source = _fsdp_dtensor(opened, dtype, tp, ignored, trust_pickle)
        case kind:
            raise UnsupportedCheckpointError(
                f"{opened.location.path} is of kind {kind}; torch_dist and fsdp_dtensor can be exported"
            )
    if not is_hybrid(source.bases):
        return source
    bases, settings, note = as_gpt(source.bases, source.settings or {})
    types = {gpt_name(name): dtype for name, dtype in source.types.items()}
    kept = settings if source.settings is not None else None
    return replace(source, bases=bases, types=types, settings=kept, notes=(*source.notes, note))


def _torch_dist(opened: Opened, dtype: str | None, ignored: tuple[str, ...]) -> ExportSource:
    """The stored weights; the masters instead where the export is wide enough to tell them apart."""
    catalog, left_out = leave_out(opened.catalog, ignored)
    wide = dtype in _WIDE
    model = read_torch_dist(
        opened.files,
        catalog,
        trust_pickle=opened.trust_pickle,
        optimizer="masters" if wide else "none",
        unknown_keys=True,
    ).model
    values, notes = "the stored weights are exported", tuple[str, ...]()
    bases = {one_name(p.name, p.expert): p.weight for p in model.parameters}
    if MASTER in model.roles:
        advice = "Without --dtype the stored weights are exported."
        recipe = model.settings.fp8_recipe
        targets = master_targets(model)
        report = check_masters(
            opened.files, model.catalog, targets, "sample", fp8_recipe=recipe, advice=advice
        )
        values = f"the fp32 masters are exported: {describe_masters(report, 'sample')}"
        bases = {one_name(p.name, p.expert): p.main for p in model.parameters}
    elif wide:
        reason = model.unread or "the checkpoint holds none"
        notes = (f"no fp32 masters are exported, only the stored weights: {reason}",)
    return ExportSource(model.catalog, bases, _settings(opened), {}, values, left_out, notes)


def _fsdp_dtensor(
    opened: Opened, dtype: str | None, tp: int | None, ignored: tuple[str, ...], trust_pickle: bool
) -> ExportSource:
    source = read_fsdp_source(
        opened.files, opened.catalog, opened.common, ignored, trust_pickle, weights_only=True
    )
    model = fsdp_model(source, tp=tp, weights_only=True)
    bases = {one_name(p.name, p.expert): p.weight for p in model.parameters}
    masters = [p for p in model.parameters if p.weight.dtype == "float32" != p.dtype]
    own, values = training_dtype(opened.common), "the checkpoint's values are exported"
    if masters and own is None and dtype is None:
        raise UsageError(
            "the checkpoint holds fp32 masters, and nothing names the model's type; pass --dtype"
        )
    if masters:
        values = f"the checkpoint's values, fp32 masters, are exported as {dtype or own}"
    types = {one_name(p.name, p.expert): own for p in masters} if own is not None else {}
    return ExportSource(source.catalog, bases, _settings(opened), types, values, source.ignored, source.notes)


def _settings(opened: Opened) -> Mapping[str, Any] | None:
    return opened.common.args or opened.common.model_config or None


def one_name(name: str, expert: int | None) -> str:
    """The name of one expert's parameter: ``...experts.experts.7.linear_fc1.weight``."""
    return name if expert is None else name.replace(EXPERTS, f"{EXPERTS}{expert}.")


def master_targets(model: Model) -> list[TargetTensor]:
    """The fp32 master of every parameter that has one, with the stored weight it must round to."""
    return [
        TargetTensor(
            p.name if p.expert is None else f"{p.name} of expert {p.expert}",
            p.main.dtype,
            p.shape,
            p.main.sources,
            must_round_to=p.weight.sources,
            must_round_dtype=p.weight.dtype,
        )
        for p in model.parameters
        if MASTER in p.values
    ]
