"""Megatron's settings of layers that are not attention with an MLP: gated delta nets, Mamba, and their patterns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.layer_patterns import delta_net_layers

if TYPE_CHECKING:
    from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs

DELTA_NET = "gated_delta_net"
# What transformer_config.py takes where an argument is not set.
_DELTA_SIZES = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                "linear_num_key_heads": 16, "linear_num_value_heads": 32}  # fmt: skip
_MAMBA_SIZES = {"mamba_state_dim": 128, "mamba_head_dim": 64, "mamba_num_groups": 8}
KINDS = "M*-EP"  # Mamba, attention, MLP, experts: layers of their own in a HybridModel; or (Falcon-H1) three in one


def read_recurrent(args: Mapping[str, Any]) -> dict[str, Any]:
    """The `ModelArgs` fields of gated delta nets and Mamba layers."""
    return {
        "attention_output_gate": bool(args.get("attention_output_gate")),
        "moe_latent_size": args.get("moe_latent_size"),
        **_delta_nets(args),
        **_mamba(args),
    }


def _delta_nets(args: Mapping[str, Any]) -> dict[str, Any]:
    if args.get("experimental_attention_variant") != DELTA_NET:
        return {}
    layers = delta_net_layers(args.get("linear_attention_freq"), args["num_layers"])
    sizes = {name: _set(args.get(name), default) for name, default in _DELTA_SIZES.items()}
    return {"linear_layers": layers, **sizes}


def _mamba(args: Mapping[str, Any]) -> dict[str, Any]:
    told = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    pattern = (
        hybrid_pattern(told) if told else "P" * args["num_layers"] if args.get("falconh1_ratio") == 1 else ""
    )
    if not pattern:
        return {}
    if len(pattern) != args["num_layers"]:
        raise MappingError(
            f"the checkpoint's args name {args['num_layers']} layers, their hybrid pattern {len(pattern)}"
        )
    sizes = {name: _set(args.get(name), default) for name, default in _MAMBA_SIZES.items()}
    heads = args.get("mamba_num_heads") or 2 * args["hidden_size"] // max(sizes["mamba_head_dim"], 1)
    return {"hybrid_pattern": pattern, "mamba_num_heads": heads, **sizes}


def hybrid_pattern(told: object) -> str:
    """The kind of each layer of the decoder, from Megatron's pattern.

    Bars cut it for pipelines. What stands behind a slash is the pattern of a prediction layer.
    """
    pattern = "".join(str(told).partition("/")[0].replace("|", "").split())
    strange = sorted(set(pattern) - set(KINDS))
    if strange:
        raise MappingError(
            f"hybrid pattern {str(told)[:60]!r}: {', '.join(map(repr, strange))} is not one of {', '.join(KINDS)}"
        )
    return pattern


def _set(value: Any, default: int) -> Any:
    return default if value is None else value


def written_recurrent(model: ModelArgs) -> dict[str, Any]:
    """The arguments that make Megatron build these layers; none for a model without them."""
    args: dict[str, Any] = {}
    if model.attention_output_gate:
        args["attention_output_gate"] = True
    if model.moe_latent_size is not None:
        args["moe_latent_size"] = model.moe_latent_size
    if model.linear_layers:
        args |= {
            "experimental_attention_variant": DELTA_NET,
            "linear_attention_freq": list(model.linear_layers),
        }
        args |= {name: getattr(model, name) for name in _DELTA_SIZES}
    if model.hybrid_pattern:
        args |= {"is_hybrid_model": True, "hybrid_override_pattern": model.hybrid_pattern}
        args |= {name: getattr(model, name) for name in (*_MAMBA_SIZES, "mamba_num_heads")}
    return args
