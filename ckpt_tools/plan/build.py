"""The plans: of a distributed checkpoint (target tensors x their boxes x the source's chunks), of safetensors files,
of a copy. And what belongs to any plan: its digest, its holes, and which worker carries out which items.

Safetensors files have headers as blobs and bare payloads. Wider element types come first, so that every tensor is
aligned to its own width.

A copy moves whole files as bytes. They are cut where a checksum of their writer begins and ends: a run that is a
payload carries the checksum in its archive, so that carrying out the plan proves it; frames and headers
between payloads carry none.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, islice, pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import orjson

from ckpt_tools.errors import CorruptCheckpointError, MappingError, list_problems
from ckpt_tools.formats.safetensors import safetensors_header
from ckpt_tools.formats.torch_archive.tensor_template import (
    EXTENT_BYTES,
    framed_tensor,
    likely_start,
    tensor_frame,
)
from ckpt_tools.formats.torch_archive.zip_archive import ALIGNMENT
from ckpt_tools.model.box import Box, full_box, row_major_strides
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.target import InlineTensor, Target, TargetObject, TargetTensor
from ckpt_tools.model.transfers import (
    RUNS,
    VERBATIM,
    Computation,
    OutputBlob,
    OutputItem,
    Plan,
    Strategy,
    TensorInfo,
    Transfer,
    only_zeros,
)
from ckpt_tools.model.views import Piece
from ckpt_tools.model.without_gc import without_gc
from ckpt_tools.plan.byte_runs import long_parts
from ckpt_tools.plan.overlap import (
    ChunkFinder,
    Located,
    TargetReader,
    strategy,
    tiling_problem,
    transfer,
    transfers_into,
)

_BATCH = 1000  # entries of a table that are spelled at once: all names of a large plan are 140 MiB


def plan_digest(
    items: Sequence[OutputItem],
    blobs: Sequence[OutputBlob],
    sizes: Mapping[str, int],
    tensors: Mapping[str, TensorInfo],
    paths: Mapping[str, tuple[str | int, ...]],
    original_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    state = hashlib.sha256()
    data_digest = cache(lambda data: hashlib.sha256(data).hexdigest())
    for item in items:
        copied = all(isinstance(one, Transfer) for one in item.transfers)
        state.update(_canonical(list(item), list if copied else _spelled))
    for blob in blobs:
        box = None if blob.box is None else list(blob.box)
        row = [blob.key, box, blob.file, blob.offset, data_digest(blob.data)]
        state.update(_canonical(row))
    shapes = [] if original_shapes is None else [original_shapes]
    tables: list[Mapping[str, Any]] = [sizes, tensors, paths, *shapes, {}]
    before = state.copy()
    try:
        for piece in _pieces(tables):
            state.update(piece)
    except orjson.JSONEncodeError:  # all tables are one value, spelled one way
        state = before
        state.update(json.dumps([dict(table) for table in tables]).encode())
    return state.hexdigest()


def _pieces(tables: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """The JSON of a list of dicts."""
    for number, table in enumerate(tables):
        yield b",{" if number else b"[{"
        rows, separator = iter(table.items()), b""
        while part := dict(islice(rows, _BATCH)):
            yield separator
            yield orjson.dumps(part, default=list)[1:-1]  # a named tuple is a list, as for `json`
            separator = b","
        yield b"}"
    yield b"]"


def _canonical(value: object, spelled: Callable[[Any], object] = list) -> bytes:
    """`value` as JSON; the slow way for what UTF-8 cannot spell, such as file names that are not text."""
    try:
        return orjson.dumps(value, default=spelled)
    except orjson.JSONEncodeError:
        return json.dumps(value, default=repr).encode()


def _spelled(value: object) -> object:
    """Items are nested named tuples; steps of views differ by their name alone. Kernels say what they are."""
    return [type(value).__name__, *value] if isinstance(value, tuple) else repr(value)


MIN_BYTES = 1 << 20  # a shorter run of zeros saves less than the room set aside around it is worth


class Hole(NamedTuple):
    start: int
    stop: int


def holes(plan: Plan, shares: Callable[[str], bool] = lambda _: False) -> Mapping[str, list[Hole]]:
    """By file, in order: where nothing is written.

    The payloads of long items that are nothing but zeros, and what lies in its block as in a source file of which the
    output `shares` blocks.
    """
    found: dict[str, list[Hole]] = {}
    for item in plan.items:
        if item.nbytes < MIN_BYTES:
            continue
        start = item.offset + (0 if item.bare else len(tensor_frame(item.dtype, item.box.size).head))
        if only_zeros(item.transfers) and not item.bare:
            found.setdefault(item.file, []).append(Hole(start, start + item.nbytes))
        elif not item.zero_elems:
            for copy in _long_copies(item.transfers, item.dtype, item.box.size):
                (source, at), to = _source(item.transfers, copy), start + copy.to
                if (at - to) % EXTENT_BYTES == 0 and shares(source):
                    first, stop = -(-to // EXTENT_BYTES), (to + copy.nbytes) // EXTENT_BYTES
                    blocks = Hole(first * EXTENT_BYTES, stop * EXTENT_BYTES)
                    found.setdefault(item.file, []).append(blocks)
    return {file: sorted(ranges) for file, ranges in found.items()}


def hole_bytes(found: Mapping[str, list[Hole]]) -> int:
    return sum(hole.stop - hole.start for ranges in found.values() for hole in ranges)


FILE_BYTES = 1 << 30  # a file that is this long gets no further item

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
    work, a rank's items go into files `__<rank>_0.distcp`, `__<rank>_1.distcp` and so on, a next one from
    `FILE_BYTES` on.
    """

    def __init__(self, world: int) -> None:
        self._ends = [[0] for _ in range(world)]
        self._names = [_file_name(rank, 0) for rank in range(world)]  # of the file that is filled

    def place(self, rank: int, length: int, in_block: int | None = None) -> tuple[str, int]:
        """File and offset of `length` bytes, in the order of the calls; `in_block`: of a block, where they begin."""
        ends = self._ends[rank]
        if ends[-1] >= FILE_BYTES:
            self._names[rank] = _file_name(rank, len(ends))
            ends.append(0)
        align, rest = (ALIGNMENT, 0) if in_block is None else (EXTENT_BYTES, in_block)
        offset = ends[-1] + (rest - ends[-1]) % align
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
    entries: list[TargetObject | InlineTensor | TargetTensor] = [
        *target.objects, *target.inline, *target.tensors
    ]  # fmt: skip
    twice = [key for key, count in Counter(t.key for t in entries).items() for _ in range(count - 1)]
    if twice:
        raise MappingError("the target has keys more than once:\n" + list_problems(twice), twice)
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
    info = cache(TensorInfo)  # the same for hundreds of thousands
    tensors = {t.key: info(t.dtype, t.shape) for t in target.inline}
    tensors |= {t.key: info(t.dtype, t.shape) for t in target.tensors}
    paths = {t.key: t.path or (t.key,) for t in entries}
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


class _LongCopy(NamedTuple):
    """A long gapless copy out of a part of an item, which can share blocks with its source."""

    number: int  # of the part
    first: int  # byte of the source's payload
    to: int  # byte of the item's payload
    nbytes: int


class _ItemForm(NamedTuple):
    """An item without the names of its tensor and sources: the states of a parameter have the same ones."""

    rank: int
    box: Box
    length: int  # bytes, container included
    zeros: int
    parts: tuple[tuple[Located, Strategy], ...]  # each with its strategy
    copies: tuple[_LongCopy, ...]


class _Items:
    """Makes the items of one target tensor after another, and what several share only once."""

    def __init__(self, catalog: Catalog, files: _Files, whole: bool) -> None:
        self._finder, self._files, self._whole = ChunkFinder(catalog), files, whole
        self._known: dict[tuple[object, ...], list[_ItemForm]] = {}

    def of(self, tensor: TargetTensor, boxes: Sequence[tuple[int, Box]]) -> Iterator[tuple[int, OutputItem]]:
        """(target rank, item) of every box."""
        if not boxes and not self._whole:
            return  # nothing of it is in the one file that is planned
        reader = TargetReader(self._finder, tensor)
        key = (*reader.geometry(), *boxes)
        forms = self._known.get(key)
        if forms is None:
            problem = tiling_problem(full_box(tensor.shape), [b for _, b in boxes]) if self._whole else None
            if problem:
                raise MappingError(
                    f"{tensor.key}: its placement does not tile shape {tensor.shape}: {problem}"
                )
            forms = self._known[key] = list(_item_forms(reader, boxes))
        for rank, box, length, zeros, parts, copies in forms:
            transfers = [transfer(reader, at, how, box) for at, how in parts]
            in_block = None
            if copies:
                phases = _phases(transfers, copies)
                head = tensor_frame(tensor.dtype, box.size).head
                in_block = max(phases, key=phases.__getitem__) - len(head)
            name, offset = self._files.place(rank, length, in_block)
            yield (
                rank,
                OutputItem(tensor.key, box, tensor.dtype, name, offset, length, tuple(transfers), zeros),
            )


def _long_copies(
    transfers: Iterable[Transfer | Computation], dtype: str, size: tuple[int, ...]
) -> Iterator[_LongCopy]:
    width, strides = itemsize(dtype), row_major_strides(size)
    for number, one in enumerate(transfers):
        for part in long_parts(one, dtype, size):
            to = sum(a * s for a, s in zip(part.box.start, strides, strict=True))
            yield _LongCopy(number, part.piece.offset * width, to * width, part.nbytes)


def _source(transfers: Sequence[Transfer | Computation], copy: _LongCopy) -> tuple[str, int]:
    """The file and the byte at which a copy is likely to begin; where it does not, nothing is shared."""
    one = transfers[copy.number]
    assert isinstance(one, Transfer)  # what is computed is not copied
    return one.item.file, likely_start(one.item, one.dtype, one.shape) + copy.first


def _phases(transfers: Sequence[Transfer | Computation], copies: Iterable[_LongCopy]) -> dict[int, int]:
    """Where in a block an item's payload may begin -> bytes of its copies that then lie there as in their sources."""
    found: dict[int, int] = {}
    for copy in copies:
        _, start = _source(transfers, copy)
        phase = (start - copy.to) % EXTENT_BYTES
        found[phase] = found.get(phase, 0) + copy.nbytes
    return found


def _item_forms(reader: TargetReader, boxes: Sequence[tuple[int, Box]]) -> Iterator[_ItemForm]:
    tensor = reader.target
    for number, (rank, box) in enumerate(boxes):
        if box.is_empty and (0 not in tensor.shape or number):
            continue  # an empty shard: torch writes nothing, and its offset could hide a real chunk
        found = sorted(reader.locate(box), key=lambda at: at.piece.box.start)
        parts = [(at, strategy(reader, at, box)) for at in found]
        zeros = box.volume - sum(at.piece.box.volume for at in found)
        transfers = [transfer(reader, at, how, box) for at, how in parts]
        copies = tuple(_long_copies(transfers, tensor.dtype, box.size))
        length = tensor_frame(tensor.dtype, box.size).length
        yield _ItemForm(rank, box, length, zeros, tuple(parts), copies)


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


ITEM_BYTES = 64 << 20  # a larger tensor is written as several items, by several workers


class WeightFile(NamedTuple):
    """A file and its tensors; those of `InlineTensor` have known bytes."""

    name: str
    tensors: Sequence[TargetTensor | InlineTensor]


def build_safetensors_plan(
    catalog: Catalog, files: Iterable[WeightFile], shapes: Mapping[str, tuple[int, ...]]
) -> Plan:
    """The plan that writes the weight files from `catalog`.

    `shapes` are the headers' shapes of tensors that have targets with split axes.
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
        made: list[OutputItem] = []
        inline: list[OutputBlob] = []
        at = 0  # counted from the end of the header
        for tensor in ordered:
            if isinstance(tensor, InlineTensor):
                inline.append(OutputBlob(tensor.key, full_box(tensor.shape), file.name, at, tensor.data))
            else:
                try:
                    made.extend(_items(finder, tensor, file.name, at))
                except (MappingError, CorruptCheckpointError) as error:
                    problems.append(error)
            at += prod(tensor.shape) * itemsize(tensor.dtype)
        header = _in_phase(safetensors_header(infos), made)
        start = len(header)
        blobs.append(OutputBlob(file.name, None, file.name, 0, header))
        blobs += [blob._replace(offset=start + blob.offset) for blob in inline]
        items += [item._replace(offset=start + item.offset) for item in made]
        sizes[file.name] = start + at
        tensors |= infos
    raise_all(problems)
    paths = {key: (key,) for key in tensors}
    digest = plan_digest(tuple(items), tuple(blobs), sizes, tensors, paths)
    return Plan(tuple(items), tuple(blobs), sizes, tensors, paths, digest)


def _in_phase(header: bytes, items: Iterable[OutputItem]) -> bytes:
    """The header of `items`, whose offsets count from its end, with spaces behind it.

    For most bytes to lie in their blocks as in their sources. A header's length is a multiple of 8.
    """
    votes: Counter[int] = Counter()
    for item in items:
        copies = _long_copies(item.transfers, item.dtype, item.box.size)
        for phase, nbytes in _phases(item.transfers, copies).items():
            votes[(phase - item.offset - len(header)) % EXTENT_BYTES] += nbytes
    gap = max((gap for gap in votes if gap % 8 == 0), key=votes.__getitem__, default=0)
    length = len(header) - 8 + gap
    return length.to_bytes(8, "little") + header[8:] + b" " * gap


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


PART_BYTES = 64 << 20  # a longer run is copied in several items, by several workers


class Run(NamedTuple):
    """A payload in a file: where, of what, and its CRC-32 if its writer kept one."""

    start: int
    nbytes: int
    key: str
    crc32: int | None


class RawFile(NamedTuple):
    """A file to copy: its length, payloads in order, and its first bytes where those are read already."""

    nbytes: int
    runs: Sequence[Run] = ()
    head: bytes = b""


def build_copy_plan(files: Mapping[str, RawFile]) -> Plan:
    """The plan that copies each file unchanged."""
    items: list[OutputItem] = []
    blobs: list[OutputBlob] = []
    for name, file in files.items():
        if file.head:
            blobs.append(OutputBlob(f"{name}[0:{len(file.head)}]", None, name, 0, file.head))
        for run in _all_runs(name, file):
            items += _run_items(name, run)
    sizes = {name: file.nbytes for name, file in files.items()}
    digest = plan_digest(tuple(items), tuple(blobs), sizes, {}, {})
    return Plan(tuple(items), tuple(blobs), sizes, {}, {}, digest)


def _all_runs(name: str, file: RawFile) -> Iterator[Run]:
    """The payloads, and runs for what lies before, between and behind them."""
    at = len(file.head)
    for run in file.runs:
        if run.start > at:
            yield Run(at, run.start - at, f"{name}[{at}:{run.start}]", None)
        if run.nbytes:
            yield run
        at = run.start + run.nbytes
    if file.nbytes > at:
        yield Run(at, file.nbytes - at, f"{name}[{at}:{file.nbytes}]", None)


def _run_items(name: str, run: Run) -> Iterator[OutputItem]:
    source = Item(name, run.start, run.nbytes, True, run.crc32)
    strategy: Strategy = VERBATIM if run.nbytes <= PART_BYTES else RUNS
    for first in range(0, run.nbytes, PART_BYTES):
        length = min(PART_BYTES, run.nbytes - first)
        piece = Piece(Box((0,), (length,)), first, (1,))
        transfer = Transfer(run.key, source, "uint8", (run.nbytes,), piece, strategy)
        box = Box((first,), (length,))
        yield OutputItem(run.key, box, "uint8", name, run.start + first, length, (transfer,), bare=True)


# Fixed cost of an item in bytes: finding payloads, framing, journalling (measured: 0.1 ms, at 1 GB/s).
ITEM_COST_BYTES = 100_000
# What a byte costs that is not just moved: a cast passes a dozen times over what it reads, a kernel over its inputs.
CAST_COST, COMPUTE_COST = 4, 6


def worker_share(items: Sequence[OutputItem], worker: int, workers: int) -> range:
    """Numbers of the items with their middle in the worker's part of the total cost.

    Neighbours stay together, so a worker reads and writes front to back and mostly has files to itself.
    Shares differ by at most the cost of one item.
    """
    bounds = neighbour_shares(map(_cost, items), workers)
    return range(bounds[worker], bounds[worker + 1])


def neighbour_shares(costs: Iterable[int], count: int) -> list[int]:
    """The number of the first item of each of `count` shares, and of all: an item belongs where its middle falls."""
    ends = list(accumulate(costs, initial=0))
    middles = [(start + end) / 2 for start, end in pairwise(ends)]
    return [*(bisect_left(middles, ends[-1] * part / count) for part in range(count)), len(middles)]


def _cost(item: OutputItem) -> int:
    """Of an item, in bytes that are moved."""
    if any(isinstance(t, Computation) for t in item.transfers):
        factor = COMPUTE_COST
    elif any(t.dtype != item.dtype for t in item.transfers):
        factor = CAST_COST
    else:
        factor = 1
    return item.length * factor + ITEM_COST_BYTES
