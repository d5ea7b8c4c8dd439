"""Runs pytest again and again in fresh forks of a process that has imported what is slow: `server.py MODULE...`.

Reads one JSON list of arguments a line; answers with the exit status when the run is over. A line that is longer
under way than the seconds at its head is killed with all its processes, and answered by "hung".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module


def main() -> None:
    for name in ("pytest", "hypothesis", "numpy", *sys.argv[1:]):
        with suppress(ImportError):
            import_module(name)
    for line in sys.stdin:
        seconds, output, *arguments = json.loads(line)
        print(_run(float(seconds), str(output), arguments), flush=True)


def _run(seconds: float, output: str, arguments: list[str]) -> str:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for fd, standard in ((os.open(os.devnull, os.O_RDONLY), 0), (said, 1), (said, 2)):
            os.dup2(fd, standard)
        import pytest

        status = int(pytest.main(arguments))
        sys.stdout.flush()
        os._exit(status)
    until = time.monotonic() + seconds
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hung"
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what its tests have left
    return str(os.waitstatus_to_exitcode(ended[1]))


if __name__ == "__main__":
    main()
