"""The pictures of `stats`: a strip of layers, norms or changes as colours, and histograms of sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from statistics import median
from typing import NamedTuple

from ckpt_tools.commands.look.pages import page, safe, table
from ckpt_tools.commands.look.stats import CheckpointChange, CheckpointStatistics, Measured, joined
from ckpt_tools.verify.content.values import AnySums, Change, Statistics

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
    """A kind of tensor: its cells by column. A heading is drawn in bold."""

    label: str
    cells: Mapping[str, Cell]
    is_heading: bool = False


def _strip_svg(
    title: str,
    subtitle: str,
    columns: Sequence[str],
    rows: Sequence[Row],
    legend: Sequence[tuple[str, str]],  # colour, meaning
    below: str,  # more SVG, drawn from (0, 0) on under the strip
    below_height: float,
) -> str:
    """A strip as one SVG document: `columns` are layers in order, "" is what is outside of layers."""
    bottom = TOP + ROW * len(rows)
    step = (WIDTH - LEFT - RIGHT) / max(len(columns), 1)
    x = {column: LEFT + i * min(step, 40.0) for i, column in enumerate(columns)}
    parts = [
        f'<text class="title" x="12" y="26">{safe(title)}</text>',
        f'<text x="12" y="46">{safe(subtitle)}</text>',
        *_column_labels(columns, x, min(step, 40.0)),
    ]
    for number, row in enumerate(rows):
        parts += _row(row, TOP + number * ROW, x, min(step, 40.0))
    parts += _legend(legend, bottom + 22)
    height = bottom + 40 + below_height
    if below:
        parts.append(f'<g transform="translate(0 {bottom + 40:.1f})">{below}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="wide" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{safe(title)}">\n{_SVG_STYLE}\n' + "\n".join(parts) + "\n</svg>\n"
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


_SVG_STYLE = (
    "<style>text{font:13px system-ui,sans-serif;fill:#222}.title{font-size:17px;font-weight:600}"
    ".small{font-size:11px}.head{font-size:12px;font-weight:600}.end{text-anchor:end}.bars{fill:#4269d0}</style>"
)


_MOST_ROWS = 2000  # of the page's table
_LEAST_LAYERS = 3  # in a row, for its median to mean something
_FACTOR = 3.0  # doublings away from the middle that have the full colour
_STYLE = (
    ".many{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:14px}"
    "figure{margin:0}figcaption{font-size:12px;overflow-wrap:anywhere}figure svg{width:100%;height:56px;"
    "background:#f6f6f6}.bars{fill:#4269d0}.axis{display:flex;justify-content:space-between;font-size:11px;color:#555}"
)


def norms_svg(found: CheckpointStatistics) -> str:
    """The strip of norms with a histogram for every role below it, as one SVG document."""
    rows = _rows(found.tensors, _norm_cells)
    roles = [(role, f.histogram()) for role, f in found.roles().items()]
    below, height = _histograms(roles)
    return _strip_svg(
        f"{_name(found.checkpoint)}: norms",
        f"{_verdict(found)} A column is a layer; colour: RMS relative to the row's median, grey: like the others",
        list(dict.fromkeys(t.named.part.label for t in found.tensors)),
        rows,
        (
            (about_middle(-1), f"{2**_FACTOR:.0f} times smaller"),
            (about_middle(0), "healthy"),
            (about_middle(1), f"{2**_FACTOR:.0f} times larger"),
            (EMPTY, "all zeros"),
            (BAD, "NaN or Inf"),
        ),
        below,
        height,
    )


def _verdict(found: CheckpointStatistics) -> str:
    if wrong := found.nonfinite():
        return f"{len(wrong):,} of {len(found.tensors):,} tensors hold NaN or infinity."
    return f"No NaN and no infinity in {len(found.tensors):,} tensors."


def norms_html(found: CheckpointStatistics) -> str:
    """A page with the strip, what is not finite, histograms of every kind of tensor, and all numbers."""
    wrong = found.nonfinite()
    kinds = joined(((t.named.role, f"{f'{t.named.part.block}.*.' if t.named.part.block else ''}{t.named.part.leaf}"),
                    t.found) for t in found.tensors)  # fmt: skip
    return _page(
        _name(found.checkpoint),
        f"<p><b>{_verdict(found)}</b> {safe(found.checkpoint)}, {safe(found.kind)}, by {safe(found.by)}. "
        f"All sums were taken in float64, over the finite elements.</p>{_notes(found.notes)}"
        f'<div class="scroll">{norms_svg(found)}</div>{_figures(kinds)}<h2>Numbers</h2>',
        (("tensor", "role", "dtype"), (*NORMS, *COUNTS)),
        [
            [t.named.title, t.named.role, t.named.tensor.dtype, *numbers_of(t.found)]
            for t in (*wrong, *(t for t in found.tensors if t.found.census.are_finite))
        ],
        len(wrong),
    )


def _page(
    title: str, body: str, columns: tuple[Sequence[str], Sequence[str]], rows: list[list[object]], red: int
) -> str:
    """A page that ends with a table, of columns with texts and with numbers.

    The first `red` rows are red, at most `_MOST_ROWS` are shown.
    """
    shown = rows[:_MOST_ROWS]
    more = len(rows) - len(shown)
    end = f"<p>and {more:,} tensors more; --json has all.</p>" if more else ""
    named = [(name, right) for names, right in zip(columns, (False, True), strict=True) for name in names]
    numbers = table(named, shown, frozenset(range(min(red, len(shown)))))
    return page(f"stats: {title}", f"<h1>{safe(title)}</h1>{body}{numbers}{end}", _STYLE)


def _look_same(low: float, high: float) -> bool:
    """Whether a reader of two digits sees one number, so that colours must not tell them apart either."""
    return f"{low:.2g}" == f"{high:.2g}"


def _scale_legend(low: float, high: float, unit: str) -> list[tuple[str, str]]:
    """The legend of a logarithmic scale: one entry if all changes look the same."""
    if _look_same(low, high):
        return [(growing(0.5), f"{low:.2g}{unit}")]
    parts = ((0.0, low), (0.5, math.sqrt(low * high)), (1.0, high))
    return [(growing(part), f"{value:.2g}{unit}") for part, value in parts]


def change_svg(found: CheckpointChange, of: str = "relative") -> str:
    """The heat map of relative changes (`relative`) or of angles (`cosine`), as one SVG document."""
    scale = _LogScale(_angle if of == "cosine" else lambda change: change.relative, found.tensors)
    what = "relative change |B - A| / |A|" if of == "relative" else "angle between A and B"
    unit = "" if of == "relative" else " degrees"
    low, high = scale.ends
    below, height = _warning(found.left_out())
    return _strip_svg(
        f"{_name(found.a)} to {_name(found.b)}: {what}",
        "one column per layer; the scale is logarithmic, from the smallest to the largest of the map",
        list(dict.fromkeys(t.named.part.label for t in found.tensors)),
        _rows(found.tensors, scale.cells),
        (
            (EMPTY, "no change"),
            *_scale_legend(low, high, unit),
            (BAD, "NaN or Inf, or from nothing"),
        ),
        below,
        height,
    )


def change_html(found: CheckpointChange) -> str:
    """A page with both heat maps and all numbers, the largest change first."""
    wrong = found.nonfinite()
    moved = sorted(
        (t for t in found.tensors if not t.found.left_out),
        key=lambda t: -math.inf if t.found.relative is None else -t.found.relative,
    )
    alone = [
        f"{len(names):,} only in {side}"
        for side, names in (("A", found.only_in_a), ("B", found.only_in_b))
        if names
    ]
    return _page(
        f"{_name(found.a)} to {_name(found.b)}",
        f"<p>A: {safe(found.a)}<br>B: {safe(found.b)}</p>"
        f"<p>{len(found.tensors):,} tensors by {safe(found.by)}{''.join(f', {one}' for one in alone)}. All sums were "
        f"taken in float64, over the elements that are finite in both.</p>"
        f"{''.join(f'<p><b>{safe(line)}.</b></p>' for line in found.left_out())}{_notes(found.notes)}"
        f'<div class="scroll">{change_svg(found)}</div><div class="scroll">{change_svg(found, "cosine")}</div>'
        f"<h2>Numbers, {'NaN and Inf, then ' if wrong else ''}the largest change first</h2>",
        (("tensor", "role"), CHANGE),
        [[t.named.title, t.named.role, *change_of(t.found)] for t in (*wrong, *moved)],
        len(wrong),
    )


NORMS = ("norm", "rms", "mean", "min", "max")
COUNTS = ("zeros", "NaN", "Inf")
CHANGE = ("relative change", "cosine", "largest |B - A|", "changed", "of", "NaN, Inf")


def numbers_of(found: Statistics, names: Sequence[str] = NORMS) -> list[object]:
    """The numbers of these names and the `COUNTS`, for a table."""
    numbers, census = found.summary(), found.census
    return [*(short(numbers[name]) for name in names), found.zeros, census.nans, census.infinities]


def change_of(found: Change) -> list[object]:
    """`CHANGE` for a table."""
    sizes = (short(found.relative), cosine(found.cosine), short(found.furthest))
    return [*sizes, found.changed, found.elements, found.left_out]


def short(number: float | None) -> str:
    """Six digits; a dash where there is no number."""
    return "-" if number is None else f"{number:.6g}"


def cosine(number: float | None) -> str:
    """Nine digits: what a training changes shows behind many nines."""
    return "-" if number is None else f"{number:.9f}"


def _warning(lines: Sequence[str]) -> tuple[str, float]:
    """Lines in the colour of what is wrong, to stand under a strip, and their height."""
    texts = (
        f'<text x="12" y="{14 + 18 * i}" style="fill:{BAD}">{safe(line)}</text>'
        for i, line in enumerate(lines)
    )
    return "".join(texts), 18.0 * len(lines) + 6 if lines else 0.0


def _name(path: str) -> str:
    """The last two parts of a path: a run and its iteration."""
    return "/".join(PurePosixPath(path).parts[-2:]) or path


def _notes(notes: Sequence[str]) -> str:
    return "".join(f"<p>{safe(note)}</p>" for note in notes)


def _rows(
    tensors: Sequence[Measured[AnySums]], cells: Callable[[Mapping[str, AnySums]], dict[str, Cell]]
) -> list[Row]:
    """For every role a heading with whole layers, then a row a kind of tensor."""
    rows = []
    for role in dict.fromkeys(t.named.role for t in tensors):
        of_role = [t for t in tensors if t.named.role == role]
        rows.append(Row(role, cells(joined((t.named.part.label, t.found) for t in of_role)), is_heading=True))
        by_leaf: dict[str, list[Measured[AnySums]]] = {}
        for t in of_role:
            by_leaf.setdefault(t.named.part.leaf, []).append(t)
        for leaf, those in by_leaf.items():
            rows.append(Row(leaf, cells(joined((t.named.part.label, t.found) for t in those))))
    return rows


def _norm_cells(sums: Mapping[str, Statistics]) -> dict[str, Cell]:
    """Each layer's colour by its distance from the middle of those that are shown with it."""
    sizes = [math.log2(f.rms) for layer, f in sums.items() if layer and f.rms]
    middle = median(sizes) if len(sizes) >= _LEAST_LAYERS else None
    cells = {}
    for layer, found in sums.items():
        census = found.census
        away = (
            (math.log2(found.rms) - middle) / _FACTOR if found.rms and middle is not None and layer else 0.0
        )
        text = (
            f"{layer or 'outside of layers'}: norm {short(found.norm)}, rms {short(found.rms)}, "
            f"{short(found.smallest)} to {short(found.largest)}, {found.zeros:,} zeros, {census.nans:,} NaN, "
            f"{census.infinities:,} Inf of {census.elements:,}"
        )
        colour = about_middle(away) if found.rms else EMPTY
        cells[layer] = Cell(colour if census.are_finite else BAD, text)
    return cells


def _angle(found: Change) -> float | None:
    return None if found.cosine is None else math.degrees(math.acos(found.cosine))


class _LogScale:
    """Colours for changes between the smallest and the largest one that is not zero."""

    def __init__(
        self, measure: Callable[[Change], float | None], tensors: Sequence[Measured[Change]]
    ) -> None:
        self._measure = measure
        sizes = [size for t in tensors if (size := measure(t.found))]
        self.ends = (min(sizes), max(sizes)) if sizes else (1.0, 1.0)

    def cells(self, sums: Mapping[str, Change]) -> dict[str, Cell]:
        return {layer: self._cell(layer, found) for layer, found in sums.items()}

    def _cell(self, layer: str, found: Change) -> Cell:
        text = (
            f"{layer or 'outside of layers'}: relative change {short(found.relative)}, "
            f"cosine {cosine(found.cosine)}, "
            f"largest |B - A| {short(found.furthest)}, {found.changed:,} of {found.elements:,} changed"
        )
        size = self._measure(found)
        if found.left_out or (size is None and found.moved_squares):
            wrong = (
                f"{found.left_out:,} NaN or infinite in A or B, {found.left_out_changed:,} of them changed"
            )
            return Cell(BAD, f"{text}, {wrong}")
        if not size:
            return Cell(EMPTY, text)
        if _look_same(*self.ends):
            return Cell(growing(0.5), text)
        low, high = map(math.log, self.ends)
        return Cell(growing((math.log(size) - low) / (high - low)), text)


def _ends(histograms: Iterable[Sequence[tuple[int, int]]]) -> tuple[int, int]:
    powers = [exponent for one in histograms for exponent, _ in one]
    return (min(powers), max(powers)) if powers else (0, 0)


def _histograms(roles: Sequence[tuple[str, list[tuple[int, int]]]]) -> tuple[str, float]:
    """A row of histograms, one a role, and its height."""
    if not any(histogram for _, histogram in roles):
        return "", 0.0
    low, high = _ends(h for _, h in roles)
    width = min(260.0, (WIDTH - 24) / len(roles) - 14)
    parts = ['<text x="12" y="14">how many elements are of what size (powers of two)</text>']
    for i, (role, histogram) in enumerate(roles):
        parts.append(
            f'<g transform="translate({12 + i * (width + 14):.1f} 24)"><path class="bars" '
            f'd="{bars(histogram, low, high, width, 60)}"/>'
            f'<text class="small" y="74">{safe(power(low))}</text>'
            f'<text class="small end" x="{width:.1f}" y="74">{safe(power(high))}</text>'
            f'<text class="small" y="90">{safe(role)}</text></g>'
        )
    return "".join(parts), 122.0


def _figures(kinds: Mapping[tuple[str, str], Statistics]) -> str:
    """A histogram of every kind of tensor, all with one axis."""
    shown = {place: found.histogram() for place, found in kinds.items()}
    if not any(shown.values()):
        return ""
    low, high = _ends(shown.values())
    figures = "".join(
        f'<figure><svg viewBox="0 0 200 56" preserveAspectRatio="none"><path class="bars" '
        f'd="{bars(histogram, low, high, 200, 56)}"/></svg><div class="axis"><span>{power(low)}</span>'
        f"<span>{power(high)}</span></div><figcaption>{safe(role)}: {safe(leaf)}</figcaption></figure>"
        for (role, leaf), histogram in shown.items()
    )
    head = "<h2>How many elements are of what size</h2><p>Powers of two; zeros are left out.</p>"
    return f"{head}<div class=many>{figures}</div>"
