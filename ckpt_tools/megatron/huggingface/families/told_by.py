"""What tells a family where no config.json does: its parameters, and what the args say that they compute."""

from __future__ import annotations

from collections.abc import Callable, Set

from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs

PARTS = {  # of a parameter's name
    "hybrid": "decoder.final_norm.",
    "three in one": ".mamba_mixer.",
    "attention": ".self_attention.",
    "mlp": ".mlp.",
    "delta net": ".self_attention.in_proj.",
    "indexer": ".core_attention.indexer.",
    "latent attention": ".linear_kv_down_proj.",
    "experts": ".experts.experts.",
    "expert bias": ".router.expert_bias",
    "shared expert": ".shared_experts.",
    "shared gate": ".shared_experts.gate_weight",
    "dense layer": ".mlp.linear_fc1.weight",
    "qk norm": ".q_layernorm.",
    "sink": ".softmax_offset",
    "norm behind": ".linear_proj.post_layernorm.",
    "fused norm before": ".mlp.linear_fc1.layer_norm_weight",
    "norm before": ".pre_mlp_layernorm.",
    "norm bias": "decoder.final_layernorm.bias",
    "learned positions": "embedding.position_embeddings.",
    "qkv bias": ".linear_qkv.bias",
    "output bias": ".linear_proj.bias",
}
SETTINGS: dict[str, Callable[[ModelArgs], bool]] = {
    "gated attention": lambda model: model.attention_output_gate,
    "rotates neighbours": lambda model: bool(model.dsa_indexer_rope_interleaved),
    "one key head": lambda model: model.num_query_groups == 1 < model.num_attention_heads,
    "gated": lambda model: model.gated,
    "geglu": lambda model: model.activation == "geglu",
    "squared relu": lambda model: model.activation == "squared_relu",
    "normalizes q and k": lambda model: model.qk_layernorm,
    "norms around zero": lambda model: model.zero_centered_gamma,
    "rotates a part": lambda model: model.rotary_percent < 1,
    "rotates all": lambda model: model.rotary_percent == 1,
    "wide": lambda model: model.num_attention_heads * model.kv_channels != model.hidden_size,
    "window": lambda model: model.sliding_window is not None,
    "some see all": lambda model: 0 in model.sliding_layers,
}
# The first family whose words all hold. Those of most telling parameters stand first; the last has none.
FAMILIES_TOLD: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("falcon_h1", ("three in one",)),
    ("nemotron_h", ("hybrid", "attention")),
    ("nemotron_h", ("hybrid", "mlp")),
    ("mamba2", ("hybrid",)),
    ("qwen3_next", ("delta net", "experts")),
    ("qwen3_next", ("gated attention", "experts")),
    ("qwen3_5", ("delta net",)),
    ("qwen3_5", ("gated attention",)),
    ("glm_moe_dsa", ("indexer", "rotates neighbours")),
    ("deepseek_v32", ("indexer",)),
    ("youtu", ("latent attention", "no experts")),
    ("deepseek_v3", ("latent attention", "expert bias")),
    ("deepseek_v2", ("latent attention",)),
    ("minimax_m2", ("expert bias", "qk norm", "no shared expert", "no dense layer")),
    ("glm4_moe", ("expert bias",)),
    ("gpt_oss", ("sink",)),
    ("exaone4", ("norm behind", "no norm before", "no fused norm before")),
    ("gemma3", ("norm behind", "qk norm")),
    ("gemma2", ("norm behind",)),
    ("gpt_bigcode", ("learned positions", "one key head")),
    ("gpt2", ("learned positions",)),
    ("qwen2_moe", ("shared gate",)),
    ("qwen3_moe", ("experts", "qk norm")),
    ("mixtral", ("experts",)),
    ("stablelm", ("norm bias", "gated")),
    ("persimmon", ("norm bias", "squared relu", "normalizes q and k")),
    ("nemotron", ("norm bias", "squared relu", "norms around zero")),
    ("nemotron", ("norm bias", "squared relu", "rotates a part")),
    ("jais2", ("norm bias", "squared relu")),
    ("starcoder2", ("norm bias", "rotates all")),
    ("gpt_neox", ("norm bias",)),
    ("arcee", ("squared relu",)),
    ("qwen3", ("qk norm",)),
    ("glm", ("qkv bias", "no output bias", "rotates a part")),
    ("seed_oss", ("qkv bias", "no output bias", "wide")),
    ("qwen2", ("qkv bias", "no output bias")),
    ("gemma", ("geglu",)),
    ("ministral", ("window", "some see all")),
    ("mistral", ("window",)),
    ("llama", ()),
)


def told_by(names: set[str], model: ModelArgs | None) -> str:
    """The family's name. Of a model without args, nothing is told by them."""
    held = words_of(names, model)
    return next(family for family, words in FAMILIES_TOLD if all(holds(word, held) for word in words))


def words_of(names: set[str], model: ModelArgs | None) -> set[str]:
    """The words that hold for a model."""
    parts = {word for word, part in PARTS.items() if any(part in name for name in names)}
    return parts | {word for word, said in SETTINGS.items() if model is not None and said(model)}


def holds(word: str, held: Set[str]) -> bool:
    """Whether a word is among those that hold, or is not where it begins with no."""
    plain = word.removeprefix("no ")
    return (plain in held) == (plain == word)
