"""Counts of what is not a number: NaNs and infinities, told from raw bits of any type, and simple statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ckpt_tools.model.casts import Array
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.verify.compare import to_float64

# Bits of the exponent and of the mantissa: a NaN has all of the first and some of the second, an infinity none.
_IEEE = {
    "float64": (0x7FF0000000000000, 0x000FFFFFFFFFFFFF),
    "float32": (0x7F800000, 0x007FFFFF),
    "float16": (0x7C00, 0x03FF),
    "bfloat16": (0x7F80, 0x007F),
    "float8_e5m2": (0x7C, 0x03),
}
# Types without infinities: which bits count, and the one pattern that is NaN (the FP8 formats of OCP and ONNX).
_ONE_NAN = {
    "float8_e4m3fn": (0x7F, 0x7F),
    "float8_e4m3fnuz": (0xFF, 0x80),
    "float8_e5m2fnuz": (0xFF, 0x80),
    "float8_e8m0fnu": (0xFF, 0xFF),
}
_COMPLEX = {"complex64": "float32", "complex128": "float64"}


@dataclass(slots=True)
class Census:
    """Elements seen, and those that are not finite numbers; of a complex type each part counts as one."""

    elements: int = 0
    nans: int = 0
    infinities: int = 0

    def add(self, bits: Array, dtype: str) -> None:
        """Count a stretch of elements of `dtype`, given as any array over their bytes."""
        base = _COMPLEX.get(dtype, dtype)
        if base in _IEEE:
            exponent, mantissa = _IEEE[base]
            flat = bits.reshape(-1).view(f"u{_width(base)}")
            suspects = flat[flat & flat.dtype.type(exponent) == exponent]
            nans = int(np.count_nonzero(suspects & suspects.dtype.type(mantissa)))
            self.nans += nans
            self.infinities += len(suspects) - nans
        elif base in _ONE_NAN:
            mask, pattern = _ONE_NAN[base]
            flat = bits.reshape(-1).view("u1")
            self.nans += int(np.count_nonzero(flat & np.uint8(mask) == pattern))
        else:
            flat = bits.reshape(-1)
        self.elements += flat.size


def _width(dtype: str) -> int:
    return {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e5m2": 1}[dtype]


@dataclass(slots=True)
class Statistics:
    """Sums over the finite elements of a tensor, joined from its tiles; computed in float64."""

    elements: int = 0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0
    smallest: float = math.inf
    largest: float = -math.inf
    total: float = 0.0
    squares: float = 0.0

    def add(self, raw: Array, dtype: str) -> None:
        """Count a tile of raw bits of a castable, integer or boolean type."""
        values = (
            to_float64(raw, dtype) if dtype in CASTABLE else raw.view(dtype).astype(np.float64)
        ).reshape(-1)
        nans = int(np.count_nonzero(np.isnan(values)))
        finite = values[np.isfinite(values)]
        self.elements += values.size
        self.nans += nans
        self.infinities += values.size - finite.size - nans
        self.zeros += int(np.count_nonzero(finite == 0))
        if finite.size:
            self.smallest = min(self.smallest, float(finite.min()))
            self.largest = max(self.largest, float(finite.max()))
            self.total += float(finite.sum())
            with np.errstate(over="ignore"):
                self.squares += float((finite * finite).sum())

    def summary(self) -> dict[str, float | int | None]:
        """Counts, minimum, maximum, mean, root mean square; None where there is no finite element."""
        count = self.elements - self.nans - self.infinities
        return {
            "elements": self.elements,
            "nan": self.nans,
            "inf": self.infinities,
            "zero": self.zeros,
            "min": self.smallest if count else None,
            "max": self.largest if count else None,
            "mean": self.total / count if count else None,
            "rms": math.sqrt(self.squares / count) if count else None,
        }
