"""Masters against weights: equal ones pass, every kind of difference is named with its tensor and element."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.errors import UnsupportedCheckpointError, VerificationError
from ckpt_tools.execute.proof.masters import MastersReport, check_masters, compare_masters, sample_boxes
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.choices import CheckLevel
from ckpt_tools.model.kernels.casts import Array, cast
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Place, Source
from tests.strategies import Shape
from tests.synthetic import DcpFolder


def masters() -> Array:
    return np.random.default_rng(3).standard_normal((40, 5000)).astype(np.float32)


def check(
    folder: Path,
    values: Array,
    weights: Array,
    level: CheckLevel,
    dtype: str = "bfloat16",
    written: str = "float32",
) -> MastersReport:
    source = DcpFolder(folder)
    source.tensor("m", "float32", values, [Box((0, 0), (40, 3000)), Box((0, 3000), (40, 2000))])
    source.tensor("w", dtype, weights, [Box((0, 0), (11, 5000)), Box((11, 0), (29, 5000))])
    source.finish()
    files = open_files(str(folder))
    target = TargetTensor(
        "t", written, (40, 5000), (Source("m"),), must_round_to=(Source("w"),), must_round_dtype=dtype
    )
    other = TargetTensor("x", "float32", (40, 5000), (Source("m"),))
    return check_masters(files, read_catalog(files), [target, other], level)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_masters_that_round_pass(tmp_path: Path, dtype: str) -> None:
    values = masters()
    weights = cast(values, "float32", dtype)
    assert check(tmp_path / "a", values, weights, "all", dtype) == MastersReport(1, 200_000, 200_000)
    assert check(tmp_path / "s", values, weights, "sample", dtype) == MastersReport(1, 4 * 4096, 200_000)
    assert check(tmp_path / "n", values, weights + 1, "none", dtype) == MastersReport()


@pytest.mark.parametrize("written", ["float16", "bfloat16", "float64"])
def test_masters_are_compared_as_they_are_stored_whatever_is_written(tmp_path: Path, written: str) -> None:
    """Through float16, many fp32 values round to another bfloat16."""
    values = masters()
    through = cast(cast(values, "float32", "float16"), "float16", "bfloat16")
    weights = cast(values, "float32", "bfloat16")
    assert (weights != through).any()
    assert check(tmp_path / "a", values, weights, "all", written=written).elements == 200_000
    with pytest.raises(VerificationError):
        check(tmp_path / "b", values, through, "all", written=written)


@pytest.mark.parametrize("at", [(0, 0), (39, 4999), (17, 3001)])
def test_one_bit_in_one_weight_is_found(tmp_path: Path, at: tuple[int, int]) -> None:
    values = masters()
    weights = cast(values, "float32", "bfloat16")
    weights[at] ^= 1
    with pytest.raises(VerificationError) as caught:
        check(tmp_path / "a", values, weights, "all")
    assert f"t[{at[0]}, {at[1]}]: master {float(values[at])!r}, stored bfloat16 weight" in str(caught.value)


def test_a_sample_finds_a_shifted_tensor(tmp_path: Path) -> None:
    values = masters()
    with pytest.raises(VerificationError, match=r"1 tensors do not round.*\n.*t\[0, "):
        check(tmp_path / "s", values, cast(np.roll(values, 1, 1), "float32", "bfloat16"), "sample")


def test_nan_equals_nan_and_nothing_else(tmp_path: Path) -> None:
    values = masters()
    values[3, 4] = np.nan
    weights = cast(values, "float32", "bfloat16")
    weights[3, 4] = 0xFFFF
    assert check(tmp_path / "a", values, weights, "all").elements == 200_000
    weights[3, 4] = 0x3F80
    with pytest.raises(VerificationError, match=r"t\[3, 4\]: master nan, stored bfloat16 weight 1\.0"):
        check(tmp_path / "b", values, weights, "all")


@pytest.mark.parametrize("level", ["all", "sample"])
@pytest.mark.parametrize("damaged", [(), ((0, 0),), ((39, 4999), (21, 7), (0, 1))])
def test_threads_and_parts_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: CheckLevel, damaged: tuple[tuple[int, int], ...]
) -> None:
    values = masters()
    weights = cast(values, "float32", "bfloat16")
    for at in damaged:
        weights[at] ^= 1
    source = DcpFolder(tmp_path / "in")
    source.tensor("m", "float32", values)
    source.tensor("w", "bfloat16", weights)
    source.finish()
    files = open_files(str(tmp_path / "in"))
    target = TargetTensor(
        "t", "float32", (40, 5000), (Source("m"),), must_round_to=(Source("w"),), must_round_dtype="bfloat16"
    )
    compared = [compare_masters(files, read_catalog(files), [target] * 3, level)]
    monkeypatch.setattr("ckpt_tools.execute.proof.masters._PART_ELEMS", 9000)
    monkeypatch.setattr("ckpt_tools.execute.proof.masters._TILE_ELEMS", 700)
    compared += [compare_masters(files, read_catalog(files), [target] * 3, level, threads=n) for n in (1, 4)]
    assert all(problems == compared[0][1] for _, problems in compared)
    assert len(compared[0][1]) == (3 if damaged else 0)
    assert damaged or len({report for report, _ in compared}) == 1


def test_padding_rows_are_zeros_on_both_sides(tmp_path: Path) -> None:
    source = DcpFolder(tmp_path / "in")
    values = masters()
    source.tensor("m", "float32", values)
    source.tensor("w", "bfloat16", cast(values, "float32", "bfloat16"))
    source.finish()
    files = open_files(str(tmp_path / "in"))
    m, w = (Source(key, (Place((0, 0), (48, 5000)),)) for key in "mw")
    target = TargetTensor(
        "t", "float32", (48, 5000), (m,), must_round_to=(w,), must_round_dtype="bfloat16", zero_filled=True
    )
    assert check_masters(files, read_catalog(files), [target], "all").elements == 240_000


@pytest.mark.parametrize("shape", [(), (5,), (100_000,), (3, 1 << 20), (7, 9, 5000), (100_000, 1), (0, 4)])
def test_samples_lie_inside_and_reach_both_ends(shape: Shape) -> None:
    boxes = sample_boxes(full_box(shape))
    assert all(full_box(shape).contains(box) for box in boxes)
    assert sum(box.volume for box in boxes) <= max(4 * 4096, 1)
    corners = {(0,) * len(shape), tuple(n - 1 for n in shape)}
    if math.prod(shape):
        assert all(any(box.contains(Box(corner, (1,) * len(shape))) for box in boxes) for corner in corners)


@pytest.mark.parametrize("damaged", [False, True])
def test_remainders_are_told_from_damage(tmp_path: Path, damaged: bool) -> None:
    """Int16 remainders are a format that is not read; where anything else is wrong too, the checkpoint is."""
    values = masters()
    source = DcpFolder(tmp_path / "in")
    source.tensor("m", "float32", np.arange(-20_000, 20_000, dtype=np.float32).reshape(8, 5000))
    source.tensor("w", "bfloat16", cast(values[:8], "float32", "bfloat16"))
    source.tensor("m2", "float32", np.roll(values, 1, 1) if damaged else values)
    source.tensor("w2", "bfloat16", cast(values, "float32", "bfloat16"))
    source.finish()
    files = open_files(str(tmp_path / "in"))
    targets = [
        TargetTensor(
            m, "float32", shape, (Source(m),), must_round_to=(Source(w),), must_round_dtype="bfloat16"
        )
        for m, w, shape in (("m", "w", (8, 5000)), ("m2", "w2", (40, 5000)))
    ]
    error = VerificationError if damaged else UnsupportedCheckpointError
    with pytest.raises(error, match="of 2 tensors do not round" if damaged else "in place of 1 masters"):
        check_masters(files, read_catalog(files), targets, "all")


@pytest.mark.parametrize(
    ("weight", "passes"), [(0x3F81, True), (0x3F82, True), (0x3F80, False), (0x3F83, False)]
)
@pytest.mark.parametrize("sign", [0, 0x8000])
def test_of_two_weights_as_near_either_may_be_stored(
    tmp_path: Path, weight: int, passes: bool, sign: int
) -> None:
    """torch takes the even one, the fused Adam that keeps 16-bit remainders the one further from zero."""
    values = np.full((40, 5000), (sign | 0x3F81) << 16 | 0x8000, np.uint32).view(np.float32)
    weights = np.full((40, 5000), sign | weight, np.uint16)
    if passes:
        assert check(tmp_path / "a", values, weights, "all").elements == 200_000
    else:
        with pytest.raises(VerificationError, match="do not round"):
            check(tmp_path / "a", values, weights, "all")
    beside = (values.view(np.uint32) + np.uint32(1)).view(np.float32)  # nearer to the one above
    if weight == 0x3F81:
        with pytest.raises(VerificationError, match="do not round"):
            check(tmp_path / "b", beside, weights, "all")
