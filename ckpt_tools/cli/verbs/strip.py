"""`strip`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli.iterations import edit
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options.row import option
from ckpt_tools.cli.options.signature import fill, with_options
from ckpt_tools.cli.options.table import FRESH, FRESH_OPTIMIZER, ITERATIONS, READING, RUNNING, OutputDir
from ckpt_tools.cli.render import render
from ckpt_tools.cli.render.reports import print_rewritten

if TYPE_CHECKING:
    from ckpt_tools.commands.job.report import ConversionReport


_OWN = {
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


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("strip"))(
        with_options(
            strip,
            READING | RUNNING | FRESH_OPTIMIZER | {"check_masters"},
            _OWN,
        )
    )


def strip(
    input_dir: Annotated[str, typer.Argument(help="A run's root or an iteration folder.")],
    output_dir: OutputDir,
    **given: Any,
) -> None:
    """Copy the weights of a checkpoint: without optimizer, scheduler and random number states."""
    from ckpt_tools.commands.edit.strip import strip_checkpoint
    from ckpt_tools.megatron.fsdp_dtensor.fresh_optimizer import check_fresh
    from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions

    settings = fill(TargetOptions, {name: given[name] for name in FRESH_OPTIMIZER})
    check_fresh(replace(settings, weights_only=True))
    fresh = settings if settings.fresh_optimizer else None
    edit(
        input_dir,
        output_dir,
        given,
        lambda options, progress: strip_checkpoint(
            input_dir, output_dir, given["dtype"], options, progress, fresh, given["check_masters"]
        ),
        lambda done: _as_json(done, given["dtype"]),
        lambda done: _print(done, given["dtype"]),
    )


def _as_json(done: ConversionReport, dtype: str | None) -> dict[str, object]:
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


def _print(done: ConversionReport, dtype: str | None) -> None:
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
