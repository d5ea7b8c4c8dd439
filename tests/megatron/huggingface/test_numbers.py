"""Sizes that no model has are refused before anything is built of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config import read_config
from ckpt_tools.megatron.huggingface.families import FAMILIES
from ckpt_tools.megatron.huggingface.model_args import read_model_args
from ckpt_tools.megatron.huggingface.rules import Rule, expand

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
