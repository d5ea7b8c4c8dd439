"""What real jobs of Megatron-FSDP stored, laid out otherwise and back: their own chunks and bytes again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.verify import VerifyOptions, verify_checkpoint
from ckpt_tools.commands.convert.plan import BufferTypes, buffer_types
from ckpt_tools.formats.pickle.unpickle import TorchDtype
from ckpt_tools.megatron.run_state.common_state import CommonState
from tests.commands import oracle
from tests.commands.test_repair import parts, write
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


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_bf16_main_weights_are_exact_masters(moments: torch.dtype, tmp_path: Path) -> None:
    """What `--megatron-fsdp-main-params-dtype bf16` stores: laid out byte for byte, widened for 3D."""
    native = next(fixture_dir("core019_llama_tp2_native_fsdp_dtensor").glob("iter_*"))
    tensors, objects = parts(native)
    tensors = {
        key: value.bfloat16()
        if key.startswith("model.")
        else value.to(moments)
        if key.endswith(("exp_avg", "exp_avg_sq"))
        else value
        for key, value in tensors.items()
    }
    source = write(tmp_path / "source" / "iter_0000002", tensors | objects)
    again = oracle.tensors(laid_out(source, tmp_path / "again", "--dp-shard 3 --tp 2"))
    assert all(oracle.same_bytes(again[key], tensors[key]) for key in tensors)
    there = laid_out(source, tmp_path / "there", "--to torch_dist")
    assert verify_checkpoint(str(there), None, VerifyOptions(content=True)).is_valid
    found = oracle.tensors(there)
    proj = "self_attention.linear_proj.weight"
    for layer in (0, 1):
        stored = tensors[f"model.module.decoder.layers.{layer}.{proj}"]
        assert oracle.same_bytes(found[f"decoder.layers.{proj}"][layer], stored)
        assert oracle.same_bytes(found[f"optimizer.state.param.decoder.layers.{proj}"][layer], stored.float())
        assert found[f"optimizer.state.exp_avg.decoder.layers.{proj}"].dtype == moments


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("float32", None)),
        ({"use_megatron_fsdp": True}, ("float32", None)),
        (
            {"megatron_fsdp_main_params_dtype": TorchDtype("bfloat16")},
            ("float32", None),
        ),  # of another kind of job
        (
            {
                "use_megatron_fsdp": True,
                "megatron_fsdp_main_params_dtype": TorchDtype("bfloat16"),
                "megatron_fsdp_main_grads_dtype": TorchDtype("float32"),
            },
            ("bfloat16", "float32"),
        ),
        ({"use_megatron_fsdp": True, "megatron_fsdp_main_params_dtype": None}, (None, None)),
        ({"use_megatron_fsdp": True, "megatron_fsdp_main_params_dtype": "auto"}, ("float32", None)),
    ],
)
def test_memory_is_of_the_types_that_the_job_had(
    settings: dict[str, object], expected: tuple[str | None, str | None]
) -> None:
    assert buffer_types(CommonState({}, None, settings)) == BufferTypes(*expected)
