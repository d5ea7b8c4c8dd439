"""Pickles from a small grammar: well formed in the large, with any value where any other could be."""

import random
import struct

GLOBALS = [
    *(f"torch.distributed.checkpoint.metadata {name}" for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties",
    )),
    "torch.distributed.checkpoint.filesystem _StorageInfo", "torch Size", "torch float32", "torch FloatStorage",
    "torch.storage UntypedStorage", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter", "torch device", "collections OrderedDict", "_codecs encode",
    "argparse Namespace", "builtins set", "builtins frozenset", "builtins complex", "builtins slice",
    "builtins bytes", "__builtin__ bytearray", "io BytesIO", "functools partial", "pathlib PosixPath",
    "numpy dtype", "numpy.core.multiarray _reconstruct", "megatron.core.x Y", "os system",
]  # fmt: skip
NAMES = [
    "fqn",
    "offset",
    "index",
    "state_dict_metadata",
    "storage_data",
    "size",
    "chunks",
    "properties",
    "latin1",
]
NAMES += [
    "offsets",
    "sizes",
    "relative_path",
    "length",
    "storage",
    "cpu",
    "0",
    "data",
    "",
    "\ud800",
    "\x1b[31m",
]
SIMPLE = [
    b"N",
    b"\x88",
    b"\x89",
    b")",
    b"]",
    b"}",
    b"\x8f",
    b"K\0",
    b"K\1",
    b"J\xff\xff\xff\xff",
    b"G" + bytes(8),
]
SIMPLE += [
    b"J\xff\xff\xff\x7f",
    b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    b"C\3abc",
    b"\x96" + struct.pack("<Q", 2) + b"xy",
]
ACTIONS = [
    b"R",
    b"\x81",
    b"b",
    b"a",
    b"s",
    b"e",
    b"u",
    b"\x90",
    b"\x91",
    b"t",
    b"\x85",
    b"\x86",
    b"\x87",
    b"Q",
    b"2",
]
ACTIONS += [
    b"0",
    b"1",
    b"(",
    b"\x94",
    b"\x93",
    b".",
    b"l",
    b"d",
    b"i",
    b"o",
    b"\x92",
    b"\x82\1",
    b"\x97",
    b"\x98",
]


def random_pickle(rng: random.Random) -> bytes:
    """A pickle of a random value."""
    return bytes([0x80, rng.choice([2, 2, 4, 5])]) + _value(rng, 5) + b"."


def opcode(rng: random.Random) -> bytes:
    """Any one opcode with an argument."""
    return rng.choice([lambda: rng.choice(ACTIONS), lambda: _leaf(rng), lambda: _memo(rng)])()


def _value(rng: random.Random, depth: int) -> bytes:
    if depth == 0 or rng.random() < 0.3:
        return _leaf(rng)
    some = [_value(rng, depth - 1) for _ in range(rng.choice([0, 1, 2, 3, 4]))]
    joined = b"".join(some)
    kind = rng.randrange(8)
    if kind == 0:
        made = b"(" + joined + b"t"
    elif kind == 1:
        made = b"](" + joined + b"e"
    elif kind == 2:
        made = b"}(" + b"".join(_text(rng) + value for value in some) + b"u"
    elif kind == 3:
        made = b"}(" + joined + (b"N" if len(some) % 2 else b"") + b"u"
    elif kind == 4:
        made = rng.choice([b"\x8f(" + joined + b"\x90", b"(" + joined + b"\x91"])
    elif kind == 5:
        made = _global(rng) + b"(" + joined + b"t" + rng.choice([b"R", b"\x81"])
    elif kind == 6:
        state = b"}(" + b"".join(_text(rng) + value for value in some) + b"u"
        made = _global(rng) + b")\x81" + state + b"b"
    else:
        made = b"(" + b"".join([_text(rng), *some]) + b"tQ"
    return made + rng.choice([b"", b"\x94", b"q" + bytes([rng.randrange(8)])])


def _leaf(rng: random.Random) -> bytes:
    return rng.choice(
        [lambda: rng.choice(SIMPLE), lambda: _text(rng), lambda: _global(rng), lambda: _get(rng)]
    )()


def _text(rng: random.Random) -> bytes:
    encoded = rng.choice(NAMES).encode("utf-8", "surrogatepass")
    return rng.choice([b"\x8c" + bytes([len(encoded)]), b"X" + struct.pack("<I", len(encoded))]) + encoded


def _global(rng: random.Random) -> bytes:
    return b"c" + rng.choice(GLOBALS).replace(" ", "\n").encode() + b"\n"


def _get(rng: random.Random) -> bytes:
    return b"h" + bytes([rng.randrange(8)])


def _memo(rng: random.Random) -> bytes:
    index = rng.choice([0, 1, 7, 200])
    return rng.choice([b"h" + bytes([index]), b"j" + struct.pack("<I", index), b"q" + bytes([index])])
