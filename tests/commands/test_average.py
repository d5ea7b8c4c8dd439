"""`average`: bit-equal to torch on whole tensors, for every kind; what it takes from the last; what it refuses."""

import json
import re
import shutil
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

from ckpt_tools import AverageOptions, average_checkpoints, convert_to_fsdp_dtensor, diff_checkpoints
from ckpt_tools.cli.app import run
from ckpt_tools.commands.edit.average import Averaged, mean_weights
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.errors import CorruptCheckpointError, MappingError, UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.run import WriteOptions
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.model.box import Box
from ckpt_tools.model.kernels.casts import Array
from ckpt_tools.model.kernels.kernel import WeightedMean
from tests.altered import altered, overwrite, scaled
from tests.commands import oracle
from tests.commands.made import place
from tests.conftest import DATA, MOE, fixture_dir
from tests.damage import ITERATION, copy_of, drop_key, flip_bit, metadata_of, payload_of
from tests.folders import is_sound

RUN = "core019_llama_tp2_fully_reshardable"
FSDP = "core019_llama_tp2_native_fsdp_dtensor"
SHARES = (0.5, 0.3, 0.2)
NAN = float("nan")
NORM = "decoder.final_layernorm.weight"


def mean(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """Whole tensors, in double, rounded once."""
    total = torch.zeros(values[0].shape, dtype=torch.float64)
    for share, value in zip(shares, values, strict=True):
        total += share * value.double()
    return total.to(values[0].dtype)


def three(name: str, place: Path) -> list[Path]:
    return [altered(name, place / str(seed), seed) for seed in (1, 2)] + [fixture_dir(name)]


def averaged(sources: Sequence[Path], output: Path, **options: object) -> Averaged:
    return average_checkpoints([str(s) for s in sources], str(output), AverageOptions(**options))  # type: ignore[arg-type]


@cache
def mean_of(name: str) -> tuple[list[Path], Path, Averaged]:
    """Three sources, what is made of them, and what is said of it."""
    sources, out = three(name, place()), place()
    shares = {"ema": 0.75} if name == FSDP else {"weights": SHARES}
    return sources, out, averaged(sources, out, **shares)


@pytest.mark.parametrize("name", [RUN, MOE])
def test_masters_are_averaged_and_weights_are_their_rounding(name):
    sources, out, done = mean_of(name)
    before = [oracle.tensors(source / ITERATION) for source in sources]
    after = oracle.tensors(out / ITERATION)
    assert after.keys() == before[-1].keys()
    weights = [key for key in after if not key.startswith("optimizer.")]
    changed = 0
    for key, found in after.items():
        master = f"optimizer.state.param.{key}"
        if key in weights and master in after:
            expected = mean([b[master] for b in before], SHARES).reshape(found.shape).to(found.dtype)
        elif key.startswith("optimizer.state.param."):
            expected = mean([b[key] for b in before], SHARES)
        else:
            expected = before[-1][key]
            assert key.endswith("expert_bias") or "exp_avg" in key
        assert oracle.same_bytes(found, expected), key
        changed += not oracle.same_bytes(found, before[-1][key])
    assert changed == 2 * (len(weights) - len(done.kept)) == 2 * len(done.averaged)
    assert [key.rpartition(".")[2] for key in done.kept] == (["expert_bias"] if name == MOE else [])
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert is_sound(out)
    masters = done.report.masters
    assert (masters.use, masters.mode, masters.found.tensors > 0) == ("written", "sample", True)


@pytest.mark.parametrize("name", [RUN, MOE, FSDP])
def test_everything_else_is_the_last_ones(name):
    (*_, last), out, _ = mean_of(name)
    was, now = (oracle.metadata(root / ITERATION) for root in (last, out))
    assert was.planner_data in (None, now.planner_data)  # Megatron keeps none
    assert was.state_dict_metadata.keys() == now.state_dict_metadata.keys()
    for key, entry in was.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            first, second = (oracle.item(root / ITERATION, key) for root in (last, out))
            assert repr(first) == repr(second) or first == second, key
            continue
        boxes = [{(*c.offsets, *c.sizes) for c in m.state_dict_metadata[key].chunks} for m in (was, now)]
        assert boxes[0] == boxes[1], key
    files = [
        {(i.fqn, *i.offset): info.relative_path for i, info in m.storage_data.items() if i.offset is not None}
        for m in (was, now)
    ]
    assert files[0] == files[1]


def test_fsdp_dtensor_holds_masters_in_the_place_of_weights():
    sources, out, done = mean_of(FSDP)
    shares = (0.5625, 0.1875, 0.25)  # 0.75 squared, 0.25 of 0.75, 0.25
    assert done.weights == shares
    before = [oracle.tensors(source / ITERATION) for source in sources]
    after = oracle.tensors(out / ITERATION)
    for key, found in after.items():
        is_weight = key.startswith("model.")
        expected = mean([b[key] for b in before], shares) if is_weight else before[-1][key]
        assert oracle.same_bytes(found, expected), key
    assert set(done.averaged) == {key for key in after if key.startswith("model.")}
    assert (done.report.masters.use, done.report.masters.mode) == ("as_stored", "none")
    assert is_sound(out)
    assert run(["preflight", str(out)]) == 0


def test_buckets_are_averaged_as_the_parameters_in_them(tmp_path):
    """Two layouts of one job have one mean."""
    found = []
    for layout in ("fully_reshardable", "dp_reshardable"):
        root = fixture_dir(f"core019_llama_tp2_{layout}")
        place = tmp_path / layout
        averaged([scaled(root, tmp_path / f"twice-{layout}", -2.0), root], place, weights=(0.3, 0.7))
        assert is_sound(place)
        found.append(oracle.tensors(place / ITERATION))
    weights = [key for key in found[0] if not key.startswith("optimizer.")]
    assert len(weights) == 9
    for key in weights:
        assert oracle.same_bytes(found[0][key], found[1][key]), key
    before = oracle.tensors(fixture_dir("core019_llama_tp2_dp_reshardable") / ITERATION)
    for key in [key for key in found[1] if key.endswith(".param")]:
        expected = mean([-2.0 * before[key], before[key]], (0.3, 0.7))
        assert oracle.same_bytes(found[1][key], expected), key
    report = diff_checkpoints(tmp_path / "fully_reshardable", tmp_path / "dp_reshardable")
    assert all(t.kind == "equal" for t in report.tensors)


@pytest.mark.parametrize(
    "name",
    ["v013_moe_ms_ep2", "v015_dense_ms_tp2_dp2", "v016_dense_nodistopt_tp2", "tf2_dist", "te_moe_ep2_dpr"],
)
def test_the_mean_of_a_checkpoint_and_itself_is_itself(name, tmp_path):
    root = fixture_dir(name)
    root = root / "checkpoint" if (root / "checkpoint").exists() else root
    averaged([root, root], tmp_path / "out")
    assert diff_checkpoints(root, tmp_path / "out").is_equal


def test_buckets_of_another_order_are_refused(tmp_path):
    sources = [fixture_dir(f"core019_llama_{job}_dp_reshardable") for job in ("dp2", "tp2")]
    with pytest.raises(
        MappingError, match=r"masters elsewhere in .*convert both to fsdp_dtensor and average"
    ):
        averaged(sources, tmp_path / "out")


def test_other_layouts_are_told_in_a_line(tmp_path):
    sources = [
        fixture_dir(f"core019_llama_tp2_{layout}") for layout in ("fully_reshardable", "dp_reshardable")
    ]
    with pytest.raises(MappingError) as refused:
        averaged(sources, tmp_path / "out")
    (problem,) = refused.value.problems
    assert problem.startswith("the optimizer is stored as fully_reshardable in ")
    assert "convert both to fsdp_dtensor" in problem
    models = [tmp_path / name for name in ("a", "b")]
    for source, model in zip(sources, models, strict=True):
        convert_to_fsdp_dtensor(source, model)
    averaged(models, tmp_path / "out")


def test_keys_that_differ_alike_are_told_in_a_line(tmp_path):
    names = ("core019_llama_tp2_fully_reshardable", "core019_moe_ep2_fully_reshardable")
    with pytest.raises(MappingError) as refused:
        averaged([fixture_dir(name) for name in names], tmp_path / "out")
    assert any(re.match(r"\d+ keys, such as \S+: each is in ", line) for line in refused.value.problems)
    assert len(refused.value.problems) < 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face model of several files."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    assert run(["export-hf", str(DATA / RUN), str(folder), "-q", "--max-shard-size", "30kB"]) == 0
    (folder / "tokenizer.json").write_text("{}")
    return folder


def another(model: Path, place: Path) -> Path:
    shutil.copytree(model, place)
    generator = torch.Generator().manual_seed(5)
    for path in place.glob("*.safetensors"):
        tensors = load_file(path)
        values = {k: (v + torch.randn(v.shape, generator=generator)).to(v.dtype) for k, v in tensors.items()}
        save_file(values, path, {"format": "pt"})
    return place


def test_hugging_face_models(model, tmp_path):
    sources, out = [another(model, tmp_path / "other"), model], tmp_path / "out"
    averaged(sources, out, weights=(3, 1))
    names = sorted(path.name for path in model.iterdir())
    assert sorted(path.name for path in out.iterdir()) == names
    assert len([name for name in names if name.endswith(".safetensors")]) > 2
    for name in names:
        if not name.endswith(".safetensors"):
            assert (out / name).read_bytes() == (model / name).read_bytes(), name
            continue
        tensors = [load_file(place / name) for place in (*sources, out)]
        assert tensors[0].keys() == tensors[2].keys()
        for key, found in tensors[2].items():
            assert oracle.same_bytes(found, mean([t[key] for t in tensors[:2]], (0.75, 0.25))), key
    assert run(["import-hf", str(out), str(tmp_path / "again"), "-q"]) == 0


def _with_config(place: Path, **fields: object) -> Path:
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | fields))
    return place


def test_models_of_other_settings_have_no_mean(model, tmp_path, capsys):
    other, noted = _with_config(another(model, tmp_path / "a"), rope_theta=5), another(model, tmp_path / "b")
    for sources in ([other, model], [model, other]):
        assert run(["average", *map(str, sources), str(tmp_path / "out"), "-q"]) == 5
        assert re.search("rope_theta is (5|10000.0) in .*, (5|10000.0) in", capsys.readouterr().err)
    _with_config(noted, initializer_range=7)
    report = averaged([noted, model], tmp_path / "noted").report
    assert any("initializer_range is 7 in" in note for note in report.notes)
    (noted / "config.json").unlink()
    with pytest.raises(MappingError, match=r"b has no config\.json"):
        averaged([model, noted], tmp_path / "out")
    assert any(
        "no settings to compare" in note for note in averaged([noted, model], tmp_path / "c").report.notes
    )


@pytest.mark.parametrize(
    ("name", "value"), [("rotary_base", 5), ("normalization", "LayerNorm"), ("swiglu", False)]
)
def test_runs_of_other_settings_have_no_mean(name, value, tmp_path):
    other = copy_of(RUN, tmp_path)
    with open_checkpoint(str(other)) as opened:
        opened.common.values["args"].state[name] = value
        (other / ITERATION / "common.pt").write_bytes(dump_archive(opened.common.values))
    with pytest.raises(MappingError, match=rf"{name} is {value!r} in .*, .* in "):
        averaged([other, DATA / RUN], tmp_path / "out")


def test_quantized_models_have_no_mean(model, tmp_path):
    place = shutil.copytree(model, tmp_path / "quantized")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    with pytest.raises(UnsupportedCheckpointError, match="quantization_config"):
        averaged([model, place], tmp_path / "out")


def test_plain_dcp(tmp_path):
    states: list[dict[str, Any]] = []
    for number in (1, 2):
        model = {
            "w": torch.arange(12.0).reshape(3, 4).t() * number,
            "half": torch.tensor([1.0, 3.0], dtype=torch.float16) * number,
            "running_mean": torch.full((2,), float(number)),
            "batches": torch.tensor(number),
        }
        optimizer = {
            "state": {"w": {"exp_avg": torch.full((4, 3), 0.5 * number), "step": torch.tensor(2.0 * number)}}
        }
        states.append({"model": model, "optimizer": optimizer, "epoch": number})
        dcp.save(states[-1], checkpoint_id=tmp_path / str(number), no_dist=True)
    done = averaged([tmp_path / "1", tmp_path / "2"], tmp_path / "out", weights=(1, 3))
    found: dict[str, Any] = {
        "model": {k: torch.zeros_like(v) for k, v in states[0]["model"].items()},
        "epoch": 0,
    }
    found["optimizer"] = {"state": {"w": {"exp_avg": torch.zeros(4, 3), "step": torch.tensor(0.0)}}}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(found["model"]["w"], states[0]["model"]["w"] * 1.75)
    assert found["model"]["half"].tolist() == [1.75, 5.25]
    assert found["model"]["running_mean"].tolist() == [2.0, 2.0]
    assert (found["model"]["batches"].item(), found["epoch"]) == (2, 2)
    assert torch.equal(found["optimizer"]["state"]["w"]["exp_avg"], torch.full((4, 3), 1.0))
    assert found["optimizer"]["state"]["w"]["step"].item() == 4.0
    assert set(done.averaged) == {"model.w", "model.half"}
    assert set(done.kept) == {"model.running_mean", "model.batches"}


def test_the_tensors_of_a_run_are_told_from_those_of_a_model(tmp_path):
    of_a_run = {
        "optimizer.state.w.exp_avg", "optim.state.w.momentum_buffer", "app.optimizer.state.w.exp_avg_sq",
        "optimizers_0.state.w.sum", "lr_scheduler.last", "train_state.loss", "state.w.exp_avg",
    }  # fmt: skip
    of_a_model = {
        "w", "model.scheduler.w", "model.optimizer.w", "module.layer.step", "app.model.w", "encoder.rng_proj",
    }  # fmt: skip
    for name, value in (("a", 1.0), ("b", 3.0)):
        state = {key: torch.tensor([value]) for key in of_a_run | of_a_model}
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    done = averaged([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert set(done.averaged) == of_a_model
    found = {key: value.item() for key, value in oracle.tensors(tmp_path / "out").items()}
    assert found == dict.fromkeys(of_a_run, 3.0) | dict.fromkeys(of_a_model, 2.0)


def test_states_that_no_name_tells_are_the_last_ones(user_cases, tmp_path):
    a, b = (user_cases / "average_dcp_states" / f"adafactor_titan_{side}" for side in "ab")
    done = averaged([a, b], tmp_path / "out")
    first, last, found = map(oracle.tensors, (a, b, tmp_path / "out"))
    states = {key for key in last if key.startswith(("state.", "train_state."))}
    assert set(done.averaged) == last.keys() - states
    assert all(oracle.same_bytes(found[key], last[key]) for key in states)
    assert all(
        torch.equal(found[k], ((first[k].double() + last[k].double()) / 2).float()) for k in done.averaged
    )


@pytest.mark.parametrize("key", ["optimizer.state.w.master_param", "optim.fp32_params.0", "master_weights.w"])
def test_masters_of_a_plain_checkpoint_are_refused(key, tmp_path):
    state = {"model.w": torch.zeros(2, dtype=torch.bfloat16), key: torch.zeros(2)}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(UnsupportedCheckpointError, match=f"modify-state-dict CKPT OUT(?s:.*){key}"):
        averaged([tmp_path / "a", tmp_path / "a"], tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_numbers_without_a_mean_are_refused_by_name(dtype, tmp_path):
    dcp.save({"model": {"odd": torch.zeros(4).to(dtype)}}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(UnsupportedCheckpointError, match=r"model\.odd is "):
        averaged([tmp_path / "a", tmp_path / "a"], tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["te_remainder_tp2_fr", "te_prec8_dp2_dpr", "tf2_dcp", "v014_moe_dpzero_ep2"]
)
def test_masters_that_are_no_numbers_of_their_own_are_refused(name, tmp_path):
    root = fixture_dir(name)
    root = root / "checkpoint" if (root / "checkpoint").exists() else root
    with pytest.raises(UnsupportedCheckpointError, match=r"strip|modify-state-dict|fsdp_dtensor"):
        averaged([root, root], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_masters_of_another_step_are_refused(tmp_path, capsys):
    stale = copy_of(RUN, tmp_path)
    key = f"optimizer.state.param.{NORM}"
    overwrite(stale / ITERATION, {key: oracle.tensors(stale / ITERATION)[key] + 1})
    assert run(["average", str(stale), str(DATA / RUN), str(tmp_path / "out"), "-q"]) == 6
    err = capsys.readouterr().err
    assert NORM in err
    assert f"strip {stale}" in err


def test_shares():
    for weights, ema, expected in (
        (None, None, (0.5, 0.5)), ((1, 3), None, (0.25, 0.75)), (None, 0.25, (0.25, 0.75)),
    ):  # fmt: skip
        assert mean_weights(2, weights, ema) == expected


@pytest.mark.parametrize(
    ("count", "weights", "ema"),
    [
        (1, None, None), (2, (1.0,), None), (2, (1.0, 0.0), None), (2, (2.0, -1.0), None), (2, (1.0, NAN), None),
        (2, (1.0, float("inf")), None), (2, (1e308, 1e308), None), (2, None, 1.0), (2, None, 0.0), (2, None, NAN),
        (2, (1.0, 1.0), 0.5),
    ],
)  # fmt: skip
def test_shares_that_make_no_mean(count, weights, ema):
    with pytest.raises(UsageError):
        mean_weights(count, weights, ema)


def test_shares_that_are_divided_are_told(tmp_path, capsys):
    words = ["average", *[str(DATA / RUN)] * 3, str(tmp_path / "out"), "--weights"]
    assert run([*words, "2,1,1", "--dry-run"]) == 0
    assert "0.5, 0.25, 0.25 (--weights divided by their sum, 4)" in capsys.readouterr().out
    assert run([*words, "0.5,0.3,0.2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["given_weights"] == [0.5, 0.3, 0.2] and sum(report["weights"]) == pytest.approx(1)


def test_an_average_of_moving_averages_is_one():
    shares = mean_weights(7, None, 0.9)
    value = 0.0
    for number in range(7):
        value = float(number) if number == 0 else 0.9 * value + 0.1 * number
    assert sum(share * number for number, share in enumerate(shares)) == pytest.approx(value, rel=1e-12)


def test_other_keys_are_named(tmp_path, capsys):
    less = copy_of(RUN, tmp_path)
    with metadata_of(less) as metadata:
        for key in [k for k in metadata.state_dict_metadata if k.endswith(NORM)]:
            drop_key(metadata, key)
    for sources in ([less, DATA / RUN], [DATA / RUN, less]):
        assert run(["average", *map(str, sources), str(tmp_path / "out"), "-q"]) == 5
        err = capsys.readouterr().err
        assert f"{NORM} is in {DATA / RUN / ITERATION}, but not in {less / ITERATION}" in err
        assert f"optimizer.state.param.{NORM} is in" in err
    assert not (tmp_path / "out").exists()


def test_other_shapes_and_types_are_named(tmp_path):
    for name, value in (("a", torch.zeros(4)), ("b", torch.zeros(5)), ("c", torch.zeros(4).half())):
        dcp.save({"model": {"w": value}}, checkpoint_id=tmp_path / name, no_dist=True)
    with pytest.raises(MappingError, match=r"model\.w is float32 \(4,\) in .*a, but float32 \(5,\) in .*b"):
        averaged([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    with pytest.raises(MappingError, match=r"model\.w is float32 \(4,\) in .*a, but float16 \(4,\) in .*c"):
        averaged([tmp_path / "a", tmp_path / "a", tmp_path / "c"], tmp_path / "out")


def test_what_is_refused_before_anything_is_written(tmp_path):
    root = copy_of(RUN, tmp_path)
    with pytest.raises(UsageError, match="the same format"):
        averaged([root, fixture_dir(FSDP)], tmp_path / "out")
    with pytest.raises(UsageError, match="overlap"):
        averaged([root, DATA / RUN], root / "mean")


def stopped(sources: Sequence[Path], output: Path) -> None:
    """Begin, and stop where some items are written."""

    def stop(done: int, _total: int) -> None:
        if done:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        average_checkpoints([str(s) for s in sources], str(output), AverageOptions(), stop)


def test_it_goes_on_where_it_stopped(tmp_path):
    sources = [altered(RUN, tmp_path / "a", 1), DATA / RUN]
    averaged(sources, tmp_path / "whole")
    stopped(sources, tmp_path / "out")
    averaged(sources, tmp_path / "out", resume=True)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        whole, resumed = ((tmp_path / place / ITERATION / name).read_bytes() for place in ("whole", "out"))
        assert whole == resumed
    with pytest.raises(UsageError, match="not empty"):
        averaged(sources, tmp_path / "out")


@pytest.mark.parametrize("changed", [0, 1])
def test_it_does_not_go_on_from_a_source_that_changed(changed, tmp_path):
    sources = [altered(RUN, tmp_path / str(seed), seed) for seed in (1, 2)]
    stopped(sources, tmp_path / "out")
    path, at, _ = payload_of(sources[changed], f"optimizer.state.param.{NORM}", (0,))
    flip_bit(path, at)
    with pytest.raises(CorruptCheckpointError, match=str(path)):
        averaged(sources, tmp_path / "out", resume=True)


def test_tiles_of_all_sources_share_the_memory(tmp_path, monkeypatch):
    for number in range(6):
        state = {"model": {"w": torch.full((1024, 512), float(number), dtype=torch.float32)}}
        dcp.save(state, checkpoint_id=tmp_path / str(number), no_dist=True)
    held: list[int] = []
    compute = WeightedMean.compute

    def watched(self: WeightedMean, box: Box, tiles: Sequence[Array]) -> Array:
        held.append(sum(tile.nbytes for tile in tiles))
        return compute(self, box, tiles)

    monkeypatch.setattr(WeightedMean, "compute", watched)
    memory = 3 << 20
    sources = [tmp_path / str(number) for number in range(6)]
    averaged(sources, tmp_path / "out", write=WriteOptions(threads=2, memory_bytes=memory))
    assert sum(held) == 6 * 1024 * 512 * 4  # nothing is computed twice
    assert max(held) <= memory / 2
    assert oracle.tensors(tmp_path / "out")["model.w"].unique().tolist() == [2.5]


def test_as_private_as_the_most_private_source(tmp_path):
    sources = [copy_of(RUN, tmp_path / name) for name in ("a", "b")]
    (sources[0] / ITERATION).chmod(0o700)
    averaged(sources, tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out" / ITERATION).stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out" / ITERATION).iterdir()}
    assert modes == {0o600}
