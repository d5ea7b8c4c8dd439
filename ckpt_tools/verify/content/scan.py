"""One stored item: every record summed, its elements counted, and masters held against the weights beside them.

What is wrong with an item does not end the scan: it is what the scan of it has found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from ckpt_tools.errors import CkptError
from ckpt_tools.execute.processes.team import Tick
from ckpt_tools.execute.proof.masters import rounding_mismatch, surely_rounds
from ckpt_tools.formats.storage import crc
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import Stretch, find_tensor
from ckpt_tools.formats.torch_archive.tensor_template import UsualItem
from ckpt_tools.formats.torch_archive.zip_archive import payload_offset, read_directory, stored_crc32
from ckpt_tools.model.catalog import Item
from ckpt_tools.model.kernels.casts import Array
from ckpt_tools.verify.content.values import Census

BUFFER_BYTES = 512 << 10  # a multiple of every element size, and looked at before it leaves the cache
_BESIDE_ELEMS = 1 << 16  # of masters and of weights: with what is made of them they take as much
_HELD_BYTES = 64 << 10  # of an item whose records are not read one by one


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
    """What a job has found: records whose checksums were compared, or that have none, and what is wrong."""

    census: Census
    compared: int = 0
    without: int = 0
    problems: tuple[str, ...] = ()
    part: tuple[UsualItem, int] | None = None  # the payload that a part was read of, and the part's CRC-32
    rounds: bool = False  # masters that were read beside their weights: whether all of them round to those


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
    except CkptError:  # told by who reads each alone
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
    except CkptError:  # told by who looks at it
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
    """CRC-32 of a stretch of a file, whose elements, if they have a type, are counted in the census."""
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
