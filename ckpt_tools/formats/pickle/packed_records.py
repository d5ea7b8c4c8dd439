"""The flat records that make up most of a `.metadata` file, as patterns over its pickled bytes.

Pickle protocol 4 and later always write these objects in the same way, so one regular expression matches a whole
record, and its groups are what it holds: a SIZE or text is in one group when the record makes it, and in
another when it fetches one that was made before (a GET).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

_GET = rb"(?:h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_TUPLE = rb"(?:%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,16}t)" % (_INT, _INT, _INT, _INT)
_INTS = re.compile(_INT, re.DOTALL)
_BEGINNING = re.compile(rb"%b\)\x81\x94}\x94\(" % _GET, re.DOTALL)  # of every kind: class, NEWOBJ, attributes

# Memo entries that a group makes when it matches, by the end of its name; a SIZE is a tuple, arguments and a call.
_MEMOS = {"text": 1, "strides": 1, "empty": 2, "tuple": 3, "object": 2, "write": 4}


class Kind:
    """A kind of record: its pattern, and the memo entries that one makes (`memos`, and more of its groups)."""

    def __init__(self, memos: int, *parts: bytes) -> None:
        self._memos, self._source = memos, b"".join(parts)
        self._pattern: re.Pattern[bytes] | None = (
            None  # compiled when a record is met: that takes milliseconds
        )
        self._more: tuple[tuple[int, int], ...] = ()
        self._texts: tuple[int, ...] = ()

    def match(self, data: bytes, at: int) -> re.Match[bytes] | None:
        """The record that begins at byte `at`, or None."""
        if self._pattern is None and _BEGINNING.match(data, at) is None:
            return None
        found = (self._pattern or self._compiled()).match(data, at)
        if found:
            for group in self._texts:  # a text is preceded by its length, which no pattern can count
                text = found[group]
                if text is not None and len(text) != text[1] + 2:
                    return None
        return found

    def memos_of(self, found: re.Match[bytes]) -> int:
        """How many memo entries a record makes."""
        count = self._memos
        for group, memos in self._more:
            if found[group] is not None:
                count += memos
        return count

    def _compiled(self) -> re.Pattern[bytes]:
        pattern = re.compile(self._source, re.DOTALL)
        ends = {index: name.rpartition("_")[2] for name, index in pattern.groupindex.items()}
        self._more = tuple((index, _MEMOS[end]) for index, end in ends.items() if end in _MEMOS)
        self._texts = tuple(index for index, end in ends.items() if end == "text")
        self._pattern = pattern
        return pattern


def _get(name: bytes) -> bytes:
    return b"(?P<%b>%b)" % (name, _GET)


def _open(cls: bytes) -> bytes:
    """Class, no arguments, NEWOBJ, and the beginning of its attributes."""
    return _get(cls) + rb"\)\x81\x94}\x94\("


def _size(name: bytes) -> bytes:
    """`torch.Size` of a tuple of INTs, or the fetch of one."""
    made = rb"(?:(?P<%b_tuple>%b)\x94|(?P<%b_empty>\)))\x85\x94R\x94" % (name, _TUPLE, name)
    return b"(?:%b%b|%b)" % (_get(name + b"_call"), made, _get(name))


def _text(name: bytes) -> bytes:
    """A text with its length, or the fetch of one."""
    return rb"(?:%b|(?P<%b_text>\x8c.[\x00-\x7f]{1,255})\x94)" % (_get(name), name)


def _int(name: bytes) -> bytes:
    return b"(?P<%b>%b)" % (name, _INT)


_INDEX = b"".join((
    _open(b"index_class"), _get(b"fqn_name"), _text(b"fqn"), _get(b"index_name"), b"(?:%b|N)" % _int(b"number"),
    b"(?:%b%b)?ub" % (_get(b"start_name"), _size(b"start")),
))  # fmt: skip
_CHUNK = b"".join((
    _open(b"class"), _get(b"offsets_name"), _size(b"offsets"), _get(b"sizes_name"), _size(b"sizes"), b"ub"
))  # fmt: skip
_STRIDES = rb"(?:N|\)|%b|(?P<strides>%b)\x94)?" % (_GET, _TUPLE)  # torch 2.15
_PROPERTIES = rb"%b\)\x81\x94\(%b%b[\x88\x89]%b[\x88\x89]%bt\x94b" % (_GET, _GET, _GET, _GET, _STRIDES)
_WRITE = b"".join((
    rb"(?P<data_write>%b\)\x81\x94}\x94\(" % _GET, _GET, b"(?:%b|(?P<chunk_object>%b))" % (_GET, _CHUNK),
    _GET, _PROPERTIES, _GET, _size(b"whole"), b"ub)",
))  # fmt: skip

CHUNK = Kind(2, _CHUNK)
"""ChunkStorageMetadata: offsets and sizes."""

STORED = Kind(
    4, _INDEX, _open(b"info_class"), _get(b"path_name"), _text(b"path"),
    _get(b"offset_name"), _int(b"offset"), _get(b"length_name"), _int(b"length"), b"ub",
)  # fmt: skip
"""A MetadataIndex (fqn, index, offset unless it is an object's) and its _StorageInfo (path, offset, length)."""

PLANNED = Kind(
    4, rb"%b\)\x81\x94}\x94\(" % _GET, _GET, _INDEX, _GET, _GET, _GET, b"(?:%b|N)" % _INT,
    _GET, b"(?:N|%b)ub" % _WRITE,
)  # fmt: skip
"""A WriteItem of a save plan; nothing of it is needed."""


def integer(opcode: bytes) -> int:
    """The value of an INT, given as opcode and argument."""
    if opcode[0] == 0x8A:
        return int.from_bytes(opcode[2:], "little", signed=True)
    return int.from_bytes(opcode[1:], "little", signed=opcode[0] == 0x4A)


def integers(opcodes: bytes) -> tuple[int, ...]:
    """The elements of a tuple of INTs, given as its opcodes."""
    return tuple(integer(found) for found in _INTS.findall(opcodes, opcodes[0] == 0x28, len(opcodes) - 1))


# Forms of `struct` for the arguments of the opcodes that push a number; those of a long integer are its bytes.
_ARGUMENTS = {ord("K"): "B", ord("M"): "H", ord("J"): "i", ord("h"): "B", ord("j"): "I"}


class Layout:
    """What a record has in common with those that differ from it in their numbers alone.

    The next record mostly is such a one. It is known by the bytes between its numbers, which are taken out of it by
    the same call: a match and its groups take five times as long.
    """

    def __init__(self, found: re.Match[bytes], *groups: str) -> None:
        """The record's numbers are the INTs, tuples of INTs and GETs that these `groups` matched, in order."""
        data, at = found.string, found.start()
        parts = ["<"]
        self._long: list[int] = []  # which numbers are long ones
        for number, place in enumerate(place for group in groups for place in _numbers_in(found, group)):
            begin, form = place + 1, _ARGUMENTS.get(data[place])
            if form is None:
                begin, form = place + 2, f"{data[place + 1]}s"
                self._long.append(number)
            parts.append(f"{begin - at}s{form}")
            at = begin + struct.calcsize(f"<{form}")
        self._form = struct.Struct(f"{''.join(parts)}{found.end() - at}s")
        self._between = self._form.unpack_from(data, found.start())[::2]

    def numbers(self, data: bytes, at: int) -> Sequence[int] | None:
        """The numbers of the record that begins at byte `at`, or None if it is not of this layout."""
        if at + self._form.size > len(data):
            return None
        values = self._form.unpack_from(data, at)
        if values[::2] != self._between:
            return None
        if not self._long:
            return values[1::2]
        numbers = list(values[1::2])
        for number in self._long:
            numbers[number] = int.from_bytes(numbers[number], "little", signed=True)
        return numbers


def _numbers_in(found: re.Match[bytes], group: str) -> list[int]:
    """Offsets of the opcodes that push the numbers of a group."""
    start, end = found.span(group)
    if not group.endswith("_tuple"):
        return [start]
    first = start + (found.string[start] == 0x28)  # behind a mark
    return [number.start() for number in _INTS.finditer(found.string, first, end - 1)]
