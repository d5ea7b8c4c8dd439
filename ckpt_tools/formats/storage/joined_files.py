"""Several folders read as one: what is made of several checkpoints at once.

A file is named by its folder's location and its name there (`/runs/a/iter_0000100/__0_0.distcp`), so that messages
name the file that is meant, and one folder that is joined twice is read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.formats.storage.files import Files, path_in
from ckpt_tools.model.catalog import TensorEntry


class JoinedFiles:
    """The files of several folders, each of which is its owner's to close."""

    def __init__(self, parts: Iterable[Files]) -> None:
        self._parts = {part.location.rstrip("/"): part for part in parts}
        self.location = " and ".join(self._parts)

    @property
    def parts(self) -> tuple[Files, ...]:
        return tuple(self._parts.values())

    def part(self, name: str) -> tuple[Files, str]:
        """The folder that a file is in, and its name there."""
        inside = [place for place in self._parts if name.startswith(f"{place}/")]
        if not inside:
            raise CorruptCheckpointError(f"{name} is not in {self.location}")
        place = max(inside, key=len)
        return self._parts[place], name[len(place) + 1 :]

    def exists(self, name: str) -> bool:
        files, inner = self.part(name)
        return files.exists(inner)

    def size(self, name: str) -> int:
        files, inner = self.part(name)
        return files.size(inner)

    def list(self) -> list[str]:
        return sorted(joined_name(part, name) for part in self.parts for name in part.list())

    def read(self, name: str, offset: int, length: int) -> bytes:
        files, inner = self.part(name)
        return files.read(inner, offset, length)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        files, inner = self.part(name)
        files.read_into(inner, offset, buffer)

    def close(self) -> None:
        """Does nothing: the folders stay their owners'."""


class FilesBeside(JoinedFiles):
    """The files of one folder under their own names, and those of others as joined folders have them; closes all."""

    def __init__(self, first: Files, others: Iterable[Files]) -> None:
        others = tuple(others)
        super().__init__((first, *others))
        self._first = first
        self.location = first.location

    def part(self, name: str) -> tuple[Files, str]:
        """The folder that a file is in, and its name there."""
        inside = any(name.startswith(f"{place}/") for place in self._parts)
        return super().part(name) if inside else (self._first, name)

    def list(self) -> list[str]:
        return self._first.list()

    def close(self) -> None:
        for part in self.parts:
            part.close()


def joined_name(part: Files, name: str) -> str:
    """What a file of `part` is called among joined folders."""
    return path_in(part.location, name)


def joined_entry(part: Files, entry: TensorEntry, key: str) -> TensorEntry:
    """A stored tensor of `part` under `key` in the catalog of joined folders."""
    items = [chunk.item._replace(file=joined_name(part, chunk.item.file)) for chunk in entry.chunks]
    chunks = [chunk._replace(item=item) for chunk, item in zip(entry.chunks, items, strict=True)]
    return replace(entry, key=key, chunks=tuple(chunks))


def place_of(files: Files, name: str) -> tuple[Files, str]:
    """The folder that holds a file, and its name there: of joined folders the one that is meant."""
    return files.part(name) if isinstance(files, JoinedFiles) else (files, name)


def by_folder(files: Files, names: Sequence[str]) -> Iterator[tuple[Files, list[str]]]:
    """The folders that hold `names`, each with its share of them as they are called there."""
    if not isinstance(files, JoinedFiles):
        yield files, list(names)
        return
    shares: dict[str, tuple[Files, list[str]]] = {}
    for name in names:
        part, inner = files.part(name)
        shares.setdefault(part.location, (part, []))[1].append(inner)
    yield from shares.values()
