"""No damage of a source is laundered: every payload that is read from is proven, however it is read."""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.errors import CorruptCheckpointError, Interrupted, UnsupportedCheckpointError, UsageError
from ckpt_tools.execute import run
from ckpt_tools.execute.move.read_box import read_box
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.proof.payload_sums import MOST_PIECES, Piece, Pieces, SourceProof, Stored
from ckpt_tools.execute.proof.prove_source import ProofReport, prove_rest
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage import crc
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.item_reader import find_tensor
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.target import Target, TargetTensor
from ckpt_tools.model.transfers import Plan
from ckpt_tools.model.views import Narrow, Permute, Source, View
from ckpt_tools.plan.build import build_plan
from tests.damage import flip_bit
from tests.execute.conftest import Case, make_case, opened
from tests.execute.converter import Order
from tests.plan.test_build import rows
from tests.synthetic import DcpFolder

SMALL = WriteOptions(threads=2, memory_bytes=6 << 16)
ITEM = Item("f", 0, 0)


class OneFile:
    """`Files` of one file that is in memory."""

    location = "here"

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def read_into(self, _name: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._data[offset : offset + len(buffer)]


def in_memory(data: bytes) -> Any:
    """`Files` with what a proof asks for."""
    return OneFile(data)


class OneOfSeveral(Ranks):
    """A rank that is a thread; what it tells the others goes through JSON, as in a job."""

    def __init__(self, rank: int, barrier: threading.Barrier, told: list[str]) -> None:
        super().__init__(rank, barrier.parties)
        self._barrier, self._told = barrier, told

    def together(self, step: Callable[[], Any]) -> list[Any]:
        self._told[self.rank] = json.dumps(step())
        self._barrier.wait()
        results = [json.loads(text) for text in self._told]
        self._barrier.wait()
        return results


@st.composite
def reads(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]]]:
    """A record, and any ranges of it in any order, some read twice."""
    data = draw(st.binary(min_size=1, max_size=80))
    ends = st.integers(0, len(data))
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=12))
    return data, [(min(pair), max(pair)) for pair in pairs]


@settings(max_examples=300)
@given(what=reads(), at=st.integers(0, 50), damage=st.integers(0, 1), buffer=st.integers(1, 100))
def test_any_reads_of_a_record_prove_the_same(what, at, damage, buffer):
    data, ranges = what
    stored = Stored(ITEM, at, len(data), crc.crc32(data) ^ damage)
    proof = SourceProof()

    def prove() -> ProofReport:
        for start, stop in ranges:
            record = proof.of("key", stored)
            if record is not None:
                record.add(at + start, memoryview(data)[start:stop])
        proof.of("key", stored)
        return prove_rest(proof, in_memory(bytes(at) + data), lambda _: "key", Ranks(), 2, buffer)

    if damage:
        with pytest.raises(
            CorruptCheckpointError, match=r"^key: the payload of the item at byte 0 of f has another"
        ):
            prove()
        return
    report = prove()
    seen = {i for start, stop in ranges for i in range(start, stop)}
    assert (report.payloads, report.nbytes, report.without) == (1, len(data), 0)
    assert report.read_for_it == len(data) - len(seen)


@settings(max_examples=100)
@given(shares=st.lists(reads(), min_size=2, max_size=4), damage=st.integers(0, 1), buffer=st.integers(1, 50))
def test_any_shares_of_several_ranks_prove_the_same(shares, damage, buffer):
    """Each rank's ranges are cut to one record."""
    data = max((one for one, _ in shares), key=len)
    stored = Stored(ITEM, 0, len(data), crc.crc32(data) ^ damage)
    proofs = [SourceProof() for _ in shares]
    try:
        for proof, (_, ranges) in zip(proofs, shares, strict=True):
            record = proof.of("key", stored)
            assert record is not None
            for start, stop in ranges:
                record.add(start, memoryview(data)[start:stop])
    except CorruptCheckpointError:
        assert damage  # one rank has read all of it
        return
    barrier, told = threading.Barrier(len(shares)), [""] * len(shares)

    def verdict(rank: int) -> ProofReport | None:
        ranks = OneOfSeveral(rank, barrier, told)
        try:
            return prove_rest(proofs[rank], in_memory(data), lambda _: "key", ranks, 1, buffer)
        except CorruptCheckpointError:
            return None

    with ThreadPoolExecutor(len(shares)) as pool:
        verdicts = set(pool.map(verdict, range(len(shares))))
    assert len(verdicts) == 1
    assert (verdicts == {None}) == bool(damage)


def test_more_pieces_than_are_kept_are_read_again():
    data = os.urandom(2 * MOST_PIECES + 101)
    stored = Stored(ITEM, 0, len(data), crc.crc32(data))
    proof = SourceProof()
    record = proof.of("key", stored)
    assert record is not None
    for at in range(1, len(data), 2):
        record.add(at, memoryview(data)[at : at + 1])
    assert len(record.pieces) == MOST_PIECES
    report = prove_rest(proof, in_memory(data), str, Ranks(), 2, 7)
    assert (report.nbytes, report.read_for_it) == (len(data), len(data) - MOST_PIECES)


def test_pieces_that_overlap_are_left_out():
    pieces = Pieces(10)
    for piece in (Piece(2, 5, 1), Piece(4, 8, 2), Piece(0, 3, 3), Piece(2, 5, 4), Piece(7, 7, 0)):
        pieces.put(piece)
    assert list(pieces) == [Piece(2, 5, 1)]
    assert pieces.gaps(0, 10) == [(0, 2), (5, 10)]
    assert pieces.gaps(3, 4) == []


def stored_payload(folder: Path, key: str, number: int = 0) -> tuple[Path, int, int]:
    """File, offset and length of the payload of a chunk."""
    files = LocalFiles(str(folder))
    chunk = read_catalog(files).tensors[key].chunks[number]
    frame = find_tensor(files, chunk.item)
    files.close()
    return folder / chunk.item.file, frame.payload_offset, frame.nbytes


def plans(case: Case) -> dict[str, Plan]:
    """One tensor each, read in another way."""
    shape = case.catalog.tensors["weight"].shape
    ways: dict[str, tuple[tuple[int, ...], View]] = {
        "whole": (shape, ()),
        "a few rows": ((3, shape[1]), (Narrow(0, 5, 3),)),
        "columns": ((shape[0], 9), (Narrow(1, 20, 9),)),
        "turned": (shape[::-1], (Permute((1, 0)),)),
    }
    return {
        name: build_plan(
            case.catalog,
            Target((TargetTensor("t", "bfloat16", size, (Source("weight", view),)),)),
            rows(3),
            3,
        )
        for name, (size, view) in ways.items()
    } | {"all": build_plan(case.catalog, Target(case.target.tensors), rows(2), 2)}


@pytest.mark.parametrize("way", ["whole", "a few rows", "columns", "turned", "all"])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_bit_of_a_payload_is_found_whatever_is_read_of_it(tmp_path, way, place):
    case = make_case(tmp_path / "source")
    plan = plans(case)[way]
    path, offset, nbytes = stored_payload(tmp_path / "source", "weight")
    flip_bit(path, offset + {"first": 0, "middle": nbytes // 2, "last": nbytes - 1}[place], bit=3)
    says = rf"^weight: the payload of the item at byte \d+ of {path.name} has .* bytes {offset}\.\.{offset + nbytes} "
    for options in (SMALL, WriteOptions(1), WriteOptions(3)):
        with pytest.raises(CorruptCheckpointError, match=says) as caught:
            write_checkpoint(plan, case.files, Output(tmp_path / "out"), options)
        assert caught.value.exit_code == 4
        assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
    report = write_checkpoint(plan, case.files, Output(tmp_path / "out"), WriteOptions(check_source="none"))
    assert (report.check_source, report.payloads_proven, report.bytes_proven) == ("none", 0, 0)


def test_only_what_is_read_of_is_proven_and_what_nothing_needs_is_read_and_counted(case, tmp_path):
    path, offset, _ = stored_payload(tmp_path / "source", "stacked", 3)
    flip_bit(path, offset)
    chunks = case.catalog.tensors["weight"].chunks
    for way in ("whole", "a few rows"):
        report = write_checkpoint(plans(case)[way], case.files, Output(tmp_path / way))
        assert report.payloads_proven == len(chunks)
        assert report.bytes_proven == sum(2 * c.box.volume for c in chunks)
        assert report.bytes_read + report.bytes_read_to_prove == report.bytes_proven
        assert (report.bytes_read_to_prove > 0) == (way == "a few rows")


@pytest.mark.parametrize("at_least", [1, 1 << 60])
def test_unproven_damage_of_a_whole_payload_still_shows(tmp_path, monkeypatch, at_least):
    """It keeps the checksum of its writer on every way, so that the copy is as damaged as its source, not sound."""
    monkeypatch.setattr("ckpt_tools.execute.move.stream.KERNEL_COPY_BYTES", at_least)
    source = DcpFolder(tmp_path / "source")
    source.tensor("w", "float32", np.arange(40_000, dtype=np.float32).reshape(200, 200))
    source.tensor("small", "float32", np.arange(40, dtype=np.float32))
    files, catalog = opened(source)
    for key in ("w", "small"):
        path, offset, _ = stored_payload(tmp_path / "source", key)
        flip_bit(path, offset + 11)
    tensors = tuple(TargetTensor(k, e.dtype, e.shape, (Source(k),)) for k, e in catalog.tensors.items())
    plan = build_plan(catalog, Target(tensors), rows(1), 1)
    write_checkpoint(plan, files, Output(tmp_path / "out"), WriteOptions(check_source="none"))
    out = LocalFiles(str(tmp_path / "out"))
    for key, entry in read_catalog(out).tensors.items():
        path, offset, nbytes = stored_payload(tmp_path / "out", key)
        stated = find_tensor(out, entry.chunks[0].item).crc32
        assert crc.crc32(path.read_bytes()[offset : offset + nbytes]) != stated


def test_damage_of_a_payload_that_two_processes_read_is_one_error(tmp_path, converters):
    make_case(tmp_path / "source", scale=24)
    path, offset, nbytes = stored_payload(tmp_path / "source", "weight")
    flip_bit(path, offset + nbytes // 3)
    for end in converters.run(Order(str(tmp_path), world=2, parts=3)):
        assert end.status == 4 and path.name in end.message
        assert end.message.startswith("weight: the payload of the item at byte ")  # no rank found it alone
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_resume_proves_what_another_process_has_moved(case, tmp_path, monkeypatch):
    def stop(*_args: object) -> None:
        raise Interrupted("here")

    path, offset, nbytes = stored_payload(tmp_path / "source", "weight")
    flip_bit(path, offset + nbytes - 1)
    with monkeypatch.context() as patch:
        patch.setattr(run, "prove_rest", stop)
        with pytest.raises(Interrupted):
            write_checkpoint(plans(case)["columns"], case.files, Output(tmp_path / "out"))
    assert (tmp_path / ".out.ckpt_tools-partial").exists()
    with pytest.raises(CorruptCheckpointError, match=r"^weight: .* another checksum"):
        write_checkpoint(plans(case)["columns"], case.files, Output(tmp_path / "out", resume=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("way", ["whole", "a few rows", "turned"])
def test_stores_are_proven_too(case, tmp_path, way):
    import fsspec

    plan = plans(case)[way]
    store = fsspec.filesystem("memory")
    place = f"memory://{tmp_path.name}-{way.replace(' ', '-')}"
    store.put(str(tmp_path / "source"), place + "/in", recursive=True)
    good = write_checkpoint(plan, open_files(place + "/in"), Output(place + "/good"))
    assert good.payloads_proven
    path, offset, nbytes = stored_payload(tmp_path / "source", "weight")
    flip_bit(path, offset + nbytes // 2)
    store.put(str(path), f"{place}/in/{path.name}")
    for output in (place + "/out", tmp_path / "out"):
        with pytest.raises(CorruptCheckpointError, match=r"^weight: .* another checksum"):
            write_checkpoint(plan, open_files(place + "/in"), Output(output))
    assert not store.exists(f"{place}/out/.metadata")
    assert not (tmp_path / "out").exists()


def stock_source(folder: Path, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str) -> LocalFiles:
    """A checkpoint whose tensor `w` is what torch pickles of `tensor`, as it is."""
    import io

    from ckpt_tools.formats.dcp.metadata_write import metadata_bytes
    from ckpt_tools.model.transfers import OutputItem, TensorInfo

    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    folder.mkdir()
    data = buffer.getvalue()
    (folder / "__0_0.distcp").write_bytes(data)
    box = Box((0,) * len(shape), shape)
    item = OutputItem("w", box, dtype, "__0_0.distcp", 0, len(data), ())
    plan = Plan((item,), (), {"__0_0.distcp": len(data)}, {"w": TensorInfo(dtype, shape)}, {"w": ("w",)}, "")
    (folder / ".metadata").write_bytes(metadata_bytes(plan))
    return LocalFiles(str(folder))


def copied(files: LocalFiles, out: Path, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch.distributed.checkpoint as dcp

    plan = build_plan(
        read_catalog(files), Target((TargetTensor("w", dtype, shape, (Source("w"),)),)), rows(1), 1
    )
    write_checkpoint(plan, files, Output(out), SMALL)
    state = {"w": torch.zeros(shape, dtype=getattr(torch, dtype))}
    dcp.load(state, checkpoint_id=out)
    return state["w"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5.0).expand(7, 5),
        torch.arange(7.0)[:, None].expand(7, 5),
        torch.tensor(3.0).expand(4, 1, 6),
        torch.arange(40.0).as_strided((6, 5), (3, 2)),
        torch.arange(40.0)[10:30],
        torch.arange(40.0).reshape(5, 8)[1:4, 2:7],
    ],
    ids=["rows repeat", "columns repeat", "one element", "overlapping", "a part", "a box"],
)
def test_tensors_of_any_strides_mean_the_same(tmp_path, tensor):
    shape = tuple(tensor.shape)
    files = stock_source(tmp_path / "in", tensor, shape, "float32")
    found = copied(files, tmp_path / "out", "float32", shape)
    assert found.numpy().tobytes() == tensor.contiguous().numpy().tobytes()
    target = TargetTensor("w", "float32", shape, (Source("w"),))
    read = read_box(files, read_catalog(files), target, Box((0,) * len(shape), shape))
    assert read.tobytes() == found.numpy().tobytes()
    storage = tensor.untyped_storage().nbytes()
    frame = find_tensor(files, read_catalog(files).tensors["w"].chunks[0].item)
    assert frame.record.nbytes == storage
    flip_bit(
        tmp_path / "in" / "__0_0.distcp", frame.record.start + storage - 1
    )  # needed by none of the parts
    with pytest.raises(CorruptCheckpointError, match=r"^w: .* another checksum"):
        copied(files, tmp_path / "again", "float32", shape)


@pytest.mark.parametrize(
    ("tensor", "bit"),
    [
        (torch.arange(6.0).to(torch.complex64).conj(), "conj"),
        (torch._neg_view(torch.arange(6.0)), "neg"),
        (torch.view_as_complex(torch.arange(12.0).reshape(6, 2)).conj().imag, "neg"),
    ],
)
def test_lazy_bits_are_refused_by_name(tmp_path, tensor, bit):
    dtype = str(tensor.dtype).removeprefix("torch.")
    files = stock_source(tmp_path / "in", tensor, (6,), dtype)
    with pytest.raises(UnsupportedCheckpointError, match=f"^w: .*'{bit}'.*resolve_neg"):
        copied(files, tmp_path / "out", dtype, (6,))
    assert not (tmp_path / "out").exists()
    catalog = read_catalog(files)
    with pytest.raises(UnsupportedCheckpointError, match=f"^w: .*'{bit}'"):  # diff and print-tensor read so
        read_box(files, catalog, TargetTensor("w", dtype, (6,), (Source("w"),)), Box((0,), (6,)))


def test_elements_that_share_storage_do_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt_tools.execute.move.source_reader._MAX_REPEATED_BYTES", 1000)
    files = stock_source(tmp_path / "in", torch.arange(5.0).expand(60, 5), (60, 5), "float32")
    with pytest.raises(
        UnsupportedCheckpointError, match=r"^w: a tensor of 1200 bytes was saved over 20 bytes"
    ):
        copied(files, tmp_path / "out", "float32", (60, 5))


@pytest.mark.parametrize("remote", [False, True])
def test_resume_of_a_finished_output_ends_well(case, tmp_path, remote):
    place = f"memory://{tmp_path.name}-finished/out" if remote else tmp_path / "out"
    plan = case.plan(2)

    def output(**how: bool) -> Output:
        return Output(place, beside={"tracker": b"7"}, extra_files={"extra": b"x"}, **how)

    write_checkpoint(plan, case.files, output())
    again = write_checkpoint(plan, case.files, output(resume=True))
    assert (again.bytes_read, again.items_resumed) == (0, again.items)
    assert again.payloads_proven == sum(len(e.chunks) for e in case.catalog.tensors.values())
    with pytest.raises(UsageError, match="not empty"):  # equal names and lengths say nothing
        write_checkpoint(plan, case.files, Output(place, extra_files={"extra": b"y"}, resume=True))
    path, offset, _ = stored_payload(tmp_path / "source", "weight")
    flip_bit(path, offset)
    unproven = WriteOptions(check_source="none")
    with pytest.raises(UsageError, match="not empty"):
        write_checkpoint(plan, open_files(str(tmp_path / "source")), output(resume=True), unproven)
    files = open_files(str(tmp_path / "source"))
    done = write_checkpoint(plan, files, output(resume=True, overwrite=True), unproven)
    assert done.bytes_read > 0


def test_a_tracker_that_moved_on_since_stays(case, tmp_path):
    output = Output(tmp_path / "out", beside={"tracker": b"7"})
    write_checkpoint(case.plan(1), case.files, output)
    resumed = Output(tmp_path / "out", beside={"tracker": b"7"}, resume=True)
    (tmp_path / "tracker").write_text("9")
    write_checkpoint(case.plan(1), case.files, resumed)
    assert (tmp_path / "tracker").read_text() == "9"
    (tmp_path / "tracker").unlink()
    write_checkpoint(case.plan(1), case.files, resumed)
    assert (tmp_path / "tracker").read_text() == "7"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source", "tracker"]
