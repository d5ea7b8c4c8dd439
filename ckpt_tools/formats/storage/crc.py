"""CRC-32 (the zip polynomial) at memory speed, and of joined parts without touching their bytes."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
    from isal.isal_zlib import crc32_combine as combine
except ImportError:  # no wheel for this platform, or an old one: the same sums, several times slower
    from zlib import crc32

    def combine(first: int, second: int, second_bytes: int, /) -> int:
        """CRC-32 of A+B from those of A and B and the length of B.

        Appending n zero bytes multiplies the remainder of A by x^(8n) modulo the polynomial (zlib, crc32_combine).
        """
        square = 1 << 23  # x^8, bit-reversed: bit 31 is x^0
        while second_bytes:
            if second_bytes & 1:
                first = _multiply(square, first)
            square = _multiply(square, square)
            second_bytes >>= 1
        return first ^ second


__all__ = ["combine", "crc32", "of_zeros"]


def of_zeros(nbytes: int) -> int:
    """CRC-32 of so many zero bytes, without summing them."""
    found: int = combine(0xFFFFFFFF, 0xFFFFFFFF, nbytes)
    return found


def _multiply(a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product
