"""Archives written without torch are those of torch; what globals become that are read."""

import argparse
import collections
import io
import pathlib
import pickle
import signal
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import CorruptCheckpointError, HostileCheckpointError, UnsupportedCheckpointError
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.pickle.machine import Machine, Name, Object
from ckpt_tools.formats.pickle.stored_classes import check_memory_format
from ckpt_tools.formats.pickle.unpickle import StandIn, TorchDtype, load_pickle, stand_in
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


def unpickled(data: bytes, trust: bool = False) -> Any:
    return load_pickle(data, "x", {}, trust_pickle=trust)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n.".encode()


KNOWN = [
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("signal", "Signals"),
    ("_io", "BytesIO"),
    ("functools", "partial"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib", "PureWindowsPath"),
    ("numpy", "ndarray"),
    ("numpy.dtypes", "UInt32DType"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("torch._C", "Generator"),
    ("megatron.core.enums", "ModelType"),
    ("megatron.training.arguments", "Anything"),
    ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    ("nemo.lightning.pytorch.strategies", "Config"),
]


@pytest.mark.parametrize(("module", "name"), KNOWN)
def test_known_globals_are_inert(module, name):
    found = unpickled(named(module, name))
    assert issubclass(found, StandIn)
    assert (found.module, found.qualname) == (module, name)
    assert module.partition(".")[0] not in ("megatron", "nemo") or module not in sys.modules


REFUSED = [
    ("os", "system"),
    ("nt", "system"),
    ("builtins", "exec"),
    ("builtins", "getattr"),
    ("numpy", "load"),
    ("numpy.core.multiarray", "fromfile"),
    ("torch", "load"),
    ("torch.storage", "_load_from_bytes"),
    ("functools", "reduce"),
    ("operator", "attrgetter"),
    ("ckpt_tools.formats.storage.files", "open_files"),
    ("pathlib", "Path.unlink"),
    ("argparse", "Namespace.__class__"),
    ("megatronx", "y"),
]


@pytest.mark.parametrize(("module", "name"), REFUSED)
def test_others_are_refused_by_name(module, name):
    acts = module in ("os", "nt", "builtins", "operator") or (module, name) == ("torch", "load")
    refusal = HostileCheckpointError if acts else UnsupportedCheckpointError
    with pytest.raises(refusal) as found:
        unpickled(named(module, name))
    assert f"names {module}.{name!r}" in str(found.value)
    assert "--unknown-classes" in str(found.value)
    with pytest.raises(refusal):
        Machine(named(module, name), "x").load()
    trusted = unpickled(named(module, name), trust=True)
    assert issubclass(trusted, StandIn)
    assert Machine(named(module, name), "x", trust_pickle=True).load() == (module, name)


def test_trusted_calls_do_nothing():
    found = unpickled(b"cos\nsystem\nX\x02\0\0\0id\x85R.", trust=True)
    assert (found.module, found.qualname, found.args, found.called) == ("os", "system", ("id",), True)


def test_plain_classes_are_values():
    value = [collections.OrderedDict(a=1), {1}, frozenset([2]), complex(1, 2), bytearray(b"x"), slice(1, 2)]
    for protocol in range(2, 6):
        assert unpickled(pickle.dumps(value, protocol)) == value


def test_state_and_arguments_are_kept():
    found = unpickled(pickle.dumps(argparse.Namespace(a=1, b=[2]), 2))
    assert found.attributes == {"a": 1, "b": [2]}
    assert (found.args, found.called) == ((), False)
    assert found == unpickled(pickle.dumps(argparse.Namespace(a=1, b=[2]), 5))
    assert found != unpickled(pickle.dumps(argparse.Namespace(a=2, b=[2]), 2))
    assert repr(found) == "argparse.Namespace(a=1, b=[2])"


def test_items_and_pairs_are_kept():
    found = unpickled(b"\x80\x02cmegatron.x\nC\n)\x81(K\x01K\x02e(K\x03K\x04u.")
    assert (found.items, found.pairs) == ([1, 2], [(3, 4)])


def test_enum_members_are_keys_and_objects_are_not():
    member = stand_in("megatron.core.enums", "ModelType")
    assert {member(1): "a", member(2): "b"}[member(2)] == "b"
    with pytest.raises(TypeError, match="as a key"):
        hash(member.__new__(member))


def test_a_pickle_cannot_change_us():
    """BUILD on a class, on one of our functions, and on a dtype leaves all of them as they were."""
    state = b"(N}X\x06\0\0\0moduleX\x02\0\0\0osstb."
    for target in (b"cargparse\nNamespace\n", b"c_codecs\nencode\n", b"ctorch\nSize\n", b"cbuiltins\nset\n"):
        with pytest.raises(CorruptCheckpointError):
            unpickled(target + state)
    with pytest.raises(CorruptCheckpointError):
        unpickled(b"ctorch\nfloat32\n" + state)
    assert stand_in("argparse", "Namespace").module == "argparse"
    assert unpickled(b"ctorch\nfloat32\n.") == TorchDtype("float32")
    assert unpickled(b"c_codecs\nencode\nX\x01\0\0\0aX\x06\0\0\0latin1\x86R.") == b"a"


def test_a_memo_numbered_in_two_ways_is_refused():
    """The second MEMOIZE makes entry 1, which the PUT made before: what a GET of it finds depends on the reader."""
    with pytest.raises(CorruptCheckpointError, match="numbered and not"):
        Machine(b"\x80\x04]\x94K\x05q\x01\x94h\x01.", "here").load()
    assert Machine(b"\x80\x04K\x05\x94.", "here").load() == 5
    assert Machine(b"\x80\x02K\x05q\x01q\x00q\x01h\x01.", "here").load() == 5


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.arange(3, dtype=np.uint32), "numpy array u4 [3]"),
        (np.zeros((2, 0)), "numpy array f8 [2, 0]"),
        (np.bool_(False), "numpy scalar b1 0x00"),
        (np.random.RandomState, "numpy.random.mtrand.RandomState"),
    ],
)
def test_values_of_numpy_are_shown_by_type_and_shape(value, text, protocol):
    found = load_pickle(pickle.dumps(value, protocol), "here", {}, trust_pickle=True)
    assert repr(found) == text


MODULE = "torch.distributed.checkpoint.metadata"


def memory_format(*args: object, kind: str = "_MEM_FORMAT_ENCODING") -> Object:
    return Object(Name(MODULE, kind), args)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_torchs_three_memory_formats(number):
    check_memory_format(memory_format(number))


@pytest.mark.parametrize(
    "value",
    [
        *(memory_format(*args) for args in ((3,), (-1,), (True,), (False,), (1.0,), (), (0, 1), ("0",))),
        memory_format(0, kind="TensorProperties"),
        0,
        None,
    ],
)
def test_nothing_else_is_a_memory_format(value):
    with pytest.raises(TypeError, match="where a memory format belongs"):
        check_memory_format(value)


def test_a_memory_format_has_no_state():
    value = memory_format(0)
    value.state = {}
    with pytest.raises(TypeError, match="where a memory format belongs"):
        check_memory_format(value)


def test_a_line_may_cross_the_128_kib_that_the_unpickler_reads_at_a_time():
    for count in range(65_400, 65_480, 8):  # of numbers, two bytes each
        values = [1] * count + [collections.OrderedDict(a=1)]
        assert unpickled(pickle.dumps(values, protocol=2)) == values
