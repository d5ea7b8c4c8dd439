"""Two state dicts of one model under one side's names, where the other has its model inside of a wrapper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt_tools.megatron.dcp.one_model import Spelling, spelled_as
from ckpt_tools.verify.compare.differences import Side


def under_one_spelling(sides: tuple[Side, Side]) -> tuple[tuple[Side, Side], list[str]]:
    """Both sides under the names of one, and a note on it, where these are proven to be the same model's."""
    found = spelled_as((sides[0].catalog, sides[1].catalog))
    if found is None:
        return sides, []
    renamed = _respelled(sides[found.side], found)
    notes = [f"{_told(found)}: {len(found.names)} tensors of the same shapes are one model's. --by keys compares "
             "the keys as they are stored"]  # fmt: skip
    return ((renamed, sides[1]) if found.side == 0 else (sides[0], renamed)), notes


def _respelled(side: Side, found: Spelling) -> Side:
    objects = {found.keys[key]: value for key, value in side.objects.items()}
    for key in found.lists:  # the names in them are values, and as different as the keys
        if key in side.objects:
            objects[found.keys[key]] = _names(side.value(key), found)
    return replace(
        side, tensors={found.keys[key]: tensor for key, tensor in side.tensors.items()}, objects=objects
    )


def _names(value: Any, found: Spelling) -> Any:
    if type(value) is not list:
        return value
    return [found.names.get(name, name) if isinstance(name, str) else name for name in value]


def _told(found: Spelling) -> str:
    (own, front), (other, other_front) = zip(
        ("AB"[found.side], "BA"[found.side]), found.in_front, strict=True
    )
    text = f"the names of {own} are compared with {other}'s"
    if front != other_front:
        behind, there = (f" behind {one!r}" if one else "" for one in (front, other_front))
        text = f"the names of {own}{behind} are compared with {other}'s{there}"
    return text + (", without the segments of wrappers inside of them" if found.inside else "")
