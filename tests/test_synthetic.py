"""The synthetic checkpoint is one that stock DCP reads, with the grammar the tool expects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_tools.commands.check.diff import diff_checkpoints
from ckpt_tools.commands.convert.to_dtensors import convert_to_fsdp_dtensor
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.plan.overlap import entry_problem
from tests.synthetic import LAYOUTS, Llama, write_llama


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_dcp_reads_it_and_masters_round_to_weights(tmp_path: Path) -> None:
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


def test_every_layout_converts_to_the_same_files(tmp_path: Path) -> None:
    made = []
    for layout in LAYOUTS:
        source, output = tmp_path / layout / "iter_0000100", tmp_path / f"{layout}-out"
        write_llama(source, gib=0.01, layout=layout)
        convert_to_fsdp_dtensor(str(source), str(output), ConvertOptions(check_masters="all"))
        made.append({path.name: path.read_bytes() for path in output.rglob("*.distcp")})
    assert made[0] and made[0] == made[1] == made[2]


def test_stages_that_processes_write_hold_the_same_tensors(tmp_path: Path) -> None:
    write_llama(tmp_path / "one", gib=0.01)
    write_llama(tmp_path / "two", gib=0.01, pp=2)
    assert len(list((tmp_path / "two").glob("*.distcp"))) == 4
    found = diff_checkpoints(tmp_path / "one", tmp_path / "two")
    assert found.tensors and {tensor.kind for tensor in found.tensors} == {"equal"}
    assert [value.name for value in found.values] == ["common_state.args.pipeline_model_parallel_size"]
