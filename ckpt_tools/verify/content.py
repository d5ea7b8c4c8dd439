"""Are the stored bytes the ones that were written, and are they numbers: one pass over every item.

Every record of every archive is summed and compared with the CRC-32 its writer stored, also of the archives that
are a file of their own (`common.pt`); the same pass counts NaNs and infinities. Memory is one buffer a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ckpt_tools.errors import CkptError
from ckpt_tools.execute.spread import Tick, spread
from ckpt_tools.formats import crc
from ckpt_tools.formats.archive import payload_offset, read_directory
from ckpt_tools.formats.container import find_tensor, whole_file
from ckpt_tools.formats.files import Files
from ckpt_tools.megatron.keys import bucket_key
from ckpt_tools.model.casts import Array
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.verify.report import Check, Findings
from ckpt_tools.verify.values import Census

_BUFFER_BYTES = 4 << 20  # a multiple of every element size


class _Job(NamedTuple):
    """One stored item: of a tensor when it has an element type, else an object."""

    item: Item
    key: str
    where: str
    dtype: str | None


class _Scan(NamedTuple):
    """What one item holds: records whose checksums were compared, or that have none, and what is wrong."""

    key: str
    where: str
    compared: int
    without: int
    problems: tuple[str, ...]
    census: Census


def scan_content(
    files: Files,
    catalog: Catalog,
    *,
    threads: int = 2,
    workers: int | None = None,
    allow_nonfinite: bool = False,
    tick: Tick = lambda _: None,
) -> tuple[Check, Check]:
    """The checks `checksums` (of records) and `values` (of tensors). `tick` is told the bytes read."""
    sums, values = Findings("checksums", "records"), Findings("values", "elements")
    census: dict[str, Census] = {key: Census() for key in catalog.tensors}
    without = 0
    for scan in _scans(files, catalog, threads, workers, tick):
        sums.looked_at += scan.compared
        without += scan.without
        for problem in scan.problems:
            sums.error(scan.where, problem)
        if scan.key in census:
            count = census[scan.key]
            count.elements += scan.census.elements
            count.nans += scan.census.nans
            count.infinities += scan.census.infinities
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


def _scans(files: Files, catalog: Catalog, threads: int, workers: int | None, tick: Tick) -> list[_Scan]:
    """Every item once, in file order."""
    buffers = threading.local()

    def scan(job: _Job, told: Tick) -> _Scan:
        if not hasattr(buffers, "array"):
            buffers.array = np.empty(_BUFFER_BYTES, np.uint8)
        return _scan_item(files, job, buffers.array, told)

    jobs = sorted((*_jobs(catalog), *_archive_files(files)), key=lambda job: job.item)
    nbytes = sum(job.item.length for job in jobs)
    return spread(scan, jobs, nbytes=nbytes, threads=threads, workers=workers, tick=tick)


def _jobs(catalog: Catalog) -> Iterable[_Job]:
    """Every stored item; an alias is scanned for each of its keys."""
    for key, entry in catalog.tensors.items():
        for chunk in entry.chunks:
            yield _Job(chunk.item, key, f"{key} {chunk.box}", entry.dtype)
    for key, stored in catalog.objects.items():
        yield _Job(stored.item, key, key, None)


def _archive_files(files: Files) -> Iterable[_Job]:
    """The files that `torch.save` wrote beside the items: the common state, Bridge's progress."""
    for name in files.list():
        if name.endswith(".pt"):
            yield _Job(whole_file(files, name), name, name, None)


def _scan_item(files: Files, job: _Job, buffer: Array, tick: Tick) -> _Scan:
    item, key, where, dtype = job
    census = Census()
    compared = without = 0
    problems = []
    try:
        for name, start, length, expected, is_payload in _stretches(files, item, dtype):
            found = 0
            for at in range(0, length, len(buffer)):
                part = buffer[: min(len(buffer), length - at)]
                files.read_into(item.file, start + at, part.data)
                found = crc.crc32(part.data, found)
                if is_payload and dtype is not None:
                    census.add(part, dtype)
                tick(len(part))
            if expected is None:
                without += not item.bare  # safetensors has no checksums at all
                continue
            compared += 1
            if found != expected:
                problems.append(
                    f"{name} in bytes {start}..{start + length} of {item.file} has CRC-32 {found:08x}, its writer "
                    f"stored {expected:08x}: bits have changed since"
                )
    except CkptError as error:
        problems.append(str(error))
    return _Scan(key, where, compared, without, tuple(problems), census)


def _stretches(
    files: Files, item: Item, dtype: str | None
) -> Iterator[tuple[str, int, int, int | None, bool]]:
    """(name, first byte in the file, length, CRC-32 or None, is a tensor's payload) of what an item holds."""
    if item.bare:
        yield "the payload", item.offset, item.length, None, True
        return
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
        expected = record.crc32 if record.crc32 or not record.size else None
        yield f"record {record.name!r}", start, record.size, expected, is_payload
    if payload is not None and not seen:  # a part of its storage only
        yield "the payload", *payload, None, True
