"""Are the stored bytes the ones that were written, and are they numbers: one pass over every item.

Every record of every archive is summed and compared with the CRC-32 its writer stored, also of the archives that
are a file of their own (`common.pt`); the same pass counts NaNs and infinities. Memory is one buffer a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ckpt_tools.errors import CkptError
from ckpt_tools.execute.source_reader import frame_reads, has_stores, store_ranges
from ckpt_tools.execute.spread import Tick, begun
from ckpt_tools.formats import crc
from ckpt_tools.formats.archive import payload_offset, read_directory, stored_crc32
from ckpt_tools.formats.container import Stretch, find_tensor, whole_file
from ckpt_tools.formats.files import Files
from ckpt_tools.formats.frames import RECORDS, UsualItem, tensor_frame, usual_item
from ckpt_tools.formats.read_ahead import Range
from ckpt_tools.model.casts import Array
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.model.dtypes import ITEMSIZE
from ckpt_tools.verify.report import Check, Findings
from ckpt_tools.verify.values import Census

_BUFFER_BYTES = 512 << 10  # a multiple of every element size, and looked at before it leaves the cache
_PART_BYTES = 32 << 20  # of a payload, read by one thread
_PAYLOADS = 1024  # whose places are kept: of long tensors several parts are read, about at one time
_BEHIND_BYTES = 256 << 20  # read by a worker while the first process looks at metadata


class _Job(NamedTuple):
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


class _Scan(NamedTuple):
    """What a job has found: records whose checksums were compared, or that have none, and what is wrong."""

    census: Census
    compared: int = 0
    without: int = 0
    problems: tuple[str, ...] = ()
    part: tuple[UsualItem, int] | None = None  # the payload that a part was read of, and the part's CRC-32


@contextmanager
def scanning(
    files: Files,
    catalog: Catalog,
    *,
    threads: int = 2,
    workers: int | None = None,
    allow_nonfinite: bool = False,
    tick: Tick = lambda _: None,
) -> Iterator[Callable[[], tuple[Check, Check]]]:
    """Give the block a function that returns the checks `checksums` (of records) and `values` (of tensors).

    Other processes have begun to read when the block does. `tick` is told the bytes read.
    """
    buffers = threading.local()

    def scan(job: _Job, told: Tick) -> _Scan:
        if not hasattr(buffers, "array"):
            buffers.array = np.empty(_BUFFER_BYTES, np.uint8)
        return _scan_job(files, job, payload_of(job.item, job.dtype, job.shape), buffers.array, told)

    def reads(job: _Job) -> Iterator[Range]:
        return _reads(files, job, buffers.__dict__.setdefault("told", set()))

    payload_of = lru_cache(_PAYLOADS)(partial(_payload_of, files))

    jobs = sorted((*_jobs(files, catalog), *_archive_files(files)), key=lambda job: job.item)
    with begun(
        scan,
        jobs,
        sizes=[job.nbytes for job in jobs],
        threads=threads,
        workers=workers,
        tick=tick,
        behind=_BEHIND_BYTES,
        reads=reads if has_stores(files) else None,
    ) as results:
        yield lambda: _checks(files, catalog, _by_item(jobs, results()), allow_nonfinite)


def _checks(
    files: Files, catalog: Catalog, scans: Iterable[tuple[_Job, _Scan]], allow_nonfinite: bool
) -> tuple[Check, Check]:
    from ckpt_tools.megatron.keys import bucket_key  # not before the other processes have begun

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
        if not count.nans and not count.infinities:
            continue
        message = f"{count.nans} NaN and {count.infinities} infinite of {count.elements} elements"
        if bucket_key(key):  # gaps between parameters are uninitialised memory in every checkpoint
            values.warning(key, f"{message}; they may lie in the alignment gaps of the bucket")
        elif allow_nonfinite:
            values.warning(key, message)
        else:
            values.error(key, message)
    return sums.done(), values.done()


def _by_item(jobs: Sequence[_Job], scans: Sequence[_Scan]) -> Iterator[tuple[_Job, _Scan]]:
    """Every item once, in file order."""
    for _, group in groupby(zip(jobs, scans, strict=True), key=lambda one: (one[0].item, one[0].where)):
        parts = list(group)
        yield parts[0][0], _joined(parts)


def _jobs(files: Files, catalog: Catalog) -> Iterator[_Job]:
    """Every stored item; an alias is scanned for each of its keys."""
    size_of = cache(partial(_size, files))
    for key, entry in catalog.tensors.items():
        for chunk in entry.chunks:
            item, nbytes = chunk.item, chunk.item.length
            if not item.bare and entry.dtype in ITEMSIZE:
                nbytes = min(nbytes, chunk.box.volume * ITEMSIZE[entry.dtype])
            is_there = item.offset + item.length <= size_of(item.file)  # else one finds that it is not
            step = _PART_BYTES if is_there else max(nbytes, 1)
            for start in range(0, nbytes, step) or (0,):
                stop = min(start + step, nbytes)
                yield _Job(item, key, f"{key} {chunk.box}", entry.dtype, chunk.box.size, start, stop)
    for key, stored in catalog.objects.items():
        yield _Job(stored.item, key, key)


def _size(files: Files, name: str) -> int:
    """Bytes of a file; 0 of one that cannot be read."""
    try:
        return files.size(name)
    except CkptError:
        return 0


def _archive_files(files: Files) -> Iterator[_Job]:
    """The files that `torch.save` wrote beside the items: the common state, Bridge's progress."""
    for name in files.list():
        if name.endswith(".pt"):
            yield _Job(whole_file(files, name), name, name)


def _joined(parts: Sequence[tuple[_Job, _Scan]]) -> _Scan:
    """What the jobs of one item have found together."""
    whole = _Scan(
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
    problem = _changed("record 'archive/data/0'", item, payload, found)
    return whole._replace(compared=RECORDS, problems=(problem,))


def _changed(name: str, item: Item, stretch: Stretch | UsualItem, found: int) -> str:
    start, nbytes, expected = stretch
    return (
        f"{name} in bytes {start}..{start + nbytes} of {item.file} has CRC-32 {found:08x}, its writer stored "
        f"{expected:08x}: bits have changed since"
    )


def _scan_job(files: Files, job: _Job, payload: UsualItem | None, buffer: Array, tick: Tick) -> _Scan:
    if payload is None:
        return _Scan(Census()) if job.start else _scan_item(files, job, buffer, tick)
    census = Census()
    part = Stretch(payload.start + job.start, job.nbytes, None)
    try:
        found = _look(files, job.item.file, part, buffer, tick, census, job.dtype)
    except CkptError as error:
        return _Scan(census, problems=(str(error),))
    return _Scan(census, part=(payload, found))


def _reads(files: Files, job: _Job, told: set[Item]) -> Iterator[Range]:
    """What a job reads of a store, where its item is of the usual form; `told`: whose frame it reads no more."""
    item, start = job.item, job.item.offset
    if job.dtype is None:
        yield from store_ranges(files, item.file, start, start + item.length)
        return
    if not item.bare:
        frame = tensor_frame(job.dtype, job.shape)
        if frame.length != item.length:
            return
        start += len(frame.head)
        if item not in told:
            yield from frame_reads(files, item, len(frame.head), frame.tail_bytes)
        if job.nbytes < frame.payload_bytes:
            told.add(item)
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


def _look(
    files: Files, file: str, stretch: Stretch, buffer: Array, tick: Tick, census: Census, dtype: str | None
) -> int:
    """CRC-32 of a stretch of a file, whose elements, if they have a type, are counted in the census."""
    found = 0
    for at in range(0, stretch.nbytes, len(buffer)):
        part = buffer[: min(len(buffer), stretch.nbytes - at)]
        files.read_into(file, stretch.start + at, part.data)
        found = crc.crc32(part.data, found)
        if dtype is not None:
            census.add(part, dtype)
        tick(len(part))
    return found


def _scan_item(files: Files, job: _Job, buffer: Array, tick: Tick) -> _Scan:
    """Every record of any archive."""
    census = Census()
    compared = without = 0
    problems = []
    try:
        for name, stretch, is_payload in _stretches(files, job.item, job.dtype):
            dtype = job.dtype if is_payload else None
            found = _look(files, job.item.file, stretch, buffer, tick, census, dtype)
            if stretch.crc32 is None:
                without += 1
                continue
            compared += 1
            if found != stretch.crc32:
                problems.append(_changed(name, job.item, stretch, found))
    except CkptError as error:
        problems.append(str(error))
    return _Scan(census, compared, without, tuple(problems))


def _stretches(files: Files, item: Item, dtype: str | None) -> Iterator[tuple[str, Stretch, bool]]:
    """(name, bytes, is a tensor's payload) of every record that an archive holds."""
    place = f"{files.location.rstrip('/')}/{item.file} at byte {item.offset}"

    def read(offset: int, length: int) -> bytes:
        return files.read(item.file, item.offset + offset, length)

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
