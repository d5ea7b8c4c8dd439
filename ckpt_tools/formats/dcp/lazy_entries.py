"""Entries of a large metadata file, decoded when somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, overload

from ckpt_tools.errors import CkptError, CorruptCheckpointError
from ckpt_tools.model.catalog import Chunk

KEPT = 100_000  # items of entries that were looked at, kept decoded

V = TypeVar("V")


class Lazy(Mapping[str, V]):
    """Entries decoded on look-up, the latest kept."""

    def __init__(
        self, raw: Mapping[str, object], decode: Callable[[str], V], weigh: Callable[[V], int]
    ) -> None:
        self._raw, self._decode, self._weigh = raw, decode, weigh
        self._kept: dict[str, V] = {}
        self._weight = 0

    def __getitem__(self, key: str) -> V:
        value = self._kept.get(key)
        if value is None:
            if key not in self._raw:
                raise KeyError(key)
            try:
                value = self._decode(key)
            except CkptError:
                raise
            except Exception as error:
                raise CorruptCheckpointError(f"{key}: {type(error).__name__}: {error}") from error
            self._weight += self._weigh(value)
            if self._weight > KEPT:
                self._kept, self._weight = {}, self._weigh(value)
            self._kept[key] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __contains__(self, key: object) -> bool:
        return key in self._raw

    def errors(self) -> Iterator[CorruptCheckpointError]:
        """What is wrong with the entries."""
        for key in self._raw:
            try:
                self[key]
            except CorruptCheckpointError as error:
                yield error


class LazyChunks(Sequence[Chunk]):
    """The chunks of one tensor, decoded when they are asked for: most passes over a catalog ask for shapes alone."""

    __slots__ = ("_count", "_decoded", "_key")

    def __init__(self, decoded: Mapping[str, tuple[Chunk, ...]], key: str, count: int) -> None:
        self._decoded, self._key, self._count = decoded, key, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._decoded[self._key])

    @overload
    def __getitem__(self, at: int) -> Chunk: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, at: int | slice) -> Chunk | Sequence[Chunk]:
        return self._decoded[self._key][at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))
