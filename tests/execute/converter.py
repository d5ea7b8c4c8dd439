"""A process that has imported everything and forks converters of the small source, each as a line of JSON orders it.

Also the program of a rank: `torchrun -m tests.execute.converter ORDER`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_tools.errors import CkptError, CorruptCheckpointError, StorageError
from ckpt_tools.execute.move.stream import Pump
from ckpt_tools.execute.output.local_output import LocalOutput
from ckpt_tools.execute.processes import lines, team
from ckpt_tools.execute.processes.meeting import connect
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.formats.locate.detect import TRACKER
from tests.conftest import REPO
from tests.execute.conftest import reopened_case
from tests.ports import free_port

CALLS = "open close mkdir rename replace unlink rmdir pwrite write pread preadv ftruncate copy_file_range"
PUBLISHED = "published+"  # before a number: of calls after publication, else of all


@dataclass(frozen=True)
class Order:
    """One conversion of `<here>/source` to `<here>/<out>`."""

    here: str
    out: str = "out"
    world: int = 1  # ranks, as a launcher starts them
    workers: int | None = 1
    environ: Mapping[str, str] | None = None  # of a rank, with "RANK" for its number; None: as torchrun's
    fault: str = ""  # see `_faults`
    victim: int = 0  # the rank that has it
    killed_at: str = ""  # the number of a call of the system that the victim dies at; "-1": calls are counted
    overwrite: bool = False
    resume: bool = False
    parts: int = 2  # target ranks of the plan


class End(NamedTuple):
    """How a process ended: exit status, and what it said."""

    status: int
    message: str = ""
    bytes_read: int = 0
    resumed: int = 0
    ranks: int = 0


def convert(order: Order, rank: int, environ: Mapping[str, str]) -> int:
    """One rank's conversion; its exit code."""
    here = Path(order.here)
    os.environ.update(environ)
    lines.BEAT_SECONDS, lines.SILENT_SECONDS, lines.STOPPED_LOOKS = 0.2, 3.0, 5
    case = reopened_case(here / "source")
    plan = case.plan(order.parts + (order.fault == "plan") * rank)
    options = WriteOptions(2 if order.workers == 1 else 1, 12 << 20, workers=order.workers)
    if order.workers == 1:
        options = replace(options, memory_bytes=6 << 16)
    output = Output(here / order.out, {TRACKER: b"7"}, overwrite=order.overwrite, resume=order.resume)
    if order.fault == "elsewhere" and rank:  # a folder of this node, where a conversion was stopped
        output = replace(output, directory=here / "node" / order.out)
        (here / "node" / f".{order.out}.ckpt_tools-partial" / "checkpoint").mkdir(parents=True)
    count, after = itertools.count(), itertools.count()
    try:
        launched = connect()
        if order.fault == "twice":
            write_checkpoint(
                case.plan(3), case.files, replace(output, directory=here / "first"), options, ranks=launched
            )
            launched = connect()
        if order.fault.startswith("limit"):
            _limit_processes(order, rank)
        with team.with_workers(plan.bytes_to_write, options, launched) as (ranks, write):
            if ranks.rank == order.victim or order.fault == "slow":
                _spoil(order.fault, here)
            if order.killed_at:
                _count_calls(order.killed_at if ranks.rank == order.victim else "-1", count, after)
            report = write_checkpoint(plan, case.files, output, write, ranks=ranks)
    except CkptError as error:
        message = " | ".join([str(error), *error.told_problems])
        _tell(here, rank, End(error.exit_code, message))
        return error.exit_code
    except Exception as error:
        _tell(here, rank, End(70, str(error)))
        return 70
    _tell(here, rank, End(0, "", report.bytes_read, report.items_resumed, report.ranks))
    with (here / "left").open("a") as left:
        left.write(f"{ranks.rank}\n")
    (here / f"calls{rank}").write_text(f"{next(count)} {next(after)}")
    return 0


def _tell(here: Path, rank: int, end: End) -> None:
    (here / f"end{rank}").write_text(json.dumps(end))


def _spoil(fault: str, here: Path) -> None:
    """What is wrong with the pumps of this rank from now on."""

    def gone(number: int) -> Callable[..., None]:
        def write(*_: object) -> None:
            name = (
                here / f"gone-{threading.get_ident()}"
            )  # a thread may be stopped between opening and writing
            name.write_text(str(os.getpid()))
            name.replace(here / "gone")
            os.kill(os.getpid(), number)

        return write

    def slowly(pump: Pump, *_items: object) -> None:
        (here / "busy").touch()
        for _ in range(600):
            pump._tick(0)
            time.sleep(0.05)

    def burning(*_: object) -> None:
        raise StorageError("the disk of this rank is on fire")

    def damaged(*_: object) -> None:
        raise CorruptCheckpointError("as seen by worker 1", ["in one place", "in another"])

    faults: dict[str, Any] = {
        "fail": burning, "damage": damaged, "defect": lambda *_: 1 // 0, "slow": slowly,
        "kill": gone(signal.SIGKILL), "stop": gone(signal.SIGSTOP),
    }  # fmt: skip
    if fault in faults:
        Pump.write_item = Pump.write_batch = faults[fault]  # type: ignore[method-assign]


def _count_calls(killed_at: str, count: itertools.count[int], after: itertools.count[int]) -> None:
    """Die at a call of the system, counted from now on or, with `PUBLISHED`, from publication on."""
    phase, _, at = killed_at.rpartition("+")
    published, put_in_place = threading.Event(), LocalOutput.put_in_place

    def told(output: LocalOutput) -> None:
        put_in_place(output)
        published.set()

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            number, number_after = next(count), next(after) if published.is_set() else -1
            if (number_after if phase else number) == int(at) >= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **named)

        return counted

    LocalOutput.put_in_place = told  # type: ignore[method-assign,assignment]
    for name in CALLS.split():
        setattr(os, name, deadly(getattr(os, name)))


def _limit_processes(order: Order, rank: int) -> None:
    """The system of rank 0 starts one more process, that of rank 1 starts three."""
    fork, left = os.fork, [1] * (1 + 2 * rank)

    def limited() -> int:
        if not left:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        left.pop()
        return fork()

    os.fork = limited
    if order.workers is None:
        team.default_workers = lambda *_: 4


def _environ(order: Order, rank: int, port: int) -> dict[str, str]:
    words = order.environ or {"RANK": "RANK", "WORLD_SIZE": str(order.world), "MASTER_ADDR": "127.0.0.1"}
    return {name: str(rank) if word == "RANK" else word for name, word in words.items()} | {
        "MASTER_PORT": str(port)
    }


def _serve() -> None:
    for line in sys.stdin:
        order, port = Order(**json.loads(line)), free_port()
        pids = []
        for rank in range(order.world):
            pids.append(os.fork())
            if pids[-1] == 0:
                code = 70
                try:
                    os.setsid()
                    code = convert(order, rank, _environ(order, rank, port))
                finally:
                    os._exit(code)
        print(json.dumps(pids), flush=True)
        codes: dict[int, int] = {}
        while len(codes) < order.world:
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
            if order.killed_at and codes[pid]:  # as torchrun's agent does
                for other in set(pids) - codes.keys():
                    os.kill(other, signal.SIGTERM)
            if order.fault == "stop" and order.world == len(codes) + 1:
                os.kill(pids[order.victim // (order.workers or 1)], signal.SIGKILL)
        print(json.dumps([codes[pid] for pid in pids]), flush=True)


class Converters:
    """The process, and what comes of its converters."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.execute.converter"],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "OPENBLAS_NUM_THREADS": "1"},
        )

    def start(self, order: Order) -> list[int]:
        """The process ids of its ranks."""
        assert self._server.stdin is not None
        self._order = order
        self._server.stdin.write(json.dumps(asdict(order)) + "\n")
        self._server.stdin.flush()
        self._pids: list[int] = self._line()
        return self._pids

    def wait(self) -> list[End]:
        """How every rank ended; nobody whom one has started is left."""
        statuses = self._line()
        ends = []
        for rank, status in enumerate(statuses):
            said = Path(self._order.here, f"end{rank}")
            ends.append(End(*json.loads(said.read_text())) if said.exists() and status >= 0 else End(status))
            said.unlink(missing_ok=True)
            assert ends[-1].status == status
        for pid in self._pids:
            wait_until(partial(_is_gone, pid))
        return ends

    def run(self, order: Order) -> list[End]:
        self.start(order)
        return self.wait()

    def close(self) -> str:
        return self._server.communicate(timeout=60)[1]

    def _line(self) -> Any:
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline())


def _is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(condition: Callable[[], object], seconds: float = 20) -> float:
    """The seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.005)
    return time.monotonic() - began


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _serve()
    else:
        sys.exit(convert(Order(**json.loads(sys.argv[1])), int(os.environ["RANK"]), os.environ))
