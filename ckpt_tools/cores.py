"""How many processors this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = _CPU_QUOTA) -> int:
    """Its affinity, and its control group's quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no quota: "max", or no such file
        most, period = quota.read_text().split()
        cores = min(cores, max(1, round(int(most) / int(period))))
    return cores
