"""How a strided region of a payload is read: in which pieces, with how much waste; and how items are cut in tiles.

A region has `size` (elements per dimension) and lies in its payload at `strides` (elements). Worked example,
columns 2..3 of a row-major (4, 8) payload, size (4, 2), strides (8, 1): four runs of 2 elements, or one
covering span of 26 elements of which 8 are wanted. Which is cheaper depends on what one more read costs.

Of many small items, neighbours make one read and one write (`batches`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.transfers import VERBATIM, Computation, OutputItem, Transfer

# One more read costs about as much as reading this many bytes more: the disk and the system call.
READ_COST_BYTES = 64 * 1024


class ReadPattern(NamedTuple):
    """A region is read in blocks: one index of each of the `outer` dimensions, and `rows` indices of `split`.

    Every block is read as one span of at most the limit; `span_elems` is its length for a full block.
    """

    outer: tuple[int, ...]
    split: int | None  # None: the block is one element wide in every dimension of more than one element
    rows: int
    span_elems: int
    reads: int

    def dense(self, size: Sequence[int]) -> bool:
        """Whether the spans hold nothing but wanted elements."""
        inner = math.prod(n for d, n in enumerate(size) if d not in self.outer and d != self.split)
        return self.span_elems == inner * self.rows


def read_pattern(size: Sequence[int], strides: Sequence[int], itemsize: int, limit_elems: int) -> ReadPattern:
    """The cheapest way to read a region in spans of at most `limit_elems` elements (at least 1).

    One candidate a dimension, from the fastest to the slowest in the payload: everything faster than `dim` is inside
    a span, of `dim` as many `rows` as the limit allows, everything slower is one read per index. Going outwards,
    reads become fewer and spans take in more unwanted bytes; the best is where the sum of both costs is least. In
    the example of this module's head (columns 2..3 of (4, 8), 2 bytes an element) one span a row is 4 reads of 4
    bytes, one span over all rows 1 read of 52 bytes, and as a read costs as much as 64 KiB, the second wins.
    """
    # By stride, not by position: a transposed view has its fastest dimension first. Dimensions of one element have
    # no say (their stride may be anything).
    order = sorted((d for d, n in enumerate(size) if n > 1), key=lambda d: -strides[d])
    span = 1  # elements from the first to the last of what lies inside of `dim`
    # Element by element: best where even neighbours lie far apart, and all there is for a region of one element.
    best = ReadPattern(tuple(order), None, 1, 1, math.prod(size))
    best_cost = best.reads * (READ_COST_BYTES + itemsize)
    for k in range(len(order) - 1, -1, -1):
        dim = order[k]
        if span > limit_elems:  # what is inside does not fit one span, and further out it only grows
            break
        # A stride of 0 is an expanded dimension: all its elements are the same one.
        rows = min(size[dim], 1 + (limit_elems - span) // strides[dim]) if strides[dim] else size[dim]
        full = (rows - 1) * strides[dim] + span
        reads = math.prod(size[d] for d in order[:k]) * -(-size[dim] // rows)
        cost = reads * (READ_COST_BYTES + full * itemsize)
        if cost <= best_cost:  # at equal cost fewer reads: the later candidate
            best, best_cost = ReadPattern(tuple(order[:k]), dim, rows, full, reads), cost
        span += (size[dim] - 1) * strides[dim]
    return best


def pattern_blocks(pattern: ReadPattern, size: Sequence[int]) -> Iterator[Box]:
    """The boxes of a region (in its own coordinates) that `pattern` reads with one span each."""
    start, block = [0] * len(size), list(size)
    for d in pattern.outer:
        block[d] = 1
    for index in itertools.product(*(range(size[d]) for d in pattern.outer)):
        for d, i in zip(pattern.outer, index, strict=True):
            start[d] = i
        if pattern.split is None:
            yield Box(tuple(start), tuple(block))
            continue
        for first in range(0, size[pattern.split], pattern.rows):
            start[pattern.split] = first
            block[pattern.split] = min(pattern.rows, size[pattern.split] - first)
            yield Box(tuple(start), tuple(block))


def span_elems(size: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a non-empty region, both included."""
    return 1 + sum((n - 1) * s for n, s in zip(size, strides, strict=True))


def is_dense(size: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a non-empty region is one gapless run in row-major order."""
    expected = 1
    for n, s in zip(reversed(size), reversed(strides), strict=True):
        if n > 1 and s != expected:
            return False
        expected *= n
    return True


def is_run(region: Box, size: Sequence[int]) -> bool:
    """Whether `region` is one gapless range of a row-major tensor of `size`."""
    axis = 0
    while axis < len(size) and region.size[axis] == 1:
        axis += 1
    return region.size[axis + 1 :] == tuple(size[axis + 1 :])


SHARED_BYTES = 1 << 20  # so long a copy may have a gap in front of its item, to share blocks with its source


def long_parts(transfer: Transfer | Computation, dtype: str, size: Sequence[int]) -> list[Transfer]:
    """A transfer into an item of this type and size, in parts that are gapless both in their payload and in the item.

    None where these are shorter than `SHARED_BYTES`, or are computed.
    """
    if isinstance(transfer, Computation) or transfer.dtype != dtype or transfer.nbytes < SHARED_BYTES:
        return []
    piece = transfer.piece
    axis, inner, region = len(size), 1, piece.box
    while axis and (region.size[axis - 1] == 1 or piece.strides[axis - 1] == inner):
        axis -= 1
        inner *= region.size[axis]
        if region.size[axis] != size[axis]:
            break
    if inner * itemsize(dtype) < SHARED_BYTES:
        return []
    lead = (range(a, a + n) for a, n in zip(region.start[:axis], region.size[:axis], strict=True))
    boxes = (
        Box((*index, *region.start[axis:]), (*(1,) * axis, *region.size[axis:]))
        for index in itertools.product(*lead)
    )
    return [transfer._replace(piece=part) for part in map(piece.crop, boxes) if part]


def row_major_tiles(box: Box, limit_elems: int) -> Iterator[Box]:
    """`box` cut in boxes of at most `limit_elems` (>= 1) elements that follow each other in row-major order."""
    axis, inner = len(box.size), 1
    while axis and inner * box.size[axis - 1] <= limit_elems:
        axis -= 1
        inner *= box.size[axis]
    if axis == 0:
        yield box
        return
    axis -= 1
    rows = max(1, limit_elems // inner)
    lead = (range(a, a + n) for a, n in zip(box.start[:axis], box.size[:axis], strict=True))
    for index in itertools.product(*lead):
        for first in range(0, box.size[axis], rows):
            yield Box(
                (*index, box.start[axis] + first, *box.start[axis + 1 :]),
                (*(1,) * axis, min(rows, box.size[axis] - first), *box.size[axis + 1 :]),
            )


SMALL_BYTES = 64 << 10  # items up to this length, container included, are worth joining
MAX_GAP_BYTES = 64 << 10  # reading this much in vain costs less than one more read


class Span(NamedTuple):
    """Bytes `[start, stop)` of a source file that are read at once."""

    file: str
    start: int
    stop: int


def batches(items: Sequence[OutputItem], share: range, max_bytes: int) -> Iterator[range]:
    """`share` cut into runs of neighbours in one file that are small whole-payload copies; others are alone.

    The source items of a run, and its outputs, have at most `max_bytes` each (which is at least SMALL_BYTES).
    """
    first, size = share.start, 0
    for number in share:
        item = items[number]
        length = _joinable_bytes(item)
        begins = number == first
        fits = length is not None and size + length <= max_bytes and item.file == items[first].file
        if not begins and not fits:
            yield range(first, number)
            first, size, begins = number, 0, True
        if length is None:  # alone, so the next one starts a batch
            yield range(number, number + 1)
            first, size = number + 1, 0
        else:
            size += length
    if first < share.stop:
        yield range(first, share.stop)


def _joinable_bytes(item: OutputItem) -> int | None:
    """Room that a small whole-payload copy takes in a batch, or None if the item is not one."""
    if item.bare or item.zero_elems or len(item.transfers) != 1:
        return None
    (transfer,) = item.transfers
    if isinstance(transfer, Computation) or transfer.strategy != VERBATIM:
        return None
    source = transfer.item
    length = max(item.length + 64, source.length)
    return None if source.bare or length > SMALL_BYTES else length


def coalesce(items: Iterable[Item], max_span_bytes: int) -> list[Span]:
    """Spans that hold all `items`, in file order: neighbours are joined, up to MAX_GAP_BYTES apart.

    No span is longer than `max_span_bytes`, unless a single item is.
    """
    spans: list[Span] = []
    for file, offset, length in sorted({item[:3] for item in items}):
        stop = offset + length
        if spans:
            last = spans[-1]
            joined = max(last.stop, stop)
            near = last.file == file and offset - last.stop <= MAX_GAP_BYTES
            if near and joined - last.start <= max_span_bytes:
                spans[-1] = Span(file, last.start, joined)
                continue
        spans.append(Span(file, offset, stop))
    return spans
