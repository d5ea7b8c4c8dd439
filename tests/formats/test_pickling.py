"""Archives written without torch: read by stock torch, and equal to what torch itself would have written."""

import argparse
import collections
import io
import pathlib
import signal
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.pickle.unpickle import TorchDtype, stand_in
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor, load_object, whole_file
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.model.catalog import Item
from tests.formats.checkpoints import dcp_folders


class Bytes:
    """One item in memory, as `Files`."""

    location = "memory"

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, name: str, offset: int, length: int) -> bytes:
        assert offset + length <= len(self._data)
        return self._data[offset : offset + length]


def load(data: bytes) -> Any:
    files: Any = Bytes(data)
    return load_object(files, Item("x", 0, len(data)))


def records(data: bytes) -> dict[str, bytes]:
    """All records but the id that torch makes of its own hash."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
        contents = [archive.read(name) for name in archive.namelist()]
    return {n: c for n, c in zip(names, contents, strict=True) if n != ".data/serialization_id"}


VALUES: list[Any] = [
    None,
    [
        1,
        -5,
        2**31,
        2**70,
        3.5,
        True,
        "é",
        "\ud800",
        b"",
        b"abc",
        bytearray(b"xy"),
        complex(1, 2),
        (),
        (1, (2,)),
    ],
    {"a": {1, 2}, "b": frozenset([3]), 7: [], (1, 2): {}},
    collections.OrderedDict(a=1),
    argparse.Namespace(a=1, b=signal.SIGTERM, c=torch.float32),
    types.SimpleNamespace(x=[1]),
    pathlib.PurePosixPath("/a/b"),
    [np.arange(5), np.float32(1.5), np.zeros((2, 0), "<f8")],
    {
        "x": torch.zeros(2, 3).bfloat16(),
        "y": torch.tensor(2.5),
        "z": torch.zeros(0, 4),
        "b": torch.tensor([True]),
    },
    [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3, dtype=torch.uint16), torch.float8_e5m2],
]


@pytest.mark.parametrize("value", VALUES, ids=[type(v).__name__ + str(i) for i, v in enumerate(VALUES)])
def test_round_trip_is_torchs_own_bytes(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    stock = buffer.getvalue()
    ours = dump_archive(load(stock))
    assert records(ours) == records(stock)
    assert len(ours) == len(stock)
    assert repr(torch.load(io.BytesIO(ours), weights_only=False)) == repr(value)


def test_layout_is_torchs_byte_for_byte():
    """Only the serialization id, a hash of torch's own, and its two checksums differ."""
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(100.0), "empty": torch.zeros(0), "n": 3}, buffer)
    stock = buffer.getvalue()
    ours = dump_archive(load(stock))
    different = [i for i, (a, b) in enumerate(zip(ours, stock, strict=True)) if a != b]
    with zipfile.ZipFile(io.BytesIO(stock)) as archive:
        start = archive.getinfo("archive/.data/serialization_id").header_offset
    assert min(different) > start
    assert len(different) <= 40 + 4 + 4


def test_weights_only_load_accepts_plain_content():
    data = dump_archive(
        {"w": StoredTensor("bfloat16", (2,), b"\0\0\x80\x3f"), "lr": 0.1, "betas": (0.9, 0.95)}
    )
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert found["w"].tolist() == [0.0, 1.0]
    assert (found["lr"], found["betas"]) == (0.1, (0.9, 0.95))


def objects(folder: Path) -> list[tuple[Files, Item]]:
    files = open_files(str(folder))
    items = [entry.item for entry in read_catalog(files).objects.values()]
    items += [whole_file(files, name) for name in ("common.pt", "train_state.pt") if files.exists(name)]
    return [(files, item) for item in items]


@pytest.mark.parametrize("folder", dcp_folders())
def test_recorded_objects_keep_every_pickled_byte(folder):
    """Megatron's enums, arguments and random states go out as they came in, classes that are not installed too."""
    found = objects(folder)
    assert found
    for files, item in found:
        data = files.read(*item[:3])
        ours = dump_archive(load_object(files, item))
        assert records(ours)["data.pkl"] == records(data)["data.pkl"]
        assert load(ours) == load_object(files, item)


def test_shared_objects_stay_shared():
    inner = [StoredTensor("uint8", (1,), b"\7")]
    found = torch.load(io.BytesIO(dump_archive([inner, inner])), weights_only=True)
    assert found[0] is found[1]


def test_same_value_same_bytes():
    value = {"args": stand_in("argparse", "Namespace")(), "t": StoredTensor("int64", (), b"\1" + b"\0" * 7)}
    assert dump_archive(value) == dump_archive(value)


def test_foreign_objects_are_not_written():
    with pytest.raises(TypeError, match="neither plain data nor read from a checkpoint"):
        dump_archive({"path": Item("a", 0, 1)})
    with pytest.raises(TypeError, match="no keyword arguments"):
        dump_archive(stand_in("argparse", "Namespace")(a=1))


def test_stand_ins_become_the_real_classes():
    namespace = stand_in("argparse", "Namespace").__new__(stand_in("argparse", "Namespace"))
    namespace.state = {"signal": stand_in("signal", "Signals")(15), "dtype": TorchDtype("bfloat16")}
    found = torch.load(io.BytesIO(dump_archive(namespace)), weights_only=False)
    assert found == argparse.Namespace(signal=signal.SIGTERM, dtype=torch.bfloat16)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_data_round_trip(value):
    data = dump_archive(value)
    assert load(data) == value
    assert torch.load(io.BytesIO(data), weights_only=False) == value
