"""Archives around tensors equal what `torch.save` writes, byte for byte."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.torch_archive.item_reader import find_tensor
from ckpt_tools.formats.torch_archive.tensor_template import (
    framed_tensor,
    likely_start,
    tensor_frame,
    usual_item,
)
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.dtypes import ITEMSIZE

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
def test_frame_loads_and_equals_torch_save(dtype: str, shape: tuple[int, ...]) -> None:
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
def test_frame_equals_torch_save(dtype: str, shape: tuple[int, ...]) -> None:
    payload = bytes(torch.Size(shape).numel() * ITEMSIZE[dtype])
    stock = io.BytesIO()
    torch.save(tensor_of(dtype, shape, payload), stock)
    assert framed_tensor(dtype, shape, payload) == stock.getvalue()


@pytest.mark.parametrize("shape", [(3,), (2, 300), (1, 2, 1, 3, 2)])
def test_lengths_of_archives_up_to_torch_2_6(shape: tuple[int, ...]) -> None:
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
def test_zip64_frame_equals_torch_save(dtype: str, numel: int) -> None:
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
def test_a_tail_tells_its_checksum(dtype: str, shape: tuple[int, ...], crc: int) -> None:
    frame = tensor_frame(dtype, shape)
    assert frame.crc_in(frame.tail(crc)) == crc


def test_a_usual_item_is_what_a_closer_look_finds(tmp_path: Path) -> None:
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
