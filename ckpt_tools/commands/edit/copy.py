"""`copy`: a checkpoint, or all of a run, from one place to another, byte for byte: folders and object stores.

Files keep their names and bytes. Every payload is proven against the checksum that its writer stored while it is
copied; the copy appears whole or not at all, and an interrupted copy can be resumed. Whatever the format, the other
files of a folder are copied too; folders inside of it are not, and are named.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.commands.job.conversion import Conversion, EditOptions, Progress, like_to_like
from ckpt_tools.commands.job.iterations import convert_iterations
from ckpt_tools.commands.job.opened import open_checkpoint, warn_of_iteration
from ckpt_tools.commands.job.outputs import is_root
from ckpt_tools.commands.job.report import Edits
from ckpt_tools.commands.job.rewrite import edit
from ckpt_tools.errors import CkptError, UnsupportedCheckpointError, UsageError, VerificationError
from ckpt_tools.execute.move.source_reader import SourceReader, frame_reads, has_stores, store_ranges
from ckpt_tools.execute.output.checks import is_written
from ckpt_tools.execute.processes.meeting import connect
from ckpt_tools.execute.proof.payload_sums import Stored, check
from ckpt_tools.execute.run import Output, WriteOptions, WriteReport
from ckpt_tools.execute.write_job import METADATA
from ckpt_tools.formats.dcp.metadata_read import MAX_METADATA_BYTES
from ckpt_tools.formats.locate.detect import BRIDGE_TRACKER, Location, locate
from ckpt_tools.formats.safetensors import read_safetensors_header
from ckpt_tools.formats.storage import crc
from ckpt_tools.formats.storage.files import AnyPath, Files, path_text, read_whole
from ckpt_tools.formats.storage.open_files import files_below, open_files
from ckpt_tools.formats.storage.prefetch import Range, reading_ahead
from ckpt_tools.formats.torch_archive.item_reader import read_archive, record_stretches, whole_file
from ckpt_tools.megatron.run_state.common_state import read_common_state
from ckpt_tools.megatron.torch_dist.grids import incomplete_objects
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.model.target import Target
from ckpt_tools.plan.build import RawFile, Run, build_copy_plan
from ckpt_tools.plan.links import link_files

_TENSORS = (".distcp", ".safetensors")  # files that hold them
_SMALL_BYTES = 1 << 20  # files up to this length are held in memory
_PROVEN_WHOLE = 64 << 10  # archives up to this length are proven when they are planned
_AHEAD_BYTES = 8 << 20  # of archives' frames in a store that are on their way
_RECORD_BYTES = 4096  # and so are records up to this length, which describe a payload


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions(EditOptions):
    """What is copied and how."""

    every_iteration: bool = False  # of a root; else `iteration`, or its latest
    read_back: bool = False  # compare the copy with the source once more


@dataclass(frozen=True, slots=True)
class Copied:
    """What became of one checkpoint."""

    source: str
    output: str
    files: int
    nbytes: int
    proven: int  # payloads and small archives that have the checksum their writer stored
    without_checksum: int  # payloads without a stored checksum
    read_back: bool
    links: Mapping[str, int]  # files that both share -> length in bytes
    left_out: tuple[str, ...]  # names of files in inner folders, and of what is not a file
    written: WriteReport | None  # None: a dry run
    replaced: str | None  # as of `WriteReport`; a dry run predicts it
    tracker: str | None  # likewise

    def as_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "source": self.source,
            "output": self.output,
            "files": self.files,
            "bytes": self.nbytes,
            "bytes_cloned": 0 if self.written is None else self.written.bytes_cloned,
            "seconds": 0.0 if self.written is None else self.written.seconds,
            "payloads_proven": self.proven,
            "payloads_without_checksum": self.without_checksum,
            "read_back": self.read_back,
            "linked_files": dict(self.links),
            "left_out": list(self.left_out),
            "replaced": self.replaced,
            "tracker": self.tracker,
        }


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What was copied; of all iterations of a run also those that were there already or could not be copied."""

    copied: tuple[Copied, ...]
    already_there: tuple[int, ...] = ()
    not_finished: tuple[int, ...] = ()  # the newest, which its job is still writing
    failed: tuple[tuple[int | None, CkptError], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "schema_version": 1,
            "copied": [one.as_json() for one in self.copied],
            "already_there": list(self.already_there),
            "not_finished": list(self.not_finished),
            "failed": [
                {"iteration": number, "exit_code": error.exit_code, "error": str(error)}
                for number, error in self.failed
            ],
        }


def copy_checkpoint(
    source: AnyPath,
    output: AnyPath,
    options: CopyOptions | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy the checkpoint at `source` to `output`: a run's root to a root with its tracker, one folder to a folder.

    With `options.every_iteration` all iterations of a root, the latest last: past those that are there already, and
    past those that cannot be copied, which the report names.

    Raises:
        UsageError: the output overlaps the source or is taken.
        CorruptCheckpointError: a payload has another checksum than its writer stored; nothing is published.
        VerificationError: reading back, the copy is not what the source is.
        Otherwise the errors of opening and writing.
    """
    source, output = path_text(source), path_text(output)
    options = options or CopyOptions()
    if not options.every_iteration:
        return CopyReport((_copy(source, output, options, progress),))
    if options.iteration is not None:
        raise UsageError("one iteration is asked for, and all of them; give one of both")
    outcomes = convert_iterations(
        source,
        output,
        (),
        options.overwrite,
        lambda number, tracker: _copy(
            source, output, replace(options, iteration=number, tracker=tracker), progress
        ),
    )
    return CopyReport(
        tuple(one.report for one in outcomes if one.report is not None),
        tuple(one.iteration for one in outcomes if one.was_there and one.iteration is not None),
        tuple(one.iteration for one in outcomes if one.is_unfinished and one.iteration is not None),
        tuple((one.iteration, one.error) for one in outcomes if one.error is not None),
    )


def _copy(source: str, output: str, options: CopyOptions, progress: Progress | None) -> Copied:
    with (
        connect().ending_together() as ranks,
        open_checkpoint(source, options.iteration, options.trust_pickle, with_common=False) as opened,
    ):
        location, files, catalog = opened.location, opened.files, opened.catalog
        with suppress(CkptError):  # a state that cannot be read is copied unchanged
            common = read_common_state(files, catalog, options.trust_pickle)
            warn_of_iteration(location, common)
            for name, problem in incomplete_objects(catalog.objects, common):
                warnings.warn(f"{location.path}: {name}: {problem}; it is copied unchanged", stacklevel=2)
        place = like_to_like(source, location, output, options)
        if inner := sorted(name for name in _named_by(catalog) if "/" in name):
            raise UnsupportedCheckpointError(
                f"{location.path}: {METADATA} places entries in a folder inside the checkpoint ({inner[0]}), which "
                "copy does not take. Convert it, or copy the folder with another program."
            )
        odd: list[str] = []
        names = files_below(location.path, odd)
        left_out = (*(name for name in names if "/" in name), *sorted(odd))
        sizes = {name: nbytes for name, nbytes in names.items() if "/" not in name}
        sizes |= {
            name: files.size(name) for name in _named_by(catalog) - sizes.keys()
        }  # an error: it is absent
        big = {name: n for name, n in sizes.items() if n and (n > _SMALL_BYTES or name.endswith(_TENSORS))}
        big.pop(METADATA, None)
        # `.metadata` last, which makes a folder in a store a checkpoint.
        small = sorted(sizes.keys() - big.keys(), key=lambda name: (name == METADATA, name))
        prove = options.write.check_source == "all"
        # Other files are few, and some people edit them.
        links = {name: n for name, n in big.items() if options.hard_link and name.endswith(_TENSORS)}
        read = big if prove else {name: n for name, n in big.items() if name not in links}
        runs, proven_whole = _runs(files, catalog, read, prove)
        plan = build_copy_plan(runs)
        plan = link_files(plan, links) if links else plan
        made = Conversion(
            to="hf" if location.kind == "safetensors" else location.kind,
            loader=None,
            iteration=location.iteration,
            catalog=catalog,
            target=Target(()),
            plan=plan,
            extra_files={name: read_whole(files, name, MAX_METADATA_BYTES) for name in small},
            beside=_trackers(source, location),
            edits=Edits(),
            copies_files=True,
        )
        done = edit(
            source,
            output,
            lambda _: made,
            options,
            progress,
            opened=opened,
            place=lambda *_: place,
            ranks=ranks,
        )
        written = done.written
        if options.read_back and written is not None:
            _read_back(made, files, place, options.write)
    return Copied(
        location.path,
        str(place.directory),
        len(sizes),
        sum(sizes.values()),
        (0 if written is None else written.payloads_proven) + proven_whole,
        sum(run.crc32 is None for file in runs.values() for run in file.runs),
        options.read_back,
        plan.links,
        left_out,
        written,
        done.replaced,
        done.tracker,
    )


def _named_by(catalog: Catalog) -> set[str]:
    """The files that a catalog's items lie in."""
    tensors = {chunk.item.file for entry in catalog.tensors.values() for chunk in entry.chunks}
    return tensors | {entry.item.file for entry in catalog.objects.values()}


def _trackers(source: str, location: Location) -> Mapping[str, bytes]:
    """Bridge's tracker, where it names what is copied; Megatron's is made by `choose_output`."""
    if location.tracker != BRIDGE_TRACKER or location.root is None or not is_root(source, location):
        return {}
    if locate(location.root).path != location.path:
        return {}
    with closing(open_files(location.root)) as files:
        return {BRIDGE_TRACKER: read_whole(files, BRIDGE_TRACKER)}


def _runs(
    files: Files, catalog: Catalog, sizes: Mapping[str, int], prove: bool
) -> tuple[dict[str, RawFile], int]:
    """The payloads of every file, and how many small archives were proven on the way."""
    runs: dict[str, list[Run]] = {name: [] for name in sizes}
    heads: dict[str, bytes] = {}
    proven = 0
    for name in sizes:
        if name.endswith(".safetensors"):
            entries = read_safetensors_header(files, name).values()
            chunks = [chunk for entry in entries for chunk in entry.chunks]
            first = min((chunk.item.offset for chunk in chunks), default=sizes[name])
            heads[name] = files.read(name, 0, first)
            keys = {chunk.item: entry.key for entry in entries for chunk in entry.chunks}
            runs[name] = [Run(item.offset, item.length, key, item.crc32) for item, key in keys.items()]
    archives = (one for one in _archives(files, catalog, sizes) if one[0].file in runs)
    with reading_ahead(
        archives, lambda one: _archive_reads(files, one[0]), _AHEAD_BYTES if has_stores(files) else 0
    ) as inside:
        for item, key in inside:
            if item.length <= _PROVEN_WHOLE and prove:
                read_archive(files, item)
                proven += 1
            elif item.length > _PROVEN_WHOLE:
                for record in record_stretches(files, item):
                    if record.nbytes > _RECORD_BYTES:
                        runs[item.file].append(Run(record.start, record.nbytes, key, record.crc32))
                    elif prove and record.crc32 is not None:
                        found = crc.crc32(files.read(item.file, record.start, record.nbytes))
                        check(key, Stored(item, record.start, record.nbytes, record.crc32), found)
    return {
        name: RawFile(n, _disjoint(runs[name]), heads.get(name, b"")) for name, n in sizes.items()
    }, proven


def _archive_reads(files: Files, item: Item) -> Iterator[Range]:
    """What `_runs` reads of an archive in a store."""
    if item.length <= _PROVEN_WHOLE:
        return store_ranges(files, item.file, item.offset, item.offset + item.length)
    return frame_reads(files, item)


def _archives(files: Files, catalog: Catalog, sizes: Mapping[str, int]) -> Iterator[tuple[Item, str]]:
    """Every `torch.save` archive once: items of tensors and objects, and files that are one."""
    seen = set[Item]()
    stored = [(c.item, entry.key) for entry in catalog.tensors.values() for c in entry.chunks]
    for item, key in [*stored, *((entry.item, key) for key, entry in catalog.objects.items())]:
        if not item.bare and item not in seen:
            seen.add(item)
            yield item, key
    for name in sizes:
        if name.endswith(".pt"):
            yield whole_file(files, name), name


def _disjoint(runs: Iterable[Run]) -> list[Run]:
    """Runs in order; of two that share bytes the first, which is then read on to where the next begins."""
    kept: list[Run] = []
    for run in sorted(runs):
        if not kept or run.start >= kept[-1].start + kept[-1].nbytes:
            kept.append(run)
    return kept


def _read_back(made: Conversion, files: Files, place: Output, write: WriteOptions) -> None:
    """Raise VerificationError if the copy is not, byte for byte, what the source is."""
    plan, place = made.plan, replace(place, extra_files=made.extra_files, is_dcp=False)
    with closing(SourceReader(files)) as reader:
        same = is_written(plan, place, plan.items, reader, write, small_parts=True, tick=lambda: None)
    if not same:
        raise VerificationError(
            f"{place.directory}: read back, it differs from {files.location}. Do not use it; copy again with "
            "--overwrite, and check the storage."
        )
