"""Of which kind a checkpoint is: by what its `.metadata` names, and by what lies beside it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt_tools.formats.dcp import MAX_METADATA_BYTES, METADATA, missing_metadata
from ckpt_tools.formats.documents import DocumentError, parse_json
from ckpt_tools.formats.files import Files, read_whole

if TYPE_CHECKING:
    from ckpt_tools.formats.detect import CheckpointKind

_FSDP_KEY = re.compile(rb"(model\.module\.|optimizer\.state\.module\.|optimizer\.param_to_group_meta\.)")
_OF_MEGATRON = re.compile(
    rb"(?:optimizer\.state\.module\.|optimizer\.param_to_group_meta\.|checkpoint_version|iteration"
    rb"|(?:decoder|encoder|mtp)\.layers\.|word_embeddings)"
)
_NUMBERED_STATE = re.compile(rb"optimizer\.state\.\d+\.")
_RECORD = "ckpt_tools.json"  # beside what was converted
_MAX_RECORD_BYTES = 1 << 20
# In the metadata of weights alone that were converted for Megatron-FSDP v2, beside the record of that. A plain state
# dict has the same entries, and its record says what it is.
_VERSION_2 = (b"model.", b"checkpoint_version")


def kind_of(files: Files, names: list[str], backend: str | None) -> CheckpointKind:
    """The kind of the checkpoint in a folder with these names; `backend` is the one that metadata.json names."""
    if METADATA in names:
        if backend:
            return "torch_dist"
        data = read_whole(files, METADATA, MAX_METADATA_BYTES)
        return "fsdp_dtensor" if _is_fsdp_dtensor(data) or _is_version_2(files, names, data) else "dcp"
    if any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    raise missing_metadata(files)


def _is_fsdp_dtensor(data: bytes) -> bool:
    """Whether the keys in a `.metadata` are those of Megatron-LM's Megatron-FSDP.

    Whoever saves a wrapped module himself has `model.module.` too, but not the entries that Megatron-LM puts beside
    it, nor its names; or an optimizer that numbers its parameters, as Megatron-LM's does not.
    """
    if not _FSDP_KEY.search(data) or _NUMBERED_STATE.search(data):
        return False
    return _OF_MEGATRON.search(data) is not None


def _is_version_2(files: Files, names: list[str], data: bytes) -> bool:
    """Whether a conversion made it for Megatron-FSDP v2, without the optimizer, whose keys would tell."""
    if _RECORD not in names or not all(word in data for word in _VERSION_2):
        return False
    try:
        record = parse_json(read_whole(files, _RECORD, _MAX_RECORD_BYTES))
    except DocumentError:
        return True  # a damaged record is told when it is needed
    return not isinstance(record, dict) or record.get("format") != "dcp"
