"""The batch scripts with stand-ins for Slurm's programs: what they run, in which order, and what they return."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.preflight import preflight
from ckpt_tools.verify.report import Report
from tests.conftest import REPO, fixture_dir

SCRIPTS = REPO / "example-scripts"
CONVERT = SCRIPTS / "sbatch_checkpoint_convert.sh"
TRAIN = SCRIPTS / "sbatch_mfsdp_deepseek_v3.sh"

_SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$CALLS"
[[ -z ${FAIL:-} || $* != *"$FAIL"* ]] || exit 6
"""


class Slurm:
    """Stand-ins on PATH; `run` gives a script's exit code, its stderr, and the arguments of every `srun`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in [("srun", _SRUN), ("scontrol", "#!/usr/bin/env bash\necho node7\necho node8\n")]:
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def run(self, script: Path, **settings: str) -> tuple[int, str, list[str]]:
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        environ = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "SLURM_JOB_ID": "20017",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_CPUS_ON_NODE": "96",
            **settings,
        }
        done = subprocess.run(
            ["bash", str(script)], env=environ, cwd=self.folder, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr, calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_strict_executable_and_end_with_a_newline(script):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert text.endswith("\n")
    assert os.access(script, os.X_OK)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck: apt-get install shellcheck")
def test_scripts_are_shellcheck_clean():
    found = subprocess.run(
        ["shellcheck", *map(str, sorted(SCRIPTS.glob("*.sh")))], capture_output=True, text=True, check=False
    )
    assert found.stdout == ""


def test_convert_starts_one_task_a_node_then_verifies(slurm):
    settings = {"CONVERT_ARGS": "--dp-shard 8 --fsync"}
    code, _, calls = slurm.run(CONVERT, INPUT="/in", OUTPUT="/out dir", **settings)
    assert code == 0
    assert calls == [
        "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=96 --kill-on-bad-exit=1 --label "
        "python3 -m ckpt_tools convert-torch-dist-to-fsdp-dtensor /in /out dir --resume "
        "--report convert-20017.json --dp-shard 8 --fsync",
        "--nodes=1 --ntasks=1 python3 -m ckpt_tools verify /out dir",
    ]


def test_convert_in_a_container(slurm):
    code, _, calls = slurm.run(
        CONVERT,
        INPUT="/in",
        OUTPUT="/out",
        CPUS_PER_TASK="32",
        VERIFY="0",
        COMMAND="convert",
        CONTAINER_IMAGE="nvcr.io/x:1",
        CONTAINER_MOUNTS="/in,/out",
    )
    assert code == 0
    assert calls == [
        "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=32 --kill-on-bad-exit=1 --label "
        "--container-image=nvcr.io/x:1 --container-mounts=/in,/out python3 -m ckpt_tools convert /in /out --resume "
        "--report convert-20017.json"
    ]


def test_convert_returns_the_failure_of_its_ranks_and_of_the_verification(slurm):
    for fail, calls in (("convert-", 1), ("verify", 2)):
        code, _, made = slurm.run(CONVERT, INPUT="/in", OUTPUT="/out", FAIL=fail)
        assert (code, len(made)) == (6, calls)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("OUTPUT=/out", "set INPUT to the checkpoint to convert"),
        ("INPUT=/in", "set OUTPUT to the directory to write"),
    ],
)
def test_convert_refuses_incomplete_settings(slurm, settings, message):
    code, stderr, calls = slurm.run(CONVERT, **dict(word.split("=") for word in settings.split()))
    assert code != 0 and message in stderr and calls == []


def test_training_starts_after_a_preflight_of_the_same_flags(slurm):
    code, stderr, calls = slurm.run(
        TRAIN, CHECKPOINT="/ckpt", SAVE="/save", MEGATRON="/m", EP="16", EXTRA_ARGS="--fp8-format hybrid"
    )
    assert code == 0, stderr
    check, train = calls
    assert check.startswith("--nodes=1 --ntasks=1 python3 -m ckpt_tools preflight /ckpt -- PYTORCH_CUDA_")
    flags = check.partition(" PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False ")[2]
    assert "/m/pretrain_gpt.py " + flags in train
    for wanted in [
        "--data-parallel-sharding-strategy optim_grads_params",
        "--no-gradient-accumulation-fusion",
        "--ckpt-format fsdp_dtensor",
        "--expert-model-parallel-size 16",
        "--load /ckpt --save /save",
        "--mock-data",
        "--fp8-format hybrid",
    ]:
        assert wanted in flags
    assert "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node7:20017" in train


def test_training_does_not_start_when_the_preflight_fails(slurm):
    code, _, calls = slurm.run(TRAIN, CHECKPOINT="/ckpt", SAVE="/save", MEGATRON="/m", FAIL="preflight")
    assert (code, len(calls)) == (6, 1)


def test_training_goes_on_from_what_it_saved(slurm, tmp_path):
    settings = {"CHECKPOINT": "/ckpt", "SAVE": str(tmp_path), "MEGATRON": "/m", "WEIGHTS_ONLY": "1"}
    first = slurm.run(TRAIN, **settings)[2][1]
    assert "--load /ckpt " in first
    assert "--no-load-optim --no-load-rng --finetune" in first
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("200")
    again = slurm.run(TRAIN, **settings)[2][1]
    assert f"--load {tmp_path} " in again
    assert "--no-load-optim" not in again


# The model of te_mla_ep2_fr, after the script's own flags: the last word counts.
_SMALL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 16 --q-lora-rank 32 "
    "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --max-position-embeddings 64 "
    "--vocab-size 200 --make-vocab-size-divisible-by 16 --num-experts 4 --moe-layer-freq [0]+[1] "
    "--moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 32 --moe-router-topk 2 "
    "--override-opt_param-scheduler"
)


def test_training_flags_at_a_small_size_are_ready(slurm, tmp_path):
    """From the 3D-parallel run to the launch: converted, and checked with the very flags of the script."""
    source = fixture_dir("te_mla_ep2_fr")
    assert run(["convert", str(source), str(tmp_path / "out"), "-q"]) == 0

    def checked(**settings: str) -> Report:
        settings = {"EP": "2", "SEQ_LEN": "32", "EXTRA_ARGS": _SMALL} | settings
        checkpoint = str(tmp_path / "out")
        calls = slurm.run(TRAIN, CHECKPOINT=checkpoint, SAVE="/save", MEGATRON="/m", **settings)[2]
        return preflight(checkpoint, calls[0].partition(" -- ")[2].split()).report

    report = checked()
    assert report.findings == []
    assert {"layer-spec", "sizes", "parts", "expert-layers", "vocabulary", "mtp"} <= {
        c.name for c in report.checks
    }
    for more, rule in [("--num-experts 8", "sizes"), ("--transformer-impl local", "layer-spec"),
                       ("--mtp-num-layers 2", "mtp"), ("--kv-lora-rank 32", "sizes")]:  # fmt: skip
        assert {f.check for f in checked(EXTRA_ARGS=f"{_SMALL} {more}").findings} == {rule}
    assert {f.check for f in checked(WEIGHTS_ONLY="1").findings} == {
        "warm-start"
    }  # main raises NotImplementedError


def test_the_program_of_the_training_is_told_to_preflight(slurm):
    calls = slurm.run(TRAIN, CHECKPOINT="/ckpt", SAVE="/save", MEGATRON="/m", TARGET="core-0.16")[2]
    assert "preflight /ckpt --target core-0.16 -- " in calls[0]


def test_training_flags_break_no_rule_of_preflight(slurm):
    """Only those on the model itself: the checkpoint at hand is no DeepSeek-V3."""
    checkpoint = str(fixture_dir("core019_llama_tp2_native_fsdp_dtensor"))

    def broken(**settings: str) -> set[str]:
        calls = slurm.run(TRAIN, CHECKPOINT=checkpoint, SAVE="/save", MEGATRON="/m", **settings)[2]
        report = preflight(checkpoint, calls[0].partition(" -- ")[2].split()).report
        return {finding.check for finding in report.findings}

    assert broken() == {
        "architecture", "vocabulary", "layer-spec", "mtp", "sizes", "parts", "schedule",
    }  # fmt: skip
    assert broken(EXTRA_ARGS="--use-torch-fsdp2") - broken() == {"fsdp-or-fsdp2"}
