"""Hypothesis strategies for boxes, tilings, views and element types, shared by all property tests."""

import math

from hypothesis import strategies as st

from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.views import (
    Defragment,
    Insert,
    Narrow,
    Permute,
    Place,
    Select,
    Step,
    Unflatten,
    View,
    view_shape,
)

Shape = tuple[int, ...]


def shapes(
    min_dims: int = 0, max_dims: int = 4, min_side: int = 1, max_side: int = 7
) -> st.SearchStrategy[Shape]:
    """Shapes, elements per dimension; 0-d and prime sides included."""
    return st.lists(st.integers(min_side, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: Shape, min_side: int = 0) -> Box:
    """Boxes inside a tensor of `shape`; empty ones too unless `min_side` is 1."""
    start, size = [], []
    for n in shape:
        length = draw(st.integers(min(min_side, n), n))
        start.append(draw(st.integers(0, n - length)))
        size.append(length)
    return Box(tuple(start), tuple(size))


@st.composite
def tilings(draw: st.DrawFn, shape: Shape, max_cuts: int = 5) -> list[Box]:
    """Exact tilings of a tensor of `shape`: boxes cut in two again and again, in any order."""
    parts = [full_box(shape)]
    for _ in range(draw(st.integers(0, max_cuts))):
        wide = [(i, d) for i, part in enumerate(parts) for d, n in enumerate(part.size) if n > 1]
        if not wide:
            break
        i, d = draw(st.sampled_from(wide))
        part = parts.pop(i)
        cut = draw(st.integers(1, part.size[d] - 1))
        for first, length in ((0, cut), (cut, part.size[d] - cut)):
            start, size = list(part.start), list(part.size)
            start[d] += first
            size[d] = length
            parts.append(Box(tuple(start), tuple(size)))
    return draw(st.permutations(parts))


@st.composite
def steps(draw: st.DrawFn, shape: Shape) -> Step:
    """A view step that fits `shape`."""
    kinds = ["insert", "place"]
    if shape:
        kinds += ["narrow", "select", "permute"]
    if len(shape) == 1:
        kinds += ["unflatten"]
    kind = draw(st.sampled_from(kinds))
    if kind == "insert":
        return Insert(draw(st.integers(0, len(shape))))
    if kind == "place":
        start = tuple(draw(st.integers(0, 2)) for _ in shape)
        return Place(start, tuple(a + n + draw(st.integers(0, 2)) for a, n in zip(start, shape, strict=True)))
    if kind == "permute":
        return Permute(tuple(draw(st.permutations(range(len(shape))))))
    if kind == "unflatten":
        dims = draw(shapes(max_dims=3).filter(lambda dims: math.prod(dims) <= shape[0]))
        return Unflatten(draw(st.integers(0, shape[0] - math.prod(dims))), dims)
    axis = draw(st.integers(0, len(shape) - 1))
    if kind == "select":
        return Select(axis, draw(st.integers(0, shape[axis] - 1)))
    size = draw(st.integers(1, shape[axis]))
    return Narrow(axis, draw(st.integers(0, shape[axis] - size)), size)


@st.composite
def defragments(draw: st.DrawFn) -> tuple[Shape, Defragment]:
    """A stored shape and the step that undoes its N-D flattening."""
    local = draw(shapes(1, 3, max_side=4))
    fragments = tuple(draw(st.integers(1, 3)) for _ in local)
    dims = tuple(n * f for n, f in zip(local, fragments, strict=True))
    return (*fragments, math.prod(local)), Defragment(dims, fragments)


@st.composite
def viewed_shapes(draw: st.DrawFn, max_steps: int = 4) -> tuple[Shape, View]:
    """A source shape and a view that fits it."""
    view: tuple[Step, ...] = ()
    if draw(st.booleans()):
        shape, first = draw(defragments())
        view = (first,)
    else:
        shape = draw(st.one_of(shapes(), shapes(1, 1, 1, 60)))
    for _ in range(draw(st.integers(0, max_steps))):
        view = (*view, draw(steps(view_shape(view, shape))))
    return shape, view
