"""The fields of config.json that say what `ModelArgs` says, per family: one table for reading and writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.layer_patterns import no_rope_layers
from ckpt_tools.megatron.huggingface.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.rope_args import read_rope

REQUIRED: Final = object()
Config: TypeAlias = Mapping[str, Any]


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


def _write_rope(candidates: Sequence[Any], model: ModelArgs) -> Any:
    if len(candidates) != 1:
        raise MappingError(
            "rope_scaling: Megatron-LM ignored this option in many versions, so the args do not tell whether the "
            f"model was trained with {' or '.join(map(str, candidates))}; pass --hf-config with the right one"
        )
    return candidates[0]


def _read_dense(dense: Sequence[int], config: Config) -> tuple[int, ...]:
    step = config.get("decoder_sparse_step", 1)
    layers = range(config["num_hidden_layers"])
    return tuple(int(layer not in (dense or ()) and (layer + 1) % step == 0) for layer in layers)


def _read_step(step: int, config: Config) -> tuple[int, ...]:
    return _read_dense(config.get("mlp_only_layers", ()), config)


def _write_dense(moe: Sequence[int], model: ModelArgs) -> list[int]:
    return [layer for layer, one in enumerate(moe) if not one]


def _write_leading_dense(moe: Sequence[int], model: ModelArgs) -> int:
    dense = model.num_layers - sum(moe)
    if any(moe[:dense]):
        raise MappingError(
            f"moe_layer_freq {list(moe)}: DeepSeek has dense layers first and MoE layers after them"
        )
    return dense


def _read_leading_dense(dense: int, config: Config) -> tuple[int, ...]:
    layers = int(config["num_hidden_layers"])
    if config.get("moe_layer_freq", 1) != 1:
        raise MappingError(f"moe_layer_freq {config['moe_layer_freq']} is not supported")
    return (0,) * min(dense, layers) + (1,) * (layers - dense)


def _write_layer_types(sliding: Sequence[int], model: ModelArgs) -> list[str]:
    return ["sliding_attention" if one else "full_attention" for one in sliding or (0,) * model.num_layers]


def _read_layer_types(types: Sequence[str], config: Config) -> tuple[int, ...]:
    return tuple(int(one == "sliding_attention") for one in types)


def _write_rotated(without: Sequence[int], model: ModelArgs) -> list[int]:
    """`no_rope_layers` of a config.json has 1 for the layers that do rotate."""
    return [1 - one for one in without or (0,) * model.num_layers]


def _read_rotated(rotated: Sequence[int] | None, config: Config) -> tuple[int, ...]:
    layers = int(config["num_hidden_layers"])
    if rotated is None:
        return no_rope_layers(config.get("no_rope_layer_interval", 4), layers, even=False)
    if (
        not isinstance(rotated, list | tuple)
        or len(rotated) != layers
        or any(one not in (0, 1) for one in rotated)
    ):
        raise MappingError(f"expected 0 or 1 for each of {layers} layers, found {str(rotated)[:60]}")
    return no_rope_layers([1 - one for one in rotated], layers)


def _read_rope_interval(interval: int, config: Config) -> tuple[int, ...]:
    return _read_rotated(config.get("no_rope_layers"), config)


def _every_second(config: Config) -> list[str]:
    """GPT-OSS without `layer_types` begins with a sliding layer and alternates."""
    return [("full_attention" if i % 2 else "sliding_attention") for i in range(config["num_hidden_layers"])]


def _one_for_none(value: Any, model: ModelArgs) -> Any:
    return 1 if value is None else value


def _write_greedy(groups: int | None, model: ModelArgs) -> str:
    return "group_limited_greedy" if groups else "greedy"


def _read_greedy(method: str, config: Config) -> int | None:
    if method == "greedy":
        return None
    if method != "group_limited_greedy":
        raise MappingError(f"{method!r} is not a way of routing that Megatron knows")
    groups: int | None = _none_for_one(config.get("n_group"), config)
    return groups


def _read_group_topk(value: int | None, config: Config) -> int | None:
    """One group of several is a choice; one of one leaves nothing to choose."""
    return None if config.get("n_group") in (None, 1) else value


def _read_sum_to_one(value: bool, config: Config) -> int:
    """Megatron makes the weights of several experts sum to one, and keeps the sigmoid of a single one."""
    topk = int(config["num_experts_per_tok"])
    if bool(value) != (topk > 1):
        raise MappingError(f"Megatron computes as with {topk > 1} where num_experts_per_tok is {topk}")
    return topk


def _write_scale(value: float | None, model: ModelArgs) -> float:
    return 1.0 if value is None else float(value)


def _float(value: Any, model: ModelArgs) -> float:
    """transformers 5 refuses an int where it expects a float; Megatron's rotary_base is an int."""
    return float(value)


def _whole(value: float, model: ModelArgs) -> float:
    """transformers 5 refuses a float where it expects an int."""
    return int(value) if value == int(value) else value


def _none_for_one(value: Any, config: Config) -> Any:
    return None if value in (None, 1, 1.0) else value


def _write_shared(size: int | None, model: ModelArgs) -> int | None:
    count, rest = divmod(size or 0, model.moe_ffn_hidden_size)
    if rest:
        raise MappingError(
            f"a shared expert of {size} is not a multiple of the experts' {model.moe_ffn_hidden_size}"
        )
    return count or None


def _read_shared(count: int | None, config: Config) -> int | None:
    return count * int(config["moe_intermediate_size"]) if count else None


def _heads(config: Config) -> int:
    return int(config["num_attention_heads"])


def _head_dim(config: Config) -> int:
    return int(config["hidden_size"]) // _heads(config)


def _dtype(value: Any, config: Config) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _number(value: float | None, model: ModelArgs) -> float:
    if value is None:
        raise MappingError(
            "activation_func_clamp_value is not set, and the config.json of GPT-OSS must have swiglu_limit"
        )
    return value


def _write_gelu(activation: str, model: ModelArgs) -> str:
    if activation not in GELU.values():
        raise MappingError(f"activation is {activation!r}; GPT-2 has {' or '.join(GELU.values())}")
    return next(name for name, value in GELU.items() if value == activation)


def _read_gelu(name: str, config: Config) -> str:
    if name not in GELU:
        raise MappingError(f"{name!r} is not one of {', '.join(GELU)}")
    return GELU[name]


def _square(heads: int, model: ModelArgs) -> int:
    """The number of heads, where config.json has no field for their size."""
    if heads * model.kv_channels != model.hidden_size:
        raise MappingError(
            f"{heads} heads of {model.kv_channels} are not hidden_size {model.hidden_size}: the config.json of this "
            "architecture cannot say that"
        )
    return heads


def _not(value: Any, _: Any) -> bool:
    return not value


def _defaults(fields: Sequence[Field], **values: Any) -> tuple[Field, ...]:
    """The fields with the defaults of this family's class (transformers 4.57 and 5.24), where Llama's has others."""
    return tuple(replace(one, default=values.get(one.hf, one.default)) for one in fields)


# Megatron's fused GELU is the approximation by tanh.
GELU = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}
VOCAB = Field("vocab_size", "vocab_size", wins="checkpoint")
DTYPE = Field("torch_dtype", "params_dtype", None, read=_dtype, wins="reference")
STD = Field("initializer_range", "init_method_std", 0.02, _float, wins="reference")
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
    "num_key_value_heads", "num_query_groups", _heads, read=lambda value, config: value or _heads(config)
)
HEAD_DIM = Field("head_dim", "kv_channels", _head_dim, read=lambda value, config: value or _head_dim(config))
FFN = Field("intermediate_size", "ffn_hidden_size")
ROPE = (
    Field("rms_norm_eps", "layernorm_epsilon", 1e-6, _float),
    Field("rope_theta", "rotary_base", 10000.0, _float),
    Field("rope_scaling", "rope_scaling", None, _write_rope, read_rope),
)
UNTIED = Field("tie_word_embeddings", "tied", False)
TIED = Field("tie_word_embeddings", "tied", True)
SQUARE = Field("num_attention_heads", "num_attention_heads", write=_square)
ATTENTION = (*SIZE, GROUPS, *ROPE, UNTIED)
TOP_K = Field("num_experts_per_tok", "moe_router_topk")
NORM_TOP_K = Field("norm_topk_prob", "moe_router_pre_softmax", False, _not, _not)
EXPERTS = (
    Field("num_experts", "num_experts", also="num_local_experts"),
    TOP_K,
    Field("moe_intermediate_size", "moe_ffn_hidden_size"),
    NORM_TOP_K,
    Field("mlp_only_layers", "moe_layers", (), _write_dense, _read_dense),
    Field("decoder_sparse_step", "moe_layers", 1, lambda moe, model: 1, _read_step),
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
PARTIAL_ROPE = Field("partial_rotary_factor", "rotary_percent", 1.0, _float)
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
    Field("n_shared_experts", "moe_shared_expert_intermediate_size", None, _write_shared, _read_shared),
    Field("first_k_dense_replace", "moe_layers", 0, _write_leading_dense, _read_leading_dense),
    Field("n_group", "moe_router_num_groups", None, _one_for_none, _none_for_one),
    Field("topk_group", "moe_router_group_topk", None, _one_for_none, _read_group_topk),
    Field("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0, _write_scale, _none_for_one),
)
SIGMOID_ROUTED = (
    *ROUTED,
    Field("norm_topk_prob", "moe_router_topk", True, lambda topk, model: topk > 1, _read_sum_to_one),
    Field("num_nextn_predict_layers", "mtp_num_layers", 0, wins="checkpoint"),
)
DEEPSEEK = (*SIZE, GROUPS, *ROPE, UNTIED, FFN, *MLA)
DEEPSEEK_V2 = _defaults(
    (
        *DEEPSEEK,
        *ROUTED,
        Field("topk_method", "moe_router_num_groups", "greedy", _write_greedy, _read_greedy),
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
        Field("no_rope_layers", "no_rope_layers", None, _write_rotated, _read_rotated),
        Field("no_rope_layer_interval", "no_rope_layers", 4, lambda layers, model: 4, _read_rope_interval),
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
        *SIGMOID_ROUTED,
    ),
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    partial_rotary_factor=0.5,
    n_shared_experts=1,
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
        Field("layer_types", "sliding_layers", _every_second, _write_layer_types, _read_layer_types),
        Field("swiglu_limit", "activation_clamp", 7.0, _number),
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
        Field("query_pre_attn_scalar", "query_pre_attn_scalar", None, _whole, wins="either"),
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
        Field("rope_local_base_freq", "rotary_base_local", None, _float, wins="either"),
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
    Field("n_head", "num_attention_heads", write=_square),
    Field("n_positions", "max_position_embeddings"),
    Field("n_inner", "ffn_hidden_size", None, read=lambda value, config: value or 4 * config["n_embd"]),
    Field("layer_norm_epsilon", "layernorm_epsilon", 1e-5, _float),
    Field("activation_function", "activation", "gelu_new", _write_gelu, _read_gelu),
    Field("attn_pdrop", "attention_dropout", 0.1, _float, wins="reference"),
    Field("resid_pdrop", "hidden_dropout", 0.1, _float, wins="reference"),
    TIED,
    STD,
    DTYPE,
)
