"""Read patterns and tiles reproduce numpy's slicing of an `arange`, whatever the limits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ckpt_tools.model.box import Box, full_box, row_major_strides
from ckpt_tools.plan.byte_runs import (
    is_dense,
    is_run,
    pattern_blocks,
    read_pattern,
    row_major_tiles,
    span_elems,
)
from tests.strategies import boxes, shapes


@given(st.data())
def test_blocks_tile_a_region_and_spans_keep_to_the_limit(data: st.DataObject) -> None:
    shape = data.draw(shapes(1))
    box = data.draw(boxes(shape, min_side=1))
    order = data.draw(st.permutations(range(len(shape))))
    strides = tuple(row_major_strides(shape)[d] for d in order)
    size = tuple(box.size[d] for d in order)
    limit = data.draw(st.integers(1, 60))
    pattern = read_pattern(size, strides, data.draw(st.sampled_from([1, 4, 1 << 20])), limit)
    whole = as_strided(np.arange(math.prod(shape)), size, [8 * s for s in strides])
    out = np.full(size, -1)
    blocks = list(pattern_blocks(pattern, size))
    for block in blocks:
        region = tuple(map(slice, block.start, block.stop))
        assert (out[region] == -1).all()
        out[region] = whole[region]
        assert span_elems(block.size, strides) <= max(limit, 1)
    assert np.array_equal(out, whole)
    assert len(blocks) == pattern.reads


@pytest.mark.parametrize(
    ("size", "strides", "limit", "reads", "dense"),
    [
        ((4, 2), (8, 1), 1 << 20, 1, False),  # one covering span
        ((4, 1 << 16), (1 << 17, 1), 1 << 20, 4, True),  # four runs: a gap of 256 KiB costs more than a read
        ((1024, 1024), (1024, 1), 1 << 20, 1, True),  # one run
        ((1024, 1024), (1024, 1), 1 << 18, 4, True),  # the same in four reads
        ((4096, 64), (4096, 1), 1 << 20, 16, False),  # covering spans of 256 rows
    ],
)
def test_patterns_weigh_gaps_against_reads(
    size: tuple[int, ...], strides: tuple[int, ...], limit: int, reads: int, dense: bool
) -> None:
    pattern = read_pattern(size, strides, 4, limit)
    assert (pattern.reads, pattern.dense(size)) == (reads, dense)


@given(st.data())
def test_tiles_follow_each_other_in_row_major_order(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    box = data.draw(boxes(shape, min_side=1))
    limit = data.draw(st.integers(1, 100))
    array = np.arange(math.prod(shape)).reshape(shape)
    tiles = list(row_major_tiles(box, limit))
    assert all(tile.volume <= limit for tile in tiles)
    parts = [array[tuple(map(slice, tile.start, tile.stop))].ravel() for tile in tiles]
    assert np.array_equal(np.concatenate(parts), array[tuple(map(slice, box.start, box.stop))].ravel())


@given(st.data())
def test_dense_and_run_against_flat_indices(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    box = data.draw(boxes(shape, min_side=1))
    strides = row_major_strides(shape)
    flat = [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, box.start, box.stop))
    ]
    gapless = flat == list(range(flat[0], flat[0] + len(flat)))
    assert is_run(box, shape) == gapless
    assert is_dense(box.size, strides) == gapless


def test_edges() -> None:
    assert is_run(full_box(()), ())
    assert is_dense((), ())
    assert list(row_major_tiles(full_box(()), 1)) == [full_box(())]
    assert not is_dense((2, 2), (1, 2))
    assert list(row_major_tiles(Box((3,), (0,)), 5)) == [Box((3,), (0,))]
