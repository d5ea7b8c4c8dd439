"""Sizes that no model has are refused before anything is built of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.config.megatron_args import read_model_args
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.mapping.rules import Rule, expand

QWEN = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
        "num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
        "decoder_sparse_step": 1, "head_dim": 4, "hidden_act": "silu", "rope_theta": 10000.0}  # fmt: skip
ARGS = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_experts": 4}


def test_the_plain_ones_are_read() -> None:
    assert read_config(FAMILIES["qwen3_moe"], QWEN).num_layers == 2
    assert read_model_args(ARGS).num_experts == 4


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**10},
        {"num_hidden_layers": 1e10},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": True},
        {"num_experts": 10**10},
        {"num_hidden_layers": 9_000, "num_experts": 9_000},
        {"num_attention_heads": 0},
        {"num_attention_heads": "2"},
        {"hidden_size": [8]},
        {"hidden_size": 1 << 62},
        {"decoder_sparse_step": 0},
        {"decoder_sparse_step": "x"},
        {"mlp_only_layers": 3},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
        {"rope_parameters": {"full_attention": 1}},
        {"vocab_size": 1.5},
    ],
    ids=str,
)
def test_what_no_config_says(change: dict[str, Any]) -> None:
    began = time.process_time()
    with pytest.raises(
        MappingError, match=next(iter(change)).replace("rope_parameters", "config") + "|config"
    ):
        read_config(FAMILIES["qwen3_moe"], QWEN | change)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 10**10},
        {"num_layers": 10**10, "moe_layer_freq": 2},
        {"num_experts": 10**10},
        {"num_layers": 9_000, "num_experts": 9_000},
        {"num_attention_heads": "x"},
        {"hidden_size": -8},
        {"moe_layer_freq": 0},
        {"padded_vocab_size": "x"},
        {"ffn_hidden_size": 2.5},
        {"rotary_scaling_factor": "x", "multi_latent_attention": True},
    ],
    ids=str,
)
def test_what_no_arguments_say(change: dict[str, Any]) -> None:
    began = time.process_time()
    with pytest.raises(MappingError):
        read_model_args(ARGS | change)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("name", ["num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"])
@pytest.mark.parametrize("value", [2.5, "2", True, -1, {}])
def test_a_count_is_a_whole_number_and_never_rounded(name: str, value: object) -> None:
    with pytest.raises(MappingError, match=f"{name} is "):
        read_config(FAMILIES["qwen3_moe"], QWEN | {name: value})


@pytest.mark.parametrize("name", ["moe_router_topk", "moe_ffn_hidden_size"])
def test_nor_is_one_of_the_arguments(name: str) -> None:
    with pytest.raises(MappingError, match=f"{name} is 2.5"):
        read_model_args(ARGS | {name: 2.5})


def test_a_rule_for_experts_says_nothing_of_a_model_without_them() -> None:
    rule = Rule("a.{l}", ("b.{l}",), "same", ("ffn",))
    of_experts = replace(rule, core="a.{l}.{e}")
    model = read_config(FAMILIES["llama"], {k: v for k, v in QWEN.items() if "experts" not in k})
    found = [expand(replace(FAMILIES["llama"], rules=(one,)), model) for one in (rule, of_experts)]
    assert [len(pairs) for pairs in found] == [2, 0]


class Asked(dict[str, Any]):
    """Settings that note which of them are looked at."""

    def __init__(self, values: dict[str, Any], names: set[str]) -> None:
        super().__init__(values)
        self.names = names

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


STRANGE: tuple[Any, ...] = (
    0, -1, 7, 1.5, "x", "", [], [1], ["x"], {}, {"a": 1}, {"rope_type": "yarn"}, True, None, float("nan"),
    float("inf"), [[1]], 10**400, 10**5000, (1,), b"x", object(),
)  # fmt: skip
KINDS: tuple[dict[str, Any], ...] = (
    {}, {"multi_latent_attention": True}, {"gated_linear_unit": True}, {"position_embedding_type": "yarn"},
    {"use_rope_scaling": True}, {"window_size": (1, 0)}, {"moe_mlp_glu_interleave_size": 2},
)  # fmt: skip


def test_any_value_of_any_argument_is_read_or_refused() -> None:
    """No other error: `bounded` explains wrong values, and would hide a mistake of ours if it caught all."""
    names: set[str] = set()
    for kind in KINDS:
        read_model_args(Asked(ARGS | kind, names))
    assert len(names) > 70
    refused = 0
    for kind in KINDS:
        for name in sorted(names):
            for value in STRANGE:
                try:
                    read_model_args(ARGS | kind | {name: value})
                except MappingError:
                    refused += 1
    assert refused > 1000


def test_any_value_in_a_config_is_read_or_refused() -> None:
    refused = 0
    for family in FAMILIES.values():
        for name in (
            *QWEN,
            "rope_scaling",
            "rope_parameters",
            "layer_types",
            "sliding_window",
            "num_local_experts",
        ):
            for value in STRANGE:
                try:
                    read_config(family, QWEN | {name: value})
                except MappingError:
                    refused += 1
    assert refused > 1000


def test_grouped_queries_without_a_number_of_groups_are_named() -> None:
    with pytest.raises(MappingError, match="do not say num_query_groups"):
        read_model_args(ARGS | {"group_query_attention": True})
