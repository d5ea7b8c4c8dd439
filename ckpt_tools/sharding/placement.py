"""Which rank of a training job owns which rows of which tensor.

`Placement` is the one thing other rooms call. It answers for one rank without computing the others'.

What upstream does oddly, and what is done about it here:

===  ===================================================  ==================================================
no.  oddity                                               here
===  ===================================================  ==================================================
 1   v1 computes a sorted list of small items, drops it   reproduced
 2   v1 cuts small 2-D items of a tail inside a row,      reproduced by `_pack`, refused by
     then crashes                                         `Placement` with the tensor, the row and the ranks
 3   coprime row sizes make a bucket many times its data  reproduced; `memory` shows the padding
 4   chunk metadata of live parameters is wrong until     not reproduced: boxes are those of the checkpoint
     the state dict hook ran
 5   DTensor inputs cut on dimension 1 fail (v1)          not reproduced: what is placed is a parameter that
                                                          Megatron has marked, which works
 6   optimizer.state_dict() fails for an empty piece of   not reproduced: nothing is stored for an empty piece
     a row-parallel parameter (standalone v1)
 7   0-D parameters cannot be saved (v1) or not be made,  both refused by all layouts but `even`
     rows of no elements crash
     tensors of no rows work but are never saved          reproduced: they give no box
 8   HSDP with no_shard has a malformed mesh              reproduced: whole tensors on every rank
 9   equal names of other ranks' experts collide          refused: an expert tensor must have its number
10   0.6.1 decays weights while it makes the moments      not a matter of placement
11   a nested unit owns nothing but uses up a number      reproduced by `units.number_units`
12   biases of grouped experts keep local numbers         not reproduced: the caller's names are global
13   log lines count unknown types as 4 bytes             not reproduced: `memory` uses real sizes
14   optim crashes for frozen groups without overlap      not a matter of placement
===  ===================================================  ==================================================

Megatron-FSDP v1 (`param_and_grad_buffer.py`) and v2 (`experimental/layout.py`) pack flat buffers the same way; each
difference is named where it is made. All numbers are elements of TP-local tensors, flattened row-major.

PyTorch FSDP2 cuts every parameter on its own along dimension 0, by the rule of `torch.chunk`. Tensor parallelism
cuts first: dimension 0 of a column-parallel parameter is cut twice, TP outside and FSDP inside, which torch writes
as ``[_StridedShard(0, split_factor=tp), Shard(0)]`` on the mesh (dp, tp).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckpt_tools.errors import UsageError, list_problems
from ckpt_tools.model.box import Box
from ckpt_tools.model.choices import LayoutName
from ckpt_tools.sharding.parameters import (
    Parameter,
    Shape,
    as_parts,
    check_parameters,
    part_boxes,
    part_names,
    row_size,
    rows_box,
)
from ckpt_tools.sharding.topology import Coordinates, Topology


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
    embedding its own bucket, which v1 does for every strategy but no_shard.
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


def chunk_length(rows: int, parts: int) -> int:
    """Rows of a full chunk; FSDP2 allocates this many on every rank, whatever it owns."""
    return -(-rows // parts)


def chunk_rows(rows: int, parts: int, index: int) -> tuple[int, int]:
    """Rows `[start, stop)` of chunk `index` of `parts`: equal ones, then at most one shorter, then empty ones.

    Worked example, 9 rows over 8 ranks: 2, 2, 2, 2, 1, 0, 0, 0.
    """
    length = chunk_length(rows, parts)
    return min(index * length, rows), min((index + 1) * length, rows)


_KEPT_ROWS = 4096  # parts of buffers with cached rows
_TRIED_SIZES = 64  # how far from the asked dp_shard an uncut one is looked for

_At = tuple[Coordinates, Coordinates]  # dense and expert view of a rank; index it with `is_expert`


class MeshAxis(NamedTuple):
    """`dim` is the tensor dimension that this axis shards, None if every rank along it holds the same."""

    name: str
    size: int
    dim: int | None


class Placement:
    """Shards of `parameters` (in the running model's order) over the ranks of `topology`.

    Args:
        parameters: the order decides how a bucket is packed (see `units.model_order`).
        layout: ``mfsdp-v1``, ``mfsdp-v2``, ``fsdp2``, or ``even``: every checkpoint tensor as
            torch's ``Shard(0)`` over all ranks, whatever the topology's axes are.
        bucket_size: elements after which v1 closes a bucket of parameters outside all units; None never does.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        topology: Topology,
        layout: LayoutName = "mfsdp-v1",
        bucket_size: int | None = None,
    ) -> None:
        topology.check_layout(layout)
        even = layout == "even"
        self.layout = layout
        self.topology = Topology(dp_shard=topology.world_size) if even else topology
        self.parameters = as_parts(parameters) if even else list(parameters)
        check_parameters(self.parameters, self.topology, scalars=even)
        self.local_shapes = [p.local_shape(self.topology) for p in self.parameters]
        self._buffers = [i for i, p in enumerate(self.parameters) if p.buffer]
        self._local = self._local_parameters()
        self._bucket_size = bucket_size
        self._found: dict[tuple[int, int, int, bool], list[tuple[int, int, int]]] = {}
        self._packings: dict[tuple[Shape, ...], Packing] = {}
        self._buckets: dict[int, tuple[Bucket, ...]] = {}
        if layout == "mfsdp-v1" and topology.strategy != "no_shard":
            self._refuse_cut_rows()

    def boxes(self, rank: int) -> Iterator[tuple[str, Box]]:
        """(checkpoint tensor, box in it) of all that `rank` holds, in the order in which it loads them.

        Empty shards give nothing. Replicas are given on every rank that holds one.
        """
        return self._boxes(rank, first_only=False)

    def written(self, rank: int) -> Iterator[tuple[str, Box]]:
        """Those of `boxes` that no lower rank holds: over all ranks they tile every tensor exactly once.

        A rank that holds replicas finds each in the file of its first peer, in the same order.
        """
        return self._boxes(rank, first_only=True)

    def shards(self, rank: int) -> Iterator[tuple[Parameter, Box]]:
        """Every live parameter of `rank` with its box in the live global tensor, empty ones included."""
        at = self._at(rank)
        for i, start, stop in self.rows(rank):
            yield self.parameters[i], self._box(i, start, stop, at)

    def rows(self, rank: int) -> list[tuple[int, int, int]]:
        """(parameter number, first row, row past the last) of `rank`, in rows of its TP-local piece.

        In the order of `parameters`, empty ones included. A scalar counts as one row.
        """
        return sorted(self._rows(self._at(rank), keep_empty=True))

    def buckets(self, rank: int) -> tuple[Bucket, ...]:
        """The flat buffers of `rank` in bucket order; none for the layouts that have no buffers."""
        return self._buckets_of(self._at(rank)[True].ep)

    def part(self, bucket: Bucket, rank: int) -> int:
        """Which part of `bucket` the optimizer of `rank` works on."""
        return self._part(self._at(rank)[bucket.group.is_expert])

    def mesh(self, parameter: Parameter) -> tuple[MeshAxis, ...]:
        """Axes of the device mesh that the DTensor of `parameter` spans, and what each does to it.

        Shards are uneven, so torch cannot tell boxes from this: use `shards`. FSDP2 writes the two cuts of
        dimension 0 of a column-parallel parameter as a strided shard.
        """
        t = self.topology
        if parameter.buffer:  # a plain tensor
            return ()
        dim = None if t.strategy == "no_shard" else 0
        axes = [MeshAxis("dp_shard", self.shard_size(parameter.is_expert), dim)]
        if t.dp_outer > 1:
            axes.insert(0, MeshAxis("dp_outer", t.dp_outer, 0 if t.shards_outer else None))
        if parameter.tp_size(t) > 1:
            axes.append(MeshAxis("tp", parameter.tp_size(t), parameter.tp_dim))
        return tuple(axes)

    def shard_size(self, expert: bool) -> int:
        """Ranks over which a dense or an expert parameter is cut, outer axis not counted."""
        return self.topology.expert_shard_size if expert else self.topology.shard_size

    def _at(self, rank: int) -> _At:
        return self.topology.coordinates(rank), self.topology.coordinates(rank, expert=True)

    def _box(self, i: int, start: int, stop: int, at: _At) -> Box:
        p = self.parameters[i]
        return rows_box(self.local_shapes[i], start, stop, p.tp_dim, at[p.is_expert].tp)

    def names(self) -> list[str]:
        """Every checkpoint tensor, in one order that agrees with the order in which each rank loads its own."""
        order = sorted(range(len(self.parameters)), key=self._loading_order)
        return [name for i in order for name in part_names(self.parameters[i])]

    def _loading_order(self, i: int) -> tuple[bool, bool, int]:
        """Megatron's checkpoint code takes split tensors out of the state dict and appends their parts, then does
        so with expert tensors that get another number; the rest stays in the model's order."""
        p = self.parameters[i]
        return self._expert_rank(p) > 0, bool(p.parts), i

    def _boxes(self, rank: int, first_only: bool) -> Iterator[tuple[str, Box]]:
        at = self._at(rank)
        held = self._rows(at, keep_empty=False)
        for i, start, stop in sorted(held, key=lambda rows: self._loading_order(rows[0])):
            p = self.parameters[i]
            if not first_only or self._is_first(p, at[p.is_expert]):
                yield from part_boxes(p, self.topology, self._box(i, start, stop, at))

    def _expert_rank(self, p: Parameter) -> int:
        """The expert-parallel rank that holds `p`; 0 for what all of them hold."""
        return 0 if p.expert is None else p.expert.number * self.topology.ep // p.expert.total

    def _is_first(self, p: Parameter, at: Coordinates) -> bool:
        """Whether no lower rank holds the same box of `p`."""
        whole = p.buffer or (self.topology.strategy == "no_shard" and self.layout != "even")
        return (
            (at.outer == 0 or (self.topology.shards_outer and not whole))
            and (at.shard == 0 or not whole)
            and (at.tp == 0 or p.tp_dim is not None)
        )

    def _rows(self, at: _At, keep_empty: bool) -> Iterator[tuple[int, int, int]]:
        """(parameter, first row, row past the last) of what a rank holds, in rows of its TP-local piece."""
        if self.layout in ("mfsdp-v1", "mfsdp-v2"):
            yield from self._buffer_rows(at, keep_empty)
            alone = self._buffers
        else:
            alone = self._local[at[True].ep]
        for i in alone:
            start, stop = self._own_rows(i, at)
            if start < stop or keep_empty:
                yield i, start, stop

    def _own_rows(self, i: int, at: _At) -> tuple[int, int]:
        """Rows of a parameter that is cut on its own, or not at all."""
        p = self.parameters[i]
        rows = self.local_shapes[i][0] if self.local_shapes[i] else 1
        parts, part = self.shard_size(p.is_expert), at[p.is_expert].shard
        return (0, rows) if p.buffer else chunk_rows(rows, parts, part)

    def _buffer_rows(self, at: _At, keep_empty: bool) -> Iterator[tuple[int, int, int]]:
        for bucket in self._buckets_of(at[True].ep):
            packing, members = bucket.packing, bucket.group.members
            if self.topology.strategy == "no_shard":
                start, stop = 0, packing.end
            else:
                start, stop = bucket.part_range(self._part(at[bucket.group.is_expert]))
            for item, first, last in self._item_rows(packing, start, stop, keep_empty):
                yield members[item], first, last

    def _item_rows(
        self, packing: Packing, start: int, stop: int, keep_empty: bool
    ) -> list[tuple[int, int, int]]:
        """(item, first row, row past the last) in elements `[start, stop)`; equal layers lie in equal buffers."""
        key = id(packing), start, stop, keep_empty  # `_packings` holds it
        found = self._found.get(key)
        if found is None:
            if len(self._found) > _KEPT_ROWS:
                self._found.clear()
            pieces = packing.all_pieces(start, stop) if keep_empty else packing.pieces(start, stop)
            rows = [(item, first, last, row_size(packing.shapes[item])) for item, first, last in pieces]
            found = self._found[key] = [(item, first // row, last // row) for item, first, last, row in rows]
        return found

    def _part(self, at: Coordinates) -> int:
        """Inner-major: the outer parts of one inner coordinate are neighbours."""
        if self.topology.shards_outer:
            return at.shard * self.topology.dp_outer + at.outer
        return at.shard

    def _local_parameters(self) -> list[list[int]]:
        """Sharded parameters of each expert-parallel rank, as indices in model order."""
        ep = self.topology.ep
        local: list[list[int]] = [[] for _ in range(ep)]
        everywhere = self.layout in ("fsdp2", "even")
        for i, p in enumerate(self.parameters):
            if p.buffer and not everywhere:
                continue
            if p.expert is None:
                for indices in local:
                    indices.append(i)
            else:
                local[self._expert_rank(p)].append(i)
        return local

    def _buckets_of(self, ep: int) -> tuple[Bucket, ...]:
        if ep not in self._buckets:
            self._buckets[ep] = tuple(self._bucket(group) for group in self._groups(ep))
        return self._buckets[ep]

    def _groups(self, ep: int) -> list[Group]:
        if self.layout == "mfsdp-v1":
            split_shared = self.topology.strategy != "no_shard"
            return group_v1(
                self.parameters, self.local_shapes, self._local[ep], self._bucket_size, split_shared
            )
        return group_v2(self.parameters, self._local[ep]) if self.layout == "mfsdp-v2" else []

    def _bucket(self, group: Group) -> Bucket:
        """v1 pads for the parts it cuts (not at all without sharding), v2 always for the whole mesh."""
        packing = self._pack(tuple(self.local_shapes[i] for i in group.members))
        inner, outer = self.shard_size(group.is_expert), self.topology.dp_outer
        parts = inner * outer if self.topology.shards_outer else inner
        if self.layout == "mfsdp-v2":
            return Bucket(group, packing, parts, packing.size(inner * outer))
        sharded = self.topology.strategy != "no_shard"
        return Bucket(group, packing, parts, packing.size(parts) if sharded else packing.end)

    def _pack(self, shapes: tuple[Shape, ...]) -> Packing:
        """The packing of these items; the many equal layers of a model share one."""
        if shapes not in self._packings:
            v1 = self.layout == "mfsdp-v1"
            self._packings[shapes] = pack_v1(shapes, v1_cell(shapes)) if v1 else pack_v2(shapes)
        return self._packings[shapes]

    def _refuse_cut_rows(self) -> None:
        problems = [
            f"{self.parameters[bucket.group.members[item]].name}: row {row} of {bucket.packing.shapes[item]}, "
            f"between rank {self._first_rank(bucket, part - 1, ep)} and rank {self._first_rank(bucket, part, ep)}"
            for ep in range(self.topology.ep)
            for bucket in self._buckets_of(ep)
            for item, row, part in bucket.packing.cuts_inside_rows(bucket.parts)
        ]
        if problems:
            size = self._uncut_size()
            way_out = "No dp_shard near it would do; use" if size is None else f"Use dp_shard {size}, or"
            raise UsageError(
                f"Megatron-FSDP v1 cannot start with dp_shard {self.topology.dp_shard}, it cuts inside rows:\n"
                f"{list_problems(problems)}\n{way_out} --layout even, which any topology can load",
                problems,
            )

    def _first_rank(self, bucket: Bucket, part: int, ep: int) -> int:
        shard, outer = divmod(part, self.topology.dp_outer) if self.topology.shards_outer else (part, 0)
        expert = bucket.group.is_expert
        return self.topology.rank(Coordinates(outer, shard, ep if expert else 0, 0), expert)

    def _uncut_size(self) -> int | None:
        """The nearest dp_shard that cuts no row."""
        packings = {(b.packing, b.group.is_expert) for buckets in self._buckets.values() for b in buckets}
        asked = self.topology.dp_shard
        for size in sorted(
            range(max(1, asked - _TRIED_SIZES), asked + _TRIED_SIZES), key=lambda n: abs(n - asked)
        ):
            try:
                other = replace(self.topology, dp_shard=size)
            except UsageError:
                continue
            outer = other.dp_outer if other.shards_outer else 1
            parts = {False: other.shard_size * outer, True: other.expert_shard_size * outer}
            if not any(any(packing.cuts_inside_rows(parts[expert])) for packing, expert in packings):
                return size
        return None
