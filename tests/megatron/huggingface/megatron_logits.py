"""Run by a test in its own process: logits of real megatron-core GPTModels on a CPU, from our parameters.

    python -m tests.megatron.huggingface.megatron_logits FOLDER      (megatron-core 0.16.1 on PYTHONPATH)

For every `<name>.json` (args) in FOLDER it loads the torch_dist checkpoint `<name>/release` with Megatron's own
`dist_checkpointing`, or else `<name>.npz` (parameters under torch_dist names), and writes `<name>.out.npz`:
`logits`, and `keys`: what the model's own `sharded_state_dict` calls its tensors.
Everything that wants a GPU is replaced: streams, RNG trackers, Transformer Engine's router kernel.
"""

import contextlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.megatron.huggingface.megatron_hybrids import (
    hybrid_model,
    joined_parts,
    provide_mamba,
    with_delta_nets,
)

OVER_HEADS = ("minimax_m2", "olmoe")


def without_gpu() -> None:
    """What megatron-core asks of a GPU, as no-ops."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    class Nothing:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.current_stream = lambda *args: Nothing()
    torch.cuda.stream = lambda *args: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    ones = torch.ones
    torch.ones = lambda *args, **kwargs: ones(*args, **{k: v for k, v in kwargs.items() if k != "device"})

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel()
    modules: list[Any] = [random, tensor_parallel]
    modules += [m for m in sys.modules.values() if getattr(m, "__name__", "").startswith("megatron.")]
    for module in modules:
        if hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *args, **kwargs: Tracker()


class Tracker:
    """An RNG tracker that tracks nothing: nothing here is drawn."""

    def fork(self, *args: Any) -> Any:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


def transformer_config(args: dict[str, Any]) -> Any:
    """Megatron's config for these args, every fusion switched off."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from torch.nn import functional

    mla = args["multi_latent_attention"]
    kind = MLATransformerConfig if mla else TransformerConfig
    known = {
        name: args[name]
        for name in kind.__dataclass_fields__
        if name in args and name not in ("params_dtype",)
    }
    known |= {"num_moe_experts": args["num_experts"], "params_dtype": torch.float32, "bf16": False,
              "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_activation_fusion": False,
              "masked_softmax_fusion": False, "persist_layer_norm": False, "apply_rope_fusion": False,
              "bias_dropout_fusion": False, "moe_grouped_gemm": False, "use_cpu_initialization": True,
              "gradient_accumulation_fusion": False, "perform_initialization": False,
              "deterministic_mode": True, "activation_func": functional.silu, "gated_linear_unit": True}  # fmt: skip
    if args["num_experts"]:
        known |= {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none",
                  "moe_layer_freq": args["moe_layer_freq"]}  # fmt: skip
    if args.get("quick_geglu"):
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        known |= {"activation_func": quick_gelu}
    if args.get("gated_linear_unit") and not args["swiglu"]:
        known |= {"activation_func": lambda x: functional.gelu(x, approximate="tanh")}
    if args["squared_relu"]:
        known |= {"activation_func": lambda x: functional.relu(x).square(), "gated_linear_unit": False}
    elif not (args["swiglu"] or args.get("quick_geglu") or args.get("gated_linear_unit")):
        form = (
            "tanh" if args["bias_gelu_fusion"] else "none"
        )  # what Megatron's fused kernel computes, and its plain one
        known |= {
            "activation_func": lambda x: functional.gelu(x, approximate=form),
            "gated_linear_unit": False,
        }
    if args.get("squared_relu"):
        from megatron.core.activations import squared_relu

        known |= {"activation_func": squared_relu}
    config = kind(**known)
    if mla:
        config.rotary_base, config.rotary_percent = args["rotary_base"], 1.0
    if args["position_embedding_type"] == "yarn":  # no config fields in 0.16: GPTModel reads these attributes
        yarn = {name: args[name] for name in args if name.startswith("yarn_")}
        yarn |= {"yarn_rotary_scaling_factor": args["rotary_scaling_factor"], "yarn_mscale": None,
                 "yarn_mscale_all_dim": None}  # fmt: skip
        vars(config).update(yarn)
    return config


def build(args: dict[str, Any]) -> Any:
    """The GPTModel of these args, local layer spec."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    config = transformer_config(args)
    if args.get("hybrid_override_pattern"):
        return hybrid_model(config, args)
    if config.num_moe_experts or args.get("linear_attention_freq"):
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args["normalization"], qk_l2_norm=False
        )
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            None, None, args["qk_layernorm"], args["multi_latent_attention"],
            normalization=args["normalization"],
        )  # fmt: skip
    for layer in getattr(spec, "layer_specs", ()):
        with_modules_of_others(layer.submodules.self_attention.submodules, args)
    if args.get("linear_attention_freq"):
        spec = with_delta_nets(spec, args)
    return GPTModel(
        config,
        spec,
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type=args["position_embedding_type"],
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        rope_scaling=args.get("use_rope_scaling", False),
        rope_scaling_factor=args.get("rope_scaling_factor", 8.0),
        seq_len_interpolation_factor=args.get("rotary_seq_len_interpolation_factor"),
        parallel_output=False,
    ).eval()


def with_modules_of_others(attention: Any, args: dict[str, Any]) -> None:
    """The attention of sparse layers, and norms over all heads, which are modules of Megatron-Bridge."""
    if args.get("experimental_attention_variant") == "dsa":
        attention.core_attention = sparse_attention(args["dsa_indexer_rope_interleaved"])
    if args["num_experts"] and args["qk_layernorm"] and args["name"].startswith(OVER_HEADS):
        attention.q_layernorm = over_heads(args["num_attention_heads"])
        attention.k_layernorm = over_heads(args["num_query_groups"])


def sparse_attention(interleaved: bool) -> Any:
    """DSA of 0.16.1, whose indexer rotates what core 0.19 does (#3026): the first part of each head.

    The transform that queries and keys go through alike is left out: it wants a GPU and changes no product of them.
    """
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.spec_utils import ModuleSpec

    def rotate(indexer: Any, x: torch.Tensor, rotary: torch.Tensor, mscale: float) -> torch.Tensor:
        return _apply_rotary_pos_emb_bshd(x, rotary, multi_latent_attention=interleaved, mscale=mscale)

    dsa.rotate_activation = lambda x: x
    dsa.DSAIndexer._apply_rope = rotate
    indexer = dsa.DSAIndexerSubmodules(Linear, Linear, LayerNorm, Linear)
    inner = ModuleSpec(module=dsa.DSAIndexer, submodules=indexer)
    return ModuleSpec(module=dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer=inner))


class Linear(torch.nn.Linear):
    """Transformer Engine's linear, which the local modules have no like of."""

    def __init__(self, rows: int, columns: int, **options: Any) -> None:
        super().__init__(rows, columns, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class LayerNorm(torch.nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=1e-6)  # dsa_indexer_k_norm_epsilon, which core 0.19 has


def over_heads(heads: int) -> Any:
    """A norm of all heads at once."""

    class OverHeads(torch.nn.RMSNorm):
        def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
            super().__init__(heads * hidden_size, eps=eps)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(2)).view(x.shape)

    return OverHeads


def live(name: str, names: set[str]) -> str:
    """A torch_dist name as the local layer spec's modules spell it."""
    name = re.sub(r"\.experts\.experts\.(\d+)\.", r".experts.local_experts.\1.", name)
    for fused, module in (
        ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
        ("self_attention.in_proj.layer_norm_", "input_layernorm."),
        ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
        ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
        ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
    ):
        if name not in names:
            name = name.replace(fused, module)
    return name


def main(folder: Path) -> None:
    provide_mamba()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import apply_factories

    without_gpu()
    prepare_mla_and_moe()
    tokens = (torch.arange(2 * 24).reshape(2, 24) * 7) % 97
    for path in sorted(folder.glob("*.json")):
        args = json.loads(path.read_text()) | {"name": path.stem}
        parameters = dict(np.load(path.with_suffix(".npz")))
        if args[
            "layernorm_zero_centered_gamma"
        ]:  # local norms cannot; the same function, stored as 1 + weight
            args["layernorm_zero_centered_gamma"] = False
            parameters = {name: array + norm_weight(name) for name, array in parameters.items()}
        model = build(args)
        if (folder / path.stem).is_dir():
            loaded = dist_checkpointing.load(
                {"model": model.sharded_state_dict()}, str(folder / path.stem / "release")
            )
            model.load_state_dict(loaded["model"], strict=True)
        else:
            own = model.state_dict()
            names = {name for name in own if not name.endswith("_extra_state")}
            parameters = joined_parts(model, parameters)
            given = {live(name, names): torch.from_numpy(array) for name, array in parameters.items()}
            model.load_state_dict({**{k: v for k, v in own.items() if k not in names}, **given}, strict=True)
        hook(model, args)
        positions = torch.arange(24).expand(2, 24)
        mask = torch.ones(1, 1, 24, 24).triu(1).bool()
        with torch.no_grad():
            logits = model(tokens, positions, mask)
        state = model.sharded_state_dict()
        apply_factories(state)
        keys = sorted({key for key in flat_keys(state) if not key.endswith("_extra_state")})
        np.savez(path.with_suffix(".out.npz"), logits=logits.numpy(), keys=np.array(keys))


def norm_weight(name: str) -> bool:
    return bool(re.search(r"norm_?\.?weight$", name))


def flat_keys(state: Any) -> list[str]:
    """The keys of all sharded tensors below a state dict."""
    if isinstance(state, dict):
        return [key for value in state.values() for key in flat_keys(value)]
    if isinstance(state, list):
        return [key for value in state for key in flat_keys(value)]
    return [state.key] if hasattr(state, "key") and hasattr(state, "global_shape") else []


def hook(model: Any, args: dict[str, Any]) -> None:
    """Gemma scales its embeddings at run time, in a Bridge module that plain megatron-core lacks."""
    if args.get("gated_linear_unit"):
        model.embedding.register_forward_hook(lambda module, inputs, out: out * args["hidden_size"] ** 0.5)


def prepare_mla_and_moe() -> None:
    """Transformer Engine's place in MLA and in the router, and its extra arguments, without it."""
    from megatron.core.transformer import dot_product_attention, multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    multi_latent_attention.TELinear = type("TELinear", (), {})
    plain = dot_product_attention.DotProductAttention.__init__

    def init(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **rest: Any
    ) -> None:
        plain(self, *args, **rest)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.config.num_attention_heads

    dot_product_attention.DotProductAttention.__init__ = init


if __name__ == "__main__":
    main(Path(sys.argv[1]))
