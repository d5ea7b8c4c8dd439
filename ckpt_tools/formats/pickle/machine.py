"""A small pickle machine: it decides whether a pickle is safe to load, and reads `.metadata` without loading it.

A large checkpoint's metadata is a million chunk records and as many storage records. As Python objects, with the
memo that keeps each of their parts alive, they take twelve times the file's size. Here a record is recognised by
its bytes (see `packed_records`) and only its offset is kept. Everything else is executed opcode by opcode. Nothing in
a pickle is imported or called: globals are names, objects are a name with a state.

For other pickles its run is a proof. The C unpickler grows its memo to any index that a PUT names. Hashing a tuple
recurses and visits shared parts again and again. Only the hashes of texts and small integers cannot be made
equal; a dict of other keys may take quadratic time. Each call that copies its argument copies a shared one again.
Each of these takes a process down with a few bytes, and is refused here.

Later opcodes may fetch a part of a packed record from the memo. `_bases` gives the record that made a memo entry, and
the fetch executes that record.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

from ckpt_tools.errors import (
    CkptError,
    CorruptCheckpointError,
    HostileCheckpointError,
    UnsupportedCheckpointError,
)
from ckpt_tools.formats.pickle.packed_records import CHUNK, PLANNED, STORED, Kind, integers
from ckpt_tools.model.dtypes import ITEMSIZE

MAX_GLOBALS = 500  # distinct names in one pickle; real ones have fewer than 30

# What checkpoints are known to hold; Megatron and NeMo classes under any path, as versions move them.
_KNOWN = re.compile(
    r"collections\.(OrderedDict|defaultdict)|_codecs\.encode|argparse\.Namespace|types\.SimpleNamespace|signal\.Signals"
    r"|(builtins|__builtin__)\.(set|frozenset|complex|slice|bytes|bytearray|list|dict|int|float|str)|_?io\.BytesIO|functools\.partial"
    r"|pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path"
    r"|numpy\.(ndarray|dtype|dtypes\.\w+)|numpy\.(_?core)\.multiarray\.(_reconstruct|scalar)"
    r"|numpy\.(_?core)\.numeric\._frombuffer"
    rf"|torch\.(Size|device|serialization\._get_layout|_C\.Generator|{'|'.join(ITEMSIZE)})"
    r"|torch\.distributed\.(checkpoint|_shard)\.[\w.]+"
    r"|(megatron|nemo|nvidia_resiliency_ext)\.[\w.]+"
    # classes of optimizers, which an offloaded optimizer has among the settings of its groups
    r"|torch\.optim\.\w+\.(Adam|AdamW|SGD)"
    r"|(transformer_engine\.pytorch|apex)\.optimizers\.\w+\.Fused(Adam|SGD)"
)


# Modules with functions that act: no checkpoint stores their contents; a pickle that names one wants it called.
_ACTING = re.compile(
    r"(os|nt|posix|posixpath|sys|subprocess|_posixsubprocess|shutil|socket|importlib|ctypes|_ctypes|runpy|pty|code|codeop"
    r"|webbrowser|tempfile|multiprocessing|threading|_thread|asyncio|pickle|_pickle|marshal|operator|_operator|types"
    r"|gc|inspect|ast|timeit|trace|pdb|bdb|doctest|profile|cProfile|http|urllib|ftplib|smtplib|builtins|__builtin__"
    r"|io|_io|torch\.(hub|load|jit|package|ops|classes))(\..*)?"
)


def check_global(module: str, name: str, where: str) -> None:
    """Refuse a global that is not known to be harmless."""
    if _KNOWN.fullmatch(f"{module}.{name}"):
        return
    if _ACTING.fullmatch(module) or _ACTING.fullmatch(f"{module}.{name}"):
        # In .metadata everything has its place and class, for which a placeholder cannot stand.
        hint = "" if where.endswith(".metadata") else "; --unknown-classes reads it as an inert placeholder"
        raise HostileCheckpointError(
            f"{where}: the pickle names {module}.{name!r}, which no known checkpoint holds and which would run code. "
            f"Nothing was imported, and torch should not load it{hint}."
        )
    raise UnsupportedCheckpointError(
        f"{where}: the pickle names {module}.{name!r}, which no known checkpoint holds. Nothing was imported. If "
        "you need the rest, --unknown-classes reads it as an inert placeholder: nothing is executed."
    )


def check_global_count(count: int, where: str) -> None:
    """Refuse more distinct globals than any checkpoint has; each costs a class."""
    if count > MAX_GLOBALS:
        raise HostileCheckpointError(f"{where}: the pickle names more than {MAX_GLOBALS} globals.")


def brief(value: object) -> str:
    """What to say of a value in an error: scalars as they are, of others the class, for they can print forever."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python spells no number of 4300 digits
        return f"an integer of {value.bit_length()} bits"
    plain = isinstance(value, str | int | float | None)
    if plain:
        return f"{value!r:.200}"
    package = "numpy " if str(getattr(type(value), "module", "")).startswith("numpy") else ""  # of a stand-in
    return f"a {package}{type(value).__name__}"


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
        """Count a tuple; its size, as hashing would see it, is limited."""
        size = 1 + len(items)
        for item in items:
            if type(item) in _NESTED:
                size += self._weigh(item)
        if size > _SMALL_TUPLE:
            self._large_tuples[id(items)] = (items, size)  # the reference keeps the identity its own
        self._check(size, MAX_TUPLE, f"a tuple of more than {MAX_TUPLE} elements with its parts")

    def add_wide_integer(self) -> None:
        """Count an integer that may equal another modulo 2**61 - 1."""
        self._wide_integers += 1
        what = f"more than {MAX_WIDE_INTEGERS} integers of 8 bytes or more in one pickle"
        self._check(self._wide_integers, MAX_WIDE_INTEGERS, what)

    def add_set(self) -> None:
        """Count a set."""
        self._sets += 1
        self._check(self._sets, MAX_SETS, f"more than {MAX_SETS} sets in one pickle")

    def add_keys(self, keys: list[Any]) -> None:
        """Count keys of a dict or members of a set; those that could be given equal hashes are limited."""
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
    """Prove that a walk through the value of a pickle of `size` bytes ends soon."""
    # By identity: how many values are inside, shared ones as often as they appear, and how deep.
    done: dict[int, tuple[int, int]] = {}
    entered: set[int] = set()
    stack = [root]
    while stack:
        value = stack[-1]
        parts = _parts(value)
        if id(value) not in entered:
            entered.add(id(value))
            for part in parts:
                if id(part) in entered and id(part) not in done:
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


_LONGEST = 1024  # bytes of an integer: Python does not print one of 1786
_UINT2, _UINT4, _INT4 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<i")


class Machine:
    """Executes one pickle.

    Afterwards `stored` has the places of all packed storage records (they are in no dict) by the opcode that pushes
    their key's name, and `files` the opcodes that push the names of their files. Packed write items are nowhere.
    `known` are globals to allow besides the harmless ones; without it, persistent ids are refused.
    """

    def __init__(
        self,
        data: bytes,
        where: str,
        trust_pickle: bool = False,
        known: Container[tuple[str, str]] | None = None,
    ) -> None:
        self.data, self.where, self._trust, self._known = data, where, trust_pickle, known
        self._limits = Limits(where, len(data), makes_tables=known is not None)
        self.stored: defaultdict[bytes, array[int]] = defaultdict(lambda: array("Q"))
        self.files: set[bytes] = set()
        self._at = 0
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._count = 0  # memo entries so far, packed ones included
        self._puts = 0  # those that a PUT made
        self._bases = array("Q")  # first memo entry of each packed record that made any
        self._places = array("Q")  # and where it begins
        self._names: set[Name] = set()

    def load(self) -> Any:
        """The pickle's value."""
        try:
            if not self._run(len(self.data)):
                raise EOFError("no STOP")
            if 0 < self._puts < self._count:  # one may replace what the other made, a packed record's too
                raise ValueError("memo entries both numbered and not, as no writer makes them")
            return self._stack.pop()
        except CkptError:
            raise
        except Exception as error:
            raise CorruptCheckpointError(
                f"{self.where}: not a readable pickle at byte {self._at} ({type(error).__name__}: {error}). "
                "It is truncated or damaged; copy the checkpoint again."
            ) from error

    def value(self, opcode: bytes) -> Any:
        """What a GET or a short text pushes, given as opcode and argument."""
        if opcode[0] == 0x8C:
            return opcode[2:].decode()
        return self.fetch(int.from_bytes(opcode[1:], "little"))

    def _run(self, end: int) -> bool:
        """Execute up to `end`; whether that ended with a STOP."""
        data, steps = self.data, _STEPS
        while self._at < end:
            code = data[self._at]
            self._at += 1
            if code == 0x2E:
                return True
            steps[code](self)
        return False

    def fetch(self, index: int) -> Any:
        """What memo entry `index` holds."""
        if index not in self._memo and self._bases:
            number = bisect_right(self._bases, index) - 1
            self._make_sizes(number)
            if index not in self._memo:
                self._execute_record(number)
        return self._memo[index]

    def first_memo(self, place: int) -> int:
        """The first memo entry that the packed record makes which begins at byte `place`."""
        return self._bases[bisect_left(self._places, place)]

    def _make_sizes(self, number: int) -> None:
        """Put the sizes that a packed chunk made into the memo, as executing it would; they are what is fetched."""
        found = CHUNK.match(self.data, self._places[number])
        if found is None:
            return
        # An empty tuple is not memoized, its arguments and the size are (+2); another tuple is memoized too (+3).
        at = self._bases[number] + 2  # the chunk and its attributes come first
        for name in ("offsets", "sizes"):
            made = found[f"{name}_tuple"]
            if made is None:
                at += 2 if found[f"{name}_empty"] else 0
            elif b"\x8a\x08" not in made and self.value(found[f"{name}_call"]) == SIZE:
                numbers = integers(made)
                self._memo[at], self._memo[at + 1], self._memo[at + 2] = numbers, (numbers,), numbers
                at += 3
            else:  # not a size, or with wide integers, which are counted as they are executed
                return

    def planned(self) -> Iterator[Any]:
        """Every packed write item, executed; its memo entries are taken out again, so that one is held at a time."""
        for number, place in enumerate(self._places):
            if found := PLANNED.match(self.data, place):
                yield self._execute_record(number)
                for index in range(self._bases[number], self._bases[number] + PLANNED.memos_of(found)):
                    self._memo.pop(index, None)

    def _execute_record(self, number: int) -> Any:
        """Put the memo entries that a packed record made into the memo; what it made last."""
        place = self._places[number]
        found = next(filter(None, (kind.match(self.data, place) for kind in (CHUNK, STORED, PLANNED))))
        suspended = self._at, self._count, self._stack, self._outer
        self._at, self._count, self._stack, self._outer = place, self._bases[number], [], []
        self._run(found.end())
        made = self._stack[-1]
        self._at, self._count, self._stack, self._outer = suspended
        return made

    def _pack_records(self) -> None:
        """Step over the records that begin here, inside of a list or dict that is being filled."""
        container = type(self._outer[-1][-1]) if self._outer and self._outer[-1] else None
        data, at = self.data, self._at
        if container is list:
            while found := CHUNK.match(data, at):
                self._stack.append(Record(at))
                at = self._packed(CHUNK, found)
            while found := PLANNED.match(data, at):
                at = self._packed(PLANNED, found)
        elif container is Pairs:
            while found := STORED.match(data, at):
                self.stored[found["fqn"] or found["fqn_text"]].append(at)
                self.files.add(found["path"] or found["path_text"])
                at = self._packed(STORED, found)
        self._at = at

    def _packed(self, kind: Kind, found: re.Match[bytes]) -> int:
        """Note which memo entries a record makes; where the next one begins."""
        self._bases.append(self._count)
        self._places.append(found.start())
        self._count += kind.memos_of(found)
        return found.end()

    def _take(self, count: int) -> bytes:
        at, self._at = self._at, self._at + count
        if self._at > len(self.data):
            raise ValueError(f"{count} bytes are needed")
        return self.data[at : self._at]

    def _protocol(self) -> None:
        if self._take(1)[0] > 5:
            raise ValueError("a pickle protocol after 5")

    def _frame(self) -> None:
        length = int.from_bytes(self._take(8), "little")
        if length > len(self.data) - self._at:
            raise ValueError(f"a frame of {length} bytes")

    def _drop(self, value: object) -> None:
        """Do nothing with what was taken from the stack."""

    def _counted(self, width: int) -> bytes:
        return self._take(int.from_bytes(self._take(width), "little"))

    def _line(self) -> str:
        end = self.data.index(b"\n", self._at)
        line = self.data[self._at : end].decode()
        self._at = end + 1
        return line

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _text(self, width: int) -> None:
        self._stack.append(self._counted(width).decode("utf-8", "surrogatepass"))

    def _byte(self) -> None:
        self._stack.append(self.data[self._at])
        self._at += 1

    def _integer(self, form: struct.Struct) -> None:
        self._stack += form.unpack_from(self.data, self._at)
        self._at += form.size

    def _get_byte(self) -> None:
        index = self.data[self._at]
        self._at += 1
        self._stack.append(self._memo[index] if index in self._memo else self.fetch(index))

    def _get(self) -> None:
        (index,) = _UINT4.unpack_from(self.data, self._at)
        self._at += 4
        self._stack.append(self._memo[index] if index in self._memo else self.fetch(index))

    def _memoize(self) -> None:
        self._memo[self._count] = self._stack[-1]
        self._count += 1

    def _put(self, index: int) -> None:
        if index > len(self.data):
            raise HostileCheckpointError(
                f"{self.where}: byte {self._at} of the pickle stores memo entry {index}, but the pickle has only "
                f"{len(self.data)} bytes. It is damaged or hostile."
            )
        if index not in self._memo:
            self._count += 1
            self._puts += 1
        self._memo[index] = self._stack[-1]

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []
        self._pack_records()

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _tuple(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count:
            raise IndexError("the stack is too short")
        del self._stack[-count:]
        self._push_tuple(items)

    def _push_tuple(self, items: tuple[Any, ...]) -> None:
        self._limits.add_tuple(items)
        self._stack.append(items)

    def _set(self, members: list[Any]) -> None:
        self._limits.add_set()
        self._limits.add_keys(members)
        self._stack.append(Members(members))

    def _long(self, width: int) -> None:
        encoded = self._counted(width)
        if len(encoded) > _LONGEST:
            raise HostileCheckpointError(
                f"{self.where}: an integer of {len(encoded)} bytes. It is damaged or hostile."
            )
        if len(encoded) >= 8:
            self._limits.add_wide_integer()
        self._stack.append(int.from_bytes(encoded, "little", signed=True))

    def _persistent(self) -> None:
        if self._known is None:
            raise ValueError("a persistent id where no storage can be")
        self._stack[-1] = Object(Name("", ""), ())

    def _extend(self, kind: type[list[Any]], items: list[Any]) -> None:
        """Fill the container of this kind on top of the stack: append, add, or put keys and values in turn."""
        target = self._stack[-1]
        if type(target) is kind:
            if kind is not list:
                self._limits.add_keys(items[::2] if kind is Pairs else items)
            target.extend(items)
        elif type(target) is Object and kind is not Members:  # of a list or dict class
            target.items = target.items or []
            target.items += items
        else:
            raise TypeError(f"a {type(target).__name__} is filled like a {kind.__name__}")
        if kind is Pairs and len(items) % 2:
            raise ValueError("a key without a value")

    def _global(self, module: str, name: str) -> None:
        found = Name(module, name)
        if found not in self._names:
            if not self._trust and found not in (self._known or ()):
                check_global(module, name, self.where)
            self._names.add(found)
            check_global_count(len(self._names), self.where)
        self._stack.append(found)

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("a global's name is not text")
        self._global(module, name)

    def _call(self) -> None:
        """NEWOBJ and REDUCE: an object of the class, but plain values of the few that stand for one."""
        args, kind = self._stack.pop(), self._stack.pop()
        if type(kind) is not Name or type(args) is not tuple:
            raise TypeError("what is called is not a global")
        if kind == SIZE:
            self._push_tuple(tuple(self._limits.copied(args)))
        elif kind == ("collections", "OrderedDict"):
            if args:
                raise TypeError("an OrderedDict is filled after it is made")
            self._stack.append(Pairs())
        elif self._known is not None and kind in COPIES:
            copied = self._limits.copied(args)
            if kind.name in ("set", "frozenset"):
                self._set(copied)
            else:
                self._stack.append(copied)
        else:
            self._stack.append(Object(kind, args))

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is Object:
            target.state = state
        elif (
            type(target) is not Pairs
            or type(state) is not Pairs
            or not all(type(name) is str and name.startswith("_") for name in state[::2])
        ):  # an OrderedDict may have attributes (`_metadata`), but none of its methods replaced
            raise TypeError(f"{type(target).__name__} takes no such state")
        self._pack_records()


def _pushing(value: Any) -> Callable[[Machine], None]:
    return lambda machine: machine._stack.append(value)


def _refuse(machine: Machine) -> None:
    code = machine.data[machine._at - 1]
    raise ValueError(f"opcode {code:#04x} is not one that checkpoints have")


def _steps() -> list[Callable[[Machine], None]]:
    """What each opcode does."""
    table: dict[bytes, Callable[[Machine], None]] = {
        b"\x80": Machine._protocol,
        b"\x95": Machine._frame,
        b"(": Machine._mark,
        b"0": lambda m: m._drop(m._stack.pop()),
        b"1": lambda m: m._drop(m._pop_mark()),
        b"2": lambda m: m._push(m._stack[-1]),
        b"N": _pushing(None),
        b"\x88": _pushing(True),
        b"\x89": _pushing(False),
        b"K": Machine._byte,
        b"M": lambda m: m._integer(_UINT2),
        b"J": lambda m: m._integer(_INT4),
        b"\x8a": lambda m: m._long(1),
        b"\x8b": lambda m: m._long(4),
        b"G": lambda m: m._push(struct.unpack(">d", m._take(8))[0]),
        b"\x8c": lambda m: m._text(1),
        b"X": lambda m: m._text(4),
        b"\x8d": lambda m: m._text(8),
        b"C": lambda m: m._push(m._counted(1)),
        b"B": lambda m: m._push(m._counted(4)),
        b"\x8e": lambda m: m._push(m._counted(8)),
        b"\x96": lambda m: m._push(m._counted(8)),  # BYTEARRAY8
        b")": _pushing(()),
        b"\x85": lambda m: m._tuple(1),
        b"\x86": lambda m: m._tuple(2),
        b"\x87": lambda m: m._tuple(3),
        b"t": lambda m: m._push_tuple(tuple(m._pop_mark())),
        b"]": lambda m: m._stack.append([]),
        b"\x8f": lambda m: m._set([]),  # EMPTY_SET
        b"}": lambda m: m._stack.append(Pairs()),
        b"a": lambda m: m._extend(list, [m._stack.pop()]),
        b"s": lambda m: m._extend(Pairs, [m._stack.pop(-2), m._stack.pop()]),
        b"e": lambda m: m._extend(list, m._pop_mark()),
        b"u": lambda m: m._extend(Pairs, m._pop_mark()),
        b"\x90": lambda m: m._extend(Members, m._pop_mark()),  # ADDITEMS
        b"\x91": lambda m: m._set(m._pop_mark()),  # FROZENSET
        b"Q": Machine._persistent,
        b"h": Machine._get_byte,
        b"j": Machine._get,
        b"\x94": Machine._memoize,
        b"q": lambda m: m._put(m._take(1)[0]),
        b"r": lambda m: m._put(int.from_bytes(m._take(4), "little")),
        b"c": lambda m: m._global(m._line(), m._line()),
        b"\x93": Machine._stack_global,
        b"R": Machine._call,
        b"\x81": Machine._call,
        b"b": Machine._build,
    }
    return [table.get(bytes([code]), _refuse) for code in range(256)]


_STEPS = _steps()
