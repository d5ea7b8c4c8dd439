"""Plans that copy no data file: the output gets hard links to the source's, and only what is new is written.

A link has the name that the file has in the source, so that every item keeps file, offset and length. What the plan
holds itself (objects, small whole tensors) goes into one more file. What the output leaves out stays in linked files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

from ckpt_tools.errors import UsageError, list_problems
from ckpt_tools.formats.torch_archive.zip_archive import ALIGNMENT
from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.target import Target, TargetTensor
from ckpt_tools.model.transfers import VERBATIM, OutputBlob, OutputItem, Plan, Transfer
from ckpt_tools.model.views import chunk_piece
from ckpt_tools.model.without_gc import without_gc
from ckpt_tools.plan.build import plan_digest


@without_gc()
def link_tensors(
    plan: Plan, target: Target, catalog: Catalog, stored: Catalog, nbytes: Callable[[str], int]
) -> Plan:
    """The plan of a distributed checkpoint, of `target` made from `catalog`, with every tensor where it is stored.

    Args:
        stored: what the source holds as tensors of its own.
        nbytes: the length of one of its files.

    Raises:
        UsageError: tensors that are not stored as the target has them.
    """
    linked: list[OutputItem] = []
    problems: list[str] = []
    for tensor in target.tensors:
        if why := _obstacle(tensor, catalog, stored):
            problems.append(f"{tensor.key}: {why}")
            continue
        key = tensor.sources[0].key
        for number, (box, item) in enumerate(stored.tensors[key].chunks):
            if box.is_empty and (0 not in tensor.shape or number):
                continue  # its offset could hide a real chunk, as in `build`
            whole = Transfer(key, item, tensor.dtype, box.size, chunk_piece(full_box(box.size)), VERBATIM)
            transfers = () if box.is_empty else (whole,)
            linked.append(OutputItem(tensor.key, box, tensor.dtype, *item[:3], transfers))
    if problems:
        raise UsageError(
            "--hard-link keeps data files as they are, but these tensors would change. Leave it out, and they are "
            f"copied:\n{list_problems(problems)}",
            problems,
        )
    blobs, sizes = _in_new_file(plan, stored)
    links = {name: nbytes(name) for name in dict.fromkeys(item.file for item in linked)}
    return _with_links(replace(plan, items=(), blobs=blobs, file_bytes=sizes), tuple(linked), links)


def link_files(plan: Plan, names: Mapping[str, int]) -> Plan:
    """The plan of a copy with links in the place of the files `names` (name -> length in bytes)."""
    kept = replace(
        plan,
        items=tuple(item for item in plan.items if item.file not in names),
        blobs=tuple(blob for blob in plan.blobs if blob.file not in names),
        file_bytes={name: size for name, size in plan.file_bytes.items() if name not in names},
    )
    return _with_links(kept, tuple(item for item in plan.items if item.file in names), names)


def _with_links(plan: Plan, linked: tuple[OutputItem, ...], links: Mapping[str, int]) -> Plan:
    sizes = {**plan.file_bytes, **links}
    of_all = plan_digest(
        (*linked, *plan.items), plan.blobs, sizes, plan.tensors, plan.paths, plan.original_shapes
    )
    digest = hashlib.sha256(f"links {sorted(links)} {of_all}".encode()).hexdigest()
    return replace(plan, linked=linked, links=links, digest=digest)


def _obstacle(tensor: TargetTensor, catalog: Catalog, stored: Catalog) -> str:
    """Why a tensor cannot stay where it is stored; empty if it can."""
    first, *more = tensor.sources or [None]
    if first is None or more or first.view:
        return "it is cut from what is stored, or joined of it"
    entry, here = catalog.tensors[first.key], stored.tensors.get(first.key)
    if entry.made is not None or here is None or entry != here:
        return "it is not stored as a tensor, but computed or part of an object"
    if entry.dtype != tensor.dtype:
        return f"{entry.dtype} is cast to {tensor.dtype}"
    if entry.shape != tensor.shape:
        return f"its shape {entry.shape} becomes {tensor.shape}"
    inner = next((item.file for _, item in entry.chunks if "/" in item.file), None)
    return "" if inner is None else f"it lies in {inner}, in a folder inside the checkpoint"


def _in_new_file(plan: Plan, stored: Catalog) -> tuple[tuple[OutputBlob, ...], dict[str, int]]:
    """The plan's archives in a file of another name than the source's, and its length; equal ones share bytes."""
    taken = {item.file for entry in stored.tensors.values() for _, item in entry.chunks}
    taken |= {entry.item.file for entry in stored.objects.values()}
    file = next(name for number in count() if (name := f"__0_{number}.distcp") not in taken)
    places: dict[bytes, int] = {}
    end = 0
    for blob in plan.blobs:
        if blob.data not in places:
            places[blob.data] = start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + blob.length
    blobs = tuple(blob._replace(file=file, offset=places[blob.data]) for blob in plan.blobs)
    return blobs, {file: end} if end else {}
