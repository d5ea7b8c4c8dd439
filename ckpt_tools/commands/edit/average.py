"""`average`: the weighted mean of several checkpoints of one model as a checkpoint, tile by tile.

Weights and masters are averaged in float64 and rounded once; the optimizer's moments, the arguments, the progress and
everything else are those of the last checkpoint.

Where fp32 masters are stored next to the weights, the masters are averaged, and each weight is its averaged master
rounded, as in every checkpoint that a job writes. Values that no optimizer updates (router biases, counters, rotary
frequencies) are states of a run and not averaged; without an optimizer they are detected by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ckpt_tools.commands.huggingface.folder import (
    CONFIG,
    read_assets,
    read_config,
    refuse_adapters,
    weight_files,
)
from ckpt_tools.commands.job.conversion import Conversion, EditOptions, Progress, with_note
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.outputs import refuse_overlap
from ckpt_tools.commands.job.read_model import shared_by
from ckpt_tools.commands.job.report import ConversionReport, Edits, Masters
from ckpt_tools.commands.job.rewrite import edit, rewrite, use_of_masters
from ckpt_tools.errors import (
    MappingError,
    UnsupportedCheckpointError,
    UsageError,
    VerificationError,
    raise_if,
)
from ckpt_tools.execute.processes.meeting import connect
from ckpt_tools.execute.proof.masters import check_masters
from ckpt_tools.execute.proof.prove_source import prove_payloads
from ckpt_tools.execute.run import WriteOptions
from ckpt_tools.formats.safetensors import INDEX_FILE, MAX_INDEX_BYTES
from ckpt_tools.formats.storage.files import AnyPath, path_text, read_whole
from ckpt_tools.formats.storage.joined_files import JoinedFiles, joined_entry
from ckpt_tools.formats.torch_archive.item_reader import read_archive
from ckpt_tools.megatron.huggingface.config.same_model import args_differences, config_differences
from ckpt_tools.megatron.keys import parameter_of, stacked_axes
from ckpt_tools.megatron.run_state.settings import read_settings
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import read_optimizer_states
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import optimizer_layout
from ckpt_tools.model.catalog import Catalog, Made, Value, made_entry
from ckpt_tools.model.dtypes import CASTABLE, FLOATING
from ckpt_tools.model.kernels.kernel import WeightedMean
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.target import Target, TargetObject, TargetTensor, rounding_target
from ckpt_tools.model.views import Source
from ckpt_tools.plan.build import build_safetensors_plan

_HOW: Final = "sample"  # of every master some rows
_TEMPORARY_TILES = 8  # what a mean needs besides a tile of every source: the sum, a product, the result


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageOptions(EditOptions):
    """Of what a mean is made and how. `weights` are shares of the checkpoints in order, `ema` a decay; not both."""

    weights: tuple[float, ...] | None = None
    ema: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """What `average` did; the report is on the last source, which gives all other values."""

    report: ConversionReport
    sources: tuple[str, ...]
    weights: tuple[float, ...]  # of the sources, together 1
    given: tuple[float, ...] | None  # as they were given, before they were divided by their sum
    averaged: tuple[str, ...]
    rounded: tuple[str, ...]  # weights that are the rounding of an averaged master
    kept: tuple[str, ...]  # of the model, taken from the last source


def average_checkpoints(
    sources: Sequence[AnyPath],
    output: AnyPath,
    options: AverageOptions | None = None,
    progress: Progress | None = None,
) -> Averaged:
    """Write the mean of the checkpoints at `sources` to `output`, in the kind and the layout of the last.

    Raises:
        UsageError: fewer than two sources, of several kinds, weights that make no mean, or an output that is taken.
        MappingError: sources with other keys, shapes, types, or settings of the model.
        VerificationError: masters that do not round to their weights.
        UnsupportedCheckpointError: numbers that have no mean.
        Otherwise the errors of opening, planning and writing.
    """
    paths, output = [path_text(source) for source in sources], path_text(output)
    options = options or AverageOptions()
    weights = mean_weights(len(paths), options.weights, options.ema)
    with ExitStack() as stack:
        ranks = stack.enter_context(connect().ending_together())
        opened = [
            stack.enter_context(open_checkpoint(source, options.iteration, options.trust_pickle))
            for source in paths
        ]
        for path, one in zip(paths, opened, strict=True):
            refuse_overlap(path, one.location, output)
        if len({one.location.kind for one in opened}) > 1:
            kinds = ", ".join(f"{one.location.path} is {one.location.kind}" for one in opened)
            raise UsageError(f"all inputs must have the same format: {kinds}. Convert them first")
        read = [_read(one, options.write) for one in opened]
        parts, masters = [its for its, _ in read], read[-1][1]
        check_alike(parts, opened)
        notes = check_settings_match(opened)
        catalog, targets = mean_targets(opened, parts[-1], weights)
        last, files = opened[-1], JoinedFiles(one.files for one in opened)
        # Buffers so small that the tiles of all sources keep to the memory that was asked for.
        write = replace(options.write, tiles=len(paths) + _TEMPORARY_TILES)
        options = replace(options, write=write)
        plan = _plan_safetensors if last.location.kind == "safetensors" else _plan_dcp
        made = replace(plan(last, catalog, targets), masters=masters.use)
        for note in notes:
            made = with_note(made, note)
        joined = replace(last, files=files)
        done = edit(paths[-1], output, lambda _: made, options, progress, opened=joined, ranks=ranks)
    return Averaged(
        report=replace(done, masters=masters),
        sources=tuple(paths),
        weights=weights,
        given=options.weights,
        averaged=parts[-1].means,
        rounded=tuple(parts[-1].rounded),
        kept=parts[-1].kept,
    )


def mean_weights(count: int, weights: Sequence[float] | None, ema: float | None) -> tuple[float, ...]:
    """The share of each of `count` checkpoints; together they are 1.

    An exponential moving average begins with the first checkpoint and takes `ema` of what it was and the rest of
    every later one.
    """
    if count < 2:
        raise UsageError(f"a mean needs two or more checkpoints before OUT, got {count}")
    if weights is not None and ema is not None:
        raise UsageError("--weights and --ema both say the checkpoints' shares; give one of them")
    if ema is not None:
        if not 0 < ema < 1:
            raise UsageError(f"--ema {ema}: a decay is between 0 and 1, for example 0.9")
        return (ema ** (count - 1), *((1 - ema) * ema ** (count - 1 - i) for i in range(1, count)))
    given = tuple(weights) if weights is not None else (1.0,) * count
    if len(given) != count:
        raise UsageError(f"--weights gives {len(given)} shares for {count} checkpoints")
    if not all(0 < share < math.inf for share in given):
        raise UsageError(f"--weights {', '.join(map(str, given))}: every share must be a number above 0")
    try:
        total = math.fsum(given)
    except OverflowError:
        raise UsageError(f"--weights {', '.join(map(str, given))}: their sum is too large") from None
    return tuple(share / total for share in given)


def _read(opened: Opened, write: WriteOptions) -> tuple[Parts, Masters]:
    """The parts of a source, and what was found of its masters."""
    try:
        parts = parts_of(opened, write.workers)
        return parts, _check_masters(opened, parts, write.threads)
    except VerificationError:
        if write.check_source == "all":
            prove_payloads(opened.files, opened.catalog, opened.catalog.tensors, write.threads)
        raise


def _check_masters(opened: Opened, parts: Parts, threads: int) -> Masters:
    """What was found of the masters: that they belong to the weights, which will be made of them.

    Always checked: what is stored as masters may be their lower halves.
    """
    if not parts.rounded:
        return Masters(use_of_masters(opened, "none"))
    tensors, path = opened.catalog.tensors, opened.location.path
    targets = [
        rounding_target(
            key,
            replace(tensors[key].value, dtype=tensors[sources[0].key].dtype, sources=sources),
            tensors[key].value,
        )
        for key, sources in parts.rounded.items()
    ]
    report = check_masters(
        opened.files,
        opened.catalog,
        targets,
        _HOW,
        threads=threads,
        fp8_recipe=read_settings(opened.common).fp8_recipe,
        advice=f"`strip {path} OUT` keeps the weights alone; average what it makes of every source.",
    )
    return Masters("written", _HOW, report)


def _plan_dcp(last: Opened, catalog: Catalog, targets: tuple[TargetTensor, ...]) -> Conversion:
    """A torch distributed checkpoint with the last one's objects, files and chunks."""
    stored, paths = last.catalog, last.catalog.planner_paths
    return rewrite(
        last,
        Target(targets, objects=tuple(TargetObject(key, None, paths.get(key, ())) for key in stored.objects)),
        ((key, read_archive(last.files, entry.item)) for key, entry in stored.objects.items()),
        Edits(),
        catalog=catalog,
        original_shapes=stored.original_shapes,
        chunks_of=lambda tensor: tensor.key,
    )


def _plan_safetensors(last: Opened, catalog: Catalog, targets: tuple[TargetTensor, ...]) -> Conversion:
    """A Hugging Face model in the last one's files, with its config and tokenizer."""
    weights, index = weight_files(last.catalog, targets)
    limits = {CONFIG: MAX_INDEX_BYTES, INDEX_FILE: MAX_INDEX_BYTES}
    kept = {
        name: read_whole(last.files, name, limit) for name, limit in limits.items() if last.files.exists(name)
    }
    return Conversion(
        to="hf",
        loader=None,
        iteration=None,
        catalog=catalog,
        target=Target(targets),
        plan=build_safetensors_plan(catalog, weights, {}),
        extra_files=read_assets(last.location.path, has_code=True)[0] | kept | index,
        edits=Edits(),
    )


_BUFFER = re.compile(
    r"(?:^|\.)(?:expert_bias|e_score_correction_bias|local_tokens_per_expert|inv_freq|original_inv_freq|cos_cached|"
    r"sin_cached|running_mean|running_var|_extra_state)$"
)
_SEPARATE_MASTER = re.compile(
    r"(?:^|\.)(?:fp32_from_fp16_params|fp32_from_fp32_params|fp32_params?|master_params?|master_weights?|master|param)"
    r"(?:\.|$)"
)
_NAMED = 3  # keys that differ in the same way are named one by one
_CONVERT = "convert both to fsdp_dtensor and average those"
_ALONE = "leave the optimizer out of every checkpoint and average the weights alone"


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one checkpoint by what becomes of them; the rest are the last one's.

    `means` are averaged as they are stored. A key of `rounded` is a weight made of the means that its sources show.
    `kept` belong to the model and are the last one's, like everything else.
    """

    means: tuple[str, ...]
    kept: tuple[str, ...]
    rounded: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)

    @property
    def model(self) -> frozenset[str]:
        """All keys that every one of the checkpoints must have."""
        return frozenset((*self.means, *self.kept, *self.rounded))


def parts_of(opened: Opened, workers: int | None = 1) -> Parts:
    """What a mean with other checkpoints of this kind is taken of; `workers` as those of `Wanted`."""
    if opened.location.kind == "torch_dist":
        return _torch_dist(opened, workers)
    return _RULES[opened.location.kind](opened)


def _torch_dist(opened: Opened, workers: int | None) -> Parts:
    tensors = opened.catalog.tensors
    try:
        states = read_optimizer_states(opened.files, opened.catalog, opened.common, share=shared_by(workers))
    except UnsupportedCheckpointError as error:
        raise UnsupportedCheckpointError(f"{error}\nFor a mean: {_ALONE} (`strip`)") from error
    if states is not None and states.payloads:
        raise UnsupportedCheckpointError(
            f"{opened.location.path}: its masters are stored inside objects ({states.layout}), which cannot be "
            f"rewritten; {_CONVERT}, and convert the result back with --to torch_dist"
        )
    known = states.states if states is not None else {}
    weights = [key for key, role in opened.roles().items() if role == WEIGHT]
    rounded = {
        key: state.value(key, tensors[key].shape, stacked_axes(key)).sources
        for (kind, key), state in known.items()
        if kind == MASTER
    }
    masters = dict.fromkeys(source.key for sources in rounded.values() for source in sources)
    trained = {key for _, key in known}
    plain = [key for key in weights if key not in rounded]
    means, kept = _sorted_out(opened, plain, trained if known else None)
    _refuse_encoded(opened, [*masters, *rounded])
    return Parts((*masters, *means), kept, rounded)


def _fsdp_dtensor(opened: Opened) -> Parts:
    found = {key: named for key in opened.catalog.tensors if (named := parameter_of(key))}
    masters = [key for key, (_, kind) in found.items() if kind in ("fp32_param", "param")]
    _refuse_masters(opened, masters)
    trained = {name for name, kind in found.values() if kind != WEIGHT}
    by_name = {name: key for key, (name, kind) in found.items() if kind == WEIGHT}
    keys = {by_name[name] for name in trained if name in by_name}
    means, kept = _sorted_out(opened, list(by_name.values()), keys if trained else None)
    return Parts(means, kept)


def _dcp(opened: Opened) -> Parts:
    roles = opened.roles()
    masters = [
        key
        for key, role in roles.items()
        if _SEPARATE_MASTER.search(key) and (role != WEIGHT or key.startswith(("master", "fp32_")))
    ]
    _refuse_masters(opened, masters)
    means, kept = _sorted_out(opened, [key for key, role in roles.items() if role == WEIGHT], None)
    return Parts(means, kept)


def _safetensors(opened: Opened) -> Parts:
    refuse_adapters(opened.catalog.tensors)
    if opened.files.exists(CONFIG) and read_config(opened.location.path).get("quantization_config"):
        raise UnsupportedCheckpointError(
            f"{opened.location.path}: config.json has a quantization_config, and the mean of quantized numbers is "
            "not the quantized mean. Average the models that were quantized, and quantize the result"
        )
    return Parts(*_sorted_out(opened, list(opened.catalog.tensors), None))


_RULES: Mapping[str, Callable[[Opened], Parts]] = {
    "fsdp_dtensor": _fsdp_dtensor,
    "dcp": _dcp,
    "safetensors": _safetensors,
}


def _sorted_out(
    opened: Opened, keys: Sequence[str], trained: set[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A model's tensors that are averaged, and the others; `trained` None: decided by name and element type."""
    averaged = [key for key in keys if (not _BUFFER.search(key) if trained is None else key in trained)]
    tensors = opened.catalog.tensors
    numbers = [
        key for key in averaged if trained is not None or tensors[key].dtype in {*FLOATING, "complex64", "complex128"}
    ]  # fmt: skip
    _refuse_encoded(opened, numbers)
    means = frozenset(numbers)
    return tuple(numbers), tuple(key for key in keys if key not in means)


def _refuse_encoded(opened: Opened, keys: Sequence[str]) -> None:
    tensors = opened.catalog.tensors
    wrong = [f"{key} is {tensors[key].dtype}" for key in keys if tensors[key].dtype not in CASTABLE]
    what = f"{opened.location.path}: these types are encoded and cannot be averaged"
    raise_if(wrong, UnsupportedCheckpointError, what)


def _refuse_masters(opened: Opened, keys: Sequence[str]) -> None:
    raise_if(
        keys,
        UnsupportedCheckpointError,
        f"{opened.location.path}: fp32 masters have no known link to their weights, which must stay their rounding; "
        f"{_ALONE} (`modify-state-dict CKPT OUT --op 'remove REGEX'`)",
    )


def check_alike(parts: Sequence[Parts], opened: Sequence[Opened]) -> None:
    """Raise MappingError if keys, shapes, types or the order of buckets differ; all of them are named."""
    last, last_parts = opened[-1], parts[-1]
    found: dict[str, list[str]] = {}
    for other, its in zip(opened[:-1], parts[:-1], strict=True):
        for key, what in _differences(other, its, last, last_parts):
            found.setdefault(what, []).append(key)
    problems = list[str]()
    for what, keys in found.items():
        if len(keys) > _NAMED:
            problems.append(f"{len(keys):,} keys, such as {keys[0]}: each {what}")
        else:
            problems += [f"{key} {what}" for key in keys]
    raise_if(problems, MappingError, "a mean is taken of checkpoints with the same keys, shapes and types")


def check_settings_match(opened: Sequence[Opened]) -> tuple[str, ...]:
    """What to say of settings that differ; raise MappingError where they make another model."""
    last, there = opened[-1], opened[-1].location.path
    problems, notes = list[str](), list[str]()
    settings = [_settings(one) for one in opened]
    if last.location.kind == "safetensors" and not settings[-1] and any(settings):
        raise MappingError(
            f"{there} has no {CONFIG}, and the mean takes that of the last model: put it there"
        )
    for one, its in zip(opened[:-1], settings[:-1], strict=True):
        here = one.location.path
        if not (its and settings[-1]):
            if its or settings[-1]:
                notes.append(f"{there if its else here} has no settings to compare with those of the others")
            continue
        differences = config_differences if last.location.kind == "safetensors" else args_differences
        for found in differences(its, settings[-1]):
            (problems if found.is_model else notes).append(found.text(here, there))
    what = "a mean is taken of checkpoints of one model, and these settings make another"
    raise_if(problems, MappingError, what)
    return tuple(notes)


def _settings(opened: Opened) -> Mapping[str, Any]:
    """Those of the model: Megatron's args, Megatron-Bridge's `model` section, or config.json."""
    if opened.location.kind != "safetensors":
        return opened.common.args or opened.common.model_config
    return read_config(opened.location.path) if opened.files.exists(CONFIG) else {}


def _differences(one: Opened, its: Parts, last: Opened, last_parts: Parts) -> Iterator[tuple[str, str]]:
    """(key, in what the two checkpoints differ there)."""
    here, there = one.location.path, last.location.path
    layouts = [optimizer_layout(side.catalog, side.common) for side in (one, last)]
    if one.location.kind == "torch_dist" and layouts[0] != layouts[1] and its.model != last_parts.model:
        yield "the optimizer", f"is stored as {layouts[0]} in {here}, as {layouts[1]} in {there}: {_CONVERT}"
        return
    for key in sorted(last_parts.model ^ its.model):
        has, lacks = (there, here) if key in last_parts.model else (here, there)
        yield key, f"is in {has}, but not in {lacks}"
    averaged = [frozenset(parts.means) for parts in (its, last_parts)]
    for key in sorted(its.model & last_parts.model):
        a, b = one.catalog.tensors[key], last.catalog.tensors[key]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield key, f"is {a.dtype} {a.shape} in {here}, but {b.dtype} {b.shape} in {there}"
        elif (key in averaged[0]) != (key in averaged[1]):
            yield key, f"has optimizer states in one of {here} and {there} and none in the other"
        elif its.rounded.get(key) != last_parts.rounded.get(key):
            yield key, f"has its masters elsewhere in {here} than in {there}: {_CONVERT}"


def mean_targets(
    opened: Sequence[Opened], parts: Parts, weights: Sequence[float]
) -> tuple[Catalog, tuple[TargetTensor, ...]]:
    """The tensors of the mean, in the last checkpoint's order, and the catalog that holds what they are made of.

    The i-th of `weights` is the i-th checkpoint's; `check_alike` has passed.
    """
    last = opened[-1]
    tensors = {key: joined_entry(last.files, e, key) for key, e in last.catalog.tensors.items()}
    for key in parts.means:
        sources = []
        for one in opened:
            name = f"{key} of {one.location.path}"
            tensors[name] = joined_entry(one.files, one.catalog.tensors[key], name)
            sources.append(Source(name))
        entry = last.catalog.tensors[key]
        values = tuple(Value(entry.dtype, entry.shape, (source,)) for source in sources)
        mean = _mean_of(key)
        tensors[mean] = made_entry(mean, Made(WeightedMean(entry.dtype, tuple(weights)), values))
    shown: dict[str, tuple[Source, ...]] = {key: (Source(_mean_of(key)),) for key in parts.means}
    shown |= {
        key: tuple(Source(_mean_of(source.key), source.view) for source in sources)
        for key, sources in parts.rounded.items()
    }
    paths = last.catalog.planner_paths
    return Catalog(last.catalog.root, tensors, {}), tuple(
        TargetTensor(key, e.dtype, e.shape, shown.get(key, (Source(key),)), paths.get(key, ()))
        for key, e in last.catalog.tensors.items()
    )


def _mean_of(key: str) -> str:
    return f"mean of {key}"
