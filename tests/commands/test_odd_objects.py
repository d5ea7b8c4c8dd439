"""Objects that pickles of protocol 5 make, and texts that UTF-8 has not: carried whole by every command."""

import argparse
import json

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from ckpt_tools.cli.app import run
from ckpt_tools.commands.job.outputs import object_archives
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.model.target import TargetObject
from tests.commands import oracle
from tests.commands.rewritten import read, write
from tests.conftest import fixture_dir

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
LLAMA = "core019_llama_tp2_fully_reshardable"
ODD = {
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "number": np.float32(1.5),
    "bytes": bytearray(b"\x00\xff"),
    "text \ud800": "value \udfff",
    "plain": [1, True, 1.0, None],
}


def same(found, expected=ODD):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is type(value)
        assert np.array_equal(found[name], value) if name == "array" else found[name] == value, name
    return True


@pytest.mark.parametrize("protocol", [2, 5])
def test_every_command_takes_them(protocol, tmp_path, monkeypatch, capsys):
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda o, f, **kw: save(o, f, **{**kw, "pickle_protocol": protocol}))
    state = {"w \udc80": torch.arange(4.0), "o \ud800": argparse.Namespace(**ODD)}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    for command in (
        ["inspect", tmp_path / "a"],
        ["verify", tmp_path / "a", "--content", "--write-manifest", tmp_path / "m.json"],
        ["verify", tmp_path / "a", "-q", "--manifest", tmp_path / "m.json", "--json"],
        ["diff", tmp_path / "a", tmp_path / "a"],
        ["print-tensor", tmp_path / "a", "w \udc80"],
        ["modify-state-dict", tmp_path / "a", tmp_path / "b", "-q", "--op", "rename ^w kept"],
        ["diff", tmp_path / "a", tmp_path / "b", "--keys", "o*"],
        ["verify", tmp_path / "b", "--content"],
    ):
        assert run([str(word) for word in command]) == 0, (command, capsys.readouterr())
    capsys.readouterr()
    assert run(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "-q", "--json"]) == 1
    assert {t["key"] for t in json.loads(capsys.readouterr().out)["tensors"]} == {"w \udc80", "kept \udc80"}
    assert same(vars(oracle.item(tmp_path / "b", "o \ud800")))


def test_a_conversion_carries_them(tmp_path):
    """As arguments of the training job, there and back."""
    parts = read(oracle.files_of(fixture_dir(LLAMA)))
    parts.args["odd"] = ODD
    save = torch.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", lambda o, f, **kw: save(o, f, **{**kw, "pickle_protocol": 5}))
        source = write(tmp_path / "in", parts)
    there, back = tmp_path / "there", tmp_path / "back"
    assert run(["convert", str(source), str(there), "-q"]) == 0
    assert run(["diff", str(source), str(there)]) == 0
    assert run(["verify", str(there), "--content"]) == 0
    assert run(["convert", str(there), str(back), "-q", "--to", "torch_dist"]) == 0
    assert same(oracle.item(oracle.files_of(there), "args").odd)
    assert same(oracle.item(oracle.files_of(back), "common_state/shard_0_1")[0]["args"].odd)


def test_values_that_read_alike_are_not_taken_for_one_another():
    """Archives of equal plain values are shared, by their text; the text of a tensor leaves its bytes out."""
    one, other = (StoredTensor("float32", (1,), data) for data in (b"\0\0\0\0", b"\0\0\x80\x3f"))
    assert repr(one) == repr(other)
    values = [(one,), (other,), ((1, (one,)),), ((1, (other,)),), 1, True, 1.0, (1,), (True,), 0.0, -0.0, "1"]
    archives = object_archives([TargetObject(str(i), value) for i, value in enumerate([*values, *values])])
    assert [key for key, _ in archives] == [str(i) for i in range(2 * len(values))]
    content = [archive for _, archive in archives]
    assert content == [dump_archive(value) for value in [*values, *values]]
    assert len(set(content)) == len(values)
