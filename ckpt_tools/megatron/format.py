"""What differs between formats, a row each: every command asks here, so that all give one answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.dcp.state_dict import EXTRA_STATE, read_state_dict, root_of
from ckpt_tools.megatron.keys import (
    SQUARES,
    has_expert_axis,
    is_optimizer_key,
    is_run_state,
    is_square,
    model_name,
    parameter_name,
    rng_key,
    rng_shard,
    role_of,
    state_key,
)
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import optimizer_layout
from ckpt_tools.megatron.torch_dist.stacking import slices_of
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.choices import CheckpointKind
from ckpt_tools.model.roles import WEIGHT, Role


class Weight(NamedTuple):
    """A parameter or buffer as its checkpoint spells it, one per layer and (fsdp_dtensor) expert."""

    name: str
    shape: tuple[int, ...]
    experts: int | None = None  # length of the expert axis the parameter was stacked along


class Weights(NamedTuple):
    """The weights of a checkpoint, and a line for each key that is not a weight's."""

    found: list[Weight]
    problems: list[str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {weight.name: weight.shape for weight in self.found}


@dataclass(frozen=True, slots=True)
class Format:
    """How a format answers what commands ask of any checkpoint.

    Attributes:
        roles: what every tensor is, by key.
        parameters: the parameter of each key that is not named for its own.
        weights: the model's weights, layers apart.
        without_optimizer: the keys of a weights-only checkpoint: of weights, and of what models keep besides these.
        squares: the keys of states that are never below zero.
        layout: the name of the optimizer's layout.
        rng_ranks: the (pp, tp) ranks with stored rng states.
        is_run: a job of Megatron saves it, in the root of a run, with its arguments and counters.
        masters_in_place: fp32 masters are stored in the place of weights.
        described: what a refused source is, after "PATH is".
    """

    roles: Callable[[Catalog], Mapping[str, Role]]
    parameters: Callable[[Catalog], Mapping[str, str]]
    weights: Callable[[Catalog], Weights]
    without_optimizer: Callable[[Catalog], frozenset[str]]
    squares: Callable[[Catalog], Collection[str]] = lambda catalog: {*filter(is_square, catalog.tensors)}
    layout: Callable[[Catalog, CommonState], str] = optimizer_layout
    rng_ranks: Callable[[Catalog], set[tuple[int, int]]] = lambda catalog: {
        (rank.pp, rank.tp) for rank in map(rng_key, (*catalog.tensors, *catalog.objects)) if rank
    }
    is_run: bool = False
    masters_in_place: bool = False
    described: str = "a plain PyTorch state dict"


def _roles_by_key(catalog: Catalog) -> Mapping[str, Role]:
    return {key: role_of(key) for key in catalog.tensors}


def _without_optimizer_by_key(catalog: Catalog) -> frozenset[str]:
    weights = [key for key in catalog.tensors if role_of(key) == WEIGHT]
    objects = (key for key in catalog.objects if not is_optimizer_key(key) and not is_run_state(key))
    return frozenset((*weights, *objects))


def _torch_dist_weights(catalog: Catalog) -> Weights:
    weights = Weights([], [])
    for key, entry in catalog.tensors.items():
        if is_optimizer_key(key):
            continue
        try:
            slices = slices_of(entry)
        except MappingError as error:
            weights.problems.append(str(error))
            continue
        experts = entry.shape[len(slices[0].lead) - 1] if slices and has_expert_axis(key) else None
        weights.found.extend(Weight(s.name, s.shape, experts) for s in slices if not s.expert)
    return weights


def _fsdp_weights(catalog: Catalog) -> Weights:
    """Names are without their wrappers' prefix."""
    named = {name: entry.shape for key, entry in catalog.tensors.items() if (name := model_name(key))}
    return Weights([Weight(name, shape) for name, shape in named.items()], [])


def _plain_roles(catalog: Catalog) -> Mapping[str, Role]:
    roles = read_state_dict(catalog).roles()
    return {key: roles.get(key, "other") for key in catalog.tensors}


def _plain_weights(catalog: Catalog) -> Weights:
    weights = read_state_dict(catalog).weights
    return Weights([Weight(name, catalog.tensors[key].shape) for name, key in weights.items()], [])


def _plain_without_optimizer(catalog: Catalog) -> frozenset[str]:
    weights = frozenset(key for key, role in _plain_roles(catalog).items() if role == WEIGHT)
    keys = read_state_dict(catalog)
    roots = {root_of(catalog, key) for key in weights} - {""}
    return weights.union(
        key
        for key in keys.others
        if (keys.model and key.startswith(keys.model))
        or root_of(catalog, key) in roots
        or key.endswith(EXTRA_STATE)
    )


FORMATS: Mapping[CheckpointKind, Format] = {
    "torch_dist": Format(
        _roles_by_key,
        lambda catalog: {key: state.weight for key in catalog.tensors if (state := state_key(key))},
        _torch_dist_weights,
        _without_optimizer_by_key,
        rng_ranks=lambda catalog: {(rank.pp, rank.tp) for rank in map(rng_shard, catalog.objects) if rank},
        is_run=True,
        described="already a torch_dist checkpoint",
    ),
    "fsdp_dtensor": Format(
        _roles_by_key,
        lambda catalog: {key: name for key in catalog.tensors if (name := parameter_name(key))},
        _fsdp_weights,
        _without_optimizer_by_key,
        is_run=True,
        masters_in_place=True,
        described="already an fsdp_dtensor checkpoint",
    ),
    "dcp": Format(
        _plain_roles,
        lambda catalog: read_state_dict(catalog).parameters(),
        _plain_weights,
        _plain_without_optimizer,
        lambda catalog: read_state_dict(catalog).of_kinds(SQUARES),
        layout=lambda catalog, _: read_state_dict(catalog).layout,
    ),
    "safetensors": Format(
        lambda catalog: dict.fromkeys(catalog.tensors, WEIGHT),
        lambda _: {},
        lambda catalog: Weights([Weight(key, entry.shape) for key, entry in catalog.tensors.items()], []),
        lambda catalog: frozenset(catalog.tensors),
        described="a Hugging Face model (use import-hf)",
    ),
}
