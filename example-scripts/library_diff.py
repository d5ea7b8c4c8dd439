"""Compare two checkpoints, also of different formats; with one unit in the last place to spare.

python example-scripts/library_diff.py CHECKPOINT_A CHECKPOINT_B
"""

import sys

from ckpt_tools import DiffOptions, Tolerance, diff_checkpoints

if len(sys.argv) < 3:
    sys.exit(__doc__)

report = diff_checkpoints(
    sys.argv[1], sys.argv[2], DiffOptions(Tolerance(ulp=1), ignore=("args*", "rng_state*"))
)
for tensor in report.tensors:
    if tensor.kind != "equal":
        print(f"{tensor.name}: {tensor.kind}, {tensor.found.different:,} of {tensor.elements:,} elements")
for value in report.values:
    print(f"{value.name}: {value.a} -> {value.b}")
print(f"{len(report.tensors)} tensors compared by {report.by}: {'equal' if report.is_equal else 'different'}")
sys.exit(0 if report.is_equal else 1)
