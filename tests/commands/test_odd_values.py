"""What is odd beside sound tensors is named with 4: values of another kind, small files that are damaged or lost.

Objects that pickles of protocol 5 make, and texts that UTF-8 has not, are carried whole by every command.
"""

import argparse
import json
import random
import shutil
import subprocess
from functools import cache

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_tools.cli.app import run
from ckpt_tools.commands.job.outputs import object_archives
from ckpt_tools.formats.locate.detect import METADATA_JSON_TEXT
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.model.target import TargetObject
from tests.commands import oracle
from tests.commands.rewritten import Parts, read, saved, write
from tests.conftest import LLAMA, NATIVE, fixture_dir
from tests.folders import content

BUCKETS = "core019_llama_dp2_dp_reshardable"
GROUP = "optimizer.param_to_group_meta.module.module.module.decoder.final_layernorm.weight"
HUGE = 10**5000  # Python does not even spell it
ODD: tuple[object, ...] = (
    None, "x\x1b[31m", [], [1, "a"], {}, {"a": {"b": [{}]}}, -1, 2**70, HUGE, float("nan"), float("inf"), 1e300,
    b"\0", (), (1,), True, 1.5, {1: 2}, [[[[1]]]],
)  # fmt: skip


@cache
def stored(name):
    """The values of a checkpoint that are no weights, by key; and what writes it with others of these."""
    folder = fixture_dir(name) / "iter_0000002"
    if (folder / "metadata.json").exists():
        parts = read(folder)
        values = {
            "common": parts.common,
            **{k: v for k, v in parts.objects.items() if "_extra_state" not in k},
        }

        def put(values, into):
            others = {key: value for key, value in values.items() if key != "common"}
            write(into, Parts(parts.tensors, parts.objects | others, values["common"]))

        return values, put
    kinds = oracle.metadata(folder).state_dict_metadata
    values = {
        k: oracle.item(folder, k) for k, kind in kinds.items() if not isinstance(kind, TensorStorageMetadata)
    }
    plain = {k: v for k, v in vars(values["args"]).items() if isinstance(v, bool | int | float | str | None)}
    values["args"], tensors = argparse.Namespace(**plain), oracle.tensors(folder)

    return values, lambda values, into: saved(into, {**tensors, **values})


def replaced(value, path, new):
    """The value with another at the end of a path of keys, indices and attributes."""
    if not path:
        return new
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**replaced(vars(value), path, new))
    items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    items[path[0]] = replaced(items.get(path[0]), path[1:], new)
    return items if isinstance(value, dict) else type(value)(items.values())


def paths(value, path=()):
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if path:
        yield path
    for key, part in inner:
        yield from paths(part, (*path, key))


GROUPS = ("common", "optimizer", "optimizer", "param_groups")
RNG = "rng_state/shard_0.0_1.2"


@pytest.mark.parametrize(
    ("name", "path", "value", "key"),
    [
        (LLAMA, (RNG,), 2**200, RNG),
        (LLAMA, (RNG,), [], RNG),
        (LLAMA, (RNG, 0), {"a": 1}, RNG),
        (LLAMA, (RNG, 0, 0), 7, f"{RNG}.0"),
        (LLAMA, ("common", "args"), [1], "args"),
        (LLAMA, ("common", "args", "num_layers"), "two", "args.num_layers"),
        (LLAMA, ("common", "args", "tensor_model_parallel_size"), 0, "args.tensor_model_parallel_size"),
        (LLAMA, ("common", "args", "world_size"), 2**70, "args.world_size"),
        (LLAMA, ("common", "args", "lr"), (1,), "args.lr"),
        (LLAMA, ("common", "iteration"), -1, "iteration"),
        (LLAMA, ("common", "opt_param_scheduler"), 2**200, "opt_param_scheduler"),
        (LLAMA, ("common", "opt_param_scheduler", "max_lr"), {}, "opt_param_scheduler.max_lr"),
        (LLAMA, GROUPS, 1.5, "optimizer.optimizer.param_groups"),
        (LLAMA, (*GROUPS, 1), None, "optimizer.optimizer.param_groups.1"),
        (LLAMA, (*GROUPS, 0, "step"), "x", "optimizer.optimizer.param_groups.0.step"),
        (LLAMA, (*GROUPS, 0, "wd_mult"), [], "optimizer.optimizer.param_groups.0.wd_mult"),
        (LLAMA, (*GROUPS, 0, "is_decoupled_lr"), "x", "optimizer.optimizer.param_groups.0.is_decoupled_lr"),
        (LLAMA, (*GROUPS, 0, "betas"), 3, "optimizer.optimizer.param_groups.0.betas"),
        (NATIVE, ("opt_param_scheduler.max_lr",), "x", "opt_param_scheduler.max_lr"),
        (NATIVE, (f"{GROUP}.max_lr",), [1], f"{GROUP}.max_lr"),
        (NATIVE, (f"{GROUP}.step",), 1e300, f"{GROUP}.step"),
    ],
)  # fmt: skip
def test_an_odd_value_is_named_by_its_key(name, path, value, key, tmp_path, capsys):
    values, put = stored(name)
    put(replaced(values, path, value), tmp_path / "in")
    for words in (["--gpus", "2", "--tp", "1"], ["--to", "dcp"]):
        assert run(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "-q", *words]) == 4
        assert f"{key} is " in capsys.readouterr().err
    assert run(["verify", str(tmp_path / "in"), "--content"]) == 1
    assert f"{key} is " in capsys.readouterr().out


def test_states_where_megatron_keeps_none_are_named_as_dropped(tmp_path, capsys):
    values, put = stored(LLAMA)
    put(replaced(values, (*GROUPS[:-1], "state"), {0: {"step": 9}}), tmp_path / "in")
    for words in (["--gpus", "2"], ["--to", "dcp"]):
        assert run(["convert", str(tmp_path / "in"), str(tmp_path / words[1]), *words]) == 0
        assert "dropped   common state optimizer.optimizer.state" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [LLAMA, NATIVE, BUCKETS])
def test_no_odd_value_ends_a_command_with_a_traceback(name, seed, tmp_path, capsys):
    values, put = stored(name)
    choose = random.Random(f"{name} {seed}")
    every = sorted(paths(values), key=str)
    for number in range(4):
        path, value = choose.choice(every), choose.choice(ODD)
        source, out = tmp_path / f"in{number}", str(tmp_path / f"out{number}")
        put(replaced(values, path, value), source)
        for words in (["verify", "--content", "--workers", "1"], ["convert", out, "--gpus", "2", "--tp", "1"],
                      ["convert", f"{out}t", "--to", "torch_dist"], ["inspect"], ["strip", f"{out}s"],
                      ["export-hf", f"{out}h"], ["preflight", "--gpus", "2"]):  # fmt: skip
            code = run([words[0], str(source), *words[1:]])
            assert code in range(8), (path, value, words, capsys.readouterr().err[-2000:])
        shutil.rmtree(source)


@pytest.mark.parametrize("case", ["weights_only", "with_optimizer"])
@pytest.mark.parametrize(
    "words", [["inspect"], ["convert", "OUT"], ["convert", "OUT", "--to", "dcp"], ["strip", "OUT"],
              ["export-hf", "OUT"], ["verify"]],
)  # fmt: skip
def test_a_lost_metadata_json_is_named_and_written_again_as_told(words, case, user_cases, tmp_path, capsys):
    source, out = tmp_path / "in put", str(tmp_path / "out")
    shutil.copytree(user_cases / "metadata_json_missing" / case, source, copy_function=shutil.copyfile)
    told = [word.replace("OUT", out) for word in words[1:]]
    assert run([words[0], str(source), *told]) == (1 if words[0] == "verify" else 4)
    printed = capsys.readouterr()
    said = printed.out + printed.err
    assert "metadata.json is missing" in said
    (advice,) = [line for line in said.splitlines() if line.startswith("  echo ")]
    subprocess.run(advice, shell=True, check=True)
    assert run([words[0], str(source), *told]) in ((0,) if words[0] in ("inspect", "verify") else range(6))
    assert "metadata.json" not in capsys.readouterr().err


RECORDED = {"convert": ["OUT"], "strip": ["OUT"], "average": ["IN", "OUT"], "verify": [], "inspect": []}


@pytest.mark.parametrize("changes", [
    (("ckpt_tools.json", "null", "nrll"), ("ckpt_tools.json", "dcp", "dcq"), ("ckpt_tools.json", "format", "fprmat"),
     ("ckpt_tools.json", "topology", "topplogy"), ("ckpt_tools.json", '"main"', '"mxin"')),
    (("metadata.json", "sharded_backend", "sharded_bbckend"), ("metadata.json", "torch_dist", "torch_disu"),
     ("metadata.json", "common_backend", "common_bbckend"), ("metadata.json", '"torch"', '"tprch"'),
     ("metadata.json", ": 1", ": 7"), ("metadata.json", "{", "[")),
])  # fmt: skip
def test_a_letter_of_a_small_file(changes, tmp_path, capsys):
    folder = tmp_path / "in" / "iter_0000002"
    if changes[0][0] == "ckpt_tools.json":
        assert run(["convert", str(fixture_dir(LLAMA)), str(tmp_path / "in"), "--to", "dcp", "-q"]) == 0
    else:
        shutil.copytree(fixture_dir(LLAMA), tmp_path / "in", copy_function=shutil.copyfile)
        folder.chmod(0o755)
        (folder / "metadata.json").write_text(METADATA_JSON_TEXT)
    for name, old, new in changes:
        sound = (folder / name).read_text()
        (folder / name).write_text(sound.replace(old, new, 1))
        for command, words in RECORDED.items():
            told = [word.replace("IN", str(folder)).replace("OUT", str(tmp_path / "out")) for word in words]
            assert run([command, str(folder), *told]) in ((1, 4) if command == "verify" else (4,)), (
                new,
                command,
            )
            printed = capsys.readouterr()
            assert name in printed.out + printed.err
        (folder / name).write_text(sound)


@pytest.mark.parametrize("words", [["--gpus", "2", "--tp", "1"], ["--to", "torch_dist", "--weights-only"]])
def test_metadata_of_torch_2_15_converts_as_that_of_an_older_one(words, user_cases, tmp_path):
    older, newer = fixture_dir("te_llama_dp2_buckets_fr") / "iter_0000002", tmp_path / "iter_0000002"
    shutil.copytree(older, newer, copy_function=shutil.copyfile)
    newer.chmod(0o755)
    shutil.copyfile(user_cases / "torch_2_15/megatron/.metadata", newer / ".metadata")
    assert (newer / ".metadata").read_bytes() != (older / ".metadata").read_bytes()
    for source, out in ((older, "a"), (newer, "b")):
        assert run(["convert", str(source), str(tmp_path / out), "-q", *words]) == 0
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert run(["verify", str(newer), "--content"]) == 0


ODD_OBJECTS = {
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "number": np.float32(1.5),
    "bytes": bytearray(b"\x00\xff"),
    "text \ud800": "value \udfff",
    "plain": [1, True, 1.0, None],
}


def same(found, expected=ODD_OBJECTS):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is type(value)
        assert np.array_equal(found[name], value) if name == "array" else found[name] == value, name
    return True


@pytest.mark.parametrize("protocol", [2, 5])
def test_every_command_takes_them(protocol, tmp_path, monkeypatch, capsys):
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda o, f, **kw: save(o, f, **{**kw, "pickle_protocol": protocol}))
    state = {"w \udc80": torch.arange(4.0), "o \ud800": argparse.Namespace(**ODD_OBJECTS)}
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
    parts.args["odd"] = ODD_OBJECTS
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
