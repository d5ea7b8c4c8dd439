"""Failing calls of the system, and converters that are killed at one of them."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_tools.catalog.detect import TRACKER
from tests.conftest import REPO
from tests.execute.conftest import make_case
from tests.execute.test_run import tree

Fault = Callable[[Callable[..., Any], Any], Any]


class Faults:
    """Wraps one of os' functions so that its n-th call goes wrong."""

    def __init__(self, real: Callable[..., Any], at: int, fault: Fault) -> None:
        self.real, self.at, self.fault = real, at, fault
        self.calls = itertools.count()

    def __call__(self, *args: Any, **named: Any) -> Any:
        if next(self.calls) == self.at:
            return self.fault(self.real, args)
        return self.real(*args, **named)


def raising(code: int) -> Fault:
    def fault(real: Callable[..., Any], args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fault


SERVER = """
import itertools, os, signal, sys
from pathlib import Path
from ckpt_tools.catalog.detect import TRACKER
from ckpt_tools.errors import CkptError
from ckpt_tools.execute import ranks as waiting
from ckpt_tools.execute.ranks import connect
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from tests.execute.conftest import reopened_case
here, world, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if world > 1:
    import torch.distributed
waiting._LAST_WORDS_SECONDS = 0.5  # the dead do not answer
plan = reopened_case(here / "source").plan(2)
count = itertools.count()
CALLS = "open close mkdir rename replace unlink rmdir pwrite write pread preadv ftruncate"
CALLS += " copy_file_range posix_fallocate"

def deadly(call, at):
    def counted(*args, **named):
        if next(count) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **named)
    return counted

def convert(rank, at):
    ranks = connect({"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    for name in CALLS.split():
        setattr(os, name, deadly(getattr(os, name), at))
    files = reopened_case(here / "source").files
    output = Output(here / "out", {TRACKER: b"7"}, overwrite=True, resume=True)
    try:
        write_checkpoint(plan, files, output, WriteOptions(2, 6 << 16), ranks=ranks)
    except CkptError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    (here / f"calls{rank}").write_text(str(next(count)))
    return 0

def start(rank, at):
    pid = os.fork()
    if pid == 0:
        os._exit(convert(rank, at))
    return pid

for line in sys.stdin:
    victim, at = map(int, line.split())
    pids = [start(rank, at if rank == victim else -1) for rank in range(world)]
    chosen = pids[victim]
    print(chosen, flush=True)
    codes = {}
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        codes[pid] = os.waitstatus_to_exitcode(status)
        for other in pids if codes[pid] else []:  # as torchrun's agent does
            os.kill(other, signal.SIGTERM)
    print(codes[chosen], flush=True)
"""


class Converters:
    """Starts converters of one source, each a fresh fork of a process that has imported everything."""

    def __init__(self, folder: Path, world: int = 1) -> None:
        self._folder = folder
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder), str(world), str(port)],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            },  # torch tells at length of peers that are gone
        )

    def __enter__(self) -> Converters:
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.communicate(timeout=60)

    def start(self, killed_at: int = -1, victim: int = 0) -> int:
        """The process id of rank `victim` of a new converter, which kills itself instead of its n-th call."""
        assert self._server.stdin is not None
        self._server.stdin.write(f"{victim} {killed_at}\n")
        self._server.stdin.flush()
        return self._number()

    def wait(self) -> int:
        """The exit status of the rank that `start` named."""
        return self._number()

    def calls(self, rank: int = 0) -> int:
        """How many calls of the system a rank made in the last run that came to its end."""
        return int((self._folder / f"calls{rank}").read_text())

    def _number(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def finish(self) -> None:
        """Run one to its end."""
        self.start()
        assert self.wait() == 0


def kill_anywhere(folder: Path, kills: int, world: int = 1, seed: int = 7) -> Counter[str]:
    """How many converters killed at random calls of the system left what: the old state, or the whole new one.

    Half of them go on afterwards; the others leave their remains to the next.
    """
    make_case(folder / "source", scale=24)
    out, partial = folder / "out", folder / ".out.ckpt_tools-partial"
    dice = random.Random(seed)
    ends = Counter[str]()
    with Converters(folder, world) as converters:
        converters.finish()
        good = tree(out)
        for _ in range(kills):
            shutil.rmtree(out, ignore_errors=True)
            if dice.random() < 0.7:
                out.mkdir()
                (out / "old").write_text("old")
            victim = dice.randrange(world)
            calls = converters.calls(victim)
            last = dice.choice([calls, 40, 12])  # all phases, publication, what is done after it
            converters.start(calls - 1 - dice.randrange(min(last, calls)), victim)
            status = converters.wait()
            assert status in (-signal.SIGKILL, 0), status  # 0: going on took fewer calls than from the start
            is_old = not out.exists() or {p.name for p in out.iterdir()} == {"old"}
            assert is_old or tree(out) == good
            ends["not reached" if status == 0 else "old" if is_old else "new"] += 1
            if dice.random() < 0.5:
                converters.finish()
                assert tree(out) == good
                assert not partial.exists()
        (folder / TRACKER).unlink()
        converters.finish()
    assert tree(out) == good
    assert (folder / TRACKER).read_text() == "7"
    assert not partial.exists()
    return ends
