"""Tensors that should be alike, read side by side in blocks that stay in the processor's cache.

What is compared is equal nearly always. No element has to be put in its place to see that where all tensors are cut
alike, or lie in the order of their elements: every block is one read of each then. Else a tile at a time is read as
it lies, and what is in one piece on all sides is looked at there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ckpt_tools.errors import CkptError
from ckpt_tools.execute.move.read_box import BoxReader, Region, Run
from ckpt_tools.execute.move.source_reader import index_of
from ckpt_tools.model.box import Box
from ckpt_tools.model.kernels.casts import Array, raw_dtype
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.plan.byte_runs import is_run, row_major_tiles

_BLOCK_ELEMS = 1 << 16  # of each tensor: with what is made of them they fit a cache of 1 MiB
_TILE_ELEMS = 1 << 18  # of tensors that are cut in different ways, which takes some time a tile


class Seen(NamedTuple):
    """A tensor, and who reads it."""

    reader: BoxReader
    tensor: TargetTensor


def in_step(seen: Sequence[Seen], box: Box) -> Iterator[tuple[Array, ...]]:
    """The elements of `box`, each once and in some order, as blocks of raw bits: the same ones of every tensor.

    Blocks of one shape, at any strides, are valid until the next. It ends early where something cannot be read: who
    has not got all elements reads them in order, and is told there what is wrong.
    """
    with suppress(CkptError):
        runs = [one.reader.runs(one.tensor, box) for one in seen]
        boxes = [[run.box for run in side] for side in runs]
        cut_alike = all(side == boxes[0] for side in boxes)
        if all(boxes) and (cut_alike or all(is_run(b, box.size) for side in boxes for b in side)):
            yield from _by_runs(runs, [raw_dtype(one.tensor.dtype) for one in seen])
            return
        reads = [one.reader.regions(one.tensor, box) for one in seen]
        for tile in row_major_tiles(box, _TILE_ELEMS):
            yield from _common([read(tile) for read in reads])


def _common(sides: Sequence[Sequence[Region]]) -> Iterator[tuple[Array, ...]]:
    """The elements of every side in each box that is inside of one region of all."""
    common: list[tuple[Box, tuple[Array, ...]]] = [(region.box, (region.elements,)) for region in sides[0]]
    for side in sides[1:]:
        common = [
            (both, (*(_cut(one, box, both) for one in elements), _cut(region.elements, region.box, both)))
            for box, elements in common
            for region in side
            if (both := box.intersect(region.box)) is not None
        ]
    for _, elements in common:
        yield elements


def _cut(elements: Array, box: Box, part: Box) -> Array:
    return elements if part == box else elements[index_of(part.relative_to(box))]


def _by_runs(runs: Sequence[Sequence[Run]], types: Sequence[np.dtype[Any]]) -> Iterator[tuple[Array, ...]]:
    """Blocks of tensors that lie in runs, which are sorted by where they begin: they follow each other, as they tile
    one box, and are either the same of every tensor or row-major ranges."""
    ends = [list(accumulate(run.box.volume for run in side)) for side in runs]
    buffers = [np.empty(_BLOCK_ELEMS, dtype) for dtype in types]
    places, at = [0] * len(runs), 0
    while at < ends[0][-1]:
        left = [end[place] - at for end, place in zip(ends, places, strict=True)]
        count = min(_BLOCK_ELEMS, *left)
        blocks = tuple(buffer[:count] for buffer in buffers)
        for side, place, remaining, block in zip(runs, places, left, blocks, strict=True):
            side[place].read(side[place].box.volume - remaining, block)
        yield blocks
        at += count
        places = [place + (n == count) for place, n in zip(places, left, strict=True)]
