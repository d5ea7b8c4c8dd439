"""The pictures of `stats`: a strip of layers, norms or changes as colours, and histograms of sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from statistics import median
from typing import Any

from ckpt_tools.commands.look import strips
from ckpt_tools.commands.look.named_tensors import NamedTensor
from ckpt_tools.commands.look.pages import page, safe, table
from ckpt_tools.commands.look.stats import CheckpointChange, CheckpointStatistics
from ckpt_tools.commands.look.strips import Cell, Row, Strip
from ckpt_tools.verify.content.values import Change, Statistics

_MOST_ROWS = 2000  # of the page's table
_LEAST_LAYERS = 3  # of a row whose middle says something
_FACTOR = 3.0  # doublings away from the middle that have the full colour
_STYLE = (
    ".many{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:14px}"
    "figure{margin:0}figcaption{font-size:12px;overflow-wrap:anywhere}figure svg{width:100%;height:56px;"
    "background:#f6f6f6}.bars{fill:#4269d0}.axis{display:flex;justify-content:space-between;font-size:11px;color:#555}"
)


def norms_svg(found: CheckpointStatistics) -> str:
    """The strip of norms with a histogram for every role below it, as one SVG document."""
    rows = _rows([(t.named, t.found) for t in found.tensors], Statistics.empty, _norm_cells)
    roles = [(role, f.histogram()) for role, f in found.roles().items()]
    below, height = _histograms(roles)
    return strips.svg(
        Strip(
            f"{_name(found.checkpoint)}: norms",
            "one column per layer; colours tell how far a root mean square is from the middle of its row",
            _columns(t.named for t in found.tensors),
            rows,
            (
                (strips.about_middle(-1), f"{2**_FACTOR:.0f} times smaller"),
                (strips.about_middle(0), "as the others"),
                (strips.about_middle(1), f"{2**_FACTOR:.0f} times larger"),
                (strips.EMPTY, "all zeros"),
                (strips.BAD, "NaN or Inf"),
            ),
            below,
            height,
        )
    )


def norms_html(found: CheckpointStatistics) -> str:
    """A page with the strip, what is sick, histograms of every kind of tensor, and all numbers."""
    sick = list(found.sick())
    said = (
        f"{len(sick):,} of {len(found.tensors):,} tensors hold NaN or infinity."
        if sick
        else f"No NaN and no infinity in {len(found.tensors):,} tensors."
    )
    shown = [*sick, *(t for t in found.tensors if not (t.found.census.nans or t.found.census.infinities))]
    rows = [_numbers_row(t.named, t.found) for t in shown[:_MOST_ROWS]]
    more = len(shown) - len(rows)
    kinds = _kinds((t.named, t.found) for t in found.tensors)
    body = (
        f"<h1>{safe(_name(found.checkpoint))}</h1><p><b>{said}</b> {safe(found.checkpoint)}, {safe(found.kind)}, "
        f"by {safe(found.by)}. All sums were taken in float64, over the finite elements.</p>{_notes(found.notes)}"
        f'<div class="scroll">{norms_svg(found)}</div>{_figures(kinds)}'
        f"<h2>Numbers</h2>{table(_NUMBERS, rows, frozenset(range(min(len(sick), len(rows)))))}"
        f"{f'<p>and {more:,} tensors more; --json has all.</p>' if more else ''}"
    )
    return page(f"stats: {_name(found.checkpoint)}", body, _STYLE)


def _alike(low: float, high: float) -> bool:
    """Whether a reader of two digits sees one number, so that colours must not tell them apart either."""
    return f"{low:.2g}" == f"{high:.2g}"


def _scale_legend(low: float, high: float, unit: str) -> list[tuple[str, str]]:
    """The legend of a logarithmic scale: one entry where all changes are alike."""
    if _alike(low, high):
        return [(strips.growing(0.5), f"{low:.2g}{unit}")]
    parts = ((0.0, low), (0.5, math.sqrt(low * high)), (1.0, high))
    return [(strips.growing(part), f"{value:.2g}{unit}") for part, value in parts]


def change_svg(found: CheckpointChange, of: str = "relative") -> str:
    """The heat map of relative changes (`relative`) or of angles (`cosine`), as one SVG document."""
    tensors = [(t.named, t.found) for t in found.tensors]
    scale = _LogScale(_relative if of == "relative" else _angle, tensors)
    what = "relative change |B - A| / |A|" if of == "relative" else "angle between A and B"
    unit = "" if of == "relative" else " degrees"
    low, high = scale.ends
    below, height = _warning(found.left_out())
    return strips.svg(
        Strip(
            f"{_name(found.a)} to {_name(found.b)}: {what}",
            "one column per layer; the scale is logarithmic, from the smallest to the largest of the map",
            _columns(named for named, _ in tensors),
            _rows(tensors, Change.empty, scale.cells),
            (
                (strips.EMPTY, "no change"),
                *_scale_legend(low, high, unit),
                (strips.BAD, "NaN or Inf, or from nothing"),
            ),
            below,
            height,
        )
    )


def change_html(found: CheckpointChange) -> str:
    """A page with both heat maps and all numbers, the largest change first."""
    sick = list(found.sick())
    moved = sorted(
        (t for t in found.tensors if not t.found.left_out),
        key=lambda t: -math.inf if t.found.relative is None else -t.found.relative,
    )
    order = [*sick, *moved]
    rows = [_change_row(t.named, t.found) for t in order[:_MOST_ROWS]]
    more = len(order) - len(rows)
    alone = [
        f"{len(names):,} only in {side}"
        for side, names in (("A", found.only_in_a), ("B", found.only_in_b))
        if names
    ]
    body = (
        f"<h1>{safe(_name(found.a))} to {safe(_name(found.b))}</h1><p>A: {safe(found.a)}<br>B: {safe(found.b)}</p>"
        f"<p>{len(found.tensors):,} tensors by {safe(found.by)}{''.join(f', {one}' for one in alone)}. All sums were "
        f"taken in float64, over the elements that are finite in both.</p>"
        f"{''.join(f'<p><b>{safe(line)}.</b></p>' for line in found.left_out())}{_notes(found.notes)}"
        f'<div class="scroll">{change_svg(found)}</div><div class="scroll">{change_svg(found, "cosine")}</div>'
        f"<h2>Numbers, {'NaN and Inf, then ' if sick else ''}the largest change first</h2>"
        f"{table(_CHANGES, rows, frozenset(range(min(len(sick), len(rows)))))}"
        f"{f'<p>and {more:,} tensors more; --json has all.</p>' if more else ''}"
    )
    return page(f"stats: {_name(found.a)} to {_name(found.b)}", body, _STYLE)


_NUMBERS = [("tensor", False), ("role", False), ("dtype", False), *((name, True) for name in (
    "norm", "rms", "mean", "min", "max", "zeros", "NaN", "Inf"))]  # fmt: skip
_CHANGES = [("tensor", False), ("role", False), *((name, True) for name in (
    "relative change", "cosine", "largest |B - A|", "changed", "of", "NaN, Inf"))]  # fmt: skip


def _numbers_row(named: NamedTensor, found: Statistics) -> list[str]:
    numbers = found.summary()
    shown = [short(numbers[key]) for key in ("norm", "rms", "mean", "min", "max")]
    counts = [f"{n:,}" for n in (found.zeros, found.census.nans, found.census.infinities)]
    return [named.title, named.role, named.tensor.dtype, *shown, *counts]


def _change_row(named: NamedTensor, found: Change) -> list[str]:
    counts = (f"{n:,}" for n in (found.changed, found.elements, found.left_out))
    return [named.title, named.role, *change_numbers(found), *counts]


def change_numbers(found: Change) -> tuple[str, str, str]:
    """Relative change, cosine and largest difference for a table."""
    return short(found.relative), cosine(found.cosine), short(found.furthest)


def short(number: float | None) -> str:
    """Six digits; a dash where there is no number."""
    return "-" if number is None else f"{number:.6g}"


def cosine(number: float | None) -> str:
    """Nine digits: what a training changes shows behind many nines."""
    return "-" if number is None else f"{number:.9f}"


def _warning(lines: Sequence[str]) -> tuple[str, float]:
    """Lines in the colour of what is wrong, to stand under a strip, and their height."""
    texts = (
        f'<text x="12" y="{14 + 18 * i}" style="fill:{strips.BAD}">{safe(line)}</text>'
        for i, line in enumerate(lines)
    )
    return "".join(texts), 18.0 * len(lines) + 6 if lines else 0.0


def _name(path: str) -> str:
    """The last two parts of a path: a run and its iteration."""
    return "/".join(PurePosixPath(path).parts[-2:]) or path


def _notes(notes: Sequence[str]) -> str:
    return "".join(f"<p>{safe(note)}</p>" for note in notes)


def _columns(tensors: Iterable[NamedTensor]) -> list[str]:
    return list(dict.fromkeys(t.part.label for t in tensors))


Cells = Callable[[Mapping[str, Any]], dict[str, Cell]]


def _rows(tensors: Sequence[tuple[NamedTensor, Any]], empty: Callable[[Any], Any], cells: Cells) -> list[Row]:
    """For every role a heading with whole layers, then a row a kind of tensor."""
    rows = []
    for role in dict.fromkeys(named.role for named, _ in tensors):
        whole: dict[str, Any] = {}
        leaves: dict[str, dict[str, Any]] = {}
        for named, found in tensors:
            if named.role != role:
                continue
            label = named.part.label
            for sums in (whole, leaves.setdefault(named.part.leaf, {})):
                if label not in sums:
                    sums[label] = empty(found)
                sums[label].join(found)
        rows.append(Row(role, cells(whole), is_heading=True))
        rows += [Row(leaf, cells(sums)) for leaf, sums in leaves.items()]
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
        colour = strips.about_middle(away) if found.rms else strips.EMPTY
        cells[layer] = Cell(strips.BAD if census.nans or census.infinities else colour, text)
    return cells


def _relative(found: Change) -> float | None:
    return found.relative


def _angle(found: Change) -> float | None:
    return None if found.cosine is None else math.degrees(math.acos(found.cosine))


class _LogScale:
    """Colours for changes between the smallest and the largest one that is not zero."""

    def __init__(
        self, measure: Callable[[Change], float | None], tensors: Sequence[tuple[NamedTensor, Change]]
    ) -> None:
        self._measure = measure
        sizes = [size for _, found in tensors if (size := measure(found))]
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
            return Cell(strips.BAD, f"{text}, {wrong}")
        if not size:
            return Cell(strips.EMPTY, text)
        if _alike(*self.ends):
            return Cell(strips.growing(0.5), text)
        low, high = map(math.log, self.ends)
        return Cell(strips.growing((math.log(size) - low) / (high - low)), text)


def _kinds(tensors: Iterable[tuple[NamedTensor, Statistics]]) -> dict[tuple[str, str], Statistics]:
    """The sums of each (role, kind of tensor) over all layers."""
    kinds: dict[tuple[str, str], Statistics] = {}
    for named, found in tensors:
        place = (
            named.role,
            f"{named.part.block}.*.{named.part.leaf}" if named.part.block else named.part.leaf,
        )
        if place not in kinds:
            kinds[place] = found.empty()
        kinds[place].join(found)
    return kinds


def _ends(histograms: Iterable[Sequence[tuple[int, int]]]) -> tuple[int, int]:
    powers = [exponent for one in histograms for exponent, _ in one]
    return (min(powers), max(powers)) if powers else (0, 0)


def _histograms(roles: Sequence[tuple[str, list[tuple[int, int]]]]) -> tuple[str, float]:
    """A row of histograms, one a role, and its height."""
    if not any(histogram for _, histogram in roles):
        return "", 0.0
    low, high = _ends(h for _, h in roles)
    width = min(260.0, (strips.WIDTH - 24) / len(roles) - 14)
    parts = ['<text x="12" y="14">how many elements are of what size (powers of two)</text>']
    for i, (role, histogram) in enumerate(roles):
        parts.append(
            f'<g transform="translate({12 + i * (width + 14):.1f} 24)"><path class="bars" '
            f'd="{strips.bars(histogram, low, high, width, 60)}"/>'
            f'<text class="small" y="74">{safe(strips.power(low))}</text>'
            f'<text class="small end" x="{width:.1f}" y="74">{safe(strips.power(high))}</text>'
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
        f'd="{strips.bars(histogram, low, high, 200, 56)}"/></svg><div class="axis"><span>{strips.power(low)}</span>'
        f"<span>{strips.power(high)}</span></div><figcaption>{safe(role)}: {safe(leaf)}</figcaption></figure>"
        for (role, leaf), histogram in shown.items()
    )
    head = "<h2>How many elements are of what size</h2><p>Powers of two; zeros are left out.</p>"
    return f"{head}<div class=many>{figures}</div>"
