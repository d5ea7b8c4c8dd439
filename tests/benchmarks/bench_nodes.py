"""Several nodes, simulated: every node is a process with a store's port of its own.

    python -m tests.benchmarks.bench_nodes FOLDER [--to folder|store] [--gib 0.5] [--moving 45]

A port of `store_server` moves so many bytes a second, read and written together: out of the store into a folder a
node copies at that rate, out of the store into the store at half of it. The slowest node is to move for `--moving`
seconds; what comes before is processor time, and long where cores are loaded. `slowest 0.5`: the last node's port has
half of the others' rate.
By hand, not by CI.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_tools.commands.convert.plan import plan_checkpoint
from ckpt_tools.commands.job.placements import Layout
from tests.benchmarks.bench_store import BUCKET
from tests.benchmarks.store_server import store_environment
from tests.benchmarks.timing import TOOL
from tests.ports import free_port

RANKS = 8  # of the target: files that every number of nodes shares out evenly
SOURCE = f"s3://{BUCKET}/source/iter_0000100"
_SECONDS = 900


@contextmanager
def store(folder: Path, rates: list[float]) -> Iterator[list[int]]:
    """A port for every rate."""
    ports = [free_port() for _ in rates]
    words = (sys.executable, "-m", "tests.benchmarks.store_server", str(folder), "--seconds", str(_SECONDS))
    servers = [
        subprocess.Popen((*words, "--processes", "1", "--port", str(port), "--rate", str(rate)))
        for port, rate in zip(ports, rates, strict=True)
    ]
    time.sleep(3)
    try:
        yield ports
    finally:
        for server in servers:
            server.kill()
            server.wait()


def converted(out: str, ports: list[int]) -> tuple[float, float]:
    """Seconds of one conversion by a process at each port: all of them, and those that its report gives to moving."""
    meeting, started = free_port(), time.monotonic()
    running = [
        subprocess.Popen(
            (*TOOL, "convert", SOURCE, out, "-q", "--json", "--workers", "1", "--world-size", str(RANKS)),
            stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
            env=os.environ | _node(rank, len(ports), port, meeting),
        )
        for rank, port in enumerate(ports)
    ]
    report, _ = running[0].communicate(timeout=_SECONDS)
    codes = [process.wait(_SECONDS) for process in running]
    if any(codes):
        raise SystemExit(f"exit statuses {codes}")
    return time.monotonic() - started, json.loads(report)["written"]["seconds"]


def _node(rank: int, nodes: int, port: int, meeting: int) -> dict[str, str]:
    launched = {"RANK": rank, "WORLD_SIZE": nodes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meeting}
    return {name: str(value) for name, value in launched.items()} | store_environment(port)


def measure(folder: Path, to_store: bool, nodes: int, slowest: float, moving: float) -> str:
    """One row: a conversion whose slowest node moves its bytes in so many seconds."""
    objects = folder / "store" / BUCKET
    for old in (folder / "out", objects / "out"):
        shutil.rmtree(old, ignore_errors=True)
    planned = plan_checkpoint(objects / "source", Layout("even", world=RANKS))
    disk = planned.plan.bytes_to_write / nodes / moving / slowest
    rate = disk * 2 if to_store else disk
    out = f"s3://{BUCKET}/out" if to_store else str(folder / "out")
    with store(folder / "store", [rate] * (nodes - 1) + [rate * slowest]) as ports:
        wall, moved = converted(out, ports)
    return (
        f"{'store' if to_store else 'folder'}, {nodes} nodes, slowest {slowest}, {rate / 1e6:.1f} MB/s a port: "
        f"{wall:.1f} s, moving {moved:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--moving", type=float, default=45, help="seconds of the slowest node")
    parser.add_argument("--to", choices=("folder", "store"), default="folder")
    given = parser.parse_args()
    folder = given.folder / "bench_nodes"
    (folder / "store/.uploads").mkdir(parents=True)
    source = str(folder / "store" / BUCKET / "source")
    try:
        subprocess.run([sys.executable, "-m", "tests.synthetic", source, "--gib", str(given.gib)], check=True)
        for nodes, slowest in ((1, 1.0), (2, 1.0), (4, 1.0), (2, 0.5), (4, 0.5)):
            print(measure(folder, given.to == "store", nodes, slowest, given.moving), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
