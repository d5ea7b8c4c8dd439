"""The order of parameters in a buffer, and what it says about pieces with equal bytes.

A buffer holds its parameters in reverse order of registration. Norms that still round to one and biases that
are still zero have equal bytes; the order decides between them wherever the unmistakable parameters around them
leave one choice only. Two things are not written in a checkpoint: whether the norm before attention belongs to it
(Transformer Engine) or precedes it (local spec), and whether experts are registered one by one or matrix by
matrix. All four conventions are tried; those that contradict an unmistakable parameter drop out, and the rest
must agree.

Any 16-bit remainder can belong to any bf16 weight, and masters of FP8 weights do not round to the stored ones: there
position alone says which shard a stretch belongs to (`place_by_position`). How Megatron lays out a buffer is on disk:

* every rank writes its own file, so a rank's weight shards lie in the files that its bucket lies in (those of
  its data-parallel group); what tensor-parallel ranks share lies in the files of one of them;
* its buffers hold all parameters of a rank once; with a virtual pipeline there is one for each stage, in the order of
  the layers;
* each starts at a multiple of 64 elements, and a chunk begins and ends wherever a parameter does, or a rank's share.

Sizes, cuts and order must agree to the last element, for every convention that does not contradict them the
parameters must be the same, and states that several ranks hold must be equal (`bucket_proof`). Else it is refused.
Masters of FP8 weights are compared with them as well, and decide where position leaves a choice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.megatron.torch_dist.optimizer_layouts.buckets import FP8, Bucket, Buffer, Piece, aligned
from ckpt_tools.model.catalog import Chunk
from ckpt_tools.model.roles import MASTER


class Rank(NamedTuple):
    """A place in the order of registration: one number per module on the way, as far as they are known."""

    steps: tuple[int, ...]
    complete: bool

    def compare(self, other: Rank) -> int:
        """1, -1 or 0 for after, before, and the same or unknown."""
        shared = min(len(self.steps), len(other.steps))
        a, b = self.steps[:shared], other.steps[:shared]
        return (a > b) - (a < b)


# Modules in the order in which their parents register them (megatron-core 0.16.1: gpt_model,
# language_model_embedding, transformer_block, transformer_layer, attention, multi_latent_attention, moe_layer,
# mlp, multi_token_prediction, llava_model, clip_vit_model). Names are compared among siblings only, so one list
# serves all parents. A module's own parameters come before those of its children.
_REGISTERED = (
    *("language_model", "vision_model", "vision_projection"),
    *("class_token", "ln_pre", "ln_post", "conv1"),
    *("embedding", "word_embeddings", "position_embeddings", "tokentype_embeddings"),
    *("encoder", "decoder", "mtp", "output_layer"),
    *("layers", "enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer"),
    *("final_layernorm", "final_norm"),
    *("input_layernorm", "self_attention", "pre_cross_attn_layernorm", "cross_attention"),
    *("pre_mlp_layernorm", "mlp"),
    *("core_attention", "softmax_offset", "linear_proj", "linear_qkv", "linear_q", "linear_kv"),
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    *("q_layernorm", "k_layernorm", "kv_layernorm"),
    *("router", "fc1_latent_proj", "fc2_latent_proj", "experts", "shared_experts"),
    *("gate_weight", "linear_fc1", "linear_fc2"),
    *("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
)
_RANK = {name: i for i, name in enumerate(_REGISTERED)}
_LOCAL_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


class Convention(NamedTuple):
    """What a checkpoint does not say about registration."""

    local_norms: bool  # the norms are modules before attention and MLP
    sequential_experts: bool  # all of one expert before the next
    shared_embedding: bool  # the embedding has its own buckets, wherever it is used


def conventions(shared_embedding: bool) -> tuple[Convention, ...]:
    choices = itertools.product((False, True), repeat=2)
    return tuple(Convention(norms, experts, shared_embedding) for norms, experts in choices)


def registration_rank(piece: Piece, convention: Convention) -> Rank:
    """Sorts pieces by registration, as far as known: the rank ends before the first unknown module.

    Two ranks of which one begins with the other have no known order. Shards of one parameter that follow each
    other (gate, up) rank downwards, so that in a buffer all ranks descend.
    """
    name = piece.name
    if convention.shared_embedding and name.endswith("embedding.word_embeddings.weight"):
        return Rank((), complete=False)
    if convention.local_norms:
        for stored, live in _LOCAL_NORMS:
            name = name.replace(stored, live)
    segments = name.replace(".experts.experts.", ".experts.").split(".")
    if piece.expert is not None:
        segments.insert(-2 if convention.sequential_experts else len(segments), str(piece.expert))
    steps: list[int] = []
    for segment in segments:
        number = int(segment) if segment.isdigit() else _RANK.get(segment)
        if number is None:
            return Rank(tuple(steps), complete=False)
        steps.append(number)
    return Rank((*steps, -piece.shard[0]), complete=True)


def first_out_of_order(ranks: Sequence[Rank]) -> int | None:
    """Index of the first rank that is above the one before it, or None; in a buffer ranks descend."""
    pairs = enumerate(itertools.pairwise(ranks), start=1)
    return next((i for i, (before, after) in pairs if after.compare(before) > 0), None)


@dataclass(frozen=True, slots=True, eq=False)
class LookAlikes:
    """Pieces of one size that no sampled element tells apart; one alone is certain."""

    members: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return self.members[0].numel

    @property
    def is_certain(self) -> bool:
        return len(self.members) == 1


def settle(
    slots: Sequence[LookAlikes], allowed: Iterable[Piece], convention: Convention
) -> list[Piece] | None:
    """The piece in each slot of a buffer (in the buffer's order), or None when this convention leaves a choice.

    A slot with one candidate is certain. Between two certain slots of known rank, each set of look-alikes
    must have exactly as many allowed members as slots; they are then in descending order.

    Example: one layer with two norms of nothing but ones. The buffer, registered last to first, has the slots
    ``fc2 fc1 ? qkv ? proj``. Where norms belong to the linear behind them (Transformer Engine), only the MLP's norm
    can be between fc1 and qkv, and only attention's between qkv and proj: each has its slot. Where they are
    separate modules, attention's was registered before proj and cannot be there: no candidate, so this
    convention drops out. Two candidates for one slot would leave a choice; a guess could be a silent swap.
    """
    usable = set(allowed)
    certain = {s.members[0] for s in slots if s.is_certain}
    result: list[Piece | None] = [s.members[0] if s.is_certain else None for s in slots]
    ranks = {p: registration_rank(p, convention) for s in set(slots) for p in s.members}
    fixed = [i for i, p in enumerate(result) if p is not None and ranks[p].complete]
    for start, stop in itertools.pairwise((-1, *fixed, len(slots))):  # gaps, with the buffer's ends as walls
        above = ranks[slots[start].members[0]] if start >= 0 else None
        below = ranks[slots[stop].members[0]] if stop < len(slots) else None
        groups: dict[LookAlikes, list[int]] = {}
        for i in range(start + 1, stop):
            if result[i] is None:
                groups.setdefault(slots[i], []).append(i)
        for lookalikes, positions in groups.items():
            candidates = (p for p in lookalikes.members if p in usable and p not in certain)
            fitting = [
                p
                for p in candidates  # a rank of unknown order fits anywhere
                if (above is None or ranks[p].compare(above) <= 0)
                and (below is None or ranks[p].compare(below) >= 0)
            ]
            # Fewer: this convention cannot be right. More: it leaves a choice.
            if len(fitting) != len(positions):
                return None
            is_ordered = all(ranks[p].complete for p in fitting) and len({ranks[p] for p in fitting}) == len(
                fitting
            )
            if len(fitting) > 1 and not is_ordered:
                return None
            fitting.sort(key=lambda p: ranks[p].steps, reverse=True)
            for i, piece in zip(positions, fitting, strict=True):
                result[i] = piece
    # Each gap was settled on its own; together, and with the certain ones, they must still descend.
    settled = [p for p in result if p is not None]
    return None if first_out_of_order([ranks[p] for p in settled]) is not None else settled


# ---- order by position: the shard of each stretch of a bucket where samples of masters do not find it

_EMBEDDING = "embedding.word_embeddings.weight"
_FILE = re.compile(r"(?:^|/)__(\d+)_\d+\.distcp$")


class Stretch(NamedTuple):
    """Elements of a bucket, from `start` on, that hold the states of `piece`."""

    bucket: Bucket
    start: int
    piece: Piece


class _Live(NamedTuple):
    """A parameter of a running rank: its pieces follow each other in the buffer (gate, up)."""

    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)


def needs_position(buffer: Buffer) -> bool:
    """Whether the masters of a buffer do not round to their weights: remainders, and those of FP8 weights."""
    return any(b.param_dtype == FP8 or b.states[MASTER].entry.dtype == "int16" for b in buffer.buckets)


def place_by_position(
    buffers: Sequence[Buffer],
    encoded: Sequence[Buffer],
    pieces: Sequence[Piece],
    problems: list[str],
    fits: Callable[[Stretch], bool] = lambda _: True,
) -> list[Stretch]:
    """What every element of the buckets of `encoded` belongs to; `buffers` are all that there are.

    `fits` is asked where several orders are possible. What cannot be proven becomes a line of `problems`.
    """
    chains = {buffer.chain for buffer in buffers}
    memories: dict[tuple[int, int, str], list[Buffer]] = {}
    for buffer in encoded:
        where = (buffer.chain, buffer.group, buffer.buckets[0].param_dtype)
        memories.setdefault(where, []).append(buffer)
    owned: dict[tuple[int, int, str], list[Piece]] = {}
    for where, memory in memories.items():
        writers = _writers(memory)
        if not writers:
            problems.append(f"{_name(memory[0])}: its files do not say which rank wrote them")
        owned[where] = [
            p
            for p in pieces
            if where[2] in (p.dtype, FP8) and _rank(p.chunk) in writers and _is_of(p, where[0], chains)
        ]
    stretches: list[Stretch] = []
    for where, memory in memories.items() if not problems else ():
        mates = [
            own
            for other, own in owned.items()
            if (other[0], other[2]) == (where[0], where[2]) and _are_mates(owned[where], own)
        ]
        shared = (p for own in mates for p in own if p.shard[1] == 1)
        held = list(dict.fromkeys((*owned[where], *shared)))
        stretches += _place(memory, held, _shared_embedding(pieces, held), problems, fits)
    return stretches


def _name(buffer: Buffer) -> str:
    return buffer.buckets[0].name.rpartition(".bucket_idx_")[0]


def _rank(chunk: Chunk) -> int | None:
    """The global rank that wrote a chunk, as the name of its file says."""
    match = _FILE.search(chunk.item.file)
    return int(match[1]) if match else None


def _writers(memory: Iterable[Buffer]) -> frozenset[int]:
    """The ranks that wrote buffers; none where a file does not say."""
    states = (flat for buffer in memory for bucket in buffer.buckets for flat in bucket.states.values())
    chunks = [chunk for flat in states for _, chunk in flat.chunks]
    ranks = {_rank(chunk) for chunk in chunks}
    return frozenset(rank for rank in ranks if rank is not None) if None not in ranks else frozenset()


def _is_of(piece: Piece, chain: int, chains: Collection[int]) -> bool:
    """Whether an optimizer has such a parameter: of two in a chain, the second has the experts."""
    return len(chains) == 1 or (piece.expert is not None) == (chain > 0)


def _are_mates(one: Iterable[Piece], other: Iterable[Piece]) -> bool:
    """Whether two ranks hold shards of the same tensors: they then share those that are not cut."""
    cut = {(p.key, p.lead) for p in one if p.shard[1] > 1}
    return any((p.key, p.lead) in cut for p in other)


def _shared_embedding(pieces: Iterable[Piece], held: Sequence[Piece]) -> Piece | None:
    """What the last pipeline stage may hold in the place of its output layer: a copy of the first one's embedding.

    It is stored once, by the first stage; the copies of its states must be equal (`bucket_proof`).
    """
    embedding = None
    for piece in pieces:
        if piece.name.endswith("output_layer.weight"):
            return None
        indices = {p.shard[0] for p in held if p.shard[1] == piece.shard[1]}
        if piece.name.endswith(_EMBEDDING) and piece not in held and indices == {piece.shard[0]}:
            embedding = piece
    return embedding


def _place(
    memory: Sequence[Buffer],
    held: Sequence[Piece],
    embedding: Piece | None,
    problems: list[str],
    fits: Callable[[Stretch], bool],
) -> list[Stretch]:
    """The pieces of one rank in its buffers, of which there is one for each stage of a virtual pipeline.

    A shared `embedding` may be before all others.
    """
    live = _live_parameters(memory[0], held, problems)
    if live is None:
        return []
    ascending = sorted(memory, key=lambda buffer: buffer.gbuf)
    buckets = [bucket for buffer in reversed(ascending) for bucket in buffer.buckets]
    orders: dict[tuple[object, ...], list[Stretch]] = {}
    for convention in conventions(shared_embedding=False):
        order = _registered(live, convention)
        for first in ([], [_Live((embedding,))] if embedding is not None else []):
            placed = None if order is None else _lay_out(buckets, [*first, *order])
            if placed is not None:
                orders[tuple((s.bucket.name, s.start, s.piece) for s in placed)] = placed
    if len(orders) > 1:
        orders = {key: placed for key, placed in orders.items() if all(map(fits, placed))} or orders
    if len(orders) != 1:
        what = "several orders" if orders else "no order"
        problems.append(
            f"{_name(memory[0])}: {what} of its rank's {len(live)} parameters, {sum(p.numel for p in live):,} "
            f"elements, would fill its {len(buckets)} bucket(s) of {sum(b.numel for b in buckets):,} elements as "
            "their chunks are cut"
        )
        return []
    return next(iter(orders.values()))


def _live_parameters(buffer: Buffer, held: Sequence[Piece], problems: list[str]) -> list[_Live] | None:
    """The parameters of a running rank; None where pieces do not say how they follow each other."""
    families: dict[tuple[str, int | None], list[Piece]] = {}
    for piece in held:
        families.setdefault(piece.family, []).append(piece)
    wrong = [members for members in families.values() if not _is_one_or_pair(members)]
    problems += [
        f"{_name(buffer)}: its rank has {len(members)} parts of {members[0].label}; in which order is not known"
        for members in wrong
    ]
    if wrong:
        return None
    return [_Live(tuple(sorted(members, key=lambda p: p.shard))) for members in families.values()]


def _is_one_or_pair(members: Sequence[Piece]) -> bool:
    """Whether pieces are one shard of one tensor, or the two halves (gate, up) of a rank."""
    first, *rest = sorted(members, key=lambda p: p.shard)
    index, count = first.shard
    return not rest or (
        len(rest) == 1
        and (rest[0].key, rest[0].lead) == (first.key, first.lead)
        and rest[0].shard == (index + count // 2, count)
    )


def _registered(live: Sequence[_Live], convention: Convention) -> list[_Live] | None:
    """The parameters as a buffer has them, the last registered first; None where their order is not known."""
    ranks: dict[Rank, _Live] = {registration_rank(p.pieces[0], convention): p for p in live}
    if len(ranks) < len(live) or not all(rank.complete for rank in ranks):
        return None
    return [ranks[rank] for rank in sorted(ranks, key=lambda r: r.steps, reverse=True)]


def _lay_out(buckets: Sequence[Bucket], order: Iterable[_Live]) -> list[Stretch] | None:
    """The parameters one after another; None where the chunks are cut otherwise."""
    stretches: list[Stretch] = []
    left = iter(buckets)
    bucket = next(left)
    at = 0
    for live in order:
        if at == bucket.numel:
            following = next(left, None)
            if following is None:
                return None
            bucket, at = following, 0
        start = aligned(at)
        stop = start + live.numel
        if not (_is_run(bucket, at, start) and _is_run(bucket, start, stop)):
            return None
        for piece in live.pieces:
            stretches.append(Stretch(bucket, start, piece))
            start += piece.numel
        at = stop
    return stretches if at == bucket.numel and next(left, None) is None else None


def _is_run(bucket: Bucket, start: int, stop: int) -> bool:
    """Whether chunks begin at `start`, end at `stop` and between them only where another rank's share begins."""
    bounds = bucket.bounds or frozenset()
    if not (start in bounds and stop in bounds and stop <= bucket.numel):
        return False
    runs = bucket.states[MASTER].chunks
    return all(
        start >= first or first >= stop or _rank(before) != _rank(after)
        for (_, before), (first, after) in itertools.pairwise(runs)
    )
