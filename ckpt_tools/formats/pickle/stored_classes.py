"""The classes that `.metadata` may be made of, and what each must hold for torch to load it.

The pickle machine takes any global that is known to be harmless. Torch imports them, so a name with one wrong letter,
or an object with another's state, ends its load: both are refused here. A newer torch adds fields:
those that are known are read, and a warning names the others.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from ckpt_tools.formats.pickle.machine import Name, Object, Pairs, brief

_TORCH = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.checkpoint.metadata")
_PROPERTIES = (*_TORCH, "torch.distributed._shard.sharded_tensor.metadata")  # the last: up to torch 2.2
_PLANS = ("torch.distributed.checkpoint.planner", "torch.distributed._shard.checkpoint.planner")
_ANY = re.compile(r"(torch\.distributed|megatron|nemo|nvidia_resiliency_ext)(\.\w+)+")  # classes that move

_MODULES: Mapping[str, tuple[str, ...] | None] = {
    "Metadata": _TORCH,
    "MCoreMetadata": None,
    "TensorStorageMetadata": _TORCH,
    "BytesStorageMetadata": _TORCH,
    "ChunkStorageMetadata": _TORCH,
    "MetadataIndex": _TORCH,
    "StorageMeta": _TORCH,
    "TensorProperties": _PROPERTIES,
    "_MEM_FORMAT_ENCODING": _TORCH,
    "MEM_FORMAT_ENCODING": _PROPERTIES,
    "_StorageInfo": (
        "torch.distributed.checkpoint.filesystem",
        "torch.distributed._shard.checkpoint.filesystem",
    ),
    "WriteItem": _PLANS,
    "WriteItemType": _PLANS,
    "TensorWriteData": _PLANS,
    "SavePlan": _PLANS,
    "MCoreSavePlan": None,
}
_OF_ROOT = "state_dict_metadata planner_data storage_data storage_meta version mcore_data all_local_plans"
_FIELDS = {
    "Metadata": _OF_ROOT.split(),
    "MCoreMetadata": _OF_ROOT.split(),
    "TensorStorageMetadata": ["properties", "size", "chunks"],
    "BytesStorageMetadata": [],
    "ChunkStorageMetadata": ["offsets", "sizes"],
    "MetadataIndex": ["fqn", "offset", "index"],
    "StorageMeta": ["checkpoint_id", "save_id", "load_id", "modules"],
    "_StorageInfo": ["relative_path", "offset", "length", "transform_descriptors"],
}
_OF_PROPERTIES = 6  # the last are the strides, since torch 2.15; each item's archive has its own strides
_ENCODINGS = ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")
_LAYOUT = Name("torch.serialization", "_get_layout")
_LAYOUTS = re.compile(
    r"torch\.(strided|sparse_coo|sparse_csr|sparse_csc|sparse_bsr|sparse_bsc|_mkldnn|jagged)"
)


def is_class(value: object, name: str) -> bool:
    """Whether the value is the global of this class, from a module that has it."""
    if type(value) is not Name or value.name != name:
        return False
    modules = _MODULES[name]
    return bool(_ANY.fullmatch(value.module)) if modules is None else value.module in modules


def fields_of(value: object, *names: str) -> dict[str, Any]:
    """The attributes of an object of one of these classes; a warning names those that it has not in
    any known torch.
    """
    if type(value) is not Object or not any(is_class(value.kind, name) for name in names):
        raise TypeError(f"{described(value)} where a {' or '.join(names)} belongs")
    if value.args or value.items is not None or not isinstance(value.state, Pairs | None):
        raise TypeError(f"a {names[0]} with a state that torch does not write")
    fields = {} if value.state is None else value.state.as_dict()
    known = _FIELDS.get(value.kind.name)
    if known is not None and not fields.keys() <= set(known):
        _warn_of(value.kind, ", ".join(map(brief, sorted(fields.keys() - known))))
    return fields


def _warn_of(kind: Name, fields: str) -> None:
    warnings.warn(
        f".metadata: a {kind.name} has fields that this version does not know: {fields}. The known fields are read, "
        "and no output has the others",
        stacklevel=2,
    )


def check_properties(value: object) -> Name:
    """The element type in a `TensorProperties`."""
    if type(value) is not Object or not is_class(value.kind, "TensorProperties") or value.args:
        raise TypeError(f"{described(value)} where a TensorProperties belongs")
    state = value.state
    if type(state) is not tuple or len(state) < 5:
        raise TypeError("a TensorProperties with a state that torch does not write")
    dtype, layout, requires_grad, memory_format, pinned = state[:5]
    if len(state) > _OF_PROPERTIES:
        _warn_of(value.kind, f"{len(state) - _OF_PROPERTIES} behind the strides")
    if type(dtype) is not Name or dtype.module != "torch":
        raise TypeError(f"{described(dtype)} where an element type belongs")
    if (
        type(layout) is not Object
        or layout.kind != _LAYOUT
        or len(layout.args) != 1
        or not _LAYOUTS.fullmatch(str(layout.args[0]))
    ):
        raise TypeError(f"{described(layout)} where a torch.layout belongs")
    if type(requires_grad) is not bool or type(pinned) is not bool:
        raise TypeError("flags of a TensorProperties that are neither true nor false")
    check_memory_format(memory_format)
    return dtype


def check_memory_format(value: object) -> None:
    """Refuse what is not one of torch's three memory formats."""
    if (
        type(value) is not Object
        or not any(is_class(value.kind, name) for name in _ENCODINGS)
        or value.args not in ((0,), (1,), (2,))
        or type(value.args[0]) is not int
        or value.state is not None
    ):
        raise TypeError(f"{described(value)} where a memory format belongs")


def check_storage_meta(value: object) -> None:
    """Refuse what torch's reader cannot set a load id on, or what it cannot make at all."""
    if value is None:
        return
    fields = fields_of(value, "StorageMeta")
    place = fields.get("checkpoint_id")
    if type(place) is Object:
        if not re.fullmatch(r"pathlib(\._local)?", place.kind.module) or place.state is not None:
            raise TypeError(f"{described(place)} where the checkpoint's path belongs")
        if not all(type(part) is str for part in place.args):
            raise TypeError("a path with parts that are not str")
    elif not isinstance(place, str | None):
        raise TypeError(f"{described(place)} where the checkpoint's path belongs")


def described(value: object) -> str:
    """A value of the wrong kind, for a message."""
    if type(value) is Name:
        return f"the name {value.module}.{value.name}"
    return f"a {value.kind.module}.{value.kind.name}" if type(value) is Object else brief(value)
