"""Targets described over parameters, as targets over the stored tensors that the parameters are seen in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Value
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Shape, Source, chunk_piece, push_piece


def rebase(
    targets: Iterable[TargetTensor], bases: Mapping[str, Value], stored: Mapping[str, Shape]
) -> list[TargetTensor]:
    """The targets with every source `name` replaced by the sources of `bases[name]`.

    `stored` are the shapes of the stored tensors. Sources of which a view shows nothing are left out: the up half
    of a gated weight has no part in the gate.
    """
    return [
        replace(
            target,
            sources=tuple(
                source for old in target.sources for source in _through(old, bases[old.key], stored)
            ),
            zero_filled=target.zero_filled or any(bases[old.key].zero_filled for old in target.sources),
        )
        for target in targets
    ]


def _through(old: Source, base: Value, stored: Mapping[str, Shape]) -> Sequence[Source]:
    found = [Source(source.key, (*source.view, *old.view)) for source in base.sources]
    if len(found) == 1:
        return found
    return [s for s in found if push_piece(s.view, chunk_piece(full_box(stored[s.key])))]
