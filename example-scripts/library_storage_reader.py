"""Any PyTorch program loads a Megatron checkpoint: straight by `dcp.load`, or from a plain state dict on disk.

python example-scripts/library_storage_reader.py tests/data/core019_llama_tp2_fully_reshardable OUT
"""

import sys

import torch
import torch.distributed.checkpoint as dcp

from ckpt_tools import StorageReader, convert_to_dcp

if len(sys.argv) != 3:
    sys.exit(__doc__)

source, output = sys.argv[1:]
reader = StorageReader(source)
known = reader.read_metadata().state_dict_metadata
name = "model.decoder.layers.0.mlp.linear_fc1.weight"  # `reader.keys()` lists all; DTensors of any mesh do as well
straight = {name: torch.empty(known[name].size)}
dcp.load(straight, storage_reader=reader, no_dist=True)

report = convert_to_dcp(source, output)
stored = {name: torch.empty(known[name].size)}
dcp.load(stored, checkpoint_id=f"{output}/iter_0000002", no_dist=True)
same = torch.equal(straight[name], stored[name])
print(f"{report.tensors} tensors; {name} {tuple(stored[name].shape)} is {'the same' if same else 'another'}")
