"""Is the checkpoint whole, judged without reading its values: chunks, files, frames.

Nothing here knows what keys mean; `meaning.py` checks that.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import PurePosixPath

from ckpt_tools.errors import CkptError, UnsupportedCheckpointError
from ckpt_tools.execute.move.source_reader import frame_reads, has_stores
from ckpt_tools.formats.dcp.metadata_read import METADATA
from ckpt_tools.formats.dcp.save_plans import plan_problem
from ckpt_tools.formats.safetensors import what_is_not_told
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.prefetch import reading_ahead
from ckpt_tools.formats.torch_archive.item_reader import find_tensor, outline_object
from ckpt_tools.formats.torch_archive.tensor_template import usual_item
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.stored_values import check_object
from ckpt_tools.megatron.torch_dist.grids import incomplete_objects, object_grids
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.plan.overlap import entry_problem
from ckpt_tools.verify.report import Check, Findings

_AHEAD_BYTES = 8 << 20  # of frames in a store that are on their way
DATA_SUFFIXES = frozenset((".distcp", ".safetensors"))


def check_tiling(catalog: Catalog) -> Check:
    """Whether every element of every tensor is stored exactly once."""
    found = Findings("tiling", "chunks")
    for key, entry in catalog.tensors.items():
        found.looked_at += len(entry.chunks)
        problem = entry_problem(entry)
        if problem:
            found.error(key, problem)
        try:
            itemsize(entry.dtype)
        except UnsupportedCheckpointError as error:
            found.error(key, str(error))
    return found.done()


def check_shards(catalog: Catalog, common: CommonState) -> Check:
    """Whether every shard is there of the objects that are stored in shards."""
    found = Findings("shards", "objects")
    found.looked_at = len(object_grids(catalog.objects))
    for name, problem in incomplete_objects(catalog.objects, common):
        found.error(name, problem)
    return found.done()


def check_plans(files: Files, trust_pickle: bool = False) -> Check:
    """Whether torch can make the save plans that Megatron keeps next to the metadata."""
    found = Findings("save plans", "write items")
    found.looked_at, problem = plan_problem(files, trust_pickle)
    if problem:
        found.error(METADATA, problem)
    return found.done()


def check_planner(catalog: Catalog) -> Check:
    """Whether what torch's and Megatron's planners kept next to the keys fits them.

    torch names every key after its path in the state dict, and puts it back there when nobody gives a state dict.
    """
    found = Findings("planner", "keys")
    found.looked_at = len(catalog.planner_paths)
    keys = catalog.tensors.keys() | catalog.objects.keys()
    for key, path in catalog.planner_paths.items():
        if key not in keys:
            found.error(key, "the planner has a path for it, but nothing is stored under this key")
        elif ".".join(map(str, path)) != key:
            found.error(key, f"the planner puts it at {path}, which is not its name")
    if catalog.planner_paths:
        for key in sorted(keys - catalog.planner_paths.keys()):
            found.error(
                key, "the planner has no path for it, but for others: torch cannot say where it belongs"
            )
    for key, shape in (catalog.original_shapes or {}).items():
        entry = catalog.tensors.get(key)
        if entry is None or prod(shape) != entry.numel:
            stored = "nothing is stored under this key" if entry is None else f"{entry.shape} is stored"
            found.error(key, f"its shape before flattening was {shape}, but {stored}")
    return found.done()


def check_files(files: Files, catalog: Catalog) -> Check:
    """Whether every file exists, is long enough for its items, and no two items share a part of their bytes.

    Two keys may name the very same item (an alias). Data files that no item names are warned of.
    """
    found = Findings("files", "files")
    by_file: dict[str, list[tuple[Item, str]]] = {}
    for key, item in all_items(catalog):
        by_file.setdefault(item.file, []).append((item, key))
    for name, items in sorted(by_file.items()):
        found.looked_at += 1
        try:
            size = files.size(name)
        except CkptError as error:
            found.error(name, f"{error} {len(items)} items lie in it, the first is {items[0][1]}.")
            continue
        items.sort()
        beyond = [(item, key) for item, key in items if item.offset + item.length > size]
        if beyond:
            item, key = beyond[0]
            found.error(
                name,
                f"the file has {size} bytes, but {key} needs bytes {item.offset}..{item.offset + item.length} "
                f"({len(beyond)} of {len(items)} items do not fit). It is truncated; copy it again.",
            )
        for (a, key_a), (b, key_b) in pairwise(items):
            if a != b and b.offset < a.offset + a.length:
                found.error(
                    name,
                    f"{key_a} in bytes {a.offset}..{a.offset + a.length} and {key_b} in bytes "
                    f"{b.offset}..{b.offset + b.length} overlap",
                )
    for name in files.list():
        if PurePosixPath(name).suffix in DATA_SUFFIXES and name not in by_file:
            found.warning(name, "no item lies in this file: a left-over of another save?")
    if said := what_is_not_told(by_file):
        found.warning(files.location, said)
    return found.done()


def check_frames(files: Files, catalog: Catalog, trust_pickle: bool = False) -> Check:
    """Whether every item is a sound archive of the tensor that the metadata describes, or of a readable object.

    Items are visited in file order; of an archive only the directory and what describes its value is read. Those of
    a file that is not there are left to `check_files`, which says so once.
    """
    found = Findings("frames", "items")
    present = {name: files.exists(name) for name in {item.file for _, item in all_items(catalog)}}
    chunks = [
        (c.item, f"{key} {c.box}", e.dtype, c.box)
        for key, e in catalog.tensors.items()
        for c in e.chunks
        if present[c.item.file]
    ]
    ahead = _AHEAD_BYTES if has_stores(files) else 0
    with reading_ahead(
        sorted(chunks, key=lambda chunk: chunk[0]), lambda c: frame_reads(files, c[0]), ahead
    ) as inside:
        for item, where, dtype, box in inside:
            found.looked_at += 1
            try:
                problem = _frame_problem(files, item, dtype, box)
            except CkptError as error:
                found.failure(where, error)
                continue
            if problem is not None:
                found.error(where, problem)
    objects = [pair for pair in catalog.objects.items() if present[pair[1].item.file]]
    with reading_ahead(
        sorted({stored.item for _, stored in objects}), lambda item: frame_reads(files, item), ahead
    ) as items:
        # Many keys may name one item: fields of groups repeat.
        known = {item: _outline(files, item, trust_pickle) for item in items}
    for key, stored in sorted(objects, key=lambda pair: pair[1].item):
        found.looked_at += 1
        value = known[stored.item]
        try:
            if isinstance(value, CkptError):
                raise value
            check_object(key, value)
        except CkptError as error:
            found.failure(key, error)
    return found.done()


def _outline(files: Files, item: Item, trust_pickle: bool) -> object:
    """An object without the bytes of its tensors, or why the item is not a sound archive of a readable one."""
    try:
        return outline_object(files, item, trust_pickle)
    except CkptError as error:
        return error


def _frame_problem(files: Files, item: Item, dtype: str, box: Box) -> str | None:
    """Why the item does not hold a `dtype` tensor of the box's size, or None."""
    if item.bare:
        nbytes = box.volume * itemsize(dtype)
        return None if item.length == nbytes else f"{item.length} bytes are stored, {nbytes} are needed"
    if usual_item(files, item, dtype, box.size) is not None:
        return None
    tensor = find_tensor(files, item)
    if (tensor.dtype, tensor.shape) == (dtype, box.size):
        return None
    return (
        f"the metadata says {dtype} {box.size}, the item at byte {item.offset} of {item.file} holds "
        f"{tensor.dtype} {tensor.shape}"
    )


def all_items(catalog: Catalog) -> Iterator[tuple[str, Item]]:
    """Every stored item with its key: the chunks of all tensors, then the objects."""
    for key, entry in catalog.tensors.items():
        for chunk in entry.chunks:
            yield key, chunk.item
    for key, stored in catalog.objects.items():
        yield key, stored.item
