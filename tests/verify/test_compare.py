"""Tolerances against the answers of numpy and Python, over raw bits; objects as torch stores them."""

import argparse
import math
import struct
import sys
import types as python_types
from collections import OrderedDict, defaultdict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.diff import diff_checkpoints
from ckpt_tools.errors import UsageError
from ckpt_tools.model.choices import NanPolicy
from ckpt_tools.model.kernels.casts import float32_to_bfloat16, raw_dtype
from ckpt_tools.verify.compare.arrays import Comparison, Extremes, Tolerance, to_float64, ulp_distance
from ckpt_tools.verify.compare.differences import DiffOptions
from ckpt_tools.verify.compare.objects import diff_values
from tests.conftest import LLAMA, fixture_dir
from tests.damage import copy_of, drop_key, metadata_of

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


MODULE = "megatron.core.made_up"


class Items(list):
    """A list class of Megatron's, as far as a pickle knows."""


class Fields(dict):
    """A dict class."""


class Rebuilt:
    """An object that a pickle makes by a call."""

    def __init__(self, *args):
        self.given = args

    def __reduce__(self):
        return Rebuilt, self.given


class Plain:
    """An object with attributes."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The classes under a name that checkpoints may hold, for torch to store."""
    module = python_types.ModuleType(MODULE)
    for cls in (Items, Fields, Rebuilt, Plain):
        monkeypatch.setattr(cls, "__module__", MODULE)
        setattr(module, cls.__name__, cls)
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, python_types.ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)


def store(value, folder):
    dcp.save({"o": Plain(v=value), "w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    return str(folder)


def differences(pairs, tmp_path, **options):
    """For each pair of values the names under which they differ, when all are stored in one checkpoint."""
    a = store(dict(enumerate(a for a, _ in pairs)), tmp_path / "a")
    b = store(dict(enumerate(b for _, b in pairs)), tmp_path / "b")
    report = diff_checkpoints(a, b, DiffOptions(**options))
    assert all(t.kind == "equal" for t in report.tensors)
    names: list[list[str]] = [[] for _ in pairs]
    for value in report.values:
        number, _, name = value.name.removeprefix("o.v.").partition(".")
        names[int(number)].append(name)
    return names


def negative_nan():
    return struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]


def ordered(metadata):
    found: Any = OrderedDict(a=1)
    found._metadata = metadata
    return found


def default_of(factory: Any, values: dict[str, Any]) -> Any:
    """A dict whose values need not be what its factory makes."""
    return defaultdict(factory, values)


def equal_values():
    return [
        OrderedDict(a=1, b=[2]),
        defaultdict(list, {"a": [1]}),
        Items([1, {"a": 2}]),
        Fields(a=1, b=(2,)),
        Rebuilt(1, "x", [2.0]),
        Plain(a=1, nan=math.nan),
        argparse.Namespace(a=1, b=None),
        np.arange(6.0).reshape(2, 3),
        np.float64(2.5),
        {1: "a", (True, 1.0): "b", None: "c", frozenset({1, 2}): "d", math.nan: "e"},
        {1, True and 2, "x"},
        [math.nan, -math.inf, -0.0, complex(math.nan, 1)],
        torch.tensor([1.0, math.nan]),
        torch.float8_e4m3fn,
        [b"x", bytearray(b"x"), slice(1, 2), 10**30, torch.Size([1, 2])],
        ordered({"": {"version": 1}}),
    ]


def test_the_same_value_is_equal(tmp_path):
    pairs = list(zip(equal_values(), equal_values(), strict=True))
    assert differences(pairs, tmp_path) == [[] for _ in pairs]


DIFFERENT: list[tuple[Any, Any, list[str]]] = [
    (OrderedDict(a=1), OrderedDict(a=2), ["a"]),
    (OrderedDict(a=1), {"a": 1}, [""]),
    (OrderedDict([("a", 1), ("b", 2)]), OrderedDict([("b", 2), ("a", 1)]), [""]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
    (ordered({"version": 1}), ordered({"version": 2}), ["_metadata.version"]),
    (defaultdict(list, {"a": [1]}), defaultdict(list, {"a": [2]}), ["a.0"]),
    (default_of(list, {"a": 1}), default_of(list, {"b": 1}), ["a", "b"]),
    (default_of(list, {"a": 1}), default_of(dict, {"a": 1}), ["args.0"]),
    (Items([1, 2]), Items([1, 3]), ["1"]),
    (Items([1, 2]), Items([1]), ["1"]),
    (Items([1]), [1], [""]),
    (Fields(a=[1]), Fields(a=[2]), ["a.0"]),
    (Fields(a=1), {"a": 1}, [""]),
    (Rebuilt(1, [2]), Rebuilt(1, [3]), ["args.1.0"]),
    (Rebuilt(1), Rebuilt(1, 2), ["args.1"]),
    (Rebuilt(1), Rebuilt(True), ["args.0"]),
    (Plain(a=1), Plain(a=2), ["a"]),
    (Plain(a=1), Plain(b=1), ["a", "b"]),
    (Plain(a=1), argparse.Namespace(a=1), [""]),
    (argparse.Namespace(a=1), argparse.Namespace(a=True), ["a"]),
    (1, True, [""]),
    (0, False, [""]),
    (1, 1.0, [""]),
    ("1", 1, [""]),
    (b"x", bytearray(b"x"), [""]),
    ({1: "a"}, {True: "a"}, ["1", "True"]),
    ({1: "a"}, {1.0: "a"}, ["1", "1.0"]),
    ({(1,): "a"}, {(True,): "a"}, ["(1,)", "(True,)"]),
    ({0.0: "a"}, {-0.0: "a"}, ["0.0", "-0.0"]),
    ({1, 2}, {True, 2}, [""]),
    (frozenset({1}), {1}, [""]),
    (slice(1, 2), slice(True, 2), ["start"]),
    (0.0, -0.0, [""]),
    (math.nan, negative_nan(), []),
    (math.nan, 1.0, [""]),
    (complex(0, 1), complex(-0.0, 1), [""]),
    (np.arange(3.0), np.arange(3.0) + 1, ["state.4"]),
    (np.float64(1), np.float32(1), ["*"]),  # whatever the state of numpy's types looks like in this release
    (torch.tensor([1.0]), torch.tensor([2.0]), [""]),
    (torch.tensor([1]), torch.tensor([1], dtype=torch.int32), [""]),
    (torch.float32, torch.float64, [""]),
]


def test_what_differs_is_named(tmp_path):
    found = differences([(a, b) for a, b, _ in DIFFERENT], tmp_path)
    for (a, b, names), told in zip(DIFFERENT, found, strict=True):
        assert told == names or (told and names == ["*"]), (a, b)


def test_values_that_are_nested_too_deeply():
    a, b = [], []  # type: ignore[var-annotated]
    for _ in range(100):
        a, b = [a], [b]
    assert [d.a for d in diff_values("v", a, b, Tolerance())] == ["nested too deeply to compare"]


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "is_equal"),
    [
        (math.inf, math.inf, Tolerance(atol=1.0, nan="equal"), True),
        (-math.inf, -math.inf, Tolerance(atol=1.0, rtol=0.5, nan="equal"), True),
        (math.inf, -math.inf, Tolerance(atol=1e300, rtol=10.0, nan="equal"), False),
        (math.inf, 1.0, Tolerance(atol=1e300, rtol=10.0, nan="equal"), False),
        (math.inf, sys.float_info.max, Tolerance(ulp=8, nan="equal"), False),
        (math.inf, math.nan, Tolerance(atol=1.0, nan="equal"), False),
        (0.0, -0.0, Tolerance(atol=1e-9, nan="equal"), True),
        (1.0, 1.0 + 1e-12, Tolerance(atol=1e-9), True),
        (1.0, 1.1, Tolerance(atol=1e-9), False),
        (complex(1, math.inf), complex(1 + 1e-12, math.inf), Tolerance(atol=1e-9), True),
        (math.nan, math.nan, Tolerance(nan="different"), False),
        (math.nan, negative_nan(), Tolerance(nan="bits"), True),
    ],
)
def test_numbers_within_a_tolerance(a, b, tolerance, is_equal, tmp_path):
    """The same in objects, in tensors inside of objects, and in tensors."""
    pairs: list[tuple[Any, Any]] = [(a, b)]
    if not isinstance(a, complex) and tolerance.nan != "bits":
        tensors = [torch.tensor([v], dtype=torch.float64) for v in (a, b)]
        pairs.append((tensors[0], tensors[1]))
        for name, tensor in zip("xy", tensors, strict=True):
            dcp.save({"w": tensor}, checkpoint_id=tmp_path / name, no_dist=True)
        report = diff_checkpoints(str(tmp_path / "x"), str(tmp_path / "y"), DiffOptions(tolerance))
        assert report.is_equal is is_equal
    assert {found == [] for found in differences(pairs, tmp_path, tolerance=tolerance)} == {is_equal}


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--keys", "nothing*"], 2, "'nothing*' matches nothing"),
        (["--keys", "common_state.args.no_such"], 2, "matches nothing"),
        (["--keys", "common_state.args.bf16"], 0, "equal"),
        (["--keys", "decoder.*", "--keys", "absent.*"], 2, "'absent.*' matches nothing"),
        (["--keys", "decoder.*", "--ignore", "*"], 2, "leave out everything"),
        (["--ignore", "*"], 2, "leave out everything"),
        (["--ignore", "common_state.args.no_such"], 0, "matches nothing"),
        (["--ignore", "*.bf16"], 0, "equal"),
    ],
)
def test_globs_that_match_nothing_make_no_checkpoints_equal(flags, code, said, capsys):
    root = str(fixture_dir(LLAMA))
    assert run(["diff", root, root, *flags]) == code
    out = capsys.readouterr()
    assert said in (out.err if code else out.out)
    if flags == ["--ignore", "*.bf16"]:
        assert "matches nothing" not in out.out


def test_a_part_on_one_side_only_is_named_by_its_glob(tmp_path):
    a, b = store({"x": 1}, tmp_path / "a"), store({"x": 1, "y": None}, tmp_path / "b")
    report = diff_checkpoints(a, b, DiffOptions(keys=("o.v.y",)))
    assert [(d.name, d.a, d.b) for d in report.values] == [("o.v.y", None, "None")]
    with pytest.raises(UsageError):
        diff_checkpoints(a, b, DiffOptions(keys=("o.v.z",)))


@pytest.mark.parametrize("side", [0, 1])
def test_keys_on_one_side_are_a_difference(side, tmp_path, capsys):
    full, less = str(fixture_dir(LLAMA)), copy_of(LLAMA, tmp_path)
    with metadata_of(less) as metadata:
        drop_key(metadata, "decoder.final_layernorm.weight")
        drop_key(metadata, "rng_state/shard_0.0_1.2")
    pair = [full, str(less)] if side else [str(less), full]
    assert run(["diff", *pair, "--by", "keys"]) == 1
    out = capsys.readouterr().out
    assert f"decoder.final_layernorm.weight: only in {'AB'[1 - side]}" in out
    assert "rng_state/shard_0.0_1.2: " in out
