"""Untrusted pickles, read without importing or running anything.

Every global a pickle names is looked up in a table of our own values. What the table does not know becomes
an inert `StandIn` when it is one of the classes that Megatron and torch are known to store (argparse
namespaces, Megatron's enums and configs, numpy arrays, ...), and is refused by name otherwise. A stand-in
keeps the original module and name, the constructor arguments and the state, so `pickling` can write it back.

`machine` dry-runs the pickle first: what could make the C unpickler grow, recurse or search without end is
refused there. A pickle may BUILD on anything it can name, so nothing it can reach has attributes to set.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, cast

from ckpt_tools.errors import CkptError, CorruptCheckpointError
from ckpt_tools.formats.pickle.machine import Machine, brief, check_global, check_global_count, check_tree
from ckpt_tools.model.dtypes import ITEMSIZE


class Sealed(type):
    """Metaclass of classes that a pickle can name: their attributes cannot be set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__} cannot be changed by a pickle")

    def __repr__(cls) -> str:
        names = vars(cls)  # of one of the classes that stand in for another
        return f"{names['module']}.{names['qualname']}" if "module" in names else super().__repr__()


class StandIn(metaclass=Sealed):
    """An object of a class (or the result of a function) that was not imported.

    `args` and `kwargs` are what it was made from, `called` whether by calling it (REDUCE) or by `__new__`
    alone (NEWOBJ); `state` is what BUILD gave, `items` what was appended, `pairs` what was set by key.
    """

    __slots__ = ("args", "called", "items", "kwargs", "pairs", "state")
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    called: bool
    state: Any
    items: list[Any]
    pairs: list[tuple[Any, Any]]
    module: ClassVar[str]
    qualname: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
        self = object.__new__(cls)
        self.args, self.kwargs, self.called, self.state = args, kwargs, False, None
        self.items, self.pairs = [], []
        return self

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.called = True

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, StandIn):
            return NotImplemented
        mine = (self.args, self.kwargs, self.state, self.items, self.pairs)
        return mine == (other.args, other.kwargs, other.state, other.items, other.pairs)

    def __hash__(self) -> int:
        """By class and plain arguments (an enum member); instances without such arguments are not hashable."""
        if not self.args or not all(isinstance(arg, str | int) for arg in self.args):
            raise TypeError(f"{self.module}.{self.qualname} as a key")
        return hash((self.module, self.qualname, *self.args))

    def __repr__(self) -> str:
        if text := _numpy_text(self):
            return text
        inside = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.attributes.items()]
        return f"{self.module}.{self.qualname}({', '.join(inside)})"

    @property
    def attributes(self) -> dict[str, Any]:
        """What the instance's `__dict__` and slots held; empty when its state has another form."""
        parts = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        return {str(k): v for part in parts if isinstance(part, dict) for k, v in part.items()}


def _numpy_text(value: StandIn) -> str:
    """An array or a scalar of numpy by its type and shape; empty for all else."""
    if value.module not in ("numpy.core.multiarray", "numpy._core.multiarray"):
        return ""
    match value.qualname, value.args, value.state:
        case "scalar", (StandIn(args=(str(dtype), *_)), bytes(data)), _:
            return f"numpy scalar {dtype} 0x{data[:16].hex()}"
        case "_reconstruct", _, (_, tuple(shape), StandIn(args=(str(dtype), *_)), *_):
            return f"numpy array {dtype} {list(shape)}"
    return ""


_CLASSES: dict[tuple[str, str], type[StandIn]] = {}


def stand_in(module: str, qualname: str) -> type[StandIn]:
    """The one stand-in class of a global; equal globals give the same class."""
    key = (module, qualname)
    if key not in _CLASSES:
        body = {"__slots__": (), "module": module, "qualname": qualname}
        _CLASSES[key] = cast("type[StandIn]", Sealed(qualname, (StandIn,), body))
    return _CLASSES[key]


class TorchDtype(NamedTuple):
    """A `torch.dtype`, by name."""

    name: str


class Function(tuple[Callable[..., Any]]):
    """One of our functions in an immutable wrapper, so that BUILD cannot give it attributes."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        return self[0](*args)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"_codecs.encode to {brief(encoding)}")
    return text.encode("latin1")


def _bytes(data: bytes = b"") -> bytes:
    return bytes(memoryview(data))  # a memoryview, so that a number cannot ask for that many zeros


def _bytearray(data: bytes | str = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(_encode(data, encoding) if isinstance(data, str) else memoryview(data))


def _size(values: tuple[int, ...] = ()) -> tuple[int, ...]:
    if not all(type(n) is int for n in values):
        raise ValueError("a torch.Size of other things than numbers")
    return tuple(values)


_PLAIN: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): Function((_encode,)),
    ("torch", "Size"): Function((_size,)),
    ("torch.serialization", "_get_layout"): stand_in("torch.serialization", "_get_layout"),
    ("torch", "device"): stand_in("torch", "device"),
    **{("torch", name): TorchDtype(name) for name in ITEMSIZE},
    **{
        (module, name): value
        for module in ("builtins", "__builtin__")
        for name, value in {
            "set": set,
            "frozenset": frozenset,
            "complex": complex,
            "slice": slice,
            "bytes": Function((_bytes,)),
            "bytearray": Function((_bytearray,)),
        }.items()
    },
}

Globals = Mapping[tuple[str, str], object]


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, source: _Source, known: Globals, storage: Callable[[Any], Any] | None, trust: bool
    ) -> None:
        super().__init__(source)
        self._known, self._storage, self._trust = known, storage, trust
        self._names: set[tuple[str, str]] = set()
        self._where = source.where

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        self._names.add(key)
        check_global_count(len(self._names), self._where)
        for table in (self._known, _PLAIN):
            if key in table:
                return table[key]
        if not self._trust:
            check_global(module, name, self._where)
        return stand_in(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise CorruptCheckpointError(f"{self._where}: the pickle refers to a storage it cannot have.")
        return self._storage(pid)


class _Source:
    """The pickle as the C unpickler's file: a count larger than the rest is refused before it costs memory."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data, self._at, self.where = memoryview(data), 0, where

    def peek(self, count: int) -> bytes:
        return bytes(self._data[self._at : self._at + count])

    def read(self, count: int) -> bytes:
        if not 0 <= count <= len(self._data) - self._at:
            raise CorruptCheckpointError(
                f"{self.where}: the pickle asks for {count} bytes at byte {self._at} of {len(self._data)}. "
                "It is truncated or damaged; copy the checkpoint again."
            )
        self._at += count
        return bytes(self._data[self._at - count : self._at])

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = self.read(len(view))
        return len(view)

    def readline(self) -> bytes:
        rest = bytes(self._data[self._at : self._at + 4096])  # no line of a pickle we accept is longer
        return self.read(rest.find(b"\n") + 1 or len(rest))


def load_pickle(
    data: bytes,
    where: str,
    known: Globals,
    storage: Callable[[Any], Any] | None = None,
    trust_pickle: bool = False,
) -> Any:
    """The value of a pickle, with stand-ins for everything that is not plain data.

    `where` names the pickle in errors; `known` gives our own value for a global and wins over everything;
    `storage` turns the persistent ids of torch archives into values.
    """
    check_tree(Machine(data, where, trust_pickle, known).load(), len(data), where)
    try:
        return _Unpickler(_Source(data, where), known, storage, trust_pickle).load()
    except CkptError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{where}: not a readable pickle ({type(error).__name__}: {error}). It is truncated or damaged; "
            "copy the checkpoint again."
        ) from error
