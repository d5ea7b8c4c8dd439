"""How long carrying out a plan takes on machines that are not here: a model of time.

A conversion starts, reads the metadata, plans on every node at once, and moves bytes; nothing but the last is shared
out. Moving is held up by what is slowest: a node's file system, its workers' processors, a network that all nodes
share, or a worker with more to do than the others. Shares go by bytes and are fixed before the first: of nodes that
are not equally fast the slowest is waited for, and its speed is the one to give. The constants are measured, and
predictions of them compared with runs, in `tests/benchmarks/RESULTS.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckpt_tools.model.transfers import OutputItem, Plan
from ckpt_tools.plan.assign import ITEM_COST_BYTES, share_bounds

_START_SECONDS = 0.5  # of a process, with imports, checks of the output, and its publication
_LAUNCH_SECONDS = 10.0  # of processes that a launcher starts: each imports torch, then they meet
_SECONDS_PER_CHUNK = 2.9e-6  # of metadata
_SECONDS_PER_TENSOR = 1.2e-4  # of the target, planned
_WORKER_SPEED = 3e9  # bytes per second that two threads read, sum and write in memory
_ITEM_SECONDS = ITEM_COST_BYTES / 1e9


@dataclass(frozen=True, slots=True)
class Machines:
    """Who is to carry out a plan; speeds are of copying, in bytes per second."""

    disk: float  # one node's file system or way to the store, all its workers together; of the slowest node
    nodes: int = 1
    workers: int = 16  # of a node
    network: float | None = None  # that all nodes read and write through, together; None: none is


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds of every part, and bytes of the busiest worker over the mean."""

    starting: float
    metadata: float
    planning: float
    moving: float
    straggling: float

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return self.starting + self.metadata + self.planning + self.moving


def predict(plan: Plan, chunks: int, machines: Machines) -> Duration:
    """How long `plan` takes, made of metadata with so many `chunks`."""
    bounds = share_bounds(plan.items, machines.nodes * machines.workers)
    shares = [plan.items[start:stop] for start, stop in pairwise(bounds)]
    sizes = [sum(item.length for item in share) for share in shares]
    nodes = [sizes[i : i + machines.workers] for i in range(0, len(sizes), machines.workers)]
    limits = [*map(_busy, shares), *(sum(node) / machines.disk for node in nodes)]
    if machines.network is not None:
        limits.append(sum(sizes) / machines.network)
    return Duration(
        starting=_START_SECONDS + (_LAUNCH_SECONDS if machines.nodes > 1 else 0),
        metadata=chunks * _SECONDS_PER_CHUNK,
        planning=len(plan.tensors) * _SECONDS_PER_TENSOR,
        moving=max(limits),
        straggling=max(sizes) * len(sizes) / max(sum(sizes), 1),
    )


def _busy(items: Sequence[OutputItem]) -> float:
    """Seconds that a worker's processors need for its items, with nothing to wait for."""
    return sum(item.length / _WORKER_SPEED + _ITEM_SECONDS for item in items)
