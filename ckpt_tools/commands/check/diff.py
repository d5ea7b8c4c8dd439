"""`diff`: two checkpoints of any format, compared under one naming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from ckpt_tools.close_names import unmatched
from ckpt_tools.commands.check.sides import COMMON_STATE, KEYS, DiffRequest, no_optimizer, under_one_naming
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.errors import CkptError, UsageError, raise_if
from ckpt_tools.formats.storage.files import AnyPath, path_text
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.verify.compare.differences import (
    DiffOptions,
    DiffReport,
    Side,
    compare_headers,
    comparing,
    diff_objects,
    weights_not_compared,
)
from ckpt_tools.verify.compare.objects import names_in
from ckpt_tools.verify.report import Meter

T = TypeVar("T")

RERUN: Final = "rerun_state_machine"


def diff_checkpoints(
    a: AnyPath,
    b: AnyPath,
    options: DiffOptions | None = None,
    request: DiffRequest | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> DiffReport:
    """What differs between the checkpoints at `a` and `b`; `progress` gets (bytes done, in all).

    Raises:
        UsageError: they are of kinds that share no names, or a glob of `options.keys` matches nothing.
        MappingError: a `torch_dist` checkpoint cannot be seen as its `fsdp_dtensor` conversion.
        Otherwise the errors of opening and reading checkpoints.
    """
    a, b = path_text(a), path_text(b)
    options, request = options or DiffOptions(), request or DiffRequest()
    opened = [
        open_checkpoint(path, iteration, request.trust_pickle)
        for path, iteration in zip((a, b), request.iterations, strict=True)
    ]
    with opened[0] as first, opened[1] as second:
        by, sides, notes, of_export = under_one_naming(first, second, request, options)
        if by == KEYS and not options.keys:
            sides, more = _without_rerun_state(sides)
            notes += more
        if options.headers:
            sides, more = _headers(sides, {first.location.kind, second.location.kind})
            notes += more
        notes += _idle_globs(sides, options, of_export)
        places = first.location.path, second.location.path
        if options.headers:
            compared_headers = compare_headers(*sides, options)
            return DiffReport(*places, by, options.tolerance, compared_headers, (), 0, tuple(notes), True)
        notes += weights_not_compared(*sides, options)
        meter = Meter(progress)
        meter.total = sum(entry.nbytes for side in sides for entry in side.catalog.tensors.values())
        with comparing(*sides, options, meter) as of_tensors:
            of_values = _tried(lambda: diff_objects(*sides, options))  # while others compare tensors
            tensors = of_tensors()
        values, compared = of_values()
    return DiffReport(*places, by, options.tolerance, tensors, values, compared, tuple(notes))


def _tried(step: Callable[[], T]) -> Callable[[], T]:
    """What returns or raises what came of a step that is done now."""
    try:
        result = step()
    except CkptError as error:
        failed = error

        def fail() -> T:
            raise failed

        return fail
    return lambda: result


def _without_rerun_state(sides: tuple[Side, Side]) -> tuple[tuple[Side, Side], list[str]]:
    """Both without the state of Megatron's rerun machine where one of them has none at all, and a note on it.

    Conversions do not carry it. It says whether a step is repeated to find faults of hardware, nothing of the model.
    """
    held = [any(name.startswith(RERUN) for name in (*side.objects, *_common(side))) for side in sides]
    if held[0] == held[1]:
        return sides, []
    first, second = map(_without_rerun, sides)
    return (first, second), [
        f"{RERUN} is in {'A' if held[0] else 'B'} alone: not compared, no conversion carries it"
    ]


def _common(side: Side) -> dict[str, object]:
    value = side.objects.get(COMMON_STATE)
    return value if isinstance(value, dict) else {}


def _without_rerun(side: Side) -> Side:
    objects = {key: value for key, value in side.objects.items() if not key.startswith(RERUN)}
    if COMMON_STATE in objects:
        objects[COMMON_STATE] = {key: value for key, value in _common(side).items() if key != RERUN}
    return replace(side, objects=objects)


def _idle_globs(sides: tuple[Side, Side], options: DiffOptions, used: tuple[str, ...]) -> list[str]:
    """A note on every glob of `ignore` that matches nothing, but for those that were `used` already."""
    names = list(dict.fromkeys(name for side in sides for name in (*side.objects, *side.tensors)))

    def look_inside(globs: tuple[str, ...] | None) -> None:
        """Add the parts of the objects that globs name (`args.tp_size`), or of all."""
        for side in sides:
            for name in side.objects:
                if globs is None or any(glob.startswith(f"{name}.") for glob in globs):
                    names.extend(names_in(name, side.value(name)))

    def idle(globs: tuple[str, ...]) -> list[str]:
        return [
            f"{glob!r} matches nothing" + (f"; did you mean {', '.join(close)}?" if close else "")
            for glob, close in unmatched(globs, names).items()
        ]

    look_inside((*options.keys, *options.ignore))
    wrong = [f"--keys {line}" for line in idle(options.keys)]
    if (options.keys or options.ignore) and not wrong and not any(map(options.wants, names)):
        wrong = ["--keys and --ignore leave out everything"]
    raise_if(wrong, UsageError, "nothing to compare")
    ignore = tuple(glob for glob in options.ignore if glob not in used)
    if idle(ignore):
        look_inside(None)  # `*.save` is left out of every object
    return [f"--ignore {line}" for line in idle(ignore)]


def _headers(sides: tuple[Side, Side], kinds: set[str]) -> tuple[tuple[Side, Side], list[str]]:
    """Both without objects; where one is a Hugging Face model, without optimizers, and a note on them."""
    first, second = (replace(side, objects={}) for side in sides)
    if "safetensors" not in kinds:
        return (first, second), []
    of_optimizer = {
        name: tensor.role
        for side in (first, second)
        for name, tensor in side.tensors.items()
        if isinstance(tensor, TargetTensor) and tensor.role not in (WEIGHT, "other")
    }
    if not of_optimizer:
        return (first, second), []
    first, second = (
        replace(side, tensors={k: t for k, t in side.tensors.items() if k not in of_optimizer})
        for side in (first, second)
    )
    return (first, second), [no_optimizer(of_optimizer.values())]
