"""Optimizer states stored under the keys of their weights: `optimizer.state.<kind>.<weight key>`.

That is `fully_reshardable`, `fully_sharded_model_space` (whose N-D flattening `nd_flattened` undoes),
optimizers that are not distributed, and fp32 optimizers, which have no masters. Up to core 0.13 a chain of
optimizers (dense and experts) puts `chained_<i>.` before every key (reference: megatron-core optimizer.py,
ChainedOptimizer).
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_tools.errors import CorruptCheckpointError, MappingError, UnsupportedCheckpointError, list_problems
from ckpt_tools.megatron.keys import canonical_kind, state_key
from ckpt_tools.megatron.torch_dist.optimizer_layouts.nd_flattened import expert_transposition, state_view
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import OptimizerStates, StateTensor
from ckpt_tools.model.catalog import Catalog, TensorEntry
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.views import Source

_STATE_DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})


def order_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """The kinds without repetition: master first, the rest in the order given."""
    unique = dict.fromkeys(kinds)
    return tuple(sorted(unique, key=lambda kind: kind != MASTER))


def are_remainders(kind: str, entry: TensorEntry) -> bool:
    """Whether a state is stored as the 16 bits by which masters and their weights differ (see `remainders`)."""
    return canonical_kind(kind) == MASTER and entry.dtype == "int16"


def refuse_encoded(entries: Iterable[TensorEntry]) -> None:
    """Nothing, when every state is stored as plain floating-point numbers.

    A precision-aware optimizer can keep int16 remainders, of which `remainders` makes masters in the layouts that are
    known to have them, or scaled 8-bit states; neither is a value by itself.

    Raises:
        UnsupportedCheckpointError: some state is not.
    """
    encoded = [f"{e.key} is {e.dtype}" for e in entries if e.dtype not in _STATE_DTYPES]
    if encoded:
        raise UnsupportedCheckpointError(
            "optimizer states are stored as the precision-aware optimizer encodes them (int16 is the low half of an "
            "fp32 master), which cannot be read as numbers:\n"
            f"{list_problems(encoded)}\n"
            "Re-save without --use-precision-aware-optimizer, or with fp32 main parameters and states; "
            "--weights-only converts the stored weights.",
            encoded,
        )


def model_space_states(
    catalog: Catalog, layout: str, transposed_experts: bool | None = None
) -> OptimizerStates:
    """States of a checkpoint whose optimizer keys name weights; `layout` is only carried along.

    `transposed_experts` (args.moe_use_legacy_grouped_gemm) says whether flattened expert states are
    transposed where their shapes cannot (see `nd_flattened`).
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
    if problems:
        raise MappingError(
            f"{len(problems)} optimizer states do not fit their weights:\n{list_problems(problems)}", problems
        )
    kinds = order_kinds(kind for kind, _ in states)
    return OptimizerStates(layout, kinds, states, consumed=frozenset(entries))
