"""Convert for Megatron-FSDP, laid out for four GPUs, and back to 3D parallel.

python example-scripts/library_convert.py tests/data/core019_llama_tp2_fully_reshardable out/fsdp out/back
"""

import sys

from ckpt_tools import (
    ConvertOptions,
    Layout,
    Topology,
    ToTorchDistOptions,
    convert_to_fsdp_dtensor,
    convert_to_torch_dist,
)

if len(sys.argv) < 4:
    sys.exit(__doc__)

source, fsdp, back = sys.argv[1:]
options = ConvertOptions(layout=Layout("mfsdp-v1", Topology(dp_shard=4)), check_masters="all")
report = convert_to_fsdp_dtensor(source, fsdp, options, progress=lambda done, total: None)
print(f"{report.tensors} tensors in groups {report.groups}; masters {report.masters.use}")
for line in (*report.dropped, *report.notes):
    print(f"  {line}")

report = convert_to_torch_dist(fsdp, back, ToTorchDistOptions(overwrite=True))
assert report.written is not None
print(f"back in {report.written.seconds:.2f} s, {report.written.bytes_written:,} bytes")
