r"""The `.metadata` pickle that `torch.distributed.checkpoint` reads, written without torch.

Its opcodes name torch's own classes, so a stock reader gets the genuine `Metadata`, `MetadataIndex` and so on.
What occurs many times (classes, field names, keys, file names, sizes) is stored once and fetched from the memo.
Chunk and storage records are spelled as torch spells them, which `formats.records` recognises whole.

Why opcodes and not `pickle.dumps`: the classes are torch's, and importing torch takes seconds. And a large checkpoint
has millions of records that differ in a few numbers: what is the same in each is appended as one run of bytes
(`open`), only the rest is spelled. The legend of opcodes is in `pickle_ops`; an object is::

    h <class> ) \x81 \x94        new object of the class in the memo, with no arguments; numbered
    } \x94 (                     its state: a dict, numbered; mark
    h <field> <value> ...        fields and values
    u b                          into the dict; the dict becomes the state

Every `\x94` uses up a number, also where nothing ever asks for it: so torch's pickler spells these records, and only
what is spelled so is read record by record.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from ckpt_tools.formats.torch_archive.object_writer import int_ops, int_tuple_ops, text_ops
from ckpt_tools.model.box import Box
from ckpt_tools.model.transfers import Plan, TensorInfo
from ckpt_tools.model.without_gc import without_gc

_MODULE = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
    "ChunkStorageMetadata",
    "BytesStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
)
_BATCH = 1000  # dict entries and list elements per opcode that adds them, as the stock pickler does


@without_gc()
def metadata_bytes(plan: Plan) -> bytes:
    """The content of `.metadata` for a plan; keys in the order of `plan.paths`, chunks in file order."""
    chunks: dict[str, list[Box]] = defaultdict(list)
    stored: list[tuple[str, Box | None, int, str, int, int]] = []  # key, box, number of the chunk, byte range
    for blob in plan.blobs:
        if blob.box is not None:
            chunks[blob.key].append(blob.box)
        stored.append((blob.key, blob.box, 0, blob.file, blob.offset, blob.length))
    for item in (*plan.linked, *plan.items):
        stored.append((item.key, item.box, len(chunks[item.key]), item.file, item.offset, item.length))
        chunks[item.key].append(item.box)
    out = _Pickle()
    out.open("Metadata", "state_dict_metadata")
    out.fill(b"}", ((key, plan.tensors.get(key), chunks[key]) for key in plan.paths), out.entry, b"u")
    out.text("planner_data")
    out.fill(b"}", plan.paths.items(), out.path, b"u")
    out.text("storage_data")
    out.fill(b"}", stored, out.stored, b"u")
    out.text("storage_meta")
    out.open("StorageMeta", "checkpoint_id")
    out.data += b"N"
    for field, value in (("save_id", b"N"), ("load_id", b"N"), ("modules", b"]")):
        out.text(field)
        out.data += value
    out.close()
    out.text("version")
    out.text("1.0.0")
    if plan.original_shapes is not None:  # an attribute of Megatron's, not a field of torch's class
        out.text("mcore_data")
        out.fill(b"}", plan.original_shapes.items(), out.original_shape, b"u")
    out.close()
    return bytes(out.data) + b"."


class _Pickle:
    """Appends opcodes of the objects in a `.metadata` to `data`: every method those of one object, or of an entry.

    The memo numbers its entries in the order in which they are made: every 0x94 is counted.
    """

    def __init__(self) -> None:
        self.data = bytearray(b"\x80\x04")
        self._memo: dict[object, bytes] = {}
        self._opened: dict[str, bytes] = {}  # what `open` appends from the second time on
        self._count = 0
        for name in _CLASSES:
            self._make(("class", name), f"c{_MODULE}\n{name}\n".encode())
        self._make(("class", "_StorageInfo"), b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n")
        self._make(("class", "Size"), b"ctorch\nSize\n")
        self._make(("layout",), b"ctorch.serialization\n_get_layout\n" + text_ops("torch.strided") + b"\x85R")
        self.data += b"0" * self._count  # they are in the memo now

    def _make(self, name: object, ops: bytes, memos: int = 1) -> None:
        """Push the object that `ops` make, the last of their `memos` memo entries, and remember it as `name`."""
        self.data += ops
        self.data += b"\x94"
        self._count += memos
        number = self._count - 1
        self._memo[name] = b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)

    def text(self, text: str) -> None:
        if known := self._memo.get(text):
            self.data += known
            return
        encoded = text.encode("utf-8", "surrogatepass")
        short = len(encoded) < 256
        self._make(text, b"\x8c" + bytes([len(encoded)]) + encoded if short else text_ops(text))

    def size(self, numbers: tuple[int, ...]) -> None:
        """A `torch.Size`."""
        if known := self._memo.get(numbers):
            self.data += known
            return
        made = self._memo["class", "Size"] + int_tuple_ops(numbers) + (b"\x94" if numbers else b"")
        self._make(numbers, made + b"\x85\x94R", memos=3 if numbers else 2)

    def open(self, name: str, field: str) -> None:
        """An object of a class up to its first field's value; other fields and their values follow, and `close`."""
        self._count += 2
        if known := self._opened.get(name):
            self.data += known
            return
        opening = self._memo["class", name] + b")\x81\x94}\x94("
        self.data += opening
        self.text(field)
        self._opened[name] = opening + self._memo[field]

    def close(self) -> None:
        self.data += b"ub"

    def fill(
        self, empty: bytes, members: Iterable[tuple[Any, ...]], push: Callable[..., None], add: bytes
    ) -> None:
        """A dict or list: `empty` makes it, `add` appends the members that were pushed since the last mark."""
        self.data += empty
        count = 0
        for member in members:
            if count % _BATCH == 0:
                self.data += b"("
            push(*member)
            count += 1
            if count % _BATCH == 0:
                self.data += add
        if count % _BATCH:
            self.data += add

    def original_shape(self, key: str, shape: tuple[int, ...]) -> None:
        """An entry of Megatron's `mcore_data` (dist_checkpointing/strategies/torch.py, core 0.8 to 0.15)."""
        self.text(key)
        self.data += b"}"
        self.text("nd_reformulated_orig_global_shape")
        self.data += int_tuple_ops(shape) + b"s"

    def path(self, key: str, path: tuple[str | int, ...]) -> None:
        """An entry of `planner_data`."""
        self.text(key)
        self.data += b"("
        for part in path:
            if isinstance(part, str):
                self.text(part)
            else:
                self.data += int_ops(part)
        self.data += b"t"

    def entry(self, key: str, info: TensorInfo | None, boxes: Iterable[Box]) -> None:
        """An entry of `state_dict_metadata`: a `TensorStorageMetadata`, or of an object."""
        self.text(key)
        if info is None:
            self.data += self._memo["class", "BytesStorageMetadata"] + b")\x81"
            return
        self.open("TensorStorageMetadata", "properties")
        self._properties(info.dtype)
        self.text("size")
        self.size(info.shape)
        self.text("chunks")
        self.fill(b"]", ((box,) for box in boxes), self._chunk, b"e")
        self.close()

    def _chunk(self, box: Box) -> None:
        self.open("ChunkStorageMetadata", "offsets")
        self.size(box.start)
        self.text("sizes")
        self.size(box.size)
        self.close()

    def _properties(self, dtype: str) -> None:
        """`TensorProperties`: (dtype, strided layout, no grad, contiguous, not pinned) for its __setstate__."""
        self.data += self._memo["class", "TensorProperties"] + b")\x81("
        if known := self._memo.get(("dtype", dtype)):
            self.data += known
        else:
            self._make(("dtype", dtype), f"ctorch\n{dtype}\n".encode())
        contiguous = self._memo["class", "_MEM_FORMAT_ENCODING"] + b"K\0\x85R"
        self.data += self._memo["layout",] + b"\x89" + contiguous + b"\x89tb"

    def stored(self, key: str, box: Box | None, number: int, file: str, offset: int, length: int) -> None:
        """An entry of `storage_data`: a `MetadataIndex` (an object's has no place) and its `_StorageInfo`."""
        self.open("MetadataIndex", "fqn")
        self.text(key)
        self.text("index")
        if box is None:
            self.data += b"N"
        else:
            self.data += int_ops(number)
            self.text("offset")
            self.size(box.start)
        self.close()
        self.open("_StorageInfo", "relative_path")
        self.text(file)
        self.text("offset")
        self.data += int_ops(offset)
        self.text("length")
        self.data += int_ops(length)
        self.close()
