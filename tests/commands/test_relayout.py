"""Laid out otherwise and back: over another topology or straight is the same, real jobs get their own chunks again.

Placements are exact on real models: files in reading order, fused projections in parts, MLA, tensors of no rows.
"""

import argparse
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import ConvertOptions, Layout, TargetOptions, Topology, convert_to_fsdp_dtensor
from ckpt_tools.cli.app import run
from ckpt_tools.commands.convert.plan import BufferTypes, buffer_types
from ckpt_tools.commands.convert.to_dtensors import prepare
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.commands.job.placements import LiveModel, exact_placement, mla_tp_dims, place_model
from ckpt_tools.formats.pickle.unpickle import TorchDtype
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.choices import LayoutName
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.plan.build import file_rank
from ckpt_tools.sharding.units import LiveTensor
from tests.commands import oracle
from tests.commands.made import fsdp
from tests.commands.rewritten import saved
from tests.commands.test_repair import parts
from tests.commands.test_to_fsdp_dtensor import options_of, source_of
from tests.conftest import DATA, fixture_dir
from tests.folders import is_sound

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
DP3, DP2_TP2 = Topology(dp_shard=3), Topology(dp_shard=2, tp=2)


def laid_out(
    source: Path,
    output: Path,
    topology: Topology,
    layout: LayoutName = "mfsdp-v1",
    target: TargetOptions | None = None,
) -> Path:
    options = ConvertOptions(
        target=target or TargetOptions(), layout=Layout(layout, topology), check_masters="none"
    )
    convert_to_fsdp_dtensor(source, output, options)
    return output


def contents(folder: Path) -> tuple[dict[str, list[tuple[Any, ...]]], dict[str, object]]:
    """Chunk boxes and file names by key, and planner paths."""
    known = oracle.metadata(folder)
    files: dict[str, list[tuple[Any, ...]]] = {}
    for index, info in known.storage_data.items():
        files.setdefault(index.fqn, []).append((tuple(index.offset or ()), info.relative_path))
    return {key: sorted(found) for key, found in files.items()}, known.planner_data


def stored_bytes(folder: Path, keys: list[str]) -> dict[str, bytes]:
    """The archive of every object."""
    found = {}
    for index, info in oracle.metadata(folder).storage_data.items():
        if index.fqn in keys:
            data = (oracle.files_of(folder) / info.relative_path).read_bytes()
            found[index.fqn] = data[info.offset : info.offset + info.length]
    return found


MODELS = (  # one of every architecture: how the optimizer was stored is gone after the first conversion
    "core019_llama_tp2_fully_reshardable", "core019_gpt3_tp2_fully_reshardable", "core019_moe_ep2_fully_reshardable",
    "main_dense_dpr_pp2_vpp2_tied", "main_gdn_fr_tp2", "main_llava_fr_tp2", "main_mla_mtp_moe_fr_tp2",
    "bridge_dense_fr_tp2_dp2",
)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_over_another_topology_or_straight_is_the_same(name, tmp_path):
    """TP 1 on the way: fused projections are regrouped, and rng states of the lost rank come from the kept one."""
    case = fixture_dir(name)
    spec = TargetOptions(layer_spec=options_of(case).layer_spec)
    straight = laid_out(source_of(case), tmp_path / "straight", DP2_TP2, target=spec)
    first = laid_out(source_of(case), tmp_path / "first", DP3, target=spec)
    second = laid_out(first, tmp_path / "second", DP2_TP2, target=spec)
    tensors, expected = oracle.tensors(second), oracle.tensors(straight)
    assert tensors.keys() == expected.keys()
    different = [key for key in expected if not oracle.same_bytes(tensors[key], expected[key])]
    assert all(key.startswith("rng_state.(0, 1)") for key in different)
    assert contents(second) == contents(straight)


def test_a_native_checkpoint_is_laid_out(tmp_path, capsys):
    """One that Megatron-FSDP wrote, for three ranks and for five rows of files."""
    native = next(fixture_dir("core019_llama_tp2_native_fsdp_dtensor").glob("iter_*"))
    words = ["--quiet", "--dp-shard", "3", "--tp", "2"]
    assert run(["convert", str(native), str(tmp_path / "out"), *words]) == 0
    assert run(["convert", str(native), str(tmp_path / "even"), "--quiet", "--world-size", "5"]) == 0
    capsys.readouterr()
    expected = oracle.tensors(native)
    for name, files in (("out", 6), ("even", 5)):
        folder = next((tmp_path / name).glob("iter_*"))
        found = oracle.tensors(folder)
        oracle.assert_same(found, expected)
        assert len(list(folder.rglob("*.distcp"))) == files


def test_options_that_would_change_the_content_are_refused(tmp_path, capsys):
    first = laid_out(LLAMA, tmp_path / "a", DP3)
    for words in (["--weights-only"], ["--vocab-size-padded", "256"], ["--experts", "grouped"]):
        assert run(["convert", str(first), str(tmp_path / "b"), "--quiet", *words]) == 2
        assert "already an fsdp_dtensor checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_projections_that_cannot_be_regrouped_are_named(tmp_path, capsys):
    gdn = source_of(fixture_dir("main_gdn_fr_tp2"))
    first = laid_out(gdn, tmp_path / "a", Topology(1, tp=2))
    assert run(["convert", str(first), str(tmp_path / "b"), "--quiet", "--dp-shard", "1", "--tp", "16"]) == 2
    assert re.search(
        r"\d+ attention heads are not a multiple of tensor parallel size 16", capsys.readouterr().err
    )


@pytest.mark.parametrize(("tp", "note"), [(4, "ranks 2 to 3: copied"), (1, "rank 1: dropped")])
def test_rng_of_more_or_fewer_ranks(tp, note, tmp_path, capsys):
    """A rank that the source does not have gets the last one's states; the others keep their own, to the byte."""
    first = laid_out(LLAMA / "iter_0000002", tmp_path / "a", DP2_TP2) / "iter_0000002"
    assert run(["convert", str(first), str(tmp_path / "b"), "--tp", str(tp)]) == 0
    assert f"rng of tensor-parallel {note}" in capsys.readouterr().out
    prefix = "rng_state.(0, "
    old, new = (
        {
            key: data
            for key, data in stored_bytes(folder, list(oracle.metadata(folder).state_dict_metadata)).items()
            if key.startswith(prefix)
        }
        for folder in (first, tmp_path / "b" / "iter_0000002")
    )
    ranks = {int(key.removeprefix(prefix).partition(")")[0]) for key in new}
    assert ranks == set(range(tp))
    for rank in ranks:
        own, source = f"{prefix}{rank})", f"{prefix}{min(rank, 1)})"
        expected = {key.replace(source, own): data for key, data in old.items() if key.startswith(source)}
        assert {key: data for key, data in new.items() if key.startswith(own)} == expected
    assert {k.replace("(0, 0)", ""): v for k, v in old.items() if "(0, 0)" in k} != {
        k.replace("(0, 1)", ""): v for k, v in old.items() if "(0, 1)" in k
    }


@pytest.mark.parametrize("name", ["main_mla_mtp_moe_fr_tp2", "core019_llama_tp2_fully_reshardable"])
@pytest.mark.parametrize("programs", ["core-0.16 main", "main core-0.17", "core-0.17 core-0.16"])
@pytest.mark.parametrize("more", [[], ["--hard-link"]])
def test_renamed_for_another_program_or_straight_is_the_same(name, programs, more, tmp_path):
    first, second = programs.split()
    source, straight = fsdp(name, dialect=first, tp=2), fsdp(name, dialect=second, tp=2)
    assert run(["convert", str(source), str(tmp_path / "out"), "--target", second, *more]) == 0
    oracle.assert_same(tmp_path / "out", straight)
    assert oracle.objects(tmp_path / "out") == oracle.objects(straight)
    assert oracle.metadata(tmp_path / "out").planner_data == oracle.metadata(straight).planner_data
    assert is_sound(tmp_path / "out")
    assert (
        run(["convert", str(tmp_path / "out"), str(tmp_path / "again"), "--target", second]) == 2
    )  # it is already


def test_a_program_that_stores_other_values_is_refused(tmp_path, capsys):
    llama, fused = fsdp(LLAMA.name), tmp_path / "fused"
    tensors = oracle.tensors(llama)
    tensors["model.module.decoder.layers.0.self_attention.linear_qkv_down_proj.weight"] = torch.ones(4, 4)
    args = argparse.Namespace(mla_down_proj_fusion=True)
    for state in (tensors, {**oracle.tensors(llama), "args": args}):
        shutil.rmtree(fused, ignore_errors=True)
        assert run(["convert", str(saved(fused, state)), str(tmp_path / "out"), "--target", "core-0.17"]) == 2
        assert "fused down-projections of MLA" in capsys.readouterr().err
    assert run(["convert", str(llama), str(tmp_path / "out"), "--target", "bridge"]) == 2
    assert "Megatron-Bridge keeps other files" in capsys.readouterr().err


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


def laid_out_by(source: Path, output: Path, words: str) -> Path:
    assert run(["convert", str(source), str(output), "--quiet", *words.split()]) == 0
    return output


@pytest.mark.parametrize("name", JOBS)
def test_a_native_job_gets_its_own_chunks_back(name, tmp_path):
    native = next(fixture_dir(name).glob("iter_*"))
    tp = "--tp 2" if "--tp 2" in JOBS[name] else "--tp 1"
    between = laid_out_by(native, tmp_path / "a", f"--dp-shard 5 {tp} --layout fsdp2")
    again = laid_out_by(between, tmp_path / "b", JOBS[name])
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
    again = oracle.tensors(laid_out_by(source, tmp_path / "again", "--dp-shard 3 --tp 2"))
    assert all(oracle.same_bytes(again[key], tensors[key]) for key in tensors)
    there = laid_out_by(source, tmp_path / "there", "--to torch_dist")
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


MODEL, STATE = "model.module.", "optimizer.state.module.module.module."


@pytest.mark.parametrize("layout", ["mfsdp-v1", "mfsdp-v2", "fsdp2"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("core019_llama_tp2_fully_reshardable", {"dp_shard": 5}),
        ("core019_moe_ep2_fully_reshardable", {"dp_shard": 4, "ep": 2}),
        ("main_mla_mtp_moe_fr_tp2", {"dp_shard": 2, "tp": 2, "ep": 2}),
    ],
)
def test_every_file_is_in_the_order_in_which_its_rank_reads(name, sizes, layout):
    """The model in the rank's own order, then the states, parameter by parameter."""
    topology = Topology(**sizes)
    if layout == "mfsdp-v2" and topology.tp > 1:
        topology = replace(topology, tp=1, etp=0)
    job = Layout(layout, topology)
    case = fixture_dir(name)
    with open_checkpoint(str(source_of(case))) as opened:
        p = prepare(opened, ConvertOptions(target=replace(options_of(case), tp=None)), job)
        core = place_model(p.live_model(), job)
        plan = p.planned(job, iteration=None).plan
    for rank in range(job.ranks):
        items = [item for item in plan.items if file_rank(item.file) == rank]
        assert [item.offset for item in items] == sorted(item.offset for item in items)
        boxes = list(core.written(rank))
        trained = [(n, box) for n, box in boxes if not n.endswith("expert_bias")]
        expected = [(MODEL + n, box) for n, box in boxes]
        expected += [(f"{STATE}{n}.{s}", box) for n, box in trained for s in ("exp_avg", "exp_avg_sq")]
        assert [(item.key, item.box) for item in items] == expected


def test_parts_that_bridge_keeps_apart_are_placed_as_the_fused_tensor_is():
    """Rank 0 of two tensor-parallel ranks has the first half of the rows of every part."""
    case = fixture_dir("main_gdn_fr_tp2")
    job = Layout("mfsdp-v1", Topology(1, tp=2))
    with open_checkpoint(str(source_of(case))) as opened:
        model = prepare(opened, ConvertOptions(target=TargetOptions(dialect="bridge")), job).live_model()
        core = place_model(model, job)
    fused = [t for t in model.tensors if t.name.endswith("in_proj.weight")]
    assert fused
    for tensor in fused:
        assert len(tensor.parts) in (6, 7)
        assert sum(part.rows for part in tensor.parts) == tensor.shape[0]
    found = [dict(core.boxes(rank)) for rank in range(2)]
    for part in (part for tensor in fused for part in tensor.parts):
        assert found[0][part.name].start[0] == 0
        assert found[1][part.name].start[0] == part.rows // 2
        assert found[0][part.name].size[0] == found[1][part.name].size[0] == part.rows // 2


@pytest.mark.parametrize(("local", "rows"), [(False, 8), (True, 4)])
def test_mla_down_projections_follow_the_layer_spec(local, rows):
    name = "decoder.layers.0.self_attention.linear_q_down_proj.weight"
    model = LiveModel((LiveTensor(name, (8, 2), "bfloat16"),), local)
    core = place_model(model, Layout("mfsdp-v1", Topology(1, tp=2)))
    assert dict(core.boxes(1))[name].size[0] == rows
    assert set(mla_tp_dims(local).values()) == ({None, 0} if local else {None})


def test_tensors_of_no_rows_and_of_no_parameter_stand_whole_in_the_first_file():
    model = LiveModel((LiveTensor("output_layer.weight", (0, 4), "float32"),), False)
    core = place_model(model, Layout("fsdp2", Topology(2)))
    place = exact_placement(core, range(2))
    empty = TargetTensor(
        "model.module.output_layer.weight", "float32", (0, 4), (), parameter="output_layer.weight"
    )
    rng = TargetTensor("rng", "uint8", (16,), ())
    assert place(empty) == [(0, Box((0, 0), (0, 4)))]
    assert place(rng) == [(0, full_box((16,)))]
    assert exact_placement(core, [1])(rng) == []
