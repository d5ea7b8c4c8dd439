"""What an output is checked for, in a folder as in a store: what it replaces, whether it is finished, whether
safetensors opens it.

A process may have been killed after it had published. Then nothing but the output says what was done, and another
source with the same structure would give files of the same names and lengths; so all content is compared.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from ckpt_tools.errors import (
    CkptError,
    Interrupted,
    StorageError,
    Terminated,
    UsageError,
    VerificationError,
)
from ckpt_tools.execute.move.source_reader import SourceReader, has_stores, store_ranges
from ckpt_tools.execute.move.stream import Pump
from ckpt_tools.execute.output.fileio import storage_errors
from ckpt_tools.execute.processes.team import by_threads
from ckpt_tools.execute.write_job import METADATA, Output, WriteOptions
from ckpt_tools.formats.dcp.metadata_write import metadata_bytes
from ckpt_tools.formats.locate.owned_files import TEMPLATES, refuse_foreign
from ckpt_tools.formats.storage.files import Files, path_in
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.human import counted, human_bytes
from ckpt_tools.model.transfers import OutputItem, Plan


def can_go_on(error: BaseException) -> bool:
    """Whether `--resume` may continue work that ended so: after damage, or masters that do not round, it cannot."""
    resumable = (StorageError, UsageError, Interrupted, Terminated)
    return isinstance(error, resumable) or not isinstance(error, CkptError)


def replaced(
    where: str,
    sizes: Callable[[str], Mapping[str, int | None]],
    written: Collection[str],
    *,
    is_unfinished: bool = False,
) -> str:
    """What the one checkpoint at `where` is, which may be replaced. `sizes` are those in a folder, as
    `Store.sizes`.
    """
    present = dict(sizes(""))
    for folder in {TEMPLATES, *(name.rpartition("/")[0] for name in written)} & present.keys():
        if present[folder] is None:
            del present[folder]
            present |= {f"{folder}/{name}": size for name, size in sizes(folder).items()}
    names = [name if size is not None else f"{name}/" for name, size in present.items()]
    kind = refuse_foreign(where, names, written, is_unfinished=is_unfinished)
    return (
        f"{kind}: {counted(len(present), 'file')}, {human_bytes(sum(size or 0 for size in present.values()))}"
    )


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
    """Whether `items` of a plan lie in the output as they would be written; with `small_parts` the rest too."""
    of_thread = threading.local()

    def pump() -> Pump:
        if not hasattr(of_thread, "pump"):
            of_thread.pump = Pump(source, memory.tile, lambda _: tick())
            of_thread.buffer = np.empty(memory.tile, np.uint8)
        made: Pump = of_thread.pump
        return made

    def compare(item: OutputItem) -> None:
        at = item.offset
        for part in pump().item_content(item):
            if len(part) > memory.tile:  # a head
                is_same = there.read(item.file, at, len(part)) == bytes(part)
            else:
                stored = of_thread.buffer[: len(part)]
                there.read_into(item.file, at, stored.data)
                is_same = np.array_equal(stored, np.frombuffer(part, np.uint8))
            if not is_same:
                raise _DifferentError(item.key)
            at += len(part)

    def reads(item: OutputItem) -> Iterator[Range]:
        yield from pump().reads(item)
        yield from store_ranges(there, item.file, item.offset, item.offset + item.length)

    with closing(open_files(str(output.directory))) as there:
        if small_parts and not same_small_parts(plan, output, there):
            return False
        memory = options.thread_memory(source.is_remote or has_stores(there))
        try:
            by_threads(compare, items, options.threads, reads, memory.ahead)
        except _DifferentError:
            return False
    return True


def same_small_parts(plan: Plan, output: Output, there: Files) -> bool:
    """Whether objects, `.metadata` and the other small files are there as they would be written."""
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


def prove_shards(plan: Plan, folder: Path) -> None:
    """Check that safetensors opens every file in `folder` and finds the tensors of the plan. No tensor is loaded."""
    for name, expected in _tensors_of_shards(plan).items():
        _prove(folder / name, str(folder / name), expected)


def prove_uploaded(plan: Plan, files: Files) -> None:
    """The same for files in a store: their headers are fetched, and put before holes as long as the tensors."""
    shards = _tensors_of_shards(plan)
    if not shards:
        return
    heads = dict(plan.file_bytes)
    for item in plan.items:
        heads[item.file] = min(heads[item.file], item.offset)
    with storage_errors(tempfile.gettempdir()), tempfile.TemporaryDirectory(prefix="ckpt-shard-") as folder:
        for name, expected in shards.items():
            path = Path(folder, "shard")
            path.write_bytes(files.read(name, 0, heads[name]))
            os.truncate(path, files.size(name))
            _prove(path, path_in(files.location, name), expected)


def _tensors_of_shards(plan: Plan) -> dict[str, set[str]]:
    tensors: dict[str, set[str]] = {name: set() for name in plan.file_bytes if name.endswith(".safetensors")}
    for item in plan.items:
        if item.file in tensors:
            tensors[item.file].add(item.key)
    return tensors


def _prove(path: Path, shown: str, expected: set[str]) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            found = set(opened.keys())
    except (SafetensorError, OSError) as error:
        raise VerificationError(
            f"{shown}: the safetensors library does not open what was written ({error}). Nothing was published; "
            "please report this."
        ) from error
    if not expected <= found:
        lost = sorted(expected - found)
        raise VerificationError(
            f"{shown}: the safetensors library does not find {', '.join(lost[:3])}, which was written. Nothing was "
            "published; please report this."
        )
