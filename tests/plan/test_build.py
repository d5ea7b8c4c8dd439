"""Plans: what they hold, what they refuse, and that nothing but their inputs decides them."""

import hashlib
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import CorruptCheckpointError, MappingError
from ckpt_tools.formats.torch_archive.tensor_template import tensor_frame
from ckpt_tools.formats.torch_archive.zip_archive import ALIGNMENT
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog, Chunk, Item, TensorEntry
from ckpt_tools.model.target import InlineTensor, Target, TargetObject, TargetTensor
from ckpt_tools.model.transfers import (
    OutputBlob,
    OutputItem,
    Plan,
    TensorInfo,
    Transfer,
    item_rows,
    plan_summary,
)
from ckpt_tools.model.views import Narrow, Place, Select, Source, view_shape
from ckpt_tools.plan.build import (
    Placement,
    WeightFile,
    build_plan,
    build_safetensors_plan,
    file_rank,
    hole_bytes,
    holes,
    plan_digest,
    worker_share,
)
from ckpt_tools.plan.links import link_tensors
from tests.conftest import REPO
from tests.strategies import Shape, tilings


def catalog_of(**tensors: tuple[str, Shape, Sequence[Box]]) -> Catalog:
    entries = {
        key: TensorEntry(
            key, dtype, shape, tuple(Chunk(box, Item("s", 4096 * i, 4096)) for i, box in enumerate(boxes))
        )
        for key, (dtype, shape, boxes) in tensors.items()
    }
    return Catalog("", entries, {})


def rows(world: int) -> Placement:
    """Shard(0) over `world` ranks by the rule of torch.chunk."""

    def place(tensor: TargetTensor) -> list[tuple[int, Box]]:
        if not tensor.shape:
            return [(0, full_box(()))]
        step = -(-tensor.shape[0] // world)
        cuts = [min(step * rank, tensor.shape[0]) for rank in range(world + 1)]
        rest = tensor.shape[1:]
        return [
            (rank, Box((cuts[rank], *(0,) * len(rest)), (cuts[rank + 1] - cuts[rank], *rest)))
            for rank in range(world)
        ]

    return place


def whole(tensor: TargetTensor) -> list[tuple[int, Box]]:
    return [(0, full_box(tensor.shape))]


def stacked_plan(world: int) -> Plan:
    """Two layers stored by two tensor-parallel ranks, unstacked."""
    chunks = [Box((layer, 4 * tp, 0), (1, 4, 6)) for tp in range(2) for layer in range(2)]
    catalog = catalog_of(w=("float32", (2, 8, 6), chunks), b=("bfloat16", (), [full_box(())]))
    tensors = [TargetTensor(f"w.{i}", "float32", (8, 6), (Source("w", (Select(0, i),)),)) for i in range(2)]
    tensors.append(TargetTensor("b", "bfloat16", (), (Source("b"),), path=("x", 0)))
    target = Target(
        tuple(tensors), (InlineTensor("step", "float32", (), b"\0\0\0\0"),), (TargetObject("args", None),)
    )
    return build_plan(catalog, target, rows(world), world, [("args", b"archive")])


def test_a_small_plan_in_full():
    plan = stacked_plan(1)
    assert [(i.key, i.box, [t.strategy for t in i.transfers]) for i in plan.items] == [
        ("w.0", full_box((8, 6)), ["verbatim", "verbatim"]),
        ("w.1", full_box((8, 6)), ["verbatim", "verbatim"]),
        ("b", full_box(()), ["verbatim"]),
    ]
    assert [(b.key, b.box) for b in plan.blobs] == [("args", None), ("step", full_box(()))]
    assert plan.paths == {key: (key,) for key in ("args", "step", "w.0", "w.1")} | {"b": ("x", 0)}
    assert plan.bytes_by_strategy == {"verbatim": 2 * 48 * 4 + 2}
    end = plan.items[-1].offset + plan.items[-1].length
    assert plan.file_bytes == {"__0_0.distcp": end} and plan.bytes_to_write == end


@pytest.mark.parametrize("world", [1, 2, 3, 8, 11])
def test_items_lie_aligned_in_order_without_overlap(world):
    plan = stacked_plan(world)
    ends: Counter[str] = Counter()
    parts: list[OutputBlob | OutputItem] = [*plan.blobs, *plan.items]
    for part in parts:
        assert part.offset % ALIGNMENT == 0
        assert 0 <= part.offset - ends[part.file] < ALIGNMENT
        ends[part.file] = part.offset + part.length
    assert ends == plan.file_bytes
    assert all(item.length == tensor_frame(item.dtype, item.box.size).length for item in plan.items)
    assert not any(item.box.is_empty for item in plan.items)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_full_file_gets_no_further_item(monkeypatch, world):
    together = stacked_plan(world)
    monkeypatch.setattr("ckpt_tools.plan.build.FILE_BYTES", 1000)
    plan = stacked_plan(world)
    parts: list[OutputBlob | OutputItem] = [*plan.blobs, *plan.items]
    others: list[OutputBlob | OutputItem] = [*together.blobs, *together.items]
    assert [(p.key, p.box) for p in parts] == [(p.key, p.box) for p in others]
    assert [file_rank(p.file) for p in parts] == [file_rank(p.file) for p in others]
    for rank in range(world):
        names = [name for name in plan.file_bytes if file_rank(name) == rank]
        assert names == [f"__{rank}_{number}.distcp" for number in range(len(names))]
        assert all(plan.file_bytes[name] >= 1000 for name in names[:-1])
        for name in names:
            last = max(p.offset for p in parts if p.file == name)
            assert last < 1000
    assert len(plan.file_bytes) > world


MIB = 1 << 20
ROWS, COLUMNS = 256, 1024  # of float32: 1 MiB


def layers(*starts: int, rows: int = ROWS, described: bool = True, bare: bool = False) -> Catalog:
    """A stacked tensor `w` of a chunk a layer, whose payload begins at that byte of its file; and a small one."""
    box = Box((0, 0, 0), (1, rows, COLUMNS))
    frame = tensor_frame("float32", box.size, described)
    head, length = (0, frame.payload_bytes) if bare else (len(frame.head), frame.length)
    chunks = [
        Chunk(box.shift((n, 0, 0)), Item(f"{n}", start - head, length, bare))
        for n, start in enumerate(starts)
    ]
    small = Chunk(full_box((3,)), Item("s", 0, 4096))
    shape = (len(starts), rows, COLUMNS)
    entries = {
        "w": TensorEntry("w", "float32", shape, tuple(chunks)),
        "s": TensorEntry("s", "uint8", (3,), (small,)),
    }
    return Catalog("", entries, {})


@pytest.mark.parametrize(
    ("catalog", "view", "phase"),
    [
        pytest.param(layers(5001), (Select(0, 0),), 5001, id="an archive that begins at any byte"),
        pytest.param(layers(5001, described=False), (Select(0, 0),), 5001, id="one of torch 2.6"),
        pytest.param(layers(5001, bare=True), (Select(0, 0),), 5001, id="no archive"),
        pytest.param(layers(9999, 5001), (Narrow(0, 1, 1),), 5001, id="a layer"),
        pytest.param(layers(5001, rows=300), (Narrow(1, 44, ROWS),), 5001, id="the last rows"),
        pytest.param(layers(7000, 5001, 5001), (), 5001, id="most bytes"),
        pytest.param(layers(5001, 7000), (), 5001, id="the first of two"),
        pytest.param(layers(5001, rows=ROWS - 1), (), None, id="short"),
        pytest.param(layers(5001, rows=600), (Narrow(2, 0, 512),), None, id="columns"),
    ],
)
def test_a_long_copy_lies_in_its_block_as_in_its_source(catalog, view, phase):
    """So a file system can share its blocks; all else begins at the next multiple of 64 bytes."""
    shape = view_shape(view, catalog.tensors["w"].shape)
    small = [TargetTensor(key, "uint8", (3,), (Source("s"),)) for key in ("a", "b")]
    target = Target((small[0], TargetTensor("w", "float32", shape, (Source("w", view),)), small[1]))
    plan = build_plan(catalog, target, whole, 1)
    before, item, behind = plan.items
    assert not holes(plan)
    blocks = hole_bytes(holes(plan, lambda _: True))  # nothing is set aside for them
    assert blocks % (MIB - 4096) == 0 and (blocks > 0) == (phase is not None)
    if phase is None:
        assert item.offset == -(-(before.offset + before.length) // ALIGNMENT) * ALIGNMENT
    else:
        assert 0 <= item.offset - (before.offset + before.length) < 4096
        assert (item.offset + len(tensor_frame("float32", shape).head) - phase) % 4096 == 0
    assert behind.offset == -(-(item.offset + item.length) // ALIGNMENT) * ALIGNMENT


@pytest.mark.parametrize(
    ("starts", "phase"),
    [((5000, 5000), 5000), ((5001, 5001), None), ((5000, 7000, 7000), 7000), ((5001, 5001, 5000), 5000)],
)
def test_spaces_behind_a_header_let_most_bytes_lie_as_in_their_sources(starts, phase):
    """Tensors follow it without gaps, and its length is a multiple of 8."""
    tensors = [
        TargetTensor(f"w{n}", "float32", (ROWS, COLUMNS), (Source("w", (Select(0, n),)),))
        for n in range(len(starts))
    ]
    plan = build_safetensors_plan(layers(*starts), [WeightFile("x.safetensors", tensors)], {})
    header = plan.blobs[0].data
    assert int.from_bytes(header[:8], "little") == len(header) - 8 and len(header) % 8 == 0
    assert list(json.loads(header[8:])) == ["__metadata__", *(t.key for t in tensors)]
    assert [item.offset for item in plan.items] == [len(header) + n * MIB for n in range(len(starts))]
    spaces = len(header) - len(header.rstrip())
    assert spaces < 8 if phase is None else (len(header) - phase) % 4096 == 0
    assert plan.bytes_to_write == len(header) + len(starts) * MIB


@given(st.data())
def test_every_world_moves_the_same_elements(data):
    shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 5)))
    catalog = catalog_of(w=("float32", shape, data.draw(tilings(shape))))
    tensor = TargetTensor("t", "float32", shape[1:], (Source("w", (Select(0, shape[0] - 1),)),))

    def moved(world: int) -> Counter[tuple[int, int, tuple[int, ...]]]:
        """(source item, payload element, target index) of every element."""
        found: Counter[tuple[int, int, tuple[int, ...]]] = Counter()
        for item in build_plan(catalog, Target((tensor,)), rows(world), world).items:
            for t in item.transfers:
                assert isinstance(t, Transfer)
                for at in range(t.piece.box.volume):
                    i, j = divmod(at, t.piece.box.size[1])
                    element = t.piece.offset + i * t.piece.strides[0] + j * t.piece.strides[1]
                    start = t.piece.box.shift(item.box.start).start
                    found[t.item.offset, element, (start[0] + i, start[1] + j)] += 1
        return found

    reference = moved(1)
    assert len(reference) == math.prod(shape[1:])
    assert set(reference.values()) == {1}
    assert moved(2) == moved(3) == moved(7) == reference


@given(st.data())
def test_shares_are_a_partition_in_order(data):
    plan = stacked_plan(data.draw(st.integers(1, 9)))
    workers = data.draw(st.integers(1, 20))
    shares = [worker_share(plan.items, i, workers) for i in range(workers)]
    assert [n for share in shares for n in share] == list(range(len(plan.items)))


@pytest.mark.parametrize(
    ("casts", "workers", "shares"),
    [(0, 4, [16] * 4), (32, 2, [24, 40])],  # 32 casts of 2 MB, 32 moves of 4 MB
)
def test_shares_are_balanced_and_weigh_casts(casts, workers, shares):
    boxes = [Box((i, 0, 0), (1, 1000, 1000)) for i in range(64)]
    catalog = catalog_of(w=("float32", (64, 1000, 1000), boxes))
    tensors = [
        TargetTensor(
            f"w{i}", "bfloat16" if i < casts else "float32", (1000, 1000), (Source("w", (Select(0, i),)),)
        )
        for i in range(64)
    ]
    items = build_plan(catalog, Target(tensors), whole, 1).items
    assert [len(worker_share(items, i, workers)) for i in range(workers)] == shares


def failing(catalog: Catalog, *tensors: TargetTensor, placement: Placement = whole) -> str:
    with pytest.raises(MappingError) as caught:
        build_plan(catalog, Target(tensors), placement, 2)
    return str(caught.value)


W = catalog_of(
    w=("float32", (4, 6), [Box((0, 0), (4, 3)), Box((0, 3), (4, 3))]), i=("int64", (4,), [full_box((4,))])
)


def test_wrong_mappings_are_named():
    def tensor(*sources: Source, shape: Shape = (4, 6), dtype: str = "float32") -> TargetTensor:
        return TargetTensor("t", dtype, shape, sources)

    upper = Source("w", (Narrow(0, 0, 2), Place((0, 0), (4, 6))))
    assert "w.x is not in the checkpoint" in failing(W, tensor(Source("w.x")))
    assert "expected shape (3, 6)" in failing(W, tensor(Source("w"), shape=(3, 6)))
    assert "does not fit" in failing(W, tensor(Source("w", (Select(0, 9),)), shape=(6,)))
    assert "is not cast to" in failing(W, tensor(Source("i"), shape=(4,)))
    message = failing(W, tensor(upper))
    assert "t [0:4, 0:6]" in message
    assert "12 of 24 elements" in message
    assert "overlap" in failing(W, tensor(upper, Source("w")))
    assert "more than once" in failing(W, tensor(Source("w")), tensor(Source("w")))
    lost = failing(W, tensor(Source("w")), placement=lambda t: [(0, Box((0, 0), (3, 6)))])
    assert "its placement does not tile shape (4, 6)" in lost
    many = failing(W, *(TargetTensor(f"t{i}", "float32", (4, 6), (Source("no"),)) for i in range(30)))
    assert "30 tensors cannot be planned" in many
    assert "and 27 more like these" in many


def test_zero_filled_elements_are_counted_and_allowed_only_when_said():
    source = Source("w", (Place((0, 0), (7, 6)),))
    assert "18 of 42 elements" in failing(W, TargetTensor("t", "float32", (7, 6), (source,)))
    plan = build_plan(
        W, Target((TargetTensor("t", "float32", (7, 6), (source,), zero_filled=True),)), rows(2), 2
    )
    assert [item.zero_elems for item in plan.items] == [0, 18]


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        ([Box((0,), (3,))], "1 of 4 elements"),
        ([Box((0,), (3,)), Box((2,), (2,))], "overlap"),
        ([Box((0,), (4,)), Box((0,), (4,))], "overlap"),
        ([Box((0,), (4,)), Box((4,), (1,))], None),  # outside: no target element comes from it
    ],
)
def test_damaged_sources_are_corrupt(chunks, says):
    catalog = catalog_of(w=("float32", (4,), chunks))
    target = Target((TargetTensor("t", "float32", (4,), (Source("w"),)),))
    if says is None:
        build_plan(catalog, target, whole, 1)
        return
    with pytest.raises(CorruptCheckpointError, match=says):
        build_plan(catalog, target, whole, 1)


def test_archives_must_be_those_of_the_objects():
    target = Target((), objects=(TargetObject("a", 1),))
    with pytest.raises(MappingError, match="archives"):
        build_plan(W, target, whole, 1, [("b", b"")])
    with pytest.raises(MappingError, match="needs 8 bytes, but has 3"):
        build_plan(W, Target((), (InlineTensor("s", "int64", (), b"123"),)), whole, 1)


def test_json_says_everything_and_digest_changes_with_it():
    plan = stacked_plan(2)
    assert json.loads(json.dumps(plan_summary(plan)))["digest"] == plan.digest
    listed = json.loads(json.dumps(list(item_rows(plan))))
    assert [row["length"] for row in listed] == [item.length for item in plan.items]
    assert len({stacked_plan(world).digest for world in (1, 2, 3, 4, 8)}) == 5


def test_plan_is_the_same_under_every_hash_seed():
    code = "from tests.plan.test_build import stacked_plan; print(stacked_plan(3).digest)"
    seeds = ["0", "4711"]
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=REPO,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in seeds
    }
    assert found == {stacked_plan(3).digest}


@pytest.mark.parametrize("shape", [(3, 2), (0, 2)])
def test_an_empty_shard_is_written_only_for_a_tensor_without_elements(shape):
    """Also the first one: its offset would hide the chunk that begins there."""
    catalog = catalog_of(w=("float32", shape, [full_box(shape)]))
    target = Target((TargetTensor("w", "float32", shape, (Source("w"),)),))
    empty, rest = Box((0, 0), (0, 2)), full_box(shape)
    plan = build_plan(catalog, target, lambda _: [(0, empty), (1, rest), (2, empty)], 3)
    assert [(item.file, item.box) for item in plan.items] == [
        ("__1_0.distcp", rest) if shape[0] else ("__0_0.distcp", empty)
    ]
    stored = catalog_of(w=("float32", shape, [empty, rest, empty]))
    linked = link_tensors(plan, target, stored, stored, lambda _: 3 * 4096)
    assert [(item.file, item.offset, item.box) for item in linked.linked] == [
        ("s", 4096, rest) if shape[0] else ("s", 0, empty)
    ]
    assert (linked.items, linked.file_bytes, linked.links) == ((), {}, {"s": 3 * 4096})


@given(st.data())
def test_layers_that_are_planned_together_are_planned_as_alone(data):
    """What is found of one layer is taken for others that are tiled alike, whatever chunks they share."""
    shape = (5, 2, 4, 3)
    leading = data.draw(st.integers(1, 2))
    boxes = data.draw(tilings(shape, max_cuts=12))
    catalog = catalog_of(w=("float32", shape, boxes), v=("float32", shape, data.draw(st.permutations(boxes))))
    tensors = [
        TargetTensor(
            f"{key}.{lead}",
            "float32",
            shape[leading:],
            (Source(key, tuple(Select(0, index) for index in lead)),),
        )
        for key in catalog.tensors
        for lead in itertools.product(*map(range, shape[:leading]))
    ]
    together = build_plan(catalog, Target(tuple(tensors)), rows(2), 2)
    alone = [build_plan(catalog, Target((tensor,)), rows(2), 2) for tensor in tensors]
    found = {(item.key, item.box): item.transfers for item in together.items}
    assert found == {(item.key, item.box): item.transfers for plan in alone for item in plan.items}


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2500])
def test_tables_are_spelled_in_pieces_as_they_are_at_once(count):
    names = [f'layer.{n}."quoted".ünï' for n in range(count)]
    sizes = {name: number for number, name in enumerate(names)}
    tensors = {name: TensorInfo("float32", (number, 2)) for number, name in enumerate(names)}
    paths = {name: ("model", number, name) for number, name in enumerate(names)}
    shapes = {name: (number,) for number, name in enumerate(names)}
    kinds = {key: tuple(info) for key, info in tensors.items()}
    at_once = orjson.dumps([sizes, kinds, paths, shapes, {}])
    assert plan_digest([], [], sizes, tensors, paths, shapes) == hashlib.sha256(at_once).hexdigest()
    at_once = orjson.dumps([sizes, kinds, paths, {}])
    assert plan_digest([], [], sizes, tensors, paths) == hashlib.sha256(at_once).hexdigest()


def test_a_name_that_is_no_text_has_all_tables_spelled_the_other_way():
    paths = {f"k{n}": ("k", n) for n in range(1500)} | {"file\udcff": ("file\udcff",)}
    tensors = {"k0": TensorInfo("float32", (2,))}
    at_once = json.dumps([{"f": 1}, {"k0": ["float32", [2]]}, paths, {}]).encode()
    assert plan_digest([], [], {"f": 1}, tensors, paths) == hashlib.sha256(at_once).hexdigest()


def test_what_is_made_by_the_hundred_thousand_is_what_a_frozen_dataclass_is():
    tensor, equal = (TargetTensor("w", "float32", (2, 3), (Source("w"),), parameter="w") for _ in range(2))
    assert equal == tensor and {equal} == {tensor} and not hasattr(tensor, "__dict__")
    assert pickle.loads(pickle.dumps(tensor)) == tensor != replace(tensor, shape=(3, 2))
