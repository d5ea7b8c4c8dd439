"""What a watcher keeps on disk: the lock of its output, what is done, what failed and how often.

All of it lies in a folder `.ckpt_tools-watch` in the output (or where `--state` says, for an output in a store): who
removes the output removes its memory too. `state.json` is replaced as a whole after every iteration. The lock is one
of the open file, which a started command inherits: a watcher that was killed leaves it held until that has ended.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckpt_tools.credentials import redacted
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.access import Access, access_of, make_folder
from ckpt_tools.execute.fileio import storage_errors
from ckpt_tools.execute.folders import Folder
from ckpt_tools.formats.documents import parse_json

FOLDER = ".ckpt_tools-watch"
LOCK, STATE = "lock", "state.json"
_VERSION = 1
_MOST_BYTES = 64 << 20
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass(frozen=True, slots=True)
class Failure:
    """An iteration that was not done. `looks` is what its files looked like: once they change, all begins anew."""

    looks: str
    tries: int
    exit_code: int
    error: str
    next_try: float | None  # seconds since 1970; None: given up

    @property
    def is_given_up(self) -> bool:
        return self.next_try is None


@dataclass(slots=True)
class Done:
    """An iteration that was done. `mark` tells whether it was written again since; `is_stale`: that was told."""

    exit_code: int
    mark: str
    is_stale: bool = False


@dataclass(slots=True)
class Memory:
    """What was done by one command with one run; `seen` tells of iterations since when they look so."""

    command: tuple[str, ...]
    run: str = ""
    done: dict[int, Done] = field(default_factory=dict)
    failed: dict[int, Failure] = field(default_factory=dict)
    seen: dict[int, tuple[str, float]] = field(default_factory=dict)


class WatchFolder:
    """The folder of one output. Held by one watcher at a time, from `take` to `close`."""

    def __init__(self, output: Path, source: str) -> None:
        """`output` is made if need be, with the permissions of the run `source`."""
        source = source.removeprefix("file://")
        self.run = redacted(source) if "://" in source else os.path.realpath(source)
        access = Access() if "://" in source else access_of(Path(source))
        self.output = output
        with storage_errors(output):
            _make(output.absolute(), access)
            with Folder.named(output) as parent:
                with suppress(FileExistsError):
                    parent.make(FOLDER, 0o700).close()
                self.folder = parent.enter(FOLDER)
        self.lock: int | None = None

    def take(self) -> str | None:
        """Hold the output: None, or who holds it."""
        with storage_errors(self.folder.path):
            fd = self.folder.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(fd, 100, 0).decode(errors="replace")
                os.close(fd)
                return owner or "another process"
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:  # these: a file system without locks
                    os.close(fd)
                    raise
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        self.lock = fd
        return None

    def close(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
        self.folder.close()

    def read(self, command: tuple[str, ...]) -> Memory:
        """What is remembered of `command`.

        Raises:
            UsageError: what lies here is of another command or run, or not of this program.
        """
        file = self.folder.path / STATE
        with storage_errors(file):
            if not self.folder.exists(STATE):
                return Memory(command, self.run)
            text = self.folder.read(STATE, _MOST_BYTES)
        try:
            memory = _from_json(parse_json(text))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{file} is not what watch keeps there. Remove it to start anew.") from None
        if memory.command != command:
            raise UsageError(
                f"{self.output} was made by --then {' '.join(memory.command)!r}; now it is "
                f"{' '.join(command)!r}. Give another output, or remove {file} to go on in this one."
            )
        if memory.run != self.run:
            raise UsageError(
                f"{self.output} was made of {memory.run}; now it is {self.run}. Give another "
                f"output. If the run has moved, remove {file}: what is there counts as done."
            )
        return memory

    def write(self, memory: Memory) -> None:
        """Remember; a reader sees the old or the new content."""
        with storage_errors(self.folder.path / STATE):
            self.folder.write(STATE, json.dumps(_as_json(memory), indent=1).encode(), sync=True, mode=0o600)


def write_beside(output: Path, name: str, data: bytes, source: str) -> None:
    """A file in the output, as private as the checkpoint it tells of; there whole or not at all."""
    mode = 0o666 if "://" in source else access_of(Path(source)).file
    with storage_errors(output / name), Folder.named(output) as folder:
        folder.write(name, data, sync=True, mode=mode)


def _make(folder: Path, access: Access) -> None:
    if folder.is_dir():
        return
    _make(folder.parent, access)
    with Folder.named(folder.parent) as above, suppress(FileExistsError):
        make_folder(above, folder.name, access).close()


def _as_json(memory: Memory) -> dict[str, Any]:
    return {
        "schema_version": _VERSION,
        "command": list(memory.command),
        "run": memory.run,
        "done": {number: asdict(done) for number, done in memory.done.items()},
        "failed": {number: asdict(failure) for number, failure in memory.failed.items()},
        "seen": memory.seen,
    }


def _from_json(data: dict[str, Any]) -> Memory:
    if data["schema_version"] != _VERSION:
        raise ValueError(data["schema_version"])
    done = {
        int(n): Done(int(d["exit_code"]), str(d["mark"]), bool(d["is_stale"]))
        for n, d in data["done"].items()
    }
    return Memory(
        tuple(map(str, data["command"])),
        str(data["run"]),
        done,
        {int(number): _failure(**failure) for number, failure in data["failed"].items()},
        {int(number): (str(looks), float(since)) for number, (looks, since) in data["seen"].items()},
    )


def _failure(looks: str, tries: int, exit_code: int, error: str, next_try: float | None) -> Failure:
    return Failure(
        str(looks), int(tries), int(exit_code), str(error), None if next_try is None else float(next_try)
    )
