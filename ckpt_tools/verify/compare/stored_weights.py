"""The stored weights behind masters, when two checkpoints are compared by parameters.

Where a format keeps masters in the place of weights, masters are what is compared, and the weights that the other
side stores beside its own would go unseen. They are held against weights where both sides store them, else against
the masters of the side that does not, which must round to them (`execute.check_masters`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.proof.masters import rounding_mismatch
from ckpt_tools.model.box import Box
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.kernels.casts import Array, cast, numpy_dtype, raw_dtype
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.target import InlineTensor, TargetTensor
from ckpt_tools.verify.compare.arrays import Comparison, Extremes, Tolerance

AnyTensor = TargetTensor | InlineTensor


def weight_behind(tensor: AnyTensor) -> TargetTensor | None:
    """The stored weight that a master must round to; None where the tensor is not such a master."""
    if not isinstance(tensor, TargetTensor) or tensor.must_round_dtype is None:
        return None
    return replace(
        tensor,
        dtype=tensor.must_round_dtype,
        sources=tensor.must_round_to,
        must_round_to=(),
        must_round_dtype=None,
        role=WEIGHT,
    )


def has_weights(pair: Sequence[AnyTensor]) -> bool:
    """Whether a side stores weights beside the masters that are compared."""
    return any(weight_behind(tensor) is not None for tensor in pair)


def can_round(pair: Sequence[AnyTensor]) -> bool:
    """Whether all of their types are numbers that rounding is known for."""
    weights = [weight for tensor in pair if (weight := weight_behind(tensor)) is not None]
    return {tensor.dtype for tensor in (*pair, *weights)} <= CASTABLE


class WeightsComparison:
    """The weights behind a pair of tensors, tile by tile; `found` holds what differs so far."""

    def __init__(self, pair: Sequence[AnyTensor], readers: Sequence[BoxReader], tolerance: Tolerance) -> None:
        weights = [weight_behind(tensor) for tensor in pair]
        self._read: list[Callable[[Box], Array] | None] = [
            None if weight is None else reader.tensor(weight)
            for weight, reader in zip(weights, readers, strict=True)
        ]
        stored = [weight.dtype for weight in weights if weight is not None]
        self._dtypes = stored[0], stored[-1]
        self._masters = [tensor.dtype for tensor in pair]
        self._is_bitwise = tolerance.is_bitwise
        self._comparison = Comparison(self._dtypes, tolerance)

    @property
    def found(self) -> Extremes:
        """What differs so far."""
        return self._comparison.found

    def add(self, tile: Box, masters: Sequence[Array]) -> int:
        """Compare a tile whose masters were read already, as raw bits; the bytes of weights that were read."""
        numbers = [m.view(numpy_dtype(dtype)) for m, dtype in zip(masters, self._masters, strict=True)]
        weights = [None if read is None else read(tile) for read in self._read]
        first, second = weights
        if first is None or second is None:
            own = 0 if second is None else 1
            mine = weights[own]
            assert mine is not None  # one side stores weights, else there is nothing to compare
            first = second = mine
            different = self._unlike(numbers, 1 - own, mine)
            if not self._is_bitwise:  # within the tolerance masters may lie on two sides of a weight's middle
                different &= self._unlike(numbers, own, mine)
            if different.any():
                rounded = self._rounded(numbers[1 - own], self._masters[1 - own], mine, different)
                first, second = (rounded, mine) if own else (mine, rounded)
        elif self._dtypes[0] == self._dtypes[1]:
            alike = ~(self._unlike(numbers, 1, first) | self._unlike(numbers, 0, second))
            second = np.where(alike, first, second)  # of two equally near weights either is right
        raw = [w.view(raw_dtype(dtype)) for w, dtype in zip((first, second), self._dtypes, strict=True)]
        self._comparison.add(raw[0], raw[1], tile.start)
        return sum(w.nbytes for w in weights if w is not None)

    def _unlike(self, masters: Sequence[Array], side: int, weights: Array) -> Array:
        return rounding_mismatch(masters[side], self._masters[side], weights, self._dtypes[0])

    def _rounded(self, masters: Array, dtype: str, weights: Array, different: Array) -> Array:
        """The masters as weights, and the weights themselves where they are one of two equally near ones."""
        made: Array = np.where(different, cast(masters, dtype, self._dtypes[0]), weights)
        return made
