"""Kernels: values that no stored tensor holds as they are, computed from stored ones a tile at a time.

A kernel is plain data with three answers: the form (type and shape) of what it gives, the boxes of its inputs that a
box of its output needs, and the elements of that box. A tile costs memory by its own size, never by the tensor's,
and an element does not depend on how the output was cut in tiles.

Arrays have the types of `casts.numpy_dtype`: the bits of bfloat16 and of 8-bit floats are unsigned integers. Worked
example, a (4, 6) weight of 8-bit floats with a scale for every (2, 3) block; its box of rows 1:3 and columns 0:2::

    Dequantize("float8_e4m3fn", (2, 3), "bfloat16")
    .form   the weight (float8_e4m3fn, (4, 6)) and the scales (float32, (2, 2)) give (bfloat16, (4, 6))
    .needs  the same box of the weight; rows 0:2 and column 0:1 of the scales
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple, Protocol

import numpy as np

from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.dtypes import CASTABLE, Form
from ckpt_tools.model.kernels.casts import Array, cast, numpy_dtype


class Kernel(Protocol):
    """What planner and tile pump ask of a kernel."""

    @property
    def name(self) -> str:
        """As plans and reports call it."""

    def form(self, inputs: Sequence[Form]) -> Form:
        """The form of the result."""

    def needs(self, box: Box, inputs: Sequence[Form]) -> tuple[Box, ...]:
        """For each input the box that the elements of `box` are made of."""

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        """The elements of `box` from the boxes that `needs` asked for."""


class _Elementwise:
    """A kernel of inputs that have its output's shape: element i is made of the inputs' elements i."""

    __slots__ = ()

    def needs(self, box: Box, inputs: Sequence[Form]) -> tuple[Box, ...]:
        return (box,) * len(inputs)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Zeros without an input: the state that a fresh optimizer keeps of a parameter."""

    dtype: str
    shape: tuple[int, ...]

    name = "zeros"

    def form(self, inputs: Sequence[Form]) -> Form:
        if inputs:
            raise ValueError(f"zeros are made of nothing, not of {len(inputs)} tensors")
        return Form(self.dtype, self.shape)

    def needs(self, box: Box, inputs: Sequence[Form]) -> tuple[Box, ...]:
        return ()

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        return np.zeros(box.size, numpy_dtype(self.dtype))


@dataclass(frozen=True, slots=True)
class JoinRemainder(_Elementwise):
    """An fp32 master from the bf16 weight and the remainder that a precision-aware optimizer keeps of it.

    The remainder is the master's low half as a signed number, so the weight was rounded up wherever it is negative:
    the master is ``(bits of the weight << 16) + remainder``, taken as one 32-bit integer (Transformer Engine, fused
    Adam with `store_param_remainders`). `dp_reshardable` stores it as int16, `fully_reshardable` as float32 numbers.
    """

    remainder: str = "int16"  # element type it is stored in

    name = "join remainder"

    def form(self, inputs: Sequence[Form]) -> Form:
        weight, remainder = inputs
        if (weight.dtype, remainder.dtype) != ("bfloat16", self.remainder):
            raise ValueError(
                f"{self.remainder} remainders belong to bfloat16 weights, found {remainder.dtype} and {weight.dtype}"
            )
        if weight.shape != remainder.shape:
            raise ValueError(f"the weight has shape {weight.shape}, its remainders {remainder.shape}")
        return Form("float32", weight.shape)

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        weight, remainder = tiles
        low = _whole_int16(remainder) if self.remainder != "int16" else remainder
        master: Array = ((weight.astype(np.uint32) << 16) + low.astype(np.int32).view(np.uint32)).view(
            np.float32
        )
        return master


def _whole_int16(numbers: Array) -> Array:
    """Floating-point numbers that are 16-bit integers, as such."""
    with np.errstate(invalid="ignore"):  # of NaNs and numbers out of range, which are refused below
        whole = numbers.astype(np.int16)
    wrong = whole != numbers
    if wrong.any():
        raise ValueError(f"{numbers[wrong].flat[0]} is not a 16-bit remainder")
    return whole


@dataclass(frozen=True, slots=True)
class Dequantize:
    """8-bit floats of type `stored` times the scale of their block, rounded once to `dtype`.

    `block` is the extent of a block in elements per dimension; the last one of a dimension may be cut short. `()`:
    one scale for the whole tensor. The product is taken in float32, as the reference decoders take it.
    """

    stored: str
    block: tuple[int, ...] = ()
    dtype: str = "float32"

    name = "dequantize"

    def form(self, inputs: Sequence[Form]) -> Form:
        values, scales = inputs
        if (values.dtype, scales.dtype) != (self.stored, "float32"):
            raise ValueError(
                f"{self.stored} numbers have float32 scales, not {values.dtype} with {scales.dtype}"
            )
        if len(self.block) not in (0, len(values.shape)):
            raise ValueError(f"blocks of {self.block} elements do not fit shape {values.shape}")
        grid = tuple([-(-n // b) for n, b in zip(values.shape, self.block, strict=False)])
        if scales.shape != grid and (self.block or scales.shape != (1,)):
            raise ValueError(
                f"{values.shape} in blocks of {self.block} has scales {grid}, not {scales.shape}"
            )
        return Form(self.dtype, values.shape)

    def needs(self, box: Box, inputs: Sequence[Form]) -> tuple[Box, ...]:
        if not self.block:
            return box, full_box(inputs[1].shape)
        start = tuple([a // b for a, b in zip(box.start, self.block, strict=True)])
        stop = tuple([-(-a // b) for a, b in zip(box.stop, self.block, strict=True)])
        return box, Box(start, tuple([b - a for a, b in zip(start, stop, strict=True)]))

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        coded, scales = tiles
        if self.block:
            for axis, (start, size, width) in enumerate(zip(*box, self.block, strict=True)):
                scales = scales.take(np.arange(start, start + size) // width - start // width, axis)
        else:
            scales = scales.reshape(())
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaNs as the decoders give them
            return cast(minifloat_values(self.stored).take(coded) * scales, "float32", self.dtype)


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The result of `kernel` with some of its axes split: the same elements in the same order.

    `splits` has the lengths that each axis becomes, ((4,), (3, 2)) for (4, 6) as (4, 3, 2). A box needs the smallest
    box of the unsplit axes around it, so a view that shows one of two interleaved columns computes both.
    """

    kernel: Kernel
    splits: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        return self.kernel.name

    def form(self, inputs: Sequence[Form]) -> Form:
        dtype, whole = self.kernel.form(inputs)
        if tuple(map(prod, self.splits)) != whole:
            raise ValueError(f"the axes of {whole} cannot be split in {self.splits}")
        return Form(dtype, tuple([length for split in self.splits for length in split]))

    def needs(self, box: Box, inputs: Sequence[Form]) -> tuple[Box, ...]:
        return self.kernel.needs(self._around(box)[0], inputs)

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        around, shown = self._around(box)
        values = self.kernel.compute(around, tiles)
        for axis, elements in enumerate(shown):
            values = _along(values, elements, axis)
        return values.reshape(box.size)

    def _around(self, box: Box) -> tuple[Box, list[Array]]:
        """The box of the unsplit axes, and which of its elements along each axis belong to `box`."""
        spans, at = [], 0
        for split in self.splits:
            part = slice(at, at + len(split))
            elements = np.zeros(1, np.int64)
            for length, start, size in zip(split, box.start[part], box.size[part], strict=True):
                elements = np.add.outer(elements * length, np.arange(start, start + size)).reshape(-1)
            spans.append(elements)
            at += len(split)
        first = [int(elements[0]) if elements.size else 0 for elements in spans]
        shown = [elements - a for elements, a in zip(spans, first, strict=True)]
        extent = [int(elements[-1]) + 1 if elements.size else 0 for elements in shown]
        return Box(tuple(first), tuple(extent)), shown


def _along(values: Array, elements: Array, axis: int) -> Array:
    """The elements with these numbers, ascending, along an axis: a view where they are evenly spaced."""
    steps = np.diff(elements)
    if not steps.size or steps.min() == steps.max():
        step = int(steps[0]) if steps.size else 1
        return values[(slice(None),) * axis + (slice(None, None, step),)]
    return values.take(elements, axis)


def reshaped(kernel: Kernel, whole: tuple[int, ...], shape: tuple[int, ...]) -> Kernel:
    """`kernel`, which gives the shape `whole`, as one that gives `shape`."""
    splits, at = [], 0
    for axis, length in enumerate(whole):
        first, at = at, at + 1
        while at < len(shape) and (prod(shape[first:at]) < length or axis == len(whole) - 1):
            at += 1
        splits.append(shape[first:at])
    if tuple(map(prod, splits)) != whole:
        raise ValueError(f"the axes of {whole} cannot be split into {shape}")
    return Reshaped(kernel, tuple(splits))


@dataclass(frozen=True, slots=True)
class WeightedMean(_Elementwise):
    """The sum of `weights[i]` times input i, taken in float64 and rounded once to the inputs' type."""

    dtype: str
    weights: tuple[float, ...]

    name = "mean"

    def form(self, inputs: Sequence[Form]) -> Form:
        if self.dtype not in CASTABLE or {form.dtype for form in inputs} != {self.dtype}:
            raise ValueError(
                f"a mean of {self.dtype} numbers is not taken of {[form.dtype for form in inputs]}"
            )
        if len(inputs) != len(self.weights) or len({form.shape for form in inputs}) != 1:
            raise ValueError(
                f"{len(self.weights)} tensors of one shape have a mean, not {[f.shape for f in inputs]}"
            )
        return inputs[0]

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        total = np.zeros(box.size, np.float64)
        with np.errstate(invalid="ignore"):  # infinities of both signs make a NaN
            for weight, tile in zip(self.weights, tiles, strict=True):
                total += weight * cast(tile, self.dtype, "float64")
        return rounded_once(total, self.dtype)


def rounded_once(values: Array, dtype: str) -> Array:
    """Doubles as `dtype`, rounded to nearest even once."""
    if dtype in ("bfloat16", "float16"):  # which a cast reaches by way of float32
        return cast(_rounded_to_odd(values), "float32", dtype)
    return cast(values, "float64", dtype)


def _rounded_to_odd(values: Array) -> Array:
    """Doubles as float32 of which a shorter float is rounded as if it were from the doubles themselves.

    What is cut off is kept in the last bit, so that no number comes to lie halfway that does not.
    """
    near = values.astype(np.float32)
    inexact = (near != values) & np.isfinite(near)
    bits = near.view(np.uint32)
    bits -= inexact & (np.abs(near) > np.abs(values))
    bits |= inexact
    return near


class Minifloat(NamedTuple):
    """How the 8 bits of a small float are read."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_infinity: bool  # IEEE: an exponent of all ones is infinity or NaN
    negative_zero_is_nan: bool  # `fnuz`: the only NaN


MINIFLOATS = {
    "float8_e4m3fn": Minifloat(4, 3, 7, False, False),
    "float8_e5m2": Minifloat(5, 2, 15, True, False),
    "float8_e4m3fnuz": Minifloat(4, 3, 8, False, True),
    "float8_e5m2fnuz": Minifloat(5, 2, 16, False, True),
}


@cache
def minifloat_values(dtype: str) -> Array:
    """The float32 value of each of the 256 codes of an 8-bit float (OCP 8-bit floating point specification)."""
    form = MINIFLOATS[dtype]
    codes = np.arange(256)
    sign = np.where(codes >> 7, -1.0, 1.0)
    exponent = codes >> form.mantissa_bits & (1 << form.exponent_bits) - 1
    mantissa = codes & (1 << form.mantissa_bits) - 1
    fraction = mantissa / (1 << form.mantissa_bits)
    size = np.where(
        exponent == 0, fraction * 2.0 ** (1 - form.bias), (1 + fraction) * 2.0 ** (exponent - form.bias)
    )
    largest = (1 << form.exponent_bits) - 1
    if form.has_infinity:
        size[exponent == largest] = np.where(mantissa[exponent == largest], np.nan, np.inf)
    elif not form.negative_zero_is_nan:
        size[codes & 0x7F == 0x7F] = np.nan
    values = (sign * size).astype(np.float32)
    if form.negative_zero_is_nan:
        values[0x80] = np.nan
    values.setflags(write=False)
    return values


@dataclass(frozen=True, slots=True)
class AddNumber:
    """Every element of a float32 tensor plus `number`, a sum in float32 that is rounded once to `dtype`."""

    dtype: str
    number: float

    @property
    def name(self) -> str:
        return f"add {self.number:g}"

    def form(self, inputs: Sequence[Form]) -> Form:
        (one,) = inputs
        if one.dtype != "float32":
            raise ValueError(f"a number is added to float32 elements, not to {one.dtype}")
        return Form(self.dtype, one.shape)

    def needs(self, box: Box, inputs: Sequence[Form]) -> tuple[Box, ...]:
        return (box,)

    def compute(self, box: Box, tiles: Sequence[Array]) -> Array:
        return cast(tiles[0] + np.float32(self.number), "float32", self.dtype)
