"""A strip: a column a layer, a row a kind of tensor, a coloured cell where a layer has such a tensor. One SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.commands.look.pages import safe

WIDTH, LEFT, RIGHT, TOP = 1200, 330, 12, 84
ROW = 17.0
CHAR = 6.2  # mean width of a character of the labels
_MOST_LABEL = 50
BAD, EMPTY = "#e00000", "#c8c8c8"
_COLD, _MIDDLE, _WARM = (33, 102, 172), (244, 244, 244), (179, 88, 6)
_STEPS = ((247, 244, 249), (201, 180, 216), (140, 107, 177), (77, 0, 75))


class Cell(NamedTuple):
    """What is drawn for a layer; `text` is its tooltip."""

    colour: str
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of tensor: its cells by column. A heading stands out."""

    label: str
    cells: Mapping[str, Cell]
    is_heading: bool = False


@dataclass(frozen=True, slots=True)
class Strip:
    """What is drawn: `columns` are layers in order, "" is what stands outside of layers."""

    title: str
    subtitle: str
    columns: Sequence[str]
    rows: Sequence[Row]
    legend: Sequence[tuple[str, str]]  # colour, meaning
    below: str = ""  # more SVG, drawn from (0, 0) on under the strip
    below_height: float = 0.0


def svg(strip: Strip) -> str:
    """The strip as one SVG document."""
    bottom = TOP + ROW * len(strip.rows)
    step = (WIDTH - LEFT - RIGHT) / max(len(strip.columns), 1)
    x = {column: LEFT + i * min(step, 40.0) for i, column in enumerate(strip.columns)}
    parts = [
        f'<text class="title" x="12" y="26">{safe(strip.title)}</text>',
        f'<text x="12" y="46">{safe(strip.subtitle)}</text>',
        *_column_labels(strip.columns, x, min(step, 40.0)),
    ]
    for number, row in enumerate(strip.rows):
        parts += _row(row, TOP + number * ROW, x, min(step, 40.0))
    parts += _legend(strip.legend, bottom + 22)
    height = bottom + 40 + strip.below_height
    if strip.below:
        parts.append(f'<g transform="translate(0 {bottom + 40:.1f})">{strip.below}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="wide" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{safe(strip.title)}">\n{_STYLE}\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _row(row: Row, y: float, x: Mapping[str, float], step: float) -> list[str]:
    label = row.label if len(row.label) <= _MOST_LABEL else f"{row.label[: _MOST_LABEL - 1]}\u2026"
    kind = "head end" if row.is_heading else "small end"
    parts = [
        f'<text class="{kind}" x="{LEFT - 8}" y="{y + 12:.1f}">{safe(label)}<title>{safe(row.label)}</title></text>'
    ]
    width, height = max(step - (1.0 if step > 4 else 0.0), 0.5), ROW - (1 if row.is_heading else 3)
    for column, cell in row.cells.items():
        parts.append(
            f'<rect fill="{cell.colour}" x="{x[column]:.2f}" y="{y:.1f}" width="{width:.2f}" '
            f'height="{height:.1f}"><title>{safe(cell.text)}</title></rect>'
        )
    return parts


def _column_labels(columns: Sequence[str], x: Mapping[str, float], step: float) -> list[str]:
    """The number of every layer for which there is room, and the block above its first."""
    parts: list[str] = []
    free, seen, block_free = 0.0, set[str](), 0.0
    for column in columns:
        block, _, number = column.rpartition(".")
        text = number or "\u2013"
        at = x[column]
        if at >= free:
            parts.append(f'<text class="small" x="{at + 1:.1f}" y="{TOP - 6}">{safe(text)}</text>')
            free = at + max(len(text) * CHAR + 6, step)
        if block and block not in seen and at >= block_free:
            parts.append(f'<text class="small" x="{at + 1:.1f}" y="{TOP - 20}">{safe(block)}</text>')
            seen.add(block)
            block_free = at + len(block) * CHAR + 8
    return parts


def _legend(entries: Sequence[tuple[str, str]], y: float) -> list[str]:
    parts, x = [], 12.0
    for colour, text in entries:
        parts.append(f'<rect fill="{colour}" stroke="#888" stroke-width=".5" x="{x:.0f}" y="{y - 10:.0f}" '
                     'width="12" height="12"/>')  # fmt: skip
        parts.append(f'<text class="small" x="{x + 17:.0f}" y="{y:.0f}">{safe(text)}</text>')
        x += 34 + len(text) * CHAR
    return parts


def about_middle(steps: float) -> str:
    """From blue over near white to brown as `steps` goes from -1 over 0 to 1."""
    steps = max(-1.0, min(1.0, steps))
    return _mixed(_MIDDLE, _COLD if steps < 0 else _WARM, abs(steps))


def growing(part: float) -> str:
    """From near white to dark violet as `part` goes from 0 to 1."""
    place = max(0.0, min(1.0, part)) * (len(_STEPS) - 1)
    low = min(int(place), len(_STEPS) - 2)
    return _mixed(_STEPS[low], _STEPS[low + 1], place - low)


def _mixed(a: tuple[int, int, int], b: tuple[int, int, int], part: float) -> str:
    return "#" + "".join(f"{round(x + (y - x) * part):02x}" for x, y in zip(a, b, strict=True))


def bars(histogram: Sequence[tuple[int, int]], low: int, high: int, width: float, height: float) -> str:
    """Elements by power of two, from `low` to `high`, as the `d` of one path; heights are in proportion."""
    if not histogram:
        return ""
    most = max(count for _, count in histogram)
    step = width / (high - low + 1)
    return "".join(
        f"M{(power - low) * step:.2f} {height:.1f}v-{max(height * count / most, 0.5):.2f}h{step:.2f}V{height:.1f}z"
        for power, count in histogram
    )


def power(exponent: int) -> str:
    """A power of two as people read numbers: `1e-03`, `64`."""
    value = math.ldexp(1.0, exponent)
    return f"{value:g}" if 0.01 <= value < 1e5 else f"{value:.0e}"


_STYLE = (
    "<style>text{font:13px system-ui,sans-serif;fill:#222}.title{font-size:17px;font-weight:600}"
    ".small{font-size:11px}.head{font-size:12px;font-weight:600}.end{text-anchor:end}.bars{fill:#4269d0}</style>"
)
