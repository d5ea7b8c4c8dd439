"""`diff` across layouts sees the stored weights behind the masters that it compares."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.diff import DiffRequest, diff_checkpoints
from ckpt_tools.commands.convert.to_dtensors import convert_to_dcp, convert_to_fsdp_dtensor
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.roles import Role
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Source
from ckpt_tools.verify.compare.arrays import Tolerance
from ckpt_tools.verify.compare.differences import (
    DiffOptions,
    DiffReport,
    Side,
    TensorDiff,
    _by_form,
    can_round,
    has_weights,
    summarize,
    weights_not_compared,
)
from tests.conftest import fixture_dir
from tests.damage import copy_of, infos_of, metadata_of, payload_of, replace_chunk

LLAMA, FP8 = "core019_llama_tp2_fully_reshardable", "te_fp8_tp2_fr"
FC2 = "decoder.layers.mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"
LIVE = [f"model.module.decoder.layers.{i}.mlp.linear_fc2.weight" for i in (0, 1)]
ZERO, NAN = b"\0\0", b"\xc0\x7f"


def filled(root: Path, key: str, dtype: str, element: bytes) -> None:
    """Every element of a stored tensor replaced, in payloads of valid checksums."""
    with metadata_of(root) as metadata:
        offsets = list(infos_of(metadata, key))
    assert offsets
    for offset in offsets:
        count = len(payload_of(root, key, offset)[2]) // len(element)
        replace_chunk(root, key, offset, dtype, element * count)


def damaged(tmp_path: Path, element: bytes) -> Path:
    root: Path = copy_of(LLAMA, tmp_path)
    filled(root, FC2, "bfloat16", element)
    return root


def rows(report: DiffReport, role: str) -> list[TensorDiff]:
    return [t for t in report.tensors if t.role == role and t.kind != "equal"]


def compared(a: object, b: object, **options: Any) -> DiffReport:
    return diff_checkpoints(str(a), str(b), DiffOptions(**options))


@pytest.mark.parametrize("element", [ZERO, NAN], ids=["zeros", "nan"])
def test_destroyed_weights_behind_sound_masters_differ(
    element: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert_to_fsdp_dtensor(str(fixture_dir(LLAMA)), str(tmp_path / "fsdp"))
    source = damaged(tmp_path, element)
    for pair in ((source, tmp_path / "fsdp"), (tmp_path / "fsdp", source)):
        report = compared(*pair)
        assert not report.is_equal
        assert [t.name for t in rows(report, "weight")] == LIVE
        assert [t.found.different for t in rows(report, "weight")] == [2048, 2048]
        assert rows(report, "master") == []
        at_source = [t.a if pair[0] == source else t.b for t in rows(report, "weight")]
        assert at_source == [("bfloat16", (32, 64))] * 2
        summary = {row.role: row for row in summarize(report.tensors)}
        assert (summary["weight"].tensors, summary["weight"].different, summary["master"].equal) == (
            17,
            2,
            17,
        )
    words = ["diff", str(tmp_path / "fsdp"), str(source)]
    assert run(words) == 1
    assert f"{LIVE[0]} (weight)" in capsys.readouterr().out
    assert run([*words, "--ignore", "*.linear_fc2.weight"]) == 0


@pytest.mark.parametrize("element", [ZERO, NAN], ids=["zeros", "nan"])
def test_a_state_dict_and_two_sides_with_weights(element: bytes, tmp_path: Path) -> None:
    convert_to_dcp(str(fixture_dir(LLAMA)), str(tmp_path / "dcp"))
    source = damaged(tmp_path, element)
    assert compared(fixture_dir(LLAMA), tmp_path / "dcp").is_equal
    assert len(rows(compared(source, tmp_path / "dcp"), "weight")) == 2
    by = DiffRequest(by="parameters")
    assert len(rows(diff_checkpoints(fixture_dir(LLAMA), source, request=by), "weight")) == 2
    assert diff_checkpoints(source, source, request=by).is_equal


def with_norm(tmp_path: Path, name: str, master: int, weight: int) -> Path:
    """A copy whose final norm is this number everywhere, as fp32 and as bf16 bits."""
    (tmp_path / name).mkdir()
    root: Path = copy_of(LLAMA, tmp_path / name)
    filled(root, f"optimizer.state.param.{NORM}", "float32", struct.pack("<I", master))
    filled(root, NORM, "bfloat16", struct.pack("<H", weight))
    return root


def test_of_two_weights_as_near_either_is_equal(tmp_path: Path) -> None:
    even, odd = (with_norm(tmp_path, f"{w:x}", 0x3F808000, w) for w in (0x3F80, 0x3F81))
    convert_to_fsdp_dtensor(str(even), str(tmp_path / "fsdp"))
    assert compared(odd, tmp_path / "fsdp").is_equal
    assert diff_checkpoints(even, odd, request=DiffRequest(by="parameters")).is_equal
    wrong = with_norm(tmp_path, "wrong", 0x3F808000, 0x3F82)
    (row,) = rows(compared(wrong, tmp_path / "fsdp"), "weight")
    assert (row.name, row.found.different) == (f"model.module.{NORM}", row.elements)
    assert row.found.values == (1.015625, 1.0)


def test_masters_within_the_tolerance_excuse_their_weights(tmp_path: Path) -> None:
    """They lie on two sides of the middle between two weights, which are further apart than the tolerance."""
    low = with_norm(tmp_path, "low", 0x3F807FFF, 0x3F80)
    high = with_norm(tmp_path, "high", 0x3F808001, 0x3F81)
    convert_to_fsdp_dtensor(str(low), str(tmp_path / "fsdp"))
    report = compared(high, tmp_path / "fsdp")
    assert [len(rows(report, role)) for role in ("master", "weight")] == [1, 1]
    assert compared(high, tmp_path / "fsdp", tolerance=Tolerance(rtol=1e-6)).is_equal
    wrong = with_norm(tmp_path, "wrong", 0x3F808001, 0x3F82)
    near = compared(wrong, tmp_path / "fsdp", tolerance=Tolerance(rtol=1e-6))
    assert [len(rows(near, role)) for role in ("master", "weight")] == [0, 1]


def test_weights_held_in_fp8_belong_to_their_masters(tmp_path: Path) -> None:
    source: Path = copy_of(FP8, tmp_path)
    convert_to_fsdp_dtensor(str(source), str(tmp_path / "fsdp"))
    report = compared(source, tmp_path / "fsdp")
    assert report.is_equal
    assert sum(t.role == "weight" for t in report.tensors) == sum(t.role == "master" for t in report.tensors)
    filled(source, FC2, "bfloat16", ZERO)
    assert {t.name for t in rows(compared(source, tmp_path / "fsdp"), "weight")} == set(LIVE)


def test_weights_that_no_rounding_is_known_for_are_named() -> None:
    master = TargetTensor("w", "float32", (2,), (Source("m"),))
    beside = TargetTensor(
        "w", "float32", (2,), (Source("m"),), must_round_to=(Source("w"),), must_round_dtype="float8_e4m3fn"
    )
    a, b = (Side(LocalFiles("."), Catalog(".", {}, {}), {"w": t}, {}) for t in (beside, master))
    (note,) = weights_not_compared(a, b, DiffOptions())
    assert note.startswith("the stored weights of 1 masters, w the first, were not compared")


def told(
    role: Role, dtype: str = "float32", shape: tuple[int, ...] = (2,), behind: str | None = None
) -> TargetTensor:
    weights = (Source("w"),) if behind else ()
    return TargetTensor(
        "t", dtype, shape, (Source("x"),), role=role, must_round_to=weights, must_round_dtype=behind
    )


@pytest.mark.parametrize(
    ("a", "b", "role", "kind"),
    [
        (told("weight", "bfloat16"), told("master"), "master", "equal"),
        (told("weight", "bfloat16"), told("weight"), "weight", "equal"),
        (told("exp_avg"), told("weight"), "exp_avg", "equal"),
        (told("master"), None, "master", "only in A"),
        (None, told("exp_avg"), "exp_avg", "only in B"),
        (told("weight"), told("master", shape=(3,)), "master", "shape"),
        (told("weight", "int8"), told("weight"), "weight", "dtype"),
        (told("weight", "int8"), told("weight", "int8"), "weight", "equal"),
    ],
)  # fmt: skip
def test_a_weight_against_a_master_is_a_master(
    a: TargetTensor | None, b: TargetTensor | None, role: str, kind: str
) -> None:
    row = _by_form("t", a, b)
    assert (row.role, row.kind) == (role, kind)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("behind", "other", "has", "can"),
    [
        (None, told("master"), False, True),
        ("bfloat16", told("master"), True, True),
        ("bfloat16", told("weight", "float16"), True, True),
        ("float8_e4m3fn", told("master"), True, False),
        ("bfloat16", told("master", behind="int8"), True, False),
        ("bfloat16", told("weight", "int8"), True, False),
    ],
)
def test_weights_behind_one_side_are_weights(
    behind: str | None, other: TargetTensor, has: bool, can: bool, turned: bool
) -> None:
    pair = [told("master", behind=behind), other][:: -1 if turned else 1]
    assert (has_weights(pair), can_round(pair)) == (has, can)
