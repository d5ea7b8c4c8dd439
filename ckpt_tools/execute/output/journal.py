"""What a conversion has finished, so that a later process can go on from it.

`plan.json` names the plan and the state of the source files; `<worker>.jsonl` gets one line for every item written:
its number in the plan and its payload's CRC-32. A line cut short by a crash counts as not written.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeGuard

from ckpt_tools.errors import CorruptCheckpointError, UsageError
from ckpt_tools.execute.output.fileio import storage_errors
from ckpt_tools.execute.output.folders import Folder
from ckpt_tools.formats.storage.files import Files, LocalFiles, stamp_of
from ckpt_tools.formats.storage.joined_files import JoinedFiles, by_folder, joined_name
from ckpt_tools.formats.storage.remote import RemoteFiles
from ckpt_tools.model.transfers import Plan

_DESCRIBING = (".metadata", "metadata.json", "common.pt", "run_config.yaml", "train_state.pt", "config.json")
_HEADER = "plan.json"
_LINES = re.compile(rb"^\[(\d{1,18}),(\d{1,10})\]$", re.MULTILINE)
_HEADER_BYTES, _JOURNAL_BYTES = 256 << 20, 4 << 30  # a line is written for every item, of millions at most


def fingerprint(files: Files, plan: Plan) -> list[list[object]]:
    """What tells the files that a plan was made of and reads from others; equal as long as nothing changed."""
    return file_stamps(files, [*plan.source_files, *_describing(files)])


def _describing(files: Files) -> list[str]:
    """The files that are there and say what a checkpoint holds; of joined folders those of each."""
    if isinstance(files, JoinedFiles):
        return [joined_name(part, name) for part in files.parts for name in _describing(part)]
    return [name for name in _DESCRIBING if files.exists(name)]


def file_stamps(files: Files, names: Sequence[str]) -> list[list[object]]:
    """For each file, values that change if another file is put in its place.

    Of a local file its length, both times in ns and its inode number: another file in its place may have the same
    length and modification time. Of one in a store its length and version (ETag, generation).
    """
    if isinstance(files, JoinedFiles):
        return [
            [joined_name(part, str(name)), *stamp]
            for part, inside in by_folder(files, names)
            for name, *stamp in file_stamps(part, inside)
        ]
    if isinstance(files, RemoteFiles):
        return [[name, *stamp] for name, stamp in files.stamps(names).items()]
    rows: list[list[object]] = []
    for name in names:
        if isinstance(files, LocalFiles):
            path = Path(files.location, name)
            with storage_errors(path):
                rows.append([name, *stamp_of(path.stat())])
        else:
            rows.append([name, files.size(name), None])
    return rows


def is_fingerprint(rows: object) -> TypeGuard[list[list[object]]]:
    """Whether a value that was read has the form of a fingerprint."""
    return isinstance(rows, list) and all(
        isinstance(row, list) and row and isinstance(row[0], str) for row in rows
    )


def check_unchanged(before: list[list[object]], after: list[list[object]], location: str) -> None:
    """Prove that two fingerprints of the source at `location` are the same."""
    now = {str(row[0]): row for row in after}
    _raise_source_changed(
        [str(row[0]) for row in before if now.pop(str(row[0]), None) != row] + list(now), location
    )


def check_unchanged_since_open(files: Files) -> None:
    """Prove that every local file still is what it was when this process opened it first: also what describes the
    checkpoint, and was read before anything was planned.
    """
    if isinstance(files, JoinedFiles):
        for part in files.parts:
            check_unchanged_since_open(part)
    if isinstance(files, LocalFiles):
        stamps = dict(files.opened)
        now = {name: stamp_of(status) for name, status in files.opened_now(stamps).items()}
        _raise_source_changed([name for name in stamps if now.get(name) != stamps[name]], files.location)


def _raise_source_changed(changed: list[str], location: str) -> None:
    if changed:
        raise CorruptCheckpointError(
            f"{location}: {', '.join(changed[:5])} changed while the conversion ran, so what was read is a mix. "
            "Stop whatever writes there and convert again with --overwrite."
        )


class Journal:
    """The journal in `folder`; `append` may be called from any thread."""

    def __init__(self, folder: Path, parent: Callable[[], Folder]) -> None:
        self._folder = folder
        self._parent = parent
        self._lock = threading.Lock()

    def exists(self) -> bool:
        try:
            with self._inside() as folder:
                return folder.exists(_HEADER)
        except FileNotFoundError:
            return False

    def _inside(self) -> Folder:
        return self._parent().enter(self._folder.name)

    def begin(self, plan: Plan, source: list[list[object]]) -> None:
        with storage_errors(self._folder):
            header = json.dumps({"digest": plan.digest, "source": source})
            with self._parent().make(self._folder.name, 0o700) as folder:
                folder.write(_HEADER, header.encode(), mode=0o600)

    def resume(self, plan: Plan, source: list[list[object]], location: str) -> None:
        """Prove that the journal belongs to this plan and these source files."""
        with storage_errors(self._folder), self._inside() as folder:
            digest, before = _parse_header(folder.read(_HEADER, _HEADER_BYTES), self._folder)
        if digest != plan.digest:
            raise UsageError(
                f"{self._folder.parent} was started with another plan (other options, source or version). Repeat "
                "the command with the same options, or start again with --overwrite."
            )
        names = [[row[0] for row in rows] for rows in (before, source)]
        if names[0] != names[1]:
            raise CorruptCheckpointError(f"{location}: it no longer has the files the conversion began with")
        check_unchanged(before, source, location)

    def finished(self) -> dict[int, int]:
        """Item number -> payload CRC-32 of all items that any worker wrote."""
        done: dict[int, int] = {}
        with storage_errors(self._folder), self._inside() as folder:
            for name in folder.names():
                if name.endswith(".jsonl"):
                    lines = _LINES.findall(folder.read(name, _JOURNAL_BYTES))
                    done.update((int(number), int(checksum)) for number, checksum in lines)
        return done

    def open(self, worker: int) -> None:
        """Begin to append as `worker`, behind what an earlier process may have left."""
        path = self._folder / f"{worker}.jsonl"
        with storage_errors(path):
            with self._inside() as folder:
                self._fd = folder.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            if os.fstat(self._fd).st_size:
                os.write(self._fd, b"\n")  # ends a line that was cut short

    def append(self, done: Iterable[tuple[int, int]]) -> None:
        """Note items as written: (number in the plan, payload CRC-32)."""
        lines = b"".join(b"[%d,%d]\n" % row for row in done)
        with self._lock, storage_errors(self._folder):
            while lines:
                lines = lines[os.write(self._fd, lines) :]

    def close(self) -> None:
        with storage_errors(self._folder):
            os.close(self._fd)


def _parse_header(data: bytes, folder: Path) -> tuple[str, list[list[object]]]:
    """Digest of the plan and fingerprint of the source, as `begin` wrote them."""
    try:
        match json.loads(data):
            case {"digest": str(digest), "source": rows} if is_fingerprint(rows):
                return digest, rows
    except (ValueError, RecursionError):
        pass
    raise CorruptCheckpointError(
        f"{folder / _HEADER} is damaged and cannot be resumed. Start again with --overwrite."
    )
