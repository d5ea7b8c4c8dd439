"""From an `fsdp_dtensor` checkpoint to the `Target` that holds the same for another topology: nothing is computed.

Two things depend on the number of tensor-parallel ranks: the rows of fused projections (gated delta nets, Mamba)
are grouped by rank, and each rank has rng states of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt_tools.errors import UsageError
from ckpt_tools.megatron.fsdp_dtensor.parameters import (
    StoredParameter,
    fused_rows,
    packed_projections,
    stored_parameters,
)
from ckpt_tools.megatron.fsdp_dtensor.read import FsdpSource
from ckpt_tools.megatron.keys import STEP, parameter_of, rng_key, role_of
from ckpt_tools.megatron.run_state.record import Size
from ckpt_tools.model.catalog import Catalog, Item, concat
from ckpt_tools.model.target import Target, TargetObject, TargetTensor
from ckpt_tools.model.views import Source

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Relayout:
    """The target, and for each of its objects the stored archive that is carried over byte for byte."""

    target: Target
    archives: tuple[tuple[str, Item], ...]


def build_relayout(source: FsdpSource, wanted: Size | None) -> Relayout:
    """Everything that `source` holds, for a job of `wanted` tensor-parallel ranks (None: as many as it is for)."""
    catalog = source.catalog
    writer = None if source.tp is None else source.tp.ranks
    tp = writer if wanted is None else wanted.ranks
    regrouped = {} if tp is None or tp == writer else dict(_regrouped(source, writer, tp))
    tensors: list[TargetTensor] = []
    objects: list[TargetObject] = []
    archives: list[tuple[str, Item]] = []
    for old, key, path in _keys(catalog, tp, writer):
        if old in catalog.objects:
            objects.append(TargetObject(key, None, path))
            archives.append((key, catalog.objects[old].item))
            continue
        entry = catalog.tensors[old]
        of = parameter_of(old)
        tensors.append(
            TargetTensor(
                key,
                entry.dtype,
                entry.shape,
                regrouped.get(old, (Source(old),)),
                path,
                parameter=of.name if of and of.kind != STEP else "",
                role=role_of(old),
            )
        )
    target = Target(
        tuple(tensors),
        objects=tuple(objects),
        dropped=source.ignored,
        notes=tuple(_notes(regrouped, writer, tp)),
    )
    return Relayout(target, tuple(archives))


def _keys(catalog: Catalog, tp: int | None, writer: int | None) -> Iterator[tuple[str, str, Path]]:
    """(stored key, key in the target, its planner path); rng states for `tp` ranks, the last rank's repeated."""
    for old in (*catalog.objects, *catalog.tensors):
        path = tuple(catalog.planner_paths.get(old, (old,)))
        found = rng_key(old)
        if found is None or writer is None or tp is None or tp == writer:
            yield old, old, path
            continue
        rank = found.tp
        for t in range(rank, tp) if rank == writer - 1 else [rank] if rank < tp else []:
            name = f"({found.pp}, {t})"
            middle = tuple(name if step == f"({found.pp}, {rank})" else step for step in path)
            yield old, f"rng_state.{name}.{found.rest}", middle


def _regrouped(source: FsdpSource, writer: int | None, tp: int) -> Iterator[tuple[str, tuple[Source, ...]]]:
    """(stored key, sources) of the fused projections whose rows are grouped by tensor-parallel rank."""
    packed = packed_projections(tensor.name for tensor in source.tensors)
    if not packed:
        return
    if writer is None:
        raise UsageError(
            f"{packed[0]}: its rows cannot be regrouped for tensor parallel size {tp}, as the size they "
            "are for is unknown: the checkpoint holds no rng states and no record of a conversion. Lay out the "
            "torch_dist checkpoint that this one was made from instead"
        )
    parts: dict[str, list[StoredParameter]] = {}
    for part in stored_parameters(source.tensors, writer, None):
        if part.cuts and "_down_proj." not in part.name:  # every rank has all of MLA's down-projection
            parts.setdefault(part.tensor.name, []).append(part)
    for name, of_tensor in parts.items():
        runs = fused_rows(name, {part.name: part.shape[0] for part in of_tensor}, tp)
        for kind, whole in of_tensor[0].tensor.values.items():
            values = {part.name: part.value(kind) for part in of_tensor}
            rows = [values[run.part].rows(run.start, run.count) for run in runs]
            yield whole.sources[0].key, concat(name, rows).sources


def _notes(regrouped: Mapping[str, object], writer: int | None, tp: int | None) -> Iterator[str]:
    if regrouped:
        yield f"{len(regrouped)} tensors of fused projections regrouped from tensor parallel size {writer} to {tp}"
    if writer is not None and tp is not None and tp > writer:
        yield f"rng of tensor-parallel {_ranks(writer, tp)}: copied from rank {writer - 1}"
    if writer is not None and tp is not None and tp < writer:
        yield f"rng of tensor-parallel {_ranks(tp, writer)}: dropped, the target has no such ranks"


def _ranks(first: int, stop: int) -> str:
    return f"rank {first}" if stop == first + 1 else f"ranks {first} to {stop - 1}"
