"""The tile pump: one output item at a time through buffers of a fixed size.

An item is cut into segments that follow each other in its payload. A long segment that is a gapless copy out of a
local file shares its blocks with the source, is copied by the kernel, or read and written as it is (`_move`); a whole
payload keeps its CRC-32. Anything else passes through a tile buffer, is cast if it must be, and is summed on the way.
The item's CRC is joined from its segments'.

A small item that is a whole source payload in the frame that today's torch writes is copied out of one large read
into one large write. Anything unusual is left to the general way, which explains it.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ckpt_tools.execute.move.source_reader import (
    Filled,
    Filler,
    Payload,
    SourceReader,
    chunk_of,
    store_ranges,
)
from ckpt_tools.execute.output.fileio import (
    BLOCK_BYTES,
    At,
    CopyCount,
    OutputFile,
    copy_range,
    share,
    storage_errors,
    stored_ranges,
    write_all,
)
from ckpt_tools.execute.proof.payload_sums import Stored, check
from ckpt_tools.formats.storage import crc
from ckpt_tools.formats.storage.files import Files, LocalFiles
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.formats.torch_archive.tensor_template import Frame, bare_frame, tensor_frame
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.kernels.casts import Array, raw_dtype
from ckpt_tools.model.transfers import (
    VERBATIM,
    Computation,
    OutputBlob,
    OutputItem,
    Transfer,
    only_zeros,
    stored_parts,
)
from ckpt_tools.plan.byte_runs import Span, coalesce, is_dense, is_run, long_parts, row_major_tiles
from ckpt_tools.plan.overlap import BoxIndex


class _Loaded:
    """Source items in memory: in `buffer` as far as it goes."""

    def __init__(self, files: Files, items: Sequence[Item], buffer: memoryview) -> None:
        self._spans: list[Span] = coalesce(items, len(buffer))
        self._keys = [(s.file, s.start) for s in self._spans]
        self._data: list[memoryview] = []
        self.nbytes = 0
        for file, start, stop in self._spans:
            part, buffer = buffer[: stop - start], buffer[stop - start :]
            if len(part) < stop - start:
                part = memoryview(bytearray(stop - start))
            files.read_into(file, start, part)
            self._data.append(part)
            self.nbytes += len(part)

    def item(self, item: Item) -> memoryview:
        """All bytes of one of the items."""
        number = bisect_right(self._keys, (item.file, item.offset)) - 1
        first = item.offset - self._spans[number].start
        return self._data[number][first : first + item.length]


class SmallCopies:
    """The archives of a batch of items (see `byte_runs.batches`), each made from one source item in `buffer`."""

    def __init__(self, source: SourceReader, items: Sequence[OutputItem], buffer: memoryview) -> None:
        self._items = items
        self._proof = source.proof
        self._proven: dict[Item, int] = {}  # bytes of each payload
        self._copies = [next(stored_parts(item.transfers)) for item in items]
        self._loaded = _Loaded(source.files, [transfer.item for transfer in self._copies], buffer)
        self.bytes_read = self._loaded.nbytes

    def archives(self) -> Iterator[tuple[list[bytes | memoryview], int] | None]:
        """The parts of each item's archive and its payload's CRC-32; None for an item in an unusual frame."""
        for item, transfer in zip(self._items, self._copies, strict=True):
            stored = self._loaded.item(transfer.item)
            source = tensor_frame(transfer.dtype, transfer.shape)
            head, end = len(source.head), len(source.head) + source.payload_bytes
            # As bytes: views are compared byte by byte.
            usual = len(stored) == source.length and bytes(stored[:head]) == source.head
            checksum = source.crc_in(bytes(stored[end:])) if usual else None
            # A writer that keeps no checksums leaves zeros.
            if checksum is None or (not checksum and source.payload_bytes):
                yield None
                continue
            payload = stored[head:end]
            if self._proof is not None and payload:
                if (found := crc.crc32(payload)) != checksum:
                    at = Stored(transfer.item, transfer.item.offset + head, len(payload), checksum)
                    check(transfer.key, at, found)
                self._proven[transfer.item] = len(payload)
            if (item.dtype, item.box.size) == (transfer.dtype, transfer.shape):
                yield [stored], checksum
            else:
                frame = tensor_frame(item.dtype, item.box.size)
                yield [frame.head, payload, frame.tail(checksum)], checksum

    def note_proven(self) -> None:
        """Tell of the payloads that `archives` has proven, all at once."""
        if self._proof is not None:
            self._proof.all_proven(self._proven)


_COPY_STEP_BYTES = 64 << 20  # copied by the kernel between two looks at whether to stop
_CAST_COPIES = 4  # arrays of a tile's elements that a cast holds at a time
_COMPUTE_COPIES = 8  # and a kernel that computes, its inputs among them
# Of a plain copy at a time: what was read is summed and written out of the processor's cache.
_CACHED_BYTES = 512 << 10
KERNEL_COPY_BYTES = 256 * 1024  # below, one read and one write cost less than joining checksums


@dataclass(slots=True)
class Counters(Filled):
    """What a worker has read and moved, in bytes, and rounded."""

    copies: CopyCount = field(default_factory=CopyCount)


class Copy(NamedTuple):
    """`nbytes` bytes of a payload, from its byte `first` on, that are copied as they lie."""

    payload: Payload
    first: int
    nbytes: int
    crc32: int | None  # of these bytes, where it is known

    @property
    def start(self) -> int:
        """In bytes of the payload's file."""
        return self.payload.offset + self.first


class Segment(NamedTuple):
    """A gapless range of an item's payload: `box` is relative to the item's start."""

    box: Box
    transfers: Sequence[Transfer | Computation]
    zeros: bool  # some elements come from no transfer


def segments(item: OutputItem) -> list[Segment]:
    """The item's payload in order: a segment for each gapless range, if it is made of such, else one in all."""
    size = item.box.size
    whole = [Segment(Box((0,) * len(size), size), item.transfers, item.zero_elems > 0)]
    if item.zero_elems:
        return whole
    found = []
    for t in item.transfers:
        parts = long_parts(t, item.dtype, size)
        if not parts and not is_run(t.box, size):
            return whole
        found += [Segment(part.box, (part,), False) for part in parts or (t,)]
    return sorted(found, key=lambda segment: segment.box.start)


class Pump:
    """Writes items with two buffers of `tile_bytes` each. One pump a thread.

    `tick` is called with the bytes written since the last call, after every tile, and may raise to stop the work.
    """

    def __init__(self, source: SourceReader, tile_bytes: int, tick: Callable[[int], None]) -> None:
        self._source = source
        self._tile_bytes = tile_bytes
        room = np.empty(tile_bytes + 2 * BLOCK_BYTES, np.uint8)
        self._room = room[-room.ctypes.data % BLOCK_BYTES :]
        self._scratch = np.empty(tile_bytes, np.uint8)
        self._tick = tick
        self.counters = Counters()
        self._unshared: set[tuple[int, int]] = set()
        self._filler = Filler(source, self._scratch, self.counters)

    def reads(self, item: OutputItem | OutputBlob) -> Iterator[Range]:
        """What the content of an item asks of stores, in order; that of a blob is known."""
        if isinstance(item, OutputBlob):
            return
        for segment in segments(item):
            for tile, transfers in _tiles(item, segment, self._tile_bytes):
                yield from self._filler.reads(tile, transfers, item.box.start)

    def batch_reads(self, items: Sequence[OutputItem]) -> Iterator[Range]:
        copies = [next(stored_parts(item.transfers)).item for item in items]
        for file, start, stop in coalesce(copies, len(self._scratch)):
            yield from store_ranges(self._source.files, file, start, stop)

    def write_item(self, item: OutputItem, file: OutputFile) -> int:
        """Write one item; returns its payload's CRC-32, 0 if nobody summed it."""
        frame = _frame_of(item)
        at = item.offset + len(frame.head)
        sums = []
        for segment in segments(item):
            nbytes = segment.box.volume * itemsize(item.dtype)
            sums.append((self._write_segment(item, segment, file, at), nbytes))
            at += nbytes
        total = _joined(sums)
        tail = frame.tail(total)
        with storage_errors(file.path):
            write_all(file.fd, frame.head, item.offset)
            write_all(file.fd, tail, at)
        self._tick(len(frame.head) + len(tail))
        return total

    def write_batch(self, items: Sequence[OutputItem], file: OutputFile) -> list[int]:
        """`write_item` for the items of one of `byte_runs.batches`: few reads, one write."""
        small = SmallCopies(self._source, items, self._scratch.data)
        self.counters.read += small.bytes_read
        base, end = items[0].offset, items[-1].offset + items[-1].length
        out = self._buffer(base, end - base).data
        checksums, at = [], 0
        for item, archive in zip(items, small.archives(), strict=True):
            if archive is None:
                return [self.write_item(one, file) for one in items]
            gap = item.offset - base - at
            for part in (bytes(gap), *archive[0]) if gap else archive[0]:
                out[at : at + len(part)] = part
                at += len(part)
            checksums.append(archive[1])
        small.note_proven()
        file.write(out, base)
        self.counters.copies.touched += len(out)
        self._tick(sum(item.length for item in items))
        return checksums

    def item_content(self, item: OutputItem) -> Iterator[bytes | memoryview]:
        """The item's bytes in order, as `write_item` writes them; each part is valid until the next is asked for."""
        frame = _frame_of(item)
        yield frame.head
        sums = []
        for segment in segments(item):
            checksum = 0
            for data, checksum in self._segment_content(item, segment, 0):  # noqa: B007  the last one counts
                yield data
            stated = self._stated(self._copy(item, segment), checksum)
            sums.append((stated, segment.box.volume * itemsize(item.dtype)))
        tail = frame.tail(_joined(sums))
        self._tick(len(frame.head) + len(tail))
        yield tail

    def is_intact(self, item: OutputItem, file: OutputFile, checksum: int) -> bool:
        """Whether the archive is there as it was written: its frame, and a payload with this CRC-32."""
        if not checksum and item.nbytes:
            return False  # nobody summed it
        frame = _frame_of(item)
        at = item.offset + len(frame.head)
        end = at + frame.payload_bytes
        total = 0
        with storage_errors(file.path):
            for done in range(at, end, self._tile_bytes):
                part = self._room[: min(self._tile_bytes, end - done)].data
                if os.preadv(file.fd, [part], done) != len(part):
                    return False
                total = crc.crc32(part, total)
                self._tick(len(part))
            tail = frame.tail(checksum)
            self._tick(frame.length - frame.payload_bytes)
            around = os.pread(file.fd, len(frame.head), item.offset) + os.pread(file.fd, len(tail), end)
        return total == checksum and around == frame.head + tail

    def _write_segment(self, item: OutputItem, segment: Segment, file: OutputFile, at: int) -> int | None:
        """Write a segment's bytes from byte `at` of the file on; returns their CRC-32, None if nobody summed them."""
        if only_zeros(segment.transfers):
            nbytes = segment.box.volume * itemsize(item.dtype)
            self._write_zeros(file, at, at + nbytes)
            return crc.of_zeros(nbytes)
        copy = self._copy(item, segment)
        checksum = self._move(copy, file, at) if copy else None
        if checksum is not None:
            return self._stated(copy, checksum)
        checksum = 0
        for data, checksum in self._segment_content(item, segment, at):  # noqa: B007  the last one counts
            file.write(data, at)
            at += len(data)
        return self._stated(copy, checksum)

    def _write_zeros(self, file: OutputFile, start: int, stop: int) -> None:
        """Zeros from byte `start` to `stop` of the file; what is a hole there reads as zeros already."""
        done = start
        for first, end in stored_ranges(file.fd, start, stop):
            for at in range(first, end, self._tile_bytes):
                data = self._buffer(at, min(self._tile_bytes, end - at))
                data[:] = 0
                file.write(data.data, at)
                self.counters.copies.touched += len(data)
                self._tick(at + len(data) - done)
                done = at + len(data)
        self._tick(stop - done)

    def _stated(self, copy: Copy | None, found: int) -> int | None:
        """The CRC-32 of a segment's bytes: a whole payload keeps its own, so that unproven damage still shows."""
        if copy is None or (copy.crc32 is None and self._source.sums):
            return found
        return copy.crc32

    def _segment_content(
        self, item: OutputItem, segment: Segment, at: int
    ) -> Iterator[tuple[memoryview, int]]:
        """A segment's bytes, for byte `at` of the file on, a tile at a time, each with the CRC-32 of all so far."""
        total = 0
        for tile, transfers in _tiles(item, segment, self._tile_bytes):
            data = self._fill(item, tile, transfers, segment.zeros, at)
            at += len(data)
            total = crc.crc32(data, total)
            self.counters.copies.touched += len(data)
            yield data, total
            self._tick(len(data))

    def _copy(self, item: OutputItem, segment: Segment) -> Copy | None:
        """What a segment is a copy of, if it is nothing but that."""
        if len(segment.transfers) != 1 or segment.zeros:
            return None
        (t,) = segment.transfers
        if isinstance(t, Computation) or t.dtype != item.dtype or not is_dense(t.box.size, t.piece.strides):
            return None
        payload = self._source.payload(chunk_of(t))
        known = payload.crc32 if t.strategy == VERBATIM else None
        return Copy(payload, t.piece.offset * itemsize(t.dtype), t.nbytes, known)

    def _move(self, copy: Copy, file: OutputFile, at: int) -> int | None:
        """Move a long copy without tiles; returns the CRC-32 that was found, 0 if none was asked for; None: not done.

        What shares its blocks with the source is read for its checksum alone. What must be read and is not shared
        passes through the processor's cache: nothing is cheaper than to write what was read.
        """
        payload, found = copy.payload, 0
        if copy.nbytes < KERNEL_COPY_BYTES or not isinstance(payload.files, LocalFiles):
            return None
        with payload.files.descriptor(payload.name) as stored, storage_errors(file.path):
            source, target = At(stored, copy.start), At(file.fd, at)
            is_shared = share(source, target, copy.nbytes, self.counters.copies, self._unshared)
            if not is_shared and file.direct is not None:
                return None
            if payload.proof is not None or (copy.crc32 is None and self._source.sums):
                found = self._pass_through(copy, None if is_shared else file, at)
            elif is_shared:
                self._tick(copy.nbytes)
            else:
                for done in range(0, copy.nbytes, _COPY_STEP_BYTES):
                    step = min(_COPY_STEP_BYTES, copy.nbytes - done)
                    copy_range(source.skip(done), target.skip(done), step, self.counters.copies)
                    self._tick(step)
        self.counters.read += copy.nbytes
        return found

    def _pass_through(self, copy: Copy, file: OutputFile | None, at: int) -> int:
        """Read and sum a copy and tell its proof, writing it from byte `at` of `file` on if one is given."""
        payload, step, total = copy.payload, min(_CACHED_BYTES, self._tile_bytes), 0
        for done in range(0, copy.nbytes, step):
            data = self._buffer(at + done, min(step, copy.nbytes - done)).data
            payload.files.read_into(payload.name, copy.start + done, data)
            total = crc.crc32(data, total)
            if file is not None:
                file.write(data, at + done)
                self.counters.copies.touched += len(data)
            self._tick(len(data))
        if payload.proof is not None:
            payload.proof.add_sum(copy.start, copy.nbytes, total)
        return total

    def _buffer(self, at: int, nbytes: int) -> Array:
        """Room for at most a tile, as far into a page as byte `at` of a file: what O_DIRECT asks for."""
        first = at % BLOCK_BYTES
        return self._room[first : first + nbytes]

    def _fill(
        self, item: OutputItem, tile: Box, transfers: Sequence[Transfer | Computation], zeros: bool, at: int
    ) -> memoryview:
        """The bytes of a tile (relative to the item's start), in the buffer for byte `at` of the file."""
        data = self._buffer(at, tile.volume * itemsize(item.dtype))
        if zeros:
            data[:] = 0
        out = data.view(raw_dtype(item.dtype)).reshape(tile.size)
        self._filler.fill(out, item.dtype, tile, transfers, item.key, item.box.start)
        return data.data


def _joined(sums: Iterable[tuple[int | None, int]]) -> int:
    """CRC-32 of what follows each other, from those of the parts and their bytes; 0 if one is not known."""
    total = 0
    for checksum, nbytes in sums:
        if checksum is None:
            return 0
        total = crc.combine(total, checksum, nbytes)
    return total


def _frame_of(item: OutputItem) -> Frame:
    make = bare_frame if item.bare else tensor_frame
    return make(item.dtype, item.box.size)


def _width(transfer: Transfer | Computation) -> int:
    """Bytes that an element of its result takes, or those of what it is computed from."""
    width = itemsize(transfer.dtype)
    if isinstance(transfer, Computation) and transfer.box.volume:
        inputs = sum(o.box.volume * itemsize(o.dtype) for o in transfer.operands)
        width = max(width, -(-inputs // transfer.box.volume))
    return width


def _tiles(
    item: OutputItem, segment: Segment, tile_bytes: int
) -> Iterator[tuple[Box, Sequence[Transfer | Computation]]]:
    """Boxes that fit the buffers, in payload order, each with the transfers that meet it."""
    width = max([itemsize(item.dtype), *map(_width, segment.transfers)])
    if any(isinstance(t, Computation) for t in segment.transfers):
        width *= _COMPUTE_COPIES
    elif any(t.dtype != item.dtype for t in segment.transfers):
        width *= _CAST_COPIES
    index = BoxIndex([t.box for t in segment.transfers]) if len(segment.transfers) > 1 else None
    for tile in row_major_tiles(segment.box, max(1, tile_bytes // width)):
        if index is None:
            yield tile, segment.transfers
        else:
            yield tile, [segment.transfers[i] for i in index.meeting(tile)]
