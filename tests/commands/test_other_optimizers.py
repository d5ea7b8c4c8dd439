"""Muon, Lion, SGD and an offloaded Adam: real checkpoints of them, there and back, against whole torch tensors."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import (
    ConvertOptions,
    TargetOptions,
    ToTorchDistOptions,
    convert_to_dcp,
    convert_to_fsdp_dtensor,
    convert_to_torch_dist,
    diff_checkpoints,
    slice_layers,
    verify_checkpoint,
)
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from tests.commands import oracle
from tests.commands.made import fsdp, torch_dist
from tests.commands.rewritten import read, write
from tests.commands.test_to_fsdp_dtensor import source_of
from tests.conftest import fixture_dir
from tests.data.pack import unpacked

KEPT = "kept."
# one run each, saved in both layouts: a layer-wise optimizer beside a distributed one
RUNS = ("main_muon", "main_muon_lion_tp2")
STATES = {
    "core016_sgd": {"momentum_buffer"},
    "main_muon_dpr": {"momentum_buffer", "exp_avg", "exp_avg_sq"},
    "main_muon_lion_tp2_dpr": {"momentum_buffer", "exp_avg"},
    "main_lion_dpr": {"exp_avg", "exp_avg_sq"},
}


@pytest.fixture(scope="module")
def real() -> Path:
    """The folder of the checkpoints, a folder each."""
    return unpacked("other_optimizers")


def optimizer_of(folder: Path) -> Any:
    """Its entry in the common state."""
    with open_checkpoint(str(folder)) as opened:
        return opened.common.values["optimizer"]


def plain(real: Path, name: str) -> Path:
    """The checkpoint with every state under the key of its weight: as Megatron saved it, or made of buckets."""
    same_run = real / name.replace("_dpr", "_fr")
    return same_run if same_run.exists() else torch_dist(real / name)


@pytest.mark.parametrize("name", ["core016_sgd", "main_muon_fr"])
def test_a_plain_state_dict_has_the_weights_and_says_what_it_lacks(real, tmp_path, name):
    told = convert_to_dcp(real / name, tmp_path / "dcp")
    weights = convert_to_dcp(
        real / name, tmp_path / "weights", ConvertOptions(target=TargetOptions(weights_only=True))
    )
    assert weights.tensors == told.tensors
    (line,) = [line for line in told.dropped if line.startswith("optimizer states ")]
    assert re.match(
        r"optimizer states .*momentum_buffer \(\d+ parameters, .*: only Adam's states and groups", line
    )
    assert any("no optimizer is written" in note for note in told.notes)
    found, alone = oracle.tensors(tmp_path / "dcp"), oracle.tensors(tmp_path / "weights")
    assert len(alone) > 10
    assert all(oracle.same_bytes(found[key], alone[key]) for key in alone)
    assert not any(key.startswith("optimizer") for key in found)


@pytest.mark.parametrize("name", RUNS)
def test_two_layouts_in_one_checkpoint_become_what_megatron_itself_saves_as_one(name, real):
    out = torch_dist(real / f"{name}_dpr")
    oracle.assert_same(out, real / f"{name}_fr")
    assert optimizer_of(out) == optimizer_of(real / f"{name}_fr")


def halves_by_layer(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Masters under the names of the running model: layers one by one, gate and up apart; by hand."""
    found = {}
    for key, value in stored.items():
        match = re.fullmatch(r"optimizer\.state\.(?:fp32_)?param\.(.+)", key)
        if match is None:
            continue
        layers = range(value.shape[0]) if ".layers." in match[1] else (None,)
        for layer in layers:
            name, part = match[1], value
            if layer is not None:
                name, part = name.replace(".layers.", f".layers.{layer}."), value[layer]
            name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
            name = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
            if "linear_fc1.weight" in name:
                found[f"model.module.{name}_w"], found[f"model.module.{name}_v"] = part.chunk(2)
            else:
                found[f"model.module.{name}"] = part
    return found


@pytest.mark.parametrize("name", STATES)
def test_masters_are_written_and_every_state_that_is_left_out_is_named(name, real, tmp_path):
    report = convert_to_fsdp_dtensor(real / name, tmp_path / "out")
    masters = halves_by_layer(oracle.tensors(plain(real, name)))
    assert len(masters) == 18
    oracle.assert_same(tmp_path / "out", masters)
    (line,) = [line for line in report.dropped if line.startswith("optimizer states")]
    assert set(re.findall(r"(\w+) \(\d+ parameters", line)) == STATES[name]
    assert "resumes from Adam" in line
    assert any(note.startswith("no optimizer is written") for note in report.notes)


def test_a_conversion_equals_its_source(real):
    out = fsdp(real / "main_muon_dpr")
    for source in ("main_muon_dpr", "main_muon_fr"):
        assert diff_checkpoints(real / source, out).is_equal


@pytest.mark.parametrize("name", RUNS)
def test_a_slice_of_two_layouts_is_what_a_slice_of_one_is(name, real, tmp_path):
    for layout in ("dpr", "fr"):
        slice_layers(real / f"{name}_{layout}", tmp_path / layout, "1:2")
    oracle.assert_same(tmp_path / "dpr", tmp_path / "fr")
    assert optimizer_of(tmp_path / "dpr") == optimizer_of(tmp_path / "fr")


def test_verify_finds_nothing_in_what_megatron_saved(real):
    """But that nothing tells which states a mixture keeps of which weight."""
    for folder in sorted(real.iterdir()):
        report = verify_checkpoint(folder)
        assert report.is_valid, folder
        assert {f.message.partition(":")[0] for f in report.findings} <= {
            "whether states are missing cannot be known"
        }, folder


def test_verify_finds_a_state_that_one_weight_of_muon_has_lost(real, tmp_path):
    parts = read(real / "main_muon_fr")
    del parts.tensors["optimizer.state.exp_avg_sq.decoder.final_layernorm.weight"]
    report = verify_checkpoint(write(tmp_path / "in", parts))
    assert [(f.where, f.message) for f in report.findings if f.where.startswith("decoder")] == [
        ("decoder.final_layernorm.weight", "its states ['exp_avg_sq'] are missing, others are there")
    ]


def test_another_form_of_a_checkpoint_keeps_its_states(real, tmp_path):
    """What an SGD job asks for: masters called fp32_param, and its groups; it has no layout of a distributed one."""
    apart = ToTorchDistOptions(target=TorchDistOptions(stacked=False))
    convert_to_torch_dist(real / "core016_sgd", tmp_path / "apart", apart)
    ours, source = oracle.tensors(tmp_path / "apart"), oracle.tensors(real / "core016_sgd")
    expected = {
        key.replace(".layers.", f".layers.{layer}."): value[layer] if ".layers." in key else value
        for key, value in source.items()
        for layer in range(2)
    }
    oracle.assert_same(ours, expected)
    assert any(".fp32_param." in key for key in ours)
    assert optimizer_of(tmp_path / "apart") == optimizer_of(real / "core016_sgd")
    with open_checkpoint(str(tmp_path / "apart")) as opened:
        assert "distrib_optim_sharding_type" not in opened.common.values["content_metadata"]


def test_an_offloaded_adam_is_adam(real, tmp_path):
    """Its groups name the classes of its parts; they are read as names and go along."""
    source = real / "core016_offloaded_adam"
    report = convert_to_fsdp_dtensor(source, tmp_path / "there")
    assert not report.kept and sum(report.groups.values()) == 16
    stored = oracle.tensors(source)
    ours = oracle.tensors(tmp_path / "there")
    oracle.assert_same({k: v for k, v in ours.items() if k.startswith("model.")}, halves_by_layer(stored))
    back = torch_dist(tmp_path / "there")
    oracle.assert_same(back, stored)
    (group, *_) = optimizer_of(back)["optimizer"]["param_groups"]
    assert group["step"] == 2
    assert (group["cpu_optimizer_cls"].module, group["cpu_optimizer_cls"].qualname) == (
        "torch.optim.adamw",
        "AdamW",
    )


def test_a_parameter_that_lost_its_state_is_refused_in_both_directions(real, tmp_path):
    parts = read(real / "core016_sgd")
    del parts.tensors["optimizer.state.momentum_buffer.decoder.final_layernorm.weight"]
    source = str(write(tmp_path / "in", parts))
    for convert in (convert_to_fsdp_dtensor, convert_to_torch_dist):
        with pytest.raises(MappingError, match=r"decoder\.final_layernorm\.weight: no momentum_buffer"):
            convert(source, str(tmp_path / "out"))


# ---- FP8: what Transformer Engine keeps of delayed scaling


def test_the_way_back_says_that_weights_are_no_longer_those_of_fp8(tmp_path):
    report = convert_to_torch_dist(source_of(fixture_dir("n_fp8p_dp2")), tmp_path / "out")
    assert any("quantizes them again" in note for note in report.notes)
    ours = oracle.tensors(tmp_path / "out")
    trained = [key for key in ours if f"optimizer.state.param.{key}" in ours]
    assert len(trained) == 9
    for key in trained:
        assert oracle.same_bytes(ours[key], ours[f"optimizer.state.param.{key}"].bfloat16())


def test_scales_that_no_other_format_holds_are_named_both_ways(tmp_path):
    there = convert_to_fsdp_dtensor(source_of(fixture_dir("te_fp8_tp2_fr")), tmp_path / "there")
    assert len([line for line in there.dropped if "FP8 scales, which torch_dist alone holds" in line]) == 8
    back = convert_to_torch_dist(tmp_path / "there", tmp_path / "back")
    assert back.notes[0].startswith("FP8 scaling starts again")


def test_scales_go_to_the_shards_of_their_layers_and_those_without_a_key_are_named_once(tmp_path):
    source = source_of(fixture_dir("te_fp8_tp2_fr"))
    apart, together, none = (
        ToTorchDistOptions(target=TorchDistOptions(stacked=stacked, extra_state=asked))
        for stacked, asked in ((False, True), (True, True), (False, False))
    )
    assert convert_to_torch_dist(source, tmp_path / "apart", apart).dropped == ()
    slice_layers(source, tmp_path / "second", "1:2")
    slice_layers(tmp_path / "apart", tmp_path / "second_apart", "1:2")
    convert_to_torch_dist(tmp_path / "second", tmp_path / "second_cut", apart)
    assert diff_checkpoints(tmp_path / "second_cut", tmp_path / "second_apart").is_equal
    convert_to_torch_dist(tmp_path / "apart", tmp_path / "again", together)
    assert diff_checkpoints(source, tmp_path / "again").is_equal
    lost = convert_to_torch_dist(source, tmp_path / "none", none).dropped
    assert len([line for line in lost if "which has no such key" in line]) == 8 == len(lost) - 1
