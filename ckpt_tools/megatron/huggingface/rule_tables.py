"""The rules of the families this tool knows, in pieces that families share.

Two norms of a layer go by two names each: Transformer Engine fuses a norm into the linear that follows it, other
layer specs keep it apart, and one checkpoint can mix both. Every rule of such a norm accepts either.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.megatron.huggingface.rules import Rule

P = "decoder.layers.{l}."
H = "model.layers.{l}."
ATTENTION = P + "self_attention."


def linear(core: str, hf: str, shape: tuple[str, str], *when: str) -> Rule:
    """A weight that is the same on both sides."""
    return Rule(core + ".weight", (hf + ".weight",), "same", shape, when)


def norm(core: str, hf: str, *when: str, size: str = "hidden", also: tuple[str, ...] = ()) -> Rule:
    """The weight of a norm."""
    return Rule(core, (hf + ".weight",), "same", (size,), when, also, norm=True)


QKV_NORM, INPUT_NORM = ATTENTION + "linear_qkv.layer_norm_weight", P + "input_layernorm.weight"
FC1_NORM, MLP_NORM = P + "mlp.linear_fc1.layer_norm_weight", P + "pre_mlp_layernorm.weight"


def ends(embed: str = "model.embed_tokens", final: str = "model.norm") -> tuple[Rule, ...]:
    """Embedding, final norm and head."""
    return (
        Rule("embedding.word_embeddings.weight", (embed + ".weight",), "vocab", ("vocab", "hidden")),
        norm("decoder.final_layernorm.weight", final),
        Rule("output_layer.weight", ("lm_head.weight",), "vocab", ("vocab", "hidden"), ("untied",)),
    )


def gate_up(core: str, hf: str, size: str, *when: str, names: tuple[str, str] = ("gate_proj", "up_proj"),
            fused: str | None = None) -> Rule:  # fmt: skip
    """A gated fc1."""
    return Rule(core + ".weight", tuple(f"{hf}{n}.weight" for n in names), "gate_up", (size, "hidden"), when,
                fused=fused)  # fmt: skip


SELF_ATTENTION = (
    norm(QKV_NORM, H + "input_layernorm", also=(INPUT_NORM,)),
    Rule(ATTENTION + "linear_qkv.weight", tuple(f"{H}self_attn.{x}_proj.weight" for x in "qkv"), "qkv",
         ("qkv", "hidden")),
    Rule(ATTENTION + "linear_qkv.bias", tuple(f"{H}self_attn.{x}_proj.bias" for x in "qkv"), "qkv", ("qkv",),
         ("qkv_bias",)),
    linear(ATTENTION + "linear_proj", H + "self_attn.o_proj", ("hidden", "query")),
)  # fmt: skip
PROJECTION_BIAS = Rule(
    ATTENTION + "linear_proj.bias", (H + "self_attn.o_proj.bias",), "same", ("hidden",), ("linear_bias",)
)
QK_NORM = (
    norm(ATTENTION + "q_layernorm.weight", H + "self_attn.q_norm", "qk_norm", size="head_dim"),
    norm(ATTENTION + "k_layernorm.weight", H + "self_attn.k_norm", "qk_norm", size="head_dim"),
)
MLP = (
    norm(FC1_NORM, H + "post_attention_layernorm", "dense", also=(MLP_NORM,)),
    gate_up(P + "mlp.linear_fc1", H + "mlp.", "fc1", "dense"),
    linear(P + "mlp.linear_fc2", H + "mlp.down_proj", ("hidden", "ffn"), "dense"),
)
MLP_BIAS = (
    Rule(P + "mlp.linear_fc1.bias", (H + "mlp.gate_proj.bias", H + "mlp.up_proj.bias"), "gate_up", ("fc1",),
         ("linear_bias",)),
    Rule(P + "mlp.linear_fc2.bias", (H + "mlp.down_proj.bias",), "same", ("hidden",), ("linear_bias",)),
)  # fmt: skip
EXPERT = P + "mlp.experts.experts.{e}."


def moe(
    block: str = "mlp.", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, ...]:
    """Router and experts, one Hugging Face tensor per expert; transformers 5 may have saved them as one."""
    one = H + block + "experts.{e}."
    return (
        norm(MLP_NORM, H + "post_attention_layernorm", "moe", also=(FC1_NORM,)),
        linear(P + "mlp.router", H + block + "gate", ("experts", "hidden"), "moe"),
        gate_up(EXPERT + "linear_fc1", one, "moe_fc1", "moe", names=(gate, up),
                fused=H + "mlp.experts.gate_up_proj"),
        Rule(EXPERT + "linear_fc2.weight", (one + down + ".weight",), "same", ("hidden", "moe_ffn"), ("moe",),
             fused=H + "mlp.experts.down_proj"),
    )  # fmt: skip


SHARED_GATE = Rule(P + "mlp.shared_experts.gate_weight", (H + "mlp.shared_expert_gate.weight",), "same",
                   ("one", "hidden"), ("moe", "shared_gate"))  # fmt: skip


def shared_expert(name: str) -> tuple[Rule, ...]:
    """The expert that every token passes."""
    core = P + "mlp.shared_experts."
    return (
        gate_up(core + "linear_fc1", f"{H}mlp.{name}.", "shared_fc1", "moe", "shared_experts"),
        linear(
            core + "linear_fc2", f"{H}mlp.{name}.down_proj", ("hidden", "shared_ffn"), "moe", "shared_experts"
        ),
    )


MLA = (
    norm(INPUT_NORM, H + "input_layernorm",
         also=(QKV_NORM, *(f"{ATTENTION}{x}.layer_norm_weight" for x in
               ("linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "linear_qkv_down_proj")))),
    linear(ATTENTION + "linear_q_proj", H + "self_attn.q_proj", ("mla_query", "hidden"), "no_q_lora"),
    linear(ATTENTION + "linear_q_down_proj", H + "self_attn.q_a_proj", ("q_rank", "hidden"), "q_lora"),
    norm(ATTENTION + "linear_q_up_proj.layer_norm_weight", H + "self_attn.q_a_layernorm", "q_lora",
         size="q_rank", also=(ATTENTION + "q_layernorm.weight",)),
    linear(ATTENTION + "linear_q_up_proj", H + "self_attn.q_b_proj", ("mla_query", "q_rank"), "q_lora"),
    linear(ATTENTION + "linear_kv_down_proj", H + "self_attn.kv_a_proj_with_mqa", ("mla_kv_down", "hidden")),
    norm(ATTENTION + "linear_kv_up_proj.layer_norm_weight", H + "self_attn.kv_a_layernorm", size="kv_rank",
         also=(ATTENTION + "kv_layernorm.weight",)),
    linear(ATTENTION + "linear_kv_up_proj", H + "self_attn.kv_b_proj", ("mla_kv_up", "kv_rank")),
    linear(ATTENTION + "linear_proj", H + "self_attn.o_proj", ("hidden", "mla_value")),
)  # fmt: skip
EXPERT_BIAS = Rule(
    P + "mlp.router.expert_bias", (H + "mlp.gate.e_score_correction_bias",), "same", ("experts",),
    ("moe", "expert_bias"), dtype="float32",
)  # fmt: skip
DEEPSEEK = (*MLA, *MLP, *moe(), *shared_expert("shared_experts"), EXPERT_BIAS)
MTP = "mtp.layers.{m}."
MTP_ENDS = (
    norm(MTP + "enorm.weight", "model.layers.{n}.enorm"),
    norm(MTP + "hnorm.weight", "model.layers.{n}.hnorm"),
    linear(MTP + "eh_proj", "model.layers.{n}.eh_proj", ("hidden", "hidden2")),
    norm(MTP + "final_layernorm.weight", "model.layers.{n}.shared_head.norm"),
)

MTP_COPIES = (
    ("embedding.word_embeddings.weight", "model.layers.{n}.embed_tokens.weight"),
    ("output_layer.weight", "model.layers.{n}.shared_head.head.weight"),
)


def core_in_mtp(core: str) -> str:
    """A decoder layer's parameter as the layer inside a multi-token prediction module names it."""
    return core.replace(P, MTP + "transformer_layer.")


def in_mtp(rule: Rule) -> Rule:
    """A decoder layer's rule for the layer inside a multi-token prediction module, named as one layer more."""
    return replace(
        rule,
        core=core_in_mtp(rule.core),
        hf=tuple(name.replace("{l}", "{n}") for name in rule.hf),
        also=tuple(core_in_mtp(name) for name in rule.also),
        fused=rule.fused and rule.fused.replace("{l}", "{n}"),
    )


GPT_OSS_MOE = (
    norm(MLP_NORM, H + "post_attention_layernorm", also=(FC1_NORM,)),
    Rule(ATTENTION + "core_attention.softmax_offset", (H + "self_attn.sinks",), "same", ("heads",)),
    linear(P + "mlp.router", H + "mlp.router", ("experts", "hidden")),
    Rule(P + "mlp.router.bias", (H + "mlp.router.bias",), "same", ("experts",)),
    Rule(EXPERT + "linear_fc1.weight", (H + "mlp.experts.gate_up_proj",), "gate_up_interleaved",
         ("moe_fc1", "hidden")),
    Rule(EXPERT + "linear_fc1.bias", (H + "mlp.experts.gate_up_proj_bias",), "gate_up_interleaved",
         ("moe_fc1",)),
    Rule(EXPERT + "linear_fc2.weight", (H + "mlp.experts.down_proj",), "transposed", ("hidden", "moe_ffn")),
    Rule(EXPERT + "linear_fc2.bias", (H + "mlp.experts.down_proj_bias",), "same", ("hidden",)),
)  # fmt: skip
GEMMA2 = (
    *ends()[:2],
    *SELF_ATTENTION,
    norm(ATTENTION + "linear_proj.post_layernorm.weight", H + "post_attention_layernorm"),
    norm(FC1_NORM, H + "pre_feedforward_layernorm", also=(MLP_NORM,)),
    *MLP[1:],
    norm(P + "mlp.linear_fc2.post_layernorm.weight", H + "post_feedforward_layernorm"),
)
G = "transformer.h.{l}."


def conv1d(
    core: str, hf: str, shape: tuple[str, str], layout: str = "transposed", bias: str = "same"
) -> tuple[Rule, ...]:
    """Weight and bias of one of GPT-2's (in, out) linears."""
    return (
        Rule(core + ".weight", (hf + ".weight",), layout, shape),
        Rule(core + ".bias", (hf + ".bias",), bias, shape[:1]),
    )


def layer_norm(core: str, hf: str, also: tuple[str, ...] = ()) -> tuple[Rule, ...]:
    """Weight and bias of a LayerNorm; `core` ends before `weight`."""
    return (
        norm(core + "weight", hf, also=tuple(name + "weight" for name in also)),
        Rule(core + "bias", (hf + ".bias",), "same", ("hidden",), also=tuple(name + "bias" for name in also)),
    )


GPT2 = (
    ends(embed="transformer.wte")[0],
    linear("embedding.position_embeddings", "transformer.wpe", ("positions", "hidden")),
    *layer_norm(ATTENTION + "linear_qkv.layer_norm_", G + "ln_1", (P + "input_layernorm.",)),
    *conv1d(ATTENTION + "linear_qkv", G + "attn.c_attn", ("qkv", "hidden"), "qkv_conv1d", "qkv_conv1d"),
    *conv1d(ATTENTION + "linear_proj", G + "attn.c_proj", ("hidden", "query")),
    *layer_norm(P + "mlp.linear_fc1.layer_norm_", G + "ln_2", (P + "pre_mlp_layernorm.",)),
    *conv1d(P + "mlp.linear_fc1", G + "mlp.c_fc", ("fc1", "hidden")),
    *conv1d(P + "mlp.linear_fc2", G + "mlp.c_proj", ("hidden", "ffn")),
    *layer_norm("decoder.final_layernorm.", "transformer.ln_f"),
    ends()[2],
)
LLAMA = (*ends(), *SELF_ATTENTION, PROJECTION_BIAS, *MLP, *MLP_BIAS)
ERNIE = tuple(replace(rule, layout="qkv_pairs") if rule.layout == "qkv" else rule for rule in LLAMA)
QWEN = (*ends(), *SELF_ATTENTION, *MLP)  # biases that args ask for beyond these have no rule
PHI3 = (
    *ends(),
    SELF_ATTENTION[0],
    Rule(ATTENTION + "linear_qkv.weight", (H + "self_attn.qkv_proj.weight",), "qkv_fused", ("qkv", "hidden")),
    SELF_ATTENTION[3],
    MLP[0],
    linear(P + "mlp.linear_fc1", H + "mlp.gate_up_proj", ("fc1", "hidden"), "dense"),
    MLP[2],
)
MIXTRAL = (*ends(), *SELF_ATTENTION, *moe("block_sparse_moe.", "w1", "w3", "w2"))
DEEPSEEK_V2 = (*ends(), *DEEPSEEK)
DEEPSEEK_V3 = (*ends(), *DEEPSEEK, *MTP_ENDS, *(in_mtp(rule) for rule in DEEPSEEK))
GLM4_MOE_LAYER = (*SELF_ATTENTION, *QK_NORM, *MLP, *moe(), *shared_expert("shared_experts"), EXPERT_BIAS)
GLM4_MOE = (*ends(), *GLM4_MOE_LAYER, *MTP_ENDS, *(in_mtp(rule) for rule in GLM4_MOE_LAYER))
GPT_OSS = (*ends(), *SELF_ATTENTION, PROJECTION_BIAS, *GPT_OSS_MOE)
GEMMA = (*ends()[:2], *SELF_ATTENTION, *MLP)
