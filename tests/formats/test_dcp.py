"""The catalog against torch's own reading of the same `.metadata`, and against metadata that contradicts itself."""

import pickle
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckpt_tools.cli.app import run
from ckpt_tools.errors import CkptError, CorruptCheckpointError, UnsupportedCheckpointError
from ckpt_tools.formats.dcp import metadata_read
from ckpt_tools.formats.dcp import metadata_read as reader
from ckpt_tools.formats.dcp.metadata_read import METADATA, read_catalog
from ckpt_tools.formats.dcp.save_plans import plan_problem
from ckpt_tools.formats.pickle.machine import Machine
from ckpt_tools.formats.pickle.packed_records import STORED, Layout, integer, integers
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.model.catalog import Catalog, Chunk
from tests.conftest import fixture_dir
from tests.formats.checkpoints import dcp_folders, stock_metadata

Chunks = dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]


def assert_same(catalog: Catalog, stock: Metadata) -> None:
    """Every key, chunk and item of the catalog is what torch reads, in the same order."""
    tensors = {k: v for k, v in stock.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    assert list(catalog.tensors) == list(tensors)
    assert list(catalog.objects) == [k for k in stock.state_dict_metadata if k not in tensors]
    for key, expected in tensors.items():
        entry = catalog.tensors[key]
        assert (entry.dtype, entry.shape) == (str(expected.properties.dtype)[6:], tuple(expected.size))
        chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in expected.chunks]
        assert [(c.box.start, c.box.size) for c in entry.chunks] == chunks
        for chunk in entry.chunks:
            info = stock.storage_data[MetadataIndex(key, chunk.box.start)]
            assert chunk.item[:3] == (info.relative_path, info.offset, info.length)
    for key, found in catalog.objects.items():
        info = stock.storage_data[MetadataIndex(key)]
        assert found.item[:3] == (info.relative_path, info.offset, info.length)
    assert dict(catalog.planner_paths) == (stock.planner_data or {})


@pytest.mark.parametrize("folder", dcp_folders())
def test_recorded_catalogs_equal_stock(folder):
    catalog = read_catalog(open_files(str(folder)))
    stock = stock_metadata(folder)
    assert_same(catalog, stock)
    shapes = getattr(stock, "mcore_data", None)
    name = "nd_reformulated_orig_global_shape"
    expected = None if shapes is None else {k: tuple(v[name]) for k, v in shapes.items() if name in v}
    assert catalog.original_shapes == expected


def test_mcore_root_class_is_kept():
    folder = fixture_dir("v015_dense_ms_tp2_dp2") / "checkpoint"
    catalog = read_catalog(open_files(str(folder)))
    assert catalog.metadata_class == "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
    assert catalog.original_shapes is not None
    assert catalog.original_shapes["optimizer.state.exp_avg.decoder.final_layernorm.weight"] == (24,)


def test_plain_torch_save(tmp_path):
    state = {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "scalar": torch.tensor(2, dtype=torch.int16)},
        "fp8": torch.zeros(4).to(torch.float8_e4m3fn),
        "list": [1, {"a": 2}],
        "step": 7,
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    catalog = read_catalog(open_files(str(tmp_path)))
    assert_same(catalog, stock_metadata(tmp_path))
    assert catalog.planner_paths["model.w"] == ("model", "w")
    assert catalog.tensors["fp8"].dtype == "float8_e4m3fn"
    assert catalog.original_shapes is None


def metadata(tensors: Chunks, **stored: Any) -> Metadata:
    """Metadata of fp32 tensors from their chunks `(offsets, sizes)`; `stored` adds or replaces storage entries."""
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    at = 0
    for key, chunks in tensors.items():
        shape = [
            max(a + n for a, n in dim) for dim in zip(*(zip(*c, strict=True) for c in chunks), strict=True)
        ]
        parts = [ChunkStorageMetadata(torch.Size(a), torch.Size(n)) for a, n in chunks]
        described[key] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), parts)
        for index, (offsets, _) in enumerate(chunks):
            storage[MetadataIndex(key, offsets, index)] = _StorageInfo(
                f"__{index % 3}_0.distcp", at, 1000 + at % 7
            )
            at += 1_000_003
    described["object"] = BytesStorageMetadata()
    storage[MetadataIndex("object")] = _StorageInfo("__0_0.distcp", at, 1261)
    return Metadata(described, {"object": ("object",)}, storage | stored.pop("storage", {}), **stored)


def save(folder: Path, value: object, protocol: int = 4) -> None:
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(value, file, protocol)


GRID: Chunks = {
    "matrix": [((r, c), (64, 300)) for r in range(0, 640, 64) for c in range(0, 70_000, 300)],
    "vector": [((a,), (5,)) for a in range(0, 1500, 5)],
    "deep": [((a, 0, 0, 0, 0), (1, 2, 3, 4, 70_000)) for a in range(300)],
}

FEW = {key: chunks[:5] for key, chunks in GRID.items()}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_and_many_chunks(tmp_path, protocol):
    """Protocol 4 and 5 records are packed, 2 and 3 executed; offsets beyond 4 GiB come in as long integers."""
    value = metadata(GRID)
    save(tmp_path, value, protocol)
    catalog = read_catalog(open_files(str(tmp_path)))
    assert_same(catalog, value)


def grown(monkeypatch: pytest.MonkeyPatch, kind: type, *fields: object) -> None:
    """Let torch's class write more than it does: values behind a tuple's, or else a field of the name."""
    write = kind.__getstate__ if kind is TensorProperties else lambda self: dict(vars(self))

    def state(self: object) -> object:
        found = write(self)
        return (*found, *fields) if isinstance(found, tuple) else found | {"quantization": fields[0]}

    monkeypatch.setattr(kind, "__getstate__", state, raising=False)


@pytest.mark.parametrize("strides", [(), (4, 1), (1 << 40, 1, 1), (9, 9, 9, 9), None, "odd"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_strides_of_torch_2_15_are_read_over(strides, protocol, tmp_path, monkeypatch):
    """Every tensor's in its properties, and in those of every write item, which stay packed."""
    value = metadata(FEW)
    expected = pickle.loads(pickle.dumps(value))
    value.all_local_plans = [plan(value), plan(value)]
    grown(monkeypatch, TensorProperties, strides)
    save(tmp_path, value, protocol)
    files = open_files(str(tmp_path))
    assert_same(read_catalog(files), expected)
    assert plan_problem(files) == (2 * len(value.all_local_plans[0].items), None)
    machine = Machine((tmp_path / METADATA).read_bytes(), "")
    machine.load()
    packed = len(list(machine.planned()))  # all but the first, which makes the names
    assert packed == (2 * len(value.all_local_plans[0].items) - 1 if protocol == 4 else 0)


@pytest.mark.parametrize(
    "kind", [TensorProperties, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex,
             _StorageInfo, StorageMeta, Metadata],
)  # fmt: skip
@pytest.mark.parametrize("protocol", [2, 4])
def test_fields_of_a_newer_torch_are_named_and_the_others_read(kind, protocol, tmp_path, monkeypatch, capsys):
    value = metadata(FEW, storage_meta=StorageMeta(checkpoint_id="x"))
    expected = pickle.loads(pickle.dumps(value))
    grown(monkeypatch, kind, None, 7)
    save(tmp_path, value, protocol)
    with pytest.warns(UserWarning, match=f"a {kind.__name__} has fields that this version does not know: "):
        assert_same(read_catalog(open_files(str(tmp_path))), expected)
    assert run(["inspect", str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "does not know" in line]
    assert ("1 behind the strides" if kind is TensorProperties else "'quantization'") in line


def plan(value: Metadata) -> SavePlan:
    """What a rank wrote all chunks by."""
    return SavePlan([
        WriteItem(
            MetadataIndex(key, chunk.offsets, number), WriteItemType.SHARD,
            tensor_data=TensorWriteData(deepcopy(chunk), TensorProperties(torch.float32), torch.Size(entry.size)),
        )
        for key, entry in value.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
        for number, chunk in enumerate(entry.chunks)
    ])  # fmt: skip


def test_sizes_of_packed_chunks_are_those_that_executing_them_makes(tmp_path):
    save(tmp_path, metadata(GRID | {"scalar": [((), ())]}))
    data = (tmp_path / METADATA).read_bytes()
    made, executed = Machine(data, ""), Machine(data, "")
    made.load(), executed.load()
    before, found = set(made._memo), 0
    for number in range(len(made._bases)):
        made._make_sizes(number)
        executed._execute_record(number)
    for index in set(made._memo) - before:
        assert made._memo[index] == executed._memo[index]
        found += 1
    assert found >= 3 * sum(map(len, GRID.values()))  # the offsets of every chunk: numbers, arguments, size


def test_a_layout_knows_the_records_that_differ_in_their_numbers_alone(tmp_path):
    value = metadata(GRID)
    for info in value.storage_data.values():
        info.relative_path = sys.intern(
            info.relative_path
        )  # one text a file, as in what a process has gathered
    save(tmp_path, value)
    data = (tmp_path / METADATA).read_bytes()
    machine = Machine(data, "")
    machine.load()
    known: list[Layout] = []
    for place in sorted(place for places in machine.stored.values() for place in places):
        found = STORED.match(data, place)
        assert found is not None
        if found["path"] is None or found["fqn"] is None or found["start_name"] is None:
            continue
        start = "start" if found["start"] else "start_tuple"
        groups = ("fqn", "number", start, "path", "offset", "length")
        expected = [int.from_bytes(found["fqn"][1:], "little"), integer(found["number"])]
        fetched = found["start"]
        expected += [int.from_bytes(fetched[1:], "little")] if fetched else integers(found["start_tuple"])
        expected += [int.from_bytes(found["path"][1:], "little")]
        expected += [integer(found["offset"]), integer(found["length"])]
        told = [list(numbers) for layout in known if (numbers := layout.numbers(data, place)) is not None]
        assert told in ([], [expected])  # no two layouts are of one record
        if not told:
            known.append(Layout(found, *groups))
            own = known[-1]
            assert list(own.numbers(data, place) or ()) == expected
            assert own.numbers(data[: found.end() - 1], place) is None
            record = data[place : found.end()]
            assert own.numbers(record[:-1] + b"s", 0) is None
            assert own.numbers(b"N" + record[1:], 0) is None
    assert 1 < len(known) < 100


def test_small_and_large_catalogs_decode_alike(tmp_path, monkeypatch):
    save(tmp_path, metadata(GRID))
    files = open_files(str(tmp_path))
    eager = read_catalog(files)
    monkeypatch.setattr(reader, "EAGER_BYTES", 0)
    monkeypatch.setattr(metadata_read, "KEPT", 10)
    lazy = read_catalog(files)
    for _ in range(2):
        assert dict(eager.tensors) == dict(lazy.tensors)
        assert dict(eager.objects) == dict(lazy.objects)


def test_shapes_of_a_large_catalog_are_told_without_decoding_chunks(tmp_path, monkeypatch):
    """A plan for a model of 700,000 chunks asks for shapes several times and for each chunk once."""
    save(tmp_path, metadata(GRID))
    files = open_files(str(tmp_path))
    eager = read_catalog(files)
    decoded: list[str] = []
    decode = reader._Decoder.chunks

    def chunks(self: reader._Decoder, key: str) -> tuple[Chunk, ...]:
        decoded.append(key)
        return decode(self, key)

    monkeypatch.setattr(reader._Decoder, "chunks", chunks)
    monkeypatch.setattr(reader, "EAGER_BYTES", 0)
    lazy = read_catalog(files)
    told = [(t.key, t.dtype, t.shape, len(t.chunks)) for t in lazy.tensors.values()]
    assert told == [(t.key, t.dtype, t.shape, len(t.chunks)) for t in eager.tensors.values()]
    assert decoded == []
    for entry in lazy.tensors.values():
        assert [chunk.box for chunk in entry.chunks] == [c.box for c in eager.tensors[entry.key].chunks]
        assert entry.chunks == eager.tensors[entry.key].chunks
    assert decoded == list(lazy.tensors)


def test_truncation_anywhere_is_our_error(tmp_path):
    source = fixture_dir("core019_llama_tp2_fully_reshardable") / "iter_0000002" / ".metadata"
    data = source.read_bytes()
    for end in [*range(0, 300), *range(300, len(data), 211), len(data) - 1]:
        (tmp_path / ".metadata").write_bytes(data[:end])
        with pytest.raises(CorruptCheckpointError, match="truncated or damaged"):
            read_catalog(open_files(str(tmp_path)))


def test_flipped_bytes_never_crash(tmp_path):
    source = fixture_dir("core019_llama_tp2_fully_reshardable") / "iter_0000002" / ".metadata"
    data = source.read_bytes()
    refused = 0
    for at in range(0, len(data), 397):
        for value in (data[at] ^ 0xFF, 0x2E, 0x94):
            (tmp_path / ".metadata").write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
            try:
                read_catalog(open_files(str(tmp_path)))
            except CkptError:
                refused += 1
    assert refused > 80


ONE: Chunks = {"w": [((0, 0), (2, 3)), ((2, 0), (2, 3))]}
W0 = MetadataIndex("w", (0, 0))

CONTRADICTIONS = {
    "escape": (
        {W0: _StorageInfo("../x.distcp", 0, 9)},
        "file name '../x.distcp' leads out of the checkpoint",
    ),
    "absolute": (
        {W0: _StorageInfo("/etc/passwd", 0, 9)},
        "file name '/etc/passwd' leads out of the checkpoint",
    ),
    "url": ({W0: _StorageInfo("s3://b/x", 0, 9)}, "file name 's3://b/x' leads out of the checkpoint"),
    "inner": ({W0: _StorageInfo("a/../../x", 0, 9)}, "leads out of the checkpoint"),
    "nul": ({W0: _StorageInfo("a\0b", 0, 9)}, "is not a file name"),
    "no name": ({W0: _StorageInfo(None, 0, 9)}, "KeyError"),
    "negative": ({W0: _StorageInfo("a", -5, 9)}, "w: 9 bytes at -5 of a are not an item"),
    "huge": ({W0: _StorageInfo("a", 0, 1 << 62)}, "are not an item"),
    "text length": ({W0: _StorageInfo("a", 0, "9")}, "w: '9' bytes at 0 of a are not an item"),
    "unknown key": ({MetadataIndex("v", (0,)): _StorageInfo("a", 0, 9)}, "v: stored but not described"),
    "unknown chunk": (
        {MetadataIndex("w", (1, 0)): _StorageInfo("a", 0, 9)},
        r"chunks that it has not, the first at \(1, 0\)",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_contradictions_are_named(tmp_path, name, protocol):
    storage, message = CONTRADICTIONS[name]
    save(tmp_path, metadata(ONE, storage=storage), protocol)
    with pytest.raises(CorruptCheckpointError, match=message):
        read_catalog(open_files(str(tmp_path)))


def test_all_problems_are_listed(tmp_path):
    value = metadata({f"t{i}": [((0,), (4,)), ((4,), (4,))] for i in range(30)})
    for i in range(30):
        del value.storage_data[MetadataIndex(f"t{i}", (4,))]
    save(tmp_path, value)
    with pytest.raises(CorruptCheckpointError) as found:
        read_catalog(open_files(str(tmp_path)))
    assert "t0: no file holds the chunk [4:8]" in str(found.value)
    assert "... and 27 more like these" in str(found.value)
    assert len(found.value.problems) == 30


def test_tensors_that_are_cut_alike_are_each_held_to_their_own_shape(tmp_path):
    cut: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,), (4,)), ((4,), (4,))]
    value = metadata({"a": cut, "b": cut, "c": cut, "d": [((0,), (4,)), ((4,), (5,))]})
    value.state_dict_metadata["c"].size = torch.Size((7,))
    save(tmp_path, value)
    with pytest.raises(CorruptCheckpointError, match=r"c: chunk \[4:8\] is outside of shape \[7\]") as found:
        read_catalog(open_files(str(tmp_path)))
    assert len(found.value.problems) == 1
    value.state_dict_metadata["c"].size = torch.Size((8,))
    save(tmp_path, value)
    tensors = read_catalog(open_files(str(tmp_path))).tensors
    boxes = {key: [str(chunk.box) for chunk in entry.chunks] for key, entry in tensors.items()}
    assert boxes == {key: ["[0:4]", "[4:8]"] for key in "abc"} | {"d": ["[0:4]", "[4:9]"]}
    files = {key: [(chunk.item.file, chunk.item.offset) for chunk in e.chunks] for key, e in tensors.items()}
    assert len({place for places in files.values() for place in places}) == 8


def test_chunk_out_of_bounds(tmp_path):
    value = metadata(ONE)
    value.state_dict_metadata["w"].size = torch.Size((3, 3))
    save(tmp_path, value)
    with pytest.raises(CorruptCheckpointError, match=r"w: chunk \[2:4, 0:3\] is outside of shape \[3, 3\]"):
        read_catalog(open_files(str(tmp_path)))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("offsets", "sizes"), [((0, 0), (2,)), ((0,), (2, 3)), ((0, 0, 0), (2, 3, 1)), ((), ())]
)
def test_chunk_of_other_dimensions(offsets, sizes, protocol, tmp_path):
    value = metadata(ONE)
    value.state_dict_metadata["w"].chunks[1] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    save(tmp_path, value, protocol)
    told = f"w: a chunk has {len(offsets)} offsets and {len(sizes)} sizes, its tensor has 2 dimensions"
    with pytest.raises(CorruptCheckpointError, match=told):
        read_catalog(open_files(str(tmp_path)))


def test_transforms_are_refused(tmp_path):
    save(tmp_path, metadata(ONE, storage={W0: _StorageInfo("a", 0, 9, ["stream.zstd/1"])}))
    with pytest.raises(UnsupportedCheckpointError, match=r"transformed by.*stream.zstd/1"):
        read_catalog(open_files(str(tmp_path)))


def test_unsupported_element_type(tmp_path):
    value = metadata(ONE)
    value.state_dict_metadata["w"].properties.dtype = torch.quint8
    save(tmp_path, value)
    with pytest.raises(UnsupportedCheckpointError, match="quint8"):
        read_catalog(open_files(str(tmp_path)))


def test_missing_metadata_says_why(tmp_path):
    files = open_files(str(tmp_path))
    with pytest.raises(
        UnsupportedCheckpointError, match=r"no .metadata, so this is not a distributed checkpoint"
    ):
        read_catalog(files)
    (tmp_path / "iter_0000002").mkdir()
    with pytest.raises(UnsupportedCheckpointError, match="Give one of its iterations: iter_0000002"):
        read_catalog(files)
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(UnsupportedCheckpointError, match="interrupted before it was complete"):
        read_catalog(files)
    (tmp_path / "__0.metadata").touch()
    with pytest.raises(UnsupportedCheckpointError, match=r"spread over 1 files like __0\.metadata"):
        read_catalog(files)


@pytest.mark.parametrize("value", [3, {"a": 1}, ChunkStorageMetadata(torch.Size(()), torch.Size(())), None])
def test_other_pickles_are_no_metadata(tmp_path, value):
    save(tmp_path, value)
    with pytest.raises(CorruptCheckpointError, match="not checkpoint metadata"):
        read_catalog(open_files(str(tmp_path)))


class Planned:
    """What somebody's planner keeps."""

    def __init__(self) -> None:
        self.paths = {"w": ("w",)}


class Acting:
    def __reduce__(self) -> tuple[Any, ...]:
        return (eval, ("{}",))


@pytest.mark.parametrize(("planner", "code", "is_advised"), [(Planned(), 3, True), (Acting(), 4, False)])
def test_planner_data_of_another_class(planner, code, is_advised, tmp_path):
    """--unknown-classes is advised where it may help, and reads it as what tells nothing."""
    with open(tmp_path / METADATA, "wb") as file:
        pickle.dump(Metadata({}, planner, {}), file)
    with pytest.raises(CkptError) as refused:
        read_catalog(open_files(str(tmp_path)))
    assert refused.value.exit_code == code
    assert ("--unknown-classes" in str(refused.value)) == is_advised
    assert read_catalog(open_files(str(tmp_path)), trust_pickle=True).planner_paths == {}
