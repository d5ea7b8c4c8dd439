"""Safetensors files that were written, opened as everybody will open them: with the safetensors library."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ckpt_tools.errors import VerificationError
from ckpt_tools.execute.output.fileio import storage_errors
from ckpt_tools.formats.storage.files import Files, path_in
from ckpt_tools.model.transfers import Plan

_SUFFIX = ".safetensors"


def prove_shards(plan: Plan, folder: Path) -> None:
    """Check that safetensors opens every file in `folder` and finds the tensors of the plan. No tensor is loaded."""
    for name, expected in _expected(plan).items():
        _prove(folder / name, str(folder / name), expected)


def prove_uploaded(plan: Plan, files: Files) -> None:
    """The same for files in a store: their headers are fetched, and stand before holes as long as the tensors."""
    shards = _expected(plan)
    if not shards:
        return
    heads = dict(plan.file_bytes)
    for item in plan.items:
        heads[item.file] = min(heads[item.file], item.offset)
    with storage_errors(tempfile.gettempdir()), tempfile.TemporaryDirectory(prefix="ckpt-shard-") as folder:
        for name, expected in shards.items():
            path = Path(folder, "shard")
            path.write_bytes(files.read(name, 0, heads[name]))
            os.truncate(path, files.size(name))
            _prove(path, path_in(files.location, name), expected)


def _expected(plan: Plan) -> dict[str, set[str]]:
    """The tensors of every safetensors file."""
    found: dict[str, set[str]] = {name: set() for name in plan.file_bytes if name.endswith(_SUFFIX)}
    for item in plan.items:
        if item.file in found:
            found[item.file].add(item.key)
    return found


def _prove(path: Path, shown: str, expected: set[str]) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            found = set(opened.keys())
    except (SafetensorError, OSError) as error:
        raise VerificationError(
            f"{shown}: the safetensors library does not open what was written ({error}). Nothing was published; "
            "please report this."
        ) from error
    if not expected <= found:
        lost = sorted(expected - found)
        raise VerificationError(
            f"{shown}: the safetensors library does not find {', '.join(lost[:3])}, which was written. Nothing was "
            "published; please report this."
        )
