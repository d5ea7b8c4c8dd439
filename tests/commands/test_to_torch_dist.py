"""To `torch_dist` on real checkpoints: nothing is lost on a round trip, whichever direction it begins with.

From `torch_dist` any optimizer layout becomes `fully_reshardable`, or another program's.
"""

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
from ckpt_tools.errors import (
    CorruptCheckpointError,
    MappingError,
    UnsupportedCheckpointError,
    UsageError,
    VerificationError,
)
from ckpt_tools.execute.run import WriteOptions
from ckpt_tools.megatron.run_state.stored_values import optimizer_groups
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from tests.commands import oracle
from tests.commands.made import fsdp, torch_dist
from tests.commands.test_source_damage import copy_of, payloads
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


ONE_RUN = (("te_llama_dp2_buckets_dpr", "te_llama_dp2_buckets_fr"),
           ("core019_llama_tp2_dp_reshardable", "core019_llama_tp2_fully_reshardable"),
           ("core016_llama_tp2_dp_reshardable", "core016_llama_tp2_fully_reshardable"))  # fmt: skip
# Of the arguments: where a run saved, and in which layout.
SAVED = {"save", "load", "dump_param_to_param_group_map", "dist_ckpt_optim_fully_reshardable"}
OTHER_LAYOUTS = (
    "main_dense_dpr_pp2_vpp2_tied",
    "v013_dense_dpzero_tp2_dp2",
    "v015_moe_ms_etp2_shared",
    "v016_dense_nodistopt_tp2",
)


def again(source: Path, output: Path, **target: Any) -> Path:
    convert_to_torch_dist(source, output, ToTorchDistOptions(target=TorchDistOptions(**target)))
    return output


def plain(value: Any) -> Any:
    """A common state without what differs between two saves of one run."""
    args = {name: v for name, v in vars(value["args"]).items() if name not in SAVED}
    return {**value, "args": args}


@pytest.mark.parametrize(("buckets", "natural"), ONE_RUN)
def test_buckets_become_what_the_same_run_saved_as_fully_reshardable(buckets, natural):
    expected, made = source_of(fixture_dir(natural)), torch_dist(buckets)
    oracle.assert_same(made, expected)
    assert same(plain(common_state(made)), plain(common_state(expected)))
    ours, theirs = (
        {key: value for key, value in oracle.objects(f).items() if not key.startswith("common_state/")}
        for f in (made, expected)
    )
    assert ours == theirs
    assert len(ours) > 8


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_every_layout_is_brought_over_with_all_that_stands_beside_it(name):
    case = fixture_dir(name)
    source, made = source_of(case), torch_dist(name)
    assert_same_common_state(source, made)
    assert common_state(made)["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    kept = {
        k: v
        for k, v in oracle.objects(source).items()
        if "._extra_state/" in k or k.startswith("rerun_state")
    }
    assert {k: v for k, v in oracle.objects(made).items() if k in kept} == kept
    before, after = oracle.tensors(source), oracle.tensors(made)
    weights = {key: value for key, value in before.items() if "optimizer." not in key}
    assert [key for key, value in weights.items() if not oracle.same_bytes(value, after[key])] == []
    oracle.assert_same(
        made_of(case), fsdp(made, layer_spec=options_of(case).layer_spec, tp=options_of(case).tp)
    )


def test_nothing_to_convert_is_said_with_what_to_give(tmp_path):
    source = source_of(fixture_dir("core019_llama_tp2_fully_reshardable"))
    with pytest.raises(
        UsageError, match=r"nothing to convert: .*torch_dist checkpoint \(fully_reshardable\).*--target"
    ):
        again(source, tmp_path / "out")
    first = again(source, tmp_path / "first", dialect="main")
    oracle.assert_same(first, source)
    with pytest.raises(UsageError, match="nothing to convert"):  # it is main's already, as its record says
        again(first, tmp_path / "out", dialect="main")
    with pytest.raises(UsageError, match=r"--tp 2: no meaning for this conversion to torch_dist"):
        again(source, tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()


def test_another_program_gets_its_own_grid_of_rng_states_and_what_it_may_ask_for(tmp_path):
    source = source_of(fixture_dir("te_moe_ep2_dpr"))
    made = again(source, tmp_path / "made", dialect="core-0.16")
    assert {key for key in objects(made) if key.startswith("rng_state/")} == {
        "rng_state/shard_0.0.0_1.1.2",
        "rng_state/shard_0.0.1_1.1.2",
    }
    ours, theirs = oracle.objects(made), oracle.objects(source)
    extra = {key for key in theirs if "._extra_state/" in key}
    assert {key: ours[key] for key in extra} == {key: theirs[key] for key in extra}
    assert {key for key in ours if "._extra_state/" in key} > extra


def test_groups_of_routed_experts_follow_the_job(tmp_path):
    source = source_of(fixture_dir("te_moe_ep2_dpr"))
    apart = common_state(again(source, tmp_path / "apart"))["optimizer"]
    assert [[g["is_expert_parallel"] for g in optimizer_groups(apart[i])] for i in (0, 1)] == [
        [False, False],
        [True],
    ]
    together = common_state(again(source, tmp_path / "together", ep=1, etp=1))["optimizer"]
    assert [g["is_expert_parallel"] for g in optimizer_groups(together)] == [False, False]
    parted = common_state(again(tmp_path / "together", tmp_path / "parted", ep=2))["optimizer"]
    assert [g["is_expert_parallel"] for g in optimizer_groups(parted[1])] == [True, True]


def test_the_form_and_the_parts_can_be_chosen(tmp_path):
    source = source_of(fixture_dir("core019_llama_tp2_dp_reshardable"))
    weights = again(source, tmp_path / "weights", weights_only=True)
    assert not any("optimizer" in key for key in (*oracle.tensors(weights), *common_state(weights)))
    single = again(source, tmp_path / "single", stacked=False)
    stored, whole = oracle.tensors(single), oracle.tensors(source)
    for layer in (0, 1):
        name = "self_attention.linear_qkv.weight"
        assert oracle.same_bytes(
            stored[f"decoder.layers.{layer}.{name}"], whole[f"decoder.layers.{name}"][layer]
        )
    keys = {key for key in objects(single) if "linear_qkv._extra_state/" in key}
    assert keys == {f"decoder.layers.{i}.self_attention.linear_qkv._extra_state/shard_0_1" for i in (0, 1)}
    oracle.assert_same(torch_dist(single, stacked=True), torch_dist("core019_llama_tp2_dp_reshardable"))


def test_damaged_masters_are_damage_and_unproven_ones_an_error_of_their_own(tmp_path):
    source = copy_of("v016_dense_nodistopt_tp2", tmp_path / "source")
    key, file, offset, _ = next(p for p in payloads(source) if ".fp32_param." in p[0] or ".param." in p[0])
    data = bytearray(file.read_bytes())
    data[offset + 3] ^= 0x40
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=key.rpartition("optimizer.state.")[2]):
        again(source, tmp_path / "out")
    unseen = ToTorchDistOptions(write=WriteOptions(check_source="none"))
    with pytest.raises(VerificationError, match="do not round to the stored weights"):
        convert_to_torch_dist(source, tmp_path / "out", unseen)
    assert not (tmp_path / "out").exists()
