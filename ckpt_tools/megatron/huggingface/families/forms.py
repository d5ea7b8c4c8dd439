"""The translations that a family file names: `form` of a field (both directions), and `default_by`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ckpt_tools.megatron.huggingface.config import field_values as plain
from ckpt_tools.megatron.huggingface.config import hybrid_values as hybrid
from ckpt_tools.megatron.huggingface.config import layer_values as layers
from ckpt_tools.megatron.huggingface.config import moe_values as moe
from ckpt_tools.megatron.huggingface.config.field_values import Config
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.config.rope_args import read_rope


class Form(NamedTuple):
    """A value as config.json has it, made of that of `ModelArgs` (`write`), and the other way (`read`).

    `says` is a line for authors of rule files, of what config.json has.
    """

    says: str
    write: Callable[[Any, ModelArgs], Any] = plain.plain_write
    read: Callable[[Any, Config], Any] = plain.plain_read


FORMS: dict[str, Form] = {
    "plain": Form("the same value on both sides"),
    "float": Form("the same number, written as a float", plain.as_float),
    "whole": Form("the same number, written as an int where it is one", plain.as_whole),
    "dtype": Form("a type by its name, with or without `torch.` before it", read=plain.dtype_name),
    "negated": Form("true for false, and false for true", plain.negated, plain.negated),
    "rope": Form(
        "`rope_scaling`: llama3, linear or yarn with all their numbers; null for none",
        plain.write_rope,
        read_rope,
    ),
    "groups": Form("the number of key heads; null for as many as there are heads", read=plain.read_groups),
    "head_dim": Form("the size of a head; null for an equal part of `hidden_size`", read=plain.read_head_dim),
    "square_heads": Form(
        "the number of heads of a class without `head_dim`: they make `hidden_size` together",
        plain.square_heads,
    ),
    "dense_layers": Form("a list of the layers without experts", layers.write_dense, layers.read_dense),
    "sparse_step": Form(
        "every n-th layer has experts; read with `mlp_only_layers`, written as 1",
        layers.write_step,
        layers.read_step,
    ),
    "leading_dense": Form(
        "the number of layers without experts, which come first",
        layers.write_leading_dense,
        layers.read_leading_dense,
    ),
    "shared_experts": Form(
        "a number of shared experts, each of `moe_intermediate_size`; 0 for none",
        moe.write_shared,
        moe.read_shared,
    ),
    "some_shared_experts": Form(
        "the same, of a class that always has one", moe.write_some_shared, moe.read_shared
    ),
    "one_for_none": Form("1 for null", plain.one_for_none, plain.none_for_one),
    "group_topk": Form(
        "groups that a token may choose from; null where `n_group` is 1",
        plain.one_for_none,
        moe.read_group_topk,
    ),
    "routing_scale": Form("a factor; 1.0 for null", moe.write_scale, plain.none_for_one),
    "sum_to_one": Form(
        "whether the weights of the chosen experts sum to one: Megatron's do if there are several",
        moe.write_sum_to_one,
        moe.read_sum_to_one,
    ),
    "greedy": Form(
        "`topk_method`: greedy, or group_limited_greedy with `n_group`", moe.write_greedy, moe.read_greedy
    ),
    "rotated_layers": Form(
        "`no_rope_layers`: 1 for each layer that does rotate", layers.write_rotated, layers.read_rotated
    ),
    "rotated_interval": Form(
        "every n-th layer does not rotate; read where `no_rope_layers` is absent, written as 4",
        layers.write_rope_interval,
        layers.read_rope_interval,
    ),
    "layer_types": Form(
        "full_attention or sliding_attention for each layer",
        layers.write_layer_types,
        layers.read_layer_types,
    ),
    "clamp": Form("a limit that must be there", plain.clamp),
    "gelu": Form("the name of a GELU: gelu_new (by tanh) or gelu", plain.write_gelu, plain.read_gelu),
    "gelu_tanh": Form(
        "the same of a class that says gelu_pytorch_tanh", plain.write_gelu_tanh, plain.read_gelu
    ),
    "gpt2_ffn": Form("the size of the MLP; null for four times `n_embd`", read=plain.read_gpt2_ffn),
    "sequential": Form(
        "false, of a class whose attention and MLP stand beside each other unless told",
        plain.write_sequential,
        plain.read_sequential,
    ),
    "multi_query": Form(
        "true for one key head, false for as many as there are heads",
        plain.write_multi_query,
        plain.read_multi_query,
    ),
    "window": Form("the keys that a query sees, of a class that always has a window", read=plain.read_window),
    "scaled_rope": Form(
        "`rope_scaling` of a class that scales by itself where it is null",
        plain.write_scaled,
        plain.read_scaled,
    ),
    "youtu_std": Form(
        "the spread of initial weights; null for what follows from `hidden_size`",
        plain.as_float,
        plain.read_youtu_std,
    ),
    "mlp_types": Form("dense or sparse for each layer", layers.write_mlp_types, layers.read_mlp_types),
    "sparse_layers": Form(
        "`layer_types` of sparse attention, which say nothing more; not written",
        plain.write_nothing,
        moe.read_sparse_layers,
    ),
    "indexer_types": Form(
        "full or shared for each layer: whether it has an indexer", moe.write_indexers, moe.read_indexers
    ),
    "index_freq": Form("every n-th layer has an indexer", moe.write_index_freq, moe.read_indexers),
    "index_offset": Form(
        "how many layers at first have an indexer each", moe.write_index_offset, moe.read_indexers
    ),
    "no_window": Form("a window that no layer has", plain.write_nothing, layers.read_no_window),
    "exaone_windows": Form(
        "full_attention or sliding_attention for each layer, or made of `sliding_window_pattern`",
        layers.write_layer_types,
        layers.read_exaone_types,
    ),
    "exaone_rope": Form(
        "the same list, of a class that rotates the layers with a window alone",
        layers.write_types_that_rotate,
        layers.read_exaone_rope,
    ),
    "rotary_dim": Form("how many rows of a head are rotated", plain.write_rotary_dim, plain.read_rotary_dim),
    "several_experts": Form(
        "the number of experts of a token, of a class that has at least two",
        moe.write_several,
        moe.read_several,
    ),
    "sarvam_rope": Form(
        "`rope_scaling` where YaRN may be called deepseek_yarn", plain.write_rope, plain.read_sarvam_rope
    ),
    "linear_layers": Form(
        "full_attention or linear_attention (a gated delta net) for each layer",
        hybrid.write_linear,
        hybrid.read_linear,
    ),
    "linear_interval": Form(
        "every n-th layer is attention; `layer_types` has the last word",
        hybrid.write_interval,
        hybrid.read_interval,
    ),
    "hybrid_pattern": Form(
        "a letter of each layer of a HybridModel (M Mamba, * attention, - MLP, E experts), or a list of words",
        read=hybrid.read_pattern,
    ),
    "experts_of_pattern": Form("the number of experts, where the pattern has an E", read=hybrid.read_experts),
    "mamba_layers": Form(
        "the number of layers, which are all Mamba", hybrid.write_pattern_length, hybrid.read_mamba_layers
    ),
    "parallel_layers": Form(
        "the number of layers, which all have Mamba beside attention",
        hybrid.write_pattern_length,
        hybrid.read_parallel_layers,
    ),
    "mamba_head": Form(
        "the size of a Mamba head; auto for an equal part of the inner size", read=hybrid.read_mamba_head
    ),
    "mamba_inner": Form("the size of all Mamba heads together", hybrid.write_inner, hybrid.read_inner),
    "mamba_expand": Form(
        "how many times `hidden_size` all Mamba heads are", hybrid.write_expand, hybrid.read_expand
    ),
    "nested_base": Form("`rope_theta` in `rope_parameters`", plain.write_nested_base, plain.read_nested_base),
    "nested_scaling": Form(
        "`rope_type` and the numbers of a scaling in `rope_parameters`",
        plain.write_nested_scaling,
        plain.read_nested_scaling,
    ),
    "nested_part": Form(
        "`partial_rotary_factor` in `rope_parameters`", plain.write_nested_part, plain.read_nested_part
    ),
}
# By what a class takes where config.json has no such field; the first line of each docstring is for authors.
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
    "mamba_heads": hybrid.mamba_heads,
}
