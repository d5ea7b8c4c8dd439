"""Optimizer states stored under the keys of their weights: `optimizer.state.<kind>.<weight key>`.

That is `fully_reshardable`, `fully_sharded_model_space`, optimizers that are not distributed, and fp32 optimizers,
which have no masters. Up to core 0.13 a chain of optimizers (dense and experts) puts `chained_<i>.` before every key
(megatron-core optimizer.py, ChainedOptimizer).

`fully_sharded_model_space` (core 0.8-0.15) stored a state of global shape G, cut into f parts along each axis, as
``(*f, prod(G / f))``; `Defragment` is the inverse. Legacy GroupedMLP (core <= 0.16) flattened its expert states in
the layout of its own weights, which is the transpose of the stored ones: ``[.., H, 2F]`` for fc1 and ``[.., F, H]``
for fc2 (v0.15 moe/experts.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckpt_tools.errors import CorruptCheckpointError, MappingError, UnsupportedCheckpointError, raise_if
from ckpt_tools.megatron.keys import canonical_kind, state_key
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import OptimizerStates, StateTensor
from ckpt_tools.model.catalog import Catalog, TensorEntry
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.views import Defragment, Permute, Shape, Source, View

_EXPERT_WEIGHT = re.compile(r"^(?P<module>.*\bexperts\.experts\.)linear_fc(?P<fc>[12])\.weight$")


def state_view(stored: Shape, weight: Shape, original: Shape | None, transposed: bool = False) -> View:
    """Steps from a state stored with shape `stored` to the shape of its weight.

    `original` is what `mcore_data` notes for the key; without a note it is the shape of the weight. A
    state of the weight's own rank is stored as it is (1-D states before core 0.11, all states since 0.16).
    """
    shape = (*weight[:-2], weight[-1], weight[-2]) if transposed else weight
    if stored == weight and original in (None, weight):
        return ()
    if original not in (None, shape):
        raise ValueError(f"was flattened from shape {original}, but the weight has shape {weight}")
    if len(stored) != len(shape) + 1:
        raise ValueError(f"has shape {stored}, but the weight has shape {weight}")
    undo = Defragment(shape, stored[:-1])
    undo.shape(stored)
    rank = len(weight)
    return (undo, Permute((*range(rank - 2), rank - 1, rank - 2))) if transposed else (undo,)


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


_STATE_DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})


def order_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """The kinds without repetition: master first, the rest in the order given."""
    unique = dict.fromkeys(kinds)
    return tuple(sorted(unique, key=lambda kind: kind != MASTER))


def are_remainders(kind: str, entry: TensorEntry) -> bool:
    """Whether a state is stored as the 16 bits by which masters and their weights differ (see `remainders`)."""
    return canonical_kind(kind) == MASTER and entry.dtype == "int16"


def refuse_encoded(entries: Iterable[TensorEntry]) -> None:
    """Raise UnsupportedCheckpointError if a state is not stored as plain floating-point numbers.

    A precision-aware optimizer can keep int16 remainders, of which `remainders` makes masters in the layouts that are
    known to have them, or scaled 8-bit states; neither is a value by itself.
    """
    encoded = [f"{e.key} is {e.dtype}" for e in entries if e.dtype not in _STATE_DTYPES]
    raise_if(
        encoded,
        UnsupportedCheckpointError,
        "optimizer states are stored as the precision-aware optimizer encodes them (int16 is the low half of an "
        "fp32 master), which cannot be read as numbers",
        "Re-save without --use-precision-aware-optimizer, or with fp32 main parameters and states; "
        "--weights-only converts the stored weights.",
    )


def model_space_states(
    catalog: Catalog, layout: str, transposed_experts: bool | None = None
) -> OptimizerStates:
    """States of a checkpoint whose optimizer keys name weights; `layout` is only carried along.

    `transposed_experts` (args.moe_use_legacy_grouped_gemm) says whether flattened expert states are
    transposed where their shapes cannot.
    """
    entries = {key: found for key in catalog.tensors if (found := state_key(key))}
    stored = {key: catalog.tensors[key] for key in entries}
    refuse_encoded(e for key, e in stored.items() if not are_remainders(entries[key].kind, e))
    weight_of = {key: found.weight for key, found in entries.items()}
    transposed = expert_transposition(catalog, weight_of, transposed_experts)
    states: dict[tuple[str, str], StateTensor] = {}
    problems: list[str] = []
    for key, found in entries.items():
        kind, weight_key, entry = canonical_kind(found.kind), found.weight, catalog.tensors[key]
        weight = catalog.tensors.get(weight_key)
        if weight is None:
            problems.append(f"{key}: there is no weight {weight_key}")
            continue
        if (kind, weight_key) in states:
            raise CorruptCheckpointError(
                f"{key}: the {kind} state of {weight_key} is also stored under another key; "
                "which one is meant cannot be known"
            )
        original = (catalog.original_shapes or {}).get(key)
        try:
            view = state_view(entry.shape, weight.shape, original, weight_key in transposed)
        except ValueError as error:
            problems.append(f"{key}: {error}")
            continue
        states[kind, weight_key] = StateTensor(entry.dtype, whole=Source(key, view))
    raise_if(problems, MappingError, f"{len(problems)} optimizer states do not fit their weights")
    kinds = order_kinds(kind for kind, _ in states)
    return OptimizerStates(layout, kinds, states, consumed=frozenset(entries))
