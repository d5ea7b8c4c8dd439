"""Bytes read so far, of how many: counted by several threads, told to one callback."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Meter:
    """Call it with bytes just read; `progress` is told (bytes done, `total`). Threads may share it."""

    def __init__(self, progress: Callable[[int, int], None] = lambda _done, _total: None) -> None:
        self.total = 0
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(self._done, max(self.total, self._done))
