"""Which optimizer group does each parameter belong to, and why?

python example-scripts/library_group_map.py tests/data/core019_llama_tp2_fully_reshardable
"""

import sys

from ckpt_tools import TargetOptions, build_group_map

if len(sys.argv) < 2:
    sys.exit(__doc__)

found = build_group_map(sys.argv[1], TargetOptions(dialect="core-0.16"))
for name, group in found.groups.items():
    print(f"{group}  {name}: {found.rules[name]}")
