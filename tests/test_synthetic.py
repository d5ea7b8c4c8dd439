"""The synthetic checkpoints: stock DCP reads one, the other has the published size and needs its metadata alone."""

from math import prod

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from ckpt_tools.commands.check.diff import diff_checkpoints
from ckpt_tools.commands.convert.plan import plan_checkpoint
from ckpt_tools.commands.convert.to_dtensors import convert_to_fsdp_dtensor
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.commands.job.placements import Layout
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.plan.build import file_rank
from ckpt_tools.plan.overlap import entry_problem
from ckpt_tools.sharding.topology import Topology
from tests.synthetic import LAYOUTS, Llama, write_llama
from tests.synthetic_deepseek import stored_weights, write_metadata


def test_stock_dcp_reads_it_and_masters_round_to_weights(tmp_path):
    write_llama(tmp_path / "iter", gib=0.01)
    files = open_files(str(tmp_path / "iter"))
    catalog = read_catalog(files)
    assert len(catalog.tensors) == 4 * len(list(Llama(0.01, 2).parameters()))
    assert not [problem for entry in catalog.tensors.values() if (problem := entry_problem(entry))]
    assert torch.load(tmp_path / "iter" / "common.pt", weights_only=False)["args"].swiglu
    keys = [key for key in catalog.tensors if "linear_fc1.weight" in key and "exp" not in key]
    state = {key: torch.zeros(catalog.tensors[key].shape, dtype=torch.float32) for key in keys}
    state = {k: v if "param" in k else v.to(torch.bfloat16) for k, v in state.items()}
    dcp.load(state, checkpoint_id=tmp_path / "iter")
    weight, master = (state[key] for key in sorted(keys))
    assert master.to(torch.bfloat16).view(torch.int16).equal(weight.view(torch.int16))
    assert np.unique(master.numpy()).size > 1000


def test_every_layout_converts_to_the_same_files(tmp_path):
    made = []
    for layout in LAYOUTS:
        source, output = tmp_path / layout / "iter_0000100", tmp_path / f"{layout}-out"
        write_llama(source, gib=0.01, layout=layout)
        convert_to_fsdp_dtensor(str(source), str(output), ConvertOptions(check_masters="all"))
        made.append({path.name: path.read_bytes() for path in output.rglob("*.distcp")})
    assert made[0] and made[0] == made[1] == made[2]


def test_stages_that_processes_write_hold_the_same_tensors(tmp_path):
    write_llama(tmp_path / "one", gib=0.01)
    write_llama(tmp_path / "two", gib=0.01, pp=2)
    assert len(list((tmp_path / "two").glob("*.distcp"))) == 4
    found = diff_checkpoints(tmp_path / "one", tmp_path / "two")
    assert found.tensors and {tensor.kind for tensor in found.tensors} == {"equal"}
    assert [value.name for value in found.values] == ["common_state.args.pipeline_model_parallel_size"]


def test_it_has_671_billion_parameters():
    main = {key: shape for key, (_, shape) in stored_weights(61).items() if not key.startswith("mtp.")}
    assert round(sum(map(prod, main.values())) / 1e9) == 671


def test_five_layers_are_planned_for_128_ranks_without_a_payload(tmp_path):
    write_metadata(tmp_path / "in", layers=5)
    assert not list(tmp_path.rglob("*.distcp"))
    layout = Layout("mfsdp-v1", Topology.of_world(128, ep=64))
    found = plan_checkpoint(str(tmp_path / "in"), layout)
    elements = sum(prod(item.box.size) for item in found.plan.items)
    assert elements == sum(prod(t.shape) for t in found.target.tensors)
    assert len(found.costs) == 128
    assert found.imbalance < 1.2
    alone = plan_checkpoint(str(tmp_path / "in"), layout, rank=77)
    assert list(alone.plan.items) == [item for item in found.plan.items if file_rank(item.file) == 77]
    assert alone.costs == [found.costs[77]]
    assert set(alone.plan.tensors) == {item.key for item in alone.plan.items}
    assert [row.key for row in alone.tensors()] == list(alone.plan.tensors)
    assert len(alone.target.tensors) == len(found.target.tensors)
