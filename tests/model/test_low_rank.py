"""Low-rank sums against torch in double, on whole tensors and on any tiling."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.model.box import full_box
from ckpt_tools.model.dtypes import Form
from ckpt_tools.model.kernels import low_rank
from ckpt_tools.model.kernels.kernel import Kernel
from ckpt_tools.model.kernels.low_rank import AddLowRank
from tests.model.test_kernels import by_tiles
from tests.strategies import shapes, tilings

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
