"""Boxes tile every tensor, whatever the sizes; replicas, experts, halves and refusals."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt_tools.errors import UsageError
from ckpt_tools.model.box import Box
from ckpt_tools.model.choices import LayoutName
from ckpt_tools.sharding.parameters import Expert, Parameter, Part
from ckpt_tools.sharding.placement import Placement
from ckpt_tools.sharding.topology import LAYOUTS, Topology

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 17, 24])
STRATEGIES: list[tuple[str | int, int]] = [
    *((name, 0) for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
    (3, 1),
]


@st.composite
def topologies(draw: st.DrawFn, layout: LayoutName) -> Topology:
    strategy, outer_strategy = draw(st.sampled_from(STRATEGIES)) if layout != "fsdp2" else (3, 0)
    tp = draw(st.integers(1, 3)) if layout != "mfsdp-v2" else 1
    try:
        return Topology(
            draw(st.integers(1, 5)),
            draw(st.integers(1, 3)),
            tp,
            1 if layout == "mfsdp-v2" else draw(st.integers(1, 2)),
            draw(st.integers(1, 4)),
            1 if layout == "mfsdp-v2" else draw(st.integers(1, 3)),
            1,
            strategy,
            outer_strategy,
        )
    except UsageError:
        assume(False)
        raise


@st.composite
def models(draw: st.DrawFn, topology: Topology) -> list[Parameter]:
    """Parameters that the topology can cut: primes, 1-D, no rows, gated, experts, frozen, buffers."""
    found = []
    for i in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(["plain", "plain", "gated", "expert", "buffer"]))
        is_expert = kind == "expert"
        tp = topology.etp if is_expert else topology.tp
        shape = [draw(SIZES), *(max(1, n) for n in draw(st.lists(SIZES, max_size=2)))]
        tp_dim = draw(st.sampled_from([None, *range(len(shape))])) if kind != "buffer" else None
        parts: tuple[Part, ...] = ()
        if tp_dim is not None:
            shape[tp_dim] *= tp
        if kind == "gated":
            parts = (Part(f"p{i}_w", shape[0]), Part(f"p{i}_v", shape[0]))
            shape[0] *= 2
        for e in range(2 * topology.ep if is_expert else 1):
            found.append(
                Parameter(
                    f"p{i}.experts.{e}" if is_expert else f"p{i}",
                    tuple(shape),
                    draw(st.sampled_from(["bfloat16", "bfloat16", "float32"])),
                    tp_dim,
                    is_expert,
                    Expert(e, 2 * topology.ep) if is_expert else None,
                    draw(st.sampled_from([None, 0, 1])),
                    draw(st.booleans()),
                    draw(st.integers(0, 9)) == 0,
                    kind == "buffer",
                    parts,
                )
            )
    return found


def coverage(shapes: dict[str, tuple[int, ...]], boxes: Iterable[tuple[str, Box]]) -> dict[str, np.ndarray]:
    counts = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
    for name, box in boxes:
        assert not box.is_empty
        assert all(stop <= size for stop, size in zip(box.stop, shapes[name], strict=True))
        counts[name][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] += 1
    return counts


def stored_shapes(parameters: Iterable[Parameter]) -> dict[str, tuple[int, ...]]:
    return {
        name: (rows, *p.shape[1:])
        for p in parameters
        for name, rows in (p.parts or (Part(p.name, p.shape[0]),))
    }


def cuts_a_row(placement: Placement) -> bool:
    """Whether any rank's piece begins or ends inside a row, from the pieces alone."""
    for rank in range(placement.topology.world_size):
        for bucket in placement.buckets(rank):
            for piece in bucket.packing.pieces(*bucket.part_range(placement.part(bucket, rank))):
                row = math.prod(bucket.packing.shapes[piece.item][1:])
                if piece.start % row or piece.stop % row:
                    return True
    return False


@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
def test_what_is_written_tiles_every_tensor_exactly(layout, data):
    topology = data.draw(topologies(layout))
    parameters = data.draw(models(topology))
    bucket_size = data.draw(st.sampled_from([None, 1, 50]))
    try:
        placement = Placement(parameters, topology, layout, bucket_size)
    except UsageError as error:
        assert layout == "mfsdp-v1" and "cuts inside rows" in str(error)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Placement, "_refuse_cut_rows", lambda self: None)
            assert cuts_a_row(Placement(parameters, topology, layout, bucket_size))
        return
    assert topology.strategy == "no_shard" or not cuts_a_row(placement)
    shapes = stored_shapes(parameters)
    ranks = range(topology.world_size)
    for counts in coverage(shapes, (w for r in ranks for w in placement.written(r))).values():
        assert (counts == 1).all()
    held = {rank: list(placement.boxes(rank)) for rank in ranks}
    written = {rank: list(placement.written(rank)) for rank in ranks}
    for rank in ranks:  # a subsequence: ranks read in one direction
        remaining = iter(held[rank])
        assert all(any(box == other for other in remaining) for box in written[rank])
    first: dict[tuple[str, Box], int] = {}
    for rank in ranks:
        for box in held[rank]:
            first.setdefault(box, rank)
    assert {box: rank for rank in ranks for box in written[rank]} == first
    if layout != "even":
        shards_hold_the_same(placement, held)


def shards_hold_the_same(placement: Placement, held: dict[int, list[tuple[str, Box]]]) -> None:
    """`shards` are the live parameters of the boxes: every rank lists all of its own, empty ones too."""
    for rank, boxes in held.items():
        shards = list(placement.shards(rank))
        here = placement.topology.coordinates(rank, expert=True).ep
        ep = placement.topology.ep
        own = [
            p
            for p in placement.parameters
            if p.expert is None or p.expert.number * ep // p.expert.total == here
        ]
        assert [p for p, _ in shards] == own
        assert sum(box.volume for _, box in shards) == sum(box.volume for _, box in boxes)


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.integers(1, 5), min_size=2, max_size=3),
    st.integers(1, 4),
    st.data(),
)
def test_boxes_of_parts_hold_the_rows_of_the_live_tensor(tp, dp, rows, width, data):
    """The live tensor built from parts as Megatron does it: TP rank by TP rank, part after part."""
    parts = tuple(Part(f"part{i}", n * tp) for i, n in enumerate(rows))
    values = {name: np.arange(n * width).reshape(n, width) + 1000 * i for i, (name, n) in enumerate(parts)}
    live = np.concatenate([np.split(values[part.name], tp)[t] for t in range(tp) for part in parts])
    p = Parameter("live", live.shape, "bfloat16", tp_dim=0, parts=parts)
    placement = Placement([p], Topology(dp, tp=tp), data.draw(st.sampled_from(["mfsdp-v1", "fsdp2"])))
    for rank in range(dp * tp):
        ((_, box),) = placement.shards(rank)
        mine = live[box.start[0] : box.stop[0]]
        found = [values[name][b.start[0] : b.stop[0]] for name, b in placement.boxes(rank)]
        assert np.concatenate(found or [live[:0]]).tolist() == mine.tolist()


MIDROW = [Parameter(f"p{i}", shape, "bfloat16") for i, shape in enumerate([(7, 10), (2, 3), (2, 3)])]


@pytest.mark.parametrize("dp", range(1, 9))
def test_a_cut_inside_a_row_is_refused_with_a_way_out(dp):
    """The sizes that upstream crashes with: 5 to 8 ranks."""
    if dp < 5:
        assert Placement(MIDROW, Topology(dp)).buckets(0)
        return
    with pytest.raises(UsageError) as error:
        Placement(MIDROW, Topology(dp))
    message = str(error.value)
    assert "p2: row 1 of (2, 3), between rank 3 and rank 4" in message
    assert "Use dp_shard 4, or --layout even" in message
    for layout in ("mfsdp-v2", "fsdp2", "even"):
        assert list(Placement(MIDROW, Topology(dp), layout).boxes(0))


def test_the_proposed_size_is_legal_for_the_experts():
    experts = [
        Parameter(f"x.experts.{i}", shape, "bfloat16", is_expert=True, expert=Expert(e, 2))
        for e in range(2)
        for i, shape in enumerate([(7, 10), (2, 3), (2, 3)], 10 * e)
    ]
    with pytest.raises(UsageError, match="Use dp_shard 8, or") as error:
        Placement(experts, Topology(10, ep=2))
    assert "x.experts.12: row 1 of (2, 3), between rank 7 and rank 9" in str(error.value)
    assert Placement(experts, Topology(8, ep=2)).buckets(0)


@pytest.mark.parametrize(
    ("parameter", "topology", "layout", "words"),
    [
        (Parameter("w", (5, 4), "bfloat16", tp_dim=0), Topology(2, tp=2), "mfsdp-v1", "w: tp 2 does not divide"),
        (Parameter("w", (4,), "bfloat16", tp_dim=1), Topology(2, tp=2), "mfsdp-v1", "has no dimension 1"),
        (
            Parameter("w.experts.0", (4,), "bfloat16", is_expert=True, expert=Expert(0, 3)),
            Topology(2, ep=2),
            "mfsdp-v1",
            "w.experts.0: ep 2 does not divide the layer's 3 experts",
        ),
        (Parameter("w.experts.x", (4,), "bfloat16", is_expert=True), Topology(2, ep=2), "fsdp2", "without an expert"),
        (Parameter("s", (), "bfloat16"), Topology(2), "mfsdp-v1", r"s: shape \(\) has no rows"),
        (Parameter("s", (), "bfloat16"), Topology(2), "fsdp2", r"s: shape \(\) has no rows"),
        (Parameter("z", (4, 0), "bfloat16"), Topology(2), "mfsdp-v2", "z: shape .* has rows of no elements"),
        (Parameter("w", (6, 2), "bfloat16", parts=(Part("a", 2),)), Topology(2), "mfsdp-v1", "2] rows, not 6"),
        (
            Parameter("w", (6, 2), "bfloat16", tp_dim=0, parts=(Part("a", 3), Part("b", 3))),
            Topology(1, tp=2),
            "mfsdp-v1",
            "a: tp 2 does not divide its 3 rows",
        ),
    ],
)  # fmt: skip
def test_parameters_that_do_not_fit_are_named(parameter, topology, layout, words):
    with pytest.raises(UsageError, match=words):
        Placement([Parameter("ok", (4, 4), "bfloat16"), parameter], topology, layout)


def test_mesh_axes_say_what_is_sharded():
    p, b = Parameter("w", (4, 2), "float32", tp_dim=1), Parameter("b", (4,), "float32", buffer=True)
    hfsdp = Placement([p, b], Topology(2, 3, 2, outer_strategy="optim"))
    assert hfsdp.mesh(p) == (("dp_outer", 3, 0), ("dp_shard", 2, 0), ("tp", 2, 1))
    assert hfsdp.mesh(b) == ()
    whole = Placement([p], Topology(2, 3, strategy="no_shard"))
    assert whole.mesh(p) == (("dp_outer", 3, None), ("dp_shard", 2, None))


def test_even_takes_scalars_and_gives_them_to_rank_0():
    placement = Placement(
        [Parameter("s", (), "float32"), Parameter("w", (3, 0), "float32")], Topology(3), "even"
    )
    assert [list(placement.boxes(rank)) for rank in range(3)] == [[("s", Box((), ()))], [], []]
