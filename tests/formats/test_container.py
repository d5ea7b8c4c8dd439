"""Frames and objects against torch on every item of the recorded checkpoints; archives as `torch.save` writes."""

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import CkptError, CorruptCheckpointError, UnsupportedCheckpointError
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import Files, LocalFiles
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.item_reader import (
    StoredTensor,
    find_tensor,
    load_object,
    read_archive,
    read_small_file,
    record_stretches,
    whole_file,
)
from ckpt_tools.formats.torch_archive.tensor_template import (
    framed_tensor,
    likely_start,
    tensor_frame,
    usual_item,
)
from ckpt_tools.formats.torch_archive.zip_archive import payload_offset, read_directory, write_archive
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.dtypes import ITEMSIZE
from tests.conftest import fixture_dir
from tests.formats.checkpoints import dcp_folders


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Row-major little-endian bytes of any element type."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def saved(folder: Path, value: object) -> tuple[Files, Item]:
    torch.save(value, folder / "x.pt")
    files = open_files(str(folder))
    return files, whole_file(files, "x.pt")


@pytest.mark.parametrize("folder", dcp_folders())
def test_frames_of_recorded_tensors(folder):
    files = open_files(str(folder))
    for entry in read_catalog(files).tensors.values():
        for box, item in ((chunk.box, chunk.item) for chunk in entry.chunks):
            frame = find_tensor(files, item)
            payload = files.read(item.file, frame.payload_offset, frame.nbytes)
            stock = torch.load(io.BytesIO(files.read(*item[:3])), weights_only=True)
            assert (
                (frame.dtype, frame.shape)
                == (entry.dtype, box.size)
                == (str(stock.dtype)[6:], tuple(stock.shape))
            )
            assert frame.strides == stock.stride()
            assert frame.is_row_major
            assert payload == tensor_bytes(stock)
            assert frame.crc32 == zlib.crc32(payload)
    files.close()


TENSORS = {
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "bool": torch.tensor([True, False]),
    "int64": torch.arange(5),
    "complex64": torch.ones(2, dtype=torch.complex64),
    "uint16": torch.ones(3, dtype=torch.uint16),
    "fp8": torch.arange(4.0).to(torch.float8_e5m2),
    "bf16": torch.arange(12.0).reshape(3, 4).bfloat16(),
    "large": torch.arange(5000.0),
}


@pytest.mark.parametrize("name", TENSORS)
def test_element_types(tmp_path, name):
    tensor = TENSORS[name]
    files, item = saved(tmp_path, tensor)
    frame = find_tensor(files, item)
    assert (frame.dtype, frame.shape, frame.strides) == (
        str(tensor.dtype)[6:],
        tuple(tensor.shape),
        tensor.stride(),
    )
    payload = files.read("x.pt", frame.payload_offset, frame.nbytes)
    assert payload == tensor_bytes(tensor)
    assert frame.crc32 == zlib.crc32(payload)
    assert load_object(files, item) == StoredTensor(frame.dtype, frame.shape, payload)


def test_views_keep_their_strides(tmp_path):
    """A transposed tensor's payload is not row-major; a slice of a storage has no checksum of its own."""
    base = torch.arange(24.0).reshape(4, 6)
    files, item = saved(tmp_path, base.t())
    frame = find_tensor(files, item)
    assert (frame.shape, frame.strides, frame.is_row_major) == ((6, 4), (1, 6), False)
    assert load_object(files, item) == StoredTensor("float32", (6, 4), tensor_bytes(base.t()))
    files, item = saved(tmp_path, base[1:3])
    frame = find_tensor(files, item)
    assert frame.is_row_major
    assert frame.crc32 is None
    assert files.read("x.pt", frame.payload_offset, frame.nbytes) == tensor_bytes(base[1:3])
    files, item = saved(tmp_path, base[:, 1:3])
    assert load_object(files, item) == StoredTensor("float32", (4, 2), tensor_bytes(base[:, 1:3]))


def test_parameters_are_tensors(tmp_path):
    files, item = saved(tmp_path, torch.nn.Parameter(torch.arange(3.0)))
    assert find_tensor(files, item).shape == (3,)


def test_checksums_off(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        files, item = saved(tmp_path, torch.arange(3.0))
    finally:
        torch.serialization.set_crc32_options(True)
    assert find_tensor(files, item).crc32 is None


def test_an_object_is_no_tensor(tmp_path):
    files, item = saved(tmp_path, {"a": 1})
    with pytest.raises(CorruptCheckpointError, match="a tensor is expected, found dict"):
        find_tensor(files, item)


def test_truncation_anywhere_is_our_error(tmp_path):
    """An item cut short, and an item of a file cut short."""
    files, item = saved(tmp_path, torch.arange(700.0))
    data = files.read(*item[:3])
    for end in [*range(0, len(data), 83), *range(len(data) - 120, len(data))]:
        with pytest.raises(CorruptCheckpointError):
            find_tensor(files, item._replace(length=end))
    files.close()
    for end in range(0, len(data), 503):
        (tmp_path / "x.pt").write_bytes(data[:end])
        with pytest.raises(CorruptCheckpointError, match=r"the file has|does not end like"):
            find_tensor(open_files(str(tmp_path)), item)


def test_flipped_bytes_never_crash(tmp_path):
    folder = fixture_dir("core019_llama_tp2_fully_reshardable") / "iter_0000002"
    source = open_files(str(folder))
    item = read_catalog(source).objects["common_state/shard_0_1"].item
    data = source.read(*item[:3])
    tried = refused = 0
    for at in [*range(0, 1000, 3), *range(1000, len(data), 997), *range(len(data) - 700, len(data), 3)]:
        (tmp_path / "x.pt").write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        files = open_files(str(tmp_path))
        tried += 1
        try:
            load_object(files, whole_file(files, "x.pt"))
        except CkptError:
            refused += 1
        files.close()
    assert tried > 550
    assert refused > tried // 4


def test_archives_that_torch_reads(tmp_path):
    """What `write_archive` makes passes Python's zipfile with its checksums, and reads back record by record."""
    records = [
        ("a/data.pkl", b"\x80\x02K\x07."),
        ("a/byteorder", b"little"),
        ("a/empty", b""),
        ("a/x", b"x" * 1000),
    ]
    data = write_archive(records)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert [(info.filename, archive.read(info)) for info in archive.infolist()] == records
    directory = read_directory(lambda at, n: data[at : at + n], len(data), "x")
    assert [(r.name, r.size) for r in directory.values()] == [
        (name, len(content)) for name, content in records
    ]


@pytest.mark.parametrize("shape", [(3, 5), (0, 5)])
def test_objects_and_tensors_have_one_zip_writer(shape):
    """The records of a tensor's archive, written as those of an object, are that archive again."""
    data = framed_tensor("float32", shape, bytes(range(4 * shape[0] * shape[1])))

    def read(at: int, n: int) -> bytes:
        return data[at : at + n]

    records = read_directory(read, len(data), "x").values()
    starts = [(record, payload_offset(read, record, "x")) for record in records]
    assert write_archive([(r.name, read(start, r.size)) for r, start in starts]) == data


def test_large_archive_with_zip64_sizes(tmp_path):
    """Above 4 GiB sizes and offsets are in the zip64 extra block; the file is sparse."""
    with torch.serialization.skip_data():
        torch.save([torch.empty(1 << 32, dtype=torch.uint8), torch.empty(5)], tmp_path / "x.pt")
    files = open_files(str(tmp_path))
    item = whole_file(files, "x.pt")
    directory = read_directory(lambda at, n: files.read("x.pt", at, n), item.length, "x")
    sizes = {name.rpartition("x/")[2]: record.size for name, record in directory.items()}
    assert (sizes["data/0"], sizes["data/1"]) == (1 << 32, 20)
    assert max(record.header for record in directory.values()) > 1 << 32


def test_no_flipped_bit_of_an_object_changes_its_value(tmp_path):
    value = {"max_lr": 0.01, "step": 7, "state": torch.arange(6.0), "seen": torch.arange(12)[3:9]}
    files, item = saved(tmp_path, value)
    good = load_object(files, item)
    data = files.read(item.file, 0, item.length)
    silent = 0
    for at in range(0, item.length, 3):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "y.pt").write_bytes(damaged)
        try:
            found = load_object(files, Item("y.pt", 0, item.length))
        except CkptError:
            continue
        assert found == good, f"byte {at}"
        silent += 1
    assert 0 < silent < item.length  # padding, and records that hold no value


def test_archives_are_taken_over_only_if_every_record_is_sound(tmp_path):
    files, item = saved(tmp_path, {"max_lr": 0.01, "state": torch.arange(6.0)})
    data = files.read(item.file, 0, item.length)
    assert read_archive(files, item) == read_small_file(files, "x.pt") == data
    for start, nbytes, crc32 in record_stretches(files, item):
        assert zlib.crc32(data[start : start + nbytes]) == crc32
        for at in (start, start + nbytes - 1):
            damaged = bytearray(data)
            damaged[at] ^= 4
            (tmp_path / "y.pt").write_bytes(damaged)
            for _ in range(2):  # small ones are remembered
                with pytest.raises(
                    CorruptCheckpointError, match=r"y\.pt at byte 0: record 'x/.*bits have changed"
                ):
                    read_archive(files, Item("y.pt", 0, item.length))
            with pytest.raises(CorruptCheckpointError, match="bits have changed"):
                read_small_file(files, "y.pt")


def test_a_small_file_that_is_no_archive_is_taken_over_as_it_is(tmp_path):
    for content in (b"", b"PK", b"model: {}\n"):
        (tmp_path / "run_config.yaml").write_bytes(content)
        assert read_small_file(open_files(str(tmp_path)), "run_config.yaml") == content


@pytest.mark.parametrize(
    ("tensor", "bit"),
    [(torch.ones(2, dtype=torch.complex64).conj(), "conj"), (torch._neg_view(torch.ones(3)), "neg")],
)
def test_bits_that_torch_applies_later_are_refused(tmp_path, tensor, bit):
    files, item = saved(tmp_path, [1, tensor])
    with pytest.raises(UnsupportedCheckpointError, match=f"x.pt at byte 0: .*'{bit}'"):
        load_object(files, item)
    files, item = saved(tmp_path, tensor)
    with pytest.raises(UnsupportedCheckpointError, match=f"'{bit}'"):
        find_tensor(files, item)
    files, item = saved(tmp_path, tensor.resolve_conj().resolve_neg())
    assert find_tensor(files, item).is_row_major


SAME_WRITER = io.BytesIO()
torch.save(torch.zeros(1), SAME_WRITER)
needs_same_writer = pytest.mark.skipif(
    b".format_version" not in SAME_WRITER.getvalue(), reason="this torch writes an older record set"
)


def tensor_of(dtype: str, shape: tuple[int, ...], payload: bytes) -> torch.Tensor:
    raw = torch.tensor(list(payload), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("shape", [(), (0, 5), (3,), (2, 300), (3, 70000), (1, 2, 1, 3, 2)])
def test_frame_loads_and_equals_torch_save(dtype, shape):
    numel = 1
    for n in shape:
        numel *= n
    payload = bytes(i % 2 for i in range(numel * ITEMSIZE[dtype]))
    ours = framed_tensor(dtype, shape, payload)
    loaded = torch.load(io.BytesIO(ours), weights_only=True)
    assert loaded.dtype == getattr(torch, dtype)
    assert tuple(loaded.shape) == shape
    assert loaded.contiguous().flatten().view(torch.uint8).numpy().tobytes() == payload
    if b".format_version" in SAME_WRITER.getvalue():
        stock = io.BytesIO()
        torch.save(tensor_of(dtype, shape, payload), stock)
        assert ours == stock.getvalue()


@needs_same_writer
@given(
    st.sampled_from(["float32", "bfloat16", "uint16", "bool"]),
    st.lists(st.integers(0, 300), max_size=5).map(tuple).filter(lambda s: torch.Size(s).numel() < 100000),
)
def test_frame_equals_torch_save(dtype, shape):
    payload = bytes(torch.Size(shape).numel() * ITEMSIZE[dtype])
    stock = io.BytesIO()
    torch.save(tensor_of(dtype, shape, payload), stock)
    assert framed_tensor(dtype, shape, payload) == stock.getvalue()


@pytest.mark.parametrize("shape", [(3,), (2, 300), (1, 2, 1, 3, 2)])
def test_lengths_of_archives_up_to_torch_2_6(shape):
    """Written by torch's writer, record by record as `torch.save` did then; a plan goes by the length of an item."""
    tensor, stock = torch.zeros(shape), io.BytesIO()
    torch.save(tensor, stock)
    reader, older = torch._C.PyTorchFileReader(io.BytesIO(stock.getvalue())), io.BytesIO()
    writer = torch._C.PyTorchFileWriter(older)
    for name in ("data.pkl", "byteorder", "data/0"):
        content = reader.get_record(name)
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    assert torch.equal(torch.load(io.BytesIO(older.getvalue()), weights_only=True), tensor)
    item = Item("f", 5, len(older.getvalue()))
    start = torch._C.PyTorchFileReader(io.BytesIO(older.getvalue())).get_record_offset("data/0")
    assert likely_start(item, "float32", shape) == 5 + start


class Recorder(io.RawIOBase):
    """Keeps what is written and leaves out what `skip_data` seeks over."""

    def __init__(self) -> None:
        self.position = 0
        self.parts: list[tuple[int, bytes]] = []

    def write(self, data: Any) -> int:
        self.parts.append((self.position, bytes(data)))
        self.position += len(self.parts[-1][1])
        return len(self.parts[-1][1])

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset if whence == 0 else self.position + offset
        return self.position

    def tell(self) -> int:
        return self.position


@needs_same_writer
@pytest.mark.parametrize(
    ("dtype", "numel"),
    [
        *(("float32", numel) for numel in ((1 << 30) - 1, 1 << 30, (1 << 30) + 5, 1 << 32)),
        # The payload's length, and the offset of the record after it, around the last number of 32 bits.
        *(("uint8", (1 << 32) - 1 + d) for d in (-1, 0, 1)),
        *(("uint8", (1 << 32) - 1 - len(tensor_frame("uint8", (1000,)).head) - 16 + d) for d in (-1, 0, 1)),
    ],
)
def test_zip64_frame_equals_torch_save(dtype, numel):
    recorder = Recorder()
    with torch.serialization.skip_data():
        torch.save(torch.empty(numel, dtype=getattr(torch, dtype)), recorder)
    frame = tensor_frame(dtype, (numel,))
    head = b"".join(data for at, data in recorder.parts if at < len(frame.head))
    tail = b"".join(data for at, data in recorder.parts if at >= len(frame.head) + frame.payload_bytes)
    assert frame.head == head
    assert frame.length == recorder.position
    assert frame.tail(0) == tail  # without data torch records CRC 0


@given(
    st.sampled_from(["float32", "uint16"]),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.integers(0, 2**32 - 1),
)
def test_a_tail_tells_its_checksum(dtype, shape, crc):
    frame = tensor_frame(dtype, shape)
    assert frame.crc_in(frame.tail(crc)) == crc


def test_a_usual_item_is_what_a_closer_look_finds(tmp_path):
    """And one whose frame differs in any bit is not usual: its payload alone may be anything."""
    values = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    stream = io.BytesIO()
    torch.save(values, stream)
    data = b"before" + stream.getvalue()
    item = Item("items", 6, len(stream.getvalue()))
    files = LocalFiles(str(tmp_path))
    (tmp_path / "items").write_bytes(data)
    found, expected = usual_item(files, item, "bfloat16", (4, 6)), find_tensor(files, item)
    assert found == (expected.payload_offset, expected.nbytes, expected.crc32)
    assert usual_item(files, item, "float16", (4, 6)) is None
    assert usual_item(files, item, "bfloat16", (6, 4)) is None
    assert usual_item(files, item._replace(length=item.length - 1), "bfloat16", (4, 6)) is None
    payload = range(expected.payload_offset, expected.payload_offset + expected.nbytes)
    with (tmp_path / "items").open("r+b", buffering=0) as file:
        for at in range(6, len(data)):
            for byte in (data[at] ^ 1 << at % 8, data[at]):
                file.seek(at)
                file.write(bytes([byte]))
                usual = at in payload or byte == data[at]
                assert usual_item(files, item, "bfloat16", (4, 6)) == (found if usual else None), at
