"""What a watcher does with iterations, and what it tells of them: plain data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckpt_tools.formats.detect import CheckpointKind

Event = Literal["done", "failed", "given_up", "waiting", "stale"]
Makes = Literal["root", "folders", "reports"]


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """How a run is watched."""

    every: float = 60.0  # seconds
    once: bool = False
    retries: int = 3
    settle: float = 120.0  # seconds without a change, in a run without a tracker
    state: Path | None = None  # where the lock and what is remembered are, if not in the output


@dataclass(frozen=True, slots=True)
class Action:
    """What is done with an iteration: a command of this program and its options.

    `makes`: a root with iterations and a tracker; folders that are models of their own; or a report each, which is
    written to the output. `kinds` are those of what it makes.
    """

    verb: str
    options: tuple[str, ...]
    makes: Makes
    kinds: tuple[CheckpointKind, ...]
    trust_pickle: bool

    @property
    def words(self) -> tuple[str, ...]:
        return (self.verb, *self.options)


@dataclass(frozen=True, slots=True)
class Told:
    """What became of an iteration."""

    event: Event
    iteration: int
    name: str
    output: str
    exit_code: int = 0
    why: str = ""
    tries: int = 0
    seconds: float = 0.0
    report: Any = None

    def as_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "schema_version": 1,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "event": self.event,
            "iteration": self.iteration,
            "name": self.name,
            "output": self.output,
            "exit_code": self.exit_code,
            "why": self.why,
            "tries": self.tries,
            "seconds": round(self.seconds, 3),
            "report": self.report,
        }
