"""Settings of layers for a part of the layers: cut, left, or refused by name."""

import json

import pytest

from ckpt_tools.errors import CkptError
from ckpt_tools.megatron.run_state.layer_settings import Layers, cut_settings

BF16 = {"first_last_layers_bf16": True}
BLOCKS = "heterogeneous_layers_config_encoded_json"


@pytest.mark.parametrize(
    ("layers", "settings", "expected"),
    [
        ((0, 4, 4), {"linear_attention_freq": 4}, {"linear_attention_freq": [1, 1, 1, 0]}),
        ((2, 4, 4), {"linear_attention_freq": 4}, {"linear_attention_freq": [1, 0]}),
        ((1, 3, 4), {"linear_attention_freq": [1, 0, 1, 1]}, {"linear_attention_freq": [0, 1]}),
        ((1, 3, 4), {"window_attn_skip_freq": [1, 0, 1, 0]}, {"window_attn_skip_freq": [0, 1]}),
        ((1, 3, 6), {"window_attn_skip_freq": 3}, {"window_attn_skip_freq": [1, 0]}),
        ((1, 4, 4), {"moe_layer_freq": 2}, {"moe_layer_freq": [0, 1, 0]}),
        ((0, 1, 4), {"moe_layer_freq": (0, 1, 1, 1)}, {"moe_layer_freq": (0,)}),
        ((0, 1, 4), {"moe_layer_freq": 1}, {}),
        ((1, 4, 4), {"no_rope_freq": 2}, {"no_rope_freq": [1, 0, 1]}),
        ((1, 4, 4), {"no_rope_freq": 0}, {}),
        ((1, 3, 4), {"hybrid_layer_pattern": "M*|-M/MM"}, {"hybrid_layer_pattern": "*-/MM"}),
        ((1, 3, 4), {"hybrid_override_pattern": "M*-M"}, {"hybrid_override_pattern": "*-"}),
        ((1, 3, 4), {"mtp_hybrid_override_pattern": "MMMM", "mtp_layer_freq": 3}, {}),
        ((1, 3, 4), {"layer_types": list("abcd"), "mlp_layer_types": list("efgh")},
         {"layer_types": ["b", "c"], "mlp_layer_types": ["f", "g"]}),
        ((2, 6, 6), {"first_k_dense_replace": 3}, {"first_k_dense_replace": 1}),
        ((2, 4, 6), {"max_window_layers": 6}, {"max_window_layers": 2}),
        ((4, 6, 6), {"first_k_dense_replace": 3}, {"first_k_dense_replace": 0}),
        ((1, 3, 4), {"mlp_only_layers": [0, 2, 3]}, {"mlp_only_layers": [1]}),
        ((4, 6, 8), {"decoder_sparse_step": 2}, {}),
        ((5, 6, 8), {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ((6, 8, 12), {"sliding_window_pattern": 6, "interleaved_attn_pattern": (5, 1)}, {}),
        ((5, 8, 12), {"sliding_window_pattern": 6}, "sliding_window_pattern"),
        ((5, 8, 12), {"sliding_window_pattern": 6, "layer_types": list("abcdefghijkl")},
         {"layer_types": ["f", "g", "h"]}),
        ((5, 8, 12), {"interleaved_attn_pattern": [5, 1]}, "interleaved_attn_pattern"),
        ((1, 4, 8), {"full_attention_interval": 4}, "full_attention_interval"),
        ((1, 3, 6), {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 4, **BF16},
         {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}),
        ((1, 3, 6), {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}, {}),
        ((1, 3, 6), {"recompute_num_layers": 4}, {"recompute_num_layers": 2}),
        ((1, 3, 6), {"recompute_num_layers": 1}, {}),
        ((1, 3, 6), {"pipeline_model_parallel_layout": "Ett|ttttL", "num_layers_in_first_pipeline_stage": 2},
         {"pipeline_model_parallel_layout": None, "num_layers_in_first_pipeline_stage": None}),
        ((0, 6, 6), {"pipeline_model_parallel_layout": "Ett|ttttL"}, {}),
        ((0, 5, 8), {"dsa_indexer_topk_freq": 3, "dsa_indexer_skip_topk_offset": 3}, {}),
        ((1, 8, 8), {"dsa_indexer_topk_freq": 3, "dsa_indexer_skip_topk_offset": 3},
         {"dsa_indexer_skip_topk_offset": 2}),
        ((4, 8, 8), {"dsa_indexer_topk_freq": 3, "dsa_indexer_skip_topk_offset": 3}, "dsa_indexer_topk_freq"),
        ((1, 2, 3), {BLOCKS: json.dumps({"block_configs": [1, 2, 3]}), "heterogeneous_layers_config_path": "x"},
         {BLOCKS: json.dumps({"block_configs": [2]}), "heterogeneous_layers_config_path": None}),
        ((1, 2, 3), {"heterogeneous_layers_config_path": "x"}, "heterogeneous_layers_config_path"),
        ((1, 2, 3), {"hybrid_attention_ratio": 0.5}, "hybrid_attention_ratio"),
        ((1, 2, 3), {"deepstack_visual_indexes": [0, 1]}, "deepstack_visual_indexes"),
        ((1, 2, 3), {"moe_layer_freq": [0, 1]}, "moe_layer_freq"),
        ((1, 2, 3), {"mlp_only_layers": "none"}, "mlp_only_layers"),
        ((1, 2, 3), {"window_of_each_layer": [1, 0, 1]}, "window_of_each_layer"),
        ((1, 2, 3), {"my_attention_freq": 2}, "my_attention_freq"),
        ((0, 1, 2), {"cp_comm_type": ["p2p", "a2a"]}, {"cp_comm_type": ["p2p"]}),
        ((1, 3, 3), {"cp_comm_type": ["p2p"]}, {}),
        ((1, 3, 3), {"cp_comm_type": "p2p"}, {}),
        ((1, 3, 4), {"rotary_base_per_layer": (1, 2, 3, 4)}, {"rotary_base_per_layer": (2, 3)}),
        ((1, 3, 4), {"rotary_base_per_layer": (1, 2, 3)}, "rotary_base_per_layer"),
        ((1, 3, 4), {"swiglu_limits": [1, 2, 3, 4]}, "swiglu_limits"),
        ((1, 3, 4), {"kimi_kda_layers": [1, 2]}, "kimi_kda_layers"),
        ((1, 3, 4), {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ((1, 3, 4), {"attention_layers": ["global", "local"] * 2}, "attention_layers"),
        ((1, 3, 4), BF16, {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0}),
        ((0, 4, 4), BF16, {}),
        ((0, 3, 4), {**BF16, "num_layers_at_end_in_bf16": None},
         {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}),
        ((0, 1, 2), {"window_size": (7, 0), "eos_token_id": [1, 2], "rotary_base": [1, 2], "profile_ranks": [0, 1]},
         {}),
        ((1, 2, 3), {"data_path": ["a", "b", "c"], "rope_local_base_freq": 10000, "my_list": [1, 2]}, {}),
    ],
)  # fmt: skip
def test_a_setting_of_some_layers(layers, settings, expected):
    cut, settings = Layers(*layers), {"num_layers": layers[2], **settings}
    if isinstance(expected, str):
        with pytest.raises(CkptError, match=f"^{expected} = "):
            cut_settings(settings, cut)
    else:
        assert settings | cut_settings(settings, cut) == settings | {"num_layers": cut.kept, **expected}
