"""A rank's line to the launcher's store: requests that cannot block for ever, and the ranks' signs of life.

A process that was killed or stopped says nothing, and without an agent nobody says it for it. So every rank counts up
a number at the store every two seconds from a thread of its own. Rank 0 watches all numbers, the others that of rank
0 and the store itself. Silence is counted in own beats and not by the clock: when a whole job is suspended and goes
on, nobody has missed anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswerError  # another class than TimeoutError in Python 3.10
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from ckpt_tools.errors import StorageError

BEAT_SECONDS = 2.0
SILENT_SECONDS = 60.0  # without a sign of life
JOIN_SECONDS = 300.0  # until the first one; some schedulers start the ranks of a job minutes apart


class Line:
    """One process's line to `store`, which `keeper` keeps. Its thread ends with the process."""

    def __init__(self, rank: int, world: int, store: Any, keeper: str) -> None:
        self.rank, self.world = rank, world
        self.store, self.keeper = store, keeper
        self._watched = [peer for peer in (range(world) if rank == 0 else (0,)) if peer != rank]
        self._seen: dict[int, tuple[int, int]] = dict.fromkeys(self._watched, (0, 0))
        self._lost: str | None = None
        self._requests: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._serve, name="ckpt-line", daemon=True).start()

    def ask(self, request: Callable[[], Any]) -> Any:
        """The result of a request to the store."""
        if self._lost is None:
            future: Future[Any] = Future()
            self._requests.put((request, future))
            try:
                return future.result(SILENT_SECONDS)
            except NoAnswerError:
                self._lost = f"no answer for {SILENT_SECONDS:.0f} s"
            except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
                self._lost = str(error).partition("\n")[0]
        raise StorageError(
            f"rank {self.rank} lost the other ranks: {self.keeper} was killed or stopped, or its node is gone "
            f"({self._lost})"
        )

    def silent(self) -> list[int]:
        """The watched ranks that give no sign of life."""
        return [
            peer for peer, (count, missed) in self._seen.items() if missed * BEAT_SECONDS >= _patience(count)
        ]

    def _serve(self) -> None:
        due = 0.0
        while True:
            if time.monotonic() >= due:
                with suppress(RuntimeError, OSError):  # the next request meets it again, and tells
                    self._beat()
                due = time.monotonic() + BEAT_SECONDS
            try:
                request, future = self._requests.get(timeout=max(0.0, due - time.monotonic()))
            except Empty:
                continue
            try:
                future.set_result(request())
            except BaseException as error:
                future.set_exception(error)

    def _beat(self) -> None:
        self.store.add(f"beat/{self.rank}", 1)
        for peer in self._watched:
            count = self.store.add(f"beat/{peer}", 0)
            before, missed = self._seen[peer]
            self._seen[peer] = (count, 0 if count != before else missed + 1)


def _patience(count: int) -> float:
    return SILENT_SECONDS if count else JOIN_SECONDS
