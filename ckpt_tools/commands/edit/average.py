"""`average`: the weighted mean of several checkpoints of one model as a checkpoint, tile by tile.

Weights and masters are averaged in float64 and rounded once; the optimizer's moments, the arguments, the progress and
everything else are those of the last checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from ckpt_tools.commands.edit.mean_targets import Parts, check_alike, mean_targets, parts_of
from ckpt_tools.commands.huggingface.folder import CONFIG, read_assets, weight_files
from ckpt_tools.commands.job.conversion import (
    Conversion,
    EditOptions,
    Progress,
    Writer,
    carry_out,
    like_to_like,
    open_source,
)
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.outputs import refuse_overlap
from ckpt_tools.commands.job.report import ConversionReport, Edits, Masters
from ckpt_tools.commands.job.rewrite import rewrite, use_of_masters
from ckpt_tools.errors import UsageError, VerificationError
from ckpt_tools.execute.proof.masters import check_masters
from ckpt_tools.execute.proof.prove_source import prove_payloads
from ckpt_tools.execute.run import WriteOptions
from ckpt_tools.formats.safetensors import INDEX_FILE, MAX_INDEX_BYTES
from ckpt_tools.formats.storage.files import AnyPath, path_text, read_whole
from ckpt_tools.formats.storage.joined_files import JoinedFiles
from ckpt_tools.formats.torch_archive.item_reader import read_archive
from ckpt_tools.megatron.run_state.settings import read_settings
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.target import Target, TargetObject, TargetTensor
from ckpt_tools.model.views import Source
from ckpt_tools.plan.build import build_safetensors_plan

_HOW: Final = "sample"  # of every master some rows
_TEMPORARY_TILES = 8  # what a mean needs beside a tile of every source: the sum, a product, the result


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageOptions(EditOptions):
    """Of what a mean is made and how. `weights` are shares of the checkpoints in order, `ema` a decay; not both."""

    weights: tuple[float, ...] | None = None
    ema: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """What `average` did; the report is on the last source, of which all is that no mean is taken of."""

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
        MappingError: sources with other keys, shapes or types.
        VerificationError: masters that do not round to their weights.
        UnsupportedCheckpointError: numbers that have no mean.
        Otherwise the errors of opening, planning and writing.
    """
    paths, output = [path_text(source) for source in sources], path_text(output)
    options = options or AverageOptions()
    weights = mean_weights(len(paths), options.weights, options.ema)
    with ExitStack() as stack:
        opened = [
            stack.enter_context(open_checkpoint(source, options.iteration, options.trust_pickle))
            for source in paths
        ]
        _check_places(paths, output, opened)
        read = [_read(one, options.write) for one in opened]
        parts, masters = [its for its, _ in read], read[-1][1]
        check_alike(parts, opened)
        catalog, targets = mean_targets(opened, parts[-1], weights)
        last, files = opened[-1], JoinedFiles(one.files for one in opened)
        options = replace(options, write=_within_memory(options.write, len(paths)))
        plan = _plan_safetensors if last.location.kind == "safetensors" else _plan_dcp
        made = replace(plan(last, catalog, targets), masters=masters.use)
        writer = Writer(open_source, like_to_like, lambda _opened, _options, _world: made)
        done = carry_out(
            paths[-1], replace(last, files=files), output, writer, options, progress, options.dry_run
        )
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


def _check_places(sources: Sequence[str], output: str, opened: Sequence[Opened]) -> None:
    """Raise UsageError if the output overlaps a source, or the sources are of several kinds."""
    for source, one in zip(sources, opened, strict=True):
        refuse_overlap(source, one.location, output)
    kinds = {one.location.kind for one in opened}
    if len(kinds) > 1:
        found = ", ".join(f"{one.location.path} is {one.location.kind}" for one in opened)
        raise UsageError(f"checkpoints of one kind have a mean: {found}. Convert them to one kind first")


def _read(opened: Opened, write: WriteOptions) -> tuple[Parts, Masters]:
    """The parts of a source, and what was found of its masters."""
    try:
        parts = parts_of(opened, write.workers)
        return parts, _check_masters(opened, parts, write.threads)
    except VerificationError:
        if write.check_source != "none":
            prove_payloads(opened.files, opened.catalog, opened.catalog.tensors, write.threads)
        raise


def _check_masters(opened: Opened, parts: Parts, threads: int) -> Masters:
    """What was found of the masters: that they belong to the weights, which will be made of them.

    It is always looked at: what stands in the place of masters may be their lower halves.
    """
    if not parts.rounded:
        return Masters(use_of_masters(opened, "none"))
    tensors, path = opened.catalog.tensors, opened.location.path
    targets = [
        TargetTensor(
            key,
            tensors[sources[0].key].dtype,
            tensors[key].shape,
            sources,
            must_round_to=(Source(key),),
            must_round_dtype=tensors[key].dtype,
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
        extra_files=read_assets(last.location.path, has_code=True).files | kept | index,
        edits=Edits(),
    )


def _within_memory(write: WriteOptions, sources: int) -> WriteOptions:
    """The options with buffers so small that the tiles of all sources keep to the memory that was asked for."""
    return replace(write, tiles=sources + _TEMPORARY_TILES)
