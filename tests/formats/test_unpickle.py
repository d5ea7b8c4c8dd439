"""What globals become: our values, inert stand-ins, or a refusal by name."""

import argparse
import collections
import pickle
import sys
from typing import Any

import numpy as np
import pytest

from ckpt_tools.errors import CorruptCheckpointError, HostileCheckpointError, UnsupportedCheckpointError
from ckpt_tools.formats.pickle.machine import Machine
from ckpt_tools.formats.pickle.unpickle import StandIn, TorchDtype, load_pickle, stand_in


def load(data: bytes, trust: bool = False) -> Any:
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
    found = load(named(module, name))
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
        load(named(module, name))
    assert f"names {module}.{name!r}" in str(found.value)
    assert "--unknown-classes" in str(found.value)
    with pytest.raises(refusal):
        Machine(named(module, name), "x").load()
    trusted = load(named(module, name), trust=True)
    assert issubclass(trusted, StandIn)
    assert Machine(named(module, name), "x", trust_pickle=True).load() == (module, name)


def test_trusted_calls_do_nothing():
    found = load(b"cos\nsystem\nX\x02\0\0\0id\x85R.", trust=True)
    assert (found.module, found.qualname, found.args, found.called) == ("os", "system", ("id",), True)


def test_plain_classes_are_values():
    value = [collections.OrderedDict(a=1), {1}, frozenset([2]), complex(1, 2), bytearray(b"x"), slice(1, 2)]
    for protocol in range(2, 6):
        assert load(pickle.dumps(value, protocol)) == value


def test_state_and_arguments_are_kept():
    found = load(pickle.dumps(argparse.Namespace(a=1, b=[2]), 2))
    assert found.attributes == {"a": 1, "b": [2]}
    assert (found.args, found.called) == ((), False)
    assert found == load(pickle.dumps(argparse.Namespace(a=1, b=[2]), 5))
    assert found != load(pickle.dumps(argparse.Namespace(a=2, b=[2]), 2))
    assert repr(found) == "argparse.Namespace(a=1, b=[2])"


def test_items_and_pairs_are_kept():
    found = load(b"\x80\x02cmegatron.x\nC\n)\x81(K\x01K\x02e(K\x03K\x04u.")
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
            load(target + state)
    with pytest.raises(CorruptCheckpointError):
        load(b"ctorch\nfloat32\n" + state)
    assert stand_in("argparse", "Namespace").module == "argparse"
    assert load(b"ctorch\nfloat32\n.") == TorchDtype("float32")
    assert load(b"c_codecs\nencode\nX\x01\0\0\0aX\x06\0\0\0latin1\x86R.") == b"a"


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
