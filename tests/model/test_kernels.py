"""Kernels against torch on whole tensors, and against themselves on any tiling."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.dtypes import Form
from ckpt_tools.model.kernels.casts import Array, cast, numpy_dtype
from ckpt_tools.model.kernels.kernel import (
    MINIFLOATS,
    Dequantize,
    JoinRemainder,
    Kernel,
    WeightedMean,
    Zeros,
    minifloat_values,
)
from ckpt_tools.model.kernels.low_rank import AddLowRank
from ckpt_tools.model.kernels.packed import DecodeMxfp4, UnpackInt4
from ckpt_tools.model.kernels.quantize import BlockScales, QuantizeBlocks
from tests.strategies import shapes, tilings


def by_tiles(kernel: Kernel, inputs: list[Array], forms: list[Form], tiling: list[Box]) -> Array:
    """The kernel's result, tile by tile."""
    form = kernel.form(forms)
    out = np.empty(form.shape, numpy_dtype(form.dtype))
    for box in tiling:
        needed = kernel.needs(box, forms)
        tiles = [a[_index(b)] for a, b in zip(inputs, needed, strict=True)]
        out[_index(box)] = kernel.compute(box, tiles)
    return out


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.start, box.stop))


@pytest.mark.parametrize("dtype", MINIFLOATS)
def test_every_8_bit_float_has_the_value_torch_gives_it(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype))
    expected = codes.to(torch.float32).numpy()
    assert np.array_equal(minifloat_values(dtype), expected, equal_nan=True)
    zeros = expected == 0
    assert np.array_equal(np.signbit(minifloat_values(dtype)[zeros]), np.signbit(expected[zeros]))


def masters(
    rng: np.random.Generator, shape: tuple[int, ...], exponents: int = 30
) -> tuple[Array, Array, Array]:
    """Bits of bf16 weights, their int16 remainders, and the fp32 masters that both together are, by torch."""
    scale = 10.0 ** rng.integers(-exponents, exponents)
    bits = np.asarray(rng.standard_normal(shape) * scale, np.float32).view(np.uint32)
    bits[rng.random(shape) < 0.3] &= np.uint32(0xFFFF0000)
    bits[rng.random(shape) < 0.3] |= np.uint32(0x8000)
    master = torch.from_numpy(bits.view(np.float32))
    weight = master.to(torch.bfloat16)
    bits, whole = weight.view(torch.int16).to(torch.int32) << 16, master.view(torch.int32)
    remainder = whole - bits
    up = remainder > 32767  # a tie that torch rounds down; Transformer Engine rounds it up
    weight = weight.view(torch.int16) + up.to(torch.int16)
    remainder = torch.where(up, -32768, remainder).to(torch.int16)
    return weight.view(torch.uint16).numpy(), remainder.numpy(), master.numpy()


@given(st.data(), shapes(1, 3), st.sampled_from(["int16", "float32"]))
def test_a_master_is_the_weight_and_its_remainder_together(data, shape, dtype):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    weight, remainder, expected = masters(rng, shape)
    forms = [Form("bfloat16", shape), Form(dtype, shape)]
    inputs = [weight, remainder.astype(dtype)]
    found = by_tiles(JoinRemainder(dtype), inputs, forms, data.draw(tilings(shape)))
    assert found.tobytes() == expected.tobytes()


@given(st.data(), shapes(1, 3))
def test_any_32_bits_are_joined_of_their_halves(data, shape):
    """Halfway masters, NaNs and infinities too; the halves by 64-bit integers."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    bits = rng.integers(0, 1 << 32, shape, np.uint64).astype(np.uint32)
    bits[rng.random(shape) < 0.3] &= np.uint32(0xFFFF0000)
    bits[rng.random(shape) < 0.3] |= np.uint32(0x8000)
    tiling = data.draw(tilings(shape))
    whole = bits.astype(np.int64) + 32768  # a master that lies halfway is rounded up
    weight = (whole // 65536 % 65536).astype(np.uint16)
    remainder = (whole % 65536 - 32768).astype(np.float32)
    forms = [Form("bfloat16", shape), Form("float32", shape)]
    joined = by_tiles(JoinRemainder("float32"), [weight, remainder], forms, tiling)
    assert joined.tobytes() == bits.tobytes()


@pytest.mark.parametrize("number", [0.5, 32768.0, -32769.0, np.nan, np.inf])
def test_a_number_that_is_not_a_remainder_is_refused(number):
    low = np.array([1.0, number], np.float32)
    with pytest.raises(ValueError, match="not a 16-bit remainder"):
        JoinRemainder("float32").compute(full_box((2,)), [np.zeros(2, np.uint16), low])


@given(
    st.data(),
    shapes(1, 3),
    st.sampled_from(["float8_e4m3fn", "float8_e5m2"]),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_a_quantized_tensor_is_its_numbers_times_their_blocks_scales(data, shape, stored, dtype):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    block = tuple(data.draw(st.integers(1, 4)) for _ in shape) if data.draw(st.booleans()) else ()
    coded = rng.integers(0, 256, shape, np.uint8)
    grid = tuple(-(-n // b) for n, b in zip(shape, block, strict=False))
    scales = rng.random(grid, np.float32).reshape(grid)
    wide = torch.from_numpy(scales)
    for axis, width in enumerate(block):
        wide = wide.repeat_interleave(width, axis).narrow(axis, 0, shape[axis])
    values = torch.from_numpy(coded).view(getattr(torch, stored)).to(torch.float32) * wide
    expected = values.to(getattr(torch, dtype))
    kernel = Dequantize(stored, block, dtype)
    forms = [Form(stored, shape), Form("float32", grid)]
    found = by_tiles(kernel, [coded, scales], forms, data.draw(tilings(shape)))
    got = torch.from_numpy(found).view(expected.dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0), expected.nan_to_num(0))


@given(st.data(), shapes(1, 2), st.sampled_from([np.float32, np.float16]))
def test_a_mean_is_rounded_as_numpy_rounds_doubles(data, shape, kind):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    inputs = [
        (rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 12, shape)).astype(kind) for _ in range(3)
    ]
    weights, name = (0.5, 0.25, 2.0**-25), kind.__name__
    expected = sum(w * x.astype(np.float64) for w, x in zip(weights, inputs, strict=True))
    found = by_tiles(WeightedMean(name, weights), inputs, [Form(name, shape)] * 3, data.draw(tilings(shape)))
    assert found.tobytes() == np.asarray(expected).astype(kind).tobytes()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("bfloat16", (1, 1 + 2**-7), 1),  # halfway: to even
        ("bfloat16", (1 + 2**-7, 1 + 2**-6), 1 + 2**-6),
        ("bfloat16", (1, 1 + 2**-7, 2**-10), 1 + 2**-7),  # a bit more, which float32 does not see
        ("bfloat16", (1 + 2**-7, 1 + 2**-6, -(2**-10)), 1 + 2**-7),
        ("float16", (1, 1 + 2**-10), 1),
        ("float16", (1, 1 + 2**-10, 2**-10), 1 + 2**-10),
        ("bfloat16", (2.0**-133, 0), 0),  # the smallest subnormal: halfway to zero
        ("bfloat16", (2.0**-133, 2.0**-132), 2.0**-132),
        ("bfloat16", (np.inf, 1), np.inf),
        ("bfloat16", (np.inf, -np.inf), np.nan),
        ("float16", (65504, 65504), 65504),
    ],
)
def test_a_mean_of_16_bit_numbers_is_rounded_once_too(dtype, values, expected, sign):
    inputs = [cast(np.array(sign * value, np.float64), "float64", dtype) for value in values]
    shares = (0.5, 0.5, 2.0**-30)[: len(values)]
    found = WeightedMean(dtype, shares).compute(Box((), ()), inputs)
    assert found.shape == ()
    assert np.array_equal(cast(found, dtype, "float64"), np.float64(sign * expected), equal_nan=True)


BLOCKS, WORDS = Form("uint8", (2, 4, 3, 16)), Form("int32", (5, 2))
FACTORS = [Form("float32", (4, 2)), Form("float32", (2, 6))]


@pytest.mark.parametrize(
    ("kernel", "forms"),
    [
        (JoinRemainder(), [Form("float16", (2,)), Form("int16", (2,))]),
        (JoinRemainder(), [Form("bfloat16", (2,)), Form("int16", (3,))]),
        (JoinRemainder("float32"), [Form("bfloat16", (2,)), Form("int16", (2,))]),
        (Dequantize("float8_e4m3fn", (2,)), [Form("float8_e5m2", (4,)), Form("float32", (2,))]),
        (Dequantize("float8_e4m3fn", (2,)), [Form("float8_e4m3fn", (4,)), Form("float32", (3,))]),
        (Dequantize("float8_e4m3fn", (2, 2)), [Form("float8_e4m3fn", (4,)), Form("float32", (2,))]),
        (Dequantize("float8_e4m3fn"), [Form("float8_e4m3fn", (4,)), Form("float32", (4,))]),
        (WeightedMean("float32", (1.0,)), [Form("bfloat16", (4,))]),
        (WeightedMean("float32", (0.5, 0.5)), [Form("float32", (4,)), Form("float32", (5,))]),
        (WeightedMean("int32", (1.0,)), [Form("int32", (4,))]),
        (Zeros("float32", (2,)), [Form("float32", (2,))]),
        (DecodeMxfp4(), [BLOCKS, Form("uint8", (2, 4, 2))]),
        (DecodeMxfp4(), [BLOCKS, Form("float32", (2, 4, 3))]),
        (DecodeMxfp4(), [Form("uint8", (2, 4, 3, 8)), Form("uint8", (2, 4, 3))]),
        (DecodeMxfp4(), [Form("uint8", (4, 3, 16)), Form("uint8", (4, 3))]),
        (UnpackInt4(16, 4), [WORDS, Form("float32", (5, 3))]),
        (UnpackInt4(15, 4), [WORDS, Form("float32", (5, 4))]),
        (UnpackInt4(24, 4), [WORDS, Form("float32", (5, 6))]),
        (UnpackInt4(16, 4), [Form("int64", (5, 2)), Form("float32", (5, 4))]),
        (UnpackInt4(16, 4), [Form("int32", ()), Form("float32", ())]),
        (UnpackInt4(16, 4), [WORDS, Form("float32", (5, 4)), Form("int32", (1, 4))]),
        (UnpackInt4(16, 4, zero_points=True), [WORDS, Form("float32", (5, 4))]),
        (UnpackInt4(16, 4, zero_points=True), [WORDS, Form("float32", (5, 4)), Form("int32", (5, 4))]),
        (QuantizeBlocks("bfloat16"), [Form("float32", (4, 4))]),
        (QuantizeBlocks("bfloat16"), [Form("bfloat16", (4,))]),
        (BlockScales("bfloat16"), [Form("bfloat16", (2, 4, 4))]),
        (AddLowRank("float32", 1.0), [Form("bfloat16", (4, 6)), *FACTORS]),
        (AddLowRank("float32", 1.0), [Form("float32", (4, 6)), FACTORS[0], Form("float32", (3, 6))]),
        (AddLowRank("float32", 1.0), [Form("float32", (4, 6)), Form("float32", (5, 2)), FACTORS[1]]),
        (AddLowRank("float32", 1.0), [Form("float32", (1, 4, 6)), *FACTORS]),
    ],
)
def test_inputs_of_another_form_are_refused(kernel, forms):
    with pytest.raises(ValueError, match=r"\w"):
        kernel.form(forms)


@given(st.data())
def test_zeros_are_made_of_nothing(data):
    shape = data.draw(shapes(0, 3))
    kernel = Zeros("float32", shape)
    found = by_tiles(kernel, [], [], data.draw(tilings(shape)))
    assert found.dtype == np.float32 and found.tobytes() == np.zeros(shape, np.float32).tobytes()
