"""Tensors read side by side: the same elements of all of them, each once, however each of them lies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.proof import masters as module
from ckpt_tools.execute.proof.masters import Seen, in_step, rounding_mismatch, surely_rounds
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.kernels.casts import Array, float32_to_bfloat16
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Permute, Source
from tests.synthetic import DcpFolder

SHAPE = (6, 10)
ROWS = [Box((0, 0), (2, 10)), Box((2, 0), (4, 10))]
COLUMNS = [Box((0, 0), (6, 4)), Box((0, 4), (6, 6))]
WHOLE = [full_box(SHAPE)]


def _seen(folder: Path, cuts: dict[str, list[Box]], values: Array) -> dict[str, Seen]:
    out = DcpFolder(folder)
    for key, boxes in cuts.items():
        out.tensor(key, "float32", values, boxes)
    out.finish()
    files = LocalFiles(str(folder))
    reader = BoxReader(files, read_catalog(files))
    return {key: Seen(reader, TargetTensor(key, "float32", values.shape, (Source(key),))) for key in cuts}


@pytest.mark.parametrize("first", ["rows", "columns", "whole"])
@pytest.mark.parametrize("second", ["rows", "columns", "whole"])
@pytest.mark.parametrize("box", [full_box(SHAPE), Box((1, 0), (4, 10)), Box((1, 3), (3, 4))])
def test_every_element_comes_once_with_its_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str, box: Box
) -> None:
    monkeypatch.setattr(module, "_BLOCK_ELEMS", 7)
    monkeypatch.setattr(module, "_TILE_ELEMS", 13)
    values = np.arange(60, dtype=np.float32).reshape(SHAPE)
    seen = _seen(tmp_path / "a", {"rows": ROWS, "columns": COLUMNS, "whole": WHOLE}, values)
    pairs = [
        (a.copy().reshape(-1), b.copy().reshape(-1)) for a, b in in_step([seen[first], seen[second]], box)
    ]
    got = [np.concatenate(side).view(np.float32) for side in zip(*pairs, strict=True)]
    assert got[0].tobytes() == got[1].tobytes()
    inside = values[tuple(map(slice, box.start, box.stop))]
    assert sorted(got[0].tolist()) == sorted(inside.reshape(-1).tolist())


def test_runs_are_read_without_gathering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(60, dtype=np.float32).reshape(SHAPE)
    seen = _seen(tmp_path / "a", {"rows": ROWS, "columns": COLUMNS, "whole": WHOLE}, values)
    monkeypatch.setattr(BoxReader, "regions", None)
    for pair in ("rows", "whole"), ("columns", "columns"):
        blocks = list(in_step([seen[key] for key in pair], full_box(SHAPE)))
        assert sum(a.size for a, _ in blocks) == 60


def test_a_view_that_turns_elements_is_gathered(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.float32).reshape(SHAPE)
    seen = _seen(tmp_path / "a", {"whole": WHOLE}, values)["whole"]
    turned = TargetTensor("turned", "float32", (10, 6), (Source("whole", (Permute((1, 0)),)),))
    ((a, b),) = in_step([Seen(seen.reader, turned)] * 2, full_box((10, 6)))
    assert a.tobytes() == b.tobytes() == np.ascontiguousarray(values.T).tobytes()


def test_what_cannot_be_read_ends_it_early(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.float32).reshape(SHAPE)
    seen = _seen(tmp_path / "a", {"rows": ROWS, "whole": WHOLE}, values)
    with (tmp_path / "a/__1_0.distcp").open("r+b") as file:
        file.truncate(100)
    blocks = list(in_step([seen["whole"], seen["rows"]], full_box(SHAPE)))
    assert sum(a.size for a, _ in blocks) < 60


EDGES = np.array(
    [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x7F7F7FFF,
     0x7F7F8000, 0x7F7F8001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF], np.uint32
)  # fmt: skip


def test_near_masters_round_to_their_weights() -> None:
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
                assert rounding_mismatch(pair[0], "float32", pair[1], "bfloat16")[0], (
                    hex(master),
                    hex(weight),
                )
    assert near > len(EDGES)
