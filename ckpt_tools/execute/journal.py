"""What a conversion has finished, so that a later process can go on from it.

`plan.json` names the plan and the state of the source files; `<worker>.jsonl` gets one line for every item written:
its number in the plan and its payload's CRC-32. A line cut short by a crash counts as not written.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckpt_tools.catalog.files import Files, LocalFiles
from ckpt_tools.catalog.remote import RemoteFiles
from ckpt_tools.errors import CorruptCheckpointError, UsageError
from ckpt_tools.execute.fileio import storage_errors
from ckpt_tools.plan.model import Plan

_HEADER = "plan.json"
_LINES = re.compile(rb"^\[(\d+),(\d+)\]$", re.MULTILINE)


def fingerprint(files: Files, names: Sequence[str]) -> list[list[object]]:
    """What tells a file from another, for each; equal as long as nothing changed.

    Of a local file its length, both times in ns and its inode number: whoever puts another file in its place may
    give it the same length and modification time. Of one in a store its length and version (ETag, generation).
    """
    if isinstance(files, RemoteFiles):
        return [[name, *stamp] for name, stamp in files.stamps(names).items()]
    rows: list[list[object]] = []
    for name in names:
        if isinstance(files, LocalFiles):
            path = Path(files.location, name)
            with storage_errors(path):
                status = path.stat()
            rows.append([name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino])
        else:
            rows.append([name, files.size(name), None])
    return rows


def check_unchanged(before: list[list[object]], after: list[list[object]], location: str) -> None:
    """Prove that two fingerprints of the source at `location` are the same.

    Raises:
        CorruptCheckpointError: a source file is not what it was.
    """
    changed = [str(a[0]) for a, b in zip(before, after, strict=True) if a != b]
    if changed:
        raise CorruptCheckpointError(
            f"{location}: {', '.join(changed[:5])} changed while the conversion ran, so what was read is a mix. "
            "Stop whatever writes there and convert again with --overwrite."
        )


class Journal:
    """The journal in `folder`; `append` may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def exists(self) -> bool:
        return (self._folder / _HEADER).exists()

    def begin(self, plan: Plan, source: list[list[object]]) -> None:
        """Start a new journal."""
        with storage_errors(self._folder):
            self._folder.mkdir()
            header = json.dumps({"digest": plan.digest, "source": source})
            temporary = self._folder / f"{_HEADER}.tmp"
            temporary.write_text(header)
            temporary.replace(self._folder / _HEADER)

    def resume(self, plan: Plan, source: list[list[object]], location: str) -> None:
        """Prove that the journal belongs to this plan and these source files.

        Raises:
            UsageError: it belongs to another plan.
            CorruptCheckpointError: the source has changed since.
        """
        with storage_errors(self._folder):
            header = json.loads((self._folder / _HEADER).read_text())
        if header["digest"] != plan.digest:
            raise UsageError(
                f"{self._folder.parent} was begun with another plan (other options, source or version). Repeat "
                "the command with the same options, or start anew with --overwrite."
            )
        names = [[row[0] for row in rows] for rows in (header["source"], source)]
        if names[0] != names[1]:
            raise CorruptCheckpointError(f"{location}: it no longer has the files the conversion began with")
        check_unchanged(header["source"], source, location)

    def finished(self) -> dict[int, int]:
        """Item number -> payload CRC-32 of all items that any worker wrote."""
        done: dict[int, int] = {}
        with storage_errors(self._folder):
            for path in sorted(self._folder.glob("*.jsonl")):
                found = _LINES.findall(path.read_bytes())
                done.update((int(number), int(checksum)) for number, checksum in found)
        return done

    def open(self, worker: int) -> None:
        """Begin to append as `worker`, behind what an earlier process may have left."""
        path = self._folder / f"{worker}.jsonl"
        with storage_errors(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            if os.fstat(self._fd).st_size:
                os.write(self._fd, b"\n")  # ends a line that was cut short

    def append(self, done: Iterable[tuple[int, int]]) -> None:
        """Note items as written: (number in the plan, payload CRC-32)."""
        lines = b"".join(b"[%d,%d]\n" % one for one in done)
        with self._lock, storage_errors(self._folder):
            while lines:
                lines = lines[os.write(self._fd, lines) :]

    def close(self) -> None:
        """Stop appending."""
        with storage_errors(self._folder):
            os.close(self._fd)
