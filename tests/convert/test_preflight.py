"""`preflight`: every rule is broken by one change of a job that is known to run, and by nothing else."""

from __future__ import annotations

import pytest

from ckpt_tools.convert.opened import open_checkpoint
from ckpt_tools.convert.preflight import preflight
from ckpt_tools.convert.to_fsdp_dtensor import ConvertOptions, convert_to_fsdp_dtensor
from ckpt_tools.errors import UsageError
from ckpt_tools.megatron.to_fsdp_dtensor import TargetOptions
from ckpt_tools.verify.job import Job, parse_command, parse_yaml
from ckpt_tools.verify.rules import RULES
from tests.conftest import fixture_dir
from tests.damage import copy_of, drop_key, metadata_of

NATIVE = "core019_llama_tp2_native_fsdp_dtensor"
_COMMAND = """
torchrun --nproc-per-node 2 pretrain_gpt.py
--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer
--no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor --tensor-model-parallel-size 2
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --swiglu --transformer-impl local
--untie-embeddings-and-output-weights --vocab-size 200 --make-vocab-size-divisible-by 16
"""
GOOD = _COMMAND.split()


def broken(words, name=NATIVE, **options):
    """{rule: (severity, what was found)} of a job."""
    report = preflight(str(fixture_dir(name)), words, **options).report
    return {f.check: (f.severity, f.where) for f in report.findings}


def test_a_job_that_trained_breaks_no_rule():
    assert broken(GOOD) == {}


@pytest.mark.parametrize(
    "name", [NATIVE, "core019_gpt3_tp2_native_fsdp_dtensor", "core019_moe_dp1_native_fsdp_dtensor"]
)
def test_the_args_that_wrote_a_native_checkpoint_break_no_rule(name):
    with open_checkpoint(str(fixture_dir(name))) as opened:
        args = {k: v for k, v in opened.common.args.items() if isinstance(v, str | int | float | bool | None)}
    words = []
    for key, value in args.items():
        if value is False:
            words.append(f"--no-{key.replace('_', '-')}")
        elif value is not None:
            words += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    assert broken(words, name) == {}


@pytest.mark.parametrize(
    ("added", "rule", "severity", "found"),
    [
        ("--ckpt-format torch_dist", "ckpt-format", "error", "torch_dist"),
        ("--use-torch-fsdp2", "fsdp-or-fsdp2", "error", "use_torch_fsdp2"),
        ("--pipeline-model-parallel-size 2", "pipeline", "error", "size 2"),
        ("--num-layers-per-virtual-pipeline-stage 1", "pipeline", "error", "virtual stages 1"),
        ("--no-use-distributed-optimizer", "distributed-optimizer", "error", "off"),
        ("--data-parallel-sharding-strategy zero3", "sharding-strategy", "error", "'zero3'"),
        ("--data-parallel-sharding-strategy no_shard", "no-sharding", "warning", "no_shard"),
        ("--outer-dp-sharding-strategy optim_grads", "outer-strategy", "error", "optim_grads"),
        ("--use-tp-pp-dp-mapping", "tp-pp-dp-mapping", "error", "use_tp_pp_dp_mapping"),
        ("--ddp-average-in-collective", "average-in-collective", "error", "ddp_average_in_collective"),
        ("--gradient-accumulation-fusion", "gradient-accumulation-fusion", "warning", "on"),
        ("--reuse-grad-buf-for-mxfp8-param-ag", "mxfp8-buffer", "error", "reuse"),
        ("--cpu-offloading --recompute-granularity full", "cpu-offloading", "error", "recompute_granularity"),
        ("--cpu-offloading --cpu-offloading-num-layers 2", "offloaded-layers", "error", "2 of 2"),
        ("--fsdp-manual-registration", "manual-registration", "warning", "nccl_ub"),
        ("--check-weight-hash-across-dp-replicas-interval 10", "weight-hash", "error", "10"),
        ("--num-layers 4", "architecture", "error", "num_layers: job 4, checkpoint 2"),
        ("--hidden-size 64", "architecture", "error", "hidden_size"),
        ("--vocab-size 300", "vocabulary", "error", "224 rows, the job will ask for 320"),
        ("--make-vocab-size-divisible-by 128", "vocabulary", "error", "256"),
        ("--padded-vocab-size 208", "vocabulary", "error", "208"),
        ("--no-untie-embeddings-and-output-weights", "tied-embeddings", "error", "tied"),
        ("--no-swiglu", "swiglu", "error", "in halves"),
        ("--transformer-impl transformer_engine", "layer-spec", "error", "transformer_engine"),
        ("--mtp-num-layers 1", "mtp", "error", "0 stored"),
        ("--no-strict-fsdp-dtensor-load", "strict-load", "warning", "off"),
    ],
)
def test_one_change_breaks_one_rule(added, rule, severity, found):
    ((broken_rule, (how_bad, what)),) = broken([*GOOD, *added.split()]).items()
    assert (broken_rule, how_bad) == (rule, severity)
    assert found in what


@pytest.mark.parametrize(
    ("left_out", "rules"),
    [
        ("--use-megatron-fsdp", {"megatron-fsdp"}),
        ("--use-distributed-optimizer", {"distributed-optimizer"}),
        ("--no-gradient-accumulation-fusion", {"gradient-accumulation-fusion"}),
    ],
)
def test_a_flag_that_is_left_out(left_out, rules):
    assert broken([word for word in GOOD if word != left_out]).keys() == rules


def test_the_old_spelling_and_the_meta_device():
    words = [word.replace("--use-megatron-fsdp", "--use-custom-fsdp") for word in GOOD]
    assert broken(words).keys() == {"old-spelling"}
    words = [word.replace("--use-megatron-fsdp", "--init-model-with-meta-device") for word in GOOD]
    assert broken(words).keys() == {"megatron-fsdp", "meta-device"}


def test_version_2_loads_weights_only():
    words = [word for word in GOOD if word != "--use-distributed-optimizer"]
    found = broken([*words, "--megatron-fsdp-version", "2", "--fp8", "hybrid"])
    assert "tensor_model_parallel_size is 2, fp8 is on, the optimizer's state" in found["version-2"][1]
    assert broken([*GOOD, "--megatron-fsdp-version", "2"]).keys() == {"version-2", "distributed-optimizer"}


def test_the_environment_stands_before_the_program():
    assert broken(["CUDA_DEVICE_MAX_CONNECTIONS=1", *GOOD]).keys() == {"max-connections"}
    assert broken(["CUDA_DEVICE_MAX_CONNECTIONS=8", *GOOD]) == {}
    segments = "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:32,expandable_segments:True"
    assert broken([segments, *GOOD, "--nccl-ub"]).keys() == {"user-buffers"}


def test_more_ranks_than_rng_states():
    words = [*GOOD, "--tensor-model-parallel-size", "4", "--make-vocab-size-divisible-by", "8"]
    assert broken(words) == {"rng-entries": ("error", "no rng state for tensor parallel ranks [2, 3] of 4")}
    assert broken([*words, "--no-load-rng"]) == {}
    assert broken([*words, "--finetune"]) == {}


def test_a_warm_start_has_no_optimizer(tmp_path):
    source = str(fixture_dir("core019_llama_tp2_fully_reshardable"))
    options = ConvertOptions(target=TargetOptions(weights_only=True))
    convert_to_fsdp_dtensor(source, str(tmp_path / "out"), options)
    report = preflight(str(tmp_path / "out"), GOOD)
    assert {f.check for f in report.report.findings if f.severity == "error"} == {
        "optimizer-entries",
        "rng-entries",
    }
    assert "--finetune" in report.flags
    assert preflight(str(tmp_path / "out"), [*GOOD, "--finetune"]).report.is_valid


def test_experts_named_for_another_job():
    name = "core019_moe_dp1_native_fsdp_dtensor"
    assert broken([*GOOD, "--tensor-model-parallel-size", "1"], name) == {}
    found = broken([*GOOD, "--tensor-model-parallel-size", "1", "--moe-grouped-gemm"], name)
    assert found == {"experts": ("error", "moe_grouped_gemm is on, experts are stored as local_experts.N")}


def test_a_torch_dist_checkpoint_is_of_the_wrong_kind():
    found = preflight(str(fixture_dir("core019_llama_tp2_fully_reshardable")))
    (finding,) = found.report.findings
    assert (finding.check, finding.fix) == (
        "checkpoint-format",
        "convert-torch-dist-to-fsdp-dtensor CHECKPOINT CONVERTED",
    )
    assert "--load CONVERTED" in found.flags


def test_a_conversion_passes(tmp_path):
    convert_to_fsdp_dtensor(str(fixture_dir("core019_llama_tp2_fully_reshardable")), str(tmp_path / "out"))
    assert broken_in(tmp_path / "out", GOOD) == {}


def broken_in(path, words):
    return {f.check: f.where for f in preflight(str(path), words).report.findings}


def test_the_key_set_of_a_strict_load(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        drop_key(metadata, "args")
        drop_key(
            metadata, "optimizer.param_to_group_meta.module.module.module.decoder.final_layernorm.weight.lr"
        )
    assert broken_in(root, GOOD).keys() == {"entries", "groups"}


def test_the_flags_to_launch_with_break_no_rule():
    for name in (NATIVE, "core019_gpt3_tp2_native_fsdp_dtensor", "core019_moe_dp1_native_fsdp_dtensor"):
        flags = preflight(str(fixture_dir(name))).flags
        assert broken([word for flag in flags for word in flag.split()], name) == {}
        assert any(flag.startswith("--load ") for flag in flags)


def test_a_bridge_configuration(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "model: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1, num_layers: 2, "
        "gradient_accumulation_fusion: false}\n"
        "dist: {use_megatron_fsdp: true, use_tp_pp_dp_mapping: false}\n"
        "ddp: {average_in_collective: true, data_parallel_sharding_strategy: optim_grads_params}\n"
        "checkpoint: {ckpt_format: fsdp_dtensor, strict_fsdp_dtensor_load: true}\n"
    )
    assert broken((), yaml_file=file) == {"average-in-collective": ("warning", "average_in_collective is on")}
    assert broken(["--use-tp-pp-dp-mapping"], yaml_file=file).keys() == {
        "average-in-collective",
        "tp-pp-dp-mapping",
    }


def test_a_megatron_lm_recipe(tmp_path):
    file = tmp_path / "model_config.yaml"
    lines = ["ENV_VARS:", "  CUDA_DEVICE_MAX_CONNECTIONS: 1", "MODEL_ARGS:"]
    words = GOOD[4:]
    while words:
        flag, value = words.pop(0), True
        if words and not words[0].startswith("--"):
            value = words.pop(0)
        lines.append(f"  {flag}: {'true' if value is True else value}")
    file.write_text("\n".join(lines))
    assert broken((), yaml_file=file).keys() == {"max-connections"}


@pytest.mark.parametrize("text", ["- a", "a: [", "3"])
def test_no_yaml_mapping(text, tmp_path):
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"job\.yaml"):
        broken((), yaml_file=tmp_path / "job.yaml")
    with pytest.raises(UsageError, match=r"no\.yaml"):
        broken((), yaml_file=tmp_path / "no.yaml")


def test_words_of_a_command_line():
    job = parse_command(
        ["A=1", "srun", "x.py", "--a-b", "--c=2", "--d", "1", "x", "2.5", "--no-e", "--lr", "1e-4"]
    )
    assert dict(job.environment) == {"A": "1"}
    assert dict(job.settings) == {
        "a_b": True,
        "c": 2,
        "d": [1, "x", 2.5],
        "no_e": True,
        "e": False,
        "lr": 1e-4,
    }
    assert not Job()
    assert parse_yaml("a: 1\nb: {a: 2, c: null}").settings == {"a": 1, "c": None}


def test_every_rule_can_be_explained():
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert all(rule.why and rule.fix for rule in RULES)
