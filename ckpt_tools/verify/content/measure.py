"""Tensors measured tile by tile by threads and processes: statistics of one checkpoint, changes between two.

A long tensor is shared out in parts, and the sums of parts are joined in their order: the result does not depend on
how many threads and processes there are. Memory is a tile a thread and a handful of numbers a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, TypeVar

from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.processes.team import Tick, spread
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.kernels.casts import Array
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.verify.content.parts import Part, bytes_of, part_reads, parts_of
from ckpt_tools.verify.content.values import Change, Statistics


class Place(NamedTuple):
    """Where tensors are read from."""

    files: Files
    catalog: Catalog


AnySums = TypeVar("AnySums", Statistics, Change)


def statistics(
    place: Place,
    tensors: Sequence[TargetTensor],
    *,
    histogram: bool = False,
    threads: int = 2,
    workers: int | None = None,
    tick: Tick = lambda _: None,
) -> list[Statistics]:
    """The statistics of each tensor; `tick` is told the bytes read."""

    def measure(part: Part, told: Tick) -> Statistics:
        found = Statistics(histogram)
        tensor = tensors[part.number]
        read = reader.tensor(tensor)
        for tile in part.tiles():
            values = read(tile)
            found.add(values, tensor.dtype)
            told(values.nbytes)
        return found

    with ExitStack() as stack:
        reader = _reader(place, stack)
        parts = parts_of(tensors)
        found = spread(
            measure,
            parts,
            sizes=bytes_of(parts, tensors),
            threads=threads,
            workers=workers,
            tick=tick,
            reads=part_reads((reader, tensors)),
        )
        return _joined([Statistics(histogram) for _ in tensors], parts, found)


def changes(
    places: tuple[Place, Place],
    pairs: Sequence[tuple[TargetTensor, TargetTensor]],
    *,
    threads: int = 2,
    workers: int | None = None,
    tick: Tick = lambda _: None,
) -> list[Change]:
    """How each tensor of the first place has moved in the second; both of a pair have one shape."""

    def measure(part: Part, told: Tick) -> Change:
        found = Change()
        pair = pairs[part.number]
        reads = [reader.tensor(tensor) for reader, tensor in zip(readers, pair, strict=True)]
        for tile in part.tiles():
            a, b = _both(reads, tile)
            found.add((a, b), (pair[0].dtype, pair[1].dtype))
            told(a.nbytes + b.nbytes)
        return found

    with ExitStack() as stack:
        readers = [_reader(place, stack) for place in places]
        parts = parts_of([a for a, _ in pairs])
        sizes = bytes_of(parts, [a for a, _ in pairs], [b for _, b in pairs])
        reads = part_reads((readers[0], [a for a, _ in pairs]), (readers[1], [b for _, b in pairs]))
        found = spread(measure, parts, sizes=sizes, threads=threads, workers=workers, tick=tick, reads=reads)
        return _joined([Change() for _ in pairs], parts, found)


def _both(reads: Sequence[Callable[[Box], Array]], tile: Box) -> tuple[Array, Array]:
    return reads[0](tile), reads[1](tile)


def _reader(place: Place, stack: ExitStack) -> BoxReader:
    reader = BoxReader(place.files, place.catalog)
    stack.callback(reader.close)
    return reader


def _joined(whole: list[AnySums], parts: Sequence[Part], found: Sequence[AnySums]) -> list[AnySums]:
    """The sums of every tensor, of its parts in order."""
    for part, sums in zip(parts, found, strict=True):
        whole[part.number].join(sums)
    return whole
