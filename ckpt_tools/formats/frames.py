"""The `torch.save` archive around one dense tensor, byte for byte as torch 2.13 writes it, without torch.

An archive is a stored zip. Everything before the payload depends on element type and shape alone,
everything behind it on the payload's CRC-32 as well, so a payload can be streamed between `head` and `tail`::

    data.pkl | .format_version | .storage_alignment | byteorder | data/0 = payload | version |
    .data/serialization_id | central directory | zip64 end record | zip64 locator | end record

Record data starts at multiples of 64 bytes from the archive's start; the local headers' extra fields ("FB",
then `Z`) make up the distance (caffe2/serialize/inline_container.cc, `getPadding`). Records that do not fit
32 bits get the zip64 extra field in front of it, and an 8-byte-wide data descriptor, as miniz writes them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ckpt_tools.formats.pickle_ops import int_ops, int_tuple_ops, text_ops
from ckpt_tools.model.box import row_major_strides
from ckpt_tools.model.dtypes import itemsize

ALIGNMENT = 64
EXTENT_BYTES = 4096  # file systems that share extents share such blocks
_U32 = 0xFFFFFFFF
_U64 = 0xFFFFFFFFFFFFFFFF
_CRC = struct.Struct("<I")
# c10's hash over the fixed set of record names; the first 20 digits of every such archive's id.
_NAMES_HASH = 15728199511854643026
_ID_FORM = b"%020d" % _NAMES_HASH + b"%020d"

_STORAGE_CLASS = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


class _Record(NamedTuple):
    """A finished zip record, for the central directory. Sizes and offset in bytes."""

    name: bytes
    offset: int
    size: int
    crc: int


class _Blanks(NamedTuple):
    """A tail, but for what depends on the payload's CRC-32: that itself, the serialization id, the id's CRC-32.

    A tail is known but for five places, so it is made once for an element type and shape, and filled in for each
    payload: a checkpoint has many tensors of one shape, and the zip records cost more than the CRC of a small one.
    """

    crc: int  # where the payload's first stands, in bytes from the tail's start
    form: bytes  # the tail with a `%b` wherever one stands
    before: int  # combined CRC-32s of the records in front of the payload, and of those behind
    behind: tuple[int, ...]


class Frame(NamedTuple):
    """The bytes around a payload."""

    head: bytes
    payload_bytes: int
    length: int  # bytes of the whole archive
    blanks: _Blanks | None = None  # None: no tail

    @property
    def tail_bytes(self) -> int:
        return self.length - len(self.head) - self.payload_bytes

    def tail(self, crc: int) -> bytes:
        """What follows a payload whose CRC-32 is `crc`."""
        if self.blanks is None:
            return b""
        _, form, before, behind = self.blanks
        own = (crc, *behind) if self.payload_bytes else behind  # an empty record is not summed
        digits = _ID_FORM % _combined_crc(own, before)
        stated, id_crc = _CRC.pack(crc), _CRC.pack(zlib.crc32(digits))
        if not self.payload_bytes:  # has no descriptor
            return form % (digits, id_crc, stated, id_crc)
        return form % (stated, digits, id_crc, stated, id_crc)

    def crc_in(self, tail: bytes) -> int | None:
        """The payload's CRC-32 that `tail`, of `tail_bytes`, states; None if it is the tail of another frame."""
        crc = int(_CRC.unpack_from(tail, self.blanks.crc)[0]) if self.blanks else 0
        return crc if tail == self.tail(crc) else None


@lru_cache(maxsize=4096)
def tensor_frame(dtype: str, shape: tuple[int, ...]) -> Frame:
    """The archive of a dense row-major tensor; its payload lies at `len(head)`.

    Raises:
        UnsupportedCheckpointError: the element type is unknown.
    """
    payload_bytes = prod(shape) * itemsize(dtype)
    out = bytearray()
    records = [
        _append_record(out, 0, name, data)
        for name, data in (
            (b"archive/data.pkl", _data_pickle(dtype, shape)),
            (b"archive/.format_version", b"1"),
            (b"archive/.storage_alignment", b"%d" % ALIGNMENT),
            (b"archive/byteorder", b"little"),
        )
    ]
    records.append(_Record(b"archive/data/0", len(out), payload_bytes, 0))
    out += _local_header(records[-1])
    end = len(out) + payload_bytes
    tail_bytes, blanks = _tail_form(records, end)
    return Frame(bytes(out), payload_bytes, end + tail_bytes, blanks)


def bare_frame(dtype: str, shape: tuple[int, ...]) -> Frame:
    """No bytes around the payload at all."""
    payload_bytes = prod(shape) * itemsize(dtype)
    return Frame(b"", payload_bytes, payload_bytes)


def framed_tensor(dtype: str, shape: Sequence[int], payload: bytes) -> bytes:
    """The whole archive of a dense tensor whose row-major little-endian bytes are `payload`."""
    frame = tensor_frame(dtype, tuple(shape))
    return frame.head + payload + frame.tail(zlib.crc32(payload))


def _tail_form(records: list[_Record], start: int) -> tuple[int, _Blanks]:
    """Length and form of what stands from archive offset `start` on, behind the payload, the last of `records`.

    It is written once with zeros where the payload's CRC-32 has a say, and those places are cut out afterwards. In
    the order in which `Frame.tail` fills them in::

        payload's data descriptor    CRC-32 of the payload        (4 bytes behind its signature; none if it is empty)
        .data/serialization_id       40 digits: hash of the names, hash of all records' CRC-32s
        the id's data descriptor     CRC-32 of these digits
        central directory            CRC-32 of the payload        (its entry is the last but two)
        central directory            CRC-32 of the digits         (the last entry)

    The hash sums records in their order in the archive: those before the payload are summed here (`before`), the
    payload's and the version's when it is known. The id itself has no part in it.
    """
    out = bytearray()
    if records[-1].size:  # miniz writes no descriptor behind an empty record
        out += _descriptor(records[-1])
    version = _append_record(out, start, b"archive/version", b"3\n")
    digits = b"0" * 40
    serial = _append_record(out, start, b"archive/.data/serialization_id", digits)
    descriptor = len(out) - len(_descriptor(serial))
    entries = _append_directory(out, start, [*records, version, serial])
    payload_crc = (*((4,) if records[-1].size else ()), entries[-3])
    places = [(place, _CRC.size) for place in (*payload_crc, descriptor + 4, entries[-1])]
    places.append((descriptor - len(digits), len(digits)))
    before = _combined_crc([record.crc for record in records[:-1]])
    return len(out), _Blanks(payload_crc[0], _form(out, places), before, (version.crc,))


def _form(tail: bytearray, places: Iterable[tuple[int, int]]) -> bytes:
    """`tail` for the `%` operator, with a `%b` in each of the `places` (offset, length).

    Binary zips may hold a `%` anywhere, so it is doubled. Formatting is one call into C for the whole tail.
    """
    form, done = b"", 0
    for start, length in sorted(places):
        form += tail[done:start].replace(b"%", b"%%") + b"%b"
        done = start + length
    return form + tail[done:].replace(b"%", b"%%")


def _append_record(out: bytearray, base: int, name: bytes, data: bytes) -> _Record:
    """Append a small record; `base` is the archive offset of `out`'s first byte."""
    record = _Record(name, base + len(out), len(data), zlib.crc32(data))
    out += _local_header(record)
    out += data
    out += _descriptor(record)
    return record


def _local_header(record: _Record) -> bytes:
    name, offset, size, _ = record
    extra = _zip64_extra(size, 0, offset)  # the stored size is not known yet when miniz writes this
    pad = -(offset + 30 + len(name) + len(extra) + 4) % ALIGNMENT
    extra += struct.pack("<2sH", b"FB", pad) + b"Z" * pad
    flags = 0x0808 if size else 0x0800
    fixed = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
    return fixed + name + extra


def _zip64_extra(size: int, stored: int, offset: int) -> bytes:
    fields = ([size, stored] if size >= _U32 else []) + ([offset] if offset >= _U32 else [])
    return struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""


def _descriptor(record: _Record) -> bytes:
    wide = record.size >= _U32 or record.offset >= _U32
    return struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\7\10", record.crc, record.size, record.size)


def _append_directory(out: bytearray, base: int, records: Sequence[_Record]) -> list[int]:
    """Append the central directory and the three end records; where in `out` each entry's CRC-32 lies."""
    start = base + len(out)
    places = []
    for name, offset, size, crc in records:
        places.append(len(out) + 16)
        extra = _zip64_extra(size, size, offset)
        flags = 0x0808 if size else 0x0800
        out += struct.pack(
            "<4sHHHHHHIIIHHHHHII",
            *(b"PK\1\2", 0, 0, flags, 0, 0, 0, crc, min(size, _U32), min(size, _U32)),
            *(len(name), len(extra), 0, 0, 0, 0, min(offset, _U32)),
        )
        out += name + extra
    end = base + len(out)
    n = len(records)
    out += struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 0x031E, 45, 0, 0, n, n, end - start, start)
    out += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    out += struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, n, n, end - start, min(start, _U32), 0)
    return places


def _combined_crc(crcs: Sequence[int], seed: int = 0) -> int:
    """c10::hash_combine over the CRC-32s of all records with data, the last 20 digits; `seed`: of earlier ones."""
    for crc in crcs:
        seed ^= (crc + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _U64
    return seed


def _data_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The protocol 2 pickle of `torch._utils._rebuild_tensor_v2(storage, 0, shape, strides, ...)`.

    Types without a storage class of their own use `_rebuild_tensor_v3`, whose storage counts bytes and whose
    last argument is the type.
    """
    typed = _STORAGE_CLASS.get(dtype)
    storage = f"torch\n{typed}" if typed else "torch.storage\nUntypedStorage"
    count = prod(shape) * (1 if typed else itemsize(dtype))
    out = _Memoizer()
    out.memoized(b"ctorch._utils\n_rebuild_tensor_v%d\n" % (2 if typed else 3))
    out.raw(b"((")
    out.memoized(text_ops("storage"))
    out.memoized(f"c{storage}\n".encode())
    out.memoized(text_ops("0"))
    out.memoized(text_ops("cpu"))
    out.raw(int_ops(count))
    out.memoized(b"t")
    out.raw(b"QK\0")
    for numbers in (shape, row_major_strides(shape)):
        if numbers:
            out.memoized(int_tuple_ops(numbers))
        else:
            out.raw(b")")
    out.raw(b"\x89")
    out.memoized(b"ccollections\nOrderedDict\n")
    out.memoized(b")R")
    if not typed:
        out.memoized(f"ctorch\n{dtype}\n".encode())
    out.memoized(b"t")
    out.memoized(b"R")
    return b"\x80\x02" + bytes(out.data) + b"."


class _Memoizer:
    """Pickle opcodes with the running memo number that the C pickler gives each object."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.count = 0

    def raw(self, opcodes: bytes) -> None:
        self.data += opcodes

    def memoized(self, opcodes: bytes) -> None:
        self.data += opcodes + b"q" + bytes([self.count])
        self.count += 1
