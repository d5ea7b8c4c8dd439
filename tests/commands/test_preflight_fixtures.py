"""Every real checkpoint is ready for the job of its own arguments, and the command printed starts that job."""

import shlex
from functools import cache
from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.launch import _LEFT_OUT, _decided, said_by
from ckpt_tools.commands.check.preflight import preflight
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.formats.locate.detect import TRACKER
from ckpt_tools.verify.readiness.facts import Facts
from ckpt_tools.verify.readiness.job import Job, flags_of, parse_command
from tests.commands.launched import launch_of
from tests.conftest import all_checkpoints
from tests.damage import copy_of, drop_key, metadata_of


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
