"""`print-tensor` against numpy indexing of what stock torch loads; it reads no more than it shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

from ckpt_tools.commands.look.checkpoint import MAX_SHOWN, parse_slice, print_tensor
from ckpt_tools.errors import MappingError, UsageError
from ckpt_tools.formats.storage.files import LocalFiles
from tests.conftest import fixture_dir

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

TENSORS = {
    "bf16": torch.linspace(-3, 3, 60, dtype=torch.bfloat16).reshape(3, 4, 5),
    "fp32": torch.tensor([1.5, float("nan"), float("inf"), -2.0, 0.0, -float("inf")]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "int": torch.arange(-6, 6).reshape(3, 4),
    "bool": torch.tensor([True, False, True]),
    "large": torch.arange(5000.0).reshape(50, 100),
    "empty": torch.empty(0, 3),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    dcp.save({**TENSORS, "value": {"a": [1, 2.5]}}, checkpoint_id=folder, no_dist=True)
    return str(folder)


@pytest.mark.parametrize("key", ["bf16", "scalar", "int", "bool", "empty"])
def test_small_tensors_are_shown_whole(source, key):
    shown = print_tensor(source, key)
    assert shown.values == TENSORS[key].tolist()
    assert (shown.dtype, shown.shape) == (str(TENSORS[key].dtype)[6:], tuple(TENSORS[key].shape))


def test_large_tensors_show_a_corner(source):
    shown = print_tensor(source, "large")
    assert shown.box is not None
    assert MAX_SHOWN / 4 < shown.box.volume <= MAX_SHOWN
    rows, columns = shown.box.size
    assert shown.values == TENSORS["large"][:rows, :columns].tolist()


@pytest.mark.parametrize("part", ["0:2, :, 3", "1", ":, -1", "[2,0:2,1:]", "-2:, 1:3", "5:9", "", "1, 2, 0"])
def test_slices_are_numpys(source, part):
    index = tuple(
        slice(*(int(n) if n.strip() else None for n in text.split(":"))) if ":" in text else int(text)
        for text in part.strip("[]").split(",")
        if text.strip()
    )
    assert print_tensor(source, "bf16", part).values == TENSORS["bf16"].float().numpy()[index].tolist()


edges = st.one_of(st.none(), st.integers(-9, 9))


@given(st.integers(0, 7), edges, edges)
def test_ranges_are_pythons(length, low, high):
    text = f"{'' if low is None else low}:{'' if high is None else high}"
    box, _ = parse_slice(text, (length,))
    assert list(range(box.start[0], box.stop[0])) == list(range(length))[low:high]


@pytest.mark.parametrize(("part", "message"), [("9", "outside"), ("0:2:1", "neither"), ("x", "neither"),
                                               ("0,0,0,0", "4 parts"), ("-4", "outside")])  # fmt: skip
def test_slices_that_do_not_fit(source, part, message):
    with pytest.raises(UsageError, match=message):
        print_tensor(source, "bf16", part)


def test_statistics(source):
    found = print_tensor(source, "fp32", stats=True).statistics
    mean, rms = pytest.approx(-0.5 / 3), pytest.approx(np.sqrt(6.25 / 3))
    assert found == {"elements": 6, "nan": 1, "inf": 2, "zero": 1, "min": -2.0, "max": 1.5,
                     "mean": mean, "rms": rms, "norm": 2.5}  # fmt: skip
    assert print_tensor(source, "large", stats=True).statistics["mean"] == 2499.5
    assert print_tensor(source, "large", "1", stats=True).statistics["elements"] == 100
    assert print_tensor(source, "empty", stats=True).statistics["min"] is None
    assert print_tensor(source, "bool", stats=True).statistics["zero"] == 1


def test_objects_are_shown_as_values(source):
    assert print_tensor(source, "value.a").values == [1, 2.5]
    with pytest.raises(UsageError, match="not a tensor"):
        print_tensor(source, "value.a", "0")


def test_an_unknown_key_names_its_neighbours(source):
    with pytest.raises(MappingError, match="Did you mean large"):
        print_tensor(source, "larg")


def test_only_what_is_shown_is_read(source, monkeypatch):
    read = []
    original = LocalFiles.read_into

    def counting(self, name, offset, buffer):
        if name != ".metadata":
            read.append(len(buffer))
        original(self, name, offset, buffer)

    monkeypatch.setattr(LocalFiles, "read_into", counting)
    print_tensor(source, "large", "7, 3:5")
    assert min(read) == 8  # two elements
    assert sum(read) <= 2 * 4096 + 2 * 128 + 8  # and the frame around them


def test_a_tensor_of_many_chunks(source):
    root = str(fixture_dir("core019_llama_tp2_fully_reshardable"))
    key = "decoder.layers.mlp.linear_fc1.weight"
    whole = print_tensor(root, key, "1")
    assert len(whole.chunks) > 1
    values = np.array(whole.values)
    assert values.shape == (128, 32)  # an index drops its axis, as in numpy
    assert print_tensor(root, key, "1, 60:70, 5").values == values[60:70, 5].tolist()
