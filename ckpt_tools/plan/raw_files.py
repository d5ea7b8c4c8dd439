"""The plan of a copy: whole files as they lie, cut where a checksum of their writer begins and ends.

What is moved is bytes: every output item is a bare run of them. A run that is a payload carries the checksum that
stands in its archive, so that carrying out the plan proves it; frames and headers between payloads carry none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.transfers import RUNS, VERBATIM, OutputBlob, OutputItem, Plan, Strategy, Transfer
from ckpt_tools.model.views import Piece
from ckpt_tools.plan.digest import plan_digest

PART_BYTES = 64 << 20  # a longer run is copied in several items, by several workers


class Run(NamedTuple):
    """A payload in a file: where, of what, and its CRC-32 if its writer kept one."""

    start: int
    nbytes: int
    key: str
    crc32: int | None


class RawFile(NamedTuple):
    """A file to copy: its length, payloads in order, and its first bytes where those are read already."""

    nbytes: int
    runs: Sequence[Run] = ()
    head: bytes = b""


def build_copy_plan(files: Mapping[str, RawFile]) -> Plan:
    """The plan that writes each file as it is."""
    items: list[OutputItem] = []
    blobs: list[OutputBlob] = []
    for name, file in files.items():
        if file.head:
            blobs.append(OutputBlob(f"{name}[0:{len(file.head)}]", None, name, 0, file.head))
        for run in _all_runs(name, file):
            items += _items(name, run)
    sizes = {name: file.nbytes for name, file in files.items()}
    digest = plan_digest(tuple(items), tuple(blobs), sizes, {}, {})
    return Plan(tuple(items), tuple(blobs), sizes, {}, {}, digest)


def _all_runs(name: str, file: RawFile) -> Iterator[Run]:
    """The payloads, and runs for what lies before, between and behind them."""
    at = len(file.head)
    for run in file.runs:
        if run.start > at:
            yield Run(at, run.start - at, f"{name}[{at}:{run.start}]", None)
        if run.nbytes:
            yield run
        at = run.start + run.nbytes
    if file.nbytes > at:
        yield Run(at, file.nbytes - at, f"{name}[{at}:{file.nbytes}]", None)


def _items(name: str, run: Run) -> Iterator[OutputItem]:
    source = Item(name, run.start, run.nbytes, True, run.crc32)
    strategy: Strategy = VERBATIM if run.nbytes <= PART_BYTES else RUNS
    for first in range(0, run.nbytes, PART_BYTES):
        length = min(PART_BYTES, run.nbytes - first)
        piece = Piece(Box((0,), (length,)), first, (1,))
        transfer = Transfer(run.key, source, "uint8", (run.nbytes,), piece, strategy)
        box = Box((first,), (length,))
        yield OutputItem(run.key, box, "uint8", name, run.start + first, length, (transfer,), bare=True)
