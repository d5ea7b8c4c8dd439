"""The last part of a source's proof: what no one needed to read is read, and what several ranks read is joined."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpt_tools.errors import CorruptCheckpointError, list_problems
from ckpt_tools.execute.move.source_reader import ChunkRef, SourceReader, store_ranges
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.processes.team import by_threads
from ckpt_tools.execute.proof.payload_sums import Piece, Pieces, SourceProof, Stored, damage
from ckpt_tools.formats.storage import crc
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.formats.torch_archive.item_reader import record_stretches
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.model.without_gc import without_gc
from ckpt_tools.plan.build import neighbour_shares

_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ProofReport:
    """What was proven of a source, over all ranks."""

    payloads: int = 0
    nbytes: int = 0
    read_for_it: int = 0  # bytes that nothing else needed
    without: int = 0  # payloads that carry no checksum


class _Part(NamedTuple):
    """Bytes [start, stop) of the record of `item` that are still to be summed, from byte `at` of its file on."""

    item: Item
    at: int
    start: int
    stop: int


_Records = dict[Item, tuple[Stored, Pieces]]


@without_gc()
def prove_rest(
    proof: SourceProof,
    files: Files,
    key_of: Callable[[Item], str],
    ranks: Ranks,
    threads: int,
    buffer_bytes: int = _BUFFER_BYTES,
    ahead_bytes: int = 0,
) -> ProofReport:
    """Complete the proof of every record that any rank has read from; called on every rank.

    Ranks tell each other the sums of what they read of records that none has read whole, share out what is missing,
    and join all: every rank comes to the same verdict.

    Args:
        key_of: the tensor that an item holds, for messages.
        ahead_bytes: what each thread may hold of a store's files before it sums them.
    """
    shares = ranks.together(lambda: _serialize(proof))
    done = {
        Item(file, *rest): nbytes
        for share in shares
        for file, rows in share["done"].items()
        for rest, nbytes in rows
    }
    records = _joined(shares, done.keys())
    parts = _missing(records, buffer_bytes)
    bounds = neighbour_shares((part.stop - part.start for part in parts), ranks.world)
    mine = parts[bounds[ranks.rank] : bounds[ranks.rank + 1]]  # the shares in rank order are all parts
    read = ranks.together(lambda: _read(mine, files, ranks.check, threads, buffer_bytes, ahead_bytes))
    for part, checksum in zip(parts, (checksum for one in read for checksum in one), strict=True):
        records[part.item][1].put(Piece(part.start, part.stop, checksum))
    done |= {item: stored.nbytes for item, (stored, _) in records.items()}
    problems = []
    for item, (stored, pieces) in records.items():
        assert pieces.total is not None  # every gap was read
        if pieces.total != stored.crc32:
            problems.append(damage(key_of(item), stored, pieces.total))
    if problems:
        many = f"{len(problems)} payloads are damaged:\n{list_problems(problems)}"
        raise CorruptCheckpointError(problems[0] if len(problems) == 1 else many, problems)
    without = {(file, *rest) for share in shares for file, rows in share["without"].items() for rest in rows}
    read_for_it = sum(part.stop - part.start for part in parts)
    return ProofReport(len(done), sum(done.values()), read_for_it, len(without))


def prove_payloads(files: Files, catalog: Catalog, wanted: Iterable[str], threads: int) -> None:
    """Prove the stored tensors and objects `wanted` by reading them: what a proof by content failed for."""
    proof = SourceProof()
    source = SourceReader(files, proof=proof)
    keys: dict[Item, str] = {}
    try:
        for key in dict.fromkeys(stored for one in wanted for stored in catalog.stored_keys(one)):
            if key in catalog.objects:
                for start, nbytes, crc32 in record_stretches(files, catalog.objects[key].item):
                    record = Item(catalog.objects[key].item.file, start, nbytes, bare=True, crc32=crc32)
                    keys[record] = key
                    if nbytes and crc32 is not None:
                        proof.of(key, Stored(record, start, nbytes, crc32))
                continue
            entry = catalog.tensors[key]
            for chunk in entry.chunks:
                keys[chunk.item] = key
                source.payload(ChunkRef(key, chunk.item, entry.dtype, chunk.box.size))
    finally:
        source.close()
    prove_rest(proof, files, keys.__getitem__, Ranks(), threads)


def _serialize(proof: SourceProof) -> dict[str, Any]:
    """What a rank sends to the others, as JSON, file by file."""
    unfinished: dict[str, list[Any]] = {}
    for item, record in proof.open.items():
        row = [item[1:], *record.stored[1:], [tuple(piece) for piece in record.pieces]]
        unfinished.setdefault(item.file, []).append(row)
    done: dict[str, list[Any]] = {}
    for item, nbytes in proof.proven.items():
        done.setdefault(item.file, []).append([item[1:], nbytes])
    without: dict[str, list[Any]] = {}
    for item in proof.without_sum:
        without.setdefault(item.file, []).append(item[1:])
    return {"unfinished": unfinished, "done": done, "without": without}


def _joined(shares: Sequence[Mapping[str, Any]], done: Iterable[Item]) -> _Records:
    """The records that no rank has proven, in file order, with the pieces of all ranks."""
    records: _Records = {}
    for share in shares:
        for file, rows in share["unfinished"].items():
            for rest, start, nbytes, crc32, pieces in rows:
                stored = Stored(Item(file, *rest), start, nbytes, crc32)
                _, known = records.setdefault(stored.item, (stored, Pieces(nbytes)))
                for piece in pieces:
                    known.put(Piece(*piece))
    for item in done:
        records.pop(item, None)
    return dict(sorted(records.items(), key=lambda record: record[0][:3]))


def _missing(records: _Records, most_bytes: int) -> list[_Part]:
    """What is still to be read of the records, in parts of at most `most_bytes`."""
    return [
        _Part(item, stored.start + at, at, min(at + most_bytes, stop))
        for item, (stored, pieces) in records.items()
        for start, stop in pieces.gaps(0, stored.nbytes)
        for at in range(start, stop, most_bytes)
    ]


def _read(
    parts: Sequence[_Part],
    files: Files,
    tick: Callable[[], None],
    threads: int,
    buffer_bytes: int,
    ahead_bytes: int,
) -> list[int]:
    """CRC-32 of each part."""
    buffers = threading.local()

    def read(part: _Part) -> int:
        tick()
        if not hasattr(buffers, "array"):
            buffers.array = np.empty(buffer_bytes, np.uint8)
        data: memoryview = buffers.array[: part.stop - part.start].data
        files.read_into(part.item.file, part.at, data)
        return crc.crc32(data)

    def reads(part: _Part) -> Iterator[Range]:
        return store_ranges(files, part.item.file, part.at, part.at + part.stop - part.start)

    return by_threads(read, parts, threads, reads, ahead_bytes)
