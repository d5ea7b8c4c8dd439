"""`copy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tools.cli import options as o
from ckpt_tools.cli import render
from ckpt_tools.cli.edit import AsJson
from ckpt_tools.cli.inspect import EnableMsc, TrustPickle
from ckpt_tools.cli.manual import page

if TYPE_CHECKING:
    from ckpt_tools.commands.copy import Copied, CopyReport

_SHOWN = 5


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("copy"))(copy)


def copy(
    source: Annotated[str, typer.Argument(help="A run's root or one checkpoint: a folder or a URL.")],
    output: Annotated[str, typer.Argument(help="A root for a root, else one folder; a folder or a URL.")],
    iteration: o.Iteration = None,
    read_back: Annotated[
        bool, typer.Option("--read-back", help="Read the copy once more and compare it with the source.")
    ] = False,
    check_source: o.CheckSource = o.SourceCheck.ALL,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    threads: o.Threads = 2,
    max_memory: o.MaxMemory = "96MiB",
    fsync: o.Fsync = False,
    direct: o.Direct = False,
    as_json: AsJson = False,
    quiet: o.Quiet = False,
    trust_pickle: TrustPickle = False,
    enable_msc: EnableMsc = False,
) -> None:
    """Copy checkpoints between folders and object stores: every payload proven, all or nothing, resumable."""
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.copy import CopyOptions, copy_checkpoint
    from ckpt_tools.execute.run import WriteOptions

    write = WriteOptions(threads, o.parse_bytes(max_memory), fsync, direct, check_source.value)
    options = CopyOptions(
        iteration=None if iteration == "all" else o.iteration_number(iteration),
        every_iteration=iteration == "all",
        read_back=read_back,
        trust_pickle=trust_pickle,
        overwrite=overwrite,
        resume=resume,
        write=write,
    )
    with progress_bar(quiet) as progress:
        done = copy_checkpoint(source, output, options, progress)
    print(render.json_text(done.as_json())) if as_json else _print(done)
    raise typer.Exit(max((error.exit_code for _, error in done.failed), default=0))


def _print(done: CopyReport) -> None:
    for one in done.copied:
        _print_copied(one)
    if done.already_there:
        print(f"already there: {', '.join(map(str, done.already_there))}")
    for number, error in done.failed:
        print(render.escape_lines(f"iteration {number} was not copied: {error}"))


def _print_copied(one: Copied) -> None:
    seconds = one.written.seconds
    print(render.escape(f"copied {one.source} -> {one.output}"))
    print(
        f"  {one.files:,} files, {render.human_bytes(one.nbytes)} in {seconds:.2f} s"
        f"{', read back and compared' if one.read_back else ''}"
    )
    print(f"  {one.proven:,} payloads have the checksum that their writer stored", end="")
    print(f"; {one.without_checksum:,} carry none" if one.without_checksum else "")
    if one.left_out:
        listed = ", ".join(map(render.escape, one.left_out[:_SHOWN]))
        more = f", and {len(one.left_out) - _SHOWN:,} more" if len(one.left_out) > _SHOWN else ""
        print(f"  not copied, in inner folders: {listed}{more}")
