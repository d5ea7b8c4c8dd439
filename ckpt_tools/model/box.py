"""Boxes: axis-aligned regions of an n-dimensional tensor, in elements.

A box lives in a named coordinate space (global tensor, source chunk, target shard); functions here never
change that space except `shift`. A scalar is the 0-d box, which has volume 1 and contains itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """`start[d] <= index[d] < start[d] + size[d]` along every dimension d, in elements."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        """First index past the box along each dimension."""
        return tuple([a + n for a, n in zip(self.start, self.size, strict=True)])

    @property
    def volume(self) -> int:
        return math.prod(self.size)

    @property
    def is_empty(self) -> bool:
        return 0 in self.size

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None when there is no common element. The identity is the whole space."""
        if self == other:
            return None if self.is_empty else self
        start, size = [], []  # plans call this millions of times: no generators, and out at the first gap
        for a, n, b, m in zip(*self, *other, strict=True):
            low = a if a > b else b
            length = (a + n if a + n < b + m else b + m) - low
            if length <= 0:
                return None
            start.append(low)
            size.append(length)
        return Box(tuple(start), tuple(size))

    def shift(self, delta: Sequence[int]) -> Box:
        """The same box with `delta` added to its start: a change of coordinate space."""
        return Box(tuple([a + d for a, d in zip(self.start, delta, strict=True)]), self.size)

    def relative_to(self, origin: Box) -> Box:
        """This box in coordinates with `origin.start` as zero."""
        return Box(tuple([a - o for a, o in zip(self.start, origin.start, strict=True)]), self.size)

    def without_axis(self, axis: int) -> Box:
        return Box(
            self.start[:axis] + self.start[axis + 1 :],
            self.size[:axis] + self.size[axis + 1 :],
        )

    def with_axis(self, axis: int, index: int) -> Box:
        """With a further axis in front of number `axis`, of which only `index` is inside."""
        return Box(
            (*self.start[:axis], index, *self.start[axis:]),
            (*self.size[:axis], 1, *self.size[axis:]),
        )

    def along(self, axis: int, start: int, size: int) -> Box:
        return Box(
            (*self.start[:axis], start, *self.start[axis + 1 :]),
            (*self.size[:axis], size, *self.size[axis + 1 :]),
        )

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` lies in this box."""
        return all(
            a <= c and d <= b
            for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def full_box(shape: Sequence[int]) -> Box:
    """The box of a whole tensor of `shape` (elements per dimension)."""
    return Box((0,) * len(shape), tuple(shape))


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements to step along each dimension of a dense row-major tensor of `shape`."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)


def flat_range_to_boxes(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """Row-major element range `[start, stop)` of a tensor of `shape`, as boxes in row-major order.

    At most `2 * len(shape) - 1` boxes. Worked example, shape (2, 3, 4), range [5, 22)::

        0 1 2 3 | 4 [5 6 7] | [8 ... 11]      -> (0,1,1)+(1,1,3)  (0,2,0)+(1,1,4)
        [12 ... 15] | [16 ... 19] | [20 21]   -> (1,0,0)+(1,2,4)  (1,2,0)+(1,1,2)
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range [{start}, {stop}) is outside a tensor of shape {tuple(shape)}")
    return list(_split_range(start, stop, tuple(shape), (), ()))


def _split_range(
    start: int, stop: int, shape: tuple[int, ...], lead: tuple[int, ...], ones: tuple[int, ...]
) -> Iterable[Box]:
    """Boxes of a range of the trailing `shape`, below the fixed leading indices `lead`."""
    if start == stop:
        return
    if not shape:
        yield Box(lead, ones)
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row
    head, tail = start - first * row, stop - last * row
    if first == last:
        yield from _split_range(head, tail, shape[1:], (*lead, first), (*ones, 1))
        return
    if head:
        yield from _split_range(head, row, shape[1:], (*lead, first), (*ones, 1))
        first += 1
    if last > first:
        rest = (0,) * (len(shape) - 1)
        yield Box((*lead, first, *rest), (*ones, last - first, *shape[1:]))
    yield from _split_range(0, tail, shape[1:], (*lead, last), (*ones, 1))


def split_axes(box: Box, shape: tuple[int, ...], seen: tuple[int, ...]) -> Box | None:
    """A box of a tensor of `shape` in the same tensor with some axes split (`seen`); None if it is cut across some.

    ``(rows 4 to 8)`` of ``[8, 6]`` are ``(4 to 8, all, all)`` of ``[8, 3, 2]``; columns 1 to 3 are not a box there.
    """
    start, size, at = [], [], 0
    for first, length, whole in zip(*box, shape, strict=True):
        axes, at = _axes_of(seen, at, whole)
        inner = math.prod(axes[1:])
        if length == whole:
            start += [0] * len(axes)
            size += axes
        elif first % inner or length % inner:
            return None
        else:
            start += [first // inner, *(0 for _ in axes[1:])]
            size += [length // inner, *axes[1:]]
    return Box(tuple(start), tuple(size)) if at == len(seen) else None


def _axes_of(seen: tuple[int, ...], at: int, whole: int) -> tuple[list[int], int]:
    """The axes from number `at` on into which an axis of `whole` elements was split, and the number of the next."""
    axes = [seen[at]] if at < len(seen) else []
    while math.prod(axes) != whole and at + len(axes) < len(seen):
        axes.append(seen[at + len(axes)])
    return axes, at + len(axes)
