"""A checkpoint as an object: what is stored under its keys, and the values of its parameters, read when indexed.

    with ckpt_tools.open("run") as c:
        c["decoder.final_layernorm.weight"][:4]                          # four elements are read
        c.parameters["decoder.layers.0.mlp.linear_fc1.weight"].master    # of layers or flat buffers that hold all

Every format is read the same way: `torch_dist` with any optimizer layout, `fsdp_dtensor`, other torch distributed
checkpoints, Hugging Face models. An index reads the box that it needs, a slice with steps the box around it.

Arrays have numpy's types. Elements of types that numpy lacks (bfloat16, 8-bit floats) have those of `ml_dtypes` where
that package is installed, else they are float32, which holds all their values. Payloads are not proven against their
checksums here; `verify --content` does that.

`print-tensor` prints a stored tensor or object, or a parameter; only the part that is asked for is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ckpt_tools.close_names import close_names
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.read_model import Wanted, read_model
from ckpt_tools.commands.look.dcp_json import json_value
from ckpt_tools.errors import CkptError, MappingError, NoSuchKeyError, UsageError
from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.move.source_reader import index_of
from ckpt_tools.formats.storage.files import AnyPath, path_text
from ckpt_tools.formats.torch_archive.item_reader import load_object
from ckpt_tools.megatron.keys import one_expert
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.dtypes import CASTABLE, itemsize
from ckpt_tools.model.kernels.casts import Array, bfloat16_to_float32, numpy_dtype, raw_dtype
from ckpt_tools.model.kernels.kernel import MINIFLOATS, minifloat_values
from ckpt_tools.model.model import Model
from ckpt_tools.model.model import Parameter as ModelParameter
from ckpt_tools.model.target import TargetTensor, target_of
from ckpt_tools.plan.byte_runs import row_major_tiles
from ckpt_tools.verify.compare.arrays import to_float64
from ckpt_tools.verify.content.values import Statistics, decoded

MAX_SHOWN = 1000  # elements, unless a slice is asked for
_TILE_BYTES = 4 << 20
_PART = re.compile(r"\s*(?:(-?\d+)|(-?\d*)\s*:\s*(-?\d*))\s*")


@dataclass(frozen=True, slots=True)
class Printed:
    """A tensor (or the value of an object, with `dtype` None) and what was read of it."""

    checkpoint: str  # its folder
    key: str
    dtype: str | None
    shape: tuple[int, ...] = ()
    box: Box | None = None  # that `values` cover; None: no values were read
    values: Any = None  # nested lists, or the object's value in JSON's types
    chunks: tuple[tuple[Box, str], ...] = ()  # and the file of each
    statistics: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """In JSON's types; numbers that JSON has not become text."""
        return {
            "schema_version": 1,
            "checkpoint": self.checkpoint,
            "key": self.key,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "chunks": [{"start": box.start, "size": box.size, "file": file} for box, file in self.chunks],
            "shown": None if self.box is None else {"start": self.box.start, "size": self.box.size},
            "values": json_value(self.values),
            "statistics": json_value(dict(self.statistics)),
        }


def print_tensor(
    source: AnyPath,
    key: str,
    part: str | None = None,
    stats: bool = False,
    iteration: int | None = None,
    trust_pickle: bool = False,
    role: str | None = None,
) -> Printed:
    """The tensor or object stored under `key`, or the parameter of that name (see `Checkpoint.parameters`).

    Args:
        role: of a parameter, `exp_avg` for example; None: its master, else its weight.
        part: indices as numpy writes them, `0:2, :, 3`; None shows all of a tensor of up to 1,000 elements and the
            corner of a larger one.
        stats: count NaNs and so on over the whole tensor (or the part), tile by tile.

    Raises:
        MappingError: there is no such key, no such parameter, or it has no such role.
        UsageError: `part` does not fit the shape.
    """
    source = path_text(source)
    with open_checkpoint(source, iteration, trust_pickle) as opened:
        catalog, chunks = opened.catalog, tuple[tuple[Box, str], ...]()
        if key in catalog.objects:
            if part is not None:
                raise UsageError(f"{key} is an object, not a tensor; --slice does not apply")
            value = load_object(opened.files, catalog.objects[key].item, trust_pickle)
            return Printed(opened.location.path, key, None, values=json_value(value))
        entry = catalog.tensors.get(key)
        if entry is None or role is not None:
            target, catalog = _parameter(opened, key, role)
        else:
            target = target_of(key, entry.value)
            chunks = tuple((box, item.file) for box, item in entry.chunks)
        dtype, shape = target.dtype, target.shape
        box, indexed = (_corner(shape), ()) if part is None else parse_slice(part, shape)
        with closing(BoxReader(opened.files, catalog)) as reader:
            read, found = reader.tensor(target), Statistics()
            values = read(box)
            if dtype in CASTABLE:  # others are shown by their bits
                values = to_float64(values.view(raw_dtype(dtype)), dtype)
            over = full_box(shape) if part is None else box
            for tile in row_major_tiles(over, _TILE_BYTES // itemsize(dtype)) if stats else ():
                if not tile.is_empty:
                    found.add(read(tile).view(raw_dtype(dtype)), dtype)
        lists, statistics = values.squeeze(indexed).tolist(), found.summary() if stats else {}
        return Printed(opened.location.path, target.key, dtype, shape, box, lists, chunks, statistics)


def _parameter(opened: Opened, name: str, role: str | None) -> tuple[TargetTensor, Catalog]:
    """A value of a parameter of the model, and the catalog that has its sources."""
    keys = [*opened.catalog.tensors, *opened.catalog.objects]
    try:
        model = read_model(opened, Wanted(unknown_keys=True))
    except CkptError:
        raise MappingError(_no_such_key(name, keys)) from None
    by_name = _by_name(model)
    parameter = by_name.get(name)
    if parameter is None:
        raise MappingError(_no_such_key(name, [*keys, *by_name]))
    values = parameter.values
    wanted = role or ("master" if "master" in values else "weight")
    value = values.get(wanted)
    if value is None:
        raise MappingError(f"{name} has no {wanted}, only {', '.join(values)}")
    return target_of(f"{name} ({wanted})", value), model.catalog


def _by_name(model: Model) -> dict[str, ModelParameter]:
    return {one_expert(p.name, p.expert): p for p in model.parameters}


def parse_slice(text: str, shape: Sequence[int]) -> tuple[Box, tuple[int, ...]]:
    """The box that `0:2, :, 3` shows of a tensor of `shape`, and the dimensions with an index, which numpy drops.

    Dimensions that are not named are taken whole.
    """
    parts = text.strip("[] ").split(",") if text.strip("[] ") else []
    if len(parts) > len(shape):
        raise UsageError(f"--slice {text!r} has {len(parts)} parts, but the shape is {tuple(shape)}")
    start, size, indexed = [0] * len(shape), list(shape), list[int]()
    for d, part in enumerate(parts):
        match = _PART.fullmatch(part)
        if match is None:
            raise UsageError(f"--slice {text!r}: {part.strip()!r} is neither an index nor a range like 0:2")
        if match[1] is not None:
            index = int(match[1]) + (shape[d] if int(match[1]) < 0 else 0)
            if not 0 <= index < shape[d]:
                raise UsageError(
                    f"--slice {text!r}: index {match[1]} is outside of dimension {d}, which has {shape[d]}"
                )
            start[d], size[d] = index, 1
            indexed.append(d)
        else:
            ends = (int(match[i]) if match[i] else None for i in (2, 3))
            low, high, _ = slice(*ends).indices(shape[d])
            start[d], size[d] = low, max(high - low, 0)
    return Box(tuple(start), tuple(size)), tuple(indexed)


def _corner(shape: tuple[int, ...]) -> Box:
    """All of a small tensor, else its first elements along every dimension."""
    size = list(shape)
    while full_box(size).volume > MAX_SHOWN:
        d = max(range(len(size)), key=lambda d: size[d])
        size[d] = max(size[d] // 2, 1)
    return full_box(size)


def _no_such_key(key: str, keys: Sequence[str]) -> str:
    close = close_names(key, keys)
    hint = f" Did you mean {', '.join(close)}?" if close else " `inspect` lists the keys."
    return f"no tensor or object is stored under {key!r}.{hint}"


_TILE_ELEMS = 1 << 22  # read at a time: what is computed needs several arrays of a tile


def open(  # as gzip.open and h5py.File it is called by its module's name, `ckpt_tools.open`
    path: AnyPath, iteration: int | None = None, *, trust_pickle: bool = False
) -> Checkpoint:
    """What `path` means: a run's root, an iteration, a torch DCP folder, a Hugging Face model; or a URL.

    Close it when done, or use it in a `with`. Nothing but metadata and the common state is read until it is indexed.

    Raises:
        UnsupportedCheckpointError: nothing is there, or a kind that is not read.
        CorruptCheckpointError: it is damaged or hostile.
    """
    return Checkpoint(open_checkpoint(path_text(path), iteration, trust_pickle))


class Tensor:
    """A tensor of a checkpoint, read when it is indexed as numpy arrays are, or handed to `numpy.asarray`."""

    def __init__(self, reader: BoxReader, target: TargetTensor) -> None:
        self._reader, self._target = reader, target

    @property
    def dtype(self) -> str:
        """The stored element type in torch's spelling, `bfloat16` for example; see the module for that of arrays."""
        return self._target.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._target.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements in the stored type."""
        return full_box(self.shape).volume * itemsize(self.dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """What numpy would give for this basic index: integers, slices, `...`; only that is read."""
        parts = index if isinstance(index, tuple) else (index,)
        if not all(part is None or part is Ellipsis or _is_index(part) for part in parts):
            raise IndexError(
                "integers, slices and ... choose what is read; read it first, and index that by arrays and booleans"
            )
        np.broadcast_to(np.zeros((), np.uint8), self.shape)[
            index
        ]  # takes one byte, refuses what numpy refuses
        box, inside = _around(parts, self.shape)
        return self._read(box)[inside]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a tensor of a checkpoint is read into a new array")
        values = self._read(full_box(self.shape))
        return values if dtype is None else values.astype(dtype)

    def __repr__(self) -> str:
        return f"<{self._target.key}: {self.dtype} {list(self.shape)}>"

    def _read(self, box: Box) -> Array:
        values = np.empty(box.size, numpy_dtype(self.dtype))
        if not box.is_empty:
            read = self._reader.tensor(self._target)
            for tile in row_major_tiles(box, _TILE_ELEMS):
                values[index_of(tile.relative_to(box))] = read(tile)
        return _in_numpy(values, self.dtype)


def _is_index(part: object) -> bool:
    """A place along an axis; True and False are integers to Python, masks to numpy."""
    return isinstance(part, slice | int | np.integer) and not isinstance(part, bool)


def _around(parts: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """The smallest box around what an index shows, and the index inside of it."""
    given = sum(part is not None and part is not Ellipsis for part in parts)
    if not any(part is Ellipsis for part in parts):
        parts = (*parts, Ellipsis)
    at = next(i for i, part in enumerate(parts) if part is Ellipsis)
    parts = (*parts[:at], *[slice(None)] * (len(shape) - given), *parts[at + 1 :])
    start, size, inside = list[int](), list[int](), list[Any]()
    axis = 0
    for part in parts:
        if part is None:
            inside.append(None)
            continue
        first, count, rest = _on_axis(part, shape[axis])
        start.append(first)
        size.append(count)
        inside.append(rest)
        axis += 1
    return Box(tuple(start), tuple(size)), (..., *inside) if not inside else tuple(inside)


def _on_axis(part: Any, length: int) -> tuple[int, int, Any]:
    """Where the elements along one axis begin, how many lie around them, and the index among those."""
    if not isinstance(part, slice):
        number = int(part)
        return number + length * (number < 0), 1, 0
    chosen = range(length)[part]
    if not chosen:
        return 0, 0, slice(None)
    low, high = min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1])
    step = chosen.step
    return low, high - low + 1, slice(None, None, step)


def _in_numpy(values: Array, dtype: str) -> Array:
    """Values in a type that has them as numbers, see the module; `values` has the type `numpy_dtype`."""
    if numpy_dtype(dtype).name == dtype:
        return values
    try:
        import ml_dtypes
    except ImportError:
        if dtype == "bfloat16":
            return bfloat16_to_float32(values)
        if dtype in MINIFLOATS:
            return minifloat_values(dtype)[values]
        return decoded(values.reshape(-1), dtype).astype(np.float32).reshape(values.shape)
    return values.view(np.dtype(getattr(ml_dtypes, dtype)))


class Parameter:
    """A parameter of the model with its values by role: `weight`, `master`, `exp_avg`, `exp_avg_sq` and others.

    `fsdp_dtensor` keeps masters in the place of weights; `main` is the most exact value there is.
    """

    def __init__(self, reader: BoxReader, name: str, parameter: ModelParameter) -> None:
        self._reader, self._parameter = reader, parameter
        self.name = name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._parameter.shape

    @property
    def roles(self) -> tuple[str, ...]:
        """The values that there are."""
        return tuple(self._parameter.values)

    @property
    def main(self) -> Tensor:
        """The master, else the weight."""
        return self["master" if "master" in self._parameter.values else "weight"]

    def __getitem__(self, role: str) -> Tensor:
        _check_text(role, "roles", "exp_avg")
        value = self._parameter.values.get(role)
        if value is None:
            raise NoSuchKeyError(f"{self.name} has no {role}, only {', '.join(self.roles)}")
        return Tensor(self._reader, target_of(f"{self.name}, {role}", value))

    def __getattr__(self, role: str) -> Tensor:
        if role.startswith("_"):
            raise AttributeError(role)
        try:
            return self[role]
        except NoSuchKeyError as error:
            raise AttributeError(str(error)) from None

    def __repr__(self) -> str:
        return f"<parameter {self.name}: {list(self.shape)}, {', '.join(self.roles)}>"


class Parameters(Mapping[str, Parameter]):
    """The parameters by the names of `torch_dist` with layers and experts one by one."""

    def __init__(self, reader: BoxReader, model: Model) -> None:
        self._reader = reader
        self._by_name = _by_name(model)

    def __getitem__(self, name: str) -> Parameter:
        _check_text(name, "names", "decoder.final_layernorm.weight")
        found = self._by_name.get(name)
        if found is None:
            raise _absent("parameter", name, self._by_name)
        return Parameter(self._reader, name, found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


class Checkpoint(Mapping[str, Any]):
    """What is stored, by key: tensors as `Tensor`s, objects as their values. Close it, or use it in a `with`."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._readers: list[BoxReader] = []
        self._reader = self._reader_of(opened.catalog)

    @property
    def path(self) -> str:
        """The folder that holds the files."""
        return self._opened.location.path

    @property
    def format(self) -> str:
        """`torch_dist`, `fsdp_dtensor`, `dcp` or `safetensors`."""
        return self._opened.location.kind

    @property
    def iteration(self) -> int | None:
        """Training steps done, where the checkpoint tells."""
        return self._opened.location.iteration or self._opened.common.iteration

    @property
    def args(self) -> Mapping[str, Any]:
        """The training arguments; {} where none are stored."""
        return self._opened.common.args

    @property
    def catalog(self) -> Catalog:
        """Where every byte lies: keys, types, shapes, chunks, files, byte ranges."""
        return self._opened.catalog

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters of a Megatron checkpoint, whatever its format and its optimizer's layout."""
        model = read_model(self._opened, Wanted(unknown_keys=True))
        return Parameters(self._reader_of(model.catalog), model)

    def __getitem__(self, key: str) -> Any:
        _check_text(key, "keys", "decoder.final_layernorm.weight")
        catalog = self._opened.catalog
        entry = catalog.tensors.get(key)
        if entry is not None:
            return Tensor(self._reader, target_of(key, entry.value))
        stored = catalog.objects.get(key)
        if stored is None:
            raise _absent("tensor or object", key, [*catalog.tensors, *catalog.objects])
        return load_object(self._opened.files, stored.item, self._opened.trust_pickle)

    def __contains__(self, key: object) -> bool:
        return key in self._opened.catalog.tensors or key in self._opened.catalog.objects

    def __iter__(self) -> Iterator[str]:
        yield from self._opened.catalog.tensors
        yield from self._opened.catalog.objects

    def __len__(self) -> int:
        return len(self._opened.catalog.tensors) + len(self._opened.catalog.objects)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its files. Tensors that were handed out cannot be read any more."""
        for reader in self._readers:
            reader.close()
        self._opened.files.close()

    def __repr__(self) -> str:
        return f"<{self.format} checkpoint {self.path}: {len(self)} keys>"

    def _reader_of(self, catalog: Catalog) -> BoxReader:
        self._readers.append(BoxReader(self._opened.files, catalog))
        return self._readers[-1]


def _check_text(name: object, what: str, example: str) -> None:
    """Raise TypeError if a key is not a str: an index, for example."""
    if not isinstance(name, str):
        raise TypeError(f"{what} are text such as {example!r}, not {type(name).__name__}")


def _absent(what: str, name: str, names: Any) -> NoSuchKeyError:
    close = close_names(name, names)
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    return NoSuchKeyError(f"there is no {what} {name!r}.{hint}")
