"""Which states an optimizer keeps, by its settings and not by what happens to be stored. Others than Adam.

Megatron-FSDP runs Adam alone (arguments.py refuses the emerging optimizers, distrib_optimizer.py SGD), so none of
its jobs can load the states of Muon, Lion and SGD, or of mixtures with Adam. Jobs of `torch_dist` can, and each asks
for what its own kind of optimizer would have saved (optimizer.py, layer_wise_optimizer.py)::

    optimizer.state.fp32_param.<weight key>           the master, where the optimizer is not distributed
    optimizer.state.param.<weight key>                the master of a distributed optimizer (Lion next to Muon)
    optimizer.state.momentum_buffer.<weight key>      SGD, Muon; adaptive Muon has moment2_buffer too
    optimizer.state.exp_avg.<weight key>              Lion, and with exp_avg_sq what Muon leaves to Adam

Chains, as {0: Muon, 1: Adam}, and their groups are read by position: the common state's entry is copied unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError, raise_if
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import load_object
from ckpt_tools.megatron.keys import bucket_object
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.stored_values import only_one, optimizer_groups
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.model import Model, Parameter
from ckpt_tools.model.roles import MASTER

_WAY_OUT = "Take another iteration, or leave the optimizer out with --weights-only or `strip`"
_STATES = {"adam": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "sgd": ("momentum_buffer",)}


class Expected(NamedTuple):
    """The kinds of state that every trained parameter must have, and what says so.

    `kinds` is None if unknown: `why` then says what is missing.
    """

    kinds: tuple[str, ...] | None
    why: str

    def missing(self, held: Iterable[str]) -> list[str]:
        have = set(held)
        return [kind for kind in self.kinds or () if kind not in have]


def expected_states(common: CommonState, groups: Sequence[Mapping[str, Any]]) -> Expected:
    """What the arguments say, else what the fields of the parameter groups prove; masters are not part of it."""
    named = common.arg("optimizer")
    fields = {field for group in groups for field in group}
    if isinstance(named, str):
        name, why = named, f"args.optimizer is {named!r}"
    elif {"betas", "eps"} <= fields:
        name, why = "adam", "its groups have betas and eps, as Adam's"
    elif "betas" in fields:
        name, why = "lion", "its groups have betas but no eps, as Lion's"
    elif "momentum" in fields:
        name, why = "sgd", "its groups have a momentum, as SGD's"
    else:
        return Expected(None, "neither the args nor the fields of the groups name the optimizer")
    if name not in _STATES:
        return Expected(None, f"{why}, and which states it keeps of which parameter is not known")
    kinds = _STATES[name]
    if name == "sgd" and (not common.arg("sgd_momentum", 1) or any(g.get("momentum") == 0 for g in groups)):
        kinds = ()  # plain SGD keeps nothing
    return Expected(kinds, why)


def refuse_missing_states(
    held: Iterable[str], common: CommonState, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Raise MappingError if a kind of state is missing entirely."""
    expected = expected_states(common, groups)
    missing = expected.missing(held)
    if missing:
        raise MappingError(
            f"no parameter has the optimizer state {' or '.join(missing)}, but {expected.why}: they were lost. "
            f"{_WAY_OUT}"
        )


ADAM = frozenset({"exp_avg", "exp_avg_sq"})
_SHARDING = "param_state_sharding_type"  # what only a distributed optimizer's entry has


def is_adams(parameters: Iterable[Parameter]) -> bool:
    """Whether every trained parameter has both moments of Adam."""
    return all(set(p.states) >= ADAM for p in parameters if p.states)


def mixes_lion_and_adam(common: CommonState) -> bool:
    """Whether some parameters may have a part of what others have: Lion keeps one of Adam's two moments."""
    return "lion" in (common.arg("optimizer"), common.arg("muon_scalar_optimizer"))


def refuse_partial_states(states: Iterable[tuple[str, Set[str]]], common: CommonState) -> None:
    """Raise MappingError if some parameter (name, kinds of state) has only a part of the states that others have."""
    if mixes_lion_and_adam(common):
        return
    held: dict[frozenset[str], list[str]] = {}
    for name, kinds in states:
        held.setdefault(frozenset(kinds), []).append(name)
    problems = [
        f"{name}: no {', '.join(sorted(more - kinds))}"
        for kinds, names in held.items()
        for more in [next((other for other in held if kinds < other), kinds)]
        if more != kinds
        for name in names
    ]
    raise_if(problems, MappingError, "optimizer states are missing that other parameters have", _WAY_OUT)


def refuse_lost_states(model: Model) -> None:
    """Raise MappingError if states or groups are missing of what the model's optimizer has."""
    refuse_missing_states(model.roles, model.common, model.groups)
    masters = {MASTER} & {*model.roles}  # which weights in fp32 need not have
    held = (
        (p.name, {*p.states, *(masters if p.dtype == "float32" else ())})
        for p in model.parameters
        if p.states
    )
    refuse_partial_states(held, model.common)
    if not model.groups and any(p.states for p in model.parameters):
        raise MappingError(
            "the checkpoint stores no optimizer parameter groups: learning rates, weight decay and steps were lost. "
            f"{_WAY_OUT}"
        )


def optimizer_entry(files: Files, catalog: Catalog, common: CommonState) -> Any:
    """The common state's `optimizer`, that of distributed optimizers as `fully_reshardable` has it."""
    stored = common.values.get("optimizer")
    if not isinstance(stored, Mapping):
        return {}
    if not all(isinstance(key, int) for key in stored):
        return _reshardable(files, catalog, 0, stored)
    return {chain: _reshardable(files, catalog, chain, part) for chain, part in stored.items()}


def _reshardable(files: Files, catalog: Catalog, chain: int, part: Any) -> Any:
    """One optimizer's entry; `dp_reshardable` has its groups in an object of every model-parallel rank."""
    if not isinstance(part, Mapping) or _SHARDING not in part:
        return part
    groups = optimizer_groups(part)
    for key, stored in catalog.objects.items():
        about = bucket_object(key)
        if not groups and about and (about.chain, about.group, about.what) == (chain, 0, "optimizer"):
            groups = optimizer_groups(only_one(load_object(files, stored.item), key), key)
    scaler = {"grad_scaler": part["grad_scaler"]} if part.get("grad_scaler") else {}
    return {"optimizer": {"param_groups": groups}, **scaler, _SHARDING: "fully_reshardable"}


def parts_of(entry: Any) -> tuple[Any, ...]:
    """The optimizers of a chain, or the one that there is; a layer-wise optimizer is a chain inside of one."""
    if isinstance(entry, Mapping) and entry and all(isinstance(key, int) for key in entry):
        return tuple(part for key in sorted(entry) for part in parts_of(entry[key]))
    return (entry,)


def is_distributed(entry: Any) -> bool:
    """Whether one of them is a distributed optimizer: loaders ask for its states by their layout."""
    return any(isinstance(part, Mapping) and _SHARDING in part for part in parts_of(entry))


def spelled_master(entry: Any, kinds: Iterable[str], all_kinds: Iterable[str]) -> str:
    """How the job that has this entry calls the master of a parameter with these kinds of states.

    Where a layer-wise optimizer is next to a distributed one, the first has the matrices: it is Muon, with
    buffers that nothing else has, or Lion with Adam for the rest.
    """
    kinds_of_optimizer = {isinstance(part, Mapping) and _SHARDING in part for part in parts_of(entry)}
    if kinds_of_optimizer != {True, False}:
        return "param" if kinds_of_optimizer == {True} else "fp32_param"
    is_layer_wise = (
        "momentum_buffer" in kinds if "momentum_buffer" in all_kinds else "exp_avg_sq" not in kinds
    )
    return "fp32_param" if is_layer_wise else "param"
