"""A checkpoint of either format whose `fsdp_dtensor` form is decided, before anyone says who holds its pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_tools.commands.conversion import CutRows
from ckpt_tools.commands.conversion_report import MastersUse
from ckpt_tools.commands.placements import Layout, Model, lay_out
from ckpt_tools.commands.target_job import TargetJob
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.target import Target, TargetTensor
from ckpt_tools.model.transfers import Plan


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `plan` prices, `load_dtensors` reads and `convert` writes."""

    loader: str | None  # None: whoever loads the source
    catalog: Catalog  # the source's, with tensors added that stand inside its objects
    target: Target
    model: Callable[[], Model]
    archives: Callable[[], Iterable[tuple[str, bytes]]]  # of the target's objects
    job: TargetJob
    small_files: Callable[[], dict[str, bytes]]  # that the loader wants beside the tensors
    masters: MastersUse
    optimizer_layout: str | None = None  # of the source
    groups: Mapping[int, int] = field(default_factory=dict)  # parameters by group id
    fp8_recipe: str | None = None  # of a source with weights held in FP8 (`ModelSettings.fp8_recipe`)
    must_be_zero: Sequence[CutRows] = ()
    without_masters: Callable[[str], Prepared] | None = (
        None  # the same for masters that do not round, with a note
    )

    @property
    def must_round(self) -> list[TargetTensor]:
        """Masters, with the stored weights that they must round to."""
        return [tensor for tensor in self.target.tensors if tensor.must_round_to]

    def lay_out(self, layout: Layout, only: int | None = None) -> Plan:
        """The plan for the ranks of `layout`, or the file of one rank alone (see `lay_out`)."""
        archives = self.archives() if only in (None, 0) else ()
        return lay_out(self.catalog, self.target, self.model, archives, layout, only)
