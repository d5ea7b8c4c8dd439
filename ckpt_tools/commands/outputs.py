"""Where a conversion's result goes, the archives of its objects, and what is said about it afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckpt_tools.credentials import hidden, redacted
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.run import Output, WriteReport
from ckpt_tools.formats.detect import TRACKER, Location
from ckpt_tools.formats.pickling import dump_archive
from ckpt_tools.model.target import Target, TargetObject


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion did, for people and, as JSON, for programs."""

    source: str
    output: str
    iteration: int | None
    source_layout: str
    target: str
    dialect: str
    tensors: int
    objects: int
    groups: dict[int, int]  # group id -> number of parameters
    masters_checked: str
    dropped: tuple[str, ...]
    renamed: tuple[str, ...]
    backfilled: tuple[str, ...]
    notes: tuple[str, ...]
    job: Mapping[str, Any] | None = None  # the one that loads the output (`TargetJob.as_json`)
    written: WriteReport | None = None  # None: a dry run
    plan: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The report as plain data, with its schema version."""
        data = asdict(self)
        data["tensor_count"], data["object_count"] = data.pop("tensors"), data.pop("objects")
        data |= {"source": redacted(self.source), "output": redacted(self.output)}
        return {"schema_version": 1, **data}


def choose_output(
    source: str, location: Location, output: str, overwrite: bool, resume: bool, tracker: bool = True
) -> Output:
    """Like to like: a run's root becomes a root with `iter_%07d` and tracker, an iteration directory one directory.

    Without `tracker` the root's tracker stays as it is.

    Raises:
        UsageError: the output is the source, or one of them lies inside the other.
    """
    refuse_overlap(source, location, output)
    if not is_root(source, location):
        return Output(output_directory(output), overwrite=overwrite, resume=resume)
    name = "release" if location.is_release else f"iter_{location.iteration:07d}"
    latest = "release" if location.is_release else str(location.iteration)
    folder = output_directory(f"{output.rstrip('/')}/{name}")
    beside = {TRACKER: latest.encode()} if tracker else {}
    return Output(folder, beside, overwrite=overwrite, resume=resume)


def output_directory(output: str) -> Path | str:
    """A path, or the URL of a folder in an object store."""
    path = hidden(output).removeprefix("file://")
    if "://" in path:
        return path
    folder = Path(path)
    return folder if folder.name not in ("", "..") else folder.resolve()  # publishing needs its name


def is_root(source: str, location: Location) -> bool:
    """Whether the user named the run's root and not the iteration in it."""
    return location.root is not None and place_parts(source) == place_parts(location.root)


def refuse_overlap(source: str, location: Location, output: str) -> None:
    """Nothing, for an output that is a place of its own.

    Raises:
        UsageError: it has no name (a shell's variable that is not set), or shares folders with the source.
    """
    if not hidden(output).removeprefix("file://"):
        raise UsageError("the output's name is empty; is a variable not set?")
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
    path = hidden(location).removeprefix("file://")
    if "://" not in path:
        return Path(path).resolve().parts
    scheme, _, rest = path.partition("://")
    return (scheme, *filter(None, rest.split("/")))


MAX_DIGITS = 18  # of an iteration
_PLAIN = (type(None), bool, int, float, str)  # a union would be made anew for each of a million fields


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


def count_objects(target: Target) -> int:
    """Objects and inline tensors of a target."""
    return len(target.objects) + len(target.inline)
