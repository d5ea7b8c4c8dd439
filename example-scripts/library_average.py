"""Average checkpoints of one run, the later ones more, keep the weights alone, and copy them elsewhere.

python example-scripts/library_average.py out/mean out/weights s3://bucket/weights RUN/iter_0001000 RUN/iter_0002000
"""

import sys

from ckpt_tools import (
    AverageOptions,
    CopyOptions,
    EditOptions,
    average_checkpoints,
    copy_checkpoint,
    strip_checkpoint,
)

if len(sys.argv) < 5:
    sys.exit(__doc__)

mean, weights, elsewhere, *sources = sys.argv[1:]
averaged = average_checkpoints(sources, mean, AverageOptions(ema=0.9, overwrite=True))
print("shares of the mean:", ", ".join(f"{share:.2f}" for share in averaged.weights))
print(f"{len(averaged.averaged)} tensors averaged, {len(averaged.rounded)} of them rounded as weights")
left = strip_checkpoint(mean, weights, options=EditOptions(overwrite=True))
print(f"{left.tensors} tensors without {len(left.edits.removed)} keys of the run")
(copied,) = copy_checkpoint(weights, elsewhere, CopyOptions(overwrite=True)).copied
print(f"{copied.nbytes:,} bytes copied, {copied.proven} payloads proven")
