"""The way back on real checkpoints: nothing is lost on a round trip in either direction."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckpt_tools import ConvertOptions, ToTorchDistOptions, convert_to_fsdp_dtensor, convert_to_torch_dist
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError
from ckpt_tools.megatron.run_state.stored_values import optimizer_groups
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from tests.commands import oracle
from tests.commands.made import fsdp, torch_dist
from tests.commands.test_to_fsdp_dtensor import cases, made_of, options_of, source_of
from tests.conftest import fixture_dir

NATIVE = ("core019_llama_tp2_native_fsdp_dtensor", "core019_gpt3_tp2_native_fsdp_dtensor",
          "core019_moe_dp1_native_fsdp_dtensor")  # fmt: skip
OPTIMIZER = re.compile(r"^(chained_\d+\.)?optimizer\.")
LOST = ("rerun_state_machine",)  # of the common state: fsdp_dtensor has no place for it


def common_state(folder: Path) -> dict[str, Any]:
    if (folder / "common.pt").exists():
        return torch.load(folder / "common.pt", weights_only=False, pickle_module=oracle.PickleModule)
    return oracle.item(folder, "common_state/shard_0_1")[0]


def objects(folder: Path) -> dict[str, Any]:
    """Every object of a checkpoint; equal archives are unpickled once."""
    loaded: dict[bytes, Any] = {}
    found = {}
    for key, archive in oracle.objects(folder).items():
        if archive not in loaded:
            loaded[archive] = torch.load(
                io.BytesIO(archive), weights_only=False, pickle_module=oracle.PickleModule
            )
        found[key] = loaded[archive]
    return found


def same(a: object, b: object) -> bool:
    """Equality that also looks into tensors, arrays and shells of unknown classes."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and oracle.same_bytes(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dict__") and not isinstance(a, type):
        return type(a).__name__ == type(b).__name__ and same(vars(a), vars(b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_torch_dist_to_fsdp_dtensor_and_back(case):
    source, there = source_of(case), made_of(case)
    dtype = None if common_state(source).get("args") else "bfloat16"
    back = torch_dist(there, dtype=dtype)

    before, after = oracle.tensors(source), oracle.tensors(back)
    weights = {key for key in before if not OPTIMIZER.match(key)}
    assert weights == {key for key in after if not OPTIMIZER.match(key)}
    if (common_state(source).get("content_metadata") or {}).get("distrib_optim_sharding_type") in (
        "fully_reshardable",
        None,
    ) and not any("fp32_param" in key for key in before):
        oracle.assert_same(before, after)
    assert [key for key in weights if not oracle.same_bytes(before[key], after[key])] == []

    # Other layouts hold the same values in another form: compared after bringing both into one.
    asked = options_of(case)
    again = fsdp(back, layer_spec=asked.layer_spec, tp=asked.tp, swiglu=None if dtype is None else True)
    oracle.assert_same(there, again)
    assert oracle.objects(there) == oracle.objects(again)

    assert_same_common_state(source, back)
    extra = [{k for k in objects(f) if "._extra_state/" in k} for f in (source, back)]
    assert extra[0] <= extra[1]
    assert {k: v for k, v in objects(back).items() if k in extra[0]} == {k: [None] for k in extra[0]}
    assert json.loads((back / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def assert_same_common_state(source: Path, back: Path) -> None:
    """Everything that is not tensors: args, scheduler, groups in id order, steps, rng."""
    before, after = common_state(source), common_state(back)
    assert same(after, oracle.item(back, "common_state/shard_0_1")[0])
    kept = [name for name in before if name not in (*LOST, "optimizer", "content_metadata")]
    assert [name for name in kept if not same(before[name], after.get(name))] == []
    groups = optimizer_groups(before.get("optimizer")) or bucket_groups(source)
    rebuilt = optimizer_groups(after.get("optimizer"))
    assert len(groups) == len(rebuilt)
    for old, new in zip(groups, rebuilt, strict=True):
        assert {k: v for k, v in old.items() if not same(v, new.get(k))} == {}
        assert new.keys() - old.keys() <= {"default_config", "step"}  # filled in on the way there
    rng = {k: v for k, v in objects(back).items() if k.startswith("rng_state/")}
    old_rng = {k: v for k, v in objects(source).items() if k.startswith("rng_state/")}
    if rng:  # the grid that the args name; stages but the first, and ranks that the conversion left out, are copies
        assert rng.keys() == old_rng.keys()
        assert same(
            *(found["rng_state/shard_0.0_" + next(iter(rng)).rpartition("_")[2]] for found in (rng, old_rng))
        )
        assert all(any(same(value, old) for old in old_rng.values()) for value in rng.values())
    assert bool(rng) == bool(old_rng)


def bucket_groups(source: Path) -> list[dict[str, Any]]:
    """Groups of layouts that keep them beside the buckets."""
    found = objects(source)
    keys = sorted(key for key in found if ".dp_group_idx_0.optimizer/shard_" in key)
    return [group for key in keys for group in optimizer_groups(found[key][0])]


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_fsdp_dtensor_checkpoint_survives_the_way_back_and_forth(name, tmp_path):
    native = next(fixture_dir(name).glob("iter_*"))
    convert_to_torch_dist(fixture_dir(name), tmp_path / "back")
    back = tmp_path / "back" / native.name
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "2"
    convert_to_fsdp_dtensor(back, tmp_path / "again")
    oracle.assert_same(native, tmp_path / "again")
    assert same(objects(native), objects(tmp_path / "again"))
    weights = oracle.tensors(back)
    for key, value in weights.items():
        if f"optimizer.state.param.{key}" in weights:
            assert torch.equal(value, weights[f"optimizer.state.param.{key}"].bfloat16())


def test_rows_grouped_by_rank_are_put_back_by_the_number_of_rng_states(tmp_path):
    case = fixture_dir("main_gdn_fr_tp2")
    options = ConvertOptions(target=replace(options_of(case), tp=2))
    convert_to_fsdp_dtensor(source_of(case), tmp_path / "there", options)
    convert_to_torch_dist(tmp_path / "there", tmp_path / "back")
    oracle.assert_same(source_of(case), tmp_path / "back")
    wrong = ToTorchDistOptions(TorchDistOptions(tp=1))
    with pytest.raises(MappingError, match="--tp 1: the checkpoint is for 2 tensor-parallel ranks"):
        convert_to_torch_dist(tmp_path / "there", tmp_path / "wrong", wrong)


def test_every_layer_and_expert_is_a_chunk_of_its_own():
    stored = oracle.metadata(torch_dist(fsdp("core019_moe_ep2_fully_reshardable"))).state_dict_metadata
    expert = stored["optimizer.state.exp_avg.decoder.layers.1.mlp.experts.experts.linear_fc1.weight"]
    assert [c.offsets[0] for c in expert.chunks] == [0, 1, 2, 3]
    assert {tuple(c.sizes) for c in expert.chunks} == {(1, *expert.size[1:])}


def test_extra_states_from_a_template_or_none_at_all(tmp_path):
    case = fixture_dir("core019_llama_tp2_fully_reshardable")
    there = fsdp(source_of(case))
    for name, options in (
        ("template", ToTorchDistOptions(extra_state_template=str(source_of(case)))),
        ("none", ToTorchDistOptions(TorchDistOptions(extra_state=False))),
    ):
        convert_to_torch_dist(there, tmp_path / name, options)
    wanted = {key for key in objects(source_of(case)) if "._extra_state/" in key}
    found = [{key for key in objects(tmp_path / n) if "._extra_state/" in key} for n in ("template", "none")]
    assert found == [wanted, set()]
    with pytest.raises(MappingError, match="holds no _extra_state objects"):
        options = ToTorchDistOptions(extra_state_template=str(tmp_path / "none"))
        convert_to_torch_dist(there, tmp_path / "x", options)
    assert not (tmp_path / "x").exists()


def test_a_dry_run_writes_nothing_and_other_kinds_are_refused(tmp_path):
    native = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")
    report = convert_to_torch_dist(native, tmp_path / "out", dry_run=True)
    assert (report.written, report.groups, report.tensors) == (None, {0: 10, 1: 5}, 36)
    assert (report.masters.use, report.masters.mode) == ("as_stored", "none")  # nothing to compare them with
    assert list(tmp_path.iterdir()) == []
    model = tmp_path / "model"
    model.mkdir()
    save_file({"a": torch.zeros(2)}, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    with pytest.raises(
        UnsupportedCheckpointError,
        match=r"is a Hugging Face model. `import-hf .* --to torch_dist` makes a Megatron checkpoint of it",
    ):
        convert_to_torch_dist(model, tmp_path / "out")
