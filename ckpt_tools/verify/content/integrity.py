"""`integrity.json`: the SHA-256 of every file, as Megatron writes it with `--verify-integrity`.

{"algorithm": "sha256", "files": {"__0_0.distcp": "<hex>", ".metadata": "<hex>"}}
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.untrusted_documents import parse_json
from ckpt_tools.verify.checkpoint.structure import DATA_SUFFIXES
from ckpt_tools.verify.content.manifest import SMALL_FILES, file_row
from ckpt_tools.verify.report import Check, Findings

INTEGRITY = "integrity.json"
_MOST_BYTES = 64 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_integrity(files: Files, content: bool, tick: Callable[[int], None] = lambda _: None) -> Check:
    """Whether the files are those that `integrity.json` lists and, with `content`, have the sums it gives."""
    found = Findings("integrity", "files")
    try:
        sums = _read(files)
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


def _read(files: Files) -> dict[str, str]:
    size = files.size(INTEGRITY)
    if size > _MOST_BYTES:
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
