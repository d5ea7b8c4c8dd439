"""Whole conversions: stock DCP reads what was written, and nothing but the plan decides a byte."""

import dataclasses
import hashlib
import math
import os
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.errors import CkptError, CorruptCheckpointError, StorageError, UsageError
from ckpt_tools.execute.move import stream
from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.dcp.metadata_write import metadata_bytes
from ckpt_tools.formats.locate.detect import TRACKER
from ckpt_tools.formats.pickle.machine import Machine, Object, Record
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.human import human_bytes
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.kernels.casts import Array, numpy_dtype
from ckpt_tools.model.target import Target, TargetTensor
from ckpt_tools.model.transfers import Plan
from ckpt_tools.model.views import Place, Select, Source, view_shape
from ckpt_tools.model.without_gc import without_gc
from ckpt_tools.plan.build import FILE_BYTES, build_plan, hole_bytes, holes
from tests.execute.conftest import make_case, opened
from tests.model.test_box import ABSENT, expected
from tests.plan.test_build import rows
from tests.strategies import tilings, viewed_shapes
from tests.synthetic import DcpFolder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tree(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of every file."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def stock_load(folder: Path, plan: Plan) -> dict[str, Array]:
    """Every tensor as stock DCP reads it, as bytes of its type."""
    state = {k: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for k, t in plan.tensors.items()}
    dcp.load(state, checkpoint_id=folder)
    return {
        k: np.frombuffer(
            v.reshape(-1).view(torch.uint8).numpy().tobytes(), numpy_dtype(plan.tensors[k].dtype)
        )
        for k, v in state.items()
    }


def assert_equal(found: dict[str, Array], wanted: dict[str, Array]) -> None:
    assert found.keys() == wanted.keys()
    for key, values in found.items():
        assert values.tobytes() == wanted[key].tobytes(), key


@pytest.mark.parametrize(
    ("world", "file_bytes", "files"), [(1, FILE_BYTES, 1), (3, FILE_BYTES, 3), (2, 100_000, 6)]
)
def test_stock_dcp_reads_every_tensor_and_object(case, tmp_path, monkeypatch, world, file_bytes, files):
    monkeypatch.setattr("ckpt_tools.plan.build.FILE_BYTES", file_bytes)
    plan = case.plan(world)
    assert len(plan.file_bytes) == files
    out = tmp_path / "out" / "iter_0000007"
    report = write_checkpoint(
        plan, case.files, Output(out, beside={TRACKER: b"7"}, extra_files={"extra.txt": b"x"})
    )
    assert sorted(p.name for p in out.iterdir()) == sorted([".metadata", "extra.txt", *plan.file_bytes])
    assert sorted(p.name for p in out.parent.iterdir()) == ["iter_0000007", TRACKER]
    assert (out.parent / TRACKER).read_text() == "7"
    assert_equal(stock_load(out, plan), case.expected)
    state = {"iteration": None}
    dcp.load(state, checkpoint_id=out)
    assert state == {"iteration": 7}
    assert {p.name: p.stat().st_size for p in out.glob("*.distcp")} == plan.file_bytes
    assert report.bytes_written == plan.bytes_to_write
    again = read_catalog(open_files(str(out)))
    assert again.planner_paths == plan.paths
    assert {k: (e.dtype, e.shape) for k, e in again.tensors.items()} == dict(plan.tensors)


def test_metadata_holds_genuine_torch_classes(case, tmp_path):
    write_checkpoint(case.plan(2), case.files, Output(tmp_path / "out"))
    metadata = dcp.FileSystemReader(tmp_path / "out").read_metadata()
    assert type(metadata) is dcp.metadata.Metadata
    stored = metadata.state_dict_metadata["layer.0"]
    assert stored.properties == dcp.metadata.TensorProperties(dtype=torch.float32)
    assert stored.chunks[1] == dcp.metadata.ChunkStorageMetadata(torch.Size([128, 0]), torch.Size([128, 128]))
    assert type(stored.size) is torch.Size
    assert type(metadata.state_dict_metadata["iteration"]) is dcp.metadata.BytesStorageMetadata
    index = next(i for i in metadata.storage_data if i.fqn == "layer.0" and i.offset[0])
    assert (index, index.index) == (dcp.metadata.MetadataIndex("layer.0", (128, 0)), 1)
    assert (metadata.storage_meta.checkpoint_id, metadata.storage_meta.modules) == (None, [])
    assert metadata.planner_data["layer.0"] == ("layer.0",)
    assert metadata.version == "1.0.0"


def test_reading_recognises_the_records_that_are_written(case):
    plan = case.plan(3)
    machine = Machine(metadata_bytes(plan), "here")
    described = machine.load().state.as_dict()["state_dict_metadata"].as_dict()
    chunks = [c for entry in described.values() if entry.state for c in entry.state.as_dict()["chunks"]]
    assert len(chunks) == len(plan.items) + 1  # and the step
    # The first of each kind is another: it names the fields, which later ones fetch from the memo.
    assert [type(chunk) for chunk in chunks] == [Object] + [Record] * len(plan.items)
    assert sum(map(len, machine.stored.values())) == len(plan.items) + len(plan.blobs) - 1


def test_kernel_copies_equal_tiles(tmp_path, monkeypatch):
    case = make_case(tmp_path / "source", scale=32)
    plan = case.plan(1)
    unproven = WriteOptions(check_source="none")
    report = write_checkpoint(plan, case.files, Output(tmp_path / "kernel"), unproven)
    assert report.bytes_kernel_copied + report.bytes_cloned >= 4 * 512 * 512 * 4
    one = WriteOptions(threads=1)  # a payload that another thread has proven is copied unread
    proven = write_checkpoint(plan, case.files, Output(tmp_path / "proven"), one)
    assert proven.bytes_kernel_copied == 0  # what must be read is written as it was read
    write_checkpoint(plan, case.files, Output(tmp_path / "synced"), WriteOptions(4, 12 << 16, fsync=True))
    monkeypatch.setattr("ckpt_tools.execute.move.stream.KERNEL_COPY_BYTES", 1 << 60)
    report = write_checkpoint(plan, case.files, Output(tmp_path / "tiles"), unproven)
    assert report.bytes_kernel_copied == report.bytes_cloned == 0
    names = ("kernel", "tiles", "proven", "synced")
    assert len({str(tree(tmp_path / name)) for name in names}) == 1
    assert_equal(stock_load(tmp_path / "tiles", plan), case.expected)


@pytest.mark.parametrize("at_least", [1, 1 << 60])
def test_a_whole_payload_beside_others_or_zeros(tmp_path, monkeypatch, at_least):
    """The first piece is a whole payload that could be copied, but it is not the whole item.

    Between small items that are whole copies, where such a payload must not join their batch.
    """
    monkeypatch.setattr(stream, "KERNEL_COPY_BYTES", at_least)
    values = np.arange(3 * 8, dtype=np.float32).reshape(3, 8)
    source = DcpFolder(tmp_path / "source")
    source.tensor("mixed", "float32", values, [Box((0, 0), (1, 8)), Box((1, 0), (2, 4)), Box((1, 4), (2, 4))])
    source.tensor("short", "float32", values)
    files, catalog = opened(source)
    padded = Source("short", (Place((0, 0), (5, 8)),))
    tensors = (
        TargetTensor("before", "float32", (3, 8), (Source("short"),)),
        TargetTensor("mixed", "float32", (3, 8), (Source("mixed"),)),
        TargetTensor("padded", "float32", (5, 8), (padded,), zero_filled=True),
        TargetTensor("behind", "float32", (3, 8), (Source("short"),)),
    )
    plan = build_plan(catalog, Target(tensors), rows(1), 1)
    write_checkpoint(plan, files, Output(tmp_path / "out"))
    wanted = dict.fromkeys(("before", "mixed", "behind"), values)
    wanted["padded"] = np.concatenate([values, np.zeros((2, 8), np.float32)])
    assert_equal(stock_load(tmp_path / "out", plan), wanted)


@settings(max_examples=25)
@given(data=st.data())
def test_any_view_of_any_chunks(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("view")
    shape, view = data.draw(viewed_shapes())
    wanted = expected(shape, view) + 1  # no element is zero, so that one left out shows
    source = DcpFolder(folder / "source")
    source.tensor("w", "int64", np.arange(math.prod(shape)).reshape(shape) + 1, data.draw(tilings(shape)))
    files, catalog = opened(source)
    target = TargetTensor("t", "int64", view_shape(view, shape), (Source("w", view),), zero_filled=True)
    world = data.draw(st.integers(1, 3))
    plan = build_plan(catalog, Target((target,)), rows(world), world)
    threads = data.draw(st.integers(1, 2))
    with mock.patch.object(stream, "KERNEL_COPY_BYTES", data.draw(st.sampled_from([1, 1 << 60]))):
        options = WriteOptions(threads, 6 << 16, check_source=data.draw(st.sampled_from(["all", "none"])))
        write_checkpoint(plan, files, Output(folder / "out"), options)
    wanted = np.where(wanted == ABSENT + 1, 0, wanted)
    assert_equal(stock_load(folder / "out", plan), {"t": wanted})
    reader = BoxReader(files, catalog)
    assert reader.read(target, full_box(target.shape)).tobytes() == wanted.tobytes()
    reader.close()


def test_transposed_payloads_of_stock_dcp(tmp_path):
    """A stock writer keeps the memory format of what it saves: payloads need not be row-major."""
    values = torch.arange(2 * 3 * 40 * 50, dtype=torch.float32).reshape(3, 40, 2, 50)
    dcp.save(
        {"w": values.permute(3, 0, 2, 1), "v": torch.arange(12.0).reshape(3, 4).t()},
        checkpoint_id=tmp_path / "in",
    )
    files = open_files(str(tmp_path / "in"))
    tensors = (
        TargetTensor("w", "float32", (50, 3, 2, 40), (Source("w"),)),
        TargetTensor("v", "float32", (4, 3), (Source("v"),)),
    )
    plan = build_plan(read_catalog(files), Target(tensors), rows(2), 2)
    write_checkpoint(plan, files, Output(tmp_path / "out"), WriteOptions(memory_bytes=6 << 16))
    found = stock_load(tmp_path / "out", plan)
    assert found["w"].tobytes() == values.permute(3, 0, 2, 1).contiguous().numpy().tobytes()
    assert found["v"].tobytes() == np.arange(12, dtype=np.float32).reshape(3, 4).T.tobytes()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_items_that_are_not_what_the_metadata_says(tmp_path):
    source = DcpFolder(tmp_path / "in")
    source.tensor("w", "float32", np.zeros((4, 6), np.float32))
    source.tensor("v", "int32", np.zeros((4, 6), np.int32))
    files, catalog = opened(source)
    entry = catalog.tensors["w"]
    swapped = entry.chunks[0]._replace(item=catalog.tensors["v"].chunks[0].item)
    object.__setattr__(entry, "chunks", (swapped,))
    plan = build_plan(catalog, Target((TargetTensor("w", "float32", (4, 6), (Source("w"),)),)), rows(1), 1)
    with pytest.raises(
        CorruptCheckpointError, match=r"w: the metadata says float32 \(4, 6\).*int32 \(4, 6\)"
    ):
        write_checkpoint(plan, files, Output(tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_outputs_that_are_refused(case, tmp_path):
    plan = case.plan(1)
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        write_checkpoint(plan, case.files, Output(out))
    with pytest.raises(UsageError, match="not a directory"):
        write_checkpoint(plan, case.files, Output(out / "precious"))
    with pytest.raises(UsageError, match="not enough for 2 threads"):
        write_checkpoint(plan, case.files, Output(out, overwrite=True), WriteOptions(memory_bytes=1000))
    assert (out / "precious").read_text() == "x"
    with pytest.raises(UsageError, match="holds precious, not a part of a checkpoint"):
        write_checkpoint(plan, case.files, Output(out, overwrite=True))
    (out / "precious").unlink()
    write_checkpoint(case.plan(2), case.files, Output(out))
    write_checkpoint(plan, case.files, Output(out, overwrite=True))
    assert_equal(stock_load(out, plan), case.expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_too_little_disk_is_known_before_the_first_byte(case, tmp_path, monkeypatch):
    """And it is the output's own: neither more is asked for, nor less."""
    real, plan = os.statvfs(tmp_path), case.plan(1)
    needed = sum(plan.file_bytes.values()) - hole_bytes(holes(plan))
    for free in (needed - 1, needed):
        found = os.statvfs_result((real[0], 1, *real[2:4], free, *real[5:]))
        monkeypatch.setattr(os, "statvfs", lambda path, found=found: found)
        if free == needed:
            write_checkpoint(plan, case.files, Output(tmp_path / "out"))
            return
        with pytest.raises(StorageError, match=rf" has .*iB free, but out needs {human_bytes(needed)}\."):
            write_checkpoint(plan, case.files, Output(tmp_path / "out"))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def _rewrite(path: Path) -> None:
    """Other bytes in the same place, as many as before."""
    with open(path, "r+b") as file:
        file.write(bytes(1000))


def _replace(path: Path) -> None:
    """Another file of the same length and times under the same name."""
    status, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.utime(path, ns=(1, 1)),
        lambda path: os.truncate(path, path.stat().st_size + 1),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        _rewrite,
        _replace,
        Path.unlink,
    ],
)
def test_a_source_that_changes_underneath(case, tmp_path, change):
    path, pending = tmp_path / "source" / "__0_0.distcp", [True]

    def disturb(done: int, total: int) -> None:
        if done and pending:
            pending.clear()
            change(path)

    says = "( changed while| does not exist|.*: No such|: bytes .* needed| has another checksum)"
    with pytest.raises(CkptError, match=path.name + says):
        write_checkpoint(case.plan(1), case.files, Output(tmp_path / "out"), progress=disturb)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("was_there", [False, True])
@pytest.mark.parametrize(
    "name", ["metadata.json", "common.pt", "run_config.yaml", "train_state.pt", "config.json"]
)
def test_a_file_that_describes_the_source_appears_or_goes(name, was_there, case, tmp_path):
    path = tmp_path / "source" / name
    if was_there:
        path.touch()

    def disturb(done: int, total: int) -> None:
        path.unlink(missing_ok=True) if was_there else path.touch()

    with pytest.raises(CorruptCheckpointError, match=f"{name} changed while"):
        write_checkpoint(case.plan(1), case.files, Output(tmp_path / "out"), progress=disturb)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["tensors", "objects"])
@pytest.mark.parametrize("beside", [{}, {"tracker": b"3"}])
def test_fsync_reaches_every_file_and_folder(part, beside, case, tmp_path, monkeypatch):
    extra = {"config.json": b"{}", "inner/notes": b"x"}
    output = Output(tmp_path / "run" / "out", extra_files=extra, beside=beside)
    kept = case.target
    target = Target(kept.tensors) if part == "tensors" else Target((), objects=kept.objects)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    plan = dataclasses.replace(case, target=target).plan(1)
    write_checkpoint(plan, case.files, output, WriteOptions(2, fsync=True))
    there = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert len(there) > 5 and [path for path in there if path.stat().st_ino not in synced] == []


def small_source(folder: Path, count: int) -> tuple[Target, dict[str, Array]]:
    """Many small tensors; every third one loses a dimension on its way, so that its frame changes."""
    rng = np.random.default_rng(2)
    source, targets, wanted = DcpFolder(folder), [], {}
    for i in range(count):
        values = rng.integers(1, 100, (1, i % 7, 5), np.int64)
        source.tensor(f"w{i}", "int64", values)
        view = (Select(0, 0),) if i % 3 == 0 else ()
        wanted[f"t{i}"] = values[0] if view else values
        targets.append(TargetTensor(f"t{i}", "int64", wanted[f"t{i}"].shape, (Source(f"w{i}", view),)))
    source.finish()
    return Target(tuple(targets)), wanted


def test_joined_small_items_equal_the_general_way(tmp_path, monkeypatch):
    target, wanted = small_source(tmp_path / "in", 300)
    files = open_files(str(tmp_path / "in"))
    plan = build_plan(read_catalog(files), target, rows(2), 2)
    joined: list[int] = []
    real = stream.Pump.write_batch

    def counted(*args: Any) -> Any:
        joined.extend(args[1])
        return real(*args)

    monkeypatch.setattr(stream.Pump, "write_batch", counted)
    write_checkpoint(plan, files, Output(tmp_path / "joined"), WriteOptions(memory_bytes=6 << 16))
    assert len(joined) > 100
    assert_equal(stock_load(tmp_path / "joined", plan), wanted)
    with monkeypatch.context() as patch:  # frames of another torch are left to the general way
        patch.setattr(
            "ckpt_tools.execute.move.stream.SmallCopies.archives",
            lambda self: iter([None] * len(self._items)),
        )
        patch.setattr("ckpt_tools.execute.move.source_reader.usual_item", lambda *_: None)
        write_checkpoint(plan, files, Output(tmp_path / "one by one"))
    assert tree(tmp_path / "joined") == tree(tmp_path / "one by one")


@pytest.mark.parametrize("batched", [True, False])
def test_a_flipped_bit_in_a_small_payload_is_found(tmp_path, monkeypatch, batched):
    target, _ = small_source(tmp_path / "in", 30)
    files = open_files(str(tmp_path / "in"))
    catalog = read_catalog(files)
    if not batched:
        monkeypatch.setattr("ckpt_tools.plan.byte_runs.SMALL_BYTES", 0)
    item = catalog.tensors["w13"].chunks[0].item
    with open(tmp_path / "in" / item.file, "r+b") as file:
        file.seek(item.offset + 704)
        file.write(b"\xff")
    with pytest.raises(CorruptCheckpointError, match=r"w13: the payload of the item .* another checksum"):
        write_checkpoint(build_plan(catalog, target, rows(1), 1), files, Output(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["local", "store"])
def test_buffers_do_not_outlive_the_work(place, case, tmp_path, monkeypatch):
    """Nothing refers to a pump in a circle: an `--iteration all` would hold more with every checkpoint."""
    made: list[weakref.ref[stream.Pump]] = []
    real = stream.Pump.__init__

    def noted(pump: stream.Pump, *args: Any) -> None:
        made.append(weakref.ref(pump))
        real(pump, *args)

    monkeypatch.setattr(stream.Pump, "__init__", noted)
    with without_gc():
        output = tmp_path / "out" if place == "local" else "memory://outlive/out"
        write_checkpoint(case.plan(2), case.files, Output(output))
        assert len(made) == WriteOptions().threads
        assert not [pump for pump in made if pump() is not None]
