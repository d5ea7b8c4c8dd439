"""Families with experts beyond the first ones: sparse attention, and norms over all heads at once.

Norms over all heads are modules of Megatron-Bridge (minimax_m2_provider.py, olmoe_provider.py); the names and layouts
of those two families are those of its published mappings.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.megatron.huggingface import config_fields as fields
from ckpt_tools.megatron.huggingface import field_values as values
from ckpt_tools.megatron.huggingface import moe_values as moe
from ckpt_tools.megatron.huggingface import rule_tables as rules
from ckpt_tools.megatron.huggingface.config_fields import Field
from ckpt_tools.megatron.huggingface.config_fields import _defaults as defaults
from ckpt_tools.megatron.huggingface.rules import Family, Rule

INDEXER, HF_INDEXER = rules.ATTENTION + "core_attention.indexer.", rules.H + "self_attn.indexer."
INDEXER_RULES = (
    rules.linear(INDEXER + "linear_wq_b", HF_INDEXER + "wq_b", ("index_query", "q_rank"), "indexer"),
    rules.linear(INDEXER + "linear_wk", HF_INDEXER + "wk", ("index_dim", "hidden"), "indexer"),
    rules.norm(INDEXER + "k_norm.weight", HF_INDEXER + "k_norm", "indexer", size="index_dim"),
    Rule(INDEXER + "k_norm.bias", (HF_INDEXER + "k_norm.bias",), "same", ("index_dim",), ("indexer",)),
    rules.linear(
        INDEXER + "linear_weights_proj", HF_INDEXER + "weights_proj", ("index_heads", "hidden"), "indexer"
    ),
)


def apart(rule: Rule) -> Rule:
    """A rule of MLA whose norm is kept apart: the indexer is given queries that are normalized already."""
    own = [name for name in rule.also if name.endswith((".q_layernorm.weight", ".kv_layernorm.weight"))]
    return replace(rule, core=own[0], also=(rule.core,)) if own else rule


def everywhere(rule: Rule) -> Rule:
    """A rule of a prediction layer, which has an indexer in any case (sparse_attention.py)."""
    return replace(rule, when=tuple(one for one in rule.when if one != "indexer"))


SPARSE_LAYER = (*(apart(rule) for rule in rules.DEEPSEEK), *INDEXER_RULES)
SPARSE = (
    *rules.ends(),
    *SPARSE_LAYER,
    *rules.MTP_ENDS,
    *(everywhere(rules.in_mtp(rule)) for rule in SPARSE_LAYER),
)
QK_NORM_OVER_HEADS = tuple(
    replace(rule, shape=(size,)) for rule, size in zip(rules.QK_NORM, ("query", "key"), strict=True)
)
MINIMAX_M2 = (
    *rules.MIXTRAL,
    *QK_NORM_OVER_HEADS,
    replace(rules.EXPERT_BIAS, hf=(rules.H + "block_sparse_moe.e_score_correction_bias",)),
)
OLMOE = (*rules.QWEN[:3], *rules.SELF_ATTENTION, *QK_NORM_OVER_HEADS, *rules.moe())
DOTS1 = (
    *rules.QWEN,
    *rules.QK_NORM,
    *rules.moe(),
    *rules.shared_expert("shared_experts"),
    rules.EXPERT_BIAS,
)
OWN = rules.H + "attention."  # Ling and Sarvam
FUSED_LAYER = (
    rules.SELF_ATTENTION[0],
    Rule(rules.ATTENTION + "linear_qkv.weight", (OWN + "query_key_value.weight",), "qkv_fused", ("qkv", "hidden")),
    Rule(rules.ATTENTION + "linear_qkv.bias", (OWN + "query_key_value.bias",), "qkv_fused", ("qkv",), ("qkv_bias",)),
    rules.linear(rules.ATTENTION + "linear_proj", OWN + "dense", ("hidden", "query")),
    rules.norm(rules.ATTENTION + "q_layernorm.weight", OWN + "query_layernorm", size="head_dim"),
    rules.norm(rules.ATTENTION + "k_layernorm.weight", OWN + "key_layernorm", size="head_dim"),
    *rules.MLP,
    *rules.moe(),
    *rules.shared_expert("shared_experts"),
    replace(rules.EXPERT_BIAS, hf=(rules.H + "mlp.gate.expert_bias",)),
)  # fmt: skip
FUSED = (*rules.ends(embed="model.word_embeddings"), *FUSED_LAYER)
MTP_ENDS = (
    *rules.MTP_ENDS[:3],
    rules.norm(rules.MTP + "final_layernorm.weight", "model.layers.{n}.final_layernorm"),
)
LING2 = (*FUSED, *MTP_ENDS, *(rules.in_mtp(rule) for rule in FUSED_LAYER))
EXAONE_MOE = (*DOTS1[:-1], replace(rules.EXPERT_BIAS, hf=(rules.H + "mlp.e_score_correction_bias",)))
HY3_LAYER = (
    *rules.SELF_ATTENTION,
    *rules.QK_NORM,
    *rules.MLP,
    *(replace(r, hf=(rules.H + "mlp.router.gate.weight",)) if "router" in r.core else r for r in rules.moe()),
    *rules.shared_expert("shared_mlp"),
    replace(rules.EXPERT_BIAS, hf=(rules.H + "mlp.expert_bias",)),
)
HY3 = (*rules.ends(), *HY3_LAYER, *MTP_ENDS, *(rules.in_mtp(rule) for rule in HY3_LAYER))
SOLAR = (
    *rules.ends(),
    *rules.SELF_ATTENTION,
    *rules.moe(),
    *rules.shared_expert("shared_experts"),
    rules.EXPERT_BIAS,
)

MLP_LAYER_TYPES = Field(
    "mlp_layer_types", "moe_layers", moe.leading_dense, moe.write_mlp_types, moe.read_mlp_types
)
SHARED = next(one for one in fields.GLM4_MOE if one.hf == "n_shared_experts")
ROUTED = (*(one for one in fields.SIGMOID_ROUTED if one.hf != SHARED.hf), SHARED)
LATENT_FIELDS = (*fields.DEEPSEEK, *ROUTED, MLP_LAYER_TYPES)
# transformers goes by the kinds of layers, others by the number of dense ones.
LITE = defaults(
    LATENT_FIELDS,
    q_lora_rank=768,
    first_k_dense_replace=moe.dense_by_types,
    routed_scaling_factor=1.8,
    rms_norm_eps=1e-5,
)
INDEX = (
    Field("index_n_heads", "dsa_indexer_n_heads"),
    Field("index_head_dim", "dsa_indexer_head_dim"),
    Field("index_topk", "dsa_indexer_topk", 2048),
    Field("layer_types", "dsa_indexer_n_heads", None, moe.write_nothing, moe.read_sparse_layers),
)
DEEPSEEK_V32 = defaults(
    (*LATENT_FIELDS, *INDEX),
    q_lora_rank=1536,
    routed_scaling_factor=2.5,
    first_k_dense_replace=moe.dense_by_types,
    n_group=8,
    topk_group=4,
    index_n_heads=64,
    index_head_dim=128,
)
GLM_MOE_DSA = defaults(
    (
        *DEEPSEEK_V32,
        Field("indexer_types", "indexer_layers", None, moe.write_indexers, moe.read_indexers),
        Field("index_topk_freq", "indexer_layers", None, moe.write_index_freq, moe.read_indexers),
        Field("index_skip_topk_offset", "indexer_layers", None, moe.write_index_offset, moe.read_indexers),
    ),
    q_lora_rank=2048,
    n_group=1,
    topk_group=1,
    rms_norm_eps=1e-5,
    index_n_heads=32,
)
DOTS1_FIELDS = defaults(
    (
        *fields.ATTENTION,
        fields.HEAD_DIM,
        fields.FFN,
        *(one for one in ROUTED if one.arg != "mtp_num_layers"),
        Field("sliding_window", "sliding_window", 4096, moe.write_nothing, moe.read_no_window),
    ),
    num_key_value_heads=32,
    norm_topk_prob=False,
)
SEVERAL = Field("num_experts_per_tok", "moe_router_topk", write=moe.write_several, read=moe.read_several)
MINIMAX_M2_FIELDS = defaults(
    (
        *fields.ATTENTION,
        fields.HEAD_DIM,
        Field("intermediate_size", "moe_ffn_hidden_size"),
        Field("num_local_experts", "num_experts", also="num_experts"),
        SEVERAL,
        Field("rotary_dim", "rotary_percent", None, moe.write_rotary_dim, moe.read_rotary_dim),
        Field("partial_rotary_factor", "rotary_percent", moe.rotary_factor, values.as_float),
    ),
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=5e6,
)
OLMOE_FIELDS = defaults(
    (
        *fields.ATTENTION,
        fields.SQUARE,
        Field("intermediate_size", "moe_ffn_hidden_size"),
        Field("num_experts", "num_experts", also="num_local_experts"),
        fields.TOP_K,
        fields.NORM_TOP_K,
    ),
    num_key_value_heads=None,
    rms_norm_eps=1e-5,
)
NUMBERED = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def renamed(known: tuple[Field, ...], names: dict[str, str], **also: str) -> tuple[Field, ...]:
    """Fields under other names; `also` are second spellings."""
    return tuple(
        replace(
            one, hf=names.get(one.hf, one.hf), also=also.get(one.hf, None if one.hf in names else one.also)
        )
        for one in known
    )


HEADS = (*fields.ATTENTION, fields.HEAD_DIM, fields.FFN)
EXAONE_MOE_FIELDS = defaults(
    (
        *HEADS,
        *renamed(tuple(one for one in ROUTED if one.arg != "mtp_num_layers"), NUMBERED),
        MLP_LAYER_TYPES,
        Field("sliding_window", "sliding_window", 4096, read=moe.read_window),
        Field("layer_types", "sliding_layers", None, values.write_layer_types, moe.read_exaone_types),
        Field("layer_types", "no_rope_layers", None, moe.write_exaone_types, moe.read_exaone_rope),
    ),
    num_key_value_heads=32,
    first_k_dense_replace=moe.dense_by_types,
    routed_scaling_factor=2.5,
    rms_norm_eps=1e-5,
)
HY3_FIELDS = defaults(
    (
        *HEADS,
        SEVERAL,
        *renamed(
            tuple(
                one for one in ROUTED if one.hf not in ("n_group", "topk_group", "norm_topk_prob", SEVERAL.hf)
            ),
            {**NUMBERED, "routed_scaling_factor": "router_scaling_factor"},
        ),
        Field("expert_hidden_dim", "moe_ffn_hidden_size", moe.expert_size),
        MLP_LAYER_TYPES,
    ),
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=11158840.0,
    first_k_dense_replace=moe.dense_by_types,
    router_scaling_factor=2.826,
)
SOLAR_FIELDS = defaults(
    (
        *fields.ATTENTION,
        fields.HEAD_DIM,
        Field("intermediate_size", "ffn_hidden_size", moe.expert_size),
        fields.PARTIAL_ROPE,
        Field("attention_bias", "add_qkv_bias", False),
        *(one for one in ROUTED if one.arg not in ("mtp_num_layers", "moe_layers")),
    ),
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
)
# Names of the released configurations, which transformers knows as second ones.
SARVAM_ROUTED = renamed(
    tuple(one for one in ROUTED if one.arg != "mtp_num_layers"), NUMBERED, **{name: name for name in NUMBERED}
)
SARVAM_FIELDS = defaults(
    (
        *HEADS,
        fields.PARTIAL_ROPE,
        Field("use_qkv_bias", "add_qkv_bias", False, also="attention_bias"),
        *SARVAM_ROUTED,
    ),
    num_key_value_heads=4,
    head_dim=64,
    rope_theta=8e6,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
)
SARVAM_MLA_FIELDS = defaults(
    (*(moe.deepseek_yarn(one) for one in fields.DEEPSEEK), *SARVAM_ROUTED),
    num_key_value_heads=None,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
)
LING2_FIELDS = defaults(
    (
        *HEADS,
        fields.PARTIAL_ROPE,
        Field("use_qkv_bias", "add_qkv_bias", False),
        *renamed(ROUTED, NUMBERED),
    ),
    num_key_value_heads=4,
    rope_theta=600000.0,
    first_k_dense_replace=1,
    n_group=8,
    topk_group=4,
)

SILU = {"hidden_act": "silu"}
NO_BIAS = {"add_bias_linear": False, "add_qkv_bias": False}
FULL = {"sliding_window": None}
NOT_LATENT = {"activation": "swiglu", "softmax_type": "vanilla", "multi_latent_attention": False}
LATENT = NOT_LATENT | {"multi_latent_attention": True}
PARTIAL = {"normalization": "RMSNorm", "position_embedding_type": "rope"}
ROPE = PARTIAL | {"rotary_percent": 1.0}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
ROUTED_AS_V3 = {
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
ONE_SHARED = {"moe_shared_expert_gate": False}
NO_GROUPS = {"moe_router_num_groups": None, "moe_router_topk_scaling_factor": None, "mtp_num_layers": 0,
             "moe_shared_expert_intermediate_size": None}  # fmt: skip
QK_NORM = {"qk_layernorm": True}
LATENT_MOE = ROPE | LATENT | NO_BIAS | FULL | QK_NORM | SIGMOID | ONE_SHARED
# Every class has 1e-6 in the norm of the indexer's keys, whatever config.json says.
DSA = {"experimental_attention_variant": "dsa", "dsa_indexer_k_norm_epsilon": 1e-6}

KNOWN = (
    Family("deepseek_v32", "DeepseekV32ForCausalLM", SPARSE, DEEPSEEK_V32,
           fixed=SILU | ROUTED_AS_V3 | {"mlp_bias": False},
           needs=LATENT_MOE | DSA | {"dsa_indexer_rope_interleaved": False, "indexer_layers": ()},
           copies=rules.MTP_COPIES),
    Family("glm_moe_dsa", "GlmMoeDsaForCausalLM", SPARSE, GLM_MOE_DSA,
           fixed=SILU | ROUTED_AS_V3 | {"mlp_bias": False, "indexer_rope_interleave": True},
           needs=LATENT_MOE | DSA | {"dsa_indexer_rope_interleaved": True}, copies=rules.MTP_COPIES),
    Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", rules.DEEPSEEK_V3, LITE, fixed=SILU | ROUTED_AS_V3,
           needs=LATENT_MOE, copies=rules.MTP_COPIES),
    Family("dots1", "Dots1ForCausalLM", DOTS1, DOTS1_FIELDS,
           fixed=SILU | {"attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
           needs=ROPE | NOT_LATENT | NO_BIAS | FULL | QK_NORM | SIGMOID | ONE_SHARED | {"mtp_num_layers": 0}),
    Family("minimax_m2", "MiniMaxM2ForCausalLM", MINIMAX_M2, MINIMAX_M2_FIELDS,
           fixed=SILU | {"scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer",
                         "use_routing_bias": True},
           needs=PARTIAL | NOT_LATENT | NO_BIAS | FULL | QK_NORM | SIGMOID | NO_GROUPS),
    Family("olmoe", "OlmoeForCausalLM", OLMOE, OLMOE_FIELDS, fixed=SILU | {"attention_bias": False, "clip_qkv": None},
           needs=ROPE | NOT_LATENT | NO_BIAS | FULL | QK_NORM | NO_GROUPS
           | {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}),
    Family("exaone_moe", "ExaoneMoeForCausalLM", EXAONE_MOE, EXAONE_MOE_FIELDS,
           fixed=SILU | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
           needs=ROPE | NOT_LATENT | NO_BIAS | QK_NORM | SIGMOID | ONE_SHARED | {"mtp_num_layers": 0}),
    Family("hy_v3", "HYV3ForCausalLM", HY3, HY3_FIELDS,
           fixed=SILU | {"attention_bias": False, "mlp_bias": False, "qk_norm": True},
           needs=ROPE | NOT_LATENT | NO_BIAS | FULL | QK_NORM | SIGMOID | ONE_SHARED
           | {"moe_router_num_groups": None}),
    Family("solar_open", "SolarOpenForCausalLM", SOLAR, SOLAR_FIELDS, fixed=SILU,
           needs=PARTIAL | NOT_LATENT | FULL | SIGMOID | ONE_SHARED
           | {"add_bias_linear": False, "qk_layernorm": False, "mtp_num_layers": 0}),
    Family("sarvam_moe", "SarvamMoEForCausalLM", FUSED, SARVAM_FIELDS, fixed=SILU | {"use_qk_norm": True},
           needs=PARTIAL | NOT_LATENT | FULL | SIGMOID | ONE_SHARED | QK_NORM
           | {"add_bias_linear": False, "mtp_num_layers": 0}),
    Family("sarvam_mla", "SarvamMLAForCausalLM", (*rules.ends(), *rules.DEEPSEEK), SARVAM_MLA_FIELDS,
           fixed=SILU | ROUTED_AS_V3, needs=LATENT_MOE | {"mtp_num_layers": 0}),
    Family("bailing_moe_v2", "BailingMoeV2ForCausalLM", LING2, LING2_FIELDS, also_types=("bailing_moe",),
           fixed=SILU | {"architectures": ["BailingMoeV2ForCausalLM"], "use_qk_norm": True, "use_bias": False,
                         "moe_router_enable_expert_bias": True},
           needs=PARTIAL | NOT_LATENT | FULL | SIGMOID | ONE_SHARED | QK_NORM | {"add_bias_linear": False}),
)  # fmt: skip
