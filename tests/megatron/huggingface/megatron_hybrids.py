"""Gated delta nets of the real megatron-core on a CPU; imported by `megatron_logits` in its own process.

The kernels of flash-linear-attention want a GPU. Megatron's own deterministic form of the rule is plain torch, and only
the norm of queries and keys is given here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


def with_delta_nets(spec: Any, args: dict[str, Any]) -> Any:
    """The layers of `spec`, those that args name as gated delta nets with one in place of their attention.

    Megatron builds such layers of Transformer Engine's modules only; these are its local ones, and the norm before
    the projection goes by the name that the fused module gives it.
    """
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.ssm import gated_delta_net as net
    from megatron.core.transformer.spec_utils import ModuleSpec

    net.HAVE_FLA = True
    net.l2norm = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    local = LocalSpecProvider()
    attention = ModuleSpec(
        module=net.GatedDeltaNet,
        submodules=net.GatedDeltaNetSubmodules(
            in_proj=local.column_parallel_linear(),
            out_norm=local.layer_norm(rms_norm=True, for_qk=False),
            out_proj=local.row_parallel_linear(),
        ),
    )
    layers = [copy.deepcopy(layer) for layer in spec.layer_specs]
    for layer, linear in zip(layers, args["linear_attention_freq"], strict=True):
        if linear:
            layer.submodules.self_attention = attention
            layer.submodules.sharded_state_dict_keys_map = {
                "input_layernorm.": "self_attention.in_proj.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            }
    spec.layer_specs = layers
    return spec


def joined_parts(model: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters with the parts of a projection joined as the model's own `sharded_state_dict` joins them."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    joined = dict(parameters)
    for name, factory in model.sharded_state_dict().items():
        if name in joined or not isinstance(factory, ShardedTensorFactory):
            continue
        keys = [part.key for part in factory.build()]
        if all(key in joined for key in keys):
            joined[name] = factory.merge_fn([torch.from_numpy(joined.pop(key)) for key in keys]).numpy()
    return joined
