"""Any box of a target tensor as a numpy array, read through its views: checks, comparisons and printing use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from ckpt_tools.box import Box, full_box
from ckpt_tools.catalog.files import Files
from ckpt_tools.catalog.model import Catalog
from ckpt_tools.execute.casts import Array, cast_checked, numpy_dtype, raw_dtype
from ckpt_tools.execute.proof import SourceProof
from ckpt_tools.execute.prove import prove_rest
from ckpt_tools.execute.ranks import Ranks
from ckpt_tools.execute.source import ChunkRef, SourceReader, index_of, read_region
from ckpt_tools.megatron.target import TargetTensor
from ckpt_tools.plan.overlap import ChunkFinder, SourcePiece, TargetReader

_SCRATCH_BYTES = 4 << 20


class BoxReader:
    """Reads boxes of target tensors from one checkpoint, in any thread; close it when done."""

    def __init__(self, files: Files, catalog: Catalog, proof: SourceProof | None = None) -> None:
        self.catalog = catalog
        self._source = SourceReader(files, proof=proof)
        self._finder = ChunkFinder(catalog)
        self._of_thread = threading.local()

    def tensor(self, target: TargetTensor) -> Callable[[Box], Array]:
        """What `read` does for this target, its sources looked up once for many boxes."""
        pieces = TargetReader(self._finder, target).pieces
        return lambda box: self._read(target, box, pieces(box))

    def pieces(self, target: TargetTensor) -> Callable[[Box], list[SourcePiece]]:
        """What makes up boxes of this target, in coordinates of the box."""
        return TargetReader(self._finder, target).pieces

    def read(self, target: TargetTensor, box: Box) -> Array:
        """The elements of `box` (global coordinates of `target`), of the type `casts.numpy_dtype(target.dtype)`.

        Elements that no source of a `zero_filled` target shows are zeros.

        Raises:
            MappingError, CorruptCheckpointError: as `TargetReader.pieces`.
            VerificationError: a cast makes an infinity of a number.
        """
        return self.tensor(target)(box)

    def _read(self, target: TargetTensor, box: Box, pieces: Sequence[SourcePiece]) -> Array:
        scratch, dtype = self._scratch(), target.dtype
        covered = sum(piece.box.volume for _, _, piece in pieces) == box.volume
        raw = (np.empty if covered else np.zeros)(box.size, raw_dtype(dtype))
        for entry, chunk, piece in pieces:
            payload = self._source.payload(ChunkRef(entry.key, chunk.item, entry.dtype, chunk.box.size))
            region = raw[index_of(piece.box)]
            if entry.dtype == dtype:
                read_region(payload, piece, region, scratch)
                continue
            values = np.empty(piece.box.size, raw_dtype(entry.dtype))
            read_region(payload, piece, values, scratch)
            start = tuple(a + b for a, b in zip(box.start, piece.box.start, strict=True))
            region[...], _ = cast_checked(values, entry.dtype, dtype, target.key, start)
        return raw.view(numpy_dtype(dtype))

    def _scratch(self) -> Array:
        if not hasattr(self._of_thread, "scratch"):
            self._of_thread.scratch = np.empty(_SCRATCH_BYTES, np.uint8)
        scratch: Array = self._of_thread.scratch
        return scratch

    def close(self) -> None:
        """Remove temporary files."""
        self._source.close()


def read_proven(files: Files, catalog: Catalog, target: TargetTensor) -> Array:
    """All of a target tensor, as `BoxReader.read`, from payloads that have the checksums their writer stored.

    Raises:
        CorruptCheckpointError: one of them has another.
    """
    proof = SourceProof()
    reader = BoxReader(files, catalog, proof)
    try:
        values = reader.read(target, full_box(target.shape))
        prove_rest(proof, files, lambda _: target.key, Ranks(), 1)
    finally:
        reader.close()
    return values


def read_box(files: Files, catalog: Catalog, target: TargetTensor, box: Box) -> Array:
    """One box of one target tensor; see `BoxReader.read`."""
    reader = BoxReader(files, catalog)
    try:
        return reader.read(target, box)
    finally:
        reader.close()
