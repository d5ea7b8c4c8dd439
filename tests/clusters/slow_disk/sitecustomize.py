"""Makes writing tensors slow in a job's first start, so that a test can stop it half way."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

_pwrite = os.pwrite


def _slow_pwrite(fd: int, data: Buffer, offset: int) -> int:
    if threading.current_thread() is not threading.main_thread():  # threads write tensors
        time.sleep(0.3)
    return _pwrite(fd, data, offset)


if "SLURM_RESTART_COUNT" not in os.environ:
    os.pwrite = _slow_pwrite
