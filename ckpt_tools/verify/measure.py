"""Tensors measured tile by tile by a few threads: statistics of one checkpoint, changes between two.

A long tensor is shared out in parts, and the sums of parts are joined in their order: the result does not depend on
how many threads there are. Memory is a tile a thread and a handful of numbers a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple, TypeVar

from ckpt_tools.execute.read_box import BoxReader
from ckpt_tools.formats.files import Files
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.casts import Array
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.plan.byte_runs import row_major_tiles
from ckpt_tools.verify.values import Change, Statistics

TILE_ELEMS = 1 << 19
_PART_ELEMS = 1 << 24  # of a tensor, measured by one thread
_MOST_READ_AHEAD = 256  # parts handed to the threads before their results are taken


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
    tick: Callable[[int], None] = lambda _: None,
) -> list[Statistics]:
    """The statistics of each tensor; `tick` is told the bytes read.

    Raises:
        CorruptCheckpointError, MappingError: a tensor cannot be read.
    """

    def measure(number: int, tiles: Iterable[Box]) -> Statistics:
        found = Statistics(histogram)
        tensor = tensors[number]
        read = reader.tensor(tensor)
        for tile in tiles:
            values = read(tile)
            found.add(values, tensor.dtype)
            tick(values.nbytes)
        return found

    with ExitStack() as stack:
        reader = _reader(place, stack)
        return _joined(tensors, measure, lambda: Statistics(histogram), threads)


def changes(
    places: tuple[Place, Place],
    pairs: Sequence[tuple[TargetTensor, TargetTensor]],
    *,
    threads: int = 2,
    tick: Callable[[int], None] = lambda _: None,
) -> list[Change]:
    """How each tensor of the first place has moved in the second; both of a pair have one shape.

    Raises:
        CorruptCheckpointError, MappingError: a tensor cannot be read.
    """

    def measure(number: int, tiles: Iterable[Box]) -> Change:
        found = Change()
        pair = pairs[number]
        reads = [reader.tensor(tensor) for reader, tensor in zip(readers, pair, strict=True)]
        for tile in tiles:
            a, b = _both(reads, tile)
            found.add((a, b), (pair[0].dtype, pair[1].dtype))
            tick(a.nbytes + b.nbytes)
        return found

    with ExitStack() as stack:
        readers = [_reader(place, stack) for place in places]
        return _joined([a for a, _ in pairs], measure, Change, threads)


def _both(reads: Sequence[Callable[[Box], Array]], tile: Box) -> tuple[Array, Array]:
    return reads[0](tile), reads[1](tile)


def _reader(place: Place, stack: ExitStack) -> BoxReader:
    reader = BoxReader(place.files, place.catalog)
    stack.callback(reader.close)
    return reader


def _joined(
    tensors: Sequence[TargetTensor],
    measure: Callable[[int, Iterable[Box]], AnySums],
    empty: Callable[[], AnySums],
    threads: int,
) -> list[AnySums]:
    """The sums of every tensor, of its parts in order."""
    results = [empty() for _ in tensors]
    parts = _parts(tensors)
    with ThreadPoolExecutor(threads, "ckpt-measure") as pool:
        try:
            while some := list(itertools.islice(parts, _MOST_READ_AHEAD)):
                numbers = [number for number, _ in some]
                for number, found in zip(numbers, pool.map(measure, *zip(*some, strict=True)), strict=True):
                    results[number].join(found)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


def _parts(tensors: Sequence[TargetTensor]) -> Iterator[tuple[int, list[Box]]]:
    """Number of a tensor, and tiles of it that one thread measures."""
    for number, tensor in enumerate(tensors):
        tiles = (t for t in row_major_tiles(full_box(tensor.shape), TILE_ELEMS) if not t.is_empty)
        while some := list(_until_full(tiles)):
            yield number, some


def _until_full(tiles: Iterator[Box]) -> Iterator[Box]:
    elements = 0
    for tile in tiles:
        yield tile
        elements += tile.volume
        if elements >= _PART_ELEMS:
            return
