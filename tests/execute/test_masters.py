"""Masters against weights: equal ones pass, every kind of difference is named with its tensor and element.

Weights that Transformer Engine holds in FP8 are made with torch's own E4M3 casts; `te_fp8_weights.npz` has real ones.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.commands.convert.to_dtensors import convert_to_fsdp_dtensor
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.errors import UnsupportedCheckpointError, VerificationError
from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.proof import masters as module
from ckpt_tools.execute.proof.masters import (
    MastersReport,
    Seen,
    check_masters,
    compare_masters,
    describe_masters,
    in_step,
    rounding_mismatch,
    sample_boxes,
    surely_rounds,
)
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.run_state.settings import ModelSettings, settings_of
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.choices import CheckLevel
from ckpt_tools.model.kernels.casts import Array, cast, float32_to_bfloat16
from ckpt_tools.model.kernels.fp8_weights import survey, too_far
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Permute, Place, Source
from ckpt_tools.verify.report import VerifyOptions
from tests.commands import oracle
from tests.conftest import DATA, fixture_dir
from tests.strategies import Shape
from tests.synthetic import DcpFolder

SHAPE = (40, 5000)
COLUMNS_CUT = [Box((0, 0), (40, 3000)), Box((0, 3000), (40, 2000))]
ROWS_CUT = [Box((0, 0), (11, 5000)), Box((11, 0), (29, 5000))]


def masters(shape: Shape = SHAPE, seed: int = 3) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.02).astype(np.float32)


def target(
    key: str = "t",
    shape: Shape = SHAPE,
    sources: tuple[str, str] = ("m", "w"),
    dtype: str = "bfloat16",
    written: str = "float32",
) -> TargetTensor:
    """A master that has to round to the other source."""
    master, weight = ((Source(name),) for name in sources)
    return TargetTensor(key, written, shape, master, must_round_to=weight, must_round_dtype=dtype)


def stored(folder: Path, *tensors: tuple[str, str, Array, Sequence[Box] | None]) -> LocalFiles:
    source = DcpFolder(folder / "in")
    for key, dtype, values, boxes in tensors:
        source.tensor(key, dtype, values, boxes)
    source.finish()
    return LocalFiles(str(source.folder))


def check(
    folder: Path,
    values: Array,
    weights: Array,
    level: CheckLevel = "all",
    dtype: str = "bfloat16",
    *,
    written: str = "float32",
    recipe: str | None = None,
    cuts: tuple[Sequence[Box] | None, Sequence[Box] | None] = (COLUMNS_CUT, ROWS_CUT),
    threads: int = 1,
) -> MastersReport:
    files = stored(folder, ("m", "float32", values, cuts[0]), ("w", dtype, weights, cuts[1]))
    targets = [
        target(shape=values.shape, dtype=dtype, written=written),
        TargetTensor("x", "float32", values.shape, (Source("m"),)),
    ]
    return check_masters(files, read_catalog(files), targets, level, threads=threads, fp8_recipe=recipe)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_masters_that_round_pass(tmp_path, dtype):
    values = masters()
    weights = cast(values, "float32", dtype)
    assert check(tmp_path / "a", values, weights, "all", dtype) == MastersReport(1, 200_000, 200_000)
    assert check(tmp_path / "s", values, weights, "sample", dtype) == MastersReport(1, 4 * 4096, 200_000)
    assert check(tmp_path / "n", values, weights + 1, "none", dtype) == MastersReport()


@pytest.mark.parametrize("written", ["float16", "bfloat16", "float64"])
def test_masters_are_compared_as_they_are_stored_whatever_is_written(tmp_path, written):
    """Through float16, many fp32 values round to another bfloat16."""
    values = masters()
    through = cast(cast(values, "float32", "float16"), "float16", "bfloat16")
    weights = cast(values, "float32", "bfloat16")
    assert (weights != through).any()
    assert check(tmp_path / "a", values, weights, "all", written=written).elements == 200_000
    with pytest.raises(VerificationError):
        check(tmp_path / "b", values, through, "all", written=written)


@pytest.mark.parametrize("at", [(0, 0), (39, 4999), (17, 3001)])
def test_one_bit_in_one_weight_is_found(tmp_path, at):
    values = masters()
    weights = cast(values, "float32", "bfloat16")
    weights[at] ^= 1
    with pytest.raises(VerificationError) as caught:
        check(tmp_path / "a", values, weights, "all")
    assert f"t[{at[0]}, {at[1]}]: master {float(values[at])!r}, stored bfloat16 weight" in str(caught.value)


def test_a_sample_finds_a_shifted_tensor(tmp_path):
    values = masters()
    with pytest.raises(VerificationError, match=r"1 tensors do not round.*\n.*t\[0, "):
        check(tmp_path / "s", values, cast(np.roll(values, 1, 1), "float32", "bfloat16"), "sample")


def test_nan_equals_nan_and_nothing_else(tmp_path):
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
def test_threads_and_parts_change_nothing(tmp_path, monkeypatch, level, damaged):
    values = masters()
    weights = cast(values, "float32", "bfloat16")
    for at in damaged:
        weights[at] ^= 1
    files = stored(tmp_path, ("m", "float32", values, None), ("w", "bfloat16", weights, None))
    catalog, targets = read_catalog(files), [target()] * 3
    compared = [compare_masters(files, catalog, targets, level)]
    monkeypatch.setattr(module, "_PART_ELEMS", 9000)
    monkeypatch.setattr(module, "_TILE_ELEMS", 700)
    compared += [compare_masters(files, catalog, targets, level, threads=n) for n in (1, 4)]
    assert all(problems == compared[0][1] for _, problems in compared)
    assert len(compared[0][1]) == (3 if damaged else 0)
    assert damaged or len({report for report, _ in compared}) == 1


def test_padding_rows_are_zeros_on_both_sides(tmp_path):
    values = masters()
    files = stored(
        tmp_path, ("m", "float32", values, None), ("w", "bfloat16", cast(values, "float32", "bfloat16"), None)
    )
    m, w = (Source(key, (Place((0, 0), (48, 5000)),)) for key in "mw")
    padded = TargetTensor(
        "t", "float32", (48, 5000), (m,), must_round_to=(w,), must_round_dtype="bfloat16", zero_filled=True
    )
    assert check_masters(files, read_catalog(files), [padded], "all").elements == 240_000


@pytest.mark.parametrize("shape", [(), (5,), (100_000,), (3, 1 << 20), (7, 9, 5000), (100_000, 1), (0, 4)])
def test_samples_lie_inside_and_reach_both_ends(shape):
    boxes = sample_boxes(full_box(shape))
    assert all(full_box(shape).contains(box) for box in boxes)
    assert sum(box.volume for box in boxes) <= max(4 * 4096, 1)
    corners = {(0,) * len(shape), tuple(n - 1 for n in shape)}
    if math.prod(shape):
        assert all(any(box.contains(Box(corner, (1,) * len(shape))) for box in boxes) for corner in corners)


@pytest.mark.parametrize("damaged", [False, True])
def test_remainders_are_told_from_damage(tmp_path, damaged):
    """Int16 remainders are a format that is not read; where anything else is wrong too, the checkpoint is."""
    values = masters()
    files = stored(
        tmp_path,
        ("m", "float32", np.arange(-20_000, 20_000, dtype=np.float32).reshape(8, 5000), None),
        ("w", "bfloat16", cast(values[:8], "float32", "bfloat16"), None),
        ("m2", "float32", np.roll(values, 1, 1) if damaged else values, None),
        ("w2", "bfloat16", cast(values, "float32", "bfloat16"), None),
    )
    targets = [target("m", (8, 5000)), target("m2", sources=("m2", "w2"))]
    error = VerificationError if damaged else UnsupportedCheckpointError
    with pytest.raises(error, match="of 2 tensors do not round" if damaged else "in place of 1 masters"):
        check_masters(files, read_catalog(files), targets, "all")


@pytest.mark.parametrize(
    ("weight", "passes"), [(0x3F81, True), (0x3F82, True), (0x3F80, False), (0x3F83, False)]
)
@pytest.mark.parametrize("sign", [0, 0x8000])
def test_of_two_weights_as_near_either_may_be_stored(tmp_path, weight, passes, sign):
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


SMALL = (6, 10)
CUTS = {
    "rows": [Box((0, 0), (2, 10)), Box((2, 0), (4, 10))],
    "columns": [Box((0, 0), (6, 4)), Box((0, 4), (6, 6))],
    "whole": [full_box(SMALL)],
}
NUMBERS = np.arange(60, dtype=np.float32).reshape(SMALL)


@pytest.fixture
def seen(tmp_path: Path) -> dict[str, Seen]:
    """One tensor, cut in three ways."""
    files = stored(tmp_path, *((key, "float32", NUMBERS, boxes) for key, boxes in CUTS.items()))
    reader = BoxReader(files, read_catalog(files))
    return {key: Seen(reader, TargetTensor(key, "float32", SMALL, (Source(key),))) for key in CUTS}


@pytest.mark.parametrize("first", CUTS)
@pytest.mark.parametrize("second", CUTS)
@pytest.mark.parametrize("box", [full_box(SMALL), Box((1, 0), (4, 10)), Box((1, 3), (3, 4))])
def test_blocks_in_step_hold_every_element_once(seen, monkeypatch, first, second, box):
    monkeypatch.setattr(module, "_BLOCK_ELEMS", 7)
    monkeypatch.setattr(module, "_TILE_ELEMS", 13)
    pairs = [
        (a.copy().reshape(-1), b.copy().reshape(-1)) for a, b in in_step([seen[first], seen[second]], box)
    ]
    got = [np.concatenate(side).view(np.float32) for side in zip(*pairs, strict=True)]
    assert got[0].tobytes() == got[1].tobytes()
    inside = NUMBERS[tuple(map(slice, box.start, box.stop))]
    assert sorted(got[0].tolist()) == sorted(inside.reshape(-1).tolist())


def test_runs_are_read_without_gathering(seen, monkeypatch):
    monkeypatch.setattr(BoxReader, "regions", None)
    for pair in ("rows", "whole"), ("columns", "columns"):
        blocks = list(in_step([seen[key] for key in pair], full_box(SMALL)))
        assert sum(a.size for a, _ in blocks) == 60


def test_a_view_that_turns_elements_is_gathered(seen):
    turned = TargetTensor("turned", "float32", (10, 6), (Source("whole", (Permute((1, 0)),)),))
    ((a, b),) = in_step([Seen(seen["whole"].reader, turned)] * 2, full_box((10, 6)))
    assert a.tobytes() == b.tobytes() == np.ascontiguousarray(NUMBERS.T).tobytes()


def test_what_cannot_be_read_ends_it_early(seen, tmp_path):
    for file in sorted((tmp_path / "in").glob("__1*.distcp")):
        with file.open("r+b") as opened:
            opened.truncate(100)
    blocks = list(in_step([seen["whole"], seen["rows"]], full_box(SMALL)))
    assert sum(a.size for a, _ in blocks) < 60


EDGES = np.array(
    [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x7F7F7FFF,
     0x7F7F8000, 0x7F7F8001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF], np.uint32
)  # fmt: skip


def test_near_masters_round_to_their_weights():
    """Every edge of fp32 against every bf16 weight within two steps of it, and the zeros: near is never unlike."""
    bits = np.concatenate([EDGES, EDGES | np.uint32(1 << 31)])
    near = 0
    for master in bits:
        around = [(int(master) >> 16) + step & 0xFFFF for step in range(-2, 3)]
        for weight in (*around, 0, 0x8000, 0x7F80, 0xFF80):
            pair = np.array([master], np.uint32).view(np.float32), np.array([weight], np.uint16)
            rounded = float32_to_bfloat16(pair[0])
            if surely_rounds(*pair):
                near += 1
                tie = master & 0xFFFF == 0x8000 and weight in (int(master) >> 16, (int(master) >> 16) + 1)
                assert rounded[0] == weight or tie, (hex(master), hex(weight))
            elif np.isfinite(pair[0][0]):
                is_unlike = rounding_mismatch(pair[0], "float32", pair[1], "bfloat16")[0]
                assert is_unlike, (hex(master), hex(weight))
    assert near > len(EDGES)


ROWS, COLUMNS = 96, 512
SHARDS = (Box((0, 0), (ROWS, 256)), Box((0, 256), (ROWS, 256)))  # of two tensor-parallel ranks
SCALES = (5000.1, 6000.2)
RECIPES = pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "blockwise", "unknown"])
LEVELS = pytest.mark.parametrize("level", ["sample", "all"])


def fp8_masters(seed: int = 5) -> Array:
    return masters((ROWS, COLUMNS), seed)


def through_e4m3(values: Array, scale: Array | float, first: torch.dtype = torch.bfloat16) -> Array:
    """What Transformer Engine makes of masters, dequantized, as bits."""
    factor = torch.as_tensor(scale, dtype=torch.float32)
    scaled = torch.from_numpy(values).to(first).float() * factor
    numbers = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    bits: Array = (numbers * (1 / factor)).bfloat16().view(torch.uint16).numpy()
    return bits


def by_shard(values: Array, scales: tuple[float, float] = SCALES) -> Array:
    halves = [through_e4m3(values[:, 256 * i : 256 * (i + 1)], scale) for i, scale in enumerate(scales)]
    return np.concatenate(halves, 1)


def by_block(values: Array, rows: int, columns: int, power_of_two: bool) -> Array:
    parts = values.reshape(ROWS // rows, rows, COLUMNS // columns, columns)
    scale = 448 / np.abs(parts).max(axis=(1, 3), keepdims=True)
    if power_of_two:
        scale = 2.0 ** np.floor(np.log2(scale))
    whole = np.broadcast_to(scale, parts.shape).reshape(ROWS, COLUMNS).astype(np.float32)
    return through_e4m3(values, whole)


def in_fp8(recipe: str, values: Array) -> Array:
    """Weights as a recipe makes them."""
    return by_block(values, 32, 32, True) if recipe in ("mxfp8", "blockwise") else by_shard(values)


def check_fp8(
    folder: Path,
    values: Array,
    weights: Array,
    recipe: str | None,
    level: CheckLevel = "all",
    shards: Sequence[Box] = SHARDS,
) -> MastersReport:
    return check(folder, values, weights, level, recipe=recipe, cuts=(shards, shards), threads=2)


@LEVELS
@pytest.mark.parametrize(
    "scales",
    [(448 / 0.09, 448 / 0.07), (7123.4, 4999.9), (8192.0, 4096.0), (1.0, 1.0), (8000.0, 9000.5)],
    ids=["amax", "any", "powers of two", "underflow", "saturation"],
)
def test_one_scale_a_rank(tmp_path, scales, level):
    values = fp8_masters()
    found = check_fp8(tmp_path, values, by_shard(values, scales), "delayed", level)
    assert (found.tensors, found.fp8) == (1, 1)
    assert level == "sample" or found.elements == values.size


@LEVELS
@pytest.mark.parametrize(
    ("recipe", "rows", "columns", "powers"),
    [("mxfp8", 1, 32, True), ("blockwise", 32, 128, True), ("blockwise", 32, 128, False)],
)
def test_a_scale_a_block(tmp_path, recipe, rows, columns, powers, level):
    values = fp8_masters() * np.logspace(-3, 0, ROWS, dtype=np.float32)[:, None]
    assert check_fp8(tmp_path, values, by_block(values, rows, columns, powers), recipe, level).fp8 == 1


def test_masters_that_were_not_cast_to_the_models_type_first(tmp_path):
    values = fp8_masters()
    weights = through_e4m3(values, 5000.7, first=torch.float32)
    assert check_fp8(tmp_path, values, weights, "delayed").fp8 == 1


def test_blocks_are_counted_from_the_start_of_what_a_rank_holds(tmp_path):
    """A sample of a wide row begins inside a block, and a rank's part of it at any column."""
    values = np.random.default_rng(5).standard_normal((8, 5008)).astype(np.float32)
    values *= np.repeat(10.0 ** np.random.default_rng(6).uniform(-4, 0, 5024 // 32), 32)[:5008].astype(
        np.float32
    )
    boxes = [Box((0, 0), (8, 2480)), Box((0, 2480), (8, 2528))]
    weights = np.empty(values.shape, np.uint16)
    for box in boxes:
        first, last = box.start[1], box.stop[1]
        for at in range(first, last, 32):
            block = values[:, at : min(at + 32, last)]
            scale = 2.0 ** np.floor(np.log2(448 / np.abs(block).max(axis=1, keepdims=True)))
            weights[:, at : at + block.shape[1]] = through_e4m3(block, scale.astype(np.float32))
    levels: tuple[CheckLevel, ...] = ("sample", "all")
    for level in levels:
        found = check_fp8(tmp_path / level, values, weights, "mxfp8", level, shards=boxes)
        assert found.fp8 == 1, level


@RECIPES
def test_weights_of_few_values_are_not_fp8_for_that(tmp_path, recipe):
    values = np.full((ROWS, COLUMNS), 0.5, np.float32)
    weights = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    values[3, 4] = 0.51
    with pytest.raises(VerificationError, match=r"t\[3, 4\]"):
        check_fp8(tmp_path, values, weights, recipe)


@RECIPES
@pytest.mark.parametrize("bit", [31, 27, 22])
@pytest.mark.parametrize("at", [(0, 0), (40, 300), (95, 511)])
def test_a_flipped_bit_of_a_master_is_found(tmp_path, recipe, bit, at):
    values = fp8_masters()
    values[at] = 0.0137
    weights = in_fp8(recipe, values)
    values.view(np.uint32)[at] ^= np.uint32(1 << bit)
    says = re.escape(f"t[{at[0]}, {at[1]}]: master {float(values[at])!r}")
    with pytest.raises(VerificationError, match=f"{says}.*which no FP8 scale explains"):
        check_fp8(tmp_path, values, weights, recipe)


@RECIPES
@pytest.mark.parametrize("wrong", [-1.0, 0.0137, np.nan, np.inf])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_large_master_of_a_weight_of_zero_is_found(recipe, wrong, zero, tmp_path):
    values = fp8_masters()
    values[40, 300:304] = zero, -1e-9, 1e-9, zero
    weights = in_fp8(recipe, values)
    check_fp8(tmp_path / "sound", values, weights, recipe)
    values[40, 300] = wrong
    with pytest.raises(VerificationError, match=re.escape(f"t[40, 300]: master {float(values[40, 300])!r}")):
        check_fp8(tmp_path / "wrong", values, weights, recipe)


@RECIPES
@LEVELS
def test_masters_of_another_tensor_or_step_are_found(tmp_path, recipe, level):
    values = fp8_masters()
    later = (values * np.random.default_rng(9).uniform(0.98, 1.02, values.shape)).astype(np.float32)
    for name, wrong in (("swapped", fp8_masters(6)), ("later", later)):
        with pytest.raises(VerificationError, match=r"1 tensors do not round"):
            check_fp8(tmp_path / name, wrong, in_fp8(recipe, values), recipe, level)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "unknown", None])
def test_weights_that_are_not_fp8_are_held_to_their_own_rounding(tmp_path, recipe):
    values = fp8_masters()
    weights = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert check_fp8(tmp_path / "a", values, weights, recipe).fp8 == 0
    damaged = values.copy()
    damaged[3, 4] *= 1.01
    with pytest.raises(VerificationError, match=r"t\[3, 4\]"):
        check_fp8(tmp_path / "b", damaged, weights, recipe)
    with pytest.raises(VerificationError, match=r"1 tensors do not round"):
        check_fp8(tmp_path / "c", values * np.float32(1.01), weights, recipe)
    if recipe is None:  # of a writer without FP8
        with pytest.raises(VerificationError, match=r"1 tensors do not round"):
            check_fp8(tmp_path / "d", values, by_shard(values), None)


@pytest.mark.parametrize(
    ("args", "recipe"),
    [
        ({"bf16": True, "fp8": None, "fp8_param_gather": False, "fp8_recipe": "delayed"}, None),
        ({"fp8": "hybrid", "fp8_param_gather": True, "fp8_recipe": "mxfp8"}, "mxfp8"),
        ({"fp8": "e4m3", "fp8_param": True, "fp8_recipe": "blockwise"}, "blockwise"),
        ({"fp8": "hybrid"}, "delayed"),
        ({"fp8_param": True}, "delayed"),
    ],
)
def test_settings_tell_the_recipe(args, recipe):
    assert settings_of(args).fp8_recipe == settings_of(args, bridge=True).fp8_recipe == recipe
    assert ModelSettings().fp8_recipe == "unknown"


def test_real_weights_are_proven(tmp_path):
    """Two ranks' shards of a projection and one of another weight, from `te_fp8param_tp2_fr` (delayed scaling)."""
    real = np.load(DATA / "te_fp8_weights.npz")
    halves = [Box((0, 0), (64, 32)), Box((0, 32), (64, 32))]
    tensors: list[tuple[str, str, Array, Sequence[Box] | None]] = []
    for kind, dtype in (("master", "float32"), ("weight", "bfloat16")):
        both = np.concatenate([real[f"proj{i}_{kind}"] for i in (0, 2)], axis=1)
        tensors += [(f"proj.{kind}", dtype, both, halves), (f"qkv.{kind}", dtype, real[f"qkv1_{kind}"], None)]
    files = stored(tmp_path, *tensors)
    targets = [target(n, (64, 64), (f"{n}.master", f"{n}.weight")) for n in ("proj", "qkv")]
    accepted = 0
    for name in ("proj0", "proj2", "qkv1"):
        rounded = torch.from_numpy(real[f"{name}_master"]).bfloat16().view(torch.uint16).numpy()
        accepted += int((rounded != real[f"{name}_weight"]).sum())
    for recipe in ("delayed", "unknown"):
        found = check_masters(files, read_catalog(files), targets, "all", fp8_recipe=recipe)
        assert found == MastersReport(2, 8192, 8192, fp8=2, accepted=accepted, saturated=2)


def test_a_real_run_converts_with_its_masters(tmp_path):
    source = fixture_dir("te_fp8param_tp2_fr")
    report = convert_to_fsdp_dtensor(str(source), str(tmp_path / "out"), ConvertOptions(check_masters="all"))
    assert report.masters.use == "written" and report.masters.mode == "all"
    found = report.masters.found
    assert (found.fp8, found.accepted, found.saturated) == (10, 68900, 13)
    assert "half a step of E4M3, except 13 elements above" in describe_masters(found, "all")
    assert report.dropped[0].startswith("stored weights: 68,900 of 100,672 compared elements")
    source_tensors = oracle.tensors(source / "iter_0000002")
    made = oracle.tensors(tmp_path / "out" / "iter_0000002")
    for layer in range(2):
        for name in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"):
            master = source_tensors[f"optimizer.state.param.decoder.layers.{name}"][layer]
            assert oracle.same_bytes(made[f"model.module.decoder.layers.{layer}.{name}"], master)
    checked = verify_checkpoint(str(source), options=VerifyOptions(content=True))
    assert [found for check in checked.checks for found in check.findings] == []


def test_shards_of_a_real_job_are_those_of_their_own_masters_alone():
    source = fixture_dir("te_fp8param_tp2_fr") / "iter_0000002"
    source_tensors, shards = oracle.tensors(source), list[tuple[Array, Array, int]]()
    for key, entry in read_catalog(open_files(str(source))).tensors.items():
        if key.startswith("decoder.") and key.endswith(".weight") and "linear" in key:
            for chunk in entry.chunks:
                at = tuple(slice(a, b) for a, b in zip(chunk.box.start, chunk.box.stop, strict=True))
                master = source_tensors[f"optimizer.state.param.{key}"][at].flatten().numpy()
                weight = source_tensors[key][at].flatten().view(torch.uint16).numpy()
                shards.append((master, weight, chunk.box.size[-1]))
    assert len(shards) == 20
    for i, (values, _, columns) in enumerate(shards):
        for j, (_, weights, width) in enumerate(shards):
            if (values.size, columns) == (weights.size, width):
                shard = survey(values, weights, "bfloat16")
                is_near = not too_far(values, weights, "bfloat16", shard)[0].any()
                assert (shard.equal == shard.elements or (shard.is_fp8 and is_near)) == (i == j)


@pytest.mark.parametrize(("compared", "how"), [(10, "sample"), (20, "all")])
def test_a_sample_of_every_element_is_all_of_them(compared, how):
    said = describe_masters(MastersReport(1, compared, 20), "sample")
    assert said == f"{compared} elements of 1 masters round to the stored weights ({how})"
