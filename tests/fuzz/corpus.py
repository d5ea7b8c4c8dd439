"""Inputs that fuzzing found to reach different code, kept for CI and the next run.

`python -m tests.fuzz.corpus CORPUS` packs the small ones of a corpus that `tests.fuzz.run` left.
"""

import io
import sys
import tarfile
from pathlib import Path

from tests.conftest import DATA

KEPT = DATA / "fuzz_corpus.tar.xz"
MAX_BYTES = 5000


def kept(parser: str) -> list[bytes]:
    """The kept inputs of a parser."""
    with tarfile.open(KEPT) as archive:
        found = [archive.extractfile(one) for one in archive if one.name.startswith(f"{parser}/")]
        return [file.read() for file in found if file is not None]


def keep(corpus: Path) -> None:
    """Pack the corpora of all parsers; the same corpora give the same bytes."""
    with tarfile.open(KEPT, "w:xz", preset=9) as archive:
        for path in sorted(corpus.glob("*/*")):
            data = path.read_bytes()
            if (
                path.parent.name != "failures"
                and len(data) <= MAX_BYTES
                and not path.name.startswith("seed-")
            ):
                one = tarfile.TarInfo(f"{path.parent.name}/{path.name}")
                one.size = len(data)
                archive.addfile(one, io.BytesIO(data))


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
