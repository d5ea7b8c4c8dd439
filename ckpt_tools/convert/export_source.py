"""What an export reads: every parameter of a checkpoint of either format, and which of its values are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.catalog.left_out import leave_out
from ckpt_tools.catalog.model import Catalog
from ckpt_tools.convert.opened import Opened
from ckpt_tools.errors import CkptError, StorageError, UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.check_masters import check_masters, describe_masters
from ckpt_tools.megatron.fsdp_source import WEIGHT, read_fsdp_source
from ckpt_tools.megatron.hybrid import as_gpt, gpt_name, is_hybrid
from ckpt_tools.megatron.names import BUFFERS
from ckpt_tools.megatron.optimizer_layouts.model import MASTER, OptimizerStates
from ckpt_tools.megatron.optimizer_layouts.reader import read_optimizer_states
from ckpt_tools.megatron.rebase import Base
from ckpt_tools.megatron.settings import read_settings
from ckpt_tools.megatron.stored import stored_parameters
from ckpt_tools.megatron.target import Source, TargetTensor
from ckpt_tools.megatron.to_torch_dist import training_dtype
from ckpt_tools.megatron.torch_dist import EXPERTS, Parameter, sort_keys
from ckpt_tools.megatron.views import Select

_WIDE = ("float32", "float64")  # what an fp32 master says more to than the weight


@dataclass(frozen=True, slots=True)
class ExportSource:
    """Parameters under their `torch_dist` names, layers and experts one by one, and the settings they go with.

    `types` has the running model's type of parameters whose values are fp32 masters; others keep what is stored.
    `values` says in words which values are taken.
    """

    catalog: Catalog
    bases: Mapping[str, Base]
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
    catalog, left_out = leave_out(opened.catalog, ignored)
    parameters = sort_keys(catalog).parameters
    states, notes = _masters(opened, catalog) if dtype in _WIDE else (None, ())
    if states is None:
        values, masters = "the stored weights are exported", list[Parameter]()
    else:
        catalog = replace(catalog, tensors={**catalog.tensors, **states.payloads})
        masters = [p for p in parameters if states.has(MASTER, p.key)]
        targets = master_targets(masters, states)
        recipe = read_settings(opened.common).fp8_recipe
        advice = "Without --dtype the stored weights are exported."
        report = check_masters(opened.files, catalog, targets, "sample", fp8_recipe=recipe, advice=advice)
        values = f"the fp32 masters are exported: {describe_masters(report, 'sample')}"
    bases = {one_name(p): Base(p.dtype, p.shape, (_stored(p),)) for p in parameters}
    for p in masters:
        assert states is not None  # or there are none
        bases[one_name(p)] = Base(states.dtype(MASTER, p.key), p.shape, states.sources(MASTER, p.key, p.lead))
    return ExportSource(catalog, bases, _settings(opened), {}, values, left_out, notes)


def _masters(opened: Opened, catalog: Catalog) -> tuple[OptimizerStates | None, tuple[str, ...]]:
    """The optimizer's states when masters are among them, else a note why the weights have to do."""
    try:
        states = read_optimizer_states(opened.files, catalog, opened.common)
        reason = "the checkpoint holds none"
    except StorageError:
        raise
    except CkptError as error:
        states, reason = None, f"they cannot be read: {str(error).splitlines()[0].rstrip(':')}"
    if states is not None and MASTER in states.kinds:
        return states, ()
    return None, (f"no fp32 masters are exported, only the stored weights: {reason}",)


def _fsdp_dtensor(
    opened: Opened, dtype: str | None, tp: int | None, ignored: tuple[str, ...], trust_pickle: bool
) -> ExportSource:
    source = read_fsdp_source(
        opened.files, opened.catalog, opened.common, ignored, trust_pickle, weights_only=True
    )
    tp = source.known_tp(tp)
    local = read_settings(opened.common).local_norms
    parameters = stored_parameters(source.tensors, tp, local)
    bases = {one_name(p): Base(p.tensor.dtypes[WEIGHT], p.shape, p.sources(WEIGHT)) for p in parameters}
    masters = [
        one_name(p)
        for p in parameters
        if source.is_master(p.tensor)
        and p.tensor.dtypes[WEIGHT] == "float32"
        and not p.name.endswith(BUFFERS)
    ]
    own, values = training_dtype(opened.common), "the checkpoint's values are exported"
    if masters and own is None and dtype is None:
        raise UsageError(
            "the checkpoint holds fp32 masters, and nothing names the model's type; pass --dtype"
        )
    if masters:
        values = f"the checkpoint's values, fp32 masters, are exported as {dtype or own}"
    types = dict.fromkeys(masters, own) if own is not None else {}
    return ExportSource(source.catalog, bases, _settings(opened), types, values, source.ignored, source.notes)


def _settings(opened: Opened) -> Mapping[str, Any] | None:
    return opened.common.args or opened.common.model_config or None


def one_name(parameter: Any) -> str:
    """The name of one expert's parameter: ``...experts.experts.7.linear_fc1.weight``."""
    name: str = parameter.name
    return name if parameter.expert is None else name.replace(EXPERTS, f"{EXPERTS}{parameter.expert}.")


def master_targets(parameters: Sequence[Parameter], states: OptimizerStates) -> list[TargetTensor]:
    """The fp32 master of every parameter that has one, with the stored weight it must round to."""
    return [
        TargetTensor(
            p.name if p.expert is None else f"{p.name} of expert {p.expert}",
            states.dtype(MASTER, p.key),
            p.shape,
            states.sources(MASTER, p.key, p.lead),
            must_round_to=(_stored(p),),
            must_round_dtype=p.dtype,
        )
        for p in parameters
        if states.has(MASTER, p.key)
    ]


def _stored(parameter: Parameter) -> Source:
    return Source(parameter.key, tuple(Select(0, index) for index in parameter.lead))
