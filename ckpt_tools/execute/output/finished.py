"""Whether an output that is there is what a plan would write: a process may have been killed after it had published.

Then nothing but the output is left to tell what was done, and another source with the same structure would give files
of the same names and lengths; so all content is compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from ckpt_tools.errors import CkptError
from ckpt_tools.execute.move.source_reader import SourceReader, has_stores, store_ranges
from ckpt_tools.execute.move.stream import Pump
from ckpt_tools.execute.output.fileio import storage_errors
from ckpt_tools.execute.processes.team import by_threads
from ckpt_tools.execute.write_job import METADATA, Output, WriteOptions
from ckpt_tools.formats.dcp.metadata_write import metadata_bytes
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.model.transfers import OutputItem, Plan


def has_files(sizes: Mapping[str, int], present: Mapping[str, int | None]) -> bool:
    """Whether all files of a plan (name -> bytes) are present in full length."""
    return bool(sizes) and all(present.get(name) == size for name, size in sizes.items())


def lengths(folder: Path) -> dict[str, int | None]:
    """Lengths of the files in a folder, by name; none where there is no folder."""
    if folder.is_symlink() or not folder.is_dir():
        return {}
    with storage_errors(folder):
        return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def is_written(
    plan: Plan,
    output: Output,
    items: Sequence[OutputItem],
    source: SourceReader,
    options: WriteOptions,
    *,
    small_parts: bool,
    tick: Callable[[], None],
) -> bool:
    """Whether `items` of a plan lie in the output as they would be written; with `small_parts` all but items too."""
    with closing(open_files(str(output.directory))) as there:
        return (not small_parts or same_small_parts(plan, output, there)) and same_items(
            items, there, source, options, tick
        )


def same_small_parts(plan: Plan, output: Output, there: Files) -> bool:
    """Whether objects, `.metadata` and the files beside the tensors are there as they would be written."""
    small = dict(output.extra_files)
    if output.is_dcp:
        small[METADATA] = metadata_bytes(plan)
    return all(
        there.exists(name) and there.size(name) == len(data) and there.read(name, 0, len(data)) == data
        for name, data in small.items()
    ) and has_blobs(plan, there)


def has_blobs(plan: Plan, there: Files) -> bool:
    """Whether the objects of a plan are there as they would be written."""
    return all(there.read(blob.file, blob.offset, blob.length) == blob.data for blob in plan.blobs)


class _DifferentError(CkptError):
    """An item is not what would be written."""


def same_items(
    items: Sequence[OutputItem],
    there: Files,
    source: SourceReader,
    options: WriteOptions,
    tick: Callable[[], None],
) -> bool:
    """Whether `items` are in the files `there` as `source` would give them."""
    memory, own = options.thread_memory(source.is_remote or has_stores(there)), threading.local()

    def pump() -> Pump:
        if not hasattr(own, "pump"):
            own.pump, own.buffer = (
                Pump(source, memory.tile, lambda _: tick()),
                np.empty(memory.tile, np.uint8),
            )
        found: Pump = own.pump
        return found

    def compare(item: OutputItem) -> None:
        at = item.offset
        for part in pump().item_content(item):
            if not _equal(part, at, item, there, own.buffer):
                raise _DifferentError(item.key)
            at += len(part)

    def reads(item: OutputItem) -> Iterator[Range]:
        yield from pump().reads(item)
        yield from store_ranges(there, item.file, item.offset, item.offset + item.length)

    try:
        by_threads(compare, items, options.threads, reads, memory.ahead)
    except _DifferentError:
        return False
    return True


def _equal(part: bytes | memoryview, at: int, item: OutputItem, there: Files, buffer: np.ndarray) -> bool:
    if len(part) > len(buffer):  # a head
        return there.read(item.file, at, len(part)) == bytes(part)
    found = buffer[: len(part)]
    there.read_into(item.file, at, found.data)
    return np.array_equal(found, np.frombuffer(part, np.uint8))
