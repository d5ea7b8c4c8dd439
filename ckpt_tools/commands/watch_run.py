"""What the folder of a watched run tells: what its tracker has reached, and whether an iteration's files change."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from pathlib import Path

from ckpt_tools.commands.ls import iteration_names
from ckpt_tools.commands.outputs import is_root, refuse_overlap
from ckpt_tools.errors import (
    NEVER_FINDINGS,
    CkptError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckpt_tools.formats.beside import LOCAL_FILE, local_checkpoint
from ckpt_tools.formats.dcp import METADATA
from ckpt_tools.formats.detect import (
    BRIDGE_TRACKER,
    TRACKER,
    Location,
    locate,
    tracked_iteration,
)
from ckpt_tools.formats.files import open_files, path_in
from ckpt_tools.formats.run_layouts import iteration_folders


def check_run(run: str, output: str) -> None:
    """Refuse what cannot be watched. A run without an iteration can: its job has just begun.

    Raises:
        UsageError: it is one checkpoint, or the output lies in it.
        UnsupportedCheckpointError: there is no such folder, or it is of another kind.
    """
    refuse_overlap(run, Location("dcp", run), output)
    files = open_files(run)
    try:
        names = files.list()
    finally:
        files.close()
    if iteration_folders(names):
        return
    if local := next((name for name in names if LOCAL_FILE.fullmatch(name)), None):
        raise UnsupportedCheckpointError(local_checkpoint(path_in(run, local)))
    try:
        location = locate(run)
    except CkptError:  # nothing is there yet
        return
    if not is_root(run, location):
        raise UsageError(f"{run} is one checkpoint, not a run's root; give the folder that it lies in.")


def by_tracker(run: str, number: int, settle: float) -> tuple[bool, str]:
    """Whether the run has a tracker, and why an iteration is to be waited for by it.

    `settle`: seconds after which nobody seems to be writing it.

    Raises:
        UnsupportedCheckpointError: it names a folder that is not there, and has done so for a while.
    """
    try:
        latest = tracked_iteration(run)
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        return True, str(error)
    if latest is None:
        return False, ""
    reached = max((n for _, n in iteration_folders([latest])), default=-1)
    if number <= reached:
        return True, ""
    rests = Path(run).is_dir() and _rests(run, settle)  # of a store's nothing tells for how long
    if rests and latest not in iteration_names(run):
        locate(run)  # refuses it: there is no such folder
    return True, f"the run's tracker names {latest}"


def check_tracker(run: str, settle: float) -> None:
    """Refuse a tracker that tells nothing; one that is young may be half written, and is waited for.

    Raises:
        CorruptCheckpointError: it is damaged, and nobody is writing it.
    """
    try:
        tracked_iteration(run)
    except CorruptCheckpointError as error:
        if _rests(run, settle):
            raise CorruptCheckpointError(f"{error} Nothing tells what is finished.") from error


def _rests(run: str, settle: float) -> bool:
    """Whether nobody seems to be writing it."""
    written = max(_when(path_in(run, name)) for name in (TRACKER, BRIDGE_TRACKER))
    return time.time() - written >= settle


def _when(place: str) -> float:
    """When a file was written; long ago where nothing tells, as in a store, which has whole objects only."""
    try:
        return Path(place).stat().st_mtime
    except OSError:
        return 0.0


def mark_of(place: str) -> str:
    """What changes when an iteration is written again, as after a job was set back; "" where it is not known."""
    try:
        status = (Path(place) / METADATA).stat()
    except OSError:  # in a store, or gone
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def looks_of(place: str, sizes: dict[str, int]) -> str:
    """A digest of names and sizes, and of a folder's files of when they were written."""
    found = hashlib.sha256()
    for name, nbytes in sizes.items():
        written = 0
        if "://" not in place:
            with suppress(OSError):
                written = (Path(place) / name).stat().st_mtime_ns
        found.update(f"{name}\0{nbytes}\0{written}\n".encode("utf-8", "surrogateescape"))
    return found.hexdigest()
