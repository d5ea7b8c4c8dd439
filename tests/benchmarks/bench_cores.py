"""Everything the tool does with bytes against the whole machine: sixteen `cp` at once, and as many `cat`.

    python -m tests.benchmarks.bench_cores FOLDER [--gib 8] [--layout L] [--runs 5] [--only NAME ...]

One process that copies does not know what a machine can do: here the anchor is sixteen `cp` of sixteen equal files of
the source's size together. Rows are run in turn, the first round is thrown away; wall seconds from start to exit,
median and range, and for the tool the largest sum of anonymous memory over its processes. Run by hand, not by CI.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.synthetic import LAYOUTS

TOOL = (sys.executable, "-m", "ckpt_tools")
SIXTEEN = range(16)
_SAMPLE_SECONDS = 0.02


def anonymous_bytes(session: int) -> tuple[int, int, int]:
    """RssAnon of all processes of a session (shared pages count in each), their Pss_Anon, and the largest RssAnon."""
    sizes, shared = [0], 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) != session:
                continue
            status = (folder / "status").read_text()
            rollup = (folder / "smaps_rollup").read_text()
        except (OSError, ProcessLookupError):
            continue
        if "RssAnon:" in status:
            sizes.append(int(status.split("RssAnon:")[1].split()[0]) << 10)
            shared += int(rollup.split("Pss_Anon:")[1].split()[0]) << 10
    return sum(sizes), shared, max(sizes)


def timed(command: str) -> tuple[float, tuple[int, int, int]]:
    """Seconds of a shell command, and the most memory it had."""
    most = (0, 0, 0)
    started = time.monotonic()
    process = subprocess.Popen(["bash", "-c", command], stdout=subprocess.DEVNULL, start_new_session=True)

    def watch() -> None:
        nonlocal most
        while process.poll() is None:
            most = max(most, anonymous_bytes(process.pid))
            time.sleep(_SAMPLE_SECONDS)

    watcher = threading.Thread(target=watch)
    if (
        "ckpt_tools" in command and "MEMORY" in os.environ
    ):  # looking costs time: not in runs whose time counts
        watcher.start()
    code = process.wait()
    seconds = time.monotonic() - started
    if watcher.ident:
        watcher.join()
    if code:
        raise SystemExit(f"{command}: exit status {code}")
    return seconds, most


def commands(folder: Path) -> dict[str, str]:
    """What is measured, by name; each writes `out`, or nothing."""
    tool, source, out = " ".join(TOOL), folder / "source", folder / "out"
    convert = f"{tool} convert {source} {out} -q"
    back = f"{tool} convert {folder / 'fsdp'} {out} --to torch_dist -q"
    at_once = " & ".join(f"cp {folder}/equal/{i} {out}/{i}" for i in SIXTEEN)
    reading = " & ".join(f"cat {folder}/equal/{i} > /dev/null" for i in SIXTEEN)
    return {
        "cp -r": f"cp -r {source} {out}",
        "16 cp at once": f"mkdir {out}; {at_once} & wait",
        "16 cat at once": f"{reading} & wait",
        "convert": convert,
        "convert --workers 1": f"{convert} --workers 1",
        "convert --check-source none": f"{convert} --check-source none",
        "convert --check-masters all": f"{convert} --check-masters all",
        "convert --world-size 16": f"{convert} --layout even --world-size 16",
        "convert --dp-shard 64": f"{convert} --dp-shard 64",
        "back to torch_dist": back,
        "verify --content": f"{tool} verify {source} --content -q",
        "verify --content (fsdp)": f"{tool} verify {folder / 'fsdp'} --content -q",
        "diff": f"{tool} diff {source} {folder / 'fsdp'} -q",
        "export-hf": f"{tool} export-hf {source} {out} -q",
        "--help": f"{tool} --help",
        "inspect": f"{tool} inspect {source}",
    }


def prepare(folder: Path, given: argparse.Namespace) -> int:
    """Source, its conversion and sixteen equal files; bytes of the source."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "equal").mkdir(parents=True)
    make = ("--gib", str(given.gib), "--tp", "2", "--layout", given.layout)
    subprocess.run([sys.executable, "-m", "tests.synthetic", str(folder / "source"), *make], check=True)
    source = [str(folder / name) for name in ("source", "fsdp")]
    subprocess.run([*TOOL, "convert", *source, "-q"], check=True, stdout=subprocess.DEVNULL)
    size = sum(p.stat().st_size for p in (folder / "source").rglob("*") if p.is_file())
    block = os.urandom(1 << 24)
    for number in SIXTEEN:
        with (folder / f"equal/{number}").open("wb") as file:
            for at in range(0, size // 16, len(block)):
                file.write(block[: size // 16 - at])
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()
    folder = given.folder / "bench_cores"
    size = prepare(folder, given)
    rows = {k: v for k, v in commands(folder).items() if not given.only or k in given.only}
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    memory: dict[str, tuple[int, int, int]] = {}
    for turn in range(given.runs + 1):
        for name, command in rows.items():
            shutil.rmtree(folder / "out", ignore_errors=True)
            taken, most = timed(command)
            memory[name] = max(memory.get(name, most), most)
            if turn:
                seconds[name].append(taken)
    shutil.rmtree(folder)
    print(f"{size / 2**30:.2f} GiB, {given.layout}, {len(os.sched_getaffinity(0))} cores, {given.runs} runs")
    anchor = statistics.median(seconds["16 cp at once"])
    for name, row in seconds.items():
        middle = statistics.median(row)
        sizes = " ".join(f"{n >> 20:5d}" for n in memory[name]) if any(memory[name]) else ""
        print(
            f"{name:36} {middle:6.2f} ({min(row):.2f}-{max(row):.2f})  / 16 cp {middle / anchor:5.2f}  {sizes}"
        )
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
