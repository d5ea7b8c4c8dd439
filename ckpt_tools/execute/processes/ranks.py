"""The processes of one conversion: who they are, and how they agree.

One process needs no torch. Several meet at the launcher's TCP store for a few small messages: outcomes of a step,
never data. A rank that fails says so at once; the others see it within a second, stop, and all raise the same error.
A rank that was killed or stopped says nothing: the others end within 90 seconds and name it (see `Line`). Forked
processes of one machine (`team`) agree by the same steps, over pipes.

Without a launcher's agent nobody reports a process that was killed or stopped. So every rank counts up a number at
the store every two seconds from a separate thread. Rank 0 watches all numbers, the others that of rank 0 and the
store itself. Silence is counted in own beats and not by the clock: when a whole job is suspended and resumed, no rank
has missed a beat.

`StopSignals` notes Ctrl-C and SIGTERM; loops ask it, so that neither interrupts cleaning up.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswerError
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from ckpt_tools import errors
from ckpt_tools.errors import CkptError, Interrupted, StorageError, Terminated, UsageError
from ckpt_tools.torch_extra import require_torch

BEAT_SECONDS = 2.0
SILENT_SECONDS = 60.0  # without a sign of life
JOIN_SECONDS = 300.0  # until the first one; some schedulers start the ranks of a job minutes apart


class Line:
    """One process's line to `store`, which `keeper` keeps. Its thread ends with the process."""

    def __init__(self, rank: int, world: int, store: Any, keeper: str) -> None:
        self.rank, self.world = rank, world
        self.store, self.keeper = store, keeper
        self._watched = [peer for peer in (range(world) if rank == 0 else (0,)) if peer != rank]
        self._seen: dict[int, tuple[int, int]] = dict.fromkeys(self._watched, (0, 0))
        self._lost: str | None = None
        self._requests: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._serve, name="ckpt-line", daemon=True).start()

    def ask(self, request: Callable[[], Any]) -> Any:
        if self._lost is None:
            future: Future[Any] = Future()
            self._requests.put((request, future))
            try:
                return future.result(SILENT_SECONDS)
            except NoAnswerError:
                self._lost = f"no answer for {SILENT_SECONDS:.0f} s"
            except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
                self._lost = str(error).partition("\n")[0]
        raise StorageError(
            f"rank {self.rank} lost the other ranks: {self.keeper} was killed or stopped, or its node is gone "
            f"({self._lost})"
        )

    def silent(self) -> list[int]:
        """The watched ranks that give no sign of life."""
        return [
            peer
            for peer, (count, missed) in self._seen.items()
            if missed * BEAT_SECONDS >= (SILENT_SECONDS if count else JOIN_SECONDS)
        ]

    def _serve(self) -> None:
        due = 0.0
        while True:
            if time.monotonic() >= due:
                with suppress(RuntimeError, OSError):  # the next request meets it again, and tells
                    self._beat()
                due = time.monotonic() + BEAT_SECONDS
            try:
                request, future = self._requests.get(timeout=max(0.0, due - time.monotonic()))
            except Empty:
                continue
            try:
                future.set_result(request())
            except BaseException as error:
                future.set_exception(error)

    def _beat(self) -> None:
        self.store.add(f"beat/{self.rank}", 1)
        for peer in self._watched:
            count = self.store.add(f"beat/{peer}", 0)
            before, missed = self._seen[peer]
            self._seen[peer] = (count, 0 if count != before else missed + 1)


T = TypeVar("T")
SerializedError: TypeAlias = list[Any]
"""An error on its way to other processes: name of its class ("": a defect), message or traceback, problems."""
Outcome: TypeAlias = dict[str, Any]
"""What a step came to on one rank: "result" or "error", which is None where another rank's error ended it."""

_POLL_SECONDS = 1.0
_LAST_WORDS_SECONDS = 10.0  # how long a failing rank waits for the others' messages
_CONNECT_SECONDS = 300  # as long as a rank may start later than another

_lines: dict[tuple[object, ...], Line] = {}  # of this process, which may convert several times
_topics: dict[tuple[object, ...], int] = {}  # how often it did


class PeerFailedError(Exception):
    """Another rank failed; `together` raises its error."""


class Ranks:
    """The processes of one conversion, as one of them sees them: here it is the only one.

    `watch` is called whenever a rank waits or asks whether to go on, and may raise to stop.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world
        self.watch: Callable[[], None] = lambda: None

    def together(self, step: Callable[[], T]) -> list[T]:
        """Run `step` on every rank; the results of all ranks, in rank order."""
        return [step()]

    def gather(self, step: Callable[[], T]) -> list[T]:
        """As `together`, for results that only rank 0 needs; other ranks may get none."""
        return self.together(step)

    def check(self) -> None:
        """Go on, or stop because of `watch` or another rank."""
        self.watch()


class SeveralRanks(Ranks):
    """One of several processes. A step ends for all when all have ended it, and fails for all if one fails.

    Subclasses carry outcomes from each process to the others.
    """

    poll_seconds: float  # between two looks at the others
    names_ranks: bool  # whether an error says which ranks it is from

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self._polled = time.monotonic()
        self._lock = threading.Lock()

    def together(self, step: Callable[[], T]) -> list[T]:
        return self._agree(step, all_need_it=True)

    def gather(self, step: Callable[[], T]) -> list[T]:
        return self._agree(step, all_need_it=False)

    def _agree(self, step: Callable[[], T], all_need_it: bool) -> list[T]:
        defect = None
        outcome: Outcome
        try:
            outcome = {"result": step()}
        except PeerFailedError:
            outcome = {"error": None}
        except (CkptError, KeyboardInterrupt) as error:
            outcome = {"error": serialize_error(error)}
        except BaseException as error:
            defect, outcome = error, {"error": ["", traceback.format_exc(), []]}
        outcomes = self._exchange(outcome, all_need_it)
        if defect is not None:
            raise defect
        failed = {rank: one["error"] for rank, one in enumerate(outcomes) if one.get("error")}
        if failed:
            raise joined_error(failed, self.names_ranks)
        return [one["result"] for one in outcomes]

    def check(self) -> None:
        self.watch()
        with self._lock:
            if time.monotonic() - self._polled < self.poll_seconds:
                return
            self._polled = time.monotonic()
            if self._has_failed():
                raise PeerFailedError

    def _exchange(self, outcome: Outcome, all_need_it: bool) -> list[Outcome]:
        """Send this rank's outcome; those of all ranks, or an empty list where rank 0 alone needs them."""
        raise NotImplementedError

    def _has_failed(self) -> bool:
        """Whether another rank has failed in this step."""
        raise NotImplementedError


class DistributedRanks(SeveralRanks):
    """This process and its peers at a `torch.distributed` store. Results of steps must be JSON.

    `topic` keeps apart what several conversions of one job say.
    """

    poll_seconds = _POLL_SECONDS
    names_ranks = True

    def __init__(self, line: Line, topic: str) -> None:
        super().__init__(line.rank, line.world)
        self._line, self._store, self._topic = line, line.store, topic
        self._round = 0

    def _exchange(self, outcome: Outcome, all_need_it: bool) -> list[Outcome]:
        self._round += 1
        if outcome.get("error"):
            self._post("failed", "1")
        self._post(f"{self._round}/{self.rank}", json.dumps(outcome))
        try:
            outcomes = [self._outcome(peer) for peer in range(self.world)]
        finally:
            self._leave_round()
        silent = [str(peer) for peer, one in enumerate(outcomes) if one is None]
        silent = silent or [str(peer) for peer, one in enumerate(outcomes) if one and "error" in one]
        if silent and not any(one and one.get("error") for one in outcomes):
            raise StorageError(
                f"no sign of life from rank {', '.join(silent)}: it was killed or stopped, or its node is gone. "
                "Nothing was published; --resume continues from here."
            )
        return [one or {"error": None} for one in outcomes]

    def _has_failed(self) -> bool:
        self._report_dead_peers()
        return self._has("failed")

    def _outcome(self, peer: int) -> Outcome | None:
        """A peer's outcome of this round; None if it gives no sign of life, or none after another has failed."""
        key = f"{self._round}/{peer}"
        deadline = None
        while True:
            self.watch()
            if self._has(key):
                outcome: Outcome = json.loads(self._line.ask(lambda: self._store.get(self._key(key))))
                return outcome
            self._report_dead_peers()
            if self._has("failed"):
                deadline = deadline or time.monotonic() + _LAST_WORDS_SECONDS
                if self._has(f"silent/{peer}") or time.monotonic() > deadline:
                    return None
            time.sleep(0.01)

    def _leave_round(self) -> None:
        """Rank 0, which may host the store, leaves a round last: when all others have left or do not answer."""
        key = self._key(f"{self._round}/left")
        if self.rank != 0:
            self._line.ask(lambda: self._store.add(key, 1))
            return
        deadline = time.monotonic() + 2 * _LAST_WORDS_SECONDS  # the others may wait for somebody's last words
        while time.monotonic() <= deadline:
            left = self._line.ask(lambda: self._store.add(key, 0))
            if left >= self.world - 1 - len(self._line.silent()):
                return
            time.sleep(0.01)

    def _report_dead_peers(self) -> None:
        """Tell those that do not watch them."""
        for peer in self._line.silent():
            self._post(f"silent/{peer}", "1")
            self._post("failed", "1")

    def _has(self, key: str) -> bool:
        return bool(self._line.ask(lambda: self._store.check([self._key(key)])))

    def _post(self, key: str, text: str) -> None:
        self._line.ask(lambda: self._store.set(self._key(key), text))

    def _key(self, key: str) -> str:
        return f"{self._topic}/{key}"


def serialize_error(error: BaseException) -> SerializedError:
    """An error for another process, which `error_called` makes one of again."""
    problems = list(error.told_problems) if isinstance(error, CkptError) else []
    text = str(error) or ("interrupted." if isinstance(error, KeyboardInterrupt) else type(error).__name__)
    return [type(error).__name__, text, problems]


def joined_error(failed: Mapping[int, SerializedError], names_ranks: bool) -> Exception:
    """One error with the messages and problems of all failed ranks, each once; of the lowest rank's class.

    A defect of one shows where it is; Ctrl-C, which reaches all, is `Interrupted`.
    """
    kinds = [kind for kind, _, _ in failed.values()]
    messages = {text: [rank for rank in failed if failed[rank][1] == text] for _, text, _ in failed.values()}
    lines = [
        f"rank {', '.join(map(str, ranks))}: {text}" if names_ranks else text
        for text, ranks in messages.items()
    ]
    if "" in kinds:
        return RuntimeError("in a worker:\n" + "\n".join(lines))
    problems: tuple[str, ...] = ()
    if any(listed for _, _, listed in failed.values()):  # of one that lists none, its message
        problems = tuple(
            dict.fromkeys(problem for _, text, listed in failed.values() for problem in listed or [text])
        )
    kind = "KeyboardInterrupt" if "KeyboardInterrupt" in kinds else kinds[0]
    return error_called(kind, "\n".join(lines), problems)


def error_called(kind: str, text: str, problems: Iterable[str] = ()) -> CkptError:
    """The error of class `kind` that another process has raised; Ctrl-C is `Interrupted`."""
    name = "Interrupted" if kind == "KeyboardInterrupt" else kind
    error: type[CkptError] = getattr(errors, name, CkptError)
    return error(text, problems)


def connect(environ: Mapping[str, str] = os.environ) -> Ranks:
    """The ranks of this job, from torchrun's environment variables or, without them, Slurm's."""
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
    return DistributedRanks(*_line(rank, world, environ))


def _line(rank: int, world: int, environ: Mapping[str, str]) -> tuple[Line, str]:
    """This process's line to the job's store, and a topic that all ranks call by the same name."""
    require_torch(f"a job of {world} processes that share one conversion")
    host = environ.get("MASTER_ADDR") or _first_host(environ.get("SLURM_STEP_NODELIST", ""))
    port = int(environ.get("MASTER_PORT") or 20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000)
    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent runs the store
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    place = (os.getpid(), rank, world, host, port, restart)
    if place not in _lines:
        keeper = "torchrun's agent" if hosted else "rank 0"
        store = _store(rank, world, (host, port), restart, is_host=rank == 0 and not hosted)
        _lines[place] = Line(rank, world, store, f"{keeper}, which keeps the store at {host}:{port},")
        _topics[place] = 0
    _topics[place] += 1
    return _lines[place], str(_topics[place])


def _store(rank: int, world: int, place: tuple[str, int], restart: str, is_host: bool) -> Any:
    from torch.distributed import PrefixStore, TCPStore

    wait = timedelta(seconds=_CONNECT_SECONDS)
    try:
        store = TCPStore(*place, world, is_host, wait, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise StorageError(
            f"rank {rank} cannot {'open' if is_host else 'reach'} the store of this job at {place[0]}:{place[1]} "
            f"({reason}). Check MASTER_ADDR, MASTER_PORT and that rank 0 runs."
        ) from error
    return PrefixStore(f"ckpt_tools/{restart}", store)


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[07-09,12],login1` -> `gpu07`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise UsageError(
            "several processes need MASTER_ADDR and MASTER_PORT; start them with torchrun or srun"
        )
    return match[1] + (match[2] or "")


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
        if self._seen == signal.SIGINT:
            raise Interrupted(f"interrupted: {_RESUMABLE}")
        if self._seen == signal.SIGTERM:
            raise Terminated(f"terminated: {_RESUMABLE}")
