"""Converting a synthetic checkpoint against copying its output: time, memory, processes.

    python -m tests.benchmarks.bench_convert FOLDER [--gib 4] [--runs 5] [--only NAME ...]

Every row is a command run `--runs` times in turn with the others, so that a noisy machine disturbs all alike:
median wall seconds and range, the ratio to `cp -r` of the same bytes in the same round, peak anonymous memory above
a process that did the same imports, and how the bytes went. FOLDER chooses the file system. Run by hand, not by CI.
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
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.synthetic import write_llama

CONVERT = "convert-torch-dist-to-fsdp-dtensor"
IMPORTS = (
    "import ckpt_tools.cli.app, ckpt_tools.convert.to_fsdp_dtensor, ckpt_tools.execute.run, "
    "ckpt_tools.execute.check_masters"
)
STOCK = """
import sys, warnings, torch, torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
stored = dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata
state = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in stored.items() if hasattr(v, "size")}
dcp.load(state, checkpoint_id=sys.argv[1])
dcp.save(state, storage_writer=dcp.FileSystemWriter(sys.argv[2], sync_files=False))
"""


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process; 0 when it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def timed(command: Sequence[str]) -> tuple[float, int]:
    """Wall seconds and peak RssAnon in bytes of a command that must succeed."""
    peak = 0
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.005):
                peak = max(peak, anonymous_bytes(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        status = process.wait()
        seconds = time.perf_counter() - began
        done.set()
        watcher.join()
    if status:
        raise SystemExit(f"{' '.join(command)} failed with {status}")
    return seconds, peak


def imports_only() -> int:
    """RssAnon of a process that imports what a conversion imports, in bytes."""
    code = (
        f"{IMPORTS}; print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('RssAnon')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


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
    ours = [sys.executable, "-m", "ckpt_tools", CONVERT, str(source)]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    iteration = next(source.glob("iter_*"))
    said = ["--quiet", "--report", str(report)]
    return {
        "cp -r": lambda out: ["cp", "-r", str(sample), str(out)],
        "convert": lambda out: [*ours, str(out), *said],
        "convert, masters all": lambda out: [*ours, str(out), *said, "--check-masters", "all"],
        "convert, masters none": lambda out: [*ours, str(out), *said, "--check-masters", "none"],
        "cp + sync, cold": lambda out: ["sh", "-c", f"cp -r {sample} {out} && sync -f {out}"],
        "convert --fsync, cold": lambda out: [*ours, str(out), *said, "--fsync"],
        "2 processes": lambda out: [*run, "2", "-m", "ckpt_tools", CONVERT, str(source), str(out), "--quiet"],
        "stock load + save": lambda out: [sys.executable, "-c", STOCK, str(iteration), str(out)],
    }


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="rows to run besides `cp -r`")
    given = parser.parse_args()
    source, sample, out = (given.folder / name for name in ("source", "sample", "out"))
    report = given.folder / "report.json"
    for path in (sample, out):
        shutil.rmtree(path, ignore_errors=True)
    if not source.exists():
        write_llama(source / "iter_0000100", given.gib)
        (source / "latest_checkpointed_iteration.txt").write_text("100")
    timed([sys.executable, "-m", "ckpt_tools", CONVERT, str(source), str(sample), "--quiet"])
    rows = commands(source, sample, report)
    if given.only:
        rows = {name: command for name, command in rows.items() if name == "cp -r" or name in given.only}
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    peaks: dict[str, int] = dict.fromkeys(rows, 0)
    ways: dict[str, str] = {}
    for _ in range(given.runs):
        for name, command in rows.items():
            if "cold" in name:
                drop_caches(given.folder)
            report.unlink(missing_ok=True)
            took, peak = timed(command(out))
            seconds[name].append(took)
            peaks[name] = max(peaks[name], peak)
            if report.exists():
                ways[name] = how(json.loads(report.read_text()))
            shutil.rmtree(out)
    base = imports_only()
    size = sum(path.stat().st_size for path in sample.rglob("*") if path.is_file())
    print(f"{size / 2**30:.2f} GiB written, {os.cpu_count()} CPUs, {platform.release()}, {given.runs} runs\n")
    print("| | median s | range | / cp -r | peak RssAnon above imports | bytes |\n|---|---|---|---|---|---|")
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(times, seconds["cp -r"], strict=True))
        memory = f"{(peaks[name] - base) / 2**20:.0f} MiB" if name in ways else ""
        row = [name, f"{statistics.median(times):.2f}", f"{min(times):.2f}-{max(times):.2f}", f"{ratio:.2f}"]
        print("|", " | ".join([*row, memory, ways.get(name, "")]), "|")


def how(report: object) -> str:
    """The bytes of a conversion by the way they went, from its JSON report."""
    written = report[0]["written"] if isinstance(report, list) else report["written"]  # type: ignore[index]
    names = {"bytes_kernel_copied": "kernel", "bytes_cloned": "cloned", "bytes_touched": "touched"}
    return ", ".join(f"{written[key] / 2**30:.2f} GiB {name}" for key, name in names.items() if written[key])


if __name__ == "__main__":
    main()
