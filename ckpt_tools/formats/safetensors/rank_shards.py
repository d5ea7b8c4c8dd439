"""A model that every rank has written its part of, as `torch.distributed.checkpoint`'s HuggingFaceStorageWriter does.

With `save_distributed` rank R writes `shard-R-model-I-of-N.safetensors` for every file I that holds some of what it
has. Where a part stands in its tensor is in the header, in `__metadata__` under DCP_SHARDING_INFO:
`{name: {"saved_offsets": [...]}}`, as JSON in a text. The whole tensor's shape is nowhere: it is where its parts end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.model.box import Box
from ckpt_tools.model.catalog import Chunk, TensorEntry

_NAME = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")  # torch _hf_utils.py `_gen_file_name`
_MOST_FILES = 100_000
_PLACES, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def parts_of_ranks(names: Iterable[str]) -> list[str]:
    """The names that are those of ranks' parts."""
    return sorted(name for name in names if _NAME.fullmatch(name))


def lacking_files(names: Iterable[str]) -> list[str]:
    """What the names of the parts say is not there: a rank need not have some of every file, but one has."""
    found = [match for name in names if (match := _NAME.fullmatch(name))]
    ends = {int(match[3]) for match in found}
    if len(ends) > 1:
        return [f"parts of models of {' and of '.join(map(str, sorted(ends)))} files"]
    there, count = {int(match[2]) for match in found}, max(ends, default=0)
    if count > _MOST_FILES:  # a name can say any number
        return [f"parts of a model of {count:,} files, of which {len(there):,} are there"]
    return [
        f"no rank's part of file {number} of {count}" for number in range(1, count + 1) if number not in there
    ]


def what_is_not_told(names: Iterable[str]) -> str:
    """What nobody can see in the ranks' parts `names`: that the last rows of all tensors are not there."""
    ranks = {int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
    if not ranks:
        return ""
    gaps = max(ranks) - min(ranks) + 1 - len(ranks)
    absent = f", without {gaps:,} between them" if gaps else ""
    return (
        f"parts of {len(ranks):,} ranks, {min(ranks)} to {max(ranks)}{absent}: no file says how many ranks "
        "there were or how long a tensor is, so that a lost last part cannot be seen here; import-hf compares with "
        "config.json"
    )


def placed(name: str, found: Mapping[str, TensorEntry], notes: Mapping[str, str]) -> dict[str, TensorEntry]:
    """The tensors of a rank's file with their chunks where they belong; shapes are those of the parts still."""
    try:
        places = json.loads(notes[_PLACES], object_pairs_hook=_unique)
    except KeyError as error:
        raise ValueError(f"{name}: no {_PLACES} in its header, which says where the parts belong") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name}: {_PLACES} in its header does not say where the parts belong: {error}"
        ) from error
    return {key: _moved(name, entry, places) for key, entry in found.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two places of one name nobody can tell which is meant."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _moved(name: str, entry: TensorEntry, places: Any) -> TensorEntry:
    match places:
        case {entry.key: {"saved_offsets": list(offsets)}} if len(offsets) == len(entry.shape):
            pass
        case _:
            raise ValueError(
                f"{name}: {_PLACES} has no {_OFFSETS} of {len(entry.shape)} numbers for {entry.key}"
            )
    if not all(type(n) is int and 0 <= n < 1 << 60 for n in offsets):
        raise ValueError(f"{name}: {entry.key} cannot stand at {offsets}")
    (chunk,) = entry.chunks
    return replace(entry, chunks=(Chunk(Box(tuple(offsets), entry.shape), chunk.item),))


def joined(parts: Iterable[TensorEntry]) -> TensorEntry:
    """One tensor of its parts, in the order of their places."""
    parts = list(parts)
    forms = {(part.dtype, len(part.shape)) for part in parts}
    if len(forms) > 1:
        said = " and ".join(f"{dtype} of {n} dimensions" for dtype, n in sorted(forms))
        raise ValueError(f"{parts[0].key}: its parts are {said}")
    chunks = sorted(chunk for part in parts for chunk in part.chunks)
    shape = tuple(map(max, zip(*(chunk.box.stop for chunk in chunks), strict=True)))
    whole = replace(parts[0], shape=shape, chunks=tuple(chunks))
    held = sum(chunk.box.volume for chunk in chunks)
    if held != whole.numel:
        what = "leave holes" if held < whole.numel else "overlap"
        raise ValueError(
            f"{whole.key}: its parts {what}: {held:,} elements for {list(shape)}; is each rank's file there?"
        )
    return whole
