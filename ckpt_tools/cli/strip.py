"""`strip`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tools.cli import options as o
from ckpt_tools.cli import render
from ckpt_tools.cli.edit import AsJson, OutputDir
from ckpt_tools.cli.inspect import EnableMsc, TrustPickle
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.reports import print_rewritten
from ckpt_tools.cli.verify import Iteration

if TYPE_CHECKING:
    from ckpt_tools.commands.strip import Stripped


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("strip"))(strip)


def strip(
    input_dir: Annotated[str, typer.Argument(help="A run's root or an iteration folder.")],
    output_dir: OutputDir,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="Element type of the weights, which fsdp_dtensor stores as fp32 masters."
        ),
    ] = None,
    iteration: Iteration = None,
    check_source: o.CheckSource = o.SourceCheck.ALL,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    threads: o.Threads = 2,
    as_json: AsJson = False,
    quiet: o.Quiet = False,
    trust_pickle: TrustPickle = False,
    enable_msc: EnableMsc = False,
) -> None:
    """Copy the weights of a checkpoint: without optimizer, scheduler and random number states."""
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.rewrite import EditOptions
    from ckpt_tools.commands.strip import strip_checkpoint
    from ckpt_tools.execute.run import WriteOptions

    write = WriteOptions(threads, check_source=check_source.value)
    options = EditOptions(iteration, trust_pickle, overwrite, write, resume)
    with progress_bar(quiet) as progress:
        done = strip_checkpoint(input_dir, output_dir, dtype, options, progress)
    print(render.json_text(_as_json(done))) if as_json else _print(done)


def _as_json(done: Stripped) -> dict[str, object]:
    return {
        "schema_version": 1,
        "source": done.source,
        **done.as_json(),
        "removed": done.removed,
        "dtype": done.dtype,
        "cast": done.cast,
        "rounded_elements": done.written.rounded_elements,
    }


def _print(done: Stripped) -> None:
    print(f"left out {len(done.removed):,} keys and entries of optimizer, scheduler and random number states")
    if done.cast:
        print(
            f"cast {len(done.cast):,} tensors to {done.dtype}, which rounded "
            f"{done.written.rounded_elements:,} elements"
        )
    print_rewritten(done)
