"""Settings that say something of each layer, and what they say of a part of the layers: expanded, cut, written again.

One table for Megatron's arguments, Megatron-Bridge's `model` section and config.json. What is in none of its rows
and has an entry for each layer is refused by its name, unless its entries are known to be of something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.megatron.huggingface.config.layer_patterns import TURNS, in_turns, indexer_layers, sharing
from ckpt_tools.megatron.huggingface.config.ledger import arguments, config_fields_of, short

_COUNTS = ("num_layers", "encoder_num_layers", "num_hidden_layers", "n_layer", "depth")
# An entry for each layer, in a list or a text; those of TURNS can be a number in its place.
_EACH = (*TURNS, "hybrid_layer_pattern", "hybrid_override_pattern", "layer_types", "mlp_layer_types",
         "layers_block_type", "indexer_types", "no_rope_layers", "is_moe_layer", "sliding_windows", "attn_type_list",
         "compress_ratios", "csa_compress_ratios")  # fmt: skip
# A list of an entry for each layer; a text, or a list of one, is for all of them.
_EACH_OR_ONE = ("cp_comm_type", "rotary_base_per_layer")
# The last layer of each turn is another; a number and no list. Unused where the second setting is there.
_ONLY_TURNS = {
    "sliding_window_pattern": "layer_types",
    "_sliding_window_pattern": "layer_types",
    "full_attention_interval": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
    "decoder_sparse_step": None,
    "interleaved_attn_pattern": None,
}
# Numbers of first layers and of last ones, each with the switch that they need.
_FIRST = {"first_k_dense_replace": None, "max_window_layers": None,
          "num_layers_at_start_in_bf16": "first_last_layers_bf16"}  # fmt: skip
_LAST = {"num_layers_at_end_in_bf16": "first_last_layers_bf16"}
# Lists of layers by number; each layer in the second kind also has weights outside of the layers.
_PLACES = ("mlp_only_layers", "attn_layer_indices", "full_attn_idxs", "fullatt_block_indexes")
_PLACES_WITH_WEIGHTS = ("deepstack_visual_indexes",)
_INDEXERS = (("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"),
             ("index_topk_freq", "index_skip_topk_offset"))  # fmt: skip
_AT_MOST = {"recompute_num_layers": 0, "mhc_recompute_layer_num": 0, "cpu_offloading_num_layers": 1}
# How a job spreads layers over pipeline stages, which no longer fits: Megatron then spreads them evenly.
_STAGES = (
    "pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "first_pipeline_num_layers",
    "last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size",
)  # fmt: skip
_JSON = "heterogeneous_layers_config_encoded_json"
# What has no form for a part of the layers, unless the second setting is there and decides.
_NEVER = {"hybrid_attention_ratio": ("hybrid_override_pattern", "hybrid_layer_pattern"),
          "hybrid_mlp_ratio": ("hybrid_override_pattern", "hybrid_layer_pattern"),
          "heterogeneous_layers_config_path": (_JSON,), "per_layer_config": (),
          "num_kv_shared_layers": ()}  # fmt: skip
# Lists with entries that are no layers, even if there are as many as layers.
_OF_NO_LAYERS = frozenset({
    "blend", "blend_per_split", "betas", "cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated",
    "data_path", "ddp_param_name_patterns_for_fp32_local_accumulation", "finetune_data_files",
    "gtp_remat_opt_in_modules", "hierarchical_context_parallel_sizes", "high_priority_stream_groups",
    "interleaved_attn_pattern", "iterations_to_skip", "mlp_multipliers", "moe_aux_loss_coeff",
    "moe_router_load_balancing_type", "mrope_section", "offload_modules",
    "param_name_patterns_for_fp32_local_accumulation", "profile_ranks", "rampup_batch_size", "recompute_modules",
    "retriever_report_topk_accuracies", "rl_inference_parsers", "rotary_base", "spec", "special_tokens",
    "ssm_multipliers", "test_data_path", "tiktoken_special_tokens", "tokenizer_special_tokens", "train_data_path",
    "valid_data_path", "validation_set_names", "window_size",
})  # fmt: skip
_ROWS = {*_COUNTS, *_EACH, *_EACH_OR_ONE, *_ONLY_TURNS, *_FIRST, *_LAST, *_PLACES, *_PLACES_WITH_WEIGHTS, *_AT_MOST,
         *_STAGES, *_NEVER, _JSON, *(name for pair in _INDEXERS for name in pair)}  # fmt: skip
_SOUNDS_LIKE_ONE = re.compile(
    r"(layer|attn|attention|moe|expert|window)\w*_(freq|pattern|interval|period|offset|types|ratios)$"
)


class Layers(NamedTuple):
    """Layers `[start, stop)` of `total`."""

    start: int
    stop: int
    total: int

    @property
    def kept(self) -> int:
        return self.stop - self.start

    def clamp(self, layer: int) -> int:
        """A boundary between layers in the numbers of those kept."""
        return min(max(layer, self.start), self.stop) - self.start


def cut_settings(settings: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    """The settings that say another thing of the layers kept."""
    changed: dict[str, Any] = {name: layers.kept for name in _COUNTS if settings.get(name) == layers.total}
    if not changed:
        return {}
    for name, value in settings.items():
        if value and name not in changed and (name in TURNS or layers.kept < layers.total):
            try:
                changed[name] = _cut(name, value, settings, layers)
            except (TypeError, ValueError, LookupError):
                raise UsageError(f"{name} = {short(value)} is not a value that this setting has") from None
    if settings.get("first_last_layers_bf16") and layers.kept < layers.total:  # without numbers, 1 of each
        for name, switch in (*_FIRST.items(), *_LAST.items()):
            if switch and settings.get(name) is None:
                changed[name] = _cut(name, 1, settings, layers)
    for freq, offset in _INDEXERS if layers.kept < layers.total else ():
        if settings.get(freq, 1) not in (None, 0, 1) and not settings.get("indexer_types"):
            pattern = indexer_layers(layers.total, settings[freq], settings.get(offset) or 0)
            try:
                changed[freq], changed[offset] = sharing(pattern[layers.start : layers.stop])
            except MappingError as error:
                raise _no_form(freq, settings[freq], layers) from error
    return {name: value for name, value in changed.items() if value != settings.get(name)}


def _cut(name: str, value: Any, settings: Mapping[str, Any], layers: Layers) -> Any:
    """What a setting is for the layers kept; `value` where it stays."""
    is_number = type(value) is int
    if name in _EACH:
        if is_number and name in TURNS:
            pattern = in_turns(name, value, layers.total) if value > 1 else ()
            return list(pattern[layers.start : layers.stop]) if len(set(pattern)) > 1 else value
        return _part(name, value, layers)
    if name in _EACH_OR_ONE:
        return value if isinstance(value, str) or len(value) == 1 else _part(name, value, layers)
    if name in _ONLY_TURNS:
        turn = value if is_number else sum(value)
        is_used = turn > 1 and not settings.get(_ONLY_TURNS[name] or "")
        ends = (
            [layer for layer in range(layers.start, layers.stop) if (layer + 1) % turn == 0]
            if is_used
            else []
        )
        if is_used and ends != [
            layer + layers.start for layer in range(layers.kept) if (layer + 1) % turn == 0
        ]:
            raise _no_form(name, value, layers)
    elif name in _FIRST and is_number and settings.get(_FIRST[name] or name):
        return layers.clamp(value)
    elif name in _LAST and settings.get(_LAST[name] or name):
        return layers.kept - layers.clamp(layers.total - value)
    elif name in (*_PLACES, *_PLACES_WITH_WEIGHTS):
        kept = [place - layers.start for place in value if layers.start <= place < layers.stop]
        if name in _PLACES_WITH_WEIGHTS and len(kept) < len(value):
            raise _no_form(name, value, layers)
        return kept
    elif name in _AT_MOST:
        return min(value, layers.kept - _AT_MOST[name])
    elif name in _STAGES:
        return None
    elif name == _JSON:
        config = json.loads(value)
        return json.dumps({**config, "block_configs": _part(name, config["block_configs"], layers)})
    elif name in _NEVER and not any(map(settings.get, _NEVER[name])):
        raise _no_form(name, value, layers)
    elif name == "heterogeneous_layers_config_path":
        return None
    elif _may_follow(name, value, layers.total):
        raise MappingError(
            f"{name} = {short(value)}: this setting may say something of each layer, so "
            "its value for a part of them is unknown; remove it from the settings first"
        )
    return value


def _part(name: str, value: Any, layers: Layers) -> Any:
    """The entries of the layers kept. Behind a slash a text has patterns of prediction layers, which stay."""
    entries, behind = value, ""
    if isinstance(value, str):
        pattern, slash, tail = value.partition("/")
        entries, behind = re.sub(r"[|\s]", "", pattern), slash + tail
    if not isinstance(entries, Sequence) or (entries and len(entries) != layers.total):
        raise UsageError(f"{name} = {short(value)} does not have one entry for each of {layers.total} layers")
    part: Any = entries[layers.start : layers.stop]
    return part + behind if behind else part


def _no_form(name: str, value: Any, layers: Layers) -> UsageError:
    return UsageError(
        f"{name} = {short(value)} cannot say what layers {layers.start}:{layers.stop} of {layers.total} are; "
        "choose other layers"
    )


def _may_follow(name: str, value: Any, total: int) -> bool:
    """Whether a setting without a row has an entry for each layer, or a name that sounds like one."""
    if name in _ROWS or name in _OF_NO_LAYERS or name.startswith("mtp_") or name in config_fields_of(""):
        return False
    if isinstance(value, list | tuple) and (len(value) == total or name in arguments().changes):
        return True
    return name not in arguments() and bool(_SOUNDS_LIKE_ONE.search(name)) and value != 1
