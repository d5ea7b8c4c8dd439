"""Damage that knows the structure it damages: opcodes of a pickle, records of an archive, values of JSON."""

import itertools
import json
import pickletools
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

from ckpt_tools.errors import CkptError
from ckpt_tools.formats.torch_archive.zip_archive import payload_offset, read_directory, write_archive
from tests.fuzz.grammar import opcode, random_pickle

NUMBERS = [
    0,
    1,
    2,
    3,
    63,
    64,
    127,
    128,
    255,
    256,
    0x7FFF,
    0xFFFF,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
]
NUMBERS += [1 << 32, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]

Mutation = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def mutate(rng: random.Random, parser: str, data: bytes, others: Sequence[bytes]) -> bytes:
    """`data` damaged in one to four ways; `others` are inputs to take parts from."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        data = rng.choice([damage, STRUCTURED[parser], STRUCTURED[parser]])(rng, data, others)
    return data


def damage(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Bytes flipped, overwritten by numbers, removed, repeated, cut off, inserted, or taken from another input."""
    start = rng.randrange(len(data) + 1)
    old, other = data[start : start + rng.choice([1, 4, 16, 64, 1024])], rng.choice(others)
    width, at = rng.choice([1, 2, 4, 8]), rng.randrange(len(other) + 1)
    number = (rng.choice(NUMBERS) + rng.choice([0, 0, 1, -1])) % (1 << 8 * width)
    new = rng.choice(
        [
            bytes(byte ^ 1 << rng.randrange(8) for byte in old[:1]) + old[1:],
            number.to_bytes(width, "little") + old[width:],
            b"",
            old * rng.choice([2, 2, 3, 50]),
            rng.getrandbits(8 * width).to_bytes(width, "little") + old,
            other[at : at + rng.choice([8, 64, 4096])],
        ]
    )
    return data[:start] + new + (data[start + len(old) :] if rng.random() < 0.9 else b"")


def damage_pickle(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Opcodes removed, repeated, exchanged, inserted, taken from another pickle, or with another number."""
    ops = _opcodes(data)
    if len(ops) < 3 or rng.random() < 0.05:
        return random_pickle(rng)
    at = rng.randrange(len(ops))
    stop = at + rng.choice([1, 1, 2, 5, 30])
    numbers = [i for i, op in enumerate(ops) if op[:1] in b"KMJ"]
    kind = rng.randrange(8)
    if kind > 5 and numbers:
        at = rng.choice(numbers)
        near = int.from_bytes(ops[at][1:], "little") + rng.choice([-1, 1, 1000])
        ops[at] = b"J" + (rng.choice([near, rng.choice(NUMBERS)]) % (1 << 32)).to_bytes(4, "little")
    elif kind == 0:
        del ops[at:stop]
    elif kind == 1:
        ops[at:at] = ops[at:stop] * rng.choice([1, 2, 20])
    elif kind == 2:
        other = rng.randrange(len(ops))
        ops[at], ops[other] = ops[other], ops[at]
    elif kind == 3:
        ops[at:at] = [opcode(rng) for _ in range(rng.choice([1, 2, 4]))]
    elif kind == 4:
        ops[at:stop] = [damage(rng, b"".join(ops[at:stop]), others)]
    else:
        theirs = _opcodes(rng.choice(others)) or [b"N"]
        first = rng.randrange(len(theirs))
        ops[at:stop] = theirs[first : first + rng.choice([1, 5, 30])]
    return b"".join(ops)


def _opcodes(data: bytes) -> list[bytes]:
    """The opcodes of a pickle with their arguments, as far as it is one."""
    starts = []
    try:
        for _, _, position in pickletools.genops(data):
            starts.append(position or 0)
    except Exception:  # whatever pickletools runs into
        pass
    return [data[a:b] for a, b in itertools.pairwise([*starts, len(data)])]


def damage_archive(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Another pickle or record in a whole archive, or a number of its directory changed."""
    records = _records(data)
    if not records:
        return damage(rng, data, others)
    if rng.random() < 0.4:
        at = max(0, len(data) - rng.randrange(1, 1000))
        width = rng.choice([2, 4, 8])
        number = rng.choice([*NUMBERS, at, len(data)]) % (1 << 8 * width)
        return data[:at] + number.to_bytes(width, "little") + data[at + width :]
    i = rng.randrange(len(records)) if rng.random() < 0.3 else 0
    name, content = records[i]
    if rng.random() < 0.1:
        records[i] = (records[rng.randrange(len(records))][0], content)
    elif name.endswith("data.pkl"):
        pickles = [found for other in rng.sample(others, min(2, len(others))) for found in _pickles(other)]
        records[i] = (name, damage_pickle(rng, content, pickles or [content]))
    else:
        records[i] = (name, damage(rng, content, others))
    return write_archive(records)


def _records(data: bytes) -> list[tuple[str, bytes]]:
    def read(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    try:
        found = read_directory(read, len(data), "")
        return [(r.name, read(payload_offset(read, r, ""), r.size)) for r in found.values()]
    except (CkptError, struct.error):
        return []


def _pickles(data: bytes) -> list[bytes]:
    return [content for name, content in _records(data) if name.endswith("data.pkl")]


def damage_json(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A value of the document exchanged for another kind, repeated, or nested."""
    start = data.find(b"{")
    try:
        tree = json.loads(data[start:].rstrip(b"\0"))
    except (ValueError, RecursionError):
        return damage(rng, data, others)
    text = json.dumps(_changed(rng, tree, 6)).encode()
    return data[: max(start, 0)] + text


def _changed(rng: random.Random, value: Any, depth: int) -> Any:
    if isinstance(value, dict) and value and depth and rng.random() < 0.9:
        key = rng.choice(list(value))
        new = {**value, key: _changed(rng, value[key], depth - 1)}
        if rng.random() < 0.2:
            new[key + rng.choice(["", "module.", "\x1b[31m", "\ud800", "_w"])] = new.pop(key)
        return new
    if isinstance(value, list) and value and depth and rng.random() < 0.7:
        i = rng.randrange(len(value))
        return [*value[:i], _changed(rng, value[i], depth - 1), *value[i + 1 :]]
    plain = [None, True, "x", "../x", -1, 1.5, 1e400, rng.choice(NUMBERS), [], {}, [value] * 3, {"a": value}]
    return rng.choice(plain)


STRUCTURED: dict[str, Mutation] = {
    "metadata": damage_pickle,
    "object": damage_archive,
    "frame": damage_archive,
    "map": damage_json,
    "safetensors": damage_json,
    **dict.fromkeys(("config", "arguments", "rules", "journal", "job"), damage_json),
}
