"""One rank of a job whose uneven DTensors are made known to DCP by the released megatron-fsdp, under gloo."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it misses Transformer Engine
    from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor


def main(folder: str, report: str) -> None:
    """Load this rank's rows of every cut tensor and write down which they were."""
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    stored = dcp.FileSystemReader(folder).read_metadata()
    own = {i.fqn: i.offset for i, s in stored.storage_data.items() if s.relative_path == f"__{rank}_0.distcp"}
    state, rows = {}, {}
    for key, entry in stored.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata) or not key.startswith(("model.", "optimizer.state.")):
            continue
        if not entry.size:  # a step: no rows to cut
            continue
        sizes = {tuple(c.offsets): tuple(c.sizes) for c in entry.chunks}
        offset = own.get(key)
        local = sizes[tuple(offset)] if offset is not None else (0, *entry.size[1:])
        stride = torch.empty(entry.size, device="meta").stride()
        tensor = torch.full(local, 7).to(entry.properties.dtype)
        state[key] = DTensor.from_local(
            tensor, mesh, [Shard(0)], run_check=False, shape=entry.size, stride=stride
        )
        rows[key] = [offset[0] if offset is not None else 0, local[0]]
    preprocess_state_dict_for_uneven_dtensor(state)
    dcp.load(state, checkpoint_id=folder)
    torch.save({key: t.to_local() for key, t in state.items()}, f"{report}.{rank}.pt")
    Path(f"{report}.{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torn down, torch's threads now and then abort the process where cores are busy


if __name__ == "__main__":
    main(*sys.argv[1:])
