"""Finding boxes among many, and proving that they do not overlap, in near linear time for any real tiling."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

from ckpt_tools.model.box import Box


class _Level:
    """Boxes grouped by their start along one dimension, in order.

    `reach[i]` is the largest stop of groups 0..i: both ends of the range of groups that can meet an interval
    are found by bisection, exactly so when the groups do not overlap along this dimension.
    """

    __slots__ = ("children", "reach", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.reach: list[int] = []
        self.children: list[_Node] = []


_Node: TypeAlias = "_Level | int"


class BoxIndex:
    """Answers which of `boxes`, all of the same number of dimensions, meet a box. Empty ones meet nothing."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        order = sorted((i for i, box in enumerate(boxes) if not box.is_empty), key=lambda i: boxes[i].start)
        self._roots = self._group(order, 0)

    def _group(self, order: list[int], dim: int) -> list[_Node]:
        """One node per distinguishable group: a box number, or a level below which the rest is sorted."""
        boxes = self._boxes
        if len(order) <= 1 or dim == len(boxes[order[0]].start):
            return list(order)
        level = _Level()
        reach = 0
        for start, members in groupby(order, key=lambda i: boxes[i].start[dim]):
            group = list(members)
            reach = max(reach, *(start + boxes[i].size[dim] for i in group))
            for child in self._group(group, dim + 1):
                level.starts.append(start)
                level.reach.append(reach)
                level.children.append(child)
        return [level]

    def meeting(self, box: Box) -> Iterator[int]:
        """Numbers of the boxes that share an element with `box`, in row-major order of their starts."""
        pending = [(node, 0) for node in reversed(self._roots)]
        while pending:
            node, dim = pending.pop()
            if isinstance(node, int):
                if self._boxes[node].intersect(box) is not None:
                    yield node
                continue
            first = bisect_right(node.reach, box.start[dim])
            last = bisect_left(node.starts, box.start[dim] + box.size[dim])
            pending.extend((child, dim + 1) for child in reversed(node.children[first:last]))


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two boxes that share an element, or None when all are disjoint."""
    if len(boxes) <= 1:
        return None
    index = BoxIndex(boxes)
    for i, box in enumerate(boxes):
        for j in index.meeting(box):
            if j != i:
                return min(i, j), max(i, j)
    return None


def tiling_problem(box: Box, parts: Sequence[Box]) -> str | None:
    """Why `parts` do not tile `box` exactly, or None: every element of `box` lies in exactly one part."""
    if len(parts) == 1 and parts[0] == box:
        return None
    outside = [part for part in parts if not box.contains(part)]
    if outside:
        return f"{outside[0]} reaches outside {box}"
    overlap = find_overlap(parts)
    if overlap is not None:
        return f"{parts[overlap[0]]} and {parts[overlap[1]]} overlap"
    missing = box.volume - sum(part.volume for part in parts)
    if missing:
        return (
            f"{missing} of {box.volume} elements of {box} are in no part; {example_hole(box, parts)} is one"
        )
    return None


def example_hole(box: Box, parts: Sequence[Box]) -> Box:
    """A one-element box inside `box` that no part covers. There must be one."""
    index = BoxIndex(parts)
    while box.volume > 1:
        axis = max(range(len(box.size)), key=lambda d: box.size[d])
        low = box.size[axis] // 2
        halves = [_slice(box, axis, 0, low), _slice(box, axis, low, box.size[axis] - low)]
        box = next(half for half in halves if _covered(half, parts, index) < half.volume)
    return box


def _slice(box: Box, axis: int, offset: int, size: int) -> Box:
    start, sizes = list(box.start), list(box.size)
    start[axis] += offset
    sizes[axis] = size
    return Box(tuple(start), tuple(sizes))


def _covered(box: Box, parts: Sequence[Box], index: BoxIndex) -> int:
    common = (parts[i].intersect(box) for i in index.meeting(box))
    return sum(part.volume for part in common if part is not None)
