"""Everything a conversion reads of a `torch_dist` checkpoint before it plans: all of it small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from ckpt_tools.errors import (
    NEVER_FINDINGS,
    CkptError,
    CorruptCheckpointError,
    VerificationError,
    raise_if,
)
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor, load_object
from ckpt_tools.megatron.keys import (
    COMMON_OBJECT,
    bucket_object,
    is_optimizer_key,
    left_out_by,
    rng_shard,
    state_key,
)
from ckpt_tools.megatron.run_state.common_state import CommonState, read_common_state
from ckpt_tools.megatron.run_state.settings import read_settings
from ckpt_tools.megatron.run_state.stored_values import (
    fields_at,
    number_of,
    only_one,
    optimizer_groups,
    rng_at,
)
from ckpt_tools.megatron.torch_dist.grids import incomplete_objects
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_proof import Share, by_threads
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import read_optimizer_states
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import OptimizerStates, selected
from ckpt_tools.megatron.torch_dist.optimizers import is_adams, optimizer_entry
from ckpt_tools.megatron.torch_dist.stacking import Slice, SortedKeys, sort_keys
from ckpt_tools.model.catalog import Catalog, Item, Value, leave_out
from ckpt_tools.model.model import Model, Parameter
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.views import Source

# Objects that Megatron-FSDP neither reads nor writes, and why they can be left out.
_DROPPED = (
    ("*_extra_state/shard_*", "Transformer Engine extra state: not part of fsdp_dtensor"),
    ("*_extra_state", "Transformer Engine extra state: not part of fsdp_dtensor"),
    ("rerun_state_machine_state/*", "rerun state: not part of fsdp_dtensor"),
)
Extent: TypeAlias = Literal["whole", "proven masters", "masters", "none"]
"""How much of an optimizer is wanted; `proven masters` must be those of the stored weights if they are matched by
their content, `masters` are left out then."""


@dataclass(frozen=True, slots=True)
class TorchDistSource:
    """A `torch_dist` checkpoint taken apart; tensors are still only described."""

    model: Model
    states: OptimizerStates | None


def read_torch_dist(
    files: Files,
    catalog: Catalog,
    ignored: tuple[str, ...] = (),
    trust_pickle: bool = False,
    *,
    optimizer: Extent = "whole",
    unknown_keys: bool = False,
    share: Share = by_threads,
) -> TorchDistSource:
    """The checkpoint in `files` taken apart; `ignored` are globs of keys that are left out.

    Tensors inside stored objects (`dp_zero_gather_scatter`) are added to the catalog. Of the
    optimizer may be wanted the masters alone, as far as they can be read, or nothing. `unknown_keys` may be there and
    count as dropped. `share`: see `read_optimizer_states`.
    """
    common = read_common_state(files, catalog, trust_pickle)
    stored = catalog.tensors.keys()
    catalog, left_out = leave_out(catalog, ignored)
    if optimizer != "whole":  # else they are missed with their states
        refuse_lost_weights(catalog, stored)
    keys = sort_keys(catalog)
    states, unread = _states(files, catalog, common, optimizer, share)
    scales = extra_states(files, catalog, common) if optimizer == "whole" else {}
    consumed = (
        frozenset(filter(is_optimizer_key, (*catalog.tensors, *catalog.objects)))
        if optimizer != "whole"
        else (states.consumed if states is not None else frozenset())
    )
    entry = common.values.get("optimizer")
    made = [e for e in states.payloads.values() if e.made is not None] if states is not None else []
    parameters = tuple(_parameter(p, states) for p in keys.parameters)
    is_other = optimizer == "whole" and states is not None and not is_adams(parameters)
    model = Model(
        catalog=replace(catalog, tensors={**catalog.tensors, **states.payloads}) if states else catalog,
        parameters=parameters,
        common=common,
        settings=read_settings(common),
        optimizer_layout=None if states is None else states.layout,
        groups=stored_groups(files, catalog, common) if optimizer == "whole" else (),
        scheduler=common.scheduler,
        rng=rng_states(files, catalog) if optimizer == "whole" else {},
        incomplete=incomplete_objects(catalog.objects, common),
        grad_scaler=_grad_scaler(entry),
        step=next(_steps(entry), None),
        own_optimizer=optimizer_entry(files, catalog, common) if is_other else None,
        extra_states=scales,
        dropped=(
            *left_out,
            *(f"{key}: FP8 scales, which torch_dist alone holds; the job starts new ones" for key in scales),
            *dropped_objects(keys, frozenset({*consumed, *scales}), unknown_keys),
            *(
                f"common state {name}: not where Megatron keeps states"
                for name in _other_states(entry)
                if optimizer == "whole" and not is_other
            ),
        ),
        unread=unread,
        notes=()
        if not made
        else (
            f"{sum(e.numel for e in made):,} elements of masters are computed: the optimizer (precision-aware) kept "
            "the 16 bits by which they differ from their bf16 weights",
        ),
    )
    return TorchDistSource(model, states)


def refuse_lost_weights(catalog: Catalog, stored: Set[str]) -> None:
    """Raise CorruptCheckpointError if the catalog has optimizer states of weights that are not stored."""
    weights = {named.weight for key in catalog.tensors if (named := state_key(key))}
    lost = sorted(weights - stored)
    what = "weights are missing that have optimizer states"
    raise_if(lost, CorruptCheckpointError, what, "Take another iteration")


def _parameter(stored: Slice, states: OptimizerStates | None) -> Parameter:
    """A slice of a stored weight, and the same slice of its optimizer states, as a parameter of the model."""
    values = {WEIGHT: Value(stored.dtype, stored.shape, (Source(stored.key, selected(stored.lead)),))}
    for kind in states.kinds if states is not None else ():
        if states is not None and (state := states.states.get((kind, stored.key))):
            values[kind] = Value(state.dtype, stored.shape, states.sources(kind, stored.key, stored.lead))
    return Parameter(stored.name, stored.shape, stored.dtype, values, stored.expert, origin=stored.key)


def extra_states(files: Files, catalog: Catalog, common: CommonState) -> dict[str, Item]:
    """Objects of Transformer Engine that hold something: scales and amax histories of delayed scaling.

    Those of modules without FP8 are empty. Where the args say that the job has no such modules, none is looked at.
    """
    known = common.settings
    if known and not any(common.arg(name) for name in ("fp8", "fp4")):
        return {}
    items = {key: e.item for key, e in catalog.objects.items() if "._extra_state/" in key}
    return {key: item for key, item in items.items() if holds_something(load_object(files, item))}


def holds_something(value: object) -> bool:
    """Whether an extra state is more than nothing, an empty tensor or an empty file."""
    if isinstance(value, list | tuple):
        return any(map(holds_something, value))
    if isinstance(value, StoredTensor):
        return bool(value.data)
    return value is not None and getattr(value, "args", True) not in ((), (b"",))


def _other_states(entry: object, name: str = "optimizer") -> Iterator[str]:
    """The places of states that an optimizer's own `state_dict` holds, where `entry` has such."""
    for key, value in entry.items() if isinstance(entry, Mapping) else ():
        if key == "state" and isinstance(value, Mapping) and value.keys() - {"common_step"}:
            yield f"{name}.state"
        elif key == "optimizer" or isinstance(key, int):
            yield from _other_states(value, f"{name}.{key}")


def _grad_scaler(optimizer: object) -> Mapping[str, Any]:
    """The loss scaler's state of an fp16 run; empty without one."""
    parts = [optimizer, *optimizer.values()] if isinstance(optimizer, Mapping) else []
    scalers = (p["grad_scaler"] for p in parts if isinstance(p, Mapping) and p.get("grad_scaler"))
    return fields_at(next(scalers, {}), "optimizer.grad_scaler")


def _states(
    files: Files, catalog: Catalog, common: CommonState, wanted: Extent, share: Share
) -> tuple[OptimizerStates | None, str | None]:
    """The optimizer's states, or why they cannot be read where that is not an error."""
    if wanted == "none":
        return None, None
    try:
        return read_optimizer_states(files, catalog, common, share=share), None
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        if wanted == "whole" or (wanted == "proven masters" and isinstance(error, VerificationError)):
            raise
        return None, f"they cannot be read: {str(error).splitlines()[0].rstrip(':')}"


def _steps(optimizer: object) -> Any:
    """Steps kept outside groups: `common_step` of non-distributed optimizers, torch Adam's `param_state`."""
    if not isinstance(optimizer, Mapping):
        return
    for value in optimizer.values():
        if isinstance(value, Mapping):
            for name in ("common_step", "step"):
                if name in value and not isinstance(value[name], Mapping):
                    yield number_of(value[name], f"the optimizer's {name}")
            yield from _steps(value)


def stored_groups(files: Files, catalog: Catalog, common: CommonState) -> tuple[Mapping[str, Any], ...]:
    """The optimizer's parameter groups in id order, from the common state or from the buckets' own objects.

    A `step` that the optimizer kept as a tensor becomes a number, as Megatron asks for.
    """
    groups = optimizer_groups(common.values.get("optimizer")) or _groups_of_buckets(files, catalog)
    return tuple(
        g if g.get("step") is None else g | {"step": number_of(g["step"], f"optimizer.param_groups.{i}.step")}
        for i, g in enumerate(groups)
    )


def _groups_of_buckets(files: Files, catalog: Catalog) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    about = ((key, bucket_object(key)) for key in catalog.objects)
    keys = [key for key, found in about if found and (found.group, found.what) == (0, "optimizer")]
    for key in sorted(keys):  # chained_0 before chained_1: the order of ids
        groups += optimizer_groups(only_one(load_object(files, catalog.objects[key].item), key), key)
    return groups


def rng_states(files: Files, catalog: Catalog) -> dict[tuple[int, int], object]:
    """The rng states by (pp, tp), of several data-parallel entries the first."""
    states_of: dict[tuple[int, int], object] = {}
    for key, entry in catalog.objects.items():
        rank = rng_shard(key)
        if rank and not rank.dp:
            states_of[rank.pp, rank.tp] = rng_at(only_one(load_object(files, entry.item), key), key)
    return states_of


def dropped_objects(keys: SortedKeys, consumed: frozenset[str], unknown_keys: bool) -> list[str]:
    """One line per object or tensor that the target leaves out."""
    ranks = {key: rank for key in keys.objects if (rank := rng_shard(key))}
    others = [
        key
        for key in (*keys.objects, *keys.optimizer)
        if key not in ranks and key not in consumed and key != COMMON_OBJECT
    ]
    of_data_parallel = "fsdp_dtensor keeps the rng states of one data-parallel rank"
    return [
        *(f"{key}: {of_data_parallel}" for key, rank in ranks.items() if rank.dp),
        *left_out_by(_DROPPED, others, unknown_keys),
    ]
