"""Draws time and peak memory against checkpoint size from what `bench_convert --json` wrote.

python -m tests.benchmarks.chart ROWS.jsonl > .github/performance.svg
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LINES = {  # row -> what the chart calls it, colour
    "cp -r": ("cp -r", "#8b949e"),
    "convert": ("ckpt_tools", "#2f81f7"),
    "convert, 16 files": ("ckpt_tools, 16 target ranks", "#3fb950"),
    "stock load + save": ("dcp.load + dcp.save", "#db6d28"),
}
WIDTH, HEIGHT, LEFT, TOP = 330, 220, 56, 40  # of one plot, in pixels
Point = tuple[float, float]


def plot(title: str, left: float, lines: Mapping[str, Sequence[Point]], unit: str) -> list[str]:
    """SVG elements of one log-log plot whose points are (GiB, value)."""
    values = [y for points in lines.values() for _, y in points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def place(point: Point) -> Point:
        across = math.log2(point[0]) / 4  # 1 to 16 GiB
        return left + across * WIDTH, TOP + HEIGHT * (high - math.log10(point[1])) / (high - low)

    out = [f'<text x="{left}" y="{TOP - 14}" class="title">{title}</text>']
    for power in range(low, high + 1):
        _, y = place((1, 10.0**power))
        out.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}" class="grid"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} {unit}</text>')
    for size in (1, 4, 16):
        x, y = place((size, 10.0**low))
        out.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{size} GiB</text>')
    for name, points in lines.items():
        colour = LINES[name][1]
        placed = [place(point) for point in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed]
    return out


def chart(rows: Sequence[Mapping[str, Any]]) -> str:
    """The SVG of both plots and their legend."""

    def lines(value: Callable[[Mapping[str, Any]], float], names: Sequence[str]) -> dict[str, list[Point]]:
        return {n: [(row["gib"], value(row)) for row in rows if row["name"] == n] for n in names}

    ours = [name for name in LINES if name != "cp -r"]
    width, height = 2 * (WIDTH + LEFT) + 70, HEIGHT + TOP + 66
    seconds = lines(lambda row: statistics.median(row["seconds"]), list(LINES))
    body = [
        *plot("time, process start included", LEFT, seconds, "s"),
        *plot("peak RSS", 2 * LEFT + WIDTH + 40, lines(lambda r: r["resident"] / 2**30, ours), "GiB"),
    ]
    for number, (name, colour) in enumerate(LINES.values()):
        x, y = LEFT + number * 185, height - 16
        body.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        body.append(f'<text x="{x + 16}" y="{y}">{name}</text>')
    style = "text{font:12px sans-serif;fill:#6e7781}.title{font-weight:bold}.grid{stroke:#8b949e;stroke-opacity:.3}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    label = "<title>Time and peak memory of a conversion against the size of the checkpoint</title>"
    return "\n".join([head, label, f"<style>{style}</style>", *body, "</svg>"])


def main() -> None:
    """Print the chart of the natural layout's rows in the files given."""
    rows = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    chosen = [row for row in rows if row["layout"] == "fully_reshardable" and row["name"] in LINES]
    print(chart(chosen))


if __name__ == "__main__":
    main()
