"""A field of config.json that says what a setting of `ModelArgs` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from ckpt_tools.megatron.huggingface.config.field_values import Config, plain_read, plain_write
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs

REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class Field:
    """config.json's `hf` is `ModelArgs.arg`; `write` and `read` translate the value.

    `default` is what the transformers class takes when the key is absent: a value, or a function of the config.
    `wins` says whose value stands where checkpoint and reference config differ; "" refuses, and so does "either"
    unless one of them does not know (None). `also` is another spelling of `hf` that readers accept.
    """

    hf: str
    arg: str
    default: Any = REQUIRED
    write: Callable[[Any, ModelArgs], Any] = plain_write
    read: Callable[[Any, Config], Any] = plain_read
    wins: Literal["", "either", "reference", "checkpoint"] = ""
    also: str | None = None
