"""The processes of one conversion, and how they agree.

They send each other a few small messages: outcomes of a step, never data. Rank 0 collects the outcomes and sends them
to all. The ranks of a launcher have a line to rank 0 (`meeting`), a forked worker has one to the rank that has forked
it (`team`), which sends the outcomes of all its workers with its own:

    rank 0                                         ranks of other nodes                 their workers
    its workers' outcomes and those of the ranks   its own and its workers' outcomes    own outcome
    all outcomes to all                            passes them on                       waits for them
    `check` looks for early failures, sends "stop" `check` looks for both               `check` looks for "stop"

A rank that fails makes the others stop within a second, and all raise the same error; between steps the next step
fails (`ending_together`). A process that was killed closes its line, so that nobody waits for it. One that is stopped
(SIGSTOP, a debugger) keeps the others waiting for a minute, see `lines`.

`StopSignals` notes Ctrl-C and SIGTERM; loops ask it, so that neither interrupts cleaning up.
"""

from __future__ import annotations

import json
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from ckpt_tools import errors
from ckpt_tools.errors import (
    CkptError,
    Interrupted,
    StorageError,
    Terminated,
    UsageError,
    as_ckpt_error,
)
from ckpt_tools.execute.processes.lines import LOOK_SECONDS, Line, next_message, send_to

T = TypeVar("T")
SerializedError: TypeAlias = list[Any]
"""An error on its way to other processes: name of its class ("": a defect), message or traceback, problems."""
Outcome: TypeAlias = dict[str, Any]
"""What a step came to on one rank: "result" and "step", or "error", which is None where another rank's ended it."""
_STOP = "stop"
_SHARED = "is_shared"  # the attribute of an error that all ranks raise


class PeerFailedError(Exception):
    """Another rank failed; `together` raises its error."""


class Ranks:
    """The processes of one conversion, as one of them sees them; by default it is the only one.

    A step ends for all when all have ended it, and fails for all if one fails. Results of steps are JSON where ranks
    of a launcher take part. `watch` is called whenever a rank waits or asks whether to go on, and may raise to stop.

    Args:
        up: the line to rank 0, or of a worker to who has forked it.
        down: the lines to others, and which ranks speak on each.
        nodes: the launcher's number of every rank, or of who has forked it; empty without a launcher.
        counted: how many conversions this process has shared before, and how many steps of this one.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        up: Line | None = None,
        down: Mapping[Line, range] | None = None,
        nodes: Sequence[int] = (),
        counted: Sequence[int] = (0, 0),
    ) -> None:
        self.rank, self.world = rank, world
        self.watch: Callable[[], None] = lambda: None
        self._up, self._down, self._nodes = up, down or {}, nodes
        self._conversion, self._steps = counted
        self._outcomes: dict[int, Outcome] = {}  # of this step: this rank's, and what came from below
        self._answer: list[Outcome] | None = None  # of this step, from above
        self._is_stopped = False  # from above
        self._looked = 0.0
        self._lock = threading.Lock()
        if world > 1:
            self._selector = selectors.DefaultSelector()
            for line in (*self._down, *([up] if up else ())):
                self._selector.register(line, selectors.EVENT_READ)

    def with_workers(self, counts: Sequence[int], workers: Sequence[Line]) -> Ranks:
        """The ranks when each is so many processes; this one has `workers`, which get to know who they are."""
        first = list(accumulate(counts, initial=0))
        nodes = [rank for rank, count in enumerate(counts) for _ in range(count)] if self._nodes else []
        counted = (self._conversion, self._steps)
        down = {line: range(first[ranks.start], first[ranks.stop]) for line, ranks in self._down.items()}
        for rank, line in enumerate(workers, first[self.rank] + 1):
            down[line] = range(rank, rank + 1)
            send_to([line], [rank, first[-1], nodes, counted, counts[self.rank]])
        return Ranks(first[self.rank], first[-1], self._up, down, nodes, counted)

    @classmethod
    def of_worker(cls, up: Line) -> tuple[Ranks, int]:
        """As a worker sees them, and how many of them are on its node."""
        rank, world, nodes, counted, here = next_message(up)
        return cls(rank, world, up, None, nodes, counted), here

    def together(self, step: Callable[[], T]) -> list[T]:
        """Run `step` on every rank; the results of all ranks, in rank order."""
        return self._agree(step, all_need_it=True)

    def everywhere(self, step: Callable[[], T]) -> T:
        """Run `step` on every rank; this rank's own result, which need not be JSON."""
        results = list[T]()
        self.together(lambda: results.extend([step()]))
        return results[0]

    @contextmanager
    def ending_together(self) -> Iterator[Ranks]:
        """Run the block on every rank: it ends when all have ended it, and all raise an error that one has raised.

        Without it, the others would take a rank that fails between steps for killed.
        """
        failed = None
        try:
            yield self
        except BaseException as error:
            if self.world == 1 or _SHARED in vars(error):
                raise
            failed = error

        def end() -> None:
            if failed is not None:
                raise failed

        try:
            self.together(end)
        except CkptError as error:
            if failed is None or _SHARED in vars(error):
                raise
            raise failed from error  # nobody is left to tell

    def agree(self, asked: Mapping[str, object]) -> None:
        """Raise UsageError on every rank unless all were asked for the same; `asked` is JSON by name."""
        first, *others = self.together(lambda: asked)
        for rank, other in enumerate(others, 1):
            for name in {**first, **other}:
                if other.get(name) != first.get(name):
                    number = self._nodes[rank] if self._nodes else rank
                    raise UsageError(
                        f"the ranks were asked for different things: {name} is {first.get(name)} on rank 0 and "
                        f"{other.get(name)} on rank {number}. Give all ranks the same command and the same source."
                    )

    def gather(self, step: Callable[[], T]) -> list[T]:
        """As `together`, for results that only rank 0 needs; other ranks may get none."""
        return self._agree(step, all_need_it=False)

    def check(self) -> None:
        """Go on, or stop because of `watch` or another rank."""
        self.watch()
        with self._lock:
            if self.world == 1 or time.monotonic() - self._looked < LOOK_SECONDS:
                return
            self._looked = time.monotonic()
            self._receive(0)
            if self._has_failed():
                raise PeerFailedError

    def _agree(self, step: Callable[[], T], all_need_it: bool) -> list[T]:
        if self.world == 1:
            return [step()]
        defect = None
        outcome: Outcome
        try:
            outcome = {"result": step(), "step": step.__qualname__}
            if self._nodes:  # the same on every rank
                outcome = json.loads(json.dumps(outcome))
        except PeerFailedError:
            outcome = {"error": None}
        except BaseException as raised:
            error = as_ckpt_error(raised)
            if isinstance(error, CkptError | KeyboardInterrupt):
                outcome = {"error": serialize_error(error)}
            else:
                defect, outcome = error, {"error": ["", traceback.format_exc(), []]}
        outcomes = self._exchange(outcome, all_need_it)
        failed = {rank: one["error"] for rank, one in enumerate(outcomes) if one.get("error")}
        if failed:
            error = defect or joined_error(failed, self._nodes)
            vars(error)[_SHARED] = True
            raise error
        if len({one.get("step") for one in outcomes}) > 1:
            raise RuntimeError(f"the ranks have lost step: {[one.get('step') for one in outcomes]}")
        return [one["result"] for one in outcomes]

    def _exchange(self, outcome: Outcome, all_need_it: bool) -> list[Outcome]:
        """All outcomes of the step, or an empty list where rank 0 alone needs them."""
        self._outcomes[self.rank] = outcome
        everybody = {self.rank, *(rank for ranks in self._down.values() for rank in ranks)}
        has_stopped = is_sent = False
        while self._answer is None:
            if self._has_failed() and not has_stopped:
                has_stopped = True
                send_to(self._down, _STOP)
            if not is_sent and self._outcomes.keys() == everybody:
                mine = [self._outcomes[rank] for rank in sorted(everybody)]
                if self._up is None:
                    self._answer = mine
                    break
                is_sent = True
                send_to([self._up], [self._conversion, self._steps, mine])
            self._receive(LOOK_SECONDS)
            for line, ranks in self._down.items():
                if ranks[0] not in self._outcomes:
                    line.look()
            try:
                self.watch()
            except CkptError as error:
                if "error" not in self._outcomes[self.rank]:
                    self._outcomes[self.rank] = {"error": serialize_error(error)}
                    is_sent = False  # once more
        answer, self._answer, self._outcomes = self._answer, None, {}
        self._steps += 1
        needed = all_need_it or any("error" in one for one in answer)
        send_to(self._down, answer if needed else [])
        return answer

    def _has_failed(self) -> bool:
        return self._is_stopped or any("error" in outcome for outcome in self._outcomes.values())

    def _receive(self, seconds: float) -> None:
        """What has come from other processes, waiting at most so long for it."""
        for key, _ in self._selector.select(seconds):
            line = key.fileobj
            assert isinstance(line, Line)
            for message in line.receive():
                if line is not self._up:
                    self._note(self._down[line], *message)
                elif message == _STOP:
                    self._is_stopped = True
                else:  # a stop that follows is of the next step
                    self._answer, self._is_stopped = message, False
            if not line.is_open:
                self._selector.unregister(line)
        for line, ranks in self._down.items():
            if line.is_lost() and ranks[0] not in self._outcomes:
                self._note_failure(ranks, self._loss(line, ranks[0]))
        if self._up is not None and self._up.is_lost() and self._answer is None:
            raise StorageError(
                f"rank {self._nodes[self.rank] if self._nodes else self.rank} lost the other ranks: rank 0 was "
                f"killed or stopped, or its node is gone. {_RESUMABLE.capitalize()}."
            )

    def _note(self, ranks: range, conversion: int, step: int, outcomes: list[Outcome]) -> None:
        if conversion != self._conversion:
            self._note_failure(ranks, "it takes part in another conversion of this job")
        elif step == self._steps:  # else said again, too late
            self._outcomes.update(zip(ranks, outcomes, strict=True))

    def _note_failure(self, ranks: range, text: str) -> None:
        self._outcomes.update({rank: {"error": ["StorageError", text, []]} for rank in ranks})

    def _loss(self, line: Line, rank: int) -> str:
        if line.pid is None:
            return (
                "no sign of life: it was killed or stopped, or its node is gone. Nothing was published; --resume "
                "continues from here."
            )
        why = "it was killed, perhaps as memory ran out"
        if line.missed >= line.most_missed:
            why = f"it was stopped (SIGSTOP) for {line.most_missed * LOOK_SECONDS:.0f} s, and killed then"
        return (
            f"worker {rank - self.rank} (process {line.pid}) has ended early: {why}. Nothing was published. "
            "Try again with fewer --workers; a command that has --resume continues from here with it."
        )


def serialize_error(error: BaseException) -> SerializedError:
    """An error for another process, which `error_called` makes one of again."""
    problems = list(error.told_problems) if isinstance(error, CkptError) else []
    text = str(error) or ("interrupted." if isinstance(error, KeyboardInterrupt) else type(error).__name__)
    return [type(error).__name__, text, problems]


def joined_error(failed: Mapping[int, SerializedError], nodes: Sequence[int]) -> Exception:
    """One error with the messages and problems of all failed ranks, each once; of the lowest rank's class.

    `nodes`: as of `Ranks`; a message of all is printed without them. A defect of one shows where it is; Ctrl-C, which
    reaches all, is `Interrupted`.
    """
    kinds = [kind for kind, _, _ in failed.values()]
    messages: dict[str, dict[str, None]] = {}
    for rank, (_, text, _) in failed.items():
        messages.setdefault(text, {})[str(nodes[rank]) if nodes else ""] = None
    are_named = bool(nodes) and (len(messages) > 1 or {nodes[rank] for rank in failed} != {*nodes})
    lines = [f"rank {', '.join(names)}: {text}" if are_named else text for text, names in messages.items()]
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
