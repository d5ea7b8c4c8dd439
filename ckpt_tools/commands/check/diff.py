"""`diff`: two checkpoints of any kind, brought under the same names and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, TypeVar

from ckpt_tools.close_names import unmatched
from ckpt_tools.commands.check.spelling import under_one_spelling
from ckpt_tools.commands.convert.version_2 import is_version_2, respelled
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.read_model import Wanted, read_model
from ckpt_tools.errors import CkptError, UsageError, list_problems
from ckpt_tools.formats.storage.files import AnyPath, path_text
from ckpt_tools.megatron.dcp.state_dict import is_megatron, read_state_dict
from ckpt_tools.megatron.format import FORMATS
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.fsdp_dtensor.tensors import state_prefix
from ckpt_tools.megatron.fsdp_dtensor.write import build_fsdp_target
from ckpt_tools.megatron.keys import COMMON_OBJECT, KEPT, MODEL_PREFIX
from ckpt_tools.megatron.names import DIALECTS
from ckpt_tools.megatron.run_state.record import read_record, stored_tp
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import read_optimizer_states
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import optimizer_layout
from ckpt_tools.model.choices import DiffBy
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.target import InlineTensor, TargetTensor
from ckpt_tools.model.views import Source
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
from ckpt_tools.verify.content.meter import Meter

T = TypeVar("T")

KEYS: Final = "keys"
PARAMETERS: Final = "parameters"
HUGGINGFACE: Final = "huggingface"
_MEGATRON = frozenset({"torch_dist", "fsdp_dtensor", "dcp"})
_COMPARABLE_LAYOUTS = (
    "none",
    "fully_reshardable",
    "non_distributed",
)  # the same keys and shapes for any topology


@dataclass(frozen=True, slots=True)
class DiffRequest:
    """How two checkpoints are brought together."""

    by: DiffBy = "auto"
    iterations: tuple[int | None, int | None] = (None, None)
    target: TargetOptions = field(default_factory=TargetOptions)  # how a torch_dist side is named
    trust_pickle: bool = False
    rules: Path | None = None  # a rule file, for a Hugging Face side


def diff_checkpoints(
    a: AnyPath,
    b: AnyPath,
    options: DiffOptions | None = None,
    request: DiffRequest | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> DiffReport:
    """What differs between the checkpoints at `a` and `b`; `progress` is told (bytes done, in all).

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
        by = _choose(request.by, first, second)
        if request.rules is not None and by != HUGGINGFACE:
            raise UsageError("--rules is for a Hugging Face model and a Megatron checkpoint")
        of_export = tuple[str, ...]()  # globs of `ignore` that are for `export-hf --ignore-keys`
        if by == HUGGINGFACE:
            of_export = _meant_for_export(first, second, options.ignore)
            sides, notes = _by_export(first, second, of_export, request.rules, options.headers)
        elif by == KEYS:
            sides, notes = (by_keys(first), by_keys(second)), list[str]()
            if request.by == "auto":
                sides, notes = under_one_spelling(sides)
                if (as_export := _of_one_model(first, second, sides)) is not None:
                    by, (sides, notes) = HUGGINGFACE, as_export
            if not options.keys:
                sides, more = _without_rerun_state(sides)
                notes += more
        else:
            sides, notes = _by_parameters(first, second, request.target, options.workers)
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


def _meant_for_export(a: Opened, b: Opened, ignore: tuple[str, ...]) -> tuple[str, ...]:
    """The globs that match keys of the Megatron checkpoint and no tensor of the model: an export left those out."""
    model, checkpoint = (a, b) if a.location.kind == "safetensors" else (b, a)
    keys = (*checkpoint.catalog.tensors, *checkpoint.catalog.objects)
    return tuple(
        glob
        for glob in ignore
        if any(fnmatchcase(key, glob) for key in keys)
        and not any(fnmatchcase(key, glob) for key in model.catalog.tensors)
    )


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
    if wrong:
        raise UsageError(f"nothing to compare:\n{list_problems(wrong)}", wrong)
    ignore = tuple(glob for glob in options.ignore if glob not in used)
    if idle(ignore):
        look_inside(None)  # `*.save` is left out of every object
    return [f"--ignore {line}" for line in idle(ignore)]


def _choose(by: DiffBy, a: Opened, b: Opened) -> DiffBy:
    kinds = {a.location.kind, b.location.kind}
    if by == PARAMETERS and not (kinds <= _MEGATRON and all(map(holds_megatron, (a, b)))):
        raise UsageError(
            "--by parameters needs torch_dist, fsdp_dtensor or dcp checkpoints of Megatron models, not "
            f"{sorted(kinds)}"
        )
    between = "safetensors" in kinds and bool(kinds & _MEGATRON) and all(map(holds_megatron, (a, b)))
    if by == HUGGINGFACE and not between:
        raise UsageError(
            f"--by huggingface needs a Hugging Face model and a Megatron checkpoint, not {sorted(kinds)}"
        )
    if by != "auto":
        return by
    if between:
        return HUGGINGFACE
    if kinds == {"torch_dist"}:
        layouts = {optimizer_layout(side.catalog, side.common) for side in (a, b)}
        comparable = len(layouts) == 1 and layouts <= set(_COMPARABLE_LAYOUTS)
        return KEYS if comparable and _joins_masters(a) == _joins_masters(b) else PARAMETERS
    if kinds == {"dcp"}:
        return KEYS if len({read_state_dict(side.catalog).layout for side in (a, b)}) == 1 else _across(a, b)
    versions = {is_version_2(side.catalog.tensors) for side in (a, b)}
    if kinds == {"fsdp_dtensor"} and len(versions) == 2:
        return PARAMETERS
    return _across(a, b) if len(kinds) == 2 else KEYS


def _across(a: Opened, b: Opened) -> DiffBy:
    """By parameters, where both sides hold Megatron's."""
    return PARAMETERS if all(map(holds_megatron, (a, b))) else KEYS


def holds_megatron(side: Opened) -> bool:
    return side.location.kind != "dcp" or is_megatron(read_state_dict(side.catalog))


def _joins_masters(opened: Opened) -> bool:
    """Whether a `torch_dist` checkpoint holds remainders in the place of masters."""
    if not opened.common.arg("use_precision_aware_optimizer"):
        return False
    states = read_optimizer_states(opened.files, opened.catalog, opened.common, sample_only=True)
    return states is not None and states.has_made


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
    from ckpt_tools.commands.check.diff_hf import no_optimizer

    return (first, second), [no_optimizer(of_optimizer.values())]


def _by_export(
    a: Opened, b: Opened, ignore_keys: tuple[str, ...], rules: Path | None, headers: bool
) -> tuple[tuple[Side, Side], list[str]]:
    from ckpt_tools.commands.check.diff_hf import sides_by_export

    if a.location.kind == "safetensors":
        model, checkpoint, notes = sides_by_export(a, b, ignore_keys, rules, headers)
        return (model, checkpoint), notes
    model, checkpoint, notes = sides_by_export(b, a, ignore_keys, rules, headers)
    return (checkpoint, model), notes


def _of_one_model(
    a: Opened, b: Opened, sides: tuple[Side, Side]
) -> tuple[tuple[Side, Side], list[str]] | None:
    """Two Hugging Face models under the names of the first, where more of them meet so than by keys."""
    misfit = _misfit(*sides)
    if not misfit or {a.location.kind, b.location.kind} != {"safetensors"}:
        return None
    from ckpt_tools.commands.check.diff_hf import sides_of_one_model

    found = sides_of_one_model(a, b)
    return found if found is not None and _misfit(*found[0]) < misfit else None


def by_keys(opened: Opened) -> Side:
    """The checkpoint under its stored keys; a common state is one value wherever it lies."""
    roles = opened.roles()
    tensors = {
        key: TargetTensor(
            key,
            entry.dtype,
            entry.shape,
            (Source(key),),
            role=roles[key],
        )
        for key, entry in opened.catalog.tensors.items()
    }
    objects: dict[str, object] = {k: o for k, o in opened.catalog.objects.items() if k != COMMON_OBJECT}
    if opened.location.kind == "torch_dist":
        objects = {COMMON_STATE: opened.common.values, **objects}
    return Side(opened.files, opened.catalog, tensors, objects, opened.trust_pickle)


def _by_parameters(
    a: Opened, b: Opened, target: TargetOptions, workers: int | None
) -> tuple[tuple[Side, Side], list[str]]:
    """Both under the names of `fsdp_dtensor`; a `torch_dist` checkpoint is seen as its conversion."""
    if a.location.kind == b.location.kind == "fsdp_dtensor":
        first, second = by_keys(a), by_keys(b)
        if is_version_2(first.tensors) != is_version_2(second.tensors):
            first, second = _as_version_2(first), _as_version_2(second)
        return (first, second), []
    if a.location.kind == "fsdp_dtensor":
        stored = by_keys(a)
        converted, notes = _as_converted(b, target, stored, workers)
        return (stored, converted), notes
    if b.location.kind == "fsdp_dtensor":
        stored = by_keys(b)
        converted, notes = _as_converted(a, target, stored, workers)
        return (converted, stored), notes
    if target.tp is None:  # packed projections are compared in the order that a state dict has them in
        told = [_recorded_tp(side) for side in (a, b) if side.location.kind == "dcp"]
        target = replace(target, tp=next((tp for tp in told if tp is not None), None))
    first, notes = _as_converted(a, target, None, workers)
    second, more = _as_converted(b, target, None, workers)
    return (first, second), [*notes, *more]


def _recorded_tp(opened: Opened) -> int | None:
    """The tensor parallel size that an output was made for, where its record or its rng states tell it."""
    size = stored_tp(read_record(opened.files), FORMATS[opened.location.kind].rng_ranks(opened.catalog), {})
    return None if size is None else size.ranks


def _as_version_2(side: Side) -> Side:
    """Under the names of Megatron-FSDP v2, which are those of v1 without one wrapper."""
    if is_version_2(side.tensors):
        return side
    return replace(
        side,
        tensors={respelled(key): value for key, value in side.tensors.items()},
        objects={respelled(key): value for key, value in side.objects.items()},
    )


def _as_converted(
    opened: Opened, target: TargetOptions, other: Side | None, workers: int | None
) -> tuple[Side, list[str]]:
    """The conversion of a `torch_dist` checkpoint or plain state dict, under the names that fit `other` best."""
    model = read_model(opened, Wanted(unknown_keys=True, workers=workers))
    options = target if other is None else _fitted(target, model, other)
    side = _converted(opened, model, options)
    if other is None or target.dialect is not None:
        return side, []
    best, misfit = side, _misfit(side, other)
    for name in DIALECTS if misfit else ():
        candidate = _converted(opened, model, replace(options, dialect=name))
        if _misfit(candidate, other) < misfit:
            best, misfit = candidate, _misfit(candidate, other)
            options = replace(options, dialect=name)
    return best, [f"names as --target {options.dialect} writes them"] if options.dialect else []


def _fitted(target: TargetOptions, model: Model, other: Side) -> TargetOptions:
    """The options with what the other side's keys tell where nobody has said."""
    names = [key for key in other.tensors if key.startswith("model.")]
    told: dict[str, object] = {}
    if target.model_prefix == MODEL_PREFIX and is_version_2(other.tensors):
        told["model_prefix"] = MODEL_PREFIX.removesuffix(".module")
        told["state_prefix"] = target.state_prefix or state_prefix(model).removesuffix(".module")
    if target.layer_spec is None and any(name.endswith(_FUSED_NORMS) for name in names):
        told["layer_spec"] = "te"
    elif target.layer_spec is None and any(name.endswith(".input_layernorm.weight") for name in names):
        told["layer_spec"] = "local"
    if target.experts is None and any(".experts." in name for name in names):
        told["experts"] = "sequential" if any(".local_experts." in name for name in names) else "grouped"
    if target.swiglu is None and model.settings.swiglu is None:
        told["swiglu"] = any(".linear_fc1.weight" in name and name.endswith("_w") for name in names)
    if target.tp is None:
        tp = stored_tp(read_record(other.files), FORMATS["fsdp_dtensor"].rng_ranks(other.catalog), {})
        told["tp"] = None if tp is None else tp.ranks
    if not any(key.startswith(_OF_A_RUN) for key in (*other.tensors, *other.objects)):
        told["weights_only"] = True
    return replace(target, **told)  # type: ignore[arg-type]  # each value has its field's type


COMMON_STATE, RERUN = "common_state", "rerun_state_machine"
_OF_A_RUN = ("optimizer.", "opt_param_scheduler.", KEPT)
_FUSED_NORMS = (".linear_qkv.layer_norm_weight", ".linear_fc1.layer_norm_weight")


def _converted(opened: Opened, model: Model, options: TargetOptions) -> Side:
    built = build_fsdp_target(model, options).target
    tensors: dict[str, TargetTensor | InlineTensor] = {t.key: t for t in built.tensors}
    tensors |= {t.key: t for t in built.inline}
    objects = {o.key: o.value for o in built.objects}
    return Side(opened.files, model.catalog, tensors, objects, opened.trust_pickle, model.settings.fp8_recipe)


def _misfit(side: Side, other: Side) -> int:
    """How many names stand on one side only."""
    return len(side.tensors.keys() ^ other.tensors.keys()) + len(side.objects.keys() ^ other.objects.keys())
