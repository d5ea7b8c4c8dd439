"""Commands that show what is stored: `inspect`, `ls`, `print-tensor`, `print-torch-dcp-in-json`, `stats`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import options as v
from ckpt_tools.cli import render
from ckpt_tools.cli.options import flag, option
from ckpt_tools.cli.table import OPENING, READING, Checkpoint, fill, with_options
from ckpt_tools.human import counted, human_bytes
from ckpt_tools.model.choices import InspectBy, StatsBy
from ckpt_tools.plain_data import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_tools.commands.look.inspect import Inspection
    from ckpt_tools.commands.look.ls import RunListing
    from ckpt_tools.commands.look.stats import CheckpointChange, CheckpointStatistics, Measured
    from ckpt_tools.verify.content.values import Change

_INSPECT = {
    "keys": option(list[str], "--keys", read=v.globs, help="List only keys that match this glob."),
    "by": option(
        list[InspectBy],
        "--by",
        help="Instead of the listing: tensors, elements and bytes by this (repeatable).",
    ),
    "tree": flag("--tree", help="List keys as a tree."),
    "html": option(
        Path, "--html", callback=v.in_a_folder, help="Write an HTML page: tree, search, chunks of each rank."
    ),
    "list_group_meta": flag(
        "--not-ignore-param-to-group-meta",
        help="List the param_to_group_meta objects too.",
    ),
}
_FIRST = 6  # values of a summary
_DCP_JSON = {
    "values": flag("--values", help="Add the values of small objects and scalars."),
    "output": option(
        Path, "-o", "--output", callback=v.in_a_folder, help="File to write. Default: stdout."
    ),
    "no_write": flag(
        "--no-write", help="Do not write param_to_param_group_map.json into a map dump's folder."
    ),
}  # fmt: skip
_PRINT = {
    "part": option(str, "--slice", help="Print the values of a part, as numpy writes it: '0:2, :, 3'."),
    "role": option(
        str, "--role", help="Of a parameter: weight, master, exp_avg ... Default: master, else weight."
    ),
    "stats": flag("--stats", help="With --slice or --json: minimum, maximum, mean, NaN and Inf too."),
}


def inspect(checkpoint: Checkpoint, **given: Any) -> None:
    """Show what a checkpoint is and what it holds. Only metadata is read."""
    from ckpt_tools.commands.look.inspect import inspect_checkpoint

    keys = given["keys"]
    found = inspect_checkpoint(
        checkpoint, given["iteration"], keys, given["list_group_meta"], given["trust_pickle"]
    )
    if keys:
        from ckpt_tools.close_names import unmatched

        for pattern, close in unmatched(keys, (*found.catalog.tensors, *found.catalog.objects)).items():
            hint = f" Did you mean {', '.join(map(render.escape, close))}?" if close else ""
            render.say(f"note: --keys {render.escape(repr(pattern))} matches nothing.{hint}")
    html = given["html"]
    if html is not None:
        from ckpt_tools.commands.look.pages import inspection_html

        render.write_text(html, inspection_html(found), checkpoint)
        if str(html) == "-":
            return
    if given["as_json"]:
        head, names = found.summary(), {"nbytes": "bytes"}
        if given["by"]:
            head["by"] = {
                axis: [{axis: name or None, **plain(t, names)} for name, t in found.by(axis).items()]
                for axis in given["by"]
            }
        tensors = (plain(tensor, names) for tensor in found.tensors())
        objects = ({"key": key, "bytes": nbytes} for key, nbytes in found.objects())
        sys.stdout.writelines(render.json_lines(head, {"tensors": tensors, "objects": objects}))
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
        leaves = [(t.key, f"{t.dtype} {list(t.shape)}") for t in found.tensors()]
        leaves += [(key, f"object, {nbytes:,} bytes") for key, nbytes in found.objects()]
        render.print_tree(found.location.path, leaves)
    else:
        _print_listing(found)


def print_torch_dcp_in_json(
    torch_dcp_dir: Annotated[
        str, typer.Argument(help="A folder with a .metadata file: an iteration, not a run.")
    ],
    **given: Any,
) -> None:
    """Print the metadata of a PyTorch DCP folder as JSON; of a dump of parameter groups, write its map file."""
    from ckpt_tools.commands.look.dcp_json import dcp_as_json, write_group_map

    trust_pickle = given["trust_pickle"]
    text = render.json_text(dcp_as_json(torch_dcp_dir, given["values"], trust_pickle)) + "\n"
    render.write_text(given["output"] or Path("-"), text, torch_dcp_dir)
    written = None if given["no_write"] else write_group_map(torch_dcp_dir, trust_pickle)
    if written:
        render.say(f"wrote {render.escape(written)}")


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


def ls(
    run: Annotated[str, typer.Argument(help="A run, one checkpoint, or a folder of runs.")],
    **given: Any,
) -> None:
    """List the iterations of a run: complete or not, size, format, parallel sizes; or the runs in a folder.

    Only metadata is read, and the exit code is 0 for damaged ones too: `verify` checks them.
    """
    from ckpt_tools.commands.look.ls import list_run

    found = list_run(run, given["trust_pickle"])
    print(render.json_text(found.as_json())) if given["as_json"] else _print_iterations(found)


def _print_iterations(found: RunListing) -> None:
    from ckpt_tools.formats.locate.run_layouts import layouts_of

    if found.runs:
        runs = [
            (row.name, row.iterations, row.latest or "-", row.kind or "-", human_bytes(row.nbytes))
            for row in found.runs
        ]
        render.print_table(("run", "iterations", "latest", "format", "size"), runs)
        return
    rows = [
        (
            "/".join(filter(None, (row.name, row.inside))) + (" *" if row.is_latest else ""),
            row.state,
            human_bytes(row.nbytes),
            row.kind or "-",
            " ".join(f"{axis}{size}" for axis, size in (row.topology or {}).items()) or "-",
        )
        for row in found.iterations
    ]
    render.print_table(("iteration", "state", "size", "format", "topology"), rows)
    if found.latest:
        how = (
            "complete one in"
            if any(layout.loaded for layout in layouts_of(found.latest))
            else "by the tracker of"
        )
        render.tell(f"* the latest, {how} {render.escape(found.root)}")
    if found.note:
        render.tell(f"no latest: {render.escape(found.note)}")
    for row in found.iterations:
        if row.why:
            render.tell(f"{row.name}: {render.escape(row.why)}")
    if found.others:
        largest = sorted(found.others.items(), key=lambda pair: -pair[1])
        listed = ", ".join(f"{render.escape(name)} {human_bytes(n)}" for name, n in largest[:5])
        more = f", and {len(largest) - 5:,} more" if len(largest) > 5 else ""
        render.tell(f"other files: {listed}{more}")


def print_tensor(
    checkpoint: Checkpoint,
    key: Annotated[
        str, typer.Argument(help="A stored key (`inspect` lists them), or the name of a parameter.")
    ],
    **given: Any,
) -> None:
    """Print a summary of a tensor, the values of a part of it (--slice), or an object.

    Checksums are not compared: `verify --content` does that.
    """
    from ckpt_tools.commands.look.checkpoint import print_tensor as read

    is_summary = given["part"] is None and not given["as_json"]
    printed = read(
        checkpoint,
        key,
        given["part"],
        given["stats"] or is_summary,
        given["iteration"],
        given["trust_pickle"],
        given["role"],
    )
    if given["as_json"]:
        print(render.json_text(printed.as_json()))
        return
    if printed.dtype is None:
        render.tell_whole(render.json_text(printed.values))
        return
    chunks = f", {counted(len(printed.chunks), 'chunk')}" if printed.chunks else ""
    render.tell(f"{render.escape(printed.key)}: {printed.dtype} {list(printed.shape)}{chunks}")
    for name, value in printed.statistics.items():
        render.tell(f"  {name:<9}{f'{value:.6g}' if isinstance(value, float) else value}")
    if is_summary:
        first = list(islice(flat(printed.values), _FIRST))
        more = ", ..." if prod(printed.shape) > len(first) else ""
        render.tell(f"  {'first':<9}{', '.join(f'{v:.6g}' for v in first)}{more}")
        return
    render.tell_whole(render.escape_lines(render_values(printed.values)))


def flat(values: object) -> Iterator[Any]:
    """The numbers of nested lists."""
    if isinstance(values, list):
        for value in values:
            yield from flat(value)
    else:
        yield values


def render_values(values: object) -> str:
    """Nested lists of numbers, a row a line."""
    if isinstance(values, list) and values and isinstance(values[0], list):
        return "[" + ",\n".join(render_values(row) for row in values) + "]"
    return str(values)


_STDOUT = Path("-")
_SHOWN = 20


_STATS = {
    "keys": option(
        list[str], "--keys", read=v.globs, help="Measure only names that match this glob, and list each tensor."
    ),
    "roles": option(
        list[str], "--role", read=v.globs, help="Only weight, master, exp_avg, ... (repeatable)."
    ),
    "layers": option(
        list[int], "--layer", read=v.globs, min=0,
        help="Only layers of this number (repeatable), and list each tensor.",
    ),
    "by": option(
        StatsBy, "--by", default="auto",
        help="Names of parameters, or stored keys. Default: of parameters, if they are known.",
    ),
    "fail_on_nan": flag("--fail-on-nan", help="Exit code 1 if anything is NaN or Inf."),
    "svg": option(Path, "--svg", callback=v.in_a_folder, help="Draw layers and roles as an SVG file."),
    "html": option(Path, "--html", callback=v.in_a_folder, help="The same as an HTML page, with all numbers."),
}  # fmt: skip


def stats(
    checkpoint: Annotated[str, typer.Argument(help="A run, one of its iterations, or a Hugging Face model.")],
    other: Annotated[str | None, typer.Argument(help="A second one, to see what changed.")] = None,
    **given: Any,
) -> None:
    """Norms, extremes, zeros, NaN and Inf by layer and role; of two checkpoints, what changed. Sums are float64.

    Checksums are not compared: `verify --content` does that.
    """
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.look.stats import (
        CheckpointStatistics,
        StatsOptions,
        checkpoint_change,
        checkpoint_statistics,
    )

    svg, html = given["svg"], given["html"]
    is_drawn = svg is not None or html is not None
    options = fill(StatsOptions, given, histogram=other is None and is_drawn)
    found: CheckpointStatistics | CheckpointChange
    with progress_bar(given["quiet"]) as progress:
        if other is None:
            found = checkpoint_statistics(checkpoint, options, progress)
        else:
            found = checkpoint_change(checkpoint, other, options, progress)
    if is_drawn:
        from ckpt_tools.commands.look import stats_page as pages

        of_one = isinstance(found, CheckpointStatistics)
        svg_of: Any = pages.norms_svg if of_one else pages.change_svg
        html_of: Any = pages.norms_html if of_one else pages.change_html
        for file, draw in ((svg, svg_of), (html, html_of)):
            if file is not None:
                render.write_text(file, draw(found), checkpoint)
    if _STDOUT in (svg, html):
        return  # nothing but the picture
    sick = len(found.nonfinite())
    if given["as_json"]:
        print(render.json_text(found.as_json()))
    else:
        render.tell_verdict(f"{_verdict(sick, len(found.tensors))}", not sick)
        if isinstance(found, CheckpointStatistics):
            _print_statistics(found)
        else:
            _print_change(found)
        for note in found.notes:
            render.tell(f"note: {render.escape(note)}")
    if sick and given["fail_on_nan"]:
        if render.is_quiet():
            render.complain(f"error: {_verdict(sick, len(found.tensors))}")
        raise typer.Exit(1)


def _verdict(sick: int, measured: int) -> str:
    if not sick:
        return f"no NaN and no Inf in {counted(measured, 'tensor')}"
    return f"NaN or Inf in {sick:,} of {counted(measured, 'tensor')}"


def _print_statistics(found: CheckpointStatistics) -> None:
    from ckpt_tools.commands.look.stats_page import COUNTS, NORMS, numbers_of, short

    roles, layers = found.roles(), found.layers()
    render.print_table(("role", *NORMS, *COUNTS), [[role, *numbers_of(sums)] for role, sums in roles.items()])
    labels = list(dict.fromkeys(label for label, _ in layers))
    if not found.chosen and len(labels) > 1:
        table = []
        for label in labels:
            held = [layers.get((label, role)) for role in roles]
            wrong = sum(f.census.nans + f.census.infinities for f in held if f is not None)
            table.append(
                [label or "outside of layers", *("-" if f is None else short(f.norm) for f in held), wrong]
            )
        render.print_table(("norm of layer", *roles, "NaN, Inf"), table)
    listed = found.tensors if found.chosen else found.nonfinite()
    if not listed:
        return
    columns = ("norm", "mean", "min", "max")
    rows = [
        [t.named.title, t.named.role, t.named.tensor.dtype, *numbers_of(t.found, columns)] for t in listed
    ]
    title, most = ("", None) if found.chosen else ("tensors with NaN or Inf", _SHOWN)
    render.print_table(("tensor", "role", "dtype", *columns, *COUNTS), rows, title, most)


def _print_change(found: CheckpointChange) -> None:
    from ckpt_tools.commands.look.stats_page import CHANGE, change_of

    if found.chosen:
        _print_changed_tensors(found.tensors)
    else:
        rows = [[role, *change_of(f)] for role, f in found.roles().items()]
        render.print_table(("role", *CHANGE), rows)
        _print_changed_layers(found)
        if wrong := found.nonfinite():
            _print_changed_tensors(wrong, "tensors with NaN or Inf in A or B", _SHOWN)
    for line in found.left_out():
        render.tell(line)
    for what, names in (("only in A", found.only_in_a), ("only in B", found.only_in_b),
                        ("of another shape in B", found.reshaped)):  # fmt: skip
        if names:
            shown = ", ".join(map(render.escape, names[:3])) + (", ..." if len(names) > 3 else "")
            render.tell(f"{len(names):,} {what}: {shown}")


def _print_changed_layers(found: CheckpointChange) -> None:
    from ckpt_tools.commands.look.stats_page import cosine, short

    layers, roles = found.layers(), list(found.roles())
    rows: list[list[object]] = []
    for label in dict.fromkeys(label for label, _ in layers):
        row: list[object] = [label or "outside of layers"]
        held = [layers.get((label, name)) for name in roles]
        for change in held:
            row += ["-", "-"] if change is None else [short(change.relative), cosine(change.cosine)]
        rows.append([*row, sum(change.left_out for change in held if change is not None)])
    heads = [text for name in roles for text in (name, "cosine")]
    render.print_table(("relative change of", *heads, "NaN, Inf"), rows)


def _print_changed_tensors(
    tensors: Sequence[Measured[Change]], title: str = "", most: int | None = None
) -> None:
    from ckpt_tools.commands.look.stats_page import CHANGE, change_of

    rows = [(t.named.title, t.named.role, *change_of(t.found)) for t in tensors]
    render.print_table(("tensor", "role", *CHANGE), rows, title, most)


COMMANDS = {
    "inspect": with_options(inspect, READING | {"as_json"}, _INSPECT),
    "print-torch-dcp-in-json": with_options(print_torch_dcp_in_json, OPENING | {"trust_pickle"}, _DCP_JSON),
    "ls": with_options(ls, OPENING | {"trust_pickle", "as_json"}),
    "print-tensor": with_options(print_tensor, READING | {"as_json"}, _PRINT),
    "stats": with_options(stats, READING | {"workers", "threads", "as_json"}, _STATS),
}
