"""Any box of a target tensor as a numpy array, read through its views: checks, comparisons and printing use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ckpt_tools.execute.fill import Filled, Filler
from ckpt_tools.execute.proof import SourceProof
from ckpt_tools.execute.prove import prove_rest
from ckpt_tools.execute.ranks import Ranks
from ckpt_tools.execute.source_reader import Payload, SourceReader, chunk_of
from ckpt_tools.formats.files import Files
from ckpt_tools.formats.read_ahead import Range
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.casts import Array, numpy_dtype, raw_dtype
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.transfers import Computation, Transfer
from ckpt_tools.plan.byte_runs import is_dense
from ckpt_tools.plan.overlap import ChunkFinder, TargetReader
from ckpt_tools.plan.strategy import transfers_into

_SCRATCH_BYTES = 4 << 20
_FEW = 32  # transfers


class Run(NamedTuple):
    """A part of a box whose elements lie one behind the other in a payload, in row-major order."""

    box: Box  # relative to that box
    payload: Payload
    offset: int  # of the first element, in bytes of the payload's file

    def read(self, first: int, out: Array) -> None:
        """Fill 1-d `out`, of raw bits, with the elements from number `first` of the run on."""
        at, data = self.offset + first * out.itemsize, out.view(np.uint8).data
        self.payload.files.read_into(self.payload.name, at, data)
        if self.payload.proof is not None:
            self.payload.proof.add(at, data)


class BoxReader:
    """Reads boxes of target tensors from one checkpoint, in any thread; close it when done."""

    def __init__(self, files: Files, catalog: Catalog, proof: SourceProof | None = None) -> None:
        self.catalog = catalog
        self._source = SourceReader(files, proof=proof)
        self._finder = ChunkFinder(catalog)
        self._of_thread = threading.local()
        self.is_remote = self._source.is_remote

    def tensor(self, target: TargetTensor) -> Callable[[Box], Array]:
        """What `read` does for this target, its sources looked up once for many boxes."""
        reader = TargetReader(self._finder, target)
        return lambda box: self._read(target, box, transfers_into(reader, box), box)

    def inside(self, target: TargetTensor, whole: Box) -> Callable[[Box], Array]:
        """What `tensor` does, for boxes inside of `whole` only: what makes up all of it is looked up once.

        Raises as `read`.
        """
        transfers = transfers_into(TargetReader(self._finder, target), whole)
        if len(transfers) > _FEW:  # all of them are gone through for every box
            return self.tensor(target)
        return lambda box: self._read(target, box, transfers, whole)

    def reads(self, target: TargetTensor) -> Callable[[Box], Iterable[Range]]:
        """What reading boxes of this target asks of stores."""
        if not self.is_remote:
            return lambda _: ()
        reader = TargetReader(self._finder, target)

        def of_box(box: Box) -> Iterator[Range]:
            filler = Filler(self._source, self._scratch(), Filled())
            return filler.reads(full_box(box.size), transfers_into(reader, box), box.start)

        return of_box

    def transfers(self, target: TargetTensor) -> Callable[[Box], list[Transfer | Computation]]:
        """What makes up boxes of this target, in coordinates of the box."""
        reader = TargetReader(self._finder, target)
        return lambda box: transfers_into(reader, box)

    def runs(self, target: TargetTensor, box: Box) -> list[Run]:
        """The runs that make up `box` of this target, by where they begin; none where something else does, too.

        Raises as `read`.
        """
        found = transfers_into(TargetReader(self._finder, target), box)
        runs = []
        for one in found:
            if isinstance(one, Computation) or one.dtype != target.dtype:
                return []
            if not is_dense(one.box.size, one.piece.strides):
                return []
            payload = self._source.payload(chunk_of(one))
            runs.append(Run(one.box, payload, payload.offset + one.piece.offset * itemsize(one.dtype)))
        return runs if sum(run.box.volume for run in runs) == box.volume else []

    def read(self, target: TargetTensor, box: Box) -> Array:
        """The elements of `box` (global coordinates of `target`), of the type `casts.numpy_dtype(target.dtype)`.

        Elements that no source of a `zero_filled` target shows are zeros.

        Raises:
            MappingError, CorruptCheckpointError: as `TargetReader.locate`.
            VerificationError: a cast makes an infinity of a number.
        """
        return self.tensor(target)(box)

    def _read(
        self, target: TargetTensor, box: Box, transfers: Sequence[Transfer | Computation], whole: Box
    ) -> Array:
        """The elements of `box`, from the transfers into `whole`, which contains it."""
        covered = sum(transfer.box.volume for transfer in transfers) == whole.volume
        raw = (np.empty if covered else np.zeros)(box.size, raw_dtype(target.dtype))
        filler = Filler(self._source, self._scratch(), Filled())
        filler.fill(raw, target.dtype, box.relative_to(whole), transfers, target.key, whole.start)
        return raw.view(numpy_dtype(target.dtype))

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
