"""Everything a conversion reads of a `torch_dist` checkpoint before it plans: all of it small."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ckpt_tools.catalog.container import StoredTensor, load_object
from ckpt_tools.catalog.files import Files
from ckpt_tools.catalog.left_out import leave_out
from ckpt_tools.catalog.model import Catalog
from ckpt_tools.catalog.unpickle import StandIn
from ckpt_tools.errors import CkptError, MappingError, StorageError, list_problems
from ckpt_tools.megatron.common_state import CommonState, read_common_state
from ckpt_tools.megatron.fsdp_dtensor import RNG_KEY
from ckpt_tools.megatron.object_grids import object_grids
from ckpt_tools.megatron.optimizer_layouts.model import OptimizerStates
from ckpt_tools.megatron.optimizer_layouts.reader import read_optimizer_states
from ckpt_tools.megatron.param_groups import optimizer_groups
from ckpt_tools.megatron.settings import ModelSettings, read_settings
from ckpt_tools.megatron.torch_dist import Parameter, SortedKeys, is_optimizer_key, sort_keys

# Objects that Megatron-FSDP neither reads nor writes, and why they can be left out.
DROPPED_OBJECTS = (
    ("*_extra_state/shard_*", "Transformer Engine extra state: not part of fsdp_dtensor"),
    ("*_extra_state", "Transformer Engine extra state: not part of fsdp_dtensor"),
    ("rerun_state_machine_state/*", "rerun state: never read from fsdp_dtensor"),
)
COMMON_OBJECT = "common_state/*"


@dataclass(frozen=True, slots=True)
class TorchDistSource:
    """A `torch_dist` checkpoint taken apart; tensors are still only described."""

    catalog: Catalog
    parameters: tuple[Parameter, ...]
    states: OptimizerStates | None
    groups: tuple[Mapping[str, Any], ...]
    settings: ModelSettings
    common: Mapping[str, Any]
    model_config: Mapping[str, Any]  # the `model` section of Bridge's run_config.yaml
    rng: Mapping[tuple[int, int], object]  # (pp, tp) -> list of rng states
    dropped: tuple[str, ...]
    rng_missing: tuple[str, ...] = ()  # a line for rng states of which some ranks' are not there
    notes: tuple[str, ...] = ()

    @property
    def args_object(self) -> StandIn | None:
        """The writer's argparse namespace, to be written back as it was."""
        return self.common.get("args")

    @property
    def args(self) -> Mapping[str, Any] | None:
        """The writer's arguments by name."""
        return None if self.args_object is None else self.args_object.attributes

    @property
    def scheduler(self) -> Mapping[str, Any]:
        """The learning-rate scheduler's state; empty when none was saved."""
        return self.common.get("opt_param_scheduler") or {}

    @property
    def step(self) -> object:
        """The optimizer's step where the common state keeps it outside the groups, else None."""
        return next(_steps(self.common.get("optimizer")), None)

    @property
    def grad_scaler(self) -> object:
        """The loss scaler's state of an fp16 run, else None."""
        optimizer = self.common.get("optimizer")
        parts = [optimizer, *optimizer.values()] if isinstance(optimizer, Mapping) else []
        return next(
            (p["grad_scaler"] for p in parts if isinstance(p, Mapping) and p.get("grad_scaler")), None
        )


def read_torch_dist(
    files: Files,
    catalog: Catalog,
    ignored: tuple[str, ...] = (),
    trust_pickle: bool = False,
    *,
    weights_only: bool = False,
    unknown_keys: bool = False,
) -> TorchDistSource:
    """The checkpoint in `files` taken apart; `ignored` are globs of keys that are left out.

    Tensors that stand inside stored objects (`dp_zero_gather_scatter`) are added to the catalog. With `weights_only`
    the optimizer is read for its masters, as far as it can be read. `unknown_keys` may be there and count as dropped.

    Raises:
        UnsupportedCheckpointError, VerificationError: see `read_optimizer_states`.
        MappingError: keys that nothing accounts for, or that do not make a whole model.
    """
    common = read_common_state(files, catalog, trust_pickle)
    catalog, left_out = leave_out(catalog, ignored)
    keys = sort_keys(catalog)
    states, notes = _states(files, catalog, common, weights_only)
    rng, rng_missing = rng_states(files, catalog)
    consumed = (
        frozenset(filter(is_optimizer_key, (*catalog.tensors, *catalog.objects)))
        if weights_only
        else (states.consumed if states is not None else frozenset())
    )
    return TorchDistSource(
        catalog=replace(catalog, tensors={**catalog.tensors, **states.payloads}) if states else catalog,
        parameters=keys.parameters,
        states=states,
        groups=() if weights_only else stored_groups(files, catalog, common),
        settings=read_settings(common),
        common=common.values,
        model_config=common.model_config,
        rng=rng,
        rng_missing=rng_missing,
        dropped=(*left_out, *dropped_objects(keys, consumed, unknown_keys)),
        notes=notes,
    )


def _states(
    files: Files, catalog: Catalog, common: CommonState, weights_only: bool
) -> tuple[OptimizerStates | None, tuple[str, ...]]:
    """The optimizer's states; a note instead of an error when it is left out anyhow."""
    try:
        return read_optimizer_states(files, catalog, common), ()
    except StorageError:
        raise
    except CkptError as error:
        if not weights_only:
            raise
        reason = str(error).splitlines()[0].rstrip(":")
        return None, (f"the stored weights are written, not the masters, which cannot be read: {reason}",)


def _steps(optimizer: object) -> Any:
    """Steps kept outside groups: `common_step` of non-distributed optimizers, torch Adam's `param_state`."""
    if not isinstance(optimizer, Mapping):
        return
    for value in optimizer.values():
        if isinstance(value, Mapping):
            for name in ("common_step", "step"):
                if name in value and not isinstance(value[name], Mapping):
                    yield _number(value[name])
            yield from _steps(value)


def _number(value: object) -> object:
    """A stored tensor of one element as the Python number it holds."""
    if not isinstance(value, StoredTensor):
        return value
    return struct.unpack(_NUMBER_FORMATS[value.dtype], value.data)[0]


_NUMBER_FORMATS = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}


def stored_groups(files: Files, catalog: Catalog, common: CommonState) -> tuple[Mapping[str, Any], ...]:
    """The optimizer's parameter groups in id order, from the common state or from the buckets' own objects.

    A `step` that the optimizer kept as a tensor becomes a number, as Megatron asks for.
    """
    groups = optimizer_groups(common.values.get("optimizer")) or _groups_of_buckets(files, catalog)
    return tuple(g | {"step": _number(g["step"])} if "step" in g else g for g in groups)


def _groups_of_buckets(files: Files, catalog: Catalog) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    keys = [key for key in catalog.objects if ".dp_group_idx_0.optimizer/shard_" in key]
    for key in sorted(keys):  # chained_0 before chained_1: the order of ids
        groups += optimizer_groups(load_object(files, catalog.objects[key].item)[0])
    return groups


def rng_states(files: Files, catalog: Catalog) -> tuple[dict[tuple[int, int], object], tuple[str, ...]]:
    """The rng states by (pp, tp), of several data-parallel entries the first; and what of them is missing."""
    found: dict[tuple[int, int], object] = {}
    wanted = {k: e for k, e in catalog.objects.items() if RNG_KEY.match(k)}
    for key, entry in wanted.items():
        match = RNG_KEY.match(key)
        if match and match[3] in (None, "0"):
            found[int(match[1]), int(match[2])] = load_object(files, entry.item)[0]
    return found, tuple(grid.problem for grid in object_grids(wanted) if grid.problem)


def dropped_objects(keys: SortedKeys, consumed: frozenset[str], unknown_keys: bool) -> list[str]:
    """One line per object or tensor that the target leaves out.

    Raises:
        MappingError: keys that nothing accounts for, unless there may be `unknown_keys`.
    """
    dropped, unknown = [], []
    for key in (*keys.objects, *keys.optimizer):
        rng = RNG_KEY.match(key)
        if rng and rng[3] not in (None, "0"):
            dropped.append(f"{key}: fsdp_dtensor keeps the rng states of one data-parallel rank")
            continue
        if rng or key in consumed or fnmatchcase(key, COMMON_OBJECT):
            continue
        reason = next((why for glob, why in DROPPED_OBJECTS if fnmatchcase(key, glob)), None)
        if reason is None:
            unknown.append(key)
        else:
            dropped.append(f"{key}: {reason}")
    if unknown_keys:
        return dropped + [f"{key}: no rule accounts for it" for key in unknown]
    if unknown:
        weights = (
            "; --weights-only leaves out the whole optimizer" if any(map(is_optimizer_key, unknown)) else ""
        )
        raise MappingError(
            "the checkpoint holds keys that no rule accounts for; leave them out with --ignore-keys GLOB if the "
            f"target can do without them{weights}:\n" + list_problems(unknown)
        )
    return dropped
