"""The command of the 3D-parallel job that loads a `torch_dist` checkpoint as it is."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.launch import Launch, launch, unsaid
from ckpt_tools.commands.check.preflight import preflight
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.formats.locate.detect import TRACKER
from ckpt_tools.verify.readiness.facts import Facts
from ckpt_tools.verify.readiness.job import VERSIONS, Job, parse_command
from tests.conftest import DATA, fixture_dir
from tests.folders import root_of
from tests.megatron.huggingface.by_rules import directory, imported
from tests.megatron.huggingface.released import DENSE, POPULAR

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
NATIVE = "core019_llama_tp2_native_fsdp_dtensor"
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
