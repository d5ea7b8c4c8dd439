"""The settings that rules calculate with are of the kind that Megatron takes.

A command line is typed by its parser. YAML files and stored arguments are not: there a size can be a word, or so
large that no model has it. What is wrong is named once, and the rules go on without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt_tools.verify.facts import Facts
from ckpt_tools.verify.report import ERROR, Check, Finding

_MOST = 1 << 40  # of anything that is counted
_FROM_ONE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards", "num_attention_heads", "micro_batch_size", "global_batch_size",
    "eval_micro_batch_size", "eval_global_batch_size",
)  # fmt: skip
_FROM_ZERO = (
    "seq_length", "max_position_embeddings", "num_layers", "num_experts", "cpu_offloading_num_layers", "hidden_size",
    "num_query_groups", "kv_channels", "ffn_hidden_size", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "kv_lora_rank", "qk_pos_emb_head_dim", "q_lora_rank", "v_head_dim",
    "mtp_num_layers", "make_vocab_size_divisible_by", "vocab_size", "padded_vocab_size",
)  # fmt: skip
_LEAST = dict.fromkeys(_FROM_ONE, 1) | dict.fromkeys(_FROM_ZERO, 0)
_WORDS = ("optimizer",)
_PATTERNS = ("moe_layer_freq",)


def checked_settings(facts: Facts) -> tuple[Facts, Check]:
    """The facts without settings of another kind than Megatron takes, and what those are."""
    wrong = {name: wanted for name, wanted in map(_judged, facts.job.settings.items()) if wanted}
    sound = {name: value for name, value in facts.job.settings.items() if name not in wrong}
    args = {name: value for name, value in facts.args.items() if not _judged((name, value))[1]}
    findings = tuple(
        Finding("settings", ERROR, f"{name} is {_short(facts.job.settings[name])}", f"Megatron takes {wanted}",
                "correct it where it comes from")
        for name, wanted in sorted(wrong.items())
    )  # fmt: skip
    known = [name for name in facts.job.settings if name in {*_LEAST, *_WORDS, *_PATTERNS}]
    return replace(facts, job=replace(facts.job, settings=sound), args=args), Check(
        "settings", "settings", len(known), findings
    )


def _judged(setting: tuple[str, Any]) -> tuple[str, str]:
    """A setting's name, and what Megatron takes for it if it is something else."""
    name, value = setting
    if value is None:
        return name, ""
    if name in _LEAST and not _counts(value, _LEAST[name]):
        return name, f"a whole number from {_LEAST[name]} to {_MOST:,}"
    if name in _WORDS and not isinstance(value, str):
        return name, "a word"
    if name in _PATTERNS and not _counts(value, 1):
        is_list = isinstance(value, list | tuple) and all(_counts(one, 0) for one in value)
        return name, "" if is_list else "a whole number from 1, or a list of 0 and 1"
    return name, ""


def _counts(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MOST


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
