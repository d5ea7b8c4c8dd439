"""The training job that a result is laid out for, of what was given."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from ckpt_tools.cli.options import MAX_RANKS
from ckpt_tools.cli.table import TABLE, Given
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.commands.job.placements import Layout
    from ckpt_tools.model.choices import LayoutName

_AXES: Final = (
    "dp_outer",
    "cp",
    "ep",
    "etp",
    "pp",
    "strategy",
    "outer_strategy",
)  # mean nothing without a size
JOB_SIZES = frozenset({"layout", "world_size", "gpus", "dp_shard", "tp", "units", *_AXES})


def layout_of(given: Given) -> Layout | None:
    """The layout that the placement options ask for; None when they ask for nothing."""
    from ckpt_tools.commands.job.placements import Layout

    _refuse_mistyped(given)
    layout, gpus, world_size = _name(given), given["gpus"], given["world_size"]
    if gpus is None and given["dp_shard"] is None and layout in (None, "even"):
        axes = [
            f"--{name.replace('_', '-')} {given[name]}" for name in _AXES if given[name] != _default(name)
        ]
        if axes:
            raise UsageError(
                f"{', '.join(axes)}: such options describe a training job, which needs its size too: give --gpus or "
                "--dp-shard"
            )
        return None if world_size is None else Layout(world=_positive(world_size, "--world-size"))
    if gpus is not None and world_size not in (None, gpus):
        raise UsageError(
            f"--gpus {gpus} contradicts --world-size {world_size}: both are the ranks of the job"
        )
    return _of_job(given, world_size if gpus is None else gpus)


def _name(given: Given) -> LayoutName | None:
    """Whose placement is asked for: one that has units where these are named."""
    layout: LayoutName | None = given["layout"]
    if not given["units"]:
        return layout
    if layout not in (None, "mfsdp-v1", "mfsdp-v2"):
        raise UsageError(
            f"--units {', '.join(given['units'])}: with --layout {layout} every tensor is cut on its own; "
            "leave it out"
        )
    return layout or "mfsdp-v1"


def _of_job(given: Given, world: int | None) -> Layout:
    from ckpt_tools.commands.job.placements import Layout
    from ckpt_tools.sharding.topology import Topology

    layout, dp_shard, etp = _name(given), given["dp_shard"], given["etp"]
    sizes = {name: given[name] for name in ("dp_outer", "cp", "ep", "pp", "strategy", "outer_strategy")}
    tp = 1 if given["tp"] is None else given["tp"]
    if world is None:
        if dp_shard is None:
            raise UsageError(f"--layout {layout} needs the size of the job: give --gpus or --dp-shard")
        world = dp_shard * given["dp_outer"] * given["cp"] * (tp or 1) * given["pp"]
    topology = Topology.of_world(
        world, dp_shard=dp_shard, tp=tp, etp=0 if etp is None else _positive(etp, "--etp"), **sizes
    )
    return Layout(
        layout or "mfsdp-v1",
        topology,
        tp_given=given["tp"] is not None,
        name_given=layout is not None,
        units=given["units"],
    )


def _default(name: str) -> object:
    default = TABLE[name].default
    return getattr(default, "value", default)


def _refuse_mistyped(given: Given) -> None:
    factors = [given[name] for name in ("dp_shard", "dp_outer", "tp", "cp", "pp") if given[name] is not None]
    others = [given[name] or 1 for name in ("world_size", "gpus", "ep", "etp")]
    if any(size > MAX_RANKS for size in (*factors, *others, prod(factors))):
        raise UsageError(
            f"a job of more than {MAX_RANKS:,} ranks is asked for; is a size of the topology mistyped?"
        )


def _positive(ranks: int, option: str) -> int:
    if ranks < 1:
        raise UsageError(f"{option} {ranks}: at least one rank is needed")
    return ranks
