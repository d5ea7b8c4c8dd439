"""A command of this program as a process of its own, and the signals that end it and its watcher.

Whatever happens to a conversion, killed for its memory or worse, does not happen to the watcher; and no memory that
one has taken is kept until the next.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ckpt_tools.errors import Interrupted, Terminated
from ckpt_tools.execute.signals import StopSignals

# Not `-m`: that would import what lies in the working directory. The package may lie in a zip file.
_START = (
    "import sys; sys.path = [sys.argv.pop(1), *filter(None, sys.path)]; sys.argv[0] = 'checkpoint-inspector'; "
    "from ckpt_tools.cli.app import main; main()"
)
_PACKAGE = Path(__file__).parent.parent.parent
_OF_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
)  # a command is alone, wherever its watcher runs
_KEPT_LINES = 40
_KILLED = 128  # a shell's code of a process that a signal ended, less the signal


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: its exit code, its JSON report if there is one, and the error that it told."""

    exit_code: int
    report: Any
    error: str
    seconds: float


class Hand(StopSignals):
    """Starts commands one at a time. SIGINT and SIGTERM end the one that runs, which leaves what it can go on from.

    A second signal acts at once. `kept` are descriptors that commands inherit, `tell` gets lines of their stderr.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.kept: tuple[int, ...] = ()
        self._tell = tell
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Hand:
        self._wakes, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        signal.set_wakeup_fd(-1)
        os.close(self._wakes)
        os.close(self._woken)

    def _remember(self, number: int, _frame: object) -> None:
        super()._remember(number, _frame)
        if self._child is not None:
            self._child.terminate()

    def check(self) -> None:
        """Go on, or stop if a signal has arrived.

        Raises:
            Interrupted, Terminated: it has.
        """
        if self._seen == signal.SIGINT:
            raise Interrupted("interrupted; started again, it goes on from here.")
        if self._seen == signal.SIGTERM:
            raise Terminated("terminated; started again, it goes on from here.")

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until a signal arrives; raises as `check`."""
        self.check()
        select.select([self._wakes], [], [], max(seconds, 0))
        self.check()

    def run(self, words: Sequence[str]) -> Ended:
        """Run a command to its end; raises as `check`, when it has ended."""
        self.check()
        start = time.monotonic()
        with tempfile.TemporaryFile("w+") as report:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _START, str(_PACKAGE), *words],
                stdin=subprocess.DEVNULL,
                stdout=report,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                pass_fds=self.kept,
                env={name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS},
                start_new_session=True,  # Ctrl-C is told once, by us
            )
            if self._seen is not None:  # it arrived while the process was made
                self._child.terminate()
            assert self._child.stderr is not None
            with self._child.stderr as lines:
                told = self._hear(lines)
            code = self._child.wait()
            self._child = None
            self.check()
            report.seek(0)
            text = report.read()
        code = _KILLED - code if code < 0 else code
        return Ended(code, _parsed(text), _error(code, told), time.monotonic() - start)

    def _hear(self, lines: Iterable[str]) -> list[str]:
        """What a command says as it goes is told on; the error that it ends with is kept."""
        kept: deque[str] = deque(maxlen=_KEPT_LINES)
        for line in lines:
            if kept or line.startswith(("error: ", "Traceback ")):
                kept.append(line.rstrip("\n"))
            else:
                self._tell(line.rstrip("\n"))
        return list(kept)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _error(code: int, lines: list[str]) -> str:
    if not code:
        return ""
    if lines:
        return "\n".join(lines).removeprefix("error: ")
    if code > _KILLED:
        name = next((s.name for s in signal.Signals if s == code - _KILLED), f"signal {code - _KILLED}")
        return f"it was ended by {name}" + (", perhaps as memory ran out" if name == "SIGKILL" else "")
    return f"it ended with {code}"
