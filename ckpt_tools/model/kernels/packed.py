"""Kernels for weights of 4 bits, several in one stored element, with a scale for each group of them.

Both take the product with the scale in float32 and round it once, as the decoders of the programs that define these
encodings do; they look up what a byte can mean. Worked example, a (16, 64) weight of 4-bit integers with a scale for
every 32 columns; its box of rows 2:4 and columns 30:34::

    UnpackInt4(columns=64, group=32)
    .form   the words (int32, (16, 8)) and the scales (float32, (16, 2)) give (bfloat16, (16, 64))
    .needs  rows 2:4 of the words 3:5 (columns 24:40) and of both scales
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ckpt_tools.model.box import Box
from ckpt_tools.model.dtypes import Form
from ckpt_tools.model.kernels.casts import Array, cast

_BLOCK, _BLOCK_BYTES = 32, 16  # elements and bytes of an MXFP4 block (OCP Microscaling Formats)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN_SCALE = 255  # of E8M0
_WORD = 8  # 4-bit integers in an int32


@dataclass(frozen=True, slots=True)
class DecodeMxfp4:
    """MXFP4 of shape (experts, out, in) as (experts, in, out), the way GPT-OSS multiplies with it.

    Blocks are (experts, out, in / 32, 16) bytes with the lower nibble first, E2M1; a scale byte s of a block is 2 to
    the power s - 127.
    """

    name = "decode MXFP4"

    def form(self, inputs: Sequence[Form]) -> Form:
        blocks, scales = inputs
        if (blocks.dtype, scales.dtype) != ("uint8", "uint8"):
            raise ValueError(f"MXFP4 blocks and scales are uint8, not {blocks.dtype} and {scales.dtype}")
        if len(blocks.shape) != 4 or blocks.shape[-1] != _BLOCK_BYTES or scales.shape != blocks.shape[:-1]:
            raise ValueError(
                f"MXFP4 has blocks (experts, out, in / {_BLOCK}, {_BLOCK_BYTES}) and a scale for each, not "
                f"{blocks.shape} with {scales.shape}"
            )
        experts, rows, groups = scales.shape
        return Form("bfloat16", (experts, groups * _BLOCK, rows))

    def needs(self, box: Box, inputs: Sequence[Form]) -> tuple[Box, ...]:
        (expert, column, row), (experts, columns, rows) = box
        first, count = _cells(column, columns, _BLOCK)
        scales = Box((expert, row, first), (experts, rows, count))
        return Box((*scales.start, 0), (*scales.size, _BLOCK_BYTES)), scales

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        blocks, scales = tiles
        if (scales == _NAN_SCALE).any():
            raise ValueError(f"an MXFP4 scale is {_NAN_SCALE}, which is not a number")
        pairs = _mxfp4_pairs().take((scales.astype(np.uint16) << 8)[..., None] | blocks)
        rows = pairs.view(np.uint16).reshape(*scales.shape[:2], -1)
        skipped = box.start[1] % _BLOCK
        shown: Array = rows[..., skipped : skipped + box.size[1]].transpose(0, 2, 1)
        return shown


@dataclass(frozen=True, slots=True)
class UnpackInt4:
    """4-bit integers times the scale of their group, rounded once to `dtype` (compressed-tensors, pack-quantized).

    An int32 word holds eight columns of a row, the first in its lowest bits, each stored with 8 added. `group`
    columns share a scale. Zero points, where there are any, are packed down the rows and subtracted first.
    """

    columns: int
    group: int
    dtype: str = "bfloat16"
    zero_points: bool = False

    name = "unpack int4"

    def form(self, inputs: Sequence[Form]) -> Form:
        words = inputs[0]
        types = ("int32", "float32", "int32")[: 2 + self.zero_points]
        if tuple(form.dtype for form in inputs) != types:
            raise ValueError(f"4-bit integers are {', '.join(types)}, not {[form.dtype for form in inputs]}")
        if self.columns % self.group:
            raise ValueError(f"{self.columns} columns are not whole groups of {self.group}")
        rows = words.shape[0] if words.shape else 0
        grid = (rows, self.columns // self.group)
        wanted = [(rows, -(-self.columns // _WORD)), grid, (-(-rows // _WORD), grid[1])][: len(inputs)]
        if [form.shape for form in inputs] != wanted:
            raise ValueError(
                f"{rows} rows of {self.columns} 4-bit columns in groups of {self.group} are stored as "
                f"{' and '.join(map(str, wanted))}, not {' and '.join(str(form.shape) for form in inputs)}"
            )
        return Form(self.dtype, (rows, self.columns))

    def needs(self, box: Box, inputs: Sequence[Form]) -> tuple[Box, ...]:
        (row, column), (rows, columns) = box
        word, words = _cells(column, columns, _WORD)
        group, groups = _cells(column, columns, self.group)
        first, packed = _cells(row, rows, _WORD)
        boxes = Box((row, word), (rows, words)), Box((row, group), (rows, groups))
        return (*boxes, Box((first, group), (packed, groups))) if self.zero_points else boxes

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        (row, column), (rows, columns) = box
        skipped = column % _WORD
        values = _signed(tiles[0])[:, skipped : skipped + columns]
        group = np.arange(column, column + columns) // self.group - column // self.group
        if self.zero_points:
            skipped = row % _WORD
            zeros = _signed(tiles[2].T)[:, skipped : skipped + rows].T
            values = values - zeros.take(group, 1)
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaNs as the decoders give them
            return cast(values * tiles[1].take(group, 1), "float32", self.dtype)


def _cells(start: int, size: int, width: int) -> tuple[int, int]:
    """First and number of the cells of `width` elements that hold `[start, start + size)`."""
    first = start // width
    return first, -(-(start + size) // width) - first


def _signed(words: Array) -> Array:
    """(rows, words) of packed 4-bit integers as float32 (rows, 8 x words)."""
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8)
    return _int4_pairs().take(octets).view(np.float32).reshape(len(words), -1)


@cache
def _int4_pairs() -> Array:
    """For each byte its two 4-bit integers as float32, in the bits of one number."""
    return _nibbles(tuple(range(-8, 8))).view(np.uint64).reshape(-1)


@cache
def _mxfp4_pairs() -> Array:
    """For each scale and byte, number `scale << 8 | byte`, the two bfloat16s in the bits of one number."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinities as the decoders give them
        scales = np.ldexp(np.float32(1), np.arange(256, dtype=np.int32) - 127)
        values = scales[:, None, None] * _nibbles((*_E2M1, *(-x for x in _E2M1)))
    return cast(values, "float32", "bfloat16").view(np.uint32).reshape(-1)


def _nibbles(values: tuple[float, ...]) -> Array:
    """For each byte the float32 values of its lower and its upper nibble."""
    return np.array([(values[octet & 15], values[octet >> 4]) for octet in range(256)], np.float32)
