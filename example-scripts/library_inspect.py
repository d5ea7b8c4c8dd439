"""What a checkpoint is and holds, without reading a tensor.

python example-scripts/library_inspect.py tests/data/core019_llama_tp2_fully_reshardable
"""

import sys

from ckpt_tools import inspect_checkpoint

if len(sys.argv) < 2:
    sys.exit(__doc__)

found = inspect_checkpoint(sys.argv[1], keys=["*.mlp.*"])
print(
    f"{found.location.kind} by {found.writer}, iteration {found.iteration}: {found.parameters:,} parameters"
)
for (role, dtype), total in found.totals.items():
    print(f"  {role:<10} {dtype:<9} {total.tensors:>5} tensors {total.nbytes:>9,} bytes")
for tensor in found.tensors():
    print(f"  {tensor.key} {tensor.dtype} {list(tensor.shape)}")
