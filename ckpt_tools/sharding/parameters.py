"""Parameters as the sharding core sees them, and the tensors that a checkpoint holds of them: plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ckpt_tools.errors import UsageError, list_problems
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.many import many
from ckpt_tools.sharding.topology import Topology

Shape = tuple[int, ...]


class Part(NamedTuple):
    """A checkpoint tensor that holds some rows of a live parameter; `rows` counts those of all TP ranks."""

    name: str
    rows: int


class Expert(NamedTuple):
    """Which of a layer's experts a parameter belongs to."""

    number: int  # counted over all expert-parallel ranks
    total: int


@many(frozen=True, slots=True)
class Parameter:
    """One parameter of the running model; `shape` is global (all TP ranks), in elements.

    `tp_dim` is the dimension that tensor parallelism cuts, None when every TP rank holds it whole. `expert`
    says which expert of its layer it belongs to. `unit` numbers its FSDP unit, None is the root. A `buffer` is
    never sharded. `parts` names the tensors that a checkpoint holds instead of it: the rows of each TP rank's
    piece are those of the parts, one after another (``[W; V]`` of a gated fc1 is stored as `_w` and `_v`).
    """

    name: str
    shape: Shape
    dtype: str
    tp_dim: int | None = None
    is_expert: bool = False
    expert: Expert | None = None
    unit: int | None = None
    trainable: bool = True
    shared_embedding: bool = False
    buffer: bool = False
    parts: tuple[Part, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def tp_size(self, topology: Topology) -> int:
        """Equal pieces into which tensor parallelism cuts this parameter."""
        if self.tp_dim is None:
            return 1
        return topology.etp if self.is_expert else topology.tp

    def local_shape(self, topology: Topology) -> Shape:
        if self.tp_dim is None:
            return self.shape
        t = self.tp_dim
        return (*self.shape[:t], self.shape[t] // self.tp_size(topology), *self.shape[t + 1 :])


def row_size(shape: Sequence[int]) -> int:
    """Elements of one row: the product of all dimensions but the first, 1 for 1-D tensors and scalars."""
    return math.prod(shape[1:])


@lru_cache(maxsize=4096)  # a rank has the same rows of the many equal layers
def rows_box(local: Shape, start: int, stop: int, tp_dim: int | None, tp_rank: int) -> Box:
    """Box in the global tensor of rows `[start, stop)` of the piece of shape `local` that `tp_rank` has."""
    if not local:
        return full_box(local)
    offset = [start, *(0 for _ in local[1:])]
    if tp_dim is not None:
        offset[tp_dim] += tp_rank * local[tp_dim]
    return Box(tuple(offset), (stop - start, *local[1:]))


def part_names(parameter: Parameter) -> list[str]:
    return [part.name for part in parameter.parts] or [parameter.name]


def part_boxes(parameter: Parameter, topology: Topology, box: Box) -> Iterator[tuple[str, Box]]:
    """The non-empty boxes of checkpoint tensors that hold the live parameter's `box`, in row order.

    Worked example, fc1 of shape (8, 3) at TP 2, parts `_w` and `_v` of 4 rows each. Live rows are
    ``w0 w1 v0 v1 | w2 w3 v2 v3``: live rows [1:4) are `_w` rows [1:2) and `_v` rows [0:2), and live rows
    [6:8) are `_v` rows [2:4).
    """
    if not parameter.parts:
        if not box.is_empty:
            yield parameter.name, box
        return
    blocks = parameter.tp_size(topology) if parameter.tp_dim == 0 else 1
    for number, found in _cut(tuple([part.rows for part in parameter.parts]), blocks, box):
        yield parameter.parts[number].name, found


@lru_cache(maxsize=4096)
def _cut(parts: tuple[int, ...], blocks: int, box: Box) -> list[tuple[int, Box]]:
    """(number, box) of the parts, given by their rows, that `box` lies in."""
    found = []
    at = 0  # first live row of the part's rows on this TP rank
    for tp_rank in range(blocks):
        for number, rows in enumerate(parts):
            count = rows // blocks
            lo, hi = max(at, box.start[0]), min(at + count, box.start[0] + box.size[0])
            if lo < hi and 0 not in box.size:
                inside = Box((tp_rank * count + lo - at, *box.start[1:]), (hi - lo, *box.size[1:]))
                found.append((number, inside))
            at += count
    return found


def as_parts(parameters: Iterable[Parameter]) -> list[Parameter]:
    """What a checkpoint holds: each part as a separate, unsharded parameter."""
    return [
        Parameter(name, (rows, *p.shape[1:]) if p.parts else p.shape, p.dtype)
        for p in parameters
        for name, rows in (p.parts or (Part(p.name, 0),))
    ]


def check_parameters(parameters: Sequence[Parameter], topology: Topology, scalars: bool) -> None:
    """Return if every parameter can be cut by tensor and expert parallelism as asked.

    `scalars` allows tensors without a first dimension to shard, or without elements in a row.
    """
    problems = [problem for p in parameters for problem in _problems(p, topology)]
    if not scalars:
        problems += [
            f"{p.name}: shape {p.shape} has {'no rows to shard' if not p.shape else 'rows of no elements'}"
            for p in parameters
            if not p.buffer and (not p.shape or row_size(p.shape) == 0)
        ]
    names = Counter(name for p in parameters for name in part_names(p))
    problems += [f"{name} is listed {count} times" for name, count in names.items() if count > 1]
    if problems:
        raise UsageError("these tensors cannot be placed:\n" + list_problems(problems), problems)


def _problems(p: Parameter, topology: Topology) -> Iterator[str]:
    tp = p.tp_size(topology)
    axis = "etp" if p.is_expert else "tp"
    if p.tp_dim is not None and not 0 <= p.tp_dim < len(p.shape):
        yield f"{p.name}: shape {p.shape} has no dimension {p.tp_dim} for {axis} to cut"
        return
    if p.tp_dim is not None and p.shape[p.tp_dim] % tp:
        yield f"{p.name}: {axis} {tp} does not divide dimension {p.tp_dim} of shape {p.shape}"
    if p.expert is not None and p.expert.total % topology.ep:
        yield f"{p.name}: ep {topology.ep} does not divide the layer's {p.expert.total} experts"
    if p.is_expert and p.expert is None and topology.ep > 1:
        yield (
            f"{p.name}: an expert tensor without an expert number would be another tensor on each of the "
            f"{topology.ep} expert-parallel ranks under one name"
        )
    if p.parts:
        blocks = tp if p.tp_dim == 0 else 1
        if sum(part.rows for part in p.parts) != p.shape[0]:
            yield f"{p.name}: its parts have {[part.rows for part in p.parts]} rows, not {p.shape[0]}"
        for part in p.parts:
            if part.rows % blocks:
                yield f"{part.name}: {axis} {blocks} does not divide its {part.rows} rows"
