"""Many small items at a time: the general way with its reads, writes and frame checks joined.

A small item that is a whole source payload in the frame that today's torch writes is copied out of one large read
into one large write. Anything unusual is left to the general way, which explains it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from ckpt_tools.execute.move.source_reader import SourceReader, store_ranges
from ckpt_tools.execute.proof.payload_sums import Stored, check
from ckpt_tools.formats.storage import crc
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.formats.torch_archive.tensor_template import tensor_frame
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.transfers import OutputItem, stored_parts
from ckpt_tools.plan.coalesce import Span, coalesce


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


def small_reads(source: SourceReader, items: Sequence[OutputItem], buffer_bytes: int) -> Iterator[Range]:
    """What `SmallCopies` asks of stores, for a buffer of so many bytes."""
    copies = [next(stored_parts(item.transfers)).item for item in items]
    for file, start, stop in coalesce(copies, buffer_bytes):
        yield from store_ranges(source.files, file, start, stop)


class SmallCopies:
    """The archives of a batch of items (see `plan.coalesce.batches`), each made from one source item in `buffer`."""

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
