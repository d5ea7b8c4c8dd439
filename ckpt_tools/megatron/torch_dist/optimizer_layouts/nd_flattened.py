"""Views that undo the N-D flattening of optimizer states (core 0.8-0.15, `fully_sharded_model_space`).

A state of global shape G cut into f parts along each axis was stored as ``(*f, prod(G / f))``; `Defragment`
is the inverse. Legacy GroupedMLP (core <= 0.16) flattened its expert states in the layout of its own weights,
which is the transpose of the stored ones: ``[.., H, 2F]`` for fc1 and ``[.., F, H]`` for fc2 (v0.15
moe/experts.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.views import Defragment, Permute, Shape, Step, View

_EXPERT_WEIGHT = re.compile(r"^(?P<module>.*\bexperts\.experts\.)linear_fc(?P<fc>[12])\.weight$")


def state_view(stored: Shape, weight: Shape, original: Shape | None, transposed: bool = False) -> View:
    """Steps from a state stored with shape `stored` to the shape of its weight.

    `original` is what `mcore_data` notes for the key; without a note the shape of the weight stands in. A
    state of the weight's own rank is stored as it is (1-D states before core 0.11, all states since 0.16).
    """
    shape = _swap_last(weight) if transposed else weight
    if stored == weight and original in (None, weight):
        return ()
    if original not in (None, shape):
        raise ValueError(f"was flattened from shape {original}, but the weight has shape {weight}")
    if len(stored) != len(shape) + 1:
        raise ValueError(f"has shape {stored}, but the weight has shape {weight}")
    undo = Defragment(shape, stored[:-1])
    undo.shape(stored)
    steps: tuple[Step, ...] = (undo,)
    return (*steps, _swap_step(len(weight))) if transposed else steps


def expert_transposition(
    catalog: Catalog, weight_of: Mapping[str, str], legacy_grouped_gemm: bool | None
) -> frozenset[str]:
    """Weight keys of the expert modules whose flattened states are stored transposed.

    A module is decided as a whole: by any of its states whose shapes allow one reading only, else by
    `legacy_grouped_gemm`. Without that hint, an uncut module that is square or has no note of its shapes is read
    as not transposed; the check that masters round to their weights is what proves it.
    """
    evidence: dict[str, set[bool]] = {}
    members: dict[str, set[str]] = {}
    for key, weight_key in weight_of.items():
        match = _EXPERT_WEIGHT.match(weight_key)
        weight = catalog.tensors.get(weight_key)
        if match is None or weight is None or len(catalog.tensors[key].shape) != len(weight.shape) + 1:
            continue
        members.setdefault(match["module"], set()).add(weight_key)
        original = (catalog.original_shapes or {}).get(key)
        readings = {
            t for t in (False, True) if _reads(catalog.tensors[key].shape, weight.shape, original, t, match)
        }
        if len(readings) == 1:
            evidence.setdefault(match["module"], set()).update(readings)
    found: set[str] = set()
    for module, keys in members.items():
        votes = evidence.get(module, {bool(legacy_grouped_gemm)})
        if votes == {True}:
            found |= keys
    return frozenset(found)


def _reads(
    stored: Shape, weight: Shape, original: Shape | None, transposed: bool, match: re.Match[str]
) -> bool:
    """Whether the shapes allow this reading; cuts lie on the output axis of fc1 and the input axis of fc2."""
    try:
        state_view(stored, weight, original, transposed)
    except ValueError:
        return False
    cut_axis = -2 if (match["fc"] == "1") != transposed else -1
    fragments = stored[:-1]
    uncut = fragments[-1] if cut_axis == -2 else fragments[-2]
    return uncut == 1


def _swap_last(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


def _swap_step(rank: int) -> Permute:
    return Permute((*range(rank - 2), rank - 1, rank - 2))
