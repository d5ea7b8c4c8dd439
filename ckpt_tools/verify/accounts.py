"""Two checkpoints of one model as accounts: what each holds, what was carried over, and what only one of them has.

All of it is counted from metadata. Both sides balance when what they hold is what was carried and what is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt_tools.credentials import redacted
from ckpt_tools.model.catalog import TensorEntry

MOST_NAMES = 8


class Amount(NamedTuple):
    """So many tensors, of so many values, in so many bytes."""

    tensors: int = 0
    values: int = 0
    nbytes: int = 0

    def plus(self, other: Amount) -> Amount:
        """Both together."""
        return Amount(self.tensors + other.tensors, self.values + other.values, self.nbytes + other.nbytes)


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one side holds, by the element types of its stored tensors."""

    path: str
    format: str
    by_dtype: Mapping[str, Amount]

    @property
    def total(self) -> Amount:
        return total(self.by_dtype.values())

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        types = {dtype: _counts(amount) for dtype, amount in self.by_dtype.items()}
        return {"path": redacted(self.path), "format": self.format, **_counts(self.total), "by_dtype": types}


@dataclass(frozen=True, slots=True)
class Carried:
    """Values that both sides hold, of one pair of element types."""

    source_dtype: str
    output_dtype: str
    source: Amount
    output: Amount


@dataclass(frozen=True, slots=True)
class Remainder:
    """What one side has alone, and why; `names` are the first of the tensors.

    Amounts may be negative: where several values are packed into one stored element, fewer are stored.
    """

    why: str
    amount: Amount
    names: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return {"why": self.why, **_counts(self.amount), "first": list(self.names)}


@dataclass(frozen=True, slots=True)
class Audit:
    """The accounts of an output and its source."""

    source: Inventory
    output: Inventory
    carried: tuple[Carried, ...]
    only_in_source: tuple[Remainder, ...]
    only_in_output: tuple[Remainder, ...]
    notes: tuple[str, ...] = ()

    def imbalances(self) -> list[str]:
        """Where what a side holds is not what was carried and what it has alone."""
        sides = (
            ("source", self.source, [one.source for one in self.carried], self.only_in_source),
            ("output", self.output, [one.output for one in self.carried], self.only_in_output),
        )
        wrong = []
        for name, side, carried, alone in sides:
            explained = total((*carried, *(one.amount for one in alone)))
            wrong += [
                f"the {name} holds {held:,} {what}, and {said:,} are explained"
                for what, held, said in zip(
                    ("tensors", "values", "bytes"), side.total, explained, strict=True
                )
                if held != said
            ]
        if sum(one.source.values for one in self.carried) != sum(one.output.values for one in self.carried):
            wrong.append("other numbers of values were carried on both sides")
        return wrong

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return {
            "source": self.source.as_json(),
            "output": self.output.as_json(),
            "carried": [
                {"source_dtype": one.source_dtype, "output_dtype": one.output_dtype}
                | {"source": _counts(one.source), "output": _counts(one.output)}
                for one in self.carried
            ],
            "only_in_source": [one.as_json() for one in self.only_in_source],
            "only_in_output": [one.as_json() for one in self.only_in_output],
            "balanced": not self.imbalances(),
            "notes": list(self.notes),
        }


def _counts(amount: Amount) -> dict[str, int]:
    return {"tensors": amount.tensors, "values": amount.values, "bytes": amount.nbytes}


def total(amounts: Iterable[Amount]) -> Amount:
    """The sum."""
    found = Amount()
    for one in amounts:
        found = found.plus(one)
    return found


def amount_of(entry: TensorEntry) -> Amount:
    """A stored tensor."""
    return Amount(1, entry.numel, entry.nbytes)


def inventory(path: str, kind: str, tensors: Iterable[TensorEntry]) -> Inventory:
    """What stored tensors are by their types."""
    found: dict[str, Amount] = {}
    for entry in tensors:
        found[entry.dtype] = found.get(entry.dtype, Amount()).plus(amount_of(entry))
    return Inventory(path, kind, dict(sorted(found.items())))


class Ledger:
    """Collects what one side has alone."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Amount, list[str]]] = {}

    def add(self, why: str, name: str, amount: Amount) -> None:
        """`amount` of the tensor `name`, if it is of one."""
        sofar, names = self._found.get(why, (Amount(), []))
        if name and len(names) < MOST_NAMES and name not in names:
            names.append(name)
        self._found[why] = sofar.plus(amount), names

    def done(self) -> tuple[Remainder, ...]:
        """As data."""
        return tuple(Remainder(why, amount, tuple(names)) for why, (amount, names) in self._found.items())
