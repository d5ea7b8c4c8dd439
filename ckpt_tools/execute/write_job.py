"""A job of writing, as plain data: what is written, of what, where and how; and what an output must be able to do;
and what one thread of one worker may hold in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from ckpt_tools.errors import UsageError
from ckpt_tools.formats.storage.io_pool import CONNECTIONS
from ckpt_tools.formats.storage.prefetch import REQUEST_BYTES
from ckpt_tools.human import human_bytes
from ckpt_tools.model.choices import SourceCheck

if TYPE_CHECKING:
    from ckpt_tools.execute.move.source_reader import SourceReader
    from ckpt_tools.execute.move.stream import Counters
    from ckpt_tools.execute.processes.ranks import Ranks
    from ckpt_tools.formats.storage.drivers import Part
    from ckpt_tools.formats.storage.files import Files
    from ckpt_tools.model.transfers import OutputItem, Plan


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
    tile: int  # one buffer of a pump
    ahead: int  # ranges of a store's files, on their way or not yet read (`formats.storage.prefetch`)
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


Found: TypeAlias = Literal["nothing", "unfinished", "published", "finished"]
"""What an earlier process left of an output.

Nothing; some of the work, to be gone on from; the output in place, and only the cleaning up is left; or nothing but
an output that has the plan's files in full length: perhaps all is done.
"""
Progress: TypeAlias = Callable[[int, int], None]
"""Called several times a second with the bytes done and the bytes in all, from the thread that called."""
SourceState: TypeAlias = list[list[object]]
"""See `journal.fingerprint`."""
METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Output:
    """Where the checkpoint goes, and what may already be there."""

    directory: Path | str  # str: a URL
    beside: Mapping[str, bytes] = field(default_factory=dict)  # trackers: files to replace in its parent
    extra_files: Mapping[str, bytes] = field(default_factory=dict)  # small files to put into the directory
    is_dcp: bool = True  # describe the tensors in `.metadata`, which is written last
    overwrite: bool = False
    resume: bool = False


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to work. None of it changes a byte of the result, but for checksums that `unread` leaves out."""

    threads: int = 2
    memory_bytes: int | None = None  # for buffers, of all workers together; None: see `default_bytes`
    fsync: bool = False  # make everything durable before it is published, and give its page cache back
    direct: bool = False  # write past the page cache
    check_source: SourceCheck = "all"
    verify_output: bool = False  # read what was written back and compare it, before it is published
    workers: int | None = None  # processes forked here, see `team.with_workers`; None: as many as help
    tiles: int = TILES  # that a thread holds at a time

    def thread_memory(self, reads_store: bool, writes_store: bool = False) -> ThreadMemory:
        memory = thread_memory(self.memory_bytes, self.threads, self.workers or 1, reads_store, writes_store)
        return memory._replace(tile=max(MIN_TILE_BYTES, memory.tile * TILES // self.tiles))


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What was done, over all ranks; bytes are payload bytes unless said otherwise."""

    bytes_written: int  # length of all files
    bytes_read: int
    bytes_cloned: int
    bytes_kernel_copied: int
    bytes_touched: int
    items: int
    items_resumed: int
    seconds: float
    peak_rss_bytes: int  # of the largest rank
    ranks: int
    check_source: SourceCheck  # as asked for
    payloads_proven: int  # of the source
    payloads_without_checksum: int  # of the source, read from
    bytes_proven: int
    bytes_read_to_prove: int  # besides `bytes_read`: what nothing else needed
    rounded_tensors: int = 0  # that a cast changed for good, among the items that were not resumed
    rounded_elements: int = 0
    rounded_most: str | None = None  # the key with the most of them
    rounded_and_kept: int = 0  # further elements, of values that the output holds exactly too
    replaced: str | None = None  # what stood at the output before: kind, files and bytes
    output_verified: bool = False  # read back and compared before it was published
    tracker: str | None = None  # what became of the root's, where it named another iteration
    is_tracked: bool = False  # the root's names what was written: a job finds it by `--load` alone
    directory: str = ""  # that holds the checkpoint's files

    @property
    def was_there(self) -> bool:
        """Whether nothing was left to write: the output is compared, or lacked its last step only."""
        return 0 < self.items == self.items_resumed

    def in_short(self) -> dict[str, object]:
        """What was written and proven, as every command that rewrites a checkpoint says it to programs."""
        return {
            "bytes_written": self.bytes_written,
            "bytes_cloned": self.bytes_cloned,
            "seconds": self.seconds,
            "check_source": self.check_source,
            "payloads_proven": self.payloads_proven,
            "payloads_without_checksum": self.payloads_without_checksum,
            "bytes_proven": self.bytes_proven,
            "replaced": self.replaced,
            "tracker": self.tracker,
        }


class Preview(NamedTuple):
    """What `WriteReport` will say of what is there before."""

    replaced: str | None = None
    tracker: str | None = None


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One plan to carry out, as this rank sees it."""

    plan: Plan
    files: Files  # of the source
    output: Output
    options: WriteOptions
    ranks: Ranks
    progress: Progress

    @property
    def thread_memory(self) -> ThreadMemory:
        from ckpt_tools.execute.move.source_reader import has_stores

        return self.options.thread_memory(has_stores(self.files), isinstance(self.output.directory, str))


class Done(NamedTuple):
    counters: Sequence[Counters]  # of its threads
    resumed: int  # items and blobs that an earlier process had finished
    versions: Mapping[str, str | None] = {}  # of its files, as the store calls them; a file system has none
    parts: Mapping[str, Sequence[Part]] = {}  # of files that others write too


class JobOutput(Protocol):
    """What differs between a local directory and a folder of an object store. `run` has the order of calls."""

    token: str  # of this run: rank 0 draws it, all ranks get it
    scratch: Path | None  # where temporary files may lie

    @property
    def data(self) -> Path | None:
        """Where what was written can be read before it is published; None: nowhere."""

    @property
    def replaced(self) -> str | None:
        """Rank 0: what is replaced, in words."""

    def look(self) -> bool:
        """Rank 0: raise what would be raised before the first byte is written; nothing is made.

        True if perhaps all is done already, see `take`.
        """

    def take(self, state: SourceState) -> Found:
        """Rank 0: make the output this run's, for a source in this state, and all ready to be written into.

        `state` is noted again, in place, where links to the source were removed: that changes its files' ctime.
        Nothing is touched yet where it says "finished": `keep` or `begin` follows.
        """

    def draw_token(self) -> None:
        """Rank 0, after `take`: have a token in the output."""

    def check_token(self) -> None:
        """Raise unless this rank sees the output that rank 0 has taken."""

    def keep(self) -> None:
        """Rank 0: the output was found to be what would be written."""

    def begin(self) -> Found:
        """Rank 0: it was not: what is there is in the way, as in any other output."""

    def share(self) -> Sequence[OutputItem]:
        """This rank's items."""

    def open_files(self) -> Mapping[str, str | None]:
        """Rank 0: what all ranks must know of files that not every one of them can see.

        In a store, None for those that an earlier process has written, and for those that several ranks write the
        id of an upload that is started for them.
        """

    def work(self, source: SourceReader, opened: Mapping[str, str | None]) -> Done:
        """This rank's items, and what lies in their files, are written; `opened` is what `open_files` gave."""

    def publish(
        self, metadata: bytes | None, versions: Mapping[str, str | None], parts: Mapping[str, Sequence[Part]]
    ) -> None:
        """Rank 0: prove what all ranks have written (see `Done`); small files; `.metadata` last."""

    def trackers_locked(self) -> AbstractContextManager[None]:
        """Rank 0: no other conversion into the same root changes its trackers meanwhile, where locks are known."""

    def has_beside(self, name: str) -> bool:
        """Rank 0: whether the output's parent has such a file."""

    def write_beside(self, name: str, content: bytes) -> None:
        """Rank 0: replace a file in the output's parent."""

    def finish(self) -> None:
        """Rank 0: all is done; nothing is left but the output."""

    def leave(self, error: BaseException) -> None:
        """Rank 0: keep what another process can go on from; remove work that no one can use."""

    def close(self) -> None:
        """Give back what this rank holds open."""
