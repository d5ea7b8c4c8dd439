"""The `.metadata` pickle that `torch.distributed.checkpoint` reads, written without torch.

Its opcodes name torch's own classes, so a stock reader gets the genuine `Metadata`, `MetadataIndex` and so on.
What occurs many times (classes, field names, keys, file names, sizes) is stored once and fetched from the memo.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ckpt_tools.box import Box
from ckpt_tools.plan.model import Plan, TensorInfo
from ckpt_tools.plan.pickle_ops import int_ops, int_tuple_ops, text_ops
from ckpt_tools.plan.without_gc import without_gc

_MODULE = "torch.distributed.checkpoint.metadata"
_FIELDS = {
    "Metadata": ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    "TensorStorageMetadata": ("properties", "size", "chunks"),
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "MetadataIndex": ("fqn", "offset", "index"),
    "StorageMeta": ("checkpoint_id", "save_id", "load_id", "modules"),
    "_StorageInfo": ("relative_path", "offset", "length"),
    "BytesStorageMetadata": (),
}
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
    for item in plan.items:
        stored.append((item.key, item.box, len(chunks[item.key]), item.file, item.offset, item.length))
        chunks[item.key].append(item.box)
    for alias, key in plan.aliases.items():
        chunks[alias] = chunks[key]
    spellings: dict[str, list[str]] = defaultdict(list)
    for alias, key in plan.aliases.items():
        spellings[key].append(alias)
    stored += [(alias, *row[1:]) for row in stored for alias in spellings.get(row[0], ())]
    pickle = _Pickle()
    entries = (
        (
            pickle.text(key),
            pickle.tensor(plan.tensors[key], chunks[key])
            if key in plan.tensors
            else pickle.instance("BytesStorageMetadata"),
        )
        for key in plan.paths
    )
    paths = ((pickle.text(key), pickle.path(path)) for key, path in plan.paths.items())
    items = ((pickle.index(*row[:3]), pickle.storage(*row[3:])) for row in stored)
    storage_meta = pickle.instance("StorageMeta", b"N", b"N", b"N", b"]")
    fields = (pickle.dict(entries), pickle.dict(paths), pickle.dict(items), storage_meta, text_ops("1.0.0"))
    extra = b""
    if plan.original_shapes is not None:  # an attribute of Megatron's, not a field of torch's class
        extra = pickle.text("mcore_data") + pickle.original_shapes(plan.original_shapes)
    return pickle.prologue + pickle.instance("Metadata", *fields, extra=extra) + b"."


class _Pickle:
    """Opcodes of the objects in a `.metadata`. Every method returns the opcodes that push one object.

    `prologue` puts all classes and field names into the memo. Other shared objects are made where they occur first,
    so opcodes have to be written in the order in which they were asked for.
    """

    def __init__(self) -> None:
        self._memo: dict[object, bytes] = {}
        self.prologue = b"\x80\x02"
        for name in ("TensorProperties", "_MEM_FORMAT_ENCODING", *_FIELDS):
            module = _MODULE if name != "_StorageInfo" else "torch.distributed.checkpoint.filesystem"
            self.prologue += self._made(("class", name), f"c{module}\n{name}\n".encode()) + b"0"
        self.prologue += self._made(("class", "Size"), b"ctorch\nSize\n") + b"0"
        layout = b"ctorch.serialization\n_get_layout\n" + text_ops("torch.strided") + b"\x85R"
        self.prologue += self._made("layout", layout) + b"0"
        for field in sorted({field for fields in _FIELDS.values() for field in fields}):
            self.prologue += self.text(field) + b"0"

    def _made(self, name: object, ops: bytes) -> bytes:
        """Make an object and remember it as `name`."""
        number = struct.pack("<I", len(self._memo))
        self._memo[name] = b"j" + number
        return ops + b"r" + number

    def text(self, text: str) -> bytes:
        return self._memo.get(text) or self._made(text, text_ops(text))

    def size(self, numbers: tuple[int, ...]) -> bytes:
        """A `torch.Size`."""
        known = self._memo.get(numbers)
        return known or self._made(numbers, self._memo["class", "Size"] + int_tuple_ops(numbers) + b"\x85R")

    def instance(self, name: str, *values: bytes, extra: bytes = b"") -> bytes:
        """An object of a class of `_FIELDS` with the given values of its fields, and `extra` names and values."""
        made = self._memo["class", name] + b")\x81"
        if not values:
            return made
        fields = zip(_FIELDS[name], values, strict=True)
        return made + b"}(" + b"".join([self._memo[field] + value for field, value in fields]) + extra + b"ub"

    def dict(self, entries: Iterable[tuple[bytes, bytes]]) -> bytes:
        return _batched(b"}", (key + value for key, value in entries), b"u")

    def original_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
        """Megatron's `mcore_data` (dist_checkpointing/strategies/torch.py, core 0.8 to 0.15)."""
        name = "nd_reformulated_orig_global_shape"
        return self.dict(
            (self.text(key), self.dict([(self.text(name), int_tuple_ops(shape))]))
            for key, shape in shapes.items()
        )

    def path(self, path: tuple[str | int, ...]) -> bytes:
        parts = [self.text(part) if isinstance(part, str) else int_ops(part) for part in path]
        return b"(" + b"".join(parts) + b"t"

    def tensor(self, info: TensorInfo, boxes: Iterable[Box]) -> bytes:
        """A `TensorStorageMetadata`."""
        properties, shape = self._properties(info.dtype), self.size(info.shape)
        parts = (self.instance("ChunkStorageMetadata", self.size(b.start), self.size(b.size)) for b in boxes)
        return self.instance("TensorStorageMetadata", properties, shape, _batched(b"]", parts, b"e"))

    def _properties(self, dtype: str) -> bytes:
        """`TensorProperties`: (dtype, strided layout, no grad, contiguous, not pinned) for its __setstate__."""
        made = self._memo["class", "TensorProperties"] + b")\x81"
        element = self._memo.get(("dtype", dtype)) or self._made(
            ("dtype", dtype), f"ctorch\n{dtype}\n".encode()
        )
        contiguous = self._memo["class", "_MEM_FORMAT_ENCODING"] + b"K\0\x85R"
        return made + b"(" + element + self._memo["layout"] + b"\x89" + contiguous + b"\x89tb"

    def index(self, key: str, box: Box | None, number: int) -> bytes:
        """A `MetadataIndex`; objects have neither offset nor number."""
        if box is None:
            return self.instance("MetadataIndex", self.text(key), b"N", b"N")
        return self.instance("MetadataIndex", self.text(key), self.size(box.start), int_ops(number))

    def storage(self, file: str, offset: int, length: int) -> bytes:
        return self.instance("_StorageInfo", self.text(file), int_ops(offset), int_ops(length))


def _batched(empty: bytes, members: Iterable[bytes], add: bytes) -> bytes:
    """A dict or list: `empty` makes it, `add` appends the members since the last mark."""
    out = bytearray(empty)
    count = 0
    for member in members:
        if count % _BATCH == 0:
            out += b"("
        out += member
        count += 1
        if count % _BATCH == 0:
            out += add
    if count % _BATCH:
        out += add
    return bytes(out)
