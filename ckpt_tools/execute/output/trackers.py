"""The tracker files of a run's root, which say which iteration a job loads."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from ckpt_tools.errors import CkptError, StorageError
from ckpt_tools.formats.locate.detect import TRACKER, tracked_iteration
from ckpt_tools.formats.locate.run_layouts import iteration_folders
from ckpt_tools.formats.storage.open_files import open_files


def root_and_name(output: Path | str) -> tuple[str, str]:
    """The root in which an output lies, a path or the URL of a folder, and its name there."""
    if "://" in str(output):
        root, _, name = str(output).rstrip("/").rpartition("/")
        return root, name
    path = Path(output)
    return str(path.parent), path.name


def is_tracked(output: Path | str) -> bool:
    """Whether the tracker of its root names `output`, which a job then finds by `--load` alone."""
    root, name = root_and_name(output)
    try:
        return name.startswith(("iter_", "release")) and tracked_iteration(root) == name
    except CkptError:  # it need not be allowed to look there
        return False


def tracker_change(output: Path | str, latest: str) -> tuple[bool, str | None]:
    """Whether a root's tracker stays once `latest` (a number or "release") lies at `output`, and what to say.

    A job must not go back to an older iteration because one was added. A tracker that cannot be read is replaced.
    """
    root, _ = root_and_name(output)
    try:
        old = tracked_iteration(root)
        with closing(open_files(root)) as files:
            is_there = old in files.list()
    except StorageError:
        raise
    except CkptError:
        return False, None
    number = dict(iteration_folders([old or ""])).get(old or "")
    shown = old if number is None else str(number)
    if shown in (None, latest):
        return False, None
    if is_there and number is not None and (latest == "release" or number > int(latest)):
        option = "" if latest in ("release", "0") else f"give it --ckpt-step {latest}, or "
        return (
            True,
            f"{TRACKER} stays at {shown}; for a job to load {latest}, {option}write {latest} into that file",
        )
    return False, f"{TRACKER} moves from {shown} to {latest}"
