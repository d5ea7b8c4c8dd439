"""`modify-state-dict`, `slice` and `print-tensor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli.iterations import edit
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options import given_values as v
from ckpt_tools.cli.options.row import flag, option
from ckpt_tools.cli.options.signature import with_options
from ckpt_tools.cli.options.table import ITERATIONS, READING, RUNNING, Checkpoint, OutputDir
from ckpt_tools.cli.render import render
from ckpt_tools.cli.render.reports import print_rewritten
from ckpt_tools.human import counted

if TYPE_CHECKING:
    from ckpt_tools.commands.job.report import ConversionReport

_SHOWN = 20
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
_PRINT = {
    "part": option(str, "--slice", help="A part, as numpy writes it: '0:2, :, 3'."),
    "stats": flag("--stats", help="Minimum, maximum, mean, NaN and Inf counts."),
}


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command(**page("modify-state-dict"))(with_options(modify_state_dict, READING | RUNNING, _MODIFY))
    app.command(**page("slice"))(with_options(slice_layers, READING | RUNNING, _SLICE))
    app.command(**page("print-tensor"))(with_options(print_tensor, READING | {"as_json"}, _PRINT))


def modify_state_dict(input_dir: Checkpoint, output_dir: OutputDir, **given: Any) -> None:
    """Copy a checkpoint without some keys or with other names. Removals first; the first rename that fits wins."""
    from ckpt_tools.commands.edit.modify import modify_state_dict as modify

    edit(
        input_dir,
        output_dir,
        given,
        lambda options, progress: modify(input_dir, output_dir, given["op"], options, progress),
        _as_json,
        _print,
    )


def slice_layers(input_dir: Checkpoint, output_dir: OutputDir, **given: Any) -> None:
    """Copy a few layers of a checkpoint as a small, whole checkpoint, for tests and CI."""
    from ckpt_tools.commands.edit.slice import slice_layers as cut

    layers, block = given["layers"], given["block"]
    edit(
        input_dir,
        output_dir,
        given,
        lambda options, progress: cut(input_dir, output_dir, layers, block, options, progress),
        _as_json,
        _print,
    )


def print_tensor(
    checkpoint: Checkpoint,
    key: Annotated[str, typer.Argument(help="A stored key; `inspect` lists them.")],
    **given: Any,
) -> None:
    """Print a stored tensor or object; only what is shown is read.

    Values are taken as they are stored: checksums are not compared (`verify --content` does that).
    """
    from ckpt_tools.commands.look.print_tensor import print_tensor as read

    printed = read(checkpoint, key, given["part"], given["stats"], given["iteration"], given["trust_pickle"])
    if given["as_json"]:
        print(render.json_text(printed.as_json()))
        return
    if printed.dtype is None:
        render.tell_whole(render.json_text(printed.values))
        return
    chunks = counted(len(printed.chunks), "chunk")
    render.tell(f"{render.escape(printed.key)}: {printed.dtype} {list(printed.shape)}, {chunks}")
    for name, value in printed.statistics.items():
        render.tell(f"  {name:<9}{value}")
    if printed.box is not None and printed.box.size != printed.shape:
        render.tell(f"  shown: {printed.box}")
    render.tell_whole(render.escape_lines(render_values(printed.values)))


def render_values(values: object) -> str:
    """Nested lists of numbers, a row a line."""
    if isinstance(values, list) and values and isinstance(values[0], list):
        return "[" + ",\n".join(render_values(row) for row in values) + "]"
    return str(values)


def _as_json(done: ConversionReport) -> dict[str, object]:
    return {
        "schema_version": 1, "source": done.source, **done.edit_json(),
        "removed": done.edits.removed, "renamed": done.edits.renamed,
    }  # fmt: skip


def _print(done: ConversionReport) -> None:
    lines = [f"removed {key}" for key in done.edits.removed]
    lines += [f"renamed {key} -> {name}" for key, name in done.edits.renamed.items()]
    render.tell_first(lines, _SHOWN)
    print_rewritten(done)
