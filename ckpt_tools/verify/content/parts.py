"""Tensors in parts of bounded size: what one thread reads of them, so that a long one is read by many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple, Protocol

from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.processes.team import Reads
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.plan.byte_runs import row_major_tiles

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
