"""Draws what the benchmarks wrote with `--json`.

python -m tests.benchmarks.chart CONVERT.jsonl > .github/performance.svg    time and peak memory against size
python -m tests.benchmarks.chart PLAN.jsonl > .github/planning.svg          the same of planning, against tensors
"""

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


def plot(
    title: str, left: float, lines: Mapping[str, Sequence[Point]], unit: str, ticks: Mapping[int, str]
) -> list[str]:
    """SVG elements of one log-log plot, from the first to the last of the horizontal axis's `ticks`."""
    values = [y for points in lines.values() for _, y in points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    first, last = min(ticks), max(ticks)

    def place(point: Point) -> Point:
        across = math.log(point[0] / first) / math.log(last / first)
        return left + across * WIDTH, TOP + HEIGHT * (high - math.log10(point[1])) / (high - low)

    out = [f'<text x="{left}" y="{TOP - 14}" class="title">{title}</text>']
    for power in range(low, high + 1):
        _, y = place((first, 10.0**power))
        out.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}" class="grid"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} {unit}</text>')
    for tick, name in ticks.items():
        x, y = place((tick, 10.0**low))
        out.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{name}</text>')
    for name, points in lines.items():
        colour = LINES.get(name, LINES["convert"])[1]
        placed = [place(point) for point in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed]
    return out


def conversions(rows: Sequence[Mapping[str, Any]]) -> str:
    """The SVG of both plots of `bench_local` and their legend."""

    def lines(value: Callable[[Mapping[str, Any]], float], names: Sequence[str]) -> dict[str, list[Point]]:
        return {n: [(row["gib"], value(row)) for row in rows if row["name"] == n] for n in names}

    names = [name for name in LINES if any(row["name"] == name for row in rows)]
    seconds = lines(lambda row: statistics.median(row["seconds"]), names)
    memory = lines(lambda row: row["resident"] / 2**30, [name for name in names if name != "cp -r"])
    ticks = {1: "1 GiB", 4: "4 GiB", 16: "16 GiB"}
    body = [
        *plot("time, process start included", LEFT, seconds, "s", ticks),
        *plot("peak RSS", 2 * LEFT + WIDTH + 40, memory, "GiB", ticks),
    ]
    for number, name in enumerate(names):
        x, y = LEFT + number * 185, HEIGHT + TOP + 50
        body.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{LINES[name][1]}"/>')
        body.append(f'<text x="{x + 16}" y="{y}">{LINES[name][0]}</text>')
    return picture("Time and peak memory of a conversion against the size of the checkpoint", body)


def plans(rows: Sequence[Mapping[str, Any]]) -> str:
    """The SVG of both plots of `bench_plan`: all ranks, at its sizes."""
    whole = [row for row in rows if row["rank"] == "all"]
    ticks = {row["tensors"]: f"{row['tensors']:,}" for row in whole}
    seconds = {"": [(row["tensors"], row["cpu"]) for row in whole]}
    memory = {"": [(row["tensors"], row["gib"]) for row in whole]}
    body = [
        *plot("CPU seconds, against target tensors", LEFT, seconds, "s", ticks),
        *plot("peak RSS", 2 * LEFT + WIDTH + 40, memory, "GiB", ticks),
    ]
    return picture("Time and memory of planning against the number of target tensors", body)


def picture(label: str, body: Sequence[str]) -> str:
    """An SVG file."""
    style = "text{font:12px sans-serif;fill:#6e7781}.title{font-weight:bold}.grid{stroke:#8b949e;stroke-opacity:.3}"
    width, height = 2 * (WIDTH + LEFT) + 70, HEIGHT + TOP + 66
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, f"<title>{label}</title>", f"<style>{style}</style>", *body, "</svg>"])


def main() -> None:
    """Print the chart of the rows in the files given: of plans, or of the natural layout's conversions."""
    rows = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    if "tensors" in rows[0]:
        print(plans(rows))
    else:
        print(
            conversions(
                [row for row in rows if row["layout"] == "fully_reshardable" and row["name"] in LINES]
            )
        )


if __name__ == "__main__":
    main()
