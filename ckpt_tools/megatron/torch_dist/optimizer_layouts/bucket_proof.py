"""Proof by content: which weight shard each stretch of a bucket is the master of.

A master rounds to its stored weight bit for bit, because a checkpoint is saved between optimizer steps.
Candidates are found by a few sampled elements, the order decides between equal ones (`bucket_order`), and then
every element of every assigned stretch is compared, tile by tile. Whatever remains unproven is refused by
name. Masters that do not round, remainders and those of FP8 weights, are placed by position (`place_by_position`).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ckpt_tools.cores import usable_cores
from ckpt_tools.errors import UnsupportedCheckpointError, VerificationError, raise_if
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import find_tensor
from ckpt_tools.formats.torch_archive.tensor_template import usual_item
from ckpt_tools.megatron.keys import layer_of
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_order import (
    Convention,
    LookAlikes,
    Stretch,
    conventions,
    first_out_of_order,
    needs_position,
    place_by_position,
    registration_rank,
    settle,
)
from ckpt_tools.megatron.torch_dist.optimizer_layouts.buckets import (
    ALIGNMENT,
    FP8,
    Bucket,
    Buffer,
    Flat,
    Piece,
    aligned,
)
from ckpt_tools.model.catalog import Chunk
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.kernels.fp8_weights import merged, survey, too_far
from ckpt_tools.model.roles import MASTER

if TYPE_CHECKING:
    import numpy.typing as npt

    Bits = npt.NDArray[Any]  # unsigned integers of the size of the element type

ADVICE = (
    "Nothing was converted, because a wrong optimizer state would not be noticed in training. "
    "Load the checkpoint in Megatron and save it again with --dist-ckpt-optim-fully-reshardable, or convert the "
    "stored weights alone with --weights-only."
)
_MOST_THREADS = 8  # more hold each other up
_PART_TILES = 32  # compared by one thread in a row
TILE = 1 << 18  # elements compared at a time: what that takes stays in the cache
SAMPLE = 64  # elements in each of the three windows of a fingerprint

Fingerprint = tuple[bytes, ...]


Job = TypeVar("Job")
Result = TypeVar("Result")


class Share(Protocol):
    """Does many jobs, of so many bytes each, at once: the results in the order of the jobs.

    Who can have several processes do them gives such a function; results are plain.
    """

    def __call__(
        self, work: Callable[[Job], Result], jobs: Sequence[Job], sizes: Sequence[int]
    ) -> list[Result]: ...


def by_threads(work: Callable[[Job], Result], jobs: Sequence[Job], sizes: Sequence[int]) -> list[Result]:
    del sizes
    with ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS)) as pool:
        return list(pool.map(work, jobs))


class _Slot(NamedTuple):
    bucket: Bucket
    start: int
    lookalikes: LookAlikes


def find_stretches(
    buffers: Sequence[Buffer],
    pieces: Sequence[Piece],
    reader: Reader,
    *,
    sample_only: bool = False,
    share: Share = by_threads,
) -> list[Stretch]:
    """What every element of every bucket that is not padding belongs to, proven.

    With `sample_only` the last step, the comparison of all elements, is left to who reads them next.
    """
    encoded = [buffer for buffer in buffers if needs_position(buffer)]
    plain = [buffer for buffer in buffers if not needs_position(buffer)]
    index = PieceIndex(pieces if plain else (), reader)
    problems: list[str] = []
    walked = []
    for buffer in plain:
        walk = _walk if all(b.bounds is not None for b in buffer.buckets) else _walk_coalesced
        found = [slot for bucket in buffer.buckets for slot in walk(bucket, index, reader, problems)]
        walked.append((buffer, found))
    seen = {s.lookalikes for _, slots in walked for s in slots}
    unseen_parts = _half_found(pieces, (p for lookalikes in seen for p in lookalikes.members))
    names = {p.name for p in pieces}
    own_output = any(name.endswith("output_layer.weight") for name in names)
    # a second copy of the embedding can be the output layer's, or serve the MTP layers
    tried = conventions(shared_embedding=not own_output or any("mtp." in name for name in names))
    by_content = _assign(walked, tried, problems)
    placed = {stretch.piece for stretch in by_content}
    left = [piece for piece in pieces if piece not in placed]
    by_place = place_by_position(buffers, encoded, left, problems, lambda s: _fp8_mismatch(s, reader) is None)
    stretches = by_content + by_place
    if not problems:
        problems += _half_found(pieces, (s.piece for s in stretches))
    if not problems:
        problems += _mismatches(by_content, reader, sample_only, share)
        of_fp8 = [s for s in by_place if s.bucket.param_dtype == FP8 and not sample_only]
        sizes = [s.piece.numel * _width(s) for s in of_fp8]
        if of_fp8:
            problems += filter(None, share(lambda s: _fp8_mismatch(s, reader), of_fp8, sizes))
        problems += _differing_copies(stretches, reader)
    if problems:
        problems = list(dict.fromkeys([*problems, *unseen_parts]))
    what = "the optimizer state cannot be assigned to the weights beyond doubt"
    raise_if(problems, VerificationError, what, ADVICE)
    return stretches


def _walk(bucket: Bucket, index: PieceIndex, reader: Reader, problems: list[str]) -> list[_Slot]:
    """The stretches of a bucket that look like weight shards, padding left out; chunks tell where they start."""
    bounds = bucket.bounds or frozenset()
    slots: list[_Slot] = []
    at, before = 0, None
    while at < bucket.numel:
        starts_here = at % ALIGNMENT == 0 and at in bounds
        for lookalikes in index.matches(bucket, at, reader):
            stop = at + lookalikes.numel
            ends_well = stop in bounds or index.can_continue(lookalikes)
            if ends_well and (starts_here or index.continues(before, lookalikes)):
                slots.append(_Slot(bucket, at, lookalikes))
                at, before = stop, lookalikes
                break
        else:
            padded = aligned(at)
            if at % ALIGNMENT and {at, padded} <= bounds and padded < bucket.numel:
                at, before = padded, None
                continue
            stop = min((b for b in bounds if b > at and b % ALIGNMENT == 0), default=bucket.numel)
            problems.append(f"{bucket.name}: elements {at}..{stop} are the master of no stored weight")
            at, before = stop, None
    return slots


def _walk_coalesced(bucket: Bucket, index: PieceIndex, reader: Reader, problems: list[str]) -> list[_Slot]:
    """The same where nothing marks parameters, nor the buckets that were joined without their last padding.

    Their padding is zero: states were gathered into zeroed memory (v0.13 get_parameter_state_dp_zero).
    """
    slots: list[_Slot] = []
    at, base, before = 0, 0, None
    while at < bucket.numel:
        padded = base + aligned(at - base)
        here = list(index.matches(bucket, at, reader))
        lookalikes = next((a for a in here if padded == at or index.continues(before, a)), None)
        if lookalikes is None and at < padded < bucket.numel:
            padding = reader.flat(bucket.states[MASTER], at, padded - at)
            lookalikes = None if padding.any() else next(index.matches(bucket, padded, reader), None)
            at = at if lookalikes is None else padded
        if lookalikes is None and here:
            lookalikes, base = here[0], at
        if lookalikes is None:
            problems.append(
                f"{bucket.name}: element {at} and what follows are the master of no stored weight"
            )
            break
        slots.append(_Slot(bucket, at, lookalikes))
        at, before = at + lookalikes.numel, lookalikes
    return slots


def _assign(
    walked: Sequence[tuple[Buffer, list[_Slot]]], tried: Sequence[Convention], problems: list[str]
) -> list[Stretch]:
    """One piece for each slot; the order decides between equal ones."""
    shards = _shards_by_rank(walked, problems)
    stretches: list[Stretch] = []
    for buffer, slots in walked:
        marks = {m for s in slots if s.lookalikes.is_certain for m in _marks(s.lookalikes.members[0])}
        kinds = {type(m) for m in marks}

        def held_here(piece: Piece) -> bool:
            known = shards.get((buffer.chain, buffer.group, piece.shard[1]))  # noqa: B023  # used in this turn only
            if known is not None and piece.shard[0] not in known:
                return False
            return all(m in marks or type(m) not in kinds for m in _marks(piece))  # noqa: B023

        slot_lookalikes = [s.lookalikes for s in slots]
        members = {
            p for lookalikes in set(slot_lookalikes) for p in lookalikes.members if not lookalikes.is_certain
        }
        allowed = [p for p in members if held_here(p)]
        settled = {tuple(order) for c in tried if (order := settle(slot_lookalikes, allowed, c)) is not None}
        if len(settled) != 1:
            problems.append(_why_unsettled(slots, tried))
            continue
        seen: dict[Piece, _Slot] = {}
        for slot, piece in zip(slots, next(iter(settled)), strict=True):
            stretches.append(Stretch(slot.bucket, slot.start, piece))
            first = seen.setdefault(piece, slot)
            if first is not slot:
                problems.append(
                    f"{slot.bucket.name}: {piece.label} is at element {slot.start} and again in {first.bucket.name} "
                    f"at {first.start}"
                )
    return stretches


def _marks(piece: Piece) -> Iterable[object]:
    """What a model chunk holds all of or nothing of: the piece's layer (as text) and its expert (as a number)."""
    layer = layer_of(piece.name)
    return ([f"{layer.block}{layer.number}."] if layer else []) + (
        [] if piece.expert is None else [piece.expert]
    )


def _shards_by_rank(
    walked: Sequence[tuple[Buffer, list[_Slot]]], problems: list[str]
) -> dict[tuple[int, int, int], set[int]]:
    """Which of n shards a model-parallel rank holds: (chain, group, n) -> indices, from certain pieces.

    One, or two of the same slice that lie half of n apart (gate and up).
    """
    held: dict[tuple[int, int, int], dict[tuple[str, tuple[int, ...]], set[int]]] = {}
    for buffer, slots in walked:
        for slot in slots:
            if slot.lookalikes.is_certain:
                piece = slot.lookalikes.members[0]
                index, count = piece.shard
                slices = held.setdefault((buffer.chain, buffer.group, count), {})
                slices.setdefault((piece.key, piece.lead), set()).add(index)
    result = {}
    for (chain, group, count), slices in held.items():
        indices = result[chain, group, count] = set().union(*slices.values())
        pair = len(indices) == 2 and max(indices) - min(indices) == count // 2 and indices in slices.values()
        if len(indices) > 1 and not pair:
            counts = Counter(frozenset(shards) for shards in slices.values())
            rarest = min(counts, key=lambda shards: counts[shards])
            odd = sorted(f"{key} {list(lead)}" for (key, lead), shards in slices.items() if shards == rarest)
            problems.append(
                f"chain {chain}, dp_group_idx_{group}: holds the shards {sorted(indices)} of {count}, "
                f"which belong to different ranks: {', '.join(odd)}"
            )
    return result


def _why_unsettled(slots: Sequence[_Slot], tried: Sequence[Convention]) -> str:
    """The first certain piece out of order, or else the look-alikes that order cannot decide between."""
    certain = [s for s in slots if s.lookalikes.is_certain]
    where = slots[0].bucket.name
    wrong = [
        first_out_of_order([registration_rank(s.lookalikes.members[0], c) for s in certain]) for c in tried
    ]
    if None not in wrong:
        i = max(w for w in wrong if w is not None)
        first, second = (s.lookalikes.members[0].label for s in certain[i - 1 : i + 1])
        return f"{where}: {first} is before {second}, against the order of registration"
    lookalikes = max((s.lookalikes for s in slots), key=lambda a: len(a.members))
    names = ", ".join(sorted(p.label for p in lookalikes.members)[:4])
    return f"{where}: {len(lookalikes.members)} weights have equal elements and order does not decide: {names}, ..."


def _half_found(pieces: Iterable[Piece], found: Iterable[Piece]) -> list[str]:
    """One line per shard without state in a slice with state elsewhere."""
    have = set(found)
    slices = {(p.key, p.lead) for p in have}
    return [
        f"{p.label} has no optimizer state, but other parts of it have"
        for p in pieces
        if p not in have and (p.key, p.lead) in slices
    ]


def _mismatches(stretches: Sequence[Stretch], reader: Reader, sample_only: bool, share: Share) -> list[str]:
    """The first mismatch of every stretch that has one."""
    parts: list[tuple[Stretch, list[tuple[int, int]]]] = []
    for stretch in stretches:
        spans = (windows if sample_only else tiles)(stretch.piece.numel)
        parts += [(stretch, spans[i : i + _PART_TILES]) for i in range(0, len(spans), _PART_TILES)]
    sizes = [sum(count for _, count in spans) * _width(stretch) for stretch, spans in parts]
    first: dict[tuple[str, int], str] = {}
    problems = share(lambda part: _mismatch(part[0], reader, part[1]), parts, sizes)
    for (stretch, _), problem in zip(parts, problems, strict=True):
        if problem is not None:
            first.setdefault((stretch.bucket.name, stretch.start), problem)
    return list(first.values())


def _width(stretch: Stretch) -> int:
    return itemsize(stretch.bucket.states[MASTER].entry.dtype) + itemsize(stretch.piece.dtype)


def _mismatch(stretch: Stretch, reader: Reader, spans: Iterable[tuple[int, int]]) -> str | None:
    """What is wrong with a stretch: its first element that does not round to the weight."""
    bucket, start, piece = stretch
    master = bucket.states[MASTER]
    for at, count in spans:
        bits = round_bits(reader.flat(master, start + at, count), master.entry.dtype, piece.dtype)
        different = (bits != reader.chunk(piece.chunk, piece.dtype, piece.first + at, count)).nonzero()[0]
        if len(different):
            return (
                f"{piece.label}: element {start + at + int(different[0])} of {bucket.name} "
                "is a master that does not round to the stored weight"
            )
    return None


def _fp8_mismatch(stretch: Stretch, reader: Reader) -> str | None:
    """What is wrong with a stretch of masters of an FP8 weight: no scale explains them."""
    bucket, start, piece = stretch
    master = bucket.states[MASTER]
    problem = f"{piece.label}: no FP8 scale explains its masters, elements {start}.. of {bucket.name}"
    if (master.entry.dtype, piece.dtype) not in (("float32", "bfloat16"), ("float32", "float16")):
        return problem

    def parts() -> Iterator[tuple[Bits, Bits]]:
        for at, count in tiles(piece.numel):
            masters = reader.flat(master, start + at, count).view("<f4")
            yield masters, reader.chunk(piece.chunk, piece.dtype, piece.first + at, count)

    shard = merged(survey(*part, piece.dtype) for part in parts())
    if shard.equal == shard.elements:
        return None
    is_explained = shard.is_fp8 and not any(too_far(*part, piece.dtype, shard)[0].any() for part in parts())
    return None if is_explained else problem


def _differing_copies(stretches: Iterable[Stretch], reader: Reader) -> list[str]:
    """One line per state with copies on several ranks that differ in any bit."""
    copies: dict[Piece, list[Stretch]] = {}
    for stretch in stretches:
        copies.setdefault(stretch.piece, []).append(stretch)
    problems = []
    for piece, (first, *others) in copies.items():
        for other in others:
            for kind in first.bucket.states:
                for at, count in tiles(piece.numel):
                    a = reader.flat(first.bucket.states[kind], first.start + at, count)
                    b = reader.flat(other.bucket.states[kind], other.start + at, count)
                    if (a != b).any():
                        problems.append(
                            f"{piece.label}: its {kind} differs between {first.bucket.name} and {other.bucket.name}"
                        )
                        break
    return problems


# ---- elements of weights and buckets, a few at a time, as bit patterns


class Reader:
    """Elements of chunks and buckets, as bit patterns of their type. Finds each chunk's payload once."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._payload_offset = lru_cache(maxsize=1 << 16)(self._find_payload)

    def chunk(self, chunk: Chunk, dtype: str, start: int, count: int) -> Bits:
        """`count` elements from element `start` of a chunk's row-major payload."""
        import numpy as np

        size = itemsize(dtype)
        bits = np.empty(count, f"<u{size}")
        offset = self._payload_offset(chunk, dtype) + start * size
        self._files.read_into(chunk.item.file, offset, bits.view(np.uint8).data)
        return bits

    def flat(self, flat: Flat, start: int, count: int) -> Bits:
        """`count` elements from element `start` of a bucket's state."""
        import numpy as np

        parts: list[Bits] = []
        at = bisect.bisect_right(flat.chunks, start, key=lambda run: run[0]) - 1
        while count > 0:
            first, chunk = flat.chunks[at]
            take = min(count, first + chunk.box.volume - start)
            parts.append(self.chunk(chunk, flat.entry.dtype, start - first, take))
            start, count, at = start + take, count - take, at + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _find_payload(self, chunk: Chunk, dtype: str) -> int:
        if chunk.item.bare:
            return chunk.item.offset
        usual = usual_item(self._files, chunk.item, dtype, chunk.box.size)
        if usual is not None:
            return usual.start
        tensor = find_tensor(self._files, chunk.item)
        if tensor.dtype != dtype or tensor.shape != chunk.box.size or not tensor.is_row_major:
            raise UnsupportedCheckpointError(
                f"{chunk.item.file} at byte {chunk.item.offset}: expected a row-major {dtype} tensor of shape "
                f"{chunk.box.size}, found {tensor.dtype} {tensor.shape} with strides {tensor.strides}"
            )
        return tensor.payload_offset


def round_bits(bits: Bits, dtype: str, to: str) -> Bits:
    """fp32 bit patterns rounded to nearest even, as bit patterns of `to`."""
    import numpy as np

    if dtype == to:
        return bits
    if dtype == "float32" and to == "bfloat16":
        rounded: Bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        rounded[np.isnan(bits.view("<f4"))] = 0x7FC0
        return rounded.astype("<u2")
    if dtype == "float32" and to == "float16":
        with np.errstate(over="ignore"):
            half: Bits = bits.view("<f4").astype("<f2")
        return half.view("<u2")
    raise UnsupportedCheckpointError(f"masters of type {dtype} for weights of type {to} are not supported")


class PieceIndex:
    """Every weight shard by what a few of its elements look like."""

    def __init__(self, pieces: Iterable[Piece], reader: Reader) -> None:
        grouped: dict[tuple[str, int, Fingerprint], list[Piece]] = {}
        self.families: dict[tuple[str, int | None], int] = {}
        for piece in pieces:
            sample = tuple(
                reader.chunk(piece.chunk, piece.dtype, piece.first + a, n).tobytes()
                for a, n in windows(piece.numel)
            )
            grouped.setdefault((piece.dtype, piece.numel, sample), []).append(piece)
            self.families[piece.family] = self.families.get(piece.family, 0) + 1
        self._by_head: dict[tuple[str, bytes], list[tuple[int, Fingerprint, LookAlikes]]] = {}
        for (dtype, numel, sample), members in grouped.items():
            entry = (numel, sample, LookAlikes(tuple(members)))
            self._by_head.setdefault((dtype, sample[0]), []).append(entry)
        self._heads: dict[str, set[int]] = {}  # lengths in bytes
        for dtype, head in self._by_head:
            self._heads.setdefault(dtype, set()).add(len(head))

    def matches(self, bucket: Bucket, start: int, reader: Reader) -> Iterator[LookAlikes]:
        """Look-alikes with samples that agree with the bucket from element `start` on; longest first."""
        dtype, master = bucket.param_dtype, bucket.states[MASTER]

        def rounded(at: int, count: int) -> bytes:
            bits = reader.flat(master, start + at, count)
            return round_bits(bits, master.entry.dtype, dtype).tobytes()

        head = rounded(0, min(SAMPLE, bucket.numel - start))
        entries = [e for n in self._heads.get(dtype, ()) for e in self._by_head.get((dtype, head[:n]), ())]
        for numel, sample, lookalikes in sorted(entries, key=lambda entry: -entry[0]):
            if start + numel <= bucket.numel and all(
                rounded(a, n) == expected
                for (a, n), expected in zip(windows(numel)[1:], sample[1:], strict=True)
            ):
                yield lookalikes

    def continues(self, before: LookAlikes | None, after: LookAlikes) -> bool:
        """Whether both can be parts of one live parameter."""
        return before is not None and bool(
            {p.family for p in before.members} & {p.family for p in after.members}
        )

    def can_continue(self, lookalikes: LookAlikes) -> bool:
        """Whether anything could follow inside the same live parameter."""
        return any(self.families[p.family] > 1 for p in lookalikes.members)


def windows(numel: int) -> list[tuple[int, int]]:
    """(start, count) of up to three samples of a tensor: head, middle, tail."""
    if numel <= SAMPLE:
        return [(0, numel)]
    return [(0, SAMPLE), ((numel - SAMPLE) // 2, SAMPLE), (numel - SAMPLE, SAMPLE)]


def tiles(numel: int) -> list[tuple[int, int]]:
    """(start, count) of consecutive stretches that cover a tensor."""
    return [(a, min(TILE, numel - a)) for a in range(0, numel, TILE)]
