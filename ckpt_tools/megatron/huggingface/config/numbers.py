"""Sizes from config.json and from a checkpoint's arguments, looked at before anything is built of them.

Both come from strangers. A model of 10^10 layers would fill the memory with names before the first one is missed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from ckpt_tools.errors import MappingError, list_problems

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
    for field in fields(model):
        value, (kind, *optional) = getattr(model, field.name), str(field.type).split(" | ")
        if not (value is None and optional) and (wanted := _wanted(kind, value)):
            problems.append(f"{field.name} is {_short(value)}; expected {wanted}")
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
