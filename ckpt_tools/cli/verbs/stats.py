"""`stats`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import options as v
from ckpt_tools.cli import render
from ckpt_tools.cli.options import flag, option
from ckpt_tools.cli.table import READING, fill, with_options
from ckpt_tools.human import counted
from ckpt_tools.model.choices import StatsBy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_tools.commands.look.stats import CheckpointChange, CheckpointStatistics, Measured
    from ckpt_tools.verify.content.values import Change

_STDOUT = Path("-")
_SHOWN = 20
_CHANGE = ("relative change", "cosine", "largest |B - A|", "changed", "of", "NaN, Inf")


_OWN = {
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
    from ckpt_tools.commands.look.stats_page import short

    roles, layers = found.roles(), found.layers()
    columns: tuple[str, ...] = ("norm", "rms", "mean", "min", "max")
    rows: list[list[object]] = []
    for role, sums in roles.items():
        numbers = sums.summary()
        census = sums.census
        rows.append([role, *(short(numbers[c]) for c in columns), sums.zeros, census.nans, census.infinities])
    render.print_table(("role", *columns, "zeros", "NaN", "Inf"), rows)
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
    rows = []
    for t in listed:
        numbers, census = t.found.summary(), t.found.census
        shown = [short(numbers[c]) for c in columns]
        counts = (t.found.zeros, census.nans, census.infinities)
        rows.append([t.named.title, t.named.role, t.named.tensor.dtype, *shown, *counts])
    title, most = ("", None) if found.chosen else ("tensors with NaN or Inf", _SHOWN)
    render.print_table(("tensor", "role", "dtype", *columns, "zeros", "NaN", "Inf"), rows, title, most)


def _print_change(found: CheckpointChange) -> None:
    from ckpt_tools.commands.look.stats_page import change_numbers

    if found.chosen:
        _print_changed_tensors(found.tensors)
    else:
        rows: list[list[object]] = [
            [role, *change_numbers(f), f.changed, f.elements, f.left_out] for role, f in found.roles().items()
        ]
        render.print_table(("role", *_CHANGE), rows)
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
    from ckpt_tools.commands.look.stats_page import change_numbers

    rows = [
        (t.named.title, t.named.role, *change_numbers(t.found), t.found.changed, t.found.elements, t.found.left_out)
        for t in tensors
    ]  # fmt: skip
    render.print_table(("tensor", "role", *_CHANGE), rows, title, most)


COMMANDS = {"stats": with_options(stats, READING | {"workers", "threads", "as_json"}, _OWN)}
