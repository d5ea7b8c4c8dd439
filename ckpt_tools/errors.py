"""Every error a user can meet, each with the exit code the command line returns for it.

The classes follow what the user has to do, not the module that raises. A message says what failed, where
(key and box, or file and byte range), what was expected and found, and the next step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tools.redaction import redacted

MAX_LISTED_PROBLEMS = 20
_LISTED = 3  # of each kind
_NUMBERS = re.compile(r"\d+")


class CkptError(Exception):
    """Base of all errors raised on purpose; `exit_code` is the process's return code. Credentials are not shown."""

    exit_code = 70

    def __init__(self, message: str = "", problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self._problems = tuple(problems)

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that is wrong, one text each: all of it, where the message lists the first few."""
        return tuple(map(redacted, self._problems)) or (str(self),)

    @property
    def told_problems(self) -> tuple[str, ...]:
        """Those that it was made with, where `problems` falls back on the message."""
        return tuple(map(redacted, self._problems))

    def __str__(self) -> str:
        return redacted(Exception.__str__(self))


class UsageError(CkptError):
    """The command line or the requested topology cannot be carried out as given."""

    exit_code = 2


class UnsupportedCheckpointError(CkptError):
    """Not a checkpoint, or in a format that is not read."""

    exit_code = 3


class CorruptCheckpointError(CkptError):
    """The files contradict themselves or their metadata, or are hostile."""

    exit_code = 4


class HostileCheckpointError(CorruptCheckpointError):
    """The files would make their reader run code, read elsewhere, or take memory without end."""


class MappingError(CkptError):
    """A key without a rule, a shape clash, or a missing parameter group."""

    exit_code = 5


class NoSuchKeyError(MappingError, KeyError):
    """Nothing has the name that was asked for: to Python a KeyError."""


class VerificationError(CkptError):
    """Content written or read does not prove equal to what it must be."""

    exit_code = 6


class StorageError(CkptError):
    """The file system refused: disk full, permission, I/O error."""

    exit_code = 7


class Interrupted(CkptError):  # noqa: N818  named for what happened, like KeyboardInterrupt
    """Ctrl-C: stopped by the user, nothing was published."""

    exit_code = 130


class Terminated(CkptError):  # noqa: N818
    """SIGTERM: stopped cleanly, `--resume` continues."""

    exit_code = 143


# What says nothing of a checkpoint, wherever an error of reading one is a finding or a note: these go on up. Another
# process's Ctrl-C is one of them.
NEVER_FINDINGS = (StorageError, Interrupted, Terminated)


def as_ckpt_error(error: BaseException) -> BaseException:
    """What Python raises for want of memory, threads or disk as the error of this module; any other unchanged."""
    if isinstance(error, OSError):
        return StorageError(str(error))
    if isinstance(error, UnicodeEncodeError):
        return UsageError(f"{error.object!r} is not Unicode text, so nothing can have this name.")
    if isinstance(error, MemoryError):
        return StorageError("there is not enough memory for this. Nothing was published.")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return StorageError(
            "the system starts no more threads. Ask for fewer (--threads 1 --workers 1), or see `ulimit -u` and the "
            "control group's pids.max. Nothing was published."
        )
    return error


def list_problems(problems: Iterable[str]) -> str:
    """One indented line per problem; of very many three of each kind, and how many more there are.

    Problems are of one kind that differ in numbers alone: the same of every layer.
    """
    lines = list(problems)
    if len(lines) <= MAX_LISTED_PROBLEMS:
        return "\n".join(f"  - {line}" for line in lines)
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kinds.setdefault(_NUMBERS.sub("#", line), []).append(line)
    shown, counted = list[str](), 0
    for same in kinds.values():
        if len(shown) >= MAX_LISTED_PROBLEMS:
            break
        shown += [f"  - {line}" for line in same[:_LISTED]]
        counted += len(same)
        if len(same) > _LISTED:
            shown.append(f"  ... and {len(same) - _LISTED} more like these")
    if counted < len(lines):
        shown.append(f"  ... and {len(lines) - counted} more")
    return "\n".join(shown)


def raise_if(problems: Iterable[str], error: type[CkptError], what: str, advice: str = "") -> None:
    """Raise `error` if there are problems: `what` is wrong, a line for each of them, and what to do."""
    problems = list(problems)
    if problems:
        raise error("\n".join(filter(None, (f"{what}:", list_problems(problems), advice))), problems)
