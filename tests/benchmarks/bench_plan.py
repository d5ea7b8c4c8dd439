"""Time and memory of planning DeepSeek-V3 (671 B parameters with Adam states) for many ranks. Run by hand:

    python -m tests.benchmarks.bench_plan [--ranks 1024] [--json ROWS.jsonl]

A process a line: seconds of wall clock and of CPU, peak memory of the whole process, items planned. `--json` appends
the lines for `chart.py`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def measure(folder: str, ranks: int, rank: int | None) -> dict[str, float]:
    """One plan in this process, reading the metadata included."""
    from ckpt_tools.commands.convert.plan import plan_checkpoint
    from ckpt_tools.commands.job.placements import Layout
    from ckpt_tools.sharding.topology import Topology

    started = time.perf_counter()
    layout = Layout("mfsdp-v1", Topology.of_world(ranks, ep=64))
    found = plan_checkpoint(folder, layout, rank=rank)
    return {
        "seconds": time.perf_counter() - started,
        "cpu": time.process_time(),
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "tensors": len(found.target.tensors),
        "items": len(found.plan.items),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "RANK"))
    given = parser.parse_args()
    if given.measure:
        folder, rank = given.measure
        print(json.dumps(measure(folder, given.ranks, None if rank == "all" else int(rank))))
        return
    from tests.synthetic_deepseek import write_metadata

    environ = dict(os.environ)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once
    with tempfile.TemporaryDirectory() as parent:
        for layers, rank in ((8, "all"), (15, "all"), (30, "all"), (61, "all"), (61, str(given.ranks // 2))):
            folder = Path(parent, f"{layers}-{rank}")
            write_metadata(folder, layers)
            command = [sys.executable, "-m", "tests.benchmarks.bench_plan", "--ranks", str(given.ranks)]
            output = subprocess.run(
                [*command, "--measure", str(folder), rank], capture_output=True, check=True, env=environ
            ).stdout
            m = json.loads(output)
            if given.json:
                with given.json.open("a") as file:
                    file.write(json.dumps({"layers": layers, "rank": rank, **m}) + "\n")
            print(
                f"{layers} layers, {given.ranks} ranks, {'all' if rank == 'all' else 'rank ' + rank}: "
                f"{m['seconds']:.1f} s ({m['cpu']:.1f} s of CPU), {m['gib']:.2f} GiB, {m['tensors']:,} tensors, "
                f"{m['items']:,} items, {1e6 * m['cpu'] / m['tensors']:.0f} us of CPU a tensor"
            )


if __name__ == "__main__":
    main()
