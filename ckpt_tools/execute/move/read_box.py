"""Any box of a target tensor as a numpy array, read through its views: checks, comparisons and printing use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ckpt_tools.execute.move.source_reader import Filled, Filler, Payload, SourceReader, chunk_of, spans
from ckpt_tools.execute.processes.ranks import Ranks
from ckpt_tools.execute.proof.payload_sums import SourceProof
from ckpt_tools.execute.proof.prove_source import prove_rest
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.prefetch import Range
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.kernels.casts import Array, numpy_dtype, raw_dtype
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.transfers import Computation, Transfer
from ckpt_tools.plan.byte_runs import is_dense
from ckpt_tools.plan.overlap import ChunkFinder, TargetReader, transfers_into

_SCRATCH_BYTES = 4 << 20
_FEW = 32  # transfers, and places that one of them is read from
_ALIGNMENT = 64  # bytes: what a processor reads fastest


class Run(NamedTuple):
    """A part of a box that is contiguous in a payload, in row-major order."""

    box: Box  # relative to that box
    payload: Payload
    offset: int  # of the first element, in bytes of the payload

    def read(self, first: int, out: Array) -> None:
        """Fill 1-d `out`, of raw bits, with the elements from number `first` of the run on."""
        self.payload.read_into(self.offset + first * out.itemsize, out.view(np.uint8).data)


class Region(NamedTuple):
    """A part of a box, relative to it, and its elements as raw bits, at any strides."""

    box: Box
    elements: Array


class _Place(NamedTuple):
    """Where a region lies: in so many bytes of a payload, at strides of so many bytes."""

    box: Box
    payload: Payload
    offset: int
    nbytes: int
    strides: tuple[int, ...]

    def read(self, buffer: Array, start: int, dtype: np.dtype[Any]) -> Region:
        """The region, read into a byte array from byte `start` on."""
        self.payload.read_into(self.offset, buffer[start : start + self.nbytes].data)
        return Region(self.box, np.ndarray(self.box.size, dtype, buffer.data, start, self.strides))


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

    def regions(self, target: TargetTensor, whole: Box) -> Callable[[Box], list[Region]]:
        """The regions that make up boxes inside of `whole`, valid until those of the next box.

        What makes up all of `whole` is looked up once. Elements are put in order only where that takes computing, or
        where they lie in many places.

        Raises (both): as `read`.
        """
        transfers = transfers_into(TargetReader(self._finder, target), whole)
        dtype, buffer = raw_dtype(target.dtype), np.empty(0, np.uint8)
        few = len(transfers) <= _FEW  # all of them are gone through for every box
        read = self.tensor(target)
        stored = [one for one in transfers if isinstance(one, Transfer) and one.dtype == target.dtype]
        covered = few and sum(one.box.volume for one in stored) == whole.volume

        def gathered(box: Box) -> list[Region]:
            elements = self._read(target, box, transfers, whole) if few else read(box)
            return [Region(full_box(box.size), elements.view(dtype))]

        def in_place(box: Box) -> list[Region]:
            nonlocal buffer
            places = [place for one in stored for place in self._places(one, box.relative_to(whole), dtype)]
            if len(places) > _FEW:
                return gathered(box)
            ends = list(accumulate(-(-place.nbytes // _ALIGNMENT) * _ALIGNMENT for place in places))
            if ends[-1] > len(buffer):
                buffer = np.empty(ends[-1], np.uint8)
            return [
                place.read(buffer, start, dtype) for place, start in zip(places, (0, *ends), strict=False)
            ]

        return in_place if covered else gathered

    def _places(self, one: Transfer, box: Box, dtype: np.dtype[Any]) -> Iterator[_Place]:
        """Where the elements lie that a transfer gives of `box`."""
        piece = one.piece.crop(box)
        if piece is None:
            return
        payload = self._source.payload(chunk_of(one))
        strides = tuple([step * dtype.itemsize for step in piece.strides])
        for block, first, nbytes in spans(piece, piece.box.size, dtype.itemsize, _SCRATCH_BYTES):
            shown = block.shift(piece.box.relative_to(box).start)
            yield _Place(shown, payload, first, nbytes, strides)

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
        runs = []
        for one in transfers_into(TargetReader(self._finder, target), box):
            if isinstance(one, Computation) or one.dtype != target.dtype:
                return []
            if not is_dense(one.box.size, one.piece.strides):
                return []
            payload = self._source.payload(chunk_of(one))
            runs.append(Run(one.box, payload, one.piece.offset * itemsize(one.dtype)))
        return runs if sum(run.box.volume for run in runs) == box.volume else []

    def read(self, target: TargetTensor, box: Box) -> Array:
        """The elements of `box` (global coordinates of `target`), of the type `casts.numpy_dtype(target.dtype)`.

        Elements that no source of a `zero_filled` target shows are zeros.
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
        self._source.close()


def read_proven(files: Files, catalog: Catalog, target: TargetTensor) -> Array:
    """All of a target tensor, as `BoxReader.read`, from payloads that have the checksums their writer stored."""
    proof = SourceProof()
    reader = BoxReader(files, catalog, proof)
    try:
        values = reader.read(target, full_box(target.shape))
        prove_rest(proof, files, lambda _: target.key, Ranks(), 1)
    finally:
        reader.close()
    return values


def read_box(files: Files, catalog: Catalog, target: TargetTensor, box: Box) -> Array:
    reader = BoxReader(files, catalog)
    try:
        return reader.read(target, box)
    finally:
        reader.close()
