"""`ls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options.signature import with_options
from ckpt_tools.cli.options.table import OPENING
from ckpt_tools.cli.render import render
from ckpt_tools.human import human_bytes

if TYPE_CHECKING:
    from ckpt_tools.commands.look.ls import RunListing


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("ls"))(with_options(ls, OPENING | {"trust_pickle", "as_json"}))


def ls(
    run: Annotated[str, typer.Argument(help="A run's root, one checkpoint, or a folder of runs.")],
    **given: Any,
) -> None:
    """List the iterations of a run: whole or not, size, format, and the topology that they were written for.

    Of a folder with several runs, list the runs. What is damaged is named, with exit code 0: `verify` judges.
    """
    from ckpt_tools.commands.look.ls import list_run

    found = list_run(run, given["trust_pickle"])
    print(render.json_text(found.as_json())) if given["as_json"] else _print(found)


def _print(found: RunListing) -> None:
    from ckpt_tools.formats.locate.run_layouts import layouts_of

    if found.runs:
        _print_runs(found)
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
            "that is whole, of"
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
        render.tell(f"beside them: {listed}{more}")


def _print_runs(found: RunListing) -> None:
    rows = [
        (row.name, row.iterations, row.latest or "-", row.kind or "-", human_bytes(row.nbytes))
        for row in found.runs
    ]
    render.print_table(("run", "iterations", "latest", "format", "size"), rows)
