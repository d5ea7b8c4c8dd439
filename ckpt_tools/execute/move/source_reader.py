"""Reads regions of stored tensors: finds payloads, checks them against the metadata, gathers strided elements; and
fills regions of memory with what transfers say: elements read, cast, or computed.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ckpt_tools.errors import CkptError, CorruptCheckpointError, UnsupportedCheckpointError
from ckpt_tools.execute.output.fileio import drop_cache, storage_errors
from ckpt_tools.execute.proof.payload_sums import RecordProof, SourceProof, Stored
from ckpt_tools.formats.storage.files import Files, LocalFiles
from ckpt_tools.formats.storage.joined_files import JoinedFiles, by_folder, place_of
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.formats.storage.remote import RemoteFiles
from ckpt_tools.formats.torch_archive.item_reader import ARCHIVE_END, Stretch, TensorBytes, find_tensor
from ckpt_tools.formats.torch_archive.tensor_template import tensor_frame, usual_item
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.dtypes import Form, itemsize
from ckpt_tools.model.kernels.casts import Array, cast_checked, numpy_dtype, raw_dtype
from ckpt_tools.model.transfers import Computation, Operand, Transfer, stored_parts
from ckpt_tools.model.views import Piece, pull_box, push_piece
from ckpt_tools.plan.byte_runs import is_dense, pattern_blocks, read_pattern, row_major_tiles, span_elems

_CACHED_PAYLOADS = 16384
_MAX_REPEATED_BYTES = 64 << 20  # of a tensor larger than its storage: expanded, or with overlapping strides


class ChunkRef(NamedTuple):
    key: str
    item: Item
    dtype: str
    shape: tuple[int, ...]


def chunk_of(transfer: Transfer) -> ChunkRef:
    return ChunkRef(transfer.key, transfer.item, transfer.dtype, transfer.shape)


class Payload(NamedTuple):
    """A dense row-major payload: `nbytes` bytes at `offset` of the file `name` of `files`."""

    files: Files
    name: str
    offset: int
    nbytes: int
    crc32: int | None  # None: unknown
    proof: RecordProof | None = None  # sums every read; None: there is nothing to prove

    def read_into(self, first: int, buffer: memoryview) -> None:
        """Fill `buffer` with the payload's bytes from number `first` on."""
        at = self.offset + first
        self.files.read_into(self.name, at, buffer)
        if self.proof is not None:
            self.proof.add(at, buffer)


class SourceReader:
    """Payloads of a checkpoint's items. Safe to share between threads; close it to remove its temporary files.

    Payloads that are not row-major (their writer saved a transposed tensor) are rewritten row-major to a temporary
    file in `spool_parent` first. `proof` sums every byte that is read. Without `sums` nothing is read for a checksum
    alone, so that archives made of parts of payloads have none.
    """

    def __init__(
        self,
        files: Files,
        spool_parent: Path | None = None,
        proof: SourceProof | None = None,
        sums: bool = True,
    ) -> None:
        self.files = files
        self.proof, self.sums = proof, sums
        self._spool_parent = spool_parent
        self._spool: tempfile.TemporaryDirectory[str] | None = None
        self._payloads: OrderedDict[Item, Payload] = OrderedDict()
        self._lock = threading.Lock()
        self._of_thread = threading.local()  # `requested`: items with frames already requested
        self.is_remote = has_stores(files)

    def close(self) -> None:
        if self._spool is not None:
            self._spool.cleanup()
            self._spool = None

    def payload(self, chunk: ChunkRef) -> Payload:
        """Where the elements of a chunk lie."""
        with self._lock:
            payload = self._payloads.get(chunk.item)
            if payload is not None:
                self._payloads.move_to_end(chunk.item)
                return payload
        payload = self._find(chunk)
        with self._lock:
            self._payloads[chunk.item] = payload
            if len(self._payloads) > _CACHED_PAYLOADS:
                self._payloads.popitem(last=False)
        return payload

    def reads(self, transfer: Transfer, piece: Piece, scratch_bytes: int) -> Iterator[Range]:
        """What reading a piece of a transfer's chunk asks of a store, if it lies in the usual frame."""
        item = transfer.item
        files, name = place_of(self.files, item.file)
        if not isinstance(files, RemoteFiles):
            return
        start = item.offset
        if not item.bare:
            frame = tensor_frame(transfer.dtype, transfer.shape)
            if item.length != frame.length:
                return
            start += len(frame.head)
            requested: set[Item] = self._of_thread.__dict__.setdefault("requested", set())
            if item not in requested and item not in self._payloads:
                requested.add(item)
                yield from frame_reads(self.files, item, len(frame.head), frame.tail_bytes)
        for _, first, nbytes in spans(piece, piece.box.size, itemsize(transfer.dtype), scratch_bytes):
            yield Range(files, name, start + first, start + first + nbytes)

    def note(self, transfers: Iterable[Transfer | Computation]) -> None:
        """Have the payloads of work that another process has done proven too: nobody knows what it saw."""
        if self.proof is not None:
            for transfer in stored_parts(transfers):
                self.payload(chunk_of(transfer))

    def _find(self, chunk: ChunkRef) -> Payload:
        key, item, dtype, shape = chunk
        nbytes = prod(shape) * itemsize(dtype)
        files, name = place_of(self.files, item.file)
        inner = item._replace(file=name)
        if item.bare:
            if item.length != nbytes:
                raise CorruptCheckpointError(
                    f"{key} {dtype} {shape} needs {nbytes} bytes, but {item.file} has {item.length} for it"
                )
            bare = Payload(files, name, item.offset, nbytes, item.crc32)
            return self._to_prove(key, item, bare, Stretch(*bare[2:5]))
        usual = usual_item(files, inner, dtype, shape)
        if usual is not None:
            return self._to_prove(key, item, Payload(files, name, *usual), Stretch(*usual))
        try:
            tensor = find_tensor(files, inner)
        except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
            raise type(error)(f"{key}: {error}") from error
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise CorruptCheckpointError(
                f"{key}: the metadata says {dtype} {shape}, but the item at byte {item.offset} of {item.file} "
                f"holds {tensor.dtype} {tensor.shape}"
            )
        stored = Payload(files, name, tensor.payload_offset, tensor.nbytes, tensor.crc32)
        stored = self._to_prove(key, item, stored, tensor.record)
        return stored if tensor.is_row_major else self._reordered(chunk, tensor, stored)

    def _to_prove(self, key: str, item: Item, payload: Payload, record: Stretch) -> Payload:
        """The payload, which tells of its reads what its record's checksum can be compared with."""
        if self.proof is None:
            return payload
        if record.crc32 is None:
            self.proof.without(item)
            return payload
        if not record.nbytes:
            return payload
        return payload._replace(proof=self.proof.of(key, Stored(item, *record)))  # type: ignore[arg-type]

    def _reordered(self, chunk: ChunkRef, tensor: TensorBytes, stored: Payload) -> Payload:
        """The payload rewritten row-major to a temporary file."""
        nbytes = prod(chunk.shape) * itemsize(chunk.dtype)
        if nbytes > max(tensor.nbytes, _MAX_REPEATED_BYTES):
            raise UnsupportedCheckpointError(
                f"{chunk.key}: a tensor of {nbytes} bytes was saved over {tensor.nbytes} bytes of storage (shape "
                f"{tensor.shape}, strides {tensor.strides}); more than {_MAX_REPEATED_BYTES} bytes of elements that "
                "share storage are not read. Load it with torch and save it again after .contiguous()."
            )
        with self._lock:
            if self._spool is None:
                self._spool = tempfile.TemporaryDirectory(prefix="spool-", dir=self._spool_parent)
        whole = Piece(full_box(chunk.shape), 0, tensor.strides)
        width = itemsize(chunk.dtype)
        scratch = np.empty(8 << 20, np.uint8)
        with storage_errors(self._spool.name):
            fd, path = tempfile.mkstemp(dir=self._spool.name)
            with os.fdopen(fd, "wb") as file:
                for tile in row_major_tiles(whole.box, len(scratch) // width):
                    part = whole.crop(tile)
                    assert part is not None  # tiles are inside the box
                    out = np.empty(tile.size, raw_dtype(chunk.dtype))
                    read_region(stored, part, out, scratch)
                    file.write(out.tobytes())
        return Payload(LocalFiles(self._spool.name), Path(path).name, 0, nbytes, None)


def store_ranges(files: Files, file: str, start: int, stop: int) -> Iterator[Range]:
    """Bytes of a file as what is read ahead, if it is in a store."""
    part, name = place_of(files, file)
    if isinstance(part, RemoteFiles):
        yield Range(part, name, start, stop)


def frame_reads(
    files: Files, item: Item, head: int = ARCHIVE_END, tail: int = ARCHIVE_END
) -> Iterator[Range]:
    """What looking at an archive's frame reads of a store: so many bytes at either end."""
    stop = item.offset + item.length
    yield from store_ranges(files, item.file, item.offset, min(item.offset + head, stop))
    yield from store_ranges(files, item.file, max(item.offset, stop - tail), stop)


def has_stores(files: Files) -> bool:
    return any(
        isinstance(part, RemoteFiles) for part in (files.parts if isinstance(files, JoinedFiles) else [files])
    )


def forget(files: Files, names: Sequence[str]) -> None:
    """Give back the page cache of files that have been read."""
    for part, inside in by_folder(files, names):
        if isinstance(part, LocalFiles):
            for name in inside:
                with suppress(CkptError), part.descriptor(name) as fd:
                    drop_cache(fd)


def read_region(payload: Payload, piece: Piece, out: Array, scratch: Array) -> int:
    """Fill `out`, of the shape of `piece.box`, with the piece's elements; returns the bytes read.

    `out` may be strided; its element size is that of the payload. `scratch` is a byte array that bounds the length
    of one read and must hold at least one element.
    """
    if out.size == 0:
        return 0
    strides, width = piece.strides, out.itemsize
    bytes_read = 0
    for block, first, span in spans(piece, out.shape, width, len(scratch)):
        target = out[index_of(block)]
        if target.flags.c_contiguous and is_dense(block.size, strides):
            payload.read_into(first, target.reshape(-1).view(np.uint8).data)
        else:
            payload.read_into(first, scratch[:span].data)
            byte_strides = tuple(s * width for s in strides)
            target[...] = np.ndarray(block.size, target.dtype, scratch.data, 0, byte_strides)
        bytes_read += span
    return bytes_read


def spans(piece: Piece, shape: Sequence[int], width: int, most_bytes: int) -> Iterator[tuple[Box, int, int]]:
    """How a non-empty piece is read: blocks of it, with the first byte in the payload and the bytes from there on."""
    _, offset, strides = piece
    pattern = read_pattern(shape, strides, width, most_bytes // width)
    for block in pattern_blocks(pattern, shape):
        first = offset + sum(a * s for a, s in zip(block.start, strides, strict=True))
        yield block, first * width, span_elems(block.size, strides) * width


def index_of(box: Box) -> tuple[Any, ...]:
    """The index that shows `box` of an array as a view; the `...` makes it one for 0-d arrays too."""
    return (..., *map(slice, box.start, box.stop))


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

        `box` has the coordinates of the transfers' boxes, with zero at `origin` of tensor `key`; `out` has its shape
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
