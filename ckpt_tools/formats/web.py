"""A folder on a web server: `http://`, `https://`, where byte ranges are answered.

There is no way to list a folder that all servers share. An index page is read where there is one (most leave out
names that begin with a dot); without one the names that lead into a checkpoint are asked for one by one, and the
metadata names all other files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from ckpt_tools.errors import CorruptCheckpointError, StorageError, UnsupportedCheckpointError
from ckpt_tools.formats.drivers import FsspecDriver
from ckpt_tools.formats.remote import RemoteFiles
from ckpt_tools.formats.requests import pool
from ckpt_tools.formats.store import Retry

_TRACKER = "latest_checkpointed_iteration.txt"
# What a checkpoint's folder, a run's root and a Hugging Face model can have, as far as commands look for it by name.
_NAMES = (
    ".metadata", "metadata.json", "common.pt", "run_config.yaml", "train_state.pt", _TRACKER, "latest_train_state.pt",
    "model.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tekken.json", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json", "LICENSE",
)  # fmt: skip
_TOTAL = re.compile(r"bytes (?:0-0|\*)/(\d+)")


class _Answer(NamedTuple):
    """What a server says of one address."""

    size: int | None  # None: a folder
    version: str | None


class WebFiles(RemoteFiles):
    """As `RemoteFiles`; every file is asked about on its own, when it is needed.

    Raises (all methods): also StorageError: the server answers no byte ranges, or denies access.
    """

    def __init__(self, location: str, retry: Retry | None = None) -> None:
        super().__init__(location, retry)
        self._driver = cast(FsspecDriver, self._store.driver)
        self._answers: dict[str, _Answer | None] = {}

    def exists(self, name: str) -> bool:
        return self._look(name, denied_is_absent=True) is not None

    def size(self, name: str) -> int:
        answer = self._look(name)
        if answer is None or answer.size is None:
            raise CorruptCheckpointError(
                f"{self._store.where(name)} does not exist, but the checkpoint needs it. "
                "Copy the checkpoint again."
            )
        return answer.size

    def list(self) -> list[str]:
        """As `Files.list`: what the index page names, and what is known by name."""
        names = self._indexed()
        asked = [_NAMES[0]] if names else _NAMES
        found = [
            name for name, is_there in zip(asked, pool().map(self.exists, asked), strict=True) if is_there
        ]
        names |= set(found) | self._iteration(found)
        if not names:
            raise UnsupportedCheckpointError(
                f"{self.location} does not exist, or its server neither lists it nor has one of the files that "
                "a checkpoint begins with (.metadata, a tracker, model.safetensors). Give the folder of the "
                "checkpoint itself."
            )
        return sorted(names)

    def stamps(self, names: Sequence[str]) -> dict[str, tuple[int | None, str | None]]:
        """As `RemoteFiles.stamps`."""
        answers = pool().map(self._ask, names)
        return {n: (a.size, a.version) if a else (None, None) for n, a in zip(names, answers, strict=True)}

    def _look(self, name: str, denied_is_absent: bool = False) -> _Answer | None:
        """`_ask`, once for each name."""
        if name not in self._answers:
            self._answers[name] = self._ask(name, denied_is_absent)
        return self._answers[name]

    def _ask(self, name: str, denied_is_absent: bool = False) -> _Answer | None:
        """What the server says of a file when it is asked for its first byte; None when it is not there.

        Stores that do not let their folders be listed deny what is not there.
        """
        address, where = self._store.path(name), self._store.where(name)

        async def first_byte() -> tuple[int, Any, str]:
            session = await self._driver.fs.set_session()
            headers = {"Range": "bytes=0-0", "Accept-Encoding": "identity"}
            async with session.get(self._driver.fs.encode_url(address), headers=headers) as answer:
                return answer.status, answer.headers, answer.url.path

        def request(timeout: float) -> tuple[int, Any, str]:
            from fsspec.asyn import sync

            found: tuple[int, Any, str] = sync(self._driver.fs.loop, first_byte, timeout=timeout)
            if found[0] >= 500 or found[0] == 429:
                raise OSError(f"the server answers {found[0]}")
            return found

        status, headers, path = self._store.call(f"{where}: asking", request)
        if status in (404, 410) or (status == 403 and denied_is_absent):
            return None
        if status in (401, 403):
            raise StorageError(
                f"{where}: the server denies access ({status}). Check the address and its credentials."
            )
        if path.endswith("/"):
            return _Answer(None, None)
        total = _TOTAL.fullmatch(headers.get("Content-Range", ""))
        if (
            (status != 206 or total is None)
            and not (status == 416 and total)
            and headers.get("Content-Length") != "0"
        ):
            raise StorageError(
                f"{where}: the server does not answer byte ranges (status {status} instead of 206), which reading a "
                "checkpoint needs. Serve it with one that does (nginx, Apache, an object store), or copy it first."
            )
        return _Answer(int(total[1]) if total else 0, headers.get("ETag") or headers.get("Last-Modified"))

    def _indexed(self) -> set[str]:
        """Names in the folder's index page; none where the server shows none."""
        address = self._store.path("")
        folder = address.partition("?")[0] + "/"
        links: list[str] = []
        with suppress(FileNotFoundError, StorageError):
            what = f"{self.location}: listing"
            links = self._store.call(what, lambda t: self._driver.ask(t, "ls_real", folder, detail=False))
        base = urlsplit(folder).path
        names = {
            unquote(urlsplit(link).path.removeprefix(base).rstrip("/"))
            for link in links
            if not urlsplit(link).query
        }
        return {name for name in names if "/" not in name and name not in ("", ".", "..")}

    def _iteration(self, found: Sequence[str]) -> set[str]:
        """The folder that the tracker of a run's root names, if it is one."""
        if _TRACKER not in found:
            return set()
        text = self.read(_TRACKER, 0, self.size(_TRACKER)).decode("utf-8", "replace").strip()
        name = f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,18}", text) else "release"
        return {name} if self.exists(f"{name}/.metadata") else set()
