"""`watch`: each new whole iteration of a run is converted, exported, copied or verified, once.

What is new is told by the run's folder, what is done by the output and by what is remembered in it (`watch_state`).
An iteration is taken when its writer has finished it: Megatron's tracker, written last of all, names it or a later
one, `.metadata` is there and all files have their length. In a run without a tracker nothing in its folder must have
changed for a while. Whatever is not whole is left alone; what fails is tried again with growing pauses, and given up
when that would not help, until its files change.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ckpt_tools.commands.iterations import is_there
from ckpt_tools.commands.ls import COMPLETE, DAMAGED, INCOMPLETE, iteration_names, iteration_row
from ckpt_tools.commands.watch_child import Ended, Hand
from ckpt_tools.commands.watch_events import Action, Event, Told, WatchOptions
from ckpt_tools.commands.watch_run import by_tracker, check_run, check_tracker, looks_of, mark_of
from ckpt_tools.commands.watch_state import Done, Failure, Memory, WatchFolder, write_beside
from ckpt_tools.credentials import revealed
from ckpt_tools.errors import (
    CkptError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckpt_tools.execute.vacant import partial_of
from ckpt_tools.formats.detect import (
    iteration_numbers,
)
from ckpt_tools.formats.files import path_in
from ckpt_tools.formats.tree import files_below

_LASTING = (3, 4, 5, 6)  # exit codes that another try would end with again
_LONGEST_PAUSE = 3600.0
# A person mends it, or time.
_FOR_A_WHILE = (StorageError, UnsupportedCheckpointError, CorruptCheckpointError)
_ASK_SECONDS = 5.0  # for an output that is held


def watch(
    run: str,
    output: str,
    action: Action,
    options: WatchOptions,
    tell: Callable[[Told], None],
    note: Callable[[str], None],
) -> int:
    """Do `action` with every iteration of `run` that is whole and not done, again and again, or once.

    Returns the worst exit code of a pass with `options.once`, otherwise only a signal ends it. `tell` gets what
    becomes of iterations, `note` what people may want to know meanwhile.

    Raises:
        UsageError: the run or the output cannot be watched; with `once`, another watcher has the output.
        CorruptCheckpointError, UnsupportedCheckpointError: with `once`, those of `Watcher.one_pass`.
        Interrupted, Terminated: by a signal.
    """
    check_run(run, output)
    if options.once:
        iteration_names(run)  # a run that is not there is told before a folder is made for it
    folder = WatchFolder(Path(output if options.state is None else options.state), run)
    try:
        with Hand(note) as hand:
            _take(folder, options, hand, note)
            watcher = Watcher(run, output, action, options, folder, tell)
            while True:
                try:
                    code = watcher.one_pass(hand)
                except _FOR_A_WHILE as error:
                    if options.once:
                        raise
                    note(f"{error} The next try is in {options.every:g} s.")
                if options.once:
                    if watcher.is_silent:
                        note(f"note: nothing new in {run}")
                    return code
                hand.sleep(options.every)
    finally:
        folder.close()


def _take(folder: WatchFolder, options: WatchOptions, hand: Hand, note: Callable[[str], None]) -> None:
    """Hold the output, when whoever holds it has ended."""
    told = False
    while (owner := folder.take()) is not None:
        if options.once:
            raise UsageError(f"{folder.output} is watched by another process ({owner}); nothing was done.")
        if not told:
            note(f"{folder.output} is watched by another process ({owner}); waiting for its end.")
        told = True
        hand.sleep(min(options.every, _ASK_SECONDS))
    hand.kept = () if folder.lock is None else (folder.lock,)


class Watcher:
    """One run and its output. `tell` gets what becomes of iterations."""

    def __init__(
        self,
        run: str,
        output: str,
        action: Action,
        options: WatchOptions,
        folder: WatchFolder,
        tell: Callable[[Told], None],
    ) -> None:
        self.run, self.output, self.action, self.options = run, output, action, options
        self._folder, self._told = folder, tell
        self.is_silent = True  # there was nothing to tell
        self._memory: Memory = folder.read(action.words)
        self._waits: dict[int, str] = {}  # what has been told of iterations that are not finished

    def _tell(self, told: Told) -> None:
        self.is_silent = False
        self._told(told)

    def one_pass(self, hand: Hand) -> int:
        """Do what there is to do now; the worst exit code of all that was ever done or given up.

        Raises:
            CorruptCheckpointError: the run's tracker is damaged, and nobody is writing it.
            UnsupportedCheckpointError: it names no folder that is there, and newer ones wait.
        """
        check_tracker(self.run, self.options.settle)
        names = {n: name for name, n in iteration_names(self.run).items() if n is not None}
        self._forget(names)
        known = len(self._memory.done)
        for number in sorted(names):
            hand.check()
            if not self._is_done(number, names[number]):
                self._attend(number, names[number], hand)
        if len(self._memory.done) != known:  # what others have made
            self._folder.write(self._memory)
        codes = [done.exit_code for n, done in self._memory.done.items() if n in names]
        return max([*codes, *(failure.exit_code for failure in self._memory.failed.values())], default=0)

    def _forget(self, names: dict[int, str]) -> None:
        """What is remembered of iterations that are gone and were not done."""
        for kept in (self._memory.failed, self._memory.seen):
            for number in [n for n in kept if n not in names]:
                del kept[number]

    def _is_done(self, number: int, name: str) -> bool:
        """Whether nothing is to be done; one that was written again is done again where its output was removed."""
        done, mark = self._memory.done.get(number), mark_of(path_in(self.run, name))
        if done is None:
            if self._is_there(number):
                self._memory.done[number] = Done(0, mark)
            return number in self._memory.done
        if done.mark == mark or not mark:
            if self.options.once and done.exit_code:  # a verdict, which is why the pass ends with it
                where = self._output_of(number)
                self._tell(Told("done", number, name, where, done.exit_code, "an earlier pass did it"))
            return True
        if not self._is_there(number):
            del self._memory.done[number]
            return False
        if not done.is_stale:
            done.is_stale = True
            self._folder.write(self._memory)
            where = self._output_of(number)
            why = f"it was written again since; remove {where} to have it done again"
            self._tell(Told("stale", number, name, where, why=why))
        return True

    def _is_there(self, number: int) -> bool:
        """Whether the output holds what is to be made of it."""
        if self.action.makes == "reports":
            return (Path(self.output) / self._report_name(number)).exists()
        if "://" not in self.output and partial_of(Path(self.output) / f"iter_{number:07d}").exists():
            return False  # killed before its tracker was written
        return is_there(self.output, number, *self.action.kinds)

    def _attend(self, number: int, name: str, hand: Hand) -> None:
        """One iteration that is not done."""
        has_tracker, wait = by_tracker(self.run, number, self.options.settle)
        if wait:
            self._wait(number, name, wait)
            return
        place = path_in(self.run, name)
        try:
            sizes = files_below(place)
            looks = looks_of(place, sizes)
        except CkptError as error:
            self._fail(number, name, "", _failed(error.exit_code, str(error)))
            return
        before = self._memory.failed.get(number)
        if before and before.looks == looks and (before.next_try is None or before.next_try > time.time()):
            self._recall(number, name, before)
            return
        if not has_tracker and not self._is_settled(number, looks):
            self._wait(number, name, f"its files must stay as they are for {self.options.settle:g} s")
            return
        try:
            row = iteration_row(name, place, number, sizes, self.action.trust_pickle)
        except CkptError as error:
            self._fail(number, name, looks, _failed(error.exit_code, str(error)))
            return
        if row.state == INCOMPLETE and not has_tracker:
            self._wait(number, name, "its .metadata is not written yet")
        elif row.state != COMPLETE:
            self._fail(number, name, looks, _failed(4 if row.state == DAMAGED else 3, row.why))
        else:
            self._carry_out(number, name, looks, hand)

    def _recall(self, number: int, name: str, before: Failure) -> None:
        """Say in a line why a single pass ends as it does, though an earlier one has said it at length."""
        if self.options.once:
            event: Event = "given_up" if before.is_given_up else "failed"
            why = next(iter(before.error.splitlines()), "")
            where = self._output_of(number)
            self._tell(Told(event, number, name, where, before.exit_code, why, before.tries))

    def _wait(self, number: int, name: str, why: str) -> None:
        """Leave it alone for now, and say so once."""
        if self._waits.get(number) != why:
            self._waits[number] = why
            self._tell(Told("waiting", number, name, self._output_of(number), why=why))

    def _carry_out(self, number: int, name: str, looks: str, hand: Hand) -> None:
        mark = mark_of(path_in(self.run, name))
        ended = hand.run(self._command(number, name))
        if not self._has_done(ended, number, name):
            self._fail(number, name, looks, ended)
            return
        self._memory.done[number] = Done(ended.exit_code, mark)
        self._memory.failed.pop(number, None)
        self._memory.seen.pop(number, None)
        self._folder.write(self._memory)
        where = self._output_of(number)
        self._tell(
            Told("done", number, name, where, ended.exit_code, ended.error, 1, ended.seconds, ended.report)
        )

    def _is_settled(self, number: int, looks: str) -> bool:
        """Whether it has looked so for a while; remembered, since one pass alone cannot tell."""
        before, since = self._memory.seen.get(number, ("", 0.0))
        if before != looks:
            since = time.time()
            self._memory.seen[number] = (looks, since)
            self._folder.write(self._memory)
        return time.time() - since >= self.options.settle

    def _fail(self, number: int, name: str, looks: str, ended: Ended) -> None:
        """Remember it, and when to try again; what failed while its files looked otherwise does not count."""
        before = self._memory.failed.get(number)
        if before and before.looks == looks and before.next_try and before.next_try > time.time():
            return
        tries = 1 + (before.tries if before and before.looks == looks else 0)
        is_last = ended.exit_code in _LASTING or tries > self.options.retries
        pause = min(self.options.every * 2 ** (tries - 1), _LONGEST_PAUSE)
        next_try = None if is_last else time.time() + pause
        self._memory.failed[number] = Failure(looks, tries, ended.exit_code, ended.error, next_try)
        self._folder.write(self._memory)
        event: Event = "given_up" if is_last else "failed"
        where = self._output_of(number)
        self._tell(Told(event, number, name, where, ended.exit_code, ended.error, tries, ended.seconds))

    def _has_done(self, ended: Ended, number: int, name: str) -> bool:
        """Whether a command has done what it was to do; a verdict is what a report is for, whatever it says."""
        if self.action.makes != "reports":
            return ended.exit_code == 0
        if ended.report is None:
            return False
        text = json.dumps(ended.report, indent=1) + "\n"
        write_beside(Path(self.output), self._report_name(number), text.encode(), path_in(self.run, name))
        return True

    def _report_name(self, number: int) -> str:
        return f"iter_{number:07d}.json"

    def _output_of(self, number: int) -> str:
        name = self._report_name(number) if self.action.makes == "reports" else f"iter_{number:07d}"
        return path_in(self.output, name)

    def _command(self, number: int, name: str) -> list[str]:
        """The words that do it: a root to a root if the output's tracker is to name it, else a folder to a folder."""
        words = [*self.action.words, "--json"]
        if self.action.makes == "reports":
            return [*words, "--", _whole(path_in(self.run, name))]
        words.append("--resume")
        if self.action.makes == "root" and number > max(self._made(), default=-1):
            return [*words, "--iteration", str(number), "--", _whole(self.run), _whole(self.output)]
        return [*words, "--", _whole(path_in(self.run, name)), _whole(self._output_of(number))]

    def _made(self) -> Iterator[int]:
        """The iterations in the output, but one that is to be gone on with."""
        with suppress(UnsupportedCheckpointError):
            yield from (
                n for n in iteration_numbers(self.output) if n in self._memory.done or self._is_there(n)
            )


def _failed(exit_code: int, why: str) -> Ended:
    """As a command would have ended that nobody needs to start."""
    return Ended(exit_code, None, why, 0.0)


def _whole(location: str) -> str:
    """A location with the credentials that it was given with, for another process."""
    return "".join(revealed(location))
