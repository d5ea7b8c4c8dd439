"""Are the stored bytes the ones that were written, and are they numbers: one pass over every item.

Every record of every archive is summed and compared with the CRC-32 its writer stored, also of the archives that
are a file of their own (`common.pt`); the same pass counts NaNs and infinities, sees second moments below zero, and
compares masters with weights that are stored in the same chunks. Memory is one buffer a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from itertools import chain, groupby
from typing import NamedTuple, TypeAlias

import numpy as np

from ckpt_tools.errors import CkptError
from ckpt_tools.execute.move.source_reader import frame_reads, has_stores, store_ranges
from ckpt_tools.execute.processes.team import Tick, start_jobs
from ckpt_tools.execute.proof.masters import rounding_mismatch, surely_rounds
from ckpt_tools.formats.storage import crc
from ckpt_tools.formats.storage.files import Files, readable_size
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.formats.torch_archive.item_reader import Stretch, find_tensor, whole_file
from ckpt_tools.formats.torch_archive.tensor_template import RECORDS, UsualItem, tensor_frame, usual_item
from ckpt_tools.formats.torch_archive.zip_archive import payload_offset, read_directory, stored_crc32
from ckpt_tools.megatron.keys import SQUARES, bucket_key, canonical_kind, state_key
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.model.dtypes import ITEMSIZE
from ckpt_tools.model.kernels.casts import Array
from ckpt_tools.model.roles import MASTER
from ckpt_tools.verify.content.values import Census
from ckpt_tools.verify.report import Check, Findings

BUFFER_BYTES = 512 << 10  # a multiple of every element size, and looked at before it leaves the cache
_BESIDE_ELEMS = 1 << 16  # of masters and of weights: with what is made of them they take as much
_HELD_BYTES = 64 << 10  # largest item that is read at once, not record by record


class Job(NamedTuple):
    """One stored item: of a tensor when it has an element type, else an object.

    A long tensor has several jobs, each with the bytes [start, stop) of the payload that it has in the usual frame.
    In any other frame the first does the work of all.
    """

    item: Item
    key: str
    where: str
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    start: int = 0
    stop: int = 0

    @property
    def nbytes(self) -> int:
        return self.stop - self.start if self.dtype is not None else self.item.length


class Scan(NamedTuple):
    """What a job has found: records with compared checksums, records without one, and problems."""

    census: Census
    compared: int = 0
    without: int = 0
    problems: tuple[str, ...] = ()
    part: tuple[UsualItem, int] | None = None  # the payload that a part was read of, and the part's CRC-32
    rounds: bool = False  # masters that were read with their weights: whether all round to them


def changed(name: str, item: Item, stretch: Stretch | UsualItem, found: int) -> str:
    start, nbytes, expected = stretch
    return (
        f"{name} in bytes {start}..{start + nbytes} of {item.file} has CRC-32 {found:08x}, its writer stored "
        f"{expected:08x}: bits have changed since"
    )


def scan_job(files: Files, job: Job, payload: UsualItem | None, buffer: Array, tick: Tick) -> Scan:
    if payload is None:
        return Scan(Census()) if job.start else _scan_item(files, job, buffer, tick)
    census = Census()
    part = Stretch(payload.start + job.start, job.nbytes, None)
    try:
        found = _look(_reader(files, job.item.file), part, buffer, tick, census, job.dtype)
    except CkptError as error:
        return Scan(census, problems=(str(error),))
    return Scan(census, part=(payload, found))


def scan_beside(
    files: Files, jobs: tuple[Job, Job], payloads: tuple[UsualItem, UsualItem], buffer: Array, tick: Tick
) -> tuple[Scan, Scan]:
    """fp32 masters and their bf16 weights, block by block: the elements of two payloads from the same one on.

    Of masters that are near finite weights no more need be seen.
    """
    masters, weights = Census(), Census()
    sums, rounds = [0, 0], True
    try:
        for first in range(jobs[1].start // 2, jobs[1].stop // 2, _BESIDE_ELEMS):
            count = min(_BESIDE_ELEMS, jobs[1].stop // 2 - first)
            blocks = buffer[: 4 * count], buffer[4 * count : 6 * count]
            for n, (block, width) in enumerate(zip(blocks, (4, 2), strict=True)):
                files.read_into(jobs[n].item.file, payloads[n].start + first * width, block.data)
                sums[n] = crc.crc32(block.data, sums[n])
            values = blocks[0].view(np.float32), blocks[1].view(np.uint16)
            weights.add(blocks[1], "bfloat16")
            if rounds and weights.are_finite and surely_rounds(*values):
                masters.elements += count
            else:
                masters.add(blocks[0], "float32")
                rounds = rounds and not rounding_mismatch(values[0], "float32", values[1], "bfloat16").any()
            tick(6 * count)
    except CkptError:  # reported by the scan of each alone
        return (
            scan_job(files, jobs[0], payloads[0], buffer, tick),
            scan_job(files, jobs[1], payloads[1], buffer, tick),
        )
    return (
        Scan(masters, part=(payloads[0], sums[0]), rounds=rounds),
        Scan(weights, part=(payloads[1], sums[1])),
    )


class _Reader(NamedTuple):
    """Reads one file."""

    read: Callable[[int, int], bytes]  # so many bytes at an offset
    read_into: Callable[[int, memoryview], None]  # all of a buffer, from an offset


def _reader(files: Files, file: str) -> _Reader:
    return _Reader(partial(files.read, file), partial(files.read_into, file))


def _reader_of(files: Files, item: Item) -> _Reader:
    """Who reads the file of an item; a small item is read once, however many records it has."""
    direct = _reader(files, item.file)
    if item.length > _HELD_BYTES:
        return direct
    try:
        held = direct.read(item.offset, item.length)
    except CkptError:  # reported by the scan
        return direct

    def read(at: int, length: int) -> bytes:
        first = at - item.offset
        if first < 0 or length < 0 or first + length > item.length:
            return direct.read(at, length)
        return held[first : first + length]

    def read_into(at: int, buffer: memoryview) -> None:
        buffer[:] = read(at, len(buffer))

    return _Reader(read, read_into)


def _look(
    reader: _Reader, stretch: Stretch, buffer: Array, tick: Tick, census: Census, dtype: str | None
) -> int:
    """CRC-32 of a byte range of a file; with a `dtype` its elements are counted in the census."""
    found = 0
    for at in range(0, stretch.nbytes, len(buffer)):
        part = buffer[: min(len(buffer), stretch.nbytes - at)]
        reader.read_into(stretch.start + at, part.data)
        found = crc.crc32(part.data, found)
        if dtype is not None:
            census.add(part, dtype)
        tick(len(part))
    return found


def _scan_item(files: Files, job: Job, buffer: Array, tick: Tick) -> Scan:
    """Every record of any archive."""
    census = Census()
    compared = without = 0
    problems = []
    try:
        reader = _reader_of(files, job.item)
        for name, stretch, is_payload in _stretches(files, reader, job.item, job.dtype):
            dtype = job.dtype if is_payload else None
            found = _look(reader, stretch, buffer, tick, census, dtype)
            if stretch.crc32 is None:
                without += 1
                continue
            compared += 1
            if found != stretch.crc32:
                problems.append(changed(name, job.item, stretch, found))
    except CkptError as error:
        problems.append(str(error))
    return Scan(census, compared, without, tuple(problems))


def _stretches(
    files: Files, reader: _Reader, item: Item, dtype: str | None
) -> Iterator[tuple[str, Stretch, bool]]:
    """(name, bytes, is a tensor's payload) of every record that an archive holds."""
    place = f"{files.location.rstrip('/')}/{item.file} at byte {item.offset}"

    def read(offset: int, length: int) -> bytes:
        return reader.read(item.offset + offset, length)

    tensor = find_tensor(files, item) if dtype is not None else None
    payload = (tensor.payload_offset, tensor.nbytes) if tensor else None
    seen = False
    for record in read_directory(read, item.length, place).values():
        start = item.offset + payload_offset(read, record, place)
        is_payload = (start, record.size) == payload
        seen = seen or is_payload
        yield f"record {record.name!r}", Stretch(start, record.size, stored_crc32(record)), is_payload
    if payload is not None and not seen:  # a part of its storage only
        yield "the payload", Stretch(*payload, None), True


_PART_BYTES = 32 << 20  # of a payload, read by one thread
_PAYLOADS = 1024  # most cached payload places: parts of a long tensor are read at about the same time


Work: TypeAlias = tuple[Job] | tuple[Job, Job]
"""What is read by one thread: a job, or that of some masters and that of their weights."""


class Scanned(NamedTuple):
    """The checks `checksums` (of records) and `values` (of tensors); pairs of items of which each element rounds.

    `in_buckets`: what is an error in items of flat buckets unless they are gaps between parameters.
    """

    checks: tuple[Check, Check]
    rounded: frozenset[tuple[Item, Item]]
    in_buckets: Mapping[Item, list[str]]


class _Buffers(threading.local):
    """The buffer of a thread, and the items with frames already read ahead."""

    def __init__(self) -> None:
        self.array = np.empty(BUFFER_BYTES, np.uint8)
        self.framed: set[Item] = set()


@contextmanager
def scanning(
    files: Files,
    catalog: Catalog,
    *,
    threads: int = 2,
    workers: int | None = None,
    allow_nonfinite: bool = False,
    tick: Tick = lambda _: None,
    pairs: Mapping[Item, Item] | None = None,
) -> Iterator[Callable[[Collection[str]], Scanned]]:
    """Give the block a function that returns what was found, given the keys of means of squares.

    Other processes read already when the block starts. `tick` gets the bytes read. `pairs` maps items
    of fp32 masters to the items of bf16 weights that are read with them.
    """
    buffers = _Buffers()

    def scan(work: Work, count: Tick) -> tuple[Scan, ...]:
        jobs = [(job, payload_of(job.item, job.dtype, job.shape)) for job in work]
        if len(work) == 2:
            first, second = (payload for _, payload in jobs)
            if first is not None and second is not None:
                return scan_beside(files, work, (first, second), buffers.array, count)
        return tuple(scan_job(files, job, payload, buffers.array, count) for job, payload in jobs)

    def reads(work: Work) -> Iterator[Range]:
        return chain.from_iterable(_reads(files, job, buffers.framed) for job in work)

    payload_of = lru_cache(_PAYLOADS)(partial(_payload_of, files))

    pairs = pairs or {}
    jobs = (*_jobs(files, catalog, set(pairs.values())), *_archive_files(files))
    works = sorted(_beside(jobs, pairs), key=lambda work: work[0].item)
    with start_jobs(
        scan,
        works,
        sizes=[sum(job.nbytes for job in work) for work in works],
        threads=threads,
        workers=workers,
        tick=tick,
        reads=reads if has_stores(files) else None,
    ) as results:
        yield lambda squares: _scanned(files, catalog, works, results(), allow_nonfinite, squares)


def _beside(jobs: Iterable[Job], pairs: Mapping[Item, Item]) -> Iterator[Work]:
    """The jobs, those of masters with those of their weights: of both as many elements, part by part."""
    parts: dict[Item, list[Job]] = {item: [] for pair in pairs.items() for item in pair}
    for job in jobs:
        if job.item in parts:
            parts[job.item].append(job)
        else:
            yield (job,)
    for master, weight in pairs.items():
        mine, its = parts.pop(master, []), parts.pop(weight, [])
        if [(job.start, job.stop) for job in mine] == [(2 * job.start, 2 * job.stop) for job in its]:
            yield from zip(mine, its, strict=True)
        else:
            yield from ((job,) for job in (*mine, *its))


def _scanned(
    files: Files,
    catalog: Catalog,
    works: Sequence[Work],
    found: Sequence[tuple[Scan, ...]],
    allow_nonfinite: bool,
    squares: Collection[str],
) -> Scanned:
    masters = [(work, scans[0]) for work, scans in zip(works, found, strict=True) if len(work) == 2]
    wrong = {work[0].item for work, scan in masters if not scan.rounds}
    rounded = frozenset((m.item, w.item) for (m, w), _ in masters if m.item not in wrong)
    scans = sorted(zip(chain(*works), chain(*found), strict=True), key=lambda one: one[0].item)
    by_item = [*_by_item(scans)]
    in_buckets = dict[Item, list[str]]()
    for job, scan in by_item:
        if bucket := bucket_key(job.key):
            for message, is_allowed in _wrong(scan.census, job.dtype or "", bucket.kind in SQUARES):
                if not (is_allowed and allow_nonfinite):
                    in_buckets.setdefault(job.item, []).append(message)
    return Scanned(_checks(files, catalog, by_item, allow_nonfinite, squares), rounded, in_buckets)


def _wrong(count: Census, dtype: str, is_square: bool) -> Iterator[tuple[str, bool]]:
    """What values cannot be, and whether `allow_nonfinite` is about it."""
    if is_square and (lowest := count.lowest(dtype)):
        yield f"{lowest:.4g} is in it; squares are never negative, and its root is NaN", False
    if not count.are_finite:
        yield f"{count.nans} NaN and {count.infinities} infinite of {count.elements} elements", True


def _checks(
    files: Files,
    catalog: Catalog,
    scans: Iterable[tuple[Job, Scan]],
    allow_nonfinite: bool,
    squares: Collection[str],
) -> tuple[Check, Check]:
    sums, values = Findings("checksums", "records"), Findings("values", "elements")
    census: dict[str, Census] = {key: Census() for key in catalog.tensors}
    without = 0
    for job, scan in scans:
        sums.looked_at += scan.compared
        without += scan.without
        for problem in scan.problems:
            sums.error(job.where, problem)
        if job.key in census:
            census[job.key].join(scan.census)
    if without:
        sums.warning(
            files.location, f"{without} records were written without a checksum and could not be compared"
        )
    for key, count in census.items():
        values.looked_at += count.elements
        for message, is_allowed in _wrong(count, catalog.tensors[key].dtype, key in squares):
            if bucket_key(key):  # gaps between parameters are uninitialised memory in every checkpoint
                values.warning(key, f"{message}; they may lie in the alignment gaps of the bucket")
            elif allow_nonfinite and is_allowed:
                values.warning(key, message)
            else:
                values.error(key, message)
    return sums.done(), values.done()


def _by_item(scans: Iterable[tuple[Job, Scan]]) -> Iterator[tuple[Job, Scan]]:
    """Every item once, in file order."""
    for _, group in groupby(scans, key=lambda one: (one[0].item, one[0].where)):
        parts = list(group)
        yield parts[0][0], _joined(parts)


def _jobs(files: Files, catalog: Catalog, halved: Collection[Item]) -> Iterator[Job]:
    """Every stored item; an alias is scanned for each of its keys. Parts of `halved` items have half the bytes."""
    size_of = cache(partial(readable_size, files))
    for key, entry in catalog.tensors.items():
        for chunk in entry.chunks:
            item, nbytes = chunk.item, chunk.item.length
            if not item.bare and entry.dtype in ITEMSIZE:
                nbytes = min(nbytes, chunk.box.volume * ITEMSIZE[entry.dtype])
            is_there = item.offset + item.length <= size_of(item.file)  # else one finds that it is not
            step = (_PART_BYTES >> (item in halved)) if is_there else max(nbytes, 1)
            for start in range(0, nbytes, step) or (0,):
                stop = min(start + step, nbytes)
                yield Job(item, key, f"{key} {chunk.box}", entry.dtype, chunk.box.size, start, stop)
    for key, stored in catalog.objects.items():
        yield Job(stored.item, key, key)


def _archive_files(files: Files) -> Iterator[Job]:
    """The files that `torch.save` wrote next to the items: the common state, Bridge's progress."""
    for name in files.list():
        if name.endswith(".pt"):
            yield Job(whole_file(files, name), name, name)


def _joined(parts: Sequence[tuple[Job, Scan]]) -> Scan:
    """What the jobs of one item have found together."""
    whole = Scan(
        Census(),
        sum(scan.compared for _, scan in parts),
        sum(scan.without for _, scan in parts),
        tuple(problem for _, scan in parts for problem in scan.problems),
    )
    found, payload, item = 0, None, parts[0][0].item
    for job, scan in parts:
        whole.census.join(scan.census)
        if scan.part is not None:
            payload, checksum = scan.part
            found = crc.combine(found, checksum, job.nbytes)
    if payload is None or item.bare or whole.problems:  # safetensors has no checksums at all
        return whole
    if payload.crc32 is None:
        return whole._replace(compared=RECORDS - 1, without=1)
    if found == payload.crc32:
        return whole._replace(compared=RECORDS)
    problem = changed("record 'archive/data/0'", item, payload, found)
    return whole._replace(compared=RECORDS, problems=(problem,))


def _reads(files: Files, job: Job, framed: set[Item]) -> Iterator[Range]:
    """What a job reads of a store if its item has the usual form; `framed`: items with frames already read."""
    item, start = job.item, job.item.offset
    if job.dtype is None:
        yield from store_ranges(files, item.file, start, start + item.length)
        return
    if not item.bare:
        frame = tensor_frame(job.dtype, job.shape)
        if frame.length != item.length:
            return
        start += len(frame.head)
        if item not in framed:
            yield from frame_reads(files, item, len(frame.head), frame.tail_bytes)
        if job.nbytes < frame.payload_bytes:
            framed.add(item)
    yield from store_ranges(files, item.file, start + job.start, start + job.stop)


def _payload_of(files: Files, item: Item, dtype: str | None, shape: tuple[int, ...]) -> UsualItem | None:
    """Where a tensor's payload lies; None if that takes a closer look, which explains what is wrong."""
    if dtype is None:
        return None
    if item.bare:
        return UsualItem(item.offset, item.length, None)
    try:
        return usual_item(files, item, dtype, shape)
    except CkptError:
        return None


def master_pairs(catalog: Catalog) -> dict[Item, Item]:
    """Map the item of each fp32 master chunk to that of the bf16 weight's chunk at the same place, if any.

    Names and boxes alone are looked at. Whether the two must round to each other is for the model to say.
    """
    pairs: dict[Item, Item] = {}
    for key, masters in catalog.tensors.items():
        state = state_key(key)
        if state is None or canonical_kind(state.kind) != MASTER:
            continue
        weights = catalog.tensors.get(state.weight)
        if weights is None or (masters.dtype, weights.dtype) != ("float32", "bfloat16"):
            continue
        items = {chunk.box: chunk.item for chunk in weights.chunks}
        pairs |= {c.item: items[c.box] for c in masters.chunks if c.box in items}
    return pairs
