"""Which target rank writes which box of which target tensor: the sharding room's answers, as the plan asks.

And the job that will load an output: its sizes and who said them, and what of the output fits no other job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from ckpt_tools.errors import UsageError
from ckpt_tools.human import counted
from ckpt_tools.megatron.fsdp_dtensor.parameters import part_order, split_part
from ckpt_tools.megatron.fsdp_dtensor.read import FsdpSource
from ckpt_tools.megatron.fsdp_dtensor.write import FsdpTarget
from ckpt_tools.megatron.keys import BUFFERS
from ckpt_tools.megatron.names import MLA_DOWN, MLA_FUSED_DOWN, ModelStyle, stored_name
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.record import Size, TargetRecord
from ckpt_tools.megatron.run_state.settings import FP8, is_held_in_fp8, training_dtype
from ckpt_tools.megatron.vocab import Vocabulary
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.choices import LayoutName
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.target import Target, TargetTensor
from ckpt_tools.model.transfers import Plan
from ckpt_tools.plan.build import Placement as PlanPlacement
from ckpt_tools.plan.build import build_plan
from ckpt_tools.sharding.parameters import Part
from ckpt_tools.sharding.placement import Placement, chunk_rows
from ckpt_tools.sharding.topology import Topology
from ckpt_tools.sharding.units import ROOT, UNITS, LiveTensor, describe


@dataclass(frozen=True, slots=True)
class Layout:
    """The training job the output is laid out for. Without a topology: rows over `world` ranks (`even`)."""

    name: LayoutName = "even"
    topology: Topology | None = None
    world: int = 1
    tp_given: bool = True  # whether somebody chose the topology's TP; False: it is 1 because nothing was said
    name_given: bool = True  # whether somebody chose the name; False: it is that of Megatron-FSDP by default
    of_job: bool = True  # whether `world` is the size of a job; False: of the processes that convert
    units: tuple[str, ...] = ()  # patterns of the modules that are FSDP units; () for Megatron-Core's

    @property
    def ranks(self) -> int:
        """Number of target ranks, each with separate files."""
        return self.world if self.topology is None else self.topology.world_size


class LiveModel(NamedTuple):
    """What the sharding room asks about a model: its live tensors, and whether norms are modules of their own."""

    tensors: tuple[LiveTensor, ...]
    local_spec: bool


def lay_out(
    catalog: Catalog,
    target: Target,
    core: Placement | None,
    archives: Iterable[tuple[str, bytes]],
    layout: Layout,
    only: int | None = None,
    keep_order: bool = False,
) -> Plan:
    """Plan which rank of `layout` writes each piece of a target: as `core` says, or evenly without `core`.

    `only`: plan the file of this rank alone. `keep_order`: do not sort tensors into the order in which a Megatron job
    reads them. Raises the errors of `build_plan`.
    """
    ranks = range(layout.ranks) if only is None else range(only, only + 1)
    if core is None:
        place = even_placement(layout.ranks, ranks)
    else:
        place = exact_placement(core, ranks)
        if only is not None:
            target = rank_share(target, core, only)
        if not keep_order:
            target = in_reading_order(target, core.names())
    return build_plan(catalog, target, place, layout.ranks, archives, only=only)


def even_placement(world: int, ranks: Sequence[int]) -> PlanPlacement:
    """What `ranks` write of tensors cut along dimension 0 by the rule of `torch.chunk`: `Shard(0)` over `world`.

    Tensors of no parameter, such as rng states, stay whole.
    """

    @cache
    def cut(shape: tuple[int, ...]) -> Sequence[tuple[int, Box]]:
        rows, rest = shape[0], shape[1:]
        cuts = [(rank, *chunk_rows(rows, world, rank)) for rank in ranks]
        return [
            (rank, Box((start, *(0,) * len(rest)), (stop - start, *rest)))
            for rank, start, stop in cuts
            if stop > start or (rank == 0 and rows == 0)
        ]

    def place(tensor: TargetTensor) -> Sequence[tuple[int, Box]]:
        if tensor.shape and tensor.parameter:
            return cut(tensor.shape)
        return [(0, full_box(tensor.shape))] if 0 in ranks else []

    return place


def stored_chunks(
    catalog: Catalog, chunks_of: Callable[[TargetTensor], str | None]
) -> tuple[PlanPlacement, int]:
    """A placement in a file for each of the source's, and their number: every tensor in the chunks of a stored one.

    One that `chunks_of` knows none for is a chunk in the first file.
    """
    names = {chunk.item.file for entry in catalog.tensors.values() for chunk in entry.chunks}
    rank = {name: i for i, name in enumerate(sorted(names))}

    def place(tensor: TargetTensor) -> Sequence[tuple[int, Box]]:
        key = chunks_of(tensor)
        chunks = catalog.tensors[key].chunks if key is not None and key in catalog.tensors else ()
        return [(rank[chunk.item.file], chunk.box) for chunk in chunks] or [(0, full_box(tensor.shape))]

    return place, max(len(rank), 1)


def place_model(model: LiveModel, layout: Layout) -> Placement:
    """The placement of a model's parameters over the ranks of the training job."""
    if layout.topology is None:
        raise UsageError(f"--layout {layout.name} needs a topology: give --dp-shard and the other sizes")
    tp_dims = mla_tp_dims(model.local_spec)
    tensors = model.tensors
    if layout.name == "mfsdp-v2":  # which holds no weights in FP8
        tensors = tuple(replace(t, dtype="bfloat16") if t.dtype == FP8 else t for t in tensors)
    parameters = describe(
        tensors,
        layout.topology,
        units=layout.units or UNITS,
        root=None if layout.units else ROOT,
        tp_dims=tp_dims,
        layout=layout.name,
    )
    return Placement(parameters, layout.topology, layout.name)


def mla_tp_dims(local_spec: bool) -> dict[str, int | None]:
    """What tensor parallelism does to MLA's down-projections (gpt_layer_specs.py, core 0.14 and later).

    Transformer Engine's spec has a plain linear there, the local one a column-parallel; fused ones are plain.
    """
    dim = 0 if local_spec else None
    return {f"*{MLA_FUSED_DOWN}weight": None} | {f"*{name}weight": dim for name in MLA_DOWN}


def exact_placement(core: Placement, ranks: Sequence[int]) -> PlanPlacement:
    """The boxes that the target ranks `ranks` write; what no parameter places goes to rank 0 as a whole."""
    boxes: dict[str, list[tuple[int, Box]]] = {}
    for rank in ranks:
        for name, box in core.written(rank):
            boxes.setdefault(name, []).append((rank, box))
    known = set(core.names()) if 0 in ranks else boxes.keys()

    def place(tensor: TargetTensor) -> Sequence[tuple[int, Box]]:
        if tensor.parameter in known and 0 not in tensor.shape:
            return boxes.get(tensor.parameter, [])
        return [(0, full_box(tensor.shape))] if 0 in ranks else []

    return place


def rank_share(target: Target, core: Placement, rank: int) -> Target:
    """What `rank` writes of a target. Rank 0 has all of it, for what no parameter places."""
    if not rank:
        return target
    names = {name for name, _ in core.written(rank)}
    return Target(tuple(tensor for tensor in target.tensors if tensor.parameter in names))


def in_reading_order(target: Target, names: Iterable[str]) -> Target:
    """Tensors in the order in which training ranks read them, so that a file is read front to back.

    The model comes first, then the optimizer's states parameter by parameter (checkpointing.py
    `generate_state_dict`). Tensors of no parameter, such as rng states, stand in front.
    """
    position = {name: i for i, name in enumerate(names)}
    kinds = {"master": 0, "weight": 0}

    def key(tensor: TargetTensor) -> tuple[int, int]:
        at = position.get(tensor.parameter, -1)
        return (-1, -1) if at < 0 else (kinds.get(tensor.role, 1), at)

    return replace(target, tensors=tuple(sorted(target.tensors, key=key)))


def target_model(built: FsdpTarget, common: CommonState) -> LiveModel:
    """The model that a conversion from `torch_dist` gives; `common` has the settings of the run that wrote it.

    Frozen parameters are those without a group; a conversion of weights alone tells nothing, and takes all as
    trainable. The element type is that of the running model, not of its masters; the stored one if it is unknown.
    """
    found = (
        (
            LiveTensor(
                p.name,
                p.shape,
                FP8 if is_held_in_fp8(p.name, common) else p.stored[0].dtype or p.stored[0].main.dtype,
                gated=p.gated,
                buffer=p.name.endswith(BUFFERS),
                trainable=not built.memberships or p.group_name in built.memberships,
            ),
            p.group_name,
        )
        for p in built.parameters
    )
    return LiveModel(tuple(_join_parts(found, built.style)), built.style.local_norms)


def source_model(source: FsdpSource, style: ModelStyle) -> LiveModel:
    """The model that an `fsdp_dtensor` checkpoint holds."""
    trained = training_dtype(source.common)
    found = []
    for t in source.tensors:
        buffer = t.name.endswith(BUFFERS)
        trainable = not buffer and (bool(t.states) or not source.has_optimizer)
        stored = t.values[WEIGHT].dtype
        live = LiveTensor(
            t.name,
            t.shape,
            FP8 if is_held_in_fp8(t.name, source.common) else trained or stored if trainable else stored,
            gated=len(t.values[WEIGHT].sources) == 2,
            buffer=buffer,
            trainable=trainable,
        )
        found.append((live, split_part(t.name, style)[0]))
    return LiveModel(tuple(_join_parts(found, style)), style.local_norms)


def _join_parts(stored: Iterable[tuple[LiveTensor, str]], style: ModelStyle) -> Iterator[LiveTensor]:
    """Live tensors of what is stored, each with the name of the live tensor that it is, or is a part of.

    Those that the checkpoint keeps in parts (gated delta nets, MLA) are joined.
    """
    found: dict[str, list[LiveTensor]] = {}
    for tensor, live in stored:
        found.setdefault(live, []).append(tensor)
    for live, tensors in found.items():
        if len(tensors) == 1:
            yield tensors[0]
            continue
        parts: Mapping[str | None, LiveTensor] = {split_part(t.name, style)[1]: t for t in tensors}
        order = part_order(live, [str(part) for part in parts])
        rows = tuple(Part(parts[part].name, parts[part].shape[0]) for part in order)
        first = parts[order[0]]
        shape = (sum(part.rows for part in rows), *first.shape[1:])
        yield LiveTensor(live, shape, first.dtype, parts=rows, trainable=first.trainable)


@dataclass(frozen=True, slots=True)
class TargetJob:
    """What is recorded of the job, the live tensors that are packed for its TP, and the vocabulary's rows."""

    record: TargetRecord
    packed: tuple[str, ...] = ()
    vocabulary: Vocabulary | None = None

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        rows = self.vocabulary
        return {
            **self.record.as_json(),
            "tp_dependent": list(self.packed),
            "vocabulary": None
            if rows is None
            else {
                "rows": rows.rows,
                "multiple": rows.multiple,
                "fits_tp": list(rows.fits_tp),
                "is_exact": rows.is_exact,
            },
        }


def said_tp(asked: int | None, layout: Layout | None) -> Size | None:
    """Tensor-parallel ranks of the target as the user put it, None when nothing was said."""
    if asked is not None and asked < 1:
        raise UsageError(f"--tp {asked}: at least one rank is needed")
    topology = None if layout is None else layout.topology
    if topology is None:
        return None if asked is None else Size(asked, "--tp")
    if asked not in (None, topology.tp):
        raise UsageError(f"tp is {asked} for names and {topology.tp} in the topology")
    return Size(topology.tp, "--tp" if asked is not None else "the layout")


def sized(record: TargetRecord, tp: Size | None, layout: Layout, has_experts: bool) -> TargetRecord:
    """The record with the sizes of the job that `layout` is of; another job's do not go over to it."""
    topology, source = layout.topology, "the layout"
    if topology is None:
        ranks = 1 if tp is None else tp.ranks
        dp = layout.world // ranks if layout.of_job and layout.world % ranks == 0 else 0
        return replace(record, tp=tp, ep=None, etp=None, cp=None, dp=Size(dp, "--world-size") if dp else None)
    return replace(
        record,
        tp=tp,
        ep=Size(topology.ep, source) if has_experts else None,
        etp=Size(topology.etp, source) if has_experts else None,
        dp=Size(topology.dp_outer * topology.shard_size, source),
        cp=Size(topology.cp, source),
    )


def need_tp(packed: Iterable[str], asked: int | None, layout: Layout | None, stored: Size | None) -> None:
    """Refuse to pack for a number of ranks that nobody has given: the wrong one loads, and trains wrongly."""
    names = tuple(packed)
    given = asked is not None or (layout is not None and layout.topology is not None and layout.tp_given)
    if not names or given:
        return
    source = "" if stored is None else f" (the source is of TP {stored.ranks}, by {stored.source})"
    raise UsageError(
        f"--tp is needed: the rows of {summary(names)} are in an order that only one tensor parallel size has, and a "
        f"job of another size would load them without an error and give wrong results. Give the size of the job "
        f"that will load the result{source}"
    )


def summary(packed: Iterable[str]) -> str:
    """`in_proj and conv1d of 12 layers`: what is packed, in few words."""
    places = [stored_name(name).rpartition(".")[0].rpartition(".") for name in packed]
    layers = {layer for layer, _, _ in places}
    projections = dict.fromkeys(projection for _, _, projection in places)
    return f"{' and '.join(projections)} of {counted(len(layers), 'layer')}"


def describe_job(job: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(title, text) lines of `TargetJob.as_json` for people."""
    sizes = [
        f"{axis.upper()} {size['ranks']}" + ("" if size["source"] == "the layout" else f" ({size['source']})")
        for axis, size in job["topology"].items()
        if size is not None
    ]
    tp, packed = job["topology"]["tp"], job["tp_dependent"]
    only = "one TP, which the checkpoint does not say" if tp is None else f"TP {tp['ranks']} only"
    fits = f"for {only}: {summary(packed)}" if packed else "loads at any TP"
    lines = [("job", "; ".join(filter(None, [", ".join(sizes), fits])))]
    if job["vocabulary"] is not None:
        lines.append(("vocabulary", _vocabulary(job["vocabulary"])))
    return lines


def _vocabulary(found: Mapping[str, Any]) -> str:
    rows, multiple, sizes = found["rows"], found["multiple"], found["fits_tp"]
    if multiple is None:
        return f"{rows} rows; a job that pads to another number needs --padded-vocab-size {rows}"
    named = ", ".join(map(str, sizes)) or "none"
    fits = (
        f"the padded size for TP {named}"
        if found["is_exact"]
        else f"a padded size of TP {named}, if the tokenizer agrees"
    )
    divisor = f"--make-vocab-size-divisible-by {multiple}"
    return f"{rows} rows, {fits} ({divisor}); other jobs need --padded-vocab-size {rows}"
