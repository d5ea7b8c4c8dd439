"""Makes the plan: target tensors x their boxes x the source's chunks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

from ckpt_tools.errors import CorruptCheckpointError, MappingError, list_problems
from ckpt_tools.formats.torch_archive.tensor_template import EXTENT_BYTES, framed_tensor, tensor_frame
from ckpt_tools.formats.torch_archive.zip_archive import ALIGNMENT
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.target import InlineTensor, Target, TargetObject, TargetTensor
from ckpt_tools.model.transfers import (
    VERBATIM,
    Computation,
    OutputBlob,
    OutputItem,
    Plan,
    Strategy,
    TensorInfo,
    Transfer,
)
from ckpt_tools.model.without_gc import without_gc
from ckpt_tools.plan.digest import plan_digest
from ckpt_tools.plan.overlap import ChunkFinder, Located, TargetReader
from ckpt_tools.plan.strategy import strategy, transfer
from ckpt_tools.plan.tiling import tiling_problem

FILE_BYTES = 1 << 30  # a file that is this long gets no further item
SHARED_BYTES = 1 << 20  # so long a copy of a whole payload may begin behind a gap, for extents to be shared

Placement: TypeAlias = Callable[[TargetTensor], Sequence[tuple[int, Box]]]
"""The boxes of a tensor, in its global coordinates, and the target rank that owns each."""


def _file_name(rank: int, number: int) -> str:
    return f"__{rank}_{number}.distcp"


def file_rank(file: str) -> int:
    """The target rank of a file that `build_plan` named."""
    return int(file.split("_")[2])


class _Files:
    """The files of every target rank and the next free place in each, in bytes.

    A thread writes one file at a time, as file systems let only one write into a file; so that all threads have
    work, a rank's items stand in files `__<rank>_0.distcp`, `__<rank>_1.distcp` and so on, a next one from
    `FILE_BYTES` on.
    """

    def __init__(self, world: int) -> None:
        self._ends = [[0] for _ in range(world)]
        self._names = [_file_name(rank, 0) for rank in range(world)]  # of the file that is filled

    def place(self, rank: int, length: int, in_block: int | None = None) -> tuple[str, int]:
        """File and offset of `length` bytes, in the order of the calls; `in_block`: where in a block they begin."""
        ends = self._ends[rank]
        if ends[-1] >= FILE_BYTES:
            self._names[rank] = _file_name(rank, len(ends))
            ends.append(0)
        offset = -(-ends[-1] // ALIGNMENT) * ALIGNMENT
        if in_block is not None:
            offset += (in_block - offset) % EXTENT_BYTES
        ends[-1] = offset + length
        return self._names[rank], offset

    def sizes(self) -> dict[str, int]:
        """Length in bytes of every file that is not empty."""
        return {
            _file_name(rank, number): end
            for rank, ends in enumerate(self._ends)
            for number, end in enumerate(ends)
            if end
        }


@without_gc()
def build_plan(
    catalog: Catalog,
    target: Target,
    placement: Placement,
    world: int,
    blobs: Iterable[tuple[str, bytes]] = (),
    original_shapes: Mapping[str, tuple[int, ...]] | None = None,
    only: int | None = None,
) -> Plan:
    """The plan that writes `target` from `catalog` into the files of `world` target ranks.

    Args:
        placement: boxes and owners of each target tensor; the boxes must tile it.
        blobs: the archive of every object of the target, as (key, bytes).
        original_shapes: of states that stay N-D flattened in the target, as in `Catalog`.
        only: a target rank, to plan its file alone; `placement` then gives boxes of that rank, and nothing
            shows that the boxes of all ranks tile the tensors.
    """
    _check_unique(target)
    files = _Files(world)
    fixed = _place_blobs(target, blobs, files) if only in (None, 0) else ()
    maker = _Items(catalog, files, whole=only is None)
    items: list[list[OutputItem]] = [[] for _ in range(world)]
    problems: list[MappingError | CorruptCheckpointError] = []
    for tensor in target.tensors:
        try:
            for rank, item in maker.of(tensor, placement(tensor)):
                items[rank].append(item)
        except (MappingError, CorruptCheckpointError) as error:
            problems.append(error)
    raise_all(problems)
    info = cache(TensorInfo)  # alike for hundreds of thousands
    tensors = {t.key: info(t.dtype, t.shape) for t in target.inline}
    tensors |= {t.key: info(t.dtype, t.shape) for t in target.tensors}
    paths = {t.key: t.path or (t.key,) for t in _entries(target)}
    sizes = files.sizes()
    ordered = tuple(item for share in items for item in share)
    digest = plan_digest(ordered, fixed, sizes, tensors, paths, original_shapes)
    return Plan(ordered, fixed, sizes, tensors, paths, digest, original_shapes)


def _place_blobs(target: Target, blobs: Iterable[tuple[str, bytes]], files: _Files) -> tuple[OutputBlob, ...]:
    """Objects and inline tensors, which all go to target rank 0, in front of its items.

    Stock readers go by key to a byte range, so several keys may have the same one.
    """
    archives: list[tuple[str, Box | None, bytes]] = [(key, None, data) for key, data in blobs]
    for t in target.inline:
        expected = math.prod(t.shape) * itemsize(t.dtype)
        if len(t.data) != expected:
            raise MappingError(f"{t.key}: {t.dtype} {t.shape} needs {expected} bytes, but has {len(t.data)}")
        archives.append((t.key, full_box(t.shape), framed_tensor(t.dtype, t.shape, t.data)))
    given = [key for key, box, _ in archives if box is None]
    if len(given) != len(target.objects) or set(given) != {o.key for o in target.objects}:
        raise MappingError("the archives given are not those of the target's objects")
    places: dict[bytes, tuple[str, int]] = {}
    for _, _, data in archives:
        if data not in places:  # equal archives share their bytes: group fields repeat for every parameter
            places[data] = files.place(0, len(data))
    return tuple(OutputBlob(key, box, *places[data], data) for key, box, data in archives)


class _ItemForm(NamedTuple):
    """An item without the names of its tensor and sources: the states of a parameter have the same ones."""

    rank: int
    box: Box
    length: int  # bytes, container included
    zeros: int
    parts: tuple[tuple[Located, Strategy], ...]  # each with its strategy


class _Items:
    """Makes the items of one target tensor after another, and makes what is alike only once."""

    def __init__(self, catalog: Catalog, files: _Files, whole: bool) -> None:
        self._finder, self._files, self._whole = ChunkFinder(catalog), files, whole
        self._known: dict[tuple[object, ...], list[_ItemForm]] = {}

    def of(self, tensor: TargetTensor, boxes: Sequence[tuple[int, Box]]) -> Iterator[tuple[int, OutputItem]]:
        """(target rank, item) of every box."""
        if not boxes and not self._whole:
            return  # nothing of it stands in the one file that is planned
        reader = TargetReader(self._finder, tensor)
        key = (*reader.geometry(), *boxes)
        forms = self._known.get(key)
        if forms is None:
            if self._whole:
                _prove_tiling(tensor, boxes)
            forms = self._known[key] = list(_item_forms(reader, boxes))
        for rank, box, length, zeros, parts in forms:
            transfers = [transfer(reader, at, how, box) for at, how in parts]
            in_block = _as_in_source(transfers[0], tensor, box) if length >= SHARED_BYTES and parts else None
            name, offset = self._files.place(rank, length, in_block)
            yield (
                rank,
                OutputItem(tensor.key, box, tensor.dtype, name, offset, length, tuple(transfers), zeros),
            )


def _as_in_source(first: Transfer | Computation, tensor: TargetTensor, box: Box) -> int | None:
    """Where in a block an item begins so that its first payload lies there as in its source, and can be shared.

    None: it is not a whole payload, or the item would not be aligned. The source's head is taken for what torch
    writes now; where it is another, bytes are copied instead.
    """
    if first.strategy != VERBATIM or isinstance(first, Computation):
        return None
    heads = len(tensor_frame(first.dtype, first.shape).head) - len(tensor_frame(tensor.dtype, box.size).head)
    start = (first.item.offset + heads) % EXTENT_BYTES
    return None if start % ALIGNMENT or first.item.bare else start


def _prove_tiling(tensor: TargetTensor, boxes: Sequence[tuple[int, Box]]) -> None:
    problem = tiling_problem(full_box(tensor.shape), [box for _, box in boxes])
    if problem:
        raise MappingError(f"{tensor.key}: its placement does not tile shape {tensor.shape}: {problem}")


def _item_forms(reader: TargetReader, boxes: Sequence[tuple[int, Box]]) -> Iterator[_ItemForm]:
    tensor = reader.target
    for number, (rank, box) in enumerate(boxes):
        if box.is_empty and (0 not in tensor.shape or number):
            continue  # an empty shard: torch writes nothing, and its offset could hide a real chunk
        found = sorted(reader.locate(box), key=lambda at: at.piece.box.start)
        parts = [(at, strategy(reader, at, box)) for at in found]
        zeros = box.volume - sum(at.piece.box.volume for at in found)
        yield _ItemForm(rank, box, tensor_frame(tensor.dtype, box.size).length, zeros, tuple(parts))


def _entries(target: Target) -> list[TargetObject | InlineTensor | TargetTensor]:
    return [*target.objects, *target.inline, *target.tensors]


def _check_unique(target: Target) -> None:
    keys = [t.key for t in _entries(target)]
    if len(set(keys)) < len(keys):
        twice = [key for key, count in Counter(keys).items() for _ in range(count - 1)]
        raise MappingError("the target has keys more than once:\n" + list_problems(twice), twice)


def raise_all(problems: Sequence[MappingError | CorruptCheckpointError]) -> None:
    """Raise one error with all messages; damage of the source weighs more than a wrong mapping."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        kind = next((type(p) for p in problems if isinstance(p, CorruptCheckpointError)), MappingError)
        raise kind(
            f"{len(problems)} tensors cannot be planned:\n" + list_problems(map(str, problems)),
            map(str, problems),
        )
