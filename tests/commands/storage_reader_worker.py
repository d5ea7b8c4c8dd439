"""One rank of a job that loads by `StorageReader`; run by torchrun, told what to do by a JSON file.

Stock `dcp.load` of our conversion is the truth: the same template, filled by either, must have the same bytes.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, full

import ckpt_tools
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from tests.commands import oracle
from tests.commands.dtensor_worker import CountingReader, emptied


def placements_of(key: str, shape: torch.Size, mesh: DeviceMesh) -> list[Placement] | None:
    """Rows, columns, both or whole tensors, by turns; None for a plain tensor."""
    turn = sum(map(ord, key)) % 4
    if not shape or turn == 3:
        return None
    dim = 1 if turn == 1 and len(shape) > 1 else 0
    return [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]


def template(folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """Every key of a checkpoint, its tensors filled with something else."""
    state: dict[str, Any] = {}
    for key, entry in oracle.metadata(folder).state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        size, dtype = tuple(entry.size), entry.properties.dtype
        placed = placements_of(key, entry.size, mesh)
        if placed is None:
            state[key] = torch.full(size, 77).to(dtype)
        else:
            state[key] = full(size, 77, dtype=dtype, device_mesh=mesh, placements=placed)
    return state


def run(case: dict[str, Any]) -> dict[str, Any]:
    world = dist.get_world_size()
    shape = (2, world // 2) if world > 2 else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    folder = Path(case["converted"])
    stock, ours = template(folder, mesh), template(folder, mesh)
    dcp.load(stock, storage_reader=CountingReader(str(folder)))
    options = ConvertOptions(target=TargetOptions(**case["target"]))
    reader = ckpt_tools.StorageReader(case["source"], case["to"], options)
    wanted_objects = dict.fromkeys(case["objects"])
    dcp.load(ours | wanted_objects, storage_reader=reader)
    wrong = [
        key
        for key in stock
        if not oracle.same_bytes(
            *(t.to_local() if isinstance(t, DTensor) else t for t in (stock[key], ours[key]))
        )
    ]
    straight, more = shards_of(case["source"], folder) if case["to"] == "dcp" else (0, [])
    return {
        "wrong": wrong + more,
        "straight": straight,
        "tensors": len(stock),
        "sharded": sum(isinstance(t, DTensor) for t in stock.values()),
        "same_keys": set(reader.keys()) == set(oracle.metadata(folder).state_dict_metadata),
    }


def shards_of(source: str, folder: Path) -> tuple[int, list[str]]:
    """Of a state dict that is plain already: how many shards `load_dtensors` gives, and those unlike stock."""
    if not Path(source, ".metadata").exists() or Path(source, "metadata.json").exists():
        return 0, []
    if oracle.metadata(folder).planner_data != oracle.metadata(Path(source)).planner_data:
        return 0, []  # made of another format
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = ckpt_tools.load_dtensors(source, mesh, "fsdp2")
    shards = {key: tensor for key, tensor in found.items() if isinstance(tensor, DTensor)}
    stock = {key: emptied(tensor) for key, tensor in shards.items()}
    dcp.load(stock, storage_reader=CountingReader(str(folder)))
    wrong = [k for k in shards if not oracle.same_bytes(shards[k].to_local(), stock[k].to_local())]
    return len(shards), wrong


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    results = {case["name"]: run(case) for case in task["cases"]}
    Path(task["scratch"], f"result_{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torn down, torch's threads now and then abort the process where cores are busy


if __name__ == "__main__":
    main()
