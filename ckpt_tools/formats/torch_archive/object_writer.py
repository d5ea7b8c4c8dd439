r"""Python values as `torch.save` archives, without torch: the inverse of `item_reader.load_object`.

Stand-ins go out under the module and name they came in with, `StoredTensor`s as real tensors with their storage
records, so stock `torch.load` gives back what the writer of the source had. The same value gives the same bytes.

Opcodes, here and in `metadata_write` and `tensor_template` (`pickletools.dis` shows any pickle this way)::

    X <u32> text   push a str (BINUNICODE)        K <u8>  M <u16>  J <i32>   push an int
    \x8c <u8> text  the same, short               \x8a <u8> bytes           push a longer int (LONG1)
    c module \n name \n   push a global            )  \x85 \x86 \x87          push a tuple of the last 0, 1, 2, 3
    (   mark          t   a tuple from the mark   }  ]   push an empty dict, list
    u   dict entries from the mark                e   list elements from the mark
    s   one dict entry                            R   call: function, arguments
    \x81  new object: class, arguments            b   set its state
    q <u8>  put into the memo under a number      \x94  the same, under the next number (protocol 4)
    h <u8>  j <u32>   push from the memo          N None   \x88 \x89 True, False
    Q   the top names a persistent object         0   drop the top   . end
"""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ckpt_tools.formats.pickle.unpickle import StandIn, TorchDtype, stand_in
from ckpt_tools.formats.torch_archive.item_reader import STORAGE_CLASSES, StoredTensor
from ckpt_tools.formats.torch_archive.zip_archive import ALIGNMENT, write_archive
from ckpt_tools.model.box import row_major_strides
from ckpt_tools.model.dtypes import itemsize


def text_ops(text: str) -> bytes:
    """Pushes a str."""
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def int_ops(value: int) -> bytes:
    """Pushes a non-negative int, in the shortest form."""
    if value < 1 << 8:
        return b"K" + bytes([value])
    if value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<I", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(data)]) + data


def int_tuple_ops(numbers: Sequence[int]) -> bytes:
    """Pushes a tuple of non-negative ints."""
    body = b"".join(map(int_ops, numbers))
    if len(numbers) <= 3:
        return body + (b")", b"\x85", b"\x86", b"\x87")[len(numbers)]
    return b"(" + body + b"t"


PROTOCOL = 2  # what torch.save uses


def dump_archive(value: object) -> bytes:
    """The bytes that `torch.save(value)` would write: one archive, ready to be a file or a BYTES item."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    records = [
        ("data.pkl", stream.getvalue()),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGNMENT).encode()),
        ("byteorder", b"little"),
        *((f"data/{i}", tensor.data) for i, tensor in enumerate(pickler.tensors)),
        ("version", b"3\n"),
    ]
    digest = hashlib.sha256(b"".join(name.encode() + data for name, data in records)).digest()
    number = int.from_bytes(digest[:16], "little") % 10**40
    records.append((".data/serialization_id", b"%040d" % number))
    return write_archive([(f"archive/{name}", data) for name, data in records])


class _StorageRef(NamedTuple):
    """The record `data/<key>`, written as a persistent id."""

    key: int
    type_name: tuple[str, str]  # module and name of the storage class
    numel: int


_WRITABLE_MODULES = frozenset(("builtins", "collections", "_codecs"))


def __newobj__(cls: type, *args: object) -> object:  # noqa: N807  pickle asks for this name
    """`cls.__new__(cls, *args)`; pickle writes it as the NEWOBJ opcode."""
    return cls.__new__(cls, *args)


class _Pickler(pickle._Pickler):  # the C pickler imports every global it writes
    write: Callable[[bytes], object]
    memoize: Callable[[object], None]

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, PROTOCOL)
        self.tensors: list[StoredTensor] = []

    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        if type(obj) is not _StorageRef:
            return None
        return ("storage", stand_in(*obj.type_name), str(obj.key), "cpu", obj.numel)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, StandIn):
            if obj.kwargs:
                raise TypeError(f"{obj!r}: protocol {PROTOCOL} has no keyword arguments")
            cls = type(obj)
            made = (cls, obj.args) if obj.called else (__newobj__, (cls, *obj.args))
            return (*made, obj.state, iter(obj.items), iter(obj.pairs))
        if type(obj) is TorchDtype:
            return obj.name
        if type(obj) is StoredTensor:
            return self._reduce_tensor(obj)
        return NotImplemented

    def _reduce_tensor(self, tensor: StoredTensor) -> tuple[object, tuple[object, ...]]:
        """The call by which torch makes the tensor again; types without a storage class go by `v3`."""
        name = STORAGE_CLASSES.get(tensor.dtype)
        nbytes = len(tensor.data)
        kind = ("torch", name) if name else ("torch.storage", "UntypedStorage")
        numel = nbytes // itemsize(tensor.dtype) if name else nbytes
        storage = _StorageRef(len(self.tensors), kind, numel)
        self.tensors.append(tensor)
        args: tuple[object, ...] = (
            storage,
            0,
            tensor.shape,
            row_major_strides(tensor.shape),
            False,
            OrderedDict(),
        )
        if name:
            return stand_in("torch._utils", "_rebuild_tensor_v2"), args
        return stand_in("torch._utils", "_rebuild_tensor_v3"), (*args, TorchDtype(tensor.dtype))

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, TorchDtype):
            module, qualname = "torch", obj.name
        elif isinstance(obj, type) and issubclass(obj, StandIn):
            module, qualname = obj.module, obj.qualname
        elif getattr(obj, "__module__", None) in _WRITABLE_MODULES:
            super().save_global(obj, name)  # type: ignore[misc]  # typeshed omits most of this class
            return
        else:
            raise TypeError(f"{obj!r} is neither plain data nor read from a checkpoint")
        self.write(pickle.GLOBAL + f"{module}\n{qualname}\n".encode())
        self.memoize(obj)
