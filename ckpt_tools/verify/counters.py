"""Do the counters of a run agree: iteration, samples, the schedule's and the optimizer's steps.

A job takes each from its own place: the iteration from `iteration`, the place in the data from
`args.consumed_train_samples`, the learning rate from the schedule's `num_steps` (samples), Adam's bias correction
from the groups' `step` (Megatron-LM training/checkpointing.py `load_checkpoint`, optimizer_param_scheduler.py,
optimizer/distrib_optimizer.py). So a job goes on whatever they say, and what contradicts is found here only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tools.errors import CkptError
from ckpt_tools.formats.container import load_object
from ckpt_tools.formats.files import Files
from ckpt_tools.megatron.common_state import CommonState
from ckpt_tools.megatron.torch_dist.read import stored_groups
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.verify.report import Check, Findings

_NUM_STEPS = "opt_param_scheduler.num_steps"  # of fsdp_dtensor


def check_counters(files: Files, catalog: Catalog, common: CommonState, trust_pickle: bool = False) -> Check:
    """Warns of counters that cannot all be true of one moment of a run."""
    found = Findings("counters", "counters")
    try:
        groups = stored_groups(files, catalog, common) if common.of_torch_dist else ()
        scheduler = common.values.get("opt_param_scheduler") or common.values.get("lr_scheduler") or {}
        samples = scheduler.get("num_steps")
        if _NUM_STEPS in catalog.objects:
            samples = load_object(files, catalog.objects[_NUM_STEPS].item, trust_pickle)
    except CkptError:  # the checks of groups and frames tell
        return found.done()
    steps = [group["step"] for group in groups if group.get("step") is not None]
    found.looked_at = sum(count is not None for count in (common.iteration, samples)) + len(steps)
    for where, message in _contradictions(common.iteration, samples, steps, common.args):
        found.warning(where, message)
    return found.done()


def _contradictions(
    iteration: int | None, samples: Any, steps: Sequence[float], args: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """(counter, what it contradicts). A step that was skipped leaves Adam's and the schedule's counters behind."""
    if len(set(steps)) > 1:
        counts = ", ".join(map(_text, steps))
        problem = (
            f"groups of one optimizer have made different numbers of steps: {counts}. A job corrects Adam's bias in "
            "each by its own, until Megatron saves again, which stops where they differ"
        )
        yield "optimizer.param_groups", problem
    step, start = max(steps, default=None), args.get("iteration")
    if iteration is None:
        return
    if step is not None and step > iteration:
        yield "iteration", f"it is {iteration}, but the optimizer has made {_text(step)} steps"
    if isinstance(start, int) and start > iteration:
        yield "iteration", f"it is {iteration}, but the run went on from {start} (args.iteration)"
    consumed, batch = args.get("consumed_train_samples"), args.get("global_batch_size", 0)
    if not isinstance(consumed, int) or args.get("decrease_batch_size_if_needed"):
        return
    if samples is not None and (samples > consumed or (samples < consumed and step == iteration)):
        problem = (
            f"the learning rate is that of {samples} samples, args.consumed_train_samples is {consumed}, from "
            "which a job goes on in its data"
        )
        yield "opt_param_scheduler.num_steps", problem
    is_constant = isinstance(batch, int) and batch > 0 and args.get("rampup_batch_size") is None
    if is_constant and step not in (None, iteration) and consumed != iteration * batch:
        problem = (
            f"it is {iteration}, but {consumed} samples (args.consumed_train_samples) in batches of {batch} "
            f"are {_text(consumed / batch)} iterations, and the optimizer has made {_text(step)} steps"
        )
        yield "iteration", problem


def _text(count: float) -> str:
    return f"{count:g}" if count != int(count) else str(int(count))
