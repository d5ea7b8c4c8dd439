"""`.metadata` of a torch distributed checkpoint, as a `Catalog`.

Every writer's file is read: plain torch of any version, Megatron core 0.8 to main with its own root class,
`all_local_plans` and `mcore_data`. Attributes that a version does not write are treated as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tools.box import Box
from ckpt_tools.catalog.files import Files
from ckpt_tools.catalog.model import Catalog, Chunk, Item, ObjectEntry, TensorEntry
from ckpt_tools.catalog.unpickle import Sealed, TorchDtype, load_pickle
from ckpt_tools.errors import CkptError, CorruptCheckpointError, UnsupportedCheckpointError, list_problems

METADATA = ".metadata"


class _Plain(metaclass=Sealed):
    """A class of `.metadata` whose state is its attributes; the C unpickler fills them without calling us."""


class _Metadata(_Plain):
    metadata_class = "torch.distributed.checkpoint.metadata.Metadata"


class _MCoreMetadata(_Metadata):
    metadata_class = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"


class _Tensor(_Plain):
    pass


class _Bytes(_Plain):
    pass


class _Chunk(_Plain):
    pass


class _Index(_Plain):
    offset = index = None


class _StorageInfo(_Plain):
    transform_descriptors = None


class _Properties(metaclass=Sealed):
    __slots__ = ("dtype",)

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


class _Skipped(metaclass=Sealed):
    """Save plans: not needed, and the largest part of some files."""

    __slots__ = ()

    def __new__(cls, *_args: Any) -> _Skipped:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


_TORCH = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # where torch <= 2.2 kept tensor properties
_STRATEGY = "megatron.core.dist_checkpointing.strategies.torch"
_KNOWN: dict[tuple[str, str], object] = {
    (f"{_TORCH}.metadata", "Metadata"): _Metadata,
    (_STRATEGY, "MCoreMetadata"): _MCoreMetadata,
    (f"{_TORCH}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_TORCH}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_TORCH}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_TORCH}.metadata", "MetadataIndex"): _Index,
    (f"{_TORCH}.filesystem", "_StorageInfo"): _StorageInfo,
    (f"{_TORCH}.metadata", "TensorProperties"): _Properties,
    (_OLD, "TensorProperties"): _Properties,
    (f"{_TORCH}.metadata", "_MEM_FORMAT_ENCODING"): _Skipped,
    (_OLD, "MEM_FORMAT_ENCODING"): _Skipped,
    ("torch.serialization", "_get_layout"): _Skipped,
    (f"{_TORCH}.planner", "SavePlan"): _Skipped,
    (_STRATEGY, "MCoreSavePlan"): _Skipped,
    (f"{_TORCH}.planner", "WriteItem"): _Skipped,
    (f"{_TORCH}.planner", "TensorWriteData"): _Skipped,
    (f"{_TORCH}.planner", "WriteItemType"): _Skipped,
}


def read_catalog(files: Files, trust_pickle: bool = False) -> Catalog:
    """What the checkpoint in `files` holds, its `.metadata` proven consistent in itself.

    Raises:
        UnsupportedCheckpointError: no `.metadata`, or items that a torch extension transformed.
        CorruptCheckpointError: `.metadata` is damaged, contradicts itself, or points outside the folder.
    """
    root = _load(files, trust_pickle)
    where = f"{files.location.rstrip('/')}/{METADATA}"
    try:
        return _convert(root, files.location, where)
    except CkptError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{where}: not the metadata of a checkpoint ({type(error).__name__}: {error})."
        ) from error


def _load(files: Files, trust_pickle: bool) -> _Metadata:
    where = f"{files.location.rstrip('/')}/{METADATA}"
    if not files.exists(METADATA):
        raise missing_metadata(files)
    root = load_pickle(
        files.read(METADATA, 0, files.size(METADATA)), where, _KNOWN, trust_pickle=trust_pickle
    )
    if not isinstance(root, _Metadata):
        raise CorruptCheckpointError(f"{where}: holds a {type(root).__name__}, not checkpoint metadata.")
    return root


def missing_metadata(files: Files) -> UnsupportedCheckpointError:
    """Why a folder without `.metadata` cannot be read, as far as its other files tell."""
    names = files.list()
    per_rank = [name for name in names if name.startswith("__") and name.endswith(METADATA)]
    if per_rank:
        return UnsupportedCheckpointError(
            f"{files.location}: the metadata is spread over {len(per_rank)} files like {per_rank[0]} (saved with "
            "use_collectives=False). Load it with torch and save it again with collectives."
        )
    if any(name.endswith(".distcp") for name in names):
        return UnsupportedCheckpointError(
            f"{files.location}: there are .distcp files but no {METADATA}, so the save was interrupted before it "
            "was complete. Use an earlier iteration."
        )
    return UnsupportedCheckpointError(
        f"{files.location}: no {METADATA}, so this is no distributed checkpoint."
    )


def _convert(root: _Metadata, location: str, where: str) -> Catalog:
    fields = vars(root)
    problems: list[str] = []
    items = _items(fields["storage_data"], problems)
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    for key, stored in fields["state_dict_metadata"].items():
        if isinstance(stored, _Bytes):
            item = items.pop((key, None), None)
            if item is None:
                problems.append(f"{key}: no file holds it")
            else:
                objects[key] = ObjectEntry(key, item)
        else:
            tensors[key] = _tensor_entry(key, stored, items, problems)
    problems += [f"{key}: chunk at {offset} is stored but not described" for key, offset in items]
    if problems:
        raise CorruptCheckpointError(f"{where} contradicts itself:\n{list_problems(problems)}")
    return Catalog(
        root=location,
        tensors=tensors,
        objects=objects,
        planner_paths={key: tuple(path) for key, path in (fields.get("planner_data") or {}).items()},
        original_shapes=_original_shapes(fields.get("mcore_data")),
        metadata_class=root.metadata_class,
        metadata_version=fields.get("version"),
    )


_Key = tuple[str, tuple[int, ...] | None]


def _items(storage: Mapping[Any, Any], problems: list[str]) -> dict[_Key, Item]:
    """Every stored item by key and chunk offset; file names are proven to stay inside the folder."""
    found: dict[_Key, Item] = {}
    safe: set[str] = set()
    for index, info in storage.items():
        item = Item(info.relative_path, info.offset, info.length)
        if item.file not in safe:
            problem = _path_problem(item.file)
            if problem:
                problems.append(f"{index.fqn}: {problem}")
            safe.add(item.file)
        if info.transform_descriptors:
            raise UnsupportedCheckpointError(
                f"{index.fqn} in {item.file} was transformed by {', '.join(map(str, info.transform_descriptors))} "
                "when it was saved. Save the checkpoint again without torch extensions."
            )
        if item.offset < 0 or item.length < 0:
            problems.append(f"{index.fqn}: bytes {item.offset}..{item.offset + item.length} of {item.file}")
        key = (index.fqn, index.offset)
        if key in found:
            problems.append(f"{index.fqn}: two items are stored for the chunk at {index.offset}")
        found[key] = item
    return found


def _path_problem(path: object) -> str | None:
    if not isinstance(path, str) or not path or "\0" in path:
        return f"file name {path!r} is no file name"
    if path.startswith("/") or "\\" in path or ".." in path.split("/"):
        return f"file name {path!r} leads out of the checkpoint"
    return None


def _tensor_entry(key: str, stored: Any, items: dict[_Key, Item], problems: list[str]) -> TensorEntry:
    shape = tuple(stored.size)
    chunks = []
    for chunk in stored.chunks:
        box = Box(chunk.offsets, chunk.sizes)
        item = items.pop((key, box.start), None)
        if item is None:
            problems.append(f"{key}: no file holds the chunk {box}")
        elif not _inside(box, shape):
            problems.append(f"{key}: chunk {box} is outside of shape {list(shape)}")
        else:
            chunks.append(Chunk(box, item))
    return TensorEntry(key, _dtype(stored.properties), shape, tuple(chunks))


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.start) == len(box.size) == len(shape) and all(
        a >= 0 and n >= 0 and a + n <= m for a, n, m in zip(box.start, box.size, shape, strict=True)
    )


def _dtype(properties: Any) -> str:
    if isinstance(properties.dtype, TorchDtype):
        return properties.dtype.name
    raise UnsupportedCheckpointError(f"element type {properties.dtype!r} is not supported.")


def _original_shapes(mcore_data: Any) -> dict[str, tuple[int, ...]] | None:
    if mcore_data is None:
        return None
    name = "nd_reformulated_orig_global_shape"
    return {key: tuple(info[name]) for key, info in mcore_data.items() if name in info}
