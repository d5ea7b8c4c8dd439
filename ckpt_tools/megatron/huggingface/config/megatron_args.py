"""A model's architecture, read from what Megatron-LM or Megatron-Bridge stored, and written as args of Megatron-LM.

Megatron-LM keeps an argparse Namespace (`args`), Bridge the `model` section of `run_config.yaml`; their names differ
between versions and from each other.

Sparse attention (DSA): an indexer chooses the keys that a query of MLA sees. Megatron core 0.19 computes what the
Hugging Face classes compute: it rotates the first part of an index head and gives the indexer normalized queries
(#3026). Cores before it have the same parameters, but rotate the last part and may give queries that are not
normalized; their args lack `dsa_indexer_rope_interleaved`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isclose
from typing import Any

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.layer_patterns import (
    delta_net_layers,
    hybrid_pattern,
    indexer_layers,
    moe_layers,
    no_rope_layers,
    sharing,
    sliding_layers,
    sliding_turn,
    window_of,
)
from ckpt_tools.megatron.huggingface.config.model_args import GluInterleave, ModelArgs, bounded, frozen
from ckpt_tools.megatron.huggingface.config.rope_args import rope_args, rope_scaling, rotary_bases

# Arguments that say what the field of `ModelArgs` with their name says, and mean the same where they are not set.
_SAME = ("padded_vocab_size", "normalization", "rotary_percent", "attn_logit_softcapping", "final_logit_softcapping",
         "init_method_std", "attention_dropout", "hidden_dropout", "moe_router_topk", "moe_router_score_function",
         "moe_shared_expert_intermediate_size", "moe_latent_size")  # fmt: skip
_FLAGS = ("qk_layernorm", "moe_router_pre_softmax", "moe_router_enable_expert_bias", "moe_shared_expert_gate",
          "multi_latent_attention", "attention_output_gate")  # fmt: skip
# What transformer_config.py takes where an argument is not set.
_MLA_SIZES = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
              "v_head_dim": 128}  # fmt: skip
_DELTA_SIZES = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                "linear_num_key_heads": 16, "linear_num_value_heads": 32}  # fmt: skip
_MAMBA_SIZES = {"mamba_state_dim": 128, "mamba_head_dim": 64, "mamba_num_groups": 8}
OF_MLA = tuple(_MLA_SIZES)
VARIANT, DELTA_NET, SPARSE = "experimental_attention_variant", "gated_delta_net", "dsa"
# Fields of `ModelArgs` that are written under another name, or in another way.
_NOT_MEGATRON = frozenset(
    ("tied", "zero_centered_gamma", "activation", "activation_clamp", "rope_scaling", "sliding_window",
     "sliding_layers", "sliding_pattern", "rotary_base_local", "query_pre_attn_scalar", "attn_logit_softcapping",
     "final_logit_softcapping", "moe_layers", "no_rope_layers", "glu_interleave", "yarn_told", "moe_latent_size",
     "attention_output_gate", "linear_layers", "hybrid_pattern", "indexer_layers", "own")
)  # fmt: skip


@bounded("the checkpoint's args")
def read_model_args(args: Mapping[str, Any]) -> ModelArgs:
    """The architecture that Megatron-LM args or the `model` section of Bridge's run_config.yaml describe."""
    args = flat_args(args)
    needed = ["num_layers", "hidden_size", "num_attention_heads"]
    if args.get("group_query_attention") and not _is_mla(args):
        needed.append("num_query_groups")
    missing = [name for name in needed if not args.get(name)]
    if missing:
        raise MappingError(f"the checkpoint's args do not say {', '.join(missing)}; pass --hf-config")
    values: dict[str, Any] = {name: args[name] for name in _SAME if name in args}
    values |= {name: bool(args.get(name)) for name in _FLAGS}
    if values["multi_latent_attention"]:
        values |= {name: args.get(name, usual) for name, usual in _MLA_SIZES.items()}
    return ModelArgs(
        **values,
        **_sizes(args),
        **_layers(args),
        **_positions_and_windows(args),
        query_pre_attn_scalar=_query_scalar(args),
        params_dtype=_dtype(args),
        **_experts(args),
        **_sparse_attention(args),
        **(_delta_nets(args) if args.get(VARIANT) == DELTA_NET else {}),
        **_mamba(args),
    )


def with_own_settings(model: ModelArgs, names: Iterable[str], args: Mapping[str, Any]) -> ModelArgs:
    args = flat_args(args)
    return replace(model, own={name: frozen(args.get(name)) for name in names})


def _sizes(args: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = args["num_attention_heads"], args["hidden_size"]
    grouped = args.get("group_query_attention", args.get("num_query_groups") is not None)
    return {
        "num_layers": args["num_layers"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": args["num_query_groups"] if grouped and not _is_mla(args) else heads,
        "kv_channels": args.get("kv_channels") or hidden // heads,
        "ffn_hidden_size": _ffn(args),
        "max_position_embeddings": _first(args, "max_position_embeddings", "seq_length") or 0,
        "vocab_size": _vocabulary(args),
    }


def _layers(args: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tied": _tied(args),
        "layernorm_epsilon": _first(args, "layernorm_epsilon", "norm_epsilon", default=1e-5),
        "zero_centered_gamma": bool(_first(args, "layernorm_zero_centered_gamma", "apply_layernorm_1p")),
        "activation": _activation(args),
        "activation_clamp": args.get("activation_func_clamp_value"),
        "glu_linear_offset": args.get("glu_linear_offset") or 0.0,
        "add_bias_linear": bool(args.get("add_bias_linear", True)),
        "add_qkv_bias": bool(args.get("add_qkv_bias")) and not args.get("add_bias_linear", True),
        "softmax_type": as_text(args.get("softmax_type", "vanilla")),
    }


def _positions_and_windows(args: Mapping[str, Any]) -> dict[str, Any]:
    mla, layers, window = _is_mla(args), args["num_layers"], window_of(args.get("window_size"))
    kind = as_text(args.get("position_embedding_type", "learned_absolute"))
    is_rope = kind == "yarn" or args.get("enable_gpt_oss") or args.get("use_rotary_position_embeddings")
    position = "rope" if is_rope else kind
    base, local_base = rotary_bases(args)
    return {
        "position_embedding_type": position,
        "rotary_base": base,
        "rotary_base_local": local_base,
        "rotary_interleaved": bool(args.get("rotary_interleaved")) and position == "rope",
        "no_rope_layers": no_rope_layers(args.get("no_rope_freq"), layers),
        "rope_scaling": rope_scaling(args, kind, mla),
        "yarn_told": mla or "yarn_original_max_position_embeddings" in args or "gated_linear_unit" in args,
        "sliding_window": window,
        "sliding_layers": sliding_layers(args.get("window_attn_skip_freq"), layers) if window else (),
        "sliding_pattern": sliding_turn(args.get("interleaved_attn_pattern")),
    }


def _experts(args: Mapping[str, Any]) -> dict[str, Any]:
    experts = _first(args, "num_experts", "num_moe_experts")
    groups, scale = args.get("moe_router_num_groups"), args.get("moe_router_topk_scaling_factor")
    return {
        "num_experts": experts,
        "moe_layers": moe_layers(args.get("moe_layer_freq", 1), args["num_layers"]) if experts else (),
        "moe_ffn_hidden_size": args.get("moe_ffn_hidden_size") or _ffn(args),
        "moe_router_num_groups": None if groups == 1 else groups,
        "moe_router_group_topk": None if groups in (None, 1) else args.get("moe_router_group_topk"),
        "moe_router_topk_scaling_factor": None if scale == 1.0 else scale,
        "glu_interleave": _glu_interleave(args) if experts else None,
        "mtp_num_layers": args.get("mtp_num_layers") or 0,
    }


def _is_mla(args: Mapping[str, Any]) -> bool:
    return bool(args.get("multi_latent_attention"))


def _ffn(args: Mapping[str, Any]) -> Any:
    return args.get("ffn_hidden_size") or 4 * args["hidden_size"]


def _first(args: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The value of the first of `names` that is set: one option under the names versions gave it."""
    return next((args[name] for name in names if args.get(name) is not None), default)


def flat_args(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Newer Bridge nests the transformer's settings in the model's: both levels as one."""
    nested = args.get("transformer")
    return {**nested, **args} if isinstance(nested, Mapping) else args


def as_text(value: object) -> str:
    """A setting that may be an enum, a Bridge `{_target_: ...}` dict or a stub of a foreign class, as text."""
    if isinstance(value, Mapping):
        match value.get("_args_"):
            case [first, *_] if not value.get(
                "_partial_"
            ):  # an enum's value, not what a function is bound to
                return str(first)
        return str(value.get("_target_", ""))
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
    """The activation in this tool's words; a function that no family has, under its own name.

    Megatron's fused GELU and Transformer Engine's are the tanh approximation, `torch.nn.functional.gelu` is not.
    """
    fused = _first(args, "bias_gelu_fusion", "bias_activation_fusion", default=True)
    gelu = "gelu" if fused or args.get("use_te_activation_func") else "gelu_erf"
    if "gated_linear_unit" not in args:  # Megatron-LM
        return next((name for name in ("swiglu", "quick_geglu", "squared_relu") if args.get(name)), gelu)
    function = as_text(args.get("activation_func") or "gelu").rsplit(".", 1)[-1]
    known = {"silu": "silu", "swish": "silu", "fast_gelu": "gelu", "openai_gelu": "gelu", "gelu": gelu}
    function = known.get(function, function)
    if not args["gated_linear_unit"]:
        return function
    return {"silu": "swiglu", "quick_gelu": "quick_geglu", "gelu": "geglu"}.get(function, f"gated {function}")


def _query_scalar(args: Mapping[str, Any]) -> float | None:
    """`query_pre_attn_scalar`, which Bridge's Gemma 3 keeps as the softmax scale that follows from it."""
    scalar, scale = args.get("query_pre_attn_scalar"), args.get("softmax_scale")
    for name, number in (("query_pre_attn_scalar", scalar), ("softmax_scale", scale)):
        if number is not None and not (isinstance(number, int | float) and number > 0):
            raise MappingError(f"{name} {number!r} in the checkpoint's args is not a positive number")
    if scalar is not None or scale is None:
        return scalar
    exact = 1.0 / scale**2
    return float(round(exact)) if isclose(exact, round(exact), rel_tol=1e-9) else exact


def _glu_interleave(args: Mapping[str, Any]) -> GluInterleave | None:
    """How the experts' fc1 rows lie; experts that are not one grouped module ignore the setting."""
    block = args.get("moe_mlp_glu_interleave_size")
    parts = args.get("expert_tensor_parallel_size") or 1
    if not block or not args.get("moe_grouped_gemm", True) or args.get("moe_use_legacy_grouped_gemm"):
        return None
    if not (isinstance(block, int) and isinstance(parts, int) and block > 0 < parts):
        raise MappingError(
            f"moe_mlp_glu_interleave_size {block!r} with expert_tensor_parallel_size {parts!r} in the checkpoint's "
            "args: both are numbers above 0"
        )
    return GluInterleave(block, parts)


def _dtype(args: Mapping[str, Any]) -> str | None:
    if args.get("bf16") or args.get("fp16"):
        return "bfloat16" if args.get("bf16") else "float16"
    value = args.get("params_dtype")
    text = as_text(value) if value is not None else ""
    return next((name for name in ("bfloat16", "float16", "float32") if name in text), None)


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
    is_geglu = model.activation == "geglu"
    set_only = {  # the order of all arguments is that of the stored ones
        "activation_func_clamp_value": model.activation_clamp,
        "no_rope_freq": list(model.no_rope_layers) or None,
        # From here on, what only Bridge has names for.
        "gated_linear_unit": is_geglu or None,
        "activation_func": "megatron.core.activations.fast_gelu" if is_geglu else None,
        "query_pre_attn_scalar": model.query_pre_attn_scalar,
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
        "interleaved_attn_pattern": model.sliding_pattern and [model.sliding_pattern - 1, 1],
    }
    args |= {name: value for name, value in set_only.items() if value is not None}
    if model.rotary_base_local is not None:
        is_linear = rope.get("rope_type") == "linear"
        args["rotary_base"] = [model.rotary_base_local, model.rotary_base]
        args["rope_scaling_factor"] = rope["factor"] if is_linear else 1.0
    args |= _sparse_attention_args(model)
    if model.attention_output_gate:
        args["attention_output_gate"] = True
    if model.moe_latent_size is not None:
        args["moe_latent_size"] = model.moe_latent_size
    if model.linear_layers:
        args |= {VARIANT: DELTA_NET, "linear_attention_freq": list(model.linear_layers)}
        args |= {name: getattr(model, name) for name in _DELTA_SIZES}
    if model.hybrid_pattern:
        args |= {"is_hybrid_model": True, "hybrid_override_pattern": model.hybrid_pattern}
        args |= {name: getattr(model, name) for name in (*_MAMBA_SIZES, "mamba_num_heads")}
    if model.num_experts:
        every = all(model.moe_layers)
        args |= {"moe_layer_freq": 1 if every else list(model.moe_layers), "moe_grouped_gemm": True}
    own = {name: list(value) if isinstance(value, tuple) else value for name, value in model.own.items()}
    return args | rope_args(rope, model.multi_latent_attention) | own


def _delta_nets(args: Mapping[str, Any]) -> dict[str, Any]:
    layers = delta_net_layers(args.get("linear_attention_freq"), args["num_layers"])
    return {"linear_layers": layers, **_sizes_set(args, _DELTA_SIZES)}


def _mamba(args: Mapping[str, Any]) -> dict[str, Any]:
    layers = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    pattern = (
        hybrid_pattern(layers)
        if layers
        else "P" * args["num_layers"]
        if args.get("falconh1_ratio") == 1
        else ""
    )
    if not pattern:
        return {}
    if len(pattern) != args["num_layers"]:
        raise MappingError(
            f"the checkpoint's args name {args['num_layers']} layers, their hybrid pattern {len(pattern)}"
        )
    sizes = _sizes_set(args, _MAMBA_SIZES)
    heads = args.get("mamba_num_heads") or 2 * args["hidden_size"] // max(sizes["mamba_head_dim"], 1)
    return {"hybrid_pattern": pattern, "mamba_num_heads": heads, **sizes}


def _sizes_set(args: Mapping[str, Any], usual: Mapping[str, int]) -> dict[str, Any]:
    return {name: size if args.get(name) is None else args[name] for name, size in usual.items()}


SINCE = (
    "sparse attention: only Megatron core 0.19 and newer compute it as this model does; before, its indexer rotates "
    "another part of each head"
)
TOO_OLD = (
    "the args do not say dsa_indexer_rope_interleaved: they are from a Megatron core before 0.19, and its indexer "
    "rotates another part of each head than every Hugging Face class"
)


def _sparse_attention(args: Mapping[str, Any]) -> dict[str, Any]:
    """The `ModelArgs` fields of an indexer; empty for a model without one."""
    if args.get(VARIANT) != SPARSE:
        return {}
    freq, offset = args.get("dsa_indexer_topk_freq") or 1, args.get("dsa_indexer_skip_topk_offset") or 0
    own = args.get("dsa_indexer_k_norm_epsilon")
    usual = _first(args, "layernorm_epsilon", "norm_epsilon", default=1e-5)
    return {
        **{
            f"dsa_indexer_{name}": args.get(f"dsa_indexer_{name}") or 0
            for name in ("n_heads", "head_dim", "topk")
        },
        "dsa_indexer_rope_interleaved": args.get("dsa_indexer_rope_interleaved"),
        "dsa_indexer_k_norm_epsilon": usual if own is None else own,
        "indexer_layers": indexer_layers(args["num_layers"], freq, offset),
    }


def _sparse_attention_args(model: ModelArgs) -> dict[str, Any]:
    """Megatron's args of a model's indexer beyond the fields that have Megatron's names."""
    if not model.dsa_indexer_n_heads:
        return {}
    freq, offset = sharing(model.indexer_layers)
    return {
        VARIANT: SPARSE,
        "dsa_indexer_topk_freq": freq,
        "dsa_indexer_skip_topk_offset": offset,
        "dsa_indexer_rotate_activation": False,  # a rotation of both queries and keys, for the sake of rounding
    }


def sparse_attention_problems(model: ModelArgs) -> list[str]:
    """What keeps a model with an indexer from being exported or imported."""
    if not model.dsa_indexer_n_heads:
        return []
    problems = [TOO_OLD] if model.dsa_indexer_rope_interleaved is None else []
    if model.indexer_layers and 0 in model.indexer_layers[: model.mtp_num_layers]:
        problems.append(
            "prediction layers that reuse the choice of another layer's indexer: Megatron counts them from 1 again"
        )
    return problems
