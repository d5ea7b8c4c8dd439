"""`average`."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli.iterations import finish
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options import given_values as v
from ckpt_tools.cli.options.row import option
from ckpt_tools.cli.options.signature import fill, with_options
from ckpt_tools.cli.options.table import READING, RUNNING
from ckpt_tools.cli.render import render
from ckpt_tools.cli.render.reports import masters_text, print_rewritten

if TYPE_CHECKING:
    from ckpt_tools.commands.edit.average import Averaged

_SHOWN = 20
_ROUNDED = 1e-9  # by which shares like 0.1 miss 1


_OWN = {
    "weights": option(
        str, "--weights", read=v.shares,
        help="Shares in order, e.g. 0.5,0.3,0.2; they are divided by their sum: 2,1,1 means 0.5,0.25,0.25. "
             "Default: equal."

    ),
    "ema": option(
        float, "--ema", help="Exponential moving average in order, with this decay, e.g. 0.9."
    ),
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("average"))(with_options(average, READING | RUNNING, _OWN))


def average(
    input_dirs: Annotated[
        list[str], typer.Argument(help="Two or more checkpoints of one model, all of one kind.")
    ],
    output_dir: Annotated[str, typer.Argument(help="Like the last: a root for a root, else one folder.")],
    **given: Any,
) -> None:
    """Weighted mean of checkpoints: of masters where there are any, else of weights; all else is the last's."""
    from ckpt_tools.cli.render.progress import progress_bar
    from ckpt_tools.commands.edit.average import AverageOptions, average_checkpoints

    with progress_bar(given["quiet"]) as progress:
        done = average_checkpoints(input_dirs, output_dir, fill(AverageOptions, given), progress)
    finish(done, done.sources[-1], given, _as_json, _print)


def _as_json(done: Averaged) -> dict[str, object]:
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


def _print(done: Averaged) -> None:
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
