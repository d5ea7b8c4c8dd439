"""Flat optimizer buckets and the weight shards that can be in them: what metadata alone can say.

`dp_reshardable` (default since core 0.15), `fully_sharded_bucket_space` and `dp_zero_gather_scatter` (up to
0.14) store states as Megatron's buffers hold them. A buffer belongs to one rank of the model-parallel group
(`dp_group_idx`), one model chunk and one pair of types; its parameters lie in reverse order of registration,
each starting at a multiple of 64 elements of its bucket, row-major, as the shard that this rank has
(megatron-core param_and_grad_buffer.py). Nothing names the parameters: `bucket_proof` finds them by content.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError, raise_if
from ckpt_tools.megatron.keys import bucket_key, canonical_kind, is_optimizer_key, split_projection
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import are_remainders, refuse_encoded
from ckpt_tools.megatron.torch_dist.stacking import slices_of
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Catalog, Chunk, TensorEntry
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.views import Defragment, View

FP8 = "uint8"  # the `param_dtype` of primary weights in FP8 (--fp8-param-gather)
ALIGNMENT = 64  # elements; where parameters start inside a bucket


def aligned(at: int) -> int:
    """The first element from `at` on where a parameter can start."""
    return -(-at // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Flat:
    """One kind of state of a bucket: a stored tensor, seen through `view` as one dimension."""

    entry: TensorEntry
    view: View
    chunks: tuple[tuple[int, Chunk], ...]  # by first element, ascending


@dataclass(frozen=True, slots=True)
class Bucket:
    """A stretch of a buffer; its parameters start at multiples of 64 elements.

    `numel` leaves out the padding at the end. `bounds` are the element offsets where a stored chunk starts or
    ends: every parameter does so too, and so does every cut between data-parallel ranks. None where chunks
    say nothing (`dp_zero_gather_scatter`), and then several buckets may follow each other without a mark.
    """

    name: str
    param_dtype: str
    numel: int
    states: Mapping[str, Flat]
    bounds: frozenset[int] | None


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

    `box` is in the coordinates of the slice, of shape `slice_shape`; its elements are contiguous in the
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
    def numel(self) -> int:
        return self.box.volume

    @property
    def family(self) -> tuple[str, int | None]:
        fused = split_projection(self.name)
        return fused[0] if fused else self.name, self.expert

    @property
    def label(self) -> str:
        """The name, expert and box, for messages."""
        expert = "" if self.expert is None else f" expert {self.expert}"
        return f"{self.name}{expert} {self.box}"


def find_buffers(catalog: Catalog, numels: Mapping[tuple[int, int], Any]) -> tuple[Buffer, ...]:
    """All buffers stored as bucket tensors, by (chain, group, gbuf); empty when there are none.

    `numels` are the `per_bucket_numel_unpadded` objects by (chain, group), as stored.
    """
    buffers_of: dict[tuple[int, int, int], dict[int, _StoredBucket]] = {}
    for key, entry in catalog.tensors.items():
        if named := bucket_key(key):
            new = _StoredBucket(named.bucket, named.dtype, {})
            buffer = buffers_of.setdefault((named.chain, named.group, named.gbuf), {})
            buffer.setdefault(named.number, new).kinds[canonical_kind(named.kind)] = entry
    refuse_encoded(
        e
        for stored in buffers_of.values()
        for bucket in stored.values()
        for kind, e in bucket.kinds.items()
        if bucket.param_dtype == FP8 or not are_remainders(kind, e)
    )
    problems: list[str] = []
    buffers = []
    for (chain, group, gbuf), stored in sorted(buffers_of.items()):
        expected = _saved_numels(numels.get((chain, group)), gbuf)
        if sorted(stored) != list(range(len(expected))):
            problems.append(
                f"{stored[min(stored)].name}: buckets {sorted(stored)} of this buffer are there, "
                f"but {len(expected)} were saved"
            )
            continue
        buckets = tuple(_bucket(stored[i], expected[i], problems) for i in sorted(stored))
        buffers.append(Buffer(chain, group, gbuf, buckets))
    lost = {where for where in numels if not any(where == (c, g) for c, g, _ in buffers_of)}
    problems += [f"chain {c}, dp_group_idx_{g}: none of its buckets is there" for c, g in sorted(lost)]
    raise_if(problems, CorruptCheckpointError, "the optimizer buckets are not whole")
    return tuple(buffers)


class _StoredBucket(NamedTuple):
    name: str
    param_dtype: str
    kinds: dict[str, TensorEntry]


def _saved_numels(stored: Any, gbuf: int) -> list[int]:
    """Bucket sizes of one buffer from ``[[{(dtype, dtype): [numel, ...]}, one dict per buffer]]``."""
    try:
        (sizes,) = stored[0][gbuf].values()
        return [int(n) for n in sizes]
    except (TypeError, ValueError, LookupError, AttributeError):
        return []


def flatten(entry: TensorEntry) -> Flat:
    """A bucket tensor as one dimension.

    Stored 1-D, or as ``[dp, numel / dp]``: `fully_sharded_bucket_space` of core 0.11-0.14 went through the
    N-D flattening, one row a data-parallel rank.
    """
    width = entry.shape[-1] if entry.shape else 0
    runs = sorted(
        ((chunk.box.start[0] * width if len(entry.shape) == 2 else 0) + chunk.box.start[-1], chunk)
        for chunk in entry.chunks
    )
    at = 0
    for start, chunk in runs:
        whole_rows = chunk.box.size[-1] == width or chunk.box.volume == chunk.box.size[-1]
        if start != at or not whole_rows or len(entry.shape) > 2:
            raise CorruptCheckpointError(
                f"{entry.key}: shape {entry.shape} with a chunk {chunk.box} is not a flat bucket without holes"
            )
        at += chunk.box.volume
    if at != entry.numel:
        raise CorruptCheckpointError(f"{entry.key}: chunks hold {at} of {entry.numel} elements")
    view: View = (Defragment((entry.numel,), (entry.shape[0],)),) if len(entry.shape) == 2 else ()
    return Flat(entry, view, tuple(runs))


def _bucket(stored: _StoredBucket, numel: int, problems: list[str]) -> Bucket:
    name, dtype, kinds = stored
    if MASTER not in kinds:
        raise UnsupportedCheckpointError(
            f"{name} holds {', '.join(kinds)} but no master weights, and only those say which parameter lies where. "
            "Re-save with --dist-ckpt-optim-fully-reshardable; --weights-only converts the stored weights."
        )
    states = {kind: flatten(entry) for kind, entry in kinds.items()}
    bounds = {frozenset((*(first for first, _ in flat.chunks), numel)) for flat in states.values()}
    if len({entry.shape for entry in kinds.values()}) != 1 or len(bounds) != 1:
        problems.append(f"{name}: its states {', '.join(kinds)} differ in size or in their chunks")
    if numel > kinds[MASTER].numel:
        problems.append(f"{name}: {numel} elements were saved, {kinds[MASTER].numel} are there")
    return Bucket(name, dtype, numel, states, next(iter(bounds)))


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
        if chunk.box.is_empty:
            continue
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
