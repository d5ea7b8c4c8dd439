"""`ckpt_tools.json`: what a conversion assumed of the job that will load its output, kept next to the tensors.

A checkpoint does not tell by itself for how many tensor-parallel ranks its packed projections are arranged: `args`
are those of the job that trained it, not of the job it was converted for. Megatron-LM, Megatron-Bridge and stock
torch open the files that `.metadata` names and their own few; they never look at this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from ckpt_tools.errors import CorruptCheckpointError, MappingError
from ckpt_tools.formats.locate.detect import MAX_RECORD_BYTES, RECORD_FIELDS, RECORD_FILE
from ckpt_tools.formats.storage.files import Files, read_whole
from ckpt_tools.formats.untrusted_documents import parse_json
from ckpt_tools.model.choices import DialectName

SCHEMA_VERSION = 1
AXES = ("tp", "ep", "etp", "dp", "cp")
_SINCE = ("cp",)  # which older records do not have


class Size(NamedTuple):
    """Ranks along one axis of the job that loads the checkpoint, and what said so (`--tp`, `args`, ...)."""

    ranks: int
    source: str


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """The job a checkpoint was written for. None: nothing of the checkpoint depends on it, and nobody said it."""

    target: str | None = None  # a key of names.DIALECTS
    tp: Size | None = None
    ep: Size | None = None
    etp: Size | None = None
    dp: Size | None = None  # data-parallel times context-parallel ranks
    cp: Size | None = None
    tokens: int | None = None  # of the vocabulary; its other rows are padding
    format: Literal["dcp"] | None = None  # dcp: weights have Megatron-FSDP v2's names

    def as_json(self) -> dict[str, Any]:
        sizes = {axis: getattr(self, axis) for axis in AXES}
        return {
            "target": self.target,
            "topology": {
                axis: None if size is None else {"ranks": size.ranks, "source": size.source}
                for axis, size in sizes.items()
            },
            "tokens": self.tokens,
        }


def stored_tp(
    record: TargetRecord | None, rng: Iterable[tuple[int, int]], args: Mapping[str, Any]
) -> Size | None:
    """For how many tensor-parallel ranks an `fsdp_dtensor` checkpoint is, None if unknown.

    `rng` are the (pp, tp) ranks with stored states: one for each that runs. The arguments count only where
    Megatron-FSDP wrote the checkpoint itself; a conversion carries over those of the job before.
    """
    held = max((t + 1 for _, t in rng), default=None)
    if record is not None and record.tp is not None:
        if held not in (None, record.tp.ranks):
            raise MappingError(
                f"{RECORD_FILE} says that the checkpoint is for {record.tp.ranks} tensor-parallel ranks, and it "
                f"holds rng states of {held}; one of them belongs to another checkpoint. Restore the file, or delete "
                "it to go by the rng states"
            )
        return Size(record.tp.ranks, RECORD_FILE)
    if held is not None:
        return Size(held, "rng states")
    size = args.get("tensor_model_parallel_size") if args.get("ckpt_format") == "fsdp_dtensor" else None
    return Size(size, "args") if isinstance(size, int) and size > 0 else None


def record_bytes(record: TargetRecord) -> bytes:
    kind = {} if record.format is None else {"format": record.format}
    return (
        json.dumps({"schema_version": SCHEMA_VERSION, **kind, **record.as_json()}, indent=1) + "\n"
    ).encode()


def read_record(files: Files) -> TargetRecord | None:
    """What a conversion of ours recorded in a checkpoint's folder; None for checkpoints of other writers."""
    if not files.exists(RECORD_FILE):
        return None
    where = f"{files.location}/{RECORD_FILE}"
    raw = read_whole(files, RECORD_FILE, MAX_RECORD_BYTES)
    try:
        return _parsed(parse_json(raw))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{where}: not a record that this tool writes ({type(error).__name__}: {error}). Delete the file if "
            "you do not need it, and say with --tp for how many tensor-parallel ranks the checkpoint is"
        ) from None


def _parsed(data: Mapping[str, Any]) -> TargetRecord:
    unknown = [*(data.keys() - RECORD_FIELDS), *(data["topology"].keys() - set(AXES))]
    if unknown:
        raise ValueError(f"unknown are {', '.join(map(repr, sorted(unknown)))}")
    if data["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema version {data['schema_version']!r}, known is {SCHEMA_VERSION}")
    if data["target"] not in (None, *get_args(DialectName)):
        raise ValueError(f"target {data['target']!r}, known are {', '.join(get_args(DialectName))}")
    kind = data.get("format")
    if kind not in (None, "dcp"):
        raise ValueError(f"format {kind!r}, known is 'dcp'")
    sizes = {
        axis: _size(axis, data["topology"].get(axis) if axis in _SINCE else data["topology"][axis])
        for axis in AXES
    }
    tokens = data["tokens"]
    return TargetRecord(
        data["target"], **sizes, tokens=None if tokens is None else _count("tokens", tokens), format=kind
    )


def _size(axis: str, value: Any) -> Size | None:
    if value is None:
        return None
    if not isinstance(value["source"], str):
        raise TypeError(f"the source of {axis} is not a string")
    return Size(_count(axis, value["ranks"]), value["source"])


def _count(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}, not a number of at least 1")
    return value
