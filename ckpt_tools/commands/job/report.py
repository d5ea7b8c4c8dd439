"""What a conversion says about itself afterwards, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from ckpt_tools.execute.proof.masters import MastersReport
from ckpt_tools.execute.run import WriteReport
from ckpt_tools.model.choices import CheckLevel, Format
from ckpt_tools.plain_data import plain
from ckpt_tools.redaction import redacted

SCHEMA_VERSION = 2
MastersUse: TypeAlias = Literal["written", "as_stored", "merged", "left_out", "none"]
"""What becomes of a source's fp32 masters.

They are written; or copied from a format that keeps them in the place of weights, so that there is nothing to
compare them with; or merged: an adapter was added to them, and what is written is made of the sums; or left out, and
the stored weights are written; or the source has none.
"""

_NOTHING = {
    "bytes_written": 0, "bytes_cloned": 0, "seconds": 0.0, "check_source": "none", "payloads_proven": 0,
    "payloads_without_checksum": 0, "bytes_proven": 0,
}  # fmt: skip
"""`WriteReport.in_short` of a dry run."""


@dataclass(frozen=True, slots=True)
class Masters:
    """What became of the masters, and how many were compared with the stored weights (`mode`: sample, all, none)."""

    use: MastersUse = "none"
    mode: CheckLevel = "none"
    found: MastersReport = field(default_factory=MastersReport)

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return {
            "use": self.use,
            "mode": self.mode,
            **plain(self.found, {"tensors": "checked"}),
            "fp8_by_position": self.found.fp8,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """What a command did to stored keys that writes a checkpoint in the format of its source."""

    removed: tuple[str, ...] = ()  # keys, and entries of the common state
    renamed: Mapping[str, str] = field(default_factory=dict)
    cast: tuple[str, ...] = ()  # keys with another element type than before


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion did, for people and, as JSON, for programs."""

    source: str
    output: str
    iteration: int | None  # of the output; None: a release, or one checkpoint alone that has no number
    source_iteration: int | Literal["release"] | None  # None: the folder does not tell
    source_format: str  # `Location.kind`
    optimizer_layout: str | None  # of the source, as far as it was read; None: weights only
    output_format: Format
    loader: str | None  # program that will load the output; None: whichever loads the source
    architecture: str | None  # of a Hugging Face model, as its config.json calls it
    tensors: int
    objects: int  # and tensors so small that the plan holds their bytes
    groups: Mapping[int, int]  # group id -> number of parameters
    masters: Masters
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    renamed: tuple[str, ...]
    backfilled: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()  # settings and counters of the source that contradict it, copied unchanged
    job: Mapping[str, Any] | None = None  # the one that loads the output (`TargetJob.as_json`)
    written: WriteReport | None = None  # None: a dry run
    replaced: str | None = None  # as of `WriteReport`; a dry run predicts it
    tracker: str | None = None  # likewise
    plan: Mapping[str, Any] = field(default_factory=dict)
    edits: Edits = field(default_factory=Edits)

    def as_json(self) -> dict[str, Any]:
        """The report as plain data, with its schema version."""
        data = asdict(self)
        del data["edits"]
        data["tensor_count"], data["object_count"] = data.pop("tensors"), data.pop("objects")
        data |= {"source": redacted(self.source), "output": redacted(self.output)}
        return {"schema_version": SCHEMA_VERSION, **data, "masters": self.masters.as_json()}

    def links(self) -> dict[str, Any]:
        """What output and source share, as `links_summary` has it."""
        return {name: self.plan[name] for name in ("linked_files", "bytes_unreferenced")}

    def edit_json(self) -> dict[str, Any]:
        """What all commands that edit checkpoints say to programs; the schema versions are theirs."""
        return {
            "output": self.output,
            "source_format": self.source_format,
            "tensor_count": self.tensors,
            "object_count": self.objects,
            "left_out": self.dropped,
            **(_NOTHING if self.written is None else self.written.in_short()),
            "replaced": self.replaced,
            "tracker": self.tracker,
        }
