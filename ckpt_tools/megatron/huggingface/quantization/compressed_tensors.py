"""Which encodings the `config_groups` of a compressed-tensors model allow for its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError, UnsupportedCheckpointError
from ckpt_tools.model.catalog import TensorEntry
from ckpt_tools.model.dtypes import Form
from ckpt_tools.model.kernels.kernel import Dequantize, Kernel
from ckpt_tools.model.kernels.packed import UnpackInt4

FP8, INT4 = "FP8 (compressed-tensors)", "INT4 (compressed-tensors, pack-quantized)"
_FORMATS = {FP8: ("float-quantized", "naive-quantized"), INT4: ("pack-quantized",)}


class Scheme(NamedTuple):
    """How the weights of one group are encoded."""

    kind: str  # FP8 or INT4
    strategy: str  # tensor, channel, group or block: what shares a scale
    group: int | None
    block: tuple[int, ...]
    symmetric: bool

    def kernel(self, stored: Sequence[TensorEntry], shape: tuple[int, ...], dtype: str) -> Kernel:
        """The kernel of a weight of `shape` that is stored as these codes and scales."""
        if self.symmetric != (len(stored) == 2):
            raise ValueError(f"zero points are {'not ' * self.symmetric}part of {self.strategy} {self.kind}")
        kernel = self._kernel(stored, shape, dtype)
        form = kernel.form([
            Form("float32" if number == 1 else entry.dtype, entry.shape) for number, entry in enumerate(stored)
        ])  # fmt: skip
        if form.shape != shape:
            raise ValueError(f"weight_shape is {shape}, its codes are {form.shape}")
        return kernel

    def _kernel(self, stored: Sequence[TensorEntry], shape: tuple[int, ...], dtype: str) -> Kernel:
        columns = max(1, shape[-1]) if shape else 1
        if self.kind == INT4:
            return UnpackInt4(columns, self.group or columns, dtype, not self.symmetric)
        rows = (1,) * (len(shape) - 1)
        blocks = {
            "tensor": () if stored[1].shape in ((), (1,)) else tuple(max(1, length) for length in shape),
            "channel": (*rows, columns),
            "group": (*rows, self.group or columns),
            "block": (*rows[1:], *self.block),
        }
        return Dequantize(stored[0].dtype, blocks[self.strategy], dtype)


class Schemes(NamedTuple):
    """All schemes of a model."""

    all: tuple[Scheme, ...]

    def kernels(
        self, kind: str, stored: Sequence[TensorEntry], shape: tuple[int, ...], dtype: str
    ) -> tuple[list[Kernel], list[str]]:
        """The different kernels that fit a weight stored like this, and why others do not."""
        kernels: list[Kernel] = []
        reasons = []
        for scheme in self.all:
            if scheme.kind != kind:
                continue
            try:
                kernel = scheme.kernel(stored, shape, dtype)
            except ValueError as error:
                reasons.append(str(error))
                continue
            if kernel not in kernels:
                kernels.append(kernel)
        return kernels, reasons


def schemes_of(settings: Mapping[str, Any]) -> Schemes:
    """The schemes of `config_groups`."""
    sparse = settings.get("sparsity_config") or {}
    if not isinstance(sparse, Mapping) or sparse.get("format", "dense") != "dense":
        raise _unread(f"sparsity_config {sparse!r}")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise MappingError(f"config.json: config_groups of compressed-tensors is {groups!r}, expected groups")
    found = [_scheme(name, group, settings.get("format")) for name, group in groups.items()]
    return Schemes(tuple(dict.fromkeys(scheme for scheme in found if scheme is not None)))


def _scheme(name: str, group: object, default: object) -> Scheme | None:
    if not isinstance(group, Mapping):
        raise MappingError(f"config.json: config_groups.{name} is {group!r}, expected a set of fields")
    weights = group.get("weights")
    if weights is None:  # activations only
        return None
    if not isinstance(weights, Mapping):
        raise MappingError(
            f"config.json: config_groups.{name}.weights is {weights!r}, expected a set of fields"
        )
    bits, number = weights.get("num_bits", 8), weights.get("type", "int")
    kind = {(8, "float"): FP8, (4, "int"): INT4}.get((bits, number)) if isinstance(number, str) else None
    stored = group.get("format") or default
    if kind is None:
        raise _unread(f"{name}: {bits}-bit {number}")
    if stored not in (*_FORMATS[kind], "mixed-precision"):
        raise _unread(f"{name}: {bits}-bit {number} in the format {stored!r}")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy not in (("tensor", "channel", "group", "block") if kind == FP8 else ("channel", "group")):
        raise _unread(f"{name}: {bits}-bit {number} with a scale for each {strategy}")
    if weights.get("actorder") == "group":
        raise _unread(f"{name}: columns in the order of their activations (actorder: group)")
    size = weights.get("group_size") if strategy == "group" else None
    block = weights.get("block_structure") if strategy == "block" else ()
    lengths = [
        *([size] if strategy == "group" else []),
        *(block if isinstance(block, list | tuple) else [block]),
    ]
    if not _are_lengths(lengths) or (strategy == "block" and len(lengths) != 2):
        raise MappingError(f"config.json: config_groups.{name}.weights has {strategy} lengths {lengths}")
    symmetric = bool(weights.get("symmetric", True))
    if kind == FP8 and not symmetric:
        raise _unread(f"{name}: 8-bit floats with zero points")
    return Scheme(kind, strategy, size, tuple(block or ()), symmetric)


def _are_lengths(values: Iterable[object]) -> bool:
    return all(type(value) is int and value > 0 for value in values)


def _unread(what: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"config.json: compressed-tensors, {what}, is not read; {FP8} and {INT4} are. Decompress it first "
        "(transformers: `from_pretrained(DIR, quantization_config=CompressedTensorsConfig(run_compressed=False))`, "
        "then `save_pretrained`), or import the model that it was quantized from"
    )
