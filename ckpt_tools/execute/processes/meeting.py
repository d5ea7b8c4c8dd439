"""Where the ranks of a launcher meet: rank 0 listens, the others connect and say who they are.

Without an agent of torchrun rank 0 listens at MASTER_PORT. Where that is not free or not given, it takes the first
free one of a few ports that all ranks make from the job's names, and the others try those until rank 0 of this job
answers. A name keeps jobs apart; it does not keep attackers out.
"""

from __future__ import annotations

import atexit
import os
import re
import resource
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple

from ckpt_tools import __version__
from ckpt_tools.errors import StorageError, UsageError
from ckpt_tools.execute.processes.lines import BEATS, LOOK_SECONDS, Line, next_message, send_to
from ckpt_tools.execute.processes.ranks import Ranks

JOIN_SECONDS = 300.0  # some schedulers start the ranks of a job minutes apart
_ANSWER_SECONDS = 20.0
_LEAVE_SECONDS = 10.0  # how long rank 0 waits for the others to end
_PORTS, _FIRST_PORT, _PORT_RANGE = 8, 12_000, 20_000  # below those of outgoing connections
_PROGRAM = "ckpt_tools"  # in a hello: its version

_SLURM_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


class _Job(NamedTuple):
    """A rank and where it meets the others."""

    rank: int
    world: int
    host: str
    ports: tuple[int, ...]
    name: str

    @property
    def where(self) -> str:
        several = len(self.ports) > 1
        return f"{self.host}, port{'s' if several else ''} {', '.join(map(str, self.ports))}"


_met: dict[tuple[int, _Job], tuple[list[Line], count[int]]] = {}  # a process may convert several times


def connect(environ: Mapping[str, str] = os.environ) -> Ranks:
    """The ranks of this job, from torchrun's environment variables or, without them, Slurm's; all have come."""
    is_slurm = "RANK" not in environ
    names = ("SLURM_PROCID", "SLURM_NTASKS") if is_slurm else ("RANK", "WORLD_SIZE")
    try:
        rank, world = int(environ.get(names[0]) or 0), int(environ.get(names[1]) or 1)
    except ValueError:
        raise UsageError(
            f"{names[0]}={environ.get(names[0])!r} and {names[1]}={environ.get(names[1])!r}, which launchers set, "
            "are whole numbers; unset both to run alone"
        ) from None
    if not 0 <= rank < world:
        raise UsageError(f"{names[0]}={rank} is not one of the ranks 0 to {world - 1} of {names[1]}={world}")
    if world == 1 or (is_slurm and "SLURM_STEP_ID" not in environ):  # a batch script is no task of its job
        return Ranks()
    host = environ.get("MASTER_ADDR") or _first_host(environ.get("SLURM_STEP_NODELIST", ""))
    job = _Job(rank, world, host.strip("[]"), *_ports(environ, is_slurm))
    place = os.getpid(), job
    if place not in _met:
        _met[place] = [_find_rank_0(job)] if rank else _wait_for_ranks(job), count()
    lines, conversions = _met[place]
    up, down = (lines[0], {}) if rank else (None, {line: range(n, n + 1) for n, line in enumerate(lines, 1)})
    return Ranks(rank, world, up, down, range(world), (next(conversions), 0))


def shares_its_node(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher has started other processes on this machine; where it does not say, it has."""
    number = environ.get("LOCAL_WORLD_SIZE") or environ.get("WORLD_SIZE")
    if "RANK" not in environ and "SLURM_STEP_ID" in environ:
        tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # 1(x4)
        number = "1" if re.fullmatch(r"1(\(x\d+\))?", tasks) else environ.get("SLURM_NTASKS")
    return number not in (None, "", "1")


def _ports(environ: Mapping[str, str], is_slurm: bool) -> tuple[tuple[int, ...], str]:
    """The ports at which rank 0 may be, and the name of the job."""
    has_agent = "TORCHELASTIC_RUN_ID" in environ  # torchrun's, which listens at MASTER_PORT
    master = environ.get("MASTER_PORT", "")
    parts = [environ.get(name, "") for name in (_SLURM_JOB if is_slurm else ("TORCHELASTIC_RUN_ID",))]
    name = " ".join(filter(None, (*parts, master)))
    chosen = environ.get("CKPT_TOOLS_PORT") or ("" if has_agent else master)
    if chosen:
        if not chosen.isdigit() or not 0 < int(chosen) < 1 << 16:
            raise UsageError(f"MASTER_PORT or CKPT_TOOLS_PORT is {chosen!r}, not a port from 1 to 65535")
        return (int(chosen),), name
    if not is_slurm and not has_agent:
        raise UsageError(_NO_PLACE)
    digest = sha256(name.encode()).digest()
    numbers = (int.from_bytes(digest[2 * i : 2 * i + 2], "big") for i in range(_PORTS))
    return tuple(dict.fromkeys(_FIRST_PORT + number % _PORT_RANGE for number in numbers)), name


_NO_PLACE = "several processes need MASTER_ADDR and MASTER_PORT; start them with torchrun or srun"


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[07-09,12],login1` -> `gpu07`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise UsageError(_NO_PLACE)
    return match[1] + (match[2] or "")


def _hello(job: _Job) -> dict[str, Any]:
    return {_PROGRAM: __version__, "job": job.name, "rank": job.rank, "world": job.world}


_CHOOSE = "CKPT_TOOLS_PORT chooses a port that is free on that node and open between the nodes"


def _find_rank_0(job: _Job) -> Line:
    """The line to rank 0, which may start later than this one."""
    problems: dict[int, str] = {}
    stop, pause = time.monotonic() + JOIN_SECONDS, 0.02
    while time.monotonic() < stop:
        for port in job.ports:
            try:
                line = Line(socket.create_connection((job.host, port), _ANSWER_SECONDS))
            except OSError as error:
                problems[port] = error.strerror or str(error)
                continue
            line.is_stranger = True
            send_to([line], _hello(job))
            answer = next_message(line, _ANSWER_SECONDS)
            if answer == "welcome":
                line.is_stranger = False
                BEATS.add(line)
                return line
            line.close()
            match answer:
                case ["refused", str(why)]:
                    raise UsageError(f"rank {job.rank} was refused by rank 0 at {job.host}:{port}: {why}")
                case ["another job", str(name)]:
                    problems[port] = f"rank 0 of another job ({name}) answers"
                case _:
                    problems[port] = "another program answers"
        time.sleep(pause)
        pause = min(2 * pause, 1)
    reasons = "; ".join(f"{port}: {reason}" for port, reason in problems.items())
    raise StorageError(
        f"rank {job.rank} cannot reach rank 0 of this job ({job.name}) at {job.where} ({reasons}), tried for "
        f"{JOIN_SECONDS:.0f} s. Check MASTER_ADDR, and that rank 0 runs. {_CHOOSE}."
    )


def _wait_for_ranks(job: _Job) -> list[Line]:
    """Rank 0's lines to all others, in their order."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, soft + job.world), hard))
    lines: dict[int, Line] = {}
    guests: dict[Line, tuple[str, int]] = {}  # not known yet: address, and the look at which they came
    refused: dict[str, None] = {}
    looks, due = 0, 0.0  # counted: a job that was suspended goes on, and guests neither hasten nor delay it
    with ExitStack() as open_lines, _listener(job) as listener, selectors.DefaultSelector() as selector:
        open_lines.callback(_close, guests)
        open_lines.callback(_close, lines.values())
        selector.register(listener, selectors.EVENT_READ)
        while len(lines) < job.world - 1:
            ready = selector.select(LOOK_SECONDS)
            if time.monotonic() >= due:
                looks, due = looks + 1, time.monotonic() + LOOK_SECONDS
            if looks * LOOK_SECONDS >= JOIN_SECONDS:
                absent = ", ".join(str(rank) for rank in range(1, job.world) if rank not in lines)
                raise StorageError(
                    f"rank {absent} of {job.world} did not come to rank 0 at port {listener.getsockname()[1]} within "
                    f"{JOIN_SECONDS:.0f} s. {''.join(f'{one}. ' for one in refused)}Check MASTER_ADDR, and that all "
                    f"ranks run; to work alone, unset RANK and WORLD_SIZE. {_CHOOSE}."
                )
            if any(key.fileobj is listener for key, _ in ready):
                try:
                    end, (address, *_) = listener.accept()
                    guest = Line(end)
                except OSError:  # gone again, or no descriptor is left until guests are sent away
                    time.sleep(LOOK_SECONDS)
                else:
                    guest.is_stranger = True
                    guests[guest] = address, looks
                    selector.register(guest, selectors.EVENT_READ)
            for guest, (address, came) in list(guests.items()):
                said = guest.receive()
                if not said and guest.is_open and (looks - came) * LOOK_SECONDS < _ANSWER_SECONDS:
                    continue
                selector.unregister(guest)
                del guests[guest]
                answer = _answer(said[0] if said else None, job, lines)
                send_to([guest], answer)
                if answer == "welcome":
                    guest.is_stranger = False
                    lines[said[0]["rank"]] = guest
                    BEATS.add(guest)
                    continue
                guest.close()
                if answer[0] == "refused":
                    raise UsageError(answer[1])
                refused[f"{address} was refused: {' '.join(answer)}"] = None
        open_lines.pop_all()
        _close(guests)
    in_order = [lines[rank] for rank in range(1, job.world)]
    atexit.register(_leave_last, in_order)
    return in_order


def _close(lines: Iterable[Line]) -> None:
    for line in lines:
        line.close()


def _answer(hello: Any, job: _Job, lines: Mapping[int, Line]) -> Any:
    """What rank 0 says to a process that has connected; nothing is asked of one that is of another job."""
    kinds = {name: type(value) for name, value in _hello(job).items()}
    if not isinstance(hello, dict) or {name: type(value) for name, value in hello.items()} != kinds:
        return ["another program"]
    rank = hello["rank"]
    if not 0 < rank < hello["world"]:
        return ["another program"]
    if hello["job"] != job.name:
        return ["another job", job.name]
    if hello[_PROGRAM] != __version__:
        return ["refused", f"rank {rank} runs version {hello[_PROGRAM]} of ckpt_tools, rank 0 {__version__}"]
    if hello["world"] != job.world:
        return [
            "refused",
            f"rank {rank} is one of {hello['world']} processes, rank 0 of {job.world} (WORLD_SIZE)",
        ]
    if rank in lines:
        lines[rank].receive()
        if lines[rank].is_open:  # else it was started again
            return ["refused", f"two processes are rank {rank}"]
    return "welcome"


def _listener(job: _Job) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    problems = []
    for port in job.ports:
        try:
            return socket.create_server(
                ("", port),
                family=socket.AF_INET6 if both else socket.AF_INET,
                dualstack_ipv6=both,
                backlog=job.world,
            )
        except OSError as error:
            problems.append(error.strerror or str(error))
    raise StorageError(
        f"rank 0 cannot listen at {job.where} ({'; '.join(dict.fromkeys(problems))}). Another program may do so. "
        f"{_CHOOSE}."
    )


def _leave_last(lines: Sequence[Line]) -> None:
    """Rank 0 ends when the others have, which may still read what it has sent last."""
    for line in lines:
        line.end_sending()
    for _ in range(int(_LEAVE_SECONDS / LOOK_SECONDS)):
        lines = [line for line in lines if not line.is_lost()]
        if not lines:
            return
        for line in lines:
            line.receive()
        time.sleep(LOOK_SECONDS / 5)
