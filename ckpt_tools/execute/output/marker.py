"""The marker in a store's folder: what is being written there, from what, and by whom."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from typing import Any

from ckpt_tools.errors import UsageError
from ckpt_tools.execute.output.journal import is_fingerprint
from ckpt_tools.execute.write_job import SourceState
from ckpt_tools.formats.storage.io_pool import pool
from ckpt_tools.formats.storage.object_store import Store

MARKER = ".ckpt_tools-partial"
_MOST_BYTES = 256 << 20  # it tells of every file of the source


def note_of(name: str) -> str:
    """The file that says which version of the file `name` was uploaded."""
    return f"{MARKER}.{name}"


def is_note(name: str) -> bool:
    """Whether it is such a file."""
    return name.startswith(note_of(""))


class Marker:
    """A run's claim on a folder: of two, the last to write the marker has it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.token = ""  # of the run that has the folder

    def draw(self) -> None:
        """Be a run that nobody else is."""
        self.token = uuid.uuid4().hex

    def put(self, digest: str | None, state: SourceState) -> None:
        """Claim the folder for a plan and a source; without a digest what lies there is not to be gone on from."""
        owner = f"process {os.getpid()} on {os.uname().nodename}"
        header = {"digest": digest, "source": state, "token": self.token, "owner": owner}
        self._store.put(MARKER, json.dumps(header).encode())

    def read(self, present: Mapping[str, int | None] | None = None) -> dict[str, Any]:
        """What the marker says; nothing when there is none. `present` may tell how long it is."""
        if ((present or {}).get(MARKER) or 0) > _MOST_BYTES:
            raise self._not_ours()
        try:
            found = json.loads(self._store.get(MARKER))
        except FileNotFoundError:
            return {}
        except ValueError:
            found = None
        if not isinstance(found, dict) or not is_fingerprint(found.setdefault("source", [])):
            raise self._not_ours()
        return found

    def check(self) -> None:
        """Go on as long as the folder is this run's."""
        found = self.read()
        if found.get("token") != self.token:
            raise UsageError(
                f"{self._store.location} was taken by another converter ({found.get('owner', 'it has ended')}) while "
                "this one wrote there. This run stopped without changing anything; choose another output, or "
                "wait for the other one."
            )

    def note(self, name: str) -> str | None:
        """Note which version of a file was uploaded, and return it. Raises as `check`."""
        self.check()  # a note of a run that lost would vouch for a file of its own
        version = self._store.version(name)
        if version is not None:
            self._store.put(note_of(name), version.encode())
        return version

    def noted(self, name: str) -> str:
        """The version of a file that was noted."""
        return self._store.get(note_of(name)).decode(errors="replace")

    def is_noted(self, name: str) -> bool:
        """Whether a file is the one that was uploaded. Another one may have its length."""
        try:
            return self.noted(name) == self._store.version(name)
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Give the folder up: all is done."""
        list(pool().map(self._store.remove, filter(is_note, self._store.sizes())))
        self._store.remove(MARKER)

    def _not_ours(self) -> UsageError:
        return UsageError(
            f"{self._store.where(MARKER)} was not written by this version. Start again with --overwrite."
        )
