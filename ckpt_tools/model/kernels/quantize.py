"""Kernels that write block FP8: E4M3 codes, and the scale that every block of them is multiplied with.

The formula is that of DeepSeek-V3 (inference/kernel.py `act_quant_kernel`), in float32: a block's scale is its
largest magnitude / 448, a code the E4M3 number nearest to value / scale. For scales that are powers of two
(`scale_fmt` ue8m0, DeepSeek-V3.1) the scale is rounded up to one (DeepGEMM `ceil_to_ue8m0`). A block of zeros has
scale 1, and no scale is subnormal. Worked example, a (300, 256) weight in blocks of (128, 128)::

    QuantizeBlocks("bfloat16", (128, 128))     (float8_e4m3fn, (300, 256)); its box of rows 100:140 needs rows 0:256
    BlockScales("bfloat16", (128, 128))        (float32, (3, 2)); its box of row 2 needs rows 256:300
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.dtypes import CASTABLE, Form
from ckpt_tools.model.kernels.casts import Array, cast

E4M3_MAX = 448.0
_LEAST_SCALE = np.float32(2.0**-126)
_LEAST_NORMAL, _STEPS_BELOW = (
    np.float32(2.0**-6),
    np.float32(2.0**9),
)  # of E4M3: below, codes are multiples of 2**-9


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Of a matrix of type `dtype` in blocks of `block` elements, the last ones cut short."""

    dtype: str
    block: tuple[int, int] = (128, 128)
    powers: bool = False  # scales are powers of two

    def _grid(self, inputs: Sequence[Form]) -> tuple[int, int]:
        (form,) = inputs
        if form.dtype != self.dtype or self.dtype not in CASTABLE or len(form.shape) != 2:
            raise ValueError(f"blocks of a {self.dtype} matrix are quantized, not {form.dtype} {form.shape}")
        rows, columns = (-(-n // b) for n, b in zip(form.shape, self.block, strict=True))
        return rows, columns

    def _scales(self, values: Array) -> Array:
        """The scale of every block of float32 `values`, which start at the start of a block."""
        rows = self.block[0]
        starts = [np.arange(0, length, width) for length, width in zip(values.shape, self.block, strict=True)]
        magnitudes = np.empty((len(starts[0]), len(starts[1])), np.float32)
        for i, row in enumerate(starts[0]):
            high = np.abs(values[row : row + rows]).max(0)
            magnitudes[i] = np.maximum.reduceat(high, starts[1])
        if not np.isfinite(magnitudes).all():
            raise ValueError("infinities and NaNs have no place among FP8 codes")
        scales: Array = np.maximum(magnitudes / np.float32(E4M3_MAX), _LEAST_SCALE)
        if self.powers:
            bits = scales.view(np.uint32)
            scales = ((bits + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)
        scales[magnitudes == 0] = 1
        return scales


@dataclass(frozen=True, slots=True)
class BlockScales(_Blocks):
    name = "block scales"

    def form(self, inputs: Sequence[Form]) -> Form:
        return Form("float32", self._grid(inputs))

    def needs(self, box: Box, inputs: Sequence[Form]) -> tuple[Box, ...]:
        start = tuple([a * b for a, b in zip(box.start, self.block, strict=True)])
        size = tuple([n * b for n, b in zip(box.size, self.block, strict=True)])
        return (_inside(Box(start, size), inputs[0].shape),)

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        return self._scales(cast(tiles[0], self.dtype, "float32"))


@dataclass(frozen=True, slots=True)
class QuantizeBlocks(_Blocks):
    """The codes, as the bits of E4M3 numbers."""

    name = "quantize"

    def form(self, inputs: Sequence[Form]) -> Form:
        self._grid(inputs)
        return Form("float8_e4m3fn", inputs[0].shape)

    def needs(self, box: Box, inputs: Sequence[Form]) -> tuple[Box, ...]:
        start = tuple([a // b * b for a, b in zip(box.start, self.block, strict=True)])
        stop = tuple([-(-a // b) * b for a, b in zip(box.stop, self.block, strict=True)])
        whole = Box(start, tuple([b - a for a, b in zip(start, stop, strict=True)]))
        return (_inside(whole, inputs[0].shape),)

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        (row, column), (rows, columns) = box
        skipped, first = row % self.block[0], column % self.block[1]
        codes = np.empty(box.size, np.uint8)
        for start, stop in _bands(skipped, skipped + rows, self.block[0]):
            top = start // self.block[0] * self.block[0]
            values = cast(tiles[0][top : top + self.block[0]], self.dtype, "float32")
            scales = self._scales(values).repeat(self.block[1], 1)[:, first : first + columns]
            shown = values[start - top : stop - top, first : first + columns]
            codes[start - skipped : stop - skipped] = e4m3_codes(shown / scales)
        return codes


def _inside(box: Box, shape: tuple[int, ...]) -> Box:
    return box.intersect(full_box(shape)) or Box(box.start, (0,) * len(shape))


def _bands(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """`[start, stop)` cut at multiples of `width`."""
    while start < stop:
        end = min(stop, (start // width + 1) * width)
        yield start, end
        start = end


def e4m3_codes(values: Array) -> Array:
    """The bits of the E4M3 numbers nearest to float32 `values`, to even; what is larger than 448 becomes 448.

    The exponent of a normal number is 120 more in float32 than in E4M3, and its mantissa 20 bits longer.
    """
    magnitude = np.minimum(np.abs(values), np.float32(E4M3_MAX))
    bits = magnitude.view(np.uint32)
    normal = (bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1))) >> np.uint32(20)
    below = np.rint(magnitude * _STEPS_BELOW).astype(np.uint32)
    codes: Array = np.where(magnitude < _LEAST_NORMAL, below, normal - np.uint32(120 << 3)).astype(np.uint8)
    sign: Array = (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(24) & np.uint32(0x80)).astype(
        np.uint8
    )
    codes |= sign
    return codes
