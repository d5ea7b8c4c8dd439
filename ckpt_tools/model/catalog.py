"""What a checkpoint holds: tensors, their chunks, and objects, as plain data.

A view (`Value`) moves bytes; a kernel (`Made`) computes a tensor. Its entry is in the catalog like that of a
stored one, so views show it like any other.

A catalog says where every item's bytes lie but not what its keys mean. Items are addressed with their
container (the `torch.save` zip around a payload); `item_reader` finds the payload inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tools.close_names import refuse_unmatched
from ckpt_tools.errors import MappingError
from ckpt_tools.model.box import Box
from ckpt_tools.model.dtypes import Form, itemsize
from ckpt_tools.model.many import many
from ckpt_tools.model.views import Insert, Narrow, Place, Source, Step, view_shape

if TYPE_CHECKING:
    from ckpt_tools.model.kernels.kernel import Kernel


MAX_DIMENSIONS = 64  # of a tensor; torch and numpy have the same limit


class Item(NamedTuple):
    """One stored item: `length` bytes at `offset` of `file`, its container included."""

    file: str  # relative to the catalog's root, proven to stay inside it
    offset: int  # bytes from the beginning of the file
    length: int  # bytes
    bare: bool = False  # the payload alone, without a container around it (safetensors)
    crc32: int | None = None  # of a bare payload, if something else in the file states it


class Chunk(NamedTuple):
    """One stored piece of a tensor: `box` in the tensor's global coordinates."""

    box: Box
    item: Item


@many(frozen=True, slots=True)
class Value:
    """A tensor tiled by what its sources show; a source of another element type is cast.

    Elements that no source shows are zeros where `zero_filled` allows that.
    """

    dtype: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    zero_filled: bool = False

    @property
    def form(self) -> Form:
        return Form(self.dtype, self.shape)

    def seen(self, *steps: Step) -> Value:
        """What a view shows of it."""
        sources = tuple([Source(s.key, (*s.view, *steps)) for s in self.sources])
        return Value(self.dtype, view_shape(steps, self.shape), sources, self.zero_filled)

    def rows(self, start: int, count: int) -> Value:
        """`count` elements along the first axis, from `start` on."""
        return self if (start, count) == (0, self.shape[0]) else self.seen(Narrow(0, start, count))


def concat(name: str, parts: Sequence[Value], rows: int | None = None) -> Value:
    """The parts of `name` one after another along the first axis; zeros behind them where `rows` are more."""
    if len(parts) == 1 and rows in (None, *parts[0].shape[:1]):
        return parts[0]
    whole = sum([part.shape[0] for part in parts])
    shape = (whole if rows is None else rows, *parts[0].shape[1:])
    sources, at = list[Source](), 0
    for part in parts:
        sources += part.seen(Place((at, *(0,) * (len(shape) - 1)), shape)).sources
        at += part.shape[0]
    return Value(
        _one_dtype(name, parts), shape, tuple(sources), at < shape[0] or any(p.zero_filled for p in parts)
    )


def stack(name: str, parts: Mapping[tuple[int, ...], Value], lead: tuple[int, ...]) -> Value:
    """The parts of `name` by their index on new leading axes of lengths `lead`."""
    values = list(parts.values())
    shape = (*lead, *values[0].shape)
    inserts, rest = [Insert(0)] * len(lead), (0,) * len(values[0].shape)
    sources = list[Source]()
    for index, part in parts.items():
        sources += part.seen(*inserts, Place((*index, *rest), shape)).sources if lead else part.sources
    return Value(_one_dtype(name, values), shape, tuple(sources), any(p.zero_filled for p in values))


def _one_dtype(name: str, parts: Sequence[Value]) -> str:
    dtypes = sorted({part.dtype for part in parts})
    if len(dtypes) > 1:
        raise MappingError(f"{name}: its parts have different types {dtypes}")
    return dtypes[0]


@dataclass(frozen=True, slots=True)
class Made:
    """How a tensor is computed that is not stored."""

    kernel: Kernel
    inputs: tuple[Value, ...]

    @property
    def form(self) -> Form:
        """Element type and shape of the result."""
        return self.kernel.form([value.form for value in self.inputs])


@many(frozen=True, slots=True)
class TensorEntry:
    """A tensor of global `shape` (elements per dimension): stored, tiled by its chunks, or `made` by a kernel.

    No file holds a made tensor; readers put it into a catalog with the tensors that it is made of.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]
    made: Made | None = None

    @property
    def value(self) -> Value:
        """All of it."""
        return Value(self.dtype, self.shape, (Source(self.key),))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)


def made_entry(key: str, made: Made) -> TensorEntry:
    dtype, shape = made.form
    return TensorEntry(key, dtype, shape, (), made)


@many(frozen=True, slots=True)
class ObjectEntry:
    key: str
    item: Item


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything `.metadata` says, in our own types.

    `tensors` and `objects` keep the stored order. `original_shapes` maps the keys of flattened optimizer
    states (Megatron core 0.8-0.15) to the shape they had; it is None when the file has no `mcore_data`.
    """

    root: str
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, ObjectEntry]
    planner_paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    original_shapes: Mapping[str, tuple[int, ...]] | None = None
    metadata_class: str = "torch.distributed.checkpoint.metadata.Metadata"
    metadata_version: str | None = None
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was worked out from this catalog, so that it is done once; one made by `replace` starts empty."""

    def stored_keys(self, key: str) -> tuple[str, ...]:
        """The key itself, or those of the stored tensors that a made one is computed from."""
        entry = self.tensors.get(key)
        if entry is None or entry.made is None:
            return (key,)
        sources = (source for value in entry.made.inputs for source in value.sources)
        return tuple(stored for source in sources for stored in self.stored_keys(source.key))


def leave_out(catalog: Catalog, globs: Sequence[str]) -> tuple[Catalog, tuple[str, ...]]:
    """The catalog without the tensors and objects with a matching key; a line for each."""
    if not globs:
        return catalog, ()
    keys = (*catalog.tensors, *catalog.objects)
    refuse_unmatched("--ignore-keys", globs, keys)
    gone = {key for key in keys if any(fnmatchcase(key, glob) for glob in globs)}
    kept = replace(
        catalog,
        tensors={key: entry for key, entry in catalog.tensors.items() if key not in gone},
        objects={key: entry for key, entry in catalog.objects.items() if key not in gone},
    )
    return kept, tuple(f"{key}: --ignore-keys" for key in keys if key in gone)
