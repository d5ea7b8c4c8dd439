"""Python values of a checkpoint as JSON values, whatever they are and however they refer to each other."""

from __future__ import annotations

from typing import Any

from ckpt_tools.formats.pickle.unpickle import StandIn, TorchDtype
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor

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
