"""config.json of the models that are used most, as they are released and every size shrunk: each is taken whole.

Their fields are facts, written down from memory of the releases: nothing here proves them, and no class of
transformers contradicts them (test_texts_peers.py). `quantization_config` is left out, which the tests of quantized
models have.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron.huggingface.by_rules import assert_same, directory, exported, imported

SIZES = {"hidden_size": 16, "intermediate_size": 20, "max_position_embeddings": 64, "num_attention_heads": 4,
         "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 11, "initializer_range": 0.02,
         "use_cache": True, "torch_dtype": "float32", "attention_dropout": 0.0, "hidden_act": "silu",
         "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}  # fmt: skip
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
          "rope_type": "llama3"}  # fmt: skip
BIASES = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
QWEN = {"use_sliding_window": False, "sliding_window": None, "rope_theta": 1000000.0, "rms_norm_eps": 1e-06}
QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 6, "norm_topk_prob": True,
            "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False,
            "router_aux_loss_coef": 0.001}  # fmt: skip
DEEPSEEK_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                 "original_max_position_embeddings": 4096, "type": "yarn"}  # fmt: skip
DEEPSEEK = {"attention_bias": False, "num_key_value_heads": 4, "aux_loss_alpha": 0.001, "ep_size": 1,
            "first_k_dense_replace": 1, "kv_lora_rank": 8, "moe_intermediate_size": 6, "moe_layer_freq": 1,
            "n_routed_experts": 4, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 2,
            "pretraining_tp": 1, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "rms_norm_eps": 1e-06,
            "rope_theta": 10000, "seq_aux": True}  # fmt: skip
DEEPSEEK_V3 = {**DEEPSEEK, "q_lora_rank": 6, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
               "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1}  # fmt: skip
GLM = {"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 4, "moe_intermediate_size": 6, "n_group": 1,
       "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "norm_topk_prob": True,
       "num_experts_per_tok": 2, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-05,
       "rope_theta": 1000000, "rope_scaling": None, "num_nextn_predict_layers": 1, "pad_token_id": 7}  # fmt: skip
GEMMA = {"attention_bias": False, "head_dim": 4, "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0,
         "rms_norm_eps": 1e-06, "rope_theta": 10000.0}  # fmt: skip
POPULAR: dict[str, dict[str, Any]] = {
    "Llama-3.3-70B-Instruct": {
        **BIASES, "architectures": ["LlamaForCausalLM"], "eos_token_id": [2, 3, 4], "head_dim": 4,
        "model_type": "llama", "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "Llama-3.2-1B": {
        **BIASES, "architectures": ["LlamaForCausalLM"], "head_dim": 4, "model_type": "llama", "rms_norm_eps": 1e-05,
        "rope_scaling": {**LLAMA3, "factor": 32.0}, "rope_theta": 500000.0, "tie_word_embeddings": True},
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 8},
    "Mistral-Nemo-Instruct-2407": {
        "architectures": ["MistralForCausalLM"], "head_dim": 6, "model_type": "mistral", "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": None},
    "Mixtral-8x22B-v0.1": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2,
        "num_local_experts": 4, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "sliding_window": None},
    "Qwen2.5-7B-Instruct": {
        **QWEN, "architectures": ["Qwen2ForCausalLM"], "max_window_layers": 28, "model_type": "qwen2",
        "sliding_window": 131072},
    "Qwen1.5-MoE-A2.7B": {
        **QWEN, **QWEN_MOE, "architectures": ["Qwen2MoeForCausalLM"], "max_window_layers": 21,
        "model_type": "qwen2_moe", "norm_topk_prob": False, "shared_expert_intermediate_size": 24,
        "sliding_window": 32768},
    "Qwen3-8B": {
        **QWEN, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 6,
        "max_window_layers": 36, "model_type": "qwen3", "rope_scaling": None},
    "Qwen3-30B-A3B": {
        **QWEN, **QWEN_MOE, "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "head_dim": 6,
        "max_window_layers": 48, "model_type": "qwen3_moe", "rope_scaling": None},
    "Qwen3-235B-A22B-Instruct-2507": {
        **QWEN, **QWEN_MOE, "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "head_dim": 6,
        "max_window_layers": 94, "model_type": "qwen3_moe", "rope_scaling": None, "rope_theta": 5000000},
    "DeepSeek-V2-Lite": {
        **DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "n_group": 1,
        "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "n_shared_experts": 2, "routed_scaling_factor": 1.0, "q_lora_rank": None,
        "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"}},
    "DeepSeek-V3-0324": {
        **DEEPSEEK_V3, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_group": 2,
        "topk_group": 1, "rope_scaling": DEEPSEEK_YARN,
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}},
    "Kimi-K2-Instruct": {
        **DEEPSEEK_V3, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
        "rope_scaling": {**DEEPSEEK_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}},
    "GLM-4.6": {
        **GLM, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "use_qk_norm": True},
    "GLM-4.5-Air": {
        **GLM, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "use_qk_norm": False,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 2, "head_dim": 4,
        "initial_context_length": 4096, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "model_type": "gpt_oss", "num_experts_per_tok": 2, "num_local_experts": 4, "output_router_logits": False,
        "pad_token_id": 7, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                         "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
        "sliding_window": 8, "swiglu_limit": 7.0},
    "phi-4": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "embd_pdrop": 0.0, "model_type": "phi3",
        "original_max_position_embeddings": 64, "pad_token_id": 7, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 250000, "sliding_window": None},
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "layer_types": ["full_attention"] * 4,
        "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0], "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False, "pad_token_id": 7,
        "tie_word_embeddings": True},
    "Seed-OSS-36B-Instruct": {
        "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False,
        "attention_dropout": 0.1, "head_dim": 6, "mlp_bias": False, "model_type": "seed_oss", "pad_token_id": 1,
        "residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0},
    "ERNIE-4.5-0.3B-PT": {
        "architectures": ["Ernie4_5ForCausalLM"], "head_dim": 6, "model_type": "ernie4_5", "pad_token_id": 0,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False},
    "gemma-7b": {
        **GEMMA, "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "model_type": "gemma",
        "num_key_value_heads": 4, "rope_scaling": None, "tie_word_embeddings": True},
    "gemma-2-9b-it": {
        **GEMMA, "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
        "model_type": "gemma2", "query_pre_attn_scalar": 4, "sliding_window": 8, "sliding_window_size": 8,
        "tie_word_embeddings": True},
    "gemma-3-1b-it": {
        **{key: value for key, value in GEMMA.items() if key != "rope_theta"},
        "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "final_logit_softcapping": None, "model_type": "gemma3_text", "query_pre_attn_scalar": 4,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 8,
        "sliding_window_pattern": 6, "tie_word_embeddings": True},
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "embd_pdrop": 0.1, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 64, "n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 64, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 11},
}  # fmt: skip


@pytest.mark.parametrize("name", POPULAR)
def test_taken_whole(name: str) -> None:
    """No field is unknown or refused; names, bits and every field of the release come back."""
    config = POPULAR[name] if name == "gpt2" else {**SIZES, **POPULAR[name]}
    if config["model_type"] == "gemma3_text":
        del config["hidden_act"]
    layers = (
        {"mtp_num_layers": config["num_nextn_predict_layers"]} if "num_nextn_predict_layers" in config else {}
    )
    tensors = directory(config, **layers)
    found, megatron = imported(config, tensors)
    made, again = exported(megatron, found.args, config)
    assert_same(again, tensors)
    assert not [note for note in (*found.notes, *made.notes) if "not known" in note]
    lost = {"rope_scaling", "torch_dtype"}  # a scaling is written out in full
    assert {key: made.config[key] for key in config.keys() - lost} == {
        key: config[key] for key in config.keys() - lost
    }
