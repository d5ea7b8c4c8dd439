"""Settings of two checkpoints: which differences make another model."""

import pytest

from ckpt_tools.megatron.huggingface.config.same_model import args_differences, config_differences

GELU = {"bias_gelu_fusion": True}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("one", "other", "of_model", "noted"),
    [
        ({"rotary_base": 10000}, {"rotary_base": 5.0}, ["rotary_base"], []),
        ({"rotary_base": 10000}, {"rotary_base": 10000.0}, [], []),
        ({"normalization": "RMSNorm"}, {"normalization": "LayerNorm"}, ["normalization"], []),
        ({"layernorm_epsilon": 1e-5}, {"layernorm_epsilon": 1e-6}, ["layernorm_epsilon"], []),
        ({"swiglu": True}, {"swiglu": False}, ["swiglu"], []),
        ({"num_attention_heads": 4}, {"num_attention_heads": 2}, ["num_attention_heads"], []),
        ({"position_embedding_type": "rope"}, {"position_embedding_type": "none"}, ["position_embedding_type"], []),
        ({"untie_embeddings_and_output_weights": True}, {"untie_embeddings_and_output_weights": False},
         ["untie_embeddings_and_output_weights"], []),
        ({"window_size": None}, {"window_size": (7, 0)}, ["window_size"], []),
        ({"window_size": [7, 0]}, {"window_size": (7, 0)}, [], []),
        ({"qk_l2_norm": None}, {"qk_l2_norm": False}, [], []),
        ({"qk_l2_norm": True}, {"qk_l2_norm": False}, ["qk_l2_norm"], []),
        ({"num_layers": 2, "moe_layer_freq": 1}, {"num_layers": 2, "moe_layer_freq": [1, 1]}, [], []),
        ({**GELU, "swiglu": True}, {"bias_gelu_fusion": False, "swiglu": True}, [], []),
        (GELU, {"bias_gelu_fusion": False}, ["bias_gelu_fusion"], []),
        ({"attention_dropout": 0.1, "seq_length": 8}, {"attention_dropout": 0.0, "seq_length": 16}, [],
         ["attention_dropout", "seq_length"]),
        ({"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 2}, [], ["expert_tensor_parallel_size"]),
        ({"lr": 1, "save": "a", "rotary_base": 1}, {"lr": 2, "save": "b"}, [], []),
        ({"transformer": {"rotary_base": 1}}, {"transformer": {"rotary_base": 2}}, ["rotary_base"], []),
    ],
)  # fmt: skip
def test_args(one, other, of_model, noted):
    found = list(args_differences(one, other))
    assert [d.name for d in found if d.is_model] == of_model
    assert [d.name for d in found if not d.is_model] == noted


@pytest.mark.parametrize(
    ("one", "other", "of_model", "noted"),
    [
        ({}, {"model_type": "mistral"}, ["model_type"], []),
        ({}, {"rope_theta": 5}, ["rope_theta"], []),
        ({}, {"rope_theta": 10000, "transformers_version": "5", "eos_token_id": 3}, [], []),
        ({}, {"rope_theta": 10000, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}, [], []),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, ["tie_word_embeddings"], []),
        ({"tie_word_embeddings": True}, {}, ["tie_word_embeddings"], []),
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-6}, ["rms_norm_eps"], []),
        ({"initializer_range": 1, "max_position_embeddings": 8},
         {"initializer_range": 2, "max_position_embeddings": 9}, [],
         ["initializer_range", "max_position_embeddings"]),
        ({"text_config": {"model_type": "llama", "rope_theta": 1}}, {"text_config": {"model_type": "llama",
          "rope_theta": 2}}, ["text_config.rope_theta"], []),
    ],
)  # fmt: skip
def test_configs(one, other, of_model, noted):
    found = list(config_differences({**LLAMA, **one}, {**LLAMA, **other}))
    assert [d.name for d in found if d.is_model] == of_model
    assert [d.name for d in found if not d.is_model] == noted
