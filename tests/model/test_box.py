"""Boxes against sets of indices."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.model.box import Box, flat_range_to_boxes, full_box, row_major_strides, split_axes
from tests.strategies import boxes, shapes


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(range, box.start, box.stop)))


@given(st.data())
def test_intersection_containment_and_volume_are_those_of_sets(data):
    shape = data.draw(shapes(max_dims=3))
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = a.intersect(b)
    assert (indices(common) if common else set()) == indices(a) & indices(b)
    assert a.volume == len(indices(a))
    assert a.is_empty == (not indices(a))
    if not b.is_empty:
        assert a.contains(b) == (indices(b) <= indices(a))
    assert a.intersect(full_box(shape)) == a.intersect(Box(*a)) == (None if a.is_empty else a)


@given(st.data())
def test_shift_and_relative_to_are_inverse(data):
    shape = data.draw(shapes())
    a, origin = data.draw(boxes(shape)), data.draw(boxes(shape))
    assert a.relative_to(origin).shift(origin.start) == a
    assert a.relative_to(a) == full_box(a.size)


@given(st.data())
def test_flat_ranges_become_boxes_in_order(data):
    shape = data.draw(shapes())
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    strides = row_major_strides(shape)
    parts = flat_range_to_boxes(start, stop, shape)
    flat = [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for part in parts
        for index in itertools.product(*map(range, part.start, part.stop))
    ]
    assert flat == list(range(start, stop))
    assert len(parts) <= max(2 * len(shape) - 1, 1)


def test_a_range_outside_the_tensor_is_refused():
    with pytest.raises(ValueError, match=r"\[3, 7\) is outside a tensor of shape \(2, 3\)"):
        flat_range_to_boxes(3, 7, (2, 3))


def test_a_scalar_has_one_element():
    scalar = full_box(())
    assert (scalar.volume, scalar.is_empty, scalar.intersect(scalar), str(scalar)) == (1, False, scalar, "[]")
    assert flat_range_to_boxes(0, 1, ()) == [scalar]


def test_a_box_of_split_axes_holds_the_same_elements():
    shape, seen = (8, 6), (2, 4, 3, 2)
    numbers = np.arange(48)
    whole, split = numbers.reshape(shape), numbers.reshape(seen)
    boxes = 0
    for start in np.ndindex(*shape):
        for stop in np.ndindex(*shape):
            box = Box(start, tuple(b - a + 1 for a, b in zip(start, stop, strict=True)))
            if min(box.size) < 1:
                continue
            found = split_axes(box, shape, seen)
            wanted = whole[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]
            if found is None:  # cut across an axis that is split
                assert any(n != whole_ and (a % step or n % step)
                           for a, n, whole_, step in zip(*box, shape, (4, 2), strict=True))  # fmt: skip
                continue
            boxes += 1
            got = split[tuple(slice(a, a + n) for a, n in zip(*found, strict=True))]
            assert got.reshape(-1).tolist() == wanted.reshape(-1).tolist()
    assert boxes == 3 * 6
    assert split_axes(Box((0,), (4,)), (4,), (4, 1, 3)) is None  # more axes than it has elements for
