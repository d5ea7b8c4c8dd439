"""A kernel that adds a number: norms that one side stores as weight - 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckpt_tools.model.box import Box
from ckpt_tools.model.dtypes import Form
from ckpt_tools.model.kernels.casts import Array, cast


@dataclass(frozen=True, slots=True)
class AddNumber:
    """Every element of a float32 tensor plus `number`, a sum in float32 that is rounded once to `dtype`."""

    dtype: str
    number: float

    @property
    def name(self) -> str:
        return f"add {self.number:g}"

    def form(self, inputs: Sequence[Form]) -> Form:
        (one,) = inputs
        if one.dtype != "float32":
            raise ValueError(f"a number is added to float32 elements, not to {one.dtype}")
        return Form(self.dtype, one.shape)

    def needs(self, box: Box, inputs: Sequence[Form]) -> tuple[Box, ...]:
        return (box,)

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        return cast(tiles[0] + np.float32(self.number), "float32", self.dtype)
