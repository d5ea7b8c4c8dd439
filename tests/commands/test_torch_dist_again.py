"""`convert --to torch_dist` of torch_dist: any optimizer layout becomes `fully_reshardable`, or another program's."""

from pathlib import Path
from typing import Any

import pytest

from ckpt_tools import ToTorchDistOptions, convert_to_torch_dist
from ckpt_tools.errors import CorruptCheckpointError, UsageError, VerificationError
from ckpt_tools.execute.run import WriteOptions
from ckpt_tools.megatron.run_state.stored_values import optimizer_groups
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from tests.commands import oracle
from tests.commands.made import fsdp, torch_dist
from tests.commands.test_source_damage import copy_of, payloads
from tests.commands.test_to_fsdp_dtensor import made_of, options_of, source_of
from tests.commands.test_to_torch_dist import (
    assert_same_common_state,
    common_state,
    objects,
    same,
)
from tests.conftest import fixture_dir

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
