"""Tiny random models of every family, made by transformers: sizes all different, so that no mix-up fits."""

from typing import Any

from ckpt_tools.megatron.huggingface.families.families import FAMILIES

BASE = {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 37, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "initializer_range": 0.1}  # fmt: skip
HEAD = {"head_dim": 10}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 18}
MLA = {"num_key_value_heads": 4, "q_lora_rank": 14, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
       "v_head_dim": 9, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 18,
       "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
       "routed_scaling_factor": 1.0}  # fmt: skip
GLM4_MOE = {
    **BASE,
    "head_dim": 12,
    **{key: value for key, value in MLA.items() if "rank" not in key and "dim" not in key},
    "num_key_value_heads": 2,
}
DSA = {**BASE, **MLA, "rms_norm_eps": 1e-6, "index_topk": 7, "index_head_dim": 6, "index_n_heads": 3}
SHARED_CHOICE = {"num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "full"]}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
LINEAR = {**BASE, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MLA_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
GPT_OSS = {
    **BASE, **HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "rope_theta": 150000.0,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}  # fmt: skip
DELTA_NET = {"head_dim": 16, "num_hidden_layers": 4, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 5,
             "linear_value_head_dim": 7, "linear_num_key_heads": 2, "linear_num_value_heads": 6}  # fmt: skip
NEMOTRON_H = {
    **{key: value for key, value in BASE.items() if key != "num_hidden_layers"}, "head_dim": 10,
    "hybrid_override_pattern": "M-*M", "mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 7,
}  # fmt: skip
NEMOTRON_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 18,
                "moe_shared_expert_intermediate_size": 22, "routed_scaling_factor": 2.5}  # fmt: skip
FALCON_H1 = {
    "mamba_d_ssm": 30, "mamba_n_heads": 6, "mamba_d_head": 5, "mamba_n_groups": 2, "mamba_d_state": 7,
    "embedding_multiplier": 5.65, "lm_head_multiplier": 0.039, "key_multiplier": 0.39, "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.235, "attention_in_multiplier": 1.5, "attention_out_multiplier": 0.9375,
    "rope_theta": 1e11, "mlp_multipliers": [0.88, 0.58], "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.31],
    "pad_token_id": 0,
}  # fmt: skip
GEMMA = {**BASE, **HEAD, "tie_word_embeddings": True}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {**BASE, "num_key_value_heads": 4}),
    "llama3": ("LlamaConfig", {**BASE, **HEAD, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}),
    "llama_tied": ("LlamaConfig", {**BASE, **HEAD, "tie_word_embeddings": True}),
    "llama_bias": ("LlamaConfig", {**BASE, **HEAD, "attention_bias": True, "mlp_bias": True}),
    "llama_linear": ("LlamaConfig", LINEAR),
    "llama_yarn": ("LlamaConfig", {**BASE, "rope_scaling": YARN}),
    "mistral": ("MistralConfig", {**BASE, **HEAD, "sliding_window": 8}),
    "smollm3": ("SmolLM3Config", {**BASE, **HEAD, "no_rope_layers": [1, 0], "pad_token_id": 0}),
    "smollm3_interval": ("SmolLM3Config", {**BASE, "num_hidden_layers": 3, "no_rope_layer_interval": 2,
                                           "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
                                           "pad_token_id": 0}),
    "seed_oss": ("SeedOssConfig", {**BASE, **HEAD}),
    "ernie4_5": ("Ernie4_5Config", {**BASE, **HEAD}),
    "ernie4_5_bias": ("Ernie4_5Config", {**BASE, **HEAD, "use_bias": True, "tie_word_embeddings": True}),
    "phi3": ("Phi3Config", {**BASE, "head_dim": 12, "pad_token_id": 0}),
    "phi3_partial": ("Phi3Config", {**BASE, "hidden_size": 32, "partial_rotary_factor": 0.75, "sliding_window": 8,
                                    "pad_token_id": 0}),
    "qwen2": ("Qwen2Config", {**BASE}),
    "qwen3": ("Qwen3Config", {**BASE, **HEAD}),
    "qwen2_moe": ("Qwen2MoeConfig", {**BASE, **MOE, "shared_expert_intermediate_size": 22}),
    "qwen3_moe": ("Qwen3MoeConfig", {**BASE, **HEAD, **MOE, "norm_topk_prob": True}),
    "qwen3_moe_dense_first": ("Qwen3MoeConfig", {**BASE, **HEAD, **MOE, "mlp_only_layers": [0]}),
    "mixtral": ("MixtralConfig", {**BASE, **HEAD, "num_local_experts": 4, "num_experts_per_tok": 2,
                                  "sliding_window": None}),
    "deepseek_v2": ("DeepseekV2Config", {**BASE, **MLA, "topk_method": "greedy"}),
    "deepseek_v2_lite": ("DeepseekV2Config", {**BASE, **MLA, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v2_groups": ("DeepseekV2Config", {**BASE, **MLA, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                                                "topk_method": "group_limited_greedy"}),
    "deepseek_v3_groups": ("DeepseekV3Config", {**BASE, **MLA, "n_routed_experts": 8, "n_group": 2}),
    "deepseek_v3": ("DeepseekV3Config", {**BASE, **MLA, "routed_scaling_factor": 2.5, "rope_interleave": True}),
    "deepseek_v3_kimi": ("DeepseekV3Config", {**BASE, **MLA, "routed_scaling_factor": 2.827,
                                              "rope_scaling": {**MLA_YARN, "beta_fast": 1.0}}),
    "deepseek_v3_yarn": ("DeepseekV3Config", {**BASE, **MLA, "rope_scaling": MLA_YARN}),
    "glm4_moe": ("Glm4MoeConfig", {**GLM4_MOE, "attention_bias": True, "use_qk_norm": True,
                                   "routed_scaling_factor": 2.5}),
    "glm4_moe_plain": ("Glm4MoeConfig", {**GLM4_MOE, "partial_rotary_factor": 1.0}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**BASE, **MLA, "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.8}),
    "deepseek_v32": ("DeepseekV32Config", {**DSA, "routed_scaling_factor": 2.5}),
    "deepseek_v32_yarn": ("DeepseekV32Config", {**DSA, "rope_scaling": MLA_YARN}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**DSA}),
    "glm_moe_dsa_shared": ("GlmMoeDsaConfig", {**DSA, **SHARED_CHOICE}),
    "dots1": ("Dots1Config", {**GLM4_MOE, "norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    "minimax_m2": ("MiniMaxM2Config", {**BASE, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2,
                                       "rotary_dim": 6}),
    "exaone_moe": ("ExaoneMoeConfig", {**BASE, "head_dim": 12, **MOE, "sliding_window": 8, "num_shared_experts": 2,
                                       "layer_types": ["sliding_attention", "full_attention"]}),
    "hy_v3": ("HYV3Config", {**BASE, "head_dim": 12, **MOE, "num_shared_experts": 2}),
    "solar_open": ("SolarOpenConfig", {**GLM4_MOE, "first_k_dense_replace": 0, "rope_scaling": YARN}),
    "sarvam_moe": ("SarvamMoEConfig", {**GLM4_MOE, "attention_bias": True, "n_shared_experts": 1}),
    "sarvam_mla": ("SarvamMLAConfig", {**BASE, **MLA, "q_lora_rank": None, "rope_scaling": MLA_YARN}),
    "olmoe": ("OlmoeConfig", {**BASE, "num_key_value_heads": 4, "num_experts": 5, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssConfig", {**GPT_OSS}),
    "gpt_oss_square": ("GptOssConfig", {**GPT_OSS, "intermediate_size": 24}),
    "gpt_oss_unscaled": ("GptOssConfig", {**GPT_OSS, "rope_scaling": {"rope_type": "default"}}),
    "gemma": ("GemmaConfig", {**GEMMA}),
    "gemma2": ("Gemma2Config", {**GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 10}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 10}),
    "qwen3_next": ("Qwen3NextConfig", {**BASE, **DELTA_NET, **MOE, "shared_expert_intermediate_size": 22}),
    "qwen3_next_dense": ("Qwen3NextConfig", {**BASE, **DELTA_NET, **MOE, "shared_expert_intermediate_size": 22,
                                             "layer_types": ["full_attention", "linear_attention"] * 2,
                                             "mlp_only_layers": [0, 1], "norm_topk_prob": False}),
    "qwen3_5": ("Qwen3_5TextConfig", {**BASE, **DELTA_NET}),
    "qwen3_5_tied": ("Qwen3_5TextConfig", {**BASE, **DELTA_NET, "tie_word_embeddings": True,
                                           "layer_types": ["full_attention", "linear_attention"] * 2}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**BASE, **DELTA_NET, **MOE, "shared_expert_intermediate_size": 22}),
    "nemotron_h": ("NemotronHConfig", {**NEMOTRON_H}),
    "nemotron_h_moe": ("NemotronHConfig", {**NEMOTRON_H, **NEMOTRON_MOE, "hybrid_override_pattern": "ME*EM-E"}),
    "nemotron_h_latent": ("NemotronHConfig", {**NEMOTRON_H, **NEMOTRON_MOE, "hybrid_override_pattern": "M*E",
                                              "moe_latent_size": 11, "routed_scaling_factor": 1.0}),
    "falcon_h1": ("FalconH1Config", {**BASE, **FALCON_H1}),
    "falcon_h1_norm": ("FalconH1Config", {**BASE, **FALCON_H1, "tie_word_embeddings": True, "mamba_rms_norm": True,
                                          "mamba_norm_before_gate": False}),
    "mamba2": ("Mamba2Config", {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 8,
                                "head_dim": 6, "n_groups": 2, "state_size": 7, "chunk_size": 256}),
    "gpt2": ("GPT2Config", {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40,
                            "n_inner": 50, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt2_gelu": ("GPT2Config", {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40,
                                 "activation_function": "gelu", "bos_token_id": 1, "eos_token_id": 2}),
    "nemotron": ("NemotronConfig", {**BASE, **HEAD, "partial_rotary_factor": 0.4}),
    "nemotron_bias": ("NemotronConfig", {**BASE, "attention_bias": True, "mlp_bias": True,
                                         "tie_word_embeddings": True}),
    "arcee": ("ArceeConfig", {**BASE, **HEAD}),
    "arcee_bias": ("ArceeConfig", {**BASE, "attention_bias": True, "mlp_bias": True, "rope_scaling": YARN}),
    "starcoder2": ("Starcoder2Config", {**BASE, "sliding_window": 8, "tie_word_embeddings": True}),
    "starcoder2_gelu": ("Starcoder2Config", {**LINEAR, "use_bias": False, "hidden_act": "gelu"}),
    "stablelm": ("StableLmConfig", {**BASE, "num_attention_heads": 3, "num_key_value_heads": 3,
                                    "use_qkv_bias": True}),
    "stablelm_groups": ("StableLmConfig", {**LINEAR, "partial_rotary_factor": 1.0, "tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoXConfig", {**BASE, "num_attention_heads": 3, "use_parallel_residual": False}),
    "gpt_neox_tanh": ("GPTNeoXConfig", {**LINEAR, "rotary_pct": 0.5, "rotary_emb_base": 500.0,
                                        "hidden_act": "gelu_new", "use_parallel_residual": False,
                                        "tie_word_embeddings": True}),
    "gpt_bigcode": ("GPTBigCodeConfig", {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 4,
                                         "n_positions": 40, "n_inner": 50}),
    "gpt_bigcode_heads": ("GPTBigCodeConfig", {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 4,
                                               "n_positions": 40, "multi_query": False,
                                               "activation_function": "gelu"}),
    "persimmon": ("PersimmonConfig", {**BASE, "num_attention_heads": 3, "rope_theta": 25000.0}),
    "persimmon_plain": ("PersimmonConfig", {**LINEAR, "qk_layernorm": False, "rope_theta": 25000.0,
                                            "partial_rotary_factor": 0.7, "tie_word_embeddings": True}),
    "jais2": ("Jais2Config", {**BASE, **HEAD}),
    "glm": ("GlmConfig", {**BASE, "head_dim": 12, "pad_token_id": 0}),
    "glm_whole": ("GlmConfig", {**LINEAR, **HEAD, "partial_rotary_factor": 1.0, "attention_bias": False,
                                "tie_word_embeddings": True, "pad_token_id": 0}),
    "helium": ("HeliumConfig", {**BASE, "head_dim": 6}),
    "helium_bias": ("HeliumConfig", {**LINEAR, "head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
    "ministral": ("MinistralConfig", {**BASE, **HEAD, "sliding_window": 8,
                                      "layer_types": ["full_attention", "sliding_attention"]}),
    "ministral_alike": ("MinistralConfig", {**BASE, **HEAD, "sliding_window": 8, "tie_word_embeddings": True}),
    "cwm": ("CwmConfig", {**BASE, **HEAD, "sliding_window": 8}),
    "cwm_unscaled": ("CwmConfig", {**BASE, **HEAD, "sliding_window": 8, "rope_scaling": {"rope_type": "default"}}),
    "youtu": ("YoutuConfig", {**BASE, **{k: v for k, v in MLA.items() if "rank" in k or "dim" in k},
                              "num_key_value_heads": 4}),
    "internlm3": ("InternLM3Config", {**BASE, **HEAD}),
    "internlm3_bias": ("InternLM3Config", {**BASE, "head_dim": 6, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("IQuestCoderConfig", {**BASE, **HEAD}),
    "exaone": ("ExaoneConfig", {**BASE, **HEAD, "rope_scaling": LLAMA3_ROPE}),
    "exaone_tied": ("ExaoneConfig", {**BASE, "tie_word_embeddings": True}),
    "exaone4": ("Exaone4Config", {**BASE, "sliding_window": None, "sliding_window_pattern": None,
                                  "layer_types": ["full_attention"] * 2, "rope_scaling": LLAMA3_ROPE}),
    "exaone4_windows": ("Exaone4Config", {**BASE, **HEAD, "num_hidden_layers": 4, "sliding_window": 8,
                                          "tie_word_embeddings": True}),
    "deepseek_v3_one_expert": ("DeepseekV3Config", {**BASE, **MLA, "num_experts_per_tok": 1,
                                                    "norm_topk_prob": False}),
}  # fmt: skip

# Variants with the parameters and args of another family, which one takes them for without a config.json.
LIKE = {
    **dict.fromkeys(("smollm3", "smollm3_interval", "ernie4_5", "ernie4_5_bias", "phi3", "glm_whole", "helium",
                     "internlm3", "internlm3_bias", "iquestcoder", "exaone", "exaone_tied"), "llama"),
    **dict.fromkeys(("dots1", "exaone_moe", "hy_v3", "solar_open", "sarvam_moe"), "glm4_moe"),
    **dict.fromkeys(("glm4_moe_lite", "sarvam_mla"), "deepseek_v3"),
    **dict.fromkeys(("phi3_partial", "ministral_alike"), "mistral"),
    **dict.fromkeys(("cwm", "cwm_unscaled"), "ministral"),
    "olmoe": "qwen3_moe", "qwen3_5_moe": "qwen3_next", "gpt_bigcode_heads": "gpt2",
    "persimmon_plain": "nemotron", "helium_bias": "qwen2",
}  # fmt: skip
STEMS = {  # what the names of configuration classes begin with
    family.architecture.partition("For")[0].removesuffix("LMHeadModel").lower(): name
    for name, family in FAMILIES.items()
}
PLUS_ONE = ("gemma", "qwen3_next", "qwen3_5")  # whose norms compute with 1 + weight


# Mamba-2 of transformers 4.57 has one norm over all groups of heads, Megatron and transformers 5.24 one for each.
OTHERWISE_IN_4 = ("mamba2",)
# The layers of Gemma 2 and 3, EXAONE 4 and Falcon-H1 are modules of Megatron-Bridge; only core 0.19 has layers that
# share a choice of keys.
NOT_IN_MEGATRON = ("gemma2", "gemma3", "exaone4", "exaone4_windows", "falcon_h1", "falcon_h1_norm",
                   "glm_moe_dsa_shared")  # fmt: skip
# GPT-BigCode of transformers 4 is scripted by torch.jit when it is imported.
SCRIPTED = "ignore:`torch.jit.script` is deprecated:DeprecationWarning"


def family_of(variant: str) -> str:
    """The family of a variant, by the name of its class."""
    return STEMS[CONFIGS[variant][0].removesuffix("Config").removesuffix("Text").lower()]


# Fields that no argument of Megatron-LM says.
TOLD_BY_CONFIG = {
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"rope_local_base_freq": 10000.0},
}


def config_of(variant: str) -> dict[str, Any]:
    """config.json of a variant, as far as it says anything."""
    family = FAMILIES[family_of(variant)]
    kind = family.model_type or family.name
    return {**CONFIGS[variant][1], "model_type": kind, **TOLD_BY_CONFIG.get(variant, {})}


def installed() -> dict[str, tuple[str, dict[str, Any]]]:
    """The variants whose class the installed transformers has."""
    import transformers

    return {name: one for name, one in CONFIGS.items() if hasattr(transformers, one[0])}


def compared_with_megatron() -> list[str]:
    """The variants of which the installed transformers and megatron-core compute the same."""
    import transformers

    others = NOT_IN_MEGATRON + (OTHERWISE_IN_4 if transformers.__version__.startswith("4.") else ())
    return sorted(set(installed()) - set(others))


def eager() -> dict[str, str]:
    """The plain implementations of transformers' layers, which take any sizes."""
    import transformers

    experts = {"experts_implementation": "eager"} if transformers.__version__.startswith("5.") else {}
    return {"attn_implementation": "eager", **experts}


def make_model(name: str, seed: int = 0) -> Any:
    """A transformers model of a variant with every parameter and buffer of the state dict random."""
    import torch
    import transformers

    kind, settings = CONFIGS[name]
    config = getattr(transformers, kind)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, **eager())
    generator = torch.Generator().manual_seed(seed)
    tied = config.tie_word_embeddings
    for key, tensor in model.state_dict().items():
        if tied and key == "lm_head.weight":
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        scale, base = (0.2, 1.0) if "norm" in key or ".ln_" in key else (0.15, 0.0)
        if "norm" in key and name.startswith(PLUS_ONE) and not key.endswith("linear_attn.norm.weight"):
            base = 0.0
        tensor.copy_(base + scale * noise)
    return model.eval()


def logits(model: Any) -> Any:
    """Logits of two fixed token sequences, float32."""
    import torch

    tokens = (torch.arange(2 * 24).reshape(2, 24) * 7) % 97
    with torch.no_grad():
        return model(tokens).logits.float()
