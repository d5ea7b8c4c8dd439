"""Where the bytes of a run lie, whether its values are sound, and what a training has changed.

python example-scripts/library_look.py RUN RUN/iter_0001000 RUN/iter_0002000
"""

import sys

from ckpt_tools import StatsOptions, checkpoint_change, checkpoint_statistics, list_run

if len(sys.argv) < 4:
    sys.exit(__doc__)

run, before, after = sys.argv[1:]
print({row.name: row.state for row in list_run(run).iterations})
found = checkpoint_statistics(before)
bad = [t.named.title for t in found.nonfinite()]
print(", ".join(bad) if bad else f"no NaN in {len(found.tensors)} tensors")
for (layer, role), change in (
    checkpoint_change(before, after, StatsOptions(roles=("master",))).layers().items()
):
    print(f"{layer or 'outside of layers'}, {role}: {change.relative}, cosine {change.cosine}")
