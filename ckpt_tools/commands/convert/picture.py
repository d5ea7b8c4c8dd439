"""A picture of who owns what: a row a rank, its share of every flat buffer as length, padding left bare.

One self-contained SVG, or an HTML page around it. Its size is bounded: with many ranks neighbouring tensors of
the same kind are drawn as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ckpt_tools.commands.look.pages import page, safe, table
from ckpt_tools.human import human_bytes as size
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.sharding.memory import Memory
from ckpt_tools.sharding.parameters import row_size
from ckpt_tools.sharding.placement import Placement, chunk_length

WIDTH, LEFT, RIGHT, TOP = 1200, 56, 12, 96
BODY = 1024  # pixels for all rows when they are many
TALLEST_ROW = 26.0
MOST_PIECES = 6000  # drawn one by one, each with its name as a tooltip
_LISTED = 64  # ranks in the table at most, besides the last
CHAR = 6.4  # mean width of a character of the labels

# Kinds of tensors: name, pattern, colour (distinct for the colour-blind, too).
KINDS = (
    ("experts fc1", re.compile(r"\.experts\..*fc1"), "#4269d0"),
    ("experts fc2", re.compile(r"\.experts\..*fc2"), "#97bbf5"),
    ("router", re.compile(r"router|gate_weight"), "#9c6b4e"),
    ("norms", re.compile(r"norm"), "#ff725c"),
    ("embedding, output", re.compile(r"embeddings?\b|output_layer|embedder"), "#a463f2"),
    ("attention, mixer", re.compile(r"attention|mixer"), "#efb118"),
    ("MLP", re.compile(r"\bmlp\b"), "#3ca951"),
    ("other", re.compile(""), "#6cc5b0"),
)

# What a rank holds in training, by its colour; together they are its peak.
MEMORY_PARTS = {
    "weights": "#4269d0", "main_weights": "#efb118", "gradients": "#ff725c", "adam": "#3ca951",
    "communication": "#9498a0",
}  # fmt: skip


class Segment(NamedTuple):
    """Bytes `[start, start + length)` of a rank's row that hold elements of `tensor`."""

    start: int
    length: int
    tensor: str


class Column(NamedTuple):
    """A part of every row: one flat buffer, or one unit's tensors where each is cut on its own."""

    title: str
    start: int
    length: int  # bytes, padding included


@dataclass(frozen=True)
class Picture:
    """What is drawn."""

    title: str
    columns: list[Column]
    rows: list[list[Segment]]
    padding: int | None = None  # of all buffers in training; None: of those that are drawn

    @property
    def row_bytes(self) -> int:
        """Length of every row."""
        return max((c.start + c.length for c in self.columns), default=0)


def picture(core: Placement, title: str, padding: int | None = None) -> Picture:
    """The weights of every rank, in the element type of the running model, in buffer order."""
    ranks = range(core.topology.world_size)
    found = [list(_parts(core, rank)) for rank in ranks]
    columns: list[Column] = []
    at = 0
    for number in range(max(map(len, found))):
        parts = [parts[number] for parts in found if number < len(parts)]
        length = max(part.length for part in parts)
        columns.append(Column(parts[0].title, at, length))
        at += length
    rows = [
        [
            s._replace(start=s.start + c.start)
            for c, part in zip(columns, parts, strict=False)
            for s in part.held
        ]
        for parts in found
    ]
    return Picture(title, columns, rows, padding)


class _Part(NamedTuple):
    title: str
    length: int
    held: list[Segment]


def _parts(core: Placement, rank: int) -> Iterator[_Part]:
    """A rank's row, column by column."""
    for bucket in core.buckets(rank):
        members = [core.parameters[i] for i in bucket.group.members]
        start, stop = 0, bucket.size
        if core.topology.strategy != "no_shard":
            start, stop = bucket.part_range(core.part(bucket, rank))
        width = itemsize(bucket.group.dtype)
        held, at = [], 0
        for item, first, last in bucket.packing.pieces(start, stop):
            begin = bucket.packing.offsets[item] + first - start
            held.append(Segment(begin * width, (last - first) * width, members[item].name))
            at = begin + last - first
        experts = " experts" if all(".experts." in p.name for p in members) else ""
        yield _Part(f"{_unit(members[0].name)}{experts}", max(stop - start, at) * width, held)
    alone: dict[str, list[tuple[int, int, int]]] = {}
    buffered = {i for bucket in core.buckets(rank) for i in bucket.group.members}
    for i, start, stop in core.rows(rank):
        if i not in buffered:
            alone.setdefault(_unit(core.parameters[i].name), []).append((i, start, stop))
    for unit, rows in alone.items():
        held, at = [], 0
        for i, start, stop in rows:
            p, shape = core.parameters[i], core.local_shapes[i]
            row = row_size(shape) * itemsize(p.dtype)
            whole = shape[0] if shape else 1
            if stop > start:
                held.append(Segment(at, (stop - start) * row, p.name))
            at += row * (whole if p.buffer else chunk_length(whole, core.shard_size(p.is_expert)))
        yield _Part(unit, at, held)


def _unit(name: str) -> str:
    """`layers.3`, `mtp.layers.0`, or `root`."""
    match = re.search(r"(?:(mtp)\.)?layers\.\d+(?=\.)", name)
    return match[0] if match else "root"


def svg(shown: Picture) -> str:
    """The picture as one SVG document."""
    count = len(shown.rows)
    height = min(TALLEST_ROW, BODY / count)
    scale = (WIDTH - LEFT - RIGHT) / max(shown.row_bytes, 1)
    bottom = TOP + height * count
    totals = _totals(shown)
    body = [
        *_header(shown, totals),
        _bare_rows(count, height),
        *_bars(shown, height, scale),
        *_column_marks(shown, scale, bottom),
        *_rank_labels(count, height),
        *_legend(totals, bottom),
    ]
    total = bottom + 64
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="wide" viewBox="0 0 {WIDTH} {total:.0f}" role="img" '
        f'aria-label="{safe(shown.title)}">\n{_STYLE}\n' + "\n".join(body) + "\n</svg>\n"
    )


def html(shown: Picture, memory: Mapping[int, Memory] | None = None) -> str:
    """A page with the picture, and a bar and a row of numbers for the ranks; `memory` is theirs in training."""
    memory = memory or {}
    totals = [sum(s.length for s in row) for row in shown.rows]
    count = len(shown.rows)
    listed = sorted({*range(0, count, -(-count // _LISTED)), count - 1})
    columns = [(name, True) for name in ("rank", "tensors", "weights held")]
    rows = [[str(r), str(len({s.tensor for s in shown.rows[r]})), size(totals[r])] for r in listed]
    if memory:
        listed = [rank for rank in listed if rank in memory]
        rows = [row for row in rows if int(row[0]) in memory]
        columns += [(_words(part), True) for part in (*MEMORY_PARTS, "padding", "peak")]
        rows = [
            [*row, *(size(getattr(memory[r], part)) for part in (*MEMORY_PARTS, "padding", "peak"))]
            for r, row in zip(listed, rows, strict=True)
        ]
    note = "" if len(listed) == len(shown.rows) else f"<p>{len(listed)} of {len(shown.rows)} ranks.</p>"
    bars = _memory_bars({r: memory[r] for r in listed}) if memory else ""
    body = (
        f'<h1 class=narrow>{safe(shown.title)}</h1><div class="scroll">{svg(shown)}</div>{bars}'
        f"{table(columns, rows)}{note}"
    )
    return page(shown.title, body, _PAGE_STYLE)


def _memory_bars(memory: Mapping[int, Memory]) -> str:
    """What every rank holds in training, a bar a rank: its length is the peak, without activations."""
    most = max((m.peak for m in memory.values()), default=0) or 1
    bars = []
    for rank, held in memory.items():
        x, pieces = 0.0, []
        for part, colour in MEMORY_PARTS.items():
            width = 100 * getattr(held, part) / most
            text = f"rank {rank}: {_words(part)} {size(getattr(held, part))}"
            pieces.append(
                f'<rect x="{x:.3f}" width="{width:.3f}" height="10" fill="{colour}"><title>{text}</title></rect>'
            )
            x += width
        bars.append(
            f"<tr><td class=n>{rank}</td><td class=bar><svg viewBox='0 0 100 10' preserveAspectRatio='none'>"
            f"{''.join(pieces)}</svg></td><td class=n>{size(held.peak)}</td></tr>"
        )
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{_words(part)}</span>'
        for part, colour in MEMORY_PARTS.items()
    )
    return (
        f"<h2>Memory of a rank in training, without activations</h2><p class=keys>{keys}</p>"
        f"<table class=bars><tbody>{''.join(bars)}</tbody></table>"
    )


def _words(part: str) -> str:
    """What is held, as people write it."""
    return part.replace("_", " ").replace("adam", "Adam")


def _header(shown: Picture, totals: dict[str, int]) -> Iterator[str]:
    whole = shown.row_bytes * len(shown.rows)
    bare = whole - sum(totals.values())
    said = f"what no tensor fills is padding: {size(bare)}, {100 * bare / max(whole, 1):.1f} %. "
    if shown.padding is not None:
        said = f"padding, of all buffers in training: {size(shown.padding)}. "
    yield f'<text class="title" x="{LEFT}" y="26">{safe(shown.title)}</text>'
    yield (
        f'<text x="{LEFT}" y="46">one row per rank, {size(shown.row_bytes)} of weight buffers each; '
        f"{said}"
        "Columns are FSDP units, bare numbers are layers.</text>"
    )


def _bare_rows(count: int, height: float) -> str:
    """All rows as padding, over which the tensors are drawn."""
    width, thick = WIDTH - LEFT - RIGHT, _thickness(height)
    if thick == height:
        commands = f"M{LEFT} {TOP}h{width}v{height * count:.2f}h-{width}z"
    else:
        commands = "".join(
            f"M{LEFT} {TOP + i * height:.2f}h{width}v{thick:.2f}h-{width}z" for i in range(count)
        )
    return f'<path class="padding" d="{commands}"/>'


def _thickness(height: float) -> float:
    """Pixels of a row that are drawn: rows keep a distance while there is room for it."""
    return height if height < 6 else height - 2


def _bars(shown: Picture, height: float, scale: float) -> Iterator[str]:
    one_by_one = sum(map(len, shown.rows)) <= MOST_PIECES
    thick = _thickness(height)
    paths: dict[str, list[str]] = {}
    for rank, row in enumerate(shown.rows):
        y = TOP + rank * height
        for x, width, segment in _drawn(row, scale, one_by_one):
            kind = _kind(segment.tensor)
            if not one_by_one:
                paths.setdefault(kind, []).append(f"M{x:.1f} {y:.2f}h{width:.1f}v{thick:.2f}h-{width:.1f}z")
                continue
            text = f"rank {rank}: {segment.tensor}, {size(segment.length)}"
            yield (
                f'<rect class="{_css(kind)}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{thick:.2f}">'
                f"<title>{safe(text)}</title></rect>"
            )
    for kind, commands in paths.items():
        yield f'<path class="{_css(kind)}" d="{"".join(commands)}"><title>{kind}</title></path>'


def _drawn(row: list[Segment], scale: float, one_by_one: bool) -> Iterator[tuple[float, float, Segment]]:
    """(x, width, segment) in pixels; neighbours of the same kind are joined unless `one_by_one`."""
    at = 0
    while at < len(row):
        first = last = row[at]
        at += 1
        while not one_by_one and at < len(row) and _kind(row[at].tensor) == _kind(first.tensor):
            gap = (row[at].start - last.start - last.length) * scale
            if gap > 0.3:
                break
            last = row[at]
            at += 1
        width = (last.start + last.length - first.start) * scale
        gap = 0.4 if one_by_one and width > 3 else 0
        yield LEFT + first.start * scale, max(width - gap, 0.1), first


def _column_marks(shown: Picture, scale: float, bottom: float) -> Iterator[str]:
    """A line at every column and, as far as there is room, its name."""
    free = 0.0
    for column in shown.columns:
        x, width = LEFT + column.start * scale, column.length * scale
        if width > 3:
            yield f'<path class="mark" d="M{x:.1f} {TOP - 6}V{bottom:.1f}"/>'
        label = next((t for t in (column.title, _short(column.title)) if len(t) * CHAR < width), "")
        if label and x >= free:
            yield f'<text class="small" x="{x + 1:.1f}" y="{TOP - 10}">{safe(label)}</text>'
            free = x + 5 + len(label) * CHAR


def _short(title: str) -> str:
    """`mtp`, or the number of a layer."""
    return "mtp" if title.startswith("mtp") else re.sub(r"\D", "", title) or title


def _rank_labels(count: int, height: float) -> Iterator[str]:
    step = 1
    while step * height < 14:
        step *= 2
    for rank in range(0, count, step):
        y = TOP + rank * height + min(height / 2 + 4, 10 if step > 1 else height)
        yield f'<text class="small end" x="{LEFT - 8}" y="{y:.1f}">{rank}</text>'
    yield f'<text class="small end" x="{LEFT - 8}" y="{TOP - 10}">rank</text>'


def _legend(totals: dict[str, int], bottom: float) -> Iterator[str]:
    x, y = float(LEFT), bottom + 22
    for kind, text in [
        *((kind, f"{kind} {size(nbytes)}") for kind, nbytes in totals.items()),
        ("padding", "padding"),
    ]:
        width = 26 + len(text) * CHAR
        if x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + 20
        yield f'<rect class="{_css(kind)}" x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12"/>'
        yield f'<text class="small" x="{x + 17:.0f}" y="{y:.0f}">{safe(text)}</text>'
        x += width


def _totals(shown: Picture) -> dict[str, int]:
    """Bytes by kind over all ranks, those that occur."""
    found: dict[str, int] = {}
    for row in shown.rows:
        for segment in row:
            kind = _kind(segment.tensor)
            found[kind] = found.get(kind, 0) + segment.length
    return {kind: found[kind] for kind, _, _ in KINDS if kind in found}


@lru_cache(maxsize=1 << 17)
def _kind(tensor: str) -> str:
    return next(kind for kind, pattern, _ in KINDS if pattern.search(tensor))


def _css(kind: str) -> str:
    return re.sub(r"\W+", "-", kind)


_COLOURS = "".join(f".{_css(kind)}{{fill:{colour}}}" for kind, _, colour in KINDS)
_STYLE = (
    "<style>text{font:13px system-ui,sans-serif;fill:#222}.title{font-size:17px;font-weight:600}"
    ".small{font-size:11px}.end{text-anchor:end}.mark{stroke:#888;stroke-width:.6;fill:none}"
    f".padding{{fill:url(#pad)}}{_COLOURS}"
    "</style>"
    '<defs><pattern id="pad" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<rect width="6" height="6" fill="#ececec"/><path d="M-1 7L7 -1" stroke="#c4c4c4"/></pattern></defs>'
)
_PAGE_STYLE = (
    "td.bar{width:70vw;max-width:1100px;padding:2px 12px 2px 0}td.bar svg{width:100%;height:12px}"
    "table.bars td{border:0;padding-bottom:0}.keys span{margin-right:14px;white-space:nowrap;display:inline-block}"
    "@media(min-width:1140px){h1.narrow{display:none}}"  # the drawing has it, whole where it need not be scrolled
    ".keys i{display:inline-block;width:11px;height:11px;margin-right:5px}"
)
