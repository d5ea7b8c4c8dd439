"""The `torch.save` archive around one dense tensor, byte for byte as torch 2.13 writes it, without torch.

An archive is a stored zip. Everything before the payload depends on element type and shape alone,
everything behind it on the payload's CRC-32 as well, so a payload can be streamed between `head` and `tail`::

    data.pkl | .format_version | .storage_alignment | byteorder | data/0 = payload | version |
    .data/serialization_id | central directory | zip64 end record | zip64 locator | end record
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import STORAGE_CLASSES
from ckpt_tools.formats.torch_archive.object_writer import int_ops, int_tuple_ops, text_ops
from ckpt_tools.formats.torch_archive.zip_archive import (
    ALIGNMENT,
    WrittenRecord,
    append_directory,
    append_record,
    descriptor,
    local_header,
)
from ckpt_tools.model.box import row_major_strides
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.dtypes import itemsize

EXTENT_BYTES = 4096  # file systems that share extents share such blocks
_U64 = 0xFFFFFFFFFFFFFFFF
_CRC = struct.Struct("<I")
# c10's hash over the fixed set of record names; the first 20 digits of every such archive's id.
_NAMES_HASH = 15728199511854643026
_ID_FORM = b"%020d" % _NAMES_HASH + b"%020d"


class _Blanks(NamedTuple):
    """A tail, but for what depends on the payload's CRC-32: that itself, the serialization id, the id's CRC-32.

    A tail is known but for five places, so it is made once for an element type and shape, and filled in for each
    payload: a checkpoint has many tensors of one shape, and the zip records cost more than the CRC of a small one.
    """

    crc: int  # offset of the payload's first CRC, in bytes from the tail's start
    form: bytes  # the tail with a `%b` for each CRC
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
        """What follows a payload with CRC-32 `crc`."""
        if self.blanks is None:
            return b""
        _, form, before, behind = self.blanks
        own = (crc, *behind) if self.payload_bytes else behind  # an empty record is not summed
        digits = _ID_FORM % _combined_crc(own, before)
        stated, id_crc = crc.to_bytes(4, "little"), zlib.crc32(digits).to_bytes(4, "little")
        if not self.payload_bytes:  # has no descriptor
            return form % (digits, id_crc, stated, id_crc)
        return form % (stated, digits, id_crc, stated, id_crc)

    def crc_in(self, tail: bytes) -> int | None:
        """The payload's CRC-32 that `tail`, of `tail_bytes`, states; None if it is the tail of another frame."""
        crc = int(_CRC.unpack_from(tail, self.blanks.crc)[0]) if self.blanks else 0
        return crc if tail == self.tail(crc) else None


@lru_cache(maxsize=4096)
def tensor_frame(dtype: str, shape: tuple[int, ...], described: bool = True) -> Frame:
    """The archive of a dense row-major tensor; its payload lies at `len(head)`.

    Up to torch 2.6 archives were not `described`; of such a one only the lengths are as torch wrote them.
    """
    payload_bytes = prod(shape) * itemsize(dtype)
    out = bytearray()
    description = [(b"archive/.format_version", b"1"), (b"archive/.storage_alignment", b"%d" % ALIGNMENT)]
    records = [
        append_record(out, 0, name, data)
        for name, data in (
            (b"archive/data.pkl", _data_pickle(dtype, shape)),
            *(description if described else ()),
            (b"archive/byteorder", b"little"),
        )
    ]
    records.append(WrittenRecord(b"archive/data/0", len(out), payload_bytes, 0))
    out += local_header(records[-1])
    end = len(out) + payload_bytes
    tail_bytes, blanks = _tail_form(records, end)
    return Frame(bytes(out), payload_bytes, end + tail_bytes, blanks)


RECORDS = 7  # of such an archive, the payload among them


class UsualItem(NamedTuple):
    """Where the payload of an item lies that is, byte for byte, the frame today's torch writes."""

    start: int  # bytes from the beginning of the file
    nbytes: int
    crc32: int | None  # None: its writer kept none


def usual_item(files: Files, item: Item, dtype: str, shape: tuple[int, ...]) -> UsualItem | None:
    """The payload of an item with the usual frame of such a tensor; None for any other item.

    `container.find_tensor` would say the same, after twenty times the work.
    """
    if prod(shape) * itemsize(dtype) > item.length:  # metadata may say any size, and a frame holds 63 bits
        return None
    frame = tensor_frame(dtype, shape)
    if item.length != frame.length:
        return None
    start = item.offset + len(frame.head)
    if files.read(item.file, item.offset, len(frame.head)) != frame.head:
        return None
    checksum = frame.crc_in(files.read(item.file, start + frame.payload_bytes, frame.tail_bytes))
    if checksum is None:
        return None
    known = checksum or not frame.payload_bytes  # a writer that keeps no checksums leaves zeros
    return UsualItem(start, frame.payload_bytes, checksum if known else None)


def likely_start(item: Item, dtype: str, shape: tuple[int, ...]) -> int:
    """Where in its file the payload of an item begins, by the item's length. It may be wrong."""
    if item.bare:
        return item.offset
    frame = tensor_frame(dtype, shape)
    if item.length != frame.length:
        older = tensor_frame(dtype, shape, described=False)
        frame = older if item.length == older.length else frame
    return item.offset + len(frame.head)


def bare_frame(dtype: str, shape: tuple[int, ...]) -> Frame:
    """No bytes around the payload at all."""
    payload_bytes = prod(shape) * itemsize(dtype)
    return Frame(b"", payload_bytes, payload_bytes)


def framed_tensor(dtype: str, shape: Sequence[int], payload: bytes) -> bytes:
    """The whole archive of a dense tensor; `payload` is its row-major little-endian bytes."""
    frame = tensor_frame(dtype, tuple(shape))
    return frame.head + payload + frame.tail(zlib.crc32(payload))


def _tail_form(records: list[WrittenRecord], start: int) -> tuple[int, _Blanks]:
    """Length and form of the archive from offset `start` on: all after the payload, which is the last of `records`.

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
    out += descriptor(records[-1])
    version = append_record(out, start, b"archive/version", b"3\n")
    digits = b"0" * 40
    serial = append_record(out, start, b"archive/.data/serialization_id", digits)
    serial_end = len(out) - len(descriptor(serial))
    entries = append_directory(out, start, [*records, version, serial])
    payload_crc = (*((4,) if records[-1].size else ()), entries[-3])
    places = [(place, _CRC.size) for place in (*payload_crc, serial_end + 4, entries[-1])]
    places.append((serial_end - len(digits), len(digits)))
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


def _combined_crc(crcs: Sequence[int], seed: int = 0) -> int:
    """c10::hash_combine over the CRC-32s of all records with data, the last 20 digits; `seed`: of earlier ones."""
    for crc in crcs:
        seed ^= (crc + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _U64
    return seed


def _data_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The protocol 2 pickle of `torch._utils._rebuild_tensor_v2(storage, 0, shape, strides, ...)`.

    Types that have no storage class use `_rebuild_tensor_v3`: its storage counts bytes, its last argument is
    the type.
    """
    typed = STORAGE_CLASSES.get(dtype)
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
