"""A fresh process that knows nothing of ckpt_tools: stock torch loads a checkpoint as tensors and as DTensors."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def main(folder: str, report: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    entries = {k: m for k, m in known.items() if isinstance(m, TensorStorageMetadata)}
    plain = {k: torch.full(tuple(m.size), 7).to(m.properties.dtype) for k, m in entries.items()}
    sharded = {k: distribute_tensor(t.clone(), mesh, [Shard(0)]) for k, t in plain.items() if t.dim()}
    dcp.load(plain, checkpoint_id=folder)
    dcp.load(sharded, checkpoint_id=folder)
    different = [k for k, t in sharded.items() if not same(t.full_tensor(), plain[k])]
    if dist.get_rank() == 0:
        torch.save(plain, report)
        Path(f"{report}.json").write_text(json.dumps([len(plain), len(sharded), different]))
    assert "ckpt_tools" not in sys.modules
    assert all(isinstance(t, DTensor) for t in sharded.values())
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torn down, torch's threads now and then abort the process where cores are busy


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


if __name__ == "__main__":
    main(*sys.argv[1:])
