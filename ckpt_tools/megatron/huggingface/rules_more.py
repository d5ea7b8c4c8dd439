"""Rules of further dense families: LayerNorm and its bias, MLPs without a gate, fused projections, other names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckpt_tools.megatron.huggingface.rule_tables import (
    ATTENTION,
    LLAMA,
    MLA,
    MLP,
    PHI3,
    PROJECTION_BIAS,
    QWEN,
    SELF_ATTENTION,
    G,
    H,
    P,
    ends,
    layer_norm,
    linear,
)
from ckpt_tools.megatron.huggingface.rules import Rule

FC1, FC2 = P + "mlp.linear_fc1", P + "mlp.linear_fc2"


def bias(core: str, hf: str, size: str, *when: str, layout: str = "same") -> Rule:
    """The bias of a linear; without `when`, the class has it always."""
    return Rule(core + ".bias", (hf + ".bias",), layout, (size,), when)


def two_norms(before_attention: str, before_mlp: str) -> tuple[Rule, ...]:
    """Both LayerNorms of a layer."""
    return (
        *layer_norm(ATTENTION + "linear_qkv.layer_norm_", before_attention, (P + "input_layernorm.",)),
        *layer_norm(FC1 + ".layer_norm_", before_mlp, (P + "pre_mlp_layernorm.",)),
    )


def around(
    embed: str = "model.embed_tokens", final: str = "model.norm", head: str = "lm_head"
) -> tuple[Rule, ...]:
    """Embedding, final LayerNorm and head."""
    return (
        ends(embed=embed)[0],
        *layer_norm("decoder.final_layernorm.", final),
        replace(ends()[2], hf=(head + ".weight",)),
    )


def ungated(up: str, down: str, *when: str) -> tuple[Rule, ...]:
    """An MLP of two linears, whose biases are there where all of `when` holds."""
    return (
        linear(FC1, up, ("fc1", "hidden")),
        bias(FC1, up, "fc1", *when),
        linear(FC2, down, ("hidden", "ffn")),
        bias(FC2, down, "hidden", *when),
    )


def fused_attention(qkv: str, out: str) -> tuple[Rule, ...]:
    """Query, key and value as one linear, grouped as Megatron has them."""
    return (
        Rule(ATTENTION + "linear_qkv.weight", (qkv + ".weight",), "qkv_grouped", ("qkv", "hidden")),
        bias(ATTENTION + "linear_qkv", qkv, "qkv", layout="qkv_grouped"),
        linear(ATTENTION + "linear_proj", out, ("hidden", "query")),
        bias(ATTENTION + "linear_proj", out, "hidden"),
    )


def renamed(rules: Iterable[Rule], names: Mapping[str, str]) -> tuple[Rule, ...]:
    """The rules with every part of a Hugging Face name that `names` has replaced."""

    def other(name: str) -> str:
        for part, new in names.items():
            name = name.replace(part, new)
        return name

    return tuple(replace(rule, hf=tuple(map(other, rule.hf))) for rule in rules)


def in_pairs(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules for a class that keeps rotary pairs in neighbouring rows."""
    return tuple(replace(rule, layout="qkv_pairs") if rule.layout == "qkv" else rule for rule in rules)


TWO_NORMS = two_norms(H + "input_layernorm", H + "post_attention_layernorm")
SQUARED_RELU = ungated(H + "mlp.up_proj", H + "mlp.down_proj", "linear_bias")
NEMOTRON = (*around(), *TWO_NORMS, *SELF_ATTENTION[1:], PROJECTION_BIAS, *SQUARED_RELU)
ARCEE = (*ends(), *SELF_ATTENTION, PROJECTION_BIAS, MLP[0], *SQUARED_RELU)
STABLELM = (*around(), *TWO_NORMS, *SELF_ATTENTION[1:], *MLP[1:])
STARCODER2 = (*around(), *TWO_NORMS, *SELF_ATTENTION[1:], PROJECTION_BIAS,
              *ungated(H + "mlp.c_fc", H + "mlp.c_proj", "linear_bias"))  # fmt: skip
HELIUM = in_pairs(QWEN)
GLM = in_pairs((*ends(), *SELF_ATTENTION, MLP[0], *PHI3[-2:]))
YOUTU = (*ends(), *MLA, *MLP)
N = "gpt_neox.layers.{l}."
NEOX = (
    *around("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
    *two_norms(N + "input_layernorm", N + "post_attention_layernorm"),
    *fused_attention(N + "attention.query_key_value", N + "attention.dense"),
    *ungated(N + "mlp.dense_h_to_4h", N + "mlp.dense_4h_to_h"),
)
PERSIMMON = (
    *around(final="model.final_layernorm"),
    *TWO_NORMS,
    *fused_attention(H + "self_attn.query_key_value", H + "self_attn.dense"),
    *(replace(rule, shape=("head_dim",), when=("qk_norm",)) for x in "qk"
      for rule in layer_norm(f"{ATTENTION}{x}_layernorm.", f"{H}self_attn.{x}_layernorm")),
    *ungated(H + "mlp.dense_h_to_4h", H + "mlp.dense_4h_to_h"),
)  # fmt: skip
BIGCODE = (
    *around("transformer.wte", "transformer.ln_f"),
    linear("embedding.position_embeddings", "transformer.wpe", ("positions", "hidden")),
    *two_norms(G + "ln_1", G + "ln_2"),
    *fused_attention(G + "attn.c_attn", G + "attn.c_proj"),
    *ungated(G + "mlp.c_fc", G + "mlp.c_proj"),
)
EXAONE = renamed(
    LLAMA,
    {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
     "self_attn.o_proj": "self_attn.out_proj", "self_attn": "attn.attention", "input_layernorm": "ln_1",
     "post_attention_layernorm": "ln_2", "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj"},
)  # fmt: skip
