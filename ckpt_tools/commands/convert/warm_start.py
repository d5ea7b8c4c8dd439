"""What `--fresh-optimizer` asks of a source beside its weights, and the iteration at which the job begins."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.torch_dist.read import rng_states, stored_groups
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import MASTER


def with_run_state(model: Model, opened: Opened) -> Model:
    """The weights of a `torch_dist` checkpoint with what else its run kept: groups, rng states, its iteration."""
    rng, missing = rng_states(opened.files, model.catalog)
    notes = (f"rng states are left out, as some are missing: {missing[0]}",) if missing else ()
    return replace(
        model,
        rng={} if missing else rng,
        groups=stored_groups(opened.files, model.catalog, model.common),
        common=begun_common(model.common, opened.location),
        notes=(*model.notes, *notes),
    )


def weights_for_masters(model: Model, note: str) -> Model:
    """The model without its masters, with a note why; what else the optimizer kept still says what it works on."""
    parameters = tuple(
        replace(p, values={role: value for role, value in p.values.items() if role != MASTER})
        for p in model.parameters
    )
    return replace(model, parameters=parameters, notes=(*model.notes, note))


def begun_common(common: CommonState, location: Location) -> CommonState:
    """The common state with the iteration that `begun_at` names the output for."""
    named = 1 if location.is_release else location.iteration
    number = common.iteration if named is None else named
    return replace(common, values={**common.values, "iteration": max(1, number or 0)})


def begun_at(location: Location, options: TargetOptions) -> Location:
    """The place of a source as its output's is named: a job with an optimizer begins at iteration 1 or later."""
    if not options.fresh_optimizer or not (location.is_release or location.iteration == 0):
        return location
    return replace(location, iteration=1, is_release=False)
