"""Commands that take the stored weights alone hold them against the masters that they leave out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from ckpt_tools import ExportOptions, export_hf, merge_adapter, strip_checkpoint
from ckpt_tools.cli.app import run
from ckpt_tools.errors import CorruptCheckpointError, VerificationError
from ckpt_tools.megatron.keys import bucket_key
from tests.commands.test_diff import FC2, LLAMA, NAN_BITS, ZERO, damaged, filled
from tests.conftest import fixture_dir
from tests.damage import copy_of, drop_key, flip_bit, infos_of, keys_with, metadata_of, payload_of
from tests.megatron.adapter_checkpoints import lora

COMMANDS = ["export-hf", "convert --to hf", "strip"]
BUCKETS = "core016_llama_tp2_dp_reshardable"


@pytest.mark.parametrize("element", [ZERO, NAN_BITS], ids=["zeros", "nan"])
@pytest.mark.parametrize("command", COMMANDS)
def test_destroyed_weights_beside_sound_masters_are_refused(command, element, tmp_path, capsys):
    source, out = damaged(tmp_path, element), tmp_path / "out"
    words = [*command.split(), str(source), str(out), "-q"]
    for level in ("sample", "all"):
        assert run([*words, "--check-masters", level]) == 6
        told = capsys.readouterr().err
        assert "the master weights of 2 tensors do not round to the stored weights" in told
        assert "decoder.layers.1.mlp.linear_fc2.weight[0, 0]" in told
        assert "--check-masters none" in told
        assert not out.exists()
    assert run([*words, "--check-masters", "none"]) == 0


def test_what_is_taken_unproven_is_what_is_stored(tmp_path):
    source = damaged(tmp_path, ZERO)
    export_hf(source, tmp_path / "hf", ExportOptions(check_masters="none"))
    strip_checkpoint(source, tmp_path / "weights", check_masters="none")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert not stored["model.layers.0.mlp.down_proj.weight"].any()
    with metadata_of(tmp_path / "weights") as metadata:
        offsets = list(infos_of(metadata, FC2))
    assert offsets
    for offset in offsets:
        assert not any(payload_of(tmp_path / "weights", FC2, offset)[2])


@pytest.mark.parametrize("command", COMMANDS)
def test_sound_masters_are_counted(command, tmp_path, capsys):
    words = [*command.split(), str(fixture_dir(LLAMA)), str(tmp_path / "out"), "-q", "--json"]
    assert run([*words, "--check-masters", "all"]) == 0
    masters = json.loads(capsys.readouterr().out)["masters"]
    assert (masters["use"], masters["mode"]) == ("left_out", "all")
    assert masters["checked"] > 0
    assert masters["elements"] == masters["elements_in_all"] == 32928


@pytest.mark.parametrize("name", [LLAMA, BUCKETS])
def test_damage_that_a_checksum_shows_is_called_so(name, tmp_path):
    source: Path = copy_of(name, tmp_path)
    path, start, _ = payload_of(source, FC2, (0, 0, 0))
    flip_bit(path, start + 1, 6)
    with pytest.raises(CorruptCheckpointError):
        export_hf(source, tmp_path / "hf")
    with pytest.raises(CorruptCheckpointError):
        strip_checkpoint(source, tmp_path / "weights")


def test_damaged_masters_are_refused_too(tmp_path):
    """Which of the two is wrong is not known."""
    source: Path = copy_of(LLAMA, tmp_path)
    filled(source, f"optimizer.state.param.{FC2}", "float32", b"\0\0\0\0")
    for work in (export_hf, strip_checkpoint):
        with pytest.raises(VerificationError, match="do not round"):
            work(source, tmp_path / "out")


@pytest.mark.parametrize("element", [ZERO, NAN_BITS], ids=["zeros", "nan"])
@pytest.mark.parametrize("command", [*COMMANDS, "convert --to hf --dtype float32"])
def test_destroyed_weights_beside_buckets_are_refused(command, element, tmp_path, capsys):
    """Content alone tells which masters are whose, and these masters are nobody's."""
    source: Path = copy_of(BUCKETS, tmp_path)
    out = tmp_path / "out"
    filled(source, FC2, "bfloat16", element)
    first, *options = command.split()
    for level in ("sample", "all"):
        assert run([first, *options, str(source), str(out), "-q", "--check-masters", level]) == 6
        told = capsys.readouterr().err
        assert "the masters in the optimizer's buckets do not round to the stored weights" in told
        assert "are the master of no stored weight" in told
        assert "--check-masters none" in told
        assert not out.exists()
    assert run([first, *options, str(source), str(out), "-q", "--check-masters", "none"]) == 0


def test_an_adapter_is_not_merged_into_weights_that_buckets_contradict(tmp_path):
    source: Path = copy_of("core019_llama_tp2_dp_reshardable", tmp_path)
    adapter, out = str(lora().save(tmp_path / "adapter")), str(tmp_path / "out")
    assert merge_adapter(str(source), adapter, out).masters.use == "merged"
    filled(source, FC2, "bfloat16", ZERO)
    with pytest.raises(VerificationError, match=r"`strip .* --check-masters none` leaves them out"):
        merge_adapter(str(source), adapter, str(tmp_path / "another"))


def test_masters_that_cannot_be_read_are_noted(tmp_path):
    """Nothing contradicts the weights then."""
    source: Path = copy_of(BUCKETS, tmp_path)
    with metadata_of(source) as metadata:
        drop_key(metadata, next(key for key in keys_with(metadata, ".param") if bucket_key(key)))
    told = "the weights were not compared with their masters: they cannot be read"
    assert any(note.startswith(told) for note in export_hf(source, tmp_path / "hf").notes)
    note, _ = strip_checkpoint(source, tmp_path / "weights").notes
    assert note.startswith(told)


def saved(folder: Path, weights: dict[str, torch.Tensor], masters: list[torch.Tensor]) -> Path:
    """A plain state dict of a mixed-precision job, masters beside a numbering optimizer."""
    states = {i: {"exp_avg": torch.zeros_like(master)} for i, master in enumerate(masters)}
    groups = [{"lr": 0.1, "params": list(states)}]
    optimizer = {"optimizer": {"state": states, "param_groups": groups}, "fp32_from_fp16_params": [masters]}
    dcp.save({"model": weights, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_a_plain_state_dict_has_masters_too(tmp_path):
    masters = [torch.arange(128.0).reshape(8, 16) + 0.3, torch.ones(4, 16) + 0.3]
    weights = {f"net.{i}.weight": master.bfloat16() for i, master in enumerate(masters)}
    sound = saved(tmp_path / "sound", weights, masters)
    done = strip_checkpoint(sound, tmp_path / "out")
    assert done.masters is not None
    assert (done.masters.found.tensors, done.masters.found.elements, done.notes) == (2, 192, ())
    weights["net.1.weight"] = torch.zeros_like(weights["net.1.weight"])
    bad = saved(tmp_path / "bad", weights, masters)
    with pytest.raises(VerificationError, match=r"fp32_from_fp16_params\.0\.1\[0, 0\]"):
        strip_checkpoint(bad, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


def test_megatrons_torch_dcp_has_masters_too(tmp_path):
    report = export_hf(fixture_dir("tf2_dcp"), tmp_path / "out")
    assert (report.masters.use, report.masters.found.tensors) == ("left_out", 19)
