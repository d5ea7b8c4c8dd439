"""Which optimizer layout a checkpoint uses; and one answer for all of them: where the state of a weight lies.

`model_space_states` gives it for states under the keys of their weights, `optimizer.state.<kind>.<weight key>`: that
is `fully_reshardable`, `fully_sharded_model_space`, optimizers that are not distributed, and fp32 optimizers, which
have no masters. Up to core 0.13 a chain of optimizers (dense and experts) puts `chained_<i>.` before every key
(megatron-core optimizer.py, ChainedOptimizer).

`fully_sharded_model_space` (core 0.8-0.15) stored a state of global shape G, cut into f parts along each axis, as
``(*f, prod(G / f))``; `Defragment` is the inverse. Legacy GroupedMLP (core <= 0.16) flattened its expert states in
its own weights' layout, the transpose of the stored ones: ``[.., H, 2F]`` for fc1 and ``[.., F, H]``
for fc2 (v0.15 moe/experts.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ckpt_tools.errors import CorruptCheckpointError, MappingError, UnsupportedCheckpointError, raise_if
from ckpt_tools.megatron.keys import bucket_key, bucket_object, canonical_kind, state_key
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.catalog import Catalog, TensorEntry, Value, stack
from ckpt_tools.model.many import many
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.views import Defragment, Permute, Select, Shape, Source, View


def optimizer_layout(catalog: Catalog, common: CommonState) -> str:
    """Name of the optimizer layout, detected from the keys; the writer's declaration decides between look-alikes.

    `none`, `fsdp_dtensor`, `dp_reshardable`, `fully_sharded_bucket_space`, `dp_zero_gather_scatter`,
    `fully_sharded_model_space`, `fully_reshardable` or `non_distributed`.
    """
    declared = declared_layout(common)
    if any(found.what == "param_state" for found in map(bucket_object, catalog.objects) if found):
        return "dp_zero_gather_scatter"
    if any(map(bucket_key, catalog.tensors)):
        return "fully_sharded_bucket_space" if declared == "fully_sharded_bucket_space" else "dp_reshardable"
    states = {found.kind for found in map(state_key, catalog.tensors) if found}
    if "module" in states or not states:
        return "fsdp_dtensor" if states else "none"
    if catalog.original_shapes:
        return "fully_sharded_model_space"
    return "fully_reshardable" if "param" in states else declared or "non_distributed"


def declared_layout(common: CommonState) -> str | None:
    """The sharding type that the writer put into the common state, or None."""
    content = common.values.get("content_metadata")
    declared = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    optimizer: Any = common.values.get("optimizer")
    for part in (optimizer, *(optimizer.values() if isinstance(optimizer, dict) else ())):
        if declared is None and isinstance(part, dict):
            declared = part.get("param_state_sharding_type")
    return declared if isinstance(declared, str) else None


@lru_cache(maxsize=64)
def selected(lead: tuple[int, ...]) -> View:
    """The slice of a stacked tensor at the indices `lead`; a weight and its states, asked for in turn, share it."""
    return tuple([Select(0, index) for index in lead])


@many(frozen=True, slots=True)
class StateTensor:
    """One kind of state of one stored weight, in the weight's own global coordinates.

    `whole` shows all of it, leading (layer, expert) axes included. Layouts that know only the parts fill
    `slices` instead: for each index of the leading axes the sources that tile what is left of the shape.
    """

    dtype: str
    whole: Source | None = None
    slices: Mapping[tuple[int, ...], tuple[Source, ...]] = field(default_factory=dict)

    def sources(self, lead: tuple[int, ...]) -> tuple[Source, ...] | None:
        """The sources of the slice at `lead`, or None when nothing is stored for it."""
        if self.whole is None:
            return self.slices.get(lead)
        return (Source(self.whole.key, (*self.whole.view, *selected(lead))),)

    def value(self, name: str, shape: tuple[int, ...], axes: int) -> Value:
        """All of the state of the weight `name`, of which `axes` leading axes are stacked."""
        if self.whole is not None:
            return Value(self.dtype, shape, (self.whole,))
        parts = {lead: Value(self.dtype, shape[axes:], sources) for lead, sources in self.slices.items()}
        return stack(name, parts, shape[:axes])


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """Optimizer states by kind and by the key their weight has in the catalog.

    `kinds` are canonical: 'master' for the fp32 copy of a weight, others as stored (exp_avg, exp_avg_sq,
    ...). Sources name tensors of the catalog or of `payloads`: tensors inside stored
    objects, with raw byte ranges as chunks, and computed masters (`remainders`).
    """

    layout: str
    kinds: tuple[str, ...]
    states: Mapping[tuple[str, str], StateTensor]
    payloads: Mapping[str, TensorEntry] = field(default_factory=dict)
    consumed: frozenset[str] = frozenset()  # catalog keys (tensors and objects) that this layout accounts for

    @property
    def has_made(self) -> bool:
        return any(entry.made is not None for entry in self.payloads.values())

    def sources(self, kind: str, model_key: str, lead: tuple[int, ...] = ()) -> tuple[Source, ...]:
        """Sources that tile one slice of a state.

        `lead` are the indices of the stacked leading axes (layer, then expert; () for none). The views
        end in the coordinates of the weight's global shape without those axes.
        """
        state = self.states.get((kind, model_key))
        sources = None if state is None else state.sources(lead)
        if sources is None:
            of_slice = f" at index {lead}" if lead else ""
            raise MappingError(f"no optimizer state {kind!r} is stored for {model_key}{of_slice}")
        return sources


# ---- states under the keys of their weights

_EXPERT_WEIGHT = re.compile(r"^(?P<module>.*\bexperts\.experts\.)linear_fc(?P<fc>[12])\.weight$")
_STATE_DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})


def state_view(stored: Shape, weight: Shape, original: Shape | None, transposed: bool = False) -> View:
    """Steps from a state stored with shape `stored` to the shape of its weight.

    `original` is what `mcore_data` notes for the key; without a note it is the shape of the weight. A
    state with the weight's number of axes is stored unchanged (1-D states before core 0.11, all states since 0.16).
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
    """Weight keys of the expert modules with flattened states that are stored transposed.

    A module is decided as a whole: by any of its states with shapes of only one reading, else by
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
    transposed: set[str] = set()
    for module, keys in members.items():
        votes = evidence.get(module, {bool(legacy_grouped_gemm)})
        if votes == {True}:
            transposed |= keys
    return frozenset(transposed)


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
    """States of a checkpoint with optimizer keys that name weights; `layout` is only passed on.

    `transposed_experts` (args.moe_use_legacy_grouped_gemm) says whether flattened expert states are
    transposed where their shapes cannot.
    """
    entries = {key: named for key in catalog.tensors if (named := state_key(key))}
    stored = {key: catalog.tensors[key] for key in entries}
    refuse_encoded(e for key, e in stored.items() if not are_remainders(entries[key].kind, e))
    weight_of = {key: named.weight for key, named in entries.items()}
    transposed = expert_transposition(catalog, weight_of, transposed_experts)
    states: dict[tuple[str, str], StateTensor] = {}
    problems: list[str] = []
    for key, named in entries.items():
        kind, weight_key, entry = canonical_kind(named.kind), named.weight, catalog.tensors[key]
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
