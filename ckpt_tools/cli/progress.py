"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere; silent on other ranks than 0."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt_tools.cli.render import human_bytes

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_PICTURES = 0.1


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
        yield _lines()


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    # Without its own thread, which would keep this process from being forked (`execute.workers`).
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("", total=None)
        drawn = 0.0

        def update(done: int, total: int) -> None:
            nonlocal drawn
            bar.update(task, completed=done, total=total)
            if time.monotonic() - drawn > _SECONDS_BETWEEN_PICTURES or done == total:
                drawn = time.monotonic()
                bar.refresh()

        yield update


def _lines() -> Callable[[int, int], None]:
    started = last = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _SECONDS_BETWEEN_LINES or not done:
            return
        last = now
        rate = done / (now - started)
        left = (total - done) / rate
        print(
            f"{human_bytes(done)} of {human_bytes(total)} ({100 * done // max(total, 1)} %), "
            f"{human_bytes(int(rate))}/s, about {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    return update
