"""The threads of this process that wait for answers of stores: made when they are needed, ended before a fork.

A fork copies no thread, but the locks that threads hold: only a process at rest is forked (`execute.processes.team`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

CONNECTIONS = 16  # of a process that works alone
ALL_CONNECTIONS = 64  # of all processes of a command: at 50-100 MB/s each they fill most networks

# Threads that ask stores for nothing, and rest while a process is forked.
BYSTANDERS = set[threading.Thread]()

_END_SECONDS = 2.0
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_most = CONNECTIONS


def pool() -> ThreadPoolExecutor:
    """Threads for this process's requests, as many as it may have at a time."""
    global _pool  # noqa: PLW0603  of the process, as its connections are
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_most, "ckpt-store")
        return _pool


def rest() -> None:
    """End the threads, if no other thread runs that may need them; the next request makes new ones."""
    global _pool  # noqa: PLW0603  as `pool`
    if _pool is None or threading.active_count() > 1 + len(BYSTANDERS) + len(_pool._threads):
        return
    threads = [thread.native_id for thread in _pool._threads]
    _pool.shutdown(cancel_futures=True)
    _pool = None
    stop = time.monotonic() + _END_SECONDS
    for number in threads:  # Python is done with a thread a little before the system is
        while Path(f"/proc/self/task/{number}").exists() and time.monotonic() < stop:
            time.sleep(0.0005)


@contextmanager
def connections_of(processes: int) -> Iterator[None]:
    """In the block this process, one of so many that work together, has its share of their connections."""
    global _most  # noqa: PLW0603  as `pool`
    rest()
    _most = max(2, min(CONNECTIONS, ALL_CONNECTIONS // processes))
    try:
        yield
    finally:
        rest()
        _most = CONNECTIONS
