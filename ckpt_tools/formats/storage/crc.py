"""CRC-32 (the zip polynomial) at memory speed, and of joined parts without touching their bytes."""

from __future__ import annotations

from functools import lru_cache

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this platform: the same sum, about four times slower
    from zlib import crc32

__all__ = ["combine", "crc32", "of_zeros"]

_POLYNOMIAL = 0xEDB88320  # bit-reversed; bit 31 is x^0


def combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of A+B from those of A and B and the length of B.

    Appending n zero bytes multiplies the remainder of A by x^(8n) modulo the polynomial (zlib, crc32_combine).
    """
    return _multiply(_power(second_bytes), first) ^ second if first else second


def of_zeros(nbytes: int) -> int:
    """CRC-32 of so many zero bytes, without summing them."""
    return _multiply(_power(nbytes), 0xFFFFFFFF) ^ 0xFFFFFFFF


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """x^(8 * nbytes) modulo the polynomial."""
    result = 1 << 31  # x^0
    for bit, factor in enumerate(_SQUARES):
        if nbytes >> bit & 1:
            result = _multiply(factor, result)
    return result


def _multiply(a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _squares() -> list[int]:
    """x^8 and its repeated squares: enough for any length that 63 bits can say."""
    found = [1 << 23]
    while len(found) < 63:
        found.append(_multiply(found[-1], found[-1]))
    return found


_SQUARES = _squares()
