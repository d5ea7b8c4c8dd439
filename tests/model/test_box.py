"""Boxes against sets of indices, views against what numpy shows of an `arange`."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ckpt_tools.model.box import Box, flat_range_to_boxes, full_box, row_major_strides, split_axes
from ckpt_tools.model.views import (
    Defragment,
    Insert,
    Narrow,
    Permute,
    Piece,
    Place,
    Select,
    Step,
    Unflatten,
    View,
    chunk_piece,
    pull_box,
    push_piece,
    view_shape,
)
from tests.strategies import Shape, boxes, defragments, shapes, tilings, viewed_shapes


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


ABSENT = -1


def shown(array: np.ndarray, step: Step) -> np.ndarray:
    """What a step shows of an array, by numpy's means."""
    match step:
        case Narrow(axis, start, size):
            return array[(slice(None),) * axis + (slice(start, start + size),)]
        case Select(axis, index):
            return array.take(index, axis)
        case Permute(order):
            return array.transpose(order)
        case Unflatten(start, dims):
            return array[start : start + math.prod(dims)].reshape(dims)
        case Insert(axis):
            return np.expand_dims(array, axis)
        case Place(start, dims):
            out = np.full(dims, ABSENT)
            out[tuple(slice(a, a + n) for a, n in zip(start, array.shape, strict=True))] = array
            return out
        case Defragment(dims, fragments):
            out = np.empty(dims, array.dtype)
            for cell in itertools.product(*map(range, fragments)):
                corner = [c * n for c, n in zip(cell, step.local, strict=True)]
                region = tuple(slice(a, a + n) for a, n in zip(corner, step.local, strict=True))
                out[region] = array[cell].reshape(step.local)
            return out
    raise AssertionError(step)


def expected(shape: Shape, view: View) -> np.ndarray:
    array = np.arange(math.prod(shape)).reshape(shape)
    for step in view:
        array = shown(array, step)
    return array


def region(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.start, box.stop))


def elements(payload: np.ndarray, piece: Piece) -> np.ndarray:
    """The piece's elements, after a check that they lie in the payload."""
    last = piece.offset + sum((n - 1) * s for n, s in zip(piece.box.size, piece.strides, strict=True))
    assert 0 <= piece.offset <= last < payload.size
    return as_strided(payload[piece.offset :], piece.box.size, [8 * s for s in piece.strides])


def check_box(shape, view, chunks, box):
    """The planner's way: crop chunks to the pulled box, push, crop to the box."""
    source = np.arange(math.prod(shape)).reshape(shape)
    out = np.full(box.size, ABSENT)
    for chunk in chunks:
        assert chunk_piece(chunk).crop(Box(*chunk)) == chunk_piece(chunk)
        part = chunk_piece(chunk).crop(pull_box(view, box))
        for piece in push_piece(view, part) if part else ():
            kept = piece.crop(box)
            if kept is not None:
                assert not kept.box.is_empty
                place = region(kept.box.relative_to(box))
                assert (out[place] == ABSENT).all()  # nothing is shown twice
                out[place] = elements(source[region(chunk)].flatten(), kept)
    assert np.array_equal(out, expected(shape, view)[region(box)])


@given(st.data())
def test_any_box_of_any_view_of_any_chunks_is_numpy_indexing(data):
    shape, view = data.draw(viewed_shapes())
    whole = full_box(view_shape(view, shape))
    for box in (whole, data.draw(boxes(whole.size, min_side=1))):
        check_box(shape, view, data.draw(tilings(shape)), box)


@given(st.data())
def test_defragment_of_any_chunks(data):
    shape, step = data.draw(defragments())
    check_box(shape, (step,), data.draw(tilings(shape, max_cuts=8)), full_box(step.dims))


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (Narrow(0, 2, 3), (4,)),
        (Narrow(0, -1, 2), (4,)),
        (Select(1, 3), (4, 3)),
        (Select(0, -1), (4,)),
        (Unflatten(1, (2, 2)), (4,)),
        (Unflatten(0, (4,)), (2, 2)),
        (Defragment((4, 4), (2, 3)), (2, 3, 2)),
        (Defragment((4, 4), (2, 2)), (2, 2, 5)),
        (Place((1,), (4,)), (4,)),
    ],
)
def test_a_step_that_does_not_fit_is_refused(step, shape):
    with pytest.raises(ValueError, match=r"fit|room"):
        view_shape((step,), shape)
