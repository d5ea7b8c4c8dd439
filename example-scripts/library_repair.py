"""What is known to be wrong with a checkpoint, and what shows how it was meant to be; written only if there is proof.

python example-scripts/library_repair.py FSDP_DTENSOR out/repaired
"""

import sys

from ckpt_tools import CkptError, EditOptions, repair_checkpoint

if len(sys.argv) != 3:
    sys.exit(__doc__)

source, output = sys.argv[1:]
try:
    done = repair_checkpoint(source, output, EditOptions(overwrite=True))
    for change in done.changes:
        print(f"{change.cause} ({change.issue}): {len(change.keys)} entries; {change.proof}")
    if not done.changes:
        print(f"{done.source} repair knows no fault of its keys; nothing was written")
except CkptError as error:  # no proof
    print(error)
