"""Every real checkpoint is ready for the job of its own arguments, and the command printed starts that job.

Also the command of the 3D-parallel job that loads a `torch_dist` checkpoint as it is.
"""

import shlex
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.launch import _LEFT_OUT, Launch, _decided, launch, said_by, unsaid
from ckpt_tools.commands.check.preflight import preflight
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.formats.locate.detect import TRACKER
from ckpt_tools.verify.readiness.facts import Facts
from ckpt_tools.verify.readiness.job import VERSIONS, Job, flags_of, parse_command
from tests.commands.launched import launch_of
from tests.conftest import DATA, NATIVE, all_checkpoints, fixture_dir
from tests.damage import copy_of, drop_key, metadata_of
from tests.folders import root_of
from tests.megatron.huggingface.by_rules import directory, imported
from tests.megatron.huggingface.released import DENSE, POPULAR


@cache
def _cases() -> dict[str, Path]:
    """Checkpoints by name: `torch_dist` of every writer, and native ones."""
    return {
        name: path / "checkpoint" if (path / "checkpoint").is_dir() else path
        for name, path in all_checkpoints().items()
    }


def _is_native(name: str) -> bool:
    return "native" in name or name.startswith(("n_", "v16n_"))


def _target(name: str) -> str | None:
    """The program to convert for and to run: core 0.16 where that wrote it."""
    return "core-0.16" if name.startswith(("v16_", "v016", "core016")) else None


def _converted(name: str, folder: Path, *more: str) -> Path:
    """A conversion for the job of the checkpoint's own arguments."""
    source = _cases()[name]
    with open_checkpoint(str(source)) as opened:
        if opened.location.kind != "torch_dist":
            pytest.skip(f"{name} is of kind {opened.location.kind}")
        tp = opened.common.arg("tensor_model_parallel_size") or 1
        iteration = opened.common.iteration
    given = source.parent / "convert.args"
    options = given.read_text().split() if given.exists() else []
    if "gdn" in name and "--tp" not in options:
        options += ["--tp", str(tp)]  # packed by rank: no default is safe
    options += ["--target", target] if (target := _target(name)) else []
    out = folder / "out"
    is_run = (source / TRACKER).exists()
    folder = out if is_run else out / f"iter_{iteration:07d}"
    assert run(["convert", str(source), str(folder), "-q", *options, *more]) == 0
    if not is_run:  # its folder tells no iteration
        (out / TRACKER).write_text(str(iteration))
    return out


@pytest.mark.parametrize("name", [name for name in _cases() if not _is_native(name) and name != "tf2_dcp"])
def test_a_conversion_is_ready_for_the_job_of_its_arguments(name, tmp_path):
    _assert_the_command_says_the_arguments(str(_converted(name, tmp_path)), _target(name))


@pytest.mark.parametrize("name", [name for name in _cases() if _is_native(name)])
def test_a_native_checkpoint_is_ready_for_the_job_that_wrote_it(name):
    target = "core-0.16" if name.startswith("v16n") else None
    _assert_the_command_says_the_arguments(str(_cases()[name]), target)


def _assert_the_command_says_the_arguments(path: str, target: str | None) -> None:
    """And it is ready: every argument that goes over is a setting of the job that the command starts."""
    found = preflight(path, target=target)
    assert [f for f in found.report.findings if f.severity == "error"] == []
    assert found.launch is not None
    words = shlex.split(found.launch.command.replace("\\\n", " "))
    assert preflight(path, words, target=target).report.is_valid
    if found.program == "bridge":
        return
    job = parse_command(words, found.program)
    assert (job.unknown, job.refused, job.script) == ((), None, job.script)
    with open_checkpoint(path) as opened:
        args = opened.common.args
    changed = _decided(Facts("fsdp_dtensor", Job(program=found.program), args)).keys() | {
        "swiglu", "moe_grouped_gemm", "untie_embeddings_and_output_weights", "transformer_impl", "finetune",
        "no_load_rng", "expert_tensor_parallel_size", "sequence_parallel", "mtp_num_layers", "seq_length",
        "micro_batch_size", "max_position_embeddings",
    }  # fmt: skip
    for flag in flags_of(found.program):
        value = said_by(args.get(flag.name), flag)
        if value is None or _LEFT_OUT.fullmatch(flag.name) or flag.name in changed:
            continue
        if not args.get("use_megatron_fsdp") and "fsdp" in flag.name:
            continue
        assert job.settings[flag.name] == value, flag.name


def test_megatron_lm_does_not_load_what_bridge_trained(tmp_path):
    path = str(_converted("bridge_dense_fr_tp2_dp2", tmp_path))
    assert preflight(path).program == "bridge"
    assert [f.check for f in preflight(path, target="main").report.findings] == [
        "stored-arguments",
        "schedule",
    ]


@pytest.mark.parametrize("name", ["te_gdn_tp2_fr", "main_gdn_fr_tp2"])
def test_packed_projections_are_for_one_tensor_parallel_size(name, tmp_path):
    path = str(_converted(name, tmp_path, "--tp", "2", "--target", "main"))
    words = list(launch_of(preflight(path)).words)
    assert words[words.index("--tensor-model-parallel-size") + 1] == "2"
    other = [*words, "--tensor-model-parallel-size", "1", "--make-vocab-size-divisible-by", "16",
             "--padded-vocab-size", words[words.index("--padded-vocab-size") + 1] if "--padded-vocab-size" in words
             else str(_rows(path))]  # fmt: skip
    (finding,) = preflight(path, other).report.findings
    assert finding.check == "packed-projections"
    assert "are arranged for tensor parallel size 2, the job's is 1" in finding.where


def _rows(path: str) -> int:
    with open_checkpoint(path) as opened:
        return opened.catalog.tensors["model.module.embedding.word_embeddings.weight"].shape[0]


@pytest.mark.parametrize(
    ("written", "runs"), [("core-0.16", "core-0.19"), ("core-0.19", "core-0.16"), ("core-0.17", "main")]
)
def test_names_of_another_program(written, runs, tmp_path):
    """Multi-token prediction is spelled in two ways."""
    path = str(_converted("te_mla_ep2_fr", tmp_path, "--target", written))
    assert preflight(path, target=written).report.is_valid
    (finding,) = [f for f in preflight(path, target=runs).report.findings if f.check == "names"]
    assert "multi-token prediction is stored as" in finding.where


def test_the_record_of_a_conversion_says_program_and_size(tmp_path):
    """Without rng states only the record tells for how many ranks rows are packed: the arguments are the source's."""
    path = str(_converted("te_gdn_tp2_fr", tmp_path, "--tp", "1", "--target", "core-0.17", "--weights-only"))
    found = preflight(path)
    assert found.program == "core-0.17"
    assert found.launch is not None
    words = found.launch.words
    assert words[words.index("--tensor-model-parallel-size") + 1] == "1"
    other = preflight(path, [*words, "--tensor-model-parallel-size", "2"]).report
    assert "packed-projections" in {finding.check for finding in other.findings}


@pytest.mark.parametrize("absent", [(), ("0.0",), ("1.0",), ("0.0", "1.0")])
def test_rng_states_of_every_stage_are_there_or_none_is_loaded(absent, tmp_path):
    root = copy_of("te_gpt_pp2_fr", tmp_path)
    with metadata_of(root) as metadata:
        for rank in absent:
            drop_key(metadata, f"rng_state/shard_{rank}_2.1")
    start = preflight(str(root)).as_is
    assert start is not None and ("--no-load-rng" in start.words) == bool(absent)


LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "swiglu", "normalization", "position_embedding_type", "untie_embeddings_and_output_weights", "num_experts",
)  # fmt: skip


def run_of(name: str, folder: Path) -> Path:
    """The run's root of a real checkpoint, made in `folder` where it lies in a folder of another name."""
    found = root_of(name)
    if (found / TRACKER).exists():
        return found
    shutil.copytree(found, folder / "iter_0000002")
    (folder / TRACKER).write_text("2")
    return folder


def as_is(checkpoint: Path, program: str = "main") -> tuple[Launch, Job]:
    """The command, and what the parser of its program takes it for, whole."""
    found = preflight(str(checkpoint), target=program).as_is
    assert found is not None
    job = parse_command(found.filled_in, program)
    assert (job.refused, job.unknown) == (None, ())
    return found, job


def args_of(checkpoint: Path) -> dict[str, Any]:
    with open_checkpoint(str(checkpoint)) as opened:
        return dict(opened.common.args)


@pytest.mark.parametrize("program", VERSIONS)
@pytest.mark.parametrize("name", ["core019_llama_tp2_fully_reshardable", "core019_moe_ep2_fully_reshardable",
                                  "main_dense_dpr_pp2_vpp2_tied", "v016_dense_nodistopt_tp2",
                                  "core019_llama_tp2_dp_reshardable"])  # fmt: skip
def test_it_is_the_job_of_the_run(name, program, tmp_path):
    checkpoint = run_of(name, tmp_path)
    _, job = as_is(checkpoint, program)
    args = args_of(checkpoint)
    for setting in MODEL:
        assert job.get(setting) == args.get(setting), setting
    assert (job.get("ckpt_format"), job.has("use_megatron_fsdp")) == ("torch_dist", False)
    for axis in ("tensor_model", "pipeline_model", "expert_model", "context"):
        assert job.get(f"{axis}_parallel_size") == args[f"{axis}_parallel_size"], axis
    assert job.has("use_distributed_optimizer") == bool(args["use_distributed_optimizer"])
    assert not job.has("finetune")
    ranks = args["tensor_model_parallel_size"] * args["pipeline_model_parallel_size"]
    assert job.world is not None and job.world % ranks == 0


def test_what_no_flag_says_stands_in_comments(tmp_path):
    pipeline, _ = as_is(run_of("main_dense_dpr_pp2_vpp2_tied", tmp_path))
    lines = "\n".join(pipeline.environment)
    assert "dp_reshardable) loads at the TP, PP and EP of the run alone" in lines
    assert "num_layers_per_virtual_pipeline_stage" in lines or "virtual_pipeline" in lines
    whole, _ = as_is(LLAMA)
    assert any("it loads at any TP, PP and EP" in line for line in whole.environment)


def test_what_was_converted_from_megatron_fsdp_is_launched_without_it(tmp_path):
    assert run(["convert", str(fixture_dir(NATIVE)), str(tmp_path / "out"), "--to", "torch_dist", "-q"]) == 0
    _, job = as_is(tmp_path / "out")
    assert not job.has("use_megatron_fsdp")
    assert job.get("data_parallel_sharding_strategy") == parse_command(["x.py"], "main").get(
        "data_parallel_sharding_strategy"
    )
    assert job.has("use_distributed_optimizer")


def test_what_was_imported_is_launched_too(tmp_path, capsys):
    """Weights alone are for finetuning."""
    assert as_is(run_of("v016_dense_weightsonly_tp2", tmp_path / "run"))[1].has("finetune")
    assert run(["export-hf", str(LLAMA), str(tmp_path / "hf"), "-q"]) == 0
    assert run(["import-hf", str(tmp_path / "hf"), str(tmp_path / "out"), "-q"]) == 0
    _, job = as_is(tmp_path / "out")
    assert (job.get("num_layers"), job.has("finetune")) == (2, True)
    capsys.readouterr()
    assert run(["preflight", str(tmp_path / "out")]) == 1
    assert "a 3D-parallel job loads it without conversion" in capsys.readouterr().out


def test_there_is_none_where_a_job_is_described_or_megatron_fsdp_loads_it():
    assert preflight(str(LLAMA), ["--use-megatron-fsdp"]).as_is is None
    assert preflight(str(fixture_dir(NATIVE))).as_is is None


def _stored(job: Job) -> dict[str, Any]:
    """What `validate_args` makes of the settings that a job is given, and stores."""
    found = {name: list(v) if isinstance(v, tuple) else v for name, v in job.settings.items()}
    if found["use_rotary_position_embeddings"]:
        found["position_embedding_type"] = "rope"
    if found["add_bias_linear"]:
        found["add_qkv_bias"] = True
    else:
        found["bias_gelu_fusion"] = False
    return found


@pytest.mark.parametrize("program", ["core-0.16", "main"])
@pytest.mark.parametrize("name", [*POPULAR, *DENSE])
def test_an_imported_model_has_the_arguments_that_its_job_stores(name, program):
    """All of them, as the parser of the program gives them: a strict start compares some, the run uses the others."""
    config = {**POPULAR, **DENSE}[name]
    args = imported(config, directory(config))[0].args
    facts = Facts("torch_dist", Job(program=program), args)
    if unsaid(facts):
        return
    stored = _stored(parse_command(launch(facts, "/run").filled_in, program))
    made = {n: list(v) if isinstance(v, tuple) else v for n, v in args.items() if n in stored}
    made = {n: v for n, v in made.items() if n not in ("padded_vocab_size", "params_dtype")}
    assert {n: (v, stored[n]) for n, v in made.items() if v != stored[n]} == {}
