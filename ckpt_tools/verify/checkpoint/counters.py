"""Do the counters of a run agree: iteration, samples, the schedule's and the optimizer's steps.

A job takes each from its own place: the iteration from `iteration`, the place in the data from
`args.consumed_train_samples`, the learning rate from the schedule's `num_steps` (samples), Adam's bias correction
from the `step` of groups, or of parameters (Megatron-LM training/checkpointing.py `load_checkpoint`,
optimizer_param_scheduler.py, optimizer/distrib_optimizer.py). So a job continues whatever they say, and only this
check finds contradictions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckpt_tools.errors import CkptError, MappingError
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import load_object
from ckpt_tools.megatron.dcp.state_dict import read_state_dict
from ckpt_tools.megatron.fsdp_dtensor.read import SmallValues, step_number
from ckpt_tools.megatron.keys import STEP, group_key
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.torch_dist.read import stored_groups
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.verify.report import Check, Findings

_BEYOND = 1 << 63
_NUM_STEPS = "opt_param_scheduler.num_steps"  # of fsdp_dtensor and plain state dicts


class _Steps(NamedTuple):
    """How many steps an optimizer has made, by what keeps its own number of them; the first key of each number."""

    where: str
    of_what: str  # groups, or parameters
    counts: Mapping[float, int]
    first: Mapping[float, str]

    def text(self) -> str:
        """Each number, and who has it."""
        return ", ".join(
            f"{_text(step)} ({self.first[step]}" + (f" and {count - 1} more)" if count > 1 else ")")
            for step, count in self.counts.items()
        )


def check_counters(
    files: Files,
    catalog: Catalog,
    common: CommonState,
    trust_pickle: bool = False,
    weights_only: bool = False,
) -> Check:
    """Warns of counters that cannot all be true of one moment of a run.

    `weights_only`: those of the optimizer and the schedule are left aside, as a conversion leaves them out.
    """
    found = Findings("counters", "counters")
    samples, stored = None, dict[str, Any]()
    if not weights_only:
        try:
            samples = _samples(files, catalog, common, trust_pickle)
            stored = _stored_steps(files, catalog, common, trust_pickle, found)
        except CkptError:  # the checks of groups and frames tell
            return found.done()
    numbers = {key: step for key, step in stored.items() if _is_count(step)}
    for key in stored.keys() - numbers.keys():
        found.warning(key, f"its step is {stored[key]!r}, no number of steps")
    if samples is not None and not _is_count(samples):
        found.warning(_NUM_STEPS, f"it is {samples!r}, no number of samples")
        samples = None
    steps = _of_optimizer(numbers, common.of_torch_dist)
    found.looked_at = sum(count is not None for count in (common.iteration, samples)) + len(stored)
    for where, message in _contradictions(common.iteration, samples, steps, common.args):
        found.warning(where, message)
    return found.done()


def _is_count(value: object) -> bool:
    """Whether it is a number that a 64-bit counter holds; integers of a pickle may be too large for any float."""
    return isinstance(value, int | float) and -_BEYOND < value < _BEYOND


def _samples(files: Files, catalog: Catalog, common: CommonState, trust_pickle: bool) -> Any:
    """How many samples the schedule has counted."""
    if _NUM_STEPS in catalog.objects:
        return load_object(files, catalog.objects[_NUM_STEPS].item, trust_pickle)
    return common.scheduler.get("num_steps")


def _stored_steps(
    files: Files, catalog: Catalog, common: CommonState, trust_pickle: bool, found: Findings
) -> dict[str, Any]:
    """Every stored step: a group's, or a parameter's next to its other states, as torch's Adam stores it."""
    if common.of_torch_dist:
        groups = enumerate(stored_groups(files, catalog, common))
        steps = {f"optimizer.param_groups.{number}": group.get(STEP) for number, group in groups}
        return {key: step for key, step in steps.items() if step is not None}
    values, numbers = SmallValues(files, trust_pickle), dict[str, Any]()
    for key in _step_keys(catalog):
        entry = catalog.tensors.get(key)
        try:
            numbers[key] = (
                values.load(catalog.objects[key].item) if entry is None else step_number(values.tensor(entry))
            )
        except MappingError as error:  # which a conversion refuses
            found.error(key, str(error))
    return numbers


def _step_keys(catalog: Catalog) -> Iterator[str]:
    """The keys of steps, in the groups and among the states."""
    for optimizer in read_state_dict(catalog).optimizers:
        for fields in (*optimizer.groups.values(), *optimizer.states.values()):
            if STEP in fields:
                yield fields[STEP]
    for key in catalog.objects:
        group = group_key(key)
        if group is not None and group.field == STEP:
            yield key


def _of_optimizer(numbers: Mapping[str, float], has_groups: bool) -> _Steps:
    first: dict[float, str] = {}
    for key, step in numbers.items():
        first.setdefault(step, key)
    where, of_what = ("optimizer.param_groups", "groups") if has_groups else ("optimizer.state", "parameters")
    return _Steps(where, of_what, Counter(numbers.values()), first)


def _contradictions(
    iteration: int | None, samples: Any, steps: _Steps, args: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """(counter, what it contradicts). After a skipped step, Adam's and the schedule's counters lag behind."""
    if len(steps.counts) > 1:
        problem = (
            f"{steps.of_what} of one optimizer have made different numbers of steps: {steps.text()}. A job corrects "
            "Adam's bias in each by its own"
        )
        if steps.of_what == "groups":
            problem += ", until Megatron saves again, which stops where they differ"
        yield steps.where, problem
    step, start = max(steps.counts, default=None), args.get("iteration")
    if iteration is None:
        return
    if step is not None and step > iteration:
        yield "iteration", f"it is {iteration}, but the optimizer has made {_text(step)} steps"
    if isinstance(start, int) and start > iteration:
        yield "iteration", f"it is {iteration}, but the run went on from {start} (args.iteration)"
    consumed, batch = args.get("consumed_train_samples"), args.get("global_batch_size", 0)
    if not isinstance(consumed, int) or not _is_count(consumed) or args.get("decrease_batch_size_if_needed"):
        return
    if samples is not None and (samples > consumed or (samples < consumed and step == iteration)):
        problem = (
            f"the learning rate is that of {samples} samples, args.consumed_train_samples is {consumed}, from "
            "which a job continues in its data"
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
