"""Names of the running model: what a `torch_dist` name becomes for the program that will load the result.

Only this module knows dialects. The differences are few and each has a date (reference: Megatron-LM
checkpointing.py `preprocess_fsdp_dtensor_state_dict`, multi_token_prediction.py, gpt_layer_specs.py):

=================  ==================================  =====================  ======================  ===========
target             MTP inner layer: state / group      fused MLA down-proj    GDN projections         Mamba conv
=================  ==================================  =====================  ======================  ===========
core-0.16          transformer_layer / same            fused                  fused per TP rank       conv1d.x
core-0.17          mtp_model_layer / same              fused                  fused per TP rank       conv1d.x
core-0.18          mtp_model_layer / same              fused                  fused per TP rank       conv1d.x
core-0.19          mtp_model_layer / same              fused                  fused per TP rank       conv1d.x
main               transformer_layer / mtp_model_layer unfused / fused        fused per TP rank       conv1d_x
bridge             mtp_model_layer / same              fused                  kept apart / fused      conv1d.x
=================  ==================================  =====================  ======================  ===========

"State" is the name in `model.*` and `optimizer.state.*`, "group" the one in `optimizer.param_to_group_meta.*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ckpt_tools.errors import UsageError
from ckpt_tools.megatron.keys import expert_name, is_of_transformers
from ckpt_tools.model.choices import DialectName
from ckpt_tools.model.model import Parameter

BRIDGE: Final = "bridge"
_MAMBA_CONV = "mixer.conv1d."
MTP_DISK, MTP_LIVE = ".transformer_layer.", ".mtp_model_layer."
FUSED_QKV_NORM = re.compile(r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$")
FUSED_FC1_NORM = re.compile(r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$")
LOCAL_INPUT_NORM = re.compile(r"\.input_layernorm\.(weight|bias)$")
LOCAL_MLP_NORM = re.compile(r"\.pre_mlp_layernorm\.(weight|bias)$")
# The order in which the live tensor holds its parts (gated_delta_net/{gdn,gdn2}.py, mamba_mixer.py).
PART_ORDERS = (
    ("query", "key", "value", "z", "beta", "alpha"),
    ("query", "key", "value", "z", "f", "b", "w"),
    ("query", "key", "value"),
    ("z", "x", "B", "C", "dt"),
    ("x", "B", "C"),
)
MLA_DOWN = (".linear_q_down_proj.", ".linear_kv_down_proj.")
MLA_FUSED_DOWN = ".linear_qkv_down_proj."


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one loading program calls the few things that programs call differently."""

    name: DialectName
    mtp_in_state: str
    mtp_in_groups: str
    mla_fused_in_state: bool = True
    gdn_fused_in_state: bool = True
    mamba_conv: str = "conv1d."
    rng_by_dp: bool = False  # in torch_dist with expert parallelism: states of every data-parallel rank


DIALECTS: dict[DialectName, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect("core-0.16", MTP_DISK, MTP_DISK, rng_by_dp=True),
        Dialect("core-0.17", MTP_LIVE, MTP_LIVE),
        Dialect("core-0.18", MTP_LIVE, MTP_LIVE),
        Dialect("core-0.19", MTP_LIVE, MTP_LIVE),
        Dialect("main", MTP_DISK, MTP_LIVE, mla_fused_in_state=False, mamba_conv="conv1d_"),
        Dialect("bridge", MTP_LIVE, MTP_LIVE, gdn_fused_in_state=False, rng_by_dp=True),
    )
}


def dialect_named(name: str) -> Dialect:
    known = next((dialect for dialect in DIALECTS.values() if dialect.name == name), None)
    if known is None:
        raise UsageError(f"unknown target {name!r}; known targets are {', '.join(DIALECTS)}")
    return known


def dialect_for(asked: str | None, otherwise: str, names: Iterable[str]) -> Dialect:
    """The dialect of the program that is asked for; else the one that alone has the model of these parameters.

    Args:
        otherwise: the program where neither says one.
    """
    part = next(filter(is_of_transformers, names), None)
    if part is None:
        return dialect_named(asked or otherwise)
    if asked not in (None, BRIDGE):
        raise UsageError(
            f"--target {asked}: the model has {part.partition('.')[0]}, a module of transformers in addition to its "
            f"language model, which Megatron-Bridge's models alone have. Leave it out, or say --target {BRIDGE}"
        )
    return DIALECTS[BRIDGE]


@dataclass(frozen=True, slots=True)
class ModelStyle:
    """Facts of the model that its weights alone do not tell: they come from the args or from the user."""

    local_norms: bool  # norms are modules of their own in the running model (`--transformer-impl local`)
    grouped_experts: bool  # one module holds all experts (`--moe-grouped-gemm`)
    fused_mla_down: bool = False  # `--mla-down-proj-fusion`


def live_name(parameter: Parameter, style: ModelStyle) -> str:
    """The parameter's name in the running model, before what depends on the dialect."""
    name = parameter.name
    if style.local_norms:
        name = FUSED_QKV_NORM.sub(r".input_layernorm.\1", name)
        name = FUSED_FC1_NORM.sub(r".pre_mlp_layernorm.\1", name)
    if parameter.expert is not None:
        name = expert_name(name, parameter.expert, style.grouped_experts)
    return name


def state_name(name: str, dialect: Dialect) -> str:
    """A live name as the dialect spells it in `model.*` and `optimizer.state.*`."""
    return _spelled(name, dialect, dialect.mtp_in_state)


def group_name(name: str, dialect: Dialect) -> str:
    """A live name as the dialect spells it in `optimizer.param_to_group_meta.*`."""
    return _spelled(name, dialect, dialect.mtp_in_groups)


def stored_name(name: str, hybrid_mtp: bool = False) -> str:
    """The `torch_dist` spelling of a live name of any dialect: the inverse of `state_name` and `group_name`.

    The inner layer of a multi-token-prediction layer keeps its live name in hybrid models (`hybrid_mtp`). A norm
    that a fused MLA down-projection absorbed is stored as the layer's input norm (multi_latent_attention.py).
    """
    name = name.replace(f".self_attention{MLA_FUSED_DOWN}layer_norm_", ".input_layernorm.")
    return _unspelled(name, hybrid_mtp)


def respelled(key: str, dialect: Dialect, of_group: bool, hybrid_mtp: bool) -> str:
    """A key of any dialect as another one spells it, where nothing but the name differs."""
    spell = group_name if of_group else state_name
    return spell(_unspelled(key, hybrid_mtp), dialect)


def is_hybrid_mtp(names: Iterable[str]) -> bool:
    """Whether a model's multi-token prediction has layers of its own, whose live name is the stored one."""
    return any(f"{MTP_LIVE}layers." in name for name in names)


def fuse_local_norm(name: str) -> str:
    """The stored name of a norm that is a separate module in the running model; other names unchanged."""
    name = LOCAL_INPUT_NORM.sub(r".self_attention.linear_qkv.layer_norm_\1", name)
    return LOCAL_MLP_NORM.sub(r".mlp.linear_fc1.layer_norm_\1", name)


def _unspelled(name: str, hybrid_mtp: bool) -> str:
    if not hybrid_mtp and _in_mtp(name):
        name = name.replace(MTP_LIVE, MTP_DISK, 1)
    return name.replace("mixer.conv1d_", _MAMBA_CONV)


def _spelled(name: str, dialect: Dialect, inner: str) -> str:
    name = name.replace(_MAMBA_CONV, f"mixer.{dialect.mamba_conv}")
    return name.replace(MTP_DISK, inner, 1) if _in_mtp(name) else name


def _in_mtp(name: str) -> bool:
    return ".mtp." in name or name.startswith("mtp.")
