"""`inspect` and `print-torch-dcp-in-json`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options import given_values as v
from ckpt_tools.cli.options.row import flag, option
from ckpt_tools.cli.options.signature import with_options
from ckpt_tools.cli.options.table import OPENING, READING, Checkpoint
from ckpt_tools.cli.render import render
from ckpt_tools.human import human_bytes
from ckpt_tools.model.choices import InspectBy

if TYPE_CHECKING:
    from ckpt_tools.commands.look.inspect import Inspection

_INSPECT = {
    "keys": option(list[str], "--keys", read=v.globs, help="List only keys that match this glob."),
    "by": option(
        list[InspectBy],
        "--by",
        help="Tensors, elements and bytes by this instead of the listing, repeatable.",
    ),
    "tree": flag("--tree", help="List keys as a tree."),
    "html": option(
        Path, "--html", callback=v.in_a_folder, help="Write a page: the tree, a search, chunks over ranks."
    ),
    "list_group_meta": flag(
        "--not-ignore-param-to-group-meta",
        help="List the param_to_group_meta objects, not only their number.",
    ),
}
_PRINT = {
    "values": flag("--values", help="Add the values of small objects and scalars."),
    "output": option(
        Path, "-o", "--output", callback=v.in_a_folder, help="Write there instead of to stdout."
    ),
    "no_write": flag(
        "--no-write", help="Do not write param_to_param_group_map.json into a map dump's folder."
    ),
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command(**page("inspect"))(with_options(inspect, READING | {"as_json"}, _INSPECT))
    app.command(**page("print-torch-dcp-in-json"))(
        with_options(print_torch_dcp_in_json, OPENING | {"trust_pickle"}, _PRINT)
    )


def inspect(checkpoint: Checkpoint, **given: Any) -> None:
    """Show what a checkpoint is and what it holds, from its metadata alone."""
    from ckpt_tools.commands.look.inspect import inspect_checkpoint

    keys = given["keys"]
    found = inspect_checkpoint(
        checkpoint, given["iteration"], keys, given["list_group_meta"], given["trust_pickle"]
    )
    if keys:
        render.say_unmatched(keys, (*found.catalog.tensors, *found.catalog.objects))
    html = given["html"]
    if html is not None:
        from ckpt_tools.commands.look.pages import inspection_html

        render.write_text(html, inspection_html(found), checkpoint)
        if str(html) == "-":
            return
    if given["as_json"]:
        summary = found.summary() | ({"by": _json_sums(found, given["by"])} if given["by"] else {})
        sys.stdout.writelines(render.json_lines(summary, _json_lists(found)))
        return
    _print_summary(found)
    for axis in given["by"] or ():
        rows = [
            (name or "-", t.tensors, t.elements, human_bytes(t.nbytes)) for name, t in found.by(axis).items()
        ]
        render.print_table((axis, "tensors", "elements", "bytes"), rows)
    if given["by"]:
        return
    if given["tree"]:
        render.print_tree(found.location.path, _leaves(found))
    else:
        _print_listing(found)


def print_torch_dcp_in_json(
    torch_dcp_dir: Annotated[
        str, typer.Argument(help="A folder with a .metadata: an iteration, not a run's root.")
    ],
    **given: Any,
) -> None:
    """Print the metadata of a torch distributed checkpoint as JSON; export a parameter group map dump."""
    from ckpt_tools.commands.look.dcp_json import dcp_as_json, write_group_map

    trust_pickle = given["trust_pickle"]
    text = render.json_text(dcp_as_json(torch_dcp_dir, given["values"], trust_pickle)) + "\n"
    render.write_text(given["output"] or Path("-"), text, torch_dcp_dir)
    written = None if given["no_write"] else write_group_map(torch_dcp_dir, trust_pickle)
    if written:
        render.say(f"wrote {render.escape(written)}")


def _json_sums(found: Inspection, axes: Sequence[InspectBy]) -> dict[str, list[dict[str, object]]]:
    return {
        axis: [
            {axis: name or None, "tensors": t.tensors, "elements": t.elements, "bytes": t.nbytes}
            for name, t in found.by(axis).items()
        ]
        for axis in axes
    }


def _json_lists(found: Inspection) -> dict[str, Iterator[object]]:
    return {
        "tensors": (
            {
                "key": t.key,
                "dtype": t.dtype,
                "shape": t.shape,
                "chunks": t.chunks,
                "bytes": t.nbytes,
                "role": t.role,
            }
            for t in found.tensors()
        ),
        "objects": ({"key": key, "bytes": nbytes} for key, nbytes in found.objects()),
    }


def _print_summary(found: Inspection) -> None:
    where = found.location
    facts = {
        "path": where.path,
        "format": where.kind,
        "writer": found.writer,
        "iteration": "release" if where.is_release else found.iteration,
        "common state": found.common_source,
        "mcore_data": "no" if found.catalog.original_shapes is None else "yes",
        "optimizer layout": found.layout,
        "parameters": f"{found.parameters:,}",
        **found.parallel_sizes,
        **found.arguments,
    }
    render.print_table(
        ("checkpoint", ""),
        [(name, str(value)) for name, value in facts.items() if value is not None],
    )
    render.print_table(
        ("role", "dtype", "tensors", "elements", "bytes"),
        [(*kind, t.tensors, t.elements, human_bytes(t.nbytes)) for kind, t in found.totals.items()],
    )


def _print_listing(found: Inspection) -> None:
    render.print_table(
        ("tensor", "dtype", "shape", "chunks", "bytes"),
        [(t.key, t.dtype, list(t.shape), t.chunks, human_bytes(t.nbytes)) for t in found.tensors()],
    )
    objects = list(found.objects())
    if objects or not found.patterns:
        render.print_table(("object", "bytes"), objects)
    if found.group_meta and not found.list_group_meta:
        render.tell(
            f"and {found.group_meta:,} param_to_group_meta objects (--not-ignore-param-to-group-meta lists them)"
        )


def _leaves(found: Inspection) -> Iterator[tuple[str, str]]:
    for tensor in found.tensors():
        yield tensor.key, f"{tensor.dtype} {list(tensor.shape)}"
    for key, nbytes in found.objects():
        yield key, f"object, {nbytes:,} bytes"
