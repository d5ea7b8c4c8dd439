"""What real jobs of Megatron-FSDP stored, laid out otherwise and back: their own chunks and bytes again."""

from pathlib import Path

import pytest
import torch

from ckpt_tools.cli.app import run
from ckpt_tools.commands.convert.plan import BufferTypes, buffer_types
from ckpt_tools.formats.pickle.unpickle import TorchDtype
from ckpt_tools.megatron.run_state.common_state import CommonState
from tests.commands import oracle
from tests.commands.rewritten import saved
from tests.commands.test_repair import parts
from tests.conftest import fixture_dir
from tests.folders import is_sound

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
def test_a_native_job_gets_its_own_chunks_back(name, tmp_path):
    native = next(fixture_dir(name).glob("iter_*"))
    tp = "--tp 2" if "--tp 2" in JOBS[name] else "--tp 1"
    between = laid_out(native, tmp_path / "a", f"--dp-shard 5 {tp} --layout fsdp2")
    again = laid_out(between, tmp_path / "b", JOBS[name])
    assert chunks(again) == chunks(native)
    assert chunks(between) != chunks(native)
    found, expected = oracle.tensors(again), oracle.tensors(native)
    oracle.assert_same(found, expected)
    assert is_sound(again)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_bf16_main_weights_are_exact_masters(moments, tmp_path):
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
    source = saved(tmp_path / "source" / "iter_0000002", tensors | objects)
    again = oracle.tensors(laid_out(source, tmp_path / "again", "--dp-shard 3 --tp 2"))
    assert all(oracle.same_bytes(again[key], tensors[key]) for key in tensors)
    there = laid_out(source, tmp_path / "there", "--to torch_dist")
    assert is_sound(there)
    found = oracle.tensors(there)
    proj = "self_attention.linear_proj.weight"
    for layer in (0, 1):
        stored = tensors[f"model.module.decoder.layers.{layer}.{proj}"]
        assert oracle.same_bytes(found[f"decoder.layers.{proj}"][layer], stored)
        assert oracle.same_bytes(found[f"optimizer.state.param.decoder.layers.{proj}"][layer], stored.float())
        assert found[f"optimizer.state.exp_avg.decoder.layers.{proj}"].dtype == moments


MFSDP, MAIN = "use_megatron_fsdp", "megatron_fsdp_main_params_dtype"
BF16 = TorchDtype("bfloat16")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("float32", None)),
        ({MAIN: BF16}, ("float32", None)),  # of another kind of job
        ({MFSDP: True, MAIN: BF16, "megatron_fsdp_main_grads_dtype": TorchDtype("float32")}, ("bfloat16", "float32")),
        ({MFSDP: True, MAIN: None}, (None, None)),
        ({MFSDP: True, MAIN: "auto"}, ("float32", None)),
    ],
)  # fmt: skip
def test_memory_is_of_the_types_that_the_job_had(settings, expected):
    assert buffer_types(CommonState({}, None, settings)) == BufferTypes(*expected)
