"""Names of element types and their sizes, in torch's spelling without the `torch.` prefix.

The whole tool speaks these names, so nothing but the writer's oracle tests needs torch to know a type.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_tools.errors import UnsupportedCheckpointError, UsageError

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}

CASTABLE = frozenset({"float64", "float32", "float16", "bfloat16"})  # one to the other, in any direction
FLOATING = frozenset(name for name in ITEMSIZE if "float" in name)


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise UnsupportedCheckpointError(
            f"element type {dtype!r} is not supported; known types are {', '.join(ITEMSIZE)}"
        ) from None


class Form(NamedTuple):
    """Element type and shape (elements per dimension) of a value."""

    dtype: str
    shape: tuple[int, ...]


def check_dtype(dtype: str | None) -> None:
    """Raise UsageError if weights cannot be written as this type."""
    if dtype is not None and dtype not in CASTABLE:
        raise UsageError(f"--dtype {dtype}: weights can be written as {', '.join(sorted(CASTABLE))}")
