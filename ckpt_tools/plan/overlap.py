"""Which pieces of which source chunks make up a box of a target tensor, the proof that they tile it, and how each
piece gets there: copied from a stored chunk, or computed by a kernel.

`BoxIndex` finds boxes among many, and proves that they do not overlap, in near linear time for any real tiling.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from typing import NamedTuple, TypeAlias

from ckpt_tools.errors import CorruptCheckpointError, MappingError
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog, Chunk, TensorEntry
from ckpt_tools.model.dtypes import CASTABLE, itemsize
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.transfers import (
    COMPUTED,
    COVERING,
    RUNS,
    VERBATIM,
    Computation,
    Operand,
    Strategy,
    Transfer,
)
from ckpt_tools.model.views import Piece, Select, Source, View, chunk_piece, pull_box, push_piece, view_shape
from ckpt_tools.plan.byte_runs import is_dense, is_run, read_pattern


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
        start, size = box.start[axis], box.size[axis]
        half = box.along(axis, start, low)
        common = (parts[i].intersect(half) for i in index.meeting(half))
        is_full = sum(part.volume for part in common if part is not None) == half.volume
        box = box.along(axis, start + low, size - low) if is_full else half
    return box


class Tiling(NamedTuple):
    """How chunks tile a tensor under one index of its leading axes: one layer of it, say, or one expert.

    What is found in one tiling is found in all of the same `form`, in the chunks of the same numbers among theirs.
    """

    form: int
    chunks: tuple[int, ...]  # numbers of the chunks that hold any of it


class Located(NamedTuple):
    """A piece of chunk number `chunk`, of those of its tiling, of a target's source number `source`."""

    source: int
    chunk: int
    piece: Piece


class ChunkFinder:
    """The tensors of a catalog with an index over each one's chunks, made when first needed."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._indexes: dict[tuple[str, tuple[int, ...]], tuple[list[Box], BoxIndex]] = {}
        self._tilings: dict[tuple[str, int], Mapping[tuple[int, ...], Tiling]] = {}
        self._tilings_by: dict[tuple[tuple[Box, ...], int], Mapping[tuple[int, ...], Tiling]] = {}
        self._forms: dict[tuple[object, ...], int] = {}

    def entry(self, target: TargetTensor, source: Source) -> TensorEntry:
        """The source's tensor; raises MappingError if its view does not fit the target."""
        entry = self.catalog.tensors.get(source.key)
        if entry is None:
            raise MappingError(f"{target.key}: its source tensor {source.key} is not in the checkpoint")
        if entry.dtype != target.dtype and not {entry.dtype, target.dtype} <= CASTABLE:
            raise MappingError(
                f"{target.key}: {source.key} is {entry.dtype}, which is not cast to {target.dtype}"
            )
        try:
            shape = view_shape(source.view, entry.shape)
        except ValueError as error:
            raise MappingError(f"{target.key}: source {source.key} of shape {entry.shape}: {error}") from None
        if shape != target.shape:
            raise MappingError(
                f"{target.key}: expected shape {target.shape}, but its source {source.key} of shape "
                f"{entry.shape} shows {shape}"
            )
        return entry

    def tiling(self, entry: TensorEntry, lead: tuple[int, ...]) -> Tiling:
        """How its chunks tile a stored tensor under the index `lead`; all of it under ()."""
        tilings = self._tilings.get((entry.key, len(lead)))
        if tilings is None:
            cut = tuple([chunk.box for chunk in entry.chunks]), len(lead)
            if cut not in self._tilings_by:  # those of states and layers mostly are
                self._tilings_by[cut] = self._tilings_of(*cut)
            tilings = self._tilings[entry.key, len(lead)] = self._tilings_by[cut]
        return tilings.get(lead, _NOTHING)

    def _tilings_of(self, boxes: Sequence[Box], axes: int) -> Mapping[tuple[int, ...], Tiling]:
        """How chunks tile a tensor, by the indices of its first `axes` axes."""
        held: dict[tuple[int, ...], list[int]] = defaultdict(list)
        places: dict[tuple[int, ...], list[object]] = defaultdict(list)
        for number, (start, size) in enumerate(boxes):
            rest = start[axes:]
            for inside in product(*map(range, size[:axes])):
                lead = tuple([a + i for a, i in zip(start, inside, strict=False)])
                held[lead].append(number)
                places[lead].append((inside, rest, size))
        forms = self._forms
        return {
            lead: Tiling(forms.setdefault((axes, *places[lead]), len(forms)), tuple(numbers))
            for lead, numbers in held.items()
        }

    def chunks(self, entry: TensorEntry, lead: tuple[int, ...], box: Box) -> Iterable[tuple[int, Box]]:
        """Those chunks of a tiling that meet `box`: their numbers among its chunks, and their boxes.

        A made tensor counts as one chunk.
        """
        if entry.made is not None:
            return [(0, full_box(entry.shape))]
        known = self._indexes.get((entry.key, lead))
        if known is None:
            boxes = [entry.chunks[number].box for number in self.tiling(entry, lead).chunks]
            known = self._indexes[entry.key, lead] = boxes, BoxIndex(boxes)
        boxes, index = known
        return [(number, boxes[number]) for number in index.meeting(box)]


_NOTHING = Tiling(-1, ())


def _leading(view: View) -> tuple[int, ...]:
    """The indices that a view's first steps fix of the leading axes."""
    lead: list[int] = []
    for step in view:
        if not isinstance(step, Select) or step.axis:
            break
        lead.append(step.index)
    return tuple(lead)


class TargetReader:
    """Finds the pieces of any box of one target tensor."""

    def __init__(self, finder: ChunkFinder, target: TargetTensor) -> None:
        self.target = target
        self.finder = finder
        self.sources = [(source, finder.entry(target, source)) for source in target.sources]
        self._leads = [() if e.made is not None else _leading(s.view) for s, e in self.sources]
        self._extents: BoxIndex | None = None

    def geometry(self) -> tuple[object, ...]:
        """What `locate` depends on, except the box: equal for targets with the same layout of pieces.

        Layers of a stacked tensor differ in the index alone that their views begin with, which says what is stored
        of them.
        """
        seen: list[object] = []
        for (source, entry), lead in zip(self.sources, self._leads, strict=True):
            stored = entry.key if entry.made is not None else self.finder.tiling(entry, lead).form
            seen.append((source.view[len(lead) :], entry.shape[len(lead) :], entry.dtype, stored))
        return (self.target.shape, self.target.dtype, self.target.zero_filled, *seen)

    def chunk(self, at: Located) -> Chunk:
        """The stored chunk that a piece is of."""
        entry = self.sources[at.source][1]
        return entry.chunks[self.finder.tiling(entry, self._leads[at.source]).chunks[at.chunk]]

    def locate(self, box: Box) -> list[Located]:
        """The pieces that tile `box`, each in coordinates relative to its start."""
        found: list[Located] = []
        for number in self._meeting(box):
            source, entry = self.sources[number]
            wanted = pull_box(source.view, box).intersect(full_box(entry.shape))
            if wanted is None:
                continue
            for chunk, stored in self.finder.chunks(entry, self._leads[number], wanted):
                part = chunk_piece(stored).crop(wanted)
                for shown in push_piece(source.view, part) if part else ():
                    kept = shown.crop(box)
                    if kept is not None:
                        inside = Piece(kept.box.relative_to(box), kept.offset, kept.strides)
                        found.append(Located(number, chunk, inside))
        self._prove(box, [located.piece.box for located in found])
        return found

    def _meeting(self, box: Box) -> Iterable[int]:
        if len(self.sources) == 1:
            return (0,)
        if self._extents is None:
            self._extents = BoxIndex([_extent(source, entry) for source, entry in self.sources])
        return self._extents.meeting(box)

    def _prove(self, box: Box, parts: Sequence[Box]) -> None:
        missing = box.volume - sum(part.volume for part in parts)
        if (missing == 0 or (missing > 0 and self.target.zero_filled)) and find_overlap(parts) is None:
            return
        met = [self.sources[number][1] for number in self._meeting(box)]
        damaged = [problem for entry in met if (problem := entry_problem(entry))]
        if damaged:
            raise CorruptCheckpointError(f"{self.target.key} {box} cannot be read: {damaged[0]}")
        problem = tiling_problem(Box((0,) * len(box.size), box.size), parts)
        raise MappingError(
            f"{self.target.key} {box}: its sources do not show every element exactly once: {problem} "
            f"(relative to the box's start)"
        )


def entry_problem(entry: TensorEntry) -> str | None:
    """Why the chunks of a stored tensor do not tile it exactly, or None."""
    if entry.made is not None:
        return None
    problem = tiling_problem(full_box(entry.shape), [chunk.box for chunk in entry.chunks])
    return f"the chunks of {entry.key} do not tile its shape {entry.shape}: {problem}" if problem else None


def _extent(source: Source, entry: TensorEntry) -> Box:
    """The smallest box of the target outside which the source shows nothing."""
    boxes = [piece.box for piece in push_piece(source.view, chunk_piece(full_box(entry.shape)))]
    if not boxes:
        return full_box((0,) * len(view_shape(source.view, entry.shape)))
    start = tuple(map(min, *(b.start for b in boxes), boxes[0].start))
    stop = tuple(map(max, *(b.stop for b in boxes), boxes[0].stop))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


SPAN_BYTES = 4 << 20  # longest span assumed when a strategy is chosen


def transfers_into(reader: TargetReader, box: Box) -> list[Transfer | Computation]:
    """What fills `box` (the target's coordinates), in the order of where it begins."""
    found = sorted(reader.locate(box), key=lambda at: at.piece.box.start)
    return [transfer(reader, at, strategy(reader, at, box), box) for at in found]


def strategy(reader: TargetReader, at: Located, box: Box) -> Strategy:
    """How to move a part of `box`: by bytes as its piece lies in its chunk, or by computing."""
    entry = reader.sources[at.source][1]
    if entry.made is not None:
        return COMPUTED
    stored, dtype, piece = entry.dtype, reader.target.dtype, at.piece
    size = piece.box.size
    whole = piece.box.volume == reader.chunk(at).box.volume and is_dense(size, piece.strides)
    if whole and stored == dtype and is_run(piece.box, box.size):
        return VERBATIM
    width = itemsize(stored)
    pattern = read_pattern(size, piece.strides, width, SPAN_BYTES // width)
    return RUNS if pattern.dense(size) else COVERING


def transfer(reader: TargetReader, at: Located, how: Strategy, box: Box) -> Transfer | Computation:
    """The part `at` of `box`, to be moved as `how` says."""
    source, entry = reader.sources[at.source]
    if entry.made is None:
        stored = reader.chunk(at)
        return Transfer(entry.key, stored.item, entry.dtype, stored.box.size, at.piece, how)
    region = at.piece.box
    wanted = pull_box(source.view, region.shift(box.start)).intersect(full_box(entry.shape))
    assert wanted is not None  # `locate` found it
    return Computation(
        entry.key,
        entry.made.kernel,
        entry.dtype,
        entry.shape,
        source.view,
        box.start,
        region,
        _operands(reader.finder, entry, wanted),
    )


def _operands(finder: ChunkFinder, entry: TensorEntry, wanted: Box) -> tuple[Operand, ...]:
    """What the kernel needs of its inputs for `wanted` of a made tensor."""
    assert entry.made is not None  # asked for made tensors only
    inputs, operands = entry.made.inputs, []
    boxes = entry.made.kernel.needs(wanted, [value.form for value in inputs])
    for number, (value, box) in enumerate(zip(inputs, boxes, strict=True)):
        name = f"{entry.key} (input {number})"
        tensor = TargetTensor(name, value.dtype, value.shape, value.sources, zero_filled=value.zero_filled)
        transfers = transfers_into(TargetReader(finder, tensor), box)
        covered = sum(part.box.volume for part in transfers)
        operands.append(Operand(value.dtype, value.shape, box, tuple(transfers), covered < box.volume))
    return tuple(operands)
