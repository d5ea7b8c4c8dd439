"""The plan of a Hugging Face directory's weight files: headers as blobs, payloads bare, every offset fixed.

Wider element types come first, so that every tensor is aligned to its own width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ckpt_tools.errors import CorruptCheckpointError, MappingError
from ckpt_tools.formats.safetensors.catalog import safetensors_header
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.target import InlineTensor, TargetTensor
from ckpt_tools.model.transfers import OutputBlob, OutputItem, Plan, TensorInfo
from ckpt_tools.plan.build import raise_all
from ckpt_tools.plan.digest import plan_digest
from ckpt_tools.plan.overlap import ChunkFinder, TargetReader
from ckpt_tools.plan.strategy import transfers_into

ITEM_BYTES = 64 << 20  # a larger tensor is written as several items, by several workers


class WeightFile(NamedTuple):
    """A file and its tensors; those of `InlineTensor` have known bytes."""

    name: str
    tensors: Sequence[TargetTensor | InlineTensor]


def build_safetensors_plan(
    catalog: Catalog, files: Iterable[WeightFile], shapes: Mapping[str, tuple[int, ...]]
) -> Plan:
    """The plan that writes the weight files from `catalog`.

    `shapes` are the shapes that the headers give to tensors whose targets have split axes.
    """
    finder = ChunkFinder(catalog)
    items: list[OutputItem] = []
    blobs: list[OutputBlob] = []
    sizes: dict[str, int] = {}
    tensors: dict[str, TensorInfo] = {}
    problems: list[MappingError | CorruptCheckpointError] = []
    for file in files:
        ordered = sorted(file.tensors, key=lambda t: -itemsize(t.dtype))
        infos = {t.key: TensorInfo(t.dtype, shapes.get(t.key, t.shape)) for t in ordered}
        header = safetensors_header(infos)
        blobs.append(OutputBlob(file.name, None, file.name, 0, header))
        at = len(header)
        for tensor in ordered:
            if isinstance(tensor, InlineTensor):
                blobs.append(OutputBlob(tensor.key, full_box(tensor.shape), file.name, at, tensor.data))
            else:
                try:
                    items.extend(_items(finder, tensor, file.name, at))
                except (MappingError, CorruptCheckpointError) as error:
                    problems.append(error)
            at += prod(tensor.shape) * itemsize(tensor.dtype)
        sizes[file.name] = at
        tensors |= infos
    raise_all(problems)
    paths = {key: (key,) for key in tensors}
    digest = plan_digest(tuple(items), tuple(blobs), sizes, tensors, paths)
    return Plan(tuple(items), tuple(blobs), sizes, tensors, paths, digest)


def _items(finder: ChunkFinder, tensor: TargetTensor, file: str, at: int) -> Iterator[OutputItem]:
    """The tensor in runs of whole rows, from byte `at` of the file on."""
    reader = TargetReader(finder, tensor)
    for box in _runs(tensor):
        transfers = transfers_into(reader, box)
        zeros = box.volume - sum(t.box.volume for t in transfers)
        length = box.volume * itemsize(tensor.dtype)
        yield OutputItem(tensor.key, box, tensor.dtype, file, at, length, tuple(transfers), zeros, bare=True)
        at += length


def _runs(tensor: TargetTensor) -> Iterator[Box]:
    """Boxes of whole rows of at most `ITEM_BYTES`, or of one row."""
    whole = full_box(tensor.shape)
    if whole.volume == 0:
        return
    if not tensor.shape:
        yield whole
        return
    rows, rest = tensor.shape[0], tensor.shape[1:]
    step = max(1, ITEM_BYTES // (prod(rest) * itemsize(tensor.dtype)))
    for start in range(0, rows, step):
        yield Box((start, *(0,) * len(rest)), (min(step, rows - start), *rest))
