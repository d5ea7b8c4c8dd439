"""How memory for buffers is shared: what one thread of one worker may hold of each kind."""

from __future__ import annotations

from typing import NamedTuple

from ckpt_tools.errors import UsageError
from ckpt_tools.formats.storage.io_pool import CONNECTIONS
from ckpt_tools.formats.storage.prefetch import REQUEST_BYTES
from ckpt_tools.human import human_bytes

MAX_TILE_BYTES = 8 << 20
MIN_TILE_BYTES = 64 << 10
MAX_PARTS = 9  # of an upload that one thread holds: eight on their way, one being filled
MIN_PART_BYTES = 5 << 20  # S3 takes no shorter one, but the last of a file

_FILES_BYTES = 96 << 20  # by default, of all workers together
_STORE_THREAD_BYTES = 32 << 20  # by default, of each thread, where a store is read or written
_STORE_BYTES = 128 << 20  # and of few threads together: their requests are all that is on its way
TILES = 3  # a pump has two, and what a cast needs
# Of what a thread has, in 24ths: what its tiles get where a store is read or written; the rest is for requests.
_TILES_OF_24 = {(False, False): 24, (True, False): 6, (False, True): 6, (True, True): 3}
_PARTS_OF_24 = {(False, False): 0, (True, False): 0, (False, True): 18, (True, True): 12}


class ThreadMemory(NamedTuple):
    """Bytes that one thread may hold."""

    tile: int  # one buffer of a pump
    ahead: int  # ranges of a store's files, on their way or not yet read (`formats.read_ahead`)
    parts: int  # parts of a file that is uploaded, being filled or on their way


def default_bytes(threads: int, workers: int, uses_store: bool) -> int:
    """What all workers together get where nothing is asked for."""
    return max(_STORE_BYTES, _STORE_THREAD_BYTES * threads * workers) if uses_store else _FILES_BYTES


def thread_memory(
    memory_bytes: int | None, threads: int, workers: int, reads_store: bool, writes_store: bool
) -> ThreadMemory:
    """The share of each thread, when `workers` processes of `threads` threads have `memory_bytes` together."""
    kind = (reads_store, writes_store)
    if memory_bytes is None:
        memory_bytes = default_bytes(threads, workers, any(kind))
    mine = memory_bytes // (workers * threads)
    tile = mine * _TILES_OF_24[kind] // (24 * TILES)
    parts = mine * _PARTS_OF_24[kind] // 24
    if tile < MIN_TILE_BYTES or (writes_store and parts < 2 * MIN_PART_BYTES):
        least = MIN_TILE_BYTES * TILES * 24 // _TILES_OF_24[kind]
        if writes_store:
            least = max(least, 2 * MIN_PART_BYTES * 24 // _PARTS_OF_24[kind])
        raise UsageError(
            f"{human_bytes(memory_bytes)} of buffers (--max-memory, shared by workers) are not enough for "
            f"{workers * threads} threads{' that write to a store' if writes_store else ''}; at least "
            f"{human_bytes(workers * threads * least)} are needed, or fewer --threads"
        )
    ahead = mine - TILES * tile - parts if reads_store else 0
    return ThreadMemory(
        min(tile, MAX_TILE_BYTES),
        min(ahead, CONNECTIONS * REQUEST_BYTES),
        min(parts, MAX_PARTS * REQUEST_BYTES),
    )
