"""Pickle protocol 2 opcodes of texts, ints and int tuples, for the pickles that are written without torch."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def text_ops(text: str) -> bytes:
    """Pushes a str."""
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def int_ops(value: int) -> bytes:
    """Pushes a non-negative int, in the shortest form."""
    if value < 1 << 8:
        return b"K" + bytes([value])
    if value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<I", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(data)]) + data


def int_tuple_ops(numbers: Sequence[int]) -> bytes:
    """Pushes a tuple of non-negative ints."""
    body = b"".join(map(int_ops, numbers))
    if len(numbers) <= 3:
        return body + (b")", b"\x85", b"\x86", b"\x87")[len(numbers)]
    return b"(" + body + b"t"
