"""`strip`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli.iterations import edit
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options.row import option
from ckpt_tools.cli.options.signature import fill, with_options
from ckpt_tools.cli.options.table import FRESH, FRESH_OPTIMIZER, ITERATIONS, READING, REWRITING, OutputDir
from ckpt_tools.cli.render import render
from ckpt_tools.cli.render.reports import print_rewritten

if TYPE_CHECKING:
    from ckpt_tools.commands.edit.strip import Stripped


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
            READING | REWRITING | FRESH_OPTIMIZER | {"resume", "workers", "threads", "check_masters"},
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
        _as_json,
        _print,
    )


def _as_json(done: Stripped) -> dict[str, object]:
    return {
        "schema_version": 1,
        "source": done.source,
        **done.as_json(),
        "removed": done.removed,
        "dtype": done.dtype,
        "cast": done.cast,
        "notes": done.notes,
        "rounded_elements": done.written.rounded_elements,
    }


def _print(done: Stripped) -> None:
    if done.removed or not done.notes:
        render.tell(
            f"left out {len(done.removed):,} keys and entries of optimizer, scheduler and random number states"
        )
    if done.cast:
        render.tell(
            f"cast {len(done.cast):,} tensors to {done.dtype}, which rounded "
            f"{done.written.rounded_elements:,} elements"
        )
    print_rewritten(done)
    for note in done.notes:
        render.tell(f"note: {render.escape(note)}")
