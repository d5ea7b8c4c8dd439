"""Do fp32 masters belong to FP8 primary weights, which no checkpoint holds as such?

A linear layer that Transformer Engine keeps in FP8 (`--fp8-param-gather`) is saved dequantized: the weight is q / s
in the model's type, where q is the E4M3 number nearest to master * s and s one fp32 scale for all that one rank holds
of the weight (recipes delayed and tensorwise), or one for each block of it (blockwise, mxfp8). What is stored of
scales belongs to the next step. But whatever the scale, a master lies within half a step of E4M3 of its weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ckpt_tools.model.kernels.casts import Array, cast, raw_dtype

_RUN = 32
_SLACK = 2.0**-7  # two roundings to bf16


class Survey(NamedTuple):
    """What the weights of one rank's shard are like."""

    elements: int
    equal: int  # with a master that rounds to the weight with no FP8 between
    runs: int  # of 32 neighbours
    few: int  # of these runs, with at most 8 different mantissas, as numbers of one scale have
    smallest: float  # magnitude of all but zeros
    largest: float

    @property
    def is_fp8(self) -> bool:
        """Whether the weights are held in FP8: nearly all of the others equal their rounded master, of these few."""
        return 2 * self.equal < self.elements and 0 < 0.9 * self.runs <= self.few


def survey(masters: Array, weights: Array, dtype: str) -> Survey:
    """Of some elements: fp32 `masters` and the bits of `weights` of type `dtype`."""
    bits = np.ascontiguousarray(weights).reshape(-1).view(raw_dtype(dtype))
    rounded = cast(np.ascontiguousarray(masters).reshape(-1), "float32", dtype).view(bits.dtype)
    size = np.abs(_values(bits, dtype))
    runs = size[: size.size // _RUN * _RUN].reshape(-1, _RUN)
    mantissa = np.sort(np.frexp(runs)[0], axis=1)
    different = 1 + (mantissa[:, 1:] != mantissa[:, :-1]).sum(axis=1) - (mantissa[:, 0] == 0)
    return Survey(
        size.size,
        int((rounded == bits).sum()),
        len(runs),
        int((different <= 8).sum()),
        float(size[size > 0].min(initial=np.inf)),
        float(size.max(initial=0)),
    )


def merged(surveys: Iterable[Survey]) -> Survey:
    elements, equal, runs, few, smallest, largest = zip(*surveys, strict=True)
    return Survey(sum(elements), sum(equal), sum(runs), sum(few), min(smallest), max(largest))


def too_far(masters: Array, weights: Array, dtype: str, shard: Survey) -> tuple[Array, int]:
    """Where masters are farther from their weights than half a step, in a shard like this; NaN always is.

    A step of three mantissa bits is an eighth of the number at most. Near zero (subnormals) steps have one size,
    which only zero is below. The largest number is also that of larger masters, as the cast saturates: how many
    there are is the second result.
    """
    value, master = _values(weights, dtype), masters.astype(np.float64)
    size = np.abs(value)
    least = max(min(shard.smallest / 2, shard.largest / 32), shard.largest * 2.0**-17)
    with np.errstate(invalid="ignore"):
        is_near = np.abs(master - value) <= np.maximum(size / 16, least * (1 + _SLACK)) + size * _SLACK
        outward = master * np.sign(value)
        saturated = (size > 0) & (size == shard.largest) & (size <= outward) & (outward <= 2 * shard.largest)
    found: Array = ~(is_near | saturated)
    return found, int(np.count_nonzero(saturated & ~is_near))


def _values(bits: Array, dtype: str) -> Array:
    return cast(bits.view(raw_dtype(dtype)), dtype, "float64")
