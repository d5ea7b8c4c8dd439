"""Will a Megatron-FSDP job start from this checkpoint, and with which command?

python example-scripts/library_preflight.py CHECKPOINT [-- flags of the job]
"""

import sys

from ckpt_tools import preflight

if len(sys.argv) < 2:
    sys.exit(__doc__)

checkpoint, *flags = sys.argv[1:]
found = preflight(checkpoint, [flag for flag in flags if flag != "--"])
for finding in found.report.findings:
    print(f"{finding.severity}: {finding.where}. {finding.message}. Fix: {finding.fix}")
if found.launch is not None:  # only what is ready
    print("\n".join([*found.launch.environment, found.launch.command]))
sys.exit(0 if found.report.is_valid else 1)
