"""The Megatron-LM args of a checkpoint that is made from Hugging Face weights."""

from __future__ import annotations

from typing import Any

from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.config.recurrent_args import written_recurrent
from ckpt_tools.megatron.huggingface.config.rope_args import rope_args
from ckpt_tools.megatron.huggingface.config.sparse_attention import sparse_attention_args

OF_MLA = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def megatron_args(model: ModelArgs) -> dict[str, Any]:
    """The architecture as Megatron-LM args of every version, for a checkpoint made from Hugging Face weights.

    `params_dtype` is a name, as everywhere in this tool; who pickles it makes it a torch dtype.
    """
    rope = model.rope_scaling[0] or {}
    dtype = model.params_dtype or "bfloat16"
    gelu = model.activation == "gelu"
    args: dict[str, Any] = {
        name: getattr(model, name)
        for name in ModelArgs.__dataclass_fields__
        if name not in _NOT_MEGATRON
        and not name.startswith(("linear_", "mamba_"))
        and not (name.startswith("moe_") and not model.num_experts)
        and not (name.startswith("dsa_") and not model.dsa_indexer_n_heads)
        and not (name in OF_MLA and not model.multi_latent_attention)
    }
    args |= {
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "seq_length": model.max_position_embeddings,
        "untie_embeddings_and_output_weights": not model.tied,
        "norm_epsilon": model.layernorm_epsilon,
        "apply_layernorm_1p": model.zero_centered_gamma,
        "layernorm_zero_centered_gamma": model.zero_centered_gamma,
        "swiglu": model.activation == "swiglu",
        "quick_geglu": model.activation == "quick_geglu",
        "squared_relu": model.activation == "squared_relu",
        "bias_gelu_fusion": gelu and model.add_bias_linear,
        "use_te_activation_func": gelu and not model.add_bias_linear and not model.hybrid_pattern,
        "add_qkv_bias": model.add_qkv_bias or model.add_bias_linear,
        "add_position_embedding": True,  # also for rope, as every job without --no-position-embedding
        "use_rotary_position_embeddings": model.position_embedding_type == "rope",
        "apply_query_key_layer_scaling": False,
        "params_dtype": dtype,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "window_size": (model.sliding_window - 1, 0) if model.sliding_window else None,
        "window_attn_skip_freq": list(model.sliding_layers) if 0 in model.sliding_layers else None,
        "mtp_num_layers": model.mtp_num_layers or None,
        "ckpt_format": "torch_dist",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
    }
    if model.activation_clamp is not None:
        args |= {"activation_func_clamp_value": model.activation_clamp}
    if model.no_rope_layers:
        args["no_rope_freq"] = list(model.no_rope_layers)
    if model.activation == "geglu":  # Megatron-LM has no option for it; these are Bridge's names
        args |= {"gated_linear_unit": True, "activation_func": "megatron.core.activations.fast_gelu"}
    args |= _gemma_args(model) | sparse_attention_args(model) | written_recurrent(model)
    if model.num_experts:
        every = all(model.moe_layers)
        args |= {"moe_layer_freq": 1 if every else list(model.moe_layers), "moe_grouped_gemm": True}
    own = {name: list(value) if isinstance(value, tuple) else value for name, value in model.own.items()}
    return args | rope_args(rope, model.multi_latent_attention) | own


def _gemma_args(model: ModelArgs) -> dict[str, Any]:
    """What only Bridge has names for, where the model has it."""
    args: dict[str, Any] = {
        name: value
        for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
        if (value := getattr(model, name)) is not None
    }
    if model.sliding_pattern is not None:
        args["interleaved_attn_pattern"] = [model.sliding_pattern - 1, 1]
    if model.rotary_base_local is not None:
        args["rotary_base"] = [model.rotary_base_local, model.rotary_base]
        linear = model.rope_scaling[0]
        args |= {
            "rope_scaling_factor": linear["factor"] if linear and linear["rope_type"] == "linear" else 1.0
        }
    return args


_NOT_MEGATRON = frozenset(
    ("tied", "zero_centered_gamma", "activation", "activation_clamp", "rope_scaling", "sliding_window",
     "sliding_layers", "sliding_pattern", "rotary_base_local", "query_pre_attn_scalar", "attn_logit_softcapping",
     "final_logit_softcapping", "moe_layers", "no_rope_layers", "glu_interleave", "yarn_told", "moe_latent_size",
     "attention_output_gate", "linear_layers", "hybrid_pattern", "indexer_layers", "own")
)  # fmt: skip
