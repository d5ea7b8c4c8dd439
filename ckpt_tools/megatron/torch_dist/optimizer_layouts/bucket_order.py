"""The order of parameters in a buffer, and what it says about pieces with equal bytes.

A buffer holds its parameters in reverse order of registration. Norms that still round to one and biases that
are still zero look alike; the order tells them apart wherever the unmistakable parameters around them leave
one choice only. Two things are not written in a checkpoint: whether the norm before attention belongs to it
(Transformer Engine) or precedes it (local spec), and whether experts are registered one by one or matrix by
matrix. All four conventions are tried; those that contradict an unmistakable parameter drop out, and the rest
must agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.megatron.torch_dist.optimizer_layouts.buckets import Piece


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
    shared_embedding: bool  # the embedding has buckets of its own, wherever it is used


def conventions(shared_embedding: bool) -> tuple[Convention, ...]:
    """What is possible when `shared_embedding` is known."""
    choices = itertools.product((False, True), repeat=2)
    return tuple(Convention(norms, experts, shared_embedding) for norms, experts in choices)


def registration_rank(piece: Piece, convention: Convention) -> Rank:
    """Sorts pieces by registration, as far as it is known: the rank ends before the first unknown module.

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
    """Index of the first rank that stands above the one before it, or None; in a buffer ranks descend."""
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

    A slot with one look-alike is certain. Between two certain slots of known rank, each set of look-alikes
    must have exactly as many allowed members as slots; they then stand in descending order.

    Example: one layer whose two norms hold nothing but ones. The buffer, registered last to first, has the slots
    ``fc2 fc1 ? qkv ? proj``. Where norms belong to the linear behind them (Transformer Engine), only the MLP's norm
    can stand between fc1 and qkv, and only attention's between qkv and proj: each has its slot. Where they are
    modules of their own, attention's was registered before proj and cannot stand there: no candidate, so this
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
        for alike, positions in groups.items():
            candidates = (p for p in alike.members if p in usable and p not in certain)
            fitting = [p for p in candidates if _inside(ranks[p], above, below)]
            # Fewer: this convention cannot be right. More: it leaves a choice.
            if len(fitting) != len(positions) or (len(fitting) > 1 and not _distinct(fitting, ranks)):
                return None
            fitting.sort(key=lambda p: ranks[p].steps, reverse=True)
            for i, piece in zip(positions, fitting, strict=True):
                result[i] = piece
    # Each gap was settled on its own; together, and with the certain ones, they must still descend.
    settled = [p for p in result if p is not None]
    return None if first_out_of_order([ranks[p] for p in settled]) is not None else settled


def _inside(rank: Rank, above: Rank | None, below: Rank | None) -> bool:
    """Whether a rank can lie between two others; one of unknown order can."""
    return (above is None or rank.compare(above) <= 0) and (below is None or rank.compare(below) >= 0)


def _distinct(pieces: Sequence[Piece], ranks: Mapping[Piece, Rank]) -> bool:
    """Whether the order of these pieces is known."""
    return all(ranks[p].complete for p in pieces) and len({ranks[p] for p in pieces}) == len(pieces)
