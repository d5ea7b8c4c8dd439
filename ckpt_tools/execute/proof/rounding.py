"""Do masters round to weights: bit for bit, and at a glance."""

from __future__ import annotations

import numpy as np

from ckpt_tools.model.kernels.casts import Array, cast, raw_dtype


def unlike(masters: Array, master_dtype: str, weights: Array, dtype: str) -> Array:
    """Where masters do not round to weights; any NaN equals any other."""
    if (master_dtype, dtype) == ("float32", "bfloat16") and are_near(masters, weights):
        return np.zeros(masters.shape, bool)
    rounded = cast(masters, master_dtype, dtype)
    bits = raw_dtype(dtype)
    different: Array = rounded.view(bits) != weights.view(bits)
    if different.any():
        different &= ~(_is_nan(rounded, dtype) & _is_nan(weights, dtype))
        if (master_dtype, dtype) == ("float32", "bfloat16"):
            different &= ~_is_tie(masters, weights)
    return different


def are_near(masters: Array, weights: Array) -> bool:
    """Whether fp32 masters hold no NaN and lie at most half a step from their bf16 weights, the next ones then.

    Masters of finite weights are finite then, too. Bits of one sign are ordered like the numbers, so a difference of
    bits tells, in fewer passes than rounding. That between a NaN and a zero of the other sign is small, so NaNs are
    looked for: they are what the largest of numbers is, if there is one among them.
    """
    flat = np.ascontiguousarray(masters).reshape(-1)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        if not flat.size or np.isnan(flat.max()):
            return False
    apart = weights.reshape(-1).view(np.uint16).astype(np.uint32)
    apart <<= 16
    np.subtract(flat.view(np.uint32), apart, out=apart)
    apart += 1 << 15
    return bool(apart.max() <= 1 << 16)


def _is_tie(masters: Array, weights: Array) -> Array:
    """Where fp32 masters lie in the middle of two bf16 numbers and the weight is one of them.

    torch takes the even one, the fused Adam that splits masters in weight and remainder the one further from zero.
    """
    bits = masters.view(np.uint32)
    lower, upper = bits >> 16, (bits >> 16) + 1
    tie: Array = (bits & 0xFFFF == 1 << 15) & ((weights == lower) | (weights == upper))
    return tie


def _is_nan(values: Array, dtype: str) -> Array:
    return np.isnan(cast(values, dtype, "float32"))
