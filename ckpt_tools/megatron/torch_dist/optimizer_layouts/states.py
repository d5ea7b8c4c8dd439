"""Which optimizer layout a checkpoint uses; and one answer for all of them: where the state of a weight lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.keys import bucket_key, bucket_object, state_key
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.catalog import Catalog, TensorEntry, Value, stack
from ckpt_tools.model.many import many
from ckpt_tools.model.views import Select, Source, View


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
    objects, whose chunks are raw byte ranges, and masters that are computed (`remainders`).
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
