"""config.json of released models, every size shrunk: those used most, further dense ones, with experts, and hybrids.

Their fields are facts, written down from memory of the releases: nothing here proves them, and no class of
transformers contradicts them (test_texts_peers.py). `quantization_config` is left out, which the tests of quantized
models have.
"""

from typing import Any

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
GLM4 = {"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 4, "moe_intermediate_size": 6, "n_group": 1,
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
        **GLM4, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "use_qk_norm": True},
    "GLM-4.5-Air": {
        **GLM4, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "use_qk_norm": False,
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

POPULAR = {name: text if "n_embd" in text else {**SIZES, **text} for name, text in POPULAR.items()}
del POPULAR["gemma-3-1b-it"]["hidden_act"]

SMALL = {"hidden_size": 16, "intermediate_size": 20, "max_position_embeddings": 32, "num_attention_heads": 4,
         "num_hidden_layers": 2, "vocab_size": 11, "initializer_range": 0.02, "use_cache": True,
         "torch_dtype": "float32", "transformers_version": "4.44.0"}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
PLAIN = {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "tie_word_embeddings": False}
AFM_YARN = {**DEEPSEEK_YARN, "factor": 20.0, "rope_type": "yarn"}
del AFM_YARN["mscale_all_dim"]
DENSE: dict[str, dict[str, Any]] = {
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
        **SMALL, "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "hidden_act": "silu",
        "layer_norm_eps": 1e-05, "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "rope_theta": 10000,
        "tie_word_embeddings": False, "use_qkv_bias": True, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "glm-4-9b-chat-hf": {
        **GROUPED, "architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True, "head_dim": 8,
        "attention_dropout": 0.0, "eos_token_id": [1, 2, 3], "hidden_act": "silu", "pad_token_id": 1,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0,
        "tie_word_embeddings": False},
    "AFM-4.5B": {
        **GROUPED, **PLAIN, "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "head_dim": 4,
        "hidden_act": "relu2", "rms_norm_eps": 1e-05, "rope_scaling": AFM_YARN, "rope_theta": 10000.0},
    "helium-1-preview-2b": {
        **SMALL, **PLAIN, "architectures": ["HeliumForCausalLM"], "model_type": "helium", "head_dim": 4,
        "hidden_act": "silu", "num_key_value_heads": 4, "pad_token_id": 3, "rms_norm_eps": 1e-08,
        "rope_theta": 100000.0},
    "RedPajama-INCITE-Base-3B-v1": {
        **SMALL, "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "bos_token_id": 0,
        "eos_token_id": 0, "hidden_act": "gelu", "layer_norm_eps": 1e-05, "rotary_emb_base": 10000, "rotary_pct": 1.0,
        "tie_word_embeddings": False, "use_parallel_residual": False},
    "persimmon-8b-base": {
        **SMALL, "architectures": ["PersimmonForCausalLM"], "model_type": "persimmon", "attention_dropout": 0.0,
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
# GLM-4.5 as rule files are tested with it.
GLM = {
    "vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 4, "intermediate_size": 10, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
    "torch_dtype": "float32", "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True,
    "partial_rotary_factor": 0.5, "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
MEDIUM = {"vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 4, "num_attention_heads": 4,
          "intermediate_size": 10, "moe_intermediate_size": 6, "num_experts_per_tok": 2,
          "max_position_embeddings": 32}  # fmt: skip
LATENT = {
    **MEDIUM, "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 4, "n_routed_experts": 4, "n_shared_experts": 1, "attention_bias": False,
    "hidden_act": "silu", "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "ep_size": 1, "attention_dropout": 0.0, "initializer_range": 0.02,
}  # fmt: skip
OF_GROUPS = {**MEDIUM, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6}
INDEX = {"index_topk": 3, "index_head_dim": 6, "index_n_heads": 3}
LATENT_YARN = {**DEEPSEEK_YARN, "original_max_position_embeddings": 16}
SPARSE: dict[str, dict[str, Any]] = {
    "DeepSeek-V3.2": {**LATENT, **INDEX, "model_type": "deepseek_v32", "first_k_dense_replace": 2, "n_group": 2,
                      "topk_group": 1, "rope_theta": 10000, "rope_scaling": LATENT_YARN},
    "GLM-5": {**LATENT, **INDEX, "model_type": "glm_moe_dsa", "first_k_dense_replace": 3, "n_group": 1,
              "topk_group": 1, "head_dim": 2, "qk_head_dim": 6, "rope_interleave": True, "pretraining_tp": 1,
              "indexer_rope_interleave": True, "rms_norm_eps": 1e-5,
              "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "dtype": "bfloat16",
              "mlp_layer_types": ["dense", "dense", "dense", "sparse"],
              "layer_types": ["deepseek_sparse_attention"] * 4},
    "GLM-5.2": {**LATENT, **INDEX, "model_type": "glm_moe_dsa", "first_k_dense_replace": 1, "num_hidden_layers": 8,
                "indexer_types": ["full", "full", "full", "shared", "shared", "shared", "full", "shared"],
                "index_topk_freq": 4, "index_skip_topk_offset": 3, "indexer_rope_interleave": True,
                "index_share_for_mtp_iteration": True, "moe_router_dtype": "float32"},
    "GLM-4.7-Flash": {**LATENT, "model_type": "glm4_moe_lite", "first_k_dense_replace": 1, "n_group": 1,
                      "topk_group": 1, "partial_rotary_factor": 1.0, "rope_scaling": None, "rope_theta": 1000000,
                      "routed_scaling_factor": 1.8, "dtype": "bfloat16"},
    "Moonlight": {**LATENT, "model_type": "deepseek_v3", "q_lora_rank": None, "first_k_dense_replace": 1,
                  "n_group": 1, "topk_group": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "rope_theta": 50000.0,
                  "rope_scaling": None, "routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0},
    "dots.llm1": {**OF_GROUPS, "model_type": "dots1", "first_k_dense_replace": 1, "n_routed_experts": 4,
                  "n_shared_experts": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_theta": 10000000,
                  "scoring_func": "sigmoid", "attention_bias": False, "rms_norm_eps": 1e-5, "n_group": None,
                  "topk_group": None, "sliding_window": None},
    "MiniMax-M2": {**{k: v for k, v in OF_GROUPS.items() if k != "moe_intermediate_size"}, "model_type": "minimax_m2",
                   "attn_type_list": [1, 1, 1, 1], "auto_map": {"AutoConfig": "configuration_minimax_m2.Config"},
                   "mtp_transformer_layers": 1, "num_local_experts": 4, "num_mtp_modules": 3,
                   "qk_norm_type": "per_layer", "rope_theta": 5000000, "rotary_dim": 2, "scoring_func": "sigmoid",
                   "shared_intermediate_size": 0, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True},
    "OLMoE": {**{k: v for k, v in OF_GROUPS.items() if k not in ("moe_intermediate_size", "head_dim")},
              "model_type": "olmoe", "num_key_value_heads": 4, "num_experts": 3, "norm_topk_prob": False,
              "attention_bias": False, "clip_qkv": None, "rope_theta": 10000.0},
    "K-EXAONE": {**OF_GROUPS, "model_type": "exaone_moe", "first_last_k_dense_replace": 1, "num_experts": 4,
                 "is_moe_layer": [False, True, True, True], "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
                 "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
                 "sliding_window": 4, "sliding_window_pattern": "LLLG", "rope_theta": 1000000, "rope_scaling": None,
                 "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "dtype": "bfloat16",
                 "num_nextn_predict_layers": 1},
    "Hy3": {**OF_GROUPS, "model_type": "hy_v3", "qk_norm": True, "first_k_dense_replace": 1, "num_experts": 4,
            "num_shared_experts": 1, "expert_hidden_dim": 6, "router_scaling_factor": 2.826,
            "num_nextn_predict_layers": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0}},
    "Solar-Open": {**OF_GROUPS, "model_type": "solar_open", "partial_rotary_factor": 1.0, "n_routed_experts": 4,
                   "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rope_theta": 1000000,
                   "first_k_dense_replace": 0, "rope_scaling": {"type": "yarn", "factor": 2.0,
                                                                "original_max_position_embeddings": 16}},
    "sarvam": {**OF_GROUPS, "model_type": "sarvam_moe", "num_experts": 4, "num_shared_experts": 1,
               "use_qkv_bias": False, "first_k_dense_replace": 1, "use_qk_norm": True, "rope_theta": 8000000.0,
               "norm_topk_prob": True},
    "sarvam-105b": {**{k: v for k, v in LATENT.items() if not k.startswith("n_")}, "model_type": "sarvam_mla",
                    "q_lora_rank": None, "head_dim": 10, "q_head_dim": 6, "num_experts": 4, "num_shared_experts": 1,
                    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
                    "rope_scaling": {**LATENT_YARN, "type": "deepseek_yarn"}},
    "Ling-2.0": {**OF_GROUPS, "model_type": "bailing_moe_v2", "architectures": ["BailingMoeV2ForCausalLM"],
                 "num_experts": 4, "num_shared_experts": 1, "n_group": 2, "topk_group": 1, "use_qkv_bias": True,
                 "use_bias": False, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "rope_theta": 600000,
                 "use_qk_norm": True, "moe_router_enable_expert_bias": True, "num_nextn_predict_layers": 1},
}  # fmt: skip
NARROW = {
    "vocab_size": 11,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
NET = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
       "linear_value_head_dim": 5}  # fmt: skip
QWEN3_NEXT = {
    **NARROW, **NET, "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
    "hidden_act": "silu", "initializer_range": 0.02, "intermediate_size": 10, "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 6, "norm_topk_prob": True,
    "num_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 8, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 14, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": True, "use_sliding_window": False,
}  # fmt: skip
QWEN3_5 = {  # the text_config of a model with images
    **NARROW, **NET, "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
    "eos_token_id": 248044, "full_attention_interval": 4, "hidden_act": "silu", "initializer_range": 0.02,
    "intermediate_size": 10, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_hidden_layers": 4, "rms_norm_eps": 1e-06,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
    "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
QWEN3_5_MOE = {
    **{name: value for name, value in QWEN3_5.items() if name != "intermediate_size"},
    "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 6, "num_experts": 3, "num_experts_per_tok": 2,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 14,
}  # fmt: skip
MAMBA = {"conv_kernel": 4, "expand": 2, "mamba_head_dim": 3, "mamba_hidden_act": "silu", "mamba_num_heads": 4,
         "mamba_proj_bias": False, "n_groups": 2, "ssm_state_size": 5, "chunk_size": 128, "time_step_floor": 0.0001,
         "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001,
         "use_conv_bias": True, "use_mamba_kernels": True}  # fmt: skip
NEMOTRON_H = {
    **NARROW, **MAMBA, "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, "bos_token_id": 1, "eos_token_id": 12,
    "hidden_dropout": 0.0, "hybrid_override_pattern": "M-M*-M", "initializer_range": 0.02, "intermediate_size": 10,
    "layer_norm_epsilon": 1e-05, "max_position_embeddings": 8192, "mlp_bias": False, "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h", "num_hidden_layers": 6, "num_logits_to_keep": 1, "pad_token_id": 0,
    "rescale_prenorm_residual": True, "residual_in_fp32": False, "rms_norm_eps": 1e-05, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True,
}  # fmt: skip
NEMOTRON_3 = {
    **NEMOTRON_H, "hybrid_override_pattern": "MEM*EM", "moe_intermediate_size": 6, "n_routed_experts": 3,
    "moe_shared_expert_intermediate_size": 14, "n_group": 1, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "topk_group": 1,
}  # fmt: skip
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4,
    "eos_token_id": 0, "expand": 2, "head_dim": 3, "hidden_act": "silu", "hidden_size": 12,
    "initializer_range": 0.1, "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 4, "num_heads": 8,
    "num_hidden_layers": 2, "pad_token_id": 0, "rescale_prenorm_residual": False, "residual_in_fp32": True,
    "rms_norm": True, "state_size": 5, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
    "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 11,
}  # fmt: skip
SPARSE["Ling-2.0 under the name of the first"] = {**SPARSE["Ling-2.0"], "model_type": "bailing_moe"}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "nemotron_h": NEMOTRON_H,
    "nemotron_3": NEMOTRON_3,
    "mamba2": MAMBA2,
    "mamba2_tied": {**MAMBA2, "tie_word_embeddings": True},
}
RELEASED: dict[str, dict[str, Any]] = {**POPULAR, **DENSE, **SPARSE, **HYBRIDS}
