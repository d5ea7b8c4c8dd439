"""Small sources and plans that the tests of this folder convert."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.box import Box
from ckpt_tools.catalog.dcp import read_catalog
from ckpt_tools.catalog.files import Files, open_files
from ckpt_tools.catalog.model import Catalog
from ckpt_tools.catalog.pickling import dump_archive
from ckpt_tools.execute.casts import Array
from ckpt_tools.megatron.target import InlineTensor, Source, Target, TargetObject, TargetTensor
from ckpt_tools.megatron.views import Narrow, Permute, Select
from ckpt_tools.plan.build import build_plan
from ckpt_tools.plan.model import Plan
from tests.plan.test_build import rows
from tests.synthetic import DcpFolder


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
    tensors, expected = [], {}
    for i in range(2):
        tensors.append(
            TargetTensor(f"layer.{i}", "float32", (rows_, columns), (Source("stacked", (Select(0, i),)),))
        )
        expected[f"layer.{i}"] = stacked[i]
    gate = (Select(0, 0), Narrow(0, 0, rows_ // 2 + 3))
    tensors.append(TargetTensor("gate", "float32", (rows_ // 2 + 3, columns), (Source("stacked", gate),)))
    expected["gate"] = stacked[0, : rows_ // 2 + 3]
    tensors.append(TargetTensor("weight", "bfloat16", weight.shape, (Source("weight"),)))
    expected["weight"] = weight
    turned = Source("weight", (Permute((1, 0)),))
    tensors.append(TargetTensor("turned", "bfloat16", weight.T.shape, (turned,)))
    expected["turned"] = weight.T
    tensors.append(TargetTensor("scalar", "float64", (), (Source("scalar"),)))
    expected["scalar"] = np.array(2.5)
    tensors.append(TargetTensor("tiny", "bool", (3,), (Source("tiny"),)))
    expected["tiny"] = np.array([True, False, True])
    step = InlineTensor("step", "float32", (), np.float32(7).tobytes())
    expected["step"] = np.array(7, np.float32)
    files = open_files(str(folder))
    target = Target(tuple(tensors), (step,), (TargetObject("iteration", 7),))
    return Case(files, read_catalog(files), target, expected)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(tmp_path / "source")
