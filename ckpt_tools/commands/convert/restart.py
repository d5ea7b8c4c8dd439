"""`strip --fresh-optimizer`: the weights of an `fsdp_dtensor` checkpoint with an optimizer that has not begun.

Weights keep their bytes, chunks and files, and zeros are cut as the weights that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ckpt_tools.commands.convert.warm_start import begun_at, begun_common
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.outputs import object_archives
from ckpt_tools.commands.job.rewrite import EditOptions, rewrite
from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.execute.run import WriteReport
from ckpt_tools.megatron.fsdp_dtensor.fresh_optimizer import with_fresh_optimizer
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.fsdp_dtensor.read import FsdpSource, fsdp_model, read_fsdp_source
from ckpt_tools.megatron.fsdp_dtensor.write import FsdpTarget, build_fsdp_target
from ckpt_tools.megatron.keys import MODEL_PREFIX, STATE_PREFIX, STATE_PREFIX_FP32, model_name
from ckpt_tools.megatron.names import DIALECTS
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.choices import DialectName, ExpertModules
from ckpt_tools.model.model import Model
from ckpt_tools.model.target import Target, TargetTensor
from ckpt_tools.plan.build import Placement


def begin_anew(
    source: str,
    opened: Opened,
    output: str,
    settings: TargetOptions,
    options: EditOptions,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Target, WriteReport]:
    """What was written: the stored weights, and everything that a job with an optimizer asks for beside them."""
    wanted = replace(settings, fresh_optimizer=True, weights_only=True)
    found = read_fsdp_source(
        opened.files, opened.catalog, opened.common, (), opened.trust_pickle, weights_only=True
    )
    model = _model(found, opened)
    fresh, about = with_fresh_optimizer(model, wanted)
    target = _named_as_stored(fresh, about, found).target
    report = rewrite(
        source,
        replace(opened, location=begun_at(opened.location, wanted)),
        output,
        target,
        object_archives(target.objects),
        options,
        catalog=fresh.catalog,
        placement=_beside_weights(opened.catalog),
        progress=progress,
    )
    return target, report


def _model(source: FsdpSource, opened: Opened) -> Model:
    """The weights, and what else the run kept that a fresh optimizer goes by."""
    try:
        model = fsdp_model(source)  # which says what is trained
    except MappingError:  # whatever is wrong with the optimizer, it goes
        model = fsdp_model(source, weights_only=True)
    return replace(
        model,
        groups=tuple(source.groups.values()),
        scheduler=source.scheduler,
        rng=source.rng,
        common=begun_common(model.common, opened.location),
    )


def _named_as_stored(model: Model, about: TargetOptions, source: FsdpSource) -> FsdpTarget:
    """The target in the dialect whose names are stored."""
    stored = {key for key in source.catalog.tensors if model_name(key)}
    keys = source.catalog.tensors.keys()
    prefix = next(
        (p for p in (STATE_PREFIX, STATE_PREFIX_FP32) if any(k.startswith(f"{p}.") for k in keys)), None
    )
    names = [tensor.name for tensor in source.tensors]
    experts: ExpertModules = "sequential" if any(".local_experts." in name for name in names) else "grouped"
    differ: set[str] = set()
    for dialect in _dialects(model):
        built = build_fsdp_target(
            model, replace(about, dialect=dialect, state_prefix=prefix, experts=experts, tp=_tp(source))
        )
        differ = {t.key for t in built.target.tensors if model_name(t.key)} ^ stored
        if not differ:
            return built
    raise MappingError(
        "the stored names are not those of the model that the checkpoint's args describe, so that its groups cannot "
        "be named:\n" + list_problems(sorted(differ)),
        sorted(differ),
    )


def _tp(source: FsdpSource) -> int | None:
    return None if source.tp is None else source.tp.ranks


def _dialects(model: Model) -> Iterator[DialectName | None]:
    recorded = model.record.target if model.record is not None else None
    yield next((name for name in DIALECTS if name == recorded), None)
    yield from DIALECTS


def _beside_weights(catalog: Catalog) -> tuple[Placement, int]:
    """Every tensor in the chunks and files of its weight; others go into the first file."""
    names = {chunk.item.file for entry in catalog.tensors.values() for chunk in entry.chunks}
    rank = {name: i for i, name in enumerate(sorted(names))}

    def place(tensor: TargetTensor) -> Sequence[tuple[int, Box]]:
        weight = catalog.tensors.get(f"{MODEL_PREFIX}.{tensor.parameter}")
        chunks = () if weight is None else weight.chunks
        return [(rank[chunk.item.file], chunk.box) for chunk in chunks] or [(0, full_box(tensor.shape))]

    return place, max(len(rank), 1)
