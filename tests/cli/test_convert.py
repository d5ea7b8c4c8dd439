"""The convert commands as users type them: outcomes, exit codes, messages, and what is left on disk."""

import json
import os
import shutil
from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from tests.conftest import DATA, fixture_dir

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
ITERATION = "iter_0000002"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A writable copy of a run's root."""
    return Path(shutil.copytree(LLAMA, tmp_path / "source"))


def convert(*words: object) -> int:
    return run(["convert", *map(str, words)])


def test_a_root_becomes_a_root_ready_for_load(tmp_path):
    assert convert(LLAMA, tmp_path / "out") == 0
    assert sorted(os.listdir(tmp_path / "out")) == [ITERATION, "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert sorted(os.listdir(tmp_path / "out" / ITERATION)) == [
        ".metadata",
        "__0_0.distcp",
        "ckpt_tools.json",
    ]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("command", ["convert", "average", "strip", "copy",
                                     "convert-torch-dist-to-fsdp-dtensor"])  # fmt: skip
def test_an_iteration_gets_a_root_by_which_a_job_finds_it(command, tmp_path, capsys):
    verb, *words = command.split()
    sources = [str(LLAMA / ITERATION)] * (2 if verb == "average" else 1)
    assert run([verb, *sources, str(tmp_path / "run"), *words]) == 0
    assert f"{tmp_path / 'run' / ITERATION}" in capsys.readouterr().out
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert run([verb, *sources, str(tmp_path / "iter_0000007"), *words]) == 0  # who names it so has a root
    assert (tmp_path / "iter_0000007" / ".metadata").exists()
    assert run([verb, *[str(LLAMA)] * len(sources), str(tmp_path / "iter_0000008"), *words]) == 0
    assert (tmp_path / "iter_0000008" / ".metadata").exists()
    assert run([verb, *sources, str(tmp_path / "iter_0000007" / ".." / "run" / ITERATION), *words]) == 2


def test_no_iteration_is_put_into_a_checkpoint(tmp_path, capsys):
    assert convert(LLAMA / ITERATION, tmp_path / ITERATION) == 0
    (tmp_path / ITERATION).rename(tmp_path / "mine")
    assert convert(LLAMA / ITERATION, tmp_path / "mine") == 2
    assert "is a checkpoint itself" in capsys.readouterr().err


def test_nvidias_spelling_of_command_and_options(tmp_path):
    words = ["convert-torch-dist-to-fsdp-dtensor", str(LLAMA / ITERATION), str(tmp_path / "out"), "--swiglu"]
    words += ["--oom-traceback", "--enable-msc", "--output-model-weight-prefix", "model.module"]
    words += ["--output-optimizer-state-prefix", "optimizer.state.module.module.module", "--quiet"]
    words += ["--param-to-param-group-map-json"]
    words += [str(LLAMA / "param_to_param_group_map" / "param_to_param_group_map.json")]
    assert run(words) == 0


def test_the_report_says_what_happened(tmp_path, capsys):
    assert convert(LLAMA, tmp_path / "out", "--report", tmp_path / "report.json") == 0
    text = capsys.readouterr().out
    assert "masters round to the stored weights (sample)" in text
    assert len(text.splitlines()) <= 8
    assert run(["convert", str(LLAMA), str(tmp_path / "again"), "--verbose", "--verify"]) == 0
    text = capsys.readouterr().out
    assert "Transformer Engine extra state" in text and "the output was read back" in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["groups"] == {"0": 10, "1": 5}
    assert report["written"]["bytes_written"] == sum(
        f.stat().st_size for f in (tmp_path / "out" / ITERATION).glob("*.distcp")
    )
    assert any("_extra_state" in line for line in report["dropped"])


def test_weights_only_keeps_args_and_progress(tmp_path, capsys):
    assert convert(LLAMA, tmp_path / "out", "--weights-only", "--dtype", "bfloat16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tensor_count"] == 17
    assert run(["inspect", str(tmp_path / "out"), "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)
    names = {entry["key"] for entry in keys["tensors"]} | {entry["key"] for entry in keys["objects"]}
    assert {"args", "iteration", "checkpoint_version"} <= names
    assert {entry["dtype"] for entry in keys["tensors"]} == {"bfloat16"}
    assert not any(name.startswith(("optimizer", "opt_param", "rng")) for name in names)


def test_the_output_must_be_elsewhere_and_empty(source, tmp_path, capsys):
    for inside in (source, source / ITERATION, source / "sub" / "dir", tmp_path):
        assert convert(source, inside) == 2, inside
    assert "overlap" in capsys.readouterr().err
    (tmp_path / "out" / ITERATION).mkdir(parents=True)
    (tmp_path / "out" / ITERATION / "mine.txt").write_text("keep")
    assert convert(source, tmp_path / "out") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "out" / ITERATION / "mine.txt").read_text() == "keep"
    assert convert(source, tmp_path / "out", "--overwrite") == 2
    assert "mine.txt" in capsys.readouterr().err
    assert (tmp_path / "out" / ITERATION / "mine.txt").read_text() == "keep"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--no-swiglu"], 5, "--no-swiglu was given"),
        (["--swiglu-modules", "vision_model"], 5, "leaves out"),
        (["--target", "core-9"], 2, "core-0.16"),
        (["--target", "main", "--rename-mtp-keys"], 2, "contradicts"),
        (["--dp-shard", "2", "--world-size", "5"], 2, "5"),
        (["--dtype", "float32"], 2, "--weights-only"),
        (["--dtype", "float7", "--weights-only"], 2, "float7"),
        (["--vocab-size", "200"], 2, "--vocab-size-padded"),
        (["--vocab-size-padded", "150", "--vocab-size", "200"], 2, "less than the 200 tokens"),
        (["--iteration", "5"], 3, "iter_0000005"),
        (["--no-such-option"], 2, "no-such-option"),
    ],
)
def test_options_that_cannot_be_met_are_refused(tmp_path, capsys, words, code, message):
    assert convert(LLAMA, tmp_path / "out", *words) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model.module.decoder.layers.9.mlp.linear_fc1.weight": 0}', "no such parameter"),
        ('{"model.module.output_layer.weight": 7}', "group 7"),
        ('{"model.module.output_layer.weight": "0"}', "group '0'"),
        ('{"a.weight": 0, "a.weight": 1}', "more than once"),
        ("[1, 2]", "list"),
        ("{", "not a readable"),
    ],
)
def test_maps_that_contradict_the_checkpoint_are_refused(tmp_path, capsys, content, message):
    (tmp_path / "map.json").write_text(content)
    assert convert(LLAMA, tmp_path / "out", "--param-to-param-group-map-json", tmp_path / "map.json") == 5
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_names_missing_from_a_map_are_derived_and_said(tmp_path, capsys):
    (tmp_path / "map.json").write_text('{"model.module.output_layer.weight": 0}')
    words = (LLAMA, tmp_path / "out", "--param-to-param-group-map-json", tmp_path / "map.json", "--json")
    assert convert(*words, "--strict-map") == 5
    assert convert(*words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["groups"] == {"0": 10, "1": 5}
    assert sum("not in the given map" in note for note in report["notes"]) == 14


def test_build_param_group_map_explains_itself(tmp_path, capsys):
    out = tmp_path / "map.json"
    assert run(["build-param-group-map", str(LLAMA), "-o", str(out), "--explain"]) == 0
    dumped = LLAMA / "param_to_param_group_map"
    assert json.loads(out.read_text()) == json.loads((dumped / "param_to_param_group_map.json").read_text())
    assert "model.module.output_layer.weight: group 0 (2 dimensions: weight decay)" in capsys.readouterr().err
    assert run(["build-param-group-map", str(dumped)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    native = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")
    assert run(["build-param-group-map", str(native)]) == 3


def test_a_command_named_for_a_source_takes_no_other(tmp_path, capsys):
    native = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")
    for command, source in (
        ("convert-torch-dist-to-fsdp-dtensor", native),
        ("convert-fsdp-dtensor-to-torch-dist", LLAMA),
    ):
        assert run([command, str(source), str(tmp_path / "out"), "--quiet"]) == 3
        assert "this command takes" in capsys.readouterr().err
    assert convert(native, tmp_path / "out", "--dp-shard", "2") == 0  # laid out anew


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--to", "torch_dist", "--swiglu"], "--swiglu"),
        (["--to", "hf", "--dp-shard", "2"], "--dp-shard"),
        (["--extra-state", "none"], "--extra-state"),
    ],
)
def test_a_flag_without_effect_is_refused(tmp_path, capsys, words, option):
    assert convert(LLAMA, tmp_path / "out", *words) == 2
    error = capsys.readouterr().err
    assert f"{option}: no meaning for a conversion to" in error
    assert ("it has one with --to torch_dist" in error) == (option == "--extra-state")


NATIVE = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")


def test_a_size_that_no_job_of_the_model_has_is_refused(tmp_path, capsys):
    """`linear_qkv` of 4 heads has rows enough for 8 ranks; the job stops before it loads."""
    for words in (("--gpus", 64, "--tp", 8), ("--tp", 8), ("--world-size", 8, "--tp", 8)):
        assert convert(NATIVE, tmp_path / "out", *words) == 2
        assert "4 attention heads are not a multiple of tensor parallel size 8" in capsys.readouterr().err
    assert convert(NATIVE, tmp_path / "out", "--gpus", 64, "--tp", 4) == 0  # 2 groups on 4 ranks
