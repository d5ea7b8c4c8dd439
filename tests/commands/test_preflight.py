"""`preflight`: every rule is broken by one change of a job that is known to run, and by nothing else."""

import json
import shlex
import subprocess
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tools.commands.check.launch import launch, unsaid
from ckpt_tools.commands.check.preflight import Start, _about, _checks, preflight
from ckpt_tools.commands.convert.to_dtensors import convert_to_fsdp_dtensor
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.commands.job.placements import Layout
from ckpt_tools.errors import UsageError
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.sharding.topology import Topology
from ckpt_tools.verify.readiness.facts import Facts, local_norms
from ckpt_tools.verify.readiness.job import PROGRAMS, VERSIONS, Job, parse_command
from ckpt_tools.verify.readiness.rules import RULES
from tests.commands.launched import launch_of
from tests.conftest import NATIVE, fixture_dir
from tests.damage import copy_of, drop_key, metadata_of

LLAMA, EXPERTS = "core019_llama_tp2_fully_reshardable", "core019_moe_ep2_fully_reshardable"
MOE = "core019_moe_dp1_native_fsdp_dtensor"
_COMMAND = """
torchrun --nproc-per-node 4 pretrain_gpt.py
--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer
--no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor --tensor-model-parallel-size 2
--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --kv-channels 8 --swiglu
--group-query-attention --num-query-groups 2 --normalization RMSNorm --disable-bias-linear --transformer-impl local
--position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 200
--make-vocab-size-divisible-by 16 --tokenizer-type NullTokenizer --max-position-embeddings 64 --seq-length 32
--micro-batch-size 2 --bf16 --lr 0.01 --min-lr 0.001 --train-iters 4
--lr-decay-iters 20 --lr-warmup-iters 1 --global-batch-size 8 --eval-interval 1000 --weight-decay 0.1
"""
FOUR_RANKS = "--tensor-model-parallel-size 4 --make-vocab-size-divisible-by 8"
SETTLED = "--override-opt_param-scheduler"
GOOD = [*_COMMAND.split(), "--load", str(fixture_dir(NATIVE))]


@pytest.fixture(autouse=True, scope="module")
def of_one_program():
    """What other programs would do (`test_weights_only`) is half of the work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "ckpt_tools.commands.check.preflight._start", lambda _, program, *__: Start(program, None)
        )
        yield


def broken(words, name=NATIVE, **options):
    """{rule: (severity, what was found)} of a job."""
    report = preflight(str(fixture_dir(name)), words, **options).report
    return {f.check: (f.severity, f.where) for f in report.findings}


def judged(about, words, target="main"):
    """The same by the rules alone, on the native checkpoint, which is read once."""
    _, checks = _checks(about, parse_command(words, target), target)
    return {f.check: (f.severity, f.where) for check in checks for f in check.findings}


@pytest.fixture(scope="module")
def about():
    """What the native checkpoint tells of its job."""
    with open_checkpoint(str(fixture_dir(NATIVE))) as opened:
        return _about(opened)[0]


def without(*flags):
    """The good job without some flags and their values."""
    words, keep = [], True
    for word in GOOD:
        if word.startswith("--"):
            keep = word not in flags
        if keep:
            words.append(word)
    return words


@pytest.mark.parametrize("target", VERSIONS)
def test_a_job_that_trained_breaks_no_rule(target):
    assert broken(GOOD, target=target) == {}


LATER = ("core-0.18", "core-0.19", "main")
CASES = [  # flags added, the rule that they break, what is found, in which versions
    ("--ckpt-format torch_dist", "ckpt-format", "torch_dist", VERSIONS),
    ("--use-torch-fsdp2", "fsdp-or-fsdp2", "use_torch_fsdp2", VERSIONS),
    ("--pipeline-model-parallel-size 2", "pipeline", "size 2", VERSIONS),
    ("--num-layers-per-virtual-pipeline-stage 1", "pipeline", "virtual stages 1", VERSIONS),
    ("--expert-model-parallel-size 2", "expert-ranks", "0 experts on 2 ranks", VERSIONS),
    ("--optimizer dist_muon", "optimizer", "dist_muon", VERSIONS),
    ("--optimizer lion", "optimizer", "lion", LATER),
    ("--moe-single-grouped-weight", "single-grouped", "weight", LATER[1:]),
    ("--moe-single-grouped-bias", "single-grouped", "bias", LATER[1:]),
    ("--tensor-parallel-num-weight-shards 4", "weight-shards", "4 on 2", LATER[1:]),
    ("--expert-tensor-parallel-num-weight-shards 4", "weight-shards", "expert_tensor", LATER[1:]),
    ("--lr 0.02 --min-lr 0.001", "schedule", "max_lr: job 0.02, checkpoint 0.01", VERSIONS),
    ("--lr-decay-iters 40", "schedule", "lr_decay_steps: job 320, checkpoint 160", VERSIONS),
    ("--num-layers 4", "architecture", "num_layers: job 4, checkpoint 2", VERSIONS),
    ("--hidden-size 64", "architecture", "hidden_size", VERSIONS),
    ("--hidden-size 64", "sizes", "hidden size: job 64, stored 32", VERSIONS),
    ("--ffn-hidden-size 128", "sizes", "ffn_hidden_size: job 128, stored 64", VERSIONS),
    ("--num-query-groups 4", "sizes", "rows of linear_qkv: job 96, stored 64", VERSIONS),
    ("--kv-channels 16", "sizes", "columns of linear_proj: job 64, stored 32", VERSIONS),
    ("--normalization LayerNorm", "parts", "final_layernorm.bias is not stored", VERSIONS),
    ("--add-qkv-bias", "parts", "add_qkv_bias is True, linear_qkv.bias is not stored", VERSIONS),
    ("--qk-layernorm", "parts", "q_layernorm is not stored", VERSIONS),
    ("--num-experts 4 --sequence-parallel", "parts", "num_experts is 4, a router is not stored", VERSIONS),
    ("--position-embedding-type learned_absolute", "parts", "position_embeddings.weight is not", VERSIONS),
    ("--vocab-size 300", "vocabulary", "224 rows, the job will ask for 320", VERSIONS),
    ("--make-vocab-size-divisible-by 128", "vocabulary", "256", VERSIONS),
    ("--padded-vocab-size 208", "vocabulary", "208", VERSIONS),
    ("--tensor-model-parallel-size 1", "vocabulary", "208 (tensor parallel size 2 would fit)", VERSIONS),
    ("--transformer-impl transformer_engine", "layer-spec", "modules of their own", VERSIONS),
    ("--mtp-num-layers 1", "mtp", "0 stored", VERSIONS),
    ("--no-strict-fsdp-dtensor-load", "strict-load", "off", VERSIONS),
    (FOUR_RANKS, "rng-entries", "ranks [2, 3] of 4", VERSIONS),
    ("--optimizer sgd", "sgd", "optimizer is sgd", VERSIONS),
    ("--optimizer sgd", "state-kinds", "no weight has momentum_buffer", VERSIONS),
    ("--tensor-model-parallel-size 8", "tensor-ranks", "4 attention heads are not a multiple of", VERSIONS),
    ("--num-attention-heads 3", "tensor-ranks", "3 attention heads are not a multiple", VERSIONS),
    ("--num-query-groups 3", "tensor-ranks", "3 query groups are neither", VERSIONS),
    ("--context-parallel-size 2 --seq-length 30", "sequence-ranks", "not a multiple of 2 x context", VERSIONS),
    ("--sequence-parallel --seq-length 33", "sequence-ranks", "33 positions on 2", VERSIONS),
    ("--num-experts 4", "expert-sequence", "experts with tensor parallel size 2", VERSIONS),
    ("--context-parallel-size 4", "world-size", "4 GPUs are not a multiple of tensor 2 x pipeline 1", VERSIONS),
    (f"--global-batch-size 6 {SETTLED}", "batch-size", "6 is not a multiple of micro_batch_size 2 x 2", VERSIONS),
    ("--finetune", "warm-start", "finetune is on", LATER),
    ("--no-load-optim", "warm-start", "no_load_optim is on", LATER),
]  # fmt: skip
ALSO = {  # what a broken rule breaks besides
    "--hidden-size 64": {"architecture", "sizes"},
    "--num-experts 4": {"parts", "expert-sequence"},
    "--tensor-model-parallel-size 8": {"tensor-ranks", "rng-entries", "vocabulary", "world-size"},
    "--num-attention-heads 3": {"tensor-ranks", "architecture", "sizes"},
    "--num-query-groups 3": {"tensor-ranks", "sizes"},
    "--optimizer sgd": {"sgd", "state-kinds"},
}
WARNINGS = {"strict-load"}


@pytest.mark.parametrize(
    ("added", "rule", "found", "target"),
    [(*case, target) for *case, targets in CASES for target in targets],
)
def test_one_change_breaks_one_rule(added, rule, found, target, about):
    result = judged(about, [*GOOD, *added.split()], target)
    assert result.keys() == ALSO.get(added, {rule})
    assert result[rule][0] == ("warning" if rule in WARNINGS else "error")
    assert found in result[rule][1]


@pytest.mark.parametrize(
    ("added", "target", "rules"),
    [
        ("--optimizer lion", "core-0.17", set()),
        ("--finetune", "core-0.17", set()),
        ("--no-load-optim", "core-0.16", set()),
        ("--finetune --optimizer-cpu-offload", "main", set()),  # its masters are copied on the host
        ("--tensor-parallel-num-weight-shards 2", "main", set()),
        ("--optimizer sgd --sgd-momentum 0", "main", {"sgd"}),
        ("--tensor-model-parallel-size 1 --make-vocab-size-divisible-by 32", "main", set()),
        (f"--global-batch-size 12 {SETTLED}", "main", set()),
        (f"--global-batch-size 6 --rampup-batch-size 2 2 10 {SETTLED}", "main", set()),
        (f"--global-batch-size 6 --decrease-batch-size-if-needed {SETTLED}", "main", set()),
        ("--sequence-parallel --context-parallel-size 2", "main", set()),
    ],
)
def test_what_a_version_allows_is_not_refused(added, target, rules, about):
    assert judged(about, [*GOOD, *added.split()], target).keys() == rules


def test_every_rule_of_every_version_is_tried():
    tried = {(rule, target) for _, rule, _, targets in CASES for target in targets}
    elsewhere = {  # tested below, with another checkpoint or another job
        "checkpoint-format", "required", "megatron-fsdp", "distributed-optimizer", "gradient-accumulation-fusion",
        "max-connections", "version-2", "tied-embeddings", "swiglu", "experts", "expert-layers",
        "optimizer-entries", "stored-arguments", "names", "packed-projections", "packed-projections-unknown",
        "strict-load", "fsdp-version", "fresh-samples", "batch-before",
        "modules", "no-position-embedding",
    }  # fmt: skip
    missing = {
        (rule.name, program)
        for rule in RULES
        for program in rule.programs
        if program in VERSIONS and rule.name not in elsewhere
    } - tried
    assert missing == set()


def test_rules_say_where_they_come_from():
    for rule in RULES:
        assert rule.why and rule.fix and rule.source
        assert rule.programs
    for program in PROGRAMS:
        names = [rule.name for rule in RULES if program in rule.programs]
        assert len(set(names)) == len(names)
    assert next(r for r in RULES if r.name == "single-grouped").where.endswith("(core-0.19 to main)")


@pytest.mark.parametrize(
    ("left_out", "target", "rules"),
    [
        ("--use-megatron-fsdp", "main", {"megatron-fsdp"}),
        ("--use-distributed-optimizer", "core-0.16", {"distributed-optimizer"}),
        ("--use-distributed-optimizer", "core-0.17", {"distributed-optimizer"}),
        ("--use-distributed-optimizer", "core-0.18", set()),  # switched on by itself
        ("--use-distributed-optimizer", "main", set()),
        ("--no-gradient-accumulation-fusion", "main", {"gradient-accumulation-fusion"}),
        ("--data-parallel-sharding-strategy", "main", set()),  # its default since 0.18
        ("--untie-embeddings-and-output-weights", "main", {"tied-embeddings"}),
        ("--swiglu", "main", {"swiglu"}),
        ("--transformer-impl", "main", {"layer-spec"}),
        ("--ckpt-format", "main", {"ckpt-format"}),
        ("--disable-bias-linear", "main", {"parts"}),
        ("--group-query-attention", "main", {"sizes"}),
        ("--normalization", "main", {"parts"}),
        ("--position-embedding-type", "main", {"parts"}),
        ("--make-vocab-size-divisible-by", "main", {"vocabulary"}),
        ("--micro-batch-size", "main", {"required"}),
        ("--max-position-embeddings", "main", {"required"}),
        ("--seq-length", "main", {"required"}),
        ("--vocab-size", "main", set()),  # the tokenizer's: 200, as the stored arguments say
        ("--bf16", "main", set()),
    ],
)
def test_what_is_not_given_has_the_default_of_its_version(left_out, target, rules, about):
    assert judged(about, without(left_out), target).keys() == rules


def test_arguments_of_the_checkpoint_stand_in_for_flags():
    architecture = ("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--kv-channels",
                    "--swiglu", "--group-query-attention", "--num-query-groups", "--normalization",
                    "--disable-bias-linear", "--position-embedding-type", "--untie-embeddings-and-output-weights",
                    "--max-position-embeddings", "--seq-length")  # fmt: skip
    assert "required" in broken(without(*architecture))
    assert broken([*without(*architecture), "--use-checkpoint-args"]) == {}


def test_version_2_runs_with_little():
    words = [*without("--use-distributed-optimizer"), "--megatron-fsdp-version", "2"]
    found = broken(words)["version-2"][1]
    assert "tensor_model_parallel_size is 2, swiglu is on, the optimizer's state is asked for" in found
    found = broken([*GOOD, "--megatron-fsdp-version", "2"])
    assert "use_distributed_optimizer is on" in found["version-2"][1]
    small = [
        *words,
        *["--tensor-model-parallel-size", "1", "--make-vocab-size-divisible-by", "32", "--no-load-optim"],
    ]
    found = broken(small)
    assert found.keys() == {"fsdp-version", "version-2"}
    assert found["version-2"][1] == "swiglu is on"
    assert found["fsdp-version"][1] == "the names are those of Megatron-FSDP v1, the job's is v2"
    assert "context_parallel_size is 2" in broken([*small, "--context-parallel-size", "2"])["version-2"][1]


def test_the_environment_stands_before_the_program():
    assert broken(["CUDA_DEVICE_MAX_CONNECTIONS=1", *GOOD]).keys() == {"max-connections"}
    assert broken(["CUDA_DEVICE_MAX_CONNECTIONS=8", *GOOD]) == {}
    flags = GOOD[GOOD.index("pretrain_gpt.py") + 1 :]
    assert broken(["CUDA_DEVICE_MAX_CONNECTIONS=1", *flags]).keys() == {"max-connections"}


@pytest.mark.parametrize("target", VERSIONS)
def test_weights_alone(tmp_path, target):
    """Core 0.16 and 0.17 start from them; later versions raise NotImplementedError, whatever is asked for."""
    out = str(tmp_path / "out")
    convert_to_fsdp_dtensor(
        str(fixture_dir(LLAMA)), out, ConvertOptions(target=TargetOptions(weights_only=True))
    )
    found = preflight(out, target=target)
    starts = target in ("core-0.16", "core-0.17")
    assert found.report.is_valid == starts
    if starts:
        assert launch_of(found).words.count("--finetune") == 1
    assert broken_in(out, [*GOOD, "--load", out], target=target).keys() == {
        "optimizer-entries",
        "rng-entries",
    }
    warm = preflight(out, [*GOOD, "--load", out, "--finetune"], target=target).report
    assert [f.check for f in warm.findings] == ([] if starts else ["warm-start"])
    assert not warm.findings or "core-0.16 or core-0.17" in warm.findings[0].fix
    single = [*without("--bf16"), "--load", out, "--finetune"]  # fp32 has no masters to copy to
    assert preflight(out, single, target=target).report.is_valid


def test_a_size_beyond_all_machines_is_answered_at_once():
    found = broken([*GOOD, "--tensor-model-parallel-size", str(10**12)])
    assert "ranks [2, 3, 4, 5, 6, 7, 8, 9] of" in found["rng-entries"][1]


def test_experts_named_for_another_job():
    words = list(launch_of(preflight(str(fixture_dir(MOE)))).words)
    assert broken(words, MOE) == {}
    found = broken([*words, "--moe-grouped-gemm"], MOE)
    assert found == {"experts": ("error", "moe_grouped_gemm is on, experts are stored as local_experts.N")}
    found = broken([*words, "--moe-layer-freq", "([1]*2)"], MOE)
    assert found == {
        "expert-layers": ("error", "moe_layer_freq [1, 1] makes experts in layers [0, 1], stored in [1]")
    }


def test_a_checkpoint_of_another_kind(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    begun = "import-hf {} CONVERTED --to fsdp_dtensor --lr LR --min-lr MIN_LR --weight-decay WD"
    for path, fix in ((fixture_dir(LLAMA), "convert {} CONVERTED"), (tmp_path, begun)):
        assert list(broken_in(path, ["--use-torch-fsdp2"])) == ["checkpoint-format"]
        found = preflight(str(path))
        assert [(f.check, f.fix) for f in found.report.findings] == [("checkpoint-format", fix.format(path))]
        assert found.launch is None


def broken_in(path, words, **options):
    return {f.check: f.where for f in preflight(str(path), words, **options).report.findings}


def test_a_strict_load_finds_every_key_and_its_bytes(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    file = next(root.rglob("__0_*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert broken_in(root, []).keys() == {"files"}
    with metadata_of(root) as metadata:
        drop_key(metadata, "args")
        name = "module.module.module.decoder.final_layernorm.weight"
        drop_key(metadata, f"optimizer.param_to_group_meta.{name}.lr")
    assert broken_in(root, [*GOOD, "--load", str(root)]).keys() == {"files", "entries", "groups"}


def test_a_kind_of_state_that_no_weight_has_is_not_ready(tmp_path):
    kind = "exp_avg_sq"
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        for key in [key for key in metadata.state_dict_metadata if key.endswith(f".{kind}")]:
            drop_key(metadata, key)
    assert broken_in(root, GOOD)["state-kinds"] == f"no weight has {kind}, which adam asks for"
    found = preflight(str(root))
    assert not found.report.is_valid
    assert found.launch is None


MLA = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_up_proj.weight",
       "input_layernorm.weight", "mlp.router.weight", "pre_mlp_layernorm.weight")  # fmt: skip


@pytest.mark.parametrize(
    ("names", "local"),
    [
        (("self_attention.linear_qkv.weight", "self_attention.linear_qkv.layer_norm_weight"), False),
        (("self_attention.linear_qkv.weight", "input_layernorm.weight"), True),
        (("mlp.linear_fc1.weight_w", "pre_mlp_layernorm.weight"), True),
        (("mlp.linear_fc1.weight_w", "mlp.linear_fc1.layer_norm_weight"), False),
        (MLA, None),  # alike in both specs
        ((*MLA, "self_attention.linear_kv_up_proj.layer_norm_weight"), False),
        ((*MLA, "self_attention.kv_layernorm.weight"), True),
        (("self_attention.in_proj.weight", "self_attention.in_proj.layer_norm_weight"), False),
        (("self_attention.in_proj.weight", "input_layernorm.weight"), True),
        ((), None),
    ],
)
def test_norms_of_the_layer_spec(names, local):
    assert local_norms([f"decoder.layers.3.{name}" for name in names]) is local
    assert local_norms([f"mtp.layers.0.mtp_model_layer.{name}" for name in names]) is local


@pytest.mark.parametrize("name", [NATIVE, "core019_gpt3_tp2_native_fsdp_dtensor", MOE])
def test_the_launch_is_what_was_checked_and_survives_a_shell(name):
    found = launch_of(preflight(str(fixture_dir(name))))
    assert shlex.split(found.command.replace("\\\n", " ")) == list(found.words)
    assert broken(list(found.words), name) == {}
    whole = preflight(str(fixture_dir(name)), [found.command.replace("\\\n", " ")])  # as one quoted word
    assert whole.report.findings == []
    assert launch_of(whole).words == found.words
    assert "--load" in found.words


def test_the_launch_of_a_described_job_is_that_job():
    found = preflight(str(fixture_dir(NATIVE)), GOOD)
    assert launch_of(found).words == tuple(GOOD)
    assert launch_of(found).environment == ("unset CUDA_DEVICE_MAX_CONNECTIONS",)
    assert preflight(str(fixture_dir(NATIVE)), GOOD[4:]).launch is None  # flags alone start nothing
    assert preflight(str(fixture_dir(NATIVE)), [*GOOD, "--use-torch-fsdp2"]).launch is None


def test_a_path_that_a_shell_would_read_is_quoted(tmp_path):
    root = copy_of(NATIVE, tmp_path).rename(tmp_path / "it's $(here)")
    found = preflight(str(root))
    assert str(root) in shlex.split(launch_of(found).command.replace("\\\n", " "))


def test_the_program_is_chosen():
    assert preflight(str(fixture_dir(NATIVE))).program == "main"
    assert preflight(str(fixture_dir(NATIVE)), target="core-0.17").program == "core-0.17"
    with pytest.raises(UsageError, match="'core-9' is not a program that loads checkpoints"):
        preflight(str(fixture_dir(NATIVE)), target="core-9")
    assert preflight(str(fixture_dir(NATIVE)), ["model.num_layers=2"]).program == "bridge"


def test_a_flag_that_the_version_does_not_know():
    report = preflight(str(fixture_dir(NATIVE)), [*GOOD, "--use-custom-fsdp", "--swigl"]).report
    found = {f.where: (f.severity, f.fix) for f in report.findings}
    assert found["--use-custom-fsdp"][0] == "error"
    assert found["--swigl"] == ("error", "did you mean --swiglu?")
    later = preflight(str(fixture_dir(NATIVE)), [*GOOD, "--megatron-fsdp-version", "1"], target="core-0.16")
    assert [f.fix for f in later.report.findings] == ["drop it, or run one of main (--target)", "drop it"]
    for script in ("my/train.py", "pretrain_vlm.py"):
        own = [word.replace("pretrain_gpt.py", script) for word in GOOD]
        assert broken([*own, "--my-flag"]) == {"flags": ("warning", "--my-flag")}
    refused = broken([*GOOD, "--num-layers", "two"])
    assert refused == {"flags": ("error", "argument --num-layers: invalid int value: 'two'")}


BRIDGE_SAYS: dict[str, dict[str, Any]] = {  # settings of a job that is ready, by section
    "model": {"tensor_model_parallel_size": 2, "num_layers": 2, "gradient_accumulation_fusion": False,
              "make_vocab_size_divisible_by": 16},
    "dist": {"use_megatron_fsdp": True, "use_tp_pp_dp_mapping": False},
    "ddp": {"average_in_collective": True, "data_parallel_sharding_strategy": "optim_grads_params"},
    "checkpoint": {"ckpt_format": "fsdp_dtensor", "strict_fsdp_dtensor_load": True,
                   "load": str(fixture_dir(NATIVE))},
}  # fmt: skip


def test_a_bridge_configuration(tmp_path):
    """What it does not say has Bridge's own default."""
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(BRIDGE_SAYS))
    found = preflight(str(fixture_dir(NATIVE)), (), file)
    assert (found.program, found.report.findings, found.launch) == ("bridge", [], None)
    for override, rules in (
        ("ddp.data_parallel_sharding_strategy=zero3", {"sharding-strategy"}),
        ("ddp.megatron_fsdp_version=2", {"version-2"}),
        ("checkpoint.strict_fsdp_dtensor_load=false", {"strict-load"}),
        ("model.num_layers=3", {"architecture"}),
        ("optimizer.optimizer=sgd", {"state-kinds", "sgd"}),
    ):
        assert broken([override], yaml_file=file).keys() == rules
    for section, setting, rule in (
        ("model", "gradient_accumulation_fusion", "gradient-accumulation-fusion"),
        ("model", "tensor_model_parallel_size", "vocabulary"),
        ("checkpoint", "ckpt_format", "ckpt-format"),
        ("checkpoint", "strict_fsdp_dtensor_load", "strict-load"),
    ):
        said = {k: v for k, v in BRIDGE_SAYS[section].items() if k != setting}
        file.write_text(json.dumps({**BRIDGE_SAYS, section: said}))
        assert broken((), yaml_file=file).keys() == {rule}


def test_a_megatron_lm_recipe(tmp_path):
    file = tmp_path / "model_config.yaml"
    lines = ["ENV_VARS:", "  CUDA_DEVICE_MAX_CONNECTIONS: 1", "MODEL_ARGS:", "  --use-torch-fsdp2: false"]
    words = GOOD[4:]
    while words:
        flag, value = words.pop(0), "true"
        if words and not words[0].startswith("--"):
            value = words.pop(0)
        lines.append(f"  {flag}: {value}")
    file.write_text("\n".join(lines))
    assert broken((), yaml_file=file).keys() == {"max-connections"}
    assert broken(["--mtp-num-layers", "1"], yaml_file=file).keys() == {"max-connections", "mtp"}


@pytest.mark.parametrize("text", ["- a", "a: [", "3"])
def test_no_yaml_mapping(text, tmp_path):
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"job\.yaml"):
        broken((), yaml_file=tmp_path / "job.yaml")
    with pytest.raises(UsageError, match=r"no\.yaml"):
        broken((), yaml_file=tmp_path / "no.yaml")


def test_a_batch_that_nothing_tells_is_asked_for_in_the_command(about):
    """As the places of data are; the rest of the command is judged."""
    job = Job({"tensor_model_parallel_size": 1}, program="main")
    whole = launch(replace(about, job=job), "/x")
    assert whole.filled_in == whole.words
    lines = whole.command.split(" \\\n    ")
    assert [line.split()[0] for line in lines[1:]] == [
        word for word in whole.words[1:] if word.startswith("--") or word.endswith(".py")
    ]
    args = {name: value for name, value in about.args.items() if name != "global_batch_size"}
    asked = launch(replace(about, job=job, args=args), "/x")
    assert "--global-batch-size GLOBAL_BATCH" in asked.command
    assert set(asked.words) - set(asked.filled_in) == {"--global-batch-size", "GLOBAL_BATCH"}
    assert parse_command(asked.filled_in, "main").refused is None
    assert "GLOBAL_BATCH" not in whole.words


def test_no_setting_of_the_run_is_lost_on_the_way_into_the_command(about):
    """config.json has a base of 500000.0, for which Megatron's flag takes a whole number."""
    about = replace(about, job=Job({"tensor_model_parallel_size": 1}, program="main"))
    whole = launch(replace(about, args={**about.args, "rotary_base": 500000.0}), "/x")
    assert "--rotary-base 500000 " in whole.command
    broken_off = launch(replace(about, args={**about.args, "rotary_base": 500000.5}), "/x")
    assert "--rotary-base" not in broken_off.words
    assert "# the run had rotary_base 500000.5, which --rotary-base cannot say" in broken_off.environment


def test_a_conversion_for_version_2_starts_from_its_weights(tmp_path):
    """The launch command says so, and version 1 is refused by the names."""
    source = str(next(fixture_dir("core019_gpt3_tp2_fully_reshardable").glob("iter_*")))
    layout = Layout("mfsdp-v2", Topology(dp_shard=2))
    options = ConvertOptions(target=TargetOptions(vocab_size_padded=208, weights_only=True), layout=layout)
    convert_to_fsdp_dtensor(source, str(tmp_path / "v2"), options)
    found = preflight(str(tmp_path / "v2"))
    assert found.launch is not None
    words = list(found.launch.words)
    assert value_of(words, "--megatron-fsdp-version") == "2"
    assert "--no-load-optim" in words
    assert "--use-distributed-optimizer" not in words
    again = preflight(str(tmp_path / "v2"), words).report
    assert [f for f in again.findings if f.severity == "error"] == []
    at = words.index("--megatron-fsdp-version")
    older = broken_in(tmp_path / "v2", [*words[:at], *words[at + 2 :], "--use-distributed-optimizer"])
    assert older["fsdp-version"] == "the names are those of Megatron-FSDP v2, the job's is v1"


def converted(tmp_path, name, **sizes):
    """The launch of a conversion for a job of these sizes, which is ready, and the names of its warnings."""
    world = sizes.pop("world")
    layout = Layout("mfsdp-v1", Topology.of_world(world, **sizes)) if sizes else Layout(world=world)
    options = ConvertOptions(layout=layout, target=TargetOptions(tp=sizes.get("tp", 1)))
    convert_to_fsdp_dtensor(str(fixture_dir(name)), str(tmp_path / "out"), options)
    found = preflight(str(tmp_path / "out"))
    return launch_of(found), {f.check for f in found.report.findings}


def value_of(words, flag):
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    ("name", "sizes", "nodes", "node", "others"),
    [
        (LLAMA, {"world": 64, "ep": 1}, 8, 8, {"--tensor-model-parallel-size": "1"}),
        (LLAMA, {"world": 64, "tp": 4}, 8, 8, {"--tensor-model-parallel-size": "4"}),
        (LLAMA, {"world": 24, "dp_outer": 3}, 3, 8, {}),
        (LLAMA, {"world": 12, "cp": 2}, 2, 6, {"--context-parallel-size": "2"}),
        (LLAMA, {"world": 64}, 8, 8, {}),  # `even`
        (EXPERTS, {"world": 64, "ep": 4}, 8, 8, {"--expert-model-parallel-size": "4"}),
    ],
)
def test_the_launch_is_for_the_gpus_that_the_checkpoint_was_converted_for(
    tmp_path, name, sizes, nodes, node, others
):
    start, warnings = converted(tmp_path, name, **sizes)
    words = start.words
    assert (value_of(words, "--nnodes"), value_of(words, "--nproc-per-node")) == (str(nodes), str(node))
    assert "HEAD_NODE:29500" in words
    assert "8 GPUs a node are assumed" in "".join(start.environment)
    for flag, value in others.items():
        assert value_of(words, flag) == value
    assert warnings <= {"batch-before"}
    assert ("batch-before" in warnings) == ("--global-batch-size" not in words)
    assert ("batch-before" in warnings) == ("--use-checkpoint-opt_param-scheduler" in words)


def test_one_node_needs_no_address(tmp_path):
    start, warnings = converted(tmp_path, LLAMA, world=8, ep=1)
    assert start.words[:3] == ("torchrun", "--nproc-per-node", "8")
    assert value_of(start.words, "--micro-batch-size") == "1"  # 2 x 8 ranks are more than the batch of 8
    assert value_of(start.words, "--global-batch-size") == "8"
    assert (len(start.environment), warnings) == (1, set())


def test_experts_on_tensor_parallel_ranks_are_launched_with_sequence_parallelism(tmp_path):
    start, _ = converted(tmp_path, EXPERTS, world=4, tp=2)
    assert "--sequence-parallel" in start.words


def test_a_later_layout_is_for_its_own_gpus(tmp_path):
    converted(tmp_path, LLAMA, world=64, tp=2)
    layout = Layout("mfsdp-v1", Topology.of_world(4, tp=2))
    options = ConvertOptions(layout=layout, target=TargetOptions(tp=2))
    convert_to_fsdp_dtensor(str(tmp_path / "out"), str(tmp_path / "again"), options)
    assert launch_of(preflight(str(tmp_path / "again"))).words[:3] == ("torchrun", "--nproc-per-node", "4")


@pytest.mark.parametrize("program", VERSIONS)
def test_flags_of_mla_are_for_models_that_have_it(program):
    flags = ("--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim")
    args = {flag[2:].replace("-", "_"): 0 for flag in flags} | {"q_lora_rank": 7}
    facts = Facts("fsdp_dtensor", Job(program=program), args)
    assert not {*flags, "--q-lora-rank"} & set(launch(facts, "/x").words)
    latent = replace(facts, args=args | {"multi_latent_attention": True})
    assert {*flags, "--q-lora-rank"} <= set(launch(latent, "/x").words)


def test_a_batch_is_judged_by_the_gpus_of_the_command():
    settled = [*GOOD[3:], SETTLED]
    eight = ["torchrun", "--nnodes", "8", "--nproc-per-node", "8", *settled, "--global-batch-size", "8"]
    assert broken(eight).keys() == {"batch-size"}
    assert "micro_batch_size 2 x 32 data-parallel ranks = 64" in broken(eight)["batch-size"][1]
    assert broken([*eight, "--micro-batch-size", "1", "--global-batch-size", "64"]) == {}
    assert broken(["torchrun", "--nproc-per-node", "gpu", *settled, "--global-batch-size", "7"]) == {}
    silent = [*without("--global-batch-size")[3:], SETTLED]
    assert broken(["torchrun", "--nproc-per-node", "24", *silent]).keys() == {"batch-before"}
    bridge = "torchrun --nproc-per-node 4 run_recipe.py --recipe x train.micro_batch_size=2 train.global_batch_size=6"
    found = broken([*bridge.split(), "model.tensor_model_parallel_size=8"])
    assert {"tensor-ranks", "world-size"} <= found.keys()  # heads are those of the checkpoint
    assert "batch-size" in broken([*bridge.split(), "model.tensor_model_parallel_size=2"])


@pytest.mark.parametrize(
    ("change", "words", "found"),
    [
        ("rm TRACKER", [], "has no latest_checkpointed_iteration.txt"),
        ("echo 1 > TRACKER", GOOD, "the tracker names iter_0000001"),
        ("", [*GOOD, "--load", "/elsewhere"], "--load is /elsewhere, the checkpoint lies in "),
        ("", [*GOOD, "--ckpt-step", "1"], "--ckpt-step is 1, this is iteration 2"),
    ],
)
def test_a_job_that_would_not_find_the_checkpoint_is_not_ready(change, words, found, tmp_path):
    root = copy_of(NATIVE, tmp_path)
    tracker = root / "latest_checkpointed_iteration.txt"
    subprocess.run(["bash", "-c", change.replace("TRACKER", str(tracker))], check=True)
    words = words if "/elsewhere" in words or not words else [*words, "--load", str(root)]
    said = broken_in(root / "iter_0000002", words)
    assert list(said) == ["place"] and found in said["place"]


@pytest.mark.parametrize(
    ("words", "rule", "severity", "found"),
    [
        (GOOD[:-2], "place", "error", "the command has no --load"),
        (GOOD[4:-2], "place", "warning", "the command has no --load"),  # the flags alone
        ([*GOOD, "--eval-interval", "0"], "required", "error", "not given: an eval_interval above 0"),
        ([*GOOD, "--train-iters", "2"], "steps", "error", "train_iters is 2, the checkpoint is of iteration 2"),
        (["torchrun", "--nproc-per-node", "x", *GOOD[3:]], "launcher", "error", "--nproc-per-node 'x'"),
        (["torchrun", "--nnodes=0", *GOOD[3:]], "launcher", "error", "--nnodes '0'"),
        (["torchrun", "--nproc-per-node", "auto", "--nnodes", "1:$N", *GOOD[3:]], None, None, None),
        (GOOD[3:], "launcher", "warning", "nothing starts pretrain_gpt.py"),
        (["A=1", *GOOD[3:]], "launcher", "warning", "nothing starts pretrain_gpt.py"),
        (["python", *GOOD[3:]], None, None, None),
        ([*without("--global-batch-size")[3:], "--weight-decay-incr-style", "linear"], "schedule",
         "error", "wd_incr_style: job linear, checkpoint constant"),
    ],
)  # fmt: skip
def test_a_job_that_would_not_do_what_is_meant(words, rule, severity, found):
    said = broken(words)
    if rule is None:
        assert said == {}
    else:
        assert said[rule][0] == severity and found in said[rule][1]
        start = preflight(str(fixture_dir(NATIVE)), words).launch
        assert (start is None) or rule == "place"


@pytest.mark.parametrize("first", ["", " ", "\t"])
@pytest.mark.parametrize("rest", [[], GOOD[3:], ["--train-iters", "10"]])
def test_a_command_that_begins_with_an_empty_word_is_refused(first, rest):
    with pytest.raises(UsageError, match="begins with an empty word"):
        preflight(str(fixture_dir(NATIVE)), [first, *rest])


def test_a_folder_that_is_no_iteration_is_not_ready(tmp_path):
    folder = copy_of(NATIVE, tmp_path / "run") / "iter_0000002"
    folder = folder.rename(tmp_path / "mine")
    (finding,) = preflight(str(folder)).report.findings
    assert "mv " in finding.fix and "RUN/iter_0000002" in finding.fix
    assert preflight(str(folder)).launch is None


def test_an_iteration_that_the_tracker_does_not_name_is_asked_for(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    (root / "latest_checkpointed_iteration.txt").write_text("9")
    (root / "iter_0000009").mkdir()
    words = launch_of(preflight(str(root / "iter_0000002"))).words
    assert value_of(words, "--ckpt-step") == "2"
    assert preflight(str(root / "iter_0000002"), words).report.is_valid


@pytest.mark.parametrize("flag", ["--train-iters", "--lr", "--eval-interval", "--save-interval"])
def test_what_megatron_has_no_default_for_is_required_and_printed(flag):
    found = broken([*without(flag), "--save", "x"] if flag == "--save-interval" else without(flag))
    assert flag.removeprefix("--").replace("-", "_") in found["required"][1]
    assert flag in launch_of(preflight(str(fixture_dir(NATIVE)))).words


def test_the_command_loads_and_saves_in_one_place_from_every_folder(monkeypatch):
    root = fixture_dir(NATIVE)
    monkeypatch.chdir(root.parent)
    start = launch_of(preflight(root.name))
    assert value_of(start.words, "--load") == value_of(start.words, "--save") == str(root)
    described = ["torchrun", "--nproc-per-node", "4", "pretrain_gpt.py", *GOOD[4:]]
    assert launch_of(preflight(root.name, described)).command.startswith("torchrun")


def test_what_no_run_tells_is_left_to_the_user(about):
    gone = ("train_iters", "train_samples", "lr", "eval_interval", "save_interval")
    args = {name: value for name, value in about.args.items() if name not in gone}
    start = launch(replace(about, args=args, schedule={}, job=Job(program="main")), "/run")
    assert "--train-iters TRAIN_ITERS" in start.command and "--lr LR" in start.command
    assert value_of(start.words, "--eval-interval") == value_of(start.words, "--save-interval") == "1000"
    assert not parse_command(start.filled_in, "main").refused
    of_samples = replace(about, args={**about.args, "train_samples": 32}, job=Job(program="main"))
    assert "--train-iters" not in launch(of_samples, "/run").words


def test_a_setting_that_no_flag_can_say_is_not_left_out(about):
    args = {**about.args, "attn_logit_softcapping": 50.0, "position_embedding_type": "yarn"}
    for program, expected in (("main", 1), ("core-0.16", 2)):
        assert len(unsaid(replace(about, args=args, job=Job(program=program)))) == expected
    stored = replace(about, args={**about.args, "add_position_embedding": False}, job=Job(program="main"))
    assert "--no-position-embedding" in launch(stored, "/run").words
    found = broken([*GOOD, "--position-embedding-type", "yarn", "--no-position-embedding"])
    assert {"architecture", "no-position-embedding"} <= found.keys()
