"""Gated delta nets and Mamba of the real megatron-core on a CPU; imported by `megatron_logits` in its own process.

The kernels of flash-linear-attention and mamba_ssm want a GPU. Of the former Megatron has a form in plain torch,
which lacks the norm of queries and keys only; the latter are given here by their definition.
"""

import copy
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch


def with_delta_nets(spec: Any, args: dict[str, Any]) -> Any:
    """The layers of `spec`, those that args name as gated delta nets with one in place of their attention.

    Megatron builds such layers of Transformer Engine's modules only; these are its local ones, and the norm before
    the projection goes by the name that the fused module gives it.
    """
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.ssm import gated_delta_net as net
    from megatron.core.transformer import spec_utils

    net.HAVE_FLA = True
    net.l2norm = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    local = LocalSpecProvider()
    attention = spec_utils.ModuleSpec(
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


def provide_mamba() -> None:
    """What megatron-core imports of mamba_ssm, in plain torch; before megatron-core itself is imported."""
    inference = (
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops"  # kernels not used here
    )
    made = {name: types.ModuleType(name) for name in (
        inference, "mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.layernorm_gated",
        "mamba_ssm.ops.triton.ssd_combined", "mamba_ssm.ops.triton.selective_state_update")}  # fmt: skip
    for module in made.values():
        module.__spec__ = ModuleSpec(module.__name__, None)
    vars(made[inference]).update(tensor_get_slice_after=None, tensor_masked_update=None, tensor_merge=None)
    vars(made["mamba_ssm.ops.triton.layernorm_gated"]).update(RMSNorm=GroupNorm)
    vars(made["mamba_ssm.ops.triton.ssd_combined"]).update(
        mamba_chunk_scan_combined=None, mamba_split_conv1d_scan_combined=convolve_and_scan
    )
    vars(made["mamba_ssm.ops.triton.selective_state_update"]).update(selective_state_update=None)
    sys.modules |= made


class GroupNorm(torch.nn.Module):
    """RMSNorm of groups of elements, behind the gate."""

    def __init__(
        self, size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any
    ):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps, self.groups = eps, size // group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (self.groups, -1))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * groups.flatten(-2)


class Duplicated(torch.nn.Linear):
    """A linear that every rank has whole, in the place of Transformer Engine's around experts of a latent size."""

    def __init__(self, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__(inputs, outputs, bias=options["bias"])

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def convolve_and_scan(
    packed: torch.Tensor, conv: torch.Tensor, bias: torch.Tensor, dt_bias: torch.Tensor, a: torch.Tensor,
    *, headdim: int, ngroups: int, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """The state space of Mamba-2 by its definition, one token after another: (batch, tokens, z x B C dt) -> y."""
    heads, tokens = dt_bias.numel(), packed.shape[1]
    inner = heads * headdim
    z, scanned, dt = packed.split([inner, conv.shape[0], heads], -1)
    padded = torch.nn.functional.pad(scanned.transpose(1, 2), (conv.shape[1] - 1, 0))
    scanned = torch.nn.functional.conv1d(padded, conv[:, None], bias, groups=conv.shape[0]).transpose(1, 2)
    x, into, out = torch.nn.functional.silu(scanned).split([inner, *[(conv.shape[0] - inner) // 2] * 2], -1)
    x = x.unflatten(-1, (heads, headdim))
    into, out = (
        part.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for part in (into, out)
    )
    dt = torch.nn.functional.softplus(dt + dt_bias)
    state, rows = torch.zeros(*x[:, 0].shape, into.shape[-1]), []
    for t in range(tokens):
        step = dt[:, t, :, None, None]
        state = state * (step * a[:, None, None]).exp() + step * x[:, t, :, :, None] * into[:, t, :, None]
        rows.append((state * out[:, t, :, None]).sum(-1) + rest["D"][:, None] * x[:, t])
    return torch.stack(rows, 1).flatten(-2) * torch.nn.functional.silu(z)


def hybrid_model(config: Any, args: dict[str, Any]) -> Any:
    """The MambaModel of these args with local modules in place of Transformer Engine's.

    A fused norm and linear are one module here too, so that names are those of a checkpoint.
    """
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.mamba import MambaModel
    from megatron.core.models.mamba import mamba_layer_specs as specs
    from megatron.core.ssm import mamba_block
    from megatron.core.transformer.moe import moe_layer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    local = LocalSpecProvider()
    linear, row = local.column_parallel_linear(), local.row_parallel_linear()

    class NormLinear(linear):  # type: ignore[misc, valid-type]
        def __init__(self, size: int, *rest: Any, **options: Any) -> None:
            super().__init__(size, *rest, **options)
            self.layer_norm_weight = torch.nn.Parameter(torch.empty(size))

        def forward(self, x: torch.Tensor) -> Any:
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon)
            return super().forward(x * scale * self.layer_norm_weight)

    mamba_block.TENorm = WrappedTorchNorm
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Duplicated
    spec = specs.mamba_stack_spec
    layers = spec.submodules
    layers.mamba_layer.submodules.mixer.submodules.in_proj = NormLinear
    layers.mamba_layer.submodules.mixer.submodules.out_proj = row
    attention = layers.attention_layer.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = NormLinear, row
    attention.core_attention = local.core_attention()
    mlp = layers.mlp_layer.submodules.mlp.submodules
    mlp.linear_fc1, mlp.linear_fc2 = NormLinear, row
    experts = layers.moe_layer.submodules
    experts.pre_mlp_layernorm = WrappedTorchNorm
    experts.mlp = specs.get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    return MambaModel(
        config,
        spec,
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        hybrid_override_pattern=args["hybrid_override_pattern"],
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    ).eval()
