"""Failing calls of the system, and converters that are killed at one of them."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_tools.formats.locate.detect import TRACKER
from tests.conftest import REPO
from tests.execute.conftest import make_case
from tests.execute.test_run import tree
from tests.ports import free_port

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


_LAST_CALLS = (
    8  # aimed at, counted back from the end: all that is done after publication, and what is before it
)
_PUBLISHED = "published+"  # before a number: of calls after publication, else of all
CONVERT = """
import itertools, json, os, signal, sys, threading
from pathlib import Path
from ckpt_tools.formats.locate.detect import TRACKER
from ckpt_tools.errors import CkptError
from ckpt_tools.execute.processes import ranks as waiting
from ckpt_tools.execute.output.staging import Staging
from ckpt_tools.execute.processes.ranks import connect
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from tests.execute.conftest import reopened_case
here = Path(sys.argv[1])
waiting._LAST_WORDS_SECONDS = 0.5  # the dead do not answer
plan = reopened_case(here / "source").plan(2)
count, count_after, published = itertools.count(), itertools.count(), threading.Event()
CALLS = "open close mkdir rename replace unlink rmdir pwrite write pread preadv ftruncate"
CALLS += " copy_file_range posix_fallocate"

def deadly(call, at):
    phase, _, number = at.rpartition("+")
    def counted(*args, **named):
        number_of_all, after = next(count), next(count_after) if published.is_set() else -1
        if (after if phase else number_of_all) == int(number) >= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **named)
    return counted

def told(publish):
    def called(*args, **named):
        publish(*args, **named)
        published.set()
    return called

def convert(rank, at, environ):
    ranks = connect(environ)
    Staging.publish = told(Staging.publish)
    for name in CALLS.split():
        setattr(os, name, deadly(getattr(os, name), at))
    files = reopened_case(here / "source").files
    output = Output(here / "out", {TRACKER: b"7"}, overwrite=True, resume=True)
    try:
        report = write_checkpoint(plan, files, output, WriteOptions(2, 6 << 16), ranks=ranks)
    except CkptError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    (here / f"calls{rank}").write_text(f"{next(count)} {next(count_after)}")
    (here / f"report{rank}").write_text(json.dumps([report.bytes_read, report.items_resumed]))
    return 0
"""
TORCHRUN = (
    CONVERT
    + """
rank, victim, at = int(os.environ["RANK"]), int(sys.argv[2]), sys.argv[3]
sys.exit(convert(rank, at if rank == victim else "-1", os.environ))
"""
)
SERVER = (
    CONVERT
    + """
world, port = int(sys.argv[2]), sys.argv[3]
if world > 1:
    import torch.distributed

def start(rank, at):
    pid = os.fork()
    if pid == 0:
        place = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os._exit(convert(rank, at, place))
    return pid

for line in sys.stdin:
    victim, at = line.split()
    pids = [start(rank, at if rank == int(victim) else "-1") for rank in range(world)]
    chosen = pids[int(victim)]
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
)


class Converters:
    """Starts converters of one source, each a fresh fork of a process that has imported everything."""

    def __init__(self, folder: Path, world: int = 1) -> None:
        self._folder = folder
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder), str(world), str(free_port())],
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

    def start(self, killed_at: str = "-1", victim: int = 0) -> int:
        """The process id of rank `victim` of a new converter, which kills itself instead of its n-th call.

        `published+n` counts from publication on, whatever was done before it.
        """
        assert self._server.stdin is not None
        self._server.stdin.write(f"{victim} {killed_at}\n")
        self._server.stdin.flush()
        return self._number()

    def wait(self) -> int:
        """The exit status of the rank that `start` named."""
        return self._number()

    def calls(self, rank: int = 0) -> int:
        """How many calls of the system a rank made in the last run that came to its end."""
        return int((self._folder / f"calls{rank}").read_text().split()[0])

    def calls_after_publication(self) -> int:
        """How many of them rank 0 made after it had published, if it did."""
        return int((self._folder / "calls0").read_text().split()[1])

    def report(self) -> tuple[int, int]:
        """Bytes that the last run to its end read, and items that it found finished."""
        read, resumed = json.loads((self._folder / "report0").read_text())
        return read, resumed

    def _number(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def finish(self) -> None:
        """Run one to its end."""
        self.start()
        assert self.wait() == 0


class TorchrunConverters(Converters):
    """As `Converters`, two ranks each, under torchrun itself: some seconds for every one."""

    def __init__(self, folder: Path, world: int = 2) -> None:
        self._folder, self._world = folder, world
        self._script = folder / "rank.py"
        self._script.write_text(TORCHRUN)

    def __exit__(self, *_error: object) -> None:
        self._job.kill()

    def start(self, killed_at: str = "-1", victim: int = 0) -> int:
        """As `Converters.start`, but the process id is torchrun's."""
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={self._world}",
        ]
        words = [str(self._script), str(self._folder), str(victim), killed_at]
        environ = {**os.environ, "PYTHONPATH": str(REPO), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._job = subprocess.Popen([*launcher, *words], env=environ, stderr=subprocess.DEVNULL)
        return self._job.pid

    def wait(self) -> int:
        """As `Converters.wait`; torchrun's own status is 1 whatever its ranks died of."""
        return -signal.SIGKILL if self._job.wait(120) else 0


def kill_anywhere(
    folder: Path,
    kills: int,
    world: int = 1,
    seed: int = 7,
    aim: str = "",
    launcher: type[Converters] = Converters,
) -> Counter[str]:
    """How many converters killed at calls of the system left what: the old state, or the whole new one.

    The first is killed at its first call, the next is rank 0 at its first call after publication, then at its last
    calls; the others at random calls of random ranks, or, with `aim` "mid", in the middle of writing. Half of them go
    on afterwards; the others leave their remains to the next.
    """
    make_case(folder / "source", scale=24)
    dice = random.Random(seed)
    ends = Counter[str]()
    with launcher(folder, world) as converters:
        converters.finish()
        state = KilledState(folder, tree(folder / "out"), converters)
        whole = converters.calls(), converters.calls_after_publication()  # going on takes fewer
        for number in range(kills):
            is_aimed = aim == "" and number <= min(kills // 2, _LAST_CALLS)
            victim = 0 if is_aimed else dice.randrange(world)
            calls = converters.calls(victim)
            if aim == "mid":
                at = str(dice.randrange(calls // 8, calls * 7 // 8))
            elif is_aimed:
                at = _aimed(number, *whole)
            else:
                at = str(calls - 1 - dice.randrange(min(dice.choice([calls, 40, 12]), calls)))
            ends.update(state.kill(at, victim, has_old=dice.random() < 0.7, goes_on=dice.random() < 0.5))
        state.finish()
    return ends


def _aimed(number: int, calls: int, after: int) -> str:
    """Where rank 0 is killed: at its first call, then at the first after publication, then back from the last."""
    if number == 0:
        return "0"
    if number == 1:
        return f"{_PUBLISHED}0"
    back = number - 1
    return f"{_PUBLISHED}{after - back}" if back < after else str(calls - back)


class KilledState:
    """An output that converters are killed at, one after another, and what must be true of it after each."""

    def __init__(self, folder: Path, good: dict[str, str], converters: Converters) -> None:
        self._folder, self._good, self._converters = folder, good, converters
        self._out, self._partial = folder / "out", folder / ".out.ckpt_tools-partial"
        self._tracker = folder / TRACKER

    def kill(self, at: str, victim: int, has_old: bool, goes_on: bool) -> Counter[str]:
        """Kill one converter at its `at`-th call; how it ended, what it left, and how one went on from there."""
        shutil.rmtree(self._out, ignore_errors=True)
        if has_old:
            self._out.mkdir()
            (self._out / ".metadata").write_text("old")
        self._tracker.write_text("old")
        self._converters.start(at, victim)
        status = self._converters.wait()
        assert status in (-signal.SIGKILL, 0), status  # 0: going on took fewer calls than from the start
        is_old = not self._out.exists() or {p.name for p in self._out.iterdir()} == {".metadata"}
        assert is_old or tree(self._out) == self._good
        tracked = self._tracker.read_text()
        assert tracked in ("old", "7"), "whole, whenever it is read"
        assert tracked == "old" or not is_old, "the tracker names what is not there"
        ends = Counter(["not reached" if status == 0 else "old" if is_old else "new"])
        if goes_on or not is_old:
            ends += self._go_on(is_old)
        return ends

    def _go_on(self, is_old: bool) -> Counter[str]:
        says_so = (self._partial / "publishing").exists()
        self.finish()
        read, resumed = self._converters.report()
        if says_so and not is_old:
            assert read == 0, "what was published is written again"
            return Counter(["found published"])
        return Counter(["went on from finished items"] if is_old and resumed else [])

    def finish(self) -> None:
        """Let a converter run to its end."""
        self._converters.finish()
        assert tree(self._out) == self._good
        assert self._tracker.read_text() == "7"
        assert not self._partial.exists()
