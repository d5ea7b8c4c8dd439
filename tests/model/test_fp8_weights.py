"""Masters of weights that Transformer Engine holds in FP8: proven where they are sound, found where they are not.

The weights are made with torch's own E4M3 casts; `te_fp8_weights.npz` has real ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_tools.commands.check.verify import VerifyOptions, verify_checkpoint
from ckpt_tools.commands.convert.to_fsdp_dtensor import convert_to_fsdp_dtensor
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.errors import VerificationError
from ckpt_tools.execute.proof.masters import MastersReport, check_masters
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.run_state.settings import (
    ModelSettings,
    settings_of,
)
from ckpt_tools.model.box import Box
from ckpt_tools.model.choices import CheckLevel
from ckpt_tools.model.kernels.casts import Array
from ckpt_tools.model.kernels.fp8_weights import survey, too_far
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Source
from tests.commands import oracle
from tests.conftest import DATA, fixture_dir
from tests.synthetic import DcpFolder

ROWS, COLUMNS = 96, 512
SHARDS = (Box((0, 0), (ROWS, 256)), Box((0, 256), (ROWS, 256)))  # of two tensor-parallel ranks


def masters(seed: int = 5) -> Array:
    return (np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)) * 0.02).astype(np.float32)


def through_e4m3(values: Array, scale: Array | float, dtype: torch.dtype = torch.bfloat16) -> Array:
    """What Transformer Engine makes of masters, dequantized, as bits."""
    factor = torch.as_tensor(scale, dtype=torch.float32)
    scaled = torch.from_numpy(values).to(dtype).float() * factor
    numbers = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    bits: Array = (numbers * (1 / factor)).to(dtype).view(torch.uint16).numpy()
    return bits


def by_shard(values: Array, scales: tuple[float, float]) -> Array:
    return np.concatenate(
        [through_e4m3(values[:, :256], scales[0]), through_e4m3(values[:, 256:], scales[1])], 1
    )


def by_block(values: Array, rows: int, columns: int, power_of_two: bool) -> Array:
    parts = values.reshape(ROWS // rows, rows, COLUMNS // columns, columns)
    scale = 448 / np.abs(parts).max(axis=(1, 3), keepdims=True)
    if power_of_two:
        scale = 2.0 ** np.floor(np.log2(scale))
    whole = np.broadcast_to(scale, parts.shape).reshape(ROWS, COLUMNS).astype(np.float32)
    return through_e4m3(values, whole)


def check(
    folder: Path,
    values: Array,
    weights: Array,
    recipe: str | None,
    level: CheckLevel = "all",
    threads: int = 1,
    shards: Sequence[Box] = SHARDS,
) -> MastersReport:
    source = DcpFolder(folder / "checkpoint")
    source.tensor("m", "float32", values, shards)
    source.tensor("w", "bfloat16", weights, shards)
    source.finish()
    files = open_files(str(folder / "checkpoint"))
    target = TargetTensor(
        "t",
        "float32",
        values.shape,
        (Source("m"),),
        must_round_to=(Source("w"),),
        must_round_dtype="bfloat16",
    )
    return check_masters(files, read_catalog(files), [target], level, threads=threads, fp8_recipe=recipe)


@pytest.mark.parametrize("level", ["sample", "all"])
@pytest.mark.parametrize(
    "scales",
    [(448 / 0.09, 448 / 0.07), (7123.4, 4999.9), (8192.0, 4096.0), (1.0, 1.0), (8000.0, 9000.5)],
    ids=["amax", "any", "powers of two", "underflow", "saturation"],
)
def test_one_scale_a_rank(tmp_path: Path, scales: tuple[float, float], level: CheckLevel) -> None:
    values = masters()
    found = check(tmp_path, values, by_shard(values, scales), "delayed", level)
    assert (found.tensors, found.fp8) == (1, 1)
    assert level == "sample" or found.elements == values.size


def test_masters_that_were_not_cast_to_the_models_type_first(tmp_path: Path) -> None:
    values = masters()
    numbers = (torch.from_numpy(values) * 5000.7).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    weights = (numbers * (1 / torch.tensor(5000.7))).bfloat16().view(torch.uint16).numpy()
    assert check(tmp_path, values, weights, "delayed").fp8 == 1


@pytest.mark.parametrize("level", ["sample", "all"])
@pytest.mark.parametrize(("recipe", "rows", "columns"), [("mxfp8", 1, 32), ("blockwise", 32, 128)])
def test_a_power_of_two_a_block(
    tmp_path: Path, recipe: str, rows: int, columns: int, level: CheckLevel
) -> None:
    values = masters() * np.logspace(-3, 0, ROWS, dtype=np.float32)[:, None]
    found = check(tmp_path, values, by_block(values, rows, columns, True), recipe, level)
    assert found.fp8 == 1


def test_blocks_are_counted_from_the_start_of_what_a_rank_holds(tmp_path: Path) -> None:
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
        found = check(tmp_path / level, values, weights, "mxfp8", level, shards=boxes)
        assert found.fp8 == 1, level


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "unknown"])
def test_weights_of_few_values_are_not_fp8_for_that(tmp_path: Path, recipe: str) -> None:
    values = np.full((ROWS, COLUMNS), 0.5, np.float32)
    weights = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    values[3, 4] = 0.51
    with pytest.raises(VerificationError, match=r"t\[3, 4\]"):
        check(tmp_path, values, weights, recipe)


def test_any_scale_a_block(tmp_path: Path) -> None:
    values = masters()
    found = check(tmp_path, values, by_block(values, 32, 128, False), "blockwise")
    assert found.fp8 == 1


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "unknown"])
@pytest.mark.parametrize("bit", [31, 30, 27, 23, 22])
@pytest.mark.parametrize("at", [(0, 0), (40, 300), (95, 511)])
def test_a_flipped_bit_of_a_master_is_found(
    tmp_path: Path, recipe: str, bit: int, at: tuple[int, int]
) -> None:
    values = masters()
    values[at] = 0.0137
    weights = by_shard(values, (5000.1, 6000.2))
    values.view(np.uint32)[at] ^= np.uint32(1 << bit)
    with pytest.raises(
        VerificationError, match=re.escape(f"t[{at[0]}, {at[1]}]: master {float(values[at])!r}")
    ):
        check(tmp_path, values, weights, recipe, threads=2)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "blockwise", "unknown"])
@pytest.mark.parametrize("wrong", [-1.0, 1.0, -0.0137, 0.0137])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_large_master_of_a_weight_of_zero_is_found(
    recipe: str, wrong: float, zero: float, tmp_path: Path
) -> None:
    values = masters()
    values[40, 300:304] = zero, -1e-9, 1e-9, zero
    is_blocked = recipe in ("mxfp8", "blockwise")
    weights = by_block(values, 32, 32, True) if is_blocked else by_shard(values, (5000.1, 6000.2))
    check(tmp_path / "sound", values, weights, recipe)
    values[40, 300] = wrong
    with pytest.raises(VerificationError, match=re.escape(f"t[40, 300]: master {float(values[40, 300])!r}")):
        check(tmp_path / "wrong", values, weights, recipe)


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise"])
def test_a_flipped_bit_of_a_master_in_blocks_is_found(tmp_path: Path, recipe: str) -> None:
    values = masters()
    weights = by_block(values, 32, 32, True)
    values[70, 290] *= 2
    with pytest.raises(VerificationError, match=r"t\[70, 290\].*which no FP8 scale explains"):
        check(tmp_path, values, weights, recipe)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "blockwise", "unknown"])
@pytest.mark.parametrize("level", ["sample", "all"])
def test_swapped_masters_are_found(tmp_path: Path, recipe: str, level: CheckLevel) -> None:
    weights = (
        by_block(masters(5), 1, 32, True) if recipe == "mxfp8" else by_shard(masters(5), (5000.1, 6000.2))
    )
    with pytest.raises(VerificationError, match=r"1 tensors do not round"):
        check(tmp_path, masters(6), weights, recipe, level)


def test_masters_of_another_step_are_found(tmp_path: Path) -> None:
    values = masters()
    later = (values * np.random.default_rng(9).uniform(0.98, 1.02, values.shape)).astype(np.float32)
    with pytest.raises(VerificationError, match="which no FP8 scale explains"):
        check(tmp_path, later, by_shard(values, (5000.1, 6000.2)), "delayed")


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "blockwise", "unknown", None])
def test_weights_that_are_not_fp8_are_held_to_their_own_rounding(tmp_path: Path, recipe: str | None) -> None:
    values = masters()
    weights = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert check(tmp_path / "a", values, weights, recipe).fp8 == 0
    damaged = values.copy()
    damaged[3, 4] *= 1.01
    with pytest.raises(VerificationError, match=r"t\[3, 4\]"):
        check(tmp_path / "b", damaged, weights, recipe)
    with pytest.raises(VerificationError, match=r"1 tensors do not round"):
        check(tmp_path / "c", values * np.float32(1.01), weights, recipe)


def test_fp8_weights_of_a_writer_without_fp8_do_not_pass(tmp_path: Path) -> None:
    values = masters()
    with pytest.raises(VerificationError, match=r"1 tensors do not round"):
        check(tmp_path, values, by_shard(values, (5000.1, 6000.2)), None)


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
def test_settings_tell_the_recipe(args: dict[str, object], recipe: str | None) -> None:
    assert settings_of(args).fp8_recipe == settings_of(args, bridge=True).fp8_recipe == recipe
    assert ModelSettings().fp8_recipe == "unknown"


def test_neither_nan_nor_infinity_is_explained(tmp_path: Path) -> None:
    for number, wrong in enumerate((np.nan, np.inf)):
        values = masters()
        weights = by_shard(values, (5000.1, 6000.2))
        values[50, 60] = wrong
        with pytest.raises(VerificationError, match=r"t\[50, 60\]"):
            check(tmp_path / str(number), values, weights, "delayed")


def test_real_weights_are_proven(tmp_path: Path) -> None:
    """Two ranks' shards of a projection and one of another weight, from `te_fp8param_tp2_fr` (delayed scaling)."""
    real = np.load(DATA / "te_fp8_weights.npz")
    source = DcpFolder(tmp_path / "checkpoint")
    halves = [Box((0, 0), (64, 32)), Box((0, 32), (64, 32))]
    for kind, dtype in (("master", "float32"), ("weight", "bfloat16")):
        both = np.concatenate([real[f"proj{i}_{kind}"] for i in (0, 2)], axis=1)
        source.tensor(f"proj.{kind}", dtype, both, halves)
        source.tensor(f"qkv.{kind}", dtype, real[f"qkv1_{kind}"])
    source.finish()
    files = open_files(str(tmp_path / "checkpoint"))
    targets = [
        TargetTensor(name, "float32", (64, 64), (Source(f"{name}.master"),),
                     must_round_to=(Source(f"{name}.weight"),), must_round_dtype="bfloat16")
        for name in ("proj", "qkv")
    ]  # fmt: skip
    for recipe in ("delayed", "unknown"):
        found = check_masters(files, read_catalog(files), targets, "all", fp8_recipe=recipe)
        assert found == MastersReport(2, 8192, 8192, fp8=2)


def test_a_real_run_converts_with_its_masters(tmp_path: Path) -> None:
    source = fixture_dir("te_fp8param_tp2_fr")
    report = convert_to_fsdp_dtensor(str(source), str(tmp_path / "out"), ConvertOptions(check_masters="all"))
    assert report.masters.use == "written" and report.masters.mode == "all"
    assert report.masters.found.fp8 == 10
    stored = oracle.tensors(source / "iter_0000002")
    made = oracle.tensors(tmp_path / "out" / "iter_0000002")
    for layer in range(2):
        for name in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"):
            master = stored[f"optimizer.state.param.decoder.layers.{name}"][layer]
            assert oracle.same_bytes(made[f"model.module.decoder.layers.{layer}.{name}"], master)
    checked = verify_checkpoint(str(source), options=VerifyOptions(content=True))
    assert [found for check in checked.checks for found in check.findings] == []


def test_shards_of_a_real_job_are_those_of_their_own_masters_alone() -> None:
    source = fixture_dir("te_fp8param_tp2_fr") / "iter_0000002"
    stored, shards = oracle.tensors(source), list[tuple[Array, Array, int]]()
    for key, entry in read_catalog(open_files(str(source))).tensors.items():
        if key.startswith("decoder.") and key.endswith(".weight") and "linear" in key:
            for chunk in entry.chunks:
                at = tuple(slice(a, b) for a, b in zip(chunk.box.start, chunk.box.stop, strict=True))
                master = stored[f"optimizer.state.param.{key}"][at].flatten().numpy()
                weight = stored[key][at].flatten().view(torch.uint16).numpy()
                shards.append((master, weight, chunk.box.size[-1]))
    assert len(shards) == 20
    for i, (masters, _, columns) in enumerate(shards):
        for j, (_, weights, width) in enumerate(shards):
            if (masters.size, columns) == (weights.size, width):
                shard = survey(masters, weights, "bfloat16")
                is_near = not too_far(masters, weights, "bfloat16", shard).any()
                assert (shard.equal == shard.elements or (shard.is_fp8 and is_near)) == (i == j)
