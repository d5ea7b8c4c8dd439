"""Everything the tool does with bytes on one machine, against `cp`, `cat` and stock torch: time, memory, processes.

    python -m tests.benchmarks.bench_local FOLDER [--gib 4 [16]] [--layout L] [--runs 5] [--only NAME ...]

Rows are run `--runs` times in turn, so that a noisy machine disturbs all alike; the first round is thrown away. For
each: median wall seconds and range from process start to exit, the ratio to the first row in the same round, seconds
of moving bytes as the tool reports them (without starting, planning and checking), with `--memory` the largest sum of
anonymous memory over its processes and the largest of one, and how the bytes went. With a second size: the seconds
that no size changes, and the bytes that the row reads over the seconds between the best runs at both sizes. FOLDER
chooses the file system, and needs five times the size. `--json` appends one line a row, which `chart.py` draws.
By hand, not by CI.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.benchmarks.timing import TOOL, Taken, equal_files, size_of, taken, written
from tests.synthetic import LAYOUTS

STOCK = """
import sys, warnings, torch, torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
stored = dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata
state = dict((k, torch.empty(v.size, dtype=v.properties.dtype)) for k, v in stored.items() if hasattr(v, "size"))
dcp.load(state, checkpoint_id=sys.argv[1])
dcp.save(state, storage_writer=dcp.FileSystemWriter(sys.argv[2], sync_files=False))
"""
_CONVERT = "{tool} convert {source} {out} {said}"
_VERIFY, _DIFF = "{tool} verify {source} --content -q {how}", "{tool} diff {source} {fsdp} -q {how}"
_RANKS = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node "
# A row is a command, and the folders that it reads.
ROWS = {
    "cp -r": ("cp -r {fsdp} {out}", "fsdp"),
    "16 cp at once": ("mkdir {out}; ls {equal} | xargs -P 16 -I N cp {equal}/N {out}/N", "equal"),
    "16 cat at once": ("ls {equal} | xargs -P 16 -I N cat {equal}/N > /dev/null", "equal"),
    "cp + sync, cold": ("cp -r {fsdp} {out} && sync -f {out}", "fsdp"),
    "stock load + save": (f"{sys.executable} -c '{STOCK}' {{source}}/iter_* {{out}}", "source"),
    "convert": (_CONVERT, "source"),
    "convert, before": (_CONVERT, "source"),
    "convert, 16 files": (f"{_CONVERT} --layout even --world-size 16", "source"),
    "convert, 64 ranks": (f"{_CONVERT} --dp-shard 64", "source"),
    "convert, 1 worker": (f"{_CONVERT} --workers 1", "source"),
    "convert, 1 thread": (f"{_CONVERT} --threads 1", "source"),
    "convert, 8 threads": (f"{_CONVERT} --threads 8", "source"),
    "masters all": (f"{_CONVERT} --check-masters all", "source"),
    "masters all, before": (f"{_CONVERT} --check-masters all", "source"),
    "masters none": (f"{_CONVERT} --check-masters none", "source"),
    "source none": (f"{_CONVERT} --check-source none", "source"),
    "convert --fsync, cold": (f"{_CONVERT} --fsync", "source"),
    "convert --direct, cold": (f"{_CONVERT} --fsync --direct --threads 4", "source"),
    **{f"{n} processes": (f"{_RANKS}{n} -m ckpt_tools convert {{source}} {{out}} {{said}}", "source")
       for n in (1, 2, 4, 16)},
    "back to torch_dist": ("{tool} convert {fsdp} {out} --to torch_dist {said}", "fsdp"),
    "export-hf": ("{tool} export-hf {source} {out} {said}", "source"),
    "import-hf": ("{tool} import-hf {hf} {out} {said}", "hf"),
    "cp -r of the model": ("cp -r {hf} {out}", "hf"),
    "verify --content": (_VERIFY, "source"),
    "verify --content (fsdp)": (_VERIFY.replace("source", "fsdp"), "fsdp"),
    "diff": (_DIFF, "source fsdp"),
    "diff (same layout)": (_DIFF.replace("fsdp", "source"), "source source"),
    "help": ("{tool} --help", ""),
    "inspect": ("{tool} inspect {source}", ""),
}  # fmt: skip


@dataclass
class Row:
    """Measurements of one command at one size; sizes in bytes."""

    name: str
    gib: float
    seconds: list[float] = field(default_factory=list)
    moving: list[float] = field(default_factory=list)
    anonymous: int = 0  # of all processes together
    largest: int = 0
    resident: int = 0
    ways: str = ""

    def add(self, one: Taken) -> None:
        self.seconds.append(one.wall)
        self.anonymous, self.largest = max(self.anonymous, one.together), max(self.largest, one.largest)
        self.resident = max(self.resident, one.resident)


def drop_caches(folder: Path) -> None:
    """Write back and forget the cached pages of a folder's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def prepare(given: argparse.Namespace, gib: float, folder: Path) -> None:
    """A source, what it is converted and exported to, and sixteen equal files of its size together."""
    source = folder / "source"
    if source.exists():
        return
    sizes = [
        f"--{name}={value}" for name in ("layout", "tp", "pp", "vocab") if (value := getattr(given, name))
    ]
    taken([sys.executable, "-m", "tests.synthetic", str(source), f"--gib={gib}", *sizes], looks=False)
    weights = ["--weights-only"] if given.layout == "storm" else []  # it holds no optimizer
    taken([*TOOL, "convert", str(source), str(folder / "fsdp"), "-q", *weights], looks=False)
    if given.layout != "storm":
        taken([*TOOL, "export-hf", str(source), str(folder / "hf"), "-q"], looks=False)
    equal_files(folder / "equal", 16, size_of(source))


def how(report: Mapping[str, float]) -> str:
    """The bytes of a conversion by the way they went."""
    names = {"bytes_kernel_copied": "kernel", "bytes_cloned": "cloned", "bytes_touched": "touched"}
    return ", ".join(f"{report[key] / 2**30:.2f} GiB {name}" for key, name in names.items() if report[key])


def measure(given: argparse.Namespace, folders: dict[float, Path]) -> list[Row]:
    """The rows, size by size."""
    found = [Row(name, gib) for name in given.only for gib in folders]
    for turn in range(given.runs + 1):
        for row in found:
            folder = folders[row.gib]
            places = {name: folder / name for name in ("source", "fsdp", "hf", "equal", "out")}
            report = folder / "report.json"
            report.unlink(missing_ok=True)
            shutil.rmtree(folder / "out", ignore_errors=True)
            if "cold" in row.name:
                drop_caches(folder)
            said = f"-q --report {report}" + (" --weights-only" if given.layout == "storm" else "")
            words = {**places, "tool": " ".join(TOOL), "said": said, "how": " ".join(given.options)}
            older = {"PYTHONPATH": given.before, "PYTHONSAFEPATH": "1"}  # the second: not from here
            environ = older if row.name.endswith("before") else {}
            one = taken(ROWS[row.name][0].format(**words), environ, given.memory)
            if turn:
                row.add(one)
                if report.exists():
                    row.moving.append(written(report)["seconds"])
                    row.ways = how(written(report))
    return found


def print_table(rows: list[Row], folders: dict[float, Path], runs: int) -> None:
    """As Markdown; a row is compared with the first of its size."""
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, Linux {platform.release()}, {runs} runs\n")
    columns = (
        "",
        "GiB",
        "median s",
        "range",
        "/ first",
        "moving s",
        "MiB together, one",
        "bytes",
        "start s, GB/s",
    )
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    first = {gib: next(row for row in rows if row.gib == gib) for gib in folders}
    for row in rows:
        ratio = statistics.median(a / b for a, b in zip(row.seconds, first[row.gib].seconds, strict=True))
        memory = f"{row.anonymous >> 20}, {row.largest >> 20}" if row.anonymous else ""
        moving = f"{statistics.median(row.moving):.2f}" if row.moving else ""
        spread = f"{min(row.seconds):.2f}-{max(row.seconds):.2f}"
        cells = [
            row.name,
            f"{row.gib:g}",
            f"{statistics.median(row.seconds):.2f}",
            spread,
            f"{ratio:.2f}",
            moving,
        ]
        print("|", " | ".join([*cells, memory, row.ways, slope(row, rows, folders)]), "|", flush=True)


def slope(row: Row, rows: list[Row], folders: dict[float, Path]) -> str:
    """Seconds at no size, and bytes a second, from the best runs at two sizes; nothing for the first of them."""
    small = next(one for one in rows if one.name == row.name)
    reads = ROWS[row.name][1].split()
    if small is row or not reads:
        return ""
    sizes = [size_of(*(folders[one.gib] / name for name in reads)) for one in (small, row)]
    rate = (sizes[1] - sizes[0]) / (min(row.seconds) - min(small.seconds))
    return f"{min(small.seconds) - sizes[0] / rate:.2f}, {rate / 1e9:.2f}"


def main() -> None:
    """Print the table; the first row is what the others are compared with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, nargs="+", default=[4])
    parser.add_argument("--layout", choices=(*LAYOUTS, "storm"), default=LAYOUTS[0])
    parser.add_argument("--tp", type=int, default=2, help="1: every payload is copied whole")
    parser.add_argument("--pp", type=int, help="stages, each written by a process of its own")
    parser.add_argument("--vocab", type=int, help="one embedding of so many tokens")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--only",
        nargs="*",
        choices=ROWS,
        metavar="NAME",
        default=["cp -r", "convert", "masters all", "masters none"],
    )
    parser.add_argument("--options", nargs="*", default=[], help="of verify and diff: --options=--workers=8")
    parser.add_argument("--before", help="PYTHONPATH of an older ckpt_tools, for the rows `... before`")
    parser.add_argument("--memory", action="store_true", help="look at it, which costs time")
    parser.add_argument("--json", type=Path, help="append the measurements here, one line a row")
    parser.add_argument("--keep", action="store_true", help="leave the samples for the next time")
    given = parser.parse_args()
    folders = {
        gib: given.folder / f"{given.layout}-{gib:g}-{given.tp}-{given.vocab or ''}" for gib in given.gib
    }
    for gib, folder in folders.items():
        prepare(given, gib, folder)
    rows = measure(given, folders)
    print(f"## {given.layout}, tp {given.tp}, {given.vocab or 'usual'} vocabulary, {given.folder}\n")
    print_table(rows, folders, given.runs)
    if given.json:
        with given.json.open("a") as file:
            for row in rows:
                about = {"folder": str(given.folder), "layout": given.layout}
                file.write(
                    json.dumps({**about, "bytes": size_of(folders[row.gib] / "fsdp"), **asdict(row)}) + "\n"
                )
    for folder in folders.values():
        if not given.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
