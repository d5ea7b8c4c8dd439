"""A kernel that adds the product of two thin matrices to a weight: a low-rank adapter (LoRA), merged.

Worked example, a (6, 4) weight with an adapter of rank 2; its box of rows 1:3 and columns 0:2::

    AddLowRank("bfloat16", scale=2.0)
    .form   the weight (float32, (6, 4)), B (float32, (6, 2)) and A (float32, (2, 4)) give (bfloat16, (6, 4))
    .needs  the same box of the weight; rows 1:3 of B, whole; columns 0:2 of A, whole
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt_tools.model.box import Box
from ckpt_tools.model.dtypes import CASTABLE, Form
from ckpt_tools.model.kernels.casts import Array, cast, numpy_dtype
from ckpt_tools.model.kernels.kernel import rounded_once

_WIDE = ("float32", "float64")
_BLOCK_ROWS, _BLOCK_COLUMNS = 32, 1024  # sums of this many elements stay in a processor's cache


@dataclass(frozen=True, slots=True)
class AddLowRank:
    """``W + scale * (B @ A)``, rounded once to `dtype`; inputs are W, B and A as float32 or float64.

    The formula is that of PEFT (tuners/lora/layer.py `Linear.merge`, `get_delta_weight`) and of Megatron-Bridge
    (peft/lora.py `LoRAMerge.merge`). They take product and sum in the adapter's type or in float32, and round the
    product to the adapter's type before it is added; here all is done in float64 in a fixed order, so that the result
    is the exact sum rounded once (but for its 53rd bit) and depends neither on tiles nor on a BLAS library.
    """

    dtype: str
    scale: float
    factors: tuple[str, str] = ("B", "A")  # what errors call them

    name = "add low rank"

    def form(self, inputs: Sequence[Form]) -> Form:
        weight, left, right = inputs
        if self.dtype not in CASTABLE or any(form.dtype not in _WIDE for form in inputs):
            raise ValueError(f"{[form.dtype for form in inputs]} numbers are not added up to {self.dtype}")
        if [len(form.shape) for form in inputs] != [2, 2, 2]:
            raise ValueError(f"matrices are expected, not {[form.shape for form in inputs]}")
        if left.shape[1] != right.shape[0] or weight.shape != (left.shape[0], right.shape[1]):
            raise ValueError(
                f"B {left.shape} times A {right.shape} cannot be added to a weight of shape {weight.shape}"
            )
        return Form(self.dtype, weight.shape)

    def needs(self, box: Box, inputs: Sequence[Form]) -> tuple[Box, ...]:
        (row, column), (rows, columns) = box
        rank = inputs[1].shape[1]
        return box, Box((row, 0), (rows, rank)), Box((0, column), (rank, columns))

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        weight, left, right = tiles
        self._refuse_not_finite(left, right)
        result = np.empty(box.size, numpy_dtype(self.dtype))
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaNs of the weight stay
            for block in _blocks(*box.size):
                result[block] = self._block(weight[block], left[block[0]], right[:, block[1]])
        return result

    def _block(self, weight: Array, left: Array, right: Array) -> Array:
        total = _product(left, right)
        total *= self.scale
        total += weight
        self._refuse_overflow(np.abs(total[np.isfinite(weight)]).max(initial=0))
        return rounded_once(total, self.dtype)

    def _refuse_not_finite(self, left: Array, right: Array) -> None:
        for name, factor in zip(self.factors, (left, right), strict=True):
            odd = factor[~np.isfinite(factor)]
            if odd.size:
                raise ValueError(
                    f"the adapter's {name} holds {odd[0].item()!r}, which would spoil the weight"
                )

    def _refuse_overflow(self, largest: Array) -> None:
        """Raise ValueError if the largest sum with a finite weight is too large; a NaN is one of infinities."""
        rounded = cast(rounded_once(largest.reshape(1), self.dtype), self.dtype, "float64")
        if not np.isfinite(rounded).all():
            raise ValueError(
                f"with the adapter's part a weight is {largest.item()!r}, too large for {self.dtype} "
                f"({' times '.join(self.factors)})"
            )


def _product(left: Array, right: Array) -> Array:
    """B @ A in float64, for each element the products added in the order of the ranks.

    numpy's own loop adds a multiple of a row of A to a row of the result, rank by rank. It sums in another order only
    where the result has one column, so it never has. Products of float32 numbers are exact: a machine's fused
    multiply-add, which does not round them, makes no difference.
    """
    left, right = (side.astype(np.float64, order="C") for side in (left, right))
    columns = right.shape[1]
    product: Array = np.einsum("ik,kj->ij", left, right if columns > 1 else right.repeat(2, 1))
    return product[:, :columns]


def _blocks(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    for row in range(0, rows, _BLOCK_ROWS):
        for column in range(0, columns, _BLOCK_COLUMNS):
            yield slice(row, row + _BLOCK_ROWS), slice(column, column + _BLOCK_COLUMNS)
