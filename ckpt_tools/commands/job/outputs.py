"""Where a conversion's result goes, and the archives of its objects."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckpt_tools.credentials import hidden
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.run import Output
from ckpt_tools.formats.dcp.metadata_read import METADATA
from ckpt_tools.formats.locate.detect import RECORD_FILE, TRACKER, Location
from ckpt_tools.formats.storage.files import Files, path_in
from ckpt_tools.formats.torch_archive.item_reader import read_small_file
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.megatron.format import FORMATS
from ckpt_tools.megatron.run_state.common_state import BRIDGE_FILES, LATEST_TRAIN_STATE, TRAIN_STATE
from ckpt_tools.megatron.run_state.record import TargetRecord, record_bytes
from ckpt_tools.model.target import TargetObject

_SAME = {"s3a": "s3", "gcs": "gs"}  # schemes of one store
_ITERATION = re.compile(r"iter_\d+|release")


def choose_output(
    source: str, location: Location, output: str, overwrite: bool, resume: bool, tracker: bool = True
) -> Output:
    """A run's root with `iter_%07d` and tracker, which a job finds by `--load`.

    The output is a single directory if it is itself named as an iteration, or if the source is a folder without an
    iteration number. Without `tracker` the root's tracker is not changed.
    """
    refuse_overlap(source, location, output)
    is_run = FORMATS[location.kind].is_run
    is_numbered = location.is_release or location.iteration is not None
    if not is_root(source, location) and not (is_run and is_numbered):
        return Output(output_directory(output), overwrite=overwrite, resume=resume)
    iteration = None if location.is_release else location.iteration
    return in_root(output, iteration, overwrite, resume, tracker)


def in_root(
    output: str, iteration: int | None, overwrite: bool, resume: bool, tracker: bool = True
) -> Output:
    """An iteration (None: a release) in the run's root `output`, or that folder alone if it is named as one."""
    if is_iteration(output):
        return Output(output_directory(output), overwrite=overwrite, resume=resume)
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    latest = "release" if iteration is None else str(iteration)
    folder = output_directory(path_in(output, name))
    if isinstance(folder, Path) and (folder.parent / METADATA).exists():
        raise UsageError(
            f"{folder.parent} is a checkpoint itself, not the root of a run; choose another output"
        )
    beside = {TRACKER: latest.encode()} if tracker else {}
    return Output(folder, beside, overwrite=overwrite, resume=resume)


def is_iteration(output: str) -> bool:
    """Whether the output is named as one iteration, and so not a run's root."""
    return bool(_ITERATION.fullmatch(str(output_directory(output)).rstrip("/").rpartition("/")[2]))


def output_directory(output: str) -> Path | str:
    """A path, or the URL of a folder in an object store. Raises UsageError if the name is empty."""
    path = hidden(output).removeprefix("file://")
    if not path:
        raise UsageError("the output's name is empty; is a variable not set?")
    if "://" in path:
        return path
    folder = Path(path)
    return folder if folder.name not in ("", "..") else folder.resolve()  # publishing needs its name


def is_root(source: str, location: Location) -> bool:
    """Whether the user named the run's root and not the iteration in it."""
    return location.root is not None and place_parts(source) == place_parts(location.root)


def refuse_overlap(source: str, location: Location, output: str) -> None:
    """Raise UsageError if the output has no name, or shares folders with the source."""
    output_directory(output)
    scheme, separator, folder = output.partition("://")
    if separator and not folder.strip("/") and scheme != "file":
        raise UsageError(f"{output} does not name a folder; choose another output.")
    target = place_parts(output)
    for place in (place_parts(location.path), place_parts(source)):
        common = min(len(target), len(place))
        if target[:common] == place[:common]:
            raise UsageError(
                f"the output {output} and the source {source} overlap; a conversion never writes into its "
                "source. Choose a directory outside it."
            )


def place_parts(location: str) -> tuple[str, ...]:
    """The names that lead to a folder, from its file system or store down; equal for two spellings of one place."""
    path = re.sub("^(file|local)://", "", hidden(location))
    if "://" not in path:
        # Not `resolve`, which before Python 3.13 has no answer for links that lead in a circle.
        return Path(os.path.realpath(path)).parts
    scheme, _, rest = path.partition("://")
    return (_SAME.get(scheme.lower(), scheme.lower()), *filter(None, rest.split("/")))


def read_bridge_files(files: Files) -> dict[str, bytes]:
    """The files that Bridge keeps next to the tensors, unchanged; none in a checkpoint of another program."""
    return {name: read_small_file(files, name) for name in BRIDGE_FILES if files.exists(name)}


def with_record(small: Mapping[str, bytes], record: TargetRecord) -> dict[str, bytes]:
    """An output's small files, and the one that says for which job it is."""
    return {**small, RECORD_FILE: record_bytes(record)}


def trackers_of(small: Mapping[str, bytes]) -> dict[str, bytes]:
    """What Bridge wants in the run's root for an iteration with these small files."""
    return {LATEST_TRAIN_STATE: small[TRAIN_STATE]} if TRAIN_STATE in small else {}


_PLAIN = (type(None), bool, int, float, str)  # a union type would be built for each of a million fields


def object_archives(objects: Iterable[TargetObject]) -> list[tuple[str, bytes]]:
    """(key, archive) of every object; equal small values are pickled once.

    Group fields repeat for every parameter: a large model has hundreds of thousands of them and a few dozen values.
    """
    seen: dict[tuple[type, str], bytes] = {}
    archives = []
    for item in objects:
        if not _is_plain(item.value):
            archives.append((item.key, dump_archive(item.value)))
            continue
        same = (type(item.value), repr(item.value))
        if same not in seen:
            seen[same] = dump_archive(item.value)
        archives.append((item.key, seen[same]))
    return archives


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
