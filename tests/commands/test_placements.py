"""Exact placements on real models: files in reading order, fused projections in parts, MLA, tensors of no rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_tools import ConvertOptions, Layout, TargetOptions, Topology
from ckpt_tools.commands.convert.to_dtensors import prepare
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.commands.job.placements import LiveModel, exact_placement, mla_tp_dims, place_model
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.plan.build import file_rank
from ckpt_tools.sharding.units import LiveTensor
from tests.commands.test_to_fsdp_dtensor import options_of, source_of
from tests.conftest import fixture_dir

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
