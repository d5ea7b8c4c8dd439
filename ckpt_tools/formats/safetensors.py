"""Safetensors: a Hugging Face model directory's files as a `Catalog`, and the header of a file to be written.

A file is: 8 bytes little-endian header length, a JSON header (ours are filled up with spaces to a multiple of 8),
the data. The header gives every tensor's dtype, shape and byte range in the data; ranges must follow one another
without gap or overlap from 0 to the end of the file (safetensors `Metadata::validate`). Nothing is handed out before
all of that holds for every file.

What the safetensors library refuses is refused here too, so that no file means something to this tool that it does
not mean to others: other encodings than UTF-8, NaN, lone surrogates, sizes that overflow 64 bits on the way.

torch's HuggingFaceStorageWriter lets every rank write its part of a model (`save_distributed`): rank R writes
`shard-R-model-I-of-N.safetensors` for every file I that holds some of what it has. Where a part lies in its tensor
is in the header, in `__metadata__` under DCP_SHARDING_INFO: `{name: {"saved_offsets": [...]}}`, as JSON in a text.
The whole tensor's shape is not stored: it is where its parts end.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import CorruptCheckpointError, MappingError, UnsupportedCheckpointError, list_problems
from ckpt_tools.formats.storage.files import Files, path_in, read_whole
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import MAX_DIMENSIONS, Catalog, Chunk, Item, TensorEntry
from ckpt_tools.model.dtypes import itemsize

if TYPE_CHECKING:
    from ckpt_tools.model.transfers import TensorInfo


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
    """What the names of the ranks' parts cannot show: that the last rows of all tensors are missing."""
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


MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_INDEX_BYTES = 128 << 20  # a million tensors
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
OTHER_WEIGHTS = (".bin", ".bin.index.json", ".pth", ".pt", ".ckpt", ".gguf", ".h5", ".msgpack")
AS_SAFETENSORS = (
    "Write its weights as safetensors first, if you trust who made them: loading a pickle may run code in it, unless "
    "weights_only=True keeps it to plain tensors (torch 2.6 or later). "
    "AutoModelForCausalLM.from_pretrained(DIR, torch_dtype='auto', weights_only=True).save_pretrained(OUT)"
)
_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST_POINTER = 1024  # bytes, by its specification
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def read_safetensors_catalog(root: str | Path) -> Catalog:
    """The tensors of a model directory, in file order; every item is a bare payload."""
    with closing(open_files(str(root))) as files:
        names = files.list()
        if parts := parts_of_ranks(names) if not {INDEX_FILE, SINGLE_FILE} & set(names) else []:
            return _join_parts(files, parts)
        return _read_catalog(files)


def _join_parts(files: Files, names: list[str]) -> Catalog:
    """The tensors that ranks have written their parts of."""
    refuse_pointers(files, names)
    parts: dict[str, list[TensorEntry]] = {}
    tensors: dict[str, TensorEntry] = {}
    problems = lacking_files(names)
    for name in names:
        try:
            for key, entry in placed(name, *_read_header(files, name)).items():
                parts.setdefault(key, []).append(entry)
        except (CorruptCheckpointError, ValueError) as error:
            problems.append(str(error))
    for key in parts if not problems else ():
        try:
            tensors[key] = joined(parts[key])
        except ValueError as error:
            problems.append(str(error))
    _refuse_damaged(files, problems)
    return Catalog(files.location, tensors, {})


def _refuse_damaged(files: Files, problems: list[str]) -> None:
    if problems:
        raise CorruptCheckpointError(
            f"{files.location}: the weights are not whole:\n" + list_problems(problems), problems
        )


def _read_catalog(files: Files) -> Catalog:
    weight_map, aliases = _weight_map(files)
    refuse_pointers(
        files, [INDEX_FILE, *set(weight_map.values())] if weight_map is not None else [SINGLE_FILE]
    )
    tensors: dict[str, TensorEntry] = {}
    problems: list[str] = []
    listed: dict[str, set[str]] = {} if weight_map is not None else {SINGLE_FILE: set()}
    for key, name in (weight_map or {}).items():
        listed.setdefault(name, set()).add(key)
    for name in sorted(listed):
        try:
            found, notes = _read_header(files, name)
        except CorruptCheckpointError as error:
            problems.append(str(error))
            continue
        for key in found:
            if weight_map is not None and weight_map.get(key) != name:
                said = f"places in {weight_map[key]}" if key in weight_map else "does not name"
                problems.append(f"{name} holds {key}, which the index {said}")
        tensors.update(found)
        aliases |= notes
        missing = listed[name] - found.keys()
        problems += [f"{name} lacks {key}, which the index places there" for key in sorted(missing)]
    _refuse_damaged(files, problems)
    # `save_model` stores a tensor under one of its names and lists the others.
    for name, stored in aliases.items():
        if stored in tensors and name not in tensors:
            tensors[name] = replace(tensors[stored], key=name)
    return Catalog(files.location, tensors, {})


def _weight_map(files: Files) -> tuple[dict[str, str] | None, dict[str, str]]:
    """The index's tensor -> file map with every file proven to exist, or None for a single file; and its texts.

    Files that the index does not name are not read: releases hold the same weights once more in another layout.
    """
    root = files.location
    names = files.list()
    present = [name for name in names if name.endswith(".safetensors")]
    if INDEX_FILE not in names:
        if SINGLE_FILE in present:
            return None, {}
        raise UnsupportedCheckpointError(
            f"{root} has neither {SINGLE_FILE} nor {INDEX_FILE}{_instead(names)}"
        )
    if SINGLE_FILE in present:
        raise UnsupportedCheckpointError(
            f"{root} has both {SINGLE_FILE} and {INDEX_FILE}; transformers would load the single file only. "
            "Remove the stale one"
        )
    refuse_pointers(files, [INDEX_FILE])
    weight_map, texts = _read_index(files)
    shards = set(weight_map.values())
    problems = [f"{name!r} is not a file name" for name in shards if name in ("", ".", "..") or "/" in name]
    problems += [f"shard {name} is missing" for name in sorted(shards - set(present))]
    if problems:
        raise CorruptCheckpointError(
            f"{path_in(files.location, INDEX_FILE)}:\n" + list_problems(problems), problems
        )
    return weight_map, texts


def unread_files(files: Files) -> tuple[str, ...]:
    """The weight files that are not those of the model, by its index or by their names."""
    names = files.list()
    named = set(_read_index(files)[0].values()) if INDEX_FILE in names else {SINGLE_FILE}
    if not named & set(names):
        named = set(parts_of_ranks(names))
    return tuple(name for name in names if name.endswith(".safetensors") and name not in named)


def _instead(names: list[str]) -> str:
    """What a folder without weights that can be read holds in their place, and the way out."""
    others = [name for name in names if name.endswith(OTHER_WEIGHTS)]
    present = [name for name in names if name.endswith(".safetensors")]
    if ADAPTER in names:
        return (
            f", but {ADAPTER}: an adapter (LoRA) without its model. `import-hf HF OUT --adapter PEFT` merges it "
            "into HF, the model it was trained on"
        )
    if present:
        return f", only {', '.join(present[:4])}: the index is missing"
    if others:
        return f", but {', '.join(others[:4])}: pickled or other weights are not read. {AS_SAFETENSORS}"
    return ""


def refuse_pointers(files: Files, names: Iterable[str]) -> None:
    """Raise UnsupportedCheckpointError if a file is a Git LFS pointer."""
    pointers = []
    for name in sorted(names):
        size = files.size(name) if files.exists(name) else 0
        if 0 < size <= _LONGEST_POINTER and files.read(name, 0, size).startswith(_POINTER):
            pointers.append(name)
    if pointers:
        raise UnsupportedCheckpointError(
            f"{files.location}: these are Git LFS pointers, the files themselves were not fetched. Run `git lfs "
            f"pull` there, or download the model again:\n{list_problems(pointers)}",
            pointers,
        )


def _read_index(files: Files) -> tuple[dict[str, str], dict[str, str]]:
    path = path_in(files.location, INDEX_FILE)
    raw = read_whole(files, INDEX_FILE, MAX_INDEX_BYTES)
    try:
        index = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: not a safetensors index: {error}") from error
    if not isinstance(index, dict) or "weight_map" not in index:
        raise CorruptCheckpointError(f"{path}: not a safetensors index: it has no weight_map")
    weight_map = index["weight_map"]
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CorruptCheckpointError(f"{path}: weight_map is not a map of tensor names to file names")
    return weight_map, _texts(index.get("metadata"))


def read_safetensors_header(files: Files, name: str) -> dict[str, TensorEntry]:
    """The tensors of one file, in data order."""
    return _read_header(files, name)[0]


def _read_header(files: Files, name: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of one file, and the texts of its `__metadata__`."""
    path = path_in(files.location, name)
    size = files.size(name)
    length = int.from_bytes(files.read(name, 0, min(size, 8)), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise CorruptCheckpointError(
            f"{path}: header of {length:,} bytes in a file of {size:,} bytes (at most {MAX_HEADER_BYTES:,})"
        )
    header = _parse_header(files.read(name, 8, length), path)
    problems: list[str] = []
    stated = header.pop("__metadata__", None)
    notes = _texts(stated)
    is_right = stated is None or (isinstance(stated, dict) and len(notes) == len(stated))
    if not is_right or not all(map(_is_text, notes.values())):
        problems.append("__metadata__ is not an object of texts")
    entries = [
        entry for key, info in header.items() if (entry := _entry(name, 8 + length, key, info, problems))
    ]
    entries.sort(key=lambda entry: (entry.chunks[0].item.offset, entry.nbytes))
    problems += _gaps(entries, 8 + length, size)
    if problems:
        raise CorruptCheckpointError(
            f"{path}: the header does not describe the file:\n" + list_problems(problems), problems
        )
    return {entry.key: entry for entry in entries}, notes


def _texts(stated: object) -> dict[str, str]:
    """The `__metadata__` texts, among them aliases of tensors."""
    return {k: v for k, v in stated.items() if isinstance(v, str)} if isinstance(stated, dict) else {}


def _parse_header(raw: bytes, path: str) -> dict[str, object]:
    try:
        header = json.loads(
            raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_parse_int
        )
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict) or not raw.startswith(b"{"):
        raise CorruptCheckpointError(f"{path}: the header is not a JSON object")
    return header


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _parse_int(digits: str) -> int | float:
    """A number; that -0 does not count as a whole one is the library's opinion."""
    return int(digits) if digits != "-0" else -0.0


def _is_text(value: str) -> bool:
    """Whether it is Unicode text: JSON's escapes can spell half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _entry(file: str, data_start: int, key: str, info: object, problems: list[str]) -> TensorEntry | None:
    """One tensor of a header; what is wrong with it goes to `problems`."""
    match info:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [start, stop], **others} if (
            not others
        ):
            wrong = _wrong_with(code, shape, start, stop)
        case _:
            wrong = "expected dtype, shape and data_offsets"
    if wrong:
        problems.append(f"{key}: {wrong}")
        return None
    needed = stop - start
    item = Item(file, data_start + start, needed, bare=True)
    dims = tuple(shape)
    return TensorEntry(key, DTYPES[code], dims, (Chunk(full_box(dims), item),))


def _wrong_with(code: str, shape: list[Any], start: Any, stop: Any) -> str:
    """Why a header's words on one tensor cannot be true; empty when they can."""
    if code not in DTYPES:
        return f"unknown element type {code!r}"
    numbers = [*shape[: MAX_DIMENSIONS + 1], start, stop]
    if len(numbers) > MAX_DIMENSIONS + 2 or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        return "such a shape or data_offsets cannot be"
    if start > stop:
        return f"its bytes [{start}, {stop}) end before they begin"
    if any(n >= 1 << 60 for n in accumulate(shape, mul)):  # in elements of 16 bytes, also before a 0 comes
        return f"the size of {shape} does not fit in 64 bits"
    needed = prod(shape) * itemsize(DTYPES[code])
    if needed != stop - start:
        return f"{code} {shape} needs {needed:,} bytes, data_offsets give {stop - start:,}"
    return ""


def _gaps(entries: list[TensorEntry], start: int, stop: int) -> Iterator[str]:
    """One line wherever tensors in data order do not follow one another from `start` to the file's end."""
    at = start
    for entry in entries:
        item = entry.chunks[0].item
        if item.offset != at:
            kind = "overlaps the tensor before it" if item.offset < at else "leaves a gap"
            yield f"{entry.key}: begins at byte {item.offset:,}, expected {at:,}: {kind}"
        at = item.offset + item.length
    if at != stop:
        what = "truncated" if at > stop else "trailing bytes"
        yield f"the tensors end at byte {at:,}, the file at {stop:,}: {what}"


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object as a dict; a name that occurs twice is an error."""
    found = dict(pairs)
    if not all(map(_is_text, found)):
        raise ValueError("a name is not Unicode text")
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"duplicate name {counts.most_common(1)[0][0]!r}")
    return found


def safetensors_header(tensors: Mapping[str, TensorInfo]) -> bytes:
    """Length and JSON header of a file that stores the tensors in this order, without gaps.

    Older readers fail without the `format` entry (huggingface/safetensors issue 549).
    """
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, (dtype, shape) in tensors.items():
        if dtype not in _CODES:
            raise MappingError(f"{key}: safetensors has no element type {dtype}")
        end = at + prod(shape) * itemsize(dtype)
        fields[key] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
