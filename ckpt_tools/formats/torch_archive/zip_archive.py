"""The zip archive of `torch.save`: stored records, 64-byte aligned, directory at the end. Read and written.

Record contents start at multiples of 64 bytes from the archive's start; the local headers' extra fields ("FB", then
`Z`) make up the distance (caffe2/serialize/inline_container.cc, `getPadding`). Records that do not fit 32 bits get
the zip64 extra field in front of it, and an 8-byte-wide data descriptor, as miniz writes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from struct import Struct, pack
from typing import NamedTuple

from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError

ALIGNMENT = 64  # bytes; every record's content starts at a multiple, counted from the archive's beginning

_MAX_DIRECTORY = 1 << 28
_U32 = 0xFFFFFFFF
_LOCAL = Struct("<4s5H3I2H")
_CENTRAL = Struct("<4s6H3I5H2I")
_END = Struct("<4s4H2IH")
_END64 = Struct("<4sQ2H2I4Q")
_LOCATOR = Struct("<4sIQI")
_DESCRIPTOR = Struct("<4s3I")
_WIDE_DESCRIPTOR = Struct("<4sIQQ")
_EXTRA = Struct("<2H")
_ENCRYPTED = 0x2061  # any of the flags for which torch's reader takes a record for encrypted or a patch
_UTF8, _DESCRIBED = 0x0800, 0x0008  # flags: how names are encoded; sizes and checksum follow the content

ReadAt = Callable[[int, int], bytes]


class Record(NamedTuple):
    """One entry of the central directory."""

    name: str
    header: int  # bytes from the beginning of the archive to the local header
    size: int  # bytes of content
    crc32: int
    limit: int  # the content ends at or before this byte: the next record or the directory


def read_directory(read: ReadAt, length: int, where: str) -> dict[str, Record]:
    """The records of an archive of `length` bytes by name, proven not to overlap."""
    count, start, size, end = _locate_directory(read, length, where)
    if start + size > end or size > _MAX_DIRECTORY or count * _CENTRAL.size > size:
        raise CorruptCheckpointError(
            f"{where}: the zip directory claims {count} records in {size} bytes at {start}, "
            f"which does not fit in an archive of {length} bytes."
        )
    records = _entries(read(start, size), count, where)
    records.sort(key=lambda record: record.header)
    limits = [*(record.header for record in records), start][1:]
    found: dict[str, Record] = {}
    for record, limit in zip(records, limits, strict=True):
        if record.header + _LOCAL.size + len(record.name.encode()) + record.size > limit:
            raise CorruptCheckpointError(
                f"{where}: record {record.name!r} of {record.size} bytes at {record.header} overlaps what "
                f"begins at {limit}."
            )
        if record.name in found:
            raise CorruptCheckpointError(f"{where}: two records are named {record.name!r}.")
        found[record.name] = record._replace(limit=limit)
    return found


def payload_offset(read: ReadAt, record: Record, where: str) -> int:
    """Bytes from the beginning of the archive to the record's content."""
    header = read(record.header, _LOCAL.size)
    if len(header) == _LOCAL.size and header[:4] == b"PK\x03\x04":
        _, _, _, method, *_, name_length, extra_length = _LOCAL.unpack(header)
        start: int = record.header + _LOCAL.size + name_length + extra_length
        name = read(record.header + _LOCAL.size, name_length)
        if name == record.name.encode() and method == 0 and start + record.size <= record.limit:
            return start
    raise CorruptCheckpointError(f"{where}: record {record.name!r} is not where the zip directory says.")


def stored_crc32(record: Record) -> int | None:
    """The checksum of a record's content, None when its writer kept none: zeros stand there."""
    return record.crc32 if record.crc32 or not record.size else None


def check_record(record: Record, content: bytes, where: str) -> None:
    """Raise CorruptCheckpointError if `content` has another checksum than the record's writer stored."""
    expected, found = stored_crc32(record), zlib.crc32(content)
    if expected not in (None, found):
        raise CorruptCheckpointError(
            f"{where}: record {record.name!r} of {record.size} bytes has CRC-32 {found:08x}, its writer stored "
            f"{expected:08x}: bits have changed since. Copy the checkpoint again."
        )


def _locate_directory(read: ReadAt, length: int, where: str) -> tuple[int, int, int, int]:
    """Records, offset and size of the directory, and the byte at which it must have ended."""
    end = length - _END.size  # torch writes no comment behind the end record
    tail = read(end, _END.size) if end >= 0 else b""
    if tail[:4] != b"PK\x05\x06":
        raise CorruptCheckpointError(
            f"{where}: the item of {length} bytes does not end like a torch.save archive. The file is "
            "truncated, or its metadata points to the wrong place; copy the checkpoint again."
        )
    _, disk, first_disk, here, count, size, start, comment = _END.unpack(tail)
    locator_at = end - _LOCATOR.size
    locator = read(locator_at, _LOCATOR.size) if locator_at >= 0 else b""
    if locator[:4] == b"PK\x06\x07":
        _, _, end64, disks = _LOCATOR.unpack(locator)
        record = read(end64, _END64.size) if end64 + _END64.size <= locator_at else b""
        if record[:4] != b"PK\x06\x06" or disks > 1:
            raise CorruptCheckpointError(f"{where}: the zip64 end record is not where the archive says.")
        _, _, _, _, disk, first_disk, here, count, size, start = _END64.unpack(record)
        end = end64
    if disk or first_disk or here != count or comment:
        raise CorruptCheckpointError(f"{where}: the zip end record is not one that torch.save writes.")
    return count, start, size, end


def _entries(data: bytes, count: int, where: str) -> list[Record]:
    records, at = [], 0
    for _ in range(count):
        if data[at : at + 4] != b"PK\x01\x02" or at + _CENTRAL.size > len(data):
            raise CorruptCheckpointError(f"{where}: the zip directory is damaged at its byte {at}.")
        _, _, _, flags, method, _, _, crc, *rest = _CENTRAL.unpack_from(data, at)
        packed, size, name_length, extra_length, comment_length, disk, _, _, header = rest
        at += _CENTRAL.size
        name = data[at : at + name_length].decode("utf-8", "replace")
        at += name_length
        if method or flags & _ENCRYPTED:
            kind = "compressed" if method else "encrypted"
            raise UnsupportedCheckpointError(
                f"{where}: record {name!r} is {kind}, which torch.save never does. Save the checkpoint again."
            )
        if disk:
            raise CorruptCheckpointError(f"{where}: record {name!r} is said to be on another disk.")
        size, packed, header = _wide_fields([size, packed, header], data[at : at + extra_length])
        if size != packed:
            raise CorruptCheckpointError(f"{where}: record {name!r} stores {packed} bytes for {size}.")
        records.append(Record(name, header, size, crc, 0))
        at += extra_length + comment_length
    return records


def _wide_fields(values: list[int], extra: bytes) -> list[int]:
    """The fields, those that are all ones taken from the zip64 extra block, in order."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, at)
        block = extra[at + 4 : at + 4 + length]
        if kind == 1:
            for i, value in enumerate(values):
                if value == _U32 and len(block) >= 8:
                    values[i], block = int.from_bytes(block[:8], "little"), block[8:]
        at += 4 + length
    return values


class WrittenRecord(NamedTuple):
    """A record of an archive that is being written, for its directory; sizes and offset in bytes."""

    name: bytes
    offset: int  # of its local header
    size: int
    crc: int


def write_archive(records: Sequence[tuple[str, bytes]]) -> bytes:
    """The archive of these records, in order, as torch's writer lays it out."""
    out = bytearray()
    append_directory(out, 0, [append_record(out, 0, name.encode(), content) for name, content in records])
    return bytes(out)


def append_record(out: bytearray, base: int, name: bytes, content: bytes) -> WrittenRecord:
    """Append a record; `base` is the archive offset of `out`'s first byte."""
    record = WrittenRecord(name, base + len(out), len(content), zlib.crc32(content))
    out += local_header(record)
    out += content
    out += descriptor(record)
    return record


def local_header(record: WrittenRecord) -> bytes:
    """A record's local header, padded so that its content begins at a multiple of `ALIGNMENT`."""
    name, offset, size, _ = record
    extra = _zip64_extra(size, 0, offset)  # the stored size is not known yet when miniz writes this
    pad = -(offset + _LOCAL.size + len(name) + len(extra) + _EXTRA.size) % ALIGNMENT
    extra += b"FB" + pad.to_bytes(2, "little") + b"Z" * pad
    return _LOCAL.pack(b"PK\x03\x04", 0, _flags(size), *(0,) * 6, len(name), len(extra)) + name + extra


def descriptor(record: WrittenRecord) -> bytes:
    """A record's data descriptor; miniz writes none after empty content."""
    if not record.size:
        return b""
    wide = record.size >= _U32 or record.offset >= _U32
    return (_WIDE_DESCRIPTOR if wide else _DESCRIPTOR).pack(
        b"PK\x07\x08", record.crc, record.size, record.size
    )


def append_directory(out: bytearray, base: int, records: Sequence[WrittenRecord]) -> list[int]:
    """Append the central directory and the three end records; where in `out` each entry's CRC-32 lies."""
    start = base + len(out)
    places = []
    for name, offset, size, crc in records:
        places.append(len(out) + 16)
        extra = _zip64_extra(size, size, offset)
        sizes = (crc, min(size, _U32), min(size, _U32), len(name), len(extra))
        out += _CENTRAL.pack(
            b"PK\x01\x02", 0, 0, _flags(size), 0, 0, 0, *sizes, 0, 0, 0, 0, min(offset, _U32)
        )
        out += name + extra
    end, count = base + len(out), len(records)
    # zip64 always, as torch does
    out += _END64.pack(b"PK\x06\x06", _END64.size - 12, 0x031E, 45, 0, 0, count, count, end - start, start)
    out += _LOCATOR.pack(b"PK\x06\x07", 0, end, 1)
    out += _END.pack(b"PK\x05\x06", 0, 0, count, count, end - start, min(start, _U32), 0)
    return places


def _flags(size: int) -> int:
    return _UTF8 | _DESCRIBED if size else _UTF8


def _zip64_extra(size: int, stored: int, offset: int) -> bytes:
    """The extra field of what does not fit 32 bits; empty when all does."""
    fields = ([size, stored] if size >= _U32 else []) + ([offset] if offset >= _U32 else [])
    return pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
