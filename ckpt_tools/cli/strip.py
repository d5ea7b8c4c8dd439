"""`strip`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import render
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options import option
from ckpt_tools.cli.reports import source_checksums, written_json
from ckpt_tools.cli.signature import fill, with_options
from ckpt_tools.cli.table import READING, REWRITING, OutputDir

if TYPE_CHECKING:
    from ckpt_tools.commands.strip import Stripped


_OWN = {
    "dtype": option(
        str, "--dtype", help="Element type of the weights, which fsdp_dtensor stores as fp32 masters."
    )
}


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("strip"))(with_options(strip, READING | REWRITING | {"resume", "threads"}, _OWN))


def strip(
    input_dir: Annotated[str, typer.Argument(help="A run's root or an iteration folder.")],
    output_dir: OutputDir,
    **given: Any,
) -> None:
    """Copy the weights of a checkpoint: without optimizer, scheduler and random number states."""
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.rewrite import EditOptions
    from ckpt_tools.commands.strip import strip_checkpoint

    options = fill(EditOptions, given)
    with progress_bar(given["quiet"]) as progress:
        done = strip_checkpoint(input_dir, output_dir, given["dtype"], options, progress)
    print(render.json_text(_as_json(done))) if given["as_json"] else _print(done)


def _as_json(done: Stripped) -> dict[str, object]:
    written = done.written
    return {
        "schema_version": 1,
        "source": done.source,
        "output": done.output,
        "tensor_count": done.tensors,
        "object_count": done.objects,
        "removed": done.removed,
        "dtype": done.dtype,
        "cast": done.cast,
        "rounded_elements": written.rounded_elements,
        **written_json(written),
    }


def _print(done: Stripped) -> None:
    written = done.written
    print(f"left out {len(done.removed):,} keys and entries of optimizer, scheduler and random number states")
    if done.cast:
        print(
            f"cast {len(done.cast):,} tensors to {done.dtype}, which rounded {written.rounded_elements:,} elements"
        )
    print(
        f"wrote {done.tensors:,} tensors and {done.objects:,} objects, "
        f"{render.human_bytes(written.bytes_written)} in {written.seconds:.2f} s, to {render.escape(done.output)}"
    )
    print(f"source checksums: {source_checksums(written)}")
