"""The convert commands as users type them: outcomes, exit codes, messages, and what is left on disk."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from ckpt_tools.cli.app import run
from tests.conftest import DATA, fixture_dir
from tests.damage import payload_of

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
ITERATION = "iter_0000002"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A writable copy of a run's root."""
    return Path(shutil.copytree(LLAMA, tmp_path / "source"))


def convert(*words: object) -> int:
    return run(["convert", *map(str, words)])


def test_a_root_becomes_a_root_ready_for_load(tmp_path):
    assert convert(LLAMA, tmp_path / "out", "--dry-run") == 0
    assert os.listdir(tmp_path) == []
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


@pytest.mark.parametrize(
    ("words", "load"),
    [
        (["convert", LLAMA, "out"], "(--load out)"),
        (["convert", LLAMA, "out/iter_0000002"], "(--load out --ckpt-step 2)"),
        (["strip", LLAMA, "out/iter_0000002"], "(--load out --ckpt-step 2)"),
        (
            ["strip", LLAMA, "out/release"],
            "(--load out once release is written into out/latest_checkpointed_iter",
        ),
        (["convert", LLAMA, "later"], "(--load later --ckpt-step 2)"),
        (["convert", LLAMA, "."], " iter_0000002 (--load .)"),
        (["convert", LLAMA, "iter_0000005"], "(--load . --ckpt-step 5)"),
        (["convert", LLAMA, "iter_5"], "(jobs find it by --load once it is named iter_0000005)"),
        (["strip", LLAMA, "a b/iter_0000000"], "(--load 'a b' once 0 is written into a b/latest_"),
        (["export-hf", LLAMA, "out", "--iteration", "all"], "out/iter_0000002: "),
    ],
)
def test_megatron_finds_the_output_as_the_report_says(words, load, tmp_path, monkeypatch, capsys):
    """By the tracker of the root or by `--ckpt-step`, which need no tracker."""
    monkeypatch.chdir(tmp_path)
    Path("later/iter_0000009").mkdir(parents=True)
    Path("later/latest_checkpointed_iteration.txt").write_text("9")
    assert run([str(word) for word in words]) == 0
    assert load in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("verb", ["convert", "strip", "copy"])
def test_a_dry_run_foretells_what_becomes_of_what_is_there(verb, tmp_path, capsys):
    later, taken = tmp_path / "iter_0000009", tmp_path / "iter_0000002"
    for folder in (later, taken):
        folder.mkdir()
        (folder / ".metadata").write_bytes(b"x")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    said, lines = [], []
    for more in (["--dry-run", "--json"], ["--dry-run"], ["--json"]):
        assert run([verb, str(LLAMA), str(tmp_path), "--overwrite", *more]) == 0
        out = capsys.readouterr().out
        if "--json" in more:
            found = json.loads(out)
            found = found["copied"][0] if verb == "copy" else found
            said.append([found["replaced"], found["tracker"]])
        else:
            lines = out.splitlines()
    assert said[0] == said[1]
    assert "stays at 9; for a job to load 2" in said[0][1]
    assert {"  replaces  " + said[0][0], "  tracker   " + said[0][1]} <= set(lines)


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
    assert "masters round to the stored weights (all)" in text
    assert len(text.splitlines()) <= 8
    assert run(["convert", str(LLAMA), str(tmp_path / "again"), "--verbose", "--verify"]) == 0
    text = capsys.readouterr().out
    assert "Transformer Engine extra state" in text and "what it wrote was read back" in text
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


TRACKER = "latest_checkpointed_iteration.txt"


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert run(["plan", str(LLAMA), "--json", *map(str, words)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "topology"),
    [
        ("--gpus 8 --tp 2", {"dp_shard": 4, "tp": 2, "etp": 2}),
        ("--gpus 8 --tp 2 --world-size 8", {"dp_shard": 4, "tp": 2, "etp": 2}),
        ("--gpus 8 --dp-outer 2 --tp 2", {"dp_shard": 2, "dp_outer": 2, "tp": 2, "etp": 2}),
        ("--gpus 8 --cp 2", {"dp_shard": 4, "cp": 2}),
        ("--gpus 4 --tp 2 --etp 1 --ep 2", {"dp_shard": 2, "tp": 2, "ep": 2}),
        ("--gpus 4 --dp-shard 2 --tp 2 --pp 1", {"dp_shard": 2, "tp": 2, "etp": 2}),
        ("--dp-shard 4 --tp 2", {"dp_shard": 4, "tp": 2, "etp": 2}),
        ("--gpus 2 --layout fsdp2", {"dp_shard": 2}),
        ("--gpus 2 --layout even", {"dp_shard": 2}),
    ],
)
def test_plan_and_convert_read_the_sizes_alike(words, topology, tmp_path, capsys):
    found = planned(capsys, *words.split())
    ones = dict.fromkeys(("dp_shard", "dp_outer", "tp", "cp", "ep", "etp", "pp"), 1)
    given = {k: v for k, v in found["topology"].items() if k in ones}
    assert given == ones | topology
    assert convert(LLAMA, tmp_path / "out", *words.split(), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["digest"] == found["digest"]
    assert report["job"] == found["job"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 8 --tp 3", "world size 8 is not a multiple of dp_outer 1 x cp 1 x tp 3"),
        ("--gpus 8 --dp-shard 3", "world size 8 is not"),
        ("--gpus 8 --dp-shard 2 --dp-outer 2 --tp 4", "= 16"),
        ("--gpus 8 --world-size 4", "--gpus 8 contradicts --world-size 4"),
        ("--gpus 0", "world size 0: a job has at least one rank"),
        ("--gpus -2 --tp 2", "world size -2: a job has at least one rank"),
        ("--gpus 4 --tp 0", "tp"),
        ("--gpus 4 --tp 2 --etp 0", "--etp 0: at least one"),
        ("--gpus 4 --pp 2", "Megatron-FSDP does not run with pipeline parallelism"),
        ("--dp-shard 2 --pp 2", "Megatron-FSDP does not run with pipeline parallelism"),
        ("--gpus 4 --cp 3", "cp 3"),
        ("--gpus 2 --ep 4", "ep 4"),
        ("--pp 2", "give --gpus or --dp-shard"),
        ("--cp 2 --world-size 4", "give --gpus or --dp-shard"),
        ("--etp 2", "give --gpus or --dp-shard"),
        ("--strategy no_shard", "give --gpus or --dp-shard"),
        ("--outer-strategy optim", "give --gpus or --dp-shard"),
        ("--layout mfsdp-v1", "give --gpus or --dp-shard"),
        ("--layout mfsdp-v2 --gpus 4 --tp 2", "mfsdp-v2 has no tp axis"),
        ("--tp 0", "--tp 0"),
        ("--tp 8", "4 attention heads are not a multiple of tensor parallel size 8"),
        ("--world-size 0", "--world-size 0"),
        ("--world-size 7 --dp-shard 2 --tp 2", "tp 2 x dp_shard 2 = 4"),
        ("--world-size 7 --layout fsdp2 --tp 2", "world size 7 is not a multiple of"),
        ("--dp-shard 3 --ep 2", "ep 2 x etp 1 = 2 does not divide dp_shard 3"),
        ("--dp-shard 2 --layout fsdp2 --strategy optim", "fsdp2 shards parameters always"),
        ("--dp-shard 2 --outer-strategy optim --strategy 0", "outer_strategy optim"),
    ],
)
def test_contradictions_are_errors_in_both(words, message, tmp_path, capsys):
    errors = []
    for command in (
        ["plan", LLAMA],
        ["convert", LLAMA, tmp_path / "out", "--dry-run"],
        ["convert", LLAMA, tmp_path / "out"],
    ):
        assert run([*map(str, command), *words.split()]) == 2, command
        errors.append(capsys.readouterr().err)
    assert message in errors[0]
    assert len(set(errors)) == 1
    assert not (tmp_path / "out").exists()


# What stands in the way of a conversion, made in the folder that gets the output.
def output_is_taken(folder: Path) -> None:
    (folder / "out" / ITERATION).mkdir(parents=True)
    (folder / "out" / ITERATION / "mine").write_text("x")


def output_is_a_file(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / ITERATION).write_text("x")


def parent_is_a_file(folder: Path) -> None:
    (folder / "out").write_text("x")


def parent_is_a_dangling_link(folder: Path) -> None:
    (folder / "out").symlink_to(folder / "nowhere")


def parent_is_a_loop(folder: Path) -> None:
    (folder / "out").symlink_to(folder / "out")


def tracker_is_a_folder(folder: Path) -> None:
    (folder / "out" / "latest_checkpointed_iteration.txt").mkdir(parents=True)


def work_was_stopped(folder: Path) -> None:
    partial = folder / "out" / f".{ITERATION}.ckpt_tools-partial"
    (partial / "journal").mkdir(parents=True)
    (partial / "lock").write_text("process 1 on host")
    (partial / "journal" / "plan.json").write_text('{"digest": "another", "source": []}')


def nothing(folder: Path) -> None:
    pass


def somebody_elses_partial(folder: Path) -> None:
    partial = folder / "out" / f".{ITERATION}.ckpt_tools-partial"
    partial.mkdir(parents=True)
    (partial / "thesis.tex").write_text("x")


def partial_is_a_link(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "elsewhere").mkdir()
    (folder / "out" / f".{ITERATION}.ckpt_tools-partial").symlink_to(folder / "elsewhere")


def lock_is_a_link(folder: Path) -> None:
    partial = folder / "out" / f".{ITERATION}.ckpt_tools-partial"
    partial.mkdir(parents=True)
    (folder / "mine").write_text("x")
    (partial / "lock").symlink_to(folder / "mine")


def replacement_was_stopped(folder: Path) -> None:
    partial = folder / "out" / f".{ITERATION}.ckpt_tools-partial"
    (partial / "replaced").mkdir(parents=True)
    (partial / "replaced" / "mine").write_text("x")
    (partial / "lock").write_text("process 1 on host")


@pytest.mark.parametrize(
    ("obstacle", "words", "code", "message"),
    [
        (somebody_elses_partial, "", 2, "which this tool did not put there"),
        (somebody_elses_partial, "--overwrite", 2, "which this tool did not put there"),
        (partial_is_a_link, "", 2, "it is not a directory"),
        (lock_is_a_link, "--overwrite", 2, "it is not a plain file"),
        (replacement_was_stopped, "", 2, "is not empty"),
        (output_is_taken, "", 2, "is not empty"),
        (output_is_a_file, "", 2, "is not a directory"),
        (output_is_a_file, "--overwrite", 2, "is not a directory"),
        (parent_is_a_file, "", 2, "a file or a broken link with that name exists"),
        (parent_is_a_dangling_link, "", 2, "with that name exists"),
        (parent_is_a_loop, "", 2, "with that name exists"),
        (tracker_is_a_folder, "", 2, "where the tracker file goes"),
        (tracker_is_a_folder, "--resume", 2, "where the tracker file goes"),
        (work_was_stopped, "", 2, "holds a conversion that was stopped"),
        (work_was_stopped, "--resume", 2, "was started with another plan"),
        (nothing, "--max-memory 1kiB", 2, "not enough for 2 threads"),
        (nothing, "--vocab-size-padded 200", 5, "are not zeros"),
        (nothing, "--no-swiglu", 5, "--no-swiglu was given"),
        (nothing, "--tp 3 --gpus 3", 2, "not a multiple of tensor parallel size 3"),
    ],
)
def test_a_dry_run_fails_where_the_run_would(obstacle, words, code, message, tmp_path, capsys):
    obstacle(tmp_path)
    before = tree(tmp_path)
    told = []
    for dry in (["--dry-run"], []):
        assert convert(LLAMA, tmp_path / "out", *words.split(), *dry) == code, dry
        told.append(capsys.readouterr().err)
        assert tree(tmp_path) == before or not dry
    assert message in told[0]
    assert told[0] == told[1]


def test_what_has_the_outputs_name_one_folder_up_is_not_in_its_way(tmp_path):
    (tmp_path / ITERATION).write_text("x")
    for dry in (["--dry-run"], []):
        assert convert(LLAMA, tmp_path / "new", *dry) == 0


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("n" * 250, 7, "File name too long"),
        (f"{'n' * 256}/out", 7, "File name too long"),
        ("http://127.0.0.1:1/out", 2, "on web servers"),
        ("memory:///", 2, "does not name a folder"),
        ("nosuchscheme://place/out", 2, "Protocol not known"),
    ],
)
def test_a_dry_run_refuses_the_places_that_the_run_would(name, code, message, tmp_path, capsys):
    output = name if "://" in name else str(tmp_path / name)
    for dry in (["--dry-run"], []):
        assert run(["export-hf", str(LLAMA), output, "-q", *dry]) == code, dry
        assert message in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


def tree(folder: Path) -> dict[str, object]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else p.lstat().st_mtime_ns
        for p in folder.rglob("*")
    }


def wrong_master(root: Path) -> None:
    file, at, payload = payload_of(root, "optimizer.state.param.decoder.final_layernorm.weight", (0,))
    data = bytearray(file.read_bytes())
    data[at : at + len(payload)] = bytes(len(payload))
    file.write_bytes(data)


def short_file(root: Path) -> None:
    file = root / ITERATION / "__1_0.distcp"
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "words", "code"),
    [
        (wrong_master, "", 4),
        (wrong_master, "--check-source none", 6),
        (wrong_master, "--check-source none --check-masters all", 6),
        (short_file, "", 4),
        (short_file, "--check-masters none --gpus 3", 4),
    ],
)
def test_a_dry_run_looks_at_the_source(damage, words, code, tmp_path, capsys):
    source = Path(shutil.copytree(LLAMA, tmp_path / "source"))
    damage(source)
    for dry in (["--dry-run"], []):
        assert convert(source, tmp_path / "out", *words.split(), *dry) == code, dry


def test_a_dry_run_sees_another_converter(tmp_path, capsys):
    partial = tmp_path / f".{ITERATION}.ckpt_tools-partial"
    partial.mkdir()
    with open(partial / "lock", "w+") as lock:
        lock.write("process 1 on elsewhere")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        for dry in (["--dry-run"], []):
            assert convert(LLAMA / ITERATION, tmp_path / ITERATION, *dry) == 2
            assert "is being written by another converter (process 1 on elsewhere)" in capsys.readouterr().err


def test_a_dry_run_is_refused_where_nothing_may_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root
    assert convert(LLAMA, tmp_path / "out", "--dry-run") == 7
    assert "Permission denied" in capsys.readouterr().err


def run_of(folder: Path, numbers: tuple[int, ...], latest: int) -> Path:
    for number in numbers:
        shutil.copytree(LLAMA / ITERATION, folder / f"iter_{number:07d}")
    (folder / TRACKER).write_text(str(latest))
    return folder


def cut(root: Path, number: int) -> None:
    (root / f"iter_{number:07d}" / ".metadata").write_bytes(b"")


def converted_iterations(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_all_iterations_go_on_past_broken_ones(tmp_path, capsys):
    source = run_of(tmp_path / "in", (2, 4, 6, 8), 8)
    cut(source, 4)
    os.truncate(source / "iter_0000006" / "__0_0.distcp", 1000)
    assert convert(source, tmp_path / "out", "--iteration", "all", "--json") == 4
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert [r["iteration"] for r in report["iterations"]] == [2, 8]
    assert [(f["iteration"], f["exit_code"]) for f in report["failed"]] == [(4, 4), (6, 4)]
    assert report["already_there"] == []
    assert [line.split(":")[1] for line in told.err.splitlines() if line.startswith("error")] == [
        " iteration 4",
        " iteration 6",
    ]
    assert converted_iterations(tmp_path / "out") == ["iter_0000002", "iter_0000008", TRACKER]
    assert (tmp_path / "out" / TRACKER).read_text() == "8"


@pytest.mark.parametrize("verb", ["convert", "copy"])
def test_the_newest_iteration_may_still_be_written(verb, tmp_path, capsys):
    source, out = run_of(tmp_path / "in", (2, 4, 6), 4), tmp_path / "out"
    newest = source / "iter_0000006"

    def ends(name: str) -> tuple[int, dict[str, Any]]:
        code = run([verb, str(source), str(tmp_path / name), "--iteration", "all", "--json"])
        return code, json.loads(capsys.readouterr().out)

    (newest / ".metadata").unlink()
    assert run([verb, str(source), str(out), "--iteration", "all"]) == 0
    assert "note: skipping iteration 6: it is still being written" in capsys.readouterr().err
    assert converted_iterations(out) == ["iter_0000002", "iter_0000004", TRACKER]
    assert (out / TRACKER).read_text() == "4"
    shutil.rmtree(newest)
    newest.mkdir()
    code, report = ends("empty")
    assert (code, report["not_finished"], report["already_there"], report["failed"]) == (0, [6], [], [])
    (newest / "common.pt").write_bytes(b"begun")
    assert ends("begun")[0] == 0
    (newest / "common.pt").rename(newest / "mine")
    assert ends("another")[0] == 3, "a folder of something else"
    shutil.rmtree(newest)
    (source / "iter_0000002" / ".metadata").unlink()
    assert ends("older")[0] == 3, "it is not the newest"


@pytest.mark.parametrize("verb", ["convert", "copy"])
def test_a_newest_iteration_that_the_tracker_names_is_whole_or_damaged(verb, tmp_path, capsys):
    source = run_of(tmp_path / "in", (2, 4), 4)
    (source / "iter_0000004" / ".metadata").unlink()
    assert run([verb, str(source), str(tmp_path / "out"), "--iteration", "all"]) == 3
    assert "error: iteration 4" in capsys.readouterr().err


def test_what_is_converted_already_stays_and_the_tracker_with_it(tmp_path, capsys):
    source = run_of(tmp_path / "in", (2, 4, 6), 4)
    out = tmp_path / "out"
    assert convert(source, out) == 0
    before = tree(out / "iter_0000004")
    capsys.readouterr()
    assert convert(source, out, "--iteration", "all", "--dry-run") == 0
    assert converted_iterations(out) == ["iter_0000004", TRACKER]
    capsys.readouterr()
    assert convert(source, out, "--iteration", "all") == 0
    assert "iteration 4: exists already, skipped" in capsys.readouterr().out
    assert tree(out / "iter_0000004") == before
    assert (out / TRACKER).read_text() == "4"
    assert convert(source, out, "--iteration", "all", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 2, "iterations": [], "already_there": [2, 6, 4], "not_finished": [], "failed": [],
    }  # fmt: skip
    inode = (out / "iter_0000004").stat().st_ino
    assert convert(source, out, "--iteration", "all", "--overwrite") == 0
    assert (out / "iter_0000004").stat().st_ino != inode


def test_plain_state_dicts_that_are_laid_out_already_are_passed_over_too(tmp_path, capsys):
    """Without --to they stay what they are, and are looked for as that."""
    source = tmp_path / "in"
    for number in (2, 4):
        dcp.save(
            {"model": {"w": torch.ones(8, 3)}}, checkpoint_id=source / f"iter_{number:07d}", no_dist=True
        )
    (source / TRACKER).write_text("4")
    words = [source, tmp_path / "out", "--iteration", "all", "--world-size", "2", "--json"]
    for done, there in (([2, 4], []), ([], [2, 4])):
        assert convert(*words) == 0
        report = json.loads(capsys.readouterr().out)
        assert [r["iteration"] for r in report["iterations"]] == done
        assert report["already_there"] == there


def test_a_foreign_folder_in_the_output_is_a_failure(tmp_path, capsys):
    source = run_of(tmp_path / "in", (2, 4), 4)
    (tmp_path / "out" / ITERATION).mkdir(parents=True)
    (tmp_path / "out" / ITERATION / "mine").write_text("x")
    assert convert(source, tmp_path / "out", "--iteration", "all") == 2
    assert "error: iteration 2:" in capsys.readouterr().err
    assert (tmp_path / "out" / TRACKER).read_text() == "4"
    assert (tmp_path / "out" / ITERATION / "mine").exists()


@pytest.mark.parametrize("spoil", [lambda root: cut(root, 4), lambda root: (root / TRACKER).write_text("?")])
def test_a_damaged_latest_or_tracker_does_not_keep_the_others(spoil, tmp_path, capsys):
    source = run_of(tmp_path / "in", (2, 4), 4)
    spoil(source)
    damaged = (source / TRACKER).read_text() == "4"
    assert convert(source, tmp_path / "out", "--iteration", "all") == (4 if damaged else 0)
    assert (tmp_path / "out" / TRACKER).read_text() == ("2" if damaged else "4")


def test_all_needs_a_root(tmp_path, capsys):
    assert convert(LLAMA / ITERATION, tmp_path / "out", "--iteration", "all") == 2
    assert "not a run's root" in capsys.readouterr().err
    assert convert(tmp_path, tmp_path / "out", "--iteration", "all") in (2, 3)
    assert convert(LLAMA, tmp_path / "iter_0000009", "--iteration", "all") == 2
    assert not (tmp_path / "out").exists()


def test_all_sizes_that_are_given_are_named(tmp_path, capsys):
    """Else each would be told in a run of its own."""
    for words, said in (
        ("--to torch_dist --pp 2 --cp 2 --tp 4 --ep 2", "error: --cp, --pp: no meaning for a conversion to"),
        ("--to torch_dist --pp 2 --tp 4 --ep 2", "leave it out, and --tp, --ep unless a message asks for it"),
        ("--gpus 7 --tp 2 --pp 3", "world size 7 is not a multiple of dp_outer 1 x cp 1 x tp 2 x pp 3 = 6"),
        (
            "--pp 2 --ep 4",
            "error: --ep 4, --pp 2: such options describe a training job, which needs its size",
        ),
        ("--cp 2", "error: --cp 2: such options describe a training job"),
    ):
        assert run(["convert", str(NATIVE), str(tmp_path / "out"), *words.split()]) == 2
        assert said in capsys.readouterr().err
