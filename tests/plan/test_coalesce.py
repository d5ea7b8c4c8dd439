"""Joining loses no item, joins only neighbours, and keeps to its limits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.transfers import RUNS, VERBATIM, OutputItem, Transfer
from ckpt_tools.model.views import chunk_piece
from ckpt_tools.plan.byte_runs import MAX_GAP_BYTES, SMALL_BYTES, Span, batches, coalesce

ITEMS = st.builds(
    Item, st.sampled_from("ab"), st.integers(0, 10 * MAX_GAP_BYTES), st.integers(1, 2 * MAX_GAP_BYTES)
)


@given(st.lists(ITEMS, max_size=20), st.integers(1, 5 * MAX_GAP_BYTES))
def test_spans_hold_every_item(items: list[Item], limit: int) -> None:
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


def test_gaps() -> None:
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
def test_batches_are_a_partition_of_small_copies(
    items: list[OutputItem], limit: int, data: st.DataObject
) -> None:
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


def test_neighbours_are_joined() -> None:
    transfer = Transfer("k", Item("s", 0, 1500), "int8", (4,), chunk_piece(full_box((4,))), VERBATIM)
    items = [OutputItem("k", full_box((4,)), "int8", "x", 0, 1500, (transfer,))] * 100
    assert list(batches(items, range(100), 1 << 20)) == [range(100)]


def small_copy(source: int = 1500, length: int = 1500, bare: bool = False, **changes: Any) -> OutputItem:
    transfer = small_transfer(source, bare)
    item = OutputItem("k", full_box((4,)), "int8", "x", 0, length, (transfer,))
    return item._replace(**changes)


def small_transfer(source: int = 1500, bare: bool = False) -> Transfer:
    return Transfer("k", Item("s", 0, source, bare), "int8", (4,), chunk_piece(full_box((4,))), VERBATIM)


@pytest.mark.parametrize(
    ("item", "joined"),
    [
        (small_copy(), True),
        (small_copy(SMALL_BYTES, SMALL_BYTES - 64), True),
        (small_copy(source=SMALL_BYTES + 1), False),
        (small_copy(length=SMALL_BYTES - 63), False),
        (small_copy(bare=True), False),
        (small_copy()._replace(bare=True), False),
        (small_copy(zero_elems=1), False),
        (small_copy(transfers=small_copy().transfers * 2), False),
        (small_copy(transfers=(small_transfer()._replace(strategy=RUNS),)), False),
    ],
)
def test_only_small_whole_payloads_are_joined(item: OutputItem, joined: bool) -> None:
    assert list(batches([item, item], range(2), 8 * SMALL_BYTES)) == (
        [range(2)] if joined else [range(1), range(1, 2)]
    )
