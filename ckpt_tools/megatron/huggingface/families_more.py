"""Further dense families, beside those of families.py."""

from __future__ import annotations

from ckpt_tools.megatron.huggingface import fields_more as fields
from ckpt_tools.megatron.huggingface import rule_tables, rules_more
from ckpt_tools.megatron.huggingface.rules import Family

COMMON = {
    "softmax_type": "vanilla",
    "multi_latent_attention": False,
    "num_experts": None,
    "mtp_num_layers": 0,
}
WHOLE = {"position_embedding_type": "rope", "rotary_percent": 1.0}
PART = {"position_embedding_type": "rope"}
RMS = {"normalization": "RMSNorm"}
LN = {"normalization": "LayerNorm"}
GATED, RELU2 = {"activation": "swiglu"}, {"activation": "squared_relu"}
UNSCALED = {"rope_scaling": (None,)}  # the class of transformers 4 does not look at it, that of 5 does
ALL_KEYS = {"sliding_window": None}
NO_QK_NORM = {"qk_layernorm": False}
NO_BIAS = {"add_bias_linear": False, "add_qkv_bias": False}
NO_LINEAR_BIAS = {"add_bias_linear": False}
LLAMA = COMMON | WHOLE | RMS | GATED | NO_QK_NORM
SILU, ACT2 = {"hidden_act": "silu"}, {"hidden_act": "relu2"}
NEOX_BUFFERS = r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
BIGCODE_BUFFERS = r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"

MORE = (
    Family("nemotron", "NemotronForCausalLM", rules_more.NEMOTRON, fields.NEMOTRON, fixed=ACT2,
           needs=COMMON | PART | LN | RELU2 | ALL_KEYS | NO_QK_NORM | UNSCALED, plus_one=True),
    Family("jais2", "Jais2ForCausalLM", rules_more.NEMOTRON, fields.JAIS2, fixed=ACT2,
           needs=COMMON | WHOLE | LN | RELU2 | ALL_KEYS | NO_QK_NORM),
    Family("persimmon", "PersimmonForCausalLM", rules_more.PERSIMMON, fields.PERSIMMON, fixed=ACT2,
           needs=COMMON | PART | LN | RELU2 | ALL_KEYS | {"add_bias_linear": True}),
    Family("arcee", "ArceeForCausalLM", rules_more.ARCEE, fields.ARCEE, fixed=ACT2,
           needs=COMMON | WHOLE | RMS | RELU2 | ALL_KEYS | NO_QK_NORM),
    Family("starcoder2", "Starcoder2ForCausalLM", rules_more.STARCODER2, fields.STARCODER2,
           needs=COMMON | WHOLE | LN | NO_QK_NORM),
    Family("gpt_neox", "GPTNeoXForCausalLM", rules_more.NEOX, fields.NEOX, fixed={"attention_bias": True},
           needs=COMMON | PART | LN | ALL_KEYS | NO_QK_NORM | {"add_bias_linear": True}, ignored=(NEOX_BUFFERS,)),
    Family("gpt_bigcode", "GPTBigCodeForCausalLM", rules_more.BIGCODE, fields.BIGCODE,
           needs=COMMON | LN | ALL_KEYS | NO_QK_NORM | {"add_bias_linear": True,
                                                        "position_embedding_type": "learned_absolute"},
           ignored=(BIGCODE_BUFFERS,)),
    Family("stablelm", "StableLmForCausalLM", rules_more.STABLELM, fields.STABLELM,
           fixed=SILU | {"qk_layernorm": False, "use_parallel_residual": False},
           needs=COMMON | PART | LN | GATED | ALL_KEYS | NO_QK_NORM | NO_LINEAR_BIAS),
    Family("glm", "GlmForCausalLM", rules_more.GLM, fields.GLM, fixed=SILU,
           needs=COMMON | PART | RMS | GATED | ALL_KEYS | NO_QK_NORM | NO_LINEAR_BIAS, unset=("pad_token_id",)),
    Family("helium", "HeliumForCausalLM", rules_more.HELIUM, fields.HELIUM, fixed=SILU | {"mlp_bias": False},
           needs=LLAMA | ALL_KEYS | NO_LINEAR_BIAS),
    Family("ministral", "MinistralForCausalLM", rule_tables.QWEN, fields.MINISTRAL, fixed=SILU,
           needs=LLAMA | NO_BIAS),
    Family("cwm", "CwmForCausalLM", rule_tables.QWEN, fields.CWM, fixed=SILU | {"mlp_bias": False},
           needs=LLAMA | NO_BIAS),
    Family("youtu", "YoutuForCausalLM", rules_more.YOUTU, fields.YOUTU, fixed=SILU | {"attention_bias": False},
           needs=COMMON | WHOLE | RMS | GATED | ALL_KEYS | NO_BIAS
           | {"qk_layernorm": True, "multi_latent_attention": True}),
    Family("internlm3", "InternLM3ForCausalLM", rule_tables.LLAMA, fields.INTERNLM3, fixed=SILU,
           needs=LLAMA | ALL_KEYS),
    Family("iquestcoder", "IQuestCoderForCausalLM", rule_tables.LLAMA, fields.IQUEST,
           fixed=SILU | {"use_sliding_window": False}, needs=LLAMA | ALL_KEYS),
    Family("exaone", "ExaoneForCausalLM", rules_more.EXAONE, fields.EXAONE, fixed={"activation_function": "silu"},
           needs=LLAMA | ALL_KEYS, ignored=(r"transformer\.(rotary|h\.\d+\.attn\.attention\.rotary)\.inv_freq",)),
)  # fmt: skip
