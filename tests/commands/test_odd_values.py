"""Stored values of another kind than their readers take end a command with 4 and their key, and none with 70."""

from __future__ import annotations

import argparse
import random
import shutil
import warnings

import pytest
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_tools.cli.app import run
from tests.commands import oracle
from tests.commands.rewritten import Parts, read, write
from tests.conftest import fixture_dir

LLAMA = "core019_llama_tp2_fully_reshardable"
NATIVE = "core019_llama_tp2_native_fsdp_dtensor"
BUCKETS = "core019_llama_dp2_dp_reshardable"
GROUP = "optimizer.param_to_group_meta.module.module.module.decoder.final_layernorm.weight"
HUGE = 10**5000  # Python does not even spell it
ODD = (None, "x\x1b[31m", [], [1, "a"], {}, {"a": {"b": [{}]}}, -1, 2**70, HUGE, float("nan"), float("inf"), 1e300,
       b"\0", (), (1,), True, 1.5, {1: 2}, [[[[1]]]])  # fmt: skip


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

    def put_native(values, into):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            planner = DefaultSavePlanner(flatten_state_dict=False)
            save({**tensors, **values}, storage_writer=FileSystemWriter(into), planner=planner, no_dist=True)

    return values, put_native


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
        (LLAMA, (RNG,), 10**400, RNG),
        (LLAMA, (RNG,), [], RNG),
        (LLAMA, (RNG, 0), {"a": 1}, RNG),
        (LLAMA, (RNG, 0, 0), 7, f"{RNG}.0"),
        (LLAMA, ("common", "args"), [1], "args"),
        (LLAMA, ("common", "args", "num_layers"), "two", "args.num_layers"),
        (LLAMA, ("common", "args", "tensor_model_parallel_size"), 0, "args.tensor_model_parallel_size"),
        (LLAMA, ("common", "args", "world_size"), 2**70, "args.world_size"),
        (LLAMA, ("common", "args", "lr"), (1,), "args.lr"),
        (LLAMA, ("common", "iteration"), -1, "iteration"),
        (LLAMA, ("common", "opt_param_scheduler"), 10**400, "opt_param_scheduler"),
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
