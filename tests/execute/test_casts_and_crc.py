"""Casts equal torch's, bit for bit; joined checksums equal zlib's."""

import itertools
import runpy
import sys
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import VerificationError
from ckpt_tools.formats.storage import crc
from ckpt_tools.model.dtypes import CASTABLE, ITEMSIZE
from ckpt_tools.model.kernels.casts import Array, cast, cast_checked, cast_raw, numpy_dtype, raw_dtype

with pytest.MonkeyPatch.context() as _patch:  # as on a platform for which isal has no wheel
    _patch.setitem(sys.modules, "isal.isal_zlib", None)
    WITHOUT_ISAL = runpy.run_path(crc.__file__)


def bits_of(tensor: torch.Tensor, dtype: str) -> Array:
    return np.frombuffer(tensor.view(torch.uint8).numpy().tobytes(), f"u{ITEMSIZE[dtype]}")


def patterns(dtype: str) -> Array:
    """All 16-bit patterns, or those of wider types where rounding turns, and noise."""
    if ITEMSIZE[dtype] == 2:
        return np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(1)
    if ITEMSIZE[dtype] == 4:
        high = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
        low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001, 0x3000], np.uint32)
        return np.concatenate([(high | low).ravel(), rng.integers(0, 1 << 32, 1 << 16, np.uint32)])
    floats = np.concatenate(
        [patterns("float32").view(np.float32).astype(np.float64) * (1 + d) for d in (0, 1e-9, -1e-9)]
    )
    return np.concatenate([floats.view(np.uint64), rng.integers(0, 1 << 63, 1 << 16, np.uint64)])


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
@pytest.mark.parametrize(("source", "target"), [*itertools.product(sorted(CASTABLE), repeat=2)])
def test_casts_equal_torch(source, target):
    bits = patterns(source)
    values = torch.from_numpy(bits.view("u1").copy()).view(getattr(torch, source))
    wanted_tensor = values.to(getattr(torch, target))
    found = cast(bits.view(numpy_dtype(source)), source, target)
    assert found.dtype == numpy_dtype(target)
    is_nan = wanted_tensor.isnan().numpy()
    got = found.view(f"u{ITEMSIZE[target]}")
    assert np.array_equal(got[~is_nan], bits_of(wanted_tensor, target)[~is_nan])
    nans = torch.from_numpy(got[is_nan].view("u1").copy()).view(getattr(torch, target))
    assert nans.isnan().all()  # a NaN's payload is not promised, that it is one is
    raw = cast_raw(bits.view(raw_dtype(source)), source, target)
    assert raw.dtype == raw_dtype(target)
    assert raw.tobytes() == found.tobytes()


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(sorted(CASTABLE), 2)])
def test_a_checked_cast_counts_what_it_changes_and_refuses_infinities(source, target):
    bits = patterns(source)
    values = torch.from_numpy(bits.view("u1").copy()).view(getattr(torch, source))
    there = values.to(getattr(torch, target))
    too_large = (there.isinf() & values.isfinite()).numpy()
    changed = ((there.to(values.dtype) != values) & ~values.isnan()).numpy()
    raw = bits.view(raw_dtype(source))
    result, count = cast_checked(raw[~too_large], source, target, "w", (0,))
    assert result.tobytes() == cast_raw(raw[~too_large], source, target).tobytes()
    assert count == changed[~too_large].sum()
    if not too_large.any():
        return
    first = int(too_large.argmax())
    with pytest.raises(VerificationError) as caught:
        cast_checked(raw[None], source, target, "w", (7, 100))
    number = values[first].double().item()
    assert str(caught.value).startswith(
        f"w[7, {100 + first}]: {number!r} is too large for {target} and would become"
    )
    assert f"as would {too_large.sum():,} of the {bits.size:,} elements" in str(caught.value)


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize(
    ("source", "target", "first"),  # the smallest number that becomes infinite, as bits
    [
        ("float32", "bfloat16", 0x7F7F_8000),
        ("float32", "float16", 0x477F_F000),
        ("bfloat16", "float16", 0x4780),
        ("float64", "float32", 0x47EF_FFFF_F000_0000),
        ("float64", "bfloat16", 0x47EF_EFFF_F000_0000),
        ("float64", "float16", 0x40EF_FDFF_F000_0000),
    ],
)
def test_the_smallest_number_that_becomes_infinite_is_refused_alone(source, target, first, sign):
    bits = first | sign << (8 * ITEMSIZE[source] - 1)
    cast_checked(np.array([bits - 1], raw_dtype(source)), source, target, "w", (0,))
    with pytest.raises(VerificationError, match="too large"):
        cast_checked(np.array([bits], raw_dtype(source)), source, target, "w", (0,))


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_numpy_types_have_the_size_of_the_element(dtype):
    assert numpy_dtype(dtype).itemsize == raw_dtype(dtype).itemsize == ITEMSIZE[dtype]
    assert getattr(torch, dtype).itemsize == ITEMSIZE[dtype]


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_joined_checksums(a, b):
    assert crc.crc32(a) == zlib.crc32(a)
    assert crc.combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_joined_checksum_of_much():
    block = bytes(1 << 20)
    total = 0
    for _ in range(40):
        total = crc.combine(total, zlib.crc32(block), len(block))
    assert total == zlib.crc32(bytes(40 << 20))


@given(st.integers(0, 100_000))
def test_the_sum_of_zeros_is_zlibs(nbytes):
    assert crc.of_zeros(nbytes) == zlib.crc32(bytes(nbytes))


@given(
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 0xFFFFFFFF),
    st.one_of(st.integers(0, 300), st.integers(0, 1 << 50)),
)
def test_sums_are_joined_alike_without_isal(first, second, nbytes):
    assert WITHOUT_ISAL["combine"](first, second, nbytes) == crc.combine(first, second, nbytes)
    assert WITHOUT_ISAL["of_zeros"](nbytes) == crc.of_zeros(nbytes)
    assert WITHOUT_ISAL["crc32"] is zlib.crc32
