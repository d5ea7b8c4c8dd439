"""Flat buffers of Megatron-FSDP: which parameters share a bucket, and where they lie in it.

All numbers are elements of TP-local tensors, flattened row-major. v1 (`param_and_grad_buffer.py`) and v2
(`experimental/layout.py`) pack alike; each difference is named where it is made. Only `Bucket.part_range` and
what is asked for with it depend on a rank.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpt_tools.sharding.parameters import Parameter, Shape, row_size


class Piece(NamedTuple):
    """Elements `[start, stop)` of item number `item`, counted inside the item."""

    item: int
    start: int
    stop: int


@dataclass(frozen=True)
class Packing:
    """Items in one flat buffer: `offsets[i]` is where item i begins, `end` where the last one ends."""

    shapes: tuple[Shape, ...]
    cell: int  # the packing grid: parts are whole multiples of it
    offsets: tuple[int, ...]
    end: int
    placed: tuple[int, ...]  # items in the order in which they found their place
    _sorted: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _stops: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numels = [math.prod(shape) for shape in self.shapes]
        by_offset = sorted(range(len(numels)), key=lambda i: (self.offsets[i], numels[i]))
        object.__setattr__(self, "_sorted", tuple(by_offset))
        object.__setattr__(self, "_stops", tuple(self.offsets[i] + numels[i] for i in by_offset))

    def size(self, parts: int) -> int:
        """Elements of the whole buffer, padded so that `parts` equal parts are whole cells."""
        return ceil_to(self.end, self.cell * parts)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """What lies in buffer elements `[start, stop)`, in buffer order, without empty pieces."""
        for position in range(bisect_right(self._stops, start), len(self._stops)):
            item = self._sorted[position]
            offset = self.offsets[item]
            if offset >= stop:
                return
            end = min(stop, self._stops[position])
            if end > max(start, offset):
                yield Piece(item, max(start, offset) - offset, end - offset)

    def all_pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """What every item has in buffer elements `[start, stop)`; an empty piece is at the item's near end."""
        for item, shape in enumerate(self.shapes):
            offset, numel = self.offsets[item], math.prod(shape)
            yield Piece(item, min(max(start - offset, 0), numel), min(max(stop - offset, 0), numel))

    def cuts_inside_rows(self, parts: int) -> Iterator[tuple[int, int, int]]:
        """(item, row, part) where the beginning of `part` falls inside `row` of an item.

        Only items smaller than the cell can be hit, since larger ones start on their own rows; and a part is
        never shorter than the cell, so at most one boundary falls into each.
        """
        length = self.size(parts) // parts
        for item, shape in enumerate(self.shapes):
            numel, row = math.prod(shape), row_size(shape)
            if row == 1 or numel == 0 or numel >= self.cell:
                continue
            part = self.offsets[item] // length + 1
            inside = part * length - self.offsets[item]
            if inside < numel and inside % row:
                yield item, inside // row, part


def ceil_to(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def v1_cell(shapes: Sequence[Shape]) -> int:
    """The v1 grid of items that are sorted by row size, longest first; small items do not widen it."""
    cell = row_size(shapes[0])
    for shape in shapes:
        if math.prod(shape) >= cell:
            cell = math.lcm(cell, row_size(shape))
    return cell


def pack_v1(shapes: Sequence[Shape], cell: int) -> Packing:
    """Where v1 puts items of these shapes, in this order (`build_data_parallel_buffer_index`).

    Small items stay in list order: upstream computes a sorted list and drops it.
    """
    small = [i for i, shape in enumerate(shapes) if math.prod(shape) < cell]
    return _pack(shapes, cell, small, [1] * len(shapes))


def pack_v2(shapes: Sequence[Shape]) -> Packing:
    """Where v2 puts items of these shapes (`GlobalLayout.build`).

    Unlike v1 the grid covers every row size, small items go largest first, and each begins on its own rows.
    """
    cell = math.lcm(*(row_size(shape) for shape in shapes))
    small = [i for i, shape in enumerate(shapes) if math.prod(shape) < cell]
    small.sort(key=lambda i: math.prod(shapes[i]), reverse=True)
    return _pack(shapes, cell, small, [row_size(shape) for shape in shapes])


def _pack(shapes: Sequence[Shape], cell: int, small: list[int], align: Sequence[int]) -> Packing:
    """Big items on the grid, each with a mate and small items in the last cell it leaves partly free.

    Worked example, cell 12, items a (5, 6), b (7, 4), c (4,), d (2,): a ends at 30, in the cell [24, 36). b
    has 28 = 2 x 12 + 4 elements, so its first 4 fill the end of that cell: b is [32, 60). d fits into the hole
    [30, 32), c does not and goes to the tail [60, 64).
    """
    numels = [math.prod(shape) for shape in shapes]
    fragments = set(small)
    big = [i for i in range(len(shapes)) if i not in fragments]
    offsets: dict[int, int] = {}
    end = 0
    while big:
        item = big.pop(0)
        offsets[item] = end
        used = numels[item] % cell
        if not used:
            end += numels[item]
            continue
        hole = end + numels[item]
        end = hole_end = ceil_to(hole, cell)
        mate = next((i for i in big if 0 < numels[i] % cell <= cell - used), None)
        if mate is not None:
            big.remove(mate)
            offsets[mate] = hole_end = end - numels[mate] % cell
            end = hole_end + numels[mate]
        left = []
        for i in small:
            start = ceil_to(hole, align[i])
            if start + numels[i] > hole_end:
                left.append(i)
                continue
            offsets[i] = start
            hole = start + numels[i]
        small = left
    for i in small:
        offsets[i] = ceil_to(end, align[i])
        end = offsets[i] + numels[i]
    return Packing(tuple(shapes), cell, tuple(offsets[i] for i in range(len(shapes))), end, tuple(offsets))


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that share a bucket: `members` are indices into the caller's list, in item order."""

    members: tuple[int, ...]
    dtype: str
    is_expert: bool
    trainable: bool
    unit: int | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat buffer: its parameters, where they lie, its padded size, the number of its equal parts."""

    group: Group
    packing: Packing
    parts: int
    size: int

    def part_range(self, part: int) -> tuple[int, int]:
        """Buffer elements `[start, stop)` of one of the equal parts."""
        length = self.size // self.parts
        return part * length, (part + 1) * length


def group_v1(
    parameters: Sequence[Parameter],
    shapes: Sequence[Shape],
    indices: Sequence[int],
    bucket_size: int | None,
    split_shared: bool,
) -> list[Group]:
    """v1's buckets of the parameters numbered `indices`, in bucket order (`_get_parameter_groups`).

    `bucket_size` (elements) closes a bucket of the root once it is reached. `split_shared` gives each shared
    embedding a bucket of its own, which v1 does for every strategy but no_shard.
    """
    groups = []
    for key, members in _classes(parameters, indices).items():
        limit = bucket_size if key[3] is None else None
        for run in _runs(parameters, shapes, members, limit, split_shared):
            run.sort(key=lambda i: -row_size(shapes[i]))
            groups.append(Group(tuple(run), *key))
    return groups


def group_v2(parameters: Sequence[Parameter], indices: Sequence[int]) -> list[Group]:
    """v2's groups: one set a wrapped module, the root's first; items keep their order."""
    classes = _classes(parameters, indices)
    owners = sorted(classes, key=lambda key: (-1 if key[3] is None else key[3], key[1]))
    return [Group(tuple(classes[key]), *key) for key in owners]


_Class = tuple[str, bool, bool, "int | None"]


def _classes(parameters: Sequence[Parameter], indices: Sequence[int]) -> dict[_Class, list[int]]:
    classes: dict[_Class, list[int]] = {}
    for i in indices:
        p = parameters[i]
        classes.setdefault((p.dtype, p.is_expert, p.trainable, p.unit), []).append(i)
    return classes


def _runs(
    parameters: Sequence[Parameter],
    shapes: Sequence[Shape],
    members: Sequence[int],
    limit: int | None,
    split_shared: bool,
) -> Iterator[list[int]]:
    run: list[int] = []
    filled = 0
    for i in members:
        if split_shared and parameters[i].shared_embedding:
            if run:
                yield run
            yield [i]
            run, filled = [], 0
            continue
        run.append(i)
        filled += math.prod(shapes[i])
        if limit and filled >= limit:
            yield run
            run, filled = [], 0
    if run:
        yield run
