"""What the values of stored objects must be, each checked where it is read: a pickle holds anything.

What Megatron keeps nowhere else goes by name: its settings, the fields of parameter groups and of the schedule.
`wanted_kind` decides what each is. Values of other names are copied, and nothing is calculated from them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.formats.pickle.machine import brief
from ckpt_tools.formats.pickle.unpickle import StandIn
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor, TensorBytes
from ckpt_tools.megatron.keys import group_key, rng_shard

MOST = 1 << 40  # of anything that is counted
_BEYOND = 1 << 63
_MOST_OPERATIONS = 1 << 127  # a float32 of `train_state.pt` holds them
_FROM_ONE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards", "num_attention_heads", "micro_batch_size", "global_batch_size",
    "eval_micro_batch_size", "eval_global_batch_size",
)  # fmt: skip
_FROM_ZERO = (
    "seq_length", "max_position_embeddings", "num_layers", "num_experts", "cpu_offloading_num_layers", "hidden_size",
    "num_query_groups", "kv_channels", "ffn_hidden_size", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "kv_lora_rank", "qk_pos_emb_head_dim", "q_lora_rank", "v_head_dim",
    "mtp_num_layers", "make_vocab_size_divisible_by", "vocab_size", "padded_vocab_size",
)  # fmt: skip
COUNTED = dict.fromkeys(_FROM_ONE, 1) | dict.fromkeys(_FROM_ZERO, 0)
"""Settings that are whole numbers, and the least of each."""
_MORE_COUNTED = dict.fromkeys(
    ("num_moe_experts", "world_size", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "train_iters",
     "train_samples", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples", "iteration",
     "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples", "moe_router_topk",
     "moe_router_num_groups", "moe_router_group_topk", "moe_latent_size", "moe_mlp_glu_interleave_size",
     "qk_head_dim", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
     "linear_num_value_heads", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads",
     "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_topk_freq",
     "dsa_indexer_skip_topk_offset"), 0
)  # fmt: skip
_COUNTS = COUNTED | _MORE_COUNTED
_NEVER_NONE = ("num_layers", "hidden_size", "num_attention_heads")
FLAGS = frozenset({
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "add_bias_linear",
    "add_position_embedding", "add_qkv_bias", "apply_layernorm_1p", "apply_query_key_layer_scaling",
    "apply_residual_connection_post_layernorm", "apply_wd_to_qk_layernorm", "attention_output_gate", "bf16",
    "bias_activation_fusion", "bias_gelu_fusion", "decrease_batch_size_if_needed",
    "distrib_optim_fully_reshardable_mem_efficient", "dsa_indexer_rope_interleaved",
    "dsa_indexer_rotate_activation", "dsa_indexer_scoring_relu", "enable_gpt_oss", "enable_mhc_connections",
    "export_moe_apply_probs_on_input", "export_offline_model", "export_qk_l2_norm", "finetune",
    "first_last_layers_bf16", "fp16", "fp4_param", "fp4_param_gather", "fp8_param", "fp8_param_gather",
    "gated_linear_unit", "gradient_accumulation_fusion", "group_query_attention", "hetereogenous_dist_checkpoint",
    "heterogeneous_block_specs", "is_decoupled_lr", "is_expert_parallel", "is_hybrid_model", "is_vision_language",
    "layernorm_zero_centered_gamma", "mla_down_proj_fusion", "moe_apply_probs_on_input", "moe_grouped_gemm",
    "moe_router_enable_expert_bias", "moe_router_force_load_balancing", "moe_router_pre_softmax",
    "moe_shared_expert_gate", "moe_single_grouped_bias", "moe_single_grouped_weight", "moe_token_dropping",
    "moe_use_legacy_grouped_gemm", "mtp_hsm", "mtp_use_repeated_layer", "multi_latent_attention", "no_load_optim",
    "no_load_rng", "openai_gelu", "optimizer_cpu_offload", "override_opt_param_scheduler", "pad_vocab_size",
    "qk_l2_norm", "qk_layernorm", "quick_geglu", "rotary_interleaved", "sequence_parallel",
    "share_embeddings_and_output_weights", "should_pad_vocab", "squared_relu", "store_param_remainders",
    "strict_fsdp_dtensor_load", "swiglu", "untie_embeddings_and_output_weights", "use_checkpoint_args",
    "use_checkpoint_opt_param_scheduler", "use_distributed_optimizer", "use_legacy_models", "use_megatron_fsdp",
    "use_mup", "use_precision_aware_optimizer", "use_rope_scaling", "use_rotary_position_embeddings",
    "use_te_activation_func", "use_torch_fsdp2", "yarn_correction_range_round_to_int",
})  # fmt: skip
"""Settings and fields that are True or False: a stand-in or a text in their place would count as True."""
_NUMBERS = frozenset({
    "lr", "min_lr", "max_lr", "init_lr", "initial_lr", "lr_mult", "pre_lr_mult", "lr_warmup_fraction",
    "weight_decay", "wd_mult", "pre_wd_mult", "start_weight_decay", "end_weight_decay", "start_wd", "end_wd",
    "eps", "adam_beta1", "adam_beta2", "adam_eps", "momentum", "sgd_momentum", "num_steps", "lr_decay_steps",
    "lr_warmup_steps", "wd_incr_steps", "checkpoint_version", "rotary_percent", "rope_scaling_factor",
    "rotary_scaling_factor", "rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
    "yarn_mscale", "yarn_mscale_all_dim", "yarn_original_max_position_embeddings", "yarn_rotary_scaling_factor",
    "activation_func_clamp_value", "glu_linear_offset", "init_method_std", "attention_dropout", "hidden_dropout",
    "moe_router_topk_scaling_factor", "softmax_scale", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping",
})  # fmt: skip
_FROM_ZERO_ON = ("layernorm_epsilon", "norm_epsilon", "dsa_indexer_k_norm_epsilon")
_BASES = ("rotary_base",)  # of Megatron-Bridge's Gemma 3 two
_ONE_OR_MORE = ("window_size", "interleaved_attn_pattern")
_OPERATIONS = ("num_floating_point_operations_so_far",)
_PATTERNS = {"moe_layer_freq": 1, "linear_attention_freq": 0, "window_attn_skip_freq": 0, "no_rope_freq": 0}
TEXTS = frozenset({
    "ckpt_format", "data_parallel_sharding_strategy", "experimental_attention_variant", "fp4", "fp8",
    "fp8_recipe", "heterogeneous_layers_config_encoded_json", "heterogeneous_layers_config_path",
    "hybrid_layer_pattern", "hybrid_override_pattern", "lr_decay_style", "lr_wsd_decay_style",
    "moe_router_score_function", "normalization", "optimizer", "outer_dp_sharding_strategy",
    "position_embedding_type", "rope_type", "softmax_type", "tokenizer_type", "transformer_impl", "wd_incr_style",
    "weight_decay_incr_style",
})  # fmt: skip
"""Settings and fields that are a text, or an enum's member."""
_MAYBE_TENSORS = ("lr", "step", "common_step")
_PAIRS = ("betas",)
_FORMS = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}


def corrupt(where: str, value: object, wanted: str) -> CorruptCheckpointError:
    """What to raise for a stored value of another kind than its reader can use."""
    return CorruptCheckpointError(
        f"{where} is {brief(value)}, and {wanted} belongs there. The checkpoint is damaged, or another program has "
        "changed it: take another copy, or another iteration"
    )


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Raise CorruptCheckpointError if a setting that is read has a value of another kind than Megatron stores."""
    for name, value in settings.items():
        checked_field(name, value, f"{where}.{name}")
    if isinstance(nested := settings.get("transformer"), Mapping):  # of newer versions of Megatron-Bridge
        check_settings(nested, f"{where}.transformer")


def wanted_kind(name: str, value: Any) -> str:
    """What belongs into a setting or a field, if `value` does not; empty for sound values and for names not read."""
    if value is None:
        return "a value" if name in _NEVER_NONE else ""
    if name in FLAGS:
        return "" if isinstance(value, bool) else "True or False"
    if (least := _COUNTS.get(name)) is not None:
        return "" if counts(value, least) else f"a whole number from {least} to {MOST:,}"
    if name in _NUMBERS:
        return "" if _is_number(value) else "a 64-bit number"
    if name in _FROM_ZERO_ON:
        return "" if _is_number(value) and value >= 0 else "a number from 0"
    if name in _BASES:
        bases = value if isinstance(value, list | tuple) else (value,)
        return "" if all(_is_number(base) and base > 0 for base in bases) else "a number above 0"
    if name in _ONE_OR_MORE:
        entries = value if isinstance(value, list | tuple) else (value,)
        return "" if all(type(entry) is int for entry in entries) else "a whole number, or a tuple of them,"
    if name == "rope_scaling":  # a switch of Megatron-Bridge, and what config.json says in other trainers
        return "" if isinstance(value, bool | str | Mapping) else "True or False"
    if name in _OPERATIONS:
        return "" if type(value) in (int, float) and abs(value) < _MOST_OPERATIONS else "a number"
    if (least := _PATTERNS.get(name)) is not None and not counts(value, least):
        is_list = isinstance(value, list | tuple) and all(counts(entry, 0) for entry in value)
        return "" if is_list else f"a whole number from {least}, or a list of 0 and 1"
    if name in TEXTS:
        return "" if _is_text(value) else "a word"
    return ""


def counts(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= MOST


def _is_text(value: object) -> bool:
    """Whether it is a text, an enum's member, or the member as Megatron-Bridge's YAML file has it."""
    is_member = isinstance(value, StandIn) and not value.module.startswith(("numpy", "torch"))
    return isinstance(value, str | Mapping) or is_member


def checked_field(name: str, value: Any, where: str) -> Any:
    """Check and return a stored setting, or a field of a parameter group or of the schedule."""
    if name in _MAYBE_TENSORS and value is not None:
        if not isinstance(value, TensorBytes):  # of an outline, which has no numbers
            number_of(value, where)
    elif name in _PAIRS and not (isinstance(value, list | tuple) and all(map(_is_number, value))):
        raise corrupt(where, value, "a tuple of numbers")
    elif wanted := wanted_kind(name, value):
        raise corrupt(where, value, wanted)
    return value


def number_of(value: Any, where: str) -> Any:
    """A stored number, or that which a tensor of one element holds."""
    if isinstance(value, StoredTensor):
        form = _FORMS.get(value.dtype)
        if form is None or struct.calcsize(form) != len(value.data):
            raise corrupt(where, value, "a tensor of one number")
        value = struct.unpack(form, value.data)[0]
    if not _is_number(value):
        raise corrupt(where, value, "a 64-bit number")
    return value


def _is_number(value: Any) -> bool:
    """Whether a 64-bit number holds it: those of pickles may be too large for any float."""
    return type(value) in (int, float) and not abs(value) >= _BEYOND  # what is no number may be stored


def fields_at(value: Any, where: str) -> Mapping[str, Any]:
    """A stored mapping of names: a parameter group, the schedule, a loss scaler; its fields are checked."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise corrupt(where, value, "a mapping of names")
    for name, field in value.items():
        checked_field(name, field, f"{where}.{name}")
    return value


def check_object(key: str, value: Any) -> None:
    """Check that an object stored under its own key is what the readers of the key take."""
    if of_group := group_key(key):
        checked_field(of_group.field, value, key)
    elif key.startswith("opt_param_scheduler."):
        checked_field(key.rpartition(".")[2], value, key)
    elif rng_shard(key):
        rng_at(only_one(value, key), key)


def rng_at(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise corrupt(where, value, "a list of states")
    for number, state in enumerate(value):
        fields_at(state, f"{where}.{number}")
    return value


def only_one(value: Any, where: str) -> Any:
    """What Megatron has wrapped into a list, as every object of a grid."""
    if not isinstance(value, list) or len(value) != 1:
        raise corrupt(where, value, "a list of one value")
    return value[0]


def optimizer_groups(optimizer: Any, where: str = "optimizer") -> list[dict[str, Any]]:
    """The parameter groups in the `optimizer` part of a common state, in id order; empty when it holds none.

    Accepts one optimizer, a chain of them ({0: ..., 1: ...}) and a bare inner optimizer.
    """
    if not isinstance(optimizer, Mapping):
        return []
    if optimizer and all(isinstance(key, int) for key in optimizer):
        return [
            group for key in sorted(optimizer) for group in optimizer_groups(optimizer[key], f"{where}.{key}")
        ]
    if "param_groups" not in optimizer:
        return optimizer_groups(optimizer.get("optimizer"), f"{where}.optimizer")
    groups, where = optimizer["param_groups"], f"{where}.param_groups"
    if not isinstance(groups, list | tuple):
        raise corrupt(where, groups, "a list of groups")
    return [
        {name: value for name, value in fields_at(group, f"{where}.{number}").items() if name != "params"}
        for number, group in enumerate(groups)
    ]
