"""What differs between two Python values from checkpoints, part by part under dotted names.

Types count: 1 is neither 1.0 nor True, a list is not a tuple, an OrderedDict not a dict. Floats follow the
tolerance, also inside tensors. A NaN is a NaN, unless NaNs shall never be equal.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from ckpt_tools.formats.pickle.unpickle import StandIn
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor
from ckpt_tools.model.choices import NanPolicy
from ckpt_tools.model.kernels.casts import raw_dtype
from ckpt_tools.verify.compare.arrays import Comparison, Tolerance

_MAX_DEPTH = 64
_MAX_TEXT = 200  # characters of a value in a report
_MAX_BEFORE = 40  # of them before the first that differs, where that is far behind
_TOO_DEEP = "nested too deeply to compare"


class ValueDiff(NamedTuple):
    """A Python value, or a part of one, that differs; None: absent."""

    name: str
    a: str | None
    b: str | None


class _Part(NamedTuple):
    """Something inside a value; `name` is its own, without that of what holds it."""

    name: str
    value: object


_Parts = dict[Hashable, _Part]


def diff_values(name: str, a: object, b: object, tolerance: Tolerance, depth: int = 0) -> Iterator[ValueDiff]:
    """The parts of two Python values that are not the same, under dotted names."""
    if depth > _MAX_DEPTH:
        yield ValueDiff(name, _TOO_DEEP, _TOO_DEEP)
        return
    inside_a, inside_b = _parts_of(a), _parts_of(b)
    is_leaf = inside_a is None or inside_b is None
    if type(a) is not type(b) or is_leaf or _differ_as_wholes(a, b):
        if type(a) is not type(b) or not is_leaf or not _same(a, b, tolerance):
            yield _difference(name, a, b, tolerance)
        return
    assert inside_a is not None
    assert inside_b is not None
    for key in dict.fromkeys((*inside_a, *inside_b)):
        left, right = inside_a.get(key), inside_b.get(key)
        inner = f"{name}.{(left or right or _Part('', None)).name}"
        if left is None or right is None:
            yield ValueDiff(inner, left and text_of(left.value), right and text_of(right.value))
        else:
            yield from diff_values(inner, left.value, right.value, tolerance, depth + 1)


def names_in(name: str, value: object, depth: int = 0) -> Iterator[str]:
    """The name of a value and of every part of it, as `diff_values` calls them."""
    yield name
    parts = _parts_of(value) if depth <= _MAX_DEPTH else None
    for part in (parts or {}).values():
        yield from names_in(f"{name}.{part.name}", part.value, depth + 1)


def text_of(value: object, start: int = 0) -> str:
    """A value as a report shows it, from this character on."""
    text = f"{value.dtype} {list(value.shape)}" if isinstance(value, StoredTensor) else repr(value)
    before = "..." if start else ""
    if len(text) - start <= _MAX_TEXT:
        return before + text[start:]
    return f"{before}{text[start : start + _MAX_TEXT]}... ({len(text)} characters)"


def _difference(name: str, a: object, b: object, tolerance: Tolerance) -> ValueDiff:
    """Both as texts that are not the same: with what a tensor holds, from where they part, or with their types."""
    if (
        isinstance(a, StoredTensor)
        and isinstance(b, StoredTensor)
        and (a.dtype, a.shape) == (b.dtype, b.shape)
    ):
        return ValueDiff(name, *_tensor_texts(a, b, tolerance))
    pairs = zip_longest(repr(a), repr(b))
    first = next((at for at, (one, other) in enumerate(pairs) if one != other), 0)
    start = first - _MAX_BEFORE if first >= _MAX_TEXT else 0
    left, right = text_of(a, start), text_of(b, start)
    if left == right:
        left, right = (f"{text} ({_type_name(value)})" for text, value in ((left, a), (right, b)))
    return ValueDiff(name, left, right)


def _tensor_texts(a: StoredTensor, b: StoredTensor, tolerance: Tolerance) -> tuple[str, str]:
    """Two tensors of one form by the elements of their largest difference."""
    found = _compared(a.dtype, a.data, b.data, tolerance).found
    assert found.index is not None
    size = raw_dtype(a.dtype).itemsize
    place = slice(found.index[0] * size, (found.index[0] + 1) * size)
    at = [int(index) for index in np.unravel_index(found.index[0], a.shape)]
    shown = [repr(value) for value in found.values or ()]
    if len(set(shown)) == 1:  # NaNs
        shown = [f"{one} (0x{side.data[place][::-1].hex()})" for one, side in zip(shown, (a, b), strict=True)]
    count = f"{found.different:,} of {len(a.data) // size:,} differ"
    left, right = (f"{text_of(a)}: {one} at {at}, {count}" for one in shown)
    return left, right


def _type_name(value: object) -> str:
    return f"{value.module}.{value.qualname}" if isinstance(value, StandIn) else type(value).__name__


def _parts_of(value: object) -> _Parts | None:
    """What a value consists of, by what must be equal for two parts to be compared; None when it has no parts."""
    if isinstance(value, StandIn):
        return _parts_of_stand_in(value)
    if isinstance(value, Mapping):
        parts: _Parts = {_token(key): _Part(str(key), inner) for key, inner in value.items()}
        for attribute, inner in getattr(value, "__dict__", {}).items():  # an OrderedDict's `_metadata`
            parts["attribute", attribute] = _Part(attribute, inner)
        return parts
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return {index: _Part(str(index), inner) for index, inner in enumerate(value)}
    if isinstance(value, slice):
        return {part: _Part(part, getattr(value, part)) for part in ("start", "stop", "step")}
    return None


def _parts_of_stand_in(value: StandIn) -> _Parts:
    """Everything that an object of a foreign class was made from."""
    attributes = value.attributes
    parts: _Parts = {("attribute", name): _Part(name, inner) for name, inner in attributes.items()}
    if not attributes and value.state is not None:
        parts["state"] = _Part("state", value.state)
    for index, inner in enumerate(value.args):
        parts["argument", index] = _Part(f"args.{index}", inner)
    for name, inner in value.kwargs.items():
        parts["keyword", name] = _Part(f"args.{name}", inner)
    for index, inner in enumerate(value.items):
        parts["item", index] = _Part(str(index), inner)
    for key, inner in value.pairs:  # the last value of a key counts, as in a dict
        parts["pair", _token(key)] = _Part(str(key), inner)
    return parts


def _differ_as_wholes(a: object, b: object) -> bool:
    """Whether two values of one type are so different that their parts need no look."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) != len(b)
    if isinstance(a, OrderedDict) and isinstance(b, OrderedDict) and a.keys() == b.keys():
        return list(a) != list(b)
    return False


def _token(key: object) -> Hashable:
    """A dict's key or a set's member so that it equals only the same value of the same type."""
    if isinstance(key, float):
        return float, struct.pack("<d", key)
    if isinstance(key, tuple):
        return (type(key), *map(_token, key))
    if isinstance(key, frozenset | set):
        return type(key), frozenset(map(_token, key))
    if isinstance(key, StandIn):
        return type(key), *map(_token, key.args)
    return type(key), repr(key) if isinstance(key, complex) else key


def _same(a: object, b: object, tolerance: Tolerance) -> bool:
    """Whether two values of one type without parts are the same."""
    if isinstance(a, StoredTensor) and isinstance(b, StoredTensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and _same_numbers(a.dtype, a.data, b.data, tolerance)
    if isinstance(a, float) and isinstance(b, float):
        return _same_floats((a,), (b,), tolerance)
    if isinstance(a, complex) and isinstance(b, complex):
        return _same_floats((a.real, a.imag), (b.real, b.imag), tolerance)
    if isinstance(a, set | frozenset):
        return _token(a) == _token(b)
    return bool(a == b)


def _same_floats(a: tuple[float, ...], b: tuple[float, ...], tolerance: Tolerance) -> bool:
    nan: NanPolicy = "different" if tolerance.nan == "different" else "equal"
    tolerance = Tolerance(tolerance.rtol, tolerance.atol, tolerance.ulp, nan)
    return _same_numbers("float64", np.array(a).tobytes(), np.array(b).tobytes(), tolerance)


def _same_numbers(dtype: str, a: bytes, b: bytes, tolerance: Tolerance) -> bool:
    return not _compared(dtype, a, b, tolerance).found.different


def _compared(dtype: str, a: bytes, b: bytes, tolerance: Tolerance) -> Comparison:
    comparison = Comparison((dtype, dtype), tolerance)
    raw = raw_dtype(dtype)
    comparison.add(np.frombuffer(a, raw), np.frombuffer(b, raw), (0,))
    return comparison
