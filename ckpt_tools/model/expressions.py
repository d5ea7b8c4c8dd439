"""Values as expressions over the tensors of a catalog: tiled by what views show of them, or made by a kernel.

Views alone (`Value`) move bytes, whatever their number and order. A kernel makes a tensor of its own (`Made`), which
stands in the catalog beside the stored ones, so that views show it as they show any other: the gate half of a
master that is joined from a weight and a remainder is a `Narrow` of a made tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tools.model.kernels import Form, Kernel
from ckpt_tools.model.many import many

if TYPE_CHECKING:
    from ckpt_tools.model.catalog import TensorEntry
    from ckpt_tools.model.target import Source


@many(frozen=True, slots=True)
class Value:
    """A tensor whose elements are tiled by what its sources show; a source of another element type is cast.

    Elements that no source shows are zeros where `zero_filled` allows that.
    """

    dtype: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    zero_filled: bool = False

    @property
    def form(self) -> Form:
        return Form(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Made:
    """How a tensor is computed that is not stored."""

    kernel: Kernel
    inputs: tuple[Value, ...]

    @property
    def form(self) -> Form:
        """Element type and shape of the result.

        Raises:
            ValueError: the inputs are not what the kernel works on.
        """
        return self.kernel.form([value.form for value in self.inputs])


def made_entry(key: str, made: Made) -> TensorEntry:
    """The catalog's entry of a tensor that is computed.

    Raises:
        ValueError: the inputs are not what the kernel works on.
    """
    from ckpt_tools.model.catalog import TensorEntry

    dtype, shape = made.form
    return TensorEntry(key, dtype, shape, (), made)
