"""The training job that placement options describe, and its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt_tools.cli.options import DEFAULT_OUTER_STRATEGY, DEFAULT_STRATEGY, MAX_RANKS, LayoutName

if TYPE_CHECKING:
    from ckpt_tools.commands.placements import Layout


@dataclass(frozen=True, slots=True)
class JobSizes:
    """The training job that the placement options describe, as they were given."""

    layout: str | None
    world_size: int | None
    gpus: int | None
    dp_shard: int | None
    dp_outer: int
    tp: int | None
    cp: int
    ep: int
    etp: int | None
    pp: int
    strategy: str
    outer_strategy: str

    @property
    def names_a_job(self) -> bool:
        return not (
            self.gpus is None and self.dp_shard is None and self.layout in (None, LayoutName.EVEN.value)
        )

    @property
    def has_only_a_world(self) -> bool:
        """Whether nothing is said that only a training job has."""
        given = (self.dp_outer, self.cp, self.ep, self.etp, self.pp, self.strategy, self.outer_strategy)
        return given == (1, 1, 1, None, 1, DEFAULT_STRATEGY, DEFAULT_OUTER_STRATEGY)

    def check(self) -> None:
        """
        Raises:
            UsageError: sizes that no machine has, or that contradict each other.
        """
        from ckpt_tools.errors import UsageError

        shards = [
            size for size in (self.dp_shard, self.dp_outer, self.tp, self.cp, self.pp) if size is not None
        ]
        alone = (self.world_size or 1, self.gpus or 1, self.ep, self.etp or 1)
        if any(size > MAX_RANKS for size in (*alone, *shards, prod(shards))):
            raise UsageError(
                f"a job of more than {MAX_RANKS:,} ranks is asked for; is a size of the topology mistyped?"
            )
        if not self.names_a_job and not self.has_only_a_world:
            raise UsageError(
                "--dp-outer, --cp, --ep, --etp, --pp, --strategy and --outer-strategy describe a training job, which "
                "needs its size too: give --gpus or --dp-shard"
            )
        if self.gpus is not None and self.world_size not in (None, self.gpus):
            raise UsageError(
                f"--gpus {self.gpus} contradicts --world-size {self.world_size}: both are the ranks of the job"
            )

    @property
    def world(self) -> int:
        """Ranks of the job.

        Raises:
            UsageError: nothing tells.
        """
        from ckpt_tools.errors import UsageError

        world = self.world_size if self.gpus is None else self.gpus
        if world is not None:
            return world
        if self.dp_shard is None:
            raise UsageError(
                f"--layout {self.layout or ''} needs the size of the job: give --gpus or --dp-shard"
            )
        return self.dp_shard * self.dp_outer * self.cp * (self.tp or 1) * self.pp


JOB_SIZES = tuple(JobSizes.__dataclass_fields__)


def layout_of(given: Mapping[str, Any]) -> Layout | None:
    """The layout that the placement options ask for; None when they ask for nothing.

    Raises:
        UsageError: sizes that do not multiply to the world, or a topology Megatron-FSDP refuses.
    """
    from ckpt_tools.commands.placements import Layout
    from ckpt_tools.sharding.topology import Topology

    sizes = JobSizes(**{name: given[name] for name in JOB_SIZES})
    sizes.check()
    if not sizes.names_a_job:
        return None if sizes.world_size is None else Layout(world=_positive(sizes.world_size))
    topology = Topology.of_world(
        sizes.world,
        dp_shard=sizes.dp_shard,
        dp_outer=sizes.dp_outer,
        tp=1 if sizes.tp is None else sizes.tp,
        cp=sizes.cp,
        ep=sizes.ep,
        etp=0 if sizes.etp is None else _positive(sizes.etp, "--etp"),
        pp=sizes.pp,
        strategy=sizes.strategy,
        outer_strategy=sizes.outer_strategy,
    )
    return Layout(sizes.layout or LayoutName.MFSDP_V1.value, topology, tp_given=sizes.tp is not None)


def _positive(ranks: int, option: str = "--world-size") -> int:
    from ckpt_tools.errors import UsageError

    if ranks < 1:
        raise UsageError(f"{option} {ranks}: at least one rank is needed")
    return ranks
