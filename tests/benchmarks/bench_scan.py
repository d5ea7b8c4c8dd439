"""What only reads, against `cat` of as many processes: seconds a size, and the start that no size changes.

    python -m tests.benchmarks.bench_scan FOLDER [--gib 4 16] [--workers 16] [--runs 5] [--only NAME ...]

FOLDER is a tmpfs with room for three times the sum of the sizes. Rows are run at both sizes in turn; the first round
is thrown away. The bytes between the sizes over the seconds between their best runs are a row's slope, and what is
left of the smaller size is its start. Bytes are those that are read: of `diff` both sides'. Run by hand, not by CI.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

TOOL = (sys.executable, "-m", "ckpt_tools")
STAGES = 8  # of the source: files for two ranks each, written by as many processes


class Row(NamedTuple):
    """A command, and the folders that it reads."""

    command: str
    reads: tuple[Path, ...]


def rows(folder: Path, workers: int, threads: int) -> dict[str, Row]:
    """What is measured in the folder of one size."""
    tool, source, output = " ".join(TOOL), folder / "source", folder / "fsdp"
    how = f"-q --workers {workers} --threads {threads}"
    reading = " & ".join(f"cat {folder}/equal/{i} > /dev/null" for i in range(workers))
    return {
        "cat": Row(f"{reading} & wait", (folder / "equal",)),
        "verify --content": Row(f"{tool} verify {source} --content {how}", (source,)),
        "verify --content (fsdp)": Row(f"{tool} verify {output} --content {how}", (output,)),
        "diff": Row(f"{tool} diff {source} {output} {how}", (source, output)),
        "diff (same layout)": Row(f"{tool} diff {source} {source} {how}", (source, source)),
    }


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def prepare(folder: Path, gib: float, workers: int) -> None:
    """A source, its conversion, and as many equal files as there are workers, of the source's size together."""
    folder.mkdir(parents=True)
    source, started = folder / "source", time.monotonic()
    make = ("--gib", str(gib), "--tp", "2", "--pp", str(STAGES))
    subprocess.run([sys.executable, "-m", "tests.synthetic", str(source), *make], check=True)
    made = time.monotonic()
    convert = [*TOOL, "convert", str(source), str(folder / "fsdp"), "-q"]
    subprocess.run(convert, check=True, stdout=subprocess.DEVNULL)
    print(
        f"{gib} GiB: made in {made - started:.0f} s, converted in {time.monotonic() - made:.0f} s", flush=True
    )
    (folder / "equal").mkdir()
    block, each = os.urandom(1 << 24), size_of(source) // workers
    for number in range(workers):
        with (folder / f"equal/{number}").open("wb") as file:
            for at in range(0, each, len(block)):
                file.write(block[: each - at])


def taken(command: str) -> tuple[float, float]:
    """Wall and CPU seconds of a shell command."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(["bash", "-c", command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - started, cpu


class Line(NamedTuple):
    """A row as a straight line over the bytes that it reads."""

    start: float  # seconds
    rate: float  # bytes a second


def line(sizes: tuple[int, int], seconds: tuple[float, float]) -> Line:
    """Through two sizes; a rate below zero is noise that the sizes do not rise above."""
    rate = (sizes[1] - sizes[0]) / (seconds[1] - seconds[0])
    return Line(seconds[0] - sizes[0] / rate, rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, nargs=2, default=(4, 16))
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=())
    given = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once
    folders = [given.folder / f"bench_scan/{gib}" for gib in given.gib]
    shutil.rmtree(given.folder / "bench_scan", ignore_errors=True)
    for folder, gib in zip(folders, given.gib, strict=True):
        prepare(folder, gib, given.workers)
    of_size = [rows(folder, given.workers, given.threads) for folder in folders]
    names = [name for name in of_size[0] if name == "cat" or not given.only or name in given.only]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {
        (name, i): [] for name in names for i in (0, 1)
    }
    for turn in range(given.runs + 1):
        for (name, i), times in found.items():
            seconds = taken(of_size[i][name].command)
            if turn:
                times.append(seconds)
    print(
        f"{given.workers} workers of {given.threads} threads, {len(os.sched_getaffinity(0))} cores, {given.runs} runs"
    )
    print(f"{'':24} {'seconds, best (median) of either size':>40}  start s   GB/s  / cat  CPU s/GB  / cat")
    anchors: list[Line] = []
    for name in names:
        sizes = [sum(map(size_of, one[name].reads)) for one in of_size]
        sorted_times = [sorted(found[name, i]) for i in (0, 1)]
        shown = ", ".join(f"{t[0][0]:7.3f} ({t[len(t) // 2][0]:.3f})" for t in sorted_times)
        pair = sizes[0], sizes[1]
        lines = [
            line(pair, (min(t[k] for t in sorted_times[0]), min(t[k] for t in sorted_times[1])))
            for k in (0, 1)
        ]
        anchors = anchors or lines
        wall, cpu = lines
        print(
            f"{name:24} {shown:>40} {wall.start:8.3f} {wall.rate / 1e9:6.2f} {wall.rate / anchors[0].rate:6.2f}"
            f" {1e9 / cpu.rate:9.3f} {anchors[1].rate / cpu.rate:6.2f}"
        )
    shutil.rmtree(given.folder / "bench_scan")


if __name__ == "__main__":
    main()
