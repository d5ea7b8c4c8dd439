"""The config.json fields of further dense families, and how their values are said in `ModelArgs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface import config_fields as known
from ckpt_tools.megatron.huggingface import field_values as values
from ckpt_tools.megatron.huggingface.config_fields import REQUIRED, Field
from ckpt_tools.megatron.huggingface.field_values import Config
from ckpt_tools.megatron.huggingface.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.rope_args import LLAMA3_SCALING, read_rope

_defaults = known._defaults


def _sequential(parallel: Any, config: Config) -> int:
    """A class whose layers have attention and MLP beside each other unless told."""
    if parallel:
        raise MappingError("attention and MLP of a layer beside each other; Megatron has one after the other")
    return int(config["num_hidden_layers"])


def _write_multi_query(groups: int, model: ModelArgs) -> bool:
    if groups not in (1, model.num_attention_heads):
        raise MappingError(f"num_query_groups is {groups}; this architecture has 1 or one for each head")
    return groups == 1


def _youtu_std(config: Config) -> float:
    return float(2.0 / (5.0 * config["hidden_size"]) ** 0.5)


def _every_fourth_full(config: Config) -> list[str]:
    """CWM without `layer_types`: the first layer sees all keys, and so does every fourth from there on."""
    return [("sliding_attention" if i % 4 else "full_attention") for i in range(config["num_hidden_layers"])]


def _all_alike(config: Config) -> list[str]:
    """Ministral without `layer_types`."""
    return ["sliding_attention"] * int(config["num_hidden_layers"])


def _read_scaled(scaling: Any, config: Config) -> Any:
    found = read_rope(scaling, config)
    return found if found[0] else _unscaled()


def _write_scaled(candidates: Any, model: ModelArgs) -> Any:
    scaling = values.write_rope(candidates, model)
    return scaling if scaling else _unscaled()


def _unscaled() -> Any:
    raise MappingError(
        "this class scales as Llama 3 with a factor of 16 where rope_scaling is null, so that no transformers-4 form "
        "of its config.json says that nothing is scaled"
    )


def _eps(name: str) -> Field:
    return Field(name, "layernorm_epsilon", 1e-5, values.as_float)


def _biases(*names: str, default: bool = False) -> tuple[Field, ...]:
    return tuple(Field(name, "add_bias_linear", default) for name in names)


def _window(keys: Any, config: Config) -> int:
    if not keys:
        raise MappingError("the class does not run without a window")
    return int(keys)


def _layers(default: Any) -> tuple[Field, ...]:
    """A window on some layers, told for each."""
    return (
        Field("sliding_window", "sliding_window", None, read=_window),
        Field("layer_types", "sliding_layers", default, values.write_layer_types, values.read_layer_types),
    )


ALIKE = ("attention_bias", "mlp_bias")
HEADS_AND_FFN = (known.HEAD_DIM, known.FFN)
LAYER_NORM = (*known.SIZE, known.GROUPS, *known.ROPE[1:], known.UNTIED, known.FFN)
QKV_BIAS = Field("attention_bias", "add_qkv_bias", False)
NEMOTRON = _defaults(
    (*LAYER_NORM, known.HEAD_DIM, _eps("norm_eps"), known.PARTIAL_ROPE, *_biases(*ALIKE)),
    partial_rotary_factor=0.5,
    initializer_range=0.0134,
)
JAIS2 = (*LAYER_NORM, known.HEAD_DIM, _eps("layer_norm_eps"), *_biases(*ALIKE, default=True))
ARCEE = _defaults(known.LLAMA, rms_norm_eps=1e-5)
STARCODER2 = _defaults(
    (
        *LAYER_NORM,
        known.SQUARE,
        _eps("norm_epsilon"),
        *_biases("use_bias", default=True),
        Field("sliding_window", "sliding_window", None),
        Field("hidden_act", "activation", "gelu_pytorch_tanh", values.write_gelu_tanh, values.read_gelu),
    ),
    num_key_value_heads=2,
    tie_word_embeddings=True,
    initializer_range=0.018042,
)
STABLELM = _defaults(
    (
        *LAYER_NORM,
        known.SQUARE,
        _eps("layer_norm_eps"),
        known.PARTIAL_ROPE,
        Field("use_qkv_bias", "add_qkv_bias", False),
    ),
    num_key_value_heads=32,
    partial_rotary_factor=0.25,
)
PERSIMMON = _defaults(
    (
        *known.SIZE,
        *known.ROPE[1:],
        known.UNTIED,
        known.FFN,
        known.SQUARE,
        _eps("layer_norm_eps"),
        known.PARTIAL_ROPE,
        Field("qk_layernorm", "qk_layernorm", True),
    ),
    partial_rotary_factor=0.5,
    rope_theta=REQUIRED,  # 25000 for the class of transformers 4, 10000 for that of 5
)
NEOX = (
    *known.SIZE,
    known.ROPE[2],
    known.UNTIED,
    known.FFN,
    known.SQUARE,
    _eps("layer_norm_eps"),
    Field("rotary_emb_base", "rotary_base", 10000.0, values.as_float, also="rope_theta"),
    Field("rotary_pct", "rotary_percent", 0.25, values.as_float, also="partial_rotary_factor"),
    Field("hidden_act", "activation", "gelu", values.write_gelu, values.read_gelu),
    Field("use_parallel_residual", "num_layers", True, lambda layers, model: False, _sequential),
)
BIGCODE = (
    *(one for one in known.GPT2 if one.hf != "activation_function"),
    Field("activation_function", "activation", "gelu_pytorch_tanh", values.write_gelu_tanh, values.read_gelu),
    Field("multi_query", "num_query_groups", True, _write_multi_query,
          lambda multi, config: 1 if multi else config["n_head"]),
)  # fmt: skip
GLM = _defaults(
    (*known.ATTENTION, *HEADS_AND_FFN, known.PARTIAL_ROPE, replace(QKV_BIAS, default=True)),
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1.5625e-07,
    partial_rotary_factor=0.5,
)
HELIUM = _defaults(
    (*known.ATTENTION, *HEADS_AND_FFN, known.SQUARE, QKV_BIAS),
    num_key_value_heads=20,
    head_dim=128,
    rms_norm_eps=1e-8,
    rope_theta=100000.0,
)
MINISTRAL = _defaults(
    (*known.ATTENTION, *HEADS_AND_FFN, *_layers(_all_alike)), num_key_value_heads=8, sliding_window=4096
)
CWM = _defaults(
    (
        *(one for one in known.ATTENTION if one.hf != "rope_scaling"),
        *HEADS_AND_FFN,
        Field("rope_scaling", "rope_scaling", {"rope_type": "llama3", "factor": 16.0, **LLAMA3_SCALING},
              _write_scaled, _read_scaled),
        *_layers(_every_fourth_full),
    ),
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    sliding_window=8192,
)  # fmt: skip
YOUTU = _defaults(
    (
        *known.DEEPSEEK,
        Field("initializer_range", "init_method_std", _youtu_std, values.as_float,
              lambda value, config: value or _youtu_std(config), wins="reference"),
    ),
    num_key_value_heads=16,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_rope_head_dim=64,
    v_head_dim=128,
    qk_nope_head_dim=128,
    tie_word_embeddings=True,
    initializer_range=_youtu_std,
)  # fmt: skip
INTERNLM3 = _defaults(
    (
        *known.ATTENTION,
        *HEADS_AND_FFN,
        Field("qkv_bias", "add_bias_linear", False, also="attention_bias"),
        Field("bias", "add_bias_linear", False, also="mlp_bias"),
    ),
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1e-5,
)
IQUEST = _defaults(known.LLAMA, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
EXAONE = _defaults(
    (
        *(one for one in known.LLAMA if one.hf not in ("num_hidden_layers", "rms_norm_eps")),
        Field("num_layers", "num_layers", also="num_hidden_layers"),
        Field("layer_norm_epsilon", "layernorm_epsilon", 1e-5, values.as_float, also="rms_norm_eps"),
    ),
    num_key_value_heads=8,
    rope_theta=500000.0,
)
