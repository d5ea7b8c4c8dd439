"""What values are like: NaNs and infinities, counted from raw bits of any element type; sums, extremes, changes.

`verify --content`, `print-tensor --stats` and `stats` count here and nowhere else. A long tensor is split in parts,
and their sums are joined in order: the result does not depend on how many threads and processes there are. Memory
is a tile a thread and a handful of numbers a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.processes.team import Reads, Tick, results_of, start_jobs
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.dtypes import CASTABLE, itemsize
from ckpt_tools.model.kernels.casts import Array, numpy_dtype, raw_dtype
from ckpt_tools.model.kernels.kernel import MINIFLOATS, minifloat_values
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.plan.byte_runs import row_major_tiles
from ckpt_tools.verify.compare.arrays import to_float64

# Bits of the exponent and of the mantissa: a NaN has all of the first and some of the second, an infinity none.
_IEEE = {
    "float64": (0x7FF0000000000000, 0x000FFFFFFFFFFFFF),
    "float32": (0x7F800000, 0x007FFFFF),
    "float16": (0x7C00, 0x03FF),
    "bfloat16": (0x7F80, 0x007F),
    "float8_e5m2": (0x7C, 0x03),
}
# Types without infinities: which bits count, and the one pattern that is NaN (the FP8 formats of OCP and ONNX).
_ONE_NAN = {
    "float8_e4m3fn": (0x7F, 0x7F),
    "float8_e4m3fnuz": (0xFF, 0x80),
    "float8_e5m2fnuz": (0xFF, 0x80),
    "float8_e8m0fnu": (0xFF, 0xFF),
}
_COMPLEX = {"complex64": "float32", "complex128": "float64"}
_ROUNDED = ("int64", "uint64")  # different ones beyond 2**53 may be one double
_BLOCK = 1 << 15  # elements looked at at a time: their doubles stay in the processor's cache
_MOST_CODES = 1 << 16
_COUNTED = 1 << 17  # elements to count by code at a time
_EXPONENTS = 2048  # of a double


@dataclass(slots=True)
class Census:
    """Elements seen, and those that are not finite numbers; of a complex type each part counts as one.

    `largest` is the largest bit pattern of a finite IEEE number: a sign bit, if any number is negative.
    """

    elements: int = 0
    nans: int = 0
    infinities: int = 0
    largest: int = 0

    def add(self, bits: Array, dtype: str) -> None:
        """Count a stretch of elements of `dtype`, given as any array over their bytes."""
        base = _COMPLEX.get(dtype, dtype)
        if base in _IEEE:
            exponent, mantissa = _IEEE[base]
            width = itemsize(base)
            flat = bits.reshape(-1).view(f"u{width}")
            # The largest bits of either sign show whether any exponent is all ones: two reads, and no array is made.
            largest, positive = int(flat.max(initial=0)), int(flat.view(f"i{width}").max(initial=0))
            if largest >= _sign(base) | exponent or positive >= exponent:
                is_number = flat & flat.dtype.type(exponent) != exponent
                suspects, largest = flat[~is_number], int(flat[is_number].max(initial=0))
                nans = int(np.count_nonzero(suspects & suspects.dtype.type(mantissa)))
                self.nans += nans
                self.infinities += len(suspects) - nans
            self.largest = max(self.largest, largest)
        elif base in _ONE_NAN:
            mask, pattern = _ONE_NAN[base]
            flat = bits.reshape(-1).view("u1")
            self.nans += int(np.count_nonzero(flat & np.uint8(mask) == pattern))
        else:
            flat = bits.reshape(-1)
        self.elements += flat.size

    @property
    def are_finite(self) -> bool:
        """Whether all that were seen are."""
        return not (self.nans or self.infinities)

    def lowest(self, dtype: str) -> float:
        """The finite number furthest below zero, of IEEE elements that are all of `dtype`; 0 without any."""
        base = _COMPLEX.get(dtype, dtype)
        if base not in _IEEE or self.largest <= _sign(base):  # -0 has the sign alone
            return 0.0
        return float(decoded(np.array([self.largest], f"u{itemsize(base)}"), base)[0])

    def join(self, other: Census) -> None:
        """Add what was counted elsewhere."""
        self.elements += other.elements
        self.nans += other.nans
        self.infinities += other.infinities
        self.largest = max(self.largest, other.largest)

    def add_values(self, values: Array, times: Array | None = None) -> None:
        """Count decoded elements, each once or as often as `times` says."""
        self.elements += _count(None, values, times)
        self.nans += _count(np.isnan(values), values, times)
        self.infinities += _count(np.isinf(values), values, times)


def _sign(dtype: str) -> int:
    """The sign bit of a floating-point type."""
    return 1 << 8 * itemsize(dtype) - 1


def _count(chosen: Array | None, values: Array, times: Array | None) -> int:
    """How many elements `values` stand for, all or those that are chosen."""
    if times is None:
        return len(values) if chosen is None else int(np.count_nonzero(chosen))
    return int((times if chosen is None else times[chosen]).sum())


class Statistics:
    """What the elements of one or several tensors are like, joined from their tiles; all sums in float64.

    Counts are of all elements, all else is of the finite ones. Of a complex type each part counts as one, integers
    beyond 2**53 are rounded. `exponents`, if asked for, counts the finite elements that are not zero by the power of
    two below their size: `exponents[1023 + e]` have ``2**e <= |x| < 2**(e + 1)``.
    """

    def __init__(self, histogram: bool = False) -> None:
        self.census = Census()
        self.zeros = 0
        self.smallest, self.largest = math.inf, -math.inf
        self.total = self.squares = 0.0
        self.exponents: Array | None = np.zeros(_EXPONENTS, np.int64) if histogram else None

    def add(self, raw: Array, dtype: str) -> None:
        """Count a tile of raw bits of element type `dtype`.

        For a histogram of many short elements their codes are counted, and sums are computed over the codes: each
        element is read once.
        """
        flat = np.ascontiguousarray(raw).reshape(-1)
        codes = 1 << 8 * flat.itemsize
        if codes <= len(flat) and codes <= _MOST_CODES and (self.exponents is not None or codes == 256):
            times = np.zeros(codes, np.int64)
            for first in range(0, len(flat), _COUNTED):
                part = flat[first : first + _COUNTED].view(f"u{flat.itemsize}")
                times += np.bincount(part, minlength=codes)
            held = np.flatnonzero(times)
            self._add_values(decoded(held.astype(f"u{flat.itemsize}"), dtype), times[held])
            return
        for first in range(0, len(flat), _BLOCK):
            self._add_values(decoded(flat[first : first + _BLOCK], dtype))

    def _add_values(self, values: Array, times: Array | None = None) -> None:
        """Count each of `values`, or as often as `times` says."""
        with np.errstate(over="ignore", invalid="ignore"):
            weighted = values if times is None else values * times
            squares = float(np.dot(values, weighted))
        if math.isfinite(squares):  # then every element is
            self.census.elements += _count(None, values, times)
        else:
            self.census.add_values(values, times)
            finite = np.isfinite(values)
            values, weighted = values[finite], weighted[finite]
            times = times if times is None else times[finite]
            with np.errstate(over="ignore"):  # of doubles beyond 1e154
                squares = float(np.dot(values, weighted))
        if not len(values):
            return
        with np.errstate(over="ignore", invalid="ignore"):
            self.total += float(weighted.sum())
        self.zeros += _count(values == 0, values, times)
        self.smallest = min(self.smallest, float(values.min()))
        self.largest = max(self.largest, float(values.max()))
        self.squares += squares
        if self.exponents is not None:
            of = values.view(np.uint64) >> 52 & 0x7FF
            self.exponents += np.bincount(of, times, _EXPONENTS).astype(np.int64)

    def empty(self) -> Statistics:
        """One of the same kind that has counted nothing."""
        return Statistics(self.exponents is not None)

    def join(self, other: Statistics) -> None:
        """Add what was counted elsewhere."""
        self.census.join(other.census)
        self.zeros += other.zeros
        self.smallest, self.largest = min(self.smallest, other.smallest), max(self.largest, other.largest)
        self.total += other.total
        self.squares += other.squares
        if self.exponents is not None and other.exponents is not None:
            self.exponents += other.exponents

    @property
    def finite(self) -> int:
        """Elements that are numbers."""
        return self.census.elements - self.census.nans - self.census.infinities

    @property
    def norm(self) -> float:
        """The Euclidean norm of the finite elements."""
        return math.sqrt(self.squares)

    @property
    def rms(self) -> float | None:
        """Root mean square of the finite elements; None without any."""
        return math.sqrt(self.squares / self.finite) if self.finite else None

    def summary(self) -> dict[str, float | int | None]:
        """Counts, minimum, maximum, mean, root mean square, norm; None where there is no finite element."""
        count = self.finite
        return {
            "elements": self.census.elements,
            "nan": self.census.nans,
            "inf": self.census.infinities,
            "zero": self.zeros,
            "min": self.smallest if count else None,
            "max": self.largest if count else None,
            "mean": self.total / count if count else None,
            "rms": self.rms,
            "norm": self.norm if count else None,
        }

    def histogram(self) -> list[tuple[int, int]]:
        """(power of two, elements) from the least to the largest size, without those that no element has."""
        if self.exponents is None:
            return []
        held = np.flatnonzero(self.exponents[1:]) + 1  # 0: zeros, and doubles below 2**-1022
        return [(int(code) - 1023, int(self.exponents[code])) for code in held]


class Change:
    """How a tensor has moved from A to B, joined from tiles; all sums in float64, over what is finite in both.

    What is NaN or infinite in A or B is left out of the sums, but not of `changed`: a NaN is like any other NaN, an
    infinity like that of its sign, and neither is like a number.
    """

    def __init__(self) -> None:
        self.elements = self.left_out = self.left_out_changed = self.changed = 0
        self.a_squares = self.b_squares = self.product = self.moved_squares = 0.0
        self.largest = 0.0  # of |B - A|

    def add(self, a: Array, b: Array, *dtypes: str) -> None:
        """Count two tiles of raw bits of the same elements, of these two types."""
        a, b = (np.ascontiguousarray(part).reshape(-1) for part in (a, b))
        for first in range(0, len(a), _BLOCK):
            block = slice(first, first + _BLOCK)
            x, y = decoded(a[block], dtypes[0]), decoded(b[block], dtypes[1])
            self._add_block(x, y)
            if dtypes[0] == dtypes[1] and dtypes[0] in _ROUNDED:
                self.changed += int(np.count_nonzero((a[block] != b[block]) & (x == y)))

    def _add_block(self, a: Array, b: Array) -> None:
        self.elements += len(a)
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all():
            self._leave_out(a[~finite], b[~finite])
            a, b = a[finite], b[finite]
        if not len(a):
            return
        with np.errstate(over="ignore", invalid="ignore"):  # of doubles beyond 1e154
            moved = b - a
            self.a_squares += float(np.dot(a, a))
            self.b_squares += float(np.dot(b, b))
            self.product += float(np.dot(a, b))
            self.moved_squares += float(np.dot(moved, moved))
            self.largest = max(self.largest, float(np.abs(moved).max()))
        self.changed += int(np.count_nonzero(moved))

    def _leave_out(self, a: Array, b: Array) -> None:
        """Count elements of which one or both are NaN or infinite."""
        changed = len(a) - int(np.count_nonzero((a == b) | (np.isnan(a) & np.isnan(b))))
        self.left_out += len(a)
        self.left_out_changed += changed
        self.changed += changed

    def empty(self) -> Change:
        """One that has counted nothing."""
        return Change()

    def join(self, other: Change) -> None:
        """Add what was counted elsewhere."""
        for name in ("elements", "left_out", "left_out_changed", "changed",
                     "a_squares", "b_squares", "product", "moved_squares"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)

    @property
    def has_numbers(self) -> bool:
        """Whether sums stand for anything: not if every element is left out of them."""
        return not self.left_out or self.left_out < self.elements

    @property
    def relative(self) -> float | None:
        """The norm of B - A over that of A; None where A is zero and B is not, or nothing is finite in both."""
        if not self.has_numbers:
            return None
        if not self.moved_squares:
            return 0.0
        return math.sqrt(self.moved_squares / self.a_squares) if self.a_squares else None

    @property
    def cosine(self) -> float | None:
        """Of the angle between A and B; None where one of them is zero."""
        norms = math.sqrt(self.a_squares) * math.sqrt(self.b_squares)
        if not norms:
            return None
        return 1.0 if not self.moved_squares else max(-1.0, min(1.0, self.product / norms))

    @property
    def furthest(self) -> float | None:
        """The largest |B - A|; None where nothing is finite in both."""
        return self.largest if self.has_numbers else None

    def summary(self) -> dict[str, float | int | None]:
        """Elements compared, left out and changed; the change relative to A, the cosine, the largest difference."""
        return {
            "elements": self.elements,
            "left_out": self.left_out,
            "left_out_changed": self.left_out_changed,
            "changed": self.changed,
            "relative_change": self.relative,
            "cosine": self.cosine,
            "max_abs": self.furthest,
        }


def decoded(raw: Array, dtype: str) -> Array:
    """The values of 1-d raw bits of any element type, as float64; both parts of complex numbers."""
    dtype = _COMPLEX.get(dtype, dtype)
    if dtype in MINIFLOATS:
        return minifloat_values(dtype)[raw.view(np.uint8)].astype(np.float64)
    if dtype == "float8_e8m0fnu":  # powers of two, without sign
        codes = raw.view(np.uint8)
        return np.where(codes == 0xFF, np.nan, np.ldexp(1.0, codes.astype(np.int32) - 127))
    if dtype in CASTABLE:
        return to_float64(raw.view(raw_dtype(dtype)), dtype)
    return raw.view(numpy_dtype(dtype)).astype(np.float64)


_TILE_ELEMS = 1 << 19  # about 40 MiB of temporary numbers a thread where two tensors differ
_PART_ELEMS = 1 << 23
_MOST_PARTS = 1 << 14  # about, of a tensor: metadata may say any shape; reading a part tells what is absent


class Shaped(Protocol):
    """Any description of a tensor."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Part(NamedTuple):
    """A box of a tensor, which is given by its number."""

    number: int
    box: Box

    def tiles(self) -> Iterator[Box]:
        """The box in pieces that are held in memory."""
        return row_major_tiles(self.box, _TILE_ELEMS)


def parts_of(tensors: Sequence[Shaped]) -> list[Part]:
    """All of each tensor, in order; none of one without elements."""
    return [
        Part(number, box)
        for number, tensor in enumerate(tensors)
        for box in row_major_tiles(
            full_box(tensor.shape), max(_PART_ELEMS, prod(tensor.shape) // _MOST_PARTS)
        )
        if not box.is_empty
    ]


def part_reads(*places: tuple[BoxReader, Sequence[object]]) -> Reads[Part] | None:
    """What reading parts asks of stores, tile by tile in all `places`: readers, each with its tensors by number.

    None where no store is read.
    """
    stores = [place for place in places if place[0].is_remote]
    if not stores:
        return None

    def reads(part: Part) -> Iterator[Range]:
        tensors = [(reader, those[part.number]) for reader, those in stores]
        of_box = [reader.reads(tensor) for reader, tensor in tensors if isinstance(tensor, TargetTensor)]
        return chain.from_iterable(of(tile) for tile in part.tiles() for of in of_box)

    return reads


def bytes_of(parts: Sequence[Part], *places: Sequence[Shaped]) -> list[int]:
    """The bytes of each part, of its tensor in all `places` together."""
    return [sum(part.box.volume * itemsize(place[part.number].dtype) for place in places) for part in parts]


AnySums = TypeVar("AnySums", Statistics, Change)


def measured(
    new: Callable[[], AnySums],
    *sides: tuple[Files, Catalog, Sequence[TargetTensor]],
    threads: int = 2,
    workers: int | None = None,
    tick: Tick = lambda _: None,
) -> list[AnySums]:
    """The `Statistics` of each tensor of one side, or its `Change` from one to another; `new` makes empty ones.

    Both tensors of a pair have one shape. `tick` gets the bytes read.
    """
    tensors = [of_side for _, _, of_side in sides]
    readers = list[BoxReader]()

    def measure(part: Part, count: Tick) -> AnySums:
        sums, of_part = new(), [side[part.number] for side in tensors]
        reads = [reader.tensor(tensor) for reader, tensor in zip(readers, of_part, strict=True)]
        add: Callable[..., None] = sums.add
        for tile in part.tiles():
            tiles = [read(tile) for read in reads]
            add(*tiles, *(tensor.dtype for tensor in of_part))
            count(sum(values.nbytes for values in tiles))
        return sums

    with ExitStack() as stack:
        for files, catalog, _ in sides:
            readers.append(BoxReader(files, catalog))
            stack.callback(readers[-1].close)
        parts = parts_of(tensors[0])
        sizes, reads = bytes_of(parts, *tensors), part_reads(*zip(readers, tensors, strict=True))
        started = start_jobs(
            measure, parts, sizes=sizes, threads=threads, workers=workers, tick=tick, reads=reads
        )
        of_parts = results_of(started)
    whole = [new() for _ in tensors[0]]
    for part, sums in zip(parts, of_parts, strict=True):
        whole[part.number].join(sums)
    return whole
