"""`du`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import given_values as v
from ckpt_tools.cli import render
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options import option
from ckpt_tools.cli.signature import with_options
from ckpt_tools.cli.table import READING
from ckpt_tools.human import human_bytes
from ckpt_tools.model.choices import UsageAxis

if TYPE_CHECKING:
    from ckpt_tools.commands.du import Usage

_STDOUT = Path("-")
_SHOWN = 10


_DEFAULT_AXES: tuple[UsageAxis, ...] = ("iteration", "role", "dtype")
_OWN = {
    "iteration": option(str, "--iteration", metavar="NUMBER|all", read=v.one_or_every,
                        help="Count this iteration of a root alone. Default: all of them."),
    "by": option(
        list[UsageAxis], "--by", help="Table to show, repeatable. Default: iteration, role and dtype."
    ),
    "duplicates": option(
        bool, "--duplicates/--no-duplicates", default=True, help="Look for items that several iterations hold."
    ),
    "svg": option(Path, "--svg", callback=v.in_a_folder, help="Draw a tree map as one SVG file."),
    "html": option(Path, "--html", callback=v.in_a_folder, help="The same as one HTML page, with all sums."),
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("du"))(with_options(du, READING | {"as_json"}, _OWN))


def du(
    run: Annotated[str, typer.Argument(help="A run's root with all its iterations, or one checkpoint.")],
    **given: Any,
) -> None:
    """Where the bytes of a run lie, and which are there twice. Tells it from metadata; reads no tensor.

    What is damaged is named and its bytes counted, with exit code 0: `verify` judges.
    """
    from ckpt_tools.commands.du import disk_usage

    svg, html = given["svg"], given["html"]
    found = disk_usage(run, given["iteration"], given["duplicates"], given["trust_pickle"])
    if svg is not None or html is not None:
        from ckpt_tools.commands import du_page

        if svg is not None:
            render.write_text(svg, du_page.usage_svg(found), run)
        if html is not None:
            render.write_text(html, du_page.usage_html(found), run)
        if _STDOUT in (svg, html):
            return  # nothing but the picture
    if given["as_json"]:
        print(render.json_text(found.as_json()))
    else:
        _print(found, given["by"] or _DEFAULT_AXES)


def _print(found: Usage, axes: Sequence[UsageAxis]) -> None:
    total = max(found.total, 1)
    for axis in axes:
        rows = [
            (name or "-", human_bytes(nbytes), f"{100 * nbytes / total:.1f} %")
            for name, nbytes in found.by(axis).items()
        ]
        render.print_table((axis, "size", "share"), rows)
    largest = sorted(found.others.items(), key=lambda pair: -pair[1])
    render.tell_first([f"beside the iterations: {name} {human_bytes(n)}" for name, n in largest], _SHOWN)
    for name, why in found.unread.items():
        render.tell(f"{render.escape(name)} is not a whole checkpoint: {render.escape(why)}")
    if found.duplicates:
        render.tell(
            f"{human_bytes(found.spare)} in {len(found.duplicates):,} items that an earlier iteration holds "
            "with the same checksum:"
        )
        items = (
            f"{o.key} {o.box} {human_bytes(o.nbytes)}, {len(o.iterations)} times" for o in found.duplicates
        )
        render.tell_first([*items], _SHOWN, "  ")
    if found.without_checksum:
        render.tell(f"{found.without_checksum:,} items carry no checksum and were not compared")
    render.tell(f"{human_bytes(found.total)} in all")
