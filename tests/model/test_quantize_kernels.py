"""Block FP8 against torch on whole tensors, and against itself on any tiling."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.model.box import full_box
from ckpt_tools.model.dtypes import Form
from ckpt_tools.model.kernels.casts import Array
from ckpt_tools.model.kernels.kernel import Dequantize, Kernel
from ckpt_tools.model.kernels.quantize import BlockScales, QuantizeBlocks, e4m3_codes
from tests.model.test_kernels import by_tiles
from tests.strategies import shapes, tilings

_: tuple[Kernel, ...] = (QuantizeBlocks("bfloat16"), BlockScales("bfloat16"))


def reference(
    weight: torch.Tensor, block: tuple[int, int], powers: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, a block at a time, in the words of DeepSeek-V3's kernel."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty([-(-n // b) for n, b in zip(weight.shape, block, strict=True)])
    for i, rows in enumerate(weight.float().split(block[0], 0)):
        for j, part in enumerate(rows.split(block[1], 1)):
            scale = part.abs().max() / 448
            if scale == 0 and not part.any():
                scale = torch.tensor(1.0)
            scale = scale.clamp(min=2.0**-126)
            if powers:
                scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
            scales[i, j] = scale
            rows_of = slice(i * block[0], i * block[0] + part.shape[0])
            codes[rows_of, j * block[1] : j * block[1] + part.shape[1]] = (part / scale).to(
                torch.float8_e4m3fn
            )
    return codes, scales


def bits(tensor: torch.Tensor) -> Array:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@given(
    st.data(),
    shapes(2, 2),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.booleans(),
)
def test_codes_and_scales_are_those_of_the_reference(data, shape, dtype, block, powers):
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 32)))
    weight = torch.randn(shape, generator=random) * torch.exp2(torch.randint(-20, 9, shape, generator=random))
    weight = torch.where(torch.rand(shape, generator=random) < 0.3, 0, weight).to(dtype)
    codes, scales = reference(weight, block, powers)
    name = str(dtype).removeprefix("torch.")
    forms = [Form(name, shape)]
    kernels = QuantizeBlocks(name, block, powers), BlockScales(name, block, powers)
    found = [
        by_tiles(kernel, [bits(weight)], forms, data.draw(tilings(kernel.form(forms).shape)))
        for kernel in kernels
    ]
    assert found[1].tobytes() == scales.numpy().tobytes()
    assert found[0].tobytes() == codes.view(torch.uint8).numpy().tobytes()


def test_every_float32_has_the_code_that_torch_gives_it():
    numbers = torch.arange(0, 1 << 32, 4999, dtype=torch.int64)
    values = torch.where(numbers < 1 << 31, numbers, numbers - (1 << 32)).to(torch.int32).view(torch.float32)
    values = values[values.isfinite()]
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    values = torch.cat(
        [values, codes, (codes[1:] + codes[:-1]) / 2]
    )  # and every number, and halfway between two
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert e4m3_codes(values.numpy()).tobytes() == expected.numpy().tobytes()


def test_dequantized_values_are_within_half_a_step():
    weight = torch.randn((300, 260), generator=torch.Generator().manual_seed(2)).bfloat16()
    forms = [Form("bfloat16", (300, 260))]
    codes = QuantizeBlocks("bfloat16").compute(full_box((300, 260)), [bits(weight)])
    scales = BlockScales("bfloat16").compute(full_box((3, 3)), [bits(weight)])
    assert BlockScales("bfloat16").form(forms) == Form("float32", (3, 3))
    back = Dequantize("float8_e4m3fn", (128, 128), "float32").compute(full_box((300, 260)), [codes, scales])
    error = np.abs(back - weight.float().numpy())
    wide = scales.repeat(128, 0).repeat(128, 1)[:300, :260]
    assert (error <= np.maximum(np.abs(back) / 16, wide * 2.0**-10) * 1.001).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_is_refused(value):
    weight = np.zeros((3, 3), np.float32)
    weight[1, 1] = value
    for kernel in (QuantizeBlocks("float32", (2, 2)), BlockScales("float32", (2, 2))):
        box = full_box(kernel.form([Form("float32", (3, 3))]).shape)
        with pytest.raises(ValueError, match="infinities and NaNs"):
            kernel.compute(box, [weight])
