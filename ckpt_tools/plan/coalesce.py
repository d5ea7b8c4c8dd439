"""Many small items at a time: which output items make one write, and which source items one read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckpt_tools.model.catalog import Item
from ckpt_tools.model.transfers import VERBATIM, Computation, OutputItem

SMALL_BYTES = 64 << 10  # items up to this length, container included, are worth joining
MAX_GAP_BYTES = 64 << 10  # reading this much in vain costs less than one more read


class Span(NamedTuple):
    """Bytes `[start, stop)` of a source file that are read at once."""

    file: str
    start: int
    stop: int


def batches(items: Sequence[OutputItem], share: range, max_bytes: int) -> Iterator[range]:
    """`share` cut into runs of neighbours in one file that are small whole-payload copies; others stand alone.

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
        if length is None:  # stands alone, so the next one begins anew
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
