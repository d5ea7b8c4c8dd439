"""What a user chooses by name: closed alphabets, one place for library and command line, and nothing to import."""

from __future__ import annotations

from typing import Literal, NoReturn, TypeAlias

MegatronFormat: TypeAlias = Literal["torch_dist", "fsdp_dtensor"]
CheckpointKind: TypeAlias = Literal["torch_dist", "fsdp_dtensor", "dcp", "safetensors"]
Format: TypeAlias = Literal["fsdp_dtensor", "torch_dist", "dcp", "hf"]
"""What an output is; the order is that of help."""
DialectName: TypeAlias = Literal["core-0.16", "core-0.17", "core-0.18", "core-0.19", "main", "bridge"]
"""The program that loads a result."""
LayerSpec: TypeAlias = Literal["te", "local"]
"""Whose modules a layer is made of: Transformer Engine's, which fuse norms into projections, or Megatron's own."""
ExpertModules: TypeAlias = Literal["grouped", "sequential"]
"""How a running model holds its experts: all in one module, or in a module each."""
LayoutName: TypeAlias = Literal["mfsdp-v1", "mfsdp-v2", "fsdp2", "even"]
"""Whose placement of rows."""
CheckLevel: TypeAlias = Literal["sample", "all", "none"]
"""How much of fp32 masters is compared with weights: a few rows of every tensor, everything, or nothing."""
SourceCheck: TypeAlias = Literal["all", "none", "unread"]
"""Whether every payload that is read from must have the checksum its writer stored.

`unread`: none is looked at, and what is cut from one is not summed for its new archive either.
"""
Quantization: TypeAlias = Literal["fp8-block"]
"""How weights of an export are quantized."""
TowerName: TypeAlias = Literal["language"]
"""The part of a vision-language model that is converted."""
NanPolicy: TypeAlias = Literal["bits", "equal", "different"]
"""When two NaNs are equal: when their bits are, always, or never."""
DiffBy: TypeAlias = Literal["auto", "keys", "parameters", "huggingface"]
"""The names by which two checkpoints are compared."""
StatsBy: TypeAlias = Literal["auto", "keys", "parameters"]
"""The names under which values are measured."""
InspectBy: TypeAlias = Literal["role", "layer", "rank", "dtype", "file"]
"""What `inspect` sums tensors by."""
ReportFormat: TypeAlias = Literal["text", "json", "github", "markdown"]
"""How a report of checks is printed."""


def assert_never(value: NoReturn) -> NoReturn:
    """Where no word is left: mypy proves that this is not reached (`typing` has it since Python 3.11 only)."""
    raise AssertionError(f"{value!r} is not a word of its alphabet")
