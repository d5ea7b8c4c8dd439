"""`ls`: the iterations of a run: whole or not, how large, of which format and topology, from metadata alone."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.errors import (
    NEVER_FINDINGS,
    CkptError,
    CorruptCheckpointError,
    HostileCheckpointError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckpt_tools.formats.dcp.metadata_read import METADATA
from ckpt_tools.formats.locate.detect import locate
from ckpt_tools.formats.locate.run_layouts import being_written, iteration_folders, names_in
from ckpt_tools.formats.storage.files import AnyPath, path_in, path_text
from ckpt_tools.formats.storage.open_files import files_below, open_files
from ckpt_tools.megatron.run_state.common_state import read_common_state
from ckpt_tools.megatron.run_state.record import AXES, read_record
from ckpt_tools.plain_data import plain
from ckpt_tools.verify.checkpoint.structure import check_files

COMPLETE, INCOMPLETE, DAMAGED = "complete", "incomplete", "damaged"
NOT_READ = "not read"  # of a format that this tool does not know, or empty
RELEASE = "release"
_SIZES = {  # what training arguments call the axes
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "world": "world_size",
}


@dataclass(frozen=True, slots=True)
class IterationRow:
    """One iteration folder. `state` follows from metadata and file sizes; `why` is empty where it is complete."""

    name: str
    iteration: int | None
    state: str
    why: str
    nbytes: int
    files: int
    kind: str | None = None
    topology: dict[str, int] | None = None
    is_latest: bool = False
    inside: str = ""  # where in the folder the checkpoint lies


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run of a folder of runs, or a checkpoint that lies there as a run does."""

    name: str
    iterations: int
    latest: str | None
    kind: str | None  # of the latest
    nbytes: int


@dataclass(frozen=True, slots=True)
class RunListing:
    """What lies in a run's root; `others` are bytes of other files and folders. Of a folder of runs, its `runs`."""

    root: str
    iterations: tuple[IterationRow, ...]
    others: dict[str, int]
    latest: str | None  # what the tracker names
    note: str = ""  # why it names nothing that is there
    runs: tuple[RunRow, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """In JSON's types."""
        names = {"nbytes": "bytes", "kind": "format", "is_latest": "latest"}
        others = [{"name": name, "bytes": nbytes} for name, nbytes in self.others.items()]
        return {"schema_version": 1, **plain(self, names), "others": others}


def list_run(root: AnyPath, trust_pickle: bool = False) -> RunListing:
    """The iterations in a run's root, the one checkpoint that `root` is, or the runs in a folder of runs.

    No tensor byte is read.

    Raises:
        UnsupportedCheckpointError: nothing is there.
        StorageError: the system or the store refused.
    """
    root = path_text(root)
    names = iteration_names(root)
    unfinished = being_written(names_in(root))
    if not names and not unfinished:
        try:
            location = locate(root)
        except UnsupportedCheckpointError:
            with closing(open_files(root)) as files:  # which is looked at and not walked through
                folders = [name for name in files.list() if not name.startswith(".")]
            runs = tuple(run for name in folders if (run := _run(name, path_in(root, name))) is not None)
            if not runs:
                raise
            return RunListing(root, (), {}, None, runs=runs)
        sizes = files_below(root)
        name = location.path.rstrip("/").rpartition("/")[2]
        row = iteration_row(name, location.path, location.iteration, sizes, trust_pickle)
        return RunListing(location.path, (row,), {}, None)
    sizes = files_below(root)  # not before it is known that it is a run: it may be all of a disk
    latest, note = _latest(root, names)
    rows = []
    for name, number in names.items():
        inside = {file[len(name) + 1 :]: n for file, n in sizes.items() if file.startswith(f"{name}/")}
        row = iteration_row(name, path_in(root, name), number, inside, trust_pickle, name == latest)
        rows.append(row)
    for name, (number, why) in unfinished.items():
        sizes_of = [n for file, n in sizes.items() if file.startswith(f"{name}/")]
        rows.append(IterationRow(name, number, INCOMPLETE, why, sum(sizes_of), len(sizes_of)))
    return RunListing(root, tuple(rows), others_in(sizes, {*names, *unfinished}), latest, note)


def _run(name: str, path: str) -> RunRow | None:
    """What a folder is, if it holds a run or a checkpoint."""
    try:
        iterations = iteration_names(path)
    except (CkptError, OSError):  # a file, or what may not be read: somebody else's
        return None
    kind, latest = None, None
    try:
        location = locate(path)
        kind = location.kind
        latest = _folder_on(location.path, iterations)
    except CkptError:
        if not iterations:
            return None
    return RunRow(name, len(iterations), latest, kind, sum(files_below(path).values()))


def iteration_names(root: str) -> dict[str, int | None]:
    """The iteration folders of a run's root with their numbers, in order; a release has none. {}: not a root."""
    with closing(open_files(root)) as files:
        found = files.list()
    numbered = sorted(iteration_folders(found), key=lambda pair: pair[1])
    release: dict[str, int | None] = {RELEASE: None} if RELEASE in found else {}
    return release | dict(numbered)


def others_in(sizes: dict[str, int], iterations: Collection[str]) -> dict[str, int]:
    """Bytes of what lies in a root next to its iterations, by the first part of the name."""
    others: dict[str, int] = {}
    for file, nbytes in sizes.items():
        first = file.partition("/")[0]
        if first not in iterations:
            others[first] = others.get(first, 0) + nbytes
    return others


def _folder_on(path: str, names: Collection[str]) -> str | None:
    """Which of the folders `path` is, or lies in: some programs keep the checkpoint further inside."""
    return next((part for part in reversed(path.split("/")) if part in names), None)


def _latest(root: str, names: Collection[str]) -> tuple[str | None, str]:
    """The folder that the tracker names, and what is wrong with the tracker."""
    try:
        return _folder_on(locate(root).path, names), ""
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        return None, str(error)


def iteration_row(
    name: str,
    path: str,
    number: int | None,
    sizes: dict[str, int],
    trust_pickle: bool,
    is_latest: bool = False,
) -> IterationRow:
    """What the iteration at `path` is; `sizes` are those of its files."""
    nbytes, files = sum(sizes.values()), len(sizes)
    try:
        with open_checkpoint(path, None, trust_pickle, with_common=False) as opened:
            check = check_files(opened.files, opened.catalog)
            wrong = next((f"{f.where}: {f.message}" for f in check.findings if f.severity == "error"), "")
            state = DAMAGED if wrong else COMPLETE
            kind, topology = opened.location.kind, topology_of(opened)
            inside = opened.location.path.removeprefix(path).strip("/")
    except (*NEVER_FINDINGS, UsageError):
        raise
    except CkptError as error:
        interrupted = METADATA not in sizes and any(file.endswith(".distcp") for file in sizes)
        state = (
            INCOMPLETE if interrupted else DAMAGED if isinstance(error, CorruptCheckpointError) else NOT_READ
        )
        return IterationRow(name, number, state, str(error), nbytes, files, is_latest=is_latest)
    return IterationRow(name, number, state, wrong, nbytes, files, kind, topology, is_latest, inside)


def topology_of(opened: Opened) -> dict[str, int]:
    """Sizes of the job that a checkpoint was written by or converted for, as far as it tells."""
    record = read_record(opened.files)
    if record is not None:
        sizes = {axis: getattr(record, axis) for axis in AXES}
        recorded = {axis: size.ranks for axis, size in sizes.items() if size is not None}
        if recorded:
            return recorded
    try:
        common = read_common_state(opened.files, opened.catalog, opened.trust_pickle)
    except (*NEVER_FINDINGS, HostileCheckpointError):
        raise
    except CkptError:  # `verify` reports it
        return {}
    values = {axis: common.arg(name) for axis, name in _SIZES.items()}
    return {
        axis: size for axis, size in values.items() if isinstance(size, int) and not isinstance(size, bool)
    }
