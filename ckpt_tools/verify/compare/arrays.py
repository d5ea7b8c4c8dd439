"""Are two arrays the same: bit by bit, or within a tolerance; and which elements differ most.

Arrays hold raw bits (`execute.casts.raw_dtype`). A tolerance accepts ``|a - b| <= atol + rtol * max(|a|, |b|)``, or
at most `ulp` representable numbers between a and b. The rule is symmetric in a and b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_tools.model.choices import NanPolicy
from ckpt_tools.model.dtypes import CASTABLE, itemsize
from ckpt_tools.model.kernels.casts import Array, bfloat16_to_float32, numpy_dtype

_BLOCK = 1 << 15  # elements compared at a time: their numbers stay in the processor's cache


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What still counts as equal. Without any tolerance bits are compared.

    `nan` says when two NaNs are equal: when their bits are, always, or never.
    """

    rtol: float = 0.0
    atol: float = 0.0
    ulp: int = 0
    nan: NanPolicy = "bits"

    @property
    def is_bitwise(self) -> bool:
        return not (self.rtol or self.atol or self.ulp)


@dataclass(slots=True)
class Extremes:
    """What differs between two tensors, joined from their tiles."""

    different: int = 0  # elements
    accepted: int = 0  # elements of weights that belong to their masters, and are not these rounded
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | None = None  # None: not comparable in representable numbers
    nan_mismatches: int = 0  # different elements of which one or both are NaN
    index: tuple[int, ...] | None = None  # of the largest difference, in elements of the tensor
    values: tuple[Any, Any] | None = None  # at `index`

    def join(self, later: Extremes) -> None:
        """Add what differs in a part behind; of equally large differences the first is named."""
        if later.different and (not self.different or later.max_abs > self.max_abs):
            self.max_abs, self.index, self.values = later.max_abs, later.index, later.values
        self.different += later.different
        self.accepted += later.accepted
        self.max_rel = max(self.max_rel, later.max_rel)
        if later.max_ulp is not None:
            self.max_ulp = max(self.max_ulp or 0, later.max_ulp)
        self.nan_mismatches += later.nan_mismatches


class Comparison:
    """Compares two tensors of given element types tile by tile; `found` holds what differs so far."""

    def __init__(self, dtypes: tuple[str, str], tolerance: Tolerance) -> None:
        self._dtypes, self._tolerance = dtypes, tolerance
        self._same_type = dtypes[0] == dtypes[1]
        self._castable = set(dtypes) <= CASTABLE
        self.found = Extremes()

    def add(self, a: Array, b: Array, start: tuple[int, ...]) -> None:
        """Compare two tiles of raw bits that begin at element `start` of their tensors."""
        shape, a, b = a.shape, np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
        if self.bits_decide and are_same_bits(a, b):
            return
        for first in range(0, len(a), _BLOCK):
            block = slice(first, first + _BLOCK)
            at = self._add_block(a[block], b[block])
            if at is not None:
                index = np.unravel_index(first + at, shape)
                self.found.index = tuple(int(i) + s for i, s in zip(index, start, strict=True))

    @property
    def bits_decide(self) -> bool:
        """Whether elements of the same bits are equal, so that only the others need a look."""
        return self._same_type and (self._tolerance.nan != "different" or not self._castable)

    def _add_block(self, a: Array, b: Array) -> int | None:
        """Compare 1-d stretches; the position of the largest difference when it is the largest so far."""
        if not self._same_type:
            at = self._compare_numbers(a, b, np.ones(len(a), bool))
            return None if at is None else int(at)
        bits_differ = (_bytes(a) != _bytes(b)).any(axis=1) if a.itemsize > 8 else a != b
        chosen = np.flatnonzero(bits_differ) if self.bits_decide else np.arange(len(a))
        if not len(chosen):
            return None
        if len(chosen) < len(a):
            a, b, bits_differ = a[chosen], b[chosen], bits_differ[chosen]
        if self._castable:
            at = self._compare_numbers(a, b, bits_differ)
        else:
            values = (a.view(numpy_dtype(self._dtypes[0])), b.view(numpy_dtype(self._dtypes[1])))
            at = self._note(bits_differ, np.zeros(len(a)), values)
        return None if at is None else int(chosen[at])

    def _compare_numbers(self, a: Array, b: Array, bits_differ: Array) -> int | None:
        values = x, y = to_float64(a, self._dtypes[0]), to_float64(b, self._dtypes[1])
        steps = ulp_distance(a, b, self._dtypes[0]) if self._same_type else None
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(x - y)
            larger = np.maximum(np.abs(x), np.abs(y))
            odd = not np.isfinite(distance).all()
            if odd:
                distance[x == y] = 0.0  # the same infinity
            unequal = self._numbers_differ(bits_differ, distance, larger, steps)
            counted = unequal
            if odd:
                nans = np.isnan(x), np.isnan(y)
                any_nan = nans[0] | nans[1]
                unequal = np.where(any_nan, self._nans_differ(bits_differ, nans[0] & nans[1]), unequal)
                distance[any_nan] = 0.0
                self.found.nan_mismatches += int(np.count_nonzero(unequal & any_nan))
                counted = unequal & ~any_nan
            self._note_sizes(counted, distance, larger, steps)
        return self._note(unequal, distance, values)

    def _note_sizes(self, counted: Array, distance: Array, larger: Array, steps: Array | None) -> None:
        """Keep the largest relative difference and the most representable numbers between two values."""
        if not counted.all():
            distance, larger = distance[counted], larger[counted]
            steps = None if steps is None else steps[counted]
        if not len(distance):
            return
        relative = float(
            np.fmax.reduce(distance / larger)
        )  # ignores the NaNs of -0 against +0, of infinities
        relative = 0.0 if math.isnan(relative) else relative
        self.found.max_rel = max(self.found.max_rel, math.inf if np.isinf(distance).any() else relative)
        if steps is not None:
            self.found.max_ulp = max(self.found.max_ulp or 0, int(steps.max()))

    def _numbers_differ(
        self, bits_differ: Array, distance: Array, larger: Array, steps: Array | None
    ) -> Array:
        tolerance = self._tolerance
        if tolerance.is_bitwise:
            return bits_differ if self._same_type else distance > 0
        near = distance <= tolerance.atol + tolerance.rtol * larger
        near |= distance == 0  # 0 x infinity, as the bound of equal infinities has it, is not a number
        if tolerance.ulp and steps is not None:
            near |= steps <= tolerance.ulp
        near &= np.isfinite(distance)  # an infinity is near itself only, whatever the tolerance
        far: Array = ~near
        return far

    def _nans_differ(self, bits_differ: Array, both: Array) -> Array:
        if self._tolerance.nan == "different":
            return np.ones(both.shape, bool)
        if self._tolerance.nan == "equal" or not self._same_type:
            return ~both
        return bits_differ

    def _note(self, unequal: Array, distance: Array, values: tuple[Array, Array]) -> int | None:
        """Count the unequal elements; the position of the one with the largest distance when that is a record."""
        count = int(np.count_nonzero(unequal))
        if not count:
            return None
        found = self.found
        is_first = not found.different
        found.different += count
        at = int(np.argmax(distance if count == len(distance) else np.where(unequal, distance, -1.0)))
        if not is_first and float(distance[at]) <= found.max_abs:
            return None
        found.max_abs = float(distance[at])
        found.values = (values[0][at].item(), values[1][at].item())
        return at


def are_same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays of one type are equal: contiguous ones eight bytes at a time, the rest one by one."""
    if not (a.flags.c_contiguous and b.flags.c_contiguous):
        return np.array_equal(a, b)
    a, b = a.reshape(-1), b.reshape(-1)
    x, y = a.view(np.uint8), b.view(np.uint8)
    whole = len(x) & ~7
    if not np.array_equal(x[:whole].view(np.uint64), y[:whole].view(np.uint64)):
        return False
    return whole == len(x) or np.array_equal(x[whole:], y[whole:])


def _bytes(raw: Array) -> Array:
    """The bytes of every element of a contiguous 1-d array, a row each."""
    rows: Array = raw.view(np.uint8).reshape(len(raw), raw.itemsize)
    return rows


def to_float64(raw: Array, dtype: str) -> Array:
    """The exact values of raw bits of a castable type."""
    numbers = bfloat16_to_float32(raw) if dtype == "bfloat16" else raw.view(numpy_dtype(dtype))
    with np.errstate(invalid="ignore"):  # a signalling NaN
        values: Array = numbers.astype(np.float64)
    return values


def ulp_distance(a: Array, b: Array, dtype: str) -> Array:
    """How many representable numbers lie from a to b: 0 for equal ones, and for -0 and +0.

    Floats of one sign are ordered like their bits, so bits with the sign taken out as a minus are consecutive
    integers over the whole line. Infinity is the number after the largest; NaNs have no meaningful distance.
    """
    width = 8 * itemsize(dtype)
    first, second = (_ordered(bits, width) for bits in (a, b))
    if width < 64:
        near: Array = np.abs(first - second)
        return near
    low, high = np.minimum(first, second), np.maximum(first, second)
    steps: Array = high.astype(np.uint64) - low.astype(np.uint64)  # wraps to the right answer: no overflow
    return steps


def _ordered(raw: Array, width: int) -> Array:
    """Bits as int64s that are ordered like the numbers they mean."""
    if width == 64:
        signed: Array = raw.view(np.int64)
        magnitude = signed & np.int64(0x7FFFFFFFFFFFFFFF)
    else:
        signed = raw.view(f"i{width // 8}").astype(np.int64)
        magnitude = signed & np.int64((1 << (width - 1)) - 1)
    ordered: Array = np.where(signed < 0, -magnitude, magnitude)
    return ordered
