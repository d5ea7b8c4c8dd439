"""The tolerance arithmetic against numpy's and Python's own answers, by hypothesis over raw bits."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.model.choices import NanPolicy
from ckpt_tools.model.kernels.casts import float32_to_bfloat16, raw_dtype
from ckpt_tools.verify.compare.arrays import Comparison, Extremes, Tolerance, to_float64, ulp_distance

WIDTHS: dict[str, Any] = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}
INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, "float64": 0x7FF0000000000000}
types = st.sampled_from(sorted(WIDTHS))


@st.composite
def bit_pairs(draw, finite=False):
    """(type, bits, bits): uniform over bits, so that subnormals, infinities and NaNs are common."""
    dtype = draw(types)
    top = INFINITY[dtype] - 1 if finite else (1 << (WIDTHS[dtype] - 1)) - 1
    number = st.tuples(st.booleans(), st.integers(0, top)).map(
        lambda pair: pair[0] << (WIDTHS[dtype] - 1) | pair[1]
    )
    return dtype, draw(number), draw(number)


def raw(dtype, *bits):
    return np.array(bits, raw_dtype(dtype))


def compared(dtype, a, b, tolerance=Tolerance()):  # noqa: B008  frozen
    return compared_arrays((dtype, dtype), raw(dtype, a), raw(dtype, b), tolerance, (0,))


def compared_arrays(dtypes, a, b, tolerance, start):
    comparison = Comparison(dtypes, tolerance)
    comparison.add(a, b, start)
    return comparison.found


def step(dtype, bits, count):
    """The bits `count` representable numbers above, walking one at a time."""
    sign, mask = 1 << (WIDTHS[dtype] - 1), (1 << (WIDTHS[dtype] - 1)) - 1
    for _ in range(count):
        if bits & sign:
            bits = bits - 1 if bits & mask else 1  # -0 counts as +0
        else:
            bits += 1
        if bits == sign:
            bits = 0
    return bits


@given(types, st.data())
def test_ulp_distance_counts_the_numbers_between(dtype, data):
    sign = 1 << (WIDTHS[dtype] - 1)
    near_zero = st.integers(0, 60)
    low = data.draw(
        st.one_of(near_zero, near_zero.map(lambda n: sign | n), st.integers(0, INFINITY[dtype] - 99))
    )
    count = data.draw(st.integers(0, 90))
    high = step(dtype, low, count)
    assert ulp_distance(raw(dtype, low), raw(dtype, high), dtype).tolist() == [count]
    assert ulp_distance(raw(dtype, high), raw(dtype, low), dtype).tolist() == [count]


def test_ulp_distance_over_the_whole_line_does_not_overflow():
    for dtype, infinity in INFINITY.items():
        sign = 1 << (WIDTHS[dtype] - 1)
        whole = ulp_distance(raw(dtype, sign | infinity), raw(dtype, infinity), dtype)
        assert whole.tolist() == [2 * infinity]
        assert ulp_distance(raw(dtype, sign), raw(dtype, 0), dtype).tolist() == [0]


@given(bit_pairs())
def test_bitwise_says_different_exactly_when_bits_differ(pair):
    dtype, a, b = pair
    assert compared(dtype, a, b).different == (a != b)
    assert compared(dtype, a, a).different == 0


@given(bit_pairs(finite=True), st.floats(0, 2, width=32), st.floats(0, 1e30), st.integers(0, 1 << 20))
def test_tolerance_is_the_documented_rule_in_exact_arithmetic(pair, rtol, atol, ulp):
    dtype, a, b = pair
    x, y = (to_float64(raw(dtype, bits), dtype).item() for bits in (a, b))
    tolerance = Tolerance(rtol, atol, ulp)
    if tolerance.is_bitwise:
        return
    distance = abs(Fraction(x) - Fraction(y))
    bound = Fraction(atol) + Fraction(rtol) * max(abs(Fraction(x)), abs(Fraction(y)))
    if not (math.isfinite(x - y) and math.isfinite(float(np.float64(rtol)) * max(abs(x), abs(y)))):
        return
    if abs(distance - bound) <= Fraction(1, 1 << 50) * bound:
        return  # the rule itself is evaluated in doubles
    within = distance <= bound or int(ulp_distance(raw(dtype, a), raw(dtype, b), dtype)[0]) <= ulp > 0
    assert compared(dtype, a, b, tolerance).different == (not within)
    assert compared(dtype, b, a, tolerance).different == (not within)


@given(bit_pairs(finite=True), st.floats(0, 10))
def test_an_infinity_is_near_itself_only(pair, rtol):
    dtype, a, _ = pair
    tolerance = Tolerance(rtol, 1e300, 1 << 40)
    assert compared(dtype, INFINITY[dtype], INFINITY[dtype], tolerance).different == 0
    assert compared(dtype, INFINITY[dtype], a, tolerance).different == 1
    negative = INFINITY[dtype] | 1 << (WIDTHS[dtype] - 1)
    assert compared(dtype, INFINITY[dtype], negative, tolerance).different == 1


@pytest.mark.parametrize("tolerant", [Tolerance(), Tolerance(ulp=1)])
def test_nan_policies(tolerant):
    quiet, other, one = 0x7FC00000, 0x7FC00001, 0x3F800000
    expected: dict[NanPolicy, tuple[int, int]] = {"bits": (0, 1), "equal": (0, 0), "different": (1, 1)}
    for policy, (same, payload) in expected.items():
        tolerance = Tolerance(ulp=tolerant.ulp, nan=policy)
        assert compared("float32", quiet, quiet, tolerance).different == same
        assert compared("float32", quiet, other, tolerance).different == payload
        found = compared("float32", quiet, one, tolerance)
        assert (found.different, found.nan_mismatches) == (1, 1)


def test_minus_zero_is_another_number_bitwise_and_the_same_within_a_tolerance():
    assert compared("float32", 0x80000000, 0).different == 1
    assert compared("float32", 0x80000000, 0, Tolerance(ulp=1)).different == 0


def test_other_types_compare_by_value_across_and_never_by_ulp():
    value = np.array([1.00390625], np.float32)  # exact in fp32, between two bf16 numbers
    rounded = float32_to_bfloat16(value)
    types = ("float32", "bfloat16")
    found = compared_arrays(types, value.view("u4"), rounded, Tolerance(), (0,))
    assert (found.different, found.max_ulp) == (1, None)
    assert compared_arrays(types, value.view("u4"), rounded, Tolerance(rtol=0.01), (0,)).different == 0


def test_the_largest_difference_is_named_with_its_index_over_tiles():
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    b = a.copy()
    b[1, 2] += 5
    b[2, 0] -= 7
    comparison = Comparison(("float32", "float32"), Tolerance())
    for row in range(3):
        comparison.add(a[row : row + 1].view("u4"), b[row : row + 1].view("u4"), (row, 0))
    found = comparison.found
    assert (found.different, found.max_abs, found.index, found.values) == (2, 7.0, (2, 0), (8.0, 1.0))


def test_scalars_have_the_empty_index():
    a, b = (np.array(value, np.float32).view("u4") for value in (1.5, 2.0))
    found = compared_arrays(("float32", "float32"), a, b, Tolerance(), ())
    assert (found.different, found.max_abs, found.index, found.values) == (1, 0.5, (), (1.5, 2.0))
    found = compared_arrays(("int64", "int64"), np.array(7, "u8"), np.array(8, "u8"), Tolerance(), ())
    assert (found.different, found.index, found.values) == (1, (), (7, 8))


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float8_e4m3fn", "bool", "complex128", "int32"])
def test_other_types_are_compared_bit_by_bit_whatever_the_tolerance(dtype):
    ones = np.ones(3, raw_dtype(dtype))
    other = ones.copy()
    other[1] = 0
    for nan in ("bits", "different"):
        found = compared_arrays((dtype, dtype), ones, other, Tolerance(rtol=1.0, nan=nan), (5,))
        assert (found.different, found.index) == (1, (6,))
        assert compared_arrays((dtype, dtype), ones, ones, Tolerance(nan=nan), (5,)).different == 0


def test_complex_nans_are_compared_by_their_bits():
    a = np.array([complex(float("nan"), 1.0)])
    assert compared_arrays(("complex128",) * 2, a, a.copy(), Tolerance(), (0,)).different == 0
    assert compared_arrays(("complex128",) * 2, a, np.conj(a), Tolerance(), (0,)).different == 1


def test_the_largest_relative_difference_and_the_number_of_steps_are_kept():
    a = np.array([1.0, -0.0, 4.0, 100.0], np.float32)
    b = np.array([1.0, 0.0, 5.0, 101.0], np.float32)
    found = compared_arrays(("float32", "float32"), a.view("u4"), b.view("u4"), Tolerance(), (0,))
    assert (found.different, found.max_abs, found.max_rel) == (3, 1.0, 0.2)
    assert found.max_ulp == 1 << 21  # from 4 to 5: a quarter of a binade of 2**23 numbers
    assert found.index == (2,)
    b[3] = np.inf
    found = compared_arrays(("float32", "float32"), a.view("u4"), b.view("u4"), Tolerance(), (0,))
    assert (found.max_abs, found.max_rel, found.index) == (np.inf, np.inf, (3,))


@given(st.integers(0, 5), st.integers(0, 1 << 17))
def test_differences_are_counted_over_blocks(count, seed):
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    b = a.copy()
    places = rng.choice(len(a), count, replace=False)
    b.view(np.uint32)[places] ^= 1
    comparison = Comparison(("float32", "float32"), Tolerance())
    comparison.add(a.view("u4").reshape(100, 1000), b.view("u4").reshape(100, 1000), (7, 0))
    assert comparison.found.different == count
    if count:
        row, column = comparison.found.index or ()
        assert (row - 7) * 1000 + column in places


@given(st.lists(bit_pairs(), min_size=1, max_size=12), st.integers(0, 12), st.sampled_from(["bits", "equal"]))
def test_parts_joined_in_order_say_what_the_whole_does(pairs, cut, nan):
    dtype, tolerance = pairs[0][0], Tolerance(rtol=1e-3, nan=nan)
    mask = (1 << WIDTHS[dtype]) - 1
    a, b = (raw(dtype, *(pair[side] & mask for pair in pairs)) for side in (1, 2))
    whole = Comparison((dtype, dtype), tolerance)
    whole.add(a, b, (0,))
    joined = Extremes()
    for part in (slice(0, cut), slice(cut, None)):
        comparison = Comparison((dtype, dtype), tolerance)
        comparison.add(a[part], b[part], (part.start,))
        joined.join(comparison.found)
    assert repr(joined) == repr(whole.found)  # NaNs are equal to themselves there


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 63, 64, 65])
def test_every_byte_has_a_say(count):
    """Eight bytes are compared at a time, and what is left behind them."""
    a = np.arange(count, dtype=np.uint8)
    for at in range(count):
        b = a.copy()
        b[at] ^= 0x80
        comparison = Comparison(("uint8", "uint8"), Tolerance())
        comparison.add(a, b, (0,))
        assert (comparison.found.different, comparison.found.index) == (1, (at,))
    comparison = Comparison(("uint8", "uint8"), Tolerance())
    comparison.add(a, a.copy(), (0,))
    assert comparison.found == Extremes()
