"""Flat optimizer buckets and the weight shards that can stand in them: what metadata alone can say.

`dp_reshardable` (default since core 0.15), `fully_sharded_bucket_space` and `dp_zero_gather_scatter` (up to
0.14) store states as Megatron's buffers hold them. A buffer belongs to one rank of the model-parallel group
(`dp_group_idx`), one model chunk and one pair of types; its parameters lie in reverse order of registration,
each starting at a multiple of 64 elements of its bucket, row-major, as the shard that this rank has
(megatron-core param_and_grad_buffer.py). Nothing names the parameters: `bucket_proof` finds them by content.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.box import Box
from ckpt_tools.catalog.model import Catalog, Chunk, TensorEntry
from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError, list_problems
from ckpt_tools.megatron.optimizer_layouts.model import MASTER
from ckpt_tools.megatron.optimizer_layouts.natural import canonical_kind, refuse_encoded
from ckpt_tools.megatron.torch_dist import is_optimizer_key, slices_of
from ckpt_tools.megatron.views import Defragment, View

ALIGNMENT = 64  # elements; where parameters start inside a bucket

BUCKET_KEY = re.compile(
    r"^(?P<name>(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)"
    r"\.gbuf_idx_(?P<gbuf>\d+)\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<index>\d+))"
    r"\.(?P<kind>[^.]+)$"
)
_FUSED_PART = re.compile(r"\.(weight|bias)\.\w+$")  # in_proj.weight.z: one part of a live parameter


@dataclass(frozen=True, slots=True)
class Flat:
    """One kind of state of a bucket: the stored tensor, seen as one dimension of `numel` elements."""

    entry: TensorEntry
    view: View
    numel: int
    chunks: tuple[tuple[int, Chunk], ...]  # by first element, ascending


@dataclass(frozen=True, slots=True)
class Bucket:
    """A stretch of a buffer whose parameters start at multiples of 64.

    `bounds` are the element offsets where a stored chunk starts or ends: every parameter does so too, and so
    does every cut between data-parallel ranks. None where chunks say nothing (`dp_zero_gather_scatter`), and
    then several buckets may follow each other without a mark.
    """

    name: str
    param_dtype: str
    states: Mapping[str, Flat]
    bounds: frozenset[int] | None
    padded: bool = False  # the end may be padding

    @property
    def numel(self) -> int:
        return self.states[MASTER].numel


@dataclass(frozen=True, slots=True)
class Buffer:
    """The buckets of one buffer in order, and the model-parallel rank that has it."""

    chain: int
    group: int
    gbuf: int
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What one stored chunk of a weight holds of one (layer, expert) slice: the shard of some rank.

    `box` is in the coordinates of the slice, whose shape is `slice_shape`; its elements are contiguous in the
    chunk's payload from element `first` on. `shard` is (index, count) among the shards of the slice. Pieces
    of one `family` can follow each other inside one live parameter: gate and up, or the parts of a fused
    projection.
    """

    name: str
    expert: int | None
    key: str
    lead: tuple[int, ...]
    dtype: str
    chunk: Chunk
    first: int
    box: Box
    slice_shape: tuple[int, ...]
    shard: tuple[int, int]

    @property
    def family(self) -> tuple[str, int | None]:
        return _FUSED_PART.sub(r".\1", self.name), self.expert

    @property
    def label(self) -> str:
        """The name, expert and box, for messages."""
        expert = "" if self.expert is None else f" expert {self.expert}"
        return f"{self.name}{expert} {self.box}"


def find_buffers(catalog: Catalog) -> tuple[Buffer, ...]:
    """All buffers stored as bucket tensors, by (chain, group, gbuf); empty when there are none.

    Raises:
        UnsupportedCheckpointError: states are encoded, not numbers, or have no masters to prove them by.
        CorruptCheckpointError: the states of a bucket do not agree in size or chunks, or a bucket is missing.
    """
    found: dict[tuple[int, int, int], dict[int, dict[str, TensorEntry]]] = {}
    heads: dict[tuple[tuple[int, int, int], int], tuple[str, str]] = {}
    for key, entry in catalog.tensors.items():
        match = BUCKET_KEY.match(key)
        if match:
            where = (int(match["chain"] or 0), int(match["group"]), int(match["gbuf"]))
            index = int(match["index"])
            found.setdefault(where, {}).setdefault(index, {})[canonical_kind(match["kind"])] = entry
            heads[where, index] = (match["name"], match["dtype"])
    refuse_encoded(e for indexed in found.values() for kinds in indexed.values() for e in kinds.values())
    buffers = []
    for where, indexed in sorted(found.items()):
        if sorted(indexed) != list(range(len(indexed))):
            raise CorruptCheckpointError(
                f"{heads[where, min(indexed)][0]}: the buckets of this buffer are {sorted(indexed)}; "
                "some are missing"
            )
        buckets = tuple(_bucket(*heads[where, index], indexed[index]) for index in sorted(indexed))
        buffers.append(Buffer(*where, buckets))
    return tuple(buffers)


def flatten(entry: TensorEntry) -> Flat:
    """A bucket tensor as one dimension.

    Stored 1-D, or as ``[dp, numel / dp]``: `fully_sharded_bucket_space` of core 0.11-0.14 went through the
    N-D flattening, one row a data-parallel rank.

    Raises:
        CorruptCheckpointError: another shape, or chunks that are no runs of elements.
    """
    numel, width = entry.numel, entry.shape[-1] if entry.shape else 0
    runs = sorted(
        ((chunk.box.start[0] * width if len(entry.shape) == 2 else 0) + chunk.box.start[-1], chunk)
        for chunk in entry.chunks
    )
    at = 0
    for start, chunk in runs:
        whole_rows = chunk.box.size[-1] == width or chunk.box.volume == chunk.box.size[-1]
        if start != at or not whole_rows or len(entry.shape) > 2:
            raise CorruptCheckpointError(
                f"{entry.key}: shape {entry.shape} with a chunk {chunk.box} is no flat bucket without holes"
            )
        at += chunk.box.volume
    view: View = (Defragment((numel,), (entry.shape[0],)),) if len(entry.shape) == 2 else ()
    return Flat(entry, view, numel, tuple(runs))


def _bucket(name: str, dtype: str, kinds: Mapping[str, TensorEntry]) -> Bucket:
    if MASTER not in kinds:
        raise UnsupportedCheckpointError(
            f"{name} holds {', '.join(kinds)} but no master weights, and only those say which parameter lies where. "
            "Re-save with --dist-ckpt-optim-fully-reshardable."
        )
    states = {kind: flatten(entry) for kind, entry in kinds.items()}
    bounds = {kind: frozenset((*(a for a, _ in s.chunks), s.numel)) for kind, s in states.items()}
    if len(set(bounds.values())) != 1:
        raise CorruptCheckpointError(f"{name}: its states {', '.join(kinds)} are cut into different chunks")
    return Bucket(name, dtype, states, bounds[MASTER], padded=len(kinds[MASTER].shape) == 2)


def check_numels(buffers: Iterable[Buffer], saved: Mapping[tuple[int, int], Any]) -> None:
    """Nothing, when the stored `per_bucket_numel_unpadded` of every (chain, group) lists these buckets.

    `saved` holds the objects as stored: ``[[{(dtype, dtype): [numel, ...]}, one dict per buffer]]``.

    Raises:
        CorruptCheckpointError: buckets are missing or have other sizes.
    """
    problems = []
    groups: dict[tuple[int, int], list[list[int]]] = {}
    for buffer in buffers:
        groups.setdefault((buffer.chain, buffer.group), []).append([b.numel for b in buffer.buckets])
    for where, value in saved.items():
        try:
            listed = [list(sizes) for one in value[0] for sizes in one.values()]
        except (TypeError, IndexError, AttributeError):
            problems.append(f"chain {where[0]}, dp_group_idx_{where[1]}: per_bucket_numel is {value!r}")
            continue
        if listed != groups.get(where, []):
            problems.append(
                f"chain {where[0]}, dp_group_idx_{where[1]}: buckets of {listed} elements were saved, "
                f"{groups.get(where, [])} are there"
            )
    if problems:
        raise CorruptCheckpointError(
            f"optimizer buckets do not match what was saved:\n{list_problems(problems)}"
        )


def weight_pieces(catalog: Catalog) -> Iterator[Piece]:
    """Every shard of every stored weight, one per (layer, expert) slice it holds."""
    for entry in catalog.tensors.values():
        if not is_optimizer_key(entry.key):
            yield from _pieces(entry)


def _pieces(entry: TensorEntry) -> Iterator[Piece]:
    parameters = {p.lead: p for p in slices_of(entry)}
    axes = len(next(iter(parameters))) if parameters else 0
    starts = [sorted({c.box.start[d] for c in entry.chunks}) for d in range(axes, len(entry.shape))]
    count = math.prod(len(s) for s in starts)
    ranks = [{a: i for i, a in enumerate(s)} for s in starts]
    for chunk in entry.chunks:
        index = 0
        for a, s, rank in zip(chunk.box.start[axes:], starts, ranks, strict=True):
            index = index * len(s) + rank[a]
        box = Box(chunk.box.start[axes:], chunk.box.size[axes:])
        for nth, lead in enumerate(_leads(Box(chunk.box.start[:axes], chunk.box.size[:axes]))):
            p = parameters[lead]
            yield Piece(
                p.name, p.expert, p.key, lead, entry.dtype, chunk, nth * box.volume, box, p.shape, (index, count)
            )  # fmt: skip


def _leads(box: Box) -> Iterator[tuple[int, ...]]:
    """The indices in a box of leading axes, in row-major order."""
    if not box.start:
        yield ()
        return
    for rest in _leads(Box(box.start[:-1], box.size[:-1])):
        for last in range(box.start[-1], box.stop[-1]):
            yield (*rest, last)
