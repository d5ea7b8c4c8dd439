"""The job that will load an output: its sizes and who said them, and what of the output fits no other job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import UsageError
from ckpt_tools.human import counted
from ckpt_tools.megatron.names import stored_name
from ckpt_tools.megatron.run_state.record import Size, TargetRecord
from ckpt_tools.megatron.vocab import Vocabulary

if TYPE_CHECKING:
    from ckpt_tools.commands.job.placements import Layout


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


def describe(job: Mapping[str, Any]) -> list[tuple[str, str]]:
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
