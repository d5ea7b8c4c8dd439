"""Which pieces of which source chunks make up a box of a target tensor, and the proof that they tile it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ckpt_tools.errors import CorruptCheckpointError, MappingError
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog, Chunk, TensorEntry
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Piece, Select, Source, View, chunk_piece, pull_box, push_piece, view_shape
from ckpt_tools.plan.tiling import BoxIndex, find_overlap, tiling_problem


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
        """The source's tensor, whose view has been checked to fit the target's shape."""
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
            alike = tuple([chunk.box for chunk in entry.chunks]), len(lead)
            if alike not in self._tilings_by:  # those of states and layers mostly are
                self._tilings_by[alike] = self._tilings_of(*alike)
            tilings = self._tilings[entry.key, len(lead)] = self._tilings_by[alike]
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
        """What `locate` depends on, the box aside: equal for targets whose pieces lie in the same way.

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
