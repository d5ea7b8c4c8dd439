"""Which parameter an optimizer means that numbers them: `optimizer.state_dict()` counts through its groups.

Inside of a group the parameters keep the order of the model's. Shapes say where the groups interleave; where they
leave a choice, masters that round to their weights decide. What is still open then is not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ckpt_tools.errors import MappingError

Shape: TypeAlias = tuple[int, ...]
Fits: TypeAlias = Callable[[str, int], bool]
"""Whether a parameter may be the one with a number."""
_Way: TypeAlias = "tuple[_Way, int, str] | None"
_MAX_OPEN = 1 << 14  # beginnings that are looked at side by side
_WAY_OUT = (
    "Save its states by name (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict), or leave them out "
    "with --weights-only"
)


class OpenChoiceError(MappingError):
    """Several orders fit, and nothing stored tells which is right: the checkpoint may be sound all the same."""


def name_numbers(
    groups: Sequence[Sequence[int]],
    parameters: Mapping[str, Shape],
    shapes: Mapping[int, Shape],
    proves: Fits | None = None,
) -> dict[int, str]:
    """The name of every numbered parameter.

    Args:
        groups: numbers of each group's parameters, in its order.
        parameters: names and shapes in the model's order, those that are not trained among them.
        shapes: of the states of a number; a number without states fits any shape.
        proves: a dearer test by content, asked only where shapes leave a choice.
    """
    has_shape: Fits = lambda name, number: shapes.get(number, parameters[name]) == parameters[name]  # noqa: E731
    found = _interleavings(groups, list(parameters), has_shape)
    if len(found) > 1 and proves is not None:
        seen: dict[tuple[str, int], bool] = {}

        def fits(name: str, number: int) -> bool:
            at = name, number
            if at not in seen:
                seen[at] = has_shape(name, number) and (number not in shapes or proves(name, number))
            return seen[at]

        found = _interleavings(groups, list(parameters), fits)
    total = sum(map(len, groups))
    if not found:
        raise MappingError(
            f"the optimizer numbers {total} parameters in {len(groups)} groups, and in no order of the groups have "
            f"its states the shapes of the model's {len(parameters)} weights: they belong to another model"
        )
    first, *others = found
    if others:
        number = next(n for n in first if first[n] != others[0].get(n))
        raise OpenChoiceError(
            f"the optimizer numbers its parameters, and its parameter {number} may be {first[number]} or "
            f"{others[0].get(number)}: nothing stored tells. {_WAY_OUT}"
        )
    return first


def _interleavings(groups: Sequence[Sequence[int]], names: Sequence[str], fits: Fits) -> list[dict[int, str]]:
    """Up to two ways to give the numbers to names, both in order; names may be left over.

    A way is a chain of (the way before, number, name). Distinct paths to one state are distinct assignments.
    """
    open_ways: dict[tuple[int, ...], list[_Way]] = {(0,) * len(groups): [None]}
    spare = len(names) - sum(map(len, groups))
    for at, name in enumerate(names):
        following: dict[tuple[int, ...], list[_Way]] = {}
        for taken, ways in open_ways.items():
            if at - sum(taken) < spare:  # it may be frozen, or a buffer
                _add(following, taken, ways)
            for g, group in enumerate(groups):
                if taken[g] < len(group) and fits(name, number := group[taken[g]]):
                    step = (*taken[:g], taken[g] + 1, *taken[g + 1 :])
                    _add(following, step, [(way, number, name) for way in ways])
        if len(following) > _MAX_OPEN:
            raise OpenChoiceError(
                f"the optimizer numbers its parameters, and too many orders of its {len(groups)} groups fit the "
                f"model's shapes. {_WAY_OUT}"
            )
        open_ways = following
    return [_names(way) for way in open_ways.get(tuple(map(len, groups)), [])]


def _add(ways: dict[tuple[int, ...], list[_Way]], taken: tuple[int, ...], more: Sequence[_Way]) -> None:
    """Keep two ways to a position at most: a third tells nothing new."""
    kept = ways.setdefault(taken, [])
    kept += more[: 2 - len(kept)]


def _names(way: _Way) -> dict[int, str]:
    found: dict[int, str] = {}
    while way is not None:
        way, number, name = way
        found[number] = name
    return found
