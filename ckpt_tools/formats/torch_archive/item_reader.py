"""What is inside one stored item: the frame around a tensor's bytes, or a Python object.

An item is a `torch.save` zip archive of uncompressed records. Offsets, sizes and checksums
come from its central directory (the local headers have none). Nothing about the layout is assumed: the
payload's place is derived, and what does not add up is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError
from ckpt_tools.formats.pickle.machine import brief
from ckpt_tools.formats.pickle.unpickle import Function, TorchDtype, load_pickle
from ckpt_tools.formats.storage.files import Files, path_in, read_whole
from ckpt_tools.formats.torch_archive.zip_archive import (
    Record,
    check_record,
    payload_offset,
    read_directory,
    stored_crc32,
)
from ckpt_tools.model.box import row_major_strides
from ckpt_tools.model.catalog import MAX_DIMENSIONS, Item
from ckpt_tools.model.dtypes import itemsize

# Classes of `torch` that stand for a typed storage in pickles, by element type; newer types have none.
STORAGE_CLASSES = {
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

MAX_PICKLE_BYTES = 64 << 20
_OFTEN_EQUAL_BYTES = 16 << 10
_ZIP = b"PK\x03\x04"
MAX_OBJECT_BYTES = 8 << 30  # of common.pt and its like
# Read at either end: covers every record but the payload of a single-tensor archive (1.5 KiB in torch 2.13).
ARCHIVE_END = 4096


class Stretch(NamedTuple):
    """Bytes of a file that one checksum covers."""

    start: int
    nbytes: int
    crc32: int | None  # None when their writer kept none


class TensorBytes(NamedTuple):
    """Where the bytes of a stored tensor lie and how its elements are laid out in them."""

    payload_offset: int  # bytes from the beginning of the file, at the tensor's first element
    nbytes: int  # bytes from the first to past the last element
    crc32: int | None  # None when the record holds more than this tensor, or its writer kept none
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    record: Stretch  # that holds the tensor's elements, and others where the tensor is a view of a part

    @property
    def is_row_major(self) -> bool:
        """Whether the payload is the dense row-major tensor."""
        expected = row_major_strides(self.shape)
        return 0 in self.shape or all(
            n == 1 or a == b for n, a, b in zip(self.shape, self.strides, expected, strict=True)
        )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor inside an object: its dense row-major little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)


class _Storage(NamedTuple):
    record: str
    dtype: str
    numel: int


class _TensorRef(NamedTuple):
    """A tensor as its pickle describes it; `offset` and `strides` in elements."""

    storage: _Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Elements from the first to past the last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


class _Archive:
    """One item: its directory, and reads inside it through a window at either end."""

    def __init__(self, files: Files, item: Item) -> None:
        self.files, self.item = files, item
        self.where = f"{path_in(files.location, item.file)} at byte {item.offset}"
        tail = min(item.length, ARCHIVE_END)
        self._tail_start = item.length - tail
        self._tail = files.read(item.file, item.offset + self._tail_start, tail)
        head = min(self._tail_start, ARCHIVE_END)
        self._head = files.read(item.file, item.offset, head) if head else b""
        self.records = read_directory(self.read, item.length, self.where)
        names = [name for name in self.records if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise CorruptCheckpointError(f"{self.where}: {len(names)} records named data.pkl, expected one.")
        self.prefix = names[0][: -len("data.pkl")]
        self._check_byteorder()

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the item."""
        if offset >= self._tail_start:
            return self._tail[offset - self._tail_start : offset - self._tail_start + length]
        if offset + length <= len(self._head):
            return self._head[offset : offset + length]
        return self.files.read(self.item.file, self.item.offset + offset, length)

    def record(self, name: str) -> Record:
        """The record of this name, without the archive's prefix."""
        try:
            return self.records[self.prefix + name]
        except KeyError:
            raise CorruptCheckpointError(f"{self.where}: the archive has no record {name!r}.") from None

    def start(self, record: Record) -> int:
        """Where the record's bytes begin, from the beginning of the item."""
        return payload_offset(self.read, record, self.where)

    def content(self, record: Record, limit: int) -> bytes:
        """The record's bytes, refused above `limit`."""
        if record.size > limit:
            raise CorruptCheckpointError(f"{self.where}: {record.name} has {record.size} bytes (> {limit}).")
        data = self.read(self.start(record), record.size)
        check_record(record, data, self.where)
        return data

    def unpickle(self, rebuild: Callable[[_TensorRef], object], trust_pickle: bool) -> Any:
        """The value of `data.pkl`, its tensors made by `rebuild`."""
        data = self.content(self.record("data.pkl"), MAX_PICKLE_BYTES)
        known = {**_STORAGE_TYPES, **_rebuilders(rebuild, self.where)}
        return load_pickle(data, self.where, known, self._storage, trust_pickle)

    def _storage(self, pid: Any) -> _Storage:
        kind, storage_type, key, _location, numel = pid
        named = type(key) is str and len(key) < 256  # it is copied for every tensor
        if kind != "storage" or not isinstance(storage_type, _StorageType) or not named:
            raise ValueError(f"unknown storage reference {brief(pid)}")
        return _Storage(f"data/{key}", storage_type.dtype, _natural(numel))

    def _check_byteorder(self) -> None:
        record = self.records.get(self.prefix + "byteorder")
        order = self.content(record, 16) if record else b"little"  # old writers do not say
        if order != b"little":
            raise UnsupportedCheckpointError(
                f"{self.where}: the archive was written in byte order {order.decode('ascii', 'replace')!r}; "
                "only little-endian checkpoints are supported."
            )


def find_tensor(files: Files, item: Item) -> TensorBytes:
    """Where the payload of a tensor item lies."""
    archive = _Archive(files, item)
    tensor = archive.unpickle(lambda ref: _tensor_bytes(archive, ref), trust_pickle=False)
    if not isinstance(tensor, TensorBytes):
        raise CorruptCheckpointError(f"{archive.where}: a tensor is expected, found {type(tensor).__name__}.")
    return tensor


def outline_object(files: Files, item: Item, trust_pickle: bool = False) -> Any:
    """The Python value of a BYTES item with a `TensorBytes` in place of every tensor: nothing large is read."""
    archive = _Archive(files, item)
    return archive.unpickle(lambda ref: _tensor_bytes(archive, ref), trust_pickle)


def load_object(files: Files, item: Item, trust_pickle: bool = False) -> Any:
    """The Python value of a BYTES item or of a whole `torch.save` file.

    Tensors become `StoredTensor`, foreign classes stand-ins (see `unpickle`).
    """
    archive = _Archive(files, item)
    budget = [
        4 * item.length
    ]  # bytes that tensors span: views of one storage may repeat, but not without end
    contents: dict[str, bytes] = {}  # several views share a storage, which is proven as a whole

    def load(ref: _TensorRef) -> StoredTensor:
        record = _checked_record(archive, ref)
        budget[0] -= max(prod(ref.shape), ref.extent) * itemsize(ref.dtype)
        if budget[0] < 0:
            raise CorruptCheckpointError(f"{archive.where}: its tensors are larger than the archive.")
        if record.name not in contents:
            contents[record.name] = archive.content(record, item.length)
        return StoredTensor(ref.dtype, ref.shape, _dense_bytes(contents[record.name], ref))

    return archive.unpickle(load, trust_pickle)


def read_archive(files: Files, item: Item) -> bytes:
    """All bytes of a BYTES item or of a whole `torch.save` file, to be copied; every record is checked."""
    data = files.read(item.file, item.offset, item.length)
    if item.length > _OFTEN_EQUAL_BYTES or not _is_sound(data):
        _check_records(data, f"{path_in(files.location, item.file)} at byte {item.offset}")
    return data


def record_stretches(files: Files, item: Item) -> list[Stretch]:
    """The content of every record of an archive, none of it read."""
    archive = _Archive(files, item)
    return [
        Stretch(item.offset + archive.start(record), record.size, stored_crc32(record))
        for record in archive.records.values()
    ]


@lru_cache(maxsize=4096)
def _is_sound(data: bytes) -> bool:
    """Whether the records of a small archive have their checksums; group fields repeat for every parameter."""
    try:
        _check_records(data, "")
    except (CorruptCheckpointError, UnsupportedCheckpointError):
        return False
    return True


def _check_records(data: bytes, where: str) -> None:
    def read(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    for record in read_directory(read, len(data), where).values():
        start = payload_offset(read, record, where)
        check_record(record, data[start : start + record.size], where)


def read_small_file(files: Files, name: str) -> bytes:
    """All bytes of a file that is not a tensor item; the checksums of an archive (`common.pt`) are verified."""
    item = whole_file(files, name)
    if item.length >= len(_ZIP) and files.read(name, 0, len(_ZIP)) == _ZIP:
        return read_archive(files, item)
    return read_whole(files, name)


def whole_file(files: Files, name: str) -> Item:
    """The item that is all of a file, for `common.pt` and its like."""
    size = files.size(name)
    if size > MAX_OBJECT_BYTES:
        raise CorruptCheckpointError(
            f"{path_in(files.location, name)} has {size:,} bytes; of a file of objects at most "
            f"{MAX_OBJECT_BYTES:,} are read into memory"
        )
    return Item(name, 0, size)


def _tensor_bytes(archive: _Archive, ref: _TensorRef) -> TensorBytes:
    record = _checked_record(archive, ref)
    size = itemsize(ref.dtype)
    nbytes = ref.extent * size
    start = archive.item.offset + archive.start(record)
    crc32 = stored_crc32(record)
    return TensorBytes(
        start + ref.offset * size,
        nbytes,
        crc32 if ref.offset == 0 and nbytes == record.size else None,
        ref.dtype,
        ref.shape,
        ref.strides,
        Stretch(start, record.size, crc32),
    )


def _checked_record(archive: _Archive, ref: _TensorRef) -> Record:
    """The record of a tensor's storage, proven to hold every element."""
    record = archive.record(ref.storage.record)
    size = itemsize(ref.storage.dtype)
    if record.size != ref.storage.numel * size:
        raise CorruptCheckpointError(
            f"{archive.where}: {record.name} has {record.size} bytes, but its pickle says "
            f"{ref.storage.numel} elements of {size} bytes."
        )
    end = (ref.offset + ref.extent) * itemsize(ref.dtype)
    if end > record.size:
        raise CorruptCheckpointError(
            f"{archive.where}: a {ref.dtype} tensor of shape {ref.shape} needs {end} bytes of {record.name}, "
            f"which has {record.size}."
        )
    return record


def _dense_bytes(content: bytes, ref: _TensorRef) -> bytes:
    """The elements of a tensor, row-major, from all bytes of its record."""
    size = itemsize(ref.dtype)
    data = content[ref.offset * size : (ref.offset + ref.extent) * size]
    if ref.extent == prod(ref.shape) and ref.strides == row_major_strides(ref.shape):
        return data
    import numpy as np

    view = np.ndarray(ref.shape, f"V{size}", data, strides=tuple(s * size for s in ref.strides))
    return bytes(view.tobytes())


class _StorageType(NamedTuple):
    dtype: str


_STORAGE_TYPES: dict[tuple[str, str], object] = {
    ("torch.storage", "UntypedStorage"): _StorageType("uint8"),
    **{("torch", name): _StorageType(dtype) for dtype, name in STORAGE_CLASSES.items()},
}


def _rebuilders(rebuild: Callable[[_TensorRef], object], where: str) -> dict[tuple[str, str], object]:
    def checked(storage: Any, dtype: str, offset: Any, shape: Any, strides: Any) -> object:
        if not isinstance(storage, _Storage):
            raise ValueError("a tensor without a storage")
        if not len(shape) == len(strides) <= MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {len(shape)} dimensions with {len(strides)} strides")
        shape, strides = tuple(map(_natural, shape)), tuple(map(_natural, strides))
        return rebuild(_TensorRef(storage, dtype, _natural(offset), shape, strides))

    def v2(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> object:
        _refuse_lazy(rest[2:], where)  # behind what autograd needs
        return checked(storage, storage.dtype, offset, shape, strides)

    def v3(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> object:
        dtype = rest[2]
        _refuse_lazy(rest[3:], where)
        if not isinstance(dtype, TorchDtype):
            raise ValueError(f"element type {brief(dtype)}")
        return checked(storage, dtype.name, offset, shape, strides)

    def parameter(data: Any, *_grad_and_hooks: Any) -> object:
        return data

    return {
        ("torch._utils", "_rebuild_tensor_v2"): Function((v2,)),
        ("torch._utils", "_rebuild_tensor_v3"): Function((v3,)),
        ("torch._utils", "_rebuild_parameter"): Function((parameter,)),
    }


def _refuse_lazy(metadata: tuple[Any, ...], where: str) -> None:
    """Refuse a tensor that torch marks as lazy (`conj`, `neg`): its elements are not its values yet."""
    for entry in metadata:
        if entry:
            bits = ", ".join(map(brief, entry)) if isinstance(entry, dict) else brief(entry)
            raise UnsupportedCheckpointError(
                f"{where}: a tensor was stored before torch had applied {bits}, so its bytes are not its values. "
                "Load it with torch and save it again after .resolve_conj().resolve_neg()."
            )


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{brief(value)} is not a size or offset")
    return value
