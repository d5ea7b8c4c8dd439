"""The picture of `du`: a tree map, roles with their layers and tensors in proportion, and a bar an iteration."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_tools.commands.du import AXES, GAPS, METADATA, OBJECTS, UNREAD, Usage
from ckpt_tools.commands.pages import page, safe, table
from ckpt_tools.human import human_bytes as size

WIDTH, HEIGHT = 1200.0, 620.0
_MOST_BOXES = 3000  # drawn one by one, each with its name as a tooltip
_LEAST_LABEL = (60.0, 13.0)  # pixels of a box that has room for a name
_LAYER = re.compile(r"^.*?\.(\d+)\.")  # shown as the number alone
_CHAR, _HEAD_CHAR = 6.7, 8.6  # mean widths of a character of the names, and of the bold ones
_MOST_ROWS = 400
_COLOURS = {  # told apart by the colour-blind, too
    "weight": "#4269d0", "master": "#a87900", "exp_avg": "#2f8a41", "exp_avg_sq": "#3d8f7c", "other": "#9c6b4e",
    OBJECTS: "#a463f2", METADATA: "#777b84", GAPS: "#94989f", UNREAD: "#d9432c", "others": "#8a8d94",
}  # fmt: skip
_STYLE = "p.under{margin:0 0 6px}.bar{fill:#4269d0}.map text{pointer-events:none}.map rect{stroke:#fff}"


class Rectangle(NamedTuple):
    """Where something is drawn, in pixels."""

    x: float
    y: float
    width: float
    height: float


def squarified(sizes: Sequence[float], room: Rectangle) -> list[Rectangle]:
    """A rectangle for each of `sizes`, the largest first, in proportion and as square as can be; they fill `room`.

    Rows are laid along the shorter side of what is left, each as long as that makes its rectangles squarer
    (Bruls, Huizing, van Wijk: Squarified treemaps).
    """
    placed: list[Rectangle] = []
    left = list(sizes)
    while left:
        scale = room.width * room.height / (sum(left) or 1.0)
        short = min(room.width, room.height)
        count = 1
        while count < len(left) and _worst(left[: count + 1], short, scale) <= _worst(
            left[:count], short, scale
        ):
            count += 1
        room = _lay(left[:count], room, scale, placed)
        left = left[count:]
    return placed


def _worst(row: Sequence[float], short: float, scale: float) -> float:
    """The largest ratio of sides in a row along the side `short`."""
    area = sum(row) * scale
    if not area or not short or not row[-1]:
        return float("inf")
    thick = area / short
    return max(max(thick * thick / (n * scale), n * scale / (thick * thick)) for n in (row[0], row[-1]))


def _lay(row: Sequence[float], room: Rectangle, scale: float, placed: list[Rectangle]) -> Rectangle:
    """Place a row along the shorter side of `room`; what is left of it."""
    area = sum(row) * scale
    x, y, width, height = room
    wide = width >= height
    thick = area / (height if wide else width) if area else 0.0
    for n in row:
        long = n * scale / thick if thick else 0.0
        placed.append(Rectangle(x, y, thick, long) if wide else Rectangle(x, y, long, thick))
        x, y = (x, y + long) if wide else (x + long, y)
    if wide:
        return Rectangle(room.x + thick, room.y, max(width - thick, 0.0), height)
    return Rectangle(room.x, room.y + thick, width, max(height - thick, 0.0))


def usage_svg(found: Usage) -> str:
    """The tree map as one SVG document."""
    roles = _tree(found)
    order = sorted(roles, key=lambda role: -sum(roles[role].values()))
    places = squarified([sum(roles[role].values()) for role in order], Rectangle(0, 0, WIDTH, HEIGHT))
    parts = []
    for role, place in zip(order, places, strict=True):
        parts += _role(role, roles[role], place)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="wide map" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" '
        f'aria-label="{safe(found.place)}"><style>text{{font:11px system-ui,sans-serif;fill:#fff}}.head{{font-weight:'
        f"600;font-size:13px}}</style>\n{''.join(parts)}\n</svg>\n"
    )


def usage_html(found: Usage) -> str:
    """A page with the tree map, a bar for every iteration, and tables of all sums."""
    tables = "".join(_sums(axis, found.by(axis)) for axis in AXES)
    twice = ""
    if found.duplicates:
        rows = [
            [f"{one.key} {one.box}", size(one.nbytes), size(one.spare), ", ".join(one.iterations)]
            for one in found.duplicates[:_MOST_ROWS]
        ]
        twice = "<h2>Stored with one checksum in several iterations</h2>" + table(
            [("item", False), ("bytes", True), ("spare", True), ("iterations", False)], rows
        )
    others = [[name, size(nbytes)] for name, nbytes in sorted(found.others.items(), key=lambda one: -one[1])]
    beside = (
        "<h2>Beside the iterations</h2>" + table([("name", False), ("bytes", True)], others) if others else ""
    )
    unread = [[name, why] for name, why in found.unread.items()]
    broken = "<h2>Not whole</h2>" + table([("iteration", False), ("why", False)], unread) if unread else ""
    spare = f", {size(found.spare)} of it in items that an earlier iteration holds with the same checksum"
    body = (
        f"<h1>{safe(found.place)}</h1><p><b>{size(found.total)}</b> in all{spare if found.spare else ''}. "
        "Areas are in proportion; point at one for its name.</p>"
        f'<div class="scroll">{usage_svg(found)}</div>{_bars(found)}{broken}{tables}{beside}{twice}'
    )
    return page(f"du: {found.place}", body, _STYLE)


def _tree(found: Usage) -> dict[str, Counter[str]]:
    """Bytes of every tensor by role, all iterations together; by layer where those are too many to draw."""
    fine, coarse = dict[str, Counter[str]](), dict[str, Counter[str]]()
    for share, nbytes in found.shares.items():
        whole = f"{share.layer}.{share.leaf}".strip(".") or share.iteration
        fine.setdefault(share.role, Counter())[whole] += nbytes
        coarse.setdefault(share.role, Counter())[share.layer or share.leaf or share.iteration] += nbytes
    chosen = fine if sum(map(len, fine.values())) <= _MOST_BOXES else coarse
    if found.others:
        chosen["others"] = Counter(found.others)
    return chosen


def _role(role: str, held: Counter[str], place: Rectangle) -> list[str]:
    total = sum(held.values())
    parts = []
    order = [(name, n) for name, n in held.most_common(_MOST_BOXES) if n]
    head = 18.0 if place.height > 60 and place.width > 80 else 0.0
    room = Rectangle(place.x, place.y + head, place.width, place.height - head)
    colour = _COLOURS.get(role, "#777")
    parts.append(_box(place, colour, f"{role}: {size(total)}"))
    if head:
        parts.append(_text(place.x + 5, place.y + 13, f"{role} {size(total)}", place.width, "head"))
    for (name, nbytes), box in zip(order, squarified([n for _, n in order], room), strict=True):
        parts.append(_box(box, colour, f"{role}: {name}, {size(nbytes)}"))
        if box.width > _LEAST_LABEL[0] and box.height > _LEAST_LABEL[1]:
            parts.append(_text(box.x + 4, box.y + 12, _LAYER.sub(r"\1 ", name, count=1), box.width))
    return parts


def _box(box: Rectangle, colour: str, text: str) -> str:
    return (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{max(box.width, 0):.1f}" height="{max(box.height, 0):.1f}" '
        f'fill="{colour}" stroke="#fff" stroke-width=".6"><title>{safe(text)}</title></rect>'
    )


def _text(x: float, y: float, text: str, width: float, kind: str = "") -> str:
    most = max(int((width - 8) / (_HEAD_CHAR if kind == "head" else _CHAR)), 1)
    shown = text if len(text) <= most else f"{text[: most - 1]}\u2026"
    return f'<text{f" class={chr(34)}{kind}{chr(34)}" if kind else ""} x="{x:.1f}" y="{y:.1f}">{safe(shown)}</text>'


def _bars(found: Usage) -> str:
    """A bar for every iteration."""
    sums = found.by("iteration")
    if len(sums) < 2:
        return ""
    most = max(sums.values())
    bars = "".join(
        f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" style="width:100%;height:10px"><rect class="bar" '
        f'width="{100 * n / max(most, 1):.2f}" height="10"/></svg><p class="under">{safe(name)} {size(n)}</p>'
        for name, n in sums.items()
    )
    return f"<h2>Iterations</h2>{bars}"


def _sums(axis: str, sums: dict[str, int]) -> str:
    rows = [[name or "-", size(n)] for name, n in list(sums.items())[:_MOST_ROWS]]
    more = len(sums) - len(rows)
    note = f"<p>and {more:,} more; --json has all.</p>" if more else ""
    return f"<h2>By {axis}</h2>{table([(axis, False), ('bytes', True)], rows)}{note}"
