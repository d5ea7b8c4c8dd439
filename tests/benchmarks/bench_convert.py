"""Converting a synthetic checkpoint against copying its output: time, memory, processes.

    python -m tests.benchmarks.bench_convert FOLDER [--gib 4] [--layout L] [--runs 5] [--only NAME ...]

Every row is a command run `--runs` times in turn with the others, so that a noisy machine disturbs all alike:
median wall seconds and range from process start to exit, the ratio to `cp -r` of the same bytes in the same round,
seconds of moving bytes as the tool reports them (without starting, planning and checking), peak anonymous memory
above a process that did the same imports, and how the bytes went. FOLDER chooses the file system. `--json` appends
one line a row, which `chart.py` draws. Run by hand, not by CI.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.synthetic import LAYOUTS

CONVERT = "convert-torch-dist-to-fsdp-dtensor"
IMPORTS = (
    "import ckpt_tools.cli.app, ckpt_tools.commands.convert.to_dtensors, ckpt_tools.execute.run, "
    "ckpt_tools.execute.proof.masters"
)
STOCK = """
import sys, warnings, torch, torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
stored = dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata
state = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in stored.items() if hasattr(v, "size")}
dcp.load(state, checkpoint_id=sys.argv[1])
dcp.save(state, storage_writer=dcp.FileSystemWriter(sys.argv[2], sync_files=False))
"""
PARALLEL_CP = "mkdir -p {out}/part && find {sample} -type f | xargs -P 16 -n 1 cp -t {out}/part"
DIRECT = ("--fsync", "--direct", "--threads", "4")
SIXTEEN = ("--layout", "even", "--world-size", "16")


@dataclass
class Row:
    """Measurements of one command; sizes in bytes."""

    name: str
    seconds: list[float] = field(default_factory=list)
    moving: list[float] = field(default_factory=list)
    anonymous: int = 0
    resident: int = 0
    ways: str = ""


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process; 0 when it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def timed(command: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[float, int, int]:
    """Wall seconds, peak RssAnon and peak RSS in bytes of a command that must succeed."""
    peak = 0
    environ = {**os.environ, **(environ or {})}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program is compiled once, not at every start
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environ)
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    done.set()
    watcher.join()
    if status:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    return seconds, peak, usage.ru_maxrss * 1024


def imports_only() -> int:
    """RssAnon of a process that imports what a conversion imports, in bytes."""
    code = (
        f"{IMPORTS}; print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('RssAnon')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


def held(source: Path) -> list[str]:
    """What must be said of a source that holds no optimizer: a storm of norms."""
    return ["--weights-only"] if "storm" in source.parent.name else []


def drop_caches(folder: Path) -> None:
    """Write back and forget the cached pages of a folder's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def commands(source: Path, sample: Path, report: Path) -> dict[str, Callable[[Path], list[str]]]:
    """What is compared: name -> command line for a given output."""
    ours = [sys.executable, "-m", "ckpt_tools", CONVERT, str(source), *held(source)]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    iteration = next(source.glob("iter_*"))
    said = ["--quiet", "--report", str(report)]

    def ranks(count: int) -> Callable[[Path], list[str]]:
        return lambda out: [*run, str(count), "-m", "ckpt_tools", CONVERT, str(source), str(out), *said]

    return {
        "cp -r": lambda out: ["cp", "-r", str(sample), str(out)],
        "cp --reflink=never": lambda out: ["cp", "-r", "--reflink=never", str(sample), str(out)],
        "cp --reflink=always": lambda out: ["cp", "-r", "--reflink=always", str(sample), str(out)],
        "parallel cp": lambda out: ["sh", "-c", PARALLEL_CP.format(sample=f"{sample}16", out=out)],
        "convert": lambda out: [*ours, str(out), *said],
        "convert, before": lambda out: [*ours, str(out), *said],
        "convert, 16 files": lambda out: [*ours, str(out), *said, *SIXTEEN],
        "convert, 1 thread": lambda out: [*ours, str(out), *said, "--threads", "1"],
        "convert, 8 threads": lambda out: [*ours, str(out), *said, "--threads", "8"],
        "masters all": lambda out: [*ours, str(out), *said, "--check-masters", "all"],
        "masters all, before": lambda out: [*ours, str(out), *said, "--check-masters", "all"],
        "masters none": lambda out: [*ours, str(out), *said, "--check-masters", "none"],
        "source none": lambda out: [*ours, str(out), *said, "--check-source", "none"],
        "source none, before": lambda out: [*ours, str(out), *said, "--check-source", "none"],
        "source unread": lambda out: [*ours, str(out), *said, "--check-source", "unread"],
        "cp + sync, cold": lambda out: ["sh", "-c", f"cp -r {sample} {out} && sync -f {out}"],
        "convert --fsync, cold": lambda out: [*ours, str(out), *said, "--fsync"],
        "convert --direct, cold": lambda out: [*ours, str(out), *said, *DIRECT],
        **{f"{n} processes": ranks(n) for n in (1, 2, 4, 16)},
        "stock load + save": lambda out: [sys.executable, "-c", STOCK, str(iteration), str(out)],
    }


def prepare(given: argparse.Namespace, source: Path, sample: Path) -> None:
    """A source, if there is none yet, and what it is converted to, in one file and in sixteen."""
    if not source.exists():
        sizes = ["--gib", str(given.gib), "--tp", str(given.tp)]
        sizes += ["--vocab", str(given.vocab)] if given.vocab else []
        timed([sys.executable, "-m", "tests.synthetic", str(source), "--layout", given.layout, *sizes])
    ours = [sys.executable, "-m", "ckpt_tools", CONVERT, str(source), *held(source)]
    timed([*ours, str(sample), "--quiet", "--overwrite"])
    if "parallel cp" in given.only:
        timed([*ours, f"{sample}16", "--quiet", "--overwrite", *SIXTEEN])


def measure(given: argparse.Namespace) -> tuple[list[Row], int]:
    """All rows, and the bytes of one output."""
    folder = given.folder / given.name
    source, sample, out, report = (folder / name for name in ("source", "sample", "out", "report.json"))
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    prepare(given, source, sample)
    rows = [Row(name) for name in given.only]
    made = commands(source, sample, report)
    for _ in range(given.runs):
        for row in rows:
            if "cold" in row.name:
                drop_caches(folder)
            report.unlink(missing_ok=True)
            older = {"PYTHONPATH": given.before, "PYTHONSAFEPATH": "1"}  # the second: not from here
            environ = older if row.name.endswith("before") else {}
            took, anonymous, resident = timed(made[row.name](out), environ)
            row.seconds.append(took)
            row.anonymous, row.resident = max(row.anonymous, anonymous), max(row.resident, resident)
            if report.exists():
                written = _written(json.loads(report.read_text()))
                row.moving.append(written["seconds"])
                row.ways = how(written)
            shutil.rmtree(out)
    size = sum(path.stat().st_size for path in sample.rglob("*") if path.is_file())
    if not given.keep:
        shutil.rmtree(folder)
    return rows, size


def _written(report: Any) -> dict[str, Any]:
    found: dict[str, Any] = (report[0] if isinstance(report, list) else report)["written"]
    return found


def how(written: Mapping[str, float]) -> str:
    """The bytes of a conversion by the way they went."""
    names = {"bytes_kernel_copied": "kernel", "bytes_cloned": "cloned", "bytes_touched": "touched"}
    return ", ".join(f"{written[key] / 2**30:.2f} GiB {name}" for key, name in names.items() if written[key])


def print_table(rows: Sequence[Row], size: int, runs: int) -> None:
    """As Markdown."""
    base = imports_only()
    print(f"{size / 2**30:.2f} GiB written, {os.cpu_count()} CPUs, {platform.release()}, {runs} runs\n")
    print(
        "| | median s | range | / first | moving s | RssAnon above imports | bytes |\n|---|---|---|---|---|---|---|"
    )
    for row in rows:
        ratio = statistics.median(a / b for a, b in zip(row.seconds, rows[0].seconds, strict=True))
        memory = f"{(row.anonymous - base) / 2**20:.0f} MiB" if row.ways and "proc" not in row.name else ""
        moving = f"{statistics.median(row.moving):.2f}" if row.moving else ""
        spread = f"{min(row.seconds):.2f}-{max(row.seconds):.2f}"
        cells = [row.name, f"{statistics.median(row.seconds):.2f}", spread, f"{ratio:.2f}", moving, memory]
        print("|", " | ".join([*cells, row.ways]), "|", flush=True)


def main() -> None:
    """Print the table; the first row is what the others are compared with."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--layout", choices=(*LAYOUTS, "storm"), default=LAYOUTS[0])
    parser.add_argument("--tp", type=int, default=2, help="1: every payload is copied whole")
    parser.add_argument("--vocab", type=int, help="one embedding of so many tokens")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=["cp -r", "convert", "masters all", "masters none"])
    parser.add_argument("--before", help="PYTHONPATH of an older ckpt_tools, for the rows `... before`")
    parser.add_argument("--json", type=Path, help="append the measurements here, one line a row")
    parser.add_argument("--keep", action="store_true", help="leave source and sample for the next time")
    given = parser.parse_args()
    given.name = f"{given.layout}-{given.gib:g}-{given.tp}-{given.vocab or ''}"
    rows, size = measure(given)
    model = f"{given.gib:g} GiB, tp {given.tp}, {given.vocab or 'usual'} vocabulary"
    print(f"## {given.layout}, {model}, {given.folder}\n")
    print_table(rows, size, given.runs)
    if given.json:
        with given.json.open("a") as file:
            for row in rows:
                about = {"folder": str(given.folder), "layout": given.layout, "gib": given.gib, "bytes": size}
                file.write(json.dumps({**about, **asdict(row)}) + "\n")


if __name__ == "__main__":
    main()
