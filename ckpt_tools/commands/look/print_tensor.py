"""`print-tensor`: a stored tensor or object, or a parameter of the model; only the part that is asked for is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.close_names import close_names
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.read_model import Wanted, read_model
from ckpt_tools.commands.look.read_values import json_value
from ckpt_tools.errors import CkptError, MappingError, UsageError
from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.formats.storage.files import AnyPath, path_text
from ckpt_tools.formats.torch_archive.item_reader import load_object
from ckpt_tools.megatron.keys import one_expert
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog, Chunk
from ckpt_tools.model.dtypes import CASTABLE, itemsize
from ckpt_tools.model.kernels.casts import Array, raw_dtype
from ckpt_tools.model.target import TargetTensor, target_of
from ckpt_tools.plan.byte_runs import row_major_tiles

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
        if key in opened.catalog.objects:
            if part is not None:
                raise UsageError(f"{key} is an object, not a tensor; --slice does not apply")
            value = load_object(opened.files, opened.catalog.objects[key].item, trust_pickle)
            return Printed(opened.location.path, key, None, values=json_value(value))
        entry = opened.catalog.tensors.get(key)
        if entry is None or role is not None:
            target, catalog = _parameter(opened, key, role)
            return _printed(opened, catalog, target, (), part, stats)
        target = target_of(key, entry.value)
        return _printed(opened, opened.catalog, target, entry.chunks, part, stats)


def _parameter(opened: Opened, name: str, role: str | None) -> tuple[TargetTensor, Catalog]:
    """A value of a parameter of the model, and the catalog that has its sources."""
    keys = [*opened.catalog.tensors, *opened.catalog.objects]
    try:
        model = read_model(opened, Wanted(unknown_keys=True))
    except CkptError:
        raise MappingError(_no_such_key(name, keys)) from None
    by_name = {one_expert(p.name, p.expert): p for p in model.parameters}
    parameter = by_name.get(name)
    if parameter is None:
        raise MappingError(_no_such_key(name, [*keys, *by_name]))
    values = parameter.values
    wanted = role or ("master" if "master" in values else "weight")
    value = values.get(wanted)
    if value is None:
        raise MappingError(f"{name} has no {wanted}, only {', '.join(values)}")
    return target_of(f"{name} ({wanted})", value), model.catalog


def _printed(
    opened: Opened,
    catalog: Catalog,
    target: TargetTensor,
    chunks: Sequence[Chunk],
    part: str | None,
    stats: bool,
) -> Printed:
    box, indexed = (_corner(target.shape), ()) if part is None else parse_slice(part, target.shape)
    over = full_box(target.shape) if part is None else box
    with closing(BoxReader(opened.files, catalog)) as reader:
        read = reader.tensor(target)
        values = to_numbers(read(box), target.dtype).squeeze(indexed).tolist()
        statistics = _statistics(read, over, target.dtype) if stats else {}
    stored = tuple((chunk.box, chunk.item.file) for chunk in chunks)
    return Printed(
        opened.location.path, target.key, target.dtype, target.shape, box, values, stored, statistics
    )


def to_numbers(values: Array, dtype: str) -> Array:
    """Values as numbers that Python can print; 8-bit floats as their bits."""
    from ckpt_tools.verify.compare.arrays import to_float64

    return to_float64(values.view(raw_dtype(dtype)), dtype) if dtype in CASTABLE else values


def _statistics(read: Any, box: Box, dtype: str) -> dict[str, Any]:
    from ckpt_tools.verify.content.values import Statistics

    found = Statistics()
    for tile in row_major_tiles(box, _TILE_BYTES // itemsize(dtype)):
        if not tile.is_empty:
            found.add(read(tile).view(raw_dtype(dtype)), dtype)
    return found.summary()


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
            low, high, _ = slice(_number(match[2]), _number(match[3])).indices(shape[d])
            start[d], size[d] = low, max(high - low, 0)
    return Box(tuple(start), tuple(size)), tuple(indexed)


def _number(text: str) -> int | None:
    return int(text) if text else None


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
