"""Objects that every rank stored a shard of: `<name>/shard_<index>_<grid>`, both a number an axis (`0.1`, `1.2`).

The grid says how many shards there were, so a missing one is seen from the keys alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from ckpt_tools.megatron.keys import object_shard, shard_key

_SHOWN = 3

Index = tuple[int, ...]


class Grid(NamedTuple):
    """The shards of one object that are there, and how many there are along every axis."""

    name: str
    axes: Index
    found: frozenset[Index]

    @property
    def problem(self) -> str | None:
        """What is wrong with the shards, or None."""
        outside = [i for i in self.found if len(i) != len(self.axes) or any(map(int.__ge__, i, self.axes))]
        if outside:
            return f"{shard_key(self.name, outside[0], self.axes)} is outside of its own grid"
        missing = prod(self.axes) - len(self.found)
        if not missing:
            return None
        first = [shard_key(self.name, index, self.axes) for index in self._absent(min(missing, _SHOWN))]
        more = f" and {missing - len(first)} more" if missing > len(first) else ""
        return f"{missing} of {prod(self.axes)} shards are missing: {', '.join(first)}{more}"

    def _absent(self, count: int) -> list[Index]:
        """The first missing shards. A key may claim any grid, so no more of it is walked than that takes."""
        walked = map(self._index, range(len(self.found) + count))
        return [index for index in walked if index not in self.found][:count]

    def _index(self, number: int) -> Index:
        """The shard of this number in row-major order."""
        index = []
        for length in reversed(self.axes):
            number, at = divmod(number, length)
            index.append(at)
        return tuple(reversed(index))


def object_grids(keys: Iterable[str]) -> list[Grid]:
    """Every object among the keys that is stored in shards."""
    found: dict[tuple[str, Index], set[Index]] = {}
    for key in keys:
        if shard := object_shard(key):
            found.setdefault((shard.name, shard.grid), set()).add(shard.place)
    return [Grid(name, axes, frozenset(shards)) for (name, axes), shards in found.items()]
