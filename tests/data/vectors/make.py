"""Draws the subset beside this file from the full vectors: `python -m tests.data.vectors.make FOLDER`.

A seeded order per family; records are taken until the family's share of the space is used up, at most one in four
of its size each, so that a subset is of many cases and not of one big one.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

SHARE = {  # bytes of gzip
    "v1_index": 22_000,
    "v1_grouped": 30_000,
    "v1_memory": 8_000,
    "v2_layout": 20_000,
    "e2e": 30_000,
    "mcore": 30_000,
}


def records(vectors: Path, family: str) -> list[Any]:
    """All records of one family, in a fixed order."""
    if family == "e2e":
        return list(json.loads((vectors / "e2e" / "whole_models.json").read_bytes())["records"])
    return [json.loads(path.read_bytes()) for path in sorted((vectors / family).glob("*.json"))]


def packed(records: list[Any]) -> bytes:
    text = json.dumps(records, separators=(",", ":")).encode()
    return gzip.compress(text, 9, mtime=0)


def main() -> None:
    vectors, out = Path(sys.argv[1]), Path(__file__).parent
    for family, share in SHARE.items():
        found = records(vectors, family)
        random.Random(7).shuffle(found)
        taken: list[Any] = []
        for record in found:
            if len(packed([record])) <= share // 4 and len(packed([*taken, record])) <= share:
                taken.append(record)
        (out / f"{family}.json.gz").write_bytes(packed(taken))
        print(f"{family}: {len(taken)} of {len(found)} records, {len(packed(taken))} bytes")


if __name__ == "__main__":
    main()
