"""`copy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options.given_values import iteration_number
from ckpt_tools.cli.options.row import flag
from ckpt_tools.cli.options.signature import fill, with_options
from ckpt_tools.cli.options.table import ITERATIONS, READING, REWRITING
from ckpt_tools.cli.render import render
from ckpt_tools.human import human_bytes

if TYPE_CHECKING:
    from ckpt_tools.commands.edit.copy import Copied, CopyReport

_SHOWN = 5
_OWN = {
    "read_back": flag("--read-back", help="Read the copy once more and compare it with the source."),
    "iteration": ITERATIONS,
}


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    names = READING | REWRITING | {"resume", "workers", "threads", "memory_bytes", "fsync", "direct"}
    app.command(**page("copy"))(with_options(copy, names, _OWN))


def copy(
    source: Annotated[str, typer.Argument(help="A run's root or one checkpoint: a folder or a URL.")],
    output: Annotated[str, typer.Argument(help="A root for a root, else one folder; a folder or a URL.")],
    **given: Any,
) -> None:
    """Copy checkpoints between folders and object stores: every payload proven, all or nothing, resumable."""
    from ckpt_tools.cli.render.progress import progress_bar
    from ckpt_tools.cli.render.reports import say_unfinished
    from ckpt_tools.commands.edit.copy import CopyOptions, copy_checkpoint
    from ckpt_tools.commands.job.iterations import iteration_name

    iteration = given["iteration"]
    options = fill(
        CopyOptions,
        given,
        iteration=None if iteration == "all" else iteration_number(iteration),
        every_iteration=iteration == "all",
    )
    with progress_bar(given["quiet"]) as progress:
        done = copy_checkpoint(source, output, options, progress)
    render.print_report(done.as_json, given["as_json"], lambda: _print(done))
    for iteration in done.not_finished:
        say_unfinished(iteration)
    for number, error in done.failed:
        render.complain(f"error: {iteration_name(number)} was not copied: {error}")
    raise typer.Exit(max((error.exit_code for _, error in done.failed), default=0))


def _print(done: CopyReport) -> None:
    for one in done.copied:
        _print_copied(one)
    if done.already_there:
        render.tell(f"already there: {', '.join(map(str, done.already_there))}")


def _print_copied(one: Copied) -> None:
    seconds = one.written.seconds
    was_there = one.written.was_there
    render.tell(render.escape(f"{'compared' if was_there else 'copied'} {one.source} -> {one.output}"))
    render.tell(
        f"  {one.files:,} files, {human_bytes(one.nbytes)} in {seconds:.2f} s"
        f"{', all of it there already: nothing was copied' if was_there else ''}"
        f"{', read back and compared' if one.read_back else ''}"
    )
    if one.written.replaced:
        render.tell(f"  replaced {one.written.replaced}")
    if one.written.check_source == "none":
        render.tell(
            "  no payload was compared with the checksum that its writer stored (--check-source none)"
        )
    else:
        without = f"; {one.without_checksum:,} carry none" if one.without_checksum else ""
        render.tell(f"  {one.proven:,} payloads have the checksum that their writer stored{without}")
    if one.left_out:
        listed = ", ".join(map(render.escape, one.left_out[:_SHOWN]))
        more = f", and {len(one.left_out) - _SHOWN:,} more" if len(one.left_out) > _SHOWN else ""
        render.tell(f"  not copied, in inner folders or not a file: {listed}{more}")
