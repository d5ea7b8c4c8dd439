"""How long DeepSeek-V3 (671 B parameters with Adam states, 9.4 TB) would take: the table in `.github/docs/speed.md`.

    python -m tests.benchmarks.bench_duration [--ranks 1024]

What `plan --disk --network --nodes` says, of one plan for several kinds of storage; speeds are of copying.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ckpt_tools.commands.placements import Layout
from ckpt_tools.commands.plan import plan_checkpoint
from ckpt_tools.formats.dcp import read_catalog
from ckpt_tools.formats.files import LocalFiles
from ckpt_tools.human import human_seconds
from ckpt_tools.plan.duration import Machines, predict
from ckpt_tools.sharding.topology import Topology
from tests.synthetic_deepseek import write_metadata

NODES = (1, 8, 64)
STORAGE = {
    "local disks, 3 GB/s a node": (3e9, None),
    "a parallel file system, 10 GB/s a node, 100 GB/s in all": (10e9, 100e9),
    "an object store, 1 GB/s a node, 40 GB/s in all": (1e9, 40e9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        write_metadata(folder)
        plan = plan_checkpoint(folder, Layout("mfsdp-v1", Topology.of_world(given.ranks, ep=64))).plan
        iteration = next(path.parent for path in folder.rglob(".metadata"))
        chunks = sum(len(e.chunks) for e in read_catalog(LocalFiles(str(iteration))).tensors.values())
    print(f"{plan.bytes_to_write / 1e12:.1f} TB, {len(plan.items):,} items, {chunks:,} chunks")
    for name, (disk, network) in STORAGE.items():
        for nodes in NODES:
            found = predict(plan, chunks, Machines(disk, nodes, network=network))
            print(
                f"{name}, {nodes} nodes: {human_seconds(found.seconds)}; before the first byte "
                f"{human_seconds(found.seconds - found.moving)}; busiest worker {found.straggling:.2f} x the mean"
            )


if __name__ == "__main__":
    main()
