"""Ctrl-C and SIGTERM as a question that a loop asks, so that neither strikes in the middle of cleaning up."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any

from ckpt_tools.errors import Interrupted, Terminated

_RESUMABLE = "nothing was published; --resume continues from here"


class StopSignals:
    """While entered (in the main thread), the first SIGINT or SIGTERM is remembered; a second one acts at once."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._seen: int | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: object) -> None:
        self._seen = number
        signal.signal(number, self._before[number])

    def check(self) -> None:
        """Go on, or stop if a signal has arrived."""
        if self._seen == signal.SIGINT:
            raise Interrupted(f"interrupted: {_RESUMABLE}")
        if self._seen == signal.SIGTERM:
            raise Terminated(f"terminated: {_RESUMABLE}")
