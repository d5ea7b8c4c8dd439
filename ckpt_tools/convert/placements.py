"""Which target rank writes which box of which target tensor: the sharding room's answers, as the plan asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt_tools.box import Box
from ckpt_tools.errors import UsageError
from ckpt_tools.megatron.target import TargetTensor
from ckpt_tools.megatron.to_fsdp_dtensor import FsdpTarget
from ckpt_tools.plan.build import Placement as PlanPlacement
from ckpt_tools.sharding.describe import LiveTensor, describe
from ckpt_tools.sharding.fsdp2 import chunk_rows
from ckpt_tools.sharding.placement import Placement
from ckpt_tools.sharding.topology import Topology


@dataclass(frozen=True, slots=True)
class Layout:
    """The training job the output is laid out for. Without a topology: rows over `world` ranks (`even`)."""

    name: str = "even"  # one of sharding.topology.LAYOUTS
    topology: Topology | None = None
    world: int = 1

    @property
    def ranks(self) -> int:
        """Number of target ranks, each with a file of its own."""
        return self.world if self.topology is None else self.topology.world_size


def even_placement(world: int) -> PlanPlacement:
    """Every tensor cut along dimension 0 by the rule of `torch.chunk`, as `Shard(0)` over `world` ranks."""

    def place(tensor: TargetTensor) -> Sequence[tuple[int, Box]]:
        if not tensor.shape:
            return [(0, Box((), ()))]
        rows, rest = tensor.shape[0], tensor.shape[1:]
        cuts = [chunk_rows(rows, world, rank) for rank in range(world)]
        return [
            (rank, Box((start, *(0,) * len(rest)), (stop - start, *rest)))
            for rank, (start, stop) in enumerate(cuts)
            if stop > start or (rank == 0 and rows == 0)
        ]

    return place


def live_tensors(built: FsdpTarget) -> list[LiveTensor]:
    """Live parameters as the sharding room describes them.

    Frozen ones are those without a group; a conversion of weights alone tells nothing, and takes all as trainable.
    """
    return [
        LiveTensor(
            p.name,
            p.shape,
            p.stored[0].dtype,
            gated=p.gated,
            buffer=p.name.endswith(".expert_bias"),
            trainable=not built.memberships or p.group_name in built.memberships,
        )
        for p in built.parameters
    ]


def exact_placement(tensors: Iterable[LiveTensor], layout: Layout) -> tuple[PlanPlacement, list[str]]:
    """The boxes Megatron-FSDP or FSDP2 would give every rank, and the order in which ranks read parameters.

    Raises:
        UsageError, MappingError: the topology or layout is impossible for these parameters.
    """
    if layout.topology is None:
        raise UsageError(f"--layout {layout.name} needs a topology: give --dp-shard and the other sizes")
    placement = Placement(describe(tensors, layout.topology), layout.topology, layout.name)
    boxes: dict[str, list[tuple[int, Box]]] = {}
    for rank in range(layout.ranks):
        for name, box in placement.written(rank):
            boxes.setdefault(name, []).append((rank, box))
    return lambda tensor: boxes[tensor.parameter], list(boxes)
