"""Memory stays inside the budget when a tensor does not."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.model.box import Box
from tests.conftest import REPO
from tests.synthetic import DcpFolder

MIB = 1 << 20
# Every worker says by how much it has grown since it was forked.
SCRIPT = """
import sys, threading
from pathlib import Path
from ckpt_tools.model.box import Box
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.processes.team import with_workers
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.model.target import Source, Target, TargetTensor
from ckpt_tools.model.views import Permute
from ckpt_tools.plan.build import build_plan

def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous())

here, dtype, turned = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "turned"
workers, budget = map(int, sys.argv[4:])
files = open_files(str(here / "in"))
shape = (6144, 2048) if turned else (2048, 6144)
target = TargetTensor("w", dtype, shape, (Source("w", (Permute((1, 0)),) if turned else ()),))
step, world = (512, 12) if workers > 1 else (shape[0], 1)
rows = [(rank, Box((step * rank, 0), (step, shape[1]))) for rank in range(world)]
plan = build_plan(read_catalog(files), Target((target,)), lambda t: rows, world)
options = WriteOptions(2, budget, workers=workers)
with with_workers(plan.bytes_to_write, options, Ranks()) as (ranks, write):
    done, peak, before = threading.Event(), [0], anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    write_checkpoint(plan, files, Output(here / "out", overwrite=True), write, ranks=ranks)
    done.set()
    watcher.join()
    grown = ranks.together(lambda: peak[0] - before)
print(*grown)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One fp32 tensor of 48 MiB in two column chunks."""
    folder = tmp_path_factory.mktemp("large")
    values = np.arange(12 * MIB, dtype=np.uint32).reshape(2048, 6144)
    out = DcpFolder(folder / "in")
    out.tensor("w", "float32", values, [Box((0, 0), (2048, 3000)), Box((0, 3000), (2048, 3144))])
    out.finish()
    return folder


@pytest.mark.parametrize(
    ("dtype", "turned", "workers", "mib"),
    [
        ("float32", "", 1, 12),
        ("bfloat16", "", 1, 12),
        ("float32", "turned", 1, 12),
        (
            "bfloat16",
            "turned",
            4,
            48,
        ),  # were the budget that of each, they would take more than twice as much
    ],
)
def test_a_tensor_larger_than_the_budget_of_all_workers(source, dtype, turned, workers, mib):
    words = [str(source), dtype, turned, str(workers), str(mib * MIB)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], cwd=REPO, check=True, capture_output=True, text=True
    )
    grown = [int(word) for word in done.stdout.split()]
    assert len(grown) == workers
    assert sum(grown) < (mib + 6 * workers) * MIB  # the interpreters' own: threads, frames, the journal
