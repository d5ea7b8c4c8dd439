"""One pipeline stage of two that save into one checkpoint as Megatron-FSDP does (MLM#7452), with stock DCP."""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.commands.stages import of_stage


def main(values: str, folder: str) -> None:
    """`values` are the tensors of a whole model; each rank is a stage of one layer."""
    dist.init_process_group("gloo")
    stage = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    tensors, objects = of_stage(torch.load(values, weights_only=True), stage)
    state: dict[str, object] = {
        key: DTensor.from_local(value, mesh, [Shard(0)], run_check=False) if value.dim() else value
        for key, value in tensors.items()
    }
    args = argparse.Namespace(num_layers=2, pipeline_model_parallel_size=2, swiglu=True, bf16=True)
    dcp.save(
        state | objects | {"args": args, "iteration": 2, "checkpoint_version": 3.0}, checkpoint_id=folder
    )
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torn down, torch's threads now and then abort the process where cores are busy


if __name__ == "__main__":
    main(*sys.argv[1:])
