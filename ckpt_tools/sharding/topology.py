"""The training job's shape: how many ranks, along which axes, and what each axis shards.

Rank numbering is Megatron's: the dense view of a rank is ``(outer * shard_size + shard) * tp + t``, the expert
view of the same rank ``((outer * expert_shard_size + shard) * ep + e) * etp + t``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt_tools.errors import UsageError, list_problems
from ckpt_tools.model.choices import LayoutName

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LAYOUTS: tuple[LayoutName, ...] = ("mfsdp-v1", "mfsdp-v2", "fsdp2", "even")


class Coordinates(NamedTuple):
    """Where a rank is along the outer, sharding, expert and tensor axes."""

    outer: int
    shard: int
    ep: int  # always 0 in the dense view
    tp: int  # the expert tensor-parallel coordinate in the expert view


@dataclass(frozen=True)
class Topology:
    """Sizes of the mesh axes and the two sharding strategies, checked.

    Strategies are names or their numbers 0-3. `etp` defaults to `tp`, as in Megatron. Parameters are sharded
    over `dp_shard * cp` ranks; pipeline parallelism cannot be combined with Megatron-FSDP.

    Raises:
        UsageError: every reason for which Megatron-FSDP refuses this combination.
    """

    dp_shard: int = 1
    dp_outer: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0  # 0: the same as tp
    pp: int = 1
    strategy: str | int = "optim_grads_params"
    outer_strategy: str | int = "no_shard"

    def __post_init__(self) -> None:
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        problems: list[str] = []
        for field in ("strategy", "outer_strategy"):
            object.__setattr__(self, field, _strategy_name(getattr(self, field), field, problems))
        problems += [
            f"{axis} is {getattr(self, axis)}, it must be at least 1"
            for axis in ("dp_shard", "dp_outer", "tp", "cp", "ep", "etp", "pp")
            if getattr(self, axis) < 1
        ]
        if self.pp > 1:
            problems.append(
                f"pp is {self.pp}: Megatron-FSDP does not run with pipeline parallelism, pp must be 1"
            )
        can_combine = not problems
        if can_combine and self.shards_outer and self.strategy != "optim_grads_params":
            problems.append(
                f"outer_strategy optim shards what the inner axis shards already, so strategy must be "
                f"optim_grads_params, not {self.strategy}"
            )
        replica, experts = self.shard_size * self.tp, self.ep * self.etp
        if can_combine and replica % experts:
            problems.append(
                f"ep {self.ep} x etp {self.etp} = {experts} does not divide dp_shard {self.dp_shard} x cp "
                f"{self.cp} x tp {self.tp} = {replica}, so experts cannot be laid over these ranks"
            )
        if problems:
            raise UsageError("impossible topology:\n" + list_problems(problems), problems)

    @classmethod
    def of_world(cls, world_size: int, *, dp_shard: int | None = None, **axes: Any) -> Topology:
        """A topology of exactly `world_size` ranks; `dp_shard` is what the other `axes` leave, unless given.

        Raises:
            UsageError: the axes do not multiply to `world_size`, or the combination is impossible.
        """
        if world_size < 1 and dp_shard is None:
            raise UsageError(f"world size {world_size}: a job has at least one rank")
        dp_outer, cp, tp, pp = (axes.get(name, 1) for name in ("dp_outer", "cp", "tp", "pp"))
        others = max(dp_outer * cp * tp * pp, 1)
        size = world_size // others if dp_shard is None else dp_shard
        if size * others != world_size or (dp_shard is None and size < 1):
            pipeline = "" if pp == 1 else f" x pp {pp}"
            given = "" if dp_shard is None else f" x dp_shard {dp_shard}"
            raise UsageError(
                f"world size {world_size} is not {'a multiple of ' if dp_shard is None else ''}"
                f"dp_outer {dp_outer} x cp {cp} x tp {tp}{pipeline}{given} = {others * (dp_shard or 1)}; "
                "change one of them or the world size"
            )
        return cls(dp_shard=size, **axes)

    @property
    def shard_size(self) -> int:
        """Ranks over which a dense parameter is cut: data-parallel times context-parallel."""
        return self.dp_shard * self.cp

    @property
    def expert_shard_size(self) -> int:
        """Ranks over which an expert parameter is cut."""
        return self.shard_size * self.tp // (self.ep * self.etp)

    @property
    def world_size(self) -> int:
        return self.dp_outer * self.shard_size * self.tp

    @property
    def shards_outer(self) -> bool:
        """Whether the outer axis cuts parameters too (HFSDP) rather than holding replicas (HSDP)."""
        return self.outer_strategy == "optim"

    def coordinates(self, rank: int, expert: bool = False) -> Coordinates:
        """Where `rank` is in the dense or the expert view.

        Raises:
            UsageError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank {rank} does not exist: this topology has {self.world_size} ranks")
        tp, ep, shards = (
            (self.etp, self.ep, self.expert_shard_size) if expert else (self.tp, 1, self.shard_size)
        )
        rest, t = divmod(rank, tp)
        rest, e = divmod(rest, ep)
        outer, shard = divmod(rest, shards)
        return Coordinates(outer, shard, e, t)

    def rank(self, at: Coordinates, expert: bool = False) -> int:
        """The inverse of `coordinates`."""
        tp, ep, shards = (
            (self.etp, self.ep, self.expert_shard_size) if expert else (self.tp, 1, self.shard_size)
        )
        return ((at.outer * shards + at.shard) * ep + at.ep) * tp + at.tp

    def check_layout(self, layout: str) -> None:
        """Return if `layout` can be used with this topology.

        Raises:
            UsageError: unknown layout, or one that upstream does not offer with these axes.
        """
        problems = []
        if layout not in LAYOUTS:
            problems.append(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
        if layout == "mfsdp-v2":
            problems += [
                f"layout mfsdp-v2 has no {axis} axis, but {axis} is {getattr(self, axis)}; use mfsdp-v1"
                for axis in ("tp", "cp", "etp")
                if getattr(self, axis) > 1
            ]
        if layout == "fsdp2":
            if self.strategy != "optim_grads_params":
                problems.append(
                    f"layout fsdp2 shards parameters always; strategy {self.strategy} needs mfsdp-v1"
                )
            if self.shards_outer:
                problems.append(
                    "layout fsdp2 replicates over the outer axis; outer strategy optim needs mfsdp-v1"
                )
        if problems:
            raise UsageError("impossible layout:\n" + list_problems(problems), problems)


def _strategy_name(value: object, field: str, problems: list[str]) -> str:
    names = STRATEGIES if field == "strategy" else STRATEGIES[:2]
    text = str(value)
    if text in names:
        return text
    if text.isdecimal() and int(text) < len(names):
        return names[int(text)]
    choices = ", ".join(f"{name} ({i})" for i, name in enumerate(names))
    problems.append(f"{field} {value!r} is not one of {choices}")
    return names[0]
