"""What an export reads: every parameter of a checkpoint of either format, and which of its values are taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_tools.commands.huggingface.folder import DEFAULT_SHARD_SIZE
from ckpt_tools.commands.job.conversion import (
    SourceOptions,
)
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.read_model import (
    Wanted,
    is_master,
    keeps_masters,
    master_targets,
    read_beside_masters,
    read_model,
)
from ckpt_tools.commands.job.report import MastersUse
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.write_job import WriteOptions
from ckpt_tools.megatron.huggingface.vision.towers import language_prefix
from ckpt_tools.megatron.hybrid import as_gpt, is_hybrid
from ckpt_tools.megatron.keys import is_optimizer_key, one_expert
from ckpt_tools.megatron.run_state.settings import training_dtype
from ckpt_tools.model.catalog import Catalog, Value, leave_out
from ckpt_tools.model.choices import CheckLevel, Quantization, TowerName
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.target import TargetTensor


@dataclass(frozen=True, slots=True)
class ExportOptions(SourceOptions):
    """What a user may decide about an export; the defaults let the checkpoint decide."""

    ignore_keys: tuple[str, ...] = ()
    hf_config: str | None = None  # directory of the original Hugging Face model
    rules: Path | None = None  # a rule file
    dtype: str | None = None
    vocab_size: int | None = None
    max_shard_bytes: int = DEFAULT_SHARD_SIZE
    mtp_copies: bool = False
    tp: int | None = None  # tensor-parallel size of the job that wrote an fsdp_dtensor checkpoint
    quantize: Quantization | None = None
    peft: bool = False  # the checkpoint's adapter (LoRA) as a PEFT directory
    tower: TowerName | None = None  # the part that it is of the model in `hf_config`
    check_masters: CheckLevel = "sample"  # of the stored weights' masters, whether they are exported or not
    alpha: float | None = None  # its scale times its rank, where nothing stored tells it


_WIDE = ("float32", "float64")  # what an fp32 master says more to than the weight


@dataclass(frozen=True, slots=True)
class ExportSource:
    """Parameters under their `torch_dist` names, layers and experts one by one, and the settings they go with.

    In a model of several parts these are the names of its language model as one of its own; `beside` are the
    parameters of the other parts, under names of their own (None: there are no other parts). `types` has the running
    model's type of parameters whose values are fp32 masters; others keep what is stored. `must_round` are the masters
    among the values, with the stored weights that they must round to.
    """

    catalog: Catalog
    bases: Mapping[str, Value]
    settings: Mapping[str, Any] | None
    types: Mapping[str, str]
    masters: MastersUse
    must_round: tuple[TargetTensor, ...] = ()
    fp8_recipe: str | None = None
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    beside: tuple[str, ...] | None = None


def read_export_source(
    opened: Opened,
    dtype: str | None,
    tp: int | None,
    ignored: tuple[str, ...],
    check: WriteOptions | None = None,
) -> ExportSource:
    """The parameters of the checkpoint, for an export as `dtype` (None: the model's own).

    Args:
        check: how to read the masters that the stored weights are to be compared with, also where those are not
            exported; None: they are not.
    """
    wide = dtype in _WIDE
    wanted = Wanted("masters" if wide else "none", ignored, unknown_keys=True, tp=tp)
    model = read_model(opened, wanted) if check is None else read_beside_masters(opened, wanted, check)
    source = _source(opened, model, dtype, wide)
    source = _parts_apart(replace(source, dropped=leave_out(opened.catalog, ignored)[1]))
    if not is_hybrid(source.bases):
        return source
    bases, settings, note = as_gpt(source.bases, source.settings or {})
    renamed = dict(zip(source.bases, bases, strict=True))
    types = {renamed[name]: dtype for name, dtype in source.types.items()}
    kept = settings if source.settings is not None else None
    return replace(source, bases=bases, types=types, settings=kept, notes=(*source.notes, note))


def imported_source(model: Model) -> ExportSource:
    """The parameters of a Hugging Face model that was read for an import."""
    bases = {one_expert(p.name, p.expert): p.weight for p in model.parameters}
    return _parts_apart(ExportSource(model.catalog, bases, model.common.args, {}, "none", notes=model.notes))


def _parts_apart(source: ExportSource) -> ExportSource:
    """The language model of a model of several parts under the names of a model of its own."""
    prefix = language_prefix(source.bases)
    if not prefix:
        return source
    return replace(
        source,
        bases={name.removeprefix(prefix): base for name, base in source.bases.items()},
        types={name.removeprefix(prefix): dtype for name, dtype in source.types.items()},
        beside=tuple(name for name in source.bases if not name.startswith(prefix)),
    )


def _source(opened: Opened, model: Model, dtype: str | None, wide: bool) -> ExportSource:
    """The stored weights; the masters instead where the export is wide enough to tell them apart."""
    own = training_dtype(opened.common)
    in_place = keeps_masters(model)
    if in_place and own is None and dtype is None:
        raise UsageError(
            "the checkpoint holds fp32 masters, and nothing names the model's type; pass --dtype"
        )
    notes = model.notes
    if wide and not in_place and MASTER not in model.roles:
        reason = model.unread or "the checkpoint holds none"
        notes = (*notes, f"no fp32 masters are exported, only the stored weights: {reason}")
    if not wide and opened.location.kind == "torch_dist":  # its notes are on masters, which are not exported
        notes = (f"the weights were not compared with their masters: {model.unread}",) if model.unread else ()
    masters: MastersUse = "left_out" if any(map(is_optimizer_key, opened.catalog.tensors)) else "none"
    if wide and MASTER in model.roles:
        masters = "written"
    return ExportSource(
        model.catalog,
        {one_expert(p.name, p.expert): p.main if wide else p.weight for p in model.parameters},
        opened.common.args or opened.common.model_config or None,
        {one_expert(p.name, p.expert): own for p in model.parameters if own and is_master(p)},
        "as_stored" if in_place else masters,
        tuple(master_targets(model)),
        model.settings.fp8_recipe,
        notes=notes,
    )
