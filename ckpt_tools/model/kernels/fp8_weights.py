"""Proof that fp32 masters belong to FP8 primary weights, which no checkpoint holds as such.

A linear layer that Transformer Engine keeps in FP8 (`--fp8-param-gather`) is saved dequantized: the weight is q / s
in the model's type, where q is the E4M3 number nearest to master * s and s one fp32 scale for all that one rank holds
of the weight (recipes delayed and tensorwise), or a power of two for each block of it (blockwise, mxfp8). Transformer
Engine casts the master to the model's type first (pytorch/tensor/utils.py `cast_master_weights_to_fp8`); releases
before 2.0 did not. What is stored of scales belongs to the next step, so the scale is found again from the values.

Rounding is monotone: of all elements with one weight value only the smallest and the largest master count. A unit of
any size is a table of at most 253 weight values then, and a scale that explains the table explains every element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckpt_tools.model.kernels.casts import Array, cast, numpy_dtype, raw_dtype
from ckpt_tools.model.kernels.kernel import minifloat_values
from ckpt_tools.model.kernels.quantize import E4M3_MAX, e4m3_codes

BLOCKED = {"mxfp8": 32, "blockwise": 128}  # elements of a row that surely have one scale, by recipe
_RUN = 32
_E4M3 = "float8_e4m3fn"
_GRID = minifloat_values(_E4M3)[:127].astype(np.float64)  # its numbers from 0 to the largest
_MIDDLE = (_GRID[1:] + _GRID[:-1]) / 2
_FLOOR = np.concatenate(
    [[0.0], _MIDDLE]
)  # what rounds to a grid number lies between its floor and its ceiling
_CEILING = np.concatenate([_MIDDLE, [np.inf]])  # the cast saturates
_NARROWEST = 8  # elements that prove a scale; Transformer Engine takes rows of a multiple of 16
_MOST_SCALES = 64  # tried in an interval
_WIDEST_BLOCK_RANGE = (
    12  # binades by which a block's largest element can exceed that of the part that was read
)
_SLACK = 2.0**-7  # two roundings to bf16


class Extremes(NamedTuple):
    """The weight values of a unit (bits, ascending) with the smallest and largest master of each.

    `equal` of all `elements` have a master that rounds to the weight with no FP8 between: nearly all of a weight that
    is not FP8, about one in sixteen of one that is.
    """

    bits: Array
    low: Array
    high: Array
    equal: int
    elements: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """`exact`: one scale explains every element. Otherwise masters may lie in `low[i]..high[i]` where the weight has
    `bits[i]`; outside of that no scale of the format explains them."""

    exact: bool
    fits: bool
    bits: Array
    low: Array
    high: Array


def extremes(masters: Array, weights: Array, dtype: str) -> Extremes:
    """The table of some elements: fp32 `masters` and the bits of `weights` of type `dtype`."""
    bits = weights.reshape(-1).view(raw_dtype(dtype))
    values = masters.reshape(-1)
    equal = cast(values, "float32", dtype).view(bits.dtype) == bits
    order = np.argsort(bits, kind="stable")
    return Extremes(*_reduced(bits[order], values[order], values[order]), int(equal.sum()), bits.size)


def merged(tables: Iterable[Extremes]) -> Extremes:
    """One table of several parts of a unit."""
    found = list(tables)
    bits, low, high = (np.concatenate([t[i] for t in found]) for i in range(3))
    order = np.argsort(bits, kind="stable")
    rows = _reduced(bits[order], low[order], high[order])
    return Extremes(*rows, sum(t.equal for t in found), sum(t.elements for t in found))


def _reduced(bits: Array, low: Array, high: Array) -> tuple[Array, Array, Array]:
    starts = np.concatenate([[0], np.flatnonzero(bits[1:] != bits[:-1]) + 1])
    return bits[starts], np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)


def is_quantized(table: Extremes) -> bool:
    """Whether most elements differ from the plain rounding of their masters: damage touches few, FP8 nearly all."""
    return 2 * table.equal < table.elements


def few_mantissas(weights: Array, dtype: str) -> tuple[int, int]:
    """Of runs of 32 weights: how many have at most 8 different mantissas, as numbers of one scale have; and all."""
    runs = weights.reshape(-1)[: weights.size // _RUN * _RUN].reshape(-1, _RUN)
    mantissa, _ = np.frexp(np.abs(_values(runs.view(raw_dtype(dtype)), dtype)))
    mantissa.sort(axis=1)
    different = 1 + (mantissa[:, 1:] != mantissa[:, :-1]).sum(axis=1) - (mantissa[:, 0] == 0)
    return int((different <= 8).sum()), len(runs)


def judge(table: Extremes, dtype: str) -> Verdict:
    """Whether one scale explains every element of a unit, and if none does, where masters can lie at all."""
    rows = _Rows.of(table, dtype)
    fits = rows.candidates()
    if any(rows.explained(one) for one in fits):
        return Verdict(True, True, table.bits, table.low, table.high)
    return rows.bounds(fits, table)


class _Fit(NamedTuple):
    """A way to read weights as E4M3 numbers (indices of the grid), and the scales that the weights leave open."""

    numbers: Array
    low: float
    high: float


class _Rows(NamedTuple):
    """A table with signs folded: magnitudes, and the magnitudes of their extreme masters (negative: other sign)."""

    dtype: str
    value: Array
    low: Array
    high: Array
    under: Array  # halves of the way to the neighbours of `value` in its type
    over: Array

    @classmethod
    def of(cls, table: Extremes, dtype: str) -> _Rows:
        value = _values(table.bits, dtype)
        negative = value < 0
        low = np.where(negative, -table.high, table.low).astype(np.float64)
        high = np.where(negative, -table.low, table.high).astype(np.float64)
        zero = value == 0
        high[zero] = np.maximum(np.abs(low[zero]), np.abs(high[zero]))
        low[zero] = 0
        size = np.abs(value)
        above = _values(_bits(size, dtype) + 1, dtype)
        below = _values(np.maximum(_bits(size, dtype), 1) - 1, dtype)
        return cls(dtype, size, low, high, (size + below) / 2, (size + above) / 2)

    def candidates(self) -> list[_Fit]:
        """Every way in which all weights are numbers of the grid times one step."""
        largest = self.value.max(initial=0)
        is_sane = np.isfinite(self.low).all() and np.isfinite(self.high).all() and np.isfinite(largest)
        if largest == 0 or not is_sane:
            return []
        some = self.value > 0
        value, under, over = self.value[some], self.under[some], self.over[some]
        index = np.searchsorted(_MIDDLE, value * _GRID[1:, None] / largest)
        number = _GRID[index]
        with np.errstate(divide="ignore"):
            step_low = (under / number).max(axis=1, initial=0)
            step_high = (over / number).min(axis=1, initial=np.inf)
        fits = []
        for row in np.flatnonzero((step_low <= step_high) & (number > 0).all(axis=1)):
            whole = np.zeros(len(self.value), np.intp)
            whole[some] = index[row]
            fits.append(_Fit(whole, 1 / step_high[row], 1 / step_low[row]))
        return fits

    def explained(self, fit: _Fit) -> bool:
        """Whether some fp32 scale turns every master into its weight, bit for bit."""
        ends = np.stack([self.low, self.high]).astype(np.float32)
        through = _values(_bits(ends, self.dtype), self.dtype).astype(np.float32)
        return any(self._explained(fit, *masters) for masters in (through, ends))

    def _explained(self, fit: _Fit, low: Array, high: Array) -> bool:
        if (low[fit.numbers > 0] <= 0).any():
            return False
        with np.errstate(divide="ignore", invalid="ignore"):
            least = np.where(fit.numbers > 0, _FLOOR[fit.numbers] / low, 0).max()
            most = np.where(high > 0, _CEILING[fit.numbers] / high, np.inf).min()
        first, last = max(float(least), fit.low), min(float(most), fit.high)
        if first > last * (1 + 2.0**-22):
            return False
        scales = _scales(first, last)[:, None, None]
        numbers = round_e4m3(np.stack([low, high])[None] * scales) * (np.float32(1) / scales)
        got = _values(_bits(numbers, self.dtype), self.dtype)
        return bool((got == self.value).all(axis=(1, 2)).any())

    def bounds(self, fits: list[_Fit], table: Extremes) -> Verdict:
        """Where masters can lie: by the reading of the weights that fits most of them, else by the format alone."""
        choices = [self._cells(fit) for fit in fits] or [self._half_steps()]
        low, high = min(choices, key=lambda ends: int(self._outside(*ends).sum()))
        negative = _values(table.bits, self.dtype) < 0
        zero = self.value == 0
        signed_low = np.where(negative, -high, np.where(zero, -high, low))
        signed_high = np.where(negative, -low, high)
        fits_all = not self._outside(low, high).any()
        return Verdict(False, fits_all, table.bits, signed_low, signed_high)

    def _outside(self, low: Array, high: Array) -> Array:
        return ~((self.low >= low) & (self.high <= high))  # so is NaN

    def _cells(self, fit: _Fit) -> tuple[Array, Array]:
        low = _FLOOR[fit.numbers] / fit.high * (1 - _SLACK)
        return low, _CEILING[fit.numbers] / fit.low * (1 + _SLACK)

    def _half_steps(self) -> tuple[Array, Array]:
        """Half a step of three mantissa bits, and of the smallest numbers; the largest one saturates."""
        largest = self.value.max(initial=0)
        smallest = self.value[self.value > 0].min(initial=np.inf)
        least = max(min(smallest, largest / 64), largest * 2.0**-17)
        room = np.maximum(self.value * (1 / 16 + _SLACK), least)
        return self.value - room, np.where(self.value == largest, 2 * largest, self.value + room)


def _values(bits: Array, dtype: str) -> Array:
    """Bits of `dtype` as float64."""
    raw = bits.astype(raw_dtype(dtype)).view(numpy_dtype(dtype))
    found: Array = cast(raw, dtype, "float64")
    return found


def _bits(values: Array, dtype: str) -> Array:
    """Values rounded to `dtype`, as bits."""
    single = np.ascontiguousarray(values, np.float32)
    return cast(single, "float32", dtype).view(raw_dtype(dtype))


def _scales(low: float, high: float) -> Array:
    """fp32 numbers of an interval: all when they are few."""
    first, last = (int(np.array(end, np.float32).view(np.uint32)) for end in (low, high))
    if last < first:
        first, last = last, first
    first, last = max(first - 1, 1), last + 1
    numbers = np.unique(np.linspace(first, last, min(_MOST_SCALES, last - first + 1)).astype(np.uint32))
    return numbers.view(np.float32)


def round_e4m3(values: Array) -> Array:
    """fp32 `values` as the nearest E4M3 numbers, ties to even, saturating; still fp32."""
    return minifloat_values(_E4M3).take(e4m3_codes(values))


def is_quantization(parts: Callable[[], Iterable[tuple[Array, Array]]], dtype: str, columns: int) -> bool:
    """Whether weights of `dtype` are what becomes of fp32 masters in FP8, or their plain rounding.

    `parts` are flat stretches (masters, weights) of one rank's shard with rows of `columns` elements.
    """
    width = math.gcd(_RUN, columns)
    if width >= _NARROWEST and all(blocks_fit(*part, dtype, width, 0) for part in parts()):
        return True
    table = merged(extremes(*part, dtype) for part in parts())
    verdict = judge(table, dtype)
    if table.equal == table.elements or verdict.exact:
        return True
    few, runs = map(sum, zip(*(few_mantissas(weights, dtype) for _, weights in parts()), strict=True))
    return is_quantized(table) and verdict.fits and 0 < 0.9 * runs <= few


def blocks_fit(masters: Array, weights: Array, dtype: str, width: int, first: int) -> bool:
    """Whether a power of two for each block of a row turns every master into its weight, bit for bit.

    Rows are the last axis; the first element stands in column `first` of what its rank holds. `width` elements from
    a multiple of it on have one scale.
    """
    columns = masters.shape[-1]
    before, after = first % width, -(first + columns) % width
    around = [(0, 0)] * (masters.ndim - 1) + [(before, after)]
    rounded = cast(masters.reshape(masters.shape), "float32", dtype)
    value = _values(weights.view(raw_dtype(dtype)), dtype).astype(np.float32)
    master = _values(rounded.view(raw_dtype(dtype)), dtype).astype(np.float32)
    value, master = (np.pad(part, around).reshape(-1, width) for part in (value, master))
    largest = np.abs(master).max(axis=1)
    if not np.isfinite(largest).all():
        return False
    with np.errstate(divide="ignore"):
        top = np.where(largest > 0, np.floor(np.log2(E4M3_MAX / largest)), 0).astype(np.int32)
    open_ = np.ones(len(value), bool)
    for lower in range(-1, _WIDEST_BLOCK_RANGE):
        scale = (top[open_] - lower)[:, None]
        got = np.ldexp(round_e4m3(np.ldexp(master[open_], scale)), -scale)
        fits = (got == value[open_]).all(axis=1)
        open_[np.flatnonzero(open_)[fits]] = False
        if not open_.any():
            return True
    return False
