"""A walk over a pickle's opcodes that finds what would hurt the C unpickler before it runs.

The C unpickler grows its memo to any index that a PUT names, 16 bytes a slot. Hashing a nested tuple recurses
without a limit. Integers that are equal modulo 2**61 - 1 share a hash, so a dict of them takes quadratic time.
"""

from __future__ import annotations

import pickletools

from ckpt_tools.errors import CorruptCheckpointError

MAX_TUPLES = 20_000  # nested tuples hash by C recursion, about 100 bytes of an 8 MiB stack a level

MAX_WIDE_INTEGERS = 2_000  # random states have 32-bit integers; nothing has many that can share a hash

_COUNTED = {  # bytes of the count that precedes that many bytes of data
    "SHORT_BINSTRING": 1, "SHORT_BINBYTES": 1, "SHORT_BINUNICODE": 1, "LONG1": 1,
    "BINSTRING": 4, "BINBYTES": 4, "BINUNICODE": 4, "LONG4": 4,
    "BINUNICODE8": 8, "BINBYTES8": 8, "BYTEARRAY8": 8,
}  # fmt: skip
_LINES = {"GLOBAL": 2, "INST": 2}
_TUPLES = frozenset(b"t\x85\x86\x87")
_PUTS = frozenset(b"prq")
_INTEGERS = frozenset(b"IL\x8a\x8b")
_CODE = {ord(op.code): op for op in pickletools.opcodes}


def _widths() -> tuple[list[int], dict[int, int], dict[int, int]]:
    """Argument bytes of fixed-width opcodes (-1: another kind), count bytes and line counts of the others."""
    fixed, counts, lines = [-1] * 256, {}, {}
    for code, op in _CODE.items():
        if op.name in _COUNTED:
            counts[code] = _COUNTED[op.name]
        elif op.arg is not None and op.arg.n < 0:
            lines[code] = _LINES.get(op.name, 1)
        elif code not in _PUTS:
            fixed[code] = op.arg.n if op.arg else 0
    return fixed, counts, lines


_FIXED, _COUNT_BYTES, _LINE_COUNT = _widths()


def check_opcodes(data: bytes, where: str) -> None:
    """Prove that a pickle cannot make the C unpickler grow, recurse or search without end.

    Raises:
        CorruptCheckpointError: it could, or it is no sequence of opcodes.
    """
    at, tuples, wide, size, fixed = 0, 0, 0, len(data), _FIXED
    while at < size:
        code = data[at]
        width = fixed[code]
        if width < 0:
            start, at = at, _skip(data, at, where)
            wide += code in _INTEGERS and at - start > 9
            continue
        at += 1 + width
        if code in _TUPLES:
            tuples += 1
        elif code == 0x2E:  # STOP
            break
    if tuples > MAX_TUPLES or wide > MAX_WIDE_INTEGERS:
        raise CorruptCheckpointError(
            f"{where}: a pickle of {tuples} tuples and {wide} integers of 8 bytes or more cannot be read safely."
        )


def _skip(data: bytes, at: int, where: str) -> int:
    """Where the opcode after the one at `at` begins; its argument has no fixed width, or it is a PUT."""
    code = data[at]
    if code in _PUTS:
        index, end = _put_index(data, at)
        if not 0 <= index <= len(data):
            raise CorruptCheckpointError(
                f"{where}: byte {at} of the pickle stores memo entry {index}, but the pickle has only "
                f"{len(data)} bytes. It is damaged or hostile."
            )
        return end
    if code in _COUNT_BYTES:
        start = at + 1 + _COUNT_BYTES[code]
        return start + int.from_bytes(data[at + 1 : start], "little")
    if code not in _LINE_COUNT:
        raise CorruptCheckpointError(f"{where}: byte {at} of the pickle is {code:#04x}, which is no opcode.")
    for _ in range(_LINE_COUNT[code]):
        at = data.find(b"\n", at + 1)
        if at < 0:
            return len(data)
    return at + 1


def _put_index(data: bytes, at: int) -> tuple[int, int]:
    """The memo index that the PUT at `at` names, -1 if it is no number, and the end of the opcode."""
    if data[at] == 0x70:  # PUT: a decimal line
        end = data.find(b"\n", at) + 1 or len(data)
        text = data[at + 1 : end].strip()
        return (int(text) if text.isdigit() and len(text) < 20 else -1), end
    end = at + (2 if data[at] == 0x71 else 5)  # BINPUT, LONG_BINPUT
    return int.from_bytes(data[at + 1 : end], "little"), end
