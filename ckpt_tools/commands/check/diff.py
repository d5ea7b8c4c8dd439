"""`diff`: two checkpoints of any format under one naming, compared.

Names are stored keys, parameters of the running model, or those of an export. `stats` compares what has the same name
too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from ckpt_tools.close_names import unmatched
from ckpt_tools.commands.convert.version_2 import respelled
from ckpt_tools.commands.huggingface.export_hf import export_tensors
from ckpt_tools.commands.huggingface.export_source import (
    ExportOptions,
    holds_several,
    imported_source,
    whole_model_if_one,
)
from ckpt_tools.commands.huggingface.folder import (
    families_with,
    prove_equal,
    read_config,
    seen_as,
    without_frequencies,
)
from ckpt_tools.commands.huggingface.import_hf import ImportOptions, read_huggingface
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.read_model import Wanted, read_model
from ckpt_tools.errors import CkptError, MappingError, UnsupportedCheckpointError, UsageError, raise_if
from ckpt_tools.formats.storage.files import AnyPath, path_text
from ckpt_tools.human import counted
from ckpt_tools.megatron.dcp.state_dict import Spelling, is_megatron, read_state_dict, spelled_as
from ckpt_tools.megatron.format import FORMATS
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.fsdp_dtensor.tensors import state_prefix
from ckpt_tools.megatron.fsdp_dtensor.write import build_fsdp_target
from ckpt_tools.megatron.huggingface.mapping.rules import Family
from ckpt_tools.megatron.huggingface.mapping.targets import import_targets
from ckpt_tools.megatron.huggingface.quantization.quantized import Dequantized, dequantized
from ckpt_tools.megatron.huggingface.vision.towers import QUANTIZED
from ckpt_tools.megatron.keys import COMMON_OBJECT, KEPT, MODEL_PREFIX, is_version_2, role_of
from ckpt_tools.megatron.names import DIALECTS
from ckpt_tools.megatron.run_state.record import read_record, stored_tp
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import read_optimizer_states
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import optimizer_layout
from ckpt_tools.megatron.torch_dist.read import holds_something
from ckpt_tools.model.catalog import TensorEntry
from ckpt_tools.model.choices import CheckpointKind, DiffBy
from ckpt_tools.model.model import Model
from ckpt_tools.model.roles import WEIGHT, Role
from ckpt_tools.model.target import InlineTensor, TargetTensor, target_of
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
from ckpt_tools.verify.compare.objects import ValueDiff, names_in
from ckpt_tools.verify.report import Meter

Sides: TypeAlias = tuple[Side, Side]
Named: TypeAlias = tuple[Sides, list[str]]  # with notes

KEYS: Final = "keys"
PARAMETERS: Final = "parameters"
HUGGINGFACE: Final = "huggingface"
_MEGATRON = frozenset({"torch_dist", "fsdp_dtensor", "dcp"})
# These have the same keys and shapes for any topology.
_COMPARABLE_LAYOUTS = frozenset({"none", "fully_reshardable", "non_distributed"})
COMMON_STATE = "common_state"
_OF_A_RUN = ("optimizer.", "opt_param_scheduler.", KEPT)
_FUSED_NORMS = (".linear_qkv.layer_norm_weight", ".linear_fc1.layer_norm_weight")
_NO_CONTENT = "redundant, as import-hf says"
_SAME = "the same values as {}, as config.json says"
_EXACT = {("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")}  # lossless casts


@dataclass(frozen=True, slots=True)
class DiffRequest:
    """How two checkpoints are brought together."""

    by: DiffBy = "auto"
    iterations: tuple[int | None, int | None] = (None, None)
    target: TargetOptions = field(default_factory=TargetOptions)  # how a torch_dist side is named
    trust_pickle: bool = False
    rules: Path | None = None  # a rule file, for a Hugging Face side


def under_one_naming(
    a: Opened, b: Opened, request: DiffRequest, options: DiffOptions
) -> tuple[DiffBy, Sides, list[str], tuple[str, ...]]:
    """What names are, both sides under them, and notes on how they were named and what is not compared.

    The last are globs of `--ignore` that are for `export-hf --ignore-keys`.
    """
    by = _choose(request.by, a, b)
    if request.rules is not None and by != HUGGINGFACE:
        raise UsageError("--rules is for a Hugging Face model and a Megatron checkpoint")
    if by == HUGGINGFACE:
        of_export = _meant_for_export(a, b, options.ignore)
        return by, *_by_export(a, b, of_export, request.rules, options.headers), of_export
    if by == PARAMETERS:
        return by, *_by_parameters(a, b, request.target, options.workers), ()
    sides, notes = (_by_keys(a), _by_keys(b)), list[str]()
    if request.by == "auto":
        sides, notes = _under_one_spelling(sides)
        as_export = _of_one_model(a, b, sides)
        if as_export is not None:
            return HUGGINGFACE, *as_export, ()
    return by, sides, notes, ()


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


def _choose(by: DiffBy, a: Opened, b: Opened) -> DiffBy:
    kinds = {a.location.kind, b.location.kind}
    of_megatron = all(map(_holds_megatron, (a, b)))
    if by == PARAMETERS and not (kinds <= _MEGATRON and of_megatron):
        raise UsageError(
            "--by parameters needs torch_dist, fsdp_dtensor or dcp checkpoints of Megatron models, not "
            f"{sorted(kinds)}"
        )
    between = "safetensors" in kinds and bool(kinds & _MEGATRON) and of_megatron
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
        comparable = len(layouts) == 1 and layouts <= _COMPARABLE_LAYOUTS
        return KEYS if comparable and _joins_masters(a) == _joins_masters(b) else PARAMETERS
    if kinds == {"dcp"} and len({read_state_dict(side.catalog).layout for side in (a, b)}) == 1:
        return KEYS
    if kinds == {"fsdp_dtensor"}:
        return PARAMETERS if len({is_version_2(side.catalog.tensors) for side in (a, b)}) == 2 else KEYS
    return PARAMETERS if of_megatron and kinds != {"safetensors"} else KEYS


def _holds_megatron(side: Opened) -> bool:
    return side.location.kind != "dcp" or is_megatron(read_state_dict(side.catalog))


def _joins_masters(opened: Opened) -> bool:
    """Whether a `torch_dist` checkpoint holds remainders in the place of masters."""
    if not opened.common.arg("use_precision_aware_optimizer"):
        return False
    states = read_optimizer_states(opened.files, opened.catalog, opened.common, sample_only=True)
    return states is not None and states.has_made


def _by_keys(opened: Opened) -> Side:
    """The checkpoint under its stored keys; a common state is one value wherever it lies."""
    roles = opened.roles()
    tensors = {
        key: target_of(key, entry.value, role=roles[key]) for key, entry in opened.catalog.tensors.items()
    }
    objects: dict[str, object] = {k: o for k, o in opened.catalog.objects.items() if k != COMMON_OBJECT}
    if opened.location.kind == "torch_dist":
        objects = {COMMON_STATE: opened.common.values, **objects}
    return Side(opened.files, opened.catalog, tensors, objects, opened.trust_pickle)


def _by_parameters(a: Opened, b: Opened, target: TargetOptions, workers: int | None) -> Named:
    """Both under the names of `fsdp_dtensor`; a checkpoint of another format is seen as its conversion."""
    stored = [_by_keys(side) if side.location.kind == "fsdp_dtensor" else None for side in (a, b)]
    first, second = stored
    if first is not None and second is not None:
        if is_version_2(first.tensors) != is_version_2(second.tensors):
            first, second = _as_version_2(first), _as_version_2(second)
        return (first, second), []
    if first is second is None and target.tp is None:
        # packed projections are compared in the order that a state dict has them in
        sizes = [_recorded_tp("dcp", side) for side in (a, b) if side.location.kind == "dcp"]
        target = replace(target, tp=next((tp for tp in sizes if tp is not None), None))
    notes: list[str] = []
    if first is None:
        first, notes = _as_converted(a, target, second, workers)
    if second is None:
        second, more = _as_converted(b, target, stored[0], workers)
        notes = [*notes, *more]
    return (first, second), notes


def _recorded_tp(kind: CheckpointKind, side: Opened | Side) -> int | None:
    """The tensor parallel size that an output was made for, where its record or its rng states tell it."""
    size = stored_tp(read_record(side.files), FORMATS[kind].rng_ranks(side.catalog), {})
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
    fitting: dict[str, object] = {}
    if target.model_prefix == MODEL_PREFIX and is_version_2(other.tensors):
        fitting["model_prefix"] = MODEL_PREFIX.removesuffix(".module")
        fitting["state_prefix"] = target.state_prefix or state_prefix(model).removesuffix(".module")
    if target.layer_spec is None and any(name.endswith(_FUSED_NORMS) for name in names):
        fitting["layer_spec"] = "te"
    elif target.layer_spec is None and any(name.endswith(".input_layernorm.weight") for name in names):
        fitting["layer_spec"] = "local"
    if target.experts is None and any(".experts." in name for name in names):
        fitting["experts"] = "sequential" if any(".local_experts." in name for name in names) else "grouped"
    if target.swiglu is None and model.settings.swiglu is None:
        fitting["swiglu"] = any(".linear_fc1.weight" in name and name.endswith("_w") for name in names)
    if target.tp is None:
        fitting["tp"] = _recorded_tp("fsdp_dtensor", other)
    if not any(key.startswith(_OF_A_RUN) for key in (*other.tensors, *other.objects)):
        fitting["weights_only"] = True
    return replace(target, **fitting)  # type: ignore[arg-type]  # each value has its field's type


def _converted(opened: Opened, model: Model, options: TargetOptions) -> Side:
    built = build_fsdp_target(model, options).target
    tensors: dict[str, TargetTensor | InlineTensor] = {t.key: t for t in built.tensors}
    tensors |= {t.key: t for t in built.inline}
    objects = {o.key: o.value for o in built.objects}
    return Side(opened.files, model.catalog, tensors, objects, opened.trust_pickle, model.settings.fp8_recipe)


def _misfit(side: Side, other: Side) -> int:
    """How many names stand on one side only."""
    return len(side.tensors.keys() ^ other.tensors.keys()) + len(side.objects.keys() ^ other.objects.keys())


def _by_export(
    a: Opened,
    b: Opened,
    ignore_keys: tuple[str, ...] = (),
    rules: Path | None = None,
    headers: bool = False,
) -> Named:
    """A Hugging Face model and another checkpoint under the model's names, as `export-hf` writes it.

    A second Hugging Face model is imported first: so experts one by one equal those of one tensor.

    Args:
        ignore_keys: as `export-hf --ignore-keys`: globs of the checkpoint's keys that the model was made without.
        rules: as `export-hf --rules`.
        headers: no payload is read; the notes say what else the checkpoint alone has.
    """
    model, checkpoint = (a, b) if a.location.kind == "safetensors" else (b, a)
    folder = model.location.path
    options = ExportOptions(
        hf_config=folder,
        rules=rules,
        trust_pickle=checkpoint.trust_pickle,
        ignore_keys=ignore_keys,
        check_masters="none",
    )
    config = read_config(folder)
    whole = whole_model_if_one(folder, config)
    others = whole.others if whole is not None and not holds_several(checkpoint.catalog) else {}
    kept, left_out = without_frequencies(model.catalog)
    plain = dequantized(kept, config, model.files)
    kept = plain.catalog
    imported = None
    if checkpoint.location.kind == "safetensors":
        imported = imported_source(read_huggingface(checkpoint, ImportOptions(rules=rules))[1])
    made = export_tensors(checkpoint, options, whole, plain.specs, imported, headers)
    notes = list(made.notes)
    if imported is not None:  # the import has padded the vocabulary rows
        notes = [note for note in notes if not note.startswith("the vocabulary is cut")]
    if headers:
        roles = {key: role_of(key) for key in checkpoint.catalog.tensors}
        states = [role for role in roles.values() if role not in (WEIGHT, "other")]
        notes += [*made.source.dropped, *([no_optimizer(states)] if states else [])]
    if others:
        notes.append(
            f"the language model alone: {len(others)} tensors of the model's other towers are not compared"
        )
    views: dict[str, TargetTensor | InlineTensor] = {tensor.key: tensor for tensor in made.ready}
    shapes = {key: view.shape for key, view in views.items() if key in made.exported.shapes}
    catalog = replace(kept, tensors={key: _reshaped(e, shapes) for key, e in kept.tensors.items()})
    families = families_with(rules, plain.config if whole is None else whole.tower.config)
    redundant = _redundant(replace(model, catalog=kept), plain, views, families, headers)
    stored: dict[str, TargetTensor | InlineTensor] = {}
    for key, entry in catalog.tensors.items():
        if key in redundant or key in plain.parts or key in others:
            continue
        view, dtype = views.get(key), entry.dtype
        if imported is None and view is not None and (dtype, view.dtype) in _EXACT:
            dtype = view.dtype
        stored[key] = TargetTensor(key, dtype, entry.shape, (Source(key),))
    wider = [key for key, tensor in stored.items() if tensor.dtype != catalog.tensors[key].dtype]
    if wider:
        notes.append(
            f"{len(wider)} tensors, {wider[0]} the first, are {views[wider[0]].dtype} in the checkpoint and "
            f"{catalog.tensors[wider[0]].dtype} in the model; they are compared as the wider type, which is exact"
        )
    notes = [
        "weights are compared as export-hf would write them; config.json, arguments and optimizer are not"
        if imported is None
        else "two Hugging Face models are compared under the names of the first; config.json is not",
        *notes,
        *left_out,
        *plain.dropped,
        *plain.notes,
        *(f"{key}: {why}" for key, why in redundant.items()),
    ]
    of_model = Side(model.files, catalog, stored, {})
    of_export = Side(checkpoint.files, made.source.catalog, views, {}, checkpoint.trust_pickle)
    return ((of_model, of_export) if model is a else (of_export, of_model)), notes


def _of_one_model(a: Opened, b: Opened, sides: Sides) -> Named | None:
    """Two Hugging Face models under the names of the first, where more names match so than by keys.

    None where that is not so, or rules do not say that they are of one class.
    """
    misfit = _misfit(*sides)
    if not misfit or {a.location.kind, b.location.kind} != {"safetensors"}:
        return None
    try:
        if any(read_config(side.location.path).get(QUANTIZED) for side in (a, b)):
            return None
        found, notes = _by_export(a, b)
    except (MappingError, UnsupportedCheckpointError):
        return None
    return (found, notes) if _misfit(*found) < misfit else None


def no_optimizer(roles: Iterable[Role]) -> str:
    """A note on a checkpoint's tensors that no Hugging Face model has."""
    counts = ", ".join(f"{count} of {role}" for role, count in Counter(roles).items())
    return f"in the checkpoint alone, since a Hugging Face model has no optimizer: {counts}"


def _reshaped(entry: TensorEntry, shapes: Mapping[str, tuple[int, ...]]) -> TensorEntry:
    """The stored tensor with the axes that the view of the other side has; its bytes are the same."""
    shape = shapes.get(entry.key, entry.shape)
    if shape == entry.shape or prod(shape) != entry.numel:
        return entry
    return seen_as(entry, shape)


def _redundant(
    model: Opened,
    plain: Dequantized,
    views: Mapping[str, object],
    families: Mapping[str, Family],
    headers: bool,
) -> dict[str, str]:
    """What the model stores though it follows from the rest, with why: an export does not write it.

    That is proven, if more than headers may be read.
    """
    specs = plain.specs
    if specs.keys() <= views.keys():
        return {}
    try:
        imported = import_targets(specs, plain.config, families=families)
    except MappingError:  # not a whole model, which the comparison says better
        return {}
    paired = {key for pair in imported.equal for key in pair}
    found = {key: _NO_CONTENT for key in imported.dropped if key not in views and key not in paired}
    for pair in imported.equal:
        if sum(key in views for key in pair) == 1 and (headers or _is_proven(model, pair)):
            one, other = sorted(pair, key=lambda key: key in views)
            found[one] = _SAME.format(other)
    return found


def _is_proven(model: Opened, pair: tuple[str, str]) -> bool:
    try:
        prove_equal(model.files, model.catalog, [pair])
    except MappingError:
        return False
    return True


def _under_one_spelling(sides: Sides) -> Named:
    """Both sides under the names of one, and a note on it, where these are proven to be the same model's."""
    found = spelled_as((sides[0].catalog, sides[1].catalog))
    if found is None:
        return sides, []
    renamed = _respelled(sides[found.side], found)
    notes = [f"{_told(found)}: {len(found.names)} tensors of the same shapes are one model's. --by keys compares "
             "the keys as they are stored"]  # fmt: skip
    return ((renamed, sides[1]) if found.side == 0 else (sides[0], renamed)), notes


def _respelled(side: Side, found: Spelling) -> Side:
    objects = {found.keys[key]: value for key, value in side.objects.items()}
    for key in found.lists:  # the names in them are values, and as different as the keys
        value = side.value(key) if key in side.objects else None
        if type(value) is list:
            names = (found.names.get(name, name) if isinstance(name, str) else name for name in value)
            objects[found.keys[key]] = list(names)
    return replace(
        side, tensors={found.keys[key]: tensor for key, tensor in side.tensors.items()}, objects=objects
    )


def _told(found: Spelling) -> str:
    (own, front), (other, other_front) = zip(
        ("AB"[found.side], "BA"[found.side]), found.in_front, strict=True
    )
    text = f"the names of {own} are compared with {other}'s"
    if front != other_front:
        behind, there = (f" behind {one!r}" if one else "" for one in (front, other_front))
        text = f"the names of {own}{behind} are compared with {other}'s{there}"
    return text + (", without the segments of wrappers inside of them" if found.inside else "")


T = TypeVar("T")

RERUN: Final = "rerun_state_machine"
_EXTRA_STATE: Final = "._extra_state/"


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
        if not options.keys:
            values, more = _without_empty_states(sides, values)
            notes += more
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


def _without_empty_states(
    sides: Sides, values: tuple[ValueDiff, ...]
) -> tuple[tuple[ValueDiff, ...], list[str]]:
    """The differences without those of Transformer Engine's extra states that hold nothing, and a note on these.

    A module without FP8 has an empty tensor, None (conversions write that) or no state, as its version likes. A
    shard that a side lacks though it has others of its module is a difference.
    """
    modules = [
        {key.partition(_EXTRA_STATE)[0] for key in side.objects if _EXTRA_STATE in key} for side in sides
    ]

    def is_empty(name: str) -> bool:
        key = name if any(name in side.objects for side in sides) else name.rpartition(".")[0]
        held = [side.value(key) for side in sides if key in side.objects]
        module = key.partition(_EXTRA_STATE)[0]
        is_lost = any(key not in s.objects and module in own for s, own in zip(sides, modules, strict=True))
        return bool(held) and not is_lost and not any(map(holds_something, held))

    left = tuple(value for value in values if _EXTRA_STATE not in value.name or not is_empty(value.name))
    if len(left) == len(values):
        return values, []
    return left, [
        f"{counted(len(values) - len(left), 'extra state')} of Transformer Engine that hold nothing have another "
        "form, or are in one side alone: not compared"
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
