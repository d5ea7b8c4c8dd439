"""`--weights-only` converts whatever the optimizer is that it leaves out; without it such optimizers are refused."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import (
    CkptError,
    ConvertOptions,
    TargetOptions,
    ToTorchDistOptions,
    convert_to_fsdp_dtensor,
    convert_to_torch_dist,
)
from ckpt_tools.commands.job.report import ConversionReport
from ckpt_tools.errors import (
    CorruptCheckpointError,
    MappingError,
    UnsupportedCheckpointError,
    VerificationError,
)
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from tests.commands import oracle
from tests.commands.made import fsdp, place, torch_dist
from tests.commands.rewritten import Parts, read, write
from tests.conftest import DATA
from tests.folders import root_of

LLAMA = DATA / "core019_llama_tp2_fully_reshardable" / "iter_0000002"
MASTER, MOMENT = "optimizer.state.param.", "optimizer.state.exp_avg."
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.{}, torch.float32).bucket_idx_0"


def weights_of(parts: Parts) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in parts.tensors.items() if not key.startswith("optimizer.")}


def states_of(parts: Parts) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in parts.tensors.items() if key.startswith("optimizer.")}


def remainder(master: torch.Tensor) -> torch.Tensor:
    """What the precision-aware optimizer keeps: master = (bits of the weight << 16) + remainder."""
    upper = master.bfloat16().view(torch.int16).int() << 16
    return (master.view(torch.int32) - upper).to(torch.int16)


def remainders_as_numbers(parts: Parts) -> None:
    """As `fully_reshardable` stores them (`te_remainder_tp2_fr`), but under args that do not say so."""
    states = states_of(parts)
    parts.tensors |= {k: remainder(t).float() for k, t in states.items() if k.startswith(MASTER)}


def fp8_states(parts: Parts) -> None:
    parts.tensors |= {k: t.to(torch.uint8) for k, t in states_of(parts).items() if k.startswith(MOMENT)}


def muon(parts: Parts) -> None:
    """One momentum for each matrix, and no second moment."""
    for key, tensor in states_of(parts).items():
        del parts.tensors[key]
        if key.startswith(MOMENT):
            parts.tensors[key.replace(".exp_avg.", ".momentum_buffer.")] = tensor


def unknown(parts: Parts) -> None:
    """A layout that nobody has seen yet."""
    for key in states_of(parts):
        del parts.tensors[key]
    parts.tensors["optimizer.flat.everything"] = torch.arange(77.0)
    parts.objects["optimizer.flat.index/shard_0_1"] = [{"anything": 1}]


def of_another_run(parts: Parts) -> None:
    parts.tensors |= {k: t * 1.5 for k, t in states_of(parts).items() if k.startswith(MASTER)}


def unprovable(parts: Parts) -> None:
    """Buckets whose contents belong to no weight."""
    buckets(parts, "bfloat16")


def fp8_buckets(parts: Parts) -> None:
    buckets(parts, "uint8")


def buckets(parts: Parts, dtype: str) -> None:
    for key in states_of(parts):
        del parts.tensors[key]
    name = BUCKET.format(dtype)
    parts.tensors |= {f"{name}.{kind}": torch.arange(256.0) for kind in ("param", "exp_avg", "exp_avg_sq")}
    numel = "optimizer.distributed.dp_group_idx_0.per_bucket_numel_unpadded/shard_0_1"
    parts.objects[numel] = [[{(getattr(torch, dtype), torch.float32): [256]}]]


def half_a_state(parts: Parts) -> None:
    key = next(key for key in states_of(parts) if key.startswith(MOMENT))
    parts.tensors[key] = parts.tensors[key][:1].clone()


OPTIMIZERS: dict[Callable[[Parts], None], tuple[type[CkptError], str]] = {
    remainders_as_numbers: (UnsupportedCheckpointError, "int16 remainders"),
    fp8_states: (UnsupportedCheckpointError, "is uint8"),
    unknown: (MappingError, "optimizer.flat.everything"),
    of_another_run: (VerificationError, "do not round to the stored weights"),
    unprovable: (VerificationError, "the master of no stored weight"),
    fp8_buckets: (VerificationError, "no order of its rank's"),
    half_a_state: (MappingError, "do not fit their weights"),
}


@cache
def bare(*left_out: str) -> Path:
    """The weights alone, under a common state without some entries."""
    parts = read(LLAMA)
    common = {k: v for k, v in parts.common.items() if k not in left_out}
    return write(place(), Parts(weights_of(parts), parts.objects, common))


def damaged_by(damage: Callable[[Parts], None], folder: Path) -> Path:
    parts = read(LLAMA)
    damage(parts)
    return write(folder / "source" / "iter_0000002", parts)


def convert(source: Path, output: Path, **options: Any) -> ConversionReport:
    wanted = ConvertOptions(target=TargetOptions(**options), check_masters="all")
    return convert_to_fsdp_dtensor(source, output, wanted)


def instead_of_masters(report: ConversionReport) -> int:
    """How often it is said that the stored weights are written, not the masters."""
    return sum(note.startswith("the stored weights are written, not the masters") for note in report.notes)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("damage", [*OPTIMIZERS, muon], ids=lambda damage: damage.__name__)
def test_any_optimizer_can_be_left_out(damage, dtype, tmp_path):
    report = convert(damaged_by(damage, tmp_path), tmp_path / "out", weights_only=True, dtype=dtype)
    oracle.assert_same(tmp_path / "out", fsdp(bare("optimizer"), weights_only=True, dtype=dtype))
    if damage in (muon, unknown):  # no masters, or none that could be told from the keys
        assert instead_of_masters(report) == 0
    elif damage in (of_another_run, remainders_as_numbers):  # seen by values, which bfloat16 leaves out
        assert instead_of_masters(report) == (dtype != "bfloat16")
    else:
        assert instead_of_masters(report) == 1
    assert report.masters.use == ("none" if damage in (muon, unknown) else "left_out")


@pytest.mark.parametrize("damage", OPTIMIZERS, ids=lambda damage: damage.__name__)
def test_the_same_optimizers_are_refused_when_they_are_wanted(damage, tmp_path):
    error, text = OPTIMIZERS[damage]
    with pytest.raises(error, match=text) as caught:
        convert(damaged_by(damage, tmp_path), tmp_path / "out")
    if damage is not half_a_state:
        assert "--weights-only" in str(caught.value)
    assert "--check-masters none" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_sound_masters_are_still_a_conversions_values(tmp_path):
    report = convert(LLAMA, tmp_path / "out", weights_only=True)
    masters = report.masters
    assert (masters.use, masters.mode) == ("written", "all")
    assert masters.found.elements == masters.found.elements_in_all > 0
    made, stored = oracle.tensors(tmp_path / "out"), oracle.tensors(LLAMA)
    master = stored[f"{MASTER}decoder.layers.self_attention.linear_qkv.weight"][1]
    assert oracle.same_bytes(made["model.module.decoder.layers.1.self_attention.linear_qkv.weight"], master)


@pytest.mark.parametrize("layout", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_fp32_weights_of_torch_dist_are_the_masters(layout, weights_only, tmp_path):
    source = f"core019_llama_tp2_{layout}"
    target = TorchDistOptions(weights_only=weights_only, dtype="float32")
    report = convert_to_torch_dist(root_of(source), tmp_path / "out", ToTorchDistOptions(target=target))
    assert report.masters.use == "written"
    made = oracle.tensors(tmp_path / "out")
    for key, stored in oracle.tensors(torch_dist(source, stacked=True)).items():
        if key.startswith(MASTER):
            assert oracle.same_bytes(made[key.removeprefix(MASTER)], stored)


@pytest.mark.parametrize("damage", [*OPTIMIZERS, muon], ids=lambda damage: damage.__name__)
def test_fp32_weights_of_torch_dist_without_sound_masters(damage, tmp_path):
    options = ToTorchDistOptions(target=TorchDistOptions(weights_only=True, dtype="float32"))
    report = convert_to_torch_dist(damaged_by(damage, tmp_path), tmp_path / "out", options)
    made = oracle.tensors(tmp_path / "out")
    assert all(oracle.same_bytes(made[key], t.float()) for key, t in weights_of(read(LLAMA)).items())
    assert instead_of_masters(report) == (damage not in (muon, unknown))


def test_a_damaged_file_is_not_an_optimizer_that_is_left_out(tmp_path):
    source = write(tmp_path / "source", read(LLAMA))
    payload = next(source.glob("*.distcp"))
    payload.write_bytes(payload.read_bytes()[:2000])
    with pytest.raises(CorruptCheckpointError):
        convert(source, tmp_path / "out", weights_only=True)


def test_the_way_back_leaves_out_what_it_cannot_read(tmp_path):
    """Masters among the states, as Megatron-LM's own converter parks them."""
    sound = fsdp(LLAMA)
    tensors, kinds = oracle.tensors(sound), oracle.metadata(sound).state_dict_metadata
    objects = {key: oracle.item(sound, key) for key in kinds if key not in tensors}
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    objects["args"] = read(LLAMA).common["args"]
    foreign = {f"optimizer.state.module.module.module.{name}.fp32_param": tensors[f"model.module.{name}"]}
    parts = Parts(tensors | foreign, objects | {"optimizer.anything": 7}, {})
    source = write(tmp_path / "foreign", parts)
    for extra in ("metadata.json", "common.pt"):
        (source / extra).unlink()
    options = ToTorchDistOptions(target=TorchDistOptions(weights_only=True))
    with pytest.raises(CkptError, match="--weights-only"):
        convert_to_torch_dist(
            source, tmp_path / "out", ToTorchDistOptions(ignore_keys=("optimizer.anything",))
        )
    report = convert_to_torch_dist(source, tmp_path / "out", options)
    assert any(
        note.startswith("the optimizer, which is left out, could not be read") for note in report.notes
    )
    oracle.assert_same(tmp_path / "out", torch_dist(sound, weights_only=True))
