"""The fields of config.json that say what `ModelArgs` says, per family: one table for reading and writing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from ckpt_tools.megatron.huggingface import field_values as values
from ckpt_tools.megatron.huggingface.field_values import Config
from ckpt_tools.megatron.huggingface.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.rope_args import read_rope

REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class Field:
    """config.json's `hf` is `ModelArgs.arg`; `write` and `read` translate the value.

    `default` is what the transformers class takes when the key is absent: a value, or a function of the config.
    `wins` says whose value stands where checkpoint and reference config differ; "" refuses, and so does "either"
    unless one of them does not know (None). `also` is another spelling of `hf` that readers accept.
    """

    hf: str
    arg: str
    default: Any = REQUIRED
    write: Callable[[Any, ModelArgs], Any] = lambda value, model: value
    read: Callable[[Any, Config], Any] = lambda value, config: value
    wins: Literal["", "either", "reference", "checkpoint"] = ""
    also: str | None = None


def _defaults(fields: Sequence[Field], **values: Any) -> tuple[Field, ...]:
    """The fields with the defaults of this family's class (transformers 4.57 and 5.24), where Llama's has others."""
    return tuple(replace(one, default=values.get(one.hf, one.default)) for one in fields)


VOCAB = Field("vocab_size", "vocab_size", wins="checkpoint")
DTYPE = Field("torch_dtype", "params_dtype", None, read=values.dtype_name, wins="reference")
STD = Field("initializer_range", "init_method_std", 0.02, values.as_float, wins="reference")
SIZE = (
    VOCAB,
    Field("hidden_size", "hidden_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("max_position_embeddings", "max_position_embeddings", wins="reference"),
    STD,
    DTYPE,
)
GROUPS = Field(
    "num_key_value_heads",
    "num_query_groups",
    values.heads,
    read=lambda value, config: value or values.heads(config),
)
HEAD_DIM = Field(
    "head_dim", "kv_channels", values.head_dim, read=lambda value, config: value or values.head_dim(config)
)
FFN = Field("intermediate_size", "ffn_hidden_size")
ROPE = (
    Field("rms_norm_eps", "layernorm_epsilon", 1e-6, values.as_float),
    Field("rope_theta", "rotary_base", 10000.0, values.as_float),
    Field("rope_scaling", "rope_scaling", None, values.write_rope, read_rope),
)
UNTIED = Field("tie_word_embeddings", "tied", False)
TIED = Field("tie_word_embeddings", "tied", True)
SQUARE = Field("num_attention_heads", "num_attention_heads", write=values.square_heads)
ATTENTION = (*SIZE, GROUPS, *ROPE, UNTIED)
TOP_K = Field("num_experts_per_tok", "moe_router_topk")
NORM_TOP_K = Field("norm_topk_prob", "moe_router_pre_softmax", False, values.negated, values.negated)
EXPERTS = (
    Field("num_experts", "num_experts", also="num_local_experts"),
    TOP_K,
    Field("moe_intermediate_size", "moe_ffn_hidden_size"),
    NORM_TOP_K,
    Field("mlp_only_layers", "moe_layers", (), values.write_dense, values.read_dense),
    Field("decoder_sparse_step", "moe_layers", 1, lambda moe, model: 1, values.read_step),
)

LLAMA = (
    *ATTENTION,
    HEAD_DIM,
    FFN,
    Field("attention_bias", "add_bias_linear", False),
    Field("mlp_bias", "add_bias_linear", False),
)
MISTRAL = _defaults(
    (*ATTENTION, HEAD_DIM, FFN, Field("sliding_window", "sliding_window", 4096)), num_key_value_heads=8
)
QWEN2 = _defaults((*ATTENTION, FFN, SQUARE), num_key_value_heads=32)
QWEN3 = _defaults((*ATTENTION, HEAD_DIM, FFN), num_key_value_heads=32, head_dim=128)
QWEN2_MOE = _defaults(
    (
        *ATTENTION,
        FFN,
        SQUARE,
        *EXPERTS,
        Field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    ),
    num_key_value_heads=16,
)
QWEN3_MOE = _defaults((*ATTENTION, HEAD_DIM, FFN, *EXPERTS), num_key_value_heads=4)
MIXTRAL = _defaults(
    (
        *ATTENTION,
        HEAD_DIM,
        Field("intermediate_size", "moe_ffn_hidden_size"),
        Field("num_local_experts", "num_experts"),
        TOP_K,
    ),
    num_key_value_heads=8,
    rope_theta=1e6,
    rms_norm_eps=1e-5,
)
PARTIAL_ROPE = Field("partial_rotary_factor", "rotary_percent", 1.0, values.as_float)
MLA = (
    Field("q_lora_rank", "q_lora_rank", None),
    Field("kv_lora_rank", "kv_lora_rank"),
    Field("qk_nope_head_dim", "qk_head_dim"),
    Field("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    Field("v_head_dim", "v_head_dim"),
)
ROUTED = (
    Field("n_routed_experts", "num_experts", also="num_local_experts"),
    TOP_K,
    Field("moe_intermediate_size", "moe_ffn_hidden_size"),
    Field(
        "n_shared_experts",
        "moe_shared_expert_intermediate_size",
        None,
        values.write_shared,
        values.read_shared,
    ),
    Field("first_k_dense_replace", "moe_layers", 0, values.write_leading_dense, values.read_leading_dense),
    Field("n_group", "moe_router_num_groups", None, values.one_for_none, values.none_for_one),
    Field("topk_group", "moe_router_group_topk", None, values.one_for_none, values.read_group_topk),
    Field(
        "routed_scaling_factor",
        "moe_router_topk_scaling_factor",
        1.0,
        values.write_scale,
        values.none_for_one,
    ),
)
SIGMOID_ROUTED = (
    *ROUTED,
    Field("norm_topk_prob", "moe_router_topk", True, lambda topk, model: topk > 1, values.read_sum_to_one),
    Field("num_nextn_predict_layers", "mtp_num_layers", 0, wins="checkpoint"),
)
DEEPSEEK = (*SIZE, GROUPS, *ROPE, UNTIED, FFN, *MLA)
DEEPSEEK_V2 = _defaults(
    (
        *DEEPSEEK,
        *ROUTED,
        Field("topk_method", "moe_router_num_groups", "greedy", values.write_greedy, values.read_greedy),
    ),
    q_lora_rank=1536,
    n_shared_experts=2,
)
DEEPSEEK_V3 = _defaults(
    (*DEEPSEEK, *SIGMOID_ROUTED),
    q_lora_rank=1536,
    n_shared_experts=1,
    first_k_dense_replace=3,
    routed_scaling_factor=2.5,
)
SMOLLM3 = _defaults(
    (
        *LLAMA,
        Field("no_rope_layers", "no_rope_layers", None, values.write_rotated, values.read_rotated),
        Field(
            "no_rope_layer_interval", "no_rope_layers", 4, lambda layers, model: 4, values.read_rope_interval
        ),
    ),
    num_key_value_heads=4,
    rope_theta=2e6,
    tie_word_embeddings=True,
)
SEED_OSS = _defaults(
    (*ATTENTION, HEAD_DIM, FFN, Field("attention_bias", "add_qkv_bias", True)),
    num_key_value_heads=8,
    head_dim=128,
)
ERNIE = _defaults(
    (*ATTENTION, HEAD_DIM, FFN, Field("use_bias", "add_bias_linear", False)),
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tie_word_embeddings=True,
)
PHI3 = _defaults(
    (*ATTENTION, HEAD_DIM, FFN, PARTIAL_ROPE, Field("sliding_window", "sliding_window", None)),
    rms_norm_eps=1e-5,
)
GLM4_MOE = _defaults(
    (
        *ATTENTION,
        HEAD_DIM,
        FFN,
        PARTIAL_ROPE,
        Field("attention_bias", "add_qkv_bias", False),
        Field("use_qk_norm", "qk_layernorm", False),
        *(one for one in SIGMOID_ROUTED if one.hf != "n_shared_experts"),
        Field(
            "n_shared_experts",
            "moe_shared_expert_intermediate_size",
            1,
            values.write_some_shared,
            values.read_shared,
        ),
    ),
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    partial_rotary_factor=0.5,
    first_k_dense_replace=1,
)
GPT_OSS = _defaults(
    (
        *ATTENTION,
        HEAD_DIM,
        Field("intermediate_size", "moe_ffn_hidden_size"),
        Field("num_local_experts", "num_experts"),
        TOP_K,
        Field("sliding_window", "sliding_window"),
        Field(
            "layer_types",
            "sliding_layers",
            values.every_second,
            values.write_layer_types,
            values.read_layer_types,
        ),
        Field("swiglu_limit", "activation_clamp", 7.0, values.clamp),
    ),
    num_key_value_heads=8,
    head_dim=64,
    rope_theta=150000.0,
    rms_norm_eps=1e-5,
)
GEMMA = _defaults((*SIZE, GROUPS, *ROPE, TIED, HEAD_DIM, FFN), num_key_value_heads=16, head_dim=256)
GEMMA2 = _defaults(
    (
        *GEMMA,
        Field("query_pre_attn_scalar", "query_pre_attn_scalar", None, values.as_whole, wins="either"),
        Field("sliding_window", "sliding_window", None, wins="either"),
        Field("attn_logit_softcapping", "attn_logit_softcapping", None, wins="either"),
        Field("final_logit_softcapping", "final_logit_softcapping", None, wins="either"),
    ),
    num_key_value_heads=4,
    head_dim=256,
)
GEMMA3 = _defaults(
    (
        *GEMMA2[:-2],
        Field("rope_local_base_freq", "rotary_base_local", None, values.as_float, wins="either"),
        Field("sliding_window_pattern", "sliding_pattern", 6, wins="either", also="_sliding_window_pattern"),
    ),
    num_key_value_heads=4,
    head_dim=256,
    rope_theta=1e6,
)
GPT2 = (
    VOCAB,
    Field("n_embd", "hidden_size"),
    Field("n_layer", "num_layers"),
    Field("n_head", "num_attention_heads", write=values.square_heads),
    Field("n_positions", "max_position_embeddings"),
    Field("n_inner", "ffn_hidden_size", None, read=lambda value, config: value or 4 * config["n_embd"]),
    Field("layer_norm_epsilon", "layernorm_epsilon", 1e-5, values.as_float),
    Field("activation_function", "activation", "gelu_new", values.write_gelu, values.read_gelu),
    Field("attn_pdrop", "attention_dropout", 0.1, values.as_float, wins="reference"),
    Field("resid_pdrop", "hidden_dropout", 0.1, values.as_float, wins="reference"),
    TIED,
    STD,
    DTYPE,
)
