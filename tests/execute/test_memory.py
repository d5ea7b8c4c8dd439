"""Memory stays inside the budget when a tensor does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.model.box import Box
from tests.conftest import REPO
from tests.synthetic import DcpFolder

MIB = 1 << 20
SCRIPT = """
import sys, threading
from pathlib import Path
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
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

here, dtype, turned, budget = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "turned", int(sys.argv[4])
files = open_files(str(here / "in"))
catalog = read_catalog(files)
shape = catalog.tensors["w"].shape
view = (Permute((1, 0)),) if turned else ()
target = TargetTensor("w", dtype, shape[::-1] if turned else shape, (Source("w", view),))
plan = build_plan(catalog, Target((target,)), lambda t: [(0, full_box(t.shape))], 1)
done, peak, before = threading.Event(), [0], anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
write_checkpoint(plan, files, Output(here / "out", overwrite=True), WriteOptions(2, budget))
done.set()
watcher.join()
print(peak[0] - before)
"""

# Every worker says by how much it has grown since it was forked.
WORKERS = (
    SCRIPT[: SCRIPT.index("here, dtype")]
    + """
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.processes.team import with_workers

here, workers, budget = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
files = open_files(str(here / "in"))
target = TargetTensor("w", "bfloat16", (6144, 2048), (Source("w", (Permute((1, 0)),)),))
rows = [(rank, Box((512 * rank, 0), (512, 2048))) for rank in range(12)]
plan = build_plan(read_catalog(files), Target((target,)), lambda t: rows, 12)
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
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One fp32 tensor of 48 MiB in two column chunks."""
    folder = tmp_path_factory.mktemp("large")
    values = np.arange(12 * MIB, dtype=np.uint32).reshape(2048, 6144)
    out = DcpFolder(folder / "in")
    out.tensor("w", "float32", values, [Box((0, 0), (2048, 3000)), Box((0, 3000), (2048, 3144))])
    out.finish()
    return folder


@pytest.mark.parametrize(("dtype", "turned"), [("float32", ""), ("bfloat16", ""), ("float32", "turned")])
def test_a_tensor_larger_than_the_budget(source: Path, dtype: str, turned: str) -> None:
    budget = 12 * MIB
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(source), dtype, turned, str(budget)],
        cwd=REPO,
        check=True,
        capture_output=True,
        text=True,
    )
    growth = int(done.stdout)
    assert growth < budget + 6 * MIB  # the interpreter's own: threads, frames, the journal


def test_the_budget_is_of_all_workers_together(source: Path) -> None:
    """Where all is cast; were the budget that of each, they would take more than twice as much."""
    budget, workers = 48 * MIB, 4
    done = subprocess.run(
        [sys.executable, "-c", WORKERS, str(source), str(workers), str(budget)],
        cwd=REPO,
        check=True,
        capture_output=True,
        text=True,
    )
    grown = [int(word) for word in done.stdout.split()]
    assert len(grown) == workers
    assert sum(grown) < budget + workers * 6 * MIB  # the interpreters' own
