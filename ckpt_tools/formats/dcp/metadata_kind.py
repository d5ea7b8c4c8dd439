"""Of which kind a checkpoint is: by what its `.metadata` names, and by what lies beside it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.formats.dcp.metadata_read import MAX_METADATA_BYTES, METADATA, missing_metadata
from ckpt_tools.formats.storage.files import Files, path_in, read_whole
from ckpt_tools.formats.untrusted_documents import DocumentError, parse_json

if TYPE_CHECKING:
    from ckpt_tools.model.choices import CheckpointKind

_FSDP_KEY = re.compile(rb"(model\.module\.|optimizer\.state\.module\.|optimizer\.param_to_group_meta\.)")
_OF_MEGATRON = re.compile(
    rb"(?:optimizer\.state\.module\.|optimizer\.param_to_group_meta\.|checkpoint_version|iteration"
    rb"|(?:decoder|encoder|mtp)\.layers\.|word_embeddings)"
)
_NUMBERED_STATE = re.compile(rb"optimizer\.state\.\d+\.")
# Objects that only `torch_dist` has, a shard of each rank.
_SHARD = re.compile(rb"(?:common_state|_extra_state|rng_state|rerun_state_machine_state)/shard_\d")
METADATA_JSON = "metadata.json"
# Readers of core 0.18 and older look at all four fields, later ones ignore the last two.
METADATA_JSON_TEXT = (
    '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    '"common_backend": "torch", "common_backend_version": 1}'
)
_RECORD = "ckpt_tools.json"  # beside what was converted
_RECORD_FIELDS = {"schema_version", "format", "target", "topology", "tokens"}
_MAX_RECORD_BYTES = 1 << 20
# In the metadata of weights alone that were converted for Megatron-FSDP v2, beside the record of that. A plain state
# dict has the same entries, and its record says what it is.
_VERSION_2 = (b"model.", b"checkpoint_version")


def kind_of(files: Files, names: list[str], backend: str | None) -> CheckpointKind:
    """The kind of the checkpoint in a folder with these names; `backend` is the one that metadata.json names."""
    if METADATA in names:
        record = _record(files) if _RECORD in names else None
        if backend:
            return "torch_dist"
        data = read_whole(files, METADATA, MAX_METADATA_BYTES)
        if _is_fsdp_dtensor(data) or _is_version_2(record, data):
            return "fsdp_dtensor"
        if _SHARD.search(data) or ("common.pt" in names and _OF_MEGATRON.search(data)):
            file = path_in(files.location, METADATA_JSON)
            raise CorruptCheckpointError(
                f"{file} is missing: the keys are those of a Megatron torch_dist checkpoint, which nothing loads "
                "without that file. Copy it from where the checkpoint was saved, or write it again:\n"
                f"  echo '{METADATA_JSON_TEXT}' > {shlex.quote(file)}"
            )
        return "dcp"
    if any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    raise missing_metadata(files)


def metadata_json_problems(fields: dict[str, Any]) -> Iterator[str]:
    """What in a `metadata.json` no loader takes."""
    for backend in ("sharded_backend", "common_backend"):
        name = f"{backend}_version"
        if name in fields and backend not in fields:
            yield f"{name} is there, but not {backend}"
        elif fields.get(name, 1) != 1:
            yield f"{name} is {fields[name]!r}, expected 1: no loader is of this version"
    if fields.get("common_backend", "torch") != "torch":
        yield f"common_backend is {fields['common_backend']!r}, expected 'torch'"


def refuse_metadata_json(files: Files) -> None:
    """
    Raises:
        CorruptCheckpointError: a `metadata.json` that names a `sharded_backend` is damaged elsewhere.
    """
    problems = list(metadata_json_problems(parse_json(read_whole(files, METADATA_JSON))))
    if problems:
        raise CorruptCheckpointError(
            f"{files.location}/{METADATA_JSON} is damaged: {'; '.join(problems)}. Copy it again", problems
        )


def _is_fsdp_dtensor(data: bytes) -> bool:
    """Whether the keys in a `.metadata` are those of Megatron-LM's Megatron-FSDP.

    Whoever saves a wrapped module himself has `model.module.` too, but not the entries that Megatron-LM puts beside
    it, nor its names; or an optimizer that numbers its parameters, as Megatron-LM's does not.
    """
    if not _FSDP_KEY.search(data) or _NUMBERED_STATE.search(data):
        return False
    return _OF_MEGATRON.search(data) is not None


def _is_version_2(record: dict[str, Any] | None, data: bytes) -> bool:
    """Whether a conversion made it for Megatron-FSDP v2, without the optimizer, whose keys would tell."""
    return record is not None and record.get("format") != "dcp" and all(word in data for word in _VERSION_2)


def _record(files: Files) -> dict[str, Any]:
    """The record beside a conversion's output, as far as it tells the kind."""
    try:
        record = parse_json(read_whole(files, _RECORD, _MAX_RECORD_BYTES))
    except DocumentError as error:
        record = str(error)
    if isinstance(record, dict) and record.keys() <= _RECORD_FIELDS and record.get("format") in (None, "dcp"):
        return record
    found = (
        record if isinstance(record, str) else "it has other fields, or another format, than this tool writes"
    )
    raise CorruptCheckpointError(
        f"{files.location}/{_RECORD} is damaged, and it says which format the checkpoint has: {found}. Copy it again "
        "from where the checkpoint was written. Without the file the format is guessed from the keys"
    )
