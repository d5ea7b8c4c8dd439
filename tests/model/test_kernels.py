"""Kernels against torch on whole tensors, and against themselves on any tiling."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.dtypes import Form
from ckpt_tools.model.kernels import low_rank
from ckpt_tools.model.kernels.casts import Array, cast, numpy_dtype
from ckpt_tools.model.kernels.kernel import (
    MINIFLOATS,
    Dequantize,
    JoinRemainder,
    Kernel,
    Reshaped,
    WeightedMean,
    Zeros,
    minifloat_values,
    reshaped,
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


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(experts, in, out) of GPT-OSS blocks, by bfloat16 arithmetic of torch."""
    nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    values = torch.tensor(E2M1, dtype=torch.bfloat16)[nibbles]
    values = torch.ldexp(values, scales.to(torch.int32)[..., None] - 127).to(torch.bfloat16)
    return values.flatten(-2).transpose(1, 2).contiguous()


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """(rows, columns) of -8..7 as int32 words of eight columns."""
    columns = -(-numbers.shape[1] // 8) * 8
    wide = torch.zeros(numbers.shape[0], columns, dtype=torch.int64)
    wide[:, : numbers.shape[1]] = numbers + 8
    words = (wide.reshape(len(wide), -1, 8) << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def code_bits(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def test_every_code_with_every_scale_is_what_torch_makes_of_it():
    """Down to the smallest bfloat16s, and up to the infinities."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16).repeat(255, 1, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).reshape(255, 1, 1).repeat(1, 16, 1)
    kernel = DecodeMxfp4()
    form = kernel.form([Form("uint8", tuple(blocks.shape)), Form("uint8", tuple(scales.shape))])
    found = kernel.compute(full_box(form.shape), [blocks.numpy(), scales.numpy()])
    assert found.tobytes() == code_bits(mxfp4(blocks, scales)).tobytes()
    assert (found & 0x7FFF == 0x7F80).any() and (found & 0x7F80 == 0).any()


@given(st.data(), shapes(3, 3, max_side=3))
def test_mxfp4_by_tiles(data, shape):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
    scales = rng.integers(100, 150, shape, np.uint8)
    forms = [Form("uint8", blocks.shape), Form("uint8", shape)]
    expected = code_bits(mxfp4(torch.from_numpy(blocks), torch.from_numpy(scales)))
    found = by_tiles(DecodeMxfp4(), [blocks, scales], forms, data.draw(tilings(expected.shape)))
    assert found.tobytes() == expected.tobytes()


def test_a_scale_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="scale is 255, which is not a number"):
        DecodeMxfp4().compute(
            full_box((1, 32, 1)), [np.zeros((1, 1, 1, 16), np.uint8), np.full((1, 1, 1), 255, np.uint8)]
        )


@given(
    st.data(),
    st.integers(1, 19),
    st.integers(1, 3),
    st.integers(1, 21),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.booleans(),
)
def test_packed_integers_are_their_numbers_times_their_groups_scales(
    data, rows, groups, group, dtype, with_zeros
):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 32)))
    columns = groups * group
    numbers = torch.randint(-8, 8, (rows, columns), generator=generator)
    zeros = torch.randint(-8, 8, (rows, groups), generator=generator)
    scales = torch.rand((rows, groups), generator=generator).to(getattr(torch, dtype))
    shifted = numbers - zeros.repeat_interleave(group, 1) if with_zeros else numbers
    expected = shifted.to(scales.dtype) * scales.repeat_interleave(group, 1)
    inputs = [pack(numbers), scales.float()] + [pack(zeros.T).T.contiguous()] * with_zeros
    types = ["int32", "float32", "int32"]
    forms = [Form(t, tuple(x.shape)) for t, x in zip(types, inputs, strict=False)]
    kernel = UnpackInt4(columns, group, dtype, with_zeros)
    tiling = data.draw(tilings((rows, columns)))
    found = by_tiles(kernel, [x.numpy() for x in inputs], forms, tiling)
    assert found.tobytes() == code_bits(expected).tobytes()


@given(st.data(), st.lists(shapes(1, 3, max_side=4), min_size=1, max_size=3))
def test_split_axes_hold_the_same_elements(data, splits):
    whole = tuple(int(np.prod(split)) for split in splits)
    shape = tuple(length for split in splits for length in split)
    coded = np.random.default_rng(data.draw(st.integers(0, 1 << 32))).integers(0, 256, whole, np.uint8)
    scales = np.ones(1, np.float32)
    plain = Dequantize("float8_e5m2")
    forms = [Form("float8_e5m2", whole), Form("float32", (1,))]
    expected = plain.compute(full_box(whole), [coded, scales])
    for kernel in (Reshaped(plain, tuple(splits)), reshaped(plain, whole, shape)):
        assert kernel.form(forms) == Form("float32", shape)
        found = by_tiles(kernel, [coded, scales], forms, data.draw(tilings(shape)))
        assert found.tobytes() == expected.tobytes()


def test_axes_are_split_but_not_joined():
    for shape in ((24,), (3, 8), (4, 6, 2), (4,)):
        with pytest.raises(ValueError, match="cannot be split"):
            reshaped(Dequantize("float8_e5m2"), (4, 6), shape)


_: Kernel = AddLowRank("float32", 1.0)


def exact(weight: np.ndarray, left: np.ndarray, right: np.ndarray, *, scale: float) -> torch.Tensor:
    w, b, a = (torch.from_numpy(x).double() for x in (weight, left, right))
    product = torch.zeros(w.shape, dtype=torch.float64)
    for rank in range(a.shape[0]):
        product = product + b[:, rank, None] * a[rank]
    return product * scale + w


@given(st.data(), shapes(2, 2), st.integers(0, 5), st.sampled_from(["float32", "float64"]))
def test_a_sum_is_that_of_doubles_rounded_once(data, shape, rank, dtype):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    sizes = (shape, (shape[0], rank), (rank, shape[1]))
    inputs = [rng.standard_normal(size).astype(dtype) for size in sizes]
    expected = exact(*inputs, scale=0.75).to(getattr(torch, dtype))
    forms = [Form(dtype, size) for size in sizes]
    found = by_tiles(AddLowRank(dtype, 0.75), inputs, forms, data.draw(tilings(shape)))
    assert found.tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (70, 1), (3, 2), (33, 65)])
@pytest.mark.parametrize("rank", [1, 2, 17, 64])
def test_products_are_added_in_the_order_of_the_ranks(shape, rank):
    """Sizes so different that another order gives another sum; a result of one column included."""
    rng = np.random.default_rng(rank)
    sizes = (shape, (shape[0], rank), (rank, shape[1]))
    inputs = [(rng.standard_normal(s) * 2.0 ** rng.integers(-30, 30, s)).astype(np.float32) for s in sizes]
    expected = exact(*inputs, scale=1.0).numpy()
    found = AddLowRank("float64", 1.0).compute(full_box(shape), [one.astype(np.float64) for one in inputs])
    assert found.tobytes() == expected.tobytes()
    turned = [np.asfortranarray(one) for one in inputs]
    assert AddLowRank("float64", 1.0).compute(full_box(shape), turned).tobytes() == expected.tobytes()


def test_blocks_of_a_tile_make_no_difference(monkeypatch):
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal(s).astype(np.float32) for s in ((70, 1100), (70, 3), (3, 1100))]
    kernel = AddLowRank("bfloat16", 0.3)
    first = kernel.compute(full_box((70, 1100)), inputs)
    monkeypatch.setattr(low_rank, "_BLOCK_ROWS", 7)
    monkeypatch.setattr(low_rank, "_BLOCK_COLUMNS", 13)
    assert kernel.compute(full_box((70, 1100)), inputs).tobytes() == first.tobytes()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("dtype", "weight", "delta", "expected"),
    [
        ("bfloat16", 1, 2**-8, 1),  # halfway: to even
        ("bfloat16", 1 + 2**-7, 2**-8, 1 + 2**-6),
        ("bfloat16", 1 + 2**-8, 2**-40, 1 + 2**-7),  # a bit more than halfway, which float32 does not see
        ("bfloat16", 1 + 3 * 2**-8, -(2**-40), 1 + 2**-7),
        ("float16", 1, 2**-11, 1),
        ("float16", 1 + 2**-11, 2**-40, 1 + 2**-10),
        ("float32", 1, 2**-24, 1),
        ("float32", 1, 2**-24 + 2**-40, 1 + 2**-23),
        ("bfloat16", np.inf, 1, np.inf),
        ("float16", np.nan, 1, np.nan),
    ],
)
def test_it_is_rounded_to_nearest_even_once(dtype, weight, delta, expected, sign):
    inputs = [
        np.array([[sign * weight]], np.float64),
        np.array([[sign * delta]], np.float64),
        np.ones((1, 1)),
    ]
    found = torch.from_numpy(AddLowRank(dtype, 1.0).compute(full_box((1, 1)), inputs))
    got = found.view(getattr(torch, dtype)).double().item()
    assert got == sign * expected or (np.isnan(expected) and np.isnan(got))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("float16", 65504.0), ("bfloat16", 3.3895313892515355e38), ("float32", 3.4028234663852886e38)],
)
def test_a_finite_sum_that_would_become_infinite_is_refused(dtype, largest, sign):
    largest *= sign
    one, weight = np.ones((1, 1)), np.array([[largest]])
    kernel = AddLowRank(dtype, largest / 16)
    for others in ([], [np.inf], [np.nan], [-largest]):  # elements beside it hide nothing
        row = np.array([[largest, *others]])
        with pytest.raises(ValueError, match=f"a weight is .*, too large for {dtype}"):
            kernel.compute(full_box(row.shape), [row, one, np.ones(row.shape)])
    still = AddLowRank(dtype, 0.0).compute(full_box((1, 1)), [weight, one, one])
    assert torch.from_numpy(still).view(getattr(torch, dtype)).double().item() == largest


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("weight", [1.0, np.nan])
def test_an_adapter_that_is_not_finite_is_refused(side, odd, weight):
    tiles = [np.full((2, 3), weight), np.zeros((2, 1)), np.zeros((1, 3))]
    kernel = AddLowRank("bfloat16", 1.0, ("l.lora_B", "l.lora_A"))
    kernel.compute(full_box((2, 3)), tiles)
    tiles[side].flat[1] = odd
    name = ("l.lora_B", "l.lora_A")[side - 1]
    with pytest.raises(ValueError, match=f"the adapter's {name} holds {odd!r}"):
        kernel.compute(full_box((2, 3)), tiles)


@pytest.mark.parametrize(
    ("weight", "left", "right"),
    [
        (1.7e308, [1e308], [1.0]),  # the sum
        (0.0, [1e308], [1e308]),  # a product
        (0.0, [1e308, -1e308], [1e308, 1e308]),  # infinity less infinity
    ],
)
def test_sums_that_leave_doubles_are_refused(weight, left, right):
    tiles = [np.array([[weight]]), np.array([left]), np.array([right]).T]
    with pytest.raises(ValueError, match=r"a weight is (inf|nan), too large for float64 \(B times A\)"):
        AddLowRank("float64", 1.0).compute(full_box((1, 1)), tiles)
