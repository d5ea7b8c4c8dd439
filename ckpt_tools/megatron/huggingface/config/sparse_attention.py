"""DeepSeek sparse attention (DSA) in Megatron's args: an indexer chooses the keys that a query of MLA sees.

Megatron core 0.19 computes what the Hugging Face classes compute: it rotates the first part of an index head and
gives the indexer normalized queries (#3026). Cores before it have the same parameters, but rotate the last part and
may give queries that are not normalized; their args lack `dsa_indexer_rope_interleaved`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tools.errors import MappingError

VARIANT = "experimental_attention_variant"
SINCE = (
    "sparse attention: only Megatron core 0.19 and newer compute it as this model does; before, its indexer rotates "
    "another part of each head"
)
TOO_OLD = (
    "the args do not say dsa_indexer_rope_interleaved: they are of a Megatron core before 0.19, whose indexer "
    "rotates another part of each head than every Hugging Face class"
)


def read_sparse_attention(args: Mapping[str, Any]) -> dict[str, Any]:
    """The `ModelArgs` fields of an indexer; nothing where there is none."""
    if args.get(VARIANT) != "dsa":
        return {}
    freq, offset = args.get("dsa_indexer_topk_freq") or 1, args.get("dsa_indexer_skip_topk_offset") or 0
    own = args.get("dsa_indexer_k_norm_epsilon")
    usual = next((args[n] for n in ("layernorm_epsilon", "norm_epsilon") if args.get(n) is not None), 1e-5)
    return {
        "dsa_indexer_n_heads": args.get("dsa_indexer_n_heads") or 0,
        "dsa_indexer_head_dim": args.get("dsa_indexer_head_dim") or 0,
        "dsa_indexer_topk": args.get("dsa_indexer_topk") or 0,
        "dsa_indexer_rope_interleaved": args.get("dsa_indexer_rope_interleaved"),
        "dsa_indexer_k_norm_epsilon": usual if own is None else own,
        "indexer_layers": indexer_layers(args["num_layers"], freq, offset),
    }


def indexer_layers(layers: int, freq: int, offset: int) -> tuple[int, ...]:
    """1 for every layer with an indexer, 0 for one that takes over the choice before it; () where all have one.

    Megatron's dsa.py `is_dsa_skip_topk_layer`, and transformers' `GlmMoeDsaConfig`, which counts layers from 0.
    """
    first = max(offset, 1)
    pattern = tuple(int(max(number - first, 0) % max(freq, 1) == 0) for number in range(1, layers + 1))
    return () if all(pattern) else pattern


def sharing(pattern: Sequence[int]) -> tuple[int, int]:
    """`dsa_indexer_topk_freq` and `dsa_indexer_skip_topk_offset` of a pattern."""
    if all(pattern):
        return 1, 0
    offset = list(pattern).index(0)
    behind = [layer for layer in range(offset, len(pattern)) if pattern[layer]]
    freq = (behind[0] if behind else len(pattern)) - offset + 1
    if not offset or indexer_layers(len(pattern), freq, offset) != tuple(pattern):
        raise MappingError(
            f"layers with an indexer are {list(pattern)}; in Megatron the first ones have one, and every n-th layer "
            "after them"
        )
    return freq, offset


def sparse_attention_args(model: Any) -> dict[str, Any]:
    """Megatron's args of a model's indexer beyond the fields that have Megatron's names."""
    if not model.dsa_indexer_n_heads:
        return {}
    freq, offset = sharing(model.indexer_layers)
    return {
        VARIANT: "dsa",
        "dsa_indexer_topk_freq": freq,
        "dsa_indexer_skip_topk_offset": offset,
        "dsa_indexer_rotate_activation": False,  # a rotation of queries and keys alike, for the sake of rounding
    }


def sparse_attention_problems(model: Any) -> list[str]:
    """What keeps a model with an indexer from being exported or imported."""
    if not model.dsa_indexer_n_heads:
        return []
    problems = [TOO_OLD] if model.dsa_indexer_rope_interleaved is None else []
    if model.indexer_layers and 0 in model.indexer_layers[: model.mtp_num_layers]:
        problems.append(
            "prediction layers that take over the choice of another's indexer: Megatron counts them from 1 again"
        )
    return problems
