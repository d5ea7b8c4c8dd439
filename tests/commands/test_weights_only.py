"""Weights without their optimizer: whatever it was it is left out, and a fresh one stands in its place.

What `--fresh-optimizer` makes is what a native checkpoint has, key for key, with zeros and a step of 0.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import closing
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
    preflight,
    strip_checkpoint,
)
from ckpt_tools.cli.app import run
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.commands.job.report import ConversionReport
from ckpt_tools.errors import (
    CorruptCheckpointError,
    MappingError,
    UnsupportedCheckpointError,
    VerificationError,
)
from ckpt_tools.execute.output.local_output import LocalOutput
from ckpt_tools.megatron.fsdp_dtensor.fresh_optimizer import schedule_of
from ckpt_tools.megatron.fsdp_dtensor.read import FsdpSource, read_fsdp_source
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from tests.commands import oracle
from tests.commands.made import fsdp, iteration_of, place, stripped, torch_dist
from tests.commands.rewritten import Parts, read, write
from tests.commands.test_huggingface import model
from tests.conftest import DATA, fixture_dir
from tests.folders import content, is_sound, root_of

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


LLAMA_NAME, NATIVE = "core019_llama_tp2_fully_reshardable", "core019_llama_tp2_native_fsdp_dtensor"
RUN, NATIVE_RUN = DATA / LLAMA_NAME, fixture_dir(NATIVE)
WEIGHTS = [RUN, "--weights-only", "--fresh-optimizer"]
RATES = ["--lr", "1e-5", "--min-lr", "1e-6", "--weight-decay", "0.1"]
MOMENTS = (".exp_avg", ".exp_avg_sq")
# A 3D-parallel run, the native checkpoint of the same model, and what its names depend on.
PAIRS = [
    ("core019_llama_tp2_fully_reshardable", "core019_llama_tp2_native_fsdp_dtensor", {}),
    ("core019_gpt3_tp2_fully_reshardable", "core019_gpt3_tp2_native_fsdp_dtensor", {}),
    ("core019_moe_ep2_fully_reshardable", "core019_moe_dp1_native_fsdp_dtensor", {}),
    ("te_llama_dp2_buckets_dpr", "n_llama_dp2", {}),
    ("te_llama_dp2_buckets_fr", "n_hsdp2", {}),
    ("te_moe_ep2_dpr", "n_moe_ep2", {}),
    ("te_mla_ep2_fr", "n_mla_dp1", {}),
    ("te_gdn_tp2_fr", "n_gdn_dp1", {"tp": 1}),
    ("v16_moe_ep2_fr", "v16n_moe_ep2", {"dialect": "core-0.16"}),
]


FRESH = {"weights_only": True, "fresh_optimizer": True}


def zeroed(tensors: oracle.Tensors) -> oracle.Tensors:
    """A fresh optimizer's moments and steps beside the same weights."""
    return {k: torch.zeros_like(t) if k.endswith((*MOMENTS, ".step")) else t for k, t in tensors.items()}


def taken_apart(folder: Path) -> FsdpSource:
    with open_checkpoint(str(folder)) as opened:
        return read_fsdp_source(opened.files, opened.catalog, opened.common)


def shown(folder: Path) -> dict[str, Any]:
    """Type and shape by key; None for objects."""
    known = oracle.metadata(folder).state_dict_metadata
    return {k: (m.properties.dtype, tuple(m.size)) if hasattr(m, "size") else None for k, m in known.items()}


@pytest.mark.parametrize(("threed", "native", "wanted"), PAIRS)
def test_it_has_what_the_native_checkpoint_has(threed, native, wanted):
    """Key for key; its weights are the masters, its moments zeros."""
    made, theirs = fsdp(threed, **FRESH, **wanted), iteration_of(native)
    assert shown(made) == shown(theirs)
    mine, other = taken_apart(made), taken_apart(theirs)
    assert mine.groups.keys() == other.groups.keys()
    for name, group in other.groups.items():
        expected = {**group, "lr": 0.0}  # before the first step of a warm-up
        if "step" in group:
            expected["step"] = 0
        assert mine.groups[name] == expected, name
    assert mine.scheduler == {**other.scheduler, "num_steps": 0}
    assert {t.name: t.step for t in mine.tensors} == {t.name: t.step and 0.0 for t in other.tensors}
    oracle.assert_same(made, zeroed(oracle.tensors(fsdp(threed, **wanted))))


@pytest.mark.parametrize("name", [native for _, native, _ in PAIRS])
def test_strip_gives_a_native_checkpoint_one(name, tmp_path):
    done = strip_checkpoint(root_of(name), tmp_path / "out", fresh=TargetOptions(lr=0.5))
    before, after = iteration_of(name), iteration_of(tmp_path / "out")
    assert shown(after) == shown(before)
    assert not done.edits.removed and not done.edits.cast
    oracle.assert_same(after, zeroed(oracle.tensors(before)))
    was, now = (oracle.metadata(folder).state_dict_metadata for folder in (before, after))
    for key in oracle.tensors(after):
        assert {tuple(c.offsets) for c in was[key].chunks} == {tuple(c.offsets) for c in now[key].chunks}
    groups = taken_apart(after).groups
    assert {group["max_lr"] for group in groups.values()} == {0.5}
    assert {oracle.item(after, f"opt_param_scheduler.{n}") for n in ("max_lr", "num_steps")} == {0.5, 0}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_alone_get_one_by_strip(dtype, tmp_path):
    """Also in half precision, where the weights become masters."""
    weights = stripped(NATIVE, dtype)
    strip_checkpoint(weights, tmp_path / "out", fresh=TargetOptions(adam_beta2=0.95))
    made = iteration_of(tmp_path / "out")
    found, wide = oracle.tensors(made), {k: t.float() for k, t in oracle.tensors(weights).items()}
    moments = {k: torch.zeros_like(t) for k, t in found.items() if k not in wide}
    assert all(key.endswith(MOMENTS) for key in moments)
    oracle.assert_same(found, wide | moments)
    groups = taken_apart(made).groups
    assert {group["betas"] for group in groups.values()} == {(0.9, 0.95)}
    assert {(name.endswith("norm.weight"), g["weight_decay"]) for name, g in groups.items()} == {
        (True, 0.0), (False, 0.1)
    }  # fmt: skip
    assert is_sound(made)


@pytest.mark.parametrize("target", ["core-0.16", "core-0.17", "core-0.18", "core-0.19", "main"])
def test_preflight_starts_it_strictly_on_every_version(target):
    made = fsdp(LLAMA_NAME, **FRESH, dialect=target, lr=1e-5, min_lr=1e-6)
    found = preflight(str(made))
    assert found.report.is_valid, [f.where for f in found.report.findings]
    assert found.launch is not None and found.program == target
    words = found.launch.words
    assert "--finetune" not in words and "--no-load-optim" not in words and "--no-load-rng" not in words
    assert "--override-opt_param-scheduler" in words
    for flag, value in (("--lr", "1e-05"), ("--min-lr", "1e-06"), ("--weight-decay", "0.1")):
        assert words[words.index(flag) + 1] == value
    ours = [word for word in words if word != "--override-opt_param-scheduler"]
    at = ours.index("--lr")
    assert any(
        f.check == "schedule"
        for f in preflight(str(made), [*ours[1:at], "--lr", "0.5", *ours[at + 2 :]]).report.findings
    )
    samples = preflight(str(made), [*words[1:], "--train-samples", "64"]).report
    assert [f.check for f in samples.findings] == ["fresh-samples"]


def test_preflight_says_what_starts_where(capsys):
    def starts(checkpoint: Path) -> dict[str, str | None]:
        return {start.program: start.how for start in preflight(str(checkpoint)).starts}

    every = ("core-0.16", "core-0.17", "core-0.18", "core-0.19", "main")
    assert [starts(iteration_of(NATIVE))[program] for program in every] == ["resume"] * 5
    assert [starts(fsdp(LLAMA_NAME, **FRESH))[program] for program in every] == ["fresh optimizer"] * 5
    weights = stripped(NATIVE)
    assert [starts(weights)[program] for program in every] == ["weights alone"] * 2 + [None] * 3
    assert run(["preflight", str(weights)]) == 1
    said = capsys.readouterr().out
    assert "  core-0.18, core-0.19, main: cannot load it (optimizer-entries)\n" in said
    assert not preflight(str(RUN)).starts


@pytest.mark.parametrize(
    ("source", "words", "says"),
    [
        (RUN, ["strip"], "jobs start from it with --finetune"),
        (
            NATIVE_RUN,
            ["strip"],
            "core-0.18 and later need a fresh one (--fresh-optimizer), core-0.16 and core-0.17",
        ),
        (NATIVE_RUN, ["strip", "--fresh-optimizer"], None),
        (RUN, ["convert", "--weights-only"], "core-0.18 and later need a fresh one (--fresh-optimizer)"),
        (RUN, ["convert", "--weights-only", "--target", "bridge"], None),  # which the job's settings decide
        (RUN, ["convert", "--to", "dcp", "--weights-only"], None),
        (RUN, ["convert"], None),
    ],
)
def test_the_report_says_what_weights_alone_need(source, words, says, tmp_path, capsys):
    verb, *more = words
    assert run([verb, str(source), str(tmp_path), *more, "-v", "--dry-run"]) == 0
    done = capsys.readouterr().out
    assert run([verb, str(source), str(tmp_path), *more, "-v"]) == 0
    for text in (done, capsys.readouterr().out):
        assert (
            f"  note      no optimizer is in it: {says}" in text
            if says
            else "no optimizer is in it" not in text
        )


def test_an_import_starts(tmp_path, capsys):
    model("llama", tmp_path / "hf")
    words = ["import-hf", str(tmp_path / "hf"), str(tmp_path / "run"), "--to", "fsdp_dtensor", "-q"]
    assert run(words) == 2
    said = capsys.readouterr().err
    assert "--lr, --min-lr and --weight-decay" in said and "--no-fresh-optimizer" in said
    assert run([*words, "--lr", "1e-5", "--min-lr", "1e-6"]) == 2
    assert "give --weight-decay for" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert run([*words, *RATES, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["masters"]["use"], report["dropped"]) == (
        "none",
        [],
    )  # a model of transformers has neither
    assert any("--override-opt_param-scheduler" in note for note in report["notes"])
    assert any(
        "--adam-beta1, --adam-beta2 and --adam-eps: not in the source" in note for note in report["notes"]
    )
    made = tmp_path / "run" / "iter_0000001"
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert oracle.item(made, "iteration") == 1
    args = oracle.item(made, "args")
    assert (args.lr, args.min_lr, args.weight_decay, args.consumed_train_samples) == (1e-5, 1e-6, 0.1, 0)
    found = preflight(str(tmp_path / "run"))
    assert found.report.is_valid and found.launch is not None
    assert {"--no-load-rng", "--override-opt_param-scheduler"} <= set(found.launch.words)
    assert is_sound(made)
    group = next(iter(taken_apart(made).groups.values()))
    assert (group["lr"], group["step"], group["bias_correction"]) == (1e-5, 0, True)


def test_an_import_with_an_optimizer_has_the_weights_of_one_without(tmp_path):
    model("llama", tmp_path / "hf")
    words = ["import-hf", str(tmp_path / "hf"), "--to", "fsdp_dtensor", "-q"]
    assert run([*words, str(tmp_path / "fresh"), *RATES]) == 0
    assert run([*words, str(tmp_path / "weights"), "--no-fresh-optimizer"]) == 0
    weights = {key: t.float() for key, t in oracle.tensors(tmp_path / "weights").items()}
    mine = oracle.tensors(tmp_path / "fresh")
    moments = {key: t for key, t in mine.items() if key.endswith(MOMENTS)}
    oracle.assert_same({key: t for key, t in mine.items() if key not in moments}, weights)
    assert run(["diff", str(tmp_path / "hf"), str(tmp_path / "fresh")]) == 0


@pytest.mark.parametrize("source", [RUN, fixture_dir(NATIVE)])
@pytest.mark.parametrize("folder", ["release", "iter_0000000"])
@pytest.mark.filterwarnings("ignore:.*the folder says iteration")
def test_a_release_begins_at_iteration_1(source, folder, tmp_path):
    """As what was imported does, whatever iteration is stored in it."""
    shutil.copytree(source, tmp_path / "run")
    (tmp_path / "run" / "iter_0000002").rename(tmp_path / "run" / folder)
    latest = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    latest.chmod(0o644)
    latest.write_text("release" if folder == "release" else "0")
    if source is RUN:
        options = ConvertOptions(target=TargetOptions(weights_only=True, fresh_optimizer=True))
        convert_to_fsdp_dtensor(tmp_path / "run", tmp_path / "out", options)
    else:
        strip_checkpoint(tmp_path / "run", tmp_path / "out", fresh=TargetOptions())
    made = iteration_of(tmp_path / "out")
    assert made.name == "iter_0000001"
    assert (tmp_path / "out" / latest.name).read_text() == "1"
    assert oracle.item(made, "iteration") == oracle.item(made, "args").iteration == 1
    assert preflight(str(tmp_path / "out")).report.is_valid


def test_embeddings_with_a_rate_of_their_own_keep_it(tmp_path):
    from ckpt_tools.commands.job.read_model import Wanted, read_model
    from ckpt_tools.formats.pickle.unpickle import StandIn
    from ckpt_tools.megatron.fsdp_dtensor.fresh_optimizer import with_fresh_optimizer

    with open_checkpoint(str(RUN)) as opened:
        weights = read_model(opened, Wanted("masters"))
    args = weights.common.values["args"]
    assert isinstance(args, StandIn)
    args.state |= {"decoupled_lr": 0.5, "decoupled_min_lr": 0.25}
    made, _ = with_fresh_optimizer(weights, TargetOptions(weights_only=True, fresh_optimizer=True))
    found = [
        (g["max_lr"], g["min_lr"], g["default_config"], g["wd_mult"], g["weight_decay"]) for g in made.groups
    ]
    assert found == [
        (0.01, 0.001, True, 1.0, 0.1), (0.01, 0.001, True, 0.0, 0.0),
        (0.5, 0.25, False, 1.0, 0.1), (0.5, 0.25, False, 0.0, 0.0),
    ]  # fmt: skip
    args.state["use_mup"] = True
    with pytest.raises(MappingError, match="muP"):
        with_fresh_optimizer(weights, TargetOptions(weights_only=True, fresh_optimizer=True))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["convert", RUN, "--fresh-optimizer"], "goes with --weights-only"),
        (["convert", RUN, "--lr", "0.1"], "--lr: only valid with --fresh-optimizer"),
        (["convert", RUN, "--weights-only", "--min-lr", "0.1"], "--min-lr: only valid with"),
        (["convert", *WEIGHTS, "--dtype", "float32"], "--dtype float32: with an optimizer"),
        (["convert", *WEIGHTS, "--min-lr", "0.1"], "--min-lr 0.1 is above --lr 0.01"),
        (["convert", *WEIGHTS, "--lr", "nan"], "--lr nan is not a number of at"),
        (["convert", *WEIGHTS, "--adam-beta2", "1"], "--adam-beta2 1.0 is not below 1"),
        (["convert", *WEIGHTS, "--adam-eps", "0"], "--adam-eps 0 makes a NaN"),
        (["convert", *WEIGHTS, "--to", "torch_dist"], "no meaning for a conversion"),
        (["convert", NATIVE_RUN, "--weights-only", "--fresh-optimizer", "--tp", "2"], "strip --fresh-optimizer"),
        (["strip", RUN, "--fresh-optimizer"], "a 3D-parallel job starts from weights alone"),
        (["strip", NATIVE_RUN, "--fresh-optimizer", "--dtype", "bfloat16"], "--dtype bfloat16: fp32 masters"),
        (["strip", NATIVE_RUN, "--lr", "0.1"], "--lr: only valid with --fresh-optimizer"),
        (["import-hf", RUN, "--to", "torch_dist", "--fresh-optimizer"], "need --to fsdp_dtensor"),
    ],
)  # fmt: skip
def test_what_goes_with_it(words, said, tmp_path, capsys):
    command, source, *rest = map(str, words)
    if command == "import-hf":
        model("llama", tmp_path / "hf")
        source = str(tmp_path / "hf")
    assert run([command, source, str(tmp_path / "out"), *rest, "-q"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_zeros_read_nothing_and_take_no_disk(tmp_path, monkeypatch):
    """A vocabulary that is mostly padding: 16 MiB a tensor, of which little is stored and no room is asked for."""
    asked: list[int] = []
    monkeypatch.setattr(LocalOutput, "_check_space", lambda self, at, nbytes: asked.append(nbytes))
    target = TargetOptions(weights_only=True, fresh_optimizer=True, vocab_size_padded=1 << 17, vocab_size=200)
    report = convert_to_fsdp_dtensor(RUN, tmp_path / "out", ConvertOptions(target=target))
    assert report.written is not None
    made, moments = iteration_of(tmp_path / "out"), 4 * (1 << 17) * 32 * 4
    assert set(asked) == {report.written.bytes_written - moments} and len(asked) == 2
    stored = sum(file.stat().st_blocks * 512 for file in made.glob("*.distcp"))
    assert stored < report.written.bytes_written - moments + (2 << 20)
    assert report.written.bytes_read < 2 << 20
    assert is_sound(made)
    loaded = oracle.tensors(made)["optimizer.state.module.module.module.output_layer.weight.exp_avg"]
    assert loaded.shape == (1 << 17, 32) and not loaded.view(torch.int32).any()


def test_the_bytes_do_not_depend_on_holes(monkeypatch):
    """The same where a file system tells of no holes."""
    sparse = fsdp(LLAMA_NAME, **FRESH)
    monkeypatch.setattr(
        "ckpt_tools.execute.move.stream.stored_ranges", lambda fd, start, stop: iter([(start, stop)])
    )
    assert content(fsdp.__wrapped__(LLAMA_NAME, **FRESH)) == content(sparse)


def test_damage_in_a_hole_is_repaired_on_resume(tmp_path):
    """Zeros are written over what does not belong there, not taken for granted."""
    from ckpt_tools.execute.move.source_reader import SourceReader
    from ckpt_tools.execute.move.stream import Pump
    from ckpt_tools.execute.output.fileio import OutputFile, stored_ranges
    from ckpt_tools.formats.storage.open_files import open_files

    path = tmp_path / "file"
    path.write_bytes(b"\x01" * 5000 + b"\0" * 20000)
    os.truncate(path, 200_000)
    with path.open("r+b") as file, closing(open_files(str(tmp_path))) as files:
        os.pwrite(file.fileno(), b"\x02" * 10, 150_000)
        pump = Pump(SourceReader(files, tmp_path), 65536, lambda nbytes: None)
        pump._write_zeros(OutputFile(path, file.fileno()), 4000, 199_000)
        assert list(stored_ranges(file.fileno(), 250_000, 300_000)) == []
    assert path.read_bytes() == b"\x01" * 4000 + b"\0" * 196_000


def test_a_bridge_run_tells_its_settings_otherwise(tmp_path):
    """Its schedule and groups where they are stored, its configuration where they are not."""
    source = root_of("bridge_dense_fr_tp2_dp2")
    groups = taken_apart(fsdp(source, **FRESH)).groups
    with open_checkpoint(str(source)) as opened:
        stored = opened.common.values["optimizer"]["optimizer"]["param_groups"][0]
    assert {(g["betas"], g["eps"], g["max_lr"]) for g in groups.values()} == {
        (stored["betas"], stored["eps"], stored["max_lr"])
    }
    weights = tmp_path / "weights"
    strip_checkpoint(source, weights)
    config = weights / "run_config.yaml"
    said = "optimizer:\n  lr: 0.25\n  min_lr: 0.125\n  weight_decay: 0.5\n  adam_beta2: 0.75\n"
    config.write_text(config.read_text() + said)
    group = next(iter(taken_apart(fsdp(weights, **FRESH)).groups.values()))
    assert (group["max_lr"], group["min_lr"], group["betas"]) == (0.25, 0.125, (0.9, 0.75))


@pytest.mark.parametrize("damage", [*OPTIMIZERS, muon], ids=lambda damage: damage.__name__)
def test_any_optimizer_is_replaced(damage, tmp_path):
    """Masters of another run, of a kind that is not read, or none: the weights are their own masters then."""
    made = fsdp(damaged_by(damage, tmp_path), **FRESH)
    oracle.assert_same(made, fsdp(bare(), **FRESH))
    assert preflight(str(made)).report.is_valid


FROZEN = "decoder.layers.1.mlp.linear_fc2.weight"


def test_what_was_frozen_stays_so(tmp_path):
    """A weight that the run's optimizer did not work on gets no states: a job that freezes it asks for none."""
    native = iteration_of(NATIVE)
    keys = oracle.metadata(native).state_dict_metadata
    mine = [key for key in keys if key.startswith("optimizer.") and f".{FROZEN}." in key]
    assert len(mine) > 4
    of_it = f"remove optimizer\\..*\\.{re.escape(FROZEN)}\\..*"
    assert run(["modify-state-dict", str(native), str(tmp_path / "frozen"), "--op", of_it, "-q"]) == 0
    strip_checkpoint(tmp_path / "frozen", tmp_path / "out", fresh=TargetOptions())
    made = shown(iteration_of(tmp_path / "out"))
    assert made == shown(iteration_of(tmp_path / "frozen"))
    assert f"model.module.{FROZEN}" in made and not set(mine) & made.keys()


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_what_was_frozen_in_3d_stays_so(factor, tmp_path):
    """Also where masters are those of another run, so that weights are taken for them."""
    parts = read(RUN / "iter_0000002")
    frozen = "output_layer.weight"
    for key in [key for key in parts.tensors if key.startswith("optimizer.") and key.endswith(frozen)]:
        del parts.tensors[key]
    masters = "optimizer.state.param."
    parts.tensors |= {k: t * factor for k, t in parts.tensors.items() if k.startswith(masters)}
    made = shown(fsdp(write(tmp_path / "source", parts), **FRESH))
    assert made[f"model.module.{frozen}"] == (torch.bfloat16, (224, 32))
    assert not [key for key in made if key.startswith("optimizer.") and frozen in key]
    assert made["model.module.embedding.word_embeddings.weight"][0] == torch.float32


@pytest.mark.parametrize(
    ("args", "warmup", "decay", "steps"),
    [
        ({"train_iters": 100, "lr_decay_iters": 50, "lr_warmup_iters": 10}, 40, 200, 400),
        ({"train_iters": 100, "lr_warmup_iters": None}, 0, 400, 400),
        ({"train_iters": 100, "lr_decay_iters": 50, "lr_warmup_fraction": 0.1}, 20.0, 200, 400),
        (
            {"train_iters": 100, "lr_decay_iters": 50, "lr_warmup_fraction": 0.0, "lr_warmup_iters": 5},
            0.0,
            200,
            400,
        ),
        ({"train_samples": 90, "lr_decay_samples": 70, "lr_warmup_samples": 7}, 7, 70, 90),
        ({"train_samples": 90, "lr_decay_samples": 70, "lr_warmup_fraction": 0.5}, 35.0, 70, 90),
        ({"train_samples": 90}, 0, 90, 90),
        ({"train_iters": 100, "train_samples": 90}, 0, 400, 400),
    ],
)
def test_the_schedule_is_that_of_megatrons_args(args, warmup, decay, steps):
    others = {"lr_decay_style": "cosine", "start_weight_decay": 0.1, "end_weight_decay": 0.2}
    assert schedule_of({"global_batch_size": 4, **args, **others}) == {
        "lr_warmup_steps": warmup, "lr_decay_steps": decay, "wd_incr_steps": steps, "lr_decay_style": "cosine",
        "start_wd": 0.1, "end_wd": 0.2,
    }  # fmt: skip
    assert schedule_of({"train_iters": 100}) is None
