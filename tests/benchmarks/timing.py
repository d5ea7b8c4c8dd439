"""What the benchmarks share: what a command takes, and samples of a size."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TOOL = (sys.executable, "-m", "ckpt_tools")
_SECONDS_BETWEEN_LOOKS = 0.02


class Taken(NamedTuple):
    """What a command took. Sizes are in bytes; shared pages count in each process."""

    wall: float  # seconds, from the start of the process to its exit
    cpu: float  # of it and its children
    together: int  # RssAnon of all its processes, the most at a time
    largest: int  # of one process
    resident: int  # the peak RSS of one process


def rss_anon(session: int) -> list[int]:
    """RssAnon of every process of a session, those that have gone left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session:
                status = (folder / "status").read_text()
                found.append(int(status.partition("RssAnon:")[2].split()[0]) << 10)
        except (OSError, IndexError):
            continue
    return found


def taken(
    command: Sequence[str] | str, environ: Mapping[str, str] | None = None, looks: bool = True
) -> Taken:
    """Run a command that must succeed, a text by bash. Looking at its memory costs time, where cores are few."""
    environ = {**os.environ, **(environ or {})}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program is compiled once, not at every start
    words = ["bash", "-c", command] if isinstance(command, str) else command
    together = largest = 0
    started, done = time.perf_counter(), threading.Event()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environ, start_new_session=True)

    def watch() -> None:
        nonlocal together, largest
        while looks and not done.wait(_SECONDS_BETWEEN_LOOKS):
            sizes = rss_anon(process.pid)
            together, largest = max(together, sum(sizes)), max(largest, *sizes, 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    done.set()
    watcher.join()
    if status:
        raise SystemExit(f"{command}: exit status {process.returncode}")
    return Taken(wall, usage.ru_utime + usage.ru_stime, together, largest, usage.ru_maxrss << 10)


def size_of(*folders: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def equal_files(folder: Path, count: int, nbytes: int) -> None:
    """Files of random bytes, of so many together."""
    folder.mkdir()
    block = os.urandom(1 << 24)
    for number in range(count):
        with (folder / str(number)).open("wb") as file:
            for at in range(0, nbytes // count, len(block)):
                file.write(block[: nbytes // count - at])


def written(report: Path) -> dict[str, Any]:
    """What a conversion's report says of the writing."""
    found: dict[str, Any] = json.loads(report.read_text())["written"]
    return found
