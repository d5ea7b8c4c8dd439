"""Price a conversion for a training job of four GPUs; nothing is written.

python example-scripts/library_plan.py tests/data/core019_llama_tp2_fully_reshardable
"""

import sys

from ckpt_tools import Layout, Topology, plan_checkpoint

if len(sys.argv) < 2:
    sys.exit(__doc__)

plan = plan_checkpoint(sys.argv[1], Layout("mfsdp-v1", Topology(dp_shard=4)))
for cost in plan.costs:
    peak = cost.memory.peak if cost.memory else 0
    print(
        f"rank {cost.rank}: {cost.items} items, {cost.nbytes:,} bytes in {', '.join(cost.files)}, "
        f"{peak:,} bytes in training"
    )
print(
    f"largest rank over the mean: {plan.imbalance:.2f}; bytes by strategy: {dict(plan.plan.bytes_by_strategy)}"
)
