"""Commands that write a checkpoint in the format of its source."""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import options as v
from ckpt_tools.cli import render
from ckpt_tools.cli.options import flag, option
from ckpt_tools.cli.reports import masters_text, print_report, print_rewritten
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
from ckpt_tools.human import human_bytes

if TYPE_CHECKING:
    from ckpt_tools.commands.edit.average import Averaged
    from ckpt_tools.commands.edit.copy import Copied, CopyReport
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
        str, "--dtype", help="Element type of the weights, which fsdp_dtensor stores as fp32 masters."
    ),
    "fresh_optimizer": option(
        bool, "--fresh-optimizer/--no-fresh-optimizer", default=False, panel=FRESH,
        help="Give an fsdp_dtensor checkpoint an optimizer that has not begun (zero moments, step 0), so that a "
             "strict load starts from its weights.",
    ),
}  # fmt: skip
_AVERAGE = {
    "weights": option(
        str, "--weights", read=v.shares,
        help="Shares in order, e.g. 0.5,0.3,0.2; they are divided by their sum: 2,1,1 means 0.5,0.25,0.25. "
             "Default: equal."

    ),
    "ema": option(
        float, "--ema", help="Exponential moving average in order, with this decay, e.g. 0.9."
    ),
}  # fmt: skip
_COPY = {
    "read_back": flag("--read-back", help="Read the copy once more and compare it with the source."),
    "iteration": ITERATIONS,
}


def modify_state_dict(input_dir: Checkpoint, output_dir: OutputDir, **given: Any) -> None:
    """Copy a checkpoint without some keys or with other names. Removals first; the first rename that fits wins."""
    from ckpt_tools.commands.edit.modify import modify_state_dict as modify
    from ckpt_tools.commands.job.conversion import EditOptions

    carry_out(
        input_dir,
        output_dir,
        given,
        fill(EditOptions, given),
        lambda options, progress: modify(input_dir, output_dir, given["op"], options, progress),
        _edited_json,
        _print_edited,
    )


def slice_layers(input_dir: Checkpoint, output_dir: OutputDir, **given: Any) -> None:
    """Copy a few layers of a checkpoint as a small, whole checkpoint, for tests and CI."""
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
        _print_edited,
    )


def _edited_json(done: ConversionReport) -> dict[str, object]:
    return {
        "schema_version": 1, "source": done.source, **done.edit_json(),
        "removed": done.edits.removed, "renamed": done.edits.renamed,
    }  # fmt: skip


def _print_edited(done: ConversionReport) -> None:
    lines = [f"removed {key}" for key in done.edits.removed]
    lines += [f"renamed {key} -> {name}" for key, name in done.edits.renamed.items()]
    render.tell_first(lines, _SHOWN)
    print_rewritten(done)


def strip(
    input_dir: Annotated[str, typer.Argument(help="A run's root or an iteration folder.")],
    output_dir: OutputDir,
    **given: Any,
) -> None:
    """Copy the weights of a checkpoint: without optimizer, scheduler and random number states."""
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
        lambda done: _print_stripped(done, given["dtype"]),
    )


def _stripped_json(done: ConversionReport, dtype: str | None) -> dict[str, object]:
    return {
        "schema_version": 1,
        "source": done.source,
        **done.edit_json(),
        "masters": done.masters.as_json(),
        "removed": done.edits.removed,
        "dtype": dtype,
        "cast": done.edits.cast,
        "notes": done.notes,
        "rounded_elements": 0 if done.written is None else done.written.rounded_elements,
    }


def _print_stripped(done: ConversionReport, dtype: str | None) -> None:
    edits = done.edits
    if edits.removed or not done.notes:
        render.tell(
            f"left out {len(edits.removed):,} keys and entries of optimizer, scheduler and random number states"
        )
    if edits.cast:
        rounded = (
            "" if done.written is None else f", which rounded {done.written.rounded_elements:,} elements"
        )
        render.tell(f"cast {len(edits.cast):,} tensors to {dtype}{rounded}")
    print_rewritten(done)
    for note in done.notes:
        render.tell(f"note: {render.escape(note)}")


def average(
    input_dirs: Annotated[
        list[str], typer.Argument(help="Two or more checkpoints of one model, all of one kind.")
    ],
    output_dir: Annotated[str, typer.Argument(help="Like the last: a root for a root, else one folder.")],
    **given: Any,
) -> None:
    """Weighted mean of checkpoints: of masters where there are any, else of weights; all else is the last's."""
    from ckpt_tools.commands.edit.average import AverageOptions, average_checkpoints

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


def _print_averaged(done: Averaged) -> None:
    for share, source in zip(done.weights, done.sources, strict=True):
        render.tell(render.escape(f"{share:.6g} of {source}"))
    if done.given is not None and abs(fsum(done.given) - 1) > _ROUNDED:
        shares = ", ".join(f"{share:.6g}" for share in done.given)
        render.tell(f"--weights {shares} were divided by their sum, {fsum(done.given):.6g}")
    render.tell(
        f"averaged {len(done.averaged):,} tensors; {len(done.rounded):,} weights are their masters' mean, rounded"
    )
    render.tell(f"masters of the last source: {masters_text(done.report.masters)}")
    render.tell_first([f"not averaged, taken from the last: {key}" for key in done.kept], _SHOWN)
    print_rewritten(done.report)


def repair(
    input_dir: Annotated[str, typer.Argument(help="A run's root or an iteration folder; it stays as it is.")],
    output_dir: OutputDir,
    **given: Any,
) -> None:
    """Correct keys that an upstream program got wrong in fsdp_dtensor, where the checkpoint proves what is right.

    fp32 masters next to the weights, group fields under wrong names, layers under the numbers of a pipeline stage.
    No weight and no master is changed. Exit code 1 when no key is to be corrected; then no output is made.
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
    }


def _print_repaired(done: Repaired) -> None:
    for change in done.changes:
        issue = f" ({change.issue})" if change.issue else ""
        render.tell(f"{change.cause}{issue}: {len(change.keys):,} entries")
        render.tell_first(change.keys, 3, "  ")
        render.tell(f"  proof: {change.proof}")
    if done.report is None:
        render.tell(
            f"{render.escape(done.source)}: repair knows no fault of these keys. Nothing was written. Values were "
            "not read: `verify --content` checks them"
        )
    else:
        print_rewritten(done.report)


def copy(
    input_dir: Annotated[str, typer.Argument(help="A run's root or one checkpoint: a folder or a URL.")],
    output_dir: Annotated[str, typer.Argument(help="A root for a root, else one folder; a folder or a URL.")],
    **given: Any,
) -> None:
    """Copy checkpoints between folders and object stores: every payload proven, all or nothing, resumable."""
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.cli.reports import say_unfinished
    from ckpt_tools.commands.edit.copy import CopyOptions, copy_checkpoint
    from ckpt_tools.commands.job.iterations import iteration_name

    of_all = given["iteration"] == "all"
    options = fill(
        CopyOptions, given, iteration=None if of_all else given["iteration"], every_iteration=of_all
    )
    with progress_bar(given["quiet"]) as progress:
        done = copy_checkpoint(input_dir, output_dir, options, progress)
    print(render.json_text(done.as_json())) if given["as_json"] else _print_copies(done)
    for iteration in done.not_finished:
        say_unfinished(iteration)
    for number, error in done.failed:
        render.complain(f"error: {iteration_name(number)} was not copied: {error}")
    raise typer.Exit(max((error.exit_code for _, error in done.failed), default=0))


def _print_copies(done: CopyReport) -> None:
    for one in done.copied:
        _print_copied(one)
    if done.already_there:
        render.tell(f"already there: {', '.join(map(str, done.already_there))}")


def _print_copied(one: Copied) -> None:
    written = one.written
    done = "would copy" if written is None else "compared" if written.was_there else "copied"
    render.tell(render.escape(f"{done} {one.source} -> {one.output}"))
    size = f"  {one.files:,} files, {human_bytes(one.nbytes)}"
    if written is None:
        render.tell(size)
    else:
        render.tell(
            f"{size} in {written.seconds:.2f} s"
            f"{', all of it there already: nothing was copied' if written.was_there else ''}"
            f"{', read back and compared' if one.read_back else ''}"
        )
        if written.replaced:
            render.tell(f"  replaced {written.replaced}")
        if written.tracker:
            render.tell(f"  {written.tracker}")
        if written.check_source == "none":
            render.tell(
                "  no payload was compared with the checksum that its writer stored (--check-source none)"
            )
        else:
            without = f"; {one.without_checksum:,} carry none" if one.without_checksum else ""
            render.tell(f"  {one.proven:,} payloads have the checksum that their writer stored{without}")
    if one.left_out:
        listed = ", ".join(map(render.escape, one.left_out[:5]))
        more = f", and {len(one.left_out) - 5:,} more" if len(one.left_out) > 5 else ""
        render.tell(f"  not copied, in inner folders or not a file: {listed}{more}")


def merge_adapter(
    input_dirs: Annotated[
        list[str], typer.Argument(help="Base and adapter; or one checkpoint that holds both (wrapped).")
    ],
    output_dir: Annotated[str, typer.Argument(help="Like the base: a root for a root, else one folder.")],
    **given: Any,
) -> None:
    """Merge a low-rank adapter (LoRA) into its base: W + alpha / rank * B A, rounded once.

    A Megatron adapter (Megatron-Bridge, NeMo 2) goes into a torch_dist or fsdp_dtensor checkpoint, into the fp32
    masters where there are any. The output has weights only, in the format of the base. DoRA and other variants are
    refused by name. import-hf --adapter merges a PEFT directory.
    """
    from ckpt_tools.commands.adapters.merge_adapter import MergeOptions
    from ckpt_tools.commands.adapters.merge_adapter import merge_adapter as merge
    from ckpt_tools.commands.job.report import ConversionReport
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
        ConversionReport.as_json,
        print_report,
    )


_EDITING = READING | RUNNING
COMMANDS = {
    "modify-state-dict": with_options(modify_state_dict, _EDITING, _MODIFY),
    "slice": with_options(slice_layers, _EDITING, _SLICE),
    "strip": with_options(
        strip, _EDITING | FRESH_OPTIMIZER | {"resume", "workers", "threads", "check_masters"}, _STRIP
    ),
    "average": with_options(average, _EDITING, _AVERAGE),
    "repair": with_options(repair, _EDITING),
    "copy": with_options(
        copy,
        READING | REWRITING | {"resume", "dry_run", "workers", "threads", "memory_bytes", "fsync", "direct"},
        _COPY,
    ),
    "merge-adapter": with_options(merge_adapter, RUNNING | READING | {"ignore_keys", "alpha"}),
}
