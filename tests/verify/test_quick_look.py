"""A quick look never decides more than a long one: reports are the same without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.commands.check.diff import DiffRequest, diff_checkpoints
from ckpt_tools.execute.proof import masters
from ckpt_tools.execute.proof.masters import compare_masters
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.kernels.casts import Array, float32_to_bfloat16
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Source
from ckpt_tools.verify.compare import differences
from ckpt_tools.verify.compare.arrays import Tolerance
from ckpt_tools.verify.compare.differences import DiffOptions
from tests.synthetic import DcpFolder

SHAPE = (24, 40)
CUTS = {
    "whole": [full_box(SHAPE)],
    "rows": [Box((0, 0), (7, 40)), Box((7, 0), (17, 40))],
    "columns": [Box((0, 0), (24, 13)), Box((0, 13), (24, 27))],
}
ODD = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38], np.float32)


def _values(seed: int) -> Array:
    random = np.random.default_rng(seed)
    values = random.standard_normal(SHAPE, np.float32)
    values.reshape(-1)[random.integers(0, values.size, 12)] = random.choice(ODD, 12)
    return values


def _altered(values: Array, seed: int) -> Array:
    """Some numbers are others, and some not-numbers and zeros are others of their kind."""
    random, other = np.random.default_rng(seed), values.copy()
    at = random.integers(0, values.size, 3)
    other.reshape(-1)[at] = random.choice([*ODD, 1.5], 3)
    return other


def _write(folder: Path, cut: str, values: Array, weights: Array | None = None) -> Path:
    out = DcpFolder(folder)
    out.tensor("master", "float32", values, CUTS[cut])
    if weights is not None:
        out.tensor("weight", "bfloat16", weights, CUTS[cut])
    out.finish()
    return folder


def _no_look(*_: object) -> list[object]:
    return []


@pytest.mark.parametrize(
    "cuts", [("whole", "whole"), ("rows", "whole"), ("columns", "columns"), ("columns", "rows")]
)
@pytest.mark.parametrize(
    "tolerance", [Tolerance(), Tolerance(nan="different"), Tolerance(rtol=1e-2, nan="equal")]
)
@pytest.mark.parametrize("seed", range(2))
def test_diff_says_the_same_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: tuple[str, str], tolerance: Tolerance, seed: int
) -> None:
    values = _values(seed)
    a = _write(tmp_path / "a", cuts[0], values)
    b = _write(tmp_path / "b", cuts[1], _altered(values, seed) if seed else values)
    options = DiffOptions(tolerance, workers=1)
    quick = diff_checkpoints(a, b, options, DiffRequest(by="keys"))
    monkeypatch.setattr(differences, "in_step", _no_look)
    assert repr(diff_checkpoints(a, b, options, DiffRequest(by="keys"))) == repr(quick)
    assert quick.is_equal == (seed == 0 and tolerance.nan != "different")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("seed", range(4))
def test_masters_are_judged_the_same_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str, seed: int
) -> None:
    values = _values(seed)
    weights = float32_to_bfloat16(_altered(values, seed) if seed % 2 else values)
    folder = _write(tmp_path / "a", cut, values, weights)
    files = LocalFiles(str(folder))
    rounds = {"must_round_to": (Source("weight"),), "must_round_dtype": "bfloat16"}
    target = TargetTensor("master", "float32", SHAPE, (Source("master"),), **rounds)  # type: ignore[arg-type]
    quick = compare_masters(files, read_catalog(files), [target], "all")
    monkeypatch.setattr(masters, "in_step", _no_look)
    assert compare_masters(files, read_catalog(files), [target], "all") == quick
    assert bool(quick[1]) == bool(seed % 2)
