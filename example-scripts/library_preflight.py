"""Will a Megatron-FSDP job start from this checkpoint, and with which flags?

python example-scripts/library_preflight.py CHECKPOINT [-- flags of the job]
"""

import sys

from ckpt_tools import preflight

checkpoint, *flags = sys.argv[1:]
found = preflight(checkpoint, [flag for flag in flags if flag != "--"])
for finding in found.report.findings:
    print(f"{finding.severity}: {finding.where}. {finding.message}. Fix: {finding.fix}")
print("\n".join([*found.environment, " ".join(found.flags)]))
sys.exit(0 if found.report.is_valid else 1)
