"""The config.json of released models of further dense families, every size shrunk: taken, or refused with a reason.

Beside what their classes say today, they have fields that only the model's first code knew.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron.huggingface.by_rules import assert_same, directory, exported, imported, problems

SIZES = {"hidden_size": 16, "intermediate_size": 20, "max_position_embeddings": 32, "num_attention_heads": 4,
         "num_hidden_layers": 2, "vocab_size": 11, "initializer_range": 0.02, "use_cache": True,
         "torch_dtype": "float32", "transformers_version": "4.44.0"}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
PLAIN = {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "tie_word_embeddings": False}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "type": "yarn"}  # fmt: skip
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
          "rope_type": "llama3"}  # fmt: skip
RELEASED: dict[str, dict[str, Any]] = {
    "Minitron-4B-Base": {
        **GROUPED, **PLAIN, "architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "head_dim": 6,
        "hidden_act": "relu2", "norm_eps": 1e-05, "partial_rotary_factor": 0.5, "rope_theta": 10000,
        "bos_token_id": 2, "eos_token_id": 3, "initializer_range": 0.0134},
    "starcoder2-3b": {
        **GROUPED, "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2",
        "activation_function": "gelu", "attention_dropout": 0.1,
        "attention_softmax_in_fp32": True, "bos_token_id": 0, "embedding_dropout": 0.1,
        "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-05, "mlp_type": "default",
        "norm_epsilon": 1e-05, "norm_type": "layer_norm", "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 8, "use_bias": True},
    "starcoderbase": {
        "activation_function": "gelu", "architectures": ["GPTBigCodeForCausalLM"], "attention_softmax_in_fp32": True,
        "attn_pdrop": 0.1, "bos_token_id": 0, "embd_pdrop": 0.1, "eos_token_id": 0, "inference_runner": 0,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "max_batch_size": None, "max_sequence_length": None,
        "model_type": "gpt_bigcode", "multi_query": True, "n_embd": 16, "n_head": 4, "n_inner": 20, "n_layer": 2,
        "n_positions": 32, "pad_key_length": True, "pre_allocate_kv_cache": False, "resid_pdrop": 0.1,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "use_cache": True, "validate_runner_input": True, "vocab_size": 11},
    "stablelm-2-1_6b": {
        **SIZES, "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "hidden_act": "silu",
        "layer_norm_eps": 1e-05, "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "rope_theta": 10000,
        "tie_word_embeddings": False, "use_qkv_bias": True, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "glm-4-9b-chat-hf": {
        **GROUPED, "architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True, "head_dim": 8,
        "attention_dropout": 0.0, "eos_token_id": [1, 2, 3], "hidden_act": "silu", "pad_token_id": 1,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0,
        "tie_word_embeddings": False},
    "AFM-4.5B": {
        **GROUPED, **PLAIN, "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "head_dim": 4,
        "hidden_act": "relu2", "rms_norm_eps": 1e-05, "rope_scaling": YARN, "rope_theta": 10000.0},
    "helium-1-preview-2b": {
        **SIZES, **PLAIN, "architectures": ["HeliumForCausalLM"], "model_type": "helium", "head_dim": 4,
        "hidden_act": "silu", "num_key_value_heads": 4, "pad_token_id": 3, "rms_norm_eps": 1e-08,
        "rope_theta": 100000.0},
    "RedPajama-INCITE-Base-3B-v1": {
        **SIZES, "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "bos_token_id": 0,
        "eos_token_id": 0, "hidden_act": "gelu", "layer_norm_eps": 1e-05, "rotary_emb_base": 10000, "rotary_pct": 1.0,
        "tie_word_embeddings": False, "use_parallel_residual": False},
    "persimmon-8b-base": {
        **SIZES, "architectures": ["PersimmonForCausalLM"], "model_type": "persimmon", "attention_dropout": 0.0,
        "hidden_act": "relu2", "hidden_dropout": 0.0, "layer_norm_eps": 1e-05, "qk_layernorm": True,
        "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 25000.0, "tie_word_embeddings": False},
    "EXAONE-3.5-2.4B-Instruct": {
        "activation_function": "silu", "architectures": ["ExaoneForCausalLM"], "attention_dropout": 0.0,
        "auto_map": {"AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM"}, "bos_token_id": 1,
        "embed_dropout": 0.0, "eos_token_id": 2, "head_dim": 4, "hidden_size": 16, "initializer_range": 0.02,
        "intermediate_size": 20, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 32, "model_type": "exaone",
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_layers": 2, "pad_token_id": 0,
        "rope_scaling": LLAMA3, "rope_theta": 1000000.0, "tie_word_embeddings": True, "torch_dtype": "float32",
        "vocab_size": 11},
    "EXAONE-4.0-1.2B": {
        **GROUPED, "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 361, "head_dim": 4, "hidden_act": "silu", "pad_token_id": 0,
        "layer_types": ["full_attention"] * 2, "rms_norm_eps": 1e-05, "rope_scaling": {**LLAMA3, "factor": 16.0},
        "rope_theta": 1000000, "sliding_window": None, "sliding_window_pattern": None, "tie_word_embeddings": True},
    "EXAONE-4.0-32B": {
        **GROUPED, "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 361, "head_dim": 4, "hidden_act": "silu", "pad_token_id": 0,
        "num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "rms_norm_eps": 1e-05,
        "rope_scaling": {**LLAMA3, "factor": 16.0}, "rope_theta": 1000000, "sliding_window": 8,
        "sliding_window_pattern": "LLLG", "tie_word_embeddings": False},
    "Falcon-H1-1.5B-Base": {
        **GROUPED, "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "attention_bias": False,
        "attention_dropout": 0.0, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
        "attn_layer_indices": None, "bos_token_id": 1, "embedding_multiplier": 5.656854249492381, "eos_token_id": 11,
        "head_dim": 4, "hidden_act": "silu", "key_multiplier": 0.39062499999999994,
        "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_head": 4, "mamba_d_ssm": 24, "mamba_d_state": 5, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 6, "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False,
        "mamba_use_mlp": True, "mlp_bias": False, "mlp_expansion_factor": 8,
        "mlp_multipliers": (0.8838834764831844, 0.5859375), "num_logits_to_keep": 1, "pad_token_id": 0,
        "projectors_bias": False, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25, "ssm_multipliers": (0.3535, 0.25, 0.1767, 0.5, 0.3535),
        "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False, "time_step_floor": 0.0001,
        "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": "auto"},
    "MiMo-7B-Base": {
        **GROUPED, "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True,
        "attention_dropout": 0.0, "auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
        "head_dim": 4, "hidden_act": "silu", "max_window_layers": 36, "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 640000, "sliding_window": None,
        "tie_word_embeddings": False, "use_mrope": False, "use_sliding_window": False},
    "cwm": {
        **GROUPED, "architectures": ["CwmForCausalLM"], "model_type": "cwm", "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": [2], "head_dim": 4, "hidden_act": "silu", "mlp_bias": False,
        "layer_types": ["full_attention", "sliding_attention"], "rms_norm_eps": 1e-05, "pretraining_tp": 1,
        "rope_scaling": {**LLAMA3, "factor": 16.0}, "rope_theta": 1000000.0, "sliding_window": 8,
        "tie_word_embeddings": False},
}  # fmt: skip
NEOX = RELEASED["RedPajama-INCITE-Base-3B-v1"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stablelm-2-12b": (
        {**RELEASED["stablelm-2-1_6b"], "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": False},
        "use_parallel_residual is True"),
    "pythia-1.4b": (
        {**NEOX, "rotary_pct": 0.25, "use_parallel_residual": True},
        "attention and MLP of a layer beside each other"),
    "gpt-neox-20b, which does not say so": (
        {key: value for key, value in NEOX.items() if key != "use_parallel_residual"},
        "attention and MLP of a layer beside each other"),
    "internlm3-8b-instruct": (
        {**GROUPED, "model_type": "internlm3", "bias": False, "head_dim": 4, "hidden_act": "silu", "qkv_bias": False,
         "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 50000000},
        "Megatron has no 'dynamic' scaling"),
    "GLM-4-9B-0414": ({**GROUPED, "model_type": "glm4"}, "norms behind its attention and its MLP"),
    "OLMo-2-1124-7B": ({**GROUPED, "model_type": "olmo2"}, "norms only behind its attention and its MLP"),
    "ERNIE-4.5-21B-A3B-PT": ({**GROUPED, "model_type": "ernie4_5_moe"}, "Bridge's mapping takes instead"),
    "gemma-4-31B": ({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}, "values are normalized"),
    "Step-3.5-Flash": ({**GROUPED, "model_type": "step3p5"}, "layers with a window have another number of them"),
    "Hunyuan-7B-Instruct": ({**GROUPED, "model_type": "hunyuan_v1_dense"}, "normalized after they are rotated"),
    "granite-3.3-8b-instruct": ({**GROUPED, "model_type": "granite"}, "scales of their own"),
    "Apertus-8B-2509": ({**GROUPED, "model_type": "apertus"}, "xIELU"),
    "phi-2": ({**SIZES, "model_type": "phi"}, "stand beside each other"),
    "opt-1.3b": ({**SIZES, "model_type": "opt"}, "counted from 2"),
    "bloom-7b1": ({"model_type": "bloom"}, "ALiBi"),
    "Llama-4-Scout": ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, "chunks of tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_taken(name: str) -> None:
    """No field is unknown; the tensors come back bit for bit, and every field that the release has."""
    config = RELEASED[name]
    tensors = directory(config)
    found, megatron = imported(config, tensors)
    made, again = exported(megatron, found.args, config)
    assert_same(again, tensors)
    assert not [note for note in (*found.notes, *made.notes) if "not known" in note]
    lost = {"transformers_version", "rope_scaling"}  # a scaling is written out in full
    assert {key: made.config[key] for key in config.keys() - lost} == {
        k: config[k] for k in config.keys() - lost
    }


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    config, text = REFUSED[name]
    assert text in problems(lambda: imported(config, {}))
