"""The translations that a family file names: `form` of a field (both directions), and `default_by`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ckpt_tools.megatron.huggingface import field_values as plain
from ckpt_tools.megatron.huggingface import hybrid_values as hybrid
from ckpt_tools.megatron.huggingface import layer_values as layers
from ckpt_tools.megatron.huggingface import moe_values as moe
from ckpt_tools.megatron.huggingface.field_values import Config
from ckpt_tools.megatron.huggingface.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.rope_args import read_rope


class Form(NamedTuple):
    """A value as config.json has it, made of that of `ModelArgs` (`write`), and the other way (`read`)."""

    write: Callable[[Any, ModelArgs], Any] = plain.plain_write
    read: Callable[[Any, Config], Any] = plain.plain_read


FORMS: dict[str, Form] = {
    "plain": Form(),
    "float": Form(plain.as_float),
    "whole": Form(plain.as_whole),
    "dtype": Form(read=plain.dtype_name),
    "negated": Form(plain.negated, plain.negated),
    "rope": Form(plain.write_rope, read_rope),
    "groups": Form(read=plain.read_groups),
    "head_dim": Form(read=plain.read_head_dim),
    "square_heads": Form(plain.square_heads),
    "dense_layers": Form(layers.write_dense, layers.read_dense),
    "sparse_step": Form(layers.write_step, layers.read_step),
    "leading_dense": Form(layers.write_leading_dense, layers.read_leading_dense),
    "shared_experts": Form(moe.write_shared, moe.read_shared),
    "some_shared_experts": Form(moe.write_some_shared, moe.read_shared),
    "one_for_none": Form(plain.one_for_none, plain.none_for_one),
    "group_topk": Form(plain.one_for_none, moe.read_group_topk),
    "routing_scale": Form(moe.write_scale, plain.none_for_one),
    "sum_to_one": Form(moe.write_sum_to_one, moe.read_sum_to_one),
    "greedy": Form(moe.write_greedy, moe.read_greedy),
    "rotated_layers": Form(layers.write_rotated, layers.read_rotated),
    "rotated_interval": Form(layers.write_rope_interval, layers.read_rope_interval),
    "layer_types": Form(layers.write_layer_types, layers.read_layer_types),
    "clamp": Form(plain.clamp),
    "gelu": Form(plain.write_gelu, plain.read_gelu),
    "gelu_tanh": Form(plain.write_gelu_tanh, plain.read_gelu),
    "gpt2_ffn": Form(read=plain.read_gpt2_ffn),
    "sequential": Form(plain.write_sequential, plain.read_sequential),
    "multi_query": Form(plain.write_multi_query, plain.read_multi_query),
    "window": Form(read=plain.read_window),
    "scaled_rope": Form(plain.write_scaled, plain.read_scaled),
    "youtu_std": Form(plain.as_float, plain.read_youtu_std),
    "mlp_types": Form(layers.write_mlp_types, layers.read_mlp_types),
    "sparse_layers": Form(plain.write_nothing, moe.read_sparse_layers),
    "indexer_types": Form(moe.write_indexers, moe.read_indexers),
    "index_freq": Form(moe.write_index_freq, moe.read_indexers),
    "index_offset": Form(moe.write_index_offset, moe.read_indexers),
    "no_window": Form(plain.write_nothing, layers.read_no_window),
    "exaone_windows": Form(layers.write_layer_types, layers.read_exaone_types),
    "exaone_rope": Form(layers.write_types_that_rotate, layers.read_exaone_rope),
    "rotary_dim": Form(plain.write_rotary_dim, plain.read_rotary_dim),
    "several_experts": Form(moe.write_several, moe.read_several),
    "sarvam_rope": Form(plain.write_rope, plain.read_sarvam_rope),
    "linear_layers": Form(hybrid.write_linear, hybrid.read_linear),
    "linear_interval": Form(hybrid.write_interval, hybrid.read_interval),
    "hybrid_pattern": Form(read=hybrid.read_pattern),
    "experts_of_pattern": Form(read=hybrid.read_experts),
    "mamba_layers": Form(hybrid.write_pattern_length, hybrid.read_mamba_layers),
    "parallel_layers": Form(hybrid.write_pattern_length, hybrid.read_parallel_layers),
    "mamba_head": Form(read=hybrid.read_mamba_head),
    "mamba_inner": Form(hybrid.write_inner, hybrid.read_inner),
    "mamba_expand": Form(hybrid.write_expand, hybrid.read_expand),
}
DEFAULTS: dict[str, Callable[[Config], Any]] = {
    "heads": plain.heads,
    "head_dim": plain.head_dim,
    "every_second": layers.every_second,
    "every_fourth_full": layers.every_fourth_full,
    "all_sliding": layers.all_sliding,
    "youtu_std": plain.youtu_std,
    "leading_dense": layers.leading_dense,
    "dense_by_types": layers.dense_by_types,
    "rotary_factor": plain.rotary_factor,
    "expert_size": moe.expert_size,
    "pattern_length": hybrid.count_layers,
}
