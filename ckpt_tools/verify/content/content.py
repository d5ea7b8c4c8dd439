"""Are the stored bytes the ones that were written, and are they numbers: one pass over every item.

Every record of every archive is summed and compared with the CRC-32 its writer stored, also of the archives that
are a file of their own (`common.pt`); the same pass counts NaNs and infinities, and holds masters against weights
that are stored alike. Memory is one buffer a thread.
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
from ckpt_tools.formats.storage import crc
from ckpt_tools.formats.storage.files import Files, readable_size
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.formats.torch_archive.item_reader import whole_file
from ckpt_tools.formats.torch_archive.tensor_template import RECORDS, UsualItem, tensor_frame, usual_item
from ckpt_tools.megatron.keys import canonical_kind, state_key
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.model.dtypes import ITEMSIZE
from ckpt_tools.model.roles import MASTER
from ckpt_tools.verify.content.scan import BUFFER_BYTES, Job, Scan, changed, scan_beside, scan_job
from ckpt_tools.verify.content.values import Census
from ckpt_tools.verify.report import Check, Findings

_PART_BYTES = 32 << 20  # of a payload, read by one thread
_PAYLOADS = 1024  # whose places are kept: of long tensors several parts are read, about at one time


Work: TypeAlias = tuple[Job] | tuple[Job, Job]
"""What is read by one thread: a job, or that of some masters and that of their weights."""


class Scanned(NamedTuple):
    """The checks `checksums` (of records) and `values` (of tensors); pairs of items of which each element rounds."""

    checks: tuple[Check, Check]
    rounded: frozenset[tuple[Item, Item]]


class _Buffers(threading.local):
    """What a thread reads into, and the items whose frames it has told to read ahead."""

    def __init__(self) -> None:
        self.array = np.empty(BUFFER_BYTES, np.uint8)
        self.told: set[Item] = set()


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
) -> Iterator[Callable[[], Scanned]]:
    """Give the block a function that returns what was found.

    Other processes have begun to read when the block does. `tick` is told the bytes read. `pairs` says which items
    of fp32 masters are read beside which items of bf16 weights.
    """
    buffers = _Buffers()

    def scan(work: Work, told: Tick) -> tuple[Scan, ...]:
        jobs = [(job, payload_of(job.item, job.dtype, job.shape)) for job in work]
        if len(work) == 2:
            first, second = (payload for _, payload in jobs)
            if first is not None and second is not None:
                return scan_beside(files, work, (first, second), buffers.array, told)
        return tuple(scan_job(files, job, payload, buffers.array, told) for job, payload in jobs)

    def reads(work: Work) -> Iterator[Range]:
        return chain.from_iterable(_reads(files, job, buffers.told) for job in work)

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
        yield lambda: _scanned(files, catalog, works, results(), allow_nonfinite)


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
) -> Scanned:
    beside = [(work, scans[0]) for work, scans in zip(works, found, strict=True) if len(work) == 2]
    wrong = {work[0].item for work, scan in beside if not scan.rounds}
    rounded = frozenset((m.item, w.item) for (m, w), _ in beside if m.item not in wrong)
    scans = sorted(zip(chain(*works), chain(*found), strict=True), key=lambda one: one[0].item)
    return Scanned(_checks(files, catalog, _by_item(scans), allow_nonfinite), rounded)


def _checks(
    files: Files, catalog: Catalog, scans: Iterable[tuple[Job, Scan]], allow_nonfinite: bool
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
    """The files that `torch.save` wrote beside the items: the common state, Bridge's progress."""
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


def _reads(files: Files, job: Job, told: set[Item]) -> Iterator[Range]:
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


def master_pairs(catalog: Catalog) -> dict[Item, Item]:
    """The item of each fp32 master chunk whose bf16 weight has a chunk of the same place, to that chunk's item.

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
