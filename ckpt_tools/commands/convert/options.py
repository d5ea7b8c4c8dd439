"""What a user may decide about a conversion to Megatron-FSDP or DCP."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_tools.commands.job.conversion import MegatronOptions
from ckpt_tools.commands.job.placements import Layout
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.model.choices import CheckLevel


@dataclass(frozen=True, slots=True)
class ConvertOptions(MegatronOptions):
    """What a user may decide about a conversion; the defaults let the checkpoint decide."""

    target: TargetOptions = field(default_factory=TargetOptions)
    layout: Layout | None = None  # None: rows over the ranks that convert
    check_masters: CheckLevel = "sample"
    keep_plain: bool = False  # the state dict of a model that is not Megatron's is laid out as what it is
