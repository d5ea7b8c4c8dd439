"""`--iteration all`: all iterations of a run in turn, past those that are there already or cannot be converted.

The newest may be one that its job is still writing: it is skipped and counts as unfinished, not as failed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ckpt_tools.commands.job.outputs import is_iteration, is_root
from ckpt_tools.errors import CkptError, Interrupted, Terminated, UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.processes.meeting import connect
from ckpt_tools.formats.dcp.metadata_read import METADATA
from ckpt_tools.formats.locate.detect import (
    METADATA_JSON,
    PARTIAL_SUFFIX,
    iteration_numbers,
    locate,
    tracked_iteration,
)
from ckpt_tools.formats.locate.run_layouts import iteration_folders
from ckpt_tools.formats.storage.files import path_in
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.run_state.common_state import COMMON_FILE
from ckpt_tools.model.choices import CheckpointKind

RELEASE = "release"

Report = TypeVar("Report")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Report]):
    """What became of one iteration: its report, or why it was not converted; neither when it was there already."""

    iteration: int | None  # None: a release
    report: Report | None = None
    error: CkptError | None = None
    is_unfinished: bool = False  # its job is still writing it

    @property
    def name(self) -> str:
        """As people call it."""
        return iteration_name(self.iteration)

    @property
    def was_there(self) -> bool:
        return self.report is None and self.error is None and not self.is_unfinished


def iteration_name(number: int | None) -> str:
    """As people call it; None is a release."""
    return RELEASE if number is None else f"iteration {number}"


def iteration_folder(number: int | None) -> str:
    """The name of its folder in a run's root; None is a release."""
    return RELEASE if number is None else f"iter_{number:07d}"


def convert_iterations(
    source: str,
    output: str,
    kinds: tuple[CheckpointKind, ...],
    overwrite: bool,
    convert: Callable[[int | None, bool], Report],
) -> list[Outcome[Report]]:
    """All iterations of the root `source`, converted to checkpoints of one of `kinds` in the root `output`.

    `kinds` is empty for what stays of the source's kind. `convert` takes the number of an iteration (None: the
    latest) and whether the output's tracker is to name it then.

    The source's latest comes last; the output's tracker, which goes forward only, names none that is beyond it. With
    several processes the first failure ends the run: they could not agree on going on.
    """

    def look() -> tuple[list[int | None], int | None, list[int]]:
        numbers, latest = all_iterations(source)
        if is_iteration(output):
            raise UsageError(f"--iteration all: {output} is named as one iteration; give the root of a run")
        if overwrite:
            return numbers, latest, []
        try:
            with closing(open_files(output)) as files:
                names = {*files.list()}
        except CkptError:  # it is not there yet
            return numbers, latest, []
        # Until its partial folder is gone, the publication of one is not finished: the tracker may be missing.
        whole = [
            n for n in numbers if n is not None and f".{iteration_folder(n)}{PARTIAL_SUFFIX}" not in names
        ]
        return numbers, latest, [n for n in whole if holds(source, output, n, kinds)]

    with connect().ending_together() as ranks:
        ranks.agree({"options": "--iteration all"})  # or one iteration, see `conversion`
        numbers, latest, present = ranks.together(look)[0]
    outcomes = list[Outcome[Report]]()
    for number in numbers:
        if number in present:
            outcomes.append(Outcome(number))
            continue
        try:
            is_beyond = number != latest and (number is None or latest is None or number > latest)
            outcomes.append(Outcome(number, convert(number, latest not in present and not is_beyond)))
        except (Interrupted, Terminated):
            raise
        except CkptError as error:
            ranks = connect()
            if ranks.together(lambda: is_being_written(source, number))[0]:  # noqa: B023  called at once
                outcomes.append(Outcome(number, is_unfinished=True))
                continue
            if ranks.world > 1:
                raise
            outcomes.append(Outcome(number, error=error))
    return outcomes


def all_iterations(source: str) -> tuple[list[int | None], int | None]:
    """Every iteration of a run's root in the order of conversion, and the latest (None: a release)."""
    numbers: list[int | None] = list(iteration_numbers(source))
    try:
        location = locate(source)
    except CkptError:
        if not numbers:
            raise
        return numbers, numbers[-1]  # the latest is damaged, or the tracker; the others need not be
    if not is_root(source, location):
        raise UsageError(f"--iteration all: {source} is one checkpoint, not a run's root")
    return [*(n for n in numbers if n != location.iteration), location.iteration], location.iteration


def every_iteration(source: str) -> tuple[list[str], list[int]]:
    """The folders of all iterations of a run's root, its latest last; and the newest, if its job still writes it."""
    numbers, _ = all_iterations(source)
    with closing(open_files(source)) as files:
        names = {number: name for name, number in iteration_folders(files.list())}
    unfinished = [n for n in numbers if n is not None and is_being_written(source, n)]
    whole = [RELEASE if n is None else names[n] for n in numbers if n not in unfinished]
    if not whole:
        raise UnsupportedCheckpointError(f"{source} has no iteration that its job has finished.")
    return [path_in(source, name) for name in whole], unfinished


def last_iterations(source: str, count: int) -> list[str]:
    """The folders of the last `count` finished iterations of a run's root, in their order."""
    folders = [folder for folder in every_iteration(source)[0] if not folder.endswith(f"/{RELEASE}")]
    if len(folders) < count:
        raise UsageError(
            f"--last {count}: {source} has only {len(folders)} finished iterations (`ls` lists them)"
        )
    return sorted(folders, key=lambda folder: int(folder.rpartition("_")[2]))[-count:]


def is_being_written(source: str, number: int | None) -> bool:
    """Whether it is the newest of the run, and what is written last is not there: `.metadata` and the tracker."""
    with closing(open_files(source)) as files:
        folders = iteration_folders(files.list())
    name, newest = max(folders, key=lambda pair: pair[1], default=("", None))
    if number is None or number != newest:
        return False
    try:
        tracked = tracked_iteration(source)
    except CkptError:
        return False
    if tracked is not None and any(reached >= number for _, reached in iteration_folders([tracked])):
        return False
    try:
        with closing(open_files(path_in(source, name))) as files:
            inside = files.list()
    except UnsupportedCheckpointError:  # a file of such a name: nobody writes into it
        return False
    is_started = any(one.endswith(".distcp") or one in (COMMON_FILE, METADATA_JSON) for one in inside)
    return METADATA not in inside and (is_started or not inside)


def holds(source: str, output: str, number: int, kinds: tuple[CheckpointKind, ...]) -> bool:
    """Whether the root `output` holds this iteration of `source`, as one of these kinds (empty: the source's)."""
    try:
        there = locate(path_in(output, iteration_folder(number))).kind
        return there in (kinds or (locate(source, number).kind,))
    except CkptError:
        return False


def exit_code(outcomes: list[Outcome[Report]]) -> int:
    """The worst of all."""
    return max((o.error.exit_code for o in outcomes if o.error is not None), default=0)


def as_json(
    outcomes: list[Outcome[Report]], data: Callable[[Report], dict[str, Any]], schema_version: int
) -> dict[str, Any]:
    """The reports and the rest as plain data, of the schema version that one report has."""
    return {
        "schema_version": schema_version,
        "iterations": [data(o.report) for o in outcomes if o.report is not None],
        "already_there": [o.iteration for o in outcomes if o.was_there],
        "not_finished": [o.iteration for o in outcomes if o.is_unfinished],
        "failed": [
            {"iteration": o.iteration, "exit_code": o.error.exit_code, "error": str(o.error)}
            for o in outcomes
            if o.error is not None
        ],
    }
