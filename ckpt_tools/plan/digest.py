"""The digest of a plan: SHA-256 over a canonical JSON of it, spelled in pieces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import orjson

from ckpt_tools.model.transfers import OutputBlob, OutputItem, TensorInfo

_BATCH = 1000  # entries of a table that are spelled at once: all names of a large plan are 140 MiB


def plan_digest(
    items: Sequence[OutputItem],
    blobs: Sequence[OutputBlob],
    sizes: Mapping[str, int],
    tensors: Mapping[str, TensorInfo],
    paths: Mapping[str, tuple[str | int, ...]],
    original_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """SHA-256 over a canonical rendering of the plan."""
    state = hashlib.sha256()
    data_digest = cache(lambda data: hashlib.sha256(data).hexdigest())
    for item in items:
        state.update(_canonical(list(item)))
    for blob in blobs:
        box = None if blob.box is None else list(blob.box)
        row = [blob.key, box, blob.file, blob.offset, data_digest(blob.data)]
        state.update(_canonical(row))
    shapes = [] if original_shapes is None else [original_shapes]
    tables: list[Mapping[str, Any]] = [sizes, tensors, paths, *shapes, {}]
    before = state.copy()
    try:
        for piece in _pieces(tables):
            state.update(piece)
    except orjson.JSONEncodeError:  # all tables are one value, spelled one way
        state = before
        state.update(json.dumps([dict(table) for table in tables]).encode())
    return state.hexdigest()


def _pieces(tables: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """The JSON of a list of dicts."""
    for number, table in enumerate(tables):
        yield b",{" if number else b"[{"
        rows, begun = iter(table.items()), False
        while part := dict(islice(rows, _BATCH)):
            yield b"," if begun else b""
            yield orjson.dumps(part, default=list)[1:-1]  # a named tuple is a list, as for `json`
            begun = True
        yield b"}"
    yield b"]"


def _canonical(value: object) -> bytes:
    """`value` as JSON; the slow way for what UTF-8 cannot spell, such as file names that are not text."""
    try:
        return orjson.dumps(value, default=_spelled)
    except orjson.JSONEncodeError:
        return json.dumps(value, default=repr).encode()


def _spelled(value: object) -> object:
    """Items are nested named tuples; steps of views differ by their name alone. Kernels say what they are."""
    return [type(value).__name__, *value] if isinstance(value, tuple) else repr(value)
