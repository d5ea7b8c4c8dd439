"""`--fresh-optimizer`: a fresh optimizer (zero moments, step 0) for the weights of a source.

What it asks of a source, the iteration at which its job begins, and `strip --fresh-optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpt_tools.commands.job.conversion import Conversion
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.outputs import object_archives
from ckpt_tools.commands.job.report import Edits
from ckpt_tools.commands.job.rewrite import rewrite, use_of_masters
from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.megatron.fsdp_dtensor.fresh_optimizer import with_fresh_optimizer
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.fsdp_dtensor.read import FsdpSource, fsdp_model, read_fsdp_source
from ckpt_tools.megatron.fsdp_dtensor.write import FsdpTarget, build_fsdp_target
from ckpt_tools.megatron.keys import MODEL_PREFIX, STATE_PREFIX, STATE_PREFIX_FP32, model_name
from ckpt_tools.megatron.names import DIALECTS
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.torch_dist.read import rng_states, stored_groups
from ckpt_tools.model.choices import DialectName, ExpertModules
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER


def with_run_state(model: Model, opened: Opened) -> Model:
    """The weights of a `torch_dist` checkpoint with what else its run kept: groups, rng states, its iteration."""
    missing = [problem for name, problem in model.incomplete if name == "rng_state"]
    notes = (f"rng states are left out, as some are missing: {missing[0]}",) if missing else ()
    return replace(
        model,
        rng={} if missing else rng_states(opened.files, model.catalog),
        groups=stored_groups(opened.files, model.catalog, model.common),
        common=common_of_iteration(model.common, opened.location),
        notes=(*model.notes, *notes),
    )


def weights_for_masters(model: Model, note: str) -> Model:
    """The model without its masters, with a note why; what else the optimizer kept still says what it works on."""
    parameters = tuple(
        replace(p, values={role: value for role, value in p.values.items() if role != MASTER})
        for p in model.parameters
    )
    return replace(model, parameters=parameters, notes=(*model.notes, note))


def common_of_iteration(common: CommonState, location: Location) -> CommonState:
    """The common state with the iteration that `started_at` names the output for."""
    named = 1 if location.is_release else location.iteration
    number = common.iteration if named is None else named
    return replace(common, values={**common.values, "iteration": max(1, number or 0)})


def started_at(location: Location, options: TargetOptions) -> Location:
    """The place of a source as its output's is named: a job with an optimizer begins at iteration 1 or later."""
    if not options.fresh_optimizer or not (location.is_release or location.iteration == 0):
        return location
    return replace(location, iteration=1, is_release=False)


def plan_fresh(opened: Opened, settings: TargetOptions) -> Conversion:
    """The stored weights of an `fsdp_dtensor` checkpoint, and everything else that a job with an optimizer loads.

    Weights keep their bytes, chunks and files, and zeros are cut as the weights that they belong to.
    """
    found = read_fsdp_source(
        opened.files, opened.catalog, opened.common, (), opened.trust_pickle, weights_only=True
    )
    fresh, about = with_fresh_optimizer(_model(found, opened), settings)
    target = _named_as_stored(fresh, about, found).target
    stored = opened.catalog
    written = {item.key for items in (target.tensors, target.inline, target.objects) for item in items}
    types = {key: entry.dtype for key, entry in stored.tensors.items()}
    edits = Edits(
        removed=tuple(key for key in (*stored.tensors, *stored.objects) if key not in written),
        cast=tuple(t.key for t in target.tensors if t.key in types and t.dtype != types[t.key]),
    )
    return rewrite(
        opened,
        replace(target, dropped=()),  # `removed` has them by key
        object_archives(target.objects),
        edits,
        catalog=fresh.catalog,
        chunks_of=lambda tensor: f"{MODEL_PREFIX}.{tensor.parameter}",
        masters=use_of_masters(opened, "left_out"),
    )


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
        common=common_of_iteration(model.common, opened.location),
    )


def _named_as_stored(model: Model, about: TargetOptions, source: FsdpSource) -> FsdpTarget:
    """The target in the dialect that has the stored names."""
    stored = {key for key in source.catalog.tensors if model_name(key)}
    keys = source.catalog.tensors.keys()
    prefix = next(
        (p for p in (STATE_PREFIX, STATE_PREFIX_FP32) if any(k.startswith(f"{p}.") for k in keys)), None
    )
    names = [tensor.name for tensor in source.tensors]
    experts: ExpertModules = "sequential" if any(".local_experts." in name for name in names) else "grouped"
    tp = None if source.tp is None else source.tp.ranks
    differ: set[str] = set()
    for dialect in _dialects(model):
        built = build_fsdp_target(
            model, replace(about, dialect=dialect, state_prefix=prefix, experts=experts, tp=tp)
        )
        differ = {t.key for t in built.target.tensors if model_name(t.key)} ^ stored
        if not differ:
            return built
    raise MappingError(
        "the stored names are not those of the model that the checkpoint's args describe, so that its groups cannot "
        "be named:\n" + list_problems(sorted(differ)),
        sorted(differ),
    )


def _dialects(model: Model) -> Iterator[DialectName | None]:
    recorded = model.record.target if model.record is not None else None
    yield next((name for name in DIALECTS if name == recorded), None)
    yield from DIALECTS
