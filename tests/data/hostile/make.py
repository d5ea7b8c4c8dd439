"""Writes the hostile files beside this script, and `expected.json`: file name to a part of the message.

`*.metadata` stand for a checkpoint's `.metadata`, `*.pt` for `common.pt`. Run it again after a change:
`python tests/data/hostile/make.py`. It must give the same bytes everywhere.
"""

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
EXPECTED: dict[str, str] = {}

DAMAGED = "truncated or damaged"
NO_METADATA = "not checkpoint metadata"
DEEP = "a tuple of more than 20000 elements with its parts"


def call(module: str, name: str, argument: str) -> bytes:
    """A protocol 2 pickle that calls a global with a text."""
    return b"\x80\x02" + f"c{module}\n{name}\n".encode() + text(argument) + b"\x85R."


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def both(name: str, pickle: bytes, message: str, in_object: str | None = None) -> None:
    """One pickle as metadata and as an object; `in_object` where the messages differ."""
    write(f"{name}.metadata", pickle, message)
    write(f"{name}.pt", archive([("a/data.pkl", pickle)]), in_object or message)


def write(name: str, content: bytes, message: str) -> None:
    (HERE / name).write_bytes(content)
    EXPECTED[name] = message


def archive(
    records: Sequence[tuple[str, bytes]],
    method: int = 0,
    flags: int = 0,
    claimed: int | None = None,
    shift: int = 0,
    entries: int | None = None,
) -> bytes:
    """A zip of stored records, with what an attacker would change: method, flags, sizes, offsets, counts."""
    out, directory = b"", b""
    for name, content in records:
        encoded, crc, header = name.encode(), zlib.crc32(content), len(out)
        size = len(content) if claimed is None else claimed
        out += struct.pack("<4s5H3I2H", b"PK\3\4", 0, flags, method, 0, 0, crc, size, size, len(encoded), 0)
        out += encoded + content
        fields = (
            0,
            0,
            flags,
            method,
            0,
            0,
            crc,
            size,
            size,
            len(encoded),
            0,
            0,
            0,
            0,
            0,
            max(0, header - shift),
        )
        directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", *fields) + encoded
    count = len(records) if entries is None else entries
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), len(out), 0)
    return out + directory + end


def tensor(shape: str, strides: str, key: str = "0", numel: int = 2, storage: str = "FloatStorage") -> bytes:
    """A pickled tensor; `shape` and `strides` as the opcodes of two tuples."""
    pid = (
        b"("
        + text("storage")
        + f"ctorch\n{storage}\n".encode()
        + text(key)
        + text("cpu")
        + long(numel)
        + b"tQ"
    )
    head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"K\0"
    return head + shape.encode("latin1") + strides.encode("latin1") + b"\x89ccollections\nOrderedDict\n)RtR."


def long(value: int) -> bytes:
    encoded = value.to_bytes(9, "little", signed=True)
    return b"\x8a\x09" + encoded


def pickles() -> None:
    """Globals, counts and shapes that no honest pickle has."""
    for module, name in (
        ("posix", "system"),
        ("builtins", "eval"),
        ("subprocess", "Popen"),
        ("importlib", "import_module"),
    ):
        both(
            f"global_{name}",
            call(module, name, "id"),
            f"names {module}.'{name}', which no known",
        )
    both("global_getattr", b"\x80\x02c__builtin__\ngetattr\n.", "names __builtin__.'getattr'")
    both("global_dotted", b"\x80\x04\x8c\x02io\x8c\x0dopen.__call__\x93.", "names io.'open.__call__'")
    both("global_inside_known", b"\x80\x02ctorch.hub\nload\n.", "names torch.hub.'load'")
    many = b"".join(f"cnemo.x\nC{i}\n0".encode() for i in range(501))
    both("globals_without_end", b"\x80\x02" + many + b"N.", "names more than 500 globals")
    both("memo_bomb", b"\x80\x02Nr\xff\xff\xff\x7f.", "stores memo entry 2147483647")
    both("memo_bomb_text", b"Np99999999999999\n.", "opcode 0x70 is not one that checkpoints have")
    both("giant_text", b"\x80\x04X\xff\xff\xff\xff.", DAMAGED)
    both("giant_text8", b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.", DAMAGED)
    both("giant_bytes8", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".", DAMAGED)
    both("giant_bytearray8", b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", DAMAGED)
    both("giant_frame", b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.", DAMAGED)
    both("extension", b"\x80\x02\x82\x01.", DAMAGED)
    both("persistent_id", b"\x80\x02K\x01Q.", DAMAGED)
    both("no_opcode", b"\x80\x02\xff\xfe.", "opcode 0xff is not one that checkpoints have")
    both("empty_stack", b"\x80\x020000.", DAMAGED)
    both("build_on_function", b"\x80\x02c_codecs\nencode\n}" + text("x") + b"K\1sb.", DAMAGED)
    slots = b"\x80\x02cargparse\nNamespace\n(N}" + text("module") + text("os") + b"stb."
    both("build_on_class", slots, DAMAGED)
    nested = b"\x80\x02}(" + b")" + b"\x85" * 20_001 + b"NuN."
    write("nested_tuples.pt", archive([("a/data.pkl", nested)]), DEEP)
    write("nested_tuples.metadata", b"\x80\x02}(" + b")" + b"\x85" * 5_000 + b"Nu.", NO_METADATA)
    write("nested_lists.metadata", b"\x80\x02" + b"](" * 3_000 + b"e" * 3_000 + b".", NO_METADATA)
    double = b"\x80\x02)" + b"2\x86" * 60  # each tuple holds the one before twice: 2**60 visits to hash it
    both("hash_bomb", double + b"q\0}h\0Ns.", DEEP)
    wide = b"\x80\x02)" + b"".join(b"q%c(" % i + b"h%c" % i * 99 + b"t" for i in range(9))
    both("hash_bomb_wide", wide + b"q\x63}h\x63Ns.", DEEP)
    write("cyclic.metadata", b"\x80\x02]q\0h\0a.", NO_METADATA)
    same = b"".join(b"\x8a\x0a" + (i * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for i in range(1_001))
    write(
        "same_hash.pt",
        archive([("a/data.pkl", b"\x80\x02}(" + same + b"u.")]),
        "more than 1000 integers of 8 bytes",
    )


def objects() -> None:
    """Calls that our own replacements must not carry out, and tensors that are not there."""
    for name in ("bytearray", "bytes"):
        pickle = b"\x80\x02c__builtin__\n%b\n" % name.encode() + long(1 << 40) + b"\x85R."
        write(f"{name}_of_a_terabyte.pt", archive([("a/data.pkl", pickle)]), DAMAGED)
    codec = b"\x80\x02c_codecs\nencode\n" + text("x") + text("zlib") + b"\x86R."
    write("codec.pt", archive([("a/data.pkl", codec)]), "_codecs.encode to 'zlib'")
    data = ("a/data/0", b"\0" * 8)
    one, huge = "K\2\x85", "\x8a\x08" + "\xff" * 7 + "\x3f\x85"
    cases = {
        "tensor_expanded": (tensor("J\0\0\0\x40\x85", "K\0\x85"), "its tensors are larger than the archive"),
        "tensor_overflow": (tensor(huge, "K\1\x85"), "needs"),
        "tensor_negative_stride": (tensor(one, "J\xff\xff\xff\xff\x85"), "-1 is not a size or offset"),
        "tensor_short_storage": (
            tensor(one, "K\1\x85", numel=3),
            "has 8 bytes, but its pickle says 3 elements",
        ),
        "tensor_beyond_storage": (tensor("K\3\x85", "K\1\x85"), "needs 12 bytes of a/data/0, which has 8"),
        "tensor_rank_mismatch": (tensor(one, ")"), "a tensor of 1 dimensions with 0 strides"),
        "tensor_key_escape": (tensor(one, "K\1\x85", key="../../x"), "no record 'data/../../x'"),
        "tensor_quantized": (tensor(one, "K\1\x85", storage="QInt8Storage"), "names torch.'QInt8Storage'"),
    }
    for name, (pickle, message) in cases.items():
        write(f"{name}.pt", archive([("a/data.pkl", pickle), data]), message)


def amplifiers() -> None:
    """Small pickles that would be copied, printed, hashed or multiplied into something large."""
    shared = (
        b"]" + b"q\xc8" + b"0](h\xc8h\xc8eq\xc8" * 60
    )  # each list holds the one before twice: 2**60 to print
    many = 40
    pid = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + shared + text("cpu") + b"K\2tQ"
    texts = text("x" * 200) + b"q\0"
    span, strided = b"", tensor("K\2\x85", "M\xff\x01\x85", numel=1024)[2:-1]
    for _ in range(many):
        span += strided
    ones = "(" + "K\1" * 65 + "t"
    large = b"(" + b"N" * 100 + b"tq\0" + b"0(" + b"h\0" * 50 + b"tq\1" + b"0"
    keys = [b"h\1K%c\x86" % i for i in range(5)]
    method = b"ccollections\nOrderedDict\n)R}" + text("items") + b"Nsb"
    cases = {
        "shared_storage_key": (pid, "unknown storage reference"),
        "shared_encoding": (
            b"c_codecs\nencode\n" + text("x") + shared + b"\x86R",
            "_codecs.encode to a list",
        ),
        "copied_text": (
            texts + b"c_codecs\nencode\nh\0\x85R" * many,
            "more copies than the pickle could hold",
        ),
        "copied_list": (
            b"](" + b"N" * 500 + b"eq\0" + b"c__builtin__\nset\nh\0\x85R" * many,
            "more copies than the pickle could hold",
        ),
        "copied_size": (
            b"](" + b"K\1" * 500 + b"eq\0" + b"ctorch\nSize\nh\0\x85R" * many,
            "more copies than the pickle could hold",
        ),
        "tensors_that_span": (span, "its tensors are larger than the archive"),
        "tensor_of_65_dimensions": (tensor(ones, ones)[2:-1], "a tensor of 65 dimensions"),
        "odd_keys": (large + b"}(" + b"N".join(keys) + b"Nu", "keys other than texts and integers, of more"),
        "odd_members": (large + b"\x8f(" + b"".join(keys) + b"\x90", "keys other than texts"),
        "shared_lists": (shared, "nests its values too deep, or has the same one too often"),
        "shared_text": (text("x" * 3000) + b"q\0](" + b"h\0" * 4000 + b"e", "has the same one too often"),
        "deep_lists": (b"]" * 202 + b"a" * 201, "nests its values too deep"),
        "contains_itself": (b"]q\0h\0a", "a value that contains itself"),
        "state_of_itself": (b"cargparse\nNamespace\n)\x81q\0}" + text("x") + b"h\0sb", "contains itself"),
        "item_of_itself": (b"cnemo.x\nList\n)\x81q\0h\0a", "contains itself"),
        "replaced_method": (method, "takes no such state"),
    }
    for name, (pickle, message) in cases.items():
        records = [("a/data.pkl", b"\x80\x04" + pickle + b"."), ("a/data/0", bytes(4096))]
        write(f"{name}.pt", archive(records[: 2 if "tensor" in name else 1]), message)
    write("shared_offset.metadata", stored(shared, b"K\1"), "x: 1 bytes at a list of a are not an item")
    write("shared_length.metadata", stored(b"K\0", shared), "x: a list bytes at 0 of a are not an item")
    write(
        "key_of_floats.metadata",
        stored(b"K\0", b"K\1", key=b"G" + bytes(8) + b"\x85"),
        "a key or file name is not text",
    )


def stored(offset: bytes, length: bytes, key: bytes = text("x")) -> bytes:
    """`.metadata` of one object; `offset`, `length` and `key` as opcodes."""
    package = "torch.distributed.checkpoint"

    def made(module: str, name: str, **state: bytes) -> bytes:
        pairs = b"".join(text(field) + value for field, value in state.items())
        return f"c{package}.{module}\n{name}\n".encode() + b")\x81}(" + pairs + b"ub"

    index = made("metadata", "MetadataIndex", fqn=key)
    info = made("filesystem", "_StorageInfo", relative_path=text("a"), offset=offset, length=length)
    known = b"}(" + text("x") + made("metadata", "BytesStorageMetadata") + b"u"
    whole = made("metadata", "Metadata", state_dict_metadata=known, storage_data=b"}(" + index + info + b"u")
    return b"\x80\x02" + whole + b"."


def archives() -> None:
    """Zip files that torch never writes."""
    good = ("a/data.pkl", b"\x80\x02K\x01.")
    write("zip_compressed.pt", archive([good], method=8), "record 'a/data.pkl' is compressed")
    write("zip_encrypted.pt", archive([good], flags=1), "record 'a/data.pkl' is encrypted")
    write("zip_size_overflow.pt", archive([good], claimed=0xFFFFFFFE), "overlaps what begins at")
    write("zip_overlap.pt", archive([good, ("a/data/0", b"x" * 64)], shift=20), "overlaps what begins at")
    write("zip_entry_count.pt", archive([good], entries=0xFFFE), "claims 65534 records")
    write("zip_same_name.pt", archive([good, good]), "two records are named 'a/data.pkl'")
    write(
        "zip_two_pickles.pt",
        archive([good, ("b/data.pkl", good[1])]),
        "2 records named data.pkl, expected one",
    )
    write("zip_no_records.pt", archive([]), "0 records named data.pkl, expected one")
    write("zip_no_pickle.pt", archive([("a/x", b"1")]), "0 records named data.pkl, expected one")
    write("zip_big_endian.pt", archive([good, ("a/byteorder", b"big")]), "written in byte order 'big'")
    write(
        "zip_byteorder_bomb.pt",
        archive([good, ("a/byteorder", b"x" * 999)]),
        "a/byteorder has 999 bytes (> 16)",
    )
    moved = archive([good, ("a/data/0", b"x" * 90)], shift=1)
    write("zip_header_elsewhere.pt", moved, "overlaps what begins at")
    write(
        "zip_local_name.pt",
        archive([good]).replace(b"a/data.pkl", b"b/data.pkl", 1),
        "is not where the zip directory",
    )
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0, 45, 0, 0, 1, 1, 1 << 62, 1 << 62)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1)
    write("zip64_overflow.pt", end64 + locator + archive([])[-22:], "does not fit in an archive of")
    write(
        "zip64_nowhere.pt",
        locator[:8] + b"\xff" * 8 + locator[16:] + archive([])[-22:],
        "zip64 end record is not where",
    )
    write(
        "zip_legacy.pt",
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + b"\0" * 40,
        "does not end like a torch.save archive",
    )
    write("zip_empty.pt", b"", "does not end like a torch.save archive")


if __name__ == "__main__":
    pickles()
    objects()
    amplifiers()
    archives()
    (HERE / "expected.json").write_text(json.dumps(EXPECTED, indent=1, sort_keys=True) + "\n")
