"""Where the files of a plan hold zeros alone, so that a file system with sparse files need keep nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckpt_tools.formats.torch_archive.tensor_template import tensor_frame
from ckpt_tools.model.transfers import Plan, only_zeros

MIN_BYTES = 1 << 20  # a shorter run of zeros saves less than the room set aside around it is worth


class Hole(NamedTuple):
    """A byte range of a file."""

    start: int
    stop: int


def holes(plan: Plan) -> Mapping[str, list[Hole]]:
    """By file, in order: the payloads of long items that are nothing but zeros."""
    found: dict[str, list[Hole]] = {}
    for item in plan.items:
        if item.nbytes >= MIN_BYTES and not item.bare and only_zeros(item.transfers):
            start = item.offset + len(tensor_frame(item.dtype, item.box.size).head)
            found.setdefault(item.file, []).append(Hole(start, start + item.nbytes))
    return {file: sorted(ranges) for file, ranges in found.items()}


def hole_bytes(found: Mapping[str, list[Hole]]) -> int:
    """Bytes in all of them."""
    return sum(hole.stop - hole.start for ranges in found.values() for hole in ranges)
