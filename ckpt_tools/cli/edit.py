"""`modify-state-dict`, `slice` and `print-tensor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tools.cli import options as o
from ckpt_tools.cli import render
from ckpt_tools.cli.inspect import EnableMsc, TrustPickle
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.reports import source_checksums, written_json
from ckpt_tools.cli.verify import Checkpoint, Iteration

if TYPE_CHECKING:
    from ckpt_tools.commands.rewrite import Edited

_SHOWN = 20
InputDir = Annotated[str, typer.Argument(help="A run's root, an iteration folder, or any torch DCP folder.")]
OutputDir = Annotated[str, typer.Argument(help="Like to like: a root for a root, else one folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command(**page("modify-state-dict"))(modify_state_dict)
    app.command(**page("slice"))(slice_layers)
    app.command(**page("print-tensor"))(print_tensor)


def modify_state_dict(
    input_dir: InputDir,
    output_dir: OutputDir,
    op: Annotated[
        list[str] | None,
        typer.Option("--op", help='"remove REGEX" or "rename REGEX REPLACEMENT"; repeatable.'),
    ] = None,
    iteration: Iteration = None,
    check_source: o.CheckSource = o.SourceCheck.ALL,
    overwrite: o.Overwrite = False,
    as_json: AsJson = False,
    quiet: o.Quiet = False,
    enable_msc: EnableMsc = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """Copy a checkpoint without some keys or with other names. Removals first; the first rename that fits wins."""
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.modify import modify_state_dict as modify
    from ckpt_tools.commands.rewrite import EditOptions
    from ckpt_tools.execute.run import WriteOptions

    options = EditOptions(iteration, trust_pickle, overwrite, WriteOptions(check_source=check_source.value))
    with progress_bar(quiet) as progress:
        edited = modify(input_dir, output_dir, op or (), options, progress)
    _print_edited(edited, as_json)


def slice_layers(
    input_dir: InputDir,
    output_dir: OutputDir,
    layers: Annotated[str, typer.Option("--layers", help="Range of layers to keep, e.g. 0:2.")],
    block: Annotated[
        str | None, typer.Option("--block", help="Module that holds the layers. Default: decoder.layers.")
    ] = None,
    iteration: Iteration = None,
    check_source: o.CheckSource = o.SourceCheck.ALL,
    overwrite: o.Overwrite = False,
    as_json: AsJson = False,
    quiet: o.Quiet = False,
    trust_pickle: TrustPickle = False,
    enable_msc: EnableMsc = False,
) -> None:
    """Copy a few layers of a checkpoint as a small, whole checkpoint, for tests and CI."""
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.rewrite import EditOptions
    from ckpt_tools.commands.slice import slice_layers as cut
    from ckpt_tools.execute.run import WriteOptions

    options = EditOptions(iteration, trust_pickle, overwrite, WriteOptions(check_source=check_source.value))
    with progress_bar(quiet) as progress:
        edited = cut(input_dir, output_dir, layers, block, options, progress)
    _print_edited(edited, as_json)


def print_tensor(
    checkpoint: Checkpoint,
    key: Annotated[str, typer.Argument(help="A stored key; `inspect` lists them.")],
    part: Annotated[
        str | None, typer.Option("--slice", help="A part, as numpy writes it: '0:2, :, 3'.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Minimum, maximum, mean, NaN and Inf counts.")
    ] = False,
    iteration: Iteration = None,
    as_json: AsJson = False,
    trust_pickle: TrustPickle = False,
    enable_msc: EnableMsc = False,
) -> None:
    """Print a stored tensor or object; only what is shown is read."""
    from ckpt_tools.commands.print_tensor import print_tensor as read

    printed = read(checkpoint, key, part, stats, iteration, trust_pickle)
    if as_json:
        print(render.json_text(printed.as_json()))
        return
    if printed.dtype is None:
        print(render.json_text(printed.values))
        return
    print(
        f"{render.escape(printed.key)}: {printed.dtype} {list(printed.shape)}, {len(printed.chunks)} chunks"
    )
    for name, value in printed.statistics.items():
        print(f"  {name:<9}{value}")
    if printed.box is not None and printed.box.size != printed.shape:
        print(f"  shown: {printed.box}")
    print(render.escape_lines(render_values(printed.values)))


def render_values(values: object) -> str:
    """Nested lists of numbers, a row a line."""
    if isinstance(values, list) and values and isinstance(values[0], list):
        return "[" + ",\n".join(render_values(row) for row in values) + "]"
    return str(values)


def _print_edited(edited: Edited, as_json: bool) -> None:
    written = edited.written
    if as_json:
        print(render.json_text({
            "schema_version": 1, "source": edited.source, "output": edited.output, "tensor_count": edited.tensors,
            "object_count": edited.objects, "removed": edited.removed, "renamed": edited.renamed,
            "left_out": edited.left_out, **written_json(written),
        }))  # fmt: skip
        return
    lines = [f"removed {key}" for key in edited.removed]
    lines += [f"renamed {key} -> {name}" for key, name in edited.renamed.items()]
    lines += [f"left out {line}" for line in edited.left_out]
    for line in lines[:_SHOWN]:
        print(render.escape(line))
    if len(lines) > _SHOWN:
        print(f"... and {len(lines) - _SHOWN:,} more (--json lists all)")
    print(
        f"wrote {edited.tensors:,} tensors and {edited.objects:,} objects, "
        f"{render.human_bytes(written.bytes_written)} in {written.seconds:.2f} s, to {render.escape(edited.output)}"
    )
    print(f"source checksums: {source_checksums(written)}")
