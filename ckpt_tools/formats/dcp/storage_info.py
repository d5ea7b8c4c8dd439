"""`storage_data` of a `.metadata`: which bytes of which file every item of a key is."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Any

from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError
from ckpt_tools.formats.pickle.machine import SIZE, Machine, Pairs, brief
from ckpt_tools.formats.pickle.packed_records import STORED, Kind, Layout, integer, integers
from ckpt_tools.formats.pickle.stored_classes import fields_of, is_class
from ckpt_tools.model.catalog import MAX_DIMENSIONS, Item

LEADS_OUT = "leads out of the checkpoint"
LAYOUTS = 8  # of packed records, that others are compared with
_KEPT_SIZES = 100_000

Offset = tuple[int, ...]

# Groups of a packed record that hold its class and the names of its attributes, and what they must be.
_INFO_NAMES = {
    "info_class": "",
    "path_name": "relative_path",
    "offset_name": "offset",
    "length_name": "length",
}
_OBJECT_NAMES = {"index_class": "", "fqn_name": "fqn", "index_name": "index"}
_INDEX_NAMES = {**_OBJECT_NAMES, "start_name": "offset"}
_STORED_NAMES = (*_INFO_NAMES, *_INDEX_NAMES)


class Storage:
    """Where the items of every key are stored, packed records included."""

    def __init__(self, machine: Machine, pairs: Pairs) -> None:
        self._machine = machine
        self._texts: dict[bytes, str] = {}
        self._packed: dict[str, array[int]] = {}
        for opcode, places in machine.stored.items():  # equal names may be pushed by different opcodes
            self._packed.setdefault(self._text(opcode), array("Q")).extend(places)
        self._plain: dict[str, list[tuple[Offset | None, Item]]] = {}
        for index, info in zip(pairs[::2], pairs[1::2], strict=True):
            key, offset, item = _plain_item(index, info)
            self._plain.setdefault(key, []).append((offset, item))
        self._known: set[Any] = set()  # opcodes of class and attribute names that proved right
        self._layouts: list[tuple[Layout, bool]] = []  # of tensors' items, and of others
        self._files: dict[int, str] = {}  # by memo entry
        self._sizes: dict[bytes, Offset] = {}
        self._fetched: dict[int, Offset] = {}  # by memo entry

    def keys(self) -> set[str]:
        return self._packed.keys() | self._plain.keys()

    def path_problems(self) -> list[str]:
        """Names that are not file names, or that lead out of the checkpoint."""
        packed = map(self._text, self._machine.files)
        plain = [item.file for items in self._plain.values() for _, item in items]
        return [problem for file in sorted({*packed, *plain}) if (problem := _path_problem(file))]

    def items(self, key: str) -> dict[Offset | None, Item]:
        """Every item of a key, by the offset of its chunk (None: an object)."""
        found = list(self._plain.get(key, ()))
        found += map(self._packed_item, self._packed.get(key, ()))
        items = dict(found)
        if len(items) != len(found):
            raise CorruptCheckpointError(f"{key}: two items are stored for one chunk")
        return items

    def size(self, match: re.Match[bytes], name: str) -> Offset:
        """A SIZE of a packed record."""
        made, fetched, call = match.group(f"{name}_tuple", name, f"{name}_call")
        if call is not None and call not in self._known:
            if self._machine.value(call) != SIZE:
                raise CorruptCheckpointError(f"{self._machine.where}: a size that is not made by torch.Size")
            self._known.add(call)
        source = made or fetched or b""
        value = self._sizes.get(source)
        if value is None:
            if len(self._sizes) > 10_000:
                self._sizes.clear()
            value = integers(made) if made else self._machine.value(fetched) if fetched else ()
            self._sizes[source] = as_offset(value)
        return value

    def fetched_size(self, index: int) -> Offset:
        """The size in a memo entry."""
        value = self._fetched.get(index)
        if value is None:
            value = as_offset(self._machine.fetch(index))
            self.note_sizes({index: value})
        return value

    def note_sizes(self, sizes: Mapping[int, Offset]) -> None:
        """Keep sizes by their memo entries: what chunks make is fetched by the records of their items."""
        if len(self._fetched) > _KEPT_SIZES:
            self._fetched.clear()
        self._fetched.update(sizes)

    def check_names(self, match: re.Match[bytes], kind: str, names: Mapping[str, str]) -> None:
        """Prove that a packed record is of the class `kind` and its attributes have these names, by group."""
        opcodes = match.group(*names)
        if opcodes in self._known:
            return
        cls, *found = map(self._machine.value, opcodes)
        if not is_class(cls, kind) or found != list(names.values())[1:]:
            raise CorruptCheckpointError(
                f"{self._machine.where}: a {kind} with the attributes {brief(found)}"
            )
        self._known.add(opcodes)

    def _packed_item(self, place: int) -> tuple[Offset | None, Item]:
        for layout, is_tensors in self._layouts:
            if (numbers := layout.numbers(self._machine.data, place)) is not None:
                file, at, length = numbers[-3:]
                name = self._files.get(file) or self._file(file)
                if not is_tensors:
                    return None, Item(name, at, length)
                return self.fetched_size(numbers[-4]), Item(name, at, length)
        return self._item_of_new_layout(place)

    def _item_of_new_layout(self, place: int) -> tuple[Offset | None, Item]:
        match = packed(STORED, self._machine.data, place)
        names = match.group(*_STORED_NAMES)
        if names not in self._known:
            self.check_names(match, "_StorageInfo", _INFO_NAMES)
            self.check_names(match, "MetadataIndex", _INDEX_NAMES if match["start_name"] else _OBJECT_NAMES)
            self._known.add(names)
        named, fetched, text, at, length = match.group("start_name", "path", "path_text", "offset", "length")
        offset = self.size(match, "start") if named else None
        if fetched and (match["start"] or not named):
            groups = ("fqn", "number", "start", "path", "offset", "length")
            layout = Layout(match, *(group for group in groups if match[group]))
            self._layouts = [(layout, bool(named)), *self._layouts[: LAYOUTS - 1]]
        return offset, Item(self._text(fetched or text), integer(at), integer(length))

    def _file(self, index: int) -> str:
        """The name of a file that a memo entry holds."""
        name = self._files[index] = self._text(b"j" + index.to_bytes(4, "little"))
        return name

    def _text(self, opcode: bytes) -> str:
        text = self._texts.get(opcode)
        if text is None:
            text = self._machine.value(opcode)
            if not isinstance(text, str):
                raise CorruptCheckpointError(f"{self._machine.where}: {brief(text)} where a name belongs")
            self._texts[opcode] = text
        return text


def packed(kind: Kind, data: bytes, place: int) -> re.Match[bytes]:
    """The record at a byte where the machine has found one."""
    match = kind.match(data, place)
    assert match is not None  # it did when it was packed
    return match


def _plain_item(index: Any, info: Any) -> tuple[str, Offset | None, Item]:
    """Key, chunk offset and item of one storage entry that was executed."""
    where, what = fields_of(index, "MetadataIndex"), fields_of(info, "_StorageInfo")
    key, offset, file = where["fqn"], where.get("offset"), what["relative_path"]
    if type(key) is not str or type(file) is not str:
        raise TypeError("a key or file name is not text")
    transforms = what.get("transform_descriptors")
    if transforms:
        names = ", ".join(map(brief, transforms)) if isinstance(transforms, list) else brief(transforms)
        raise UnsupportedCheckpointError(
            f"{key} was transformed by {names} when it was saved. Save the checkpoint again without "
            "torch extensions."
        )
    item = Item(file, what["offset"], what["length"])
    return key, None if offset is None else as_offset(offset), item


def check_range(key: str, item: Item) -> None:
    """Raises CorruptCheckpointError: what is said of an item cannot be one."""
    numbers = item.offset, item.length
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) or not item.length:
        raise CorruptCheckpointError(
            f"{key}: {brief(item.length)} bytes at {brief(item.offset)} of {item.file} are not an item"
        )


def _path_problem(path: object) -> str | None:
    if not isinstance(path, str) or not path or "\0" in path:
        return f"{brief(path)} is not a file name"
    if path.startswith("/") or "\\" in path or ".." in path.split("/") or "://" in path:
        return f"file name {brief(path)} {LEADS_OUT}"
    return None


def as_offset(value: Any) -> Offset:
    """A size or offset: a tuple of natural numbers."""
    if (
        type(value) is not tuple
        or len(value) > MAX_DIMENSIONS
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    ):
        raise CorruptCheckpointError(f"{brief(value)} is not a shape or offset")
    return value
