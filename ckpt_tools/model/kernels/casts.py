"""Element types as numpy arrays, and the casts between the floating ones, bit for bit as torch does them on a CPU.

A cast that makes an infinity of a number is refused where values are written or handed out; what rounding changes is
counted (`cast_checked`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt_tools.errors import VerificationError
from ckpt_tools.model.dtypes import ITEMSIZE, itemsize

Array: TypeAlias = npt.NDArray[Any]

_NOT_IN_NUMPY = frozenset(name for name in ITEMSIZE if name == "bfloat16" or name.startswith("float8"))
_EXACT = frozenset(  # casts that keep every value
    (narrow, wide)
    for narrow, wides in (
        ("bfloat16", ("float32", "float64")),
        ("float16", ("float32", "float64")),
        ("float32", ("float64",)),
    )
    for wide in wides
)
_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000}
_ROUNDS_TO_FINITE = (
    0x7F7F_0000  # float32 bits below which no number becomes an infinite bfloat16, and no NaN is
)
_RAW = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def is_exact(source: str, target: str) -> bool:
    return source == target or (source, target) in _EXACT


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type of an element type; unsigned integers of the same size hold the bits of those numpy lacks."""
    return np.dtype(f"uint{8 * itemsize(dtype)}" if dtype in _NOT_IN_NUMPY else dtype)


def raw_dtype(dtype: str) -> np.dtype[Any]:
    """A numpy type of the same size that is copied bit for bit."""
    return np.dtype(_RAW[itemsize(dtype)])


def cast_raw(values: Array, source: str, target: str) -> Array:
    """`cast` between arrays of `raw_dtype`s."""
    return cast(values.view(numpy_dtype(source)), source, target).view(raw_dtype(target))


def cast(values: Array, source: str, target: str) -> Array:
    """`values` of element type `source` (as `numpy_dtype` says) as `target`, rounded to nearest even.

    Both types are in `dtypes.CASTABLE`. Doubles reach 16 bits by way of float32, as in torch. NaNs stay NaNs.
    """
    if source == target:
        return values
    if source == "bfloat16":
        values = bfloat16_to_float32(values)
    if itemsize(target) == 2:
        values = _to_float(values, np.dtype(np.float32))
    return float32_to_bfloat16(values) if target == "bfloat16" else _to_float(values, numpy_dtype(target))


def cast_checked(
    values: Array, source: str, target: str, key: str, start: tuple[int, ...]
) -> tuple[Array, int]:
    """`cast_raw` of a part of tensor `key` that begins at `start`, and how many elements have another value now."""
    result = cast_raw(values, source, target)
    if is_exact(source, target):
        return result, 0
    if (source, target) == ("float32", "bfloat16"):
        changed = (values & 0xFFFF) != 0  # the bits that the narrower type has not
        if int(_magnitude(values, source).max(initial=0)) < _ROUNDS_TO_FINITE:
            return result, int(np.count_nonzero(changed))
    else:
        changed = cast_raw(result, target, source) != values
    if not changed.any():
        return result, 0
    changed &= _magnitude(values, source) <= _INFINITY[source]  # which NaN it was is not a value
    infinite = changed & (_magnitude(result, target) == _INFINITY[target])
    if infinite.any():
        raise VerificationError(_overflow(values, infinite, source, target, key, start))
    return result, int(np.count_nonzero(changed))


def _magnitude(bits: Array, dtype: str) -> Array:
    """The bits without their sign: numbers, then infinity, then NaNs in ascending order."""
    magnitude: Array = bits & bits.dtype.type((1 << (8 * itemsize(dtype) - 1)) - 1)
    return magnitude


def _overflow(
    values: Array, infinite: Array, source: str, target: str, key: str, start: tuple[int, ...]
) -> str:
    at = tuple(map(int, np.unravel_index(int(infinite.argmax()), infinite.shape)))
    element = ", ".join(str(a + b) for a, b in zip(start, at, strict=True))
    number = cast(values[at].reshape(1).view(numpy_dtype(source)), source, "float64").item()
    others = [t for t in ("bfloat16", "float32", "float64") if t != target]
    return (
        f"{key}[{element}]: {number!r} is too large for {target} and would become infinite, as would "
        f"{int(infinite.sum()):,} of the {infinite.size:,} elements around it; nothing was published. Choose another "
        f"--dtype ({', '.join(others)})"
    )


def _to_float(values: Array, target: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):  # too large for the target is infinity, as in torch
        return values.astype(target, copy=False)


def bfloat16_to_float32(bits: Array) -> Array:
    """The exact float32 values of bfloat16 `bits` (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """The bits (uint16) of float32 `values` rounded to nearest even; every NaN becomes 0x7FC0."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    result = rounded.astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        result[nan] = 0x7FC0
    return result.reshape(values.shape)
