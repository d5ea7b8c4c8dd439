"""Finding boxes and proving tilings, against brute force."""

import time

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.model.box import Box, full_box
from ckpt_tools.plan.overlap import BoxIndex, example_hole, find_overlap, tiling_problem
from tests.strategies import boxes, shapes, tilings


@given(st.data())
def test_index_finds_what_a_scan_finds(data):
    shape = data.draw(shapes(max_dims=3))
    members = data.draw(st.lists(boxes(shape), max_size=8))
    query = data.draw(boxes(shape))
    found = list(BoxIndex(members).meeting(query))
    assert sorted(found) == [i for i, box in enumerate(members) if box.intersect(query)]
    assert [members[i].start for i in found] == sorted(members[i].start for i in found)


@given(st.data())
def test_overlap_is_found_exactly_when_there_is_one(data):
    shape = data.draw(shapes(max_dims=3))
    members = data.draw(st.lists(boxes(shape), max_size=6))
    pairs = {(i, j) for j, b in enumerate(members) for i, a in enumerate(members[:j]) if a.intersect(b)}
    found = find_overlap(members)
    assert (found in pairs) if pairs else found is None


@given(st.data())
def test_a_tiling_has_no_problem_and_a_damaged_one_has(data):
    shape = data.draw(shapes())
    parts = data.draw(tilings(shape))
    whole = full_box(shape)
    assert tiling_problem(whole, parts) is None
    lost = parts[1:]
    hole = example_hole(whole, lost)
    assert hole.volume == 1
    assert parts[0].contains(hole)
    assert str(hole) in (tiling_problem(whole, lost) or "")
    assert "overlap" in (tiling_problem(whole, [*parts, parts[-1]]) or "")
    if shape:
        outside = Box((shape[0], *(0,) * (len(shape) - 1)), (1,) * len(shape))
        assert "outside" in (tiling_problem(whole, [*parts, outside]) or "")


def test_index_of_many_chunks_is_fast():
    """61 layers x 64 experts x 8 ranks; quadratic work would take minutes."""
    members = [
        Box((layer, expert, 256 * rank, 0), (1, 1, 256, 7168))
        for rank in range(8)
        for layer in range(61)
        for expert in range(64)
    ]
    began = time.process_time()
    index = BoxIndex(members)
    found = [len(list(index.meeting(Box((i % 61, i % 64, 0, 0), (1, 1, 2048, 7168))))) for i in range(5_000)]
    assert set(found) == {8}
    assert time.process_time() - began < 10
