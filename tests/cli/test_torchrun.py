"""The conversion under real torchrun: the number of converting processes never changes a byte."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.cli.app import run
from tests.conftest import DATA, REPO, fixture_dir
from tests.damage import copy_of, drop_key, metadata_of, payload_of, replace_chunk
from tests.ports import free_port

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"


def torchrun(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = "import sys; sys.modules['torch'] = None; from ckpt_tools.cli.app import run; sys.exit(run())"
    command = [
        *launcher,
        "--no-python",
        sys.executable,
        "-c",
        program,
        "convert",
        *map(str, words),
    ]  # no rank imports it
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=REPO, env=env, capture_output=True, text=True, timeout=200, check=False
    )


def digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_one_two_and_four_processes_write_the_same_bytes(tmp_path):
    found = []
    for ranks in (1, 2, 4):
        done = torchrun(ranks, LLAMA, tmp_path / str(ranks), "--world-size", 3)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("converted") == 1, done.stdout
        found.append(digests(tmp_path / str(ranks)))
    assert found[0] == found[1] == found[2]
    assert {f"iter_0000002/__{rank}_0.distcp" for rank in range(3)} < set(found[0])


def test_without_a_world_size_every_process_is_a_target_rank(tmp_path):
    done = torchrun(2, LLAMA, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    names = sorted(os.listdir(tmp_path / "out" / "iter_0000002"))
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "ckpt_tools.json"]


def test_a_rank_that_fails_fails_all_and_nothing_is_published(tmp_path):
    """A payload of one rank's share is damaged: both ranks end with its message and its exit code.

    Started without torchrun's agent, which would end the other rank as soon as one has failed.
    """
    source = Path(shutil.copytree(LLAMA, tmp_path / "source"))
    os.truncate(source / "iter_0000002" / "__1_0.distcp", 150_000)
    words = [source, tmp_path / "out", "--check-masters", "none", "--quiet"]
    first, second = two_ranks(words, words)
    assert first == second and first[0] == 4
    assert "__1_0.distcp" in first[1]
    assert not list(tmp_path.glob("out/**/.metadata"))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["OUT", "--check-source", "none"], 2, "check_source is 'all' on rank 0 and 'none' on rank 1"),
        (["OUT", "--verify"], 2, "verify_output is False on rank 0 and True on rank 1"),
        (["OUT", "--dry-run"], 2, "dry_run is False on rank 0 and True on rank 1"),
        (["OUT", "--to", "torch_dist"], 2, "ConvertOptions on rank 0 and ToTorchDistOptions on rank 1"),
        (["OUT", "--iteration", "all"], 2, "ConvertOptions on rank 0 and --iteration all on rank 1"),
        (["ELSEWHERE"], 2, "ELSEWHERE on rank 1"),
        (["OUT", "--workers", "1"], 0, ""),
    ],
)
def test_ranks_are_asked_for_the_same(tmp_path, words, code, says):
    words = [tmp_path / word if word.isupper() else word for word in words]
    first, second = two_ranks([LLAMA, tmp_path / "OUT", "-q"], [LLAMA, *words, "-q"])
    assert first == second and first[0] == code
    assert says in first[1]
    assert (code == 0) == any(tmp_path.iterdir())


def test_a_source_that_one_rank_does_not_see_is_named_by_all(tmp_path):
    first, second = two_ranks([LLAMA, tmp_path / "OUT"], [tmp_path / "absent", tmp_path / "OUT"])
    assert first == second and first[0] == 3
    assert f"rank 1: {tmp_path / 'absent'}" in first[1]


def test_what_ranks_find_wrong_while_they_plan_is_named_by_all(tmp_path):
    """They fail at different places, each on its way to the first step of all."""
    whole, broken = copy_of(LLAMA.name, tmp_path), copy_of(LLAMA.name, tmp_path / "broken")
    with metadata_of(broken) as metadata:
        drop_key(metadata, "decoder.final_layernorm.weight")
    first, second = two_ranks([whole, whole / "OUT", "-q"], [broken, whole / "OUT", "-q"])
    assert first == second and first[0] == 2
    assert f"rank 0: the output {whole}/OUT and the source {whole} overlap" in first[1]
    assert "\nrank 1: " in first[1] and "final_layernorm.weight" in first[1]


def test_a_proof_that_fails_on_one_rank_while_it_plans_is_that_of_all(tmp_path):
    whole = copy_of("core019_llama_tp2_dp_reshardable", tmp_path)
    damaged = copy_of(whole.name, tmp_path / "damaged")
    key, offset = "decoder.final_layernorm.weight", (0,)
    replace_chunk(damaged, key, offset, "bfloat16", bytes(len(payload_of(damaged, key, offset)[2])))
    first, second = two_ranks([whole, tmp_path / "OUT", "-q"], [damaged, tmp_path / "OUT", "-q"])
    assert first == second and first[0] == 6
    assert "rank 1: the optimizer state cannot be assigned to the weights" in first[1]


@pytest.mark.parametrize(("verb", "more"), [("average", [LLAMA]), ("copy", []), ("repair", [])])
def test_what_a_verb_refuses_before_it_plans_is_named_by_all(tmp_path, verb, more):
    source, absent = fixture_dir("core019_gpt3_tp2_native_fsdp_dtensor"), tmp_path / "absent"
    first, second = two_ranks([source, *more, tmp_path / "OUT"], [absent, *more, tmp_path / "OUT"], verb=verb)
    assert first == second
    assert f"rank 1: {absent}" in first[1]


@pytest.mark.parametrize(
    "words", ["convert IN", "strip IN", "average IN IN", "copy IN", "copy IN --json", "export-hf IN"]
)
def test_other_ranks_print_no_report(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ckpt_tools.cli.progress.is_first_rank", lambda: False)
    verb, *given = words.replace("IN", str(LLAMA)).split()
    assert run([verb, *given, str(tmp_path / "OUT")]) == 0
    assert capsys.readouterr().out == ""


def two_ranks(*words: list[Any], verb: str = "convert") -> list[tuple[int, str]]:
    """How a command ends on two ranks, each with its own words: its exit code and errors."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "ckpt_tools", verb, *map(str, words[rank])],
            cwd=REPO,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=200)[1] for process in ranks]
    return [(process.returncode, error) for process, error in zip(ranks, errors, strict=True)]
