"""The architecture of a model in one spelling: Megatron's own names where it has them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from ckpt_tools.errors import MappingError, list_problems
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
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


MAX_SIZE = (1 << 40) - 1  # of one dimension
MAX_LAYERS = 10_000
MAX_HEADS = 1 << 13
MAX_EXPERTS = 1 << 16
MAX_EXPERT_MODULES = 1 << 18  # layers x experts: 16 times the largest model of today
MAX_HEAD_MODULES = 1 << 16  # layers x heads: 3 times the largest model of today
_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "num_nextn_predict_layers",
    "mtp_num_layers",
    "first_k_dense_replace",
)
_EXPERTS = ("num_experts", "num_moe_experts", "num_local_experts", "n_routed_experts")
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_query_groups", "linear_num_key_heads",
          "linear_num_value_heads", "mamba_num_heads", "mamba_num_groups", "n_groups")  # fmt: skip
_POSITIVE = ("num_hidden_layers", "num_layers", "hidden_size", "head_dim", "kv_channels", "ffn_hidden_size",
             "intermediate_size")  # fmt: skip
_COUNTS = ("num_experts_per_tok", "moe_router_topk", "n_shared_experts", "moe_intermediate_size",
           "moe_ffn_hidden_size", "shared_expert_intermediate_size",
           "moe_shared_expert_intermediate_size")  # fmt: skip
_BOUNDS = (
    (_COUNTS, 0, MAX_SIZE),
    (("decoder_sparse_step",), 1, MAX_LAYERS),
    (_LAYERS, 0, MAX_LAYERS),
    (_EXPERTS, 0, MAX_EXPERTS),
    (_HEADS, 1, MAX_HEADS),
    (_POSITIVE, 1, MAX_SIZE),
)
# What reading a value of the wrong kind runs into. A name that is not there is not among them: who reads asks first.
_MISTAKES = (TypeError, ValueError, ArithmeticError)

F = TypeVar("F", bound=Callable[..., Any])


def refuse_absurd(config: object) -> None:
    """Raise MappingError, naming all of them, if sizes are not whole numbers or beyond all bounds."""
    if not isinstance(config, Mapping):
        return
    problems = []
    for names, low, high in _BOUNDS:
        for name in names:
            value = config.get(name)
            if value is not None and not (type(value) is int and low <= value <= high):
                problems.append(f"{name} is {_short(value)}; expected a whole number from {low} to {high:,}")
    if problems:
        raise MappingError("these settings cannot be those of a model:\n" + list_problems(problems), problems)


def bounded(where: str) -> Callable[[F], F]:
    """Makes a reader of `ModelArgs` explain every value that is of another kind than its field, or out of bounds."""

    def wrap(read: F) -> F:
        @functools.wraps(read)
        def checked(*args: Any) -> Any:
            for one in args:
                refuse_absurd(one)
            try:
                model = read(*args)
            except _MISTAKES as error:
                raise MappingError(
                    f"{where}: a setting has a value that no model has ({type(error).__name__}: {_short(error)})"
                ) from error
            _check_model(model, where)
            return model

        return checked  # type: ignore[return-value]

    return wrap


def _check_model(model: Any, where: str) -> None:
    problems = []
    for one in fields(model):
        value, (kind, *optional) = getattr(model, one.name), str(one.type).split(" | ")
        if not (value is None and optional) and (wanted := _wanted(kind, value)):
            problems.append(f"{one.name} is {_short(value)}; expected {wanted}")
    products = (
        (1, "", MAX_LAYERS),
        (model.num_experts or 0, "experts", MAX_EXPERT_MODULES),
        (
            (model.num_attention_heads or 0)
            + (model.num_query_groups or 0)
            + (model.linear_num_key_heads or 0),
            "heads and query groups",
            MAX_HEAD_MODULES,
        ),
    )
    for count, what, most in products if not problems else ():
        if model.num_layers * count > most:
            of = f" of {count:,} {what}" if what else ""
            problems.append(f"{model.num_layers:,} layers{of}; at most {most:,} are taken for a model")
    if problems:
        raise MappingError(f"{where}: values that no model has:\n" + list_problems(problems), problems)


def _wanted(kind: str, value: Any) -> str:
    """What a field of this type holds, when `value` is not that."""
    if kind == "int" and (type(value) is not int or not 0 <= value <= MAX_SIZE):
        return f"a whole number from 0 to {MAX_SIZE:,}"
    if kind == "float" and (type(value) not in (int, float) or not abs(value) <= sys.float_info.max):
        return "a number"
    return "a word" if kind == "str" and not isinstance(value, str) else ""


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:  # Python writes no number of any length
        return f"a whole number of {value.bit_length():,} bits"
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
