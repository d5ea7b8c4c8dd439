"""Are two checkpoints the same: tensor by tensor through views, value by value, in bounded memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import numpy as np

from ckpt_tools.execute.read_box import BoxReader
from ckpt_tools.execute.source_reader import index_of
from ckpt_tools.execute.spread import Tick, spread
from ckpt_tools.formats.container import load_object
from ckpt_tools.formats.files import Files
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.casts import Array, raw_dtype
from ckpt_tools.model.catalog import Catalog, ObjectEntry
from ckpt_tools.model.choices import DiffBy
from ckpt_tools.model.dtypes import CASTABLE, itemsize
from ckpt_tools.model.roles import Role
from ckpt_tools.model.target import InlineTensor, TargetTensor
from ckpt_tools.plan.byte_runs import row_major_tiles
from ckpt_tools.verify.compare import Comparison, Extremes, Tolerance
from ckpt_tools.verify.diff_values import ValueDiff, diff_values, text_of

TILE_ELEMS = 1 << 19  # about 40 MiB of temporary numbers a thread where tiles differ


@dataclass(frozen=True, slots=True)
class Side:
    """One checkpoint as it is compared: what stands under each name."""

    files: Files
    catalog: Catalog
    tensors: Mapping[str, TargetTensor | InlineTensor]
    objects: Mapping[str, object]  # values, or `ObjectEntry`s still to be read
    trust_pickle: bool = False

    def value(self, name: str) -> object:
        """The Python value under a name."""
        value = self.objects[name]
        return (
            load_object(self.files, value.item, self.trust_pickle)
            if isinstance(value, ObjectEntry)
            else value
        )


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """What to compare (globs on names; `args.tp_size` for a field of `args`), and what counts as equal."""

    tolerance: Tolerance = field(default_factory=Tolerance)
    keys: tuple[str, ...] = ()  # () for all
    ignore: tuple[str, ...] = ()
    threads: int = 2
    workers: int | None = None  # processes forked on this machine; None: as many as help

    def wants(self, name: str) -> bool:
        chosen = not self.keys or any(fnmatchcase(name, glob) for glob in self.keys)
        return chosen and not any(fnmatchcase(name, glob) for glob in self.ignore)


DiffKind: TypeAlias = Literal["equal", "values", "dtype", "shape", "only in A", "only in B"]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor of two checkpoints, and how they differ."""

    name: str
    role: Role
    kind: DiffKind
    a: tuple[str, tuple[int, ...]] | None  # element type and shape
    b: tuple[str, tuple[int, ...]] | None
    elements: int = 0  # compared
    found: Extremes = field(default_factory=Extremes)


@dataclass(frozen=True, slots=True)
class DiffReport:
    """Everything compared, in the order of names."""

    a: str
    b: str
    by: DiffBy  # what names are: stored keys, or parameters of the running model
    tolerance: Tolerance
    tensors: tuple[TensorDiff, ...]
    values: tuple[ValueDiff, ...]
    values_compared: int
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        return not self.values and all(t.kind == "equal" for t in self.tensors)


def diff_tensors(
    a: Side, b: Side, options: DiffOptions, tick: Tick = lambda _: None
) -> tuple[TensorDiff, ...]:
    """Every chosen tensor of either side; `tick` is told the bytes read.

    Raises:
        CkptError: a tensor cannot be read.
    """
    names = [name for name in dict.fromkeys((*a.tensors, *b.tensors)) if options.wants(name)]
    readers = threading.local()
    opened: list[BoxReader] = []

    def compare(name: str, told: Tick) -> TensorDiff:
        if not hasattr(readers, "pair"):
            readers.pair = BoxReader(a.files, a.catalog), BoxReader(b.files, b.catalog)
            opened.extend(readers.pair)
        return _diff_tensor(name, (a, b), readers.pair, options.tolerance, told)

    try:
        return tuple(
            spread(
                compare,
                names,
                nbytes=_bytes_of(names, a, b),
                threads=options.threads,
                workers=options.workers,
                tick=tick,
            )
        )
    finally:
        for reader in opened:
            reader.close()


def _bytes_of(names: Sequence[str], *sides: Side) -> int:
    """Of the tensors `names`, on both sides."""
    found = (side.tensors[name] for side in sides for name in names if name in side.tensors)
    return sum(math.prod(t.shape) * itemsize(t.dtype) for t in found)


def _diff_tensor(
    name: str,
    sides: tuple[Side, Side],
    readers: tuple[BoxReader, BoxReader],
    tolerance: Tolerance,
    tick: Tick,
) -> TensorDiff:
    a, b = (side.tensors.get(name) for side in sides)
    forms = [None if t is None else (t.dtype, t.shape) for t in (a, b)]
    role: Role = next((t.role for t in (a, b) if isinstance(t, TargetTensor)), "other")
    if a is None or b is None:
        kind: DiffKind = "only in B" if a is None else "only in A"
        return TensorDiff(name, role, kind, forms[0], forms[1])
    if a.shape != b.shape:
        return TensorDiff(name, role, "shape", forms[0], forms[1])
    if a.dtype != b.dtype and not {a.dtype, b.dtype} <= CASTABLE:
        return TensorDiff(name, role, "dtype", forms[0], forms[1])
    comparison = Comparison((a.dtype, b.dtype), tolerance)
    read_a, read_b = _read(readers[0], a), _read(readers[1], b)
    for tile in row_major_tiles(full_box(a.shape), TILE_ELEMS):
        if tile.is_empty:
            continue
        parts = read_a(tile), read_b(tile)
        comparison.add(*parts, tile.start)
        tick(parts[0].nbytes + parts[1].nbytes)
    kind = "values" if comparison.found.different else "equal"
    if a.dtype != b.dtype and tolerance.is_bitwise:
        kind = "dtype"
    return TensorDiff(name, role, kind, forms[0], forms[1], math.prod(a.shape), comparison.found)


def _read(reader: BoxReader, tensor: TargetTensor | InlineTensor) -> Callable[[Box], Array]:
    """Raw bits of any box of the tensor."""
    raw = raw_dtype(tensor.dtype)
    if isinstance(tensor, TargetTensor):
        read = reader.tensor(tensor)
        return lambda box: read(box).view(raw)
    whole: Array = np.frombuffer(tensor.data, raw).reshape(tensor.shape)
    return lambda box: whole[index_of(box)]


def diff_objects(a: Side, b: Side, options: DiffOptions) -> tuple[tuple[ValueDiff, ...], int]:
    """What differs between the objects of both sides, and how many were compared."""
    found: list[ValueDiff] = []
    compared = 0
    for name in dict.fromkeys((*a.objects, *b.objects)):
        if not _may_want(name, options):
            continue
        compared += 1
        if name not in a.objects or name not in b.objects:
            value = text_of((a if name in a.objects else b).value(name))
            difference = ValueDiff(name, *((value, None) if name in a.objects else (None, value)))
            found += [difference] if options.wants(name) else []
            continue
        differences = diff_values(name, a.value(name), b.value(name), options.tolerance)
        found += [d for d in differences if options.wants(d.name)]
    return tuple(found), compared


def _may_want(name: str, options: DiffOptions) -> bool:
    """Whether the object, or a field of it that a glob names with dots, is to be compared."""
    inner = any(glob.startswith(f"{name}.") for glob in options.keys)
    return inner or options.wants(name)


@dataclass(slots=True)
class KindSummary:
    """Tensors of one role: how many are equal, differ, or stand on one side only; the largest differences."""

    role: Role
    tensors: int = 0
    equal: int = 0
    different: int = 0
    only_a: int = 0
    only_b: int = 0
    elements: int = 0
    different_elements: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int = 0
    nan_mismatches: int = 0


def summarize(tensors: Sequence[TensorDiff]) -> list[KindSummary]:
    """One summary a role, in order of first use."""
    kinds: dict[str, KindSummary] = {}
    for tensor in tensors:
        kind = kinds.setdefault(tensor.role, KindSummary(tensor.role))
        kind.tensors += 1
        kind.equal += tensor.kind == "equal"
        kind.only_a += tensor.kind == "only in A"
        kind.only_b += tensor.kind == "only in B"
        kind.different += tensor.kind in ("values", "dtype", "shape")
        kind.elements += tensor.elements
        found = tensor.found
        kind.different_elements += found.different
        kind.max_abs = max(kind.max_abs, found.max_abs)
        kind.max_rel = max(kind.max_rel, found.max_rel)
        kind.max_ulp = max(kind.max_ulp, found.max_ulp or 0)
        kind.nan_mismatches += found.nan_mismatches
    return list(kinds.values())
