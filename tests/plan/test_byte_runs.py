"""Read patterns and tiles reproduce numpy's slicing of an `arange`, whatever the limits; joining loses no item."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ckpt_tools.model.box import Box, full_box, row_major_strides
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.transfers import RUNS, VERBATIM, OutputItem, Strategy, Transfer
from ckpt_tools.model.views import chunk_piece
from ckpt_tools.plan.byte_runs import (
    MAX_GAP_BYTES,
    SMALL_BYTES,
    Span,
    batches,
    coalesce,
    is_dense,
    is_run,
    pattern_blocks,
    read_pattern,
    row_major_tiles,
    span_elems,
)
from tests.strategies import boxes, shapes


@given(st.data())
def test_blocks_tile_a_region_and_spans_keep_to_the_limit(data):
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
def test_patterns_weigh_gaps_against_reads(size, strides, limit, reads, dense):
    pattern = read_pattern(size, strides, 4, limit)
    assert (pattern.reads, pattern.dense(size)) == (reads, dense)


@given(st.data())
def test_tiles_follow_each_other_in_row_major_order(data):
    shape = data.draw(shapes())
    box = data.draw(boxes(shape, min_side=1))
    limit = data.draw(st.integers(1, 100))
    array = np.arange(math.prod(shape)).reshape(shape)
    tiles = list(row_major_tiles(box, limit))
    assert all(tile.volume <= limit for tile in tiles)
    parts = [array[tuple(map(slice, tile.start, tile.stop))].ravel() for tile in tiles]
    assert np.array_equal(np.concatenate(parts), array[tuple(map(slice, box.start, box.stop))].ravel())


@given(st.data())
def test_dense_and_run_against_flat_indices(data):
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


def test_edges():
    assert is_run(full_box(()), ())
    assert is_dense((), ())
    assert list(row_major_tiles(full_box(()), 1)) == [full_box(())]
    assert not is_dense((2, 2), (1, 2))
    assert list(row_major_tiles(Box((3,), (0,)), 5)) == [Box((3,), (0,))]


ITEMS = st.builds(
    Item, st.sampled_from("ab"), st.integers(0, 10 * MAX_GAP_BYTES), st.integers(1, 2 * MAX_GAP_BYTES)
)


@given(st.lists(ITEMS, max_size=20), st.integers(1, 5 * MAX_GAP_BYTES))
def test_spans_hold_every_item(items, limit):
    spans = coalesce(items, limit)
    assert spans == sorted(spans)
    for item in items:
        assert any(
            s.file == item.file and s.start <= item.offset and item.offset + item.length <= s.stop
            for s in spans
        )
    longest = max((item.length for item in items), default=0)
    assert all(s.stop - s.start <= max(limit, longest) for s in spans)
    starts = {(item.file, item.offset) for item in items}
    assert all((s.file, s.start) in starts for s in spans)


def test_gaps():
    near, far = Item("f", 100 + MAX_GAP_BYTES, 50), Item("f", 101 + MAX_GAP_BYTES, 50)
    assert coalesce([near, Item("f", 0, 100)], 1 << 30) == [Span("f", 0, near.offset + 50)]
    assert len(coalesce([far, Item("f", 0, 100)], 1 << 30)) == 2
    assert len(coalesce([near, Item("f", 0, 100)], MAX_GAP_BYTES)) == 2
    assert coalesce([], 1) == []


@st.composite
def outputs(draw: st.DrawFn) -> OutputItem:
    length = draw(st.sampled_from([1500, 30_000, SMALL_BYTES - 64, SMALL_BYTES]))
    source = Item("s", 0, draw(st.sampled_from([1500, SMALL_BYTES, SMALL_BYTES + 1])), draw(st.booleans()))
    transfer = Transfer(
        "k", source, "int8", (4,), chunk_piece(full_box((4,))), draw(st.sampled_from([VERBATIM, RUNS]))
    )
    transfers = (transfer,) * draw(st.sampled_from([1, 1, 1, 2]))
    file = draw(st.sampled_from("xy"))
    zeros = draw(st.sampled_from([0, 0, 0, 1]))
    return OutputItem("k", full_box((4,)), "int8", file, 0, length, transfers, zeros, draw(st.booleans()))


@given(st.lists(outputs(), max_size=30), st.integers(SMALL_BYTES, 4 * SMALL_BYTES), st.data())
def test_batches_are_a_partition_of_small_copies(items, limit, data):
    start = data.draw(st.integers(0, len(items)))
    share = range(start, data.draw(st.integers(start, len(items))))
    found = list(batches(items, share, limit))
    assert [n for batch in found for n in batch] == list(share)
    assert all(found)
    for batch in found:
        if len(batch) == 1:
            continue
        members = [items[n] for n in batch]
        assert len({item.file for item in members}) == 1
        assert sum(item.length + 64 for item in members) <= limit
        for item in members:
            (transfer,) = item.transfers
            assert isinstance(transfer, Transfer) and transfer.strategy == VERBATIM
            assert transfer.item.length <= SMALL_BYTES
            assert not item.bare
            assert item.zero_elems == 0
            assert not transfer.item.bare


def small_copy(
    source: int = 1500, length: int = 1500, bare: bool = False, how: Strategy = VERBATIM
) -> OutputItem:
    transfer = Transfer("k", Item("s", 0, source, bare), "int8", (4,), chunk_piece(full_box((4,))), how)
    return OutputItem("k", full_box((4,)), "int8", "x", 0, length, (transfer,))


@pytest.mark.parametrize(
    ("item", "joined"),
    [
        (small_copy(), True),
        (small_copy(SMALL_BYTES, SMALL_BYTES - 64), True),
        (small_copy(source=SMALL_BYTES + 1), False),
        (small_copy(length=SMALL_BYTES - 63), False),
        (small_copy(bare=True), False),
        (small_copy()._replace(bare=True), False),
        (small_copy()._replace(zero_elems=1), False),
        (small_copy()._replace(transfers=small_copy().transfers * 2), False),
        (small_copy(how=RUNS), False),
    ],
)
def test_only_small_whole_payloads_are_joined(item, joined):
    alone = [range(1), range(1, 2)]
    assert list(batches([item, item], range(2), 8 * SMALL_BYTES)) == ([range(2)] if joined else alone)
