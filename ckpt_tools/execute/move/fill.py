"""Fills a region of memory with what transfers say: elements read from stored payloads, cast, or computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.execute.move.source_reader import SourceReader, chunk_of, index_of, read_region
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.dtypes import Form
from ckpt_tools.model.kernels.casts import Array, cast_checked, numpy_dtype, raw_dtype
from ckpt_tools.model.transfers import Computation, Operand, Transfer
from ckpt_tools.model.views import Piece, pull_box, push_piece


@dataclass(slots=True)
class Filled:
    """What was done: bytes read; by tensor, and by what was cast to it, the elements that have another value now."""

    read: int = 0
    rounded: dict[str, dict[str, int]] = field(default_factory=dict)


class Filler:
    """Fills regions from one source; `scratch` is as for `read_region`. One filler a thread."""

    def __init__(self, source: SourceReader, scratch: Array, done: Filled) -> None:
        self._source, self._scratch, self._done = source, scratch, done

    def fill(
        self,
        out: Array,
        dtype: str,
        box: Box,
        transfers: Iterable[Transfer | Computation],
        key: str,
        origin: tuple[int, ...],
    ) -> None:
        """Write the elements of `box`, of element type `dtype`, to `out`; those that no transfer gives stay.

        `box` has the coordinates of the transfers' boxes, whose zero is `origin` of tensor `key`; `out` has its shape
        and the type `casts.raw_dtype(dtype)`.
        """
        for transfer in transfers:
            common = transfer.box.intersect(box)
            if common is None:
                continue
            region, shown = out[index_of(common.relative_to(box))], common.shift(origin)
            if isinstance(transfer, Computation):
                self._compute(region, dtype, transfer, shown, key)
            else:
                self._copy(region, dtype, transfer, common, key, shown.start)

    def reads(
        self, box: Box, transfers: Iterable[Transfer | Computation], origin: tuple[int, ...]
    ) -> Iterator[Range]:
        """What `fill` asks of stores, in its order."""
        for transfer in transfers:
            common = transfer.box.intersect(box)
            if common is None:
                continue
            if isinstance(transfer, Computation):
                _, needed = _needs(transfer, common.shift(origin))
                for operand, part in zip(transfer.operands, needed, strict=True):
                    yield from self.reads(part.relative_to(operand.box), operand.transfers, operand.box.start)
            else:
                piece = transfer.piece.crop(common)
                assert piece is not None  # they meet
                yield from self._source.reads(transfer, piece, len(self._scratch))

    def _copy(
        self, out: Array, dtype: str, transfer: Transfer, box: Box, key: str, start: tuple[int, ...]
    ) -> None:
        """The part `box` of what a transfer gives; it begins at `start` of the tensor."""
        piece = transfer.piece.crop(box)
        assert piece is not None  # they meet
        payload = self._source.payload(chunk_of(transfer))
        if transfer.dtype == dtype:
            self._done.read += read_region(payload, piece, out, self._scratch)
            return
        values = np.empty(box.size, raw_dtype(transfer.dtype))
        self._done.read += read_region(payload, piece, values, self._scratch)
        out[...] = self._cast(values, transfer.dtype, dtype, transfer.key, key, start)

    def _compute(self, out: Array, dtype: str, computation: Computation, shown: Box, key: str) -> None:
        """What the view shows in `shown` (target coordinates), from as little of the made tensor as it takes."""
        wanted, boxes = _needs(computation, shown)
        name = computation.key
        tiles = [self._operand(o, box, name) for o, box in zip(computation.operands, boxes, strict=True)]
        try:
            values = computation.kernel.compute(wanted, tiles)
        except ValueError as error:
            raise CorruptCheckpointError(f"{name} {wanted}: {error}") from None
        flat, steps = _flat(values.view(raw_dtype(computation.dtype)))
        for piece in push_piece(computation.view, Piece(wanted, 0, steps)):
            part = piece.crop(shown)
            if part is not None:
                strides = tuple(s * flat.itemsize for s in part.strides)
                elements = np.ndarray(
                    part.box.size, flat.dtype, flat.data, part.offset * flat.itemsize, strides
                )
                cast = self._cast(elements, computation.dtype, dtype, computation.key, key, part.box.start)
                out[index_of(part.box.relative_to(shown))] = cast

    def _operand(self, operand: Operand, box: Box, key: str) -> Array:
        """The elements of `box` (the input's coordinates) as a kernel takes them."""
        make = np.zeros if operand.zeros else np.empty
        raw = make(box.size, raw_dtype(operand.dtype))
        inside = box.relative_to(operand.box)
        self.fill(raw, operand.dtype, inside, operand.transfers, key, operand.box.start)
        return raw.view(numpy_dtype(operand.dtype))

    def _cast(
        self, values: Array, source: str, target: str, source_key: str, key: str, start: tuple[int, ...]
    ) -> Array:
        if source == target:
            return values
        result, changed = cast_checked(values, source, target, key, start)
        if changed:
            of_key = self._done.rounded.setdefault(key, {})
            of_key[source_key] = of_key.get(source_key, 0) + changed
        return result


def _needs(computation: Computation, shown: Box) -> tuple[Box, Sequence[Box]]:
    """The part of the made tensor that the view shows in `shown`, and what of each input its kernel needs for it."""
    wanted = pull_box(computation.view, shown).intersect(full_box(computation.shape))
    assert wanted is not None  # the plan found it
    forms = [Form(operand.dtype, operand.shape) for operand in computation.operands]
    return wanted, computation.kernel.needs(wanted, forms)


def _flat(values: Array) -> tuple[Array, tuple[int, ...]]:
    """The memory of a kernel's result from its first element on, and how its elements are spaced in it.

    A kernel may return a view, transposed for one, so that what a view turns back is never copied in between.
    """
    if 0 in values.shape or min(values.strides, default=0) < 0:
        values = np.ascontiguousarray(values)
    steps = tuple([stride // values.itemsize for stride in values.strides])
    length = sum((n - 1) * step for n, step in zip(values.shape, steps, strict=True)) + 1
    return as_strided(values, (max(0, length),), (values.itemsize,)), steps
