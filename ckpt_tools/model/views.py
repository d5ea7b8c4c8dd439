"""Views: how a target tensor is seen in the coordinates of a source tensor.

A source chunk is a dense row-major payload, so any region of it that a conversion needs is a *piece*: a box of
the tensor being described, plus the offset and strides (elements) at which its elements lie in that payload.
A view is a sequence of steps from left to right; each step carries pieces and shapes from one coordinate space to
the next and can pull a box back, so that only the chunks that matter are looked at. Nothing here touches data.

Worked example, the gate half of layer 1 of stacked fc1 ``[L=2, 2F=8, H=3]``, stored as one chunk per layer::

    Piece(box=[1:2, 0:8, 0:3], offset=0, strides=(24, 3, 1))       the chunk itself
    Select(0, 1)     -> box [0:8, 0:3], offset 0, strides (3, 1)   layer 0's chunk gives no piece
    Narrow(0, 0, 4)  -> box [0:4, 0:3], offset 0, strides (3, 1)   (the up half starts at offset 12)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from ckpt_tools.model.box import Box, flat_range_to_boxes, row_major_strides

Shape: TypeAlias = tuple[int, ...]


class Piece(NamedTuple):
    """Element `index` of `box` lies at payload element ``offset + sum((index - box.start) * strides)``."""

    box: Box
    offset: int
    strides: tuple[int, ...]

    def crop(self, box: Box) -> Piece | None:
        """The part inside `box`, or None when they do not meet."""
        common = self.box.intersect(box)
        if common is None:
            return None
        if common is self.box:
            return self
        offset = self.offset
        for a, b, s in zip(common.start, self.box.start, self.strides, strict=True):
            offset += (a - b) * s
        return Piece(common, offset, self.strides)


def chunk_piece(box: Box) -> Piece:
    """The whole payload of a chunk that covers `box`."""
    return Piece(box, 0, row_major_strides(box.size))


class Narrow(NamedTuple):
    """Keep `[start, start + size)` along `axis`; its first element becomes index 0."""

    axis: int
    start: int
    size: int

    def shape(self, shape: Shape) -> Shape:
        if not 0 <= self.start <= self.start + self.size <= shape[self.axis]:
            raise ValueError(f"{self} does not fit in shape {shape}")
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    def pull(self, box: Box) -> Box:
        return box.along(self.axis, box.start[self.axis] + self.start, box.size[self.axis])

    def push(self, piece: Piece) -> Iterator[Piece]:
        kept = piece.crop(piece.box.along(self.axis, self.start, self.size))
        if kept is not None:
            box = kept.box
            moved = box.along(self.axis, box.start[self.axis] - self.start, box.size[self.axis])
            yield kept._replace(box=moved)


class Select(NamedTuple):
    """Fix `axis` at `index` and drop it: one layer or one expert of a stacked tensor."""

    axis: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which no one needs on a step

    def shape(self, shape: Shape) -> Shape:
        if not 0 <= self.index < shape[self.axis]:
            raise ValueError(f"{self} does not fit in shape {shape}")
        return shape[: self.axis] + shape[self.axis + 1 :]

    def pull(self, box: Box) -> Box:
        return box.with_axis(self.axis, self.index)

    def push(self, piece: Piece) -> Iterator[Piece]:
        a, strides = self.axis, piece.strides
        kept = piece.crop(piece.box.along(a, self.index, 1))
        if kept is not None:
            yield Piece(kept.box.without_axis(a), kept.offset, strides[:a] + strides[a + 1 :])


class Permute(NamedTuple):
    """Reorder dimensions: output dimension d is input dimension `order[d]`."""

    order: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        return tuple(shape[d] for d in self.order)

    def pull(self, box: Box) -> Box:
        inverse = [self.order.index(d) for d in range(len(self.order))]
        return Box(tuple(box.start[d] for d in inverse), tuple(box.size[d] for d in inverse))

    def push(self, piece: Piece) -> Iterator[Piece]:
        (start, size), offset, strides = piece
        yield Piece(
            Box(tuple(start[d] for d in self.order), tuple(size[d] for d in self.order)),
            offset,
            tuple(strides[d] for d in self.order),
        )


class Unflatten(NamedTuple):
    """Elements `[start, start + prod(dims))` of a 1-D tensor, seen as a row-major tensor of shape `dims`."""

    start: int
    dims: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        if len(shape) != 1 or not 0 <= self.start <= self.start + math.prod(self.dims) <= shape[0]:
            raise ValueError(f"{self} does not fit in shape {shape}")
        return self.dims

    def pull(self, box: Box) -> Box:
        if box.is_empty:
            return Box((self.start,), (0,))
        strides = row_major_strides(self.dims)
        first = sum(i * s for i, s in zip(box.start, strides, strict=True))
        last = sum((i - 1) * s for i, s in zip(box.stop, strides, strict=True))
        return Box((self.start + first,), (last - first + 1,))

    def push(self, piece: Piece) -> Iterator[Piece]:
        kept = piece.crop(Box((self.start,), (math.prod(self.dims),)))
        if kept is None:
            return
        offset, (stride,) = kept.offset, kept.strides
        strides = tuple(s * stride for s in row_major_strides(self.dims))
        first = kept.box.start[0] - self.start
        for box in flat_range_to_boxes(first, first + kept.box.size[0], self.dims):
            yield Piece(box, offset, strides)
            offset += box.volume * stride


class Defragment(NamedTuple):
    """Undo Megatron's N-D flattening of optimizer states (core 0.8-0.15).

    A tensor of shape `dims` cut into `fragments[d]` equal parts along each dimension was stored with shape
    ``(*fragments, prod(local))``: the part at grid position c, flattened row-major, is row c
    (v0.15 strategies/resharding.py). Data-parallel slices only cut the last axis into several chunks.
    """

    dims: tuple[int, ...]
    fragments: tuple[int, ...]

    @property
    def local(self) -> Shape:
        """Shape of one part, in elements."""
        return tuple(n // f for n, f in zip(self.dims, self.fragments, strict=True))

    def shape(self, shape: Shape) -> Shape:
        divides = all(n % f == 0 for n, f in zip(self.dims, self.fragments, strict=True))
        if not divides or shape != (*self.fragments, math.prod(self.local)):
            raise ValueError(f"{self} does not fit in shape {shape}")
        return self.dims

    def pull(self, box: Box) -> Box:
        local = self.local
        start = tuple(a // n for a, n in zip(box.start, local, strict=True))
        stop = tuple(-(-b // n) for b, n in zip(box.stop, local, strict=True))
        return Box((*start, 0), (*(b - a for a, b in zip(start, stop, strict=True)), math.prod(local)))

    def push(self, piece: Piece) -> Iterator[Piece]:
        grid = Box(piece.box.start[:-1], piece.box.size[:-1])
        first, count = piece.box.start[-1], piece.box.size[-1]
        for cell in itertools.product(*(range(a, b) for a, b in zip(grid.start, grid.stop, strict=True))):
            steps = zip(cell, grid.start, piece.strides[:-1], strict=True)
            offset = piece.offset + sum((c - a) * s for c, a, s in steps)
            origin = tuple(c * n for c, n in zip(cell, self.local, strict=True))
            row = Piece(Box((first,), (count,)), offset, piece.strides[-1:])
            for part in Unflatten(0, self.local).push(row):
                yield part._replace(box=part.box.shift(origin))


class Insert(NamedTuple):
    """Add a dimension of size 1 at `axis`: the first half of stacking layers or experts."""

    axis: int

    def shape(self, shape: Shape) -> Shape:
        return (*shape[: self.axis], 1, *shape[self.axis :])

    def pull(self, box: Box) -> Box:
        return box.without_axis(self.axis)

    def push(self, piece: Piece) -> Iterator[Piece]:
        a, strides = self.axis, piece.strides
        yield Piece(piece.box.with_axis(a, 0), piece.offset, (*strides[:a], 0, *strides[a:]))


class Place(NamedTuple):
    """Put the tensor at `start` of a larger tensor of shape `dims`: concatenation and stacking."""

    start: tuple[int, ...]
    dims: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        if any(a + n > m for a, n, m in zip(self.start, shape, self.dims, strict=True)):
            raise ValueError(f"{self} has no room for shape {shape}")
        return self.dims

    def pull(self, box: Box) -> Box:
        return box.shift([-a for a in self.start])

    def push(self, piece: Piece) -> Iterator[Piece]:
        yield piece._replace(box=piece.box.shift(self.start))


Step: TypeAlias = Narrow | Select | Permute | Unflatten | Defragment | Insert | Place
View: TypeAlias = tuple[Step, ...]


def view_shape(view: Sequence[Step], shape: Shape) -> Shape:
    """Shape after all steps."""
    for step in view:
        shape = step.shape(shape)
    return shape


def pull_box(view: Sequence[Step], box: Box) -> Box:
    """The source box outside which no element of `box` (in the view's coordinates) can lie.

    It may reach outside the source tensor where the view only places the tensor in a larger one.
    """
    for step in reversed(view):
        box = step.pull(box)
    return box


def push_piece(view: Sequence[Step], piece: Piece) -> list[Piece]:
    """All parts of `piece` that the view shows, in the view's coordinates."""
    pieces = [piece]
    for step in view:
        pieces = [out for one in pieces for out in step.push(one)]
    return pieces


class Source(NamedTuple):
    """The tensor `key` of the source catalog, seen through `view`."""

    key: str
    view: View = ()
