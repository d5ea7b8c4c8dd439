"""What a converted checkpoint must contain, before anyone says which rank holds which rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Catalog, Value
from ckpt_tools.model.kernels.casts import is_exact
from ckpt_tools.model.many import many
from ckpt_tools.model.roles import Role
from ckpt_tools.model.views import Shape, Source, chunk_piece, push_piece


@many(frozen=True, slots=True)
class TargetTensor:
    """A tensor to write: its elements are tiled by what its sources show.

    Several sources make a concatenation or a stack. A source of another dtype is cast. `must_round_to` names,
    for an fp32 master, the stored weights it has to round to bit for bit; `zero_filled` allows elements that no
    source shows (vocabulary padding) and writes zeros there.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    path: tuple[str | int, ...] = ()  # planner_data entry; () for (key,)
    must_round_to: tuple[Source, ...] = ()
    must_round_dtype: str | None = None
    zero_filled: bool = False
    parameter: str = ""  # the live parameter, or half of one, with the same placement
    role: Role = "weight"


def target_of(
    key: str, value: Value, path: tuple[str | int, ...] = (), role: Role = "weight"
) -> TargetTensor:
    """The target that shows a value as it is."""
    return TargetTensor(
        key, value.dtype, value.shape, value.sources, path, zero_filled=value.zero_filled, role=role
    )


def rounding_target(key: str, master: Value, weight: Value) -> TargetTensor:
    """A master that must round to a stored weight."""
    return TargetTensor(
        key,
        master.dtype,
        master.shape,
        master.sources,
        must_round_to=weight.sources,
        must_round_dtype=weight.dtype,
    )


@many(frozen=True, slots=True)
class InlineTensor:
    """A small tensor with bytes that are already known: Adam steps, rng states."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)  # row-major, little-endian
    path: tuple[str | int, ...] = ()


@many(frozen=True, slots=True)
class TargetObject:
    """A Python value to store as one `torch.save` archive (a BYTES item)."""

    key: str
    value: object = field(repr=False)
    path: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """A whole checkpoint to write, and what its making left out, renamed or filled in."""

    tensors: Sequence[TargetTensor]
    inline: tuple[InlineTensor, ...] = ()
    objects: Sequence[TargetObject] = ()
    dropped: tuple[str, ...] = ()  # one line each: source key and the reason
    kept: tuple[str, ...] = ()  # one line for each kind of what no loader asks for
    renamed: tuple[str, ...] = ()
    backfilled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def kept_exactly(tensors: Sequence[TargetTensor], catalog: Catalog) -> frozenset[tuple[str, str]]:
    """(tensor, source tensor) of the casts that lose nothing: another target tensor shows the same without rounding.

    So it is with weights that are the rounding of masters written with them.
    """

    def is_rounded(target: TargetTensor, source: Source) -> bool:
        return not is_exact(catalog.tensors[source.key].dtype, target.dtype)

    rounded = [(t, s) for t in tensors for s in t.sources if is_rounded(t, s)]
    keys = {source.key for _, source in rounded}
    kept = {s for t in tensors for s in t.sources if s.key in keys and not is_rounded(t, s)}
    lost = {(target.key, source.key) for target, source in rounded if source not in kept}
    return frozenset((target.key, source.key) for target, source in rounded) - lost


def rebase(
    targets: Iterable[TargetTensor], bases: Mapping[str, Value], stored: Mapping[str, Shape]
) -> list[TargetTensor]:
    """The targets with every source `name` replaced by the sources of `bases[name]`.

    `stored` are the shapes of the stored tensors. Sources of which a view shows nothing are left out: the up half
    of a gated weight has no part in the gate.
    """

    def through(old: Source) -> Iterable[Source]:
        sources = [Source(source.key, (*source.view, *old.view)) for source in bases[old.key].sources]
        if len(sources) == 1:
            return sources
        return [s for s in sources if push_piece(s.view, chunk_piece(full_box(stored[s.key])))]

    return [
        replace(
            target,
            sources=tuple([source for old in target.sources for source in through(old)]),
            zero_filled=target.zero_filled or any(bases[old.key].zero_filled for old in target.sources),
        )
        for target in targets
    ]
