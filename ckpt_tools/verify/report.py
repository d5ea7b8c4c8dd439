"""What a verification found: checks, each with how much it looked at and its findings; and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from ckpt_tools.errors import CkptError, HostileCheckpointError
from ckpt_tools.model.choices import CheckpointKind

Severity: TypeAlias = Literal["error", "warning"]
ERROR: Final = "error"
WARNING: Final = "warning"


class Finding(NamedTuple):
    """One thing that is wrong (`error`) or unusual (`warning`); `where` is a key, a file, a folder or a setting."""

    check: str
    severity: Severity
    where: str
    message: str
    fix: str = ""  # what to do about it, where that is not part of the message


@dataclass(frozen=True, slots=True)
class Check:
    """One check that was carried out on `looked_at` things of the kind `unit`."""

    name: str
    unit: str
    looked_at: int
    findings: tuple[Finding, ...]
    source: str = ""  # file and function of the program that demands it, with versions
    is_hostile: bool = False  # something there was made to harm its reader

    @property
    def errors(self) -> int:
        """Number of findings that make the checkpoint invalid."""
        return sum(finding.severity == ERROR for finding in self.findings)


class Findings:
    """Collects the findings of one check."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.looked_at = 0
        self._is_hostile = False
        self._found: list[Finding] = []

    def error(self, where: str, message: str, fix: str = "") -> None:
        self._found.append(Finding(self.name, ERROR, where, message, fix=fix))

    def failure(self, where: str, error: CkptError) -> None:
        """An error that reading met."""
        self.error(where, str(error))
        self._is_hostile |= isinstance(error, HostileCheckpointError)

    def warning(self, where: str, message: str) -> None:
        self._found.append(Finding(self.name, WARNING, where, message))

    def include(self, place: str, checks: Iterable[Check]) -> None:
        """What checks of something else found there."""
        for check in checks:
            self._found += [f._replace(check=self.name, where=f"{place}: {f.where}") for f in check.findings]
            self._is_hostile |= check.is_hostile

    def done(self) -> Check:
        """The check, as data."""
        return Check(self.name, self.unit, self.looked_at, tuple(self._found), is_hostile=self._is_hostile)


def failed_check(name: str, where: str, error: CkptError) -> Check:
    """A check that could not be carried out: what it found is the error that it met."""
    found = Findings(name, "checkpoints")
    found.looked_at = 1
    found.failure(where, error)
    return found.done()


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """How much to look at."""

    content: bool = False  # read every byte
    manifest: Path | None = None  # compared with
    allow_nonfinite: bool = False
    trust_pickle: bool = False
    threads: int = 2
    workers: int | None = None  # processes forked on this machine; None: as many as help
    write_manifest: Path | None = None  # made, when the checkpoint is valid
    every_iteration: bool = False  # of its run is verified: newer ones are not pointed at


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one checkpoint."""

    checkpoint: str
    format: CheckpointKind | Literal["unknown"]
    checks: tuple[Check, ...]
    content_read: bool | None = None  # whether values were looked at; None where nobody asks

    @property
    def verdict_suffix(self) -> str:
        """What a verdict must add so that nobody takes it for more than it is."""
        return "; the values were not read (--content reads them)" if self.content_read is False else ""

    @property
    def findings(self) -> list[Finding]:
        """All findings, in the order of the checks."""
        return [finding for check in self.checks for finding in check.findings]

    @property
    def is_hostile(self) -> bool:
        """Whether a file was made to harm its reader."""
        return any(check.is_hostile for check in self.checks)

    @property
    def is_valid(self) -> bool:
        return all(check.errors == 0 for check in self.checks)


class Meter:
    """Call it with bytes just read; `progress` gets (bytes done, `total`). Threads may share it."""

    def __init__(self, progress: Callable[[int, int], None] = lambda _done, _total: None) -> None:
        self.total = 0
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(self._done, max(self.total, self._done))
