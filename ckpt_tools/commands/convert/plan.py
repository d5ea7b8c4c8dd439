"""`plan`: what a conversion would do and what its result costs, computed from metadata; no tensor byte is moved."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from ckpt_tools.close_names import refuse_unmatched
from ckpt_tools.commands.convert.to_dtensors import plain_layout, prepare_output, stays_plain
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.commands.job.placements import Layout, TargetJob, lay_out, place_model, rank_share
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.pickle.unpickle import TorchDtype
from ckpt_tools.formats.storage.files import AnyPath, path_text
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.target import Target
from ckpt_tools.model.transfers import OutputItem, Plan, item_rows, plan_summary
from ckpt_tools.model.without_gc import without_gc
from ckpt_tools.plan.build import file_rank
from ckpt_tools.sharding.memory import Memory, rank_memory
from ckpt_tools.sharding.placement import Placement
from ckpt_tools.sharding.topology import Topology

SCHEMA_VERSION = 2


class RankCost(NamedTuple):
    """What one target rank gets: its files, items and bytes, and memory in training (None: no job's layout)."""

    rank: int
    files: tuple[str, ...]
    items: int
    nbytes: int
    memory: Memory | None


class TensorRow(NamedTuple):
    """One target tensor: how many boxes it is cut in, and source bytes by transfer strategy."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    boxes: int
    nbytes: int
    strategies: dict[str, int]


class BufferTypes(NamedTuple):
    """Element types of the job's buffers; None: that of the model."""

    main: str | None = "float32"  # the weights that the optimizer steps
    gradients: str | None = None


_USUAL = BufferTypes()


@dataclass(frozen=True)
class PlanReport:
    """A planned conversion; `rank` is the only one that was planned, None for all."""

    source: str
    location: Location
    layout: Layout
    target: Target
    plan: Plan
    core: Placement
    job: TargetJob
    rank: int | None = None
    globs: tuple[str, ...] = ()
    types: BufferTypes = _USUAL

    def items(self) -> Iterator[OutputItem]:
        """The planned items of the tensors that were asked for."""
        return (item for item in self.plan.items if self._wanted(item.key))

    def item_rows(self) -> Iterator[dict[str, object]]:
        """`items` as JSON objects, transfers included."""
        return (row for row in item_rows(self.plan) if self._wanted(str(row["key"])))

    def tensors(self) -> Iterator[TensorRow]:
        """The target tensors that were asked for, in target order."""
        boxes, moved = Counter[str](), defaultdict[str, Counter[str]](Counter)
        for item in self.items():
            boxes[item.key] += 1
            for transfer in item.transfers:
                moved[item.key][transfer.strategy] += transfer.nbytes
        planned = self.target
        if self.rank is not None and self.layout.name != "even":
            planned = rank_share(planned, self.core, self.rank)  # of a large model no others are made
        roles = {t.key: t.role for t in planned.tensors}
        for key, (dtype, shape) in self.plan.tensors.items():
            if key in boxes:
                nbytes = prod(shape) * itemsize(dtype)
                yield TensorRow(key, dtype, shape, roles[key], boxes[key], nbytes, moved[key])

    @cached_property
    def costs(self) -> list[RankCost]:
        """Every planned rank's share."""
        items = Counter(file_rank(item.file) for item in self.plan.items)
        files: dict[int, list[str]] = {}
        for name in self.plan.file_bytes:
            files.setdefault(file_rank(name), []).append(name)
        ranks = range(self.layout.ranks) if self.rank is None else [self.rank]
        return [
            RankCost(
                rank,
                tuple(files.get(rank, ())),
                items[rank],
                sum(self.plan.file_bytes[name] for name in files.get(rank, ())),
                None if self.layout.name == "even" else rank_memory(self.core, rank, *self.types),
            )
            for rank in ranks
        ]

    @property
    def imbalance(self) -> float:
        """Bytes of the largest rank's files over the mean of all ranks; 1.0 is even."""
        sizes = [cost.nbytes for cost in self.costs]
        return max(sizes) * len(sizes) / max(sum(sizes), 1)

    @property
    def padding(self) -> int:
        """Bytes of the planned ranks' persistent buffers that hold no element of any tensor."""
        return sum(cost.memory.padding for cost in self.costs if cost.memory is not None)

    def summary(self) -> dict[str, Any]:
        """Everything but the listings, as JSON values."""
        whole = {k: v for k, v in plan_summary(self.plan).items() if k not in ("schema_version", "files")}
        topology = self.layout.topology
        return {
            "schema_version": SCHEMA_VERSION,
            "source": self.source,
            "format": self.location.kind,
            "iteration": self.location.iteration,
            "layout": self.layout.name,
            "topology": None if topology is None else asdict(topology),
            "rank_count": self.layout.ranks,
            "only_rank": self.rank,
            **whole,
            "tensor_count": len(self.target.tensors),
            "object_count": len(self.target.objects) + len(self.target.inline),
            "item_count": len(self.plan.items),
            "imbalance": self.imbalance,
            "padding_bytes": self.padding,
            **{
                name: getattr(self.target, name)
                for name in ("dropped", "kept", "renamed", "backfilled", "notes")
            },
            "job": self.job.as_json(),
        }

    def _wanted(self, key: str) -> bool:
        return not self.globs or any(fnmatchcase(key, glob) for glob in self.globs)


def plan_checkpoint(
    source: AnyPath,
    layout: Layout,
    options: ConvertOptions | None = None,
    rank: int | None = None,
    globs: Sequence[str] = (),
) -> PlanReport:
    """What converting the checkpoint at `source` for `layout` would do, priced.

    Args:
        rank: plan the file of this target rank alone.
        globs: target keys to list; all when empty.

    Raises the errors of `convert_to_fsdp_dtensor` up to its plan, and:
        UsageError: there is no such rank, or no tensor that a glob matches.
    """
    source = path_text(source)
    if rank is not None and not 0 <= rank < layout.ranks:
        raise UsageError(f"--rank {rank}: this layout has ranks 0 to {layout.ranks - 1}")
    options = options or ConvertOptions()
    with (
        open_checkpoint(source, options.iteration, options.trust_pickle, of_run=True) as opened,
        without_gc(),
    ):
        options = replace(options, keep_plain=True)
        if stays_plain(opened, options):
            layout = plain_layout(layout)
        prepared = prepare_output(opened, options, layout)
        target = prepared.target
        if globs:
            refuse_unmatched("--tensor", globs, (t.key for t in target.tensors))
        job = layout if layout.topology else Layout(layout.name, Topology(dp_shard=layout.ranks))
        core = place_model(prepared.live_model(), job)
        catalog, keep_order, target_job = prepared.catalog, prepared.keep_order, prepared.job
        archives = prepared.archives() if rank in (None, 0) else ()
        del prepared  # its model is large, and not asked again
        placed = None if layout.name == "even" else core
        plan = lay_out(catalog, target, placed, archives, layout, rank, keep_order)
    return PlanReport(
        source,
        opened.location,
        layout,
        target,
        plan,
        core,
        target_job,
        rank,
        tuple(globs),
        types=buffer_types(opened.common),
    )


def buffer_types(common: CommonState) -> BufferTypes:
    """Those of the Megatron-FSDP job that wrote a checkpoint, the defaults for any other's."""
    if not common.arg("use_megatron_fsdp"):
        return _USUAL
    return BufferTypes(
        _type(common, "megatron_fsdp_main_params_dtype", _USUAL.main),
        _type(common, "megatron_fsdp_main_grads_dtype", _USUAL.gradients),
    )


def _type(common: CommonState, name: str, usual: str | None) -> str | None:
    value = common.arg(name, usual)
    if isinstance(value, TorchDtype):
        return value.name
    return None if value is None else usual
