"""`diff` of objects as torch stores them: neither a wrong "equal" nor a wrong "different"."""

import argparse
import math
import struct
import sys
import types
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.diff import diff_checkpoints
from ckpt_tools.errors import UsageError
from ckpt_tools.verify.compare.arrays import Tolerance
from ckpt_tools.verify.compare.differences import DiffOptions
from ckpt_tools.verify.compare.objects import diff_values
from tests.conftest import fixture_dir
from tests.damage import copy_of, drop_key, metadata_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
MODULE = "megatron.core.made_up"
LLAMA = "core019_llama_tp2_fully_reshardable"


class Items(list):
    """A list class of Megatron's, as far as a pickle knows."""


class Fields(dict):
    """A dict class."""


class Rebuilt:
    """An object that a pickle makes by a call."""

    def __init__(self, *args):
        self.given = args

    def __reduce__(self):
        return Rebuilt, self.given


class Plain:
    """An object with attributes."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The classes under a name that checkpoints may hold, for torch to store."""
    module = types.ModuleType(MODULE)
    for cls in (Items, Fields, Rebuilt, Plain):
        monkeypatch.setattr(cls, "__module__", MODULE)
        setattr(module, cls.__name__, cls)
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)


def store(value, folder):
    dcp.save({"o": Plain(v=value), "w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    return str(folder)


def differences(pairs, tmp_path, **options):
    """For each pair of values the names under which they differ, when all are stored in one checkpoint."""
    a = store(dict(enumerate(a for a, _ in pairs)), tmp_path / "a")
    b = store(dict(enumerate(b for _, b in pairs)), tmp_path / "b")
    report = diff_checkpoints(a, b, DiffOptions(**options))
    assert all(t.kind == "equal" for t in report.tensors)
    names: list[list[str]] = [[] for _ in pairs]
    for value in report.values:
        number, _, name = value.name.removeprefix("o.v.").partition(".")
        names[int(number)].append(name)
    return names


def negative_nan():
    return struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]


def ordered(metadata):
    found: Any = OrderedDict(a=1)
    found._metadata = metadata
    return found


def default_of(factory: Any, values: dict[str, Any]) -> Any:
    """A dict whose values need not be what its factory makes."""
    return defaultdict(factory, values)


def equal_values():
    return [
        OrderedDict(a=1, b=[2]),
        defaultdict(list, {"a": [1]}),
        Items([1, {"a": 2}]),
        Fields(a=1, b=(2,)),
        Rebuilt(1, "x", [2.0]),
        Plain(a=1, nan=math.nan),
        argparse.Namespace(a=1, b=None),
        np.arange(6.0).reshape(2, 3),
        np.float64(2.5),
        {1: "a", (True, 1.0): "b", None: "c", frozenset({1, 2}): "d", math.nan: "e"},
        {1, True and 2, "x"},
        [math.nan, -math.inf, -0.0, complex(math.nan, 1)],
        torch.tensor([1.0, math.nan]),
        torch.float8_e4m3fn,
        [b"x", bytearray(b"x"), slice(1, 2), 10**30, torch.Size([1, 2])],
        ordered({"": {"version": 1}}),
    ]


def test_the_same_value_is_equal(tmp_path):
    pairs = list(zip(equal_values(), equal_values(), strict=True))
    assert differences(pairs, tmp_path) == [[] for _ in pairs]


DIFFERENT: list[tuple[Any, Any, list[str]]] = [
    (OrderedDict(a=1), OrderedDict(a=2), ["a"]),
    (OrderedDict(a=1), {"a": 1}, [""]),
    (OrderedDict([("a", 1), ("b", 2)]), OrderedDict([("b", 2), ("a", 1)]), [""]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
    (ordered({"version": 1}), ordered({"version": 2}), ["_metadata.version"]),
    (defaultdict(list, {"a": [1]}), defaultdict(list, {"a": [2]}), ["a.0"]),
    (default_of(list, {"a": 1}), default_of(list, {"b": 1}), ["a", "b"]),
    (default_of(list, {"a": 1}), default_of(dict, {"a": 1}), ["args.0"]),
    (Items([1, 2]), Items([1, 3]), ["1"]),
    (Items([1, 2]), Items([1]), ["1"]),
    (Items([1]), [1], [""]),
    (Fields(a=[1]), Fields(a=[2]), ["a.0"]),
    (Fields(a=1), {"a": 1}, [""]),
    (Rebuilt(1, [2]), Rebuilt(1, [3]), ["args.1.0"]),
    (Rebuilt(1), Rebuilt(1, 2), ["args.1"]),
    (Rebuilt(1), Rebuilt(True), ["args.0"]),
    (Plain(a=1), Plain(a=2), ["a"]),
    (Plain(a=1), Plain(b=1), ["a", "b"]),
    (Plain(a=1), argparse.Namespace(a=1), [""]),
    (argparse.Namespace(a=1), argparse.Namespace(a=True), ["a"]),
    (1, True, [""]),
    (0, False, [""]),
    (1, 1.0, [""]),
    ("1", 1, [""]),
    (b"x", bytearray(b"x"), [""]),
    ({1: "a"}, {True: "a"}, ["1", "True"]),
    ({1: "a"}, {1.0: "a"}, ["1", "1.0"]),
    ({(1,): "a"}, {(True,): "a"}, ["(1,)", "(True,)"]),
    ({0.0: "a"}, {-0.0: "a"}, ["0.0", "-0.0"]),
    ({1, 2}, {True, 2}, [""]),
    (frozenset({1}), {1}, [""]),
    (slice(1, 2), slice(True, 2), ["start"]),
    (0.0, -0.0, [""]),
    (math.nan, negative_nan(), []),
    (math.nan, 1.0, [""]),
    (complex(0, 1), complex(-0.0, 1), [""]),
    (np.arange(3.0), np.arange(3.0) + 1, ["state.4"]),
    (np.float64(1), np.float32(1), ["*"]),  # whatever the state of numpy's types looks like in this release
    (torch.tensor([1.0]), torch.tensor([2.0]), [""]),
    (torch.tensor([1]), torch.tensor([1], dtype=torch.int32), [""]),
    (torch.float32, torch.float64, [""]),
]


def test_what_differs_is_named(tmp_path):
    found = differences([(a, b) for a, b, _ in DIFFERENT], tmp_path)
    for (a, b, names), told in zip(DIFFERENT, found, strict=True):
        assert told == names or (told and names == ["*"]), (a, b)


def test_values_that_are_nested_too_deeply():
    a, b = [], []  # type: ignore[var-annotated]
    for _ in range(100):
        a, b = [a], [b]
    assert [d.a for d in diff_values("v", a, b, Tolerance())] == ["nested too deeply to compare"]


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "is_equal"),
    [
        (math.inf, math.inf, Tolerance(atol=1.0, nan="equal"), True),
        (-math.inf, -math.inf, Tolerance(atol=1.0, rtol=0.5, nan="equal"), True),
        (math.inf, -math.inf, Tolerance(atol=1e300, rtol=10.0, nan="equal"), False),
        (math.inf, 1.0, Tolerance(atol=1e300, rtol=10.0, nan="equal"), False),
        (math.inf, sys.float_info.max, Tolerance(ulp=8, nan="equal"), False),
        (math.inf, math.nan, Tolerance(atol=1.0, nan="equal"), False),
        (0.0, -0.0, Tolerance(atol=1e-9, nan="equal"), True),
        (1.0, 1.0 + 1e-12, Tolerance(atol=1e-9), True),
        (1.0, 1.1, Tolerance(atol=1e-9), False),
        (complex(1, math.inf), complex(1 + 1e-12, math.inf), Tolerance(atol=1e-9), True),
        (math.nan, math.nan, Tolerance(nan="different"), False),
        (math.nan, negative_nan(), Tolerance(nan="bits"), True),
    ],
)
def test_numbers_within_a_tolerance(a, b, tolerance, is_equal, tmp_path):
    """The same in objects, in tensors inside of objects, and in tensors."""
    pairs: list[tuple[Any, Any]] = [(a, b)]
    if not isinstance(a, complex) and tolerance.nan != "bits":
        tensors = [torch.tensor([v], dtype=torch.float64) for v in (a, b)]
        pairs.append((tensors[0], tensors[1]))
        for name, tensor in zip("xy", tensors, strict=True):
            dcp.save({"w": tensor}, checkpoint_id=tmp_path / name, no_dist=True)
        report = diff_checkpoints(str(tmp_path / "x"), str(tmp_path / "y"), DiffOptions(tolerance))
        assert report.is_equal is is_equal
    assert {found == [] for found in differences(pairs, tmp_path, tolerance=tolerance)} == {is_equal}


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--keys", "nothing*"], 2, "'nothing*' matches nothing"),
        (["--keys", "common_state.args.no_such"], 2, "matches nothing"),
        (["--keys", "common_state.args.bf16"], 0, "equal"),
        (["--keys", "decoder.*", "--keys", "absent.*"], 2, "'absent.*' matches nothing"),
        (["--keys", "decoder.*", "--ignore", "*"], 2, "leave out everything"),
        (["--ignore", "*"], 2, "leave out everything"),
        (["--ignore", "common_state.args.no_such"], 0, "matches nothing"),
        (["--ignore", "*.bf16"], 0, "equal"),
    ],
)
def test_globs_that_match_nothing_make_no_checkpoints_equal(flags, code, said, capsys):
    root = str(fixture_dir(LLAMA))
    assert run(["diff", root, root, *flags]) == code
    out = capsys.readouterr()
    assert said in (out.err if code else out.out)
    if flags == ["--ignore", "*.bf16"]:
        assert "matches nothing" not in out.out


def test_a_part_on_one_side_only_is_named_by_its_glob(tmp_path):
    a, b = store({"x": 1}, tmp_path / "a"), store({"x": 1, "y": None}, tmp_path / "b")
    report = diff_checkpoints(a, b, DiffOptions(keys=("o.v.y",)))
    assert [(d.name, d.a, d.b) for d in report.values] == [("o.v.y", None, "None")]
    with pytest.raises(UsageError):
        diff_checkpoints(a, b, DiffOptions(keys=("o.v.z",)))


@pytest.mark.parametrize("side", [0, 1])
def test_keys_on_one_side_are_a_difference(side, tmp_path, capsys):
    full, less = str(fixture_dir(LLAMA)), copy_of(LLAMA, tmp_path)
    with metadata_of(less) as metadata:
        drop_key(metadata, "decoder.final_layernorm.weight")
        drop_key(metadata, "rng_state/shard_0.0_1.2")
    pair = [full, str(less)] if side else [str(less), full]
    assert run(["diff", *pair, "--by", "keys"]) == 1
    out = capsys.readouterr().out
    assert f"decoder.final_layernorm.weight: only in {'AB'[1 - side]}" in out
    assert "rng_state/shard_0.0_1.2: " in out
