"""`repair`: known damage is undone to the byte where the checkpoint proves how, and refused by name elsewhere."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import CkptError, EditOptions, repair_checkpoint, verify_checkpoint
from ckpt_tools.cli.app import run
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, VerificationError
from tests.commands import oracle
from tests.commands.made import fsdp, iteration_of
from tests.commands.rewritten import saved
from tests.commands.stages import GROUP, STATE, of_stage
from tests.conftest import fixture_dir
from tests.folders import is_sound

RUN = "core019_llama_tp2_fully_reshardable"
FC1 = "decoder.layers.mlp.linear_fc1.weight"
NATIVE = "core019_llama_tp2_native_fsdp_dtensor"


def refusal(source: Path, tmp_path: Path, error: type[CkptError], **options: Any) -> str:
    with pytest.raises(error) as caught:
        repair_checkpoint(str(source), str(tmp_path / "out"), EditOptions(**options))
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_other_formats_are_refused(tmp_path):
    assert "it changes no weights and no masters" in refusal(
        fixture_dir(RUN), tmp_path, UnsupportedCheckpointError
    )


def test_what_was_not_read_is_not_vouched_for(tmp_path, capsys):
    words = ["repair", str(fixture_dir(NATIVE)), str(tmp_path / "out")]
    assert run(words) == 1  # `repair RUN OUT && use OUT` does not go on
    said = capsys.readouterr().out
    assert "Values were not read" in said
    assert "use it" not in said
    assert run([*words, "--dry-run", "-q"]) == 1
    capsys.readouterr()
    assert run([*words, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["changes"], report["written"]) == ([], None)
    assert not (tmp_path / "out").exists()


# ---- keys of fsdp_dtensor


def parts(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = oracle.tensors(folder)
    keys = oracle.metadata(folder).state_dict_metadata.keys() - tensors.keys()
    objects = {key: oracle.item(folder, key) for key in keys - {"args"}}
    args = vars(oracle.item(folder, "args"))
    plain = {k: v for k, v in args.items() if isinstance(v, bool | int | float | str | None)}
    return tensors, objects | {"args": argparse.Namespace(**plain)}


def as_nvidias_converter_writes(
    tensors: dict[str, torch.Tensor], objects: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Rounded weights under `model.*`, masters among the states, groups under halves with an empty step before."""
    made = dict(tensors)
    for key, value in tensors.items():
        name = key.removeprefix("model.module.")
        if f"{STATE}{name}.exp_avg" in tensors:
            made[key] = value.bfloat16()
            made[f"{STATE}{name}.fp32_param"] = value
    fields: dict[str, Any] = {}
    for key, value in objects.items():
        name, _, field = key.removeprefix(GROUP).rpartition(".")
        ends = ("_w", "_v") if ".linear_fc1.weight" in name else ("",)
        fields |= (
            {f"{GROUP}.{name}{end}.{field}": value for end in ends} if key.startswith(GROUP) else {key: value}
        )
    return made, fields


@pytest.fixture
def sound() -> Path:
    return fsdp(RUN)


def test_masters_and_groups_where_nvidias_converter_puts_them(sound, tmp_path):
    tensors, objects = parts(sound)
    foreign = saved(
        tmp_path / "foreign",
        {k: v for d in as_nvidias_converter_writes(tensors, objects) for k, v in d.items()},
    )
    report = verify_checkpoint(foreign)
    told = [f.message for f in report.findings]
    assert sum("`repair` puts it in the place of the rounded weight" in message for message in told) == 17
    assert sum("`repair` takes it out" in message for message in told) == 15
    done = repair_checkpoint(str(foreign), str(tmp_path / "out"))
    assert [change.cause for change in done.changes] == ["masters-beside-weights", "group-names"]
    assert is_sound(tmp_path / "out")
    found, kept = parts(tmp_path / "out")
    oracle.assert_same(found, tensors)
    assert kept.keys() == objects.keys()
    assert all(kept[key] == objects[key] for key in objects if key.startswith(GROUP))


def test_masters_of_another_step_take_no_place(sound, tmp_path):
    tensors, objects = as_nvidias_converter_writes(*parts(sound))
    key = f"{STATE}decoder.layers.0.self_attention.linear_proj.weight.fp32_param"
    tensors[key] = tensors[key] * 1.5
    message = refusal(saved(tmp_path / "foreign", tensors | objects), tmp_path, VerificationError)
    assert "do not round to the stored weights" in message


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda master: master[:-1].clone(), "torch.bfloat16"),
        (lambda master: master.t().contiguous(), ""),
        (lambda master: master.double(), "float64"),
        (lambda master: master.bfloat16(), "bfloat16"),
        (None, "its weight: missing"),
    ],
)
def test_masters_that_fit_no_weight_take_no_place(change, found, sound, tmp_path):
    tensors, objects = as_nvidias_converter_writes(*parts(sound))
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    key = f"{STATE}{name}.fp32_param"
    if change is None:
        del tensors[f"model.module.{name}"]
    else:
        tensors[key] = change(tensors[key])
    message = refusal(saved(tmp_path / "foreign", tensors | objects), tmp_path, MappingError)
    assert "masters that fit no weight" in message and f"{key}: " in message
    assert found.removeprefix("torch.") in message


def test_halves_that_say_different_things_of_their_group(sound, tmp_path):
    tensors, objects = as_nvidias_converter_writes(*parts(sound))
    (key, *_) = [key for key in objects if key.endswith("0.mlp.linear_fc1.weight_v.lr")]
    objects[key] = 7.0
    message = refusal(saved(tmp_path / "foreign", tensors | objects), tmp_path, MappingError)
    assert f"{key} and " in message or f" and {key}" in message


# ---- layers under the numbers of a pipeline stage


@pytest.fixture(scope="module")
def collided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages of one layer each in one checkpoint, saved by two processes with stock DCP."""
    folder = tmp_path_factory.mktemp("stages")
    torch.save(oracle.tensors(iteration_of(NATIVE)), folder / "values.pt")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = Path(__file__).with_name("stages_worker.py")
    done = subprocess.run(
        [*launcher, str(worker), str(folder / "values.pt"), str(folder / "iter_0000002")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "iter_0000002"


def test_stages_that_overwrote_each_other_are_refused_by_name(collided, tmp_path, capsys):
    """One copy of each weight is left, and the states of both layers: the strict load of torch would go through."""
    stored = oracle.tensors(collided)
    assert not any(key.startswith("model.module.decoder.layers.1.") for key in stored)
    assert any(key.startswith(f"{STATE}decoder.layers.1.") for key in stored)
    assert run(["verify", str(collided)]) == 1
    told = capsys.readouterr().out
    assert (
        "MLM#7452: the weights are of layers 0, the optimizer's states layers 0-1, the args say 2 layers"
        in told
    )
    for words in (
        ["repair", str(collided), str(tmp_path / "out")],
        ["convert", str(collided), str(tmp_path / "out"), "--to", "torch_dist"],
        ["convert", str(collided), str(tmp_path / "out"), "--to", "torch_dist", "--weights-only"],
        ["convert", str(collided), str(tmp_path / "out"), "--dp-shard", "2"],
        ["export-hf", str(collided), str(tmp_path / "out")],
    ):
        assert run([*words, "-q"]) == 5, words
        assert "MLM#7452" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def of_one_stage(tmp_path: Path, stage: int, rng: int | None = None, **args: object) -> Path:
    tensors, objects = of_stage(oracle.tensors(iteration_of(NATIVE)), stage)
    if rng is not None:
        objects = {key.replace(f"({stage}, 0)", f"({rng}, 0)"): value for key, value in objects.items()}
    settings = {"num_layers": 2, "pipeline_model_parallel_size": 2, "swiglu": True, "bf16": True} | args
    state = {
        **tensors,
        **objects,
        "args": argparse.Namespace(**settings),
        "iteration": 2,
        "checkpoint_version": 3.0,
    }
    return saved(tmp_path / "stage" / "iter_0000002", state)


def test_the_layers_of_one_stage_get_their_numbers(tmp_path, capsys):
    source = of_one_stage(tmp_path, 1)
    assert run(["verify", str(source)]) == 1
    assert "`repair` gives the layers of this stage their numbers" in capsys.readouterr().out.replace(
        "\n", " "
    )
    done = repair_checkpoint(str(source), str(tmp_path / "out"))
    (change,) = done.changes
    assert (change.cause, change.issue) == ("stage-numbers", "MLM#7452")
    found, expected = oracle.tensors(tmp_path / "out"), oracle.tensors(iteration_of(NATIVE))
    assert any(key.startswith("model.module.decoder.layers.1.") for key in found)
    assert not any(".layers.0." in key for key in found)
    assert all(oracle.same_bytes(found[key], expected[key]) for key in found)
    assert len(change.keys) == sum(key.startswith("model.module.decoder.layers.1.") for key in expected)


@pytest.mark.parametrize(
    ("rng", "args", "why"),
    [
        (0, {}, "the rng states are those of stage 0, the layers those of 1"),
        (None, {"num_layers": 8}, "a stage has 4 of 8 layers by the args"),
        (None, {"num_layers": 1}, "the optimizer has layer 1, the args say 1 layers"),
    ],
)
def test_args_that_say_otherwise(rng, args, why, tmp_path):
    assert why in refusal(of_one_stage(tmp_path, 1, rng, **args), tmp_path, MappingError)


def test_states_of_other_shapes_prove_nothing(tmp_path):
    tensors, objects = of_stage(oracle.tensors(iteration_of(NATIVE)), 1)
    key = f"{STATE}decoder.layers.1.self_attention.linear_proj.weight.exp_avg"
    tensors[key] = tensors[key][:-1].clone()
    args = argparse.Namespace(num_layers=2, pipeline_model_parallel_size=2)
    state = {**tensors, **objects, "args": args, "iteration": 2, "checkpoint_version": 3.0}
    assert key in refusal(saved(tmp_path / "stage" / "iter_0000002", state), tmp_path, MappingError)


def test_weights_alone_do_not_tell_their_stage(tmp_path, capsys):
    tensors, _ = of_stage(oracle.tensors(iteration_of(NATIVE)), 1)
    weights = {key: value for key, value in tensors.items() if key.startswith("model.")}
    args = argparse.Namespace(num_layers=2, pipeline_model_parallel_size=2, swiglu=True, bf16=True)
    state = {**weights, "args": args, "iteration": 2, "checkpoint_version": 3.0}
    source = saved(tmp_path / "stage" / "iter_0000002", state)
    assert "no optimizer states tell of which stage they are" in refusal(source, tmp_path, MappingError)
    assert run(["verify", str(source)]) == 1
    assert "MLM#7452: the weights are of layers 0, the args say 2 layers and 2 pipeline stages" in (
        capsys.readouterr().out
    )


def test_a_job_without_stages_is_not_said_to_have_some(tmp_path, capsys):
    source = of_one_stage(tmp_path, 0, pipeline_model_parallel_size=1)
    assert run(["verify", str(source)]) == 1
    told = capsys.readouterr().out
    assert "MLM#7452" not in told
    assert "1 layers are stored, the args say 2" in told
