"""The families this tool knows: rules, config fields, and what a model must be to belong to one."""

from __future__ import annotations

from ckpt_tools.megatron.huggingface import config_fields as fields
from ckpt_tools.megatron.huggingface import rule_tables as rules
from ckpt_tools.megatron.huggingface.families_hyb import HYBRIDS
from ckpt_tools.megatron.huggingface.rules import Family

INV_FREQ = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
SILU = {"hidden_act": "silu"}
QWEN = SILU | {"use_sliding_window": False, "attention_bias": False}
DENSE = {"num_experts": None, "mtp_num_layers": 0}
SOFTMAX_MOE = {
    "mtp_num_layers": 0,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_topk_scaling_factor": None,
}
SIGMOID_MOE = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
PARTIAL_ROPE = {"normalization": "RMSNorm", "position_embedding_type": "rope"}
ROPE = PARTIAL_ROPE | {"rotary_percent": 1.0}
PLAIN = {"activation": "swiglu", "softmax_type": "vanilla", "multi_latent_attention": False}
GQA, PARTIAL_GQA = ROPE | PLAIN, PARTIAL_ROPE | PLAIN
FULL = {"sliding_window": None}
NO_BIAS = {"add_bias_linear": False, "add_qkv_bias": False}
QKV_BIAS = {"add_bias_linear": False, "add_qkv_bias": True}
QK_NORM = {"qk_layernorm": True}
NO_QK_NORM = {"qk_layernorm": False}
NO_SHARED = {"moe_shared_expert_intermediate_size": None}
DEEPSEEK = ROPE | NO_BIAS | FULL | QK_NORM | {
    "activation": "swiglu",
    "softmax_type": "vanilla",
    "multi_latent_attention": True,
    "moe_shared_expert_gate": False,
}  # fmt: skip
GEMMA = ROPE | NO_BIAS | DENSE | {
    "activation": "geglu",
    "softmax_type": "vanilla",
    "multi_latent_attention": False,
    "tied": True,
}  # fmt: skip
GELU_TANH = "gelu_pytorch_tanh"
GEMMA_FIXED = {"hidden_activation": GELU_TANH, "attention_bias": False}

MTP_COPIES = (
    ("embedding.word_embeddings.weight", "model.layers.{n}.embed_tokens.weight"),
    ("output_layer.weight", "model.layers.{n}.shared_head.head.weight"),
)

KNOWN = (
    Family("llama", "LlamaForCausalLM", rules.LLAMA, fields.LLAMA, fixed=SILU,
           needs=GQA | DENSE | FULL | NO_QK_NORM, ignored=INV_FREQ),
    Family("mistral", "MistralForCausalLM", rules.QWEN, fields.MISTRAL, fixed=SILU,
           needs=GQA | DENSE | NO_BIAS | NO_QK_NORM),
    Family("qwen2", "Qwen2ForCausalLM", rules.QWEN, fields.QWEN2, fixed=SILU | {"use_sliding_window": False},
           needs=GQA | DENSE | FULL | QKV_BIAS | NO_QK_NORM),
    Family("qwen3", "Qwen3ForCausalLM", (*rules.QWEN, *rules.QK_NORM), fields.QWEN3, fixed=QWEN,
           needs=GQA | DENSE | FULL | NO_BIAS | QK_NORM),
    Family("smollm3", "SmolLM3ForCausalLM", rules.LLAMA, fields.SMOLLM3, fixed=SILU | {"use_sliding_window": False},
           needs=GQA | DENSE | FULL | NO_QK_NORM, ignored=INV_FREQ, unset=("pad_token_id",)),
    Family("seed_oss", "SeedOssForCausalLM", rules.QWEN, fields.SEED_OSS,
           fixed=SILU | {"attention_out_bias": False, "mlp_bias": False},
           needs=GQA | DENSE | FULL | NO_QK_NORM | {"add_bias_linear": False}),
    Family("ernie4_5", "Ernie4_5ForCausalLM", rules.ERNIE, fields.ERNIE, fixed=SILU,
           needs=GQA | DENSE | FULL | NO_QK_NORM),
    Family("phi3", "Phi3ForCausalLM", rules.PHI3, fields.PHI3, fixed=SILU,  # every scaling of its class is LongRoPE
           needs=PARTIAL_GQA | DENSE | NO_BIAS | NO_QK_NORM | {"rope_scaling": (None,)}, ignored=INV_FREQ,
           unset=("pad_token_id",)),
    Family("qwen2_moe", "Qwen2MoeForCausalLM",
           (*rules.QWEN, *rules.moe(), *rules.shared_expert("shared_expert"), rules.SHARED_GATE),
           fields.QWEN2_MOE, fixed=SILU | {"use_sliding_window": False},
           needs=GQA | SOFTMAX_MOE | FULL | QKV_BIAS | NO_QK_NORM | {"moe_shared_expert_gate": True}),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", (*rules.QWEN, *rules.QK_NORM, *rules.moe()), fields.QWEN3_MOE,
           fixed=QWEN,
           needs=GQA | SOFTMAX_MOE | FULL | NO_BIAS | QK_NORM | NO_SHARED),
    Family("mixtral", "MixtralForCausalLM", rules.MIXTRAL, fields.MIXTRAL, fixed=SILU | {"sliding_window": None},
           needs=GQA | SOFTMAX_MOE | FULL | NO_BIAS | NO_QK_NORM | NO_SHARED | {"moe_router_pre_softmax": False}),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", rules.DEEPSEEK_V2, fields.DEEPSEEK_V2,
           fixed=SILU | {"attention_bias": False, "norm_topk_prob": False, "scoring_func": "softmax"},
           needs=DEEPSEEK | {"mtp_num_layers": 0, "moe_router_score_function": "softmax",
                             "moe_router_enable_expert_bias": False, "moe_router_pre_softmax": True}),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", rules.DEEPSEEK_V3, fields.DEEPSEEK_V3,
           fixed=SILU | {"attention_bias": False, "scoring_func": "sigmoid",
                         "topk_method": "noaux_tc", "moe_layer_freq": 1},
           needs=DEEPSEEK | SIGMOID_MOE, copies=MTP_COPIES, also_types=("kimi_k2",)),
    Family("glm4_moe", "Glm4MoeForCausalLM", rules.GLM4_MOE, fields.GLM4_MOE, fixed=SILU,
           needs=PARTIAL_GQA | FULL | SIGMOID_MOE | {"add_bias_linear": False, "moe_shared_expert_gate": False},
           copies=MTP_COPIES),
    Family("gpt_oss", "GptOssForCausalLM", rules.GPT_OSS, fields.GPT_OSS,
           fixed=SILU | {"attention_bias": True},
           needs=ROPE | SOFTMAX_MOE | NO_QK_NORM | NO_SHARED | {
               "activation": "quick_geglu", "glu_linear_offset": 1.0, "softmax_type": "learnable",
               "multi_latent_attention": False, "add_bias_linear": True, "moe_router_pre_softmax": False}),
    Family("gemma", "GemmaForCausalLM", rules.GEMMA, fields.GEMMA,
           fixed={"hidden_act": (GELU_TANH, "gelu"), **GEMMA_FIXED}, needs=GEMMA | FULL | NO_QK_NORM,
           plus_one=True),
    Family("gemma2", "Gemma2ForCausalLM", rules.GEMMA2, fields.GEMMA2, fixed=GEMMA_FIXED, needs=GEMMA | NO_QK_NORM,
           plus_one=True, window_turn=2),
    Family("gemma3", "Gemma3ForCausalLM", (*rules.GEMMA2, *rules.QK_NORM), fields.GEMMA3, "gemma3_text",
           fixed=GEMMA_FIXED, needs=GEMMA | QK_NORM, plus_one=True, window_turn=6),
    Family("gpt2", "GPT2LMHeadModel", rules.GPT2, fields.GPT2,
           needs=DENSE | FULL | NO_QK_NORM | {
               "normalization": "LayerNorm", "softmax_type": "vanilla",
               "position_embedding_type": "learned_absolute", "add_bias_linear": True,
               "multi_latent_attention": False},
           ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",)),
    *HYBRIDS,
)  # fmt: skip
FAMILIES = {family.name: family for family in KNOWN}
