"""What the pickle machine makes of a pickle, and how large a harmless one may become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ckpt_tools.errors import HostileCheckpointError

MAX_TUPLE = 20_000  # elements, shared ones counted as often as they appear; also bounds the depth
MAX_WIDE_INTEGERS = 1_000  # random states have 32-bit integers; nothing has many that can share a hash
MAX_ODD_KEYS = 20_000  # elements of all keys and set members that could be made to share a hash
MAX_SETS = 100_000  # an empty one takes 216 bytes of memory, and one byte of the pickle
MAX_DEPTH = 200  # containers inside of each other; real ones have fewer than 20
MAX_REPETITION = 4  # how many times its own size a pickle may become when shared parts are counted every time
_SMALL_TUPLE = 16
_EVEN_KEYS = (str, bytes, int, bool, type(None))


class Name(NamedTuple):
    """A global, as named."""

    module: str
    name: str


SIZE = Name("torch", "Size")
# Calls that the C unpickler carries out, and what they make is as large as what they are given.
COPIES = {
    Name("_codecs", "encode"),
    *(Name(m, n) for m in ("builtins", "__builtin__") for n in ("set", "frozenset", "bytes", "bytearray")),
}


class Object:
    """What a global made: its arguments, the state that was put into it, and what was appended or set by key."""

    __slots__ = ("args", "items", "kind", "state")

    def __init__(self, kind: Name, args: tuple[Any, ...]) -> None:
        self.kind, self.args = kind, args
        self.state: Any = None
        self.items: list[Any] | None = None


class Record(int):
    """Where a packed chunk begins, in bytes of the pickle."""

    __slots__ = ()


class Pairs(list[Any]):
    """A dict as its keys and values in turn."""

    __slots__ = ()

    def as_dict(self) -> dict[Any, Any]:
        """The dict, if its keys are all texts (a name of the caller's own is then found without surprises)."""
        if not all(type(key) is str for key in self[::2]):
            raise TypeError("a key is not text")
        return dict(zip(self[::2], self[1::2], strict=True))


class Members(list[Any]):
    """A set or frozenset."""

    __slots__ = ()


_NESTED = (tuple, Members, Object)


class Limits:
    """What a pickle of `size` bytes may still make; `makes_tables`: its dicts and sets will be hash tables."""

    def __init__(self, where: str, size: int, makes_tables: bool) -> None:
        self._where, self._size, self._makes_tables = where, size, makes_tables
        self._large_tuples: dict[int, tuple[tuple[Any, ...], int]] = {}  # by identity, with their size
        self._wide_integers = self._odd_keys = self._copied = self._sets = 0

    def add_tuple(self, items: tuple[Any, ...]) -> None:
        """A tuple whose size, as hashing would see it, is bounded."""
        size = 1 + len(items)
        for item in items:
            if type(item) in _NESTED:
                size += self._weigh(item)
        if size > _SMALL_TUPLE:
            self._large_tuples[id(items)] = (items, size)  # the reference keeps the identity its own
        self._check(size, MAX_TUPLE, f"a tuple of more than {MAX_TUPLE} elements with its parts")

    def add_wide_integer(self) -> None:
        """An integer that may be equal to another modulo 2**61 - 1."""
        self._wide_integers += 1
        what = f"more than {MAX_WIDE_INTEGERS} integers of 8 bytes or more in one pickle"
        self._check(self._wide_integers, MAX_WIDE_INTEGERS, what)

    def add_set(self) -> None:
        """One more set."""
        self._sets += 1
        self._check(self._sets, MAX_SETS, f"more than {MAX_SETS} sets in one pickle")

    def add_keys(self, keys: list[Any]) -> None:
        """Keys of a dict or members of a set; those whose hashes could be made equal are limited."""
        if self._makes_tables:
            odd = (key for key in keys if type(key) not in _EVEN_KEYS)
            self._odd_keys += sum(max(_SMALL_TUPLE, self._weigh(key)) for key in odd)
            what = f"keys other than texts and integers, of more than {MAX_ODD_KEYS} elements"
            self._check(self._odd_keys, MAX_ODD_KEYS, what)

    def copied(self, args: tuple[Any, ...]) -> Any:
        """The first argument of a call that copies it; all copies together must be in proportion to the pickle."""
        value = args[0] if args else ()
        if not isinstance(value, str | bytes | list | tuple):
            raise TypeError(f"a copy of a {type(value).__name__}")
        self._copied += len(value)
        self._check(self._copied, 2 * self._size, "more copies than the pickle could hold")
        return value

    def _weigh(self, value: Any) -> int:
        """How many elements hashing or comparing looks at, at most."""
        if type(value) is Members:
            return len(value)
        parts = value.args if type(value) is Object else value
        if id(parts) in self._large_tuples:
            return self._large_tuples[id(parts)][1]
        return _SMALL_TUPLE if type(value) is tuple else 1

    def _check(self, found: int, most: int, what: str) -> None:
        if found > most:
            raise HostileCheckpointError(f"{self._where}: {what}. It is damaged or hostile.")


def check_tree(root: Any, size: int, where: str) -> None:
    """Prove that whoever walks the value of a pickle of `size` bytes gets to an end soon."""
    # By identity: how many values are inside, shared ones as often as they appear, and how deep.
    done: dict[int, tuple[int, int]] = {}
    begun: set[int] = set()
    stack = [root]
    while stack:
        value = stack[-1]
        parts = _parts(value)
        if id(value) not in begun:
            begun.add(id(value))
            for part in parts:
                if id(part) in begun and id(part) not in done:
                    raise HostileCheckpointError(f"{where}: the pickle has a value that contains itself.")
                if _parts(part) and id(part) not in done:
                    stack.append(part)
            continue
        stack.pop()
        if id(value) in done:
            continue
        inside = [done[id(part)] if id(part) in done else (_length(part), 0) for part in parts]
        count = 1 + sum(count for count, _ in inside)
        depth = 1 + max((depth for _, depth in inside), default=0)
        if depth > MAX_DEPTH or count > MAX_REPETITION * size + 100_000:
            raise HostileCheckpointError(
                f"{where}: the pickle nests its values too deep, or has the same one too often. It is hostile."
            )
        done[id(value)] = (count, depth)


def _parts(value: Any) -> Sequence[Any]:
    if type(value) is Object:
        return (value.args, value.state, value.items)
    return value if type(value) in (tuple, list, Pairs, Members) else ()


def _length(value: Any) -> int:
    """How much a value without parts adds: long texts count for more."""
    return 1 + len(value) // 64 if isinstance(value, str | bytes) else 1
