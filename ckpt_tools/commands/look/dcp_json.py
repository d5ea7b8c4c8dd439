"""`print-torch-dcp-in-json`: the metadata of any torch distributed checkpoint as JSON values.

A dump of `--dump-param-to-param-group-map` is such a checkpoint: no tensors, one integer an object. Its map is also
written as `param_to_param_group_map.json` into the folder, as NVIDIA's user guide describes.

Python values become JSON values whatever they are and however they refer to each other (`json_value`).
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from ckpt_tools.errors import StorageError, UsageError
from ckpt_tools.execute.output.access import access_of
from ckpt_tools.execute.output.folders import Folder
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.pickle.unpickle import StandIn, TorchDtype
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor, find_tensor, load_object
from ckpt_tools.megatron.dcp.state_dict import is_group_map
from ckpt_tools.model.catalog import TensorEntry
from ckpt_tools.plain_data import plain

SCHEMA_VERSION = 1
MAP_FILE = "param_to_param_group_map.json"
MAX_VALUE_BYTES = 1 << 16  # larger tensors and objects are described, not printed


def dcp_as_json(path: str, values: bool = False, trust_pickle: bool = False) -> dict[str, Any]:
    """Tensors and objects of the checkpoint in `path`, in stored order, as JSON values.

    With `values`, objects and scalars (tensors of one element) of at most 64 KiB come with their value.
    """
    with closing(open_files(path)) as files:
        catalog = read_catalog(files, trust_pickle)
        tensors = {key: _describe_tensor(files, entry, values) for key, entry in catalog.tensors.items()}
        objects: dict[str, dict[str, Any]] = {}
        for key, entry in catalog.objects.items():
            objects[key] = {"bytes": entry.item.length}
            if values and entry.item.length <= MAX_VALUE_BYTES:
                objects[key]["value"] = json_value(load_object(files, entry.item, trust_pickle))
    return {
        "schema_version": SCHEMA_VERSION,
        "checkpoint": path,
        "metadata_class": catalog.metadata_class,
        "metadata_version": catalog.metadata_version,
        "tensors": tensors,
        "objects": objects,
    }


def write_group_map(path: str, trust_pickle: bool = False) -> str | None:
    """Write the map file of a group map dump into its folder and return its path; None for any other checkpoint."""
    groups = read_group_map(path, trust_pickle)
    if groups is None:
        return None
    if "://" in path:
        raise UsageError(f"{path}: {MAP_FILE} is only written to a disk; copy the dump, or give --no-write.")
    target = Path(path, MAP_FILE)
    try:
        with Folder.named(target.parent) as folder:
            folder.write(MAP_FILE, json.dumps(groups, indent=2).encode(), mode=access_of(target.parent).file)
    except OSError as error:
        raise StorageError(f"{target}: {error.strerror}. --no-write leaves the folder unchanged.") from error
    return str(target)


def read_group_map(path: str, trust_pickle: bool = False) -> dict[str, int] | None:
    """Parameter name to group id, as NVIDIA's command names them; None when the checkpoint is not such a dump."""
    with closing(open_files(path)) as files:
        catalog = read_catalog(files, trust_pickle)
        if not is_group_map(catalog):
            return None
        groups = {key: load_object(files, entry.item, trust_pickle) for key, entry in catalog.objects.items()}
    if not all(type(group) is int for group in groups.values()):
        return None
    return {key.replace("module.module", "model.module"): group for key, group in groups.items()}


def _describe_tensor(files: Files, entry: TensorEntry, values: bool) -> dict[str, Any]:
    chunks = [
        {**plain(box), "file": item.file, "offset": item.offset, "length": item.length}
        for box, item in entry.chunks
    ]
    described = {"dtype": entry.dtype, "shape": list(entry.shape), "chunks": chunks}
    if values and entry.numel == 1 and len(entry.chunks) == 1:
        tensor = find_tensor(files, entry.chunks[0].item)
        data = files.read(entry.chunks[0].item.file, tensor.payload_offset, tensor.nbytes)
        described["value"] = json_value(StoredTensor(tensor.dtype, (), data))
    return described


MAX_NODES = 20_000  # a few bytes of pickle can describe a value that prints forever
MAX_DEPTH = 64
MAX_ELEMENTS = 1024  # of a tensor; larger ones are described

_NUMPY_NAMES = {"bfloat16": "<u2"}  # read as its upper half of a float32


def json_value(value: object) -> Any:
    """`value` in JSON's types: stand-ins as `{"class": ..., ...}`, small tensors as nested lists, dtypes as names.

    What is nested deeper than 64 levels, or comes after 20,000 values, becomes "...".
    """
    return _Converter().convert(value, 0)


class _Converter:
    def __init__(self) -> None:
        self._left = MAX_NODES

    def convert(self, value: object, depth: int) -> Any:
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            return "..."
        if isinstance(value, dict):
            return {_name(key): self.convert(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset) and not isinstance(value, TorchDtype):
            return [self.convert(item, depth + 1) for item in value]
        if isinstance(value, StandIn):
            return self._stand_in(value, depth)
        return _leaf(value)

    def _stand_in(self, value: StandIn, depth: int) -> Any:
        described: dict[str, Any] = {"class": f"{value.module}.{value.qualname}"}
        if value.args:
            described["args"] = self.convert(value.args, depth + 1)
        if value.state is not None:
            described["state"] = self.convert(value.attributes or value.state, depth + 1)
        return described


def _leaf(value: object) -> Any:
    if isinstance(value, TorchDtype):
        return f"torch.{value.name}"
    if isinstance(value, StoredTensor):
        return _tensor(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes": len(value)}
    if isinstance(value, type) and issubclass(value, StandIn):
        return f"{value.module}.{value.qualname}"
    finite = not isinstance(value, float) or value - value == 0  # JSON has no inf and nan
    return value if finite and isinstance(value, bool | int | float | str | None) else str(value)


def _name(key: object) -> str:
    """A dict key as text; of containers only plain ones are spelled out."""
    if isinstance(key, TorchDtype):
        return f"torch.{key.name}"
    if isinstance(key, tuple):
        return f"({', '.join(_name(part) if not isinstance(part, tuple) else '...' for part in key)})"
    return str(key) if isinstance(key, str | int | float | bool | None) else type(key).__name__


def _tensor(tensor: StoredTensor) -> Any:
    """Nested lists of numbers; a description when it is large or of a type numpy has not."""
    import numpy as np

    name = _NUMPY_NAMES.get(tensor.dtype, tensor.dtype)
    if tensor.dtype.startswith(("float8", "complex")) or len(tensor.data) > MAX_ELEMENTS * 8:
        return {"dtype": tensor.dtype, "shape": list(tensor.shape)}
    array = np.frombuffer(tensor.data, np.dtype(name).newbyteorder("<"))
    if tensor.dtype == "bfloat16":
        array = (array.astype("<u4") << 16).view("<f4")
    return json_value(array.reshape(tensor.shape).tolist())
