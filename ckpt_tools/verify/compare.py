"""Are two arrays the same: bit by bit, or within a tolerance; and which elements differ most.

Arrays hold raw bits (`execute.casts.raw_dtype`). A tolerance accepts ``|a - b| <= atol + rtol * max(|a|, |b|)``, or
at most `ulp` representable numbers between a and b. The rule is symmetric in a and b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_tools.dtypes import CASTABLE, itemsize
from ckpt_tools.execute.casts import Array, bfloat16_to_float32, numpy_dtype

NAN_POLICIES = ("bits", "equal", "different")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What still counts as equal. Without any tolerance bits are compared.

    `nan` says when two NaNs are equal: when their bits are, always, or never.
    """

    rtol: float = 0.0
    atol: float = 0.0
    ulp: int = 0
    nan: str = "bits"

    @property
    def is_bitwise(self) -> bool:
        return not (self.rtol or self.atol or self.ulp)


@dataclass(slots=True)
class Extremes:
    """What differs between two tensors, joined from their tiles."""

    different: int = 0  # elements
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | None = None  # None: not comparable in representable numbers
    nan_mismatches: int = 0  # different elements of which one or both are NaN
    index: tuple[int, ...] | None = None  # of the largest difference, in elements of the tensor
    values: tuple[Any, Any] | None = None  # at `index`


class Comparison:
    """Compares two tensors of given element types tile by tile; `found` holds what differs so far."""

    def __init__(self, dtypes: tuple[str, str], tolerance: Tolerance) -> None:
        self._dtypes, self._tolerance = dtypes, tolerance
        self._same_type = dtypes[0] == dtypes[1]
        self._castable = set(dtypes) <= CASTABLE
        self.found = Extremes()

    def add(self, a: Array, b: Array, start: tuple[int, ...]) -> None:
        """Compare two tiles of raw bits that begin at element `start` of their tensors."""
        equal_bits = self._same_type and np.array_equal(_bytes(a), _bytes(b))
        if equal_bits and (self._tolerance.nan != "different" or not self._castable):
            return
        if not self._castable:
            unequal = (_bytes(a) != _bytes(b)).any(axis=-1)
            values = (a.view(numpy_dtype(self._dtypes[0])), b.view(numpy_dtype(self._dtypes[1])))
            self._note(unequal, np.zeros(a.shape), values, start)
            return
        values = to_float64(a, self._dtypes[0]), to_float64(b, self._dtypes[1])
        nans = np.isnan(values[0]), np.isnan(values[1])
        steps = ulp_distance(a, b, self._dtypes[0]) if self._same_type else None
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.where(values[0] == values[1], 0.0, np.abs(values[0] - values[1]))
            larger = np.maximum(np.abs(values[0]), np.abs(values[1]))
            relative = np.where(distance > 0, distance / larger, 0.0)
            unequal = self._numbers_differ(a != b, distance, larger, steps)
        any_nan = nans[0] | nans[1]
        unequal = np.where(any_nan, self._nans_differ(a != b, nans[0] & nans[1]), unequal)
        self.found.nan_mismatches += int(np.count_nonzero(unequal & any_nan))
        counted = unequal & ~any_nan
        if counted.any():
            relative = np.nan_to_num(relative, nan=np.inf, posinf=np.inf)  # an infinity on either side
            self.found.max_rel = max(self.found.max_rel, float(relative[counted].max()))
            if steps is not None:
                self.found.max_ulp = max(self.found.max_ulp or 0, int(steps[counted].max()))
        self._note(unequal, np.where(any_nan, 0.0, distance), values, start)

    def _numbers_differ(
        self, bits_differ: Array, distance: Array, larger: Array, steps: Array | None
    ) -> Array:
        tolerance = self._tolerance
        if tolerance.is_bitwise:
            return bits_differ if self._same_type else distance > 0
        near = distance <= tolerance.atol + tolerance.rtol * larger
        if tolerance.ulp and steps is not None:
            near |= steps <= tolerance.ulp
        far: Array = ~(
            near & np.isfinite(distance)
        )  # an infinity is near itself only, whatever the tolerance
        return far

    def _nans_differ(self, bits_differ: Array, both: Array) -> Array:
        if self._tolerance.nan == "different":
            return np.ones(both.shape, bool)
        if self._tolerance.nan == "equal" or not self._same_type:
            return ~both
        return bits_differ

    def _note(
        self, unequal: Array, distance: Array, values: tuple[Array, Array], start: tuple[int, ...]
    ) -> None:
        """Count the unequal elements and keep the one with the largest distance."""
        count = int(np.count_nonzero(unequal))
        if not count:
            return
        found = self.found
        found.different += count
        score = np.where(unequal, distance, -1.0)
        at = np.unravel_index(int(np.argmax(score)), unequal.shape)
        if found.index is None or float(distance[at]) > found.max_abs:
            found.index = tuple(int(i) + s for i, s in zip(at, start, strict=True))
            found.values = (values[0][at].item(), values[1][at].item())
        found.max_abs = max(found.max_abs, float(distance[at]))


def _bytes(raw: Array) -> Array:
    """The bytes of every element, along a last axis."""
    apart: Array = np.ascontiguousarray(raw).reshape(*raw.shape, 1).view(np.uint8)
    return apart


def to_float64(raw: Array, dtype: str) -> Array:
    """The exact values of raw bits of a castable type."""
    numbers = bfloat16_to_float32(raw) if dtype == "bfloat16" else raw.view(numpy_dtype(dtype))
    values: Array = numbers.astype(np.float64)
    return values


def ulp_distance(a: Array, b: Array, dtype: str) -> Array:
    """How many representable numbers lie from a to b (uint64): 0 for equal ones, and for -0 and +0.

    Floats of one sign are ordered like their bits, so bits with the sign taken out as a minus are consecutive
    integers over the whole line. Infinity is the number after the largest; NaNs have no meaningful distance.
    """
    width = 8 * itemsize(dtype)
    first, second = (_ordered(bits, width) for bits in (a, b))
    low, high = np.minimum(first, second), np.maximum(first, second)
    steps: Array = high.astype(np.uint64) - low.astype(np.uint64)  # wraps to the right answer: no overflow
    return steps


def _ordered(raw: Array, width: int) -> Array:
    bits = raw.astype(np.uint64)
    sign = np.uint64(1 << (width - 1))
    magnitude = (bits & (sign - np.uint64(1))).astype(np.int64)
    ordered: Array = np.where(bits & sign, -magnitude, magnitude)
    return ordered
