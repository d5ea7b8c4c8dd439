"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere; silent on other ranks than 0.

Both are named after the command, count in binary units, and end at 100 % when the work is done.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt_tools.human import human_bytes

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_PICTURES = 0.1
_BAR, _RATE = 80, 60  # columns of a terminal that has room for a bar, and for how fast it goes
_work = ""


def name_work(name: str) -> None:
    """What the process does, as progress calls it."""
    global _work  # noqa: PLW0603  one command a process
    _work = name


def is_first_rank() -> bool:
    """Whether this process speaks for the job: rank 0 of torchrun or Slurm, or the only one."""
    return (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0"


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A callback that takes (bytes done, bytes in all) of this process."""
    if quiet or not is_first_rank():
        yield lambda _done, _total: None
    elif sys.stderr.isatty():
        with _bar() as update:
            yield update
    else:
        lines = _Lines()
        yield lines.update
        lines.finish()


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns: list[ProgressColumn] = [TextColumn(_work)]
    columns += [BarColumn(bar_width=40)] if console.width >= _BAR else []
    columns += [TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.fields[size]}")]
    columns += [TimeRemainingColumn()] if console.width >= _BAR else []
    # Without its own thread, which would keep this process from being forked (`execute.processes.team`).
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("", total=None, size="")
        started, drawn, latest = time.monotonic(), 0.0, 0

        def update(done: int, total: int) -> None:
            nonlocal drawn, latest
            now, latest = time.monotonic(), total
            if now - drawn > _SECONDS_BETWEEN_PICTURES or done == total:
                drawn = now
                rate = f" {human_bytes(int(done / max(now - started, 1e-3)))}/s"
                size = f"{_of(done, total)}{rate if console.width >= _RATE else ''}"
                bar.update(task, completed=done, total=total, size=size, refresh=True)

        yield update
        if latest:
            update(latest, latest)


class _Lines:
    """A line every few seconds, and one at the end if there was any."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._total = 0
        self._said = False

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        self._total = total
        if now - self._last < _SECONDS_BETWEEN_LINES or not done:
            return
        self._last, self._said = now, True
        rate = done / (now - self._started)
        left = (total - done) / rate
        self._say(done, f"{human_bytes(int(rate))}/s, about {left:.0f} s left")

    def finish(self) -> None:
        if self._said:
            self._say(self._total, f"done in {time.monotonic() - self._started:.0f} s")

    def _say(self, done: int, rest: str) -> None:
        percent = 100 * done // max(self._total, 1)
        name = f"{_work}: " if _work else ""
        print(f"{name}{_of(done, self._total)} ({percent} %), {rest}", file=sys.stderr, flush=True)


def _of(done: int, total: int) -> str:
    return f"{human_bytes(done)} of {human_bytes(total)}"
