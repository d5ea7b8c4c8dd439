"""What real jobs of Megatron-FSDP stored, laid out otherwise and back: their own chunks and bytes again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.verify import VerifyOptions, verify_checkpoint
from tests.commands import oracle
from tests.conftest import fixture_dir

HSDP = "--dp-shard 1 --dp-outer 2 --outer-strategy optim"
JOBS = {
    "n_hsdp2": HSDP,
    "n_moe_ep2": "--dp-shard 2 --ep 2",
    "v16n_moe_ep2": "--dp-shard 2 --ep 2",
    "n_llama_dp2": "--dp-shard 2",
    "n_fp8p_dp2": "--dp-shard 2",
    "n_gdn_dp1": "--dp-shard 1 --tp 1",
    "n_mla_dp1": "--dp-shard 1",
    "core019_llama_tp2_native_fsdp_dtensor": "--dp-shard 1 --tp 2",
}


def chunks(folder: Path) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Boxes of every parameter's and state's chunks."""
    return {
        key: sorted((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks)
        for key, entry in oracle.metadata(folder).state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }


def laid_out(source: Path, output: Path, words: str) -> Path:
    assert run(["convert", str(source), str(output), "--quiet", *words.split()]) == 0
    return output


@pytest.mark.parametrize("name", JOBS)
def test_a_native_job_gets_its_own_chunks_back(name: str, tmp_path: Path) -> None:
    native = next(fixture_dir(name).glob("iter_*"))
    tp = "--tp 2" if "--tp 2" in JOBS[name] else "--tp 1"
    between = laid_out(native, tmp_path / "a", f"--dp-shard 5 {tp} --layout fsdp2")
    again = laid_out(between, tmp_path / "b", JOBS[name])
    assert chunks(again) == chunks(native)
    assert chunks(between) != chunks(native)
    found, expected = oracle.tensors(again), oracle.tensors(native)
    assert found.keys() == expected.keys()
    assert all(oracle.same_bytes(found[key], expected[key]) for key in expected)
    assert verify_checkpoint(str(again), None, VerifyOptions(content=True)).is_valid


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("--dp-shard 2 --dp-outer 2", "--dp-shard 2"),  # replicas write nothing of their own
        ("--dp-shard 4 --strategy optim", "--dp-shard 4"),
        ("--dp-shard 4 --strategy optim_grads", "--dp-shard 4"),
        ("--dp-shard 4 --strategy 1", "--dp-shard 4"),
    ],
)
def test_strategies_that_store_the_same(words: str, same: str, tmp_path: Path) -> None:
    """ZeRO-1 and 2 hold weights whole, but what the optimizer steps, and so what is stored, is cut as in ZeRO-3."""
    native = next(fixture_dir("n_llama_dp2").glob("iter_*"))
    one, other = laid_out(native, tmp_path / "a", words), laid_out(native, tmp_path / "b", same)
    assert chunks(one) == chunks(other)


def test_no_shard_stores_every_tensor_whole(tmp_path: Path) -> None:
    native = next(fixture_dir("n_llama_dp2").glob("iter_*"))
    out = laid_out(native, tmp_path / "a", "--dp-shard 4 --strategy no_shard")
    shapes = {
        key: tuple(e.size)
        for key, e in oracle.metadata(native).state_dict_metadata.items()
        if hasattr(e, "size")
    }
    assert chunks(out) == {key: [((0,) * len(shape), shape)] for key, shape in shapes.items()}


def test_an_outer_strategy_that_the_inner_one_does_not_allow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    native = str(next(fixture_dir("n_hsdp2").glob("iter_*")))
    words = f"{HSDP} --strategy optim".split()
    assert run(["convert", native, str(tmp_path / "out"), "--quiet", *words]) == 2
    assert "strategy must be optim_grads_params, not optim" in capsys.readouterr().err.replace("\n", " ")
