"""A manifest of a checkpoint: SHA-256 of its files and, independent of how they are stored, of its tensors.

A tensor's digest is that of its row-major little-endian bytes, so it outlives resharding and rewriting::

    {"schema_version": 1,
     "files": {"__0_0.distcp": {"bytes": 1024, "sha256": "..."}},
     "tensors": {"model.w": {"dtype": "float32", "shape": [8, 4], "sha256": "..."}}}

And `integrity.json`, the SHA-256 of every file, as Megatron writes it with `--verify-integrity`::

    {"algorithm": "sha256", "files": {"__0_0.distcp": "<hex>", ".metadata": "<hex>"}}
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ckpt_tools.errors import CkptError, StorageError, UsageError
from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.processes.team import Tick, results_of, start_jobs
from ckpt_tools.formats.dcp.metadata_read import METADATA
from ckpt_tools.formats.locate.detect import COMPANIONS
from ckpt_tools.formats.storage.files import Files, readable_size
from ckpt_tools.formats.untrusted_documents import DocumentError, parse_json, read_named_file
from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Catalog, TensorEntry
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Source
from ckpt_tools.plan.byte_runs import row_major_tiles
from ckpt_tools.verify.checkpoint.structure import DATA_SUFFIXES, all_items
from ckpt_tools.verify.report import Check, Findings

SCHEMA = 1
INTEGRITY = "integrity.json"
_MAX_INTEGRITY_BYTES = 64 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_MANIFEST_BYTES = 256 << 20  # a million tensors
_TILE_BYTES = 4 << 20
SMALL_FILES = (METADATA, *COMPANIONS)


def read_manifest(path: Path) -> object:
    """What a manifest's file says, not yet looked at."""
    try:
        return parse_json(read_named_file(path, MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        raise UsageError(f"there is no manifest {path}; --write-manifest {path} makes one") from None
    except DocumentError as error:
        raise UsageError(f"{path} is not a manifest ({error})") from None
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


def make_manifest(
    files: Files, catalog: Catalog, threads: int = 2, workers: int | None = None, tick: Tick = lambda _: None
) -> dict[str, Any]:
    """The manifest of a checkpoint as plain data."""
    names = {item.file for _, item in all_items(catalog)} | {n for n in SMALL_FILES if files.exists(n)}
    names |= {n for n in files.list() if PurePosixPath(n).suffix in DATA_SUFFIXES}  # of other saves too
    ordered, entries = sorted(names), list(catalog.tensors.values())

    def rows(
        row: Callable[[Any, Tick], dict[str, Any]], things: list[Any], sizes: list[int]
    ) -> list[dict[str, Any]]:
        return results_of(start_jobs(row, things, sizes=sizes, threads=threads, workers=workers, tick=tick))

    sizes = [readable_size(files, name) for name in ordered]
    digests = rows(lambda name, count: file_row(files, name, count), ordered, sizes)
    sizes = [entry.nbytes for entry in entries]
    tensors = rows(lambda entry, count: _tensor_row(files, catalog, entry, count), entries, sizes)
    return {
        "schema_version": SCHEMA,
        "files": dict(zip(ordered, digests, strict=True)),
        "tensors": {entry.key: row for entry, row in zip(entries, tensors, strict=True)},
    }


def check_manifest(stored: object, found: Mapping[str, Any]) -> Check:
    """What a manifest `stored` earlier says otherwise than the one `found` now."""
    if not _is_manifest(stored):
        raise UsageError(f"the manifest is not one of schema {SCHEMA}, as verify --write-manifest writes it")
    assert isinstance(stored, dict)
    findings = Findings("manifest", "digests")
    for part in ("files", "tensors"):
        before, now = stored[part], found[part]
        findings.looked_at += len(before)
        for name, row in before.items():
            if name not in now:
                findings.error(name, f"the manifest lists it under {part}, but it is not there")
            elif row != now[name]:
                changed = [
                    f"{k} {row.get(k)} is now {now[name][k]}" for k in now[name] if row.get(k) != now[name][k]
                ]
                findings.error(name, "; ".join(changed))
        for name in now.keys() - before.keys():
            findings.error(name, f"it is new: the manifest does not list it under {part}")
    return findings.done()


def _is_manifest(stored: object) -> bool:
    if not isinstance(stored, dict) or stored.get("schema_version") != SCHEMA:
        return False
    parts = [stored.get("files"), stored.get("tensors")]
    return all(
        isinstance(part, dict) and all(isinstance(row, dict) for row in part.values()) for part in parts
    )


def _tensor_row(files: Files, catalog: Catalog, entry: TensorEntry, tick: Tick) -> dict[str, Any]:
    """A tensor's row of a manifest; one that cannot be read has no digest but why."""
    digest, reader = hashlib.sha256(), BoxReader(files, catalog)
    try:
        read = reader.tensor(TargetTensor(entry.key, entry.dtype, entry.shape, (Source(entry.key),)))
        for tile in row_major_tiles(full_box(entry.shape), max(1, _TILE_BYTES // itemsize(entry.dtype))):
            if not tile.is_empty:
                array = read(tile)
                digest.update(array.reshape(-1).view("u1").data)
                tick(array.nbytes)
        sha256 = digest.hexdigest()
    except CkptError as error:
        sha256 = f"unreadable: {error}"
    finally:
        reader.close()
    return {"dtype": entry.dtype, "shape": list(entry.shape), "sha256": sha256}


def file_row(files: Files, name: str, tick: Tick = lambda _: None) -> dict[str, Any]:
    """A file's row of a manifest; a file that cannot be read has no digest but why."""
    digest = hashlib.sha256()
    try:
        size = files.size(name)
        for start in range(0, size, _TILE_BYTES):
            part = files.read(name, start, min(_TILE_BYTES, size - start))
            digest.update(part)
            tick(len(part))
    except CkptError as error:
        return {"bytes": 0, "sha256": f"unreadable: {error}"}
    return {"bytes": size, "sha256": digest.hexdigest()}


def check_integrity(files: Files, content: bool, tick: Callable[[int], None] = lambda _: None) -> Check:
    """Whether the files are those that `integrity.json` lists and, with `content`, have the sums it gives."""
    found = Findings("integrity", "files")
    try:
        sums = _read_integrity(files)
    except ValueError as error:
        found.error(INTEGRITY, f"it does not list SHA-256 sums ({error}); Megatron refuses to load with it")
        return found.done()
    for name, expected in sums.items():
        found.looked_at += 1
        if "/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name:
            found.error(INTEGRITY, f"it lists {name[:200]!r}, which is not the name of a file of this folder")
        elif not files.exists(name):
            found.error(name, f"{INTEGRITY} lists it, but it is not there")
        elif content:
            actual = file_row(files, name, tick)["sha256"]
            if actual != expected:
                found.error(name, f"its SHA-256 is {actual}, {INTEGRITY} says {expected}")
    for name in files.list():
        is_ours = name in SMALL_FILES or name.endswith(tuple(DATA_SUFFIXES))
        if is_ours and name not in sums:
            found.error(name, f"{INTEGRITY} does not list it: it came after the save, or was replaced")
    return found.done()


def _read_integrity(files: Files) -> dict[str, str]:
    size = files.size(INTEGRITY)
    if size > _MAX_INTEGRITY_BYTES:
        raise ValueError(f"{size} bytes")
    stored = parse_json(files.read(INTEGRITY, 0, size))
    algorithm = stored.get("algorithm", "sha256") if isinstance(stored, dict) else None
    if algorithm != "sha256":
        raise ValueError(f"algorithm {algorithm!r}" if isinstance(stored, dict) else "not an object")
    sums = stored.get("files")
    if not isinstance(sums, dict):
        raise ValueError("no files")
    wrong = [n for n, v in sums.items() if not isinstance(v, str) or not _DIGEST.fullmatch(v)]
    if wrong:
        raise ValueError(f"the sum of {wrong[0][:200]!r}")
    return sums
