"""Read every byte of a checkpoint and say what is wrong with it.

python example-scripts/library_verify.py tests/data/core019_llama_tp2_fully_reshardable
"""

import sys

from ckpt_tools import CkptError, VerifyOptions, verify_checkpoint

if len(sys.argv) < 2:
    sys.exit(__doc__)

try:
    report = verify_checkpoint(sys.argv[1], options=VerifyOptions(content=True))
except (
    CkptError
) as error:  # nothing that could be verified; every error has the exit code of the command line
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
for check in report.checks:
    print(f"{check.name:<12} {check.looked_at:>8,} {check.unit}, {check.errors} errors")
for finding in report.findings:
    print(f"{finding.severity}: {finding.where}: {finding.message}")
sys.exit(0 if report.is_valid else 1)
