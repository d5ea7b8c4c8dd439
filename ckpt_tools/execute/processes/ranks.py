"""The processes of one conversion: who they are, and how they agree.

One process needs no torch. Several meet at the launcher's TCP store for a few small messages: outcomes of a step,
never data. A rank that fails says so at once; the others see it within a second, stop, and all raise the same error.
A rank that was killed or stopped says nothing: the others end within 90 seconds and name it (see `Line`).

Without a launcher's agent nobody reports a process that was killed or stopped. So every rank counts up a number at
the store every two seconds from a thread of its own. Rank 0 watches all numbers, the others that of rank 0 and the
store itself. Silence is counted in own beats and not by the clock: when a whole job is suspended and goes on, nobody
has missed anything.

`StopSignals` notes Ctrl-C and SIGTERM; loops ask it, so that neither interrupts cleaning up.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
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
        """The result of a request to the store."""
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
"""An error on its way to other processes: name of its class, message, problems."""

_POLL_SECONDS = 1.0
_LAST_WORDS_SECONDS = 10.0  # how long a failing rank waits for the others' messages
_CONNECT_SECONDS = 300  # as long as a rank may start later than another

_lines: dict[tuple[object, ...], Line] = {}  # of this process, which may convert several times
_topics: dict[tuple[object, ...], int] = {}  # how often it did


class Ranks:
    """One process: everything is agreed at once. others of several processes are its subclasses.

    `watch` is called whenever a rank waits or asks whether to go on, and may raise to stop.
    """

    rank = 0
    world = 1

    def __init__(self) -> None:
        self.watch: Callable[[], None] = noop

    def together(self, step: Callable[[], T]) -> list[T]:
        """Run `step` on every rank; the results of all ranks, in rank order."""
        return [step()]

    def gather(self, step: Callable[[], T]) -> list[T]:
        """As `together`, for results that only rank 0 needs; other ranks may get none."""
        return self.together(step)

    def check(self) -> None:
        """Go on, or stop because of `watch` or another rank."""
        self.watch()


def noop() -> None:
    """Watches nothing."""


class PeerFailedError(Exception):
    """Another rank failed; `together` raises its error."""


class DistributedRanks(Ranks):
    """This process and its peers at a `torch.distributed` store. Results of steps must be JSON.

    `topic` keeps apart what several conversions of one job say.
    """

    def __init__(self, line: Line, topic: str) -> None:
        self.rank, self.world = line.rank, line.world
        self.watch: Callable[[], None] = noop
        self._line, self._store, self._topic = line, line.store, topic
        self._round = 0
        self._polled = time.monotonic()
        self._lock = threading.Lock()

    def together(self, step: Callable[[], T]) -> list[T]:
        """As `Ranks.together`."""
        self._round += 1
        outcome: dict[str, Any] = {}
        try:
            outcome["result"] = step()
        except PeerFailedError:
            outcome["error"] = None
        except BaseException as error:
            outcome["error"] = serialize_error(error)
            self._post("failed", "1")
            if not isinstance(error, CkptError | KeyboardInterrupt):
                self._post(f"{self._round}/{self.rank}", json.dumps(outcome))
                raise
        self._post(f"{self._round}/{self.rank}", json.dumps(outcome))
        try:
            outcomes = [self._outcome(peer) for peer in range(self.world)]
        finally:
            self._leave_round()
        failed = {peer: o["error"] for peer, o in enumerate(outcomes) if o and o.get("error")}
        if failed:
            raise _joined(failed)
        silent = [str(peer) for peer, o in enumerate(outcomes) if o is None]
        silent = silent or [str(peer) for peer, o in enumerate(outcomes) if o and "error" in o]
        if silent:
            raise StorageError(
                f"no sign of life from rank {', '.join(silent)}: it was killed or stopped, or its node is gone. "
                "Nothing was published; --resume continues from here."
            )
        return [o["result"] for o in outcomes if o is not None]

    def check(self) -> None:
        """As `Ranks.check`; asks the store at most once a second."""
        self.watch()
        with self._lock:
            if time.monotonic() - self._polled < _POLL_SECONDS:
                return
            self._polled = time.monotonic()
            self._report_dead_peers()
            if self._has("failed"):
                raise PeerFailedError

    def _outcome(self, peer: int) -> dict[str, Any] | None:
        """A peer's outcome of this round; None if it gives no sign of life, or none after another has failed."""
        key = f"{self._round}/{peer}"
        deadline = None
        while True:
            self.watch()
            if self._has(key):
                found: dict[str, Any] = json.loads(self._ask(lambda: self._store.get(self._key(key))))
                return found
            self._report_dead_peers()
            if self._has("failed"):
                deadline = deadline or time.monotonic() + _LAST_WORDS_SECONDS
                if self._has(f"silent/{peer}") or time.monotonic() > deadline:
                    return None
            time.sleep(0.01)

    def _leave_round(self) -> None:
        """Rank 0, which may host the store, leaves a round last: when all others have left or do not answer."""
        key = f"{self._round}/left"
        if self.rank != 0:
            self._ask(lambda: self._store.add(self._key(key), 1))
            return
        deadline = (
            time.monotonic() + 2 * _LAST_WORDS_SECONDS
        )  # the others may be waiting for somebody's last words
        while self._ask(lambda: self._store.add(self._key(key), 0)) < self.world - 1 - len(
            self._line.silent()
        ):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def _report_dead_peers(self) -> None:
        """Let those know that do not watch them."""
        for peer in self._line.silent():
            self._post(f"silent/{peer}", "1")
            self._post("failed", "1")

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([self._key(key)])))

    def _post(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(self._key(key), text))

    def _key(self, key: str) -> str:
        return f"{self._topic}/{key}"

    def _ask(self, request: Callable[[], Any]) -> Any:
        return self._line.ask(request)


def serialize_error(error: BaseException) -> SerializedError:
    """An error as another process can be told of it."""
    problems = list(error.told_problems) if isinstance(error, CkptError) else []
    unsaid = "interrupted." if isinstance(error, KeyboardInterrupt) else type(error).__name__
    return [type(error).__name__, str(error) or unsaid, problems]


def all_problems(told: Iterable[SerializedError]) -> tuple[str, ...]:
    """The problems of several errors, each once; of one that lists none, its message, where others list some."""
    told = list(told)
    if not any(problems for _, _, problems in told):
        return ()
    return tuple(dict.fromkeys(problem for _, text, listed in told for problem in listed or [text]))


def _joined(failed: Mapping[int, SerializedError]) -> CkptError:
    """One error of the class of the lowest failed rank, with the messages and problems of all."""
    kind = failed[min(failed)][0]
    messages = {text: [r for r in failed if failed[r][1] == text] for _, text, _ in failed.values()}
    lines = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in messages.items()]
    return error_called(kind, "\n".join(lines), all_problems(failed.values()))


def error_called(kind: str, text: str, problems: Iterable[str] = ()) -> CkptError:
    """The error of class `kind` that another process has raised; Ctrl-C is `Interrupted`."""
    found: type[CkptError] = getattr(
        errors, "Interrupted" if kind == "KeyboardInterrupt" else kind, CkptError
    )
    return found(text, problems)


def connect(environ: Mapping[str, str] = os.environ) -> Ranks:
    """The ranks of this job, from torchrun's environment variables or, without them, Slurm's."""
    prefix = "" if "RANK" in environ else "SLURM_"
    names = ("RANK", "WORLD_SIZE") if not prefix else ("SLURM_PROCID", "SLURM_NTASKS")
    try:
        rank, world = (
            int(environ.get(name) or default) for name, default in zip(names, ("0", "1"), strict=True)
        )
    except ValueError:
        raise UsageError(
            f"{names[0]}={environ.get(names[0])!r} and {names[1]}={environ.get(names[1])!r}, which launchers set, "
            "are whole numbers; unset both to run alone"
        ) from None
    if not 0 <= rank < world:
        raise UsageError(f"{names[0]}={rank} is not one of the ranks 0 to {world - 1} of {names[1]}={world}")
    if world == 1 or (
        prefix and "SLURM_STEP_ID" not in environ
    ):  # a batch script is not a task of its own job
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
        store = _store(rank, world, (host, port), is_host=rank == 0 and not hosted)
        _lines[place] = Line(
            rank, world, _named(store, restart), f"{keeper}, which keeps the store at {host}:{port},"
        )
        _topics[place] = 0
    _topics[place] += 1
    return _lines[place], str(_topics[place])


def _named(store: Any, restart: str) -> Any:
    from torch.distributed import PrefixStore

    return PrefixStore(f"ckpt_tools/{restart}", store)


def _store(rank: int, world: int, place: tuple[str, int], is_host: bool) -> Any:
    from torch.distributed import TCPStore

    wait = timedelta(seconds=_CONNECT_SECONDS)
    try:
        return TCPStore(*place, world, is_host, wait, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise StorageError(
            f"rank {rank} cannot {'open' if is_host else 'reach'} the store of this job at {place[0]}:{place[1]} "
            f"({reason}). Check MASTER_ADDR, MASTER_PORT and that rank 0 runs."
        ) from error


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[07-09,12],login1` -> `gpu07`."""
    found = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    if found is None:
        raise UsageError(
            "several processes need MASTER_ADDR and MASTER_PORT; start them with torchrun or srun"
        )
    return found[1] + (found[2] or "")


_RESUMABLE = "nothing was published; --resume goes on from here"


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
        """Go on, or stop if a signal has arrived."""
        if self._seen == signal.SIGINT:
            raise Interrupted(f"interrupted: {_RESUMABLE}")
        if self._seen == signal.SIGTERM:
            raise Terminated(f"terminated: {_RESUMABLE}")
