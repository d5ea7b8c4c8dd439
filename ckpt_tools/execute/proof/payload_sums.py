"""Proof that what was read of a source is what its writer stored, however its bytes were read.

Archives carry a CRC-32 of every payload, and a conversion reads payloads in pieces: in any order, by several threads,
with gaps that nobody needs. Every read sums the bytes that nothing has summed before; sums of neighbours are joined.
A payload that is complete is compared at once. What is left when all work is done is read by
`prove_source.prove_rest`. A payload that nothing is read from does not get into the output and is not proven.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.formats.storage import crc
from ckpt_tools.model.catalog import Item

MOST_PIECES = 4096  # of one payload; more are not kept but read again


class Piece(NamedTuple):
    """CRC-32 of the bytes [start, stop) of a record."""

    start: int
    stop: int
    crc32: int


class Stored(NamedTuple):
    """The record of an item that holds its tensor's elements, and perhaps others."""

    item: Item
    start: int  # bytes from the beginning of the file
    nbytes: int
    crc32: int  # as its writer stored it


class Pieces:
    """Disjoint pieces of a record of `nbytes` in order, neighbours joined; of more than `most` some are left out."""

    def __init__(self, nbytes: int, most: int | None = None) -> None:
        self.nbytes = nbytes
        self._most = most
        self._pieces: list[Piece] = []

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    @property
    def total(self) -> int | None:
        """CRC-32 of the whole record; None while a byte of it is missing."""
        if len(self._pieces) != 1 or self._pieces[0][:2] != (0, self.nbytes):
            return None
        return self._pieces[0].crc32

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that no piece covers."""
        gaps = []
        for number in range(max(self._after(start) - 1, 0), len(self._pieces)):
            piece = self._pieces[number]
            if piece.start >= stop:
                break
            if piece.start > start:
                gaps.append((start, piece.start))
            start = max(start, piece.stop)
        return [*gaps, (start, stop)] if start < stop else gaps

    def put(self, piece: Piece) -> None:
        """Add a piece; one that overlaps another, or is one too many, is left out."""
        start, stop, checksum = piece
        at = self._after(start)
        left = self._pieces[at - 1] if at else None
        right = self._pieces[at] if at < len(self._pieces) else None
        if start == stop or (left and left.stop > start) or (right and right.start < stop):
            return
        first, last = at, at
        if left and left.stop == start:
            start, checksum, first = left.start, crc.combine(left.crc32, checksum, stop - start), at - 1
        if right and right.start == stop:
            stop, last = right.stop, at + 1
            checksum = crc.combine(checksum, right.crc32, right.stop - right.start)
        if first < last or self._most is None or len(self._pieces) < self._most:
            self._pieces[first:last] = [Piece(start, stop, checksum)]

    def _after(self, start: int) -> int:
        """Number of the pieces that begin at or before `start`."""
        return bisect_right(self._pieces, start, key=lambda piece: piece.start)


class RecordProof:
    """What is known of one record so far. Safe to share between threads."""

    def __init__(self, proof: SourceProof, key: str, stored: Stored) -> None:
        self.stored = stored
        self._proof, self._key = proof, key
        self._lock = threading.Lock()
        self._pieces = Pieces(stored.nbytes, MOST_PIECES)

    @property
    def pieces(self) -> list[Piece]:
        with self._lock:
            return list(self._pieces)

    def add(self, offset: int, data: memoryview) -> None:
        """Sum those bytes of `data`, read at byte `offset` of the file, that nothing has summed yet."""
        first = offset - self.stored.start
        with self._lock:
            gaps = self._pieces.gaps(first, first + len(data))
        if not gaps:
            return
        summed = [Piece(a, b, crc.crc32(data[a - first : b - first])) for a, b in gaps]
        self._put(summed)

    def add_sum(self, offset: int, nbytes: int, checksum: int) -> None:
        """Note the CRC-32 of bytes read at byte `offset` of the file; lost if some of them are summed already."""
        first = offset - self.stored.start
        if nbytes == self.stored.nbytes:
            self._whole(checksum)
        else:
            self._put([Piece(first, first + nbytes, checksum)])

    def _put(self, pieces: Iterable[Piece]) -> None:
        with self._lock:
            for piece in pieces:
                self._pieces.put(piece)
            total = self._pieces.total
        if total is not None:
            self._whole(total)

    def _whole(self, found: int) -> None:
        check(self._key, self.stored, found)
        self._proof.all_proven({self.stored.item: self.stored.nbytes})


class SourceProof:
    """The payloads of one conversion that were read from, in this process. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.open: dict[Item, RecordProof] = {}  # not read as a whole
        self.proven: dict[Item, int] = {}  # bytes
        self.without_sum: set[Item] = set()

    def of(self, key: str, stored: Stored) -> RecordProof | None:
        """What to tell of reads from a record; None when it is proven already."""
        with self._lock:
            if stored.item in self.proven:
                return None
            return self.open.setdefault(stored.item, RecordProof(self, key, stored))

    def all_proven(self, nbytes: Mapping[Item, int]) -> None:
        """Note that the records of these items, so many bytes long, are what was stored."""
        with self._lock:
            self.proven.update(nbytes)
            for item in nbytes.keys() & self.open.keys():
                del self.open[item]

    def without(self, item: Item) -> None:
        with self._lock:
            self.without_sum.add(item)


def check(key: str, stored: Stored, found: int) -> None:
    """Raise CorruptCheckpointError if `found` is not the checksum that the record's writer stored."""
    if found != stored.crc32:
        raise CorruptCheckpointError(damage(key, stored, found))


def damage(key: str, stored: Stored, found: int) -> str:
    """The message for a record with the wrong CRC-32 `found`."""
    item, start, nbytes, expected = stored
    return (
        f"{key}: the payload of the item at byte {item.offset} of {item.file} has another checksum than its archive "
        f"says: bytes {start}..{start + nbytes} have CRC-32 {found:08x}, their writer stored {expected:08x}, so bits "
        "have changed since. Copy the checkpoint again; `--check-source none` copies it with the damage."
    )
