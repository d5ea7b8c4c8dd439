"""Every rank of a job takes its shards straight from a checkpoint: no conversion, no file, no whole tensor.

torchrun --nproc-per-node 2 example-scripts/library_load_dtensors.py tests/data/core019_llama_tp2_fully_reshardable
"""

import sys

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ckpt_tools import load_dtensors

if len(sys.argv) < 2:
    sys.exit(__doc__)

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
tensors = load_dtensors(sys.argv[1], mesh)
shards = [tensor for tensor in tensors.values() if isinstance(tensor, DTensor)]
held = sum(shard.to_local().numel() for shard in shards)
whole = sum(shard.numel() for shard in shards)
print(f"rank {dist.get_rank()} holds {held:,} of {whole:,} elements of {len(shards)} tensors")
dist.destroy_process_group()
