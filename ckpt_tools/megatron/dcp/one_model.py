"""Two state dicts of one model, one of which has it inside of a wrapper or of another dict: which keys are the same.

`module.` of DDP, `_fsdp_wrapped_module.` of FSDP, `model.` of a program that saves its model so: nothing says what
such a prefix may be called, so it is proven instead. Without it all names of one side must be all names of the other,
of the same shapes; a prefix on both sides (`actor.` here, `critic.` there) may be two models and proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt_tools.megatron.dcp.state_dict import (
    outside_optimizers,
    read_state_dict,
    shared_front,
    without_segments,
)
from ckpt_tools.model.catalog import Catalog

_Meaning = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one of two sides has its keys for those of the other.

    Attributes:
        side: which of the two, 0 or 1.
        keys: of every tensor and object -> what the other side calls it, or the key itself.
        names: of parameters, as groups of an optimizer list them -> the other side's.
        lists: the keys of those lists.
        in_front: what stands in front of the names, here and there.
        inside: the names differ inside, too.
    """

    side: int
    keys: Mapping[str, str]
    names: Mapping[str, str]
    lists: tuple[str, ...]
    in_front: tuple[str, str]
    inside: bool


class _Names:
    """The model of one side: its tensors by name, once the segments that wrappers put inside are taken out."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        found = read_state_dict(catalog)
        self.front, weights = found.model, found.weights
        if not catalog.planner_paths:  # then nothing but its keys tells the model's dict
            self.front, weights = "", {key: key for key in outside_optimizers(catalog)[0]}
        self.given = {without_segments(name): name for name in weights}
        self.is_clear = bool(weights) and len(self.given) == len(weights)
        self.has_segments = any(bare != name for bare, name in self.given.items())
        self._key = weights
        self._optimizers = found.optimizers
        self.head = shared_front(self.given)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by what is left of its name behind what all have in common."""
        tensors = self._catalog.tensors
        return {bare[len(self.head) :]: tensors[self._key[n]].shape for bare, n in self.given.items()}

    def keys(self) -> set[str]:
        """The keys of the model's tensors."""
        return set(self._key.values())

    def meanings(self, prefix: str) -> dict[_Meaning, str]:
        """What every key means once the names are without `prefix`."""

        def bare(name: str) -> str:
            return without_segments(name).removeprefix(prefix)

        found: dict[_Meaning, str] = {("model", bare(name)): key for name, key in self._key.items()}
        for one in self._optimizers:
            for part, owners in (("state", one.states), ("group", one.groups)):
                for owner, fields in owners.items():
                    found |= {(one.root, part, bare(owner), kind): key for kind, key in fields.items()}
        told = set(found.values())
        for key in (*self._catalog.tensors, *self._catalog.objects):
            if key not in told:
                inside = self.front != "" and key.startswith(self.front)
                found["model" if inside else "", bare(key.removeprefix(self.front)) if inside else key] = key
        return found

    def lists(self) -> Iterator[str]:
        """The keys of the lists of parameters that groups have."""
        for one in self._optimizers:
            yield from (fields["params"] for fields in one.groups.values() if "params" in fields)


def spelled_as(sides: tuple[Catalog, Catalog]) -> Spelling | None:
    """What the side with more in its names calls the other's.

    None: the model's tensors have the same keys as they are, or it is not proven that the names are of one model.
    """
    if sides[0].tensors.keys() == sides[1].tensors.keys():
        return None
    models = tuple(map(_Names, sides))
    if models[0].keys() == models[1].keys():
        return None
    if not all(one.is_clear for one in models) or models[0].shapes() != models[1].shapes():
        return None
    prefixes = _without_shared_end(models[0].head, models[1].head)
    if all(prefixes):
        return None
    lengths = [sum(map(len, one.keys())) for one in models]
    side = 0 if lengths[0] > lengths[1] else 1
    (own, prefix), (other, other_prefix) = [(models[n], prefixes[n]) for n in (side, 1 - side)]
    theirs = other.meanings(other_prefix)
    keys = {key: theirs.get(meaning, key) for meaning, key in own.meanings(prefix).items()}
    if len(set(keys.values())) < len(sides[side].tensors) + len(sides[side].objects):
        return None  # two keys that mean the same
    names = {name: other.given[other_prefix + bare.removeprefix(prefix)] for bare, name in own.given.items()}
    in_front = own.front + prefix, other.front + other_prefix
    return Spelling(side, keys, names, tuple(own.lists()), in_front, own.has_segments or other.has_segments)


def _without_shared_end(a: str, b: str) -> tuple[str, str]:
    """Two prefixes without the segments that both end with."""
    first, second = a.split(".")[:-1], b.split(".")[:-1]
    while first and second and first[-1] == second[-1]:
        del first[-1], second[-1]
    return "".join(f"{one}." for one in first), "".join(f"{one}." for one in second)
