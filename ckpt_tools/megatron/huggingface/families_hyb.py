"""Families whose layers are not all attention: rules, config fields, and what a model must be to belong to one."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.megatron.huggingface import config_fields as fields
from ckpt_tools.megatron.huggingface import field_values as values
from ckpt_tools.megatron.huggingface import hybrid_values as kinds
from ckpt_tools.megatron.huggingface import rule_tables as rules
from ckpt_tools.megatron.huggingface.config_fields import Field, _defaults
from ckpt_tools.megatron.huggingface.rule_tables import ATTENTION, MTP, H, P
from ckpt_tools.megatron.huggingface.rules import Family, Rule

NET = H + "linear_attn."
KEYS = (("query", "delta_key"), ("key", "delta_key"), ("value", "delta_value"))
GATED_ATTENTION = (
    rules.norm(rules.QKV_NORM, H + "input_layernorm", "attention", also=(rules.INPUT_NORM,)),
    Rule(ATTENTION + "linear_qkv.weight", tuple(f"{H}self_attn.{x}_proj.weight" for x in "qkv"), "qkv_gate",
         ("qkv_gate", "hidden"), ("attention",)),
    rules.linear(ATTENTION + "linear_proj", H + "self_attn.o_proj", ("hidden", "query"), "attention"),
    *(replace(one, when=("attention",)) for one in rules.QK_NORM),
)  # fmt: skip
DELTA_NET = (
    rules.norm(ATTENTION + "in_proj.layer_norm_weight", H + "input_layernorm", "delta_net",
               also=(rules.INPUT_NORM,)),
    Rule(ATTENTION + "conv1d.weight.{p}", (NET + "conv1d.weight",), "rows", ("one", "delta_kernel"),
         ("delta_net",), parts=KEYS),
    Rule(ATTENTION + "A_log", (NET + "A_log",), "same", ("delta_heads",), ("delta_net",)),
    Rule(ATTENTION + "dt_bias", (NET + "dt_bias",), "same", ("delta_heads",), ("delta_net",)),
    replace(rules.norm(ATTENTION + "out_norm.weight", NET + "norm", "delta_net", size="delta_head_dim"),
            plain=True),
    rules.linear(ATTENTION + "out_proj", NET + "out_proj", ("hidden", "delta_value"), "delta_net"),
)  # fmt: skip


def projection(hf: str, layout: str, parts: tuple[tuple[str, str], ...]) -> Rule:
    """Some parts of a gated delta net's input projection."""
    return Rule(ATTENTION + "in_proj.weight.{p}", (NET + hf + ".weight",), layout, ("hidden",), ("delta_net",),
                parts=parts)  # fmt: skip


IN_TURNS = (  # Qwen3-Next: what belongs to one key head stands together
    projection("in_proj_qkvz", "rows_by_key_head", (*KEYS, ("z", "delta_value"))),
    projection("in_proj_ba", "rows_by_key_head", (("beta", "delta_heads"), ("alpha", "delta_heads"))),
)
APART = (  # Qwen3.5
    projection("in_proj_qkv", "rows", KEYS),
    projection("in_proj_z", "rows", (("z", "delta_value"),)),
    projection("in_proj_b", "rows", (("beta", "delta_heads"),)),
    projection("in_proj_a", "rows", (("alpha", "delta_heads"),)),
)
SHARED_MOE = (*rules.moe(), *rules.shared_expert("shared_expert"), rules.SHARED_GATE)
MTP_ENDS = (
    rules.norm(MTP + "enorm.weight", "mtp.pre_fc_norm_embedding"),
    rules.norm(MTP + "hnorm.weight", "mtp.pre_fc_norm_hidden"),
    rules.linear(MTP + "eh_proj", "mtp.fc", ("hidden", "hidden2")),
    rules.norm(MTP + "final_layernorm.weight", "mtp.norm"),
)


def in_mtp(rule: Rule) -> Rule:
    """A decoder layer's rule for the layer inside the multi-token prediction module of a Qwen."""
    made = rules.in_mtp(rule)
    names = tuple(name.replace(H, "mtp.layers.{m}.") for name in rule.hf)
    return replace(made, hf=names, fused=rule.fused and rule.fused.replace(H, "mtp.layers.{m}."))


def qwen(*layer: Rule) -> tuple[Rule, ...]:
    """A whole model of such layers, whose prediction layers are attention."""
    inner = [in_mtp(rule) for rule in layer if "delta_net" not in rule.when]
    return (*rules.ends(), *layer, *MTP_ENDS, *inner)


def net_size(name: str, default: int) -> Field:
    """A size of gated delta nets; a model without one has the class's own in its config.json."""
    return Field(name, name, default, lambda size, model: size or default, kinds.read_net_size)


NET_FIELDS = (
    Field("layer_types", "linear_layers", None, kinds.write_linear, kinds.read_linear),
    Field("full_attention_interval", "linear_layers", kinds.TURN, kinds.write_interval, kinds.read_interval),
    net_size("linear_conv_kernel_dim", 4),
    net_size("linear_key_head_dim", 128),
    net_size("linear_value_head_dim", 128),
    net_size("linear_num_key_heads", 16),
    net_size("linear_num_value_heads", 32),
)
SHARED = Field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
QWEN3_NEXT = _defaults(
    (
        *fields.ATTENTION,
        fields.HEAD_DIM,
        fields.FFN,
        fields.PARTIAL_ROPE,
        *fields.EXPERTS,
        SHARED,
        *NET_FIELDS,
    ),
    num_key_value_heads=2,
    head_dim=256,
    partial_rotary_factor=0.25,
    norm_topk_prob=True,
    shared_expert_intermediate_size=512,
)
# The class keeps `mtp_num_hidden_layers` without having such layers.
MTP_LAYERS = Field("mtp_num_hidden_layers", "mtp_num_layers", 0, wins="checkpoint")
QWEN3_5 = _defaults(
    (*fields.ATTENTION, fields.HEAD_DIM, fields.FFN, fields.PARTIAL_ROPE, *NET_FIELDS, MTP_LAYERS),
    num_key_value_heads=4,
    head_dim=256,
    partial_rotary_factor=0.25,
)
QWEN3_5_MOE = _defaults(
    (
        *fields.ATTENTION,
        fields.HEAD_DIM,
        fields.PARTIAL_ROPE,
        fields.EXPERTS[0],
        fields.TOP_K,
        fields.EXPERTS[2],
        SHARED,
        *NET_FIELDS,
        MTP_LAYERS,
    ),
    num_key_value_heads=2,
    head_dim=256,
    partial_rotary_factor=0.25,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)
GATED = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "softmax_type": "vanilla",
    "multi_latent_attention": False,
    "sliding_window": None,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": True,
    "attention_output_gate": True,
}
SHARED_SOFTMAX = {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_gate": True,
}
FIXED = {"hidden_act": "silu", "attention_bias": False}

B = "backbone.layers.{l}."
MIXER, BLOCK = P + "mixer.", B + "mixer."
SCANNED = (("x", "mamba_inner"), ("B", "mamba_state"), ("C", "mamba_state"))
MAMBA = (
    rules.norm(MIXER + "in_proj.layer_norm_weight", B + "norm", "mamba", also=(P + "norm.weight",)),
    Rule(MIXER + "in_proj.weight.{p}", (BLOCK + "in_proj.weight",), "rows", ("hidden",), ("mamba",),
         parts=(("z", "mamba_inner"), *SCANNED, ("dt", "mamba_heads"))),
    Rule(MIXER + "conv1d.weight.{p}", (BLOCK + "conv1d.weight",), "rows", ("one", "mamba_kernel"), ("mamba",),
         parts=SCANNED),
    Rule(MIXER + "conv1d.bias.{p}", (BLOCK + "conv1d.bias",), "rows", (), ("mamba",), parts=SCANNED),
    *(Rule(MIXER + name, (BLOCK + name,), "same", ("mamba_heads",), ("mamba",))
      for name in ("A_log", "D", "dt_bias")),
    # Its norm is no module of Transformer Engine and never one of 1 + weight.
    Rule(MIXER + "norm.weight", (BLOCK + "norm.weight",), "same", ("mamba_inner",), ("mamba",)),
    rules.linear(MIXER + "out_proj", BLOCK + "out_proj", ("hidden", "mamba_inner"), "mamba"),
)  # fmt: skip
EXPERT, SHARED_EXPERT = BLOCK + "experts.{e}.", P + "mlp.shared_experts."
NEMOTRON_H = (
    rules.ends("backbone.embeddings")[0],
    rules.norm("decoder.final_norm.weight", "backbone.norm_f"),
    rules.ends()[2],
    *MAMBA,
    rules.norm(rules.QKV_NORM, B + "norm", "attention", also=(rules.INPUT_NORM,)),
    Rule(ATTENTION + "linear_qkv.weight", tuple(f"{BLOCK}{x}_proj.weight" for x in "qkv"), "qkv",
         ("qkv", "hidden"), ("attention",)),
    rules.linear(ATTENTION + "linear_proj", BLOCK + "o_proj", ("hidden", "query"), "attention"),
    rules.norm(rules.FC1_NORM, B + "norm", "mlp", also=(rules.MLP_NORM,)),
    rules.linear(P + "mlp.linear_fc1", BLOCK + "up_proj", ("fc1", "hidden"), "mlp"),
    rules.linear(P + "mlp.linear_fc2", BLOCK + "down_proj", ("hidden", "ffn"), "mlp"),
    rules.norm(rules.MLP_NORM, B + "norm", "experts", also=(rules.FC1_NORM,)),
    rules.linear(P + "mlp.router", BLOCK + "gate", ("experts", "hidden"), "experts"),
    replace(rules.EXPERT_BIAS, hf=(BLOCK + "gate.e_score_correction_bias",), when=("experts",)),
    Rule(rules.EXPERT + "linear_fc1.weight", (EXPERT + "up_proj.weight",), "same", ("moe_fc1", "latent"),
         ("experts",), fused=BLOCK + "experts.up_proj"),
    Rule(rules.EXPERT + "linear_fc2.weight", (EXPERT + "down_proj.weight",), "same", ("latent", "moe_ffn"),
         ("experts",), fused=BLOCK + "experts.down_proj"),
    rules.linear(SHARED_EXPERT + "linear_fc1", BLOCK + "shared_experts.up_proj", ("shared_fc1", "hidden"),
                 "experts"),
    rules.linear(SHARED_EXPERT + "linear_fc2", BLOCK + "shared_experts.down_proj", ("hidden", "shared_ffn"),
                 "experts"),
    rules.linear(P + "mlp.fc1_latent_proj", BLOCK + "fc1_latent_proj", ("latent", "hidden"), "experts",
                 "latent_experts"),
    rules.linear(P + "mlp.fc2_latent_proj", BLOCK + "fc2_latent_proj", ("hidden", "latent"), "experts",
                 "latent_experts"),
)  # fmt: skip
ROUTED = (
    *(one for one in fields.SIGMOID_ROUTED
      if one.hf not in ("n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers")),
    Field("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    Field("moe_latent_size", "moe_latent_size", None),
)  # fmt: skip
NEMOTRON_FIELDS = _defaults(
    (
        *fields.SIZE,
        fields.GROUPS,
        fields.HEAD_DIM,
        fields.FFN,
        Field("layer_norm_epsilon", "layernorm_epsilon", 1e-5, values.as_float),
        Field("hybrid_override_pattern", "hybrid_pattern", read=kinds.read_pattern, also="layers_block_type"),
        Field("ssm_state_size", "mamba_state_dim", 128),
        Field("mamba_num_heads", "mamba_num_heads", 128),
        Field("mamba_head_dim", "mamba_head_dim", 64),
        Field("n_groups", "mamba_num_groups", 8),
        *map(kinds.of_experts, _defaults(
            ROUTED,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=7688,
            moe_shared_expert_intermediate_size=7688,
            n_group=1,
            topk_group=1,
        )),
    ),
    num_hidden_layers=kinds.count_layers,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
)  # fmt: skip
MAMBA2 = (*NEMOTRON_H[:3], *MAMBA)
MAMBA2_FIELDS = _defaults(
    (
        *fields.SIZE,
        Field("num_hidden_layers", "hybrid_pattern", write=lambda pattern, model: len(pattern),
              read=lambda layers, config: "M" * layers),
        Field("layer_norm_epsilon", "layernorm_epsilon", 1e-5, values.as_float),
        Field("state_size", "mamba_state_dim", 128),
        Field("num_heads", "mamba_num_heads", 128),
        Field("head_dim", "mamba_head_dim", 64),
        Field("n_groups", "mamba_num_groups", 8),
        Field("expand", "mamba_num_heads", 2, kinds.write_expand, kinds.read_expand),
        fields.UNTIED,
    ),
    num_attention_heads=1,  # Megatron wants a number, and no layer asks for it
    max_position_embeddings=2048,
    initializer_range=0.1,
)  # fmt: skip
NEMOTRON_FIXED = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "mamba_proj_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
}

HYBRIDS = (
    Family("qwen3_next", "Qwen3NextForCausalLM",
           qwen(*GATED_ATTENTION, *DELTA_NET, *IN_TURNS, *rules.MLP, *SHARED_MOE), QWEN3_NEXT, fixed=FIXED,
           needs=GATED | SHARED_SOFTMAX, plus_one=True),
    Family("qwen3_5", "Qwen3_5ForCausalLM", qwen(*GATED_ATTENTION, *DELTA_NET, *APART, *rules.MLP), QWEN3_5,
           "qwen3_5_text", fixed=FIXED, needs=GATED | {"num_experts": None}, plus_one=True),
    Family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", qwen(*GATED_ATTENTION, *DELTA_NET, *APART, *SHARED_MOE),
           QWEN3_5_MOE, "qwen3_5_moe_text", fixed=FIXED,
           needs=GATED | SHARED_SOFTMAX | {"moe_router_pre_softmax": False}, plus_one=True),
    Family("nemotron_h", "NemotronHForCausalLM", NEMOTRON_H, NEMOTRON_FIELDS, fixed=NEMOTRON_FIXED,
           needs={"normalization": "RMSNorm", "position_embedding_type": "none", "activation": "squared_relu",
                  "softmax_type": "vanilla", "multi_latent_attention": False, "sliding_window": None,
                  "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False, "tied": False,
                  "mtp_num_layers": 0, "moe_router_score_function": "sigmoid",
                  "moe_router_enable_expert_bias": True, "moe_shared_expert_gate": False}),
    Family("mamba2", "Mamba2ForCausalLM", MAMBA2, MAMBA2_FIELDS,
           fixed={"hidden_act": "silu", "conv_kernel": 4, "use_conv_bias": True, "use_bias": False,
                  "rms_norm": True},
           needs={"normalization": "RMSNorm", "position_embedding_type": "none", "num_experts": None,
                  "mtp_num_layers": 0}),
)  # fmt: skip
