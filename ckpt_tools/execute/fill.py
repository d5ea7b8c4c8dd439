"""Fills a region of memory with what transfers say: elements read from stored payloads, cast, or computed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ckpt_tools.box import Box, full_box, row_major_strides
from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.execute.casts import Array, cast_raw, numpy_dtype, raw_dtype
from ckpt_tools.execute.source import ChunkRef, SourceReader, index_of, read_region
from ckpt_tools.megatron.views import Piece, pull_box, push_piece
from ckpt_tools.model.kernels import Form
from ckpt_tools.plan.model import Computation, Operand, Transfer


def fill(
    source: SourceReader,
    out: Array,
    dtype: str,
    box: Box,
    transfers: Iterable[Transfer | Computation],
    scratch: Array,
) -> int:
    """Write the elements of `box`, of element type `dtype`, to `out`; returns the bytes read.

    `box` has the coordinates of the transfers' boxes; `out` has its shape and the type `casts.raw_dtype(dtype)`.
    Elements that no transfer gives stay as they are. `scratch` is as for `read_region`.
    """
    done = 0
    for transfer in transfers:
        common = transfer.box.intersect(box)
        if common is None:
            continue
        region = out[index_of(common.relative_to(box))]
        if isinstance(transfer, Computation):
            done += _compute(source, region, dtype, common, transfer, scratch)
        else:
            done += _copy(source, region, dtype, transfer, common, scratch)
    return done


def chunk_of(transfer: Transfer) -> ChunkRef:
    """The source chunk that a transfer reads."""
    return ChunkRef(transfer.key, transfer.item, transfer.dtype, transfer.shape)


def _copy(source: SourceReader, out: Array, dtype: str, transfer: Transfer, box: Box, scratch: Array) -> int:
    """The part `box` of what a transfer gives."""
    piece = transfer.piece.crop(box)
    assert piece is not None  # they meet
    payload = source.payload(chunk_of(transfer))
    if transfer.dtype == dtype:
        return read_region(payload, piece, out, scratch)
    values = np.empty(box.size, raw_dtype(transfer.dtype))
    done = read_region(payload, piece, values, scratch)
    out[...] = cast_raw(values, transfer.dtype, dtype)
    return done


def _compute(
    source: SourceReader, out: Array, dtype: str, box: Box, computation: Computation, scratch: Array
) -> int:
    """The part `box` of a computation: what the view shows of as little of the made tensor as it can be made of."""
    shown = box.shift(computation.origin)
    wanted = pull_box(computation.view, shown).intersect(full_box(computation.shape))
    assert wanted is not None  # the plan found it
    operands = computation.operands
    boxes = computation.kernel.needs(wanted, [Form(o.dtype, o.shape) for o in operands])
    done, tiles = 0, []
    for operand, needed in zip(operands, boxes, strict=True):
        tile, read = _operand(source, operand, needed, scratch)
        tiles.append(tile)
        done += read
    try:
        values = computation.kernel.compute(wanted, tiles)
    except ValueError as error:
        raise CorruptCheckpointError(f"{computation.key} {wanted}: {error}") from None
    flat = values.reshape(-1).view(raw_dtype(computation.dtype))
    for piece in push_piece(computation.view, Piece(wanted, 0, row_major_strides(wanted.size))):
        part = piece.crop(shown)
        if part is not None:
            strides = tuple(s * flat.itemsize for s in part.strides)
            elements = np.ndarray(part.box.size, flat.dtype, flat.data, part.offset * flat.itemsize, strides)
            out[index_of(part.box.relative_to(shown))] = cast_raw(elements, computation.dtype, dtype)
    return done


def _operand(source: SourceReader, operand: Operand, box: Box, scratch: Array) -> tuple[Array, int]:
    """The elements of `box` (the input's coordinates) as a kernel takes them, and the bytes read."""
    make = np.zeros if operand.zeros else np.empty
    raw = make(box.size, raw_dtype(operand.dtype))
    inside = box.relative_to(operand.box)
    done = fill(source, raw, operand.dtype, inside, operand.transfers, scratch)
    return raw.view(numpy_dtype(operand.dtype)), done
