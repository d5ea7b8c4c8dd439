r"""Pickle protocol 2 opcodes of texts, ints and int tuples, for the pickles that are written without torch.

What stands in the bytes, here and in `dcp_metadata` and `frames` (`pickletools.dis` shows any pickle this way)::

    X <u32> text   push a str (BINUNICODE)        K <u8>  M <u16>  J <i32>   push an int
    \x8c <u8> text  the same, short               \x8a <u8> bytes           push a longer int (LONG1)
    c module \n name \n   push a global            )  \x85 \x86 \x87          push a tuple of the last 0, 1, 2, 3
    (   mark          t   a tuple from the mark   }  ]   push an empty dict, list
    u   dict entries from the mark                e   list elements from the mark
    s   one dict entry                            R   call: function, arguments
    \x81  new object: class, arguments            b   set its state
    q <u8>  put into the memo under a number      \x94  the same, under the next number (protocol 4)
    h <u8>  j <u32>   push from the memo          N None   \x88 \x89 True, False
    Q   the top names a persistent object         0   drop the top   . end
"""

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
