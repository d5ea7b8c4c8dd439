"""Tensors measured tile by tile by threads and processes: statistics of one checkpoint, changes between two.

A long tensor is shared out in parts, and the sums of parts are joined in their order: the result does not depend on
how many threads and processes there are. Memory is a tile a thread and a handful of numbers a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from math import prod
from typing import NamedTuple, Protocol, TypeVar

from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.processes.team import Reads, Tick, results_of, start_jobs
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.plan.byte_runs import row_major_tiles
from ckpt_tools.verify.content.values import Change, Statistics

_TILE_ELEMS = 1 << 19  # about 40 MiB of temporary numbers a thread where two tensors differ
_PART_ELEMS = 1 << 23
_MOST_PARTS = 1 << 14  # about, of a tensor: metadata may say any shape; reading a part tells what is absent


class Shaped(Protocol):
    """Any description of a tensor."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Part(NamedTuple):
    """A box of a tensor, which is given by its number."""

    number: int
    box: Box

    def tiles(self) -> Iterator[Box]:
        """The box in pieces that are held in memory."""
        return row_major_tiles(self.box, _TILE_ELEMS)


def parts_of(tensors: Sequence[Shaped]) -> list[Part]:
    """All of each tensor, in order; none of one without elements."""
    return [
        Part(number, box)
        for number, tensor in enumerate(tensors)
        for box in row_major_tiles(
            full_box(tensor.shape), max(_PART_ELEMS, prod(tensor.shape) // _MOST_PARTS)
        )
        if not box.is_empty
    ]


def part_reads(*places: tuple[BoxReader, Sequence[object]]) -> Reads[Part] | None:
    """What reading parts asks of stores, tile by tile in all `places`: readers, each with its tensors by number.

    None where no store is read.
    """
    stores = [place for place in places if place[0].is_remote]
    if not stores:
        return None

    def reads(part: Part) -> Iterator[Range]:
        tensors = [(reader, those[part.number]) for reader, those in stores]
        of_box = [reader.reads(tensor) for reader, tensor in tensors if isinstance(tensor, TargetTensor)]
        return chain.from_iterable(of(tile) for tile in part.tiles() for of in of_box)

    return reads


def bytes_of(parts: Sequence[Part], *places: Sequence[Shaped]) -> list[int]:
    """The bytes of each part, of its tensor in all `places` together."""
    return [sum(part.box.volume * itemsize(place[part.number].dtype) for place in places) for part in parts]


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
        sizes, reads = bytes_of(parts, tensors), part_reads((reader, tensors))
        started = start_jobs(
            measure, parts, sizes=sizes, threads=threads, workers=workers, tick=tick, reads=reads
        )
        return _joined([Statistics(histogram) for _ in tensors], parts, results_of(started))


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
        read_a, read_b = (reader.tensor(tensor) for reader, tensor in zip(readers, pair, strict=True))
        for tile in part.tiles():
            a, b = read_a(tile), read_b(tile)
            found.add((a, b), (pair[0].dtype, pair[1].dtype))
            told(a.nbytes + b.nbytes)
        return found

    with ExitStack() as stack:
        readers = [_reader(place, stack) for place in places]
        parts = parts_of([a for a, _ in pairs])
        sizes = bytes_of(parts, [a for a, _ in pairs], [b for _, b in pairs])
        reads = part_reads((readers[0], [a for a, _ in pairs]), (readers[1], [b for _, b in pairs]))
        started = start_jobs(
            measure, parts, sizes=sizes, threads=threads, workers=workers, tick=tick, reads=reads
        )
        return _joined([Change() for _ in pairs], parts, results_of(started))


def _reader(place: Place, stack: ExitStack) -> BoxReader:
    reader = BoxReader(place.files, place.catalog)
    stack.callback(reader.close)
    return reader


def _joined(whole: list[AnySums], parts: Sequence[Part], found: Sequence[AnySums]) -> list[AnySums]:
    """The sums of every tensor, of its parts in order."""
    for part, sums in zip(parts, found, strict=True):
        whole[part.number].join(sums)
    return whole
