"""Several processes of one machine that carry out one plan, without torch and without a launcher.

Threads of one Python process hold each other up long before a machine's memory does, so a large conversion is shared
by processes. They are forked from the one that has made the plan, before it starts a thread: a worker costs some
milliseconds, and the plan is not made again. What they agree upon goes through a pipe to the first of them:

    first process (rank 0)                         worker i (rank i)
    asks every pipe for the outcome of a step      sends its outcome of a step
    tells all outcomes to all                      waits for them
    `check` looks for early failures, tells "stop" `check` looks for "stop"

A process that was killed closes its pipe, so that nobody waits for it.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

from ckpt_tools.cores import usable_cores
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.execute.ranks import PeerFailedError, Ranks, error_called, go_on
from ckpt_tools.execute.write_job import WriteOptions

T = TypeVar("T")

_WORTH_BYTES = 256 << 20  # a worker's least share: moving less takes no longer than forking and agreeing
_MOST_BY_DEFAULT = 16  # beyond, one machine's memory is busy (measured on 16 and 32 cores)
_WATCH_SECONDS = 0.1
_STOP = "stop"


def default_workers(nbytes: int, options: WriteOptions, cores: int) -> int:
    """How many processes move `nbytes` fastest on so many cores, with room for buffers of a MiB in each thread."""
    room = options.memory_bytes // (3 * options.threads << 20)
    return max(1, min(cores // options.threads, _MOST_BY_DEFAULT, nbytes // _WORTH_BYTES, room))


@contextmanager
def shared_out(nbytes: int, options: WriteOptions, ranks: Ranks) -> Iterator[tuple[Ranks, WriteOptions]]:
    """The ranks that move `nbytes`, and the options of each: this process alone, a launcher's, or forked workers.

    Raises:
        UsageError: workers are asked for where a launcher has made the ranks, or where nothing can be forked.
    """
    workers = options.workers
    if workers is None:
        alone = ranks.world == 1 and is_alone()
        workers = default_workers(nbytes, options, usable_cores()) if alone else 1
    elif workers > 1 and ranks.world > 1:
        raise UsageError(f"--workers {workers}: the launcher has started {ranks.world} processes already")
    elif workers > 1 and not can_fork():
        raise UsageError(
            f"--workers {workers}: other threads run in this process, which cannot be forked then"
        )
    if workers == 1:
        yield ranks, options
        return
    with forked(workers) as workers_ranks:
        yield workers_ranks, replace(options, memory_bytes=options.memory_bytes // workers)


def can_fork() -> bool:
    """Whether no other Python thread runs: a fork copies none of them, but the locks they hold."""
    return threading.current_thread() is threading.main_thread() and threading.active_count() == 1


def is_alone() -> bool:
    """Whether no thread of a C library runs either: who asks for workers may know that it outlives a fork."""
    return can_fork() and len(os.listdir("/proc/self/task")) == 1


@contextmanager
def forked(workers: int) -> Iterator[WorkerRanks]:
    """Run the block in this process and in `workers` - 1 copies of it; only this one leaves it.

    Whatever ends the block here ends it in the copies: they meet a closed pipe.
    """
    with ExitStack() as pipes:
        ranks = _fork(workers, pipes)
        if ranks.rank:
            with suppress(BaseException):  # told to rank 0 by `together`, or met there as a closed pipe
                yield ranks
            os._exit(0)
        try:
            yield ranks
        finally:
            pipes.close()
            for pid in ranks.processes:
                with suppress(ChildProcessError):  # reaped by somebody's SIGCHLD handler
                    os.waitpid(pid, 0)


def _fork(workers: int, pipes: ExitStack) -> WorkerRanks:
    """The ranks as seen by the process that returns: rank 0 for the caller, another one for each copy."""
    processes: list[int] = []
    lines: list[Connection] = []
    gc.freeze()  # what is there stays shared: a collection, in a copy for all its life, would touch every page
    for rank in range(1, workers):
        ours, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: `can_fork` has looked
            pid = os.fork()
        if pid == 0:
            for line in (*lines, ours):  # or nobody would notice that rank 0 has closed them
                line.close()
            return WorkerRanks(rank, workers, [theirs], [])
        theirs.close()
        lines.append(pipes.enter_context(ours))
        processes.append(pid)
    gc.unfreeze()
    return WorkerRanks(0, workers, lines, processes)


class WorkerRanks(Ranks):
    """As `Ranks`, for one of several forked processes. Results of steps are pickled."""

    def __init__(self, rank: int, world: int, lines: list[Connection], processes: list[int]) -> None:
        self.rank, self.world, self.processes = rank, world, processes
        self.watch: Callable[[], None] = go_on
        self._lines = lines  # of rank 0: to every worker; of a worker: to rank 0
        self._outcomes: dict[int, Any] = {}  # of rank 0: what has come of this step, by rank
        self._polled = time.monotonic()
        self._lock = threading.Lock()

    def together(self, step: Callable[[], T]) -> list[T]:
        """As `Ranks.together`."""
        return self._agree(step, all_need_it=True)

    def gather(self, step: Callable[[], T]) -> list[T]:
        """As `Ranks.gather`."""
        return self._agree(step, all_need_it=False)

    def _agree(self, step: Callable[[], T], all_need_it: bool) -> list[T]:
        own = self._outcome_of(step)
        outcomes = self._tell(own) if self.rank else self._collect(own, all_need_it)
        failed = [outcome["error"] for outcome in outcomes if outcome.get("error")]
        if failed:
            raise _error_of(failed)
        return [outcome["result"] for outcome in outcomes]

    def check(self) -> None:
        """As `Ranks.check`; looks at the pipes a few times a second."""
        self.watch()
        with self._lock:
            if time.monotonic() - self._polled < _WATCH_SECONDS:
                return
            self._polled = time.monotonic()
            if self.rank:
                has_failed = self._lines[0].poll()  # "stop", or its end: nothing else is sent during a step
            else:
                self._receive(0)
                has_failed = any("error" in outcome for outcome in self._outcomes.values())
            if has_failed:
                raise PeerFailedError

    @staticmethod
    def _outcome_of(step: Callable[[], T]) -> dict[str, Any]:
        try:
            return {"result": step()}
        except PeerFailedError:
            return {"error": None}
        except (CkptError, KeyboardInterrupt) as error:
            return {"error": [type(error).__name__, str(error) or type(error).__name__]}
        except BaseException:  # a defect: rank 0 shows where
            return {"error": ["", traceback.format_exc()]}

    def _tell(self, own: Mapping[str, Any]) -> list[Any]:
        """A worker's part of the end of a step: the outcomes of all."""
        line = self._lines[0]
        line.send(own)
        while (told := line.recv()) == _STOP:
            pass
        outcomes: list[Any] = told
        return outcomes

    def _collect(self, own: dict[str, Any], all_need_it: bool) -> list[Any]:
        """Rank 0's part of the end of a step: wait for all, stop the others when one has failed, tell all.

        Of a step that went well and whose results nobody else needs, only that it did.
        """
        self._outcomes[0] = own
        has_told = False
        while True:
            if not has_told and any("error" in outcome for outcome in self._outcomes.values()):
                self._send(_STOP)
                has_told = True
            if len(self._outcomes) == self.world:
                break
            self._receive(_WATCH_SECONDS)
            try:
                self.watch()
            except CkptError as error:
                self._outcomes[0] = {"error": [type(error).__name__, str(error)]}
        outcomes = [self._outcomes[rank] for rank in range(self.world)]
        self._send(outcomes if all_need_it or has_told else [])
        self._outcomes = {}
        return outcomes

    def _send(self, message: object) -> None:
        """The same to every worker, so it is pickled once."""
        data = ForkingPickler.dumps(message)
        for line in self._lines:
            with suppress(OSError):  # a worker that is gone has its outcome already
                line.send_bytes(data)

    def _receive(self, seconds: float) -> None:
        """What has come from workers, waiting at most so long for it."""
        asked = {rank: line for rank, line in enumerate(self._lines, 1) if rank not in self._outcomes}
        ready = wait(list(asked.values()), seconds)
        for rank, line in asked.items():
            if line not in ready:
                continue
            try:
                self._outcomes[rank] = line.recv()
            except (EOFError, OSError):
                self._outcomes[rank] = {"error": ["StorageError", self._end_of(rank)]}

    def _end_of(self, rank: int) -> str:
        return (
            f"worker {rank} (process {self.processes[rank - 1]}) has ended early: it was killed, perhaps as memory "
            "ran out. Nothing was published; --resume goes on from here, with fewer --workers if need be."
        )


def _error_of(failed: list[list[str]]) -> Exception:
    """One error with the messages of all workers, each once; Ctrl-C reaches all of them."""
    kinds = [kind for kind, _ in failed]
    text = "\n".join(dict.fromkeys(message for _, message in failed))
    if "" in kinds:
        return RuntimeError(f"in a worker:\n{text}")
    return error_called("KeyboardInterrupt" if "KeyboardInterrupt" in kinds else kinds[0], text)
