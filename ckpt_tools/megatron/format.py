"""What differs between formats, a row each: every command asks here, so that all give one answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckpt_tools.megatron.dcp.state_dict import read_state_dict
from ckpt_tools.megatron.keys import parameter_name, role_of, state_key
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.choices import CheckpointKind
from ckpt_tools.model.roles import WEIGHT, Role


@dataclass(frozen=True, slots=True)
class Format:
    """`roles` of every tensor by key; `parameters`: the parameter of each key that is not named for its own."""

    roles: Callable[[Catalog], Mapping[str, Role]]
    parameters: Callable[[Catalog], Mapping[str, str]]


def _roles_by_key(catalog: Catalog) -> Mapping[str, Role]:
    return {key: role_of(key) for key in catalog.tensors}


def _roles_by_dict(catalog: Catalog) -> Mapping[str, Role]:
    roles = read_state_dict(catalog).roles()
    return {key: roles.get(key, "other") for key in catalog.tensors}


FORMATS: Mapping[CheckpointKind, Format] = {
    "torch_dist": Format(
        _roles_by_key,
        lambda catalog: {key: state.weight for key in catalog.tensors if (state := state_key(key))},
    ),
    "fsdp_dtensor": Format(
        _roles_by_key, lambda catalog: {key: name for key in catalog.tensors if (name := parameter_name(key))}
    ),
    "dcp": Format(_roles_by_dict, lambda catalog: read_state_dict(catalog).parameters()),
    "safetensors": Format(lambda catalog: dict.fromkeys(catalog.tensors, WEIGHT), lambda _: {}),
}
