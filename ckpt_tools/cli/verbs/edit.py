"""Commands that write a checkpoint in the format of its source."""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import options as v
from ckpt_tools.cli import render
from ckpt_tools.cli.options import flag, option
from ckpt_tools.cli.reports import (
    changed_before,
    masters_text,
    print_edited,
    print_lines,
    row,
    shared,
    time_and_shared,
)
from ckpt_tools.cli.table import (
    FRESH,
    FRESH_OPTIMIZER,
    ITERATIONS,
    READING,
    REWRITING,
    RUNNING,
    Checkpoint,
    OutputDir,
    fill,
    with_options,
)
from ckpt_tools.cli.writing import carry_out
from ckpt_tools.human import counted, human_bytes

if TYPE_CHECKING:
    from ckpt_tools.commands.edit.average import Averaged
    from ckpt_tools.commands.edit.copy import Copied
    from ckpt_tools.commands.edit.repair import Repaired
    from ckpt_tools.commands.job.report import ConversionReport

_SHOWN = 20
_ROUNDED = 1e-9  # by which shares like 0.1 miss 1
_MODIFY = {
    "iteration": ITERATIONS,
    "op": option(
        list[str], "--op", read=v.globs, help='"remove REGEX" or "rename REGEX REPLACEMENT"; repeatable.'
    ),
}
_SLICE = {
    "iteration": ITERATIONS,
    "layers": option(str, "--layers", default=..., help="Range of layers to keep, e.g. 0:2."),
    "block": option(str, "--block", help="Module that holds the layers. Default: decoder.layers."),
}
_STRIP = {
    "iteration": ITERATIONS,
    "dtype": option(
        str, "--dtype", help="Element type of the weights (fsdp_dtensor stores fp32 masters)."
    ),
    "fresh_optimizer": option(
        bool, "--fresh-optimizer/--no-fresh-optimizer", default=False, panel=FRESH,
        help="Give an fsdp_dtensor checkpoint a fresh optimizer (zero moments, step 0), which core 0.18 and "
             "later need.",
    ),
}  # fmt: skip
_AVERAGE = {
    "weights": option(
        str, "--weights", read=v.shares,
        help="Shares in order, e.g. 0.5,0.3,0.2; they are divided by their sum. Default: equal.",
    ),
    "ema": option(
        float, "--ema", help="Exponential moving average in order, with this decay, e.g. 0.9."
    ),
    "last": option(int, "--last", min=1, help="Average the last N iterations of one run."),
}  # fmt: skip
_COPY = {
    "read_back": flag("--read-back", help="Read the copy once more and compare it with the source."),
    "iteration": ITERATIONS,
}


def modify_state_dict(input_dir: Checkpoint, output_dir: OutputDir, **given: Any) -> None:
    """Copy a checkpoint without some keys, or with other names.

    Keys are removed first; of several renames the first that matches is used.
    """
    from ckpt_tools.commands.edit.modify import modify_state_dict as modify
    from ckpt_tools.commands.job.conversion import EditOptions

    carry_out(
        input_dir,
        output_dir,
        given,
        fill(EditOptions, given),
        lambda options, progress: modify(input_dir, output_dir, given["op"], options, progress),
        _edited_json,
        _print_changed,
    )


def slice_layers(input_dir: Checkpoint, output_dir: OutputDir, **given: Any) -> None:
    """Copy a few layers as a small checkpoint that loads, for tests, CI and bug reports."""
    from ckpt_tools.commands.edit.slice import slice_layers as cut
    from ckpt_tools.commands.job.conversion import EditOptions

    layers, block = given["layers"], given["block"]
    carry_out(
        input_dir,
        output_dir,
        given,
        fill(EditOptions, given),
        lambda options, progress: cut(input_dir, output_dir, layers, block, options, progress),
        _edited_json,
        _print_changed,
    )


def _edited_json(done: ConversionReport) -> dict[str, object]:
    edits = {"removed": done.edits.removed, "renamed": done.edits.renamed}
    return {"schema_version": 1, "source": done.source, **done.edit_json(), **done.links(), **edits}


def _print_changed(done: ConversionReport, verbose: bool) -> None:
    edits = done.edits
    counts = [(len(edits.removed), "removed"), (len(edits.renamed), "renamed")]
    lines = [f"{what:<9} {counted(n, 'key')}" for n, what in counts if n]
    details = [f"removed {key}" for key in edits.removed]
    details += [f"renamed {key} -> {name}" for key, name in edits.renamed.items()]
    print_edited(done, lines, _few(details), verbose)


def _few(lines: list[str]) -> list[str]:
    """The first of many lines."""
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"... and {more:,} more (--json lists all)"] if more > 0 else [])]


def strip(
    input_dir: Annotated[str, typer.Argument(help="A run, or one of its iterations.")],
    output_dir: OutputDir,
    **given: Any,
) -> None:
    """Copy the weights of a checkpoint, without optimizer, scheduler and random states."""
    from ckpt_tools.commands.edit.strip import strip_checkpoint
    from ckpt_tools.commands.job.conversion import EditOptions
    from ckpt_tools.megatron.fsdp_dtensor.fresh_optimizer import check_fresh
    from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions

    settings = fill(TargetOptions, {name: given[name] for name in FRESH_OPTIMIZER})
    check_fresh(replace(settings, weights_only=True))
    fresh = settings if settings.fresh_optimizer else None
    carry_out(
        input_dir,
        output_dir,
        given,
        fill(EditOptions, given),
        lambda options, progress: strip_checkpoint(
            input_dir, output_dir, given["dtype"], options, progress, fresh, given["check_masters"]
        ),
        lambda done: _stripped_json(done, given["dtype"]),
        lambda done, verbose: _print_stripped(done, given["dtype"], verbose),
    )


def _stripped_json(done: ConversionReport, dtype: str | None) -> dict[str, object]:
    return {
        "schema_version": 1,
        "source": done.source,
        **done.edit_json(),
        **done.links(),
        "masters": done.masters.as_json(),
        "removed": done.edits.removed,
        "dtype": dtype,
        "cast": done.edits.cast,
        "notes": done.notes,
        "rounded_elements": 0 if done.written is None else done.written.rounded_elements,
    }


def _print_stripped(done: ConversionReport, dtype: str | None, verbose: bool) -> None:
    edits, lines = done.edits, list[str]()
    if edits.removed or not done.notes:
        lines.append(
            row("left out", f"{len(edits.removed):,} keys of optimizer, scheduler and random states")
        )
    if edits.cast:
        rounded = (
            "" if done.written is None else f", which rounded {done.written.rounded_elements:,} elements"
        )
        lines.append(row("cast", f"{len(edits.cast):,} tensors to {dtype}{rounded}"))
    print_edited(done, lines, _few([f"left out {key}" for key in edits.removed]), verbose)


def average(
    input_dirs: Annotated[
        list[str], typer.Argument(help="Checkpoints of one model and format; or one run, with --last.")
    ],
    output_dir: Annotated[str, typer.Argument(help="The run to make; if named iter_N, that folder alone.")],
    **given: Any,
) -> None:
    """Weighted mean of checkpoints, or of the last iterations of a run (--last N).

    The fp32 masters are averaged, if there are any, and the weights are these, rounded. Optimizer states and
    everything else come from the last checkpoint.
    """
    from ckpt_tools.commands.edit.average import AverageOptions, average_checkpoints
    from ckpt_tools.commands.job.iterations import last_iterations
    from ckpt_tools.errors import UsageError

    if given["last"] is not None:
        if len(input_dirs) > 1 or given["iteration"] is not None:
            raise UsageError("--last N takes one run and its last N iterations: `average RUN OUT --last 3`")
        input_dirs = last_iterations(input_dirs[0], given["last"])
    carry_out(
        input_dirs[-1],
        output_dir,
        given,
        fill(AverageOptions, given),
        lambda options, progress: average_checkpoints(input_dirs, output_dir, options, progress),
        _averaged_json,
        _print_averaged,
    )


def _averaged_json(done: Averaged) -> dict[str, object]:
    return {
        "schema_version": 2,
        "sources": done.sources,
        **done.report.edit_json(),
        "masters": done.report.masters.as_json(),
        "weights": done.weights,
        "given_weights": done.given,
        "averaged": done.averaged,
        "rounded_from_masters": done.rounded,
        "not_averaged": done.kept,
    }


def _print_averaged(done: Averaged, verbose: bool) -> None:
    lines = [row("mean", f"{len(done.averaged):,} tensors of {len(done.sources)} checkpoints")]
    if done.rounded:
        lines[0] += f"; {len(done.rounded):,} weights are the mean of their masters, rounded"
    shares = ", ".join(f"{share:.6g}" for share in done.weights)
    if done.given is not None and abs(fsum(done.given) - 1) > _ROUNDED:
        shares += f" (--weights divided by their sum, {fsum(done.given):.6g})"
    lines += [
        row("shares", shares),
        row("masters", f"of the last source: {masters_text(done.report.masters)}"),
    ]
    details = [f"{share:.6g} of {source}" for share, source in zip(done.weights, done.sources, strict=True)]
    details += _few([f"not averaged, taken from the last: {key}" for key in done.kept])
    print_edited(done.report, lines, details, verbose)


def repair(
    input_dir: Annotated[str, typer.Argument(help="A run, or one of its iterations.")],
    output_dir: OutputDir,
    **given: Any,
) -> None:
    """Correct keys of fsdp_dtensor that another program wrote wrong, if the checkpoint proves what is right.

    These are: fp32 masters next to the weights, group fields under wrong names, layers numbered within their pipeline
    stage. No weight and no master is changed. Exit code 1, without output: there is nothing to correct.
    """
    from ckpt_tools.commands.edit.repair import repair_checkpoint
    from ckpt_tools.commands.job.conversion import EditOptions

    done = carry_out(
        input_dir,
        output_dir,
        given,
        fill(EditOptions, given),
        lambda options, progress: repair_checkpoint(input_dir, output_dir, options, progress),
        _repaired_json,
        _print_repaired,
    )
    raise typer.Exit(0 if done.changes else 1)


def _repaired_json(done: Repaired) -> dict[str, object]:
    report = done.report
    return {
        "schema_version": 1,
        "source": done.source,
        "output": done.output,
        "format": "fsdp_dtensor",
        "changes": [
            {"cause": c.cause, "issue": c.issue, "proof": c.proof, "where": c.keys} for c in done.changes
        ],
        "tensor_count": 0 if report is None else report.tensors,
        "object_count": 0 if report is None else report.objects,
        "left_out": done.left_out,
        "written": None if report is None or report.written is None else report.written.in_short(),
        **({} if report is None else report.links()),
    }


def _print_repaired(done: Repaired, verbose: bool) -> None:
    if done.report is None:
        render.tell(
            f"{render.escape(done.source)}: repair knows no fault of these keys. Nothing was written. Values were "
            "not read: `verify --content` checks them"
        )
        return
    lines = list[str]()
    for change in done.changes:
        issue = f" ({change.issue})" if change.issue else ""
        lines += [
            row("corrected", f"{change.cause}{issue}: {len(change.keys):,} entries"),
            row("proof", change.proof),
        ]
    details = [line for change in done.changes for line in _few([f"corrected {key}" for key in change.keys])]
    print_edited(done.report, lines, details, verbose)


def copy(
    input_dir: Annotated[str, typer.Argument(help="A run, or one checkpoint: a folder or a URL.")],
    output_dir: Annotated[str, typer.Argument(help="The copy: a folder or a URL.")],
    **given: Any,
) -> None:
    """Copy checkpoints between folders and object stores, and check them on the way. All or nothing, resumable."""
    from ckpt_tools.cli.progress import is_first_rank, progress_bar
    from ckpt_tools.cli.reports import say_unfinished
    from ckpt_tools.commands.edit.copy import CopyOptions, copy_checkpoint
    from ckpt_tools.commands.job.iterations import iteration_name

    of_all = given["iteration"] == "all"
    options = fill(
        CopyOptions, given, iteration=None if of_all else given["iteration"], every_iteration=of_all
    )
    with progress_bar(given["quiet"]) as progress:
        done = copy_checkpoint(input_dir, output_dir, options, progress)
    code = max((error.exit_code for _, error in done.failed), default=0)
    if not is_first_rank():
        raise typer.Exit(code)
    if given["as_json"]:
        print(render.json_text(done.as_json()))
    else:
        for copied in done.copied:
            _print_copied(copied, given["verbose"])
        if done.already_there:
            render.tell(f"already there: {', '.join(map(str, done.already_there))}")
    for iteration in done.not_finished:
        say_unfinished(iteration)
    for number, error in done.failed:
        render.complain(f"error: {iteration_name(number)} was not copied: {error}")
    raise typer.Exit(code)


def _print_copied(copied: Copied, verbose: bool) -> None:
    written = copied.written
    size = f"{copied.files:,} files, {human_bytes(copied.nbytes)}"
    lines = shared({"linked_files": copied.links})
    if written is None:
        verb = "would copy"
    else:
        verb = "compared, it was complete already:" if written.was_there else "copied"
        size += f" {time_and_shared(written)}"
        if written.check_source != "all":
            lines.append(
                "no payload was compared with the checksum that its writer stored "
                f"(--check-source {written.check_source})"
            )
        else:
            without = f"; {copied.without_checksum:,} have none" if copied.without_checksum else ""
            lines.append(f"{copied.proven:,} payloads have the checksum that their writer stored{without}")
        if copied.read_back:
            lines.append("what was copied was read back and is equal")
    lines += changed_before(copied)
    if copied.left_out:
        listed = ", ".join(copied.left_out[:5])
        more = f", and {len(copied.left_out) - 5:,} more" if len(copied.left_out) > 5 else ""
        lines.append(f"not copied, in inner folders or not a file: {listed}{more}")
    verdict = f"{verb} {copied.source} -> {copied.output}: {size}"
    print_lines(verdict, lines, [], [], verbose)


def merge_adapter(
    input_dirs: Annotated[
        list[str], typer.Argument(help="Base and adapter; or one checkpoint that holds both (wrapped).")
    ],
    output_dir: Annotated[str, typer.Argument(help="The run to make; if named iter_N, that folder alone.")],
    **given: Any,
) -> None:
    """Merge a low-rank adapter (LoRA) into its base: W + alpha / rank * B A, rounded once.

    Adapters of Megatron-Bridge and NeMo 2 are merged into torch_dist and fsdp_dtensor checkpoints, into the fp32
    masters if there are any. The output has weights only. DoRA and other variants are refused. For a PEFT folder use
    `import-hf --adapter`.
    """
    from ckpt_tools.commands.edit.merge_adapter import MergeOptions
    from ckpt_tools.commands.edit.merge_adapter import merge_adapter as merge
    from ckpt_tools.errors import UsageError

    if len(input_dirs) > 2:
        raise UsageError(
            f"a base, its adapter and the output are three folders; {len(input_dirs) + 1} are given"
        )
    base, adapter = input_dirs[0], input_dirs[1] if len(input_dirs) > 1 else None
    carry_out(
        base,
        output_dir,
        given,
        fill(MergeOptions, given, adapter=adapter),
        lambda options, progress: merge(base, adapter, output_dir, options, progress, given["dry_run"]),
    )


_EDITING = READING | RUNNING | {"hard_link"}
COMMANDS = {
    "modify-state-dict": with_options(modify_state_dict, _EDITING, _MODIFY),
    "slice": with_options(slice_layers, _EDITING, _SLICE),
    "strip": with_options(strip, _EDITING | FRESH_OPTIMIZER | {"check_masters"}, _STRIP),
    "average": with_options(average, READING | RUNNING, _AVERAGE),
    "repair": with_options(repair, _EDITING),
    "copy": with_options(
        copy,
        READING
        | REWRITING
        | {"resume", "hard_link", "dry_run", "workers", "threads", "memory_bytes", "fsync", "direct"},
        _COPY,
    ),
    "merge-adapter": with_options(merge_adapter, RUNNING | READING | {"ignore_keys", "alpha"}),
}
