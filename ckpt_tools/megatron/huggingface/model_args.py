"""The architecture of a model in one spelling, read from what Megatron-LM or Megatron-Bridge stored.

Megatron-LM keeps an argparse Namespace (`args`), Bridge the `model` section of `run_config.yaml`; their names
differ between versions and from each other. `ModelArgs` uses Megatron's own names where it can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.megatron.huggingface.numbers import bounded

RopeScaling: TypeAlias = Mapping[str, Any] | None  # as `rope_scaling` of a transformers-4 config.json
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
TRAINED_LLAMA3_FACTOR = 8.0  # what Megatron-LM trained with whatever --rope-scaling-factor said, until #6306


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """What decides shapes and layouts, and what config.json must say. Sizes are in elements.

    `rope_scaling` lists the scalings the model may have been trained with: one, unless Megatron-LM ignored an
    option and the args cannot tell. `moe_layers` and `sliding_layers` hold 1 or 0 per layer.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    max_position_embeddings: int
    vocab_size: int | None = None  # without padding; None when unknown
    padded_vocab_size: int | None = None
    tied: bool = True
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    zero_centered_gamma: bool = False  # norms are stored as weight - 1
    activation: str = "gelu"  # swiglu, geglu, quick_geglu, gelu or squared_relu
    activation_clamp: float | None = None
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    softmax_type: str = "vanilla"
    position_embedding_type: str = "learned_absolute"  # or rope or none
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rope_scaling: tuple[RopeScaling, ...] = (None,)
    yarn_told: bool = True  # False for Megatron-LM args from before it had options for YaRN
    sliding_window: int | None = None  # keys a query sees, itself included
    sliding_layers: tuple[int, ...] = ()
    init_method_std: float = 0.02
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    params_dtype: str | None = None
    num_experts: int | None = None
    moe_layers: tuple[int, ...] = ()
    moe_ffn_hidden_size: int = 0
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    mtp_num_layers: int = 0

    @property
    def true_vocab_size(self) -> int:
        """Rows of the embedding that stand for tokens."""
        if self.vocab_size is None:
            raise MappingError("the true vocabulary size is not known")
        return self.vocab_size

    @property
    def gated(self) -> bool:
        return self.activation.endswith("glu")

    def is_moe(self, layer: int) -> bool:
        return bool(self.moe_layers and self.moe_layers[layer])


@bounded("the checkpoint's args")
def read_model_args(args: Mapping[str, Any]) -> ModelArgs:
    """The architecture that Megatron-LM args or the `model` section of Bridge's run_config.yaml describe.

    Raises:
        MappingError: a field without which no shape can be told is missing, or a pattern does not fit.
    """
    args = _with_transformer(args)
    missing = [n for n in ("num_layers", "hidden_size", "num_attention_heads") if not args.get(n)]
    if missing:
        raise MappingError(f"the checkpoint's args do not say {', '.join(missing)}; pass --hf-config")
    heads, hidden, layers = args["num_attention_heads"], args["hidden_size"], args["num_layers"]
    grouped = args.get("group_query_attention", args.get("num_query_groups") is not None)
    experts = _first(args, "num_experts", "num_moe_experts")
    ffn = args.get("ffn_hidden_size") or 4 * hidden
    window = args.get("window_size")
    mla = bool(args.get("multi_latent_attention"))
    return ModelArgs(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=args["num_query_groups"] if grouped and not mla else heads,
        kv_channels=args.get("kv_channels") or hidden // heads,
        ffn_hidden_size=ffn,
        max_position_embeddings=_first(args, "max_position_embeddings", "seq_length") or 0,
        vocab_size=_vocabulary(args),
        padded_vocab_size=args.get("padded_vocab_size"),
        tied=_tied(args),
        normalization=args.get("normalization", "LayerNorm"),
        layernorm_epsilon=_first(args, "layernorm_epsilon", "norm_epsilon", default=1e-5),
        zero_centered_gamma=bool(_first(args, "layernorm_zero_centered_gamma", "apply_layernorm_1p")),
        activation=_activation(args),
        activation_clamp=args.get("activation_func_clamp_value"),
        add_bias_linear=bool(args.get("add_bias_linear", True)),
        add_qkv_bias=bool(args.get("add_qkv_bias")),
        qk_layernorm=bool(args.get("qk_layernorm")),
        softmax_type=_text(args.get("softmax_type", "vanilla")),
        position_embedding_type=_positions(args),
        rotary_base=args.get("rotary_base", 10000),
        rotary_percent=args.get("rotary_percent", 1.0),
        rotary_interleaved=bool(args.get("rotary_interleaved")),
        rope_scaling=_rope_scaling(args, mla),
        yarn_told=mla or "yarn_original_max_position_embeddings" in args or "gated_linear_unit" in args,
        sliding_window=_window(window),
        sliding_layers=_sliding(args.get("window_attn_skip_freq"), layers) if _window(window) else (),
        init_method_std=args.get("init_method_std", 0.02),
        attention_dropout=args.get("attention_dropout", 0.1),
        hidden_dropout=args.get("hidden_dropout", 0.1),
        params_dtype=_dtype(args),
        num_experts=experts,
        moe_layers=_moe_pattern(args.get("moe_layer_freq", 1), layers) if experts else (),
        moe_ffn_hidden_size=args.get("moe_ffn_hidden_size") or ffn,
        moe_router_topk=args.get("moe_router_topk", 2),
        moe_router_pre_softmax=bool(args.get("moe_router_pre_softmax")),
        moe_router_score_function=args.get("moe_router_score_function", "softmax"),
        moe_router_enable_expert_bias=bool(args.get("moe_router_enable_expert_bias")),
        moe_router_num_groups=args.get("moe_router_num_groups"),
        moe_router_group_topk=args.get("moe_router_group_topk"),
        moe_router_topk_scaling_factor=args.get("moe_router_topk_scaling_factor"),
        moe_shared_expert_intermediate_size=args.get("moe_shared_expert_intermediate_size"),
        moe_shared_expert_gate=bool(args.get("moe_shared_expert_gate")),
        multi_latent_attention=mla,
        q_lora_rank=args.get("q_lora_rank") if mla else None,
        kv_lora_rank=args.get("kv_lora_rank", 32) if mla else 0,
        qk_head_dim=args.get("qk_head_dim", 128) if mla else 0,
        qk_pos_emb_head_dim=args.get("qk_pos_emb_head_dim", 64) if mla else 0,
        v_head_dim=args.get("v_head_dim", 128) if mla else 0,
        mtp_num_layers=args.get("mtp_num_layers") or 0,
    )


def megatron_args(model: ModelArgs) -> dict[str, Any]:
    """The architecture as Megatron-LM args of every version, for a checkpoint made from Hugging Face weights.

    `params_dtype` is a name, as everywhere in this tool; who pickles it makes it a torch dtype.
    """
    rope = model.rope_scaling[0] or {}
    dtype = model.params_dtype or "bfloat16"
    args: dict[str, Any] = {
        name: getattr(model, name)
        for name in ModelArgs.__dataclass_fields__
        if name not in _NOT_MEGATRON and not (name.startswith("moe_") and not model.num_experts)
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
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
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
        args |= {"activation_func_clamp_value": model.activation_clamp, "glu_linear_offset": 1.0}
    if model.activation == "geglu":  # Megatron-LM has no option for it; these are Bridge's names
        args |= {"gated_linear_unit": True, "activation_func": "megatron.core.activations.fast_gelu"}
    if model.num_experts:
        every = all(model.moe_layers)
        args |= {"moe_layer_freq": 1 if every else list(model.moe_layers), "moe_grouped_gemm": True}
    return args | _rope_args(rope, model.multi_latent_attention)


_NOT_MEGATRON = frozenset(
    ("tied", "zero_centered_gamma", "activation", "activation_clamp", "rope_scaling", "sliding_window",
     "sliding_layers", "moe_layers", "yarn_told")
)  # fmt: skip


def _rope_args(rope: Mapping[str, Any], mla: bool) -> dict[str, Any]:
    match rope.get("rope_type"):
        case "llama3":
            return {"use_rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        case "linear":
            return {"rotary_seq_len_interpolation_factor": rope["factor"]}
        case "yarn" if mla:
            return {**rope, "rotary_scaling_factor": rope["factor"]}
        case "yarn":
            return {
                "position_embedding_type": "yarn",
                "rotary_scaling_factor": rope["factor"],
                "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
                "yarn_beta_fast": rope["beta_fast"],
                "yarn_beta_slow": rope["beta_slow"],
                "yarn_correction_range_round_to_int": rope["truncate"],
            }
    return {"rope_type": "rope", "rotary_scaling_factor": 1.0} if mla else {"use_rope_scaling": False}


def _first(args: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The value of the first of `names` that is set: one option under the names versions gave it."""
    return next((args[name] for name in names if args.get(name) is not None), default)


def _with_transformer(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Newer Bridge nests the transformer's settings in the model's: both levels as one."""
    nested = args.get("transformer")
    return {**nested, **args} if isinstance(nested, Mapping) else args


def _text(value: object) -> str:
    """A setting that may be an enum, a Bridge `{_target_: ...}` dict or a stub of a foreign class, as text."""
    if isinstance(value, Mapping):
        arguments = value.get("_args_") or [value.get("_target_", "")]
        return str(arguments[0])
    return str(getattr(value, "name", value))


def _vocabulary(args: Mapping[str, Any]) -> int | None:
    """Tokens; the null tokenizers have an end-of-document token beyond `--vocab-size` (null_tokenizer.py)."""
    size = args.get("vocab_size")
    null = str(args.get("tokenizer_type", "")).startswith("Null")
    return size + 1 if size is not None and null else size


def _tied(args: Mapping[str, Any]) -> bool:
    if "share_embeddings_and_output_weights" in args:
        return bool(args["share_embeddings_and_output_weights"])
    return not args.get("untie_embeddings_and_output_weights", False)


def _activation(args: Mapping[str, Any]) -> str:
    if "gated_linear_unit" in args:  # Bridge
        function = _text(args.get("activation_func", "")).rsplit(".", 1)[-1]
        if not args["gated_linear_unit"]:
            return "squared_relu" if "squared_relu" in function else "gelu"
        return {"silu": "swiglu", "quick_gelu": "quick_geglu"}.get(function, "geglu")
    return next((name for name in ("swiglu", "quick_geglu", "squared_relu") if args.get(name)), "gelu")


def _positions(args: Mapping[str, Any]) -> str:
    kind = _text(args.get("position_embedding_type", "learned_absolute"))
    return "rope" if kind == "yarn" or args.get("use_rotary_position_embeddings") else kind


def _rope_scaling(args: Mapping[str, Any], mla: bool) -> tuple[RopeScaling, ...]:
    bridge = "share_embeddings_and_output_weights" in args
    if mla:
        factor = args.get("rotary_scaling_factor", 1.0)
        if args.get("rope_type") == "rope" or factor == 1.0:
            return (None,)
        return (_yarn(args, factor, "", mla=True),)
    yarn = args.get("yarn_rotary_scaling_factor")
    if yarn is None and _text(args.get("position_embedding_type")) == "yarn":
        yarn = args.get("rotary_scaling_factor", 1.0)
    if yarn is not None:
        return (_yarn(args, yarn, "yarn_"),)
    if args.get("use_rope_scaling") or args.get("rope_scaling") is True:
        factor = float(args.get("rope_scaling_factor") or TRAINED_LLAMA3_FACTOR)
        factors = (factor,) if bridge or factor == TRAINED_LLAMA3_FACTOR else (TRAINED_LLAMA3_FACTOR, factor)
        return tuple({"rope_type": "llama3", "factor": f, **LLAMA3_SCALING} for f in factors)
    factor = _first(args, "rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor")
    if factor is not None and factor != 1:
        linear = {"rope_type": "linear", "factor": float(factor)}
        return (linear,) if bridge else (None, linear)
    return (None,)


def _yarn(args: Mapping[str, Any], factor: float, prefix: str, mla: bool = False) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": float(factor),
        "beta_fast": float(args.get(prefix + "beta_fast") or 32),
        "beta_slow": float(args.get(prefix + "beta_slow") or 1),
        "original_max_position_embeddings": args.get(prefix + "original_max_position_embeddings") or 4096,
    }
    if mla:
        return scaling | {
            "mscale": args.get("mscale", 1.0),
            "mscale_all_dim": args.get("mscale_all_dim", 0.0),
        }
    return scaling | {"truncate": bool(args.get("yarn_correction_range_round_to_int", True))}


def _window(window: object) -> int | None:
    """Keys a query sees, from Megatron's (left, right) or Bridge's scalar window; None for all."""
    if window is None:
        return None
    if isinstance(window, int):
        return window
    match window:
        case [int(left), 0]:
            return None if left < 0 else left + 1
    raise MappingError(f"window_size {window}: only a window to the left has a Hugging Face form")


def _sliding(skip: object, layers: int) -> tuple[int, ...]:
    """1 for every layer with a sliding window (Megatron transformer_config.py `window_attn_skip_freq`)."""
    if skip is None:
        return (1,) * layers
    if isinstance(skip, int):
        return tuple(int((layer + 1) % skip != 0) for layer in range(layers))
    return _pattern(skip, layers, "window_attn_skip_freq")


def _moe_pattern(freq: object, layers: int) -> tuple[int, ...]:
    """1 for every MoE layer (Megatron gpt_layer_specs.py `moe_layer_freq`)."""
    if isinstance(freq, int):
        return tuple(int(layer % freq == 0) for layer in range(layers))
    return _pattern(freq, layers, "moe_layer_freq")


def _pattern(values: object, layers: int, name: str) -> tuple[int, ...]:
    pattern = tuple(values) if isinstance(values, list | tuple) else ()
    problems = [f"{value!r} is not 0 or 1" for value in pattern if value not in (0, 1)]
    if len(pattern) != layers:
        problems.append(f"{values!r} does not name {layers} layers")
    if problems:
        raise MappingError(f"{name} in the checkpoint's args:\n" + list_problems(problems))
    return tuple(int(value) for value in pattern)


def _dtype(args: Mapping[str, Any]) -> str | None:
    if args.get("bf16") or args.get("fp16"):
        return "bfloat16" if args.get("bf16") else "float16"
    value = args.get("params_dtype")
    text = _text(value) if value is not None else ""
    return next((name for name in ("bfloat16", "float16", "float32") if name in text), None)
