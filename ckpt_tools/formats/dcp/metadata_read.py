"""`.metadata` of a torch distributed checkpoint, as a `Catalog`.

Every writer's file is read: plain torch of any version, Megatron core 0.8 to main with its own root class,
`all_local_plans` and `mcore_data`. Attributes that a version does not write are treated as absent.

Entries of a large file are decoded at the first look-up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import gt
from typing import Any, NamedTuple, TypeVar, overload

from ckpt_tools.errors import (
    CkptError,
    CorruptCheckpointError,
    HostileCheckpointError,
    UnsupportedCheckpointError,
    list_problems,
)
from ckpt_tools.formats.dcp.storage_info import (
    LAYOUTS,
    LEADS_OUT,
    Offset,
    Storage,
    as_offset,
    check_range,
    packed,
)
from ckpt_tools.formats.pickle.machine import Machine, Object, Pairs, Record, brief
from ckpt_tools.formats.pickle.packed_records import CHUNK, Layout
from ckpt_tools.formats.pickle.stored_classes import check_properties, check_storage_meta, fields_of, is_class
from ckpt_tools.formats.storage.files import Files, path_in, read_whole
from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Catalog, Chunk, ObjectEntry, TensorEntry
from ckpt_tools.model.dtypes import ITEMSIZE

KEPT = 100_000  # items of entries that were looked at, kept decoded

V = TypeVar("V")


class Lazy(Mapping[str, V]):
    """Entries decoded on look-up, the latest kept."""

    def __init__(
        self, raw: Mapping[str, object], decode: Callable[[str], V], weigh: Callable[[V], int]
    ) -> None:
        self._raw, self._decode, self._weigh = raw, decode, weigh
        self._kept: dict[str, V] = {}
        self._weight = 0

    def __getitem__(self, key: str) -> V:
        value = self._kept.get(key)
        if value is None:
            if key not in self._raw:
                raise KeyError(key)
            try:
                value = self._decode(key)
            except CkptError:
                raise
            except Exception as error:
                raise CorruptCheckpointError(f"{key}: {type(error).__name__}: {error}") from error
            self._weight += self._weigh(value)
            if self._weight > KEPT:
                self._kept, self._weight = {}, self._weigh(value)
            self._kept[key] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __contains__(self, key: object) -> bool:
        return key in self._raw

    def errors(self) -> Iterator[CorruptCheckpointError]:
        """What is wrong with the entries."""
        for key in self._raw:
            try:
                self[key]
            except CorruptCheckpointError as error:
                yield error


class LazyChunks(Sequence[Chunk]):
    """The chunks of one tensor, decoded when they are asked for: most passes over a catalog ask for shapes alone."""

    __slots__ = ("_count", "_decoded", "_key")

    def __init__(self, decoded: Mapping[str, tuple[Chunk, ...]], key: str, count: int) -> None:
        self._decoded, self._key, self._count = decoded, key, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._decoded[self._key])

    @overload
    def __getitem__(self, at: int) -> Chunk: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, at: int | slice) -> Chunk | Sequence[Chunk]:
        return self._decoded[self._key][at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


METADATA = ".metadata"
MAX_METADATA_BYTES = 8 << 30  # some tens of millions of chunks
EAGER_BYTES = 2 << 20  # up to this size everything is decoded, and so checked, on opening

_RANK_FILE = re.compile(r"__(\d{1,9})_\d+\.distcp")

_START_MEMO = 4  # of those of a packed chunk: itself, its attributes, a tuple, arguments, its start
_CUTS = 1000  # up to so many chunks, a tensor's boxes are kept for other tensors of the same cut
_KEPT_CUTS = 64  # ways to cut a tensor, kept decoded


class _Boxes(NamedTuple):
    """Of a tensor's chunks."""

    boxes: tuple[Box, ...]
    made: list[
        tuple[int, int]
    ]  # memo entry of a start, behind the first that the chunks make; number of the box


def read_catalog(files: Files, trust_pickle: bool = False) -> Catalog:
    """What the checkpoint in `files` holds.

    Tensors and objects are decoded when they are looked at. What contradicts itself is found on opening in all but
    very large catalogs, and then at the look-up of the key that it concerns.
    """
    if not files.exists(METADATA):
        raise missing_metadata(files)
    where = path_in(files.location, METADATA)
    machine = Machine(read_whole(files, METADATA, MAX_METADATA_BYTES), where, trust_pickle)
    root = machine.load()
    try:
        return _catalog(machine, root, files.location)
    except CkptError:
        raise
    except Exception as error:  # any error that an unexpected structure causes
        raise CorruptCheckpointError(
            f"{where}: not the metadata of a checkpoint ({type(error).__name__}: {error})."
        ) from error


def missing_metadata(files: Files) -> UnsupportedCheckpointError:
    """Error for a folder without `.metadata`; its other files decide the message."""
    names = files.list()
    per_rank = [name for name in names if name.startswith("__") and name.endswith(METADATA)]
    if per_rank:
        return UnsupportedCheckpointError(
            f"{files.location}: the metadata is spread over {len(per_rank)} files like {per_rank[0]} (saved with "
            "use_collectives=False). Load it with torch and save it again with collectives."
        )
    ranks = sorted({int(match[1]) for match in map(_RANK_FILE.fullmatch, names) if match})
    if ranks and ranks[0] > 0:
        listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        return UnsupportedCheckpointError(
            f"{files.location}: here are only the files of rank {listed}; those of rank 0 and {METADATA}, which "
            "rank 0 writes, are elsewhere. Was it saved to disks of the nodes? Copy all their folders into one."
        )
    if any(name.endswith(".distcp") for name in names):
        return UnsupportedCheckpointError(
            f"{files.location}: there are .distcp files but no {METADATA}: the save was interrupted before it was "
            "complete, or a copy left out hidden files. Copy it again, or use an earlier iteration."
        )
    iterations = [name for name in names if name.startswith("iter_")]
    hint = f" Give one of its iterations: {', '.join(iterations[-3:])}." if iterations else ""
    return UnsupportedCheckpointError(
        f"{files.location}: no {METADATA}, so this is not a distributed checkpoint.{hint}"
    )


def _catalog(machine: Machine, root: Any, location: str) -> Catalog:
    if type(root) is not Object or root.kind.name not in ("Metadata", "MCoreMetadata"):
        kind = f"{root.kind.module}.{root.kind.name}" if type(root) is Object else type(root).__name__
        raise CorruptCheckpointError(f"{machine.where}: holds a {kind}, not checkpoint metadata.")
    fields = fields_of(root, "Metadata", "MCoreMetadata")
    check_storage_meta(fields.get("storage_meta"))
    stored = fields["state_dict_metadata"].as_dict()
    storage = Storage(machine, fields.get("storage_data") or Pairs())
    by_kind: dict[str, dict[str, Object]] = {"TensorStorageMetadata": {}, "BytesStorageMetadata": {}}
    for key, entry in stored.items():
        by_kind[entry.kind.name][key] = entry
        if not is_class(entry.kind, entry.kind.name):
            raise CorruptCheckpointError(
                f"{machine.where}: torch has no {entry.kind.module}.{entry.kind.name}."
            )
    decoder = _Decoder(machine, storage, stored)
    pieces = Lazy(by_kind["TensorStorageMetadata"], decoder.chunks, len)
    tensors = Lazy(
        by_kind["TensorStorageMetadata"], lambda key: decoder.tensor(key, pieces), lambda _tensor: 1
    )
    objects = Lazy(by_kind["BytesStorageMetadata"], decoder.object, lambda _object: 1)
    unknown = [f"{key}: stored but not described" for key in storage.keys() - stored.keys()]
    problems = storage.path_problems() + sorted(unknown)
    if len(machine.data) <= EAGER_BYTES:
        found = (str(error) for lazy in (tensors, pieces, objects) for error in lazy.errors())
        problems += dict.fromkeys(found)
    if any(LEADS_OUT in problem for problem in problems):
        raise HostileCheckpointError(
            f"{machine.where} names files elsewhere:\n{list_problems(problems)}", problems
        )
    if problems:
        raise CorruptCheckpointError(
            f"{machine.where} contradicts itself:\n{list_problems(problems)}", problems
        )
    planner = fields["planner_data"]  # None in Megatron's; a planner of an unknown class is ignored
    paths = planner.as_dict() if type(planner) is Pairs else {}
    version = fields.get("version")
    return Catalog(
        root=location,
        tensors=tensors,
        objects=objects,
        planner_paths={key: _path(path) for key, path in paths.items()},
        original_shapes=_original_shapes(fields.get("mcore_data")),
        metadata_class=f"{root.kind.module}.{root.kind.name}",
        metadata_version=version if isinstance(version, str) else None,
    )


# Groups of a packed record that hold its class and the names of its attributes, and what they must be.
_CHUNK_NAMES = {"class": "", "offsets_name": "offsets", "sizes_name": "sizes"}


class _Decoder:
    """Entries of the catalog from what the metadata says about a key."""

    def __init__(self, machine: Machine, storage: Storage, described: Mapping[str, Object]) -> None:
        self._machine, self._storage, self._described = machine, storage, described
        self._boxes: dict[tuple[Offset, int, bytes], _Boxes] = {}
        self._layouts: list[tuple[Layout, bool]] = []  # of chunks, and whether they make their starts

    def object(self, key: str) -> ObjectEntry:
        fields_of(self._described[key], "BytesStorageMetadata")
        items = self._storage.items(key)
        if list(items) != [None]:
            raise CorruptCheckpointError(f"{key}: {len(items)} items are stored for an object")
        check_range(key, items[None])
        return ObjectEntry(key, items[None])

    def tensor(self, key: str, pieces: Mapping[str, tuple[Chunk, ...]]) -> TensorEntry:
        """What is said of a tensor as a whole; `pieces` decodes its chunks."""
        state = fields_of(self._described[key], "TensorStorageMetadata")
        chunks = LazyChunks(pieces, key, len(state["chunks"]))
        return TensorEntry(key, _dtype(key, state["properties"]), as_offset(state["size"]), chunks)

    def chunks(self, key: str) -> tuple[Chunk, ...]:
        """Where the pieces of a tensor are stored; each once, inside its shape."""
        state = fields_of(self._described[key], "TensorStorageMetadata")
        boxes = self._boxes_of(key, as_offset(state["size"]), state["chunks"])
        items = self._storage.items(key)
        chunks = []
        for box in boxes:
            item = items.pop(box.start, None)
            if item is None:
                raise CorruptCheckpointError(f"{key}: no file holds the chunk {box}")
            check_range(key, item)
            chunks.append(Chunk(box, item))
        if items:
            raise CorruptCheckpointError(
                f"{key}: {len(items)} items are stored for chunks that it has not, the first at {next(iter(items))}"
            )
        return tuple(chunks)

    def _boxes_of(self, key: str, shape: Offset, chunks: list[Any]) -> tuple[Box, ...]:
        """The boxes of a tensor's chunks, all inside its `shape`; their starts are noted for those who fetch them.

        Layers and optimizer states of a model are mostly cut in the same way, and then their records have the same
        bytes. Equal bytes give equal boxes, since a memo index has one value in the whole pickle.
        """
        are_packed = bool(chunks) and all(type(chunk) is Record for chunk in chunks)
        cut_key = None
        if are_packed and len(chunks) <= _CUTS:
            last = packed(CHUNK, self._machine.data, chunks[-1])
            cut_key = shape, len(chunks), self._machine.data[chunks[0] : last.end()]
        first = self._machine.first_memo(chunks[0]) if are_packed else 0
        found = self._boxes.get(cut_key) if cut_key is not None else None
        if found is None:
            found = self._new_boxes(chunks, first)
            for box in found.boxes:
                if not len(box.start) == len(box.size) == len(shape):
                    raise CorruptCheckpointError(
                        f"{key}: a chunk has {len(box.start)} offsets and {len(box.size)} sizes, its tensor has "
                        f"{len(shape)} dimensions"
                    )
                if any(map(gt, box.stop, shape)):
                    raise CorruptCheckpointError(f"{key}: chunk {box} is outside of shape {list(shape)}")
            if cut_key is not None:
                if len(self._boxes) > _KEPT_CUTS:
                    self._boxes.clear()
                self._boxes[cut_key] = found
        self._storage.note_sizes({first + memo: found.boxes[number].start for memo, number in found.made})
        return found.boxes

    def _new_boxes(self, chunks: list[Any], first: int) -> _Boxes:
        """The boxes of chunks that were packed from memo entry `first` on, or executed."""
        boxes, made = [], []
        for number, chunk in enumerate(chunks):
            if type(chunk) is not Record:
                state = fields_of(chunk, "ChunkStorageMetadata")
                boxes.append(Box(as_offset(state["offsets"]), as_offset(state["sizes"])))
                continue
            box, makes_start = self._packed_box(chunk)
            boxes.append(box)
            if makes_start:
                made.append((self._machine.first_memo(chunk) + _START_MEMO - first, number))
        return _Boxes(tuple(boxes), made)

    def _packed_box(self, place: int) -> tuple[Box, bool]:
        """The box of a packed chunk, and whether its record makes the start of it."""
        storage = self._storage
        for layout, makes_start in self._layouts:
            if (numbers := layout.numbers(self._machine.data, place)) is not None:
                size = storage.fetched_size(numbers[-1])
                start = as_offset(tuple(numbers[:-1])) if makes_start else storage.fetched_size(numbers[0])
                return Box(start, size), makes_start
        match = packed(CHUNK, self._machine.data, place)
        storage.check_names(match, "ChunkStorageMetadata", _CHUNK_NAMES)
        makes_start = match["offsets_tuple"] is not None
        if match["sizes"] and (makes_start or match["offsets"]):
            layout = Layout(match, "offsets_tuple" if makes_start else "offsets", "sizes")
            self._layouts = [(layout, makes_start), *self._layouts[: LAYOUTS - 1]]
        return Box(storage.size(match, "offsets"), storage.size(match, "sizes")), makes_start


def _path(value: Any) -> tuple[str | int, ...]:
    if type(value) is not tuple or not all(isinstance(part, str | int) for part in value):
        raise TypeError("a planner path is not a tuple of names and numbers")
    return value


def _dtype(key: str, properties: Object) -> str:
    dtype = check_properties(properties)
    if dtype.name in ITEMSIZE:
        return dtype.name
    raise UnsupportedCheckpointError(f"{key}: element type {brief(dtype)} is not supported.")


def _original_shapes(mcore_data: Pairs | None) -> dict[str, Offset] | None:
    """Shapes before N-D flattening, of the keys that have one; plain tensors have an empty dict or no entry."""
    if mcore_data is None:
        return None
    name = "nd_reformulated_orig_global_shape"
    entries = {key: info.as_dict() for key, info in mcore_data.as_dict().items()}
    return {key: as_offset(info[name]) for key, info in entries.items() if name in info}
