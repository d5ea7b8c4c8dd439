"""Sequences of a target's entries that are made when somebody looks at them.

A large model's target is half a million tensors and objects, and a rank's share of it a few hundred: who asks for
those makes no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run(Generic[T]):
    """Entries that are `make` of one of `things` after another, `count` in all.

    `names` are the parameters that those of one thing belong to.
    """

    things: Sequence[Any]
    make: Callable[[Any], Iterable[T]]
    count: int
    names: Callable[[Any], Iterable[str]] = lambda _thing: ()


class Deferred(Sequence[T]):
    """The entries of several runs, or of sequences; made when they are gone through, and kept from the end on."""

    def __init__(self, *parts: Run[T] | Sequence[T]) -> None:
        self._parts = parts
        self._count = sum(part.count if isinstance(part, Run) else len(part) for part in parts)
        self._kept: tuple[T, ...] | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return self._made() if self._kept is None else iter(self._kept)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...
    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        return (tuple(self) if self._kept is None else self._kept)[at]

    def of(self, wanted: set[str]) -> Iterator[T]:
        """Those that belong to the parameters `wanted`, made alone, and perhaps more: what is made already."""
        if self._kept is not None:
            yield from self._kept
        for part in self._parts:
            if isinstance(part, Run):
                for thing in part.things:
                    if not wanted.isdisjoint(part.names(thing)):
                        yield from part.make(thing)
            else:
                yield from part.of(wanted) if isinstance(part, Deferred) else part

    def _made(self) -> Iterator[T]:
        found: list[T] = []
        for part in self._parts:
            for entry in _entries(part):
                found.append(entry)
                yield entry
        self._kept, self._parts = tuple(found), ()  # what they were made of may be large


def _entries(part: Run[T] | Sequence[T]) -> Iterable[T]:
    if not isinstance(part, Run):
        return part
    return (entry for thing in part.things for entry in part.make(thing))


class Chosen(Sequence[T]):
    """Those entries of a sequence that are `wanted`, looked for when somebody asks."""

    def __init__(self, entries: Sequence[T], wanted: Callable[[T], object]) -> None:
        self._entries, self._wanted = entries, wanted
        self._found: tuple[T, ...] | None = None

    def __bool__(self) -> bool:
        return any(map(self._wanted, self._entries))

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...
    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        return self._all()[at]

    def _all(self) -> tuple[T, ...]:
        if self._found is None:
            self._found = tuple(filter(self._wanted, self._entries))
        return self._found
