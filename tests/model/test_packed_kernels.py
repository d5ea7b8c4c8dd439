"""4-bit kernels against torch on whole tensors, on any tiling; and kernels whose axes are split."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.model.box import full_box
from ckpt_tools.model.dtypes import Form
from ckpt_tools.model.kernels.kernel import Dequantize, Reshaped, reshaped
from ckpt_tools.model.kernels.packed import DecodeMxfp4, UnpackInt4
from tests.model.test_kernels import by_tiles
from tests.strategies import shapes, tilings

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


def bits(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def test_every_code_with_every_scale_is_what_torch_makes_of_it():
    """Down to the smallest bfloat16s, and up to the infinities."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16).repeat(255, 1, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).reshape(255, 1, 1).repeat(1, 16, 1)
    kernel = DecodeMxfp4()
    form = kernel.form([Form("uint8", tuple(blocks.shape)), Form("uint8", tuple(scales.shape))])
    found = kernel.compute(full_box(form.shape), [blocks.numpy(), scales.numpy()])
    assert found.tobytes() == bits(mxfp4(blocks, scales)).tobytes()
    assert (found & 0x7FFF == 0x7F80).any() and (found & 0x7F80 == 0).any()


@given(st.data(), shapes(3, 3, max_side=3))
def test_mxfp4_by_tiles(data, shape):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
    scales = rng.integers(100, 150, shape, np.uint8)
    forms = [Form("uint8", blocks.shape), Form("uint8", shape)]
    expected = bits(mxfp4(torch.from_numpy(blocks), torch.from_numpy(scales)))
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
    assert found.tobytes() == bits(expected).tobytes()


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
