"""The architecture of a model in one spelling: Megatron's own names where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.rope_args import RopeScaling


class GluInterleave(NamedTuple):
    """Gate and up rows in turns of `block` rows, within the rows of each of `parts` expert-tensor-parallel ranks.

    The ranks' rows are stored as halves: all first halves, then all second ones (Megatron-LM mlp.py
    `apply_swiglu_sharded_factory`, which knows nothing of the turns).
    """

    block: int
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """What decides shapes and layouts, and what config.json must say. Sizes are in elements.

    `rope_scaling` lists the scalings the model may have been trained with: one, unless Megatron-LM ignored an
    option and the args cannot tell. `moe_layers`, `sliding_layers` and `no_rope_layers` hold 1 or 0 per layer.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    max_position_embeddings: int
    vocab_size: int | None = None  # without padding; None when unknown
    padded_vocab_size: int | None = None
    tied: bool = True
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    zero_centered_gamma: bool = False  # norms are stored as weight - 1
    activation: str = (
        "gelu"  # by tanh; swiglu, geglu, quick_geglu, gelu_erf, squared_relu; or a name not used
    )
    activation_clamp: float | None = None
    glu_linear_offset: float = 0.0
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    softmax_type: str = "vanilla"
    position_embedding_type: str = "learned_absolute"  # or rope or none
    rotary_base: float = 10000
    rotary_base_local: float | None = None  # of layers with a sliding window that have their own (Gemma 3)
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    no_rope_layers: tuple[int, ...] = ()  # 1 for layers without rotary embedding; () for none
    rope_scaling: tuple[RopeScaling, ...] = (None,)
    yarn_told: bool = True  # False for Megatron-LM args from before it had options for the numbers of YaRN
    sliding_window: int | None = None  # keys a query sees, itself included
    sliding_layers: tuple[int, ...] = ()
    sliding_pattern: int | None = None  # every n-th layer sees all keys (Gemma 3)
    query_pre_attn_scalar: float | None = None  # 1 / softmax_scale ** 2; None for the size of a head
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    init_method_std: float = 0.02
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    params_dtype: str | None = None
    num_experts: int | None = None
    moe_layers: tuple[int, ...] = ()
    moe_ffn_hidden_size: int = 0
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    glu_interleave: GluInterleave | None = None  # of rows of the experts' fc1; None: gate first, then up
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    dsa_indexer_n_heads: int = 0  # 0 for a model without an indexer (megatron_args.py)
    dsa_indexer_head_dim: int = 0
    dsa_indexer_topk: int = 0
    dsa_indexer_rope_interleaved: bool | None = None
    dsa_indexer_k_norm_epsilon: float | None = None
    indexer_layers: tuple[int, ...] = ()  # 1 for layers with an indexer; () where all have one
    mtp_num_layers: int = 0
    attention_output_gate: bool = False
    linear_layers: tuple[int, ...] = ()  # 1 for gated delta nets; () for none
    linear_conv_kernel_dim: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    hybrid_pattern: str = ""  # kinds of layers of a HybridModel: M, *, -, E or P; "" for a GPT model
    mamba_state_dim: int = 0
    mamba_head_dim: int = 0
    mamba_num_groups: int = 0
    mamba_num_heads: int = 0
    moe_latent_size: int | None = None
    own: Mapping[str, Any] = field(default_factory=dict)  # arguments that only a rule file knows (`settings`)

    @property
    def true_vocab_size(self) -> int:
        """Rows of the embedding that stand for tokens."""
        if self.vocab_size is None:
            raise MappingError("the true vocabulary size is not known")
        return self.vocab_size

    @property
    def gated(self) -> bool:
        return self.activation.endswith("glu")

    def is_moe(self, layer: int) -> bool:
        return bool(self.moe_layers and self.moe_layers[layer])

    def has_indexer(self, layer: int) -> bool:
        return bool(self.dsa_indexer_n_heads and (not self.indexer_layers or self.indexer_layers[layer]))

    def has(self, setting: str) -> bool:
        """Whether the model has what a setting is about: experts, gated delta nets, Mamba layers."""
        if setting == "num_experts" or setting.startswith("moe_"):
            return self.num_experts is not None
        if setting.startswith("linear_") and setting != "linear_layers":
            return bool(self.linear_layers)
        return not setting.startswith("mamba_") or bool(self.hybrid_pattern)

    def kind(self, layer: int) -> str:
        """What a layer is or attends with: attention (*), a gated delta net (G), or of a pattern M, -, E or P."""
        if self.hybrid_pattern:
            return self.hybrid_pattern[layer]
        return "G" if self.linear_layers and self.linear_layers[layer] else "*"

    def setting(self, name: str) -> Any:
        """A field, or an argument that only a rule file knows."""
        return getattr(self, name) if name in ModelArgs.__dataclass_fields__ else self.own.get(name)


def frozen(value: Any) -> Any:
    """A value with tuples for lists."""
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value
