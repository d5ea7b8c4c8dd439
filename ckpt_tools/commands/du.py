"""`du`: where the bytes of a run lie: by iteration, role, layer, element type and rank, and what is there twice.

Everything is told from metadata and the sizes of files; sums are those of the files to the byte. Two items of one key
and box in different iterations whose writers stored the same checksum are duplicates: a weight that was frozen, an
iteration that was copied. Their payloads are not read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ckpt_tools.commands.ls import RELEASE, iteration_names, others_in, runs_in
from ckpt_tools.commands.named_tensors import part_of, weight_name
from ckpt_tools.commands.opened import Opened, open_checkpoint
from ckpt_tools.errors import (
    NEVER_FINDINGS,
    CkptError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckpt_tools.execute.source_reader import ChunkRef, SourceReader
from ckpt_tools.formats.detect import Location, locate
from ckpt_tools.formats.files import AnyPath, path_in, path_text
from ckpt_tools.formats.tree import files_below
from ckpt_tools.megatron.keys import bucket_key, role_of, stacked_layers
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Item, TensorEntry
from ckpt_tools.model.choices import UsageAxis

OBJECTS, METADATA, GAPS, UNREAD = (
    "objects",
    "metadata and other files",
    "headers and gaps",
    "not a whole checkpoint",
)
BUCKETS = "flat buffers"
AXES: tuple[UsageAxis, ...] = get_args(UsageAxis)
_RANK = re.compile(r"__(\d{1,9})_\d+\.distcp")


class Share(NamedTuple):
    """What some bytes are. Empty: they have no such thing."""

    iteration: str
    role: str
    layer: str = ""  # `decoder.layers.3`
    leaf: str = ""
    dtype: str = ""
    rank: str = ""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """An item that is stored with one checksum in several iterations."""

    key: str
    box: Box
    nbytes: int  # of one
    iterations: tuple[str, ...]

    @property
    def spare(self) -> int:
        """Bytes that one copy would save."""
        return self.nbytes * (len(self.iterations) - 1)


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a run, or of one checkpoint, by what they are."""

    place: str
    shares: Counter[Share]
    others: dict[str, int]  # of a root: what is no iteration
    duplicates: tuple[Duplicate, ...] = ()
    unread: dict[str, str] = field(default_factory=dict)  # iterations that are not whole, with the reason
    without_checksum: int = 0  # items that could not be compared

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(self.shares.values()) + sum(self.others.values())

    @property
    def spare(self) -> int:
        """Bytes of duplicates beyond their first copy."""
        return sum(one.spare for one in self.duplicates)

    def by(self, axis: UsageAxis) -> dict[str, int]:
        """Bytes by one of `AXES`, the most first; iterations, layers and ranks in their order."""
        sums: Counter[str] = Counter()
        for share, nbytes in self.shares.items():
            sums[getattr(share, axis)] += nbytes
        if axis in ("role", "dtype"):
            return dict(sums.most_common())
        return dict(sorted(sums.items(), key=lambda pair: _in_order(pair[0])))

    def as_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "schema_version": 1,
            "place": self.place,
            "bytes": self.total,
            "by": {
                axis: [{axis: name or None, "bytes": n} for name, n in self.by(axis).items()] for axis in AXES
            },
            "others": [{"name": name, "bytes": n} for name, n in self.others.items()],
            "not_whole": [{"iteration": name, "why": why} for name, why in self.unread.items()],
            "duplicate_bytes": self.spare,
            "without_checksum": self.without_checksum,
            "duplicates": [
                {
                    "key": one.key,
                    "start": list(one.box.start),
                    "size": list(one.box.size),
                    "bytes": one.nbytes,
                    "iterations": list(one.iterations),
                }
                for one in self.duplicates
            ],
        }


def disk_usage(
    place: AnyPath, iteration: int | None = None, duplicates: bool = True, trust_pickle: bool = False
) -> Usage:
    """Where the bytes lie at `place`, a run's root with all its iterations or one checkpoint.

    Args:
        iteration: count this one of a root alone.
        duplicates: look for items that several iterations hold.

    Raises:
        UnsupportedCheckpointError: nothing is there, or a folder of runs.
        StorageError: the system or the store refused.
    """
    place = path_text(place)
    names = iteration_names(place)
    is_root = bool(names) and iteration is None
    sizes: dict[str, int] = {}
    if not is_root:
        location = _located(place, iteration)
        name = location.path.rstrip("/").rpartition("/")[2]
        folders = {name: location.path}
        below = {name: files_below(location.path if names else place)}
    else:
        sizes = files_below(place)  # not before it is known that it is a run: it may be all of a disk
        folders = {name: path_in(place, name) for name in names}
        below = {
            name: {file[len(name) + 1 :]: n for file, n in sizes.items() if file.startswith(f"{name}/")}
            for name in names
        }
    found = _Found()
    for name, folder in folders.items():
        _add(found, name, folder, below[name], duplicates and len(folders) > 1, trust_pickle)
    return Usage(
        place if is_root else next(iter(folders.values())),
        found.shares,
        others_in(sizes, names) if is_root else {},
        tuple(found.duplicates()),
        found.unread,
        found.without_checksum,
    )


def _located(place: str, iteration: int | None) -> Location:
    """The one checkpoint at `place`; of a folder of runs it is said how those are counted."""
    try:
        return locate(place, iteration)
    except UnsupportedCheckpointError as error:
        runs = runs_in(place) if Path(place).is_dir() else ()
        if not runs:
            raise
        listed = ", ".join(path_in(place, row.name) for row in runs[:4]) + (", ..." if len(runs) > 4 else "")
        raise UnsupportedCheckpointError(
            f"{place} is a folder of runs, whose sizes `ls {place}` lists; `du` counts one of them: {listed}"
        ) from error


@dataclass(slots=True)
class _Found:
    shares: Counter[Share] = field(default_factory=Counter)
    unread: dict[str, str] = field(default_factory=dict)
    without_checksum: int = 0
    stored: dict[tuple[str, Box, int, int], list[str]] = field(default_factory=lambda: defaultdict(list))

    def duplicates(self) -> Iterator[Duplicate]:
        """What several iterations hold with one checksum, the largest first."""
        several = ((place, names) for place, names in self.stored.items() if len(names) > 1)
        for (key, box, nbytes, _), names in sorted(several, key=lambda one: -one[0][2] * (len(one[1]) - 1)):
            yield Duplicate(key, box, nbytes, tuple(names))


def _add(
    found: _Found, name: str, folder: str, sizes: dict[str, int], compare: bool, trust_pickle: bool
) -> None:
    """Add the bytes of one iteration's files, which are all of its folder."""
    left = Counter(sizes)
    try:
        with open_checkpoint(folder, None, trust_pickle, with_common=False) as opened:
            shares = Counter[Share]()
            inside = opened.location.path.removeprefix(folder).strip("/")
            for item, share, nbytes in _items(opened, name):
                shares[share] += nbytes
                left[path_in(inside, item.file) if inside else item.file] -= nbytes
            short = [file for file, nbytes in left.items() if nbytes < 0]
            if short:
                raise CorruptCheckpointError(f"{folder}/{short[0]} is absent or shorter than its items")
            if compare:
                _note_checksums(found, opened, name)
    except (*NEVER_FINDINGS, UsageError):
        raise
    except CkptError as error:
        found.unread[name] = str(error)
        found.shares[Share(name, UNREAD)] += sum(sizes.values())
        return
    found.shares += shares
    for file, nbytes in left.items():
        role = GAPS if nbytes != sizes.get(file, 0) else METADATA
        if nbytes > 0:
            found.shares[Share(name, role, rank=_rank(file))] += nbytes


def _items(opened: Opened, name: str) -> Iterator[tuple[Item, Share, int]]:
    """The bytes of every stored item, once, shared out over the layers that it holds."""
    kind, seen = opened.location.kind, set[Item]()
    for key, entry in opened.catalog.tensors.items():
        role = role_of(key)
        for chunk in entry.chunks:
            if chunk.item in seen:  # an alias
                continue
            seen.add(chunk.item)
            rank = _rank(chunk.item.file)
            for layer, leaf, nbytes in _over_layers(key, kind, entry, chunk.box, chunk.item.length):
                yield chunk.item, Share(name, role, layer, leaf, entry.dtype, rank), nbytes
    for stored in opened.catalog.objects.values():
        if stored.item not in seen:
            seen.add(stored.item)
            yield stored.item, Share(name, OBJECTS, rank=_rank(stored.item.file)), stored.item.length


def _over_layers(
    key: str, kind: str, entry: TensorEntry, box: Box, nbytes: int
) -> Iterator[tuple[str, str, int]]:
    """(layer, kind of tensor, bytes) of a chunk; one of several layers is shared out in equal parts."""
    if bucket_key(key):
        yield BUCKETS, BUCKETS, nbytes
        return
    name = weight_name(key, kind)
    places = stacked_layers(name) if kind == "torch_dist" else []
    if not places or not box.size or not box.size[0]:
        part = part_of(name)
        yield part.label, part.leaf, nbytes
        return
    count = box.size[0]
    for i in range(count):
        part = part_of(f"{name[: places[0]]}{box.start[0] + i}.{name[places[0] :]}")
        yield part.label, part.leaf, nbytes // count + (i < nbytes % count)


def _note_checksums(found: _Found, opened: Opened, name: str) -> None:
    """Remember the checksum that its writer stored of every chunk."""
    reader = SourceReader(opened.files)
    try:
        for key, entry in opened.catalog.tensors.items():
            for chunk in entry.chunks:
                crc32 = reader.payload(ChunkRef(key, chunk.item, entry.dtype, chunk.box.size)).crc32
                if crc32 is None:
                    found.without_checksum += 1
                else:
                    found.stored[key, chunk.box, chunk.item.length, crc32].append(name)
    finally:
        reader.close()


def _rank(file: str) -> str:
    """The rank whose file it is; the name of a file that belongs to none."""
    match = _RANK.fullmatch(file)
    return match[1] if match else file if file.endswith(".safetensors") else ""


def _in_order(name: str) -> tuple[bool, list[tuple[int, int | str]]]:
    """Names with their numbers as numbers, the empty one last."""
    parts = re.split(r"(\d+)", name)
    return not name or name == RELEASE, [(0, int(p)) if p.isdecimal() else (1, p) for p in parts]
