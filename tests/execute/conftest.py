"""Small sources and plans that the tests of this folder convert."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.kernels.casts import Array
from ckpt_tools.model.target import InlineTensor, Target, TargetObject, TargetTensor
from ckpt_tools.model.transfers import Plan
from ckpt_tools.model.views import Narrow, Permute, Select, Source
from ckpt_tools.plan.build import build_plan
from tests.plan.test_build import rows
from tests.synthetic import DcpFolder


def opened(source: DcpFolder) -> tuple[Files, Catalog]:
    """A source that is complete now."""
    source.finish()
    files = open_files(str(source.folder))
    return files, read_catalog(files)


@dataclass(frozen=True)
class Case:
    """A source on disk, what to make of it, and the arrays that must come out (bfloat16 as uint16)."""

    files: Files
    catalog: Catalog
    target: Target
    expected: dict[str, Array]

    def plan(self, world: int) -> Plan:
        blobs = [(o.key, dump_archive(o.value)) for o in self.target.objects]
        return build_plan(self.catalog, self.target, rows(world), world, blobs)


def make_case(folder: Path, scale: int = 8) -> Case:
    """Every strategy at once: whole payloads, halves, columns, a transpose, scalars, a small tensor, an object."""
    rng = np.random.default_rng(5)
    rows_, columns = 32 * scale, 16 * scale
    stacked = rng.integers(0, 1 << 32, (2, rows_, columns), np.uint32)
    source = DcpFolder(folder)
    halves = [Box((i, j * rows_ // 2, 0), (1, rows_ // 2, columns)) for i in range(2) for j in range(2)]
    source.tensor("stacked", "float32", stacked, halves)
    cut = [Box((0, j * columns // 2), (rows_, columns // 2)) for j in range(2)]
    weight = rng.integers(0, 1 << 16, (rows_, columns), np.uint16)
    source.tensor("weight", "bfloat16", weight, cut)
    source.tensor("scalar", "float64", np.array(2.5))
    source.tensor("tiny", "bool", np.array([True, False, True]))
    source.finish()
    case = reopened_case(folder)
    half = rows_ // 2 + 3
    case.expected.update(
        {f"layer.{i}": stacked[i] for i in range(2)},
        gate=stacked[0, :half],
        weight=weight,
        turned=weight.T,
        scalar=np.array(2.5),
        tiny=np.array([True, False, True]),
        step=np.array(7, np.float32),
    )
    return case


def reopened_case(folder: Path) -> Case:
    """The case in a folder that `make_case` filled, without its expectations."""
    files = open_files(str(folder))
    catalog = read_catalog(files)
    rows_, columns = catalog.tensors["weight"].shape
    half = rows_ // 2 + 3
    layers = [
        TargetTensor(f"layer.{i}", "float32", (rows_, columns), (Source("stacked", (Select(0, i),)),))
        for i in range(2)
    ]
    gate = (Select(0, 0), Narrow(0, 0, half))
    tensors = (
        *layers,
        TargetTensor("gate", "float32", (half, columns), (Source("stacked", gate),)),
        TargetTensor("weight", "bfloat16", (rows_, columns), (Source("weight"),)),
        TargetTensor("turned", "bfloat16", (columns, rows_), (Source("weight", (Permute((1, 0)),)),)),
        TargetTensor("scalar", "float64", (), (Source("scalar"),)),
        TargetTensor("tiny", "bool", (3,), (Source("tiny"),)),
    )
    step = InlineTensor("step", "float32", (), np.float32(7).tobytes())
    return Case(files, catalog, Target(tensors, (step,), (TargetObject("iteration", 7),)), {})


@pytest.fixture(scope="session")
def converters():
    """A process that has imported everything, and forks what is ordered."""
    from tests.execute.converter import Converters

    started = Converters()
    yield started
    assert "Traceback" not in started.close()


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(tmp_path / "source")
